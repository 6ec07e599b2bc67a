"""The learner's side of a publication: staging, beside memcpy in the same process, and the memory
it takes.

Runs in: one process per learner rank, which `benchmarks.weight_sync` starts. The ranks are those of
a run: a DeepSpeed learner, and its half of the shared-memory transport. A round measures each thing
once, so that figures of one round meet the same machine.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist

from async_grpo.config.schema import Config
from async_grpo.learner.weights import Published
from async_grpo.weights.layout import Layout
from async_grpo.weights.shared_memory import Segments, SharedMemorySender, choose_directory
from benchmarks.harness import free_port, kilobytes, memory_level, rank_environment
from benchmarks.weight_sync.models import Size

TIMEOUT_S = 600.0
KEY = "test-benchmark"
"""Begins the names of segments; tests that look for what a run has left behind pass over it."""


@dataclass(frozen=True)
class Round:
    """Seconds, each for all weights: gather and copy into a segment; memcpy between two buffers;
    checksums; a whole stage without checksums asked for, and with.
    """

    copy: float
    memcpy: float
    checksums: float
    stage: float
    verified: float


@dataclass(frozen=True)
class RankResult:
    """What one rank measured. MB: resident peak during the first stage above the level before it,
    and how much of it was the segment.
    """

    nbytes: int
    rounds: list[Round]
    peak_mb: float
    segment_mb: float

    @property
    def of_memcpy(self) -> list[float]:
        """Speed of the copy into the segment against memcpy, round by round."""
        return [one.memcpy / one.copy for one in self.rounds]

    @property
    def copies_gb_per_s(self) -> list[float]:
        """Speed of the copy into the segment."""
        return [self.nbytes / one.copy / 1e9 for one in self.rounds]

    @property
    def memcpy_gb_per_s(self) -> list[float]:
        """Speed of memcpy."""
        return [self.nbytes / one.memcpy / 1e9 for one in self.rounds]


def staged(
    size: Size, model: str, *, zero_stage: int, rounds: int, fallback: Path
) -> list[RankResult]:
    """What every rank of a learner of this size measures."""
    port = free_port()
    with ProcessPoolExecutor(size.ranks, mp_context=get_context("spawn")) as pool:
        running = [
            pool.submit(rank_work, size, model, zero_stage, rounds, fallback, rank, port)
            for rank in range(size.ranks)
        ]
        finished, waiting = wait(running, timeout=TIMEOUT_S, return_when=FIRST_EXCEPTION)
        if waiting:  # a rank whose neighbour failed would wait for it
            for child in multiprocessing.active_children():
                child.kill()
        for one in finished:
            one.result()  # raises why
        if waiting:
            raise TimeoutError(f"staging {size.name} took longer than {TIMEOUT_S:g} s")
        return [one.result() for one in running]


def rank_work(
    size: Size, model: str, zero_stage: int, rounds: int, fallback: Path, rank: int, port: int
) -> RankResult:
    """One rank's share; joins the others at `port`."""
    rank_environment(rank, size.ranks, port)
    torch.set_num_threads(1)
    from async_grpo.learner.learner import Learner

    def fetch(step: int, group_ids: object) -> bytes:
        raise RuntimeError("the benchmark trains nothing")

    learner = Learner(
        learner_config(size, model, zero_stage=zero_stage),
        model_dir=model,
        fetch=fetch,
        device="cpu",
        total_updates=1,
    )
    key = f"{KEY}{port}"
    sender = SharedMemorySender(learner.published, key=key, fallback=fallback)
    try:
        peak_mb, segment_mb = first_stage(sender)
        found = measure(
            learner.published, sender, rounds=rounds, key=f"{key}copy", fallback=fallback
        )
    finally:
        sender.close()
        learner.close()
    return RankResult(*found, peak_mb, segment_mb)


def learner_config(size: Size, model: str, *, zero_stage: int) -> Config:
    """A run with this learner."""
    return Config.model_validate(
        {
            "model": {"path": model, "dtype": size.dtype},
            "run": {"total_steps": 1},
            "rollout": {"prompt_length": 8, "response_length": 8, "rollout_batch_size": 4},
            "learner": {"ranks": size.ranks, "zero_stage": zero_stage},
            "watchdog": {"step_timeout_s": TIMEOUT_S / 2},
        }
    )


def first_stage(sender: SharedMemorySender) -> tuple[float, float]:
    """Resident peak of the first stage above the level before it, and the segment's part of it, in
    MB.
    """
    status = "/proc/self/status"
    level, shared = memory_level(), kilobytes(status, "RssShmem")
    sender.connect("", [1])
    dist.barrier()
    sender.stage("v0.0", verify=False)
    return (kilobytes(status, "VmHWM") - level) / 1024, (
        kilobytes(status, "RssShmem") - shared
    ) / 1024


def measure(
    weights: Published, sender: SharedMemorySender, *, rounds: int, key: str, fallback: Path
) -> tuple[int, list[Round]]:
    """Bytes of all weights, and the rounds. Every rank takes part; only rank 0 copies, and only its
    times mean something.
    """
    layout, writes = Layout(weights.weight_metadata()), weights.rank == 0
    source, target = (torch.ones(layout.nbytes, dtype=torch.uint8) for _ in range(2))
    segments = (
        Segments(choose_directory(layout.nbytes, fallback)[0], key, layout.nbytes)
        if writes
        else None
    )
    found = []
    try:
        for number in range(1, rounds + 3):  # the first two touch the pages of both segments
            dist.barrier()
            buffer = segments.begin(2 * number) if writes else None
            copy = seconds(lambda buffer=buffer: layout.fill(buffer, weights.named_weights()))
            memcpy = seconds(lambda: target.copy_(source)) if writes else 0.0
            checksums = seconds(lambda buffer=buffer: layout.checksums(buffer)) if writes else 0.0
            stages = []
            for verify in (False, True):
                dist.barrier()
                stages.append(
                    seconds(
                        lambda number=number, verify=verify: sender.stage(
                            f"v0.{number}", verify=verify
                        )
                    )
                )
            found.append(Round(copy, memcpy, checksums, *stages))
    finally:
        if segments is not None:
            segments.close()
    return layout.nbytes, found[2:]


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
