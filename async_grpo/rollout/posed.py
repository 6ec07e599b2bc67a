"""One task on an actor: how its prompts are answered, and what its rewards are called.

Runs in: rollout actors. Hides which tasks have verifiers and which are played, and when either
starts. Invariant: a group's reward components have the names that `mixture.reward_weights` has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from async_grpo.config.schema import Config
from async_grpo.environments.base import HasEnvironment
from async_grpo.rollout.players import Player
from async_grpo.tasks.base import Task, task_weights
from async_grpo.tasks.verifier import VerifierPool

StartPlayer = Callable[[Config, Any], Awaitable[Player]]


class PosedTask:
    """A task with its verifiers, or the player of its episodes. config: as it has it
    (`Config.of_task`). weights: of its reward components, by their own names.
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        *,
        make_verifiers: Callable[[], VerifierPool],
        start_player: StartPlayer,
    ) -> None:
        self.config, self.task = config, task
        self.verifiers, self._make_verifiers = make_verifiers(), make_verifiers
        self.weights = task_weights(config.task, task)
        self.plays = isinstance(task, HasEnvironment)
        self.player: Player | None = None
        self._start_player = start_player
        self._starting, self._started = asyncio.Lock(), False

    async def start(self) -> None:
        """Start verifiers or player, once; again after a start that failed. Raises VerifierError,
        EnvironmentFailed("start"), OSError.
        """
        async with self._starting:
            if self._started:
                return
            if self.plays:
                self.player = await self._start_player(self.config, self.task)
            else:
                try:
                    await self.verifiers.start()
                except BaseException:  # it is closed for good
                    self.verifiers = self._make_verifiers()
                    raise
            self._started = True

    async def close(self) -> None:
        """Stop the verifiers."""
        await self.verifiers.close()

    def named(self, rewards: Mapping[str, float]) -> dict[str, float]:
        """Return the rewards by their names in the run."""
        return {self.config.component(name): value for name, value in rewards.items()}
