"""The journal on disk: what happened to groups, appended before it takes effect.

Runs in: the replay queue's process (writing), and whoever looks at a run (reading). Hides files,
framing and flushing:

    <directory>/00000012.journal   magic, format version, segment number; then records, of which
                                   the first is a snapshot of the ledger
    record      magic | body length u32 | payload length u64 | sequence number u64
                | crc32 of these and the body | body (msgpack) | payload

A snapshot names the segment's parent: the segment and the record after which it goes on
(`history.lineage`).

The payload is a group's frame, which carries a checksum of its own (`wire`). A segment appears
under its name with its snapshot in it, or not at all. What a reader finds at the end of a segment,
or in it:

    cut off in the last record          the writer died while it wrote: nobody was told that it is
                                        there, so it is not
    a record that does not add up,      damaged: the records before it are good, none after it is
      whole or with good ones behind    taken (JournalDamage)
    a payload that does not add up      found when the frame is decoded: that group is lost, the
                                        record is not

Invariants: a record is whole in the file before `append` returns, and on the disk before `commit`
returns if `fsync` is `group`; after an error of the disk nothing is written any more, so no later
record can follow a hole.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgpack

from async_grpo.errors import JournalDamage, JournalError
from async_grpo.replay.events import Event, to_wire
from async_grpo.replay.ledger import FramePosition, GroupEntry
from async_grpo.runtime.storage import settle_folder
from async_grpo.wire.codec import Buffer, GroupMeta, WireError, decode_meta

Fsync = Literal["group", "interval", "never"]
JOURNAL_FORMAT = 6
"""Of segments and of the snapshots in them: another number cannot be read."""
MAX_BODY_BYTES = 2**28
SUFFIX = ".journal"
INTERVAL_S = 1.0
"""Seconds between flushes with fsync `interval`."""

_MAP_BYTES = 2**20
"""A segment that is not smaller is mapped to be read."""
_MAGIC = b"AGRJ"
_FILE = struct.Struct("<4sHHQ")
_RECORD_MAGIC = b"\xa7Rec"
_HEAD = struct.Struct("<4sIQQ")
_CRC = struct.Struct("<I")
_RECORD_BYTES = _HEAD.size + _CRC.size


def snapshot_facts(
    identity: str = "", training: str = "", *, start: str = "", from_step: int = 0
) -> dict[str, Any]:
    """Facts beside the ledger in a new run's snapshot (see `resume.JournalSettings`). epoch: number
    of the start. rolled_to: where this start rolls forward to, once its learner has begun with it;
    an orderly end forgets it.
    """
    facts = {
        "format": JOURNAL_FORMAT,
        "journal": uuid.uuid4().hex,
        "start": start,
        "identity": identity,
        "training": training,
    }
    return {**facts, "epoch": 0, "from_step": from_step, "rolled_to": None}


class JournalRecord(NamedTuple):
    """One record: its sequence number, its plain body, and where its payload is, if it has one."""

    sequence: int
    body: Any
    place: FramePosition | None


def segments(directory: Path) -> list[int]:
    """Numbers of the segments in a directory, ascending."""
    return sorted(int(path.stem) for path in directory.glob(f"*{SUFFIX}") if path.stem.isdigit())


def segment_path(directory: Path, number: int) -> Path:
    """File of a segment."""
    return directory / f"{number:08d}{SUFFIX}"


class Writer:
    """Appends to one segment after the other."""

    def __init__(
        self,
        directory: Path,
        *,
        fsync: Fsync = "group",
        segment_bytes: int = 2**28,
        segment: int = 0,
        sequence: int = 0,
        parent: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """segment: last number taken. The first one goes on after record `sequence` of `parent`."""
        self.directory = directory
        self._fsync = fsync
        self._segment_bytes = segment_bytes
        self._clock = clock
        self.segment, self._parent = segment, parent
        self.nbytes = 0
        """Bytes in the segment."""
        self.syncs = 0
        self._fd = -1
        self._written = self._synced = sequence
        self._synced_at = clock()
        self._syncing: asyncio.Task[None] | None = None
        self._error: str | None = None

    @property
    def full(self) -> bool:
        """Whether it is time for another segment."""
        return self.nbytes >= self._segment_bytes

    def segments(self) -> list[int]:
        """Numbers of all segments that exist, ascending."""
        return segments(self.directory)

    def begin(self, snapshot: dict[str, Any]) -> None:
        """Start the next segment with a snapshot, and flush both, but with fsync `never`."""
        self._check()
        path = segment_path(self.directory, self.segment + 1)
        temporary = path.with_suffix(".tmp")
        try:
            self._flush_now()
            if not self.directory.is_dir():
                self.directory.mkdir(parents=True)
                settle_folder(self.directory.parent)
            fd = os.open(
                temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise self._broken(error) from error
        if self._fd >= 0:
            os.close(self._fd)
        parent = None if self._parent is None else [self._parent, self._written]
        self._fd, self.nbytes = fd, 0
        self.segment += 1
        self._parent = self.segment
        self._write([_FILE.pack(_MAGIC, JOURNAL_FORMAT, 0, self.segment)])
        self.append({**snapshot, "parent": parent})
        try:
            self._flush_now()
            os.rename(temporary, path)
            if self._fsync != "never":
                settle_folder(self.directory)
        except OSError as error:
            raise self._broken(error) from error

    def append_event(self, event: Event, payload: Buffer = b"") -> FramePosition | None:
        """Write an event; its payload's position. On JournalError nothing was written."""
        return self.append(to_wire(event), payload)

    def append(self, body: Any, payload: Buffer = b"") -> FramePosition | None:
        """Write one record; its payload's position. On JournalError nothing was written."""
        self._check()
        packed = msgpack.packb(body, use_bin_type=True)
        view = memoryview(payload).cast("B")
        head = _HEAD.pack(_RECORD_MAGIC, len(packed), len(view), self._written + 1)
        offset = self.nbytes + _RECORD_BYTES + len(packed)
        self._write([head + _CRC.pack(zlib.crc32(packed, zlib.crc32(head))) + packed, view])
        self._written += 1
        return FramePosition(self.segment, offset, len(view)) if len(view) else None

    async def commit(self) -> None:
        """Wait until all is as safe as `fsync` says; callers share flushes. Raises JournalError."""
        early = self._fsync == "interval" and self._clock() - self._synced_at < INTERVAL_S
        if early or self._fsync == "never":
            return
        target = self._written if self._fsync == "group" else 0
        if self._fsync == "interval" and self._syncing is None:
            self._syncing = asyncio.ensure_future(self._sync())  # nobody waits for it
        while self._synced < target:
            self._check()
            if self._syncing is None:
                self._syncing = asyncio.ensure_future(self._sync())
            await asyncio.wait({self._syncing})
        self._check()

    def remove(self, numbers: set[int]) -> None:
        """Delete segments that nobody needs any more; never the one that is written."""
        for number in numbers - {self.segment}:
            segment_path(self.directory, number).unlink(missing_ok=True)

    def close(self) -> None:
        """Flush and close; not for reuse."""
        if self._fd >= 0:
            if self._error is None:
                try:
                    self._flush_now()
                except OSError as error:
                    raise self._broken(error) from error
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)

    async def _sync(self) -> None:
        """One flush, in a thread. What it covers is known before it starts."""
        covered, fd = self._written, -1
        try:
            fd = os.dup(self._fd)  # the segment may change meanwhile
            await asyncio.to_thread(os.fdatasync, fd)
            self._synced, self._synced_at = max(self._synced, covered), self._clock()
            self.syncs += 1
        except OSError as error:
            self._broken(error)
        finally:
            if fd >= 0:
                os.close(fd)
            self._syncing = None

    def _flush_now(self) -> None:
        if self._fd >= 0 and self._fsync != "never":
            os.fdatasync(self._fd)
            self._synced, self._synced_at = self._written, self._clock()

    def _write(self, parts: list[Buffer]) -> None:
        total, start = sum(map(len, parts)), self.nbytes
        try:
            written = os.writev(self._fd, parts)
            # the kernel takes at most 2 GiB at once, and less when the disk is full
            while written < total:
                written += os.write(self._fd, memoryview(b"".join(parts))[written:])
        except OSError as error:
            try:
                os.ftruncate(self._fd, start)
            except OSError:
                self._broken(error)
                raise JournalError(self._error) from error
            raise self._broken(error) from error
        self.nbytes += total

    def _broken(self, error: OSError) -> JournalError:
        if self._error is None:
            self._error = (
                f"the journal in {self.directory} cannot be written ({error.strerror or error}); "
                "nothing after this is recorded. Free space or repair the disk and start the same "
                "command again, or continue without a journal: replay.journal.enable=false"
            )
        return JournalError(self._error)

    def _check(self) -> None:
        if self._error is not None:
            raise JournalError(self._error)


