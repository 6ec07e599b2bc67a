"""Asynchronous against synchronous training, by what is learnt:
`python -m benchmarks.async_vs_sync [WORKLOAD ...] [--rows benchmarks/results/async_vs_sync.jsonl]
[--docs docs/explanation/benchmarks.md] [--picture docs/assets/async_vs_sync.png]`.

Real runs of the same system, with `replay.max_staleness: 0`, which is synchronous, and above 0:

    long_sums            answers of 2 to 78 tokens: a long tail
    calculator, chain    episodes with a tool; calls take 0.5 s in the mean, or 2 s (`slow_tools`)
    sums, larger, yes_no a pretrained model of 135 million parameters (`examples/real_model`)

    tuning   each side tries its choices with each learning rate, on a seed of its own; the one that
             reaches 90 % first is taken. Calls of 2 s take what calls of 0.5 s found. The
             pretrained model has one rate for all, and runs with every bound that it names
    runs     five seeds, a run of each side in turn, in an order that alternates

Seconds count from the first learner step on, evaluations included. One row per run is appended to
the file, so that it can be stopped and started again. Give it a machine of its own.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    REAL_MODEL,
    ROOT,
    OfRow,
    append,
    commit,
    difference,
    interval,
    json_lines,
    machine,
    quiet,
    read_rows,
    real_model,
    run_logged,
    until,
    write_docs,
)

SIDES = "synchronous", "asynchronous"
CHOICES = {
    "cores apart": ("replay.max_staleness=0", "cluster.cores=apart"),
    "cores shared": ("replay.max_staleness=0", "cluster.cores=shared"),
    **{f"staleness {bound}": (f"replay.max_staleness={bound}",) for bound in (1, 2, 4)},
}
"""Name -> settings."""
SEEDS, TUNING_SEED = 5, 100
GOAL = 0.90
TIMEOUT_S = 1_800.0


@dataclass(frozen=True)
class Workload:
    """A task, and how long a run is. groups: of a learner step. steps: of a synchronous run; more:
    times as many of an asynchronous one, so that both last about as long. skipped: steps that the
    rates leave out. like: the workload whose tuning holds for this one too. synchronous,
    asynchronous: what a side tries. goal: the accuracy until which seconds are counted.
    """

    config: str
    groups: int
    steps: int
    skipped: int
    rates: tuple[float, ...]
    settings: tuple[str, ...] = ()
    like: str | None = None
    more: int = 1
    synchronous: tuple[str, ...] = ("cores apart", "cores shared")
    asynchronous: tuple[str, ...] = ("staleness 2", "staleness 4")
    goal: float = GOAL
    pretrained: bool = False

    def choices(self, side: str) -> tuple[str, ...]:
        """What a side tries; a pretrained model's does all of it with every seed, untuned."""
        return self.synchronous if side == SIDES[0] else self.asynchronous


def _real(task: str) -> Workload:
    return Workload(
        f"{REAL_MODEL}/smollm2_{task}.yaml",
        8,
        15,
        3,
        (2e-5,),
        ("evaluation.every_steps=3",),
        synchronous=("cores shared",),
        asynchronous=("staleness 1", "staleness 4"),
        goal=0.75,
        pretrained=True,
    )


def _tools(task: str, mean_s: float, like: str | None = None) -> Workload:
    config = f"benchmarks/async_vs_sync/slow_{task}.yaml"
    settings = (f"task.options.mean_s={mean_s:g}",)
    steps = 20 if like else 32  # of 20 s each, or 5 s
    return Workload(config, 8, steps, 6, (1e-4, 3e-4), settings, like, more=3)


WORKLOADS = {
    "long_sums": Workload("benchmarks/async_vs_sync/long_sums.yaml", 16, 200, 10, (2e-4, 4e-4)),
    "calculator, 0.5 s": _tools("calculator", 0.5),
    "calculator, 2 s": _tools("calculator", 2.0, like="calculator, 0.5 s"),
    "chain, 0.5 s": _tools("chain", 0.5),
    "chain, 2 s": _tools("chain", 2.0, like="chain, 0.5 s"),
    "sums": _real("sums"),
    "larger": _real("larger"),
    "yes_no": _real("yes_no"),
}


