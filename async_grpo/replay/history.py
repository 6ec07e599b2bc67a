"""What happened in a run, from its journal alone: every group, every batch, and the frames on
demand.

Runs in: any process that looks at a run, while it goes on or afterwards; reads only. Hides segments
and events. The segments that lead to the newest one (`lineage`) are walked in order, and the
snapshot at the start of each one is right where it and the events before it differ:

    a process of the queue died      the snapshot says what was safe
    another start of the run         the batches of the steps after its checkpoint were taken back:
                                     their groups are ready, or wait
    a damaged part                   a group whose end was in it has state None
    a deleted or damaged part        a group that was only in it is counted, not listed
                                     (`History.unlisted`)

Invariants: memory grows by one small record per group and never by a frame; a journal that is being
written, cut off or damaged gives notes, not errors, as long as one segment can be read.

Which segments of a journal follow from each other. Hides that a run which resumed from a checkpoint
leaves branches behind: every segment names its parent, the segment and the record after which it
goes on, so that a history is the way from a segment back to its ancestors, read forwards.

What the journal tells another start of a run: the history up to its end, and the results in it.
Hides the walk over the segments that lead to the newest one (`lineage`), and where results are.
Invariants: the history ends where the first damage is; a result is given only if it is of the very
attempt that was asked for and its frame passes every check of the wire.

The batches that a run recorded, in the order in which it trained them: a queue that only repeats.
Hides the journal. Invariant: it serves exactly the recorded groups, by the attempt that was
trained; one that cannot be read is an error, never left out.

The groups of a few learner steps, from the part of a journal that tells of them. Hides which part
that is: of the segments that lead to the newest one (`lineage`), from the last that begins before
the steps to the last that begins in them, and of that one the events up to the end of the steps.
`history` reads whole runs; this takes as long for a long run as for a short one.

Invariants: what starts of the run took back does not count; memory has a place for each result of
these steps or later, never a frame.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from async_grpo.errors import JournalDamage, JournalError, SetupError
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
from async_grpo.replay.journal import JournalRecord, Segment, segment_path, segments
from async_grpo.replay.ledger import FramePosition, GroupEntry, Ledger, State
from async_grpo.replay.rules import QueueSettings
from async_grpo.wire import (
    Batch,
    Group,
    GroupMeta,
    WireError,
    decode_group,
    decode_meta,
    pack_frames,
)


@dataclass(frozen=True, slots=True)
class Link:
    """A segment, and the last of its records that belongs to the history; None for all that are
    there.
    """

    segment: Segment
    until: int | None

    def records(self) -> Iterator[JournalRecord]:
        """The records after the snapshot. Raises JournalDamage where one is damaged or the segment
        ends before its successor begins.
        """
        for record in self.segment.records():
            if self.until is not None and record.sequence > self.until:
                return
            yield record
        if self.until is not None and self.segment.sequence < self.until:
            raise JournalDamage(
                f"{self.segment.path} ends with record {self.segment.sequence}, and the "
                f"next segment goes on after {self.until}"
            )


def lineage(
    directory: Path, *, first: int | None = None, whole: bool = False
) -> tuple[list[Link], list[str]]:
    """The history that ends in the newest segment (with `first`: in its newest descendant) from the
    oldest ancestor (`first`) on.

    whole: an ancestor that cannot be read ends the history before it, instead of beginning after
    it. Returns the links, and a note for every segment that cannot be read. Raises JournalError if
    no segment, or not `first`, can be read.
    """
    opened: dict[int, Segment] = {}
    notes = []
    for number in segments(directory):
        try:
            opened[number] = Segment(directory, number)
        except JournalError as error:
            if segment_path(
                directory, number
            ).exists():  # deleted meanwhile: an old one that nobody needs
                notes.append(str(error))
    for number in sorted(opened, reverse=True):
        links = _ancestry(opened, number, first)
        oldest = links[0].segment
        broken = oldest.parent is not None and segment_path(directory, oldest.parent[0]).exists()
        if oldest.number == first or (first is None and not (whole and broken)):
            return links, notes
    raise JournalError(notes[0] if notes else f"there is no journal in {directory}")


def _ancestry(opened: dict[int, Segment], number: int, first: int | None) -> list[Link]:
    links = [Link(opened[number], None)]
    while (
        (segment := links[0].segment).number != first
        and segment.parent is not None
        and segment.parent[0] in opened
    ):
        links.insert(0, Link(opened[segment.parent[0]], segment.parent[1]))
    return links


OPEN_SEGMENTS = 8
"""Segments that stay mapped while frames are read; a batch of one learner step lies in one or two.
"""
REFUSALS = 100
"""Refused results that are remembered; the ledger counts all of them."""


Unlisted = Literal["deleted", "damaged", "before"]
"""Why the history does not tell of a group: its segments were deleted, as checkpoints do with those
that nobody needs; what they told is damaged; or the journal began after it.
"""


@dataclass(slots=True)
class GroupRecord:
    """One group as the journal tells it. `policy_version` and `actor_id` are of the latest ticket,
    `reason` of the latest setback.
    """

    group_id: int
    attempt: int
    state: State | None
    policy_version: int | None = None
    actor_id: str = ""
    step: int | None = None
    reason: str = ""
    frames: tuple[tuple[int, FramePosition], ...] = ()
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
    """Learner step -> its groups, in the history that leads to the current weights; the last one
    may still be in training.
    """
    live: dict[int, str]
    """Policy version that was live -> digest of its weights, "" if they have none."""
    starts: list[Start]
    refusals: deque[Refuse]
    """The latest results that changed no group."""
    notes: list[str]
    """What could not be read."""
    unlisted: dict[Unlisted, int]
    """Groups that the ledger counts and `groups` does not have, by reason; the reason why the
    oldest ones are missing comes first.
    """
    _open: dict[int, Segment] = field(default_factory=dict, repr=False)

    def frame(self, group_id: int, attempt: int | None = None) -> bytes:
        """The result of an attempt as it was put, by default of the latest one that has a result.
        Raises LookupError where there is none.
        """
        return bytes(self._view(group_id, attempt))

    def meta(self, group_id: int, attempt: int | None = None) -> GroupMeta | None:
        """What `frame` says beside the tokens; None where there is no result. Raises WireError for
        one that is damaged.
        """
        try:
            meta = decode_meta(self._view(group_id, attempt))
        except LookupError:
            return None
        if meta.group_id != group_id or attempt not in (None, meta.attempt):
            raise WireError(
                f"the journal has group {meta.group_id} attempt {meta.attempt} in the "
                f"place of group {group_id}"
            )
        return meta

    def group(self, group_id: int, attempt: int | None = None) -> Group | None:
        """The whole group; None where there is no result. Raises WireError for one that is
        damaged.
        """
        return (
            None
            if self.meta(group_id, attempt) is None
            else decode_group(self.frame(group_id, attempt))
        )

    def _view(self, group_id: int, attempt: int | None) -> memoryview:
        record = self.groups.get(group_id)
        places = [
            place
            for number, place in (record.frames if record else ())
            if attempt in (None, number)
        ]
        if not places:
            raise LookupError(
                f"the journal has no result of group {group_id}"
                + ("" if attempt is None else f" attempt {attempt}")
            )
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
    """The history that the segments in `directory` tell. Raises JournalError where there is no
    journal, or nothing of it can be read.
    """
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
            self._directory,
            self._ledger,
            self._groups,
            self._steps,
            self._live,
            self._starts,
            self._refusals,
            self.notes,
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
            self.notes.append(
                f"{segment.path}: the last record {tail} cut off ({segment.cut_off:,} bytes)"
            )

    def _unlisted(self) -> dict[Unlisted, int]:
        """A group that was issued before the first segment and ended there is not in its snapshot;
        any other one was in a damaged part.
        """
        ledger, (why, begins) = self._ledger, self._begins
        earlier = (
            begins - ledger.first_group_id - sum(group_id < begins for group_id in self._groups)
        )
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
        for record in [
            record
            for group_id, record in self._unfinished.items()
            if group_id not in ledger.entries
        ]:
            self._end(record, _ended(record, ledger))
        for entry in ledger.entries.values():
            record = self._groups.setdefault(entry.group_id, GroupRecord(entry.group_id, 0, None))
            record.attempt, record.state, record.policy_version = (
                entry.attempt,
                entry.state,
                entry.policy_version,
            )
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
        self._live = {
            version: digest for version, digest in self._live.items() if version <= ledger.live
        }
        for known in (self._groups, self._unfinished):
            for group_id in [group_id for group_id in known if group_id >= ledger.next_group_id]:
                del known[group_id]

    # ---- events ----

    def _take(self, event: Event, record: JournalRecord) -> None:
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
                self._groups[group_id].state, self._groups[group_id].step = (
                    State.TRAINING,
                    event.step,
                )
        elif isinstance(event, Done):
            for group_id in self._steps[event.step]:
                self._end(self._groups[group_id], State.TRAINED)
        elif isinstance(event, Live):
            self._live[event.version] = event.digest
        elif isinstance(event, Refuse):
            self._refusals.append(event)
        elif isinstance(event, Close):
            for group in [
                group for group in self._unfinished.values() if group.state != State.TRAINING
            ]:
                self._end(group, State.UNUSED)

    def _issue(self, event: Issue) -> None:
        record = self._groups.setdefault(event.group_id, GroupRecord(event.group_id, 0, None))
        record.attempt, record.state, record.policy_version, record.actor_id = (
            event.attempt,
            State.IN_FLIGHT,
            event.version,
            event.actor_id,
        )
        self._unfinished[event.group_id] = record

    def _change(
        self, event: Put | Reject | Fail | Expire | Drop, place: FramePosition | None
    ) -> None:
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
    """How a group ended that has no slot any more: at once where its last attempt was lost, else in
    a part that cannot be read.
    """
    if record.state == State.TRAINING and record.step is not None and record.step <= ledger.steps:
        return State.TRAINED
    if record.state == State.WAITING and record.reason:
        return State.EXPIRED if record.reason.startswith("too old") else State.FAILED
    return None


def _add_frame(record: GroupRecord, place: FramePosition) -> None:
    others = tuple(
        (attempt, known) for attempt, known in record.frames if attempt != record.attempt
    )
    record.frames = (*others, (record.attempt, place))


class Past:
    """A run's history up to its end: the ledger there, the batches that were taken on the way, and
    where results are.
    """

    def __init__(self, snapshot: dict[str, Any]) -> None:
        """No more than a snapshot: results are not at hand."""
        self.snapshot, self.ledger = snapshot, Ledger.from_snapshot(snapshot["ledger"])
        self.batches: dict[int, list[int]] = {}
        self.weighed: dict[int, tuple[int, int]] = {}
        """Learner step -> tokens of its batch with weight in the loss, and without."""
        self.results: dict[int, GroupEntry] = {}
        """Group -> as it was when its latest result came; in the order of completion."""
        self.last: Segment | None = None
        self.notes: list[str] = []

    def read(self, links: list[Link], *, step: int) -> None:
        """The segments in order, up to the last one, the first damage, or a start of the run that
        went behind `step`: another branch.
        """
        for link in links:
            snapshot, ledger = link.segment.snapshot, link.segment.snapshot["ledger"]
            if (
                snapshot["start"] != self.snapshot["start"]
                and (ledger["training_step"] or ledger["steps"]) < step
            ):
                return
            self._enter(link.segment)
            try:
                for record in link.records():
                    self._note(event_of(record, link.segment), record.place, link.segment)
            except JournalDamage as error:
                self.notes.append(f"what came later is not taken over, because {error}")
                return

    def _enter(self, segment: Segment) -> None:
        """A segment begins. At another start of the run its snapshot has taken back the batches
        that were lost then.
        """
        taken_back = segment.snapshot["start"] != self.snapshot["start"]
        self.snapshot, self.ledger, self.last = (
            segment.snapshot,
            Ledger.from_snapshot(segment.snapshot["ledger"]),
            segment,
        )
        if taken_back:
            self.batches = {
                step: ids for step, ids in self.batches.items() if step <= self.ledger.steps
            }
            self.weighed = {
                step: tokens for step, tokens in self.weighed.items() if step <= self.ledger.steps
            }
        for entry in (*self.ledger.entries.values(), *self.ledger.unused.values()):
            if entry.place is not None:
                self.results[entry.group_id] = replace(entry)
        if self.ledger.training_step is not None:
            self._takes(self.ledger.training_step, sorted(self.ledger.training))

    def _note(self, event: Event, place: FramePosition | None, segment: Segment) -> None:
        apply_record(self.ledger, event, place, segment)
        if isinstance(event, Put) and place is not None:
            self.results.pop(event.group_id, None)  # the last one now
            self.results[event.group_id] = replace(self.ledger.entries[event.group_id])
        if isinstance(event, TakeBatch):
            self._takes(event.step, list(event.group_ids))

    def _takes(self, step: int, group_ids: list[int]) -> None:
        self.batches[step] = group_ids
        self.weighed[step] = self.ledger.tokens.in_training(group_ids)


def find_past(
    directory: Path, snapshot: dict[str, Any] | None, settings: QueueSettings, identity: str
) -> tuple[Past | None, str]:
    """The history that leads from the checkpoint, or from the beginning of the run; None if this
    journal does not have it, and why not.
    """
    foreign = (
        "the journal in the run's directory is of another run, or of other settings, and is "
        "not read"
    )
    if snapshot is not None and snapshot["segment"] not in segments(directory):
        return None, foreign
    try:
        links, notes = lineage(
            directory, first=None if snapshot is None else snapshot["segment"], whole=True
        )
    except JournalError as error:
        return None, f"the journal is not read, because {error}"
    first = links[0].segment.snapshot
    if snapshot is None:
        begun = first["ledger"]
        if (
            begun["steps"]
            or begun["next_group_id"]
            or settings.trained_steps
            or first["identity"] != identity
        ):
            return None, foreign
    elif first["journal"] != snapshot["journal"]:
        return None, foreign
    past = Past(first)
    past.read(links, step=settings.trained_steps)
    past.notes += notes
    return past, ""


class Results:
    """Frames at their places, each segment opened once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._segments: dict[int, Segment] = {}

    def read(
        self, place: FramePosition | None, group_id: int, attempt: int, settings: QueueSettings
    ) -> tuple[GroupMeta, bytes]:
        """Metadata and frame of this very attempt. Raises WireError."""
        if place is None:
            raise WireError("the journal has no frame of it")
        try:
            segment = self._segments.get(place.segment) or Segment(self._directory, place.segment)
        except JournalError as error:
            raise WireError(str(error)) from error
        self._segments[place.segment] = segment
        frame = bytes(segment.payload(place))
        meta = decode_meta(frame, max_bytes=settings.max_frame_bytes)
        if (meta.group_id, meta.attempt) != (group_id, attempt):
            raise WireError(
                f"the journal has group {meta.group_id} attempt {meta.attempt} in the "
                f"place of group {group_id} attempt {attempt}"
            )
        return meta, frame


