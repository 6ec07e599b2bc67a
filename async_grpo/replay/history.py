"""What happened in a run, from its journal alone: every group, every batch, and the frames on demand.

Runs in: any process that looks at a run, while it goes on or afterwards; reads only. Hides segments and events. The segments that
lead to the newest one (`lineage`) are walked in order, and the snapshot at the start of each one is right where it and the events before it differ:

    a process of the queue died      the snapshot says what was safe
    another start of the run         the batches of the steps after its checkpoint were taken back: their groups are ready, or wait
    a damaged part                   a group whose end was in it has state None
    a deleted or damaged part        a group that was only in it is counted, not listed (`History.unlisted`)

Invariants: memory grows by one small record per group and never by a frame; a journal that is being written, cut off or damaged gives
notes, not errors, as long as one segment can be read.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from async_grpo.replay.events import (
    Close,
    Done,
    Drop,
    Event,
    Expire,
    Fail,
    Issue,
    Live,
    Put,
    Refuse,
    Reject,
    Skip,
    TakeBatch,
    from_wire,
)
from async_grpo.replay.journal import JournalDamage, JournalError, Record, Segment, segment_path
from async_grpo.replay.ledger import Ledger, Place, State
from async_grpo.replay.lineage import Link, lineage
from async_grpo.wire import Group, GroupMeta, WireError, decode_group, decode_meta

OPEN_SEGMENTS = 8
"""Segments that stay mapped while frames are read; a batch of one learner step lies in one or two."""
REFUSALS = 100
"""Refused results that are remembered; the ledger counts all of them."""


Unlisted = Literal["deleted", "damaged", "before"]
"""Why the history does not tell of a group: its segments were deleted, as checkpoints do with those that nobody needs; what they told is
damaged; or the journal began after it."""


@dataclass(slots=True)
class GroupRecord:
    """One group as the journal tells it. `policy_version` and `actor_id` are of the latest ticket, `reason` of the latest setback."""

    group_id: int
    attempt: int
    state: State | None
    policy_version: int | None = None
    actor_id: str = ""
    step: int | None = None
    reason: str = ""
    frames: tuple[tuple[int, Place], ...] = ()
    """(attempt, place) of each result, the latest last."""


@dataclass(frozen=True, slots=True)
class Start:
    """A start of the run: its number from 0, and the learner step from which it went on."""

    epoch: int
    step: int


@dataclass
class History:
    """A run up to the moment of reading."""

    directory: Path
    ledger: Ledger
    groups: dict[int, GroupRecord]
    steps: dict[int, tuple[int, ...]]
    """Learner step -> its groups, in the history that leads to the current weights; the last one may still be in training."""
    live: dict[int, str]
    """Policy version that was live -> digest of its weights, "" if they have none."""
    starts: list[Start]
    refusals: deque[Refuse]
    """The latest results that changed no group."""
    notes: list[str]
    """What could not be read."""
    unlisted: dict[Unlisted, int]
    """Groups that the ledger counts and `groups` does not have, by reason; the reason why the oldest ones are missing comes first."""
    _open: dict[int, Segment] = field(default_factory=dict, repr=False)

    def frame(self, group_id: int, attempt: int | None = None) -> bytes:
        """The result of an attempt as it was put, by default of the latest one that has a result. Raises LookupError where there is none."""
        return bytes(self._view(group_id, attempt))

    def meta(self, group_id: int, attempt: int | None = None) -> GroupMeta | None:
        """What `frame` says beside the tokens; None where there is no result. Raises WireError for one that is damaged."""
        try:
            meta = decode_meta(self._view(group_id, attempt))
        except LookupError:
            return None
        if meta.group_id != group_id or attempt not in (None, meta.attempt):
            raise WireError(f"the journal has group {meta.group_id} attempt {meta.attempt} in the place of group {group_id}")
        return meta

    def group(self, group_id: int, attempt: int | None = None) -> Group | None:
        """The whole group; None where there is no result. Raises WireError for one that is damaged."""
        return None if self.meta(group_id, attempt) is None else decode_group(self.frame(group_id, attempt))

    def _view(self, group_id: int, attempt: int | None) -> memoryview:
        record = self.groups.get(group_id)
        places = [place for number, place in (record.frames if record else ()) if attempt in (None, number)]
        if not places:
            raise LookupError(f"the journal has no result of group {group_id}" + ("" if attempt is None else f" attempt {attempt}"))
        number = places[-1].segment
        if number not in self._open:
            try:
                segment = Segment(self.directory, number)
            except JournalError as error:
                raise LookupError(f"the result of group {group_id} is gone: {error}") from error
            while len(self._open) >= OPEN_SEGMENTS:
                del self._open[next(iter(self._open))]
            self._open[number] = segment
        return self._open[number].payload(places[-1])


def read_history(directory: Path) -> History:
    """The history that the segments in `directory` tell. Raises JournalError where there is no journal, or nothing of it can be read."""
    links, notes = lineage(directory)
    reader = _Reader(directory)
    reader.notes += notes
    for link in links:
        reader.read(link)
    return reader.history()


class _Reader:
    """Builds a History, segment by segment."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.notes: list[str] = []
        self._ledger: Ledger | None = None
        self._begins: tuple[Unlisted, int] = ("before", 0)
        """Why the history does not begin earlier, and the first group that is issued in it."""
        self._facts: dict[str, Any] = {}
        self._forget_all()

    def history(self) -> History:
        """What was read."""
        return History(
            self._directory, self._ledger, self._groups, self._steps, self._live, self._starts, self._refusals, self.notes,
            self._unlisted(),
        )

    def read(self, link: Link) -> None:
        """Go through the next segment; damage in it ends it early."""
        segment, first = link.segment, self._ledger is None
        self._ledger = Ledger.from_snapshot(segment.snapshot["ledger"])
        if first:
            self._begins = _why_not_earlier(segment), self._ledger.next_group_id
        self._enter(segment.snapshot)
        try:
            for record in link.records():
                self._take(from_wire(record.body), record)
        except (JournalDamage, RuntimeError, ValueError) as error:
            self.notes.append(f"what came later in its segment is unknown: {error}")
        if segment.cut_off:
            tail = "is being written, or was" if link.until is None else "was"
            self.notes.append(f"{segment.path}: the last record {tail} cut off ({segment.cut_off:,} bytes)")

    def _unlisted(self) -> dict[Unlisted, int]:
        """A group that was issued before the first segment and ended there is not in its snapshot; any other one was in a damaged part."""
        ledger, (why, begins) = self._ledger, self._begins
        earlier = begins - ledger.first_group_id - sum(group_id < begins for group_id in self._groups)
        later = ledger.issued - len(self._groups) - earlier
        counts = {why: earlier}
        counts["damaged"] = counts.get("damaged", 0) + later
        return {reason: count for reason, count in counts.items() if count > 0}

    def _forget_all(self) -> None:
        self._groups: dict[int, GroupRecord] = {}
        self._unfinished: dict[int, GroupRecord] = {}
        self._steps: dict[int, tuple[int, ...]] = {}
        self._live: dict[int, str] = {}
        self._starts: list[Start] = []
        self._refusals: deque[Refuse] = deque(maxlen=REFUSALS)

    # ---- the start of a segment ----

    def _enter(self, snapshot: dict[str, Any]) -> None:
        ledger, before = self._ledger, self._facts
        if snapshot["journal"] != before.get("journal"):
            self._forget_all()
        if not self._starts or snapshot["start"] != before["start"]:
            self._start_again(snapshot)
        self._facts = {name: snapshot[name] for name in ("journal", "start")}
        for record in [record for group_id, record in self._unfinished.items() if group_id not in ledger.entries]:
            self._end(record, _ended(record, ledger))
        for entry in ledger.entries.values():
            record = self._groups.setdefault(entry.group_id, GroupRecord(entry.group_id, 0, None))
            record.attempt, record.state, record.policy_version = entry.attempt, entry.state, entry.policy_version
            record.step, record.actor_id = entry.step, entry.actor_id or record.actor_id
            if entry.place is not None:
                _add_frame(record, entry.place)
            if entry.state != State.TRAINED:
                self._unfinished[entry.group_id] = record
        if ledger.training_step is not None:
            self._steps[ledger.training_step] = tuple(sorted(ledger.slots[State.TRAINING]))

    def _start_again(self, snapshot: dict[str, Any]) -> None:
        """What came after the checkpoint of this start did not happen."""
        ledger = self._ledger
        self._starts.append(Start(snapshot["epoch"], snapshot.get("from_step", ledger.steps)))
        self._steps = {step: ids for step, ids in self._steps.items() if step <= ledger.steps}
        self._live = {version: digest for version, digest in self._live.items() if version <= ledger.live}
        for known in (self._groups, self._unfinished):
            for group_id in [group_id for group_id in known if group_id >= ledger.next_group_id]:
                del known[group_id]

    # ---- events ----

    def _take(self, event: Event, record: Record) -> None:
        self._ledger.apply(event, place=record.place)
        if isinstance(event, Issue):
            self._issue(event)
        elif isinstance(event, Put | Reject | Fail | Expire | Drop):
            self._change(event, record.place)
        elif isinstance(event, Skip):
            for group_id in range(event.group_id, event.group_id + event.count):
                self._groups[group_id] = GroupRecord(group_id, 0, State.SKIPPED)
        elif isinstance(event, TakeBatch):
            self._steps[event.step] = event.group_ids
            for group_id in event.group_ids:
                self._groups[group_id].state, self._groups[group_id].step = State.TRAINING, event.step
        elif isinstance(event, Done):
            for group_id in self._steps[event.step]:
                self._end(self._groups[group_id], State.TRAINED)
        elif isinstance(event, Live):
            self._live[event.version] = event.digest
        elif isinstance(event, Refuse):
            self._refusals.append(event)
        elif isinstance(event, Close):
            for group in [group for group in self._unfinished.values() if group.state != State.TRAINING]:
                self._end(group, State.UNUSED)

    def _issue(self, event: Issue) -> None:
        record = self._groups.setdefault(event.group_id, GroupRecord(event.group_id, 0, None))
        record.attempt, record.state, record.policy_version, record.actor_id = event.attempt, State.IN_FLIGHT, event.version, event.actor_id
        self._unfinished[event.group_id] = record

    def _change(self, event: Put | Reject | Fail | Expire | Drop, place: Place | None) -> None:
        """The ledger knows where the group went; it remembers those that ended just now."""
        record = self._groups[event.group_id]
        record.state = self._ledger.record(event.group_id)[1]
        if isinstance(event, Put) and place is not None:
            _add_frame(record, place)
        if isinstance(event, Reject | Fail):
            record.reason = event.reason
        elif isinstance(event, Expire):
            record.reason = f"too old for step {event.step}"
        elif isinstance(event, Drop):
            record.reason = "its result could not be read"
        if record.state in (State.REJECTED, State.FAILED, State.EXPIRED):
            self._end(record, record.state)

    def _end(self, record: GroupRecord, state: State | None) -> None:
        record.state = state
        del self._unfinished[record.group_id]


def _why_not_earlier(oldest: Segment) -> Unlisted:
    if oldest.parent is None:
        return "before"
    return "damaged" if segment_path(oldest.path.parent, oldest.parent[0]).exists() else "deleted"


def _ended(record: GroupRecord, ledger: Ledger) -> State | None:
    """How a group ended that has no slot any more: at once where its last attempt was lost, else in a part that cannot be read."""
    if record.state == State.TRAINING and record.step is not None and record.step <= ledger.steps:
        return State.TRAINED
    if record.state == State.WAITING and record.reason:
        return State.EXPIRED if record.reason.startswith("too old") else State.FAILED
    return None


def _add_frame(record: GroupRecord, place: Place) -> None:
    others = tuple((attempt, known) for attempt, known in record.frames if attempt != record.attempt)
    record.frames = (*others, (record.attempt, place))