class Segment:
    """One segment for reading; may be written meanwhile. `snapshot` is the ledger at its start."""

    def __init__(self, directory: Path, number: int) -> None:
        self.number, self.path = number, segment_path(directory, number)
        try:
            with open(self.path, "rb") as file:
                small = os.fstat(file.fileno()).st_size < _MAP_BYTES
                read_only = mmap.ACCESS_READ
                self._data: bytes | mmap.mmap = (
                    file.read() if small else mmap.mmap(file.fileno(), 0, access=read_only)
                )
        except OSError as error:
            raise JournalError(
                f"the journal's {self.path} cannot be read: {error.strerror or error}"
            ) from error
        if len(self._data) < _FILE.size or _FILE.unpack_from(self._data)[0] != _MAGIC:
            raise JournalDamage(f"{self.path} is no segment of a journal")
        _, found, _, named = _FILE.unpack_from(self._data)
        if found != JOURNAL_FORMAT:
            other = f"of a journal of format {found}, this program reads {JOURNAL_FORMAT}"
            raise JournalDamage(f"{self.path} is {other}")
        if named != number:
            raise JournalDamage(f"{self.path} says that it is segment {named}")
        self.size = _FILE.size
        """Bytes up to the end of the last record read."""
        self.cut_off = 0
        """Bytes behind them that are no whole record."""
        first = self._next(None)
        if first is None or not isinstance(first.body, dict):
            raise JournalDamage(f"{self.path} does not start with a snapshot")
        self.snapshot: dict[str, Any] = first.body
        self.sequence = first.sequence
        """Number of the last record read."""
        parent = self.snapshot.get("parent")
        self.parent: tuple[int, int] | None = None if parent is None else (parent[0], parent[1])
        """The segment and the record after which it goes on; None for the first one of a run."""

    def records(self) -> Iterator[JournalRecord]:
        """Read the records after the snapshot, up to the end or a cut-off one. Raises
        JournalDamage.
        """
        while (record := self._next(self.sequence + 1)) is not None:
            self.sequence = record.sequence
            yield record

    def payload(self, place: FramePosition) -> memoryview:
        """Return the bytes at a place in this segment; fewer when the file is shorter."""
        return memoryview(self._data)[place.offset : place.offset + place.length]

    def _next(self, expected: int | None) -> JournalRecord | None:
        at, end, whole = self.size, len(self._data), False
        if at == end:
            return None
        if end - at >= _RECORD_BYTES:
            magic, length, payload, sequence = _HEAD.unpack_from(self._data, at)
            start = at + _RECORD_BYTES
            stop = start + length
            whole = magic == _RECORD_MAGIC and stop + payload <= end
            if (
                magic == _RECORD_MAGIC
                and length <= MAX_BODY_BYTES
                and stop <= end
                and expected in (None, sequence)
                and self._adds_up(at, start, stop)
            ):
                if stop + payload > end:
                    self.cut_off = end - at
                    return None
                self.size = stop + payload
                view = memoryview(self._data)[start:stop]
                try:
                    body = msgpack.unpackb(view, raw=False, strict_map_key=True)
                except (ValueError, msgpack.UnpackException) as error:
                    what = f"holds a record that is not msgpack: {error}"
                    raise JournalDamage(f"{self.path} {what}") from error
                place = FramePosition(self.number, stop, payload) if payload else None
                return JournalRecord(sequence, body, place)
        found = None if expected is None else self._later_record(expected)
        if expected is not None and (whole or found is not None):
            behind = "the last one" if found is None else f"good records go on at byte {found}"
            raise JournalDamage(
                f"{self.path} is damaged at byte {at} (record {expected}; {behind})"
            )
        self.cut_off = end - at
        return None

    def _adds_up(self, at: int, start: int, stop: int) -> bool:
        checksum: int = _CRC.unpack_from(self._data, at + _HEAD.size)[0]
        head = zlib.crc32(self._data[at : at + _HEAD.size])
        return zlib.crc32(memoryview(self._data)[start:stop], head) == checksum

    def _later_record(self, expected: int) -> int | None:
        """Where a whole record with a later sequence number is."""
        at, end = self.size, len(self._data)
        while (at := self._data.find(_RECORD_MAGIC, at + 1)) >= 0 and at + _RECORD_BYTES <= end:
            _, length, _, sequence = _HEAD.unpack_from(self._data, at)
            start = at + _RECORD_BYTES
            stop = start + length
            if sequence > expected and stop <= end and self._adds_up(at, start, stop):
                return at
        return None


