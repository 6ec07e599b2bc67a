"""What ranks that share each sequence save and cost: `python -m benchmarks.sequence_parallel
[--tokens 4096 16384 65536] [--shared 1 2 4] [--layers 4] [--model DIRECTORY] [--rounds 3]
[--smoke] [--out JSON] [--docs FILE]`.

A learner step trains two sequences of so many tokens, one after the other, with `learner.ranks` as
many as `learner.sequence_parallel`: CPU ranks with one thread each, ZeRO-1, the model of a
directory, or a Qwen2 with random weights. Memory is a rank's resident peak above its level before a
step. A machine may have fewer cores than ranks, so speed is tokens per second of the CPU time that
all ranks take together.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.harness import (
    Part,
    Report,
    add_smoke,
    aim,
    arguments_of,
    free_port,
    kilobytes,
    machine,
    memory_level,
    quiet,
    rank_environment,
    spread,
)
from benchmarks.learner.arm import Batch, Ours, Work
from benchmarks.tails import PROMPT_TOKENS, TailModel

MEMORY_AIM, SPEED_AIM = 1.1, 0.8
SEQUENCES, TIMEOUT_S = 2, 3_600.0


@dataclass(frozen=True)
class Found:
    """Of one rank, or of all together: MB, and CPU and wall seconds of each step."""

    peak_mb: float
    cpu_s: list[float]
    wall_s: list[float]


def of_rank(rank: int, ranks: int, port: int, model: str, tokens: int, rounds: int) -> Found:
    """Measure one rank, in a process of its own."""
    rank_environment(rank, ranks, port)
    torch.set_num_threads(1)
    longest = tokens - PROMPT_TOKENS[1]
    budget = -(-tokens // ranks)
    work = Work(groups=1, group_size=SEQUENCES, mean=1e12, longest=longest, budget=budget)
    batch = Batch(work)
    side = Ours(model, batch, work, 1, {"ranks": ranks, "sequence_parallel": ranks})
    side.step()  # which also makes the optimizer's states
    level, cpu_s, wall_s = memory_level(), list[float](), list[float]()
    for _ in range(rounds):
        cpu, wall = time.process_time(), time.perf_counter()
        side.step()
        cpu_s.append(time.process_time() - cpu)
        wall_s.append(time.perf_counter() - wall)
    peak_mb = (kilobytes("/proc/self/status", "VmHWM") - level) / 1024
    side.learner.close()
    return Found(peak_mb, cpu_s, wall_s)


def together(ranks: int, model: str, tokens: int, rounds: int) -> Found:
    """Measure all ranks: the largest peak, and the sum of their CPU seconds."""
    with ProcessPoolExecutor(ranks, mp_context=get_context("spawn")) as pool:
        arguments = (ranks, free_port(), model, tokens, rounds)
        asked = [pool.submit(of_rank, rank, *arguments) for rank in range(ranks)]
        found = [one.result(timeout=TIMEOUT_S) for one in asked]
    return Found(
        peak_mb=max(one.peak_mb for one in found),
        cpu_s=[sum(step) for step in zip(*(one.cpu_s for one in found), strict=True)],
        wall_s=[max(step) for step in zip(*(one.wall_s for one in found), strict=True)],
    )


def part(tokens: int, arms: dict[int, Found]) -> Part:
    """Table, aims and values of one length. arms: by ranks that share the sequence."""
    lines = [
        f"{tokens:,} tokens",
        "",
        "| ranks | peak MB of a rank | of one rank's | tokens/s of a core | of one rank's | s |",
        "|---|---|---|---|---|---|",
    ]
    aims, alone = [], arms[min(arms)]
    for ranks, found in arms.items():
        memory = found.peak_mb / alone.peak_mb
        rates = [SEQUENCES * tokens / seconds for seconds in found.cpu_s]
        speed = statistics.median(alone.cpu_s) / statistics.median(found.cpu_s)
        lines.append(
            f"| {ranks} | {found.peak_mb:,.0f} | {memory:.2f} | {spread(rates, ',.0f')} | "
            f"{speed:.2f} | {spread(found.wall_s)} |"
        )
        if ranks > min(arms):
            share, where = MEMORY_AIM * min(arms) / ranks, f"{ranks} ranks, {tokens:,} tokens"
            text = f"memory at most {share:.2f} of one rank's, {where}"
            aims.append(aim(text, f"{memory:.2f}", met=memory <= share))
            text = f"{SPEED_AIM} of one rank's tokens/s of a core, {where}"
            aims.append(aim(text, f"{speed:.2f}", met=speed >= SPEED_AIM))
    return lines, aims, {str(ranks): asdict(found) for ranks, found in arms.items()}


def main(argv: list[str] | None = None) -> None:
    parser = arguments_of("sequence_parallel", "What ranks that share each sequence save and cost.")
    parser.add_argument("--tokens", nargs="+", type=int, default=[4_096, 16_384, 65_536])
    parser.add_argument("--shared", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=4, help="of the random model")
    parser.add_argument("--model", help="directory of another one")
    parser.add_argument("--rounds", type=int, default=3)
    add_smoke(parser)
    arguments = parser.parse_args(argv)
    lengths, shared, rounds = arguments.tokens, arguments.shared, arguments.rounds
    if arguments.smoke:
        lengths, shared, rounds = [256], [1, 2], 1
    report = Report("sequence_parallel", machine("torch", "deepspeed", "transformers"))
    with tempfile.TemporaryDirectory(prefix="sequence-parallel-") as temporary:
        model = TailModel("long", 256, arguments.layers, positions=65_536)
        path = arguments.model or model.write(Path(temporary) / model.name)
        for tokens in lengths:
            arms = {}
            for ranks in shared:
                arms[ranks] = together(ranks, path, tokens, rounds)
                print(f"{tokens} tokens, {ranks} ranks: {arms[ranks]}", file=sys.stderr, flush=True)
            report.keep(f"{tokens} tokens", part(tokens, arms))
    report.end(arguments)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    quiet()
    main()
