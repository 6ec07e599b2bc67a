"""Groups that go on where a checkpoint left them: which of them may, and under which version.

Runs in: the replay queue's process. The checkpoint keeps the beginnings of responses (rollout
actors hold the tokens, the queue sees numbers only). A group that is in flight at the end of the
journal and has such a beginning is issued again as the attempt that it was, under its original
version, so that order and bounds count its old tokens:

    in flight, attempt k --resume--> waiting, attempt k - 1
        --Issue(k, original version)--> in flight, attempt k

A waiting group continues if its attempt is one below that of its beginning; any other is issued
from scratch, as attempt k + 1 or later.

Invariants: a beginning has no token newer than the restored history, and none that would be too old
at the next step; with `wait`, everything that is ready or continues can be trained in time; all
that continue have a slot and a step left for them, and go first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from async_grpo.replay.ledger import Ledger, State
from async_grpo.replay.order import Due, Others
from async_grpo.replay.rules import QueueSettings


class PartialStart(NamedTuple):
    """Facts of a group's responses in a checkpoint: ticket version, `newest` token's version."""

    group_id: int
    attempt: int
    version: int
    newest: int
    responses: int
    tokens: int


def choose(
    beginnings: Sequence[PartialStart],
    ledger: Ledger,
    *,
    end: Ledger,
    settings: QueueSettings,
    free: int,
) -> tuple[list[PartialStart], int]:
    """Mark the groups that continue in `ledger`, of a resumed run; those, and how many are of no
    use.

    end: the ledger at the end of the journal. free: waiting groups that may be issued at once.
    """
    under_way = [
        one
        for one in beginnings
        if one.group_id in ledger.slots[State.WAITING] and _in_flight(one, end)
    ]
    step = ledger.newest_version
    fresh = [one for one in under_way if one.newest <= step <= one.version + settings.max_staleness]
    fresh.sort(key=lambda one: (one.version, one.group_id))
    if settings.on_stale == "wait":  # those that can be trained in time with what is ready
        ready = [
            Due(one.policy_version, one.group_id) for one in ledger.slots[State.READY].values()
        ]
        in_time = settings.order_rule.in_time(
            # the newest have most time
            [Due(one.version, one.group_id) for one in reversed(fresh)],
            Others(ready, ledger.slots[State.WAITING]),
            steps=step,
        )
        fresh = [one for one in fresh if one.group_id in in_time]
    chosen = fresh[:free]
    ids = {one.group_id for one in chosen}
    for one in under_way:
        entry = ledger.entries[one.group_id]
        if one.group_id in ids:
            entry.attempt, entry.policy_version = one.attempt - 1, one.version
        else:
            entry.attempt = one.attempt  # an earlier start may have marked it
    return chosen, len(under_way) - len(chosen)


def told(chosen: list[PartialStart], useless: int) -> str:
    """Summarise, for the resume note, what became of the partial groups."""
    responses, tokens = sum(one.responses for one in chosen), sum(one.tokens for one in chosen)
    text = f"{responses:,} responses of {len(chosen):,} groups continue from {tokens:,} tokens"
    return text + (f", {useless:,} groups are too old to" if useless else "")


def _in_flight(one: PartialStart, end: Ledger) -> bool:
    """Whether this very attempt was without a result at the end, or was about to go on."""
    entry = end.entries.get(one.group_id) or end.unused.get(one.group_id)
    if entry is None or entry.place is not None:
        return False
    if entry.state != State.IN_FLIGHT and entry.attempt == one.attempt - 1:
        return True
    same = (entry.attempt, entry.policy_version) == (one.attempt, one.version)
    return same and entry.state in (State.IN_FLIGHT, State.UNUSED)