def event_of(record: JournalRecord, segment: Segment) -> Event:
    try:
        return from_wire(record.body)
    except (ValueError, TypeError, LookupError) as error:
        raise JournalDamage(
            f"{segment.path} holds a record {record.sequence} that is no event: {error}"
        ) from error


def apply_record(
    ledger: Ledger, event: Event, place: FramePosition | None, segment: Segment
) -> None:
    try:
        ledger.apply(event, place=place)
    except (RuntimeError, TypeError, LookupError) as error:
        raise JournalDamage(f"{segment.path} tells what cannot have happened: {error}") from error


class RecordedQueue:
    """The queue's side of the loop and of the learner, from `<run directory>/journal`."""

    def __init__(self, directory: str) -> None:
        """Raises JournalError for a journal that cannot be read."""
        self._history: History = read_history(Path(directory))

    async def get_batch(self, step: int) -> Batch | None:
        """The groups that learner step `step` trained. Raises SetupError when the journal does not
        have them.
        """
        if step not in self._history.steps:
            raise SetupError(f"the journal in {self._history.directory} has no learner step {step}")
        try:
            return Batch(
                step,
                tuple(
                    decode_meta(self._history.frame(group_id))
                    for group_id in self._history.steps[step]
                ),
            )
        except (LookupError, WireError) as error:
            raise SetupError(f"learner step {step} cannot be repeated: {error}") from error

    async def payload(self, step: int, group_ids: Sequence[int]) -> np.ndarray:
        """Their frames, as the queue would serve them."""
        return pack_frames([self._history.frame(group_id) for group_id in group_ids])

    async def metrics(self) -> dict[str, float]:
        """None: nothing is admitted, ordered or counted here."""
        return {}

    async def digests(self) -> dict[int, str]:
        """Digest of the weights of every version that was live, where the run recorded one."""
        return {version: digest for version, digest in self._history.live.items() if digest}


