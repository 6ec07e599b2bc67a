"""What a child of a pool does before its own work: the far end of `async_grpo/tasks/children.py`.

Runs in: verifier and environment children. Hides the pipe to the parent, the kernel's limits and
the task's construction. Invariants: whatever the task's code prints goes to stderr and never into
the protocol; no code of the task runs before its memory is bounded.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from async_grpo.runtime import stacks
from async_grpo.runtime.variables import hide, known
from async_grpo.tasks import pipe
from async_grpo.tasks.coroutines import MOST_THREADS, Threads

LONGEST_DETAIL = 500
"""Characters that are said of an error."""


class Parent:
    """The pool that has started this process."""

    def __init__(self, part: str) -> None:
        """Take private copies of stdin and stdout; task code reads nothing, and prints to stderr.
        part: what this process is called where stacks are shown.
        """
        self._requests = os.fdopen(os.dup(0), "rb")
        self._replies = os.fdopen(os.dup(1), "wb", buffering=0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        os.close(nothing)
        stacks.register_child(part)

    def task(self, made: Callable[[Any, dict[str, Any]], Any]) -> tuple[Any, dict[str, Any]]:
        """Return the task that the parent asks for, as `made` of it and of what the parent has
        told, and that. Exits if there is none; then the parent knows why.
        """
        told = self.receive()
        if told is None:
            sys.exit()
        known(told["settings"]["env_vars"])
        try:
            task = made(_prepared(told), told)
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent raises its text
            self.send(["failed", said(error)])
            sys.exit()
        from async_grpo.tasks.base import scores_later

        self.send(["ready", sorted(task.weights), scores_later(task)])
        return task, told

    async def serve(self, answer: Callable[..., Awaitable[list[Any]]]) -> None:
        """Answer requests as they come, many at a time, until the parent closes the pipe. answer:
        of the parts of a request, ["ok", ...] or [reason, detail].
        """
        loop, reader = asyncio.get_running_loop(), ThreadPoolExecutor(1)
        loop.set_default_executor(Threads(MOST_THREADS, "calls"))
        running: set[asyncio.Task[None]] = set()

        async def one(call: int, request: list[Any]) -> None:
            reply = await answer(*request)
            try:
                self.send([call, *reply])
            except (TypeError, ValueError, OverflowError) as error:
                self.send([call, "not_sendable", said(error)])

        while (message := await loop.run_in_executor(reader, self.receive)) is not None:
            task = asyncio.create_task(one(*message))
            running.add(task)
            task.add_done_callback(running.discard)

    def receive(self) -> Any:
        """Return the next message; None when the parent has closed the pipe."""
        head = self._requests.read(pipe.LENGTH.size)
        if len(head) < pipe.LENGTH.size:
            return None
        length = pipe.checked_length(pipe.LENGTH.unpack(head)[0])
        body = self._requests.read(length)
        return pipe.unpack(body) if len(body) == length else None

    def send(self, message: list[Any]) -> None:
        """Send a message. Raises TypeError, ValueError, OverflowError for one that cannot cross."""
        self._replies.write(pipe.frame(pipe.pack(message)))


def said(error: BaseException) -> str:
    """Return what is said of an error, on one line and without values of `task.env_vars`."""
    text = f"{type(error).__name__[:100]}: {error}"
    return hide(" ".join(text.split()))[:LONGEST_DETAIL]


def _prepared(told: dict[str, Any]) -> Any:
    """Bound this process, and construct its task."""
    if told["cpu"]:
        os.sched_setaffinity(0, told["cpu"])
    # What this process, and each one that it starts, may write to and shares with none. Addresses
    # that are only reserved do not count: JavaScript, Go and Java reserve gigabytes.
    limit = told["memory_mb"] * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    from async_grpo.config import schema
    from async_grpo.tasks.base import WarmsUp
    from async_grpo.tasks.registry import create_task

    task = create_task(schema.TaskConfig.model_validate(told["settings"]), told["seed"])
    if isinstance(task, WarmsUp):
        task.warm_up()
    return task
