"""Which player plays a task's episodes: its environment here, or somebody outside.

Runs in: rollout actors. Hides the choice; what both need is in `Player`. Who plays from outside is
a task's own matter (`HasPlayers`): its class is imported by the name that the task gives.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any, Protocol

from async_grpo.config.schema import Config, TaskConfig
from async_grpo.environments.base import HasPlayers
from async_grpo.environments.pool import EnvironmentPool
from async_grpo.rollout.chat_format import chat_format_of
from async_grpo.rollout.engine.base import Purpose, Sampling
from async_grpo.rollout.episodes import Episode, EpisodePlayer, GroupPlay, PlayerParts
from async_grpo.tasks.base import Problem


class Player(Protocol):
    """Plays the episodes of one task on one engine."""

    @property
    def open_episodes(self) -> int:
        """Count the episodes that have an environment."""

    async def play(
        self,
        problem: Problem,
        sampling: Sampling,
        *,
        seed: int,
        purpose: Purpose = "rollouts",
        group: GroupPlay | None = None,
    ) -> Episode:
        """Play one episode. seed: of the environment. group: what it belongs to. Raises
        EnvironmentFailed, PromptTooLong, EngineError.
        """


class OutsidePlayers(Protocol):
    """Players of tasks whose episodes are played from outside; made of an actor's `PlayerParts`."""

    async def of(self, settings: TaskConfig, task: Any) -> Player:
        """Start a player of this task. Raises EnvironmentFailed("start"), OSError."""

    async def close(self) -> None:
        """End whatever was started."""


class Players:
    """The players of an actor, with their environments."""

    def __init__(self, parts: PlayerParts) -> None:
        self._parts = parts
        self._pools: list[EnvironmentPool] = []
        self._outside: dict[str, OutsidePlayers] = {}

    async def of(self, config: Config, task: Any) -> Player:
        """Start a player of this task. config: as the task has it. Raises
        EnvironmentFailed("start"), OSError.
        """
        if isinstance(task, HasPlayers):
            return await self.outside(task.players).of(config.task, task)
        parts = replace(self._parts, config=config)
        pool = parts.pool(config.task, task)
        self._pools.append(pool)
        await pool.start()
        chat = chat_format_of(parts.config, parts.tokenizer, task)
        return EpisodePlayer(parts, pool, weights=task.weights, chat=chat)

    def outside(self, path: str) -> Any:
        """Return the actor's one object of this class, `module:Class`."""
        if path not in self._outside:
            module, _, name = path.partition(":")
            self._outside[path] = getattr(importlib.import_module(module), name)(self._parts)
        return self._outside[path]

    async def close(self) -> None:
        """End all environments, and whatever players from outside have started."""
        for outside in self._outside.values():
            await outside.close()
        for pool in self._pools:
            await pool.close()
