"""A queue from what its journal says: after its process died, or for a run that starts again from a checkpoint.

Runs in: the replay queue's process. Hides how the ledger is rebuilt:

    same start of the run   the last segment's snapshot and the events behind it give the ledger as it was. Tickets stay with the actors
                            that hold them, the batch in training can be fetched again.
    another start           the learner is at an older step c: the ledger as it was last, with the batches of the steps after c put back.
                            Results without a token newer than c are ready again; all other groups wait to be issued again.

Invariants: a result is taken only if it is the one that the ledger names (id, attempt) and its frame passes every check of the wire; one
that cannot be read is issued again and counted, never replaced by another; a start begins a segment of its own, so what an earlier one
left cut off or damaged is never written over.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from async_grpo.replay.events import Drop, Event, Put, TakeBatch, from_wire
from async_grpo.replay.journal import JOURNAL_FORMAT, Fsync, JournalDamage, JournalError, Record, Segment, Writer, segments
from async_grpo.replay.ledger import Entry, Ledger, Place, State
from async_grpo.replay.lineage import Link, lineage
from async_grpo.replay.queue import ReplayQueue, snapshot_facts
from async_grpo.replay.rules import QueueSettings
from async_grpo.wire import GroupMeta, WireError, decode_meta


@dataclass(frozen=True)
class JournalSettings:
    """Where and how the queue keeps its journal; plain values that can be pickled.

    `start` names this start of the run: opened again under it, the queue goes on; under another one it resumes. `identity` names everything
    a result depends on but the weights (model, data, sampling): under another one, results are not taken over. `fresh` deletes what is there.
    """

    directory: str
    start: str
    identity: str = ""
    fsync: Fsync = "group"
    segment_bytes: int = 2**28
    fresh: bool = False


@dataclass
class Report:
    """What a resumed queue took over: groups ready, and groups that wait to be issued again, by reason."""

    ready: int = 0
    again: dict[str, int] = field(default_factory=dict)
    lost_steps: int = 0
    from_step: int = 0
    note: str = ""

    def waits(self, reason: str) -> None:
        """Count a group that waits."""
        self.again[reason] = self.again.get(reason, 0) + 1

    def __str__(self) -> str:
        listed = ", ".join(f"{count} {reason}" for reason, count in self.again.items())
        text = f"{self.ready} completed groups restored, {sum(self.again.values())} to be issued again" + (f" ({listed})" if listed else "")
        if self.lost_steps:
            steps = f"{self.lost_steps} learner step{'s' if self.lost_steps > 1 else ''}"
            text += f"; {steps} after the checkpoint will be trained anew" if self.from_step else (
                f"; there was no checkpoint: training begins anew, {steps} are lost"
            )
        return text + (f"; {self.note}" if self.note else "")


def open_queue(
    settings: QueueSettings, journal: JournalSettings | None = None, *, snapshot: dict[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ReplayQueue:
    """The queue of a run: a new one, one that goes on after its process died, or one that resumes for `settings.trained_steps`.

    snapshot: what the checkpoint kept (`ReplayQueue.snapshot`), None at the start of a run. `queue.report` says what was taken over.
    Raises JournalError for a journal that cannot be read, ValueError for a snapshot that does not belong to the learner's step.
    """
    if snapshot is not None:
        _check_snapshot(snapshot, settings)
    if journal is None:
        ledger, report = (None, None) if snapshot is None else _rewind(_Past(snapshot), settings)
        return ReplayQueue(settings, ledger=ledger, clock=clock, report=report)
    directory = Path(journal.directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JournalError(f"the journal's directory {directory} cannot be made: {error.strerror or error}") from error
    own = _own_segment(directory, journal.start)
    return _resume(settings, journal, snapshot, clock=clock) if own is None else _go_on(settings, journal, own, clock=clock)


def _own_segment(directory: Path, start: str) -> Segment | None:
    """The last segment, if this start of the run wrote it.

    Raises JournalDamage if this start wrote the last one and it cannot be read: what it says happened, and the learner has gone on from it.
    """
    damage = None
    for number in reversed(segments(directory)):
        try:
            segment = Segment(directory, number)
        except JournalDamage as error:
            damage = damage or error
            continue
        if segment.snapshot["start"] != start:
            return None
        if damage is not None:
            raise damage
        return segment
    return None


def _go_on(settings: QueueSettings, journal: JournalSettings, last: Segment, *, clock: Callable[[], float]) -> ReplayQueue:
    """The queue's process died: everything is as it was."""
    ledger = Ledger.from_snapshot(last.snapshot["ledger"])
    for record in last.records():
        _apply(ledger, _event(record, last), record.place, last)
    results, unreadable = _Results(Path(journal.directory)), []
    for entry in (*ledger.slots[State.READY].values(), *ledger.slots[State.TRAINING].values()):
        try:
            entry.meta, entry.frame = results.read(entry.place, entry.group_id, entry.attempt, settings)
        except WireError as error:
            if entry.state == State.TRAINING:
                raise JournalError(f"group {entry.group_id} of the learner step in training cannot be read from the journal: {error}") from error
            unreadable.append(entry)
    ledger.totals["restarts"] += 1
    writer = _writer(journal, number=last.number, last=last, clock=clock)
    queue = _opened(settings, ledger, writer, {name: value for name, value in last.snapshot.items() if name != "ledger"}, clock=clock)
    for entry in unreadable:
        queue.record(Drop(entry.group_id, entry.attempt))
    return queue


