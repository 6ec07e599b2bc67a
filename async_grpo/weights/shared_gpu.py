"""Whose GPUs they are, where learner and engines share them and do not fit together: their turns.

Runs in: the driver. A step with a weight sync:

    engines' turn    the engines generate; the learner's memory lies on the host
    learner's turn   engines sleep (requests kept, caches dropped) -> the learner takes its memory
                     back -> prepare, train, stage
    engines' turn    the learner gives its memory back -> each engine takes the weights: its own are
                     mapped and overwritten, labelled, then its KV cache is mapped, and it goes on

Whoever computes enters a turn, outside of its own deadlines, and never from inside one. Invariants:
memory of both is never needed at once; turns are taken in the order in which they were asked for;
an engine that does not sleep or wake is dropped, and a learner that does not give its memory back
is killed, which gives it back too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Literal

Change = Callable[[], Awaitable[None]]
Whose = Literal["learner", "engines"]


class Apart:
    """GPUs that hold both, or that nobody shares."""

    @asynccontextmanager
    async def turn(self, whose: Whose, *, wake: bool = True) -> AsyncIterator[None]:
        """Inside the block these may compute. wake: engines that sleep; else they take weights."""
        yield


class SharedGpu(Apart):
    """GPUs that hold one of both at a time."""

    def __init__(self) -> None:
        self._order, self._empty = asyncio.Lock(), asyncio.Event()
        self._empty.set()
        self._inside, self._whose = 0, ""
        self._ends: dict[str, Change] = {}
        self._begins: dict[str, Change] = {}

    def between(self, *, take: Change, give: Change, sleep: Change, wake: Change) -> None:
        """Say how the learner takes and gives back its memory, and how engines sleep and wake; each
        may be called where there is nothing to do.
        """
        self._ends.update(learner=sleep, engines=give)
        self._begins.update(learner=take, engines=wake)

    @asynccontextmanager
    async def turn(self, whose: Whose, *, wake: bool = True) -> AsyncIterator[None]:
        """See `Apart.turn`."""
        async with self._order:
            if self._whose != whose:
                await self._empty.wait()
                await self._ends[whose]()  # the other's
                self._whose = whose
            if wake:
                await self._begins[whose]()
            self._inside += 1
            self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()
