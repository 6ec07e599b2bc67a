"""Waits on conditions and on the processes of a run, with deadlines, which are longer on a slow
machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.support.machine_speed import slowness


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # it ended before, or while, this was read
        return False


def wait_until_gone(pids: list[int], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds * slowness()
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.02)


def wait_until(
    condition: Callable[[], Any], seconds: float, what: str, *, log: Path | None = None
) -> Any:
    """The first true value of `condition`, within a deadline. log: shown where there is none."""
    deadline = time.monotonic() + seconds * slowness()
    while not (value := condition()):
        if time.monotonic() > deadline:
            said = "" if log is None else f":\n{log.read_text()[-3000:]}"
            raise AssertionError(f"{what} did not happen within {seconds} s{said}")
        time.sleep(0.02)
    return value


def ask(trainer: Any, work: Awaitable[Any], *, seconds: float = 120.0) -> Any:
    """Await a coroutine of the system, or a call of one of its actors, on the trainer's loop."""

    async def awaited() -> Any:
        return await work

    loop = trainer.system.event_loop
    return asyncio.run_coroutine_threadsafe(awaited(), loop).result(timeout=seconds * slowness())
