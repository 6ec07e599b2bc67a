"""Settings of episodes: what a player asks of engine and environments, which children are started,
and how many episodes an actor begins.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from async_grpo.config.schema import Config
from async_grpo.environments.base import Action, Observation
from async_grpo.environments.pool import EnvironmentFailed, EnvironmentPool
from async_grpo.environments.tools import with_tools
from async_grpo.rollout.chat_format import chat_format_of
from async_grpo.rollout.engine.base import Completion, Sampling
from async_grpo.rollout.episodes import EpisodePlayer, GroupPlay, PlayerParts
from async_grpo.rollout.producer import GroupProducer
from async_grpo.tasks import pipe
from async_grpo.tasks.base import Problem
from async_grpo.tasks.children import Child
from async_grpo.wire.codec import GroupTicket
from tests.support.chat_templates import HERMES
from tests.support.renderer_families import renderer_of_family
from tests.support.tools import Asks
from tests.support.wiring import Wire

TURN = 2


class Engine:
    """Says two tokens a turn, or as many as it may."""

    stop_token_ids = (1,)
    max_num_seqs, unfinished = 8, 0

    def __init__(self, *, long: bool) -> None:
        self.long, self.asked = long, []

    async def generate(
        self, tokens: list[int], sampling: Sampling, *, name: str = "", purpose: str = "rollouts"
    ) -> list[Completion]:
        n = sampling.max_tokens if self.long else min(TURN, sampling.max_tokens)
        self.asked.append((len(tokens), sampling.max_tokens))
        ids = np.full(n, 5, np.int32)
        ended = "length" if self.long or n < TURN else "stop"
        return [Completion(ids, np.zeros(n, np.float32), [("v0.0", 0, n)], ended, 1.0)]

    def cut_off(self, name: str) -> int:
        return 0


class Episodes:
    """Environments that answer the same, again and again."""

    open_episodes = 11

    def __init__(self, answer: Observation | EnvironmentFailed) -> None:
        self.answer = answer

    async def open(self, reference: Any, seed: int) -> tuple[Episodes, Observation]:
        return self, Observation()

    async def step(self, action: Action) -> Observation:
        if isinstance(self.answer, EnvironmentFailed):
            raise self.answer
        return self.answer

    async def close(self) -> None: ...


class Tokenizer:
    eos_token_id = 1

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [7] * len(text)}

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "x" * len(ids)


def played(config: Config) -> list[Any]:
    """How episodes go in which environments say little, much, nothing that makes sense, or hang."""
    return [
        asyncio.run(_played(config, answer, long=long))
        for answer in (
            Observation(),
            Observation("much" * 2),
            Observation(invalid=True),
            EnvironmentFailed("timeout"),
        )
        for long in (False, True)
    ]


async def _played(config: Config, answer: Any, *, long: bool) -> Any:
    engine = Engine(long=long)
    parts = PlayerParts(config, engine, Tokenizer(), Counter())
    player = EpisodePlayer(parts, Episodes(answer), weights={"value": 1.0})
    sampling = Sampling(n=1, max_tokens=0, temperature=1.0)
    try:
        group = GroupPlay(engine, GroupTicket(0, 1, 0), lambda generating: None)
        episode = await player.play(Problem("ab", None), sampling, seed=3, group=group)
    except EnvironmentFailed as error:
        return engine.asked, error.reason
    return engine.asked, episode.finish_reason, episode.session.sampled


def started(config: Config) -> list[Any]:
    """The children of a pool, and what they are told."""
    seen: list[Any] = []

    async def spawn(setup: bytes, env_vars: list[str]) -> None:
        told = pipe.unpack(setup)
        seen.append((told["memory_mb"], told["tools"], sorted(told["timeouts"].items())))
        raise EnvironmentFailed("start", "these are enough")

    pool = EnvironmentPool(config.task, config.environment, weights={}, seed=0)
    with mock.patch.object(Child, "spawn", spawn), suppress(EnvironmentFailed):
        asyncio.run(pool.start())
    return seen


def written(config: Config) -> Any:
    """How chats are written, and with which parser calls are read."""
    _, tokenizer = renderer_of_family("qwen3")
    tokenizer.chat_template = HERMES
    config = config.unchecked_copy(
        update={"model": config.model.unchecked_copy(update={"path": "Qwen/Qwen3-0.6B"})}
    )
    task = with_tools(Asks(None, 0), ["calculator"])
    found = chat_format_of(config, tokenizer, task)
    reader = getattr(found, "_reader", None)
    return type(found).__name__, type(getattr(reader, "_parser", None)).__name__


def begun(config: Config) -> list[int]:
    """How many groups an actor asks for that has some episodes open already."""
    actor = GroupProducer(config, actor_id="a", queue=None, model_dir="m", device="cpu", cores=())
    player = SimpleNamespace(open_episodes=11)
    posed = {"": SimpleNamespace(player=player)}
    actor._parts = SimpleNamespace(engine=Engine(long=False), posed=posed)
    rooms = []
    for stages in ((), ("generating",), ("generating", "queued")):
        actor._groups = {
            (number, 1): SimpleNamespace(stage=stage) for number, stage in enumerate(stages)
        }
        rooms.append(actor._room())
    return rooms


WIRES = [
    Wire("rollout.turn_length", 3, played),
    Wire("rollout.context_length", 20, played),
    Wire("rollout.max_turns", 2, played),
    Wire("rollout.max_open_episodes", 24, begun),
    Wire("environment.on_timeout", "fail_group", played),
    Wire("environment.max_invalid", 1, played),
    Wire("environment.workers", 3, started),
    Wire("environment.tools", ["calculator"], started),
    Wire("environment.tool_parser", "hermes", written),
    Wire("environment.renderer", "template", written),
    Wire("environment.reset_timeout_s", 7.0, started),
    Wire("environment.step_timeout_s", 8.0, started),
    Wire("environment.memory_mb", 555, started),
]
