"""What crosses a process: tickets, groups with their tokens, and what the driver knows of them
without tokens.

Runs in: any process. Hides nothing; `wire` turns groups into bytes and back, and names these types
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, Literal

import numpy as np

Role = Literal["train", "baseline", "demonstration"]
"""Of a row: a sampled response, the greedy one of ReMax, or one that is given and imitated."""
FINISH_REASONS = (
    "stop",
    "length",
    "context",
    "max_turns",
    "invalid_action",
    "repetition",
    "env_done",
    "env_timeout",
)
"""Why a response or an episode ended: by an end token, or a limit of tokens; and of episodes by the
context's length, a limit of turns or of wrong actions, a repetition, the environment, its deadline.
"""
EPISODE_END = "episode_"
"""Begins the name of a group's time at which an episode ended; its number follows."""
SHORT = 16
"""Tokens of a response whose first token may be known only when its last one is."""
TRUNCATED = frozenset({"length", "context", "max_turns"})
"""Finish reasons that cut off what would have gone on."""


class WireError(ValueError):
    """A frame or a group that breaks the format: never padded, never trained."""


@dataclass(frozen=True, slots=True)
class GroupTicket:
    """Permission to produce one group. `policy_version`: the live version at its issue (the first
    one, for a group that a resumed run continues).

    A run that discards learner steps writes their version numbers a second time, with other
    weights: it raises its `run_epoch` by one.
    """

    group_id: int
    attempt: int
    policy_version: int
    run_epoch: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return GroupTicket, (self.group_id, self.attempt, self.policy_version, self.run_epoch)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Sampled tokens [start, end) of a row are of `policy_version`."""

    policy_version: int
    start: int
    end: int


@dataclass(slots=True)
class Row:
    """What follows a prompt as one sequence: a response, or an episode turn by turn.

    response_ids [T] int32; segments: (context tokens, sampled tokens) of each turn in order, T in
    all; behavior_logprobs [S] float32, of the S sampled tokens, under the distribution each was
    sampled from; versions cover [0, S) in order; rewards: raw value by component; verdict: 0/1 or
    None; prompt: which one of the group. An episode that went on from an earlier place again has
    several rows with its number, of equal facts; what they share is sampled in the first alone, and
    context in the others. turn_rewards: one per turn, or None. All tokens of a demonstration count
    as sampled, with log-prob 0 and the version of the group's newest token.
    """

    response_ids: np.ndarray
    behavior_logprobs: np.ndarray
    segments: list[tuple[int, int]]
    versions: list[VersionSpan]
    rewards: dict[str, float]
    verdict: float | None
    finish_reason: str
    role: Role = "train"
    prompt: int = 0
    episode: int | None = None
    """None: the row is an episode of its own."""
    turn_rewards: list[float] | None = None

    @property
    def sampled(self) -> np.ndarray:
        """Positions [S] int64 of the sampled tokens in `response_ids`."""
        if len(self.segments) == 1:
            return np.arange(self.segments[0][0], len(self.response_ids))
        sizes = np.array(self.segments).ravel()
        return np.flatnonzero(np.repeat(np.arange(len(sizes)) % 2, sizes))

    @property
    def turns(self) -> np.ndarray | None:
        """Number of the turn [S] of each sampled token; None where the row is a plain response."""
        if self.turn_rewards is None:
            return None
        return np.repeat(np.arange(len(self.segments)), [sampled for _, sampled in self.segments])


@dataclass(slots=True)
class Group:
    """The episodes of one ticket: filtered, journaled, trained or dropped whole. prompts: [P]
    int32 each, one where all episodes begin with the same. actor_id: of the process. times: Unix
    seconds when the ticket came (`queued`), the group's first token, the last token of all
    responses (`done`), the last reward (`scored`), and the end of each episode with an environment
    (`episode_0` ...). planes: by name, [entries, width], what
    `wire.PLANES` knows of.
    """

    group_id: int
    attempt: int
    policy_version: int
    actor_id: str
    prompts: list[np.ndarray]
    rows: list[Row]
    times: dict[str, float] = field(default_factory=dict)
    run_epoch: int = 0
    planes: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(slots=True)
class RowMeta:
    """What the driver knows of one row: tokens by number, rewards and versions, never tokens. Not
    to be changed; frozen it would be four times as expensive to make, once per row in the queue.
    """

    role: Role
    length: int
    """Tokens that the policy sampled."""
    rewards: dict[str, float]
    verdict: float | None
    finish_reason: str
    versions: tuple[tuple[int, int], ...]
    """(policy version, tokens) of each span, in order."""
    context: int = 0
    """Tokens behind the prompt that the policy did not sample."""
    turns: int = 1
    prompt: int = 0
    """Which one of the group."""
    turn_rewards: tuple[float, ...] | None = None

    @property
    def truncated(self) -> bool:
        """Whether a limit cut it off."""
        return self.finish_reason in TRUNCATED

    @property
    def min_version(self) -> int:
        """Oldest version that sampled a token of the response."""
        return min(self.versions)[0]

    @property
    def max_version(self) -> int:
        """Newest version that sampled a token of the response."""
        return max(self.versions)[0]

    def tokens_before(self, version: int) -> int:
        """Tokens that older versions than this one sampled."""
        return sum(tokens for sampled, tokens in self.versions if sampled < version)


def joined(rows: Sequence[RowMeta]) -> RowMeta:
    """Join the rows of one episode to what statistics see: a row with the tokens of all."""
    if len(rows) == 1:
        return rows[0]
    rewards = [row.turn_rewards for row in rows if row.turn_rewards is not None]
    return replace(
        rows[0],
        length=sum(row.length for row in rows),
        context=sum(row.context for row in rows),
        turns=sum(row.turns for row in rows),
        versions=tuple(span for row in rows for span in row.versions),
        turn_rewards=tuple(value for turns in rewards for value in turns) if rewards else None,
    )


@dataclass(slots=True)
class GroupMeta:
    """What the driver and the queue know of one group. Nobody changes one, see `RowMeta`."""

    group_id: int
    attempt: int
    policy_version: int
    actor_id: str
    prompt_lengths: tuple[int, ...]
    rows: tuple[RowMeta, ...]
    times: dict[str, float]
    nbytes: int
    run_epoch: int = 0
    forks: tuple[int, ...] = ()
    """The episode of every row; empty where each is one of its own."""

    @property
    def places(self) -> list[list[int]]:
        """Places of the rows of every episode."""
        if not self.forks:
            return [[place] for place in range(len(self.rows))]
        found: list[list[int]] = [[] for _ in range(max(self.forks) + 1)]
        for place, episode in enumerate(self.forks):
            found[episode].append(place)
        return found

    @property
    def episodes(self) -> list[RowMeta]:
        """Every episode as one row."""
        if not self.forks:
            return list(self.rows)
        return [joined([self.rows[place] for place in places]) for places in self.places]

    @property
    def episodes_sampled(self) -> list[RowMeta]:
        """Episodes that an engine sampled."""
        return [episode for episode in self.episodes if episode.role != "demonstration"]

    @property
    def episodes_to_train(self) -> list[RowMeta]:
        """What filters, retirement and group statistics see: the sampled responses."""
        return [episode for episode in self.episodes if episode.role == "train"]

    @property
    def min_version(self) -> int:
        """Oldest version that sampled a token of the group."""
        return min(row.min_version for row in self.rows)

    @property
    def max_version(self) -> int:
        """Newest version that sampled a token of the group."""
        return max(row.max_version for row in self.rows)


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one learner step, sorted by group_id."""

    step: int
    groups: tuple[GroupMeta, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as plain tuples, which costs a third; the queue sends every group's facts."""
        plain = [(_group_facts(one), [*map(_row_facts, one.rows)]) for one in self.groups]
        return _batch, (self.step, plain)


_GROUP_FACTS = tuple(part.name for part in fields(GroupMeta) if part.name != "rows")
_group_facts = attrgetter(*_GROUP_FACTS)
_row_facts = attrgetter(*(part.name for part in fields(RowMeta)))


def _batch(step: int, plain: list[tuple[tuple[Any, ...], list[tuple[Any, ...]]]]) -> Batch:
    groups = [
        GroupMeta(
            rows=tuple(RowMeta(*row) for row in rows), **dict(zip(_GROUP_FACTS, facts, strict=True))
        )
        for facts, rows in plain
    ]
    return Batch(step, tuple(groups))
