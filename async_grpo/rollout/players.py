"""Which player plays a task's episodes: its environment, a program or a worker.

Runs in: rollout actors. Hides the choice; what both need is in `Player`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Protocol

from async_grpo.config.schema import Config, TaskConfig
from async_grpo.environments.external import External
from async_grpo.environments.pool import EnvironmentPool
from async_grpo.environments.served import is_served
from async_grpo.rollout.chat_format import PlainFormat, chat_format_of, chat_format_with
from async_grpo.rollout.endpoint.player import Host, ProgramHost, ServedPlayer
from async_grpo.rollout.endpoint.server import Endpoint
from async_grpo.rollout.endpoint.work import Work, WorkHost, announce
from async_grpo.rollout.engine import Engine, Purpose, Sampling
from async_grpo.rollout.episodes import Episode, EpisodePlayer, GroupPlay
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


class Players:
    """The players of an actor, with their environments."""

    def __init__(
        self,
        config: Config,
        *,
        name: str,
        engine: Engine,
        tokenizer: Any,
        counts: Counter[str],
        cpu: set[int] | None,
    ) -> None:
        """Take what all players share. name: the actor's; counts: where they add up what they see;
        cpu: cores of the environments.
        """
        self._name = name
        self._config, self._engine = config, engine
        self._tokenizer, self._counts = tokenizer, counts
        self._cpu = cpu
        self._pools: list[EnvironmentPool] = []
        self._endpoint: Endpoint | None = None
        """One for all of its tasks."""
        self._work = Work()
        self._announced: Path | None = None

    async def of(self, settings: TaskConfig, task: Any) -> Player:
        """Start a player of this task. Raises EnvironmentFailed("start"), OSError."""
        config, tokenizer = self._config, self._tokenizer
        if isinstance(task, External):
            return await self.served(WorkHost(self._work, task, config.environment), task)
        pool = EnvironmentPool(
            settings, config.environment, weights=task.weights, seed=config.seed, cpu=self._cpu
        )
        self._pools.append(pool)
        await pool.start()
        if is_served(task):
            return await self.served(ProgramHost(pool), task)
        return EpisodePlayer(
            config,
            engine=self._engine,
            pool=pool,
            tokenizer=tokenizer,
            weights=task.weights,
            counts=self._counts,
            chat=chat_format_of(config, tokenizer, task),
        )

    async def served(self, host: Host, task: Any) -> ServedPlayer:
        """Start a player whose episodes this host has played over HTTP. Raises OSError."""
        config, tokenizer = self._config, self._tokenizer
        if self._endpoint is None:
            self._endpoint = Endpoint(
                config.endpoint, words=tokenizer.decode, counts=self._counts, work=self._work
            )
            await self._endpoint.start()
        if isinstance(host, WorkHost) and self._announced is None:
            self._announced = announce(
                Path(config.run.dir), self._name, url=self._endpoint.url, key=self._work.key
            )
        return ServedPlayer(
            config,
            engine=self._engine,
            endpoint=self._endpoint,
            host=host,
            tokenizer=tokenizer,
            weights=task.weights,
            counts=self._counts,
            formats=lambda tools: (
                chat_format_with(config, tokenizer, tools) or PlainFormat(tokenizer)
            ),
        )

    async def close(self) -> None:
        """End all environments, and stop listening."""
        if self._announced is not None:
            self._announced.unlink(missing_ok=True)
        for pool in self._pools:
            await pool.close()
        if self._endpoint is not None:
            await self._endpoint.close()
