"""Pins: an evaluation keeps one policy version, on an engine that is away or on all engines.

Runs in: the driver. Hides engines that are away from the coordinator, which asks, waits for and
counts the others only. An engine that is away stays alive for the supervision of processes; its
training groups go on, at first under the weights that it serves, and like any other group under
newer weights when it is back.

Invariant: an engine that is away holds no ticket of a version newer than the one that it serves,
for the queue gives it none once another is live; staleness is bounded by the ticket's version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Generic, Protocol, Self, TypeVar

from async_grpo.weights.fan_out import Engine, EngineHandle
from async_grpo.weights.shared_gpu import Apart

Engine_co = TypeVar("Engine_co", bound=EngineHandle, covariant=True)


class EngineSet(Protocol[Engine_co]):
    """The engines of the run, as the manager keeps them."""

    def alive(self) -> Sequence[Engine_co]:
        """Engines that are alive."""

    async def drop(self, actor_id: str, error: BaseException) -> None:
        """Declare an engine dead, because of this error."""


class ServingEngines(Generic[Engine]):
    """An engine set without the engines that are away."""

    def __init__(self, engines: EngineSet[Engine], gpu: Apart) -> None:
        """gpu: whose turn it is on shared GPUs."""
        self._engines, self.gpu = engines, gpu
        self._away: set[str] = set()

    def alive(self) -> Sequence[Engine]:
        """Engines that are alive and not away."""
        here = self._engines.alive()
        return tuple(engine for engine in here if engine.actor_id not in self._away)

    def all(self) -> Sequence[Engine]:
        """Engines that are alive, away or not."""
        return tuple(self._engines.alive())

    def away(self, engine: EngineHandle) -> bool:
        """Whether an engine is away."""
        return engine.actor_id in self._away

    async def drop(self, actor_id: str, error: BaseException) -> None:
        """Declare an engine dead, away or not."""
        self._away.discard(actor_id)
        await self._engines.drop(actor_id, error)

    def leave(self, engine: Engine) -> None:
        """Take an engine out of the set."""
        self._away.add(engine.actor_id)

    def back(self, engine: Engine) -> None:
        """Put an engine back into the set."""
        self._away.discard(engine.actor_id)

    def lives(self, engine: Engine) -> bool:
        """Whether an engine is alive, away or not."""
        return any(other.actor_id == engine.actor_id for other in self._engines.alive())


class Pin(Generic[Engine]):
    """A version that is kept: by an `engine` that is away, or (None) by all engines that serve, and
    then the next publication waits for the end of the pin.
    """

    def __init__(self, label: str, engine: Engine | None = None) -> None:
        self.label, self.engine = label, engine
        self._over = asyncio.Event()
        self._asked: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    @property
    def holds(self) -> bool:
        """Whether the pin still lasts."""
        return not self._over.is_set()

    async def over(self) -> None:
        """Wait for the end of the pin, on behalf of the learner, which is ready to publish."""
        self._asked = time.perf_counter()
        await self._over.wait()

    @property
    def learner_waited_s(self) -> float:
        """Seconds that the learner has waited for the end of this pin so far."""
        return 0.0 if self._asked is None else time.perf_counter() - self._asked


async def wait_unpinned(
    newest: Callable[[], Pin[Engine] | None], held: Callable[[], AbstractContextManager[None]]
) -> float:
    """Wait inside `held()` until no `newest` pin lasts any more; returns the seconds."""
    started = time.perf_counter()
    while (pin := newest()) is not None and pin.holds:
        with held():
            await pin.over()
    return time.perf_counter() - started
