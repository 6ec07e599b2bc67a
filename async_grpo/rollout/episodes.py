"""Plays episodes: the policy's turns from the engine, the answers from an environment.

Runs in: rollout actors. Hides the limits that end an episode, and what a failure means:

    environment: reset -> prompt -> engine: a turn -> environment: step -> context -> a turn ...

What the policy can have caused is scored, with a finish reason of its own: a limit of turns, tokens
or invalid actions, and (`environment.on_timeout`) an answer that takes too long. What it cannot
have caused never is: EnvironmentFailed, and the group is issued again. Invariants: an environment
that was opened is closed; while one thinks, its episode holds no place in the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from async_grpo.config.schema import Config, RolloutConfig, TaskConfig
from async_grpo.environments.base import Action, Content, Observation
from async_grpo.environments.pool import EnvironmentFailed, EnvironmentPool, OpenEpisode
from async_grpo.rollout.chat_format import ChatFormat, Said
from async_grpo.rollout.conversation import ContentError, Conversation
from async_grpo.rollout.engine.base import Completion, Engine, Purpose, Sampling
from async_grpo.rollout.partial import EMPTY, Turn, digest, join
from async_grpo.rollout.session import NO_ROUTES, Session
from async_grpo.tasks.base import Problem, Score
from async_grpo.wire.codec import GroupTicket
from async_grpo.wire.groups import Row

_NUMBERS = itertools.count()


def as_rows(
    episodes: Sequence[Episode], *, trained: int, weights: Mapping[str, float]
) -> tuple[list[np.ndarray], list[Row]]:
    """Return the prompts and rows of a group; the first `trained` episodes are to be trained, the
    others are baselines. weights: of the reward components, for rewards of turns.
    """
    prompts: dict[tuple[int, ...], int] = {}
    rows: list[Row] = []
    forked = any(len(episode.session.rows) > 1 for episode in episodes)
    turned = any(episode.turn_rewards for episode in episodes)
    for number, episode in enumerate(episodes):
        values = [
            sum(weights[name] * value for name, value in turn.items())
            for turn in episode.turn_rewards
        ]
        for one in episode.session.rows:
            count = len(one.segments)
            rows.append(
                Row(
                    response_ids=one.response_ids,
                    behavior_logprobs=one.behavior_logprobs,
                    segments=one.segments,
                    versions=one.versions,
                    rewards=episode.rewards,
                    verdict=episode.verdict,
                    finish_reason=episode.finish_reason,
                    role="train" if number < trained else "baseline",
                    prompt=prompts.setdefault(tuple(one.prompt), len(prompts)),
                    episode=number if forked else None,
                    turn_rewards=values[:count] if turned else None,
                )
            )
            del values[:count]
    return [np.asarray(prompt, np.int32) for prompt in prompts], rows


def routes_plane(
    prompts: Sequence[np.ndarray], rows: Sequence[Row], parts: Sequence[Sequence[np.ndarray]]
) -> dict[str, np.ndarray]:
    """Return the plane of what engines routed of all tokens of a group (`codec`), the largest
    number of its type where they do not say; nothing where they say nothing. parts: of the first
    rows, in turns. The first row with a prompt gives the prompt's.
    """
    found = [np.concatenate([part for part in one if len(part)] or [NO_ROUTES]) for one in parts]
    if not (width := max((one.shape[1] for one in found), default=0)):
        return {}
    found = [one if len(one) else one.reshape(0, width) for one in found]
    kind = np.uint16 if any(one.max(initial=0) >= 255 for one in found) else np.uint8
    starts = np.cumsum([0, *map(len, prompts), *(len(row.response_ids) for row in rows)])
    plane = np.full((starts[-1], width), np.iinfo(kind).max, kind)
    for row, one, start in reversed([*zip(rows, found, starts[len(prompts) :], strict=False)]):
        count = len(prompts[row.prompt])
        plane[starts[row.prompt] :][: len(one[:count])] = one[:count]
        plane[start:][: len(one[count:])] = one[count:]
    return {"routes": plane}


def turn_room(rollout: RolloutConfig, *, sampled: int, behind: int, length: int) -> tuple[int, str]:
    """Return the most tokens of the next turn, and the finish reason when they are used up.
    sampled: tokens of the episode; behind: tokens of the row behind its prompt; length: with it.
    """
    left = rollout.response_length - sampled
    context = (rollout.context_length or rollout.response_length) - behind
    context = min(context, rollout.longest_row - length)  # a fork's prompt is long
    turn = rollout.turn_length or left
    return min(left, context, turn), "context" if context < min(left, turn) else "length"


class PromptTooLong(ValueError):
    """A prompt has more tokens than `rollout.prompt_length`."""


@dataclass
class Episode:
    """An episode while it is played, and afterwards. last_token: Unix seconds of its last turn;
    ended: of its end, with all that its environment did, 0.0 for a plain response.
    """

    session: Session
    rewards: dict[str, float]
    verdict: float | None = None
    finish_reason: str = ""
    turn_rewards: list[dict[str, float]] = field(default_factory=list)
    metrics: Counter[str] = field(default_factory=Counter)
    first_token: float = 0.0
    last_token: float = 0.0
    ended: float = 0.0
    labels: set[str] = field(default_factory=set)
    said: list[str] = field(default_factory=list)
    """What policy and environment said in turn, for tables."""

    @classmethod
    def of(cls, prompt: list[int], response: Completion, score: Score, *, ended: float) -> Episode:
        """Make the episode of one turn that a response to a plain prompt is. ended: Unix s."""
        session = Session(prompt)
        session.take(response)
        return cls(
            session,
            {name: value for name, value in score.rewards.items() if value is not None},
            score.correct,
            response.finish_reason,
            first_token=response.first_token,
            last_token=ended,
        )


@dataclass
class _Played:
    """One episode of a group: its turns so far, and the name of the one that is generated."""

    begun: list[Turn]
    """Turns of a checkpoint that are still to be played again."""
    turns: list[Turn] = field(default_factory=list)
    running: tuple[str, Turn] | None = None
    """Request, and what stands before it, with what a checkpoint has of it."""


class GroupPlay:
    """The episodes of one group while they are played."""

    def __init__(
        self,
        engine: Engine,
        ticket: GroupTicket,
        changed: Callable[[bool], None],
        begun: Sequence[Sequence[Turn]] = (),
    ) -> None:
        """Take what is told whether a turn is generated now, whenever that changes, and the turns
        that a checkpoint has begun, by episode.
        """
        self.ticket, self.prompt_ids = ticket, list[int]()
        self.sessions: list[Session] = []
        self._engine, self._changed = engine, changed
        self._running = self._cut_off = 0
        self._begun, self._episodes = [list(turns) for turns in begun], list[_Played]()

    @property
    def tokens(self) -> int:
        """Tokens that were sampled, those of aborted requests included."""
        return self._cut_off + sum(session.sampled for session in self.sessions)

    async def all(self, episodes: Sequence[Coroutine[Any, Any, Episode]]) -> list[Episode]:
        """Play them at the same time; when one fails, nobody needs the others."""
        tasks = [asyncio.ensure_future(one) for one in episodes]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def join(self) -> int:
        """Return the number of a new episode."""
        number = len(self._episodes)
        self._episodes.append(_Played(self._begun[number] if self._begun else []))
        return number

    def is_replayed(self, episode: int) -> bool:
        """Whether turns of a checkpoint are still to be played to the episode's environment."""
        return bool(self._episodes[episode].begun)

    async def turn(self, episode: int, tokens: list[int], sampling: Sampling) -> Completion:
        """Generate one turn, or the rest of it; or say what a checkpoint has. Raises
        EnvironmentFailed("replay") where something else stands before it than stood there then.
        """
        played, before = self._episodes[episode], digest(tokens)
        start = EMPTY
        if played.begun:
            known = played.begun.pop(0)
            start = known.said
            whole = bool(start.finish_reason)
            if known.before != before or len(start.token_ids) + (not whole) > sampling.max_tokens:
                raise EnvironmentFailed(
                    "replay", "the environment did not say again what it said before the resume"
                )
            if whole:
                played.turns.append(known)
                return start
        done = await self._rest(played, Turn(before, start), tokens, sampling)
        played.turns.append(Turn(before, done))
        return done

    async def _rest(
        self, played: _Played, turn: Turn, tokens: list[int], sampling: Sampling
    ) -> Completion:
        start, name = turn.said, f"e{next(_NUMBERS)}"
        room = sampling.max_tokens - len(start.token_ids)
        self._running += 1
        self._changed(True)
        played.running = name, turn
        try:
            [done] = await self._engine.generate(
                tokens + start.token_ids.tolist(), replace(sampling, max_tokens=room), name=name
            )
        except BaseException:
            self._cut_off += self._engine.cut_off(name)
            raise
        finally:
            played.running = None
            self._running -= 1
            if not self._running:
                self._changed(False)
        if not len(start.token_ids):
            return done
        return replace(join(start, done), cached_tokens=done.cached_tokens, salt=done.salt)

    def so_far(self) -> list[Completion]:
        """Return all turns of all episodes; see `turns`."""
        return [turn.said for turns in self._so_far() for turn in turns]

    def turns(self) -> list[list[bytes]]:
        """Return of each episode what stood before each of its turns."""
        return [[turn.before for turn in turns] for turns in self._so_far()]

    def _so_far(self) -> list[list[Turn]]:
        found = []
        for played in self._episodes:
            turns = [*played.turns, *played.begun]
            if played.running is not None:
                name, turn = played.running
                grown = self._engine.so_far(name).get(0)
                said = turn.said if grown is None else join(turn.said, grown)
                if len(said.token_ids):
                    turns.append(Turn(turn.before, said))
            found.append(turns)
        return found


