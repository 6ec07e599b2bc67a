"""What a run will come to, and the one number to change: joined with a measurement, and printed.

Runs in: the process of `async-grpo predict`; starts nothing.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from async_grpo.config.schema import Config
from async_grpo.errors import SetupError
from async_grpo.observe.console.console import Console
from async_grpo.tools.predict.advice import least_outstanding, one_change, predict, said
from async_grpo.tools.predict.forecast import NAME, describe, measured_beside
from async_grpo.tools.predict.rehearsal import Prediction
from async_grpo.tools.predict.workload import Measured, Workload

LEAST_STEPS = 24


def workload(config: Config, source: Path | None, *, actors: int | None) -> tuple[Workload, Path]:
    """Join a configuration with a measurement, and say where that is from. Raises SetupError."""
    if source is not None:
        path = source / NAME if source.is_dir() else source
    else:
        beside = next(measured_beside(config, Path(config.run.dir)), None)
        if beside is None:
            raise SetupError(
                "no run of this model and task was measured on this machine beside "
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


def show(work: Workload, path: Path) -> None:
    """Print a plan."""
    now, console = predict(work), Console()
    most = sorted(work.limits().items(), key=lambda one: one[1])
    outstanding = "auto" if work.outstanding is None else str(work.outstanding)
    rows = [("measured in", str(path)), ("expected", describe(now))]
    rows += [
        ("engines", f"{now.taken:.0%} of {work.actors} x {work.places} places taken"),
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
