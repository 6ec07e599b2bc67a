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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_grpo.replay.events import Close, Drop, Event, Put, TakeBatch, from_wire
from async_grpo.replay.journal import Fsync, JournalDamage, JournalError, Segment, Writer, segments
from async_grpo.replay.ledger import Entry, Ledger, Place, State
from async_grpo.replay.queue import SNAPSHOT_FORMAT, ReplayQueue, snapshot_facts
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
    note: str = ""

    def waits(self, reason: str) -> None:
        """Count a group that waits."""
        self.again[reason] = self.again.get(reason, 0) + 1

    def __str__(self) -> str:
        listed = ", ".join(f"{count} {reason}" for reason, count in self.again.items())
        text = f"{self.ready} completed groups restored, {sum(self.again.values())} to be issued again" + (f" ({listed})" if listed else "")
        if self.lost_steps:
            text += f"; {self.lost_steps} learner steps after the checkpoint are trained again"
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
        ledger, report = (None, None) if snapshot is None else _rewind(_Past.of(snapshot, settings), settings)
        return ReplayQueue(settings, ledger=ledger, clock=clock, report=report)
    directory = Path(journal.directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JournalError(f"the journal's directory {directory} cannot be made: {error.strerror or error}") from error
    numbers = segments(directory)
    last = Segment(directory, numbers[-1]) if numbers else None
    if last is not None and last.snapshot["start"] == journal.start:
        return _go_on(settings, journal, last, clock=clock)
    return _resume(settings, journal, snapshot, numbers, clock=clock)


def _go_on(settings: QueueSettings, journal: JournalSettings, last: Segment, *, clock: Callable[[], float]) -> ReplayQueue:
    """The queue's process died: everything is as it was."""
    ledger = Ledger.from_snapshot(last.snapshot["ledger"], max_attempts=settings.max_attempts)
    for record in last.records():
        _apply(ledger, from_wire(record.body), record.place, now=clock(), where=last.path)
    results, unreadable = _Results(Path(journal.directory)), []
    for entry in ledger.entries.values():
        entry.issued_at = entry.ready_at = clock()
        if entry.state not in (State.READY, State.TRAINING):
            continue
        try:
            entry.meta, entry.frame = results.read(entry.place, entry.group_id, entry.attempt, settings)
        except WireError as error:
            if entry.state == State.TRAINING:
                raise JournalError(f"group {entry.group_id} of the learner step in training cannot be read from the journal: {error}") from error
            unreadable.append(entry)
    ledger.totals["restarts"] += 1
    queue = _on_journal(settings, journal, ledger, last, facts=_facts_of(last.snapshot), clock=clock)
    for entry in unreadable:
        queue.record(Drop(entry.group_id, entry.attempt))
    return queue


def _resume(
    settings: QueueSettings, journal: JournalSettings, snapshot: dict[str, Any] | None, numbers: list[int], *, clock: Callable[[], float]
) -> ReplayQueue:
    """Another start of the run. Without a journal that fits, outstanding groups are generated again."""
    directory = Path(journal.directory)
    first = None if journal.fresh else _first_needed(directory, numbers, snapshot, settings)
    ledger = report = last = None
    facts = snapshot_facts(journal.identity, start=journal.start)
    if first is not None:
        past, last = _Past.read(directory, [number for number in numbers if number >= first], settings)
        facts |= {"journal": past.snapshot["journal"], "epoch": past.snapshot["epoch"] + 1}
        ledger, report = _rewind(past, settings, results=_Results(directory) if past.snapshot["identity"] == journal.identity else None)
    elif snapshot is not None:
        ledger, report = _rewind(_Past.of(snapshot, settings), settings)
        facts["epoch"] = snapshot["epoch"] + 1
    if first is None:
        Writer(directory).remove(set(numbers))
    queue = _on_journal(settings, journal, ledger, last, facts=facts, clock=clock, after=max(numbers, default=0))
    queue.report = report
    return queue


def _on_journal(
    settings: QueueSettings, journal: JournalSettings, ledger: Ledger | None, last: Segment | None, *, facts: dict[str, Any],
    clock: Callable[[], float], after: int | None = None,
) -> ReplayQueue:
    writer = Writer(
        Path(journal.directory), fsync=journal.fsync, segment_bytes=journal.segment_bytes, clock=clock,
        segment=last.number if after is None else after, sequence=0 if last is None else last.sequence,
    )
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


@dataclass
class _Past:
    """A run's history up to its end: the ledger there, the batches that were taken since the beginning, and where results are."""

    snapshot: dict[str, Any]
    ledger: Ledger
    batches: dict[int, list[int]] = field(default_factory=dict)
    results: dict[int, tuple[int, Place]] = field(default_factory=dict)
    note: str = ""

    @classmethod
    def of(cls, snapshot: dict[str, Any], settings: QueueSettings) -> _Past:
        """No more than a snapshot: results are not at hand."""
        return cls(snapshot, Ledger.from_snapshot(snapshot["ledger"], max_attempts=settings.max_attempts))

    @classmethod
    def read(cls, directory: Path, numbers: list[int], settings: QueueSettings) -> tuple[_Past, Segment]:
        """The segments in order, up to the last one or the first damage; and the last segment read."""
        past = None
        for number in numbers:
            segment = Segment(directory, number)
            if past is None:
                past = cls.of(segment.snapshot, settings)
            past._enter(segment, settings)
            try:
                for record in segment.records():
                    past._note(from_wire(record.body), record.place, segment)
            except JournalDamage as error:
                past.note = f"what came later is not taken over, because {error}"
                break
        return past, segment

    def _enter(self, segment: Segment, settings: QueueSettings) -> None:
        """A segment begins. At another start of the run its snapshot has taken back the batches that were lost then."""
        taken_back = segment.snapshot["start"] != self.snapshot["start"]
        self.snapshot, self.ledger = segment.snapshot, Ledger.from_snapshot(segment.snapshot["ledger"], max_attempts=settings.max_attempts)
        if taken_back:
            self.batches = {step: ids for step, ids in self.batches.items() if step <= self.ledger.steps}
        for entry in self.ledger.entries.values():
            if entry.place is not None:
                self.results[entry.group_id] = (entry.attempt, entry.place)
        if self.ledger.training_step is not None:
            self.batches[self.ledger.training_step] = sorted(self.ledger.slots[State.TRAINING])

    def _note(self, event: Event, place: Place | None, segment: Segment) -> None:
        if isinstance(event, Close):  # a run that goes on has no unused groups
            return
        if isinstance(event, Put) and place is not None:
            self.results[event.group_id] = (event.attempt, place)
        if isinstance(event, TakeBatch):
            self.batches[event.step] = list(event.group_ids)
        _apply(self.ledger, event, place, now=0.0, where=segment.path)


def _rewind(past: _Past, settings: QueueSettings, *, results: _Results | None = None) -> tuple[Ledger, Report]:
    """The ledger for a learner at `settings.trained_steps`, and what became of the groups. Without `results`, all are issued again."""
    step, end, report = settings.trained_steps, past.ledger, Report(note=past.note)
    closed = Counter(end.closed)
    lost = {group_id: after for after, ids in past.batches.items() if after > step for group_id in ids}
    report.lost_steps = len(set(lost.values()))
    kept: list[Entry] = []
    for group_id in sorted({*end.entries, *lost}):
        entry = end.entries.get(group_id)
        if entry is None:
            closed[State.TRAINED] -= 1  # a lost step had trained it
        elif entry.step is not None and entry.step <= step:
            closed[State.TRAINED] += 1
            continue
        attempt, place = past.results.get(group_id, (1, None)) if entry is None else (entry.attempt, entry.place)
        if place is None and group_id in lost:
            attempt, place = past.results.get(group_id, (attempt, None))
        kept.append(_taken_over(Entry(group_id, attempt, step, State.WAITING, place=place), settings, results, report))
    _keep_what_can_be_trained(kept, settings, report)
    then = {"steps": step, "live": step, "training_step": None, "over": False, "closed": closed}
    ledger = Ledger.from_snapshot({**end.snapshot(), **then}, max_attempts=settings.max_attempts, entries=kept)
    report.ready = len(ledger.slots[State.READY])
    return ledger, report


def _taken_over(entry: Entry, settings: QueueSettings, results: _Results | None, report: Report) -> Entry:
    """Ready if its result can be trained at the learner's step, otherwise waiting."""
    if entry.place is None:
        report.waits("in flight")
    elif results is None:
        report.waits("completed under other settings or in another run's journal")
    else:
        try:
            entry.meta, entry.frame = results.read(entry.place, entry.group_id, entry.attempt, settings)
        except WireError:
            report.waits("unreadable in the journal")
        else:
            if entry.meta.max_version <= settings.trained_steps:
                entry.state, entry.policy_version = State.READY, entry.meta.policy_version
                return entry
            report.waits("with tokens of lost learner steps")
    entry.meta = entry.frame = entry.place = None
    return entry


def _keep_what_can_be_trained(entries: list[Entry], settings: QueueSettings, report: Report) -> None:
    """With `wait`, ready groups that a smaller bound or batch than before cannot train in time wait for another attempt."""
    if settings.on_stale != "wait":
        return
    ready = [entry for entry in entries if entry.state == State.READY]
    ready.sort(key=lambda entry: entry.group_id if settings.order == "fifo" else (entry.policy_version, entry.group_id))
    place = 0
    for entry in ready:
        if entry.meta.min_version + settings.max_staleness >= settings.trained_steps + place // settings.rollout_batch_size:
            place += 1
        else:
            report.waits("too old for these settings")
            entry.state, entry.policy_version = State.WAITING, settings.trained_steps
            entry.meta = entry.frame = entry.place = None


def _first_needed(directory: Path, numbers: list[int], snapshot: dict[str, Any] | None, settings: QueueSettings) -> int | None:
    """The segment to read from: the one that the checkpoint names, or the run's first one; None if this journal has it not."""
    number = snapshot["segment"] if snapshot is not None else (numbers[0] if numbers else None)
    if number not in numbers:
        return None
    try:
        found = Segment(directory, number).snapshot
    except JournalDamage:
        return None
    if snapshot is not None:
        return number if found["journal"] == snapshot["journal"] else None
    return number if found["ledger"]["steps"] == settings.trained_steps == 0 and found["ledger"]["next_group_id"] == 0 else None


def _check_snapshot(snapshot: dict[str, Any], settings: QueueSettings) -> None:
    if snapshot.get("format") != SNAPSHOT_FORMAT:
        raise ValueError(f"the checkpoint's queue is of format {snapshot.get('format')}, this program reads {SNAPSHOT_FORMAT}")
    steps = (snapshot["ledger"]["steps"], snapshot["ledger"]["training_step"])
    if settings.trained_steps not in steps:
        raise ValueError(
            f"the checkpoint's queue is of step {steps[0]} (in training: {steps[1]}) and the learner of step {settings.trained_steps}: they "
            "are not from the same checkpoint"
        )


def _apply(ledger: Ledger, event: Event, place: Place | None, *, now: float, where: Path) -> None:
    try:
        ledger.apply(event, place=place, now=now)
    except RuntimeError as error:
        raise JournalDamage(f"{where} tells what cannot have happened: {error}") from error


def _facts_of(snapshot: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in snapshot.items() if name != "ledger"}
