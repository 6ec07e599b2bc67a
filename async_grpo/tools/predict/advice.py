"""What a run will come to, and what to change: the smallest queue that loses nothing, and the
setting that brings the most.

Runs in: the process of `async-grpo predict`; starts nothing. Hides which changes are tried. What
costs nothing comes before what needs more hardware, and a setting is named only if it brings
`WORTH`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from async_grpo.config.schema import Config
from async_grpo.errors import SetupError
from async_grpo.observe.console.console import Console
from async_grpo.tools.predict.forecast import NAME, describe, measured_beside
from async_grpo.tools.predict.rehearsal import Prediction, predict
from async_grpo.tools.predict.workload import Measured, Workload

WORTH, LOSES = 0.05, 0.02
"""Gain of throughput that is worth a change; loss that is none."""
LESS_LAG = 0.5
"""Learner steps of lag that are worth a change if nothing is lost."""
SPLITS = 4
"""Splits of the GPUs that are simulated."""
LEAST_STEPS = 24
"""Learner steps after which a run writes its measurement."""


@dataclass(frozen=True)
class Advised:
    """A setting, its value, and what a run with it comes to. needs: hardware that it takes."""

    setting: str
    value: str
    prediction: Prediction
    needs: str = ""


def least_outstanding(work: Workload) -> int:
    """Find the fewest groups that may be outstanding without a loss of throughput: by halves, since
    more never hurts.
    """
    if work.max_staleness == 0:
        return work.capacity
    low = min(work.every_steps * work.batch + 1, work.capacity)
    high, unit = work.capacity, max(work.batch // 8, 1)
    enough = (1 - LOSES) * _fixed(work, high).groups_per_s
    while high - low > unit:
        middle = (low + high) // 2
        if _fixed(work, middle).groups_per_s >= enough:
            high = middle
        else:
            low = middle
    return high


def one_change(work: Workload, now: Prediction) -> Advised | None:
    """Return the change that brings the most throughput, or as much with less lag; None where no
    change is worth it.
    """
    least = (1 + WORTH) * now.groups_per_s
    for needs, tried in (("", _free(work)), ("more hardware", _hardware(work))):
        changes = [
            Advised(name, text, predict(work.with_settings({name: value})), needs)
            for name, text, value in tried
        ]
        best = max(changes, key=lambda one: one.prediction.groups_per_s, default=None)
        if best is not None and best.prediction.groups_per_s >= least:
            return best
        if not needs and (fresher := _fresher(work, now)) is not None:
            return fresher
    return None


def _free(work: Workload) -> list[tuple[str, str, float]]:
    """Return settings that take no hardware: name, value in words, value."""
    bound, every = work.max_staleness, work.every_steps
    bounds = {bound + 1, 2 * bound + 1}
    tried = [("replay.max_staleness", str(value), float(value)) for value in sorted(bounds)]
    if work.pause_s or work.exposed_s:
        tried.append(("weight_sync.every_steps", str(2 * every), 2.0 * every))
    if work.verify_s:
        name, now = work.verifier_setting
        tried.append((name, str(2 * now), 2.0 * now))
    if work.outstanding is not None and work.outstanding < work.capacity:
        tried.append(("replay.outstanding", str(work.capacity), float(work.capacity)))
    return tried


def _hardware(work: Workload) -> list[tuple[str, str, float]]:
    return [
        ("cluster.rollout_actors.max", str(2 * work.actors), 2.0 * work.actors),
        ("learner.ranks", "twice as many", 2.0),
    ]


def _fresher(work: Workload, now: Prediction) -> Advised | None:
    """Lower the bound as far as nothing is lost; None where that makes nothing fresher."""
    best, bound = None, work.max_staleness
    while bound > 1:
        bound -= 1
        found = predict(work.with_settings({"replay.max_staleness": bound}))
        if found.groups_per_s < (1 - LOSES) * now.groups_per_s:
            break
        if found.staleness_mean <= now.staleness_mean - LESS_LAG:
            best = Advised("replay.max_staleness", str(bound), found)
    return best


def best_split(work: Workload, *, engine_gpus: int) -> Advised | None:
    """Return the split of the GPUs between ranks and engines that trains the most groups per
    second; None where that is the present one. engine_gpus: of each engine. Those that the closed
    form ranks first are simulated.
    """
    gpus = work.ranks + work.actors * engine_gpus
    tried = {
        (ranks, engines): work.with_settings(
            {
                "cluster.rollout_actors.max": engines,
                "learner.ranks": work.rank_factor * ranks / work.ranks,
            }
        )
        for engines in range(1, (gpus - 1) // engine_gpus + 1)
        for ranks in [gpus - engines * engine_gpus]
        if ranks % work.team == 0
    }
    first = sorted(tried, key=lambda split: min(tried[split].limits().values()), reverse=True)
    now = (work.ranks, work.actors)
    found = {split: predict(tried[split]) for split in {*first[:SPLITS], now}}
    ranks, engines = split = max(found, key=lambda split: found[split].groups_per_s)
    if found[split].groups_per_s < (1 + WORTH) * found[now].groups_per_s:
        return None
    value = f"{ranks}, cluster.rollout_actors.max: {engines}"
    return Advised("learner.ranks", value, found[split])


def _fixed(work: Workload, groups: int) -> Prediction:
    return predict(work.with_settings({"replay.outstanding": groups}))


def said(change: Advised, now: Prediction) -> str:
    """Say a change and what it brings, in words."""
    factor, found = change.prediction.groups_per_s / now.groups_per_s, change.prediction
    needs = f" ({change.needs})" if change.needs else ""
    if math.isclose(factor, 1, abs_tol=LOSES):
        before = f"instead of {now.staleness_mean:.1f}"
        brings = f"as much throughput, staleness {found.staleness_mean:.1f} {before}"
    else:
        brings = f"{factor:.2f} times the throughput, learner idle {found.idle:.0%}"
    return f"{change.setting}: {change.value}{needs}: {brings}"


def workload(config: Config, source: Path | None, *, actors: int | None) -> tuple[Workload, Path]:
    """Join a configuration with a measurement, and say where that is from. Raises SetupError."""
    if source is not None:
        path = source / NAME if source.is_dir() else source
    else:
        beside = next(measured_beside(config, Path(config.run.dir)), None)
        if beside is None:
            raise SetupError(
                "no run of this model and task was measured on this machine next to "
                f"{config.run.dir}: train 30 steps (async-grpo train CONFIG "
                "run.total_steps=30), then predict with --from RUN_DIR"
            )
        path = beside
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        measured = Measured.of(record["measured"])
        places = config.cluster.engine.max_num_seqs or int(record["places"])
        cores = record.get("cores") if actors is None else None  # others bring their own
        actors = actors or config.cluster.rollout_actors.max or int(record["actors"])
    except OSError as error:
        raise SetupError(
            f"{path} cannot be read ({error.strerror}): a run writes it after {LEAST_STEPS} steps "
            "or more, and at its end"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise SetupError(f"{path} is no measurement of a run: {error}") from error
    joined = Workload.of(config, measured, max_num_seqs=places, actors=actors, cores=cores)
    return joined, path.parent


def show(work: Workload, path: Path, *, engine_gpus: int | None) -> None:
    """Print a plan. engine_gpus: of each engine; None where there is nothing to split."""
    now, console = predict(work), Console()
    most = sorted(work.limits().items(), key=lambda one: one[1])
    outstanding = "auto" if work.outstanding is None else str(work.outstanding)
    rows = [("measured in", str(path)), ("expected", describe(now))]
    rows += [
        ("engines", f"{now.taken:.0%} of {work.actors} x {work.places} slots taken"),
        (
            "outstanding",
            f"replay.outstanding {outstanding}: {now.outstanding:.0f} of {work.capacity} groups in "
            f"the end; {least_outstanding(work)} are enough",
        ),
        ("most groups/s", ", ".join(_limit(*one) for one in most)),
    ]
    for bound, found in bounds(work).items():
        mark = "  <- this configuration" if bound == work.max_staleness else ""
        rows.append((f"max_staleness {bound}", describe(found) + mark))
    change = one_change(work, now)
    rows.append(("to change", "nothing" if change is None else said(change, now)))
    if engine_gpus is not None and work.ranks + work.actors > 2:
        split = best_split(work, engine_gpus=engine_gpus)
        rows.append(("same GPUs", "split as they are" if split is None else said(split, now)))
    console.summary("plan", rows)


def bounds(work: Workload) -> dict[int, Prediction]:
    """Predict the run with other bounds beside its own."""
    tried = sorted({0, 1, 2, 4, work.max_staleness, 2 * work.max_staleness})
    return {
        bound: predict(work.with_settings({"replay.max_staleness": bound}))
        for bound in tried
        if bound >= work.every_steps - 1
    }


def _limit(name: str, rate: float) -> str:
    return f"{name} {rate:.3g}" if math.isfinite(rate) else f"{name} none"
