"""Engines that are away: out of the set for the time of an evaluation, so that publications pass
them by.

Runs in: the driver. Hides from the coordinator those that are away: it asks, waits for and counts
the others only. They stay alive for whoever watches processes; what they hold of training groups
goes on, at first under the weights that they serve, and like any other group under newer ones when
they are back.

Invariant: an engine that is away holds no ticket of a version newer than the one that it serves,
for the queue gives it none once another is live; what bounds staleness is the version of the
ticket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, Self

from async_grpo.weights.delivery import EngineHandle


class EngineSet(Protocol):
    """The engines that are alive now; `drop` declares one dead."""

    def alive(self) -> Sequence[EngineHandle]: ...
    async def drop(self, actor_id: str, error: BaseException) -> None: ...


class ServingEngines:
    """An engine set without those that are away."""

    def __init__(self, engines: EngineSet) -> None:
        self._engines = engines
        self._away: set[str] = set()

    def alive(self) -> Sequence[EngineHandle]:
        """Those that are alive and not away."""
        return tuple(
            engine for engine in self._engines.alive() if engine.actor_id not in self._away
        )

    async def drop(self, actor_id: str, error: BaseException) -> None:
        """Declare one dead, away or not."""
        self._away.discard(actor_id)
        await self._engines.drop(actor_id, error)

    def leave(self, engine: EngineHandle) -> None:
        """It is away from now on."""
        self._away.add(engine.actor_id)

    def back(self, engine: EngineHandle) -> None:
        """It is away no longer."""
        self._away.discard(engine.actor_id)

    def lives(self, engine: EngineHandle) -> bool:
        """Whether it is alive, away or not."""
        return any(other.actor_id == engine.actor_id for other in self._engines.alive())


class Pin:
    """A version that is kept: `label`; by an `engine` that is away, or, None, by all that serve,
    for which the next publication waits.
    """

    def __init__(self, label: str, engine: EngineHandle | None = None) -> None:
        self.label, self.engine = label, engine
        self._over = asyncio.Event()
        self._asked: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    @property
    def holds(self) -> bool:
        """Whether the block goes on."""
        return not self._over.is_set()

    async def over(self) -> None:
        """Wait for the end of the block, as the learner, which is ready to publish."""
        self._asked = time.perf_counter()
        await self._over.wait()

    @property
    def learner_waited_s(self) -> float:
        """Seconds that the learner has waited for this pin so far."""
        return 0.0 if self._asked is None else time.perf_counter() - self._asked


async def wait_unpinned(
    newest: Callable[[], Pin | None], held: Callable[[], AbstractContextManager[None]]
) -> float:
    """Wait while the `newest` pin holds, and another one that follows at once, inside `held()`; the
    seconds.
    """
    started = time.perf_counter()
    while (pin := newest()) is not None and pin.holds:
        with held():
            await pin.over()
    return time.perf_counter() - started
