"""Who is late: remote calls under way, and a driver whose own event loop does not turn.

Runs in: the driver.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_BEATS = 20


class Calls:
    """Calls to several numbered processes at once (ranks), as long as they are under way."""

    def __init__(self) -> None:
        self._under_way: list[tuple[str, float, Sequence[asyncio.Future[Any]]]] = []
        self._given_up = self._under_way[:]

    @contextmanager
    def under_way(
        self, what: str, calls: Sequence[asyncio.Future[Any]]
    ) -> Iterator[Callable[[], str]]:
        """Track calls, one per process in order; gives a function that names the unanswered."""
        entry = (what, time.monotonic(), calls)
        self._under_way.append(entry)
        try:
            yield lambda: _ranks(calls)
        except BaseException:
            self._given_up = [entry]
            raise
        finally:
            self._under_way.remove(entry)

    def status(self) -> list[dict[str, Any]]:
        """Return open calls and the last one given up: what, for how many seconds, who is late."""
        asked = [
            (what, since, _ranks(calls))
            for what, since, calls in [*self._under_way, *self._given_up]
        ]
        return [
            {"call": what, "seconds": time.monotonic() - since, "waits_for": late}
            for what, since, late in asked
            if late
        ]


def _ranks(calls: Sequence[asyncio.Future[Any]]) -> str:
    """Those that have not answered; whoever gave up waiting has cancelled their calls."""
    return ", ".join(
        f"rank {rank}" for rank, call in enumerate(calls) if call.cancelled() or not call.done()
    )


@contextmanager
def watched(
    loop: asyncio.AbstractEventLoop, *, seconds: float, stuck: Callable[[], None]
) -> Iterator[None]:
    """Call `stuck` from a plain thread when the event loop has not turned for so long, counted in
    short waits, so that a driver that was stopped for an hour may go on.
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
