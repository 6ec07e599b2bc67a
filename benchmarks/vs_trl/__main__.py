"""This system against TRL's GRPOTrainer: `python -m benchmarks.vs_trl [--workload long|short|real]
[--seeds N] [--smoke] [--out JSON] [--docs FILE]`.

    long     14 million parameters, up to 256 tokens with a geometric tail (mean about 70), 64
             responses per learner step
    short    the quickstart's model and task, 256 responses per learner step
    real     a pretrained model of 135 million parameters, 64 responses of at most 16 tokens

Same machine, same weights, prompts in the same order, same algorithm and numbers, float32, all
cores for each side; TRL's environment is its own (`benchmarks.vs_trl.environment`). The sides take
turns, seed by seed. Samples per second are of the learner steps after the first ones. On the short
workload also the time to a held-out accuracy. Evaluations are outside the clock of both: TRL's
clock stops for them; ours, which evaluates beside training, runs each seed twice, without
evaluations for the clock and with them for the accuracy of each step. Start-up is apart. With
`--out`, rows that are in the file already are not measured again.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    add_smoke,
    aim,
    arguments_of,
    json_lines,
    machine,
    quiet,
    run_logged,
    spread,
    write_docs,
)
from benchmarks.throughput.run import summed
from benchmarks.vs_trl.environment import DEFAULT, ensure, versions
from benchmarks.vs_trl.workloads import WORKLOADS, Workload, model_of, smoke

SIDE = Path(__file__).with_name("side.py")
TIMEOUT_S = 900.0
OURS, THEIRS = "async_grpo", "TRL"
ACCURACY = "eval/accuracy_greedy"

Row = dict[str, Any]
"""`workload, side, seed, steps`; `start_s`; `seconds, samples, tokens` of the steps that count;
`clock`: seconds at the end of each step; `curve`: [step, held-out accuracy].
"""


@dataclass(frozen=True)
class Place:
    """Where a benchmark keeps its files, and TRL's Python."""

    directory: Path
    python: Path


def ours(workload: Workload, seed: int, place: Place) -> Row:
    """A run without evaluations, for the clock; where accuracy is asked for, another with them."""
    quiet = ["evaluation.before=false", "evaluation.every_steps=0"]
    started, lines = _our_run(workload, seed, place, quiet)
    curve = {}
    if workload.target is not None:
        settings = [
            f"evaluation.every_steps={workload.evaluate_every}",
            f"evaluation.max_samples={workload.problems}",
            "evaluation.n=0",
        ]
        _, evaluated = _our_run(workload, seed, place, settings)
        curve = {line["step"]: line[ACCURACY] for line in evaluated if ACCURACY in line}
    return our_row(workload, started, lines, sorted(curve.items()))


def _our_run(
    workload: Workload, seed: int, place: Place, settings: list[str]
) -> tuple[float, list[dict[str, Any]]]:
    where = place.directory / "ours"
    shutil.rmtree(where, ignore_errors=True)
    overrides = [
        *workload.overrides(seed, place.directory),
        f"run.dir={where}",
        "tracking.mlflow=false",
        "tracking.report=false",
        *settings,
    ]
    command = [sys.executable, "-m", "async_grpo.run", workload.config, *overrides]
    started = time.time()
    run_logged(command, place.directory / "ours.txt", limit_s=TIMEOUT_S)
    return started, json_lines(where / "metrics.jsonl")


def our_row(
    workload: Workload, started: float, lines: list[dict[str, Any]], curve: list[tuple[int, float]]
) -> Row:
    """From what a run wrote."""
    steps = {line["step"]: line for line in lines if "time/step" in line}
    began = steps[1]["time"] - steps[1]["time/step"]
    window = summed(steps, skip=workload.skip, last=_last(workload))
    return {
        "steps": workload.steps,
        "start_s": began - started,
        **{name: window[name] for name in ("seconds", "samples", "tokens")},
        "clock": [steps[step]["time"] - began for step in sorted(steps)],
        "curve": [list(point) for point in curve],
    }


