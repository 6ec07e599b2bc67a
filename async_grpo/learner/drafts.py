"""Drafts: the directories in memory where ranks first write their parts of a checkpoint.

Runs in: learner ranks, and the driver (`remove_drafts`). Hides names and room. Invariants: a draft
in memory is private to the user, and its name carries the run's key and its owner's process id; the
owner removes it, the driver removes drafts by key at the end of the run, and the next run removes
those of owners that no longer live. All ranks have room, or none uses memory.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from async_grpo.runtime.lifetime import is_gone, owner
from async_grpo.weights.shared_memory import SEGMENT_DIR, free_bytes

KEEP_FREE = 2**28
_CGROUP = Path("/sys/fs/cgroup")


def draft_in_memory(key: str, number: int) -> Path:
    """Name the directory in memory for this process's draft of this number and run key."""
    return SEGMENT_DIR / f"async_grpo-{key}-{owner()}-{number}-checkpoint"


def remove_drafts(key: str) -> None:
    """Remove the drafts of this start of a run on this machine, even of killed ranks."""
    for path in SEGMENT_DIR.glob(f"async_grpo-{key}-*-checkpoint"):
        shutil.rmtree(path, ignore_errors=True)  # its owner may be removing it at this moment


def remove_abandoned_drafts() -> None:
    """Remove drafts whose owner no longer lives."""
    for path in SEGMENT_DIR.glob("async_grpo-*-checkpoint"):
        if is_gone(path.name.split("-")[-3]):
            shutil.rmtree(path, ignore_errors=True)  # other ranks that start do the same


def room() -> tuple[str, int]:
    """Name the memory that ranks of a machine share, and count the bytes that may go there."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    free = min(free_bytes(SEGMENT_DIR), available_bytes()) - KEEP_FREE
    return f"{boot}/{SEGMENT_DIR.stat().st_dev}", free


def fits(ranks: Iterable[tuple[str, int, int]]) -> bool:
    """Whether all ranks, each (memory, free bytes there, bytes needed), have room together."""
    needed: dict[str, int] = defaultdict(int)
    free: dict[str, int] = {}
    for memory, available, wanted in ranks:
        needed[memory] += wanted
        free[memory] = min(available, free.get(memory, available))
    return all(needed[memory] <= free[memory] for memory in needed)


def available_bytes() -> int:
    """Count the memory that is free, or can be freed at once, in this machine and container."""
    available = _of_machine("MemAvailable")
    try:
        limit, used = (
            (_CGROUP / name).read_text(encoding="ascii").strip()
            for name in ("memory.max", "memory.current")
        )
        statistics = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
        usage = dict(line.split() for line in statistics)
    except FileNotFoundError:
        return available  # no container of its own
    if limit == "max":
        return available
    return min(available, int(limit) - int(used) + int(usage["inactive_file"]))


def host_bytes() -> int:
    """Count the memory of this machine, or of the container where that has less."""
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
    except FileNotFoundError:
        limit = "max"
    total = _of_machine("MemTotal")
    return total if limit == "max" else min(total, int(limit))


def _of_machine(field: str) -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields[field].split()[0]) * 1024
