"""Who is late: remote calls under way, learner steps beyond their deadline, and a driver whose own event loop does not turn.

Runs in: the driver.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from async_grpo.errors import Stalled

STEP_GRACE_S = 5.0
"""A learner step gets this much longer than its deadline, since the waits inside it can say more about who is late."""
_BEATS = 20


class Calls:
    """Calls to several numbered processes at once (ranks), as long as they are under way."""

    def __init__(self) -> None:
        self._under_way: list[tuple[str, float, Sequence[Any]]] = []
        self._given_up: list[tuple[str, float, Sequence[Any]]] = []

    @contextmanager
    def under_way(self, what: str, references: Sequence[Any]) -> Iterator[Callable[[], str]]:
        """Inside the block these calls, one per process in order, are under way; gives a function that names those that are not done."""
        entry = (what, time.monotonic(), references)
        self._under_way.append(entry)
        try:
            yield lambda: _ranks(references)
        except BaseException:
            self._given_up = [entry]
            raise
        finally:
            self._under_way.remove(entry)

    def status(self) -> list[dict[str, Any]]:
        """What is asked, for how many seconds, and who has not answered; what was given up last, too."""
        calls = [(what, since, _ranks(references)) for what, since, references in [*self._under_way, *self._given_up]]
        return [{"call": what, "seconds": time.monotonic() - since, "waits_for": late} for what, since, late in calls if late]


def _ranks(references: Sequence[Any]) -> str:
    _, late = ray.wait(list(references), num_returns=len(references), timeout=0)
    return ", ".join(f"rank {rank}" for rank, reference in enumerate(references) if reference in late)


async def whole_step(work: Awaitable[Any], *, seconds: float, number: int, phase: Callable[[], str]) -> Any:
    """The result of a learner step. Raises Stalled some seconds after its deadline, for a wait inside it that has none of its own."""
    try:
        async with asyncio.timeout(seconds + STEP_GRACE_S) as deadline:
            return await work
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise Stalled(f"learner step {number} did not finish within watchdog.step_timeout_s = {seconds:g} s; it was {phase()}") from error


@contextmanager
def watched(loop: asyncio.AbstractEventLoop, *, seconds: float, stuck: Callable[[], None]) -> Iterator[None]:
    """Inside the block a plain thread calls `stuck` when the event loop has not turned for so long.

    It counts short waits, so that a driver that was itself stopped for an hour is given time to go on.
    """
    over = threading.Event()

    def watch() -> None:
        turned, missed = threading.Event(), 0
        loop.call_soon_threadsafe(turned.set)
        while not over.wait(seconds / _BEATS):
            if turned.is_set():
                turned.clear()
                missed = 0
                loop.call_soon_threadsafe(turned.set)
            elif (missed := missed + 1) >= _BEATS:
                stuck()
                return

    thread = threading.Thread(target=watch, name="async_grpo-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=seconds)
