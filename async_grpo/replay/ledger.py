"""Which state every group is in: the accounting of the replay queue.

Runs in: the replay queue's process. Hides the indexes by state and by actor, what is kept of groups that are done with, and
its part of a snapshot.

    waiting --issue_again--> in_flight --accept--> ready --train--> training --finish_step--> trained --retire--> (slot free)
       ^                     |      |
       +------- lose --------+      +--reject--> rejected          lose, attempts used up --> failed
    waiting | in_flight | ready --close--> unused          (new id) --skip--> skipped

Invariants: exactly one state per group id; the states sum to the ids issued after every transition; a group leaves `trained`,
`rejected`, `failed`, `skipped` or `unused` never again, so none is trained twice. Each arrow is one function and nothing else changes a state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from async_grpo.wire import Buffer, GroupMeta, GroupTicket

RECENT_GROUPS = 8192


class State(StrEnum):
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


@dataclass(slots=True, eq=False)
class Entry:
    """One group that holds a slot. `policy_version` is the live version at its latest issue; `step` the learner step that takes it."""

    group_id: int
    attempt: int
    policy_version: int
    state: State
    actor_id: str = ""
    ready_at: float = 0.0
    meta: GroupMeta | None = None
    frame: bytes | None = None
    step: int | None = None

    @property
    def ticket(self) -> GroupTicket:
        return GroupTicket(self.group_id, self.attempt, self.policy_version)

    @property
    def age_key(self) -> tuple[int, int]:
        """Order `oldest`: ticket version, then id."""
        return self.policy_version, self.group_id


class Ledger:
    """Groups by state. `slots` holds those that occupy a slot, `closed` counts the others."""

    def __init__(self, *, first_group_id: int, steps: int, max_attempts: int) -> None:
        self.first_group_id = self.next_group_id = first_group_id
        self.steps = steps
        self.training_step: int | None = None
        self.max_attempts = max_attempts
        self.slots: dict[State, dict[int, Entry]] = {state: {} for state in SLOT_STATES}
        self.closed: dict[State, int] = dict.fromkeys(State, 0)
        self.entries: dict[int, Entry] = {}
        self.held: dict[str, dict[int, Entry]] = {}
        self._recent: dict[int, tuple[int, State, int | None]] = {}

    @property
    def newest_version(self) -> int:
        """Largest policy version that can exist: the steps done, the one under way included."""
        return self.steps if self.training_step is None else self.training_step

    @property
    def untrained(self) -> int:
        """Groups that hold a slot and may still be trained."""
        return len(self.entries) - len(self.slots[State.TRAINED])

    def counts(self) -> dict[str, int]:
        """Groups in each state; they sum to the ids issued."""
        return {state.value: self.closed[state] + len(self.slots.get(state, ())) for state in State}

    def history(self, group_ids: Iterable[int]) -> dict[int, dict[str, int | str | None]]:
        """Attempt, state and step of each id that holds a slot or is among the last few thousand that held one."""
        found = {}
        for group_id in group_ids:
            if (record := self.record(group_id)) is not None:
                found[group_id] = {"attempt": record[0], "state": record[1].value, "step": record[2]}
        return found

    def record(self, group_id: int) -> tuple[int, State, int | None] | None:
        """(attempt, state, step) of a group, None when it was never issued or is forgotten."""
        entry = self.entries.get(group_id)
        return self._recent.get(group_id) if entry is None else (entry.attempt, entry.state, entry.step)

    def held_by(self, actor_id: str) -> list[Entry]:
        """Groups in flight at an actor."""
        return list(self.held.get(actor_id, {}).values())

    # ---- the transitions ----

    def issue_new(self, actor_id: str, version: int) -> Entry:
        """A new id, in flight at the actor."""
        entry = Entry(self.next_group_id, 1, version, State.IN_FLIGHT, actor_id)
        self.next_group_id += 1
        self.entries[entry.group_id] = self.slots[State.IN_FLIGHT][entry.group_id] = entry
        self.held.setdefault(actor_id, {})[entry.group_id] = entry
        self.check()
        return entry

    def skip(self) -> None:
        """A new id that nobody produces: it counts as issued, never holds a slot, and is not remembered as a group."""
        self.next_group_id += 1
        self.closed[State.SKIPPED] += 1
        self.check()

    def issue_again(self, entry: Entry, actor_id: str, version: int) -> None:
        """waiting -> in flight, attempt + 1, under the live version."""
        entry.attempt, entry.policy_version, entry.actor_id = entry.attempt + 1, version, actor_id
        self.held.setdefault(actor_id, {})[entry.group_id] = entry
        self._move(entry, State.WAITING, State.IN_FLIGHT)

    def lose(self, entry: Entry) -> None:
        """in flight -> waiting, or failed when it was issued `max_attempts` times."""
        self._release(entry)
        self._move(entry, State.IN_FLIGHT, State.WAITING if entry.attempt < self.max_attempts else State.FAILED)

    def accept(self, entry: Entry, meta: GroupMeta, frame: Buffer, *, now: float) -> None:
        """in flight -> ready. The frame is copied: from here on the producer may forget it."""
        self._release(entry)
        entry.meta, entry.frame, entry.ready_at = meta, bytes(memoryview(frame)), now
        self._move(entry, State.IN_FLIGHT, State.READY)

    def reject(self, entry: Entry) -> None:
        """in flight -> rejected: the slot is free at once."""
        self._release(entry)
        self._move(entry, State.IN_FLIGHT, State.REJECTED)

    def train(self, entries: Iterable[Entry], step: int) -> None:
        """ready -> training, the whole batch of a learner step."""
        self.training_step = step
        for entry in entries:
            entry.step = step
            self._move(entry, State.READY, State.TRAINING)

    def finish_step(self) -> None:
        """training -> trained. The slots stay taken until the weights that contain the step are live."""
        if self.training_step is None:
            return
        self.steps, self.training_step = self.training_step, None
        for entry in list(self.slots[State.TRAINING].values()):
            self._move(entry, State.TRAINING, State.TRAINED)

    def retire(self, version: int) -> None:
        """Free the slots of the groups that steps up to `version` trained, and drop their frames."""
        for entry in list(self.slots[State.TRAINED].values()):
            if entry.step is not None and entry.step <= version:
                self._move(entry, State.TRAINED, None)

    def discard(self, entry: Entry) -> None:
        """waiting, in flight or ready -> unused: the run ends."""
        if entry.state == State.IN_FLIGHT:
            self._release(entry)
        self._move(entry, entry.state, State.UNUSED)

    # ---- over a restart ----

    def snapshot(self) -> dict[str, Any]:
        """Plain values for `restore`: the groups outstanding with their attempts and states, and the counts."""
        groups = [[entry.group_id, entry.attempt, entry.state.value] for entry in self.entries.values() if entry.state != State.TRAINED]
        closed = {state.value: count for state, count in self.closed.items()}
        closed["trained"] += len(self.slots[State.TRAINED])
        return {
            "first_group_id": self.first_group_id, "next_group_id": self.next_group_id, "steps": self.steps,
            "training_step": self.training_step, "groups": groups, "closed": closed,
        }

    def restore(self, snapshot: dict[str, Any], *, room: int) -> None:
        """Continue from a snapshot after `steps` learner steps, in a ledger that is still empty.

        Groups in training are trained if those steps contain them; the others wait to be issued again, the oldest `room` of them.
        """
        self.first_group_id, self.next_group_id = snapshot["first_group_id"], snapshot["next_group_id"]
        self.closed.update({State(name): count for name, count in snapshot["closed"].items()})
        for group_id, attempt, state in sorted(snapshot["groups"]):
            if state == State.TRAINING and self.steps == snapshot["training_step"]:
                self.closed[State.TRAINED] += 1
            elif len(self.entries) < room:
                entry = Entry(group_id, attempt, self.steps, State.WAITING)
                self.entries[group_id] = self.slots[State.WAITING][group_id] = entry
            else:
                self.closed[State.UNUSED] += 1
        self.check()

    # ---- bookkeeping ----

    def check(self) -> None:
        """The states sum to the ids issued. Raises RuntimeError."""
        in_slots = sum(len(index) for index in self.slots.values())
        issued = self.next_group_id - self.first_group_id
        if in_slots != len(self.entries) or in_slots + sum(self.closed.values()) != issued:
            raise RuntimeError(f"the ledger does not add up: {issued} ids issued, states {self.counts()}; this is a bug, please report it")

    def _move(self, entry: Entry, expected: State, to: State | None) -> None:
        """Put `entry` into state `to`; None closes it in the state it has."""
        if entry.state != expected or self.slots[expected].pop(entry.group_id, None) is not entry:
            raise RuntimeError(f"group {entry.group_id} is {entry.state}, expected {expected}; this is a bug, please report it")
        entry.state = expected if to is None else to
        if to in self.slots:
            self.slots[to][entry.group_id] = entry
        else:
            self._close(entry)
        self.check()

    def _close(self, entry: Entry) -> None:
        del self.entries[entry.group_id]
        self.closed[entry.state] += 1
        self._recent[entry.group_id] = (entry.attempt, entry.state, entry.step)
        if len(self._recent) > RECENT_GROUPS:
            del self._recent[next(iter(self._recent))]

    def _release(self, entry: Entry) -> None:
        held = self.held[entry.actor_id]
        del held[entry.group_id]
        if not held:
            del self.held[entry.actor_id]
        entry.actor_id = ""
