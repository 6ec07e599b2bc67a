"""A run inside of the placement group of its caller, such as a trial of Ray Tune.

Runs in: the driver; knows no Ray. The first bundle is the caller's own; behind it every learner
rank has one, and every engine, or both share one where they are colocated:

    [caller] [rank 0] ... [rank M-1] [engine 0] ... [engine N-1]

Invariant: a run with bundles of its own reserves nothing beside them and pins nobody to cores,
since others compute on the same machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from async_grpo.cluster.placement import Placement, PlacementError, Slot
from async_grpo.config.schema import Config


@dataclass(frozen=True, slots=True)
class Bundle:
    """One bundle of the caller's placement group: its node, and what it holds."""

    node_id: str
    cpus: float
    gpus: float

    def holds(self, asked: dict[str, float]) -> bool:
        """Whether a process that asks for this has room."""
        return self.cpus >= asked["CPU"] and self.gpus >= asked.get("GPU", 0.0)

    def __str__(self) -> str:
        return str(_asked(self.cpus, self.gpus))


def bundles(config: Config, *, gpus: float) -> list[dict[str, float]]:
    """Return what a run asks for as bundles: the caller's, the ranks', and those of
    `cluster.rollout_actors.max` (or else `min`) engines. gpus: of a rank, 1 or 0 on CPU.
    """
    actors = config.cluster.rollout_actors
    ranks = [_asked(1.0, gpus)] * config.learner.ranks
    size = gpus * config.cluster.engine.tensor_parallel_size
    engines = [_asked(1.0, size)] * (0 if _shares(config, gpus) else actors.max or actors.min)
    return [_asked(1.0, 0.0), *ranks, *engines]


def place_given(config: Config, given: Sequence[Bundle]) -> Placement:
    """Place ranks and engines on the bundles of the caller's group. Raises PlacementError where
    they are too few or too small.
    """
    device = "cuda" if any(bundle.gpus for bundle in given[1:]) else "cpu"
    gpus, size = float(device == "cuda"), config.cluster.engine.tensor_parallel_size
    ranks, actors = config.learner.ranks, config.cluster.rollout_actors
    shared = _shares(config, gpus)
    places = list(enumerate(given))[1:]
    learners, rest = places[:ranks], places[ranks:][: actors.max]
    engines = learners if shared else rest
    fits = (
        len(learners) == ranks
        and (shared or len(engines) >= actors.min)
        and config.cluster.device in ("auto", device)
        and all(bundle.holds(_asked(1.0, gpus)) for _, bundle in learners)
        and all(bundle.holds(_asked(1.0, gpus * size)) for _, bundle in engines)
    )
    if not fits:
        needed = ", ".join(map(str, bundles(config, gpus=gpus)))
        raise PlacementError(
            f"the run is started in a placement group of {', '.join(map(str, given))}; it needs "
            f"{needed}, the first for the one who starts it (as a trial of Ray Tune asks for them: "
            "docs/library.md)"
        )
    sharers = 2 if shared else 1

    def slot(index: int, bundle: Bundle, gpus: float) -> Slot:
        threads = max(1, int(bundle.cpus)) if device == "cuda" else 0
        cpus = bundle.cpus / sharers
        return Slot(bundle.node_id, cpus, gpus / sharers, threads=threads, bundle=index)

    return Placement(
        device,
        shared,
        tuple(slot(index, bundle, gpus) for index, bundle in learners),
        tuple(slot(index, bundle, gpus * size) for index, bundle in engines),
        tuple(1 + size * index for index in range(len(engines))),
    )


def _shares(config: Config, gpus: float) -> bool:
    """Whether rank i and engine i share a bundle, and its GPU."""
    return gpus > 0 and config.cluster.layout == "colocated"


def _asked(cpus: float, gpus: float) -> dict[str, float]:
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
