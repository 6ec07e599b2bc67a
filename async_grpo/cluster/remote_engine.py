"""A rollout actor as driver and coordinator see it, and what Ray runs as one.

    RemoteEngine.receive (driver) --Ray--> RolloutProcess.receive (rollout actor) -> EngineHost

Runs in: the driver (`RemoteEngine`), rollout actors (`RolloutProcess`). Hides Ray's handle, and
connections that break: calls that may be repeated are, once the actor answers again. Invariant: no
call outlives the engine; those that are open when it is given up raise why.

All calls of one actor run on one event loop. Ray gives every concurrency group a thread and a loop
of its own, which an asyncio object does not survive; so there is none, and a limit that waiting
calls cannot reach instead (`MAX_CALLS`).
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from async_grpo.cluster.addresses import Address
from async_grpo.cluster.frozen_models import FrozenClient
from async_grpo.cluster.queue import ActorQueue
from async_grpo.config.schema import Config
from async_grpo.replay.partial import PartialStart
from async_grpo.rollout.producer import GroupProducer
from async_grpo.runtime import stacks
from async_grpo.runtime.lifetime import die_with_parent
from async_grpo.runtime.text import last_line
from async_grpo.weights.transport import Announcement, Receipt, TokenSequence

RETRY_S = 1.0


class GivenUp(ray.exceptions.RayError):
    """The engine that was asked has been given up."""


@dataclass
class RemoteEngine:
    """One rollout actor process for driver and coordinator. host: of its node. localize: to what
    its node needs.
    """

    actor_id: str
    slot: int
    host: str
    tensor_parallel_size: int
    handle: Any
    localize: Callable[[Announcement], Awaitable[Announcement]]
    acknowledged: str = ""
    """Label of the last weights that the engine took."""
    max_num_seqs: int = 0
    """Responses that it generates at the same time; known once it has started."""
    asleep: bool = False
    """Whether it may sleep."""
    _gone: asyncio.Future[Any] = field(default_factory=lambda: asyncio.Future())

    def give_up(self, error: BaseException) -> None:
        """Let all calls, those to come too, raise GivenUp for this error; the first one counts."""
        if not self._gone.done():
            self._gone.set_exception(GivenUp(last_line(error)))
            self._gone.exception()  # retrieved, so that asyncio does not log it

    async def run(self) -> None:
        """Let the actor produce groups until the queue closes."""
        await self._repeated(lambda: self.handle.run.remote())

    async def answer(self) -> None:
        """Wait until the actor answers a probe. Raises what is wrong with it."""
        await self._repeated(lambda: self.handle.health.remote())

    async def connect(self, payload: dict[str, Any]) -> Receipt:
        """Prepare the engine for publications."""
        return await self._call(self.handle.call.remote("connect", payload))

    async def receive(self, announcement: Announcement) -> Receipt:
        """Let the engine take and serve the announced weights."""
        try:
            local = await self._call(self.localize(announcement))
        except GivenUp:
            raise
        # the relay's fault: the engine is well and takes the publication when it is repeated
        except (ray.exceptions.RayError, TimeoutError) as error:
            return Receipt("", "torn", f"the bytes did not reach its node: {last_line(error)}")
        receipt = await self._repeated(lambda: self.handle.receive.remote(local))
        if not receipt.failure:
            self.acknowledged, self.asleep = receipt.serving, False
        return receipt

    async def sleep(self) -> None:
        """Let the engine give the GPU's memory back."""
        self.asleep = True  # also where the call is cut off
        await self._repeated(lambda: self.handle.sleep.remote())

    async def wake(self) -> None:
        """Let the engine go on with the weights that it serves."""
        await self._repeated(lambda: self.handle.wake.remote())
        self.asleep = False

    async def attend(self, announcement: Announcement) -> Receipt:
        """Let the engine take part in a publication that is pushed, without loading it."""
        return await self._call(self.handle.call.remote("attend", announcement))

    async def score(self, sequences: list[TokenSequence]) -> list[tuple[list[str], np.ndarray]]:
        """Log-probs of these responses, with the labels of the weights."""
        return await self._call(self.handle.call.remote("score", sequences))

    async def partials(self) -> list[tuple[PartialStart, bytes]]:
        """Partial responses of the groups that are being generated."""
        return await self._call(self.handle.partials.remote())

    async def probe_sequences(self) -> list[tuple[list[int], list[int], np.ndarray]]:
        """Return a few short responses as (prompt, response, log-probs)."""
        return await self._call(self.handle.probe_sequences.remote())

    async def _repeated(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        while True:
            try:
                return await self._call(ask())
            except ray.exceptions.ActorUnavailableError:
                await asyncio.sleep(RETRY_S)  # it may be well, behind a link that broke

    async def _call(self, call: Awaitable[Any]) -> Any:
        asked = asyncio.ensure_future(call)
        try:
            await asyncio.wait({asked, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else self._gone.result()
        finally:
            asked.cancel()


class RolloutProcess(GroupProducer):
    """A rollout actor whose queue is a Ray actor."""

    def __init__(
        self,
        config: Config,
        *,
        actor_id: str,
        queue: Any,
        frozen: Mapping[str, Any] | None = None,
        **place: Any,
    ) -> None:
        """queue: the Ray actor. frozen: those of the frozen models, or an `Address`. place: see
        `GroupProducer`.
        """
        die_with_parent()
        stacks.register(actor_id, stacks.home(config.run.dir))
        handle = ActorQueue(queue, patience_s=config.watchdog.step_timeout_s)
        clients = {
            name: one if isinstance(one, Address) else FrozenClient(name, one)
            for name, one in (frozen or {}).items()
        }
        super().__init__(config, actor_id=actor_id, queue=handle, frozen=clients, **place)
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
