"""Runs environments for a pool: `python -m async_grpo.environments.child <parent pid>`.

Runs in: an environment child, one fresh interpreter with many episodes. Hides the far end of the
pipe. Requests are [call, episode, name of the call, argument]; replies are [call, "ok", value] or
[call, reason, detail]; the reason `STUCK` is a timeout that this process does not get over.

Plain methods run one at a time, in one thread. One that takes longer than its deadline keeps that
thread, and another one goes on with the others: the episode is lost, its neighbours are not. The
pool ends the process once these have ended. A coroutine that takes longer is cancelled, and its
environment closed as any other, unless it has left a thread in a plain call. Invariants: every
request gets one reply, as long as the process can run Python at all; a deadline begins with the
call, not with the wait for its turn; `close` is called once for every environment that was made and
whose calls have returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from async_grpo.environments.base import Action, check_observation, to_wire
from async_grpo.environments.guard import end_below, guarded
from async_grpo.environments.tools import with_tools
from async_grpo.runtime.variables import hide
from async_grpo.tasks.child import LONGEST_DETAIL, Parent, said
from async_grpo.tasks.coroutines import Stuck, TooLong, within
from async_grpo.tasks.pipe import STUCK


class OneAtATime:
    """Runs plain calls in one thread; a call that does not return leaves it for another thread."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._calls = self._thread()

    @staticmethod
    def _thread() -> queue.SimpleQueue[Any]:
        calls: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def work() -> None:
            while True:
                call, loop, done = calls.get()
                try:
                    value, error = call(), None
                except BaseException as raised:  # noqa: BLE001 - the caller gets it
                    value, error = None, raised
                loop.call_soon_threadsafe(_settle, done, value, error)

        threading.Thread(target=work, name="environments", daemon=True).start()
        return calls

    async def run(self, call: Callable[[], Any], timeout_s: float) -> Any:
        """Call in the thread, when it is free. Raises Stuck."""
        async with self._turn:
            loop = asyncio.get_running_loop()
            done: asyncio.Future[Any] = loop.create_future()
            self._calls.put((call, loop, done))
            try:
                async with asyncio.timeout(timeout_s) as deadline:
                    return await done
            except TimeoutError:
                if not deadline.expired():
                    raise  # the call's own
                self._calls = self._thread()
                raise Stuck from None


def _settle(done: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if done.done():  # nobody waits any more
        return
    if error is None:
        done.set_result(value)
    else:
        # StopIteration cannot be put into a future, and SystemExit would end this process
        usual = isinstance(error, Exception) and not isinstance(error, StopIteration)
        done.set_exception(error if usual else RuntimeError(f"{type(error).__name__}: {error}"))


class Episodes:
    """The environments of this process, by episode."""

    def __init__(self, task: Any, timeouts: dict[str, float]) -> None:
        self._task, self._timeouts = task, timeouts
        self._open: dict[int, Any] = {}
        self._closing: set[asyncio.Future[Any]] = set()
        self._plain = OneAtATime()
        self._closed = False

    async def call(self, episode: int, name: str, argument: Any) -> list[Any]:
        """Answer one request: ["ok", value] or [reason, detail]."""
        try:
            if name == "close":
                return await self._close(episode)
            if name == "reset":
                made = await self._plain.run(self._task.environment, self._timeouts["reset"])
                if self._closed:  # nobody would close it
                    return ["closed", "the pool has ended"]
                self._open[episode] = made
                value = await self._of(made, "reset", argument["reference"], argument["seed"])
            else:
                value = await self._of(self._open[episode], "step", Action(**argument))
        except TooLong as error:
            stuck = isinstance(error, Stuck)
            if stuck:
                self._open.pop(episode, None)  # its thread is in it
            return [
                STUCK if stuck else "timeout",
                f"{name}() took longer than {self._timeouts[name]:g} s",
            ]
        except MemoryError:
            return ["memory", "the environments ran out of environment.memory_mb"]
        except Exception as error:  # noqa: BLE001 - an error of the user's code is an answer
            return ["exception", f"{name}(): {said(error)}"]
        try:
            return ["ok", to_wire(check_observation(value, self._task.weights))]
        except (TypeError, ValueError, OverflowError) as error:
            return ["wrong_type", f"{name}(): {hide(str(error))}"[:LONGEST_DETAIL]]

    async def _of(self, environment: Any, name: str, *arguments: Any) -> Any:
        method, timeout_s = getattr(environment, name), self._timeouts[name]
        if not inspect.iscoroutinefunction(method):
            return await self._plain.run(lambda: method(*arguments), timeout_s)
        return await within(timeout_s, method(*arguments))

    async def _close(self, episode: int) -> list[Any]:
        environment = self._open.pop(episode, None)
        if environment is not None:
            closing = asyncio.ensure_future(self._of(environment, "close"))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            await closing
        return ["ok", None]

    async def close(self) -> None:
        """Close all, of which none may keep the others waiting for longer than its deadline, and
        begin no more.
        """
        self._closed = True

        async def one(episode: int) -> None:
            with contextlib.suppress(Exception):  # of the user's code, and nobody asks any more
                await self._close(episode)

        await asyncio.gather(*[one(episode) for episode in list(self._open)])
        if self._closing:  # those that were asked for before
            await asyncio.wait(self._closing)


async def serve(parent: Parent, task: Any, timeouts: dict[str, float]) -> None:
    """Answer requests as they come, until the parent closes the pipe; then close what is open."""
    episodes = Episodes(task, timeouts)
    await parent.serve(episodes.call)
    await episodes.close()


def main() -> None:
    """Serve until the parent closes the pipe."""
    guarded(int(sys.argv[1]))
    parent = Parent("environments")
    task, told = parent.task(lambda task, told: with_tools(task, told["tools"]))
    asyncio.run(serve(parent, task, told["timeouts"]))
    end_below()
    os.kill(os.getpid(), signal.SIGKILL)  # a thread may still be in a call


if __name__ == "__main__":
    main()