@dataclass(frozen=True)
class Job(OfRow):
    """One run. kind: `tuning` or `runs`."""

    workload: str
    kind: str
    side: str
    choice: str
    lr: float
    seed: int


def jobs(name: str, rows: Sequence[dict[str, Any]]) -> Iterator[Job]:
    """What is to be done for a workload, in its order; without what is not yet known."""
    workload = WORKLOADS[name]
    if workload.pretrained:
        [rate] = workload.rates
        for seed in range(SEEDS):
            for side in sorted(SIDES, reverse=not seed % 2):
                for choice in workload.choices(side):
                    yield Job(name, "runs", side, choice, rate, seed)
        return
    tuning = WORKLOADS[name].like or name
    for rate in WORKLOADS[tuning].rates:
        for side in SIDES:
            for choice in WORKLOADS[tuning].choices(side):
                yield Job(tuning, "tuning", side, choice, rate, TUNING_SEED)
    tuned = {side: best(rows, tuning, side) for side in SIDES}
    if not all(tuned.values()):
        return
    for seed in range(SEEDS):
        for side in sorted(SIDES, reverse=not seed % 2):
            yield Job(name, "runs", side, tuned[side]["choice"], tuned[side]["lr"], seed)


def best(rows: Sequence[dict[str, Any]], name: str, side: str) -> dict[str, Any]:
    """The tuning run that reached the goal first, or where none did, got highest; empty before all
    of them are there.
    """
    found = [
        row for row in rows if (row["workload"], row["kind"], row["side"]) == (name, "tuning", side)
    ]
    workload = WORKLOADS[name]
    if len(found) < len(workload.choices(side)) * len(workload.rates):
        return {}

    def rank(row: dict[str, Any]) -> tuple[float, float]:
        reached = until(row["points"], workload.goal, 1)
        return math.inf if reached is None else reached, -last(row)

    return min(found, key=rank)


def last(row: dict[str, Any]) -> float:
    """Mean held-out accuracy of a run's last three evaluations."""
    return statistics.mean(point[3] for point in row["points"][-3:])


def run(job: Job, directory: Path) -> dict[str, Any]:
    """Run a job as a user would; what its metrics.jsonl says."""
    workload = WORKLOADS[job.workload]
    settings = [
        f"run.total_steps={workload.steps * (1 if job.side == SIDES[0] else workload.more)}",
        f"seed={job.seed}",
        f"learner.lr={job.lr}",
        *CHOICES[job.choice],
        *workload.settings,
        *(real_model() if workload.pretrained else []),
    ]
    command = ["async_grpo.run", workload.config, *settings]
    run_logged(
        [sys.executable, "-m", *command, f"run.dir={directory}"],
        directory.with_suffix(".txt"),
        limit_s=TIMEOUT_S,
    )
    measured = course(json_lines(directory / "metrics.jsonl"), workload)
    said = {"command": shlex.join(["python", "-m", *command]), "commit": commit()}
    return measured | said | {"machine": machine()}


def course(lines: Sequence[dict[str, float]], workload: Workload) -> dict[str, Any]:
    """From the metrics of a run: points of (step, seconds, tokens, held-out accuracy); groups per
    second, learner idle and mean lag after the first steps.
    """
    steps = {int(line["step"]): line for line in lines if "time/step" in line}
    began = steps[1]["time"] - steps[1]["time/step"]
    seconds, tokens = {0: 0.0}, {0: 0.0}
    for number, line in sorted(steps.items()):
        seconds[number] = line["time"] - began
        tokens[number] = tokens[number - 1] + line["rollout/response_tokens"]
    points = [
        (step, round(seconds[step], 2), int(tokens[step]), line["eval/accuracy_greedy"])
        for line in lines
        if "eval/accuracy_greedy" in line
        for step in [int(line["step"])]
    ]
    first, end = workload.skipped, max(steps)
    kept = [steps[number] for number in range(first + 1, end + 1)]
    window = seconds[end] - seconds[first]
    starved = steps[end]["time/learner/idle"] - steps[first]["time/learner/idle"]
    return {
        "points": points,
        "groups_per_s": workload.groups * len(kept) / window,
        "idle": starved / window,
        "staleness_mean": statistics.mean(line["train/staleness_mean"] for line in kept),
    }


