"""Asynchronous against synchronous training, by what is learnt:
`python -m benchmarks.async_vs_sync [--rows benchmarks/results/async_vs_sync.jsonl]
[--docs docs/explanation/benchmarks.md] [--picture docs/assets/async_vs_sync.png]`.

Real runs of the same system on a task with long tails (`long_sums`): once with
`replay.max_staleness: 0`, which is synchronous, once with 2. Each side gets the settings that are
best for it, from the same choices:

    places   one engine and one learner rank with a core each, or two of both, which share all
             cores; by groups per second of a short run
    rates    the learning rate, by held-out accuracy over the second half of a run of another seed
    runs     five seeds, a run of each side in turn, in an order that alternates

Seconds count from the first learner step on, evaluations included. One row per run is appended to
the file, so that it can be stopped and started again. Give it a machine of its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    ROOT,
    OfRow,
    append,
    cell,
    difference,
    interval,
    json_lines,
    machine,
    read_rows,
    run_logged,
    write_docs,
)

SIDES = {"synchronous": 0, "asynchronous": 2}
"""Name -> `replay.max_staleness`."""
PLACES: dict[str, tuple[str, ...]] = {
    "one engine, one rank": ("cluster.rollout_actors={min: 1, max: 1}",),
    "two engines, two ranks": ("cluster.rollout_actors={min: 2, max: 2}", "learner.ranks=2"),
}
CONFIG = "benchmarks/async_vs_sync/long_sums.yaml"
RATES = (1e-4, 2e-4, 4e-4)
SHORT, SKIPPED, STEPS, SEEDS, TUNING_SEED = 40, 10, 200, 5, 100
GOALS = (0.90, 0.95)
TIMEOUT_S = 1_800.0


@dataclass(frozen=True)
class Job(OfRow):
    """One run. kind: `places`, `rates` or `runs`."""

    kind: str
    side: str
    places: str
    lr: float
    seed: int


def jobs(rows: Sequence[dict[str, Any]]) -> Iterator[Job]:
    """What is to be done, in its order; without what is not yet known."""
    for places in PLACES:
        for side in SIDES:
            yield Job("places", side, places, RATES[1], TUNING_SEED)
    chosen = {side: best(rows, "places", side, lambda row: row["groups_per_s"]) for side in SIDES}
    if not all(chosen.values()):
        return
    for rate in RATES:
        for side in SIDES:
            yield Job("rates", side, chosen[side]["places"], rate, TUNING_SEED)
    tuned = {side: best(rows, "rates", side, second_half) for side in SIDES}
    if not all(tuned.values()):
        return
    for seed in range(SEEDS):
        for side in sorted(SIDES, reverse=bool(seed % 2)):
            yield Job("runs", side, tuned[side]["places"], tuned[side]["lr"], seed)


def second_half(row: dict[str, Any]) -> float:
    """Mean held-out accuracy of a run's second half."""
    return statistics.mean(point[3] for point in row["points"] if point[0] >= row["steps"] / 2)


def best(
    rows: Sequence[dict[str, Any]], kind: str, side: str, value: Callable[[dict[str, Any]], float]
) -> dict[str, Any]:
    """The best run of this kind; empty before all of them are there."""
    found = [row for row in rows if (row["kind"], row["side"]) == (kind, side)]
    if len(found) < len(PLACES if kind == "places" else RATES):
        return {}
    return max(found, key=value)


def run(job: Job, directory: Path) -> dict[str, Any]:
    """Run a job as a user would; what its metrics.jsonl says."""
    steps = SHORT if job.kind == "places" else STEPS
    settings = [
        f"run.dir={directory}",
        f"run.total_steps={steps}",
        f"seed={job.seed}",
        f"learner.lr={job.lr}",
        f"replay.max_staleness={SIDES[job.side]}",
        *PLACES[job.places],
    ]
    if job.kind == "places":
        settings += ["evaluation.every_steps=0", "evaluation.before=false"]
    command = [sys.executable, "-m", "async_grpo.run", CONFIG, *settings]
    run_logged(command, directory.with_suffix(".txt"), limit_s=TIMEOUT_S)
    return course(json_lines(directory / "metrics.jsonl")) | {"steps": steps}


def course(lines: Sequence[dict[str, float]]) -> dict[str, Any]:
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
    last = max(steps)
    kept = [steps[number] for number in range(SKIPPED + 1, last + 1)]
    window = seconds[last] - seconds[SKIPPED]
    starved = steps[last]["time/learner/idle"] - steps[SKIPPED]["time/learner/idle"]
    return {
        "points": points,
        "groups_per_s": 16 * len(kept) / window,
        "idle": starved / window,
        "lag_mean": statistics.mean(line["train/staleness_mean"] for line in kept),
        "machine": machine(),
    }


