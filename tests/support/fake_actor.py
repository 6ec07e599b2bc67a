"""A rollout actor without an engine, in a module of its own: its process imports nothing else."""

from __future__ import annotations

import asyncio
import os
from typing import Any


class StandIn:
    """A rollout actor without an engine."""

    def __init__(
        self,
        config: Any,
        *,
        actor_id: str,
        queue: Any,
        model_dir: str,
        device: str,
        cores: Any,
        threads: int = 0,
        partials: Any = None,
        actors: int = 1,
        frozen: Any = None,
        env_vars: Any = None,
        order: Any = None,
    ) -> None:
        self.actor_id, self._over, self._link = actor_id, asyncio.Event(), asyncio.Event()
        self._env_vars = env_vars
        self._link.set()

    async def told(self) -> Any:
        """Variables that it starts with."""
        return self._env_vars

    async def start(self, *, backend: str, label: str) -> None:
        pass

    async def run(self) -> None:
        await self._over.wait()

    async def drain(self) -> None:
        self._over.set()

    async def health(self) -> None:
        await self._link.wait()

    async def receive(self, announcement: Any) -> None:
        await self._link.wait()

    async def cut(self) -> None:
        """Answer nothing from now on."""
        self._link.clear()

    async def close(self) -> None:
        pass

    async def die(self) -> None:
        os._exit(1)


class DiesOnce(StandIn):
    """The first one of a place dies while it loads, without a word."""

    async def start(self, *, backend: str, label: str) -> None:
        if self.actor_id.endswith(".0") and self.actor_id != "actor-0.0":
            os._exit(1)


class Slow(StandIn):
    """Takes a while to load, except the first."""

    async def start(self, *, backend: str, label: str) -> None:
        await asyncio.sleep(0 if self.actor_id.startswith("actor-0") else 5)
