"""Which segments of a journal follow from each other.

Runs in: whoever reads a journal. Hides that a run which resumed from a checkpoint leaves branches behind: every segment names its parent,
the segment and the record after which it goes on, so that a history is the way from a segment back to its ancestors, read forwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from async_grpo.replay.journal import JournalDamage, JournalError, Record, Segment, segment_path, segments


@dataclass(frozen=True, slots=True)
class Link:
    """A segment, and the last of its records that belongs to the history; None for all that are there."""

    segment: Segment
    until: int | None

    def records(self) -> Iterator[Record]:
        """The records after the snapshot. Raises JournalDamage where one is damaged or the segment ends before its successor begins."""
        for record in self.segment.records():
            if self.until is not None and record.sequence > self.until:
                return
            yield record
        if self.until is not None and self.segment.sequence < self.until:
            raise JournalDamage(f"{self.segment.path} ends with record {self.segment.sequence}, and the next segment goes on after {self.until}")


def lineage(directory: Path, *, first: int | None = None, whole: bool = False) -> tuple[list[Link], list[str]]:
    """The history that ends in the newest segment (with `first`: in its newest descendant) from the oldest ancestor (`first`) on.

    whole: an ancestor that cannot be read ends the history before it, instead of beginning after it. Returns the links, and a note for
    every segment that cannot be read. Raises JournalError if no segment, or not `first`, can be read.
    """
    opened: dict[int, Segment] = {}
    notes = []
    for number in segments(directory):
        try:
            opened[number] = Segment(directory, number)
        except JournalError as error:
            if segment_path(directory, number).exists():  # deleted meanwhile: an old one that nobody needs
                notes.append(str(error))
    for number in sorted(opened, reverse=True):
        links = _ancestry(opened, number, first)
        oldest = links[0].segment
        broken = oldest.parent is not None and segment_path(directory, oldest.parent[0]).exists()
        if oldest.number == first or first is None and not (whole and broken):
            return links, notes
    raise JournalError(notes[0] if notes else f"there is no journal in {directory}")


def _ancestry(opened: dict[int, Segment], number: int, first: int | None) -> list[Link]:
    links = [Link(opened[number], None)]
    while (segment := links[0].segment).number != first and segment.parent is not None and segment.parent[0] in opened:
        links.insert(0, Link(opened[segment.parent[0]], segment.parent[1]))
    return links