def until(points: Sequence[Sequence[float]], goal: float, column: int) -> float | None:
    """Seconds (column 1) or tokens (2) until the accuracy first reaches a goal, by straight lines
    between evaluations; None where it never does.
    """
    before: Sequence[float] | None = None
    for point in points:
        if point[3] >= goal:
            if before is None:
                return point[column]
            share = (goal - before[3]) / (point[3] - before[3])
            return before[column] + share * (point[column] - before[column])
        before = point
    return None


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The result as Markdown."""
    runs = {
        side: {row["seed"]: row for row in rows if (row["kind"], row["side"]) == ("runs", side)}
        for side in SIDES
    }
    seeds = sorted(set.intersection(*(set(found) for found in runs.values())))
    if not seeds:
        return ["Not measured yet."]
    lines = [
        f"{rows[-1]['machine']}. {len(seeds)} seeds, mean and 95 % interval (Student's t); {STEPS} "
        "learner steps of 16 groups x 8.",
        "",
        "| | " + " | ".join(SIDES) + " | difference |",
        "|---|" + "---|" * (len(SIDES) + 1),
    ]

    def row(what: str, shown: Callable[[list[dict[str, Any]]], str], over: str) -> None:
        cells = [shown([runs[side][seed] for seed in seeds]) for side in SIDES]
        lines.append(f"| {what} | {' | '.join(cells)} | {over} |")

    row("best places", lambda found: found[0]["places"], "")
    row("best rate", lambda found: f"{found[0]['lr']:g}", "")

    def plain(name: str, digits: str) -> Callable[[list[dict[str, Any]]], str]:
        return lambda found: numbers([one[name] for one in found], digits)

    row("groups per second", plain("groups_per_s", ".1f"), ratio(runs, seeds, "groups_per_s"))
    row("learner idle", lambda found: cell([one["idle"] for one in found]), "")
    row("mean lag", plain("lag_mean", ".2f"), "")
    for column, unit in ((1, "seconds"), (2, "tokens")):
        for goal in GOALS:
            reached = {
                side: [until(runs[side][seed]["points"], goal, column) for seed in seeds]
                for side in SIDES
            }
            cells = []
            for found in reached.values():
                known = [one for one in found if one is not None]
                missed = [f"never in {len(found) - len(known)}"] if len(known) < len(found) else []
                cells.append(", ".join(([numbers(known, ",.0f")] if known else []) + missed))
            both = [
                one / other
                for one, other in zip(*(reached[side] for side in SIDES), strict=True)
                if one is not None and other is not None
            ]
            lines.append(
                f"| {unit} until {goal:.0%} | {' | '.join(cells)} | "
                f"{numbers(both, '.2f') + ' times' if both else '-'} |"
            )
    last = {
        side: [statistics.mean(p[3] for p in runs[side][seed]["points"][-3:]) for seed in seeds]
        for side in SIDES
    }
    over = [mine - theirs for theirs, mine in zip(*last.values(), strict=True)]
    cells = [cell(values) for values in last.values()]
    lines.append(
        f"| accuracy, last three evaluations | {' | '.join(cells)} | {difference(over)} points |"
    )
    return lines


def ratio(runs: dict[str, dict[int, dict[str, Any]]], seeds: Sequence[int], name: str) -> str:
    """The asynchronous side's value in those of the synchronous one, seed by seed."""
    first, second = (runs[side] for side in SIDES)
    return numbers([second[seed][name] / first[seed][name] for seed in seeds], ".2f") + " times"


def numbers(values: Sequence[float], digits: str) -> str:
    """Mean and 95 % interval."""
    mean, half = interval(values)
    return f"{mean:{digits}}" + ("" if half != half else f" ± {half:{digits}}")


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy over seconds and over tokens: a line per seed, and the mean of its side."""
    import matplotlib as mpl
    import numpy as np

    mpl.use("Agg")
    from matplotlib import pyplot

    colours = dict(zip(SIDES, ("#d9722e", "#3b82c4"), strict=True))
    figure, axes = pyplot.subplots(1, 2, figsize=(9.6, 3.2), sharey=True, layout="constrained")
    for column, (panel, unit) in enumerate(zip(axes, ("seconds", "tokens"), strict=True), start=1):
        scale = 1_000 if unit == "tokens" else 1
        for side, colour in colours.items():
            found = [row for row in rows if (row["kind"], row["side"]) == ("runs", side)]
            curves = [np.array(row["points"]) for row in found]
            end = min(curve[-1, column] for curve in curves)
            grid = np.linspace(0, end, 200)
            values = np.array([np.interp(grid, one[:, column], one[:, 3]) for one in curves])
            half = [interval(list(point))[1] for point in values.T] if len(values) > 1 else 0
            mean = values.mean(0)
            at = grid / scale
            panel.plot(at, 100 * mean, color=colour, label=side)
            panel.fill_between(
                at, 100 * (mean - half), 100 * (mean + half), color=colour, alpha=0.2, lw=0
            )
        panel.set_xlabel("thousand tokens" if unit == "tokens" else unit)
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("held-out accuracy, %")
    axes[0].legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.async_vs_sync",
        description="What is learnt in the same time, asynchronously and synchronously.",
    )
    default = ROOT / "benchmarks" / "results" / "async_vs_sync.jsonl"
    parser.add_argument("--rows", type=Path, default=default, help="one JSON row per run")
    parser.add_argument("--docs", type=Path, help="write the table into that page")
    parser.add_argument("--picture", type=Path, help="draw the curves into that PNG file")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="async_vs_sync-") as folder:
        while not arguments.table:
            rows = read_rows(arguments.rows)
            done = {Job.of(row) for row in rows}
            job = next((one for one in jobs(rows) if one not in done), None)
            if job is None:
                break
            row = job.__dict__ | run(job, Path(folder) / f"run-{len(rows)}")
            append(arguments.rows, row)
            accuracy = f", {row['points'][-1][3]:.1%}" if row["points"] else ""
            print(
                f"{job}: {row['groups_per_s']:.1f} groups/s, idle {row['idle']:.1%}, lag "
                f"{row['lag_mean']:.2f}{accuracy}",
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
    main()