def theirs(workload: Workload, seed: int, place: Place) -> Row:
    """One run of TRL."""
    work, out = place.directory / "work.json", place.directory / "trl.jsonl"
    cores = len(os.sched_getaffinity(0))
    work.write_text(
        json.dumps(workload.work(seed, place.directory) | {"threads": cores}), encoding="utf-8"
    )
    variables = {
        "OMP_NUM_THREADS": str(cores),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    # -I: neither its directory nor PYTHONPATH is on its path.
    command = [str(place.python), "-I", str(SIDE), str(work), str(out)]
    started, log = time.time(), place.directory / "trl.txt"
    run_logged(command, log, limit_s=TIMEOUT_S, environment=os.environ | variables)
    return their_row(workload, started, json_lines(out))


def their_row(workload: Workload, started: float, lines: list[dict[str, Any]]) -> Row:
    """From what TRL's side wrote."""
    steps = {line["step"]: line for line in lines if "time" in line}
    first, last = workload.skip, _last(workload)
    counted = [steps[step] for step in range(first + 1, last + 1)]
    [began] = [line["began"] for line in lines if "began" in line]
    return {
        "micro_batch": workload.micro_batch,
        "continuous": workload.continuous,
        "steps": workload.steps,
        "start_s": began - started,
        "seconds": steps[last]["time"] - steps[first]["time"],
        "samples": sum(line["samples"] for line in counted),
        "tokens": sum(line["tokens"] for line in counted),
        "clock": [steps[step]["time"] for step in sorted(steps)],
        "curve": [[line["step"], line["accuracy"]] for line in lines if "accuracy" in line],
    }


def _last(workload: Workload) -> int:
    # An asynchronous run has generated everything before its last step: it would count as trained
    # in no time.
    return workload.steps - 2


def samples_per_s(row: Row) -> float:
    """Responses trained per second."""
    return row["samples"] / row["seconds"]


def seconds_to(row: Row, target: float | None) -> float | None:
    """Seconds of training until the first evaluation with this accuracy; None where there was
    none.
    """
    if target is None:
        return None
    reached = [step for step, accuracy in row["curve"] if accuracy >= target]
    return None if not reached else row["clock"][reached[0] - 1] if reached[0] else 0.0


def pairs(rows: list[Row], workload: Workload) -> list[tuple[Row, Row]]:
    """Our row and TRL's, of the seeds that have both."""
    mine = [
        row for row in rows if (row["workload"], row["steps"]) == (workload.name, workload.steps)
    ]
    found = {
        side: {row["seed"]: row for row in mine if row["side"] == side} for side in (OURS, THEIRS)
    }
    return [
        (found[OURS][seed], found[THEIRS][seed])
        for seed in sorted(found[OURS].keys() & found[THEIRS].keys())
    ]


def table(rows: list[Row], workload: Workload) -> list[str]:
    """The tables of a workload, and what was reached of its aim."""
    both = pairs(rows, workload)
    if not both:
        return []
    what = (
        f"{workload.name}: {len(both)} seeds; {Path(workload.config).name}, {workload.steps} "
        f"learner steps, rates without the first {workload.skip}"
    )
    lines = [
        what,
        "",
        "| | samples/s | tokens/s | mean length | start s |",
        "|---|---|---|---|---|",
    ]
    for side, mine in sides(both):
        fields = [
            side,
            spread([samples_per_s(row) for row in mine], ".1f"),
            spread([row["tokens"] / row["seconds"] for row in mine], ",.0f"),
            spread([row["tokens"] / row["samples"] for row in mine], ".1f"),
            spread([row["start_s"] for row in mine], ".1f"),
        ]
        lines.append(f"| {' | '.join(fields)} |")
    faster = [samples_per_s(mine) / samples_per_s(other) for mine, other in both]
    told = aim(
        f"{workload.name}: {workload.aim:g} times TRL's samples/s",
        spread(faster),
        met=statistics.median(faster) >= workload.aim,
    )
    return [
        *lines,
        *accuracy(both, workload),
        "",
        "| aim | measured, seed by seed | |",
        "|---|---|---|",
        told,
        "",
    ]


def accuracy(both: list[tuple[Row, Row]], workload: Workload) -> list[str]:
    """The table of held-out accuracy, where it is asked for."""
    if workload.target is None:
        return []
    percent = f"{workload.target:.0%}"
    head = (
        f"Greedy answers to {workload.problems} held-out problems, every "
        f"{workload.evaluate_every} steps:"
    )
    lines = [
        "",
        head,
        "",
        f"| | before | after | reached {percent} | seconds to {percent} |",
        "|---|---|---|---|---|",
    ]
    for side, mine in sides(both):
        times = [
            seconds for row in mine if (seconds := seconds_to(row, workload.target)) is not None
        ]
        ends = [spread([row["curve"][end][1] for row in mine], ".1%") for end in (0, -1)]
        seconds = spread(times, ".1f") if times else ""
        cells = [side, *ends, f"{len(times)} of {len(mine)}", seconds]
        lines.append(f"| {' | '.join(cells)} |")
    reached = [[seconds_to(row, workload.target) for row in pair] for pair in both]
    sooner = [other / mine for mine, other in reached if mine and other]
    return (
        [
            *lines,
            "",
            f"TRL's seconds to {percent} over ours, where both reached it: {spread(sooner)}.",
        ]
        if sooner
        else lines
    )


def sides(both: list[tuple[Row, Row]]) -> list[tuple[str, list[Row]]]:
    """The rows of each side."""
    return [(side, [pair[index] for pair in both]) for index, side in enumerate((OURS, THEIRS))]


def measure(
    workload: Workload, seed: int, place: Place, results: dict[str, Any], out: Path | None
) -> None:
    """Both sides of a seed, in turn: which is first changes from seed to seed."""
    measured = {OURS: ours, THEIRS: theirs}
    model_of(workload.load(seed, place.directory))  # a warm start is made before any clock runs
    for side in list(measured)[:: 1 if seed % 2 == 0 else -1]:
        key = (workload.name, side, seed, workload.steps)
        if any(
            (row["workload"], row["side"], row["seed"], row["steps"]) == key
            for row in results["rows"]
        ):
            continue
        row = {"workload": workload.name, "side": side, "seed": seed} | measured[side](
            workload, seed, place
        )
        results["rows"].append(row)
        reached = seconds_to(row, workload.target)
        told = f"{samples_per_s(row):.1f} samples/s" + (
            "" if reached is None else f", {workload.target:.0%} after {reached:.1f} s"
        )
        print(f"{workload.name}, seed {seed}, {side}: {told}", file=sys.stderr, flush=True)
        if out:
            out.write_text(json.dumps(results) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = arguments_of("vs_trl", "This system against TRL's GRPOTrainer.")
    parser.add_argument("--workload", choices=list(WORKLOADS), help="one of them; all without it")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--steps", type=int, help="learner steps of a run")
    parser.add_argument(
        "--micro-batch",
        type=int,
        help="responses per forward pass of TRL's side, in place of the whole batch",
    )
    parser.add_argument(
        "--continuous", action="store_true", help="TRL's side generates with continuous batching"
    )
    parser.add_argument(
        "--environment", type=Path, default=DEFAULT, help="where TRL's environment is, or is made"
    )
    add_smoke(parser)
    arguments = parser.parse_args(argv)
    workloads = [
        WORKLOADS[name] for name in ([arguments.workload] if arguments.workload else WORKLOADS)
    ]
    if arguments.smoke:
        workloads = [smoke(workload) for workload in workloads]
    elif arguments.steps:
        if arguments.steps < max(workload.skip for workload in workloads) + 3:
            parser.error("--steps leaves nothing to measure after the first steps")
        workloads = [replace(workload, steps=arguments.steps) for workload in workloads]
    if arguments.continuous or arguments.micro_batch:
        workloads = [
            replace(
                one,
                continuous=arguments.continuous,
                micro_batch=arguments.micro_batch or one.micro_batch,
            )
            for one in workloads
        ]
    python = ensure(arguments.environment)
    results = {
        "machine": machine("vllm", "ray", "deepspeed", "torch"),
        "trl": versions(python),
        "rows": [],
    }
    if arguments.out and arguments.out.exists():
        results = json.loads(arguments.out.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="vs-trl-") as temporary:
        place = Place(Path(temporary), python)
        for seed in range(1 if arguments.smoke else arguments.seeds):
            for workload in workloads:
                measure(workload, seed, place, results, arguments.out)
    lines = [results["machine"], "", f"TRL's side: {results['trl']}", ""]
    for workload in WORKLOADS.values():
        shown = next((one for one in workloads if one.name == workload.name), workload)
        lines += table(results["rows"], shown)
    print("\n".join(lines))
    if arguments.docs:
        write_docs(arguments.docs, lines, benchmark="vs_trl")


if __name__ == "__main__":
    quiet()
    main()
