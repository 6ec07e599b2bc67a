"""What old data costs, and which loss bears it: `python -m benchmarks.staleness [--rows
docs/staleness.jsonl] [--docs docs/benchmarks.md]`.

Runs in: one process with an engine of its own; several may work at once on the same file of rows
(`--part 1/2`, `--part 2/2`).

A model is trained at a forced lag of 0 to 64 learner steps by each of several losses, all with a
learning rate that falls linearly to 0, with five seeds. A seed fixes the problems, not the
responses. What is run, in this order:

    tune     every loss at lag 0 and 16, the same rates and seeds for each; the best mean is taken,
             that of lag 16 for larger lags too
    run      addition, the quickstart's model: every loss at every lag
    far      the two losses that are best at lag 32, at lag 64
    run      sorting, another kind of task, and a larger model: some losses at some lags, with the
             rates of addition

A run counts by the mean of three evaluations over its last sixth. One row per run is appended to
the file, so that it can be stopped and started again at will.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_grpo.config.load import load_config
from async_grpo.config.schema import Config
from async_grpo.contrib.warm_start.cache import ensure_warm_start
from async_grpo.errors import NonFinite, RunError
from benchmarks import staleness_table
from benchmarks.rows import OfRow, append, read_rows
from benchmarks.staleness_run import Bench
from benchmarks.tables import write_docs

ROOT = Path(__file__).resolve().parents[1]
LAGS, FAR, TUNED_AT = (0, 8, 16, 32), 64, (0, 16)
RATES = (1e-4, 2e-4, 4e-4, 8e-4)
TUNING_SEEDS = (100, 101)
"""Of no later run."""

TIS: dict[str, Any] = {"level": "token", "mode": "truncate", "upper": 2.0}
HARMONIC: dict[str, Any] = {"kind": "harmonic", "rate": 1.0}
WIDE = {"clip_ratio_low": 0.6, "clip_ratio_high": 1.5}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "naive": (
        "old data taken for new: ratios against the learner's own policy, no weights",
        {"anchor": "recomputed"},
    ),
    "tis": (
        "the same with truncated importance weights, at most 2",
        {"anchor": "recomputed", "importance": TIS},
    ),
    "topr": (
        "no interval: right answers count in full, wrong ones by the ratio of the whole response, "
        "at most 1",
        {"policy_loss": "topr", "clip_ratio_low": None, "clip_ratio_high": None},
    ),
    "constant": (
        "ratios against the policy that sampled, constant clip interval",
        {"anchor": "behavior"},
    ),
    "wide": ("the same with an interval of 0.4 to 2.5", {"anchor": "behavior"} | WIDE),
    "widening": (
        "the same with an interval that widens with the lag k, by 1 + k / 8, up to 0.4 to 2.5",
        {
            "anchor": "behavior",
            "policy_loss": "widening",
            "plugins": ["benchmarks.widening"],
            "clip_schedule": {"kind": "harmonic", "rate": 0.125},
        },
    ),
    "bounded": (
        "the same with staleness-bounded clipping: it narrows with the lag (harmonic)",
        {"anchor": "behavior", "clip_schedule": HARMONIC},
    ),
    "combined": (
        "staleness-bounded clipping around the learner's own policy, with truncated importance "
        "weights",
        {"anchor": "recomputed", "importance": TIS, "clip_schedule": HARMONIC},
    ),
}
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "addition": ("the quickstart's task and model, 0.3 M weights", {"name": "arithmetic"}, {}),
    "sorting": (
        "five digits to be sorted, the same model",
        {"name": "benchmarks.sorting:Sorting"},
        {},
    ),
    "larger": (
        "addition with a model of 2.2 M weights",
        {"name": "arithmetic"},
        {"hidden_size": 256, "intermediate_size": 512, "layers": 3},
    ),
}
"""Name -> words, task, what differs from the quickstart's warm start."""
MORE = {
    "sorting": [(arm, lag) for lag in (0, 16, 32) for arm in ("constant", "tis", "topr")],
    "larger": [("tis", 0), ("tis", 16)],
}
"""Setting -> losses and lags beside the table of addition."""


@dataclass(frozen=True)
class Job(OfRow):
    """One run. kind: `tune` or `run`."""

    kind: str
    setting: str
    arm: str
    lag: int
    seed: int
    lr: float


@dataclass(frozen=True)
class Scale:
    """How large the experiment is."""

    steps: int = 120
    batch: int = 16
    problems: int = 1000
    seeds: int = 5
    lags: tuple[int, ...] = LAGS
    tuned_at: tuple[int, ...] = TUNED_AT
    far: int | None = FAR
    rates: tuple[float, ...] = RATES
    tuning_seeds: tuple[int, ...] = TUNING_SEEDS
    arms: tuple[str, ...] = tuple(ARMS)
    more: tuple[str, ...] = tuple(MORE)
    warm_start: dict[str, int] = field(default_factory=dict)
    """What differs from the quickstart's warm start."""


FULL = Scale()
SMOKE = Scale(
    steps=4,
    batch=4,
    problems=20,
    seeds=1,
    lags=(0, 2),
    tuned_at=(0,),
    far=None,
    rates=(1e-4,),
    tuning_seeds=(100,),
    arms=("topr", "widening"),
    more=(),
    warm_start={"max_steps": 20, "blur_max_steps": 0},
)


