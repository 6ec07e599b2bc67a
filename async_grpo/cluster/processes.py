"""What Ray runs as a rollout actor: a thin shell around `GroupProducer`.

Runs in: rollout actors (`queue` and `learner_group` have the shells of the others). A shell adds
what only Ray can give: handles to other actors as ordinary clients.

All calls of one actor run on one event loop. Ray gives every concurrency group a thread and a loop
of its own, which an asyncio object does not survive; so there is none, and a limit that waiting
calls cannot reach instead.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable
from typing import Any

from async_grpo.cluster.queue import ActorQueue
from async_grpo.config.schema import Config
from async_grpo.rollout.producer import GroupProducer
from async_grpo.runtime import stacks
from async_grpo.runtime.lifetime import die_with_parent

MAX_CALLS = 10_000


class RolloutProcess(GroupProducer):
    """A rollout actor whose queue is a Ray actor."""

    def __init__(self, config: Config, *, actor_id: str, queue: Any, **place: Any) -> None:
        """queue: the Ray actor. place: see `GroupProducer`."""
        die_with_parent()
        stacks.register(actor_id, stacks.home(config.run.dir))
        handle = ActorQueue(queue, patience_s=config.watchdog.step_timeout_s)
        super().__init__(config, actor_id=actor_id, queue=handle, **place)
        self._run: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Produce groups, once: who asks again, since its connection broke, gets the same end."""
        if self._run is None:
            self._run = asyncio.ensure_future(super().run())
        await asyncio.shield(self._run)

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the engine."""
        return await getattr(self.parts.engine, method)(*args)

    async def apply(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call function(this actor, *arguments) here: on the event loop if it is a coroutine
        function, else in a thread.
        """
        if inspect.iscoroutinefunction(function):
            return await function(self, *arguments)
        return await asyncio.to_thread(function, self, *arguments)

    async def pid(self) -> int:
        """Process id, for tests and post-mortems."""
        return os.getpid()