def _resume(
    settings: QueueSettings, journal: JournalSettings, snapshot: dict[str, Any] | None, *, clock: Callable[[], float]
) -> ReplayQueue:
    """Another start of the run. Without a journal that fits, outstanding groups are generated again."""
    directory = Path(journal.directory)
    numbers = segments(directory)
    past, note = (None, "") if journal.fresh or not numbers else _past(directory, snapshot, settings, journal.identity)
    ledger = report = None
    facts = snapshot_facts(journal.identity, start=journal.start, from_step=settings.trained_steps)
    if past is not None:
        facts |= {"journal": past.snapshot["journal"], "epoch": past.snapshot["epoch"] + 1}
        ledger, report = _rewind(past, settings, results=_Results(directory) if past.snapshot["identity"] == journal.identity else None)
    elif snapshot is not None:
        facts["epoch"] = snapshot["epoch"] + 1
        ledger, report = _rewind(_Past(snapshot), settings)
    if note:
        report = report or Report()
        report.note = note
    writer = _writer(journal, number=max(numbers, default=0), last=None if past is None else past.last, clock=clock)
    if journal.fresh:
        writer.remove(set(numbers))
    queue = _opened(settings, ledger, writer, facts, clock=clock)
    queue.report = report
    return queue


def _writer(journal: JournalSettings, *, number: int, last: Segment | None, clock: Callable[[], float]) -> Writer:
    """Writes the segments after `number`, which go on after what was read of `last`."""
    return Writer(
        Path(journal.directory), fsync=journal.fsync, segment_bytes=journal.segment_bytes, clock=clock, segment=number,
        sequence=0 if last is None else last.sequence, parent=None if last is None else last.number,
    )


def _opened(
    settings: QueueSettings, ledger: Ledger | None, writer: Writer, facts: dict[str, Any], *, clock: Callable[[], float]
) -> ReplayQueue:
    if ledger is not None:
        ready = list(ledger.slots[State.READY].values())
        for place, entry in enumerate(ready):
            entry.ready_at = clock() - 1e-6 * (len(ready) - place)  # the order of completion outlives the process, the times do not
        for entry in ledger.slots[State.IN_FLIGHT].values():
            entry.issued_at = clock()
    queue = ReplayQueue(settings, ledger=ledger, journal=writer, facts=facts, clock=clock)
    queue.begin_segment()
    return queue


