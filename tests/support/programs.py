"""Programs that play episodes on an engine of the test."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from async_grpo.agents.endpoint.player import Host, ProgramHost, ServedPlayer
from async_grpo.agents.endpoint.server import Endpoint
from async_grpo.agents.program import Program
from async_grpo.config.schema import Config
from async_grpo.environments.pool import EnvironmentFailed, EnvironmentPool
from async_grpo.rollout.chat_format import PlainFormat
from async_grpo.rollout.engine.base import Sampling
from async_grpo.rollout.episodes import Episode, PlayerParts
from async_grpo.tasks.base import Problem
from tests.support.scripted_policy import Letters, Saying

AGENTS = Path(__file__).parent.parent / "agents" / "endpoint" / "agents"
PLAIN = PlainFormat(Letters())


def config_of(command: list[str], *, endpoint: dict[str, Any] | None = None, **more: Any) -> Config:
    environment = {"workers": 1, "step_timeout_s": 30.0} | more.pop("environment", {})
    limits = {"prompt_length": 20, "response_length": 60, "context_length": 100, "max_turns": 6}
    return Config.model_validate(
        {
            "run": {"total_steps": 2},
            "model": {"path": "m"},
            "task": {
                "name": "program",
                "options": {"command": command, "of": "chain", **more.pop("options", {})},
                "env_vars": more.pop("env_vars", []),
            },
            "rollout": limits | {"rollout_batch_size": 2, "group_size": 2} | more,
            "environment": environment,
            "endpoint": endpoint or {},
        }
    )


@asynccontextmanager
async def playing(
    engine: Any, config: Config, chat: PlainFormat
) -> AsyncIterator[tuple[ServedPlayer, Program, Counter[str]]]:
    task, counts = Program(config.task, 0), Counter[str]()
    pool = EnvironmentPool(config.task, config.environment, weights=task.weights, seed=0)
    await pool.start()
    endpoint = Endpoint(config.endpoint, words=Letters().decode, counts=counts)
    await endpoint.start()
    player = served_player(
        config, engine, endpoint, ProgramHost(pool), weights=task.weights, counts=counts, chat=chat
    )
    try:
        yield player, task, counts
    finally:
        await pool.close()
        await endpoint.close()


def served_player(
    config: Config,
    engine: Any,
    endpoint: Endpoint,
    host: Host,
    *,
    weights: dict[str, float],
    counts: Counter[str],
    chat: PlainFormat = PLAIN,
) -> ServedPlayer:
    parts = PlayerParts(config, engine, Letters(), counts)
    return ServedPlayer(parts, host, endpoint=endpoint, weights=weights, formats=lambda tools: chat)


def script(name: str) -> list[str]:
    return [sys.executable, str(AGENTS / f"{name}.py")]


def play(
    engine: Any,
    config: Config,
    *,
    index: int = 0,
    problem: Problem | None = None,
    chat: PlainFormat = PLAIN,
) -> tuple[Episode | EnvironmentFailed, Counter[str]]:
    async def scenario() -> tuple[Episode | EnvironmentFailed, Counter[str]]:
        async with playing(engine, config, chat) as (player, task, counts):
            sampling = Sampling(n=1, max_tokens=60, temperature=1.0, seed=5)
            try:
                return await player.play(problem or task.train(index), sampling, seed=3), counts
            except EnvironmentFailed as error:
                return error, counts

    return asyncio.run(asyncio.wait_for(scenario(), 60))


def main() -> None:
    """Play a program that starts eight others, says so in a file, and hangs."""
    config = config_of(
        [*script("failing"), "leaves_and_hangs", sys.argv[1]],
        options={"preload": json.loads(sys.argv[2])},
    )
    play(Saying("a1"), config)


if __name__ == "__main__":
    main()
