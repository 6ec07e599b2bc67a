"""Coroutines of a user's code in a child process: each has a deadline, and none ends the process.

Runs in: verifier and environment children. Hides the threads to which coroutines give plain calls
(`asyncio.to_thread`), and which of them still run. Invariant: whatever a coroutine does, its
cancellation of itself and `sys.exit` included, is a result or an exception.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

MOST_THREADS = 32
"""Plain calls of coroutines that run at once."""


class TooLong(Exception):
    """A call took longer than its deadline."""


class Stuck(TooLong):
    """It has not returned, and keeps its thread."""


_THREADS: ContextVar[list[Future[Any]] | None] = ContextVar("_THREADS", default=None)
"""Calls that the present coroutine has given to threads."""


class Threads(ThreadPoolExecutor):
    """Threads for plain calls that coroutines make, by coroutine."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call in a thread."""
        future = super().submit(call, *args, **kwargs)
        if (mine := _THREADS.get()) is not None:
            mine.append(future)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls. Waits for none: one may never return, and the process ends."""
        super().shutdown(wait=False, cancel_futures=True)


async def within(timeout_s: float, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Await a coroutine. Raises TooLong, Stuck, and what it raises."""
    threads: list[Future[Any]] = []
    before = _THREADS.set(threads)
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            return await coroutine
    except TimeoutError:
        if not deadline.expired():
            raise  # its own
        raise (Stuck if any(one.running() for one in threads) else TooLong) from None
    except (asyncio.CancelledError, SystemExit) as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    finally:
        _THREADS.reset(before)