def pairs(
    rows: Sequence[dict[str, Any]], name: str, choice: str
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Synchronous run of a workload and asynchronous one of a choice, of seeds that have both."""
    runs: tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]] = {}, {}
    for row in rows:
        if (row["workload"], row["kind"]) == (name, "runs"):
            if row["side"] == SIDES[0]:
                runs[0][row["seed"]] = row
            elif row["choice"] == choice:
                runs[1][row["seed"]] = row
    return [(runs[0][seed], runs[1][seed]) for seed in sorted(set(runs[0]) & set(runs[1]))]


def comparisons(
    rows: Sequence[dict[str, Any]],
) -> dict[tuple[str, str], list[tuple[dict[str, Any], dict[str, Any]]]]:
    """The pairs that there are, by workload and what the asynchronous side ran with."""
    return {
        (name, choice): both
        for name, workload in WORKLOADS.items()
        for choice in workload.asynchronous
        if (both := pairs(rows, name, choice))
    }


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The result as Markdown."""
    found = comparisons(rows)
    if not found:
        return ["Not measured yet."]
    machines = {row["machine"].split(";")[0] for both in found.values() for row in both[0]}
    lines = [
        f"{'; '.join(sorted(machines))}. Means and 95 % intervals (Student's t) over seeds; "
        "synchronous -> asynchronous.",
        "",
        "| workload | seeds | settings | groups/s | | seconds until | | until as "
        "accurate as the synchronous end | accuracy after as long | staleness |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, _), both in found.items():
        goal = WORKLOADS[name].goal

        def change(value: Callable[[dict[str, Any]], float], digits: str, both: Any = both) -> str:
            sides = zip(*[(value(one), value(other)) for one, other in both], strict=True)
            return " -> ".join(f"{statistics.mean(side):{digits}}" for side in sides)

        reached = [
            [until(row["points"], goal, 1) for row in side] for side in zip(*both, strict=True)
        ]
        cells = [
            name,
            str(len(both)),
            " -> ".join(f"{row['choice']}, {row['lr']:g}" for row in both[0]),
            change(lambda row: row["groups_per_s"], ".2f"),
            ratio([other["groups_per_s"] / one["groups_per_s"] for one, other in both]),
            f"{goal:.0%}: " + " -> ".join(seconds_of(side) for side in reached),
            ratio([o / s for s, o in zip(*reached, strict=True) if s and o]),
            ratio([sooner for one, other in both if (sooner := catches_up(one, other))]),
            difference([ahead(one, other) for one, other in both]),
            numbers([other["staleness_mean"] for _, other in both], ".1f"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def catches_up(synchronous: dict[str, Any], asynchronous: dict[str, Any]) -> float | None:
    """Seconds of the asynchronous run until it is as accurate as the synchronous one in its last
    three evaluations, in those that the synchronous one took; None where it never is.
    """
    level = last(synchronous)
    theirs, mine = (until(row["points"], level, 1) for row in (synchronous, asynchronous))
    return None if mine is None or not theirs else mine / theirs


def ahead(synchronous: dict[str, Any], asynchronous: dict[str, Any]) -> float:
    """Accuracy of the asynchronous run above the synchronous one when the shorter one ends."""
    runs = synchronous["points"], asynchronous["points"]
    end = min(points[-1][1] for points in runs)
    theirs, mine = (_accuracy_at(points, end) for points in runs)
    return mine - theirs


def _accuracy_at(points: Sequence[Sequence[float]], seconds: float) -> float:
    for before, after in pairwise(points):
        if after[1] >= seconds:
            share = (seconds - before[1]) / (after[1] - before[1])
            return before[3] + share * (after[3] - before[3])
    return points[-1][3]


def seconds_of(values: Sequence[float | None]) -> str:
    """Mean of those that reached the goal, and how many did not."""
    known = [value for value in values if value is not None]
    missed = [f"never in {len(values) - len(known)}"] if len(known) < len(values) else []
    return ", ".join(([f"{statistics.mean(known):,.0f}"] if known else []) + missed)


def ratio(values: Sequence[float]) -> str:
    """Asynchronous over synchronous, seed by seed."""
    return numbers(values, ".2f") + " times" if values else "-"


def numbers(values: Sequence[float], digits: str) -> str:
    """Mean and 95 % interval."""
    mean, half = interval(values)
    return f"{mean:{digits}}" + ("" if half != half else f" ± {half:{digits}}")


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Held-out accuracy over seconds, a panel per workload: every seed, and the mean of a side."""
    import matplotlib as mpl
    import numpy as np

    mpl.use("Agg")
    from matplotlib import pyplot

    found = comparisons(rows)
    size = (3.2 * len(found) + 0.6, 3.2)
    figure, panels = pyplot.subplots(
        1, len(found), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for panel, ((name, choice), both) in zip(panels[0], found.items(), strict=True):
        for side, colour, runs in zip(
            SIDES, ("#d9722e", "#3b82c4"), zip(*both, strict=True), strict=True
        ):
            curves = [np.array(row["points"]) for row in runs]
            at = np.linspace(0, min(curve[-1, 1] for curve in curves), 200)
            values = np.array([np.interp(at, one[:, 1], one[:, 3]) for one in curves])
            for curve in curves:
                panel.plot(curve[:, 1], 100 * curve[:, 3], color=colour, alpha=0.35, lw=0.8)
            panel.plot(at, 100 * values.mean(0), color=colour, lw=2.2, label=side)
        panel.set_title(f"{name}; {choice}", fontsize=9)
        panel.set_xlabel("seconds")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("held-out accuracy, %")
    panels[0][-1].legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.async_vs_sync",
        description="What is learnt in the same time, asynchronously and synchronously.",
    )
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    default = ROOT / "benchmarks" / "results" / "async_vs_sync.jsonl"
    parser.add_argument("--rows", type=Path, default=default, help="one JSON row per run")
    parser.add_argument("--docs", type=Path, help="write the table into that page")
    parser.add_argument("--picture", type=Path, help="draw the curves into that PNG file")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.workloads if name not in WORKLOADS]
    if unknown:
        parser.error(f"no workload {', '.join(unknown)}; there are: {'; '.join(WORKLOADS)}")
    names = arguments.workloads or list(WORKLOADS)
    with tempfile.TemporaryDirectory(prefix="async_vs_sync-") as folder:
        while not arguments.table:
            rows = read_rows(arguments.rows)
            done = {Job.of(row) for row in rows}
            left = (one for name in names for one in jobs(name, rows) if one not in done)
            job = next(left, None)
            if job is None:
                break
            row = job.__dict__ | run(job, Path(folder) / f"run-{len(rows)}")
            append(arguments.rows, row)
            accuracy = f", {row['points'][-1][3]:.1%}" if row["points"] else ""
            print(
                f"{job}: {row['groups_per_s']:.1f} groups/s, idle {row['idle']:.1%}, staleness "
                f"{row['staleness_mean']:.2f}{accuracy}",
                flush=True,
            )
    rows = read_rows(arguments.rows)
    lines = table(rows)
    print("\n".join(lines))
    if arguments.docs is not None:
        write_docs(arguments.docs, lines, benchmark="async_vs_sync")
    if arguments.picture is not None:
        draw(rows, arguments.picture)


if __name__ == "__main__":
    quiet()
    main()
