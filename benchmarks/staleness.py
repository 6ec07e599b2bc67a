"""What old data costs, and which loss bears it: `python -m benchmarks.staleness [--rows
docs/staleness.jsonl] [--docs docs/benchmarks.md]`.

Runs in: one process with an engine of its own; several may work at once on the same file of rows
(`--part 1/2`, `--part 2/2`).

The model and the task of the quickstart are trained at a forced lag of 0 to 32 learner steps by
each of six losses, with five seeds. First the learning rate of every loss is tuned at lag 0 with
the same budget: of the rates whose accuracy is within a point of the best, the highest. Then it is
fixed for all lags. One row per run is appended to the file, so that it can be stopped and started
again at will.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_grpo.config.load import load_config
from async_grpo.config.schema import Config
from async_grpo.errors import NonFinite, RunError
from async_grpo.warm_start.cache import ensure_warm_start
from benchmarks.staleness_run import Bench
from benchmarks.tables import aim, write_docs

ROOT = Path(__file__).resolve().parents[1]
LAGS = (0, 1, 4, 8, 16, 32)
RATES = (1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3)
TUNING_SEEDS = (100, 101)
"""Of no later run."""
WITHIN = 0.01
"""How far below the best a learning rate may be in the tuning."""
HARMFUL, HARM_LAG = 0.10, 16
"""What the naive loss must lose at that lag, or the experiment shows nothing."""
PAIRS = (("bounded", "constant"), ("combined", "tis"))
"""Losses that differ in the clip schedule alone."""
STUDENT_95 = {
    2: 12.706,
    3: 4.303,
    4: 3.182,
    5: 2.776,
    6: 2.571,
    7: 2.447,
    8: 2.365,
    9: 2.306,
    10: 2.262,
}
"""Two-sided 95 % quantile of Student's t for so many values."""

TIS: dict[str, Any] = {"level": "token", "mode": "truncate", "upper": 2.0}
HARMONIC: dict[str, Any] = {"kind": "harmonic", "rate": 1.0}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "naive": (
        "old data taken for new: ratios against the learner's own policy, no weights",
        {"anchor": "recomputed"},
    ),
    "tis": (
        "the same with truncated importance weights, at most 2",
        {"anchor": "recomputed", "importance": TIS},
    ),
    "decoupled": (
        "decoupled PPO: importance weights above 5 masked",
        {"anchor": "recomputed", "importance": {"level": "token", "mode": "mask", "upper": 5.0}},
    ),
    "constant": (
        "ratios against the policy that sampled, constant clip interval",
        {"anchor": "behavior"},
    ),
    "bounded": (
        "the same with staleness-bounded clipping (harmonic)",
        {"anchor": "behavior", "clip_schedule": HARMONIC},
    ),
    "combined": (
        "staleness-bounded clipping around the learner's own policy, with truncated "
        "importance weights",
        {"anchor": "recomputed", "importance": TIS, "clip_schedule": HARMONIC},
    ),
}


@dataclass(frozen=True)
class Job:
    """One run. kind: `tune` or `run`."""

    kind: str
    arm: str
    lag: int
    seed: int
    lr: float

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes it another run than others."""
        return self.kind, self.arm, self.lag, self.seed, self.lr


@dataclass(frozen=True)
class Scale:
    """How large the experiment is."""

    steps: int = 120
    batch: int = 16
    problems: int = 1000
    seeds: int = 5
    lags: tuple[int, ...] = LAGS
    rates: tuple[float, ...] = RATES
    tuning_seeds: tuple[int, ...] = TUNING_SEEDS
    arms: tuple[str, ...] = tuple(ARMS)
    warm_start: dict[str, int] = field(default_factory=dict)
    """What differs from the quickstart's warm start."""


FULL = Scale()
SMOKE = Scale(
    steps=4,
    batch=4,
    problems=20,
    seeds=1,
    lags=(0, 2),
    rates=(1e-4,),
    tuning_seeds=(100,),
    arms=("naive", "combined"),
    warm_start={"max_steps": 20, "blur_max_steps": 0},
)