@dataclass(slots=True)
class GroupResult:
    """Where a result is; the learner `step` that took it, None for none so far; `waits`: it is
    ready for one.
    """

    place: FramePosition
    step: int | None = None
    waits: bool = True


class Stretch:
    """Batches of the steps `first` to `last` and the one after them, and the results that were
    there meanwhile. Raises JournalError where nothing can be read.
    """

    def __init__(self, directory: Path, *, first: int, last: int) -> None:
        self._first, self._last = first, last
        self.steps: dict[int, tuple[int, ...]] = {}
        self.results: dict[int, GroupResult] = {}
        links, self.notes = lineage(directory)
        self._segments: dict[int, Segment] = {}
        chosen = _part(links, first=first, last=last)
        for link in chosen:
            self._enter(link.segment)
            try:
                for event, place in _events(link):
                    if (
                        isinstance(event, TakeBatch)
                        and event.step > last + 1
                        and link is chosen[-1]
                    ):
                        break
                    self._take(event, place)
            except (JournalDamage, ValueError) as error:
                self.notes.append(f"what came later in its segment is unknown: {error}")
        needed = {result.place.segment for result in self.results.values()}
        self._segments = {
            link.segment.number: link.segment for link in links if link.segment.number in needed
        }

    def meta(self, group_id: int) -> GroupMeta | None:
        """What the group's frame says beside the tokens; None where its segment is gone. Raises
        WireError for one that is damaged.
        """
        place = self.results[group_id].place
        if place.segment not in self._segments:
            return None
        meta = decode_meta(self._segments[place.segment].payload(place))
        if meta.group_id != group_id:
            raise WireError(
                f"the journal has group {meta.group_id} in the place of group {group_id}"
            )
        return meta

    def _enter(self, segment: Segment) -> None:
        """What its snapshot does not know of was taken back, or has ended."""
        ledger = Ledger.from_snapshot(segment.snapshot["ledger"])
        self.steps = {step: ids for step, ids in self.steps.items() if step <= ledger.steps}
        for result in self.results.values():
            if result.step is None or result.step > ledger.steps:
                result.step, result.waits = None, False
        for group_id, entry in ledger.entries.items():
            if entry.place is not None:
                self.results[group_id] = GroupResult(entry.place)
        if ledger.training_step is not None:
            self._batch(ledger.training_step, tuple(sorted(ledger.training)))

    def _take(self, event: Event, place: FramePosition | None) -> None:
        if isinstance(event, Put) and place is not None:
            self.results[event.group_id] = GroupResult(place)
        elif isinstance(event, TakeBatch):
            self._batch(event.step, event.group_ids)
        elif isinstance(event, Expire | Drop) and event.group_id in self.results:
            self.results[event.group_id].waits = False

    def _batch(self, step: int, group_ids: tuple[int, ...]) -> None:
        if step >= self._first:
            self.steps[step] = group_ids
        for group_id in group_ids:
            if step < self._first:
                self.results.pop(group_id, None)  # it left before these steps
            elif group_id in self.results:
                self.results[group_id].step, self.results[group_id].waits = step, False


def _part(links: list[Link], *, first: int, last: int) -> list[Link]:
    """The links that tell of these steps. Steps only go back where the run started again, so the
    last place counts.
    """
    begins = [link.segment.snapshot["ledger"]["steps"] for link in links]
    start = max((index for index, steps in enumerate(begins) if steps < first), default=0)
    end = max((index for index, steps in enumerate(begins) if steps <= last), default=-1)
    return links[start : end + 1]


def _events(link: Link) -> Iterator[tuple[Event, FramePosition | None]]:
    for record in link.records():
        yield from_wire(record.body), record.place
