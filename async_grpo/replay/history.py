"""What happened in a run, from its journal alone: one reader of segments and events, and what is
asked of it.

Runs in: the replay queue's process when a run starts, and any process that looks at a run, while it
goes on or afterwards; reads only. Hides segments and events:

    lineage   the segments that lead to the newest one. A run that resumed from a checkpoint leaves
              branches behind: every segment names its parent, the segment and the record after
              which it goes on, so a history is the way back to the ancestors, read forwards
    read      walks them in order and tells a visitor what begins and what happens. The snapshot at
              the start of a segment is right where it and the events before it differ: `Visitor`
              takes back the learner steps that it does not know of

    Visitor   the ledger and the batches, at the latest record
      Past      what another start of the run needs; it ends at the first damage
      Stretch   the groups of a few learner steps, from the part of the journal that tells of them,
                so that it takes as long for a long run as for a short one
      History   every group of the run. Damage ends a segment early and gives a note: a group whose
                end was in it has state None, a group that was only in it, or in a deleted part, is
                counted and not listed (`History.unlisted`)
    RecordedQueue   the recorded batches as a queue that only repeats

Invariants: memory grows by one small record per group and never by a frame; a result is given only
if it is of the very attempt that was asked for and its frame passes every check of the wire; a
journal that is being written, cut off or damaged gives notes, not errors, as long as one segment
can be read; a recorded group that cannot be read is an error, never left out.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from async_grpo.errors import JournalDamage, JournalError, SetupError
from async_grpo.replay import events
from async_grpo.replay.events import Event
from async_grpo.replay.journal import Results, Segment, segment_path, segments
from async_grpo.replay.ledger import SLOT_STATES, FramePosition, GroupEntry, Ledger, State
from async_grpo.wire.codec import (
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
    """A segment, and the last of its records that belongs to the history; None for all of them."""

    segment: Segment
    until: int | None

    def events(self) -> Iterator[tuple[Event, FramePosition | None]]:
        """Return the events after the snapshot and the places of their frames. Raises JournalDamage
        where one is damaged or the segment ends before its successor begins.
        """
        path = self.segment.path
        for record in self.segment.records():
            if self.until is not None and record.sequence > self.until:
                return
            try:
                event = events.from_wire(record.body)
            except (ValueError, TypeError, LookupError) as error:
                what = f"holds a record {record.sequence} that is no event: {error}"
                raise JournalDamage(f"{path} {what}") from error
            yield event, record.place
        if self.until is not None and self.segment.sequence < self.until:
            what = f"the next segment continues after {self.until}"
            raise JournalDamage(f"{path} ends with record {self.segment.sequence}, and {what}")


def lineage(
    directory: Path, *, first: int | None = None, whole: bool = False
) -> tuple[list[Link], list[str]]:
    """Links from the oldest ancestor (`first`) to the newest segment (its newest descendant), and a
    note for every unreadable segment, and for every missing one that newer ones need. Raises
    JournalError without a readable segment, or `first`.

    whole: an unreadable ancestor ends the history before it, instead of beginning after it.
    """
    opened: dict[int, Segment] = {}
    notes = []
    for number in segments(directory):
        try:
            opened[number] = Segment(directory, number)
        except JournalError as error:
            if segment_path(directory, number).exists():  # else deleted meanwhile: nobody needs it
                notes.append(str(error))
    for number in sorted(opened, reverse=True):
        links = [Link(opened[number], None)]
        while (oldest := links[0].segment).number != first and oldest.parent is not None:
            parent, until = oldest.parent
            if parent not in opened:
                break
            links.insert(0, Link(opened[parent], until))
        broken = oldest.parent is not None and segment_path(directory, oldest.parent[0]).exists()
        if oldest.number == first or (first is None and not (whole and broken)):
            return links, notes
        if oldest.parent is not None and not broken:
            notes.append(f"the journal's {segment_path(directory, oldest.parent[0])} is missing")
    raise JournalError(
        notes[0]
        if notes
        else f"{directory.parent} has no journal: it is not the directory of a run (run.dir), the "
        "run is still starting, or replay.journal.enable is false"
    )


class Visitor:
    """Follows a journal from a snapshot: the ledger at the latest record, and its batches."""

    def __init__(self, snapshot: dict[str, Any]) -> None:
        self.snapshot = snapshot
        """The latest one."""
        self.ledger = Ledger.from_snapshot(snapshot["ledger"])
        self.steps: dict[int, tuple[int, ...]] = {}
        """Learner step -> its groups, in the history that leads to the current weights."""
        self.notes: list[str] = []
        """What could not be read."""

    def begins(self, segment: Segment) -> None:
        """Take the snapshot: a start of the run took back the steps that it does not know of."""
        self.snapshot = segment.snapshot
        self.ledger = ledger = Ledger.from_snapshot(segment.snapshot["ledger"])
        self.steps = {step: ids for step, ids in self.steps.items() if step <= ledger.steps}
        if ledger.training_step is not None:
            self.steps[ledger.training_step] = tuple(sorted(ledger.training))

    def happens(self, event: Event, place: FramePosition | None) -> None:
        """Take an event that the ledger has taken; `place` is where its frame is."""
        if isinstance(event, events.TakeBatch):
            self.steps[event.step] = event.group_ids


def read(
    links: Iterable[Link],
    visitor: Visitor,
    *,
    damage: Literal["raise", "end", "skip"] = "raise",
    until: Callable[[Event], bool] | None = None,
) -> None:
    """Tell `visitor` what the segments say, in order, up to the event for which `until` holds.

    damage: JournalDamage is raised, or ends the history, or the rest of its segment is skipped.
    """
    for link in links:
        visitor.begins(link.segment)
        try:
            for event, place in link.events():
                if until is not None and until(event):
                    return
                try:
                    visitor.ledger.apply(event, place=place)
                except (RuntimeError, TypeError, LookupError) as error:
                    what = f"records what cannot have happened: {error}"
                    raise JournalDamage(f"{link.segment.path} {what}") from error
                visitor.happens(event, place)
        except JournalDamage as error:
            if damage == "raise":
                raise
            if damage == "end":
                visitor.notes.append(f"later records are not used, because {error}")
                return
            visitor.notes.append(f"later records of its segment are unknown: {error}")


# ---- another start of the run ----


class Past(Visitor):
    """A run's history up to its end or the first damage; a snapshot alone has no results."""

    def __init__(self, snapshot: dict[str, Any]) -> None:
        super().__init__(snapshot)
        self.weighed: dict[int, tuple[int, int]] = {}
        """Learner step -> tokens of its batch with weight in the loss, and without."""
        self.results: dict[int, GroupEntry] = {}
        """Group -> as it was when its latest result came."""
        self.last: Segment | None = None

    def begins(self, segment: Segment) -> None:
        """See Visitor."""
        super().begins(segment)
        self.last, ledger = segment, self.ledger
        for entry in (*ledger.entries.values(), *ledger.unused.values()):
            if entry.place is not None:
                self.results[entry.group_id] = replace(entry)
        self.weighed = {step: self.weighed[step] for step in self.steps if step in self.weighed}
        if ledger.training_step is not None:
            self._weigh(ledger.training_step)

    def happens(self, event: Event, place: FramePosition | None) -> None:
        """See Visitor."""
        super().happens(event, place)
        if isinstance(event, events.Put) and place is not None:
            self.results.pop(event.group_id, None)  # the last one now
            self.results[event.group_id] = replace(self.ledger.entries[event.group_id])
        elif isinstance(event, events.TakeBatch):
            self._weigh(event.step)

    def _weigh(self, step: int) -> None:
        self.weighed[step] = self.ledger.tokens.in_training(self.steps[step])


