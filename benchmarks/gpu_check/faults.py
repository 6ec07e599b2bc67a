"""Stages in which a run is hurt, and has to go on: an engine is killed, or the run is stopped and
continued.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_check.check import Check, CheckFailed, processes, require
from benchmarks.gpu_check.training import QUICKSTART

HELD_S = 15.0
"""Seconds for which an engine stands still before it is killed: longer than a learner step, shorter
than every deadline.
"""


def kill(check: Check) -> dict[str, Any]:
    """Kill the process of an engine while a run trains; the run must go on to its end."""
    metrics = _without_an_engine(check, "kill")
    return {"restarts": metrics["cluster/restarts"], "steps": metrics["replay/steps"]}


def kill_publishing(check: Check) -> dict[str, Any]:
    """Kill the process of one of two engines during a publication, which has begun because the
    process was stopped before: none ends without it.
    """
    metrics = _without_an_engine(
        check,
        "kill_publishing",
        "cluster.rollout_actors={min: 2, max: 2}",
        # the other engine must have enough to do for the next step, after which is a publication
        "cluster.engine.max_num_seqs=32",
        "replay.max_staleness=3",
        *check.on_gpus("cluster.layout=split", "weight_sync.backend=nccl"),
        held_s=HELD_S,
    )
    if not metrics.get("weights/dropped_engines"):
        raise CheckFailed("no publication was under way when the engine was killed")
    names = ("weights/dropped_engines", "weights/repeated", "cluster/restarts", "replay/steps")
    return {name.rpartition("/")[2]: metrics.get(name, 0.0) for name in names}


def _without_an_engine(
    check: Check, name: str, *settings: str, held_s: float = 0.0
) -> dict[str, float]:
    """Kill an engine of a run that trains, after it stood still for `held_s`; the run's metrics."""
    total = f"run.total_steps={10 * check.steps}"
    command = check.run_command(name, QUICKSTART, total, *settings)
    running = check.start(command, check.directory / f"{name}.log")
    check.until_step(name, running, 2)
    engine = engine_process(running.process.pid)
    if held_s:
        os.kill(engine, signal.SIGSTOP)
        check.pause(held_s)
    os.kill(engine, signal.SIGKILL)
    require(running.wait())
    metrics = check.metrics(name)
    if not metrics.get("cluster/restarts"):
        raise CheckFailed("no engine was started again: the run did not notice")
    return metrics


def engine_process(pid: int) -> int:
    """Find the process of an engine below a run. Raises CheckFailed where there is none."""
    for process in processes("EngineCore"):
        if pid in [parent.pid for parent in process.parents()]:
            return process.pid
    raise CheckFailed("the run has no process that is called EngineCore")


def resume(check: Check) -> dict[str, Any]:
    """Stop a run by a signal, and continue it."""
    return _continued(check, "resume")


def resume_ranks(check: Check) -> dict[str, Any]:
    """Stop a run of two learner ranks in bfloat16, and continue it with one."""
    common = ["model.dtype=bfloat16", *check.on_gpus("cluster.layout=colocated")]
    return _continued(
        check, "resume_ranks", [*common, "learner.ranks=2"], [*common, "learner.ranks=1"]
    )


def _continued(
    check: Check, name: str, first: Sequence[str] = (), second: Sequence[str] = ()
) -> dict[str, Any]:
    """Stop a run by a signal, and continue it with other settings."""
    command = check.run_command(name, QUICKSTART, f"run.total_steps={10 * check.steps}", *first)
    running = check.start(command, check.directory / f"{name}-first.log")
    check.until_step(name, running, 2)
    running.process.send_signal(signal.SIGTERM)
    require(running.wait())
    stopped = check.metrics(name)["replay/steps"]
    total = f"run.total_steps={round(stopped) + check.steps}"
    done = check.command(name, check.run_command(name, QUICKSTART, total, *second))
    require(done)
    if "resumed" not in done.output:
        raise CheckFailed("the second run did not resume the first")
    return {"stopped at": stopped, "ended at": check.metrics(name)["replay/steps"]}
