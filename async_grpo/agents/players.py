"""Players whose episodes are played over HTTP: by a program, or by a worker elsewhere.

Runs in: rollout actors. Hides the actor's one endpoint, which all of its tasks share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from async_grpo.agents.endpoint.player import Host, ProgramHost, ServedPlayer
from async_grpo.agents.endpoint.server import Endpoint
from async_grpo.agents.endpoint.work import Work, WorkHost, announce
from async_grpo.agents.external import External
from async_grpo.config.schema import TaskConfig
from async_grpo.environments.pool import EnvironmentPool
from async_grpo.rollout.chat_format import PlainFormat, chat_format_with
from async_grpo.rollout.episodes import PlayerParts


class ServedPlayers:
    """The served players of an actor; see `OutsidePlayers`."""

    def __init__(self, parts: PlayerParts) -> None:
        self._parts = parts
        self._pools: list[EnvironmentPool] = []
        self._endpoint: Endpoint | None = None
        self._work = Work()
        self._announced: Path | None = None

    async def of(self, settings: TaskConfig, task: Any) -> ServedPlayer:
        """Start a player of this task. Raises EnvironmentFailed("start"), OSError."""
        config = self._parts.config
        if isinstance(task, External):
            return await self.served(WorkHost(self._work, task, config.environment), task)
        pool = self._parts.pool(settings, task)
        self._pools.append(pool)
        await pool.start()
        return await self.served(ProgramHost(pool), task)

    async def served(self, host: Host, task: Any) -> ServedPlayer:
        """Start a player whose episodes this host has played. Raises OSError."""
        parts, config, tokenizer = self._parts, self._parts.config, self._parts.tokenizer
        if self._endpoint is None:
            self._endpoint = Endpoint(
                config.endpoint, words=tokenizer.decode, counts=parts.counts, work=self._work
            )
            await self._endpoint.start()
        if isinstance(host, WorkHost) and self._announced is None:
            self._announced = announce(
                Path(config.run.dir), parts.name, url=self._endpoint.url, key=self._work.key
            )
        return ServedPlayer(
            parts,
            host,
            endpoint=self._endpoint,
            weights=task.weights,
            formats=lambda tools: (
                chat_format_with(config, tokenizer, tools) or PlainFormat(tokenizer)
            ),
        )

    async def close(self) -> None:
        """End all programs, and stop listening."""
        if self._announced is not None:
            self._announced.unlink(missing_ok=True)
        for pool in self._pools:
            await pool.close()
        if self._endpoint is not None:
            await self._endpoint.close()