def find_past(
    directory: Path, snapshot: dict[str, Any] | None, *, step: int, identity: str | None
) -> tuple[Past | None, str]:
    """Find the history from the checkpoint after `step`, or the beginning, on; None, and why,
    without one. identity: of what begins without a checkpoint; None: any.
    """
    first = None if snapshot is None else snapshot["segment"]
    begins = segment_path(directory, first or 0)
    gone = first is not None and not begins.exists()
    try:
        links, notes = lineage(directory, first=None if gone else first, whole=True)
    except JournalError as error:
        return None, f"the journal is not read, because {error}"
    oldest = links[0].segment.snapshot
    name, ours = ("identity", identity) if snapshot is None else ("journal", snapshot["journal"])
    if ours not in (None, oldest[name]):
        other = "the journal in the run's directory is of another run, or of other settings"
        return None, f"{other}, and is not read"
    if gone:
        return None, f"the journal's {begins} is missing"
    if snapshot is None and (oldest["ledger"]["steps"] or oldest["ledger"]["next_group_id"]):
        steps = oldest["ledger"]["steps"]
        return None, f"the journal in {directory} begins after learner step {steps}"
    past = Past(oldest)
    read(_one_branch(links, step), past, damage="end")
    past.notes += notes
    return past, ""


def _one_branch(links: list[Link], step: int) -> Iterator[Link]:
    """Return the links up to a start of the run that went behind `step`: another branch."""
    start = links[0].segment.snapshot["start"]
    for link in links:
        snapshot, ledger = link.segment.snapshot, link.segment.snapshot["ledger"]
        if snapshot["start"] != start and (ledger["training_step"] or ledger["steps"]) < step:
            return
        start = snapshot["start"]
        yield link