@dataclass(frozen=True)
class PlayerParts:
    """What all players of an actor share. name: the actor's; counts: where they add up episodes by
    finish reason, turns, forks, and failures by reason; cpu: cores of the environments.
    """

    config: Config
    engine: Engine
    tokenizer: Any
    counts: Counter[str]
    name: str = ""
    cpu: set[int] | None = None

    def pool(self, settings: TaskConfig, task: Any) -> EnvironmentPool:
        """Make the environments of a task, which are to be started."""
        config, weights = self.config, task.weights
        return EnvironmentPool(
            settings, config.environment, weights=weights, seed=config.seed, cpu=self.cpu
        )


class EpisodePlayer:
    """Plays the episodes of one task on one engine."""

    def __init__(
        self,
        parts: PlayerParts,
        pool: EnvironmentPool,
        *,
        weights: dict[str, float],
        chat: ChatFormat | None = None,
    ) -> None:
        """weights: of the task's reward components. chat: of prompts that are messages."""
        self._config, self._engine = parts.config, parts.engine
        self._tokenizer, self._counts = parts.tokenizer, parts.counts
        self._pool, self._weights = pool, weights
        self._stops, self._chat = frozenset(self._engine.stop_token_ids), chat

    @property
    def open_episodes(self) -> int:
        """Count the episodes that have an environment."""
        return self._pool.open_episodes

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
        number = None if group is None else group.join()
        with self._waiting():
            opened, first = await self._pool.open(problem.reference, seed)
        try:
            talk = self._begun(problem, first)
            episode = Episode(Session(talk.prompt_ids), dict.fromkeys(self._weights, 0.0))
            if group is not None:
                group.sessions.append(episode.session)
            invalid = 0
            for turn in itertools.count(1):
                before = episode.session.tokens
                done = await self._turn(episode, sampling, turn, purpose, group, number)
                said = self._said(episode, talk, before, done)
                answer = await self._answer(opened, episode, said, done)
                if answer is None:
                    break
                invalid = invalid + 1 if answer.invalid else 0
                episode.finish_reason = self._end(episode, answer, done, turn, invalid)
                if episode.finish_reason:
                    break
                ids = talk.follow(before, done.token_ids.tolist(), said, answer.content)
                self._follow(episode, talk, ids, answer)
                room, reason = self._room(episode)
                if room < 1:  # the answer leaves no place for another turn
                    episode.finish_reason = reason
                    break
            if group is not None and number is not None and group.is_replayed(number):
                raise EnvironmentFailed("replay", "the environment ended before it had")
            self._counts[f"episodes_{episode.finish_reason}"] += 1
            for name, value in episode.metrics.items():
                self._counts[f"seen_{name}"] += value
            return episode
        except ContentError as error:
            raise EnvironmentFailed("wrong_type", str(error)) from error
        except EnvironmentFailed as error:
            self._counts[f"environment_{error.reason}"] += 1
            raise
        finally:
            await asyncio.shield(opened.close())

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the seconds that an episode waits for its environment."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._counts["waited_ms"] += round(1000 * (time.monotonic() - began))

    def _begun(self, problem: Problem, first: Observation) -> Conversation:
        talk = Conversation(self._tokenizer, problem.prompt, first.content, chat=self._chat)
        limit = self._config.rollout.prompt_length
        if len(talk.prompt_ids) > limit:
            raise PromptTooLong(
                f"a prompt with what its environment says first has {len(talk.prompt_ids)} tokens, "
                f"rollout.prompt_length is {limit}"
            )
        return talk

    def _room(self, episode: Episode) -> tuple[int, str]:
        session = episode.session
        return turn_room(
            self._config.rollout,
            sampled=session.sampled,
            behind=session.behind,
            length=session.length,
        )

    async def _turn(
        self,
        episode: Episode,
        sampling: Sampling,
        turn: int,
        purpose: Purpose,
        group: GroupPlay | None,
        number: int | None,
    ) -> Completion:
        room, _ = self._room(episode)
        seed = None if sampling.seed is None else (sampling.seed + turn) % 2**63
        one = replace(sampling, n=1, max_tokens=room, seed=seed)
        if group is None or number is None:
            tokens = episode.session.tokens
            [done] = await self._engine.generate(tokens, one, purpose=purpose)
        else:
            done = await group.turn(number, episode.session.tokens, one)
        cause, again = episode.session.prefilled(done)
        self._counts[f"prefilled_{cause}"] += again
        episode.session.take(done)
        episode.first_token = episode.first_token or done.first_token
        episode.last_token = time.time()
        episode.labels |= {label for label, _, _ in done.labels}
        self._counts["turns"] += 1
        return done

    def _said(
        self, episode: Episode, talk: Conversation, before: list[int], done: Completion
    ) -> Said:
        ids = done.token_ids.tolist()
        episode.said.append(self._text(ids))
        return talk.read(before, ids, episode.said[-1])

    async def _answer(
        self, opened: OpenEpisode, episode: Episode, said: Said, done: Completion
    ) -> Observation | None:
        """Ask the environment, and note what it says; None after an answer that took too long."""
        ids = done.token_ids.tolist()
        action = Action(
            episode.said[-1],
            ids,
            done.finish_reason,
            said.calls,
            said.unreadable,
            self._text(ids, special=False) if said.content == episode.said[-1] else said.content,
        )
        try:
            with self._waiting():
                answer = await opened.step(action)
        except EnvironmentFailed as error:
            if error.reason != "timeout" or self._config.environment.on_timeout == "fail_group":
                raise
            episode.finish_reason = "env_timeout"
            episode.turn_rewards.append({})
            return None
        episode.turn_rewards.append(answer.rewards)
        for name, value in answer.rewards.items():
            episode.rewards[name] += value
        episode.metrics.update(answer.metrics)
        episode.verdict = episode.verdict if answer.correct is None else answer.correct
        return answer

    def _end(
        self, episode: Episode, answer: Observation, done: Completion, turn: int, invalid: int
    ) -> str:
        """Say why the episode ends with this turn; "" where it goes on."""
        limit = self._config.environment.max_invalid
        if answer.done:
            return "env_done"
        if limit and invalid >= limit:
            return "invalid_action"
        if done.finish_reason == "repetition":
            return "repetition"
        if turn >= self._config.rollout.max_turns:
            return "max_turns"
        return self._room(episode)[1] if done.finish_reason == "length" else ""

    def _follow(
        self, episode: Episode, talk: Conversation, ids: list[int] | None, answer: Observation
    ) -> None:
        """Append what the environment said, or begin a row where another one is needed."""
        if ids is None:
            self._counts["forks"] += 1
            episode.session.fork(talk.whole())
        else:
            episode.session.feed(ids)
        episode.said.append(_in_words(answer.content))

    def _text(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Decode a turn with its special tokens, but without the one that ended it."""
        kept = ids[:-1] if ids and ids[-1] in self._stops else ids
        return self._tokenizer.decode(kept, skip_special_tokens=not special)


def _in_words(content: Content) -> str:
    """Show what an environment said, for tables."""
    if isinstance(content, list) and content and isinstance(content[0], dict):
        return "\n".join(f"[{one['role']}] {one.get('content', '')}" for one in content)
    return str(content)
