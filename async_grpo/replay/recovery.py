"""A queue from what its journal says: after its process died, or for a run that starts again from a checkpoint.

Runs in: the replay queue's process. Hides how the ledger is rebuilt:

    same start of the run   the last segment's snapshot and the events behind it give the ledger as it was. Tickets stay with the actors
                            that hold them, the batch in training can be fetched again.
    another start           the learner is at the step of a checkpoint, and the journal (`past`) ends later: `rewind` rolls forward, or
                            discards where the steps in between cannot be trained again as they were.

Invariants: a start begins a segment of its own, so what an earlier one left cut off or damaged is never written over; a step at which the
run ended twice without coming further is not rolled forward to a third time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from async_grpo.replay.admission import free_again
from async_grpo.replay.continued import Beginning, Continued, choose, told
from async_grpo.replay.events import Drop
from async_grpo.replay.journal import JOURNAL_FORMAT, Fsync, JournalDamage, JournalError, Segment, Writer, segments, snapshot_facts
from async_grpo.replay.ledger import Ledger, State
from async_grpo.replay.past import Past, Results, apply_record, event_of, find_past
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.rewind import Report, forward, obstacle, rewind
from async_grpo.replay.rules import QueueSettings
from async_grpo.wire import WireError


@dataclass(frozen=True)
class JournalSettings:
    """Where and how the queue keeps its journal; plain values that can be pickled.

    `start` names this start of the run: opened again under it, the queue goes on; under another one it resumes, and under `<start>.<n>`
    it resumes for a learner that went back, and goes on under `start`. `identity` names everything
    a result depends on but the weights (model, data, sampling): under another one, results are not taken over. `training` names what makes
    of a batch other weights: under another one, `lost_steps` are discarded, whatever was asked for; `reason` says why that was asked for.
    `fresh` deletes what is there.
    """

    directory: str
    start: str
    identity: str = ""
    training: str = ""
    reason: str = "checkpoint.on_lost_steps is discard"
    lost_steps: Literal["replay", "discard"] = "replay"
    fsync: Fsync = "group"
    segment_bytes: int = 2**28
    fresh: bool = False


def open_queue(
    settings: QueueSettings, journal: JournalSettings | None = None, *, snapshot: dict[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ReplayQueue:
    """The queue of a run: a new one, one that goes on after its process died, or one that resumes for `settings.trained_steps`.

    snapshot: what the checkpoint kept (`ReplayQueue.snapshot`, and the `beginnings` of responses), None at the start of a run. `queue.report` says what was taken over.
    Raises JournalError for a journal that cannot be read, ValueError for a snapshot that does not belong to the learner's step.
    """
    if snapshot is not None:
        _check_snapshot(snapshot, settings)
    if journal is None:
        ledger, report = (None, None) if snapshot is None else rewind(Past(snapshot), settings, why="there is no journal")
        if ledger is not None:
            ledger.tokens.new_actors(over=False)
        return ReplayQueue(settings, ledger=ledger, clock=clock, report=report)
    directory = Path(journal.directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JournalError(f"the journal's directory {directory} cannot be made: {error.strerror or error}") from error
    own = _own_segment(directory, journal.start)
    beginnings = [Beginning(*one) for one in (snapshot or {}).get("beginnings", ())]
    if own is None:
        return _resume(settings, journal, snapshot, beginnings, clock=clock)
    return _go_on(settings, journal, own, beginnings if own.snapshot["start"] == journal.start else [], clock=clock)


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
        if segment.snapshot["start"].partition(".")[0] != start:
            return None
        if damage is not None:
            raise damage
        return segment
    return None


def _go_on(
    settings: QueueSettings, journal: JournalSettings, last: Segment, beginnings: list[Beginning], *, clock: Callable[[], float]
) -> ReplayQueue:
    """The queue's process died: everything is as it was."""
    ledger = Ledger.from_snapshot(last.snapshot["ledger"])
    for record in last.records():
        apply_record(ledger, event_of(record, last), record.place, last)
    results, unreadable = Results(Path(journal.directory)), []
    for entry in (*ledger.slots[State.READY].values(), *ledger.slots[State.TRAINING].values()):
        try:
            entry.meta, entry.frame = results.read(entry.place, entry.group_id, entry.attempt, settings)
        except WireError as error:
            if entry.state == State.TRAINING:
                raise JournalError(f"group {entry.group_id} of the learner step in training cannot be read from the journal: {error}") from error
            unreadable.append(entry)
    ledger.totals["restarts"] += 1
    writer = _writer(journal, number=last.number, last=last, clock=clock)
    facts = {name: value for name, value in last.snapshot.items() if name != "ledger"}
    queue = _opened(settings, ledger, writer, facts, beginnings, clock=clock)
    for entry in unreadable:
        queue.record(Drop(entry.group_id, entry.attempt))
    return queue


