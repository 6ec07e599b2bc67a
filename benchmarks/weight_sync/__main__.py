"""What a publication of weights costs: `python -m benchmarks.weight_sync [--only stage engine]
[--ways adapter] [--quick] [--docs FILE] [--out FILE]`.

    stage     a DeepSpeed learner of two ranks copies its weights into shared memory, ZeRO-1 and
              ZeRO-3      against memcpy in the same process
    engine    a vLLM engine at work takes them: seconds by phase, and rollout time lost
              against the same work undisturbed

The models are Qwen2 with random weights of 1, 14 and 100 million parameters in float32, and one of
500 million in bfloat16, whose learner has one rank. Each learner rank and each engine has one
thread. Figures that are compared are taken in turn, in rounds; printed is the median with the
smallest and the largest. What does not fit into the memory that is free is left out, and the table
says so.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.harness import (
    Part,
    Report,
    aim,
    apart,
    arguments_of,
    kilobytes,
    machine,
    quiet,
    spread,
)
from benchmarks.weight_sync.engine import EVERY_S, TIMEOUT_S, WAYS, EngineResult, engine_side
from benchmarks.weight_sync.learner import RankResult, staged
from benchmarks.weight_sync.models import SIZES, Size

PARTS = ["stage", "engine"]
COPY_AIM, ROLLOUT_AIM, ADAPTER_AIM = 0.8, 0.02, 0.01
ROLLOUT_AIM_SIZES = ("1M", "14M")


def told(line: str) -> str:
    """The line, shown as soon as it is there: a part takes minutes."""
    print(line, file=sys.stderr, flush=True)
    return line


def left_out(size: Size) -> str:
    """Why the learner of this size is not measured, or ""."""
    free = kilobytes("/proc/meminfo", "MemAvailable") * 1024e-9
    return (
        f"left out: needs about {size.needs_gb:.0f} GB, {free:.1f} GB are free"
        if free < size.needs_gb
        else ""
    )


def stage_part(models: dict[str, str], *, quick: bool, directory: Path) -> Part:
    """Every size with ZeRO-1, and with ZeRO-3 where there are two ranks."""
    lines = [
        "stage: rank 0 of the learner copies all weights into a shared-memory segment",
        "",
        "| model | MB | ZeRO, ranks | copy ms | copy GB/s | memcpy GB/s | of memcpy | "
        "checksums ms | stage ms, unverified / verified |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    memory = [
        "",
        "memory: resident peak of the first stage above the level before it, MB",
        "",
        "| model | MB | ZeRO | rank 0 | of it the segment | rank 1 |",
        "|---|---|---|---|---|---|",
    ]
    aims, values = [], {}
    for name, model in models.items():
        size = SIZES[name]
        for zero_stage in (1, 3) if size.ranks > 1 else (1,):
            if reason := left_out(size):
                lines.append(f"| {name} | {reason} |" + " |" * 7)
                continue
            rounds = 3 if quick else size.rounds
            found = staged(size, model, zero_stage=zero_stage, rounds=rounds, fallback=directory)
            values[f"{name} zero{zero_stage}"] = [asdict(one) for one in found]
            lines.append(told(stage_line(name, zero_stage, found)))
            megabytes = f"{found[0].nbytes / 2**20:,.1f}"
            peaks = (
                f"{found[0].peak_mb:,.1f} | {found[0].segment_mb:,.1f} | "
                f"{found[1].peak_mb if len(found) > 1 else 0:,.1f}"
            )
            memory.append(told(f"| {name} | {megabytes} | {zero_stage} | {peaks} |"))
            if zero_stage == 1:
                ratio = statistics.median(found[0].of_memcpy)
                aims.append(
                    aim(
                        f"writing the segment at {COPY_AIM} of memcpy, {name}",
                        f"{ratio:.2f}",
                        met=ratio >= COPY_AIM,
                    )
                )
    return lines + memory, aims, values


def stage_line(name: str, zero_stage: int, found: list[RankResult]) -> str:
    """One learner's line of the table."""
    first, rounds = found[0], found[0].rounds
    return (
        f"| {name} | {first.nbytes / 2**20:,.1f} | {zero_stage}, {len(found)} | "
        f"{spread([one.copy * 1e3 for one in rounds])} "
        f"| {spread(first.copies_gb_per_s, '.1f')} | "
        f"{spread(first.memcpy_gb_per_s, '.1f')} | {spread(first.of_memcpy)} "
        f"| {spread([one.checksums * 1e3 for one in rounds])} "
        f"| {statistics.median(one.stage for one in rounds) * 1e3:.2f} / "
        f"{statistics.median(one.verified for one in rounds) * 1e3:.2f} |"
    )


