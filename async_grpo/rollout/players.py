"""Which player plays a task's episodes: its environment, or a program over the endpoint.

Runs in: rollout actors. Hides the choice; what both need is in `Player`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

from async_grpo.config.schema import Config, TaskConfig
from async_grpo.environments.pool import EnvironmentPool
from async_grpo.environments.program import is_program
from async_grpo.rollout.chat_format import PlainFormat, chat_format_of, chat_format_with
from async_grpo.rollout.endpoint.player import ProgramPlayer
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
        engine: Engine,
        tokenizer: Any,
        counts: Counter[str],
        cpu: set[int] | None,
    ) -> None:
        """Take what all players share. counts: where they add up what they see; cpu: cores of the
        environments.
        """
        self._config, self._engine = config, engine
        self._tokenizer, self._counts = tokenizer, counts
        self._cpu = cpu
        self._pools: list[EnvironmentPool] = []
        self._programs: list[ProgramPlayer] = []

    async def of(self, settings: TaskConfig, task: Any) -> Player:
        """Start a player of this task. Raises EnvironmentFailed("start"), OSError."""
        config, tokenizer = self._config, self._tokenizer
        pool = EnvironmentPool(
            settings, config.environment, weights=task.weights, seed=config.seed, cpu=self._cpu
        )
        self._pools.append(pool)
        await pool.start()
        common: dict[str, Any] = {
            "engine": self._engine,
            "pool": pool,
            "tokenizer": tokenizer,
            "weights": task.weights,
            "counts": self._counts,
        }
        if not is_program(task):
            return EpisodePlayer(config, chat=chat_format_of(config, tokenizer, task), **common)
        player = ProgramPlayer(
            config,
            formats=lambda tools: (
                chat_format_with(config, tokenizer, tools) or PlainFormat(tokenizer)
            ),
            **common,
        )
        await player.start()
        self._programs.append(player)
        return player

    async def close(self) -> None:
        """End all environments, and stop listening."""
        for pool in self._pools:
            await pool.close()
        for program in self._programs:
            await program.close()