def _resume(
    settings: QueueSettings, journal: JournalSettings, snapshot: dict[str, Any] | None, beginnings: list[Beginning], *,
    clock: Callable[[], float],
) -> ReplayQueue:
    """Another start of the run. Without a journal that fits, outstanding groups are generated again."""
    directory = Path(journal.directory)
    numbers = segments(directory)
    past, note = (None, "") if journal.fresh or not numbers else find_past(directory, snapshot, settings, journal.identity)
    ledger = report = rolls_to = None
    continued: list[Beginning] = []
    facts = snapshot_facts(journal.identity, journal.training, start=journal.start, from_step=settings.trained_steps)
    if past is not None:
        facts |= {"journal": past.snapshot["journal"], "epoch": past.snapshot["epoch"] + 1}
        results = Results(directory) if past.snapshot["identity"] == journal.identity else None
        if not (why := _why_not_forward(past, settings, journal, results)):
            rolls_to = past.ledger.newest_version
            ledger, report = forward(past, settings, results)
        else:
            ledger, report = rewind(past, settings, results=results, why=why)
        if beginnings and results is not None:
            continued, useless = choose(beginnings, ledger, end=past.ledger, settings=settings, free=free_again(settings, ledger))
            report.continued = told(continued, useless)
    elif snapshot is not None:
        facts["epoch"] = snapshot["epoch"] + 1
        ledger, report = rewind(Past(snapshot), settings, why=note)
    if ledger is not None and (past is None or past.snapshot["start"].partition(".")[0] != journal.start.partition(".")[0]):
        ledger.tokens.new_actors(over=past is not None and past.ledger.over)
    if note:
        report = report or Report()
        report.note = note
    writer = _writer(journal, number=max(numbers, default=0), last=None if past is None else past.last, clock=clock)
    if journal.fresh:
        writer.remove(set(numbers))
    queue = _opened(settings, ledger, writer, facts, continued, clock=clock)
    queue.report, queue.rolls_to = report, rolls_to
    return queue


def _why_not_forward(past: Past, settings: QueueSettings, journal: JournalSettings, results: Results | None) -> str:
    newest = past.ledger.newest_version
    if newest <= settings.trained_steps:
        return "nothing is lost"
    if journal.lost_steps == "discard":
        return journal.reason
    if results is None:
        return "they were trained under another model, data or sampling"
    if past.snapshot["training"] != journal.training:
        return "settings of training have changed since"
    if past.snapshot["rolled_to"] == newest:
        return f"the run ended twice at learner step {newest}"
    return obstacle(past, settings, results)


def _writer(journal: JournalSettings, *, number: int, last: Segment | None, clock: Callable[[], float]) -> Writer:
    """Writes the segments after `number`, which go on after what was read of `last`."""
    return Writer(
        Path(journal.directory), fsync=journal.fsync, segment_bytes=journal.segment_bytes, clock=clock, segment=number,
        sequence=0 if last is None else last.sequence, parent=None if last is None else last.number,
    )


def _opened(
    settings: QueueSettings, ledger: Ledger | None, writer: Writer, facts: dict[str, Any], continued: list[Beginning], *,
    clock: Callable[[], float],
) -> ReplayQueue:
    if ledger is not None:
        for entry in ledger.slots[State.READY].values():
            entry.ready_at = clock()
        for entry in ledger.slots[State.IN_FLIGHT].values():
            entry.issued_at = clock()
    queue = ReplayQueue(settings, ledger=ledger, journal=writer, facts=facts, clock=clock, continued=Continued(continued))
    queue.begin_segment()
    return queue


def _check_snapshot(snapshot: dict[str, Any], settings: QueueSettings) -> None:
    if snapshot.get("format") != JOURNAL_FORMAT:
        raise ValueError(f"the checkpoint's queue is of format {snapshot.get('format')}, this program reads {JOURNAL_FORMAT}")
    steps = (snapshot["ledger"]["steps"], snapshot["ledger"]["training_step"])
    if settings.trained_steps not in steps:
        raise ValueError(
            f"the checkpoint's queue is of step {steps[0]} (in training: {steps[1]}) and the learner of step {settings.trained_steps}: they "
            "are not from the same checkpoint"
        )