def engine_part(
    models: dict[str, str], ways: list[str], *, quick: bool, pairs: int, directory: Path
) -> Part:
    """Every size with both settings of `weight_sync.kv_cache`, and with adapters."""
    lines = [
        "engine: publications to an engine at work; lost: rollout time per publication, "
        f"and its share at one per {EVERY_S:g} s",
        "",
        "| model | way | sequences x tokens | tokens/s | stage ms | pause ms | load "
        "ms | label, resume ms | until live ms | tokens recomputed | lost ms | lost |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    aims, values = [], {}
    for name, model in models.items():
        size = replace(SIZES[name], period_s=0.5) if quick else SIZES[name]
        for way in ways:
            turns, window_s = (2, 2) if quick else (pairs, 8)
            work = size, model, way, turns, window_s, directory
            found = apart(engine_side, *work, limit_s=TIMEOUT_S)
            values[f"{name} {way}"] = asdict(found)
            lines.append(told(engine_line(size, way, found)))
            if name in ROLLOUT_AIM_SIZES:
                share = statistics.median(pair.share for pair in found.pairs)
                most = ADAPTER_AIM if way == "adapter" else ROLLOUT_AIM
                what = (
                    f"rollout time lost at most {most:.0%} at one publication per "
                    f"{EVERY_S:g} s, {name}, {way}"
                )
                aims.append(aim(what, f"{share:.2%}", met=share <= most))
    return lines, aims, values


def engine_line(size: Size, way: str, found: EngineResult) -> str:
    """One engine's line of the table."""
    ours = found.publications

    def phase(name: str) -> str:
        return spread([getattr(one, name) * 1e3 for one in ours], ".1f")

    return (
        f"| {size.name} | {way} | {size.sequences} x {size.response} | "
        f"{found.tokens_per_s:,.0f} | {phase('stage')} | {phase('pause')} "
        f"| {phase('load')} | {phase('resume')} | {phase('live')} | "
        f"{statistics.median(one.recomputed_tokens for one in ours):,.0f} "
        f"| {spread([pair.lost * 1e3 for pair in found.pairs], '.0f')} | "
        f"{spread([pair.share for pair in found.pairs], '.2%')} |"
    )


def main() -> None:
    parser = arguments_of("weight_sync", "What a publication of weights costs.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=None)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=3, help="of the part engine")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the smallest model and few rounds: shows that it runs, not how fast",
    )
    arguments = parser.parse_args()
    report = Report("weight_sync", machine("torch"))
    with tempfile.TemporaryDirectory(prefix="weights-") as temporary:
        directory, quick = Path(temporary), arguments.quick
        sizes = arguments.sizes or (["1M"] if quick else list(SIZES))
        models = {name: SIZES[name].write(directory / name) for name in sizes}
        if "stage" in arguments.only:
            report.keep("stage", stage_part(models, quick=quick, directory=directory))
        if "engine" in arguments.only:
            work = {"quick": quick, "pairs": arguments.rounds, "directory": directory}
            report.keep("engine", engine_part(models, arguments.ways, **work))
    report.end(arguments)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    quiet()
    main()
