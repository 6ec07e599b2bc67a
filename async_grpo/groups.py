"""What crosses a process: tickets, groups with their tokens, and what the driver knows of them
without tokens.

Runs in: any process. Hides nothing; `wire` turns groups into bytes and back, and names these types
too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal

import numpy as np

Role = Literal["train", "baseline"]


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
    """Tokens [start, end) of a response were sampled by `policy_version`."""

    policy_version: int
    start: int
    end: int


@dataclass(slots=True)
class Rollout:
    """One sampled response.

    response_ids [L] int32; behavior_logprobs [L] float32, under the distribution each token was
    sampled from; loss_mask [L] uint8, 1 on tokens the policy sampled; versions cover [0, L) in
    order; rewards: raw value by component; verdict: 0/1 or None.
    """

    response_ids: np.ndarray
    behavior_logprobs: np.ndarray
    loss_mask: np.ndarray
    versions: list[VersionSpan]
    rewards: dict[str, float]
    verdict: float | None
    finish_reason: str
    role: Role = "train"


@dataclass(slots=True)
class Group:
    """The rollouts of one prompt: filtered, journaled, trained or dropped whole. prompt_ids [P]
    int32. actor_id: of the process. times: Unix seconds when the ticket came (`queued`), the
    group's first token, the last token of all responses (`done`), and the last reward (`scored`).
    """

    group_id: int
    attempt: int
    policy_version: int
    actor_id: str
    prompt_ids: np.ndarray
    rollouts: list[Rollout]
    times: dict[str, float] = field(default_factory=dict)
    run_epoch: int = 0


@dataclass(slots=True)
class RowMeta:
    """What the driver knows of one rollout: lengths in tokens, rewards and versions, never tokens.
    Not to be changed; frozen it would be four times as expensive to make, once per rollout in the
    queue.
    """

    role: Role
    length: int
    mask_tokens: int
    rewards: dict[str, float]
    verdict: float | None
    finish_reason: str
    versions: tuple[tuple[int, int], ...]
    """(policy version, tokens) of each span, in order."""

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


@dataclass(slots=True)
class GroupMeta:
    """What the driver and the queue know of one group. Nobody changes one, see `RowMeta`."""

    group_id: int
    attempt: int
    policy_version: int
    actor_id: str
    prompt_length: int
    rows: tuple[RowMeta, ...]
    times: dict[str, float]
    nbytes: int
    run_epoch: int = 0

    @property
    def rows_to_train(self) -> list[RowMeta]:
        """The rollouts that filters, retirement and the loss see: all but the baseline."""
        return [row for row in self.rows if row.role == "train"]

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
