"""What ends the swings of a run without a known end: `python -m benchmarks.open_ended
[--rows docs/open_ended.jsonl] [--docs docs/benchmarks.md]`.

Runs in: one process with an engine of its own; several may work at once on the same file of rows
(`--part 1/2`, `--part 2/2`).

The quickstart's model learns addition for 240 learner steps at a forced lag, with the learning rate
of `benchmarks.staleness`: constant, and with `learner.schedule: settle`, which knows no end. Held-
out accuracy is taken every 20 steps of the second half: what counts is its mean and its worst
value, since an open-ended run is ended anywhere. Beside it the accuracy of weights averaged with a
decay of 0.9 per step.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.rows import OfRow, append, read_rows
from benchmarks.staleness import FULL, ROOT, SMOKE, Job, Scale, config_of, start
from benchmarks.staleness_run import Bench
from benchmarks.staleness_table import cell, difference
from benchmarks.tables import write_docs

STEPS, DECAY, SEEDS = 240, 0.9, 5
RATES = {("tis", 16): 2e-4, ("tis", 32): 2e-4, ("topr", 32): 4e-4}
"""Loss and lag -> peak learning rate, as tuned by `benchmarks.staleness`."""
SCHEDULES = ("constant", "settle")


@dataclass(frozen=True)
class Open(OfRow):
    """One run."""

    arm: str
    lag: int
    schedule: str
    seed: int


def jobs(cells: Sequence[tuple[str, int]], seeds: int) -> Iterator[Open]:
    """What is to be done, in its order."""
    for seed in range(seeds):
        for arm, lag in cells:
            yield from (Open(arm, lag, schedule, seed) for schedule in SCHEDULES)


async def work(arguments: argparse.Namespace, scale: Scale, directory: str) -> None:
    """Run what is open until nothing is."""
    part, parts = (int(number) for number in arguments.part.split("/"))
    every = max(scale.steps // 12, 1)
    evaluated = range(scale.steps // 2, scale.steps + 1, every)
    done = {Open.of(row) for row in read_rows(arguments.rows)}
    cells = list(RATES) if not arguments.smoke else [("tis", 16)]
    mine = [
        one
        for one in jobs(cells, scale.seeds)
        if one not in done and zlib.crc32(repr(one).encode()) % parts == part - 1
    ]
    bench: Bench | None = None
    try:
        for one in mine:
            if bench is None:
                bench = await start("addition", scale, directory)
            job = Job("run", "addition", one.arm, one.lag, one.seed, RATES[one.arm, one.lag])
            config = config_of("addition", job, scale, directory, schedule=one.schedule)
            started = time.monotonic()
            result = await bench.train(config, seed=one.seed, evaluated=evaluated, decay=DECAY)
            append(arguments.rows, one.__dict__ | {"lr": job.lr, "steps": scale.steps} | result)
            print(
                f"{one}: {result['accuracy']:.1%}, worst {min(result['evaluations']):.1%}, "
                f"averaged {result['averaged']:.1%} in {time.monotonic() - started:.0f} s",
                flush=True,
            )
    finally:
        if bench is not None:
            await bench.close()


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The result as Markdown."""
    lines = [
        f"Held-out greedy accuracy of {STEPS} learner steps at a forced lag, every 20 steps of the "
        f"second half; mean and 95 % interval over {len({row['seed'] for row in rows})} seeds "
        f"({len(rows)} runs). Averaged: weights with a decay of {DECAY} per step, at the end. "
        "Rate divided by: at the end, run by run.",
        "",
        "| loss, lag | schedule | mean | worst of each run | last | averaged | rate divided by |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, lag in RATES:
        of = {
            schedule: sorted(
                (row for row in rows if Open.of(row) == Open(arm, lag, schedule, row["seed"])),
                key=lambda row: row["seed"],
            )
            for schedule in SCHEDULES
        }
        for schedule, found in of.items():
            cells = [
                cell([row["accuracy"] for row in found]),
                cell([min(row["evaluations"]) for row in found]),
                cell([row["evaluations"][-1] for row in found]),
                cell([row["averaged"] for row in found]),
                ", ".join(f"{row['lr'] / row['rates'][-1]:.0f}" for row in found) or "-",
            ]
            lines.append(f"| {arm}, {lag} | {schedule} | {' | '.join(cells)} |")
        pairs = [
            (one, other)
            for one in of["settle"]
            for other in of["constant"]
            if one["seed"] == other["seed"]
        ]
        over = [
            difference([read(one) - read(other) for one, other in pairs])
            for read in (
                lambda row: row["accuracy"],
                lambda row: min(row["evaluations"]),
                lambda row: row["evaluations"][-1],
                lambda row: row["averaged"],
            )
        ]
        lines.append(f"| {arm}, {lag} | points that settle has more | {' | '.join(over)} | |")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.open_ended",
        description="Held-out accuracy of runs without a known end, at forced lags.",
    )
    default = ROOT / "docs" / "open_ended.jsonl"
    parser.add_argument("--rows", type=Path, default=default, help="one JSON row per run")
    parser.add_argument("--part", default="1/1", help="which part of the runs this process does")
    parser.add_argument("--docs", type=Path, help="write the table into that page")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps of everything; the figures mean nothing"
    )
    arguments = parser.parse_args(argv)
    scale = SMOKE if arguments.smoke else replace(FULL, steps=STEPS, seeds=SEEDS)
    if not arguments.table:
        with tempfile.TemporaryDirectory(prefix="async_grpo-staleness-") as directory:
            asyncio.run(work(arguments, scale, directory))
    lines = table(read_rows(arguments.rows))
    print("\n".join(lines))
    if arguments.docs is not None:
        write_docs(arguments.docs, lines, benchmark="open_ended")


if __name__ == "__main__":
    main()