class _Results:
    """Frames at their places, each segment opened once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._segments: dict[int, Segment] = {}

    def read(self, place: Place | None, group_id: int, attempt: int, settings: QueueSettings) -> tuple[GroupMeta, bytes]:
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
            raise WireError(f"the journal has group {meta.group_id} attempt {meta.attempt} in the place of group {group_id} attempt {attempt}")
        return meta, frame


class _Past:
    """A run's history up to its end: the ledger there, the batches that were taken on the way, and where results are."""

    def __init__(self, snapshot: dict[str, Any]) -> None:
        """No more than a snapshot: results are not at hand."""
        self.snapshot, self.ledger = snapshot, Ledger.from_snapshot(snapshot["ledger"])
        self.batches: dict[int, list[int]] = {}
        self.results: dict[int, Entry] = {}
        """Group -> as it was when its latest result came."""
        self.last: Segment | None = None
        self.notes: list[str] = []

    def read(self, links: list[Link], *, step: int) -> None:
        """The segments in order, up to the last one, the first damage, or a start of the run that went behind `step`: another branch."""
        for link in links:
            snapshot = link.segment.snapshot
            if snapshot["start"] != self.snapshot["start"] and snapshot["ledger"]["steps"] < step:
                return
            self._enter(link.segment)
            try:
                for record in link.records():
                    self._note(_event(record, link.segment), record.place, link.segment)
            except JournalDamage as error:
                self.notes.append(f"what came later is not taken over, because {error}")
                return

    def _enter(self, segment: Segment) -> None:
        """A segment begins. At another start of the run its snapshot has taken back the batches that were lost then."""
        taken_back = segment.snapshot["start"] != self.snapshot["start"]
        self.snapshot, self.ledger, self.last = segment.snapshot, Ledger.from_snapshot(segment.snapshot["ledger"]), segment
        if taken_back:
            self.batches = {step: ids for step, ids in self.batches.items() if step <= self.ledger.steps}
        for entry in (*self.ledger.entries.values(), *self.ledger.unused.values()):
            if entry.place is not None:
                self.results[entry.group_id] = replace(entry)
        if self.ledger.training_step is not None:
            self.batches[self.ledger.training_step] = sorted(self.ledger.slots[State.TRAINING])

    def _note(self, event: Event, place: Place | None, segment: Segment) -> None:
        _apply(self.ledger, event, place, segment)
        if isinstance(event, Put) and place is not None:
            self.results[event.group_id] = replace(self.ledger.entries[event.group_id])
        if isinstance(event, TakeBatch):
            self.batches[event.step] = list(event.group_ids)


def _past(directory: Path, snapshot: dict[str, Any] | None, settings: QueueSettings, identity: str) -> tuple[_Past | None, str]:
    """The history that leads from the checkpoint, or from the beginning of the run; None if this journal does not have it, and why not."""
    foreign = "the journal in the run's directory is of another run, or of other settings, and is not read"
    if snapshot is not None and snapshot["segment"] not in segments(directory):
        return None, foreign
    try:
        links, notes = lineage(directory, first=None if snapshot is None else snapshot["segment"], whole=True)
    except JournalError as error:
        return None, f"the journal is not read, because {error}"
    first = links[0].segment.snapshot
    if snapshot is None:
        begun = first["ledger"]
        if begun["steps"] or begun["next_group_id"] or settings.trained_steps or first["identity"] != identity:
            return None, foreign
    elif first["journal"] != snapshot["journal"]:
        return None, foreign
    past = _Past(first)
    past.read(links, step=settings.trained_steps)
    past.notes += notes
    return past, ""