# ---- a few learner steps ----


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The learner `step` that took a result, None for none so far; `waits`: it is ready for one."""

    place: FramePosition
    step: int | None
    waits: bool


class Stretch(Past):
    """Batches of the steps `first` to `last` and of the next one, and the results of that time.
    Raises JournalError where nothing can be read.

    Read are the segments from the last one that begins before the steps to the last one that begins
    in them, and of that one the events up to the end of the steps.
    """

    def __init__(self, directory: Path, *, first: int, last: int) -> None:
        links, notes = lineage(directory)
        chosen = _part(links, first=first, last=last)
        super().__init__((chosen or links)[0].segment.snapshot)
        self.notes += notes
        read(chosen[:-1], self, damage="skip")
        read(
            chosen[-1:],
            self,
            damage="skip",
            until=lambda one: isinstance(one, events.TakeBatch) and one.step > last + 1,
        )
        self._frames = Results(directory)
        self.groups = self._groups(first)
        self.steps = {step: ids for step, ids in self.steps.items() if step >= first}

    def meta(self, group_id: int) -> GroupMeta | None:
        """Return the group's `GroupMeta`; None where its segment is gone. Raises WireError if
        damaged.
        """
        try:
            return self._frames.meta(self.groups[group_id].place, group_id)
        except JournalError:
            return None

    def _groups(self, first: int) -> dict[int, GroupResult]:
        taken = {group_id: step for step, ids in self.steps.items() for group_id in ids}
        ready = self.ledger.slots[State.READY].keys() | self.ledger.unused.keys()
        return {
            group_id: GroupResult(entry.place, taken.get(group_id), group_id in ready)
            for group_id, entry in self.results.items()
            if entry.place is not None and taken.get(group_id, first) >= first
        }


def _part(links: list[Link], *, first: int, last: int) -> list[Link]:
    """Return the links that tell of these steps. Steps only go back where the run started again."""
    begins = [link.segment.snapshot["ledger"]["steps"] for link in links]
    start = max((index for index, steps in enumerate(begins) if steps < first), default=0)
    end = max((index for index, steps in enumerate(begins) if steps <= last), default=-1)
    return links[start : end + 1]


# ---- every group ----

REFUSALS = 100
"""Refused results that are remembered; the ledger counts all of them."""
Unlisted = Literal["deleted", "missing", "damaged", "before"]
"""Why the history does not tell of a group: its segments were deleted, as checkpoints do with those
that nobody needs; one is missing that no checkpoint deleted; what they told is damaged; or the
journal began after it.
"""


@dataclass(slots=True)
class GroupRecord:
    """One group as the journal tells it: its latest ticket, and `reason` of the latest setback."""

    group_id: int
    attempt: int
    state: State | None
    policy_version: int | None = None
    actor_id: str = ""
    step: int | None = None
    reason: str = ""
    frames: tuple[tuple[int, FramePosition], ...] = ()
    """(attempt, place) of each result, the latest last."""

    def keep(self, attempt: int, place: FramePosition | None) -> None:
        """Take the result of an attempt, if it has one."""
        if place is not None:
            others = (frame for frame in self.frames if frame[0] != attempt)
            self.frames = (*others, (attempt, place))


@dataclass(frozen=True, slots=True)
class Start:
    """A start of the run: its number from 0, and the learner step from which it went on."""

    epoch: int
    step: int


class History(Visitor):
    """A run up to the moment of reading, see `read_history`."""

    def __init__(self, directory: Path, oldest: Segment) -> None:
        super().__init__(oldest.snapshot)
        self.directory = directory
        self.groups: dict[int, GroupRecord] = {}
        self.live: dict[int, str] = {}
        """Policy version that was live -> digest of its weights, "" if they have none."""
        self.starts: list[Start] = []
        self.refusals: deque[events.Refuse] = deque(maxlen=REFUSALS)
        """The latest results that changed no group."""
        self._unfinished: dict[int, GroupRecord] = {}
        self.missing = _missing(oldest)
        """Segments that should be there."""
        self._not_earlier = self._why_not_earlier(oldest)
        self._first = self.ledger.next_group_id
        """The first group that is issued in it."""
        self._results = Results(directory)

    @property
    def unlisted(self) -> dict[Unlisted, int]:
        """Count the groups that are not in `groups`, by reason, that of the oldest ones first. One
        that was issued before the first segment and ended there is not in its snapshot; others are
        damaged.
        """
        known = sum(group_id < self._first for group_id in self.groups)
        earlier = self._first - self.ledger.first_group_id - known
        counts = {self._not_earlier: earlier}
        later = self.ledger.issued - len(self.groups) - earlier
        counts["damaged"] = counts.get("damaged", 0) + later
        return {reason: count for reason, count in counts.items() if count > 0}

    def _why_not_earlier(self, oldest: Segment) -> Unlisted:
        if oldest.parent is None:
            return "before"
        path = segment_path(self.directory, oldest.parent[0])
        return "damaged" if path.exists() else "missing" if path in self.missing else "deleted"

    def frame(self, group_id: int, attempt: int | None = None) -> bytes:
        """Return the result of an attempt, by default the latest one. Raises LookupError without
        one.
        """
        place = self._place(group_id, attempt)
        try:
            return bytes(self._results.view(place))
        except JournalError as error:
            raise LookupError(f"the result of group {group_id} is gone: {error}") from error

    def meta(self, group_id: int, attempt: int | None = None) -> GroupMeta | None:
        """Return the result's `GroupMeta`; None where there is none. Raises WireError if
        damaged.
        """
        try:
            return self._results.meta(self._place(group_id, attempt), group_id, attempt)
        except (LookupError, JournalError):
            return None

    def group(self, group_id: int, attempt: int | None = None) -> Group | None:
        """Return the whole group; None where there is no result. Raises WireError if damaged."""
        if self.meta(group_id, attempt) is None:
            return None
        return decode_group(self.frame(group_id, attempt))

    def _place(self, group_id: int, attempt: int | None) -> FramePosition:
        record = self.groups.get(group_id)
        known = record.frames if record else ()
        places = [place for number, place in known if attempt in (None, number)]
        if not places:
            raise LookupError(
                f"the journal has no result of group {group_id}"
                + ("" if attempt is None else f" attempt {attempt}")
            )
        return places[-1]

    # ---- reading ----

    def begins(self, segment: Segment) -> None:
        """See Visitor."""
        before = self.snapshot["start"]
        super().begins(segment)
        if not self.starts or self.snapshot["start"] != before:
            self._start_again()
        ledger = self.ledger
        for group_id in self._unfinished.keys() - ledger.entries.keys():
            record = self._unfinished.pop(group_id)
            record.state = _ended(record, ledger)
        for entry in ledger.entries.values():
            self._follow(entry)
        ledger.watch = self._follow

    def _start_again(self) -> None:
        """Forget what came after the checkpoint of this start: it did not happen."""
        snapshot, ledger = self.snapshot, self.ledger
        self.starts.append(Start(snapshot["epoch"], snapshot.get("from_step", ledger.steps)))
        self.live = {
            version: digest for version, digest in self.live.items() if version <= ledger.live
        }
        for known in (self.groups, self._unfinished):
            for group_id in [group_id for group_id in known if group_id >= ledger.next_group_id]:
                del known[group_id]

    def happens(self, event: Event, place: FramePosition | None) -> None:
        """See Visitor."""
        super().happens(event, place)
        match event:
            case events.Reject(group_id, attempt, reason):
                self.groups[group_id].reason = reason
                self.groups[group_id].keep(attempt, place)
            case events.Fail(group_id, _, reason):
                self.groups[group_id].reason = reason
            case events.Expire(group_id, _, step):
                self.groups[group_id].reason = f"too old for step {step}"
            case events.Drop(group_id):
                self.groups[group_id].reason = "its result could not be read"
            case events.Skip(first, number):
                for group_id in range(first, first + number):
                    self.groups[group_id] = GroupRecord(group_id, 0, State.SKIPPED)
            case events.Live(version, digest):
                self.live[version] = digest
            case events.Refuse():
                self.refusals.append(event)

    def _follow(self, entry: GroupEntry) -> None:
        """Take over what the ledger knows of a group."""
        record = self.groups.setdefault(entry.group_id, GroupRecord(entry.group_id, 0, None))
        record.attempt, record.state = entry.attempt, entry.state
        record.policy_version, record.step = entry.policy_version, entry.step
        record.actor_id = entry.actor_id or record.actor_id
        record.keep(entry.attempt, entry.place)
        self._unfinished.pop(entry.group_id, None)
        if entry.state in SLOT_STATES and entry.state != State.TRAINED:
            self._unfinished[entry.group_id] = record


def read_history(directory: Path) -> History:
    """Read the segments in `directory`. Raises JournalError where nothing can be read."""
    links, notes = lineage(directory)
    history = History(directory, links[0].segment)
    history.notes += notes
    for link in links:
        read([link], history, damage="skip")
        if cut_off := link.segment.cut_off:
            tail = "is being written, or was" if link.until is None else "was"
            history.notes.append(
                f"{link.segment.path}: the last record {tail} cut off ({cut_off:,} bytes)"
            )
    history.notes += [f"{path} is missing" for path in history.missing]
    return history


def _missing(oldest: Segment) -> list[Path]:
    """Find the segments before the oldest one, and at the beginnings of checkpoints, that no
    checkpoint can have deleted: that needs one which begins later, and those there are kept.
    """
    directory, kept = oldest.path.parent, set()
    for path in directory.parent.glob(f"checkpoints/step_{'[0-9]' * 6}/queue.json"):
        with suppress(OSError, ValueError, LookupError, TypeError):  # just deleted, or damaged
            kept.add(int(json.loads(path.read_text(encoding="utf-8"))["segment"]))
    earlier = kept if oldest.parent is None else kept | {oldest.parent[0]}
    numbers = sorted(number for number in earlier if number >= min(kept, default=0))
    paths = [segment_path(directory, number) for number in numbers]
    return [path for path in paths if not path.exists()]


def _ended(record: GroupRecord, ledger: Ledger) -> State | None:
    """Tell how a group without slot ended: when its last attempt was lost, or unknown (None)."""
    if record.state == State.TRAINING and record.step is not None and record.step <= ledger.steps:
        return State.TRAINED
    if record.state == State.WAITING and record.reason:
        return State.EXPIRED if record.reason.startswith("too old") else State.FAILED
    return None


# ---- the recorded batches ----


class RecordedQueue:
    """The queue's side of the loop and of the learner, from `<run directory>/journal`."""

    def __init__(self, directory: str) -> None:
        """Read the journal. Raises JournalError where it cannot be read."""
        self._history: History = read_history(Path(directory))

    async def get_batch(self, step: int) -> Batch | None:
        """Return the groups that learner step `step` trained. Raises SetupError if it cannot."""
        history = self._history
        if step not in history.steps:
            raise SetupError(f"the journal in {history.directory} has no learner step {step}")
        try:
            frames = [history.frame(group_id) for group_id in history.steps[step]]
            return Batch(step, tuple(decode_meta(frame) for frame in frames))
        except (LookupError, WireError) as error:
            raise SetupError(f"learner step {step} cannot be repeated: {error}") from error

    async def payload(self, step: int, group_ids: Sequence[int]) -> np.ndarray:
        """Their frames, as the queue would serve them."""
        return pack_frames([self._history.frame(group_id) for group_id in group_ids])

    async def digests(self) -> dict[int, str]:
        """Digest of the weights of every version that was live, where the run recorded one."""
        return {version: digest for version, digest in self._history.live.items() if digest}