def config_of(
    setting: str, job: Job | None, scale: Scale, directory: str, *, schedule: str = "linear"
) -> Config:
    """The quickstart with the task and model of a setting, and the loss, lag and learning rate of a
    job.
    """
    _, task, warm_start = SETTINGS[setting]
    config = load_config(ROOT / "configs" / "quickstart.yaml").model_dump()
    config["run"] |= {"name": "staleness", "dir": directory, "total_steps": scale.steps}
    config["rollout"]["rollout_batch_size"] = scale.batch
    config["learner"] |= {"ppo_mini_batch_size": scale.batch // 2, "schedule": schedule}
    config["evaluation"] |= {"max_samples": scale.problems, "n": 0}
    config["algorithm"]["clip_schedule"] = {"kind": "constant"}
    config["task"] |= task
    config["model"]["warm_start"] |= scale.warm_start | warm_start
    if job is not None:
        lag = {"max_staleness": job.lag, "outstanding": (job.lag + 1) * scale.batch}
        config["replay"] |= lag
        config["learner"]["lr"] = job.lr
        config["algorithm"] |= ARMS[job.arm][1]
    return Config.model_validate(config)


def tuned(rows: Sequence[dict[str, Any]], arm: str, lag: int, scale: Scale) -> float | None:
    """The learning rate of a loss at a lag, the best of the nearest smaller lag at which it was
    tuned; None before that is complete.
    """
    at = max(one for one in scale.tuned_at if one <= lag)
    found: dict[float, list[float]] = {rate: [] for rate in scale.rates}
    for row in rows:
        if (row["kind"], row["arm"], row["lag"]) == ("tune", arm, at) and row["lr"] in found:
            found[row["lr"]].append(row["accuracy"])
    if any(len(values) < len(scale.tuning_seeds) for values in found.values()):
        return None
    return max(found, key=lambda rate: statistics.mean(found[rate]))


def far_arms(rows: Sequence[dict[str, Any]], scale: Scale) -> list[str]:
    """The two losses with the best mean at the largest lag of the table, once that is complete."""
    found = {
        arm: [
            row["accuracy"]
            for row in rows
            if (row["kind"], row["setting"], row["arm"], row["lag"])
            == ("run", "addition", arm, scale.lags[-1])
        ]
        for arm in scale.arms
    }
    if any(len(values) < scale.seeds for values in found.values()):
        return []
    return sorted(found, key=lambda arm: -statistics.mean(found[arm]))[:2]


def jobs(rows: Sequence[dict[str, Any]], scale: Scale) -> Iterator[Job]:
    """What is to be done, in its order; without what is not yet known."""
    for seed in scale.tuning_seeds:
        for lag in scale.tuned_at:
            yield from (
                Job("tune", "addition", arm, lag, seed, rate)
                for rate in scale.rates
                for arm in scale.arms
            )

    def runs(setting: str, cells: Sequence[tuple[str, int]]) -> Iterator[Job]:
        for seed in range(scale.seeds):
            for arm, lag in cells:
                if (rate := tuned(rows, arm, lag, scale)) is not None:
                    yield Job("run", setting, arm, lag, seed, rate)

    yield from runs("addition", [(arm, lag) for lag in scale.lags for arm in scale.arms])
    if scale.far is not None:
        yield from runs("addition", [(arm, scale.far) for arm in far_arms(rows, scale)])
    for setting in scale.more:
        yield from runs(setting, MORE[setting])


def next_job(path: Path, scale: Scale, *, part: int, parts: int) -> Job | None:
    """The first job of this part that has no row yet."""
    rows = read_rows(path)
    done = {Job.of(row) for row in rows}
    mine = (job for job in jobs(rows, scale) if zlib.crc32(repr(job).encode()) % parts == part)
    return next((job for job in mine if job not in done), None)  # the same in every process


async def work(arguments: argparse.Namespace, scale: Scale, directory: str) -> None:
    """Run what is open until nothing is, or the time is over."""
    deadline = time.monotonic() + 60 * arguments.minutes
    part, parts = (int(number) for number in arguments.part.split("/"))
    bench: Bench | None = None
    setting = ""
    try:
        while time.monotonic() < deadline:
            job = next_job(arguments.rows, scale, part=part - 1, parts=parts)
            if job is None:
                return
            if bench is None or job.setting != setting:
                if bench is not None:
                    await bench.close()
                setting, bench = job.setting, await start(job.setting, scale, directory)
            try:
                config = config_of(job.setting, job, scale, directory)
                result = await bench.train(config, seed=job.seed)
                del result["rates"]  # the schedule says them
            except NonFinite as error:
                result = {"accuracy": 0.0, "failed": str(error)}
            row = job.__dict__ | {"steps": scale.steps, "batch": scale.batch} | result
            append(arguments.rows, row)
            print(
                f"{job.kind} {job.setting} {job.arm} lag {job.lag} seed {job.seed} lr {job.lr:g}: "
                f"{row['accuracy']:.1%} in {row.get('seconds', 0):.0f} s",
                flush=True,
            )
    finally:
        if bench is not None:
            await bench.close()


async def start(setting: str, scale: Scale, directory: str) -> Bench:
    """Start an engine with the warm-started model of a setting."""
    base = config_of(setting, None, scale, directory)
    model_dir = await asyncio.to_thread(ensure_warm_start, base, progress=print, timeout_s=1800.0)
    bench = Bench(base, model_dir)
    await bench.start()
    return bench


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.staleness",
        description="Held-out accuracy at forced lags, for several losses.",
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
    rows = read_rows(arguments.rows)
    rates = {
        (arm, lag): tuned(rows, arm, lag, scale) for arm in scale.arms for lag in scale.tuned_at
    }
    words = {arm: text for arm, (text, _) in ARMS.items() if arm in scale.arms}
    settings = {name: text for name, (text, _, _) in SETTINGS.items()}
    lines = staleness_table.table(rows, rates=rates, arms=words, settings=settings)
    print("\n".join(lines))
    if arguments.docs is not None:
        write_docs(arguments.docs, lines, benchmark="staleness")


if __name__ == "__main__":
    main()
