"""What can happen to groups: the only things that change the ledger, and what the journal records.

Runs in: the replay queue's process, and whoever reads a journal. Hides how an event is written. An
event is a tuple of plain values, its kind is the first word on the wire; a `put` is followed by the
group's frame. Invariant: a state of the ledger is a snapshot and the events after it, applied in
order, and nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

REASON_CHARS = 200
"""What is kept of the text that says why."""
OVERDUE = "no result in time and no word from its actor"
"""Reason of a `Fail` when a ticket reached its deadline."""


class Issue(NamedTuple):
    """A new id, or the next attempt of a waiting one; version: live, or its own one (`partial`)."""

    group_id: int
    attempt: int
    actor_id: str
    version: int


class Skip(NamedTuple):
    """`number` new ids from `group_id` on pose problems that are retired or passed over, or are of
    tasks whose turn it is not: nobody produces them.
    """

    group_id: int
    number: int


class Put(NamedTuple):
    """in flight -> ready, with its frame. tokens: of responses to train; baseline: of others."""

    group_id: int
    attempt: int
    tokens: int = 0
    baseline: int = 0


class Reject(NamedTuple):
    """in flight -> rejected: nothing to learn from."""

    group_id: int
    attempt: int
    reason: str
    tokens: int = 0
    baseline: int = 0


class Fail(NamedTuple):
    """in flight -> waiting, or failed after the last attempt. tokens: sampled for it, if known."""

    group_id: int
    attempt: int
    reason: str
    tokens: int | None = None


class Expire(NamedTuple):
    """ready -> waiting, or expired after the last attempt: too old for learner step `step`."""

    group_id: int
    attempt: int
    step: int


class Drop(NamedTuple):
    """ready -> waiting: the group's frame in the journal cannot be read any more."""

    group_id: int
    attempt: int


class Forfeit(NamedTuple):
    """An actor is gone and gets no ticket any more; a `Fail` for each group it held follows."""

    actor_id: str


class Retire(NamedTuple):
    """A problem is posed no more."""

    problem: int


class Rate(NamedTuple):
    """A problem has another pass rate, by a group that is trained or rejected."""

    problem: int
    rate: float


class Evaluate(NamedTuple):
    """A task of several has this held-out accuracy."""

    task: str
    value: float


class Owe(NamedTuple):
    """A group of this task was lost (1), or another one follows it (-1)."""

    task: str
    number: int


class Refuse(NamedTuple):
    """A result that changes no group: `late`, `duplicate`, `abandoned` or `invalid`; its tokens."""

    status: str
    group_id: int
    attempt: int
    actor_id: str
    reason: str
    tokens: int = 0


class Waste(NamedTuple):
    """An attempt whose ticket had been taken away is given up: its tokens are accounted for."""

    group_id: int
    attempt: int
    actor_id: str
    tokens: int


class Sampled(NamedTuple):
    """What engines have sampled by now: (actor id, *TokenTotals) rows, of actors with news."""

    totals: tuple[tuple[Any, ...], ...]


class TakeBatch(NamedTuple):
    """ready -> training: groups of learner step `step`. masked: their tokens without weight."""

    step: int
    group_ids: tuple[int, ...]
    masked: int = 0


class Done(NamedTuple):
    """training -> trained: learner step `step` is over."""

    step: int


class Live(NamedTuple):
    """Every engine serves `version`: slots of its steps are free. digest: of the weights, or ""."""

    version: int
    digest: str


class Close(NamedTuple):
    """The run is over: what no step took is unused."""


Event = (
    Issue
    | Skip
    | Put
    | Reject
    | Fail
    | Expire
    | Drop
    | Forfeit
    | Retire
    | Rate
    | Evaluate
    | Owe
    | Refuse
    | Waste
    | Sampled
    | TakeBatch
    | Done
    | Live
    | Close
)
KINDS: dict[str, type[Event]] = {
    "batch" if event is TakeBatch else event.__name__.lower(): event for event in get_args(Event)
}
_KIND_OF = {event: kind for kind, event in KINDS.items()}


def plain_text(reason: str) -> str:
    """Cut a reason to its beginning, as text that can be written, whatever an exception said."""
    return reason[:REASON_CHARS].encode("utf-8", "replace").decode()


def to_wire(event: Event) -> list[Any]:
    """Kind and values, plain."""
    return [_KIND_OF[type(event)], *event]


def from_wire(values: list[Any]) -> Event:
    """Return the event that `to_wire` wrote. Raises ValueError for anything else."""
    kind = KINDS.get(values[0]) if values and isinstance(values[0], str) else None
    if kind is None or len(values) != 1 + len(kind._fields):
        raise ValueError(f"{str(values)[:80]} is no event")
    if kind is TakeBatch:
        return TakeBatch(values[1], tuple(values[2]), values[3])
    if kind is Sampled:
        return Sampled(tuple(tuple(row) for row in values[1]))
    return kind(*values[1:])
