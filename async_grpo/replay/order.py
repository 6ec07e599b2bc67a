"""Which groups leave the queue for a learner step, and when.

Runs in: the replay queue's process. Hides the order of departure and the check that nobody who
stays behind becomes too old (`rules`); with `mask` and `expire` nothing waits, and with `expire`
what is too old goes back first.
"""

from __future__ import annotations

from collections.abc import Callable

from async_grpo.replay.admission import Admission
from async_grpo.replay.events import Event, Expire
from async_grpo.replay.ledger import GroupEntry, Ledger, State
from async_grpo.replay.rules import QueueSettings, can_leave, in_order, is_too_old


class BatchPicker:
    """Chooses batches. `record` makes an event happen."""

    def __init__(
        self,
        settings: QueueSettings,
        ledger: Ledger,
        admission: Admission,
        record: Callable[[Event], None],
    ) -> None:
        self._settings, self._ledger, self._admission, self._record = (
            settings,
            ledger,
            admission,
            record,
        )
        self._tried: tuple[int, int] | None = None

    def choose(self, step: int) -> list[GroupEntry] | None:
        """The batch of `step` sorted by group_id, or None while it must wait."""
        if self._tried == (step, self._ledger.changes):
            return None
        chosen = self._choose(step)
        self._tried = (step, self._ledger.changes) if chosen is None else None
        return chosen

    def _choose(self, step: int) -> list[GroupEntry] | None:
        settings, slots = self._settings, self._ledger.slots
        size = settings.rollout_batch_size
        if settings.on_stale != "wait":
            self._expire(step)
        if len(slots[State.READY]) < size:
            return None
        ready = in_order(settings.order, slots[State.READY].values())
        if settings.on_stale == "wait" and not self._can_wait(ready[:size], ready[size:], step):
            return None
        return sorted(ready[:size], key=lambda entry: entry.group_id)

    def _expire(self, step: int) -> None:
        rule = {
            "step": step,
            "max_staleness": self._settings.max_staleness,
            "on_stale": self._settings.on_stale,
        }
        for entry in list(self._ledger.slots[State.READY].values()):
            if is_too_old(entry.meta, **rule):
                self._record(Expire(entry.group_id, entry.attempt, step))

    def _can_wait(self, chosen: list[GroupEntry], ready: list[GroupEntry], step: int) -> bool:
        """Whether the groups that stay behind, ready or not, are trained in time when these
        leave.
        """
        slots = self._ledger.slots
        if self._settings.order == "fifo":
            return (
                min(
                    [*slots[State.WAITING], *slots[State.IN_FLIGHT]],
                    default=chosen[-1].group_id + 1,
                )
                > chosen[-1].group_id
            )
        staying = [entry.policy_version for entry in (*ready, *slots[State.IN_FLIGHT].values())]
        staying += [version for _, version in self._admission.again()]
        return can_leave(
            staying,
            step=step,
            max_staleness=self._settings.max_staleness,
            batch_size=self._settings.rollout_batch_size,
        )
