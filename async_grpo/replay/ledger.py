"""Which state every group is in: the accounting of the replay queue, as a function of what
happened.

Runs in: the replay queue's process, and whoever reads a journal. Hides the indexes by state and by
actor, and what is kept of groups that are done with. The arrows are events (`events`), and `apply`
is the only way along them:

    waiting --Issue--> in_flight --Put--> ready --TakeBatch--> training --Done--> trained
       ^                  |   |             |                                        |
       |                  |   |             |                       (slot free) <--Live--
       |                  |   +-- Reject -->|-> rejected
       +------ Fail ------+-----------------|-> failed     (attempts used up)
       +------ Expire, Drop ----------------+-> expired    (attempts used up)
    waiting | in_flight | ready --Close--> unused               (new id) --Skip--> skipped

Invariants: exactly one state per group id; the states sum to the ids issued after every event; a
group never leaves `trained`, `rejected`, `failed`, `expired`, `skipped` or `unused`, so none is
trained twice. An id below `next_group_id` without a slot is finished; beyond its counter nothing of
it has to be kept, so the ledger does not grow with the age of the run.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from async_grpo.replay import events
from async_grpo.replay.token_ledger import Tokens
from async_grpo.wire.codec import GroupMeta, GroupTicket

RECENT_GROUPS = 8192
REASONS = 64
"""Reasons of failures that are counted one by one; further ones are counted together."""


class State(StrEnum):
    """Name what has become of a group id; exactly one holds at any time."""

    WAITING = "waiting"
    IN_FLIGHT = "in_flight"
    READY = "ready"
    TRAINING = "training"
    TRAINED = "trained"
    REJECTED = "rejected"
    EXPIRED = "expired"
    FAILED = "failed"
    SKIPPED = "skipped"
    UNUSED = "unused"


SLOT_STATES = (State.WAITING, State.IN_FLIGHT, State.READY, State.TRAINING, State.TRAINED)


class FramePosition(NamedTuple):
    """Where the journal keeps a frame: segment number, byte offset, length."""

    segment: int
    offset: int
    length: int


@dataclass(slots=True, eq=False)
class GroupEntry:
    """One group that holds a slot. `policy_version` is the live version at its latest issue; `step`
    the learner step that takes it.

    `failures`: attempts that came to nothing, and results that expired; those of an earlier start
    of the run do not count as failures. `slow`: it took longer than nine of ten others; None if
    that is not known. Times are the queue's clock: the latest issue, the result.
    """

    group_id: int
    attempt: int
    policy_version: int
    state: State
    actor_id: str = ""
    issued_at: float = 0.0
    ready_at: float = 0.0
    meta: GroupMeta | None = None
    frame: bytes | None = None
    place: FramePosition | None = None
    step: int | None = None
    failures: int = 0
    slow: bool | None = None

    @property
    def result(self) -> GroupMeta:
        """`meta` of a group that is ready or in training."""
        assert self.meta is not None, f"group {self.group_id} is {self.state}, without a result"
        return self.meta


class Ledger:
    """Groups by state: `slots` has those with a slot, by arrival; `closed` counts others."""

    def __init__(self, *, first_group_id: int, steps: int, max_attempts: int) -> None:
        self.first_group_id = self.next_group_id = first_group_id
        self.steps = self.live = steps
        self.training_step: int | None = None
        self.run_epoch, self.epoch_step = 0, 0
        """How often learner steps were discarded, and the step at which that happened last."""
        self.max_attempts = max_attempts
        self.over = False
        self.slots: dict[State, dict[int, GroupEntry]] = {state: {} for state in SLOT_STATES}
        self.entries: dict[int, GroupEntry] = {}
        self.held: dict[str, dict[int, GroupEntry]] = {}
        self.closed: Counter[State] = Counter()
        self.totals: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.rejected_now: Counter[str] = Counter()
        """Rejected since the last batch left, by reason; `failed_now` likewise."""
        self.failed_now: Counter[str] = Counter()
        self.failed_before = 0
        """Groups that had failed for good when this start of the run began."""
        self.retired: set[int] = set()
        self.rates: dict[int, float] = {}
        """Pass rates of problems (`replay.difficulty`)."""
        self.mixed: dict[int, float] = {}
        """Fifth of the pass rates -> share of its latest groups that had right and wrong responses:
        of 20 in the mean, 1 before any.
        """
        self.accuracies: dict[str, float] = {}
        """The best held-out accuracy of each of several tasks (`tasks.NAME.after`)."""
        self.owed: Counter[str] = Counter()
        """Lost groups by task, which none of the same task has followed yet (`replay.quota`)."""
        self.forfeited: set[str] = set()
        self.segment_steps: dict[int, int] = {}
        """Segment of the journal -> the latest learner step that took a group from it."""
        self.unused: dict[int, GroupEntry] = {}
        """Groups that the end of the run left over: a run that goes on later takes them up."""
        self.tokens = Tokens()
        self.changes = 0
        self.watch: Callable[[GroupEntry], None] | None = None
        """Is told of every group whose state changes, up to `trained`."""
        # a dict is slow to find its first entry
        self._recent: OrderedDict[int, tuple[int, State, int | None]] = OrderedDict()

    def apply(
        self,
        event: events.Event,
        *,
        now: float = 0.0,
        meta: GroupMeta | None = None,
        frame: bytes | None = None,
        place: FramePosition | None = None,
    ) -> None:
        """Apply an event; the rest is of a Put's group. Raises RuntimeError for the impossible."""
        self.tokens.follow(event, self)
        match event:
            case events.Issue():
                self._issue(event, now=now)
            case events.Put():
                entry = self._given_back(event)
                entry.meta, entry.frame = meta, frame
                entry.place, entry.ready_at = place, now
                self._move(entry, State.READY)
            case events.Reject(_, _, reason):
                self._move(self._given_back(event), State.REJECTED)
                self.rejected[reason] += 1
                self.rejected_now[reason] += 1
            case events.Fail(_, _, reason):
                entry = self._given_back(event)
                self.totals["attempts_lost"] += 1
                self.totals["overdue"] += reason == events.OVERDUE
                if self._again(entry, State.FAILED) == State.FAILED:
                    _count(self.failed, reason)
                    _count(self.failed_now, reason)
            case events.Expire():
                self._again(self._without_result(event), State.EXPIRED)
                self.totals["expirations"] += 1
            case events.Drop():
                self._move(self._without_result(event), State.WAITING)
                self.totals["unreadable"] += 1
            case events.Skip(group_id, number):
                self._expect(event, group_id == self.next_group_id)
                self.next_group_id += number
                self.closed[State.SKIPPED] += number
            case events.Forfeit(actor_id):
                self.forfeited.add(actor_id)
                self.totals["forfeited"] += len(self.held.get(actor_id, ()))
            case events.Retire(problem):
                self.retired.add(problem)
            case events.Rate(problem, rate):
                if (before := self.rates.get(problem)) is not None:
                    fifth, own = fifth_of(before), 2 * rate - before  # the group counted half
                    known = self.mixed.get(fifth, 1.0)
                    self.mixed[fifth] = known + (float(1e-6 < own < 1 - 1e-6) - known) / 20
                self.rates[problem] = rate
            case events.Evaluate(task, value):
                self.accuracies[task] = max(value, self.accuracies.get(task, value))
            case events.Owe(task, number):
                self.owed[task] += number
                self.totals["owed"] += max(0, number)
            case events.Refuse(status):
                self.totals[status] += 1
            case events.TakeBatch():
                self._take_batch(event)
            case events.Done():
                self._done(event)
            case events.Live(version):
                self._expect(event, self.live <= version <= self.steps)
                self.live = version
                for entry in list(self.slots[State.TRAINED].values()):
                    if entry.step is not None and entry.step <= version:
                        del self.slots[State.TRAINED][entry.group_id]
                        self._finish(entry)
            case events.Close():
                self._close_run()
        self.changes += 1
        self.check()

    @property
    def newest_version(self) -> int:
        """Largest policy version that can exist: the steps done, the one under way included."""
        return self.steps if self.training_step is None else self.training_step

    @property
    def training(self) -> dict[int, GroupEntry]:
        """The groups of the step under way."""
        return self.slots[State.TRAINING]

    @property
    def untrained(self) -> int:
        """Groups that hold a slot and may still be trained."""
        return len(self.entries) - len(self.slots[State.TRAINED])

    @property
    def under_way(self) -> int:
        """Groups that hold a slot and are not waiting for another attempt."""
        return len(self.entries) - len(self.slots[State.WAITING])

    @property
    def issued(self) -> int:
        """Ids issued so far, skipped ones included."""
        return self.next_group_id - self.first_group_id

    def counts(self) -> dict[str, int]:
        """Count the groups in each state; they sum to the ids issued."""
        return {state.value: self.closed[state] + len(self.slots.get(state, ())) for state in State}

    def history(self, group_ids: Iterable[int]) -> dict[int, dict[str, int | str | None]]:
        """Attempt, state and step of ids with a slot, or of the last `RECENT_GROUPS` with one."""
        found = {}
        for group_id in group_ids:
            if (record := self.record(group_id)) is not None:
                found[group_id] = {
                    "attempt": record[0],
                    "state": record[1].value,
                    "step": record[2],
                }
        return found

    def remembered(self) -> list[GroupEntry]:
        """List groups with a slot, in each state in the order of arrival, and groups left over."""
        in_slots = [entry for index in self.slots.values() for entry in index.values()]
        return [*in_slots, *self.unused.values()]

    def record(self, group_id: int) -> tuple[int, State, int | None] | None:
        """(attempt, state, step) of a group, None when it was never issued or is forgotten."""
        if (entry := self.entries.get(group_id)) is None:
            return self._recent.get(group_id)
        return entry.attempt, entry.state, entry.step

    def ticket(self, entry: GroupEntry) -> GroupTicket:
        """Return the ticket of a group in flight."""
        return GroupTicket(entry.group_id, entry.attempt, entry.policy_version, self.run_epoch)

    def held_by(self, actor_id: str) -> list[GroupEntry]:
        """List the groups in flight at an actor."""
        return list(self.held.get(actor_id, {}).values())

    def check(self) -> None:
        """Check that the states sum to the ids issued. Raises RuntimeError."""
        in_slots = sum(map(len, self.slots.values()))
        if in_slots != len(self.entries) or in_slots + sum(self.closed.values()) != self.issued:
            raise RuntimeError(
                f"the ledger does not add up: {self.issued} ids issued, states "
                f"{self.counts()}; this is a bug, please open an issue"
            )

    # ---- the longer events ----

    def _issue(self, event: events.Issue, *, now: float) -> None:
        if event.group_id == self.next_group_id:
            self._expect(event, event.attempt == 1)
            entry = GroupEntry(event.group_id, 1, event.version, State.IN_FLIGHT)
            self.next_group_id += 1
            self.entries[entry.group_id] = self.slots[State.IN_FLIGHT][entry.group_id] = entry
        else:
            entry = self._entry(
                event, State.WAITING, group_id=event.group_id, attempt=event.attempt - 1
            )
            entry.attempt, entry.policy_version = event.attempt, event.version
            self._move(entry, State.IN_FLIGHT)
        entry.actor_id, entry.issued_at = event.actor_id, now
        self.held.setdefault(event.actor_id, {})[entry.group_id] = entry
        self._tell(entry)

    def _take_batch(self, event: events.TakeBatch) -> None:
        self._expect(event, self.training_step is None and event.step == self.steps + 1)
        self.training_step = event.step
        for group_id in event.group_ids:
            entry = self._entry(event, State.READY, group_id=group_id)
            entry.step = event.step
            self._move(entry, State.TRAINING)
        self.rejected_now.clear()
        self.failed_now.clear()

    def _done(self, event: events.Done) -> None:
        self._expect(event, event.step == self.training_step)
        self.steps, self.training_step = event.step, None
        for entry in list(self.slots[State.TRAINING].values()):
            if entry.place is not None:
                self.segment_steps[entry.place.segment] = event.step
            entry.meta = entry.frame = entry.place = None
            self._move(entry, State.TRAINED)

    def _close_run(self) -> None:
        self.over = True
        for entry in list(self.slots[State.IN_FLIGHT].values()):
            self._release(entry)
        for state in (State.WAITING, State.IN_FLIGHT, State.READY):
            for entry in list(self.slots[state].values()):
                self.unused[entry.group_id] = entry
                self._move(entry, State.UNUSED)

    # ---- bookkeeping ----

    def _entry(
        self, event: events.Event, state: State, *, group_id: int, attempt: int | None = None
    ) -> GroupEntry:
        entry = self.slots[state].get(group_id)
        if entry is None or attempt not in (None, entry.attempt):
            raise self._impossible(event)
        return entry

    def _given_back(self, event: events.Put | events.Reject | events.Fail) -> GroupEntry:
        """Take the group that was in flight from its actor."""
        entry = self._entry(event, State.IN_FLIGHT, group_id=event.group_id, attempt=event.attempt)
        self._release(entry)
        return entry

    def _without_result(self, event: events.Expire | events.Drop) -> GroupEntry:
        """Take the result of the group that was ready."""
        entry = self._entry(event, State.READY, group_id=event.group_id, attempt=event.attempt)
        entry.meta = entry.frame = entry.place = None
        return entry

    def _again(self, entry: GroupEntry, last: State) -> State:
        """Count a failure: the group waits, or comes to its `last` state after `max_attempts`."""
        entry.failures += 1
        self._move(entry, State.WAITING if entry.failures < self.max_attempts else last)
        return entry.state

    def _expect(self, event: events.Event, possible: bool) -> None:
        if not possible:
            raise self._impossible(event)

    def _impossible(self, event: events.Event) -> RuntimeError:
        return RuntimeError(
            f"{str(event)[:200]} cannot happen now (step {self.steps}, live "
            f"{self.live}); this is a bug, please open an issue"
        )

    def _move(self, entry: GroupEntry, to: State) -> None:
        del self.slots[entry.state][entry.group_id]
        entry.state = to
        if to in self.slots:
            self.slots[to][entry.group_id] = entry
        else:
            self._finish(entry)
        self._tell(entry)

    def _tell(self, entry: GroupEntry) -> None:
        if self.watch is not None:
            self.watch(entry)

    def _finish(self, entry: GroupEntry) -> None:
        del self.entries[entry.group_id]
        self.closed[entry.state] += 1
        self._recent[entry.group_id] = (entry.attempt, entry.state, entry.step)
        if len(self._recent) > RECENT_GROUPS:
            self._recent.popitem(last=False)

    def _release(self, entry: GroupEntry) -> None:
        held = self.held[entry.actor_id]
        del held[entry.group_id]
        if not held:
            del self.held[entry.actor_id]
        entry.actor_id = ""

    # ---- as plain values ----

    def snapshot(self) -> dict[str, Any]:
        """Plain values for `from_snapshot`; results are named by their position in the journal."""
        groups = [[getattr(entry, name) for name in _IN_SNAPSHOT] for entry in self.remembered()]
        counters = {
            name: {str(key): count for key, count in getattr(self, name).items()}
            for name in _COUNTERS
        }
        return {
            "first_group_id": self.first_group_id,
            "max_attempts": self.max_attempts,
            "groups": groups,
            **{name: getattr(self, name) for name in _PLAIN},
            **counters,
            "tokens": self.tokens.snapshot(),
            "retired": sorted(self.retired),
            "rates": [list(pair) for pair in self.rates.items()],
            "mixed": [list(pair) for pair in self.mixed.items()],
            "forfeited": sorted(self.forfeited),
            "segment_steps": [list(pair) for pair in self.segment_steps.items()],
        }

    @classmethod
    def from_snapshot(
        cls, snapshot: dict[str, Any], *, entries: Iterable[GroupEntry] | None = None
    ) -> Ledger:
        """Rebuild a ledger, without results. `entries`: in place of the groups of `snapshot`."""
        ledger = cls(
            first_group_id=snapshot["first_group_id"],
            steps=snapshot["steps"],
            max_attempts=snapshot["max_attempts"],
        )
        for name in _PLAIN:
            setattr(ledger, name, snapshot[name])
        for name in _COUNTERS:
            getattr(ledger, name).update(snapshot.get(name, {}))  # older ones lack some
        ledger.closed = Counter({State(name): count for name, count in snapshot["closed"].items()})
        ledger.retired, ledger.forfeited = set(snapshot["retired"]), set(snapshot["forfeited"])
        ledger.rates.update(snapshot.get("rates", ()))
        ledger.mixed.update(snapshot.get("mixed", ()))
        ledger.tokens = Tokens.from_snapshot(snapshot["tokens"])
        ledger.segment_steps = {segment: step for segment, step in snapshot["segment_steps"]}
        for entry in _entries(snapshot["groups"]) if entries is None else entries:
            if entry.state == State.UNUSED:
                ledger.unused[entry.group_id] = entry
                continue
            ledger.entries[entry.group_id] = ledger.slots[entry.state][entry.group_id] = entry
            if entry.state == State.IN_FLIGHT:
                ledger.held.setdefault(entry.actor_id, {})[entry.group_id] = entry
        ledger.check()
        return ledger


def _entries(rows: Iterable[list[Any]]) -> Iterable[GroupEntry]:
    for row in rows:
        entry = GroupEntry(**dict(zip(_IN_SNAPSHOT, row, strict=True)))
        entry.state = State(entry.state)
        if entry.place is not None:
            entry.place = FramePosition(*entry.place)
        yield entry


def fifth_of(rate: float) -> int:
    """Return the fifth of 0 to 1 in which a rate is, 0 to 4."""
    return min(4, int(5 * rate))


def _count(reasons: Counter[str], reason: str) -> None:
    """Errors may name ids or values: without a limit every one would be a reason of its own."""
    if reason not in reasons and len(reasons) >= REASONS:
        reason = "other reasons"
    reasons[reason] += 1


_IN_SNAPSHOT = (
    *("group_id", "attempt", "policy_version", "state", "actor_id", "step", "place", "failures"),
)
"""Of an entry, in this order."""
_PLAIN = (
    *("next_group_id", "steps", "live", "training_step", "over"),
    *("failed_before", "run_epoch", "epoch_step"),
)
_COUNTERS = (
    *("closed", "totals", "rejected", "failed", "rejected_now", "failed_now", "owed"),
    "accuracies",
)
