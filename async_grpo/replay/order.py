"""Which groups leave the queue for a learner step, and when: the order rules, and who asks them.

Runs in: the replay queue's process. Hides the order of departure and the bound that goes with it.
With R = rollout_batch_size, K = max_staleness and groups known by their ticket versions:

    oldest   by ticket version, then id. A batch leaves only if every group that stays behind can
             still be trained in time (`can_leave`)
    fifo     strictly by id, so a batch leaves when no smaller id is waiting or in flight
    ready    as groups are completed; no bound of its own, so it goes with `mask` and `expire` only

A rule is a class in `ORDERS`, and a name in the schema; picking batches, rolling back (`resume`)
and partial rollouts (`partial`) ask that class. With `mask` and `expire` nothing waits, and with
`expire` a group that is too old goes back first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from async_grpo.replay.events import Event, Expire
from async_grpo.replay.ledger import GroupEntry, Ledger, State
from async_grpo.wire.groups import GroupMeta

if TYPE_CHECKING:
    from async_grpo.replay.admission import Admission
    from async_grpo.replay.rules import OnStale, QueueSettings


class Due(NamedTuple):
    """A group that is to be trained: the version of its ticket and its id."""

    version: int
    group_id: int


class Others(NamedTuple):
    """What is to be trained beside some groups: groups that are due, and ids without a ticket."""

    due: Collection[Due] = ()
    waiting: Collection[int] = ()


class Order:
    """A rule for batches of R groups under the bound K; this one takes groups as they come."""

    bounded: ClassVar[bool] = False
    """Whether the rule keeps the bound by itself, so that `on_stale: wait` is possible."""

    def __init__(self, *, batch_size: int, max_staleness: int) -> None:
        self._size, self._bound = batch_size, max_staleness

    def sorted(self, ready: Collection[GroupEntry]) -> list[GroupEntry]:
        """Put ready groups, given as they were completed, in the order in which they leave."""
        return list(ready)

    def may_leave(self, chosen: Sequence[GroupEntry], others: Others, *, step: int) -> bool:
        """Tell whether the others, which stay behind, can be trained in time after `step`."""
        return True

    def in_time(self, candidates: Sequence[Due], others: Others, *, steps: int) -> set[int]:
        """Ids of the candidates, first ones preferred, that come in time after `steps` steps."""
        return {one.group_id for one in candidates}


class Oldest(Order):
    """By age of the ticket, then by id."""

    bounded = True

    def sorted(self, ready: Collection[GroupEntry]) -> list[GroupEntry]:
        """See Order."""
        return sorted(ready, key=lambda group: (group.policy_version, group.group_id))

    def may_leave(self, chosen: Sequence[GroupEntry], others: Others, *, step: int) -> bool:
        """See Order."""
        return self._fits([one.version for one in others.due], step)

    def in_time(self, candidates: Sequence[Due], others: Others, *, steps: int) -> set[int]:
        """See Order. Waiting groups get new tickets, so they do not count."""
        versions, kept = [one.version for one in others.due], set()
        if self._fits([*versions, *(one.version for one in candidates)], steps):
            return {one.group_id for one in candidates}
        for one in candidates:
            if self._fits([*versions, one.version], steps):
                versions.append(one.version)
                kept.add(one.group_id)
        return kept

    def _fits(self, versions: Sequence[int], step: int) -> bool:
        return can_leave(versions, step=step, max_staleness=self._bound, batch_size=self._size)


class Fifo(Order):
    """Strictly by id."""

    bounded = True

    def sorted(self, ready: Collection[GroupEntry]) -> list[GroupEntry]:
        """See Order."""
        return sorted(ready, key=lambda group: group.group_id)

    def may_leave(self, chosen: Sequence[GroupEntry], others: Others, *, step: int) -> bool:
        """See Order."""
        last = chosen[-1].group_id
        return all(group_id > last for group_id in _ids(others))

    def in_time(self, candidates: Sequence[Due], others: Others, *, steps: int) -> set[int]:
        """See Order. Waiting groups with a smaller id are trained first, so they count."""
        ids = sorted({*_ids(others), *(one.group_id for one in candidates)})
        last_step = {group_id: steps + place // self._size for place, group_id in enumerate(ids)}
        return {
            one.group_id
            for one in candidates
            if one.version + self._bound >= last_step[one.group_id]
        }


def _ids(others: Others) -> list[int]:
    return [*others.waiting, *(one.group_id for one in others.due)]


ORDERS: dict[str, type[Order]] = {"oldest": Oldest, "fifo": Fifo, "ready": Order}


def can_leave(staying: Sequence[int], *, step: int, max_staleness: int, batch_size: int) -> bool:
    """Tell whether groups with the ticket versions `staying` can be trained in time after `step`.
    Sorted, the i-th is trained at step `step + 1 + i // R` at the latest, with lag `step + i // R -
    version`.
    """
    return all(
        version + max_staleness >= step + index // batch_size
        for index, version in enumerate(sorted(staying))
    )


def is_too_old(meta: GroupMeta, *, step: int, max_staleness: int, on_stale: OnStale) -> bool:
    """Tell whether a ready group is too old for `step`: one token, or with `mask` every token."""
    masked = on_stale == "mask"
    version = max(row.max_version for row in meta.episodes_to_train) if masked else meta.min_version
    return step - 1 - version > max_staleness


class BatchPicker:
    """Chooses the batch of a learner step. `record` makes an event happen."""

    def __init__(
        self,
        settings: QueueSettings,
        ledger: Ledger,
        admission: Admission,
        record: Callable[[Event], None],
    ) -> None:
        self._settings, self._ledger = settings, ledger
        self._order = settings.order_rule
        self._admission, self._record = admission, record
        self._tried: tuple[int, int] | None = None
        self._young: tuple[int, set[tuple[int, int]]] = (-1, set())
        """A step, and the results (id, attempt) that are not too old for it."""

    def choose(self, step: int) -> list[GroupEntry] | None:
        """Choose the batch of `step`, sorted by group_id; None while it must wait."""
        if self._tried == (step, self._ledger.changes):
            return None
        chosen = self._choose(step)
        self._tried = (step, self._ledger.changes) if chosen is None else None
        return chosen

    def _choose(self, step: int) -> list[GroupEntry] | None:
        slots, size = self._ledger.slots, self._settings.rollout_batch_size
        waits = self._settings.on_stale == "wait"
        if not waits:
            self._expire(step)
        if len(slots[State.READY]) < size:
            return None
        ready = self._order.sorted(slots[State.READY].values())
        chosen = ready[:size]
        if waits:
            staying = (*ready[size:], *slots[State.IN_FLIGHT].values())
            behind = [Due(entry.policy_version, entry.group_id) for entry in staying]
            behind += [Due(version, group_id) for group_id, version in self._admission.again()]
            others = Others(behind, slots[State.WAITING])
            if not self._order.may_leave(chosen, others, step=step):
                return None
        return sorted(chosen, key=lambda entry: entry.group_id)

    def _expire(self, step: int) -> None:
        bound, on_stale = self._settings.max_staleness, self._settings.on_stale
        if self._young[0] != step:
            self._young = (step, set())
        young = self._young[1]
        for entry in list(self._ledger.slots[State.READY].values()):
            result = (entry.group_id, entry.attempt)
            if result in young:
                continue
            if is_too_old(entry.result, step=step, max_staleness=bound, on_stale=on_stale):
                self._record(Expire(*result, step))
            else:
                young.add(result)
