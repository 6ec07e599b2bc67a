"""`python -m async_grpo.plan CONFIG [a.b=c ...] [--from RUN_DIR] [--simulate] [--actors N]`: what a
run will come to, and the one number to change.

Runs in: a process of its own; starts nothing. Exit code 2 with one sentence where there is no
measurement to plan with.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from async_grpo.config.load import ConfigError, load_config, resolve
from async_grpo.config.schema import Config
from async_grpo.errors import RunError, SetupError
from async_grpo.observe.console.console import Console
from async_grpo.plan.advice import least_outstanding, one_change, predict, said
from async_grpo.plan.forecast import NAME, describe, measured_beside
from async_grpo.plan.forms import limits
from async_grpo.plan.rehearsal import Prediction
from async_grpo.plan.workload import Measured, Workload
from async_grpo.simulation.scenario import Scenario
from async_grpo.simulation.simulator import simulate

SIMULATED_GROUPS = 2_000
"""About so many, in at least `LEAST_STEPS` learner steps."""
LEAST_STEPS, SKIPPED = 24, 6


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m async_grpo.plan",
        description="Predict throughput, learner idle and lag of a run, from a measurement.",
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or the name of a recipe")
    parser.add_argument("settings", metavar="a.b=c", nargs="*", help="settings instead of those")
    source = "a run of the same model and task, of 30 steps or more; else the newest beside run.dir"
    parser.add_argument("--from", dest="source", metavar="RUN_DIR", type=Path, help=source)
    simulated = "follow the run with the real queue too, in invented time"
    parser.add_argument("--simulate", action="store_true", help=simulated)
    parser.add_argument("--actors", type=_positive, help="rollout actors, instead of the run's own")
    seconds = "seconds that a verifier takes for a response, instead of the measured ones"
    parser.add_argument("--verify-s", type=float, metavar="SECONDS", help=seconds)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    arguments = parser.parse_intermixed_args(argv)
    try:
        config = resolve(load_config(arguments.config, arguments.settings))
        work, path = workload(config, arguments.source, actors=arguments.actors)
        if arguments.verify_s is not None:
            work = replace(work, verify_s=arguments.verify_s)
        found = simulated_figures(work) if arguments.simulate else None
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return SetupError.exit_code
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if arguments.json:
        record = {"predicted": asdict(predict(work)), "limits": limits(work), "simulated": found}
        print(json.dumps(record | {"measured_in": str(path)}))
        return 0
    show(work, path, found)
    return 0


def workload(config: Config, source: Path | None, *, actors: int | None) -> tuple[Workload, Path]:
    """Join a configuration with a measurement, and say where that is from. Raises SetupError."""
    if source is not None:
        path = source / NAME if source.is_dir() else source
    else:
        beside = next(measured_beside(config, Path(config.run.dir)), None)
        if beside is None:
            raise SetupError(
                "no run of this model and task was measured on this machine beside "
                f"{config.run.dir}: train 30 steps (python -m async_grpo.run CONFIG "
                "run.total_steps=30), then plan with --from RUN_DIR"
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


def simulated_figures(work: Workload) -> dict[str, float]:
    """Follow the run with the real queue: `Result.figures`, and tokens per second."""
    steps = max(LEAST_STEPS, SIMULATED_GROUPS // work.batch) + 2 * work.max_staleness
    result = simulate(Scenario.of(work, steps=steps), checked=False)
    figures = result.figures(skip=SKIPPED + work.max_staleness)
    return figures | {"tokens_per_s": figures["groups_per_s"] * work.group_tokens}


def show(work: Workload, path: Path, simulated: dict[str, float] | None) -> None:
    """Print a plan."""
    now, console = predict(work), Console()
    outstanding = "auto" if work.outstanding is None else str(work.outstanding)
    rows = [("measured in", str(path)), ("expected", describe(now))]
    if simulated is not None:
        rows.append(
            (
                "simulated",
                f"{simulated['tokens_per_s']:,.0f} response tokens/s, learner idle "
                f"{simulated['idle']:.0%}, lag {simulated['lag_mean']:.1f} a token on average and "
                f"{simulated['lag_max']:.0f} at most, {simulated['masked']:.0%} too old",
            )
        )
    rows += [
        ("engines", f"{now.taken:.0%} of {work.actors} x {work.places} places taken"),
        (
            "outstanding",
            f"replay.outstanding {outstanding}: {now.outstanding:.0f} of {work.capacity} groups in "
            f"the end; {least_outstanding(work)} are enough",
        ),
        ("most groups/s", ", ".join(_limit(*one) for one in sorted_limits(work))),
    ]
    for bound, found in bounds(work).items():
        mark = "  <- this configuration" if bound == work.max_staleness else ""
        rows.append((f"max_staleness {bound}", describe(found) + mark))
    change = one_change(work, now)
    rows.append(("to change", "nothing" if change is None else said(change, now)))
    console.summary("plan", rows)


def sorted_limits(work: Workload) -> list[tuple[str, float]]:
    """Return what limits the run, the lowest limit first."""
    return sorted(limits(work).items(), key=lambda one: one[1])


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


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
