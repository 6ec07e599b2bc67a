"""The groups of a few learner steps, from the part of a journal that tells of them.

Runs in: the report's process; reads only. Hides which part that is: of the segments that lead to the newest one (`lineage`), from the last that
begins before the steps to the last that begins in them, and of that one the events up to the end of the steps. `history` reads whole runs; this
takes as long for a long run as for a short one.

Invariants: what starts of the run took back does not count; memory has a place for each result of these steps or later, never a frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from async_grpo.replay.events import Drop, Event, Expire, Put, TakeBatch, from_wire
from async_grpo.replay.journal import JournalDamage, Segment
from async_grpo.replay.ledger import Ledger, Place
from async_grpo.replay.lineage import Link, lineage
from async_grpo.wire import GroupMeta, WireError, decode_meta


@dataclass(slots=True)
class Result:
    """Where a result is; the learner `step` that took it, None for none so far; `waits`: it is ready for one."""

    place: Place
    step: int | None = None
    waits: bool = True


class Stretch:
    """Batches of the steps `first` to `last` and the one after them, and the results that were there meanwhile. Raises JournalError where nothing can be read."""

    def __init__(self, directory: Path, *, first: int, last: int) -> None:
        self._first, self._last = first, last
        self.steps: dict[int, tuple[int, ...]] = {}
        self.results: dict[int, Result] = {}
        links, self.notes = lineage(directory)
        self._segments: dict[int, Segment] = {}
        chosen = _part(links, first=first, last=last)
        for link in chosen:
            self._enter(link.segment)
            try:
                for event, place in _events(link):
                    if isinstance(event, TakeBatch) and event.step > last + 1 and link is chosen[-1]:
                        break
                    self._take(event, place)
            except (JournalDamage, ValueError) as error:
                self.notes.append(f"what came later in its segment is unknown: {error}")
        needed = {result.place.segment for result in self.results.values()}
        self._segments = {link.segment.number: link.segment for link in links if link.segment.number in needed}

    def meta(self, group_id: int) -> GroupMeta | None:
        """What the group's frame says beside the tokens; None where its segment is gone. Raises WireError for one that is damaged."""
        place = self.results[group_id].place
        if place.segment not in self._segments:
            return None
        meta = decode_meta(self._segments[place.segment].payload(place))
        if meta.group_id != group_id:
            raise WireError(f"the journal has group {meta.group_id} in the place of group {group_id}")
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
                self.results[group_id] = Result(entry.place)
        if ledger.training_step is not None:
            self._batch(ledger.training_step, tuple(sorted(ledger.training)))

    def _take(self, event: Event, place: Place | None) -> None:
        if isinstance(event, Put) and place is not None:
            self.results[event.group_id] = Result(place)
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
    """The links that tell of these steps. Steps only go back where the run started again, so the last place counts."""
    begins = [link.segment.snapshot["ledger"]["steps"] for link in links]
    start = max((index for index, steps in enumerate(begins) if steps < first), default=0)
    end = max((index for index, steps in enumerate(begins) if steps <= last), default=-1)
    return links[start : end + 1]


def _events(link: Link) -> Iterator[tuple[Event, Place | None]]:
    for record in link.records():
        yield from_wire(record.body), record.place