def config_of(job: Job | None, scale: Scale, directory: str) -> Config:
    """The quickstart's model and task with the loss, lag and learning rate of a job."""
    config = load_config(ROOT / "configs" / "quickstart.yaml").model_dump()
    config["run"] |= {"name": "staleness", "dir": directory, "total_steps": scale.steps}
    config["rollout"]["rollout_batch_size"] = scale.batch
    config["learner"] |= {"ppo_mini_batch_size": scale.batch // 2}
    config["evaluation"] |= {"max_samples": scale.problems, "n": 0}
    config["algorithm"]["clip_schedule"] = {"kind": "constant"}
    config["model"]["warm_start"] |= scale.warm_start
    if job is not None:
        config["replay"]["max_staleness"] = job.lag
        config["learner"]["lr"] = job.lr
        config["algorithm"] |= ARMS[job.arm][1]
    return Config.model_validate(config)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of finished runs; a line that was cut off is none."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            print(f"a line of {path} is cut off and left out", file=sys.stderr)
    return rows


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a row in one write, since another part may write to the same file."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def tuned(rows: Sequence[dict[str, Any]], arm: str, scale: Scale) -> float | None:
    """The learning rate of a loss, once its tuning is complete."""
    found = {
        rate: [
            row["accuracy"]
            for row in rows
            if row["kind"] == "tune" and row["arm"] == arm and row["lr"] == rate
        ]
        for rate in scale.rates
    }
    if any(len(values) < len(scale.tuning_seeds) for values in found.values()):
        return None
    means = {rate: statistics.mean(values) for rate, values in found.items()}
    return max(rate for rate, mean in means.items() if mean >= max(means.values()) - WITHIN)


def jobs(rows: Sequence[dict[str, Any]], scale: Scale) -> Iterator[Job]:
    """What is to be done, tuning first, then seed after seed."""
    for seed in scale.tuning_seeds:
        yield from (Job("tune", arm, 0, seed, rate) for rate in scale.rates for arm in scale.arms)
    rates = {arm: tuned(rows, arm, scale) for arm in scale.arms}
    for seed in range(scale.seeds):
        yield from (
            Job("run", arm, lag, seed, rates[arm])
            for lag in scale.lags
            for arm in scale.arms
            if rates[arm] is not None
        )


def next_job(path: Path, scale: Scale, *, part: int, parts: int) -> Job | None:
    """The first job of this part that has no row yet."""
    rows = read_rows(path)
    done = {Job(row["kind"], row["arm"], row["lag"], row["seed"], row["lr"]).key for row in rows}
    mine = (
        job for job in jobs(rows, scale) if zlib.crc32(repr(job.key).encode()) % parts == part
    )  # the same in every process
    return next((job for job in mine if job.key not in done), None)


async def work(arguments: argparse.Namespace, scale: Scale, directory: str) -> None:
    """Run what is open until nothing is, or the time is over."""
    base = config_of(None, scale, directory)
    model_dir = await asyncio.to_thread(ensure_warm_start, base, progress=print, timeout_s=1800.0)
    deadline = time.monotonic() + 60 * arguments.minutes
    part, parts = (int(number) for number in arguments.part.split("/"))
    bench = Bench(base, model_dir)
    await bench.start()
    try:
        while time.monotonic() < deadline:
            job = next_job(arguments.rows, scale, part=part - 1, parts=parts)
            if job is None:
                return
            try:
                result = await bench.train(config_of(job, scale, directory), seed=job.seed)
            except NonFinite as error:
                result = {"accuracy": 0.0, "failed": str(error)}
            row = job.__dict__ | {"steps": scale.steps, "batch": scale.batch} | result
            append(arguments.rows, row)
            print(
                f"{job.kind} {job.arm} lag {job.lag} seed {job.seed} lr {job.lr:g}: "
                f"{row['accuracy']:.1%} in {row.get('seconds', 0):.0f} s",
                flush=True,
            )
    finally:
        await bench.close()


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval (Student's t)."""
    if len(values) < 2:
        return statistics.mean(values), math.nan
    return statistics.mean(values), STUDENT_95[len(values)] * statistics.stdev(values) / math.sqrt(
        len(values)
    )


def cell(values: Sequence[float]) -> str:
    """Mean and 95 % interval in percent, and how many runs if they are not all there."""
    if not values:
        return "-"
    mean, half = interval(values)
    return f"{mean:.1%}" + ("" if math.isnan(half) else f" ± {100 * half:.1f}")


def table(rows: Sequence[dict[str, Any]], scale: Scale) -> list[str]:
    """The result as Markdown."""
    runs = [row for row in rows if row["kind"] == "run"]
    accuracy = {
        (arm, lag): [row["accuracy"] for row in runs if row["arm"] == arm and row["lag"] == lag]
        for arm in ARMS
        for lag in scale.lags
    }
    counts = sorted({len(values) for values in accuracy.values()})
    caption = (
        f"Held-out accuracy (greedy, {scale.problems} problems) after {scale.steps} "
        f"learner steps of {scale.batch} groups x 8, two updates each; mean "
        "and 95 % interval over "
        f"{counts[0]}{f' to {counts[-1]}' if len(counts) > 1 else ''} seeds. "
        f"{platform.machine()}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores; the machine's speed does not matter."
    )
    lines = [
        caption,
        "",
        "| loss | learning rate | " + " | ".join(f"lag {lag}" for lag in scale.lags) + " |",
        "|---" * (2 + len(scale.lags)) + "|",
    ]
    for arm in ARMS:
        rate = tuned(rows, arm, scale)
        lines.append(
            f"| {arm} | {'-' if rate is None else f'{rate:g}'} | "
            + " | ".join(cell(accuracy[arm, lag]) for lag in scale.lags)
            + " |"
        )
    lines += [
        "",
        *[f"- `{arm}`: {text}" for arm, (text, _) in ARMS.items()],
        "",
        *gains(runs, scale),
        *aims(accuracy, scale),
    ]
    return lines


def gains(runs: Sequence[dict[str, Any]], scale: Scale) -> Iterator[str]:
    """What the narrowing of the clip interval adds, seed by seed."""
    accuracy = {(row["arm"], row["lag"], row["seed"]): row["accuracy"] for row in runs}
    yield (
        "What staleness-bounded clipping adds: points, the same seed with and without it (at "
        "lag 0 they are the same loss, so that column is chance):"
    )
    yield from (
        "",
        "| | " + " | ".join(f"lag {lag}" for lag in scale.lags) + " | different from 0 |",
        "|---" * (2 + len(scale.lags)) + "|",
    )
    for schedule, constant in PAIRS:
        cells, proven = [], []
        for lag in scale.lags:
            seeds = [
                seed
                for arm, other, seed in accuracy
                if (arm, other) == (schedule, lag) and (constant, lag, seed) in accuracy
            ]
            found = [
                100 * (accuracy[schedule, lag, seed] - accuracy[constant, lag, seed])
                for seed in seeds
            ]
            mean, half = interval(found) if found else (math.nan, math.nan)
            cells.append(
                "-"
                if not found
                else f"{mean:+.1f}" + ("" if math.isnan(half) else f" ± {half:.1f}")
            )
            proven += [f"lag {lag}"] if abs(mean) > half else []
        yield (
            f"| {schedule} - {constant} | {' | '.join(cells)} | {', '.join(proven) or 'nowhere'} |"
        )
    yield ""


def aims(accuracy: dict[tuple[str, int], list[float]], scale: Scale) -> Iterator[str]:
    """Whether the experiment shows anything, and the aims."""

    def mean(arm: str, lag: int) -> float:
        return statistics.mean(accuracy[arm, lag]) if accuracy.get((arm, lag)) else math.nan

    if HARM_LAG not in scale.lags or math.isnan(mean("naive", HARM_LAG)):
        yield "Not complete: no verdict yet."
        return
    loss = mean("naive", 0) - mean("naive", HARM_LAG)
    yield (
        f"The naive loss loses {100 * loss:.1f} points at lag {HARM_LAG}: "
        + (
            "old data hurts here, and the losses can be told apart."
            if loss >= HARMFUL
            else "too little for this experiment to show anything."
        )
    )
    yield from ("", "| aim | measured | |", "|---|---|---|")
    for arm in ("bounded", "combined"):
        for least, lags in (
            (0.99, [lag for lag in scale.lags if 0 < lag <= 16]),
            (0.95, [lag for lag in scale.lags if lag > 16]),
        ):
            shares = {lag: [one / mean(arm, 0) for one in accuracy[arm, lag]] for lag in lags}
            worst = min(shares, key=lambda lag: mean(arm, lag))
            met = mean(arm, worst) >= least * mean(arm, 0)
            yield aim(
                f"{arm}: at least {least:.0%} of lag 0 at lag {', '.join(map(str, lags))}",
                f"{cell(shares[worst])} at lag {worst}",
                met=met,
            )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.staleness",
        description="Held-out accuracy at forced lags, for six losses.",
    )
    parser.add_argument(
        "--rows",
        type=Path,
        default=ROOT / "docs" / "staleness.jsonl",
        help="one JSON row per run; those that are there are not run again",
    )
    parser.add_argument(
        "--part", default="1/1", help="which part of the runs this process does, for instance 1/2"
    )
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="begin no run after so many minutes"
    )
    parser.add_argument(
        "--docs", type=Path, help="write the table between this benchmark's markers of that page"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps of everything; the figures mean nothing"
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help="run nothing, print the table of the rows that are there",
    )
    arguments = parser.parse_args(argv)
    scale = SMOKE if arguments.smoke else FULL
    if not arguments.table:
        arguments.rows.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="async_grpo-staleness-") as directory:
            try:
                asyncio.run(work(arguments, scale, directory))
            except RunError as error:
                raise SystemExit(f"error: {error}") from error
    lines = table(read_rows(arguments.rows), scale)
    print("\n".join(lines))
    if arguments.docs is not None:
        write_docs(arguments.docs, lines, benchmark="staleness")


if __name__ == "__main__":
    main()
