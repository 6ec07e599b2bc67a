"""The policy as an endpoint alone, to debug an agent.

Runs in: the process of `async-grpo serve`, without Ray, learner or queue. Hides what an episode is
where nobody trains:

    task `program` or `external`  -> held-out problems are played; every episode is shown
    any other task                -> whoever has the address and the key asks; Enter ends an
                                     episode, which is shown, and begins the next one
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TextIO

from async_grpo.agents.endpoint.player import ServedPlayer
from async_grpo.agents.endpoint.served import ServedEpisode
from async_grpo.agents.served import ServedTask
from async_grpo.config.schema import Config
from async_grpo.environments.base import HasPlayers, Observation
from async_grpo.environments.pool import EnvironmentFailed
from async_grpo.errors import SetupError
from async_grpo.observe.console.console import Console
from async_grpo.rollout.generation import sampling_of
from async_grpo.rollout.host import EngineHost
from async_grpo.run.preflight.model import look
from async_grpo.tasks.base import Problem
from async_grpo.tasks.registry import create_task
from async_grpo.tools.evaluate.alone import actor_alone, quiet
from async_grpo.tools.serve.shown import Shown

FAILED = 1


def serve(config: Config, console: Console, *, episodes: int, file: TextIO) -> int:
    """Serve until all episodes are played, or until it is stopped; the exit code."""
    if config.tasks:
        raise SetupError("`tasks` has several, and one is served: say `--task` and its data")
    task = create_task(config.task, config.seed)
    console.info(*(look(config, task, of_evaluation=True) or []))
    with quiet():
        return asyncio.run(_served(config, console, episodes=episodes, file=file))


async def _served(config: Config, console: Console, *, episodes: int, file: TextIO) -> int:
    failed = 0
    async with actor_alone(config, console, name="serve") as actor:
        words = actor.parts.tokenizer.decode
        playing = _problems if isinstance(actor.parts.posed[""].task, HasPlayers) else _by_hand
        async for shown in playing(config, console, actor, episodes):
            failed += shown.failed is not None
            console.info(*shown.lines(words))
            file.write(json.dumps(shown.record(words)) + "\n")
            file.flush()
    return FAILED if failed else 0


async def _problems(
    config: Config, console: Console, actor: EngineHost, episodes: int
) -> AsyncIterator[Shown]:
    """Play held-out problems, all at the same time; each when it has ended."""
    player = actor.parts.posed[""].player
    assert isinstance(player, ServedPlayer)
    problems = actor.parts.task.evaluation(episodes)
    plays = [_play(config, player, problem, number) for number, problem in enumerate(problems, 1)]
    for ended in asyncio.as_completed(plays):
        yield await ended


async def _by_hand(
    config: Config, console: Console, actor: EngineHost, episodes: int
) -> AsyncIterator[Shown]:
    """Serve one episode after the other to whoever asks."""
    assert actor.parts.players is not None
    room = f"{config.rollout.response_length} sampled tokens (rollout.response_length)"
    hand = _Hand(console, f"it ends after {config.rollout.max_turns} turns, or {room}")
    task = actor.parts.posed[""].task
    player = await actor.parts.players.outside(ServedTask.players).served(hand, task)
    problem, number = Problem("", {}), 0
    with hand.listening():
        while not hand.stopped:
            number += 1
            shown = await _play(config, player, problem, number)
            if shown.served.turns:
                yield shown


async def _play(config: Config, player: ServedPlayer, problem: Problem, number: int) -> Shown:
    """Play one episode to its end, sampled as in training."""
    seen: list[ServedEpisode] = []
    rollout, begun, failed = config.rollout, time.monotonic(), None
    sampling = replace(sampling_of(rollout, {}), repetition=rollout.repetition)
    try:
        await player.play(problem, sampling, seed=number, watch=seen.append)
    except EnvironmentFailed as error:
        failed = error
    return Shown(number, seen[0], time.monotonic() - begun, failed)


class _Hand:
    """A host whose episodes end when a person says so."""

    def __init__(self, console: Console, room: str) -> None:
        self._console, self._ended = console, asyncio.Event()
        self._room = room
        self.stopped = False
        self.open_episodes = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to lines of standard input, and to signals, inside."""
        loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)

        def line() -> None:
            if not os.read(sys.stdin.fileno(), 4096):  # its end: signals alone from now on
                loop.remove_reader(sys.stdin.fileno())
            else:
                self._ended.set()

        for number in signals:
            loop.add_signal_handler(number, self._stop)
        with suppress(OSError, ValueError):  # a file, or none: then signals alone
            loop.add_reader(sys.stdin.fileno(), line)
        try:
            yield
        finally:
            loop.remove_reader(sys.stdin.fileno())
            for number in signals:
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.stopped = True
        self._ended.set()

    async def run(
        self, reference: dict[str, Any], seed: int, *, url: str, key: str, busy: Callable[[], bool]
    ) -> Observation:
        """Say where the policy is, and wait for the end."""
        self._ended.clear()
        if not self.stopped:
            self._console.info(
                f"episode {seed}; Enter ends it, Ctrl-C ends the endpoint:",
                f"export OPENAI_BASE_URL={url} OPENAI_API_KEY={key}",
                self._room,
            )
            await self._ended.wait()
        return Observation("env_done", done=True)
