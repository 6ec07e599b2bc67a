"""What the journal tells another start of a run: the history up to its end, and the results in it.

Runs in: the replay queue's process. Hides the walk over the segments that lead to the newest one (`lineage`), and where results are.
Invariants: the history ends where the first damage is; a result is given only if it is of the very attempt that was asked for and its
frame passes every check of the wire.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from async_grpo.replay.events import Event, Put, TakeBatch, from_wire
from async_grpo.replay.journal import JournalDamage, JournalError, Record, Segment, segments
from async_grpo.replay.ledger import Entry, Ledger, Place
from async_grpo.replay.lineage import Link, lineage
from async_grpo.replay.rules import QueueSettings
from async_grpo.wire import GroupMeta, WireError, decode_meta


class Past:
    """A run's history up to its end: the ledger there, the batches that were taken on the way, and where results are."""

    def __init__(self, snapshot: dict[str, Any]) -> None:
        """No more than a snapshot: results are not at hand."""
        self.snapshot, self.ledger = snapshot, Ledger.from_snapshot(snapshot["ledger"])
        self.batches: dict[int, list[int]] = {}
        self.weighed: dict[int, tuple[int, int]] = {}
        """Learner step -> tokens of its batch with weight in the loss, and without."""
        self.results: dict[int, Entry] = {}
        """Group -> as it was when its latest result came; in the order of completion."""
        self.last: Segment | None = None
        self.notes: list[str] = []

    def read(self, links: list[Link], *, step: int) -> None:
        """The segments in order, up to the last one, the first damage, or a start of the run that went behind `step`: another branch."""
        for link in links:
            snapshot, ledger = link.segment.snapshot, link.segment.snapshot["ledger"]
            if snapshot["start"] != self.snapshot["start"] and (ledger["training_step"] or ledger["steps"]) < step:
                return
            self._enter(link.segment)
            try:
                for record in link.records():
                    self._note(event_of(record, link.segment), record.place, link.segment)
            except JournalDamage as error:
                self.notes.append(f"what came later is not taken over, because {error}")
                return

    def _enter(self, segment: Segment) -> None:
        """A segment begins. At another start of the run its snapshot has taken back the batches that were lost then."""
        taken_back = segment.snapshot["start"] != self.snapshot["start"]
        self.snapshot, self.ledger, self.last = segment.snapshot, Ledger.from_snapshot(segment.snapshot["ledger"]), segment
        if taken_back:
            self.batches = {step: ids for step, ids in self.batches.items() if step <= self.ledger.steps}
            self.weighed = {step: tokens for step, tokens in self.weighed.items() if step <= self.ledger.steps}
        for entry in (*self.ledger.entries.values(), *self.ledger.unused.values()):
            if entry.place is not None:
                self.results[entry.group_id] = replace(entry)
        if self.ledger.training_step is not None:
            self._takes(self.ledger.training_step, sorted(self.ledger.training))

    def _note(self, event: Event, place: Place | None, segment: Segment) -> None:
        apply_record(self.ledger, event, place, segment)
        if isinstance(event, Put) and place is not None:
            self.results.pop(event.group_id, None)  # the last one now
            self.results[event.group_id] = replace(self.ledger.entries[event.group_id])
        if isinstance(event, TakeBatch):
            self._takes(event.step, list(event.group_ids))

    def _takes(self, step: int, group_ids: list[int]) -> None:
        self.batches[step] = group_ids
        self.weighed[step] = self.ledger.tokens.in_training(group_ids)


def find_past(directory: Path, snapshot: dict[str, Any] | None, settings: QueueSettings, identity: str) -> tuple[Past | None, str]:
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
    past = Past(first)
    past.read(links, step=settings.trained_steps)
    past.notes += notes
    return past, ""


class Results:
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


def event_of(record: Record, segment: Segment) -> Event:
    try:
        return from_wire(record.body)
    except (ValueError, TypeError, LookupError) as error:
        raise JournalDamage(f"{segment.path} holds a record {record.sequence} that is no event: {error}") from error


def apply_record(ledger: Ledger, event: Event, place: Place | None, segment: Segment) -> None:
    try:
        ledger.apply(event, place=place)
    except (RuntimeError, TypeError, LookupError) as error:
        raise JournalDamage(f"{segment.path} tells what cannot have happened: {error}") from error