OPEN_SEGMENTS = 8
"""Segments that stay mapped while frames are read; a batch lies in one or two of them."""


class Results:
    """Frames at their places in a journal."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[int, Segment] = {}

    def view(self, place: FramePosition) -> memoryview:
        """Return the bytes at a place. Raises JournalError where its segment is gone or
        unreadable.
        """
        if place.segment not in self._open:
            segment = Segment(self._directory, place.segment)
            while len(self._open) >= OPEN_SEGMENTS:
                del self._open[next(iter(self._open))]
            self._open[place.segment] = segment
        return self._open[place.segment].payload(place)

    def meta(
        self,
        place: FramePosition,
        group_id: int,
        attempt: int | None = None,
        *,
        max_bytes: int | None = None,
    ) -> GroupMeta:
        """Return what the frame says beside the tokens. Raises WireError for a damaged frame or one
        of another group or attempt, JournalError where its segment is gone.
        """
        meta = decode_meta(self.view(place), max_bytes=max_bytes)
        if meta.group_id != group_id or attempt not in (None, meta.attempt):
            raise WireError(
                f"the journal has group {meta.group_id} attempt {meta.attempt} instead "
                f"of group {group_id}" + ("" if attempt is None else f" attempt {attempt}")
            )
        return meta

    def read(self, entry: GroupEntry | None, *, max_bytes: int | None) -> tuple[GroupMeta, bytes]:
        """Metadata and frame of the attempt of `entry`. Raises WireError."""
        if entry is None or entry.place is None:
            raise WireError("the journal has no frame of it")
        try:
            meta = self.meta(entry.place, entry.group_id, entry.attempt, max_bytes=max_bytes)
            return meta, bytes(self.view(entry.place))
        except JournalError as error:
            raise WireError(str(error)) from error
