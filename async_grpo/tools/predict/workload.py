"""What a run does, in plain numbers: its settings, and what was measured of its engines, learner
and answers.

Runs in: the driver, and the planner's command. Hides which number comes from the configuration and
which from a measurement:

    Config  --settings--+
                        +--> Workload --> rehearsal (what a run will be)
    Measured (a run) ---+

Invariants: a measurement knows nothing of bounds and limits, so that it holds for other settings of
the same model, task and machine; what depends on the size of a learner step is scaled by tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from async_grpo.config.schema import Config
from async_grpo.replay.rules import OnStale
from async_grpo.tools.predict.engine import Speed

CPU_CONTENTION = 1.16
"""How much longer a learner step takes on CPU while engines generate, with cores of their own:
memory is shared (docs/planning.md). On GPUs 1.
"""


@dataclass(frozen=True)
class Measured:
    """Hold what was measured of a run."""

    lengths: tuple[tuple[int, ...], ...]
    """Response tokens of groups that were trained lately."""
    curve: tuple[tuple[float, float], ...]
    """Of an engine: (responses that run, tokens per second of all of them)."""
    learner_s: float
    """Seconds of a learner step, without what engines beside it cost."""
    step_tokens: float
    """Response tokens of a learner step."""
    publish_s: float = 0.0
    """From the end of staging until all engines serve the weights."""
    exposed_s: float = 0.0
    """What the learner itself waits for a publication."""
    pause_s: float = 0.0
    """What an engine stands still for a publication."""
    again_s: float = 0.0
    """Of each token that running responses have at a publication: what the engine takes longer,
    since it computes them again.
    """
    verify_s: float = 0.0
    """Seconds of a verifier for a response."""
    delay_s: float = 0.0
    """What a group takes besides generation and verifiers: calls, environments, polling."""
    contention: float = 1.0
    """How much longer learner steps take while engines generate."""
    crowd: float = 1.0
    """Engines and learner ranks for each core that they share; 1 where each has its own."""

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Read what `text` wrote. Raises OSError, ValueError, KeyError, TypeError."""
        return cls.of(json.loads(path.read_text())["measured"])

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Measured:
        """Take plain JSON."""
        lengths = tuple(tuple(map(int, group)) for group in found["lengths"])
        curve = tuple((float(count), float(speed)) for count, speed in found["curve"])
        if not lengths or not curve:
            raise ValueError("no groups or no speeds were measured")
        rest = {name: float(found[name]) for name in _NUMBERS if name in found}
        return cls(lengths, curve, **rest)

    def plain(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)


_NUMBERS = (
    "learner_s",
    "step_tokens",
    "publish_s",
    "exposed_s",
    "pause_s",
    "again_s",
    "verify_s",
    "delay_s",
    "contention",
    "crowd",
)


@dataclass(frozen=True)
class Workload:
    """Settings and measurements of a run; seconds, tokens, groups."""

    batch: int
    """Groups of a learner step, R."""
    responses: int
    """Of a group, the baseline's too."""
    max_staleness: int
    every_steps: int
    outstanding: int | None
    """Groups that may hold a slot; None: set by the queue itself."""
    on_stale: OnStale
    actors: int
    places: int
    """Responses that an engine generates at the same time."""
    verifiers: int
    """Of each actor."""
    lengths: tuple[tuple[int, ...], ...]
    speed: Speed
    learner_s: float
    even: bool = False
    """Whether every learner step takes as long, instead of in proportion to its tokens."""
    contention: float = 1.0
    ranks: int = 1
    cores: int | None = None
    """That engines and learner ranks share; None where each has its own."""
    publish_s: float = 0.0
    exposed_s: float = 0.0
    pause_s: float = 0.0
    again_s: float = 0.0
    verify_s: float = 0.0
    delay_s: float = 0.0

    @classmethod
    def of(
        cls,
        config: Config,
        measured: Measured,
        *,
        max_num_seqs: int,
        actors: int | None = None,
        cores: int | None = None,
    ) -> Workload:
        """Join a configuration with a measurement of the same model and task. max_num_seqs: of an
        engine; actors: instead of the configured ones; cores: that engines and learner ranks share,
        None where models run on GPUs.
        """
        rollout, replay = config.rollout, config.replay
        responses = rollout.group_size + config.algorithm.has_baseline
        group = mean(sum(one) / len(one) for one in measured.lengths) * responses
        scale = rollout.rollout_batch_size * group / measured.step_tokens
        actors = actors or config.cluster.rollout_actors.max or config.cluster.rollout_actors.min
        return cls(
            batch=rollout.rollout_batch_size,
            responses=responses,
            max_staleness=replay.max_staleness,
            every_steps=config.weight_sync.every_steps,
            outstanding=None if replay.outstanding == "auto" else config.max_outstanding,
            on_stale=replay.on_stale,
            actors=actors,
            places=max_num_seqs,
            verifiers=config.task.verifier.workers,
            lengths=_of_size(measured.lengths, responses),
            speed=Speed(measured.curve).times(measured.crowd),
            learner_s=measured.learner_s * scale / measured.crowd,
            contention=measured.contention,
            ranks=config.learner.ranks,
            cores=cores,
            publish_s=measured.publish_s,
            exposed_s=measured.exposed_s,
            pause_s=measured.pause_s,
            again_s=measured.again_s,
            verify_s=measured.verify_s,
            delay_s=measured.delay_s,
        )

    def slow(self, engines: float, *, learning: bool) -> float:
        """Return how much longer everything takes while so many engines generate."""
        return crowding(engines, self.ranks if learning else 0, self.cores)

    @property
    def crowd(self) -> float:
        """How much longer everything takes while all engines and the learner work."""
        return self.slow(self.actors, learning=True)

    @property
    def capacity(self) -> int:
        """Groups that may ever be outstanding."""
        return (self.max_staleness + 1) * self.batch

    @property
    def group_tokens(self) -> float:
        """Mean tokens of a group."""
        return mean(map(sum, self.lengths))

    def with_settings(self, advice: Mapping[str, float]) -> Workload:
        """Return the same with these settings (dotted names); those it does not know change
        nothing.
        """
        names = {
            "replay.max_staleness": "max_staleness",
            "replay.outstanding": "outstanding",
            "weight_sync.every_steps": "every_steps",
            "cluster.rollout_actors.max": "actors",
            "task.verifier.workers": "verifiers",
            "cluster.engine.max_num_seqs": "places",
        }
        changed: dict[str, Any] = {
            names[name]: int(value) for name, value in advice.items() if name in names
        }
        ranks = advice.get("learner.ranks", 1.0)
        return replace(self, learner_s=self.learner_s / ranks, **changed)


def crowding(actors: float, ranks: int, cores: int | None) -> float:
    """Count the engines and learner ranks for each core that they share; at least 1."""
    return 1.0 if cores is None else max(1.0, (actors + ranks) / cores)


def mean(values: Any) -> float:
    """Average numbers."""
    found = list(values)
    return math.fsum(found) / len(found)


def _of_size(lengths: Sequence[tuple[int, ...]], size: int) -> tuple[tuple[int, ...], ...]:
    """Make groups of another size from measured ones: responses again and again, in their order."""
    return tuple(
        one if len(one) == size else tuple(one[index % len(one)] for index in range(size))
        for one in lengths
    )