def _rewind(past: _Past, settings: QueueSettings, *, results: _Results | None = None) -> tuple[Ledger, Report]:
    """The ledger for a learner at `settings.trained_steps`, and what became of the groups. Without `results`, all are issued again."""
    step, end, report = settings.trained_steps, past.ledger, Report(note="; ".join(past.notes))
    closed = Counter(end.closed)
    closed[State.UNUSED] -= len(end.unused)  # a run that goes on has use for them
    known = end.entries | end.unused
    lost = {group_id: after for after, ids in past.batches.items() if after > step for group_id in ids}
    report.lost_steps, report.from_step = max(end.steps - step, 0), step
    kept: list[Entry] = []
    for group_id in sorted({*known, *lost}):
        entry = known.get(group_id)
        if entry is None:
            closed[State.TRAINED] -= 1  # a lost step had trained it
        elif entry.step is not None and entry.step <= step:
            closed[State.TRAINED] += 1
            continue
        if group_id in lost or entry is None:
            entry = past.results.get(group_id, entry) or Entry(group_id, 1, step, State.WAITING)
        kept.append(_taken_over(entry, settings, results, report))
    _keep_what_can_be_trained(kept, settings, report)
    then = {
        "steps": step, "live": step, "training_step": None, "over": False, "closed": +closed, "max_attempts": settings.max_attempts,
        # Actors, counters of now and faults are of one start of the run; whoever mended the data must not be stopped by old failures.
        "forfeited": [], "rejected_now": {}, "failed_now": {}, "failed": {}, "failed_before": closed[State.FAILED],
        "totals": {name: count for name, count in end.totals.items() if name != "restarts"},
    }
    ledger = Ledger.from_snapshot({**end.snapshot(), **then}, entries=kept)
    report.ready = len(ledger.slots[State.READY])
    return ledger, report


def _taken_over(entry: Entry, settings: QueueSettings, results: _Results | None, report: Report) -> Entry:
    """Ready if its result can be trained at the learner's step, otherwise waiting."""
    waiting = Entry(entry.group_id, entry.attempt, settings.trained_steps, State.WAITING, failures=entry.failures)
    if entry.place is None:
        report.waits("in flight")
    elif results is None:
        report.waits("completed under other settings or in another run's journal")
    elif entry.policy_version > settings.trained_steps:  # known without reading: a long run may have lost many steps
        report.waits("with tokens of lost learner steps")
    else:
        try:
            meta, frame = results.read(entry.place, entry.group_id, entry.attempt, settings)
        except WireError:
            report.waits("unreadable in the journal")
            return waiting
        if meta.max_version <= settings.trained_steps:
            ready = replace(waiting, state=State.READY, policy_version=meta.policy_version, place=entry.place)
            ready.meta, ready.frame = meta, frame
            return ready
        report.waits("with tokens of lost learner steps")
    return waiting


def _keep_what_can_be_trained(entries: list[Entry], settings: QueueSettings, report: Report) -> None:
    """With `wait`, ready groups that a smaller bound or batch than before cannot train in time wait for another attempt.

    Order `fifo` trains the waiting ones with a smaller id first, so they count.
    """
    if settings.on_stale != "wait":
        return
    if settings.order == "fifo":
        order = sorted(entries, key=lambda entry: entry.group_id)
    else:
        order = sorted((entry for entry in entries if entry.state == State.READY), key=lambda entry: (entry.policy_version, entry.group_id))
    place = 0
    for entry in order:
        if entry.policy_version + settings.max_staleness < settings.trained_steps + place // settings.rollout_batch_size:
            if entry.state == State.WAITING:
                continue
            report.waits("too old for these settings")
            entry.state, entry.policy_version = State.WAITING, settings.trained_steps
            entry.meta = entry.frame = entry.place = None
        place += 1 if settings.order == "fifo" or entry.state == State.READY else 0


def _check_snapshot(snapshot: dict[str, Any], settings: QueueSettings) -> None:
    if snapshot.get("format") != JOURNAL_FORMAT:
        raise ValueError(f"the checkpoint's queue is of format {snapshot.get('format')}, this program reads {JOURNAL_FORMAT}")
    steps = (snapshot["ledger"]["steps"], snapshot["ledger"]["training_step"])
    if settings.trained_steps not in steps:
        raise ValueError(
            f"the checkpoint's queue is of step {steps[0]} (in training: {steps[1]}) and the learner of step {settings.trained_steps}: they "
            "are not from the same checkpoint"
        )


def _event(record: Record, segment: Segment) -> Event:
    try:
        return from_wire(record.body)
    except (ValueError, TypeError, LookupError) as error:
        raise JournalDamage(f"{segment.path} holds a record {record.sequence} that is no event: {error}") from error


def _apply(ledger: Ledger, event: Event, place: Place | None, segment: Segment) -> None:
    try:
        ledger.apply(event, place=place)
    except (RuntimeError, TypeError, LookupError) as error:
        raise JournalDamage(f"{segment.path} tells what cannot have happened: {error}") from error
