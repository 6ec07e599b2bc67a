"""Plays episodes over HTTP: a program, or a worker elsewhere, talks to the actor's endpoint.

Runs in: rollout actors. Hides that an episode's turns come over HTTP:

    program (environment child), or worker --requests--> Endpoint -> ServedEpisode -> engine
            --its end: rewards-->  Episode

What it means that a program or a worker fails: after a request that was refused because the episode
had used up its tokens or turns, and that no later turn has followed (`ServedEpisode.used_up`), the
policy may have caused it, and the episode is worth nothing; so is one that takes too long
(`environment.on_timeout`). Any other failure is never scored: EnvironmentFailed. So is an episode
in which nothing was sampled, whatever was refused: there is nothing to train.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from async_grpo.agents.endpoint.messages import RequestError
from async_grpo.agents.endpoint.served import ServedEpisode
from async_grpo.agents.endpoint.server import Endpoint
from async_grpo.agents.program_process import sweep
from async_grpo.environments.base import Action, Observation
from async_grpo.environments.pool import EnvironmentFailed, EnvironmentPool
from async_grpo.rollout.chat_format import ChatFormat, Message
from async_grpo.rollout.engine.base import Completion, Purpose, Sampling
from async_grpo.rollout.episodes import Episode, GroupPlay, PlayerParts
from async_grpo.rollout.session import Session
from async_grpo.tasks.base import Problem

_REASONS = ("env_done", "stop", "length", "max_turns", "context", "invalid_action", "repetition")


MOST_FORMATS = 64
"""Sets of tools whose chat formats are kept."""


class Host(Protocol):
    """Has episodes played by somebody who talks to the endpoint."""

    @property
    def open_episodes(self) -> int:
        """Count the episodes that are played now."""

    async def run(
        self, reference: dict[str, Any], seed: int, *, url: str, key: str, busy: Callable[[], bool]
    ) -> Observation:
        """Have one played to its end. busy: whether a request of it is open. Raises
        EnvironmentFailed.
        """


class ProgramHost:
    """Runs a program per episode, in the environment children."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self._pool = pool

    @property
    def open_episodes(self) -> int:
        """Count the episodes that have a program."""
        return self._pool.open_episodes

    async def run(
        self, reference: dict[str, Any], seed: int, *, url: str, key: str, busy: Callable[[], bool]
    ) -> Observation:
        """Run one to its end. Raises EnvironmentFailed."""
        try:
            opened, _ = await self._pool.open({**reference, "url": url, "key": key}, seed)
            try:
                return await opened.step(Action(""))
            finally:
                await asyncio.shield(opened.close())
        except EnvironmentFailed as error:
            if error.reason in ("crash", "memory", "timeout", "closed"):  # its owner may be gone
                await asyncio.to_thread(sweep, key)
            raise


class ServedPlayer:
    """Plays the served episodes of one task on one engine; see `EpisodePlayer`."""

    def __init__(
        self,
        parts: PlayerParts,
        host: Host,
        *,
        endpoint: Endpoint,
        weights: dict[str, float],
        formats: Callable[[Sequence[Message]], ChatFormat],
    ) -> None:
        """Take the parts. formats: how chats with these tools are written; or SetupError."""
        self._config, self._engine = parts.config, parts.engine
        self._tokenizer, self._counts = parts.tokenizer, parts.counts
        self._host, self._weights = host, weights
        self._stops = frozenset(self._engine.stop_token_ids)
        self._make, self._formats = formats, dict[str, ChatFormat]()
        self._endpoint = endpoint

    @property
    def open_episodes(self) -> int:
        """Count the episodes that are played now."""
        return self._host.open_episodes

    async def play(
        self,
        problem: Problem,
        sampling: Sampling,
        *,
        seed: int,
        purpose: Purpose = "rollouts",
        group: GroupPlay | None = None,
        watch: Callable[[ServedEpisode], None] = lambda served: None,
    ) -> Episode:
        """Play one episode; see `EpisodePlayer.play`. watch: is told of it when it begins. Raises
        EnvironmentFailed, EngineError.
        """
        number = None if group is None else group.join()
        episode = Episode(Session(), dict.fromkeys(self._weights, 0.0))
        if group is not None:
            group.sessions.append(episode.session)

        async def sample(tokens: list[int], one: Sampling) -> Completion:
            if group is None or number is None:
                [done] = await self._engine.generate(tokens, one, purpose=purpose)
                return done
            return await group.turn(number, tokens, one)

        served = ServedEpisode(
            self._config.rollout,
            episode,
            sample=sample,
            formats=self._format,
            text=self._text,
            sampling=sampling,
            counts=self._counts,
        )
        watch(served)
        try:
            async with self._endpoint.serving(served) as key:
                answer = await self._run(problem, seed, served, key)
            if served.failure is not None:  # nobody knows what it would have been worth
                raise served.failure
            self._judge(episode, answer, served)
        except EnvironmentFailed as error:
            self._counts[f"environment_{error.reason}"] += 1
            raise
        self._counts[f"episodes_{episode.finish_reason}"] += 1
        return episode

    async def _run(
        self, problem: Problem, seed: int, served: ServedEpisode, key: str
    ) -> Observation:
        """Have the episode played, and say what a failure means."""
        try:
            return await self._host.run(
                problem.reference,
                seed,
                url=self._endpoint.url,
                key=key,
                busy=lambda: served.open > 0,
            )
        except EnvironmentFailed as error:
            if served.failure is not None:
                raise served.failure from error
            late = error.reason == "timeout"
            if late and self._config.environment.on_timeout == "score_zero":
                return Observation("env_timeout", done=True, correct=0.0)
            if error.reason != "exception" or not served.used_up:
                raise
            if not served.episode.session.rows:
                raise EnvironmentFailed("refused", f"{_unasked(served)}; {error}") from error
            return Observation(served.used_up, done=True, correct=0.0)

    def _judge(self, episode: Episode, answer: Observation, served: ServedEpisode) -> None:
        """Note what an episode is worth. Raises EnvironmentFailed without anything to train."""
        if not episode.session.rows:
            raise EnvironmentFailed("refused" if served.refusal else "silent", _unasked(served))
        unknown = sorted(set(answer.rewards) - set(self._weights))
        if unknown:
            raise EnvironmentFailed("wrong_type", f"there is no reward {', '.join(unknown)}")
        episode.rewards |= answer.rewards
        episode.verdict = answer.correct
        episode.metrics.update(answer.metrics)  # type: ignore[arg-type]
        reason = str(answer.content)
        known = reason in _REASONS or reason == "env_timeout"
        episode.finish_reason = served.last_word or (reason if known else "env_done")
        for name, value in episode.metrics.items():
            self._counts[f"seen_{name}"] += value

    def _format(self, tools: Sequence[Message]) -> ChatFormat:
        """Return how chats with these tools are written. Raises RequestError."""
        try:
            key = json.dumps(list(tools), sort_keys=True)
            if key not in self._formats:
                if len(self._formats) >= MOST_FORMATS:  # a client has many sets of tools
                    self._formats.pop(next(iter(self._formats)))
                self._formats[key] = self._make(tools)
        except Exception as error:
            raise RequestError(400, f"the model cannot be given these tools: {error}") from error
        return self._formats[key]

    def _text(self, ids: Sequence[int]) -> str:
        kept = ids[:-1] if ids and ids[-1] in self._stops else ids
        return self._tokenizer.decode(kept, skip_special_tokens=False)


def _unasked(served: ServedEpisode) -> str:
    if served.refusal:
        return f"all requests of the episode were refused: {served.refusal}"
    return "the episode ended without asking the policy"
