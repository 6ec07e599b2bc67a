"""A run whose learner and engine may both use every core: `python -m
benchmarks.throughput.both_cores CONFIG [section.key=value ...]`.

Runs in: the driver of `benchmarks.throughput`'s synchronous baseline. With `replay.max_staleness:
0` learner and engine never work at the same time, so a core for each would leave one of them idle
in every phase; here each has all of them, and as many threads.
"""

from __future__ import annotations

import os
import sys

from async_grpo.cluster import placement


def all_cores(cores: tuple[int, ...], *, ranks: int, engines: int) -> list[tuple[int, ...]]:
    """In place of a share of the cores for each process."""
    return [cores] * (ranks + engines)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = str(
        len(os.sched_getaffinity(0))
    )  # before anything reads it; the engine inherits it
    placement._deal_cores = all_cores
    from async_grpo.cli import main

    sys.exit(main())
