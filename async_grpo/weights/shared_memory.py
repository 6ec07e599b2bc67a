"""Weights through shared memory: engines and learner on one node, no collective group.

Runs in: learner rank 0 (SharedMemorySender), a relay process on every other node (SegmentCopy) and
on the learner's (written, changes), EngineCore processes (SegmentReader).

    learner rank 0 --copy--> segment 0 / 1 --views--> engines of its node
          |
          |  (for another node, once per publication: `cluster.relays`)
          +--bytes, or what changed--> relay --copy--> segment 0 / 1 --views--> engines of that node

Hides the segments: two files of a fixed size in /dev/shm, written in turn, so that a publication is
staged while engines still read the previous one; mappings are reused, because fresh pages cost
several times the copy itself. Where /dev/shm has no room, the files lie in the run's directory.

Invariants: segment files are private to the user (0600) and carry the run's key and their owner's
process id; the owner removes them on `close`, the driver by key at the end of the run, and the next
run those of owners that no longer live. The header's sequence number is odd while a write is in
progress and is checked before and after a read: a torn copy is an error, never loaded silently.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from async_grpo.config.schema import Config
from async_grpo.runtime.lifetime import is_gone, owner
from async_grpo.weights import delta
from async_grpo.weights.files import Write
from async_grpo.weights.layout import Layout, to_wire
from async_grpo.weights.transport import (
    Announcement,
    TornTransfer,
    WeightOwner,
    WeightSender,
    fallback_directory,
)

SEGMENT_DIR = Path("/dev/shm")
_HEADER = struct.Struct("<8sQ")
_MAGIC = b"AGRPWTS2"
_HEADER_BYTES = 4096
_KEEP_FREE = 64 * 2**20


def segment_path(directory: Path, key: str, index: int) -> Path:
    """File of this process's segment `index` in the run with this key; 2 is a self-check's."""
    return directory / f"async_grpo-{key}-{owner()}-weights-{index}"


def choose_directory(nbytes: int, fallback: Path) -> tuple[Path, str]:
    """Directory with room for three segments of `nbytes`: /dev/shm, or else `fallback` with a
    sentence for the user. Raises OSError if neither has room.
    """
    remove_abandoned_segments()
    needed = 3 * (nbytes + _HEADER_BYTES)
    free = free_bytes(SEGMENT_DIR)
    if free >= needed + _KEEP_FREE:
        return SEGMENT_DIR, ""
    fallback.mkdir(parents=True, exist_ok=True)
    said = (
        f"{SEGMENT_DIR} has {free / 2**20:,.0f} MiB free and three copies of the weights take "
        f"{needed / 2**20:,.0f} MiB"
    )
    if free_bytes(fallback) < needed + _KEEP_FREE:
        raise OSError(
            f"{said}, and {fallback} has no room for them either; give the container more "
            "shared memory (docker: --shm-size)"
        )
    return (
        fallback,
        f"{said}: weights are synced through files in {fallback}, which is slower; give "
        "the container more shared memory",
    )


def remove_segments(key: str, fallback: Path) -> None:
    """Remove the segments of this start of a run; in `fallback` those of every start."""
    for path in (
        *SEGMENT_DIR.glob(f"async_grpo-{key}-*-weights-?"),
        *fallback.glob("async_grpo-*-weights-?"),
    ):
        path.unlink(missing_ok=True)


def remove_abandoned_segments() -> None:
    """Remove segments in memory whose owner, a process id in the file name, no longer lives."""
    for path in SEGMENT_DIR.glob("async_grpo-*-weights-?"):
        if is_gone(path.name.split("-")[-3]):
            path.unlink(missing_ok=True)


class _Mapping:
    """A segment mapped into this process; `data` [nbytes] uint8 follows the header."""

    def __init__(self, path: Path, nbytes: int, *, create: bool) -> None:
        self.path, size = path, _HEADER_BYTES + nbytes
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                # a full /dev/shm is an error now, not a bus error in the middle of a copy
                os.posix_fallocate(fd, 0, size)
            elif os.fstat(fd).st_size < size:
                raise TornTransfer(
                    f"{path} has {os.fstat(fd).st_size} bytes, the announcement says {size}"
                )
            self.inode = os.fstat(fd).st_ino
            self.map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self.data = torch.frombuffer(
            self.map, dtype=torch.uint8, offset=_HEADER_BYTES, count=nbytes
        )

    def sequence(self) -> int:
        magic, sequence = _HEADER.unpack_from(self.map)
        return sequence if magic == _MAGIC else -1

    def require(self, sequence: int) -> None:
        """Raise TornTransfer unless the segment holds this write."""
        if (found := self.sequence()) != sequence:
            raise TornTransfer(
                f"{self.path} holds write {found}, the announcement is for write {sequence}; "
                "weights were not loaded"
            )

    def mark(self, sequence: int) -> None:
        _HEADER.pack_into(self.map, 0, _MAGIC, sequence)


class Segments:
    """The two segments of one owner, written in turn, and a third for a copy apart."""

    def __init__(self, directory: Path, key: str, nbytes: int) -> None:
        self._directory, self._key = directory, key
        self._nbytes = nbytes
        self._turns = [self._create(index) for index in (0, 1)]
        self._apart: _Mapping | None = None
        self._turn = self._sequence = 0
        self._writing = self._turns[0]

    def reserve(self) -> None:
        """Create the third segment."""
        self._apart = self._apart or self._create(2)

    def begin(self, sequence: int, *, apart: bool = False, newest: bool = False) -> Tensor:
        """Return the buffer for the write with this even number, new to the segment; readers refuse
        it until `commit`, and without one it is the next in turn again. newest: the buffer begins
        with the newest write in turn.
        """
        if apart:
            self.reserve()
            assert self._apart is not None
            self._writing = self._apart
        else:
            self._writing = self._turns[1 - self._turn]
        self._writing.mark(sequence - 1)
        self._sequence = sequence
        if newest:
            self._writing.data.copy_(self._turns[self._turn].data)
        return self._writing.data

    def commit(self) -> Path:
        """Mark the write as complete; its file."""
        self._writing.mark(self._sequence)
        if self._writing is not self._apart:
            self._turn = 1 - self._turn
        return self._writing.path

    def release(self) -> None:
        """Remove the third segment."""
        if self._apart is not None:
            self._apart.path.unlink(missing_ok=True)
            self._apart = None

    def close(self) -> None:
        """Remove the files; processes that have mapped them can go on reading."""
        for mapping in (*self._turns, self._apart):
            if mapping is not None:
                mapping.path.unlink(missing_ok=True)

    def _create(self, index: int) -> _Mapping:
        return _Mapping(segment_path(self._directory, self._key, index), self._nbytes, create=True)


class SharedMemorySender(WeightSender):
    """The learner's half: rank 0 writes, the other ranks only take part in the gather."""

    def __init__(self, owner: WeightOwner, *, key: str, fallback: Path) -> None:
        self._owner = owner
        self._key, self._fallback = key, fallback
        self._layout = Layout(owner.weight_metadata())
        self._segments: Segments | None = None
        self._sequence = 0
        self.note = ""

    @classmethod
    def of(cls, owner: WeightOwner, *, config: Config, key: str) -> Self:
        """Build the sender of a rank; segments carry `key`."""
        return cls(owner, key=key, fallback=fallback_directory(config))

    def connect(self, address: str, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]:
        """Create the segments, once."""
        if self._owner.rank == 0 and self._segments is None:
            directory, self.note = choose_directory(self._layout.nbytes, self._fallback)
            self._segments = Segments(directory, self._key, self._layout.nbytes)
        return [{"metadata": to_wire(self._layout)} for _ in tensor_parallel_sizes]

    def reserve(self) -> None:
        """Create the third segment."""
        if self._segments is not None:
            self._segments.reserve()

    def stage(self, label: str, *, verify: bool, apart: bool = False) -> Announcement:
        """Write a segment and announce its path and sequence number."""
        self._sequence += 2
        segments = self._segments
        buffer = None if segments is None else segments.begin(self._sequence, apart=apart)
        self._layout.fill(buffer, self._owner.named_weights(), once=apart)
        if segments is None or buffer is None:
            return Announcement(label, "shared_memory")
        checksums, name = self._layout.sums(buffer, verify=verify)
        path = segments.commit()
        payload = {"path": str(path), "sequence": self._sequence, "checksums": checksums}
        return Announcement(label, "shared_memory", payload, name, self._layout.nbytes)

    def release(self) -> None:
        """Remove the third segment."""
        if self._segments is not None:
            self._segments.release()

    def close(self) -> None:
        """Remove all segments."""
        if self._segments is not None:
            self._segments.close()
            self._segments = None


class SegmentCopy:
    """A relay's half: segments of its own node, with the bytes of the learner's write `held`."""

    def __init__(self, *, key: str, fallback: Path) -> None:
        self._key, self._fallback = key, fallback
        self._segments: Segments | None = None
        self._newest: Write = ("", 0)
        self.held: Write | None = None
        self.note = ""

    def write(
        self, source: Write, nbytes: int, fill: Callable[[np.ndarray], None], *, on_held: bool
    ) -> Write:
        """Let `fill` make a copy of `source` in a buffer [nbytes] uint8, once; the write in a local
        segment. on_held: the buffer begins with what is held.
        """
        if self.held != source:
            if self._segments is None:
                directory, self.note = choose_directory(nbytes, self._fallback)
                self._segments = Segments(directory, self._key, nbytes)
            number = self._newest[1] + 2
            fill(self._segments.begin(number, newest=on_held).numpy())
            self._newest = str(self._segments.commit()), number
            self.held = source
        return self._newest

    def close(self) -> None:
        """Remove the segments."""
        if self._segments is not None:
            self._segments.close()


@contextmanager
def written(write: Write, nbytes: int) -> Iterator[np.ndarray]:
    """Show a write, [nbytes] uint8, where it lies; TornTransfer if it is another, or becomes it."""
    mapping = _Mapping(Path(write[0]), nbytes, create=False)
    mapping.require(write[1])
    yield mapping.data.numpy()
    mapping.require(write[1])


def changes(base: Write, source: Write, nbytes: int) -> np.ndarray | None:
    """Return the delta between two writes; None where one is gone, or a whole copy is no longer."""
    try:
        with written(base, nbytes) as old, written(source, nbytes) as new:
            found = delta.encode(old, new, (base, source))
    except (TornTransfer, FileNotFoundError):
        return None
    return found if found.nbytes < nbytes else None


class SegmentReader:
    """An engine worker's half: the tensors of an announced segment, as views."""

    def __init__(self, metadata: Sequence[Sequence[Any]]) -> None:
        self.layout = Layout(metadata)
        self._mappings: dict[str, _Mapping] = {}

    def tensors(
        self, path: str, sequence: int, checksums: Sequence[int]
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, view) of every tensor. Raises TornTransfer unless the segment holds the announced
        write, TransferMismatch for other checksums than the announced ones.
        """
        self.check(path, sequence)
        if checksums:
            self.layout.verify(self._mappings[path].data, checksums)
            self.check(path, sequence)
        yield from self.layout.tensors(self._mappings[path].data)

    def check(self, path: str, sequence: int) -> None:
        """Raise TornTransfer unless the segment holds the announced write; after loading, the check
        proves that nothing was written meanwhile.
        """
        mapping = self._mappings.get(path)
        if mapping is None or mapping.inode != os.stat(path).st_ino:
            for gone in [known for known in self._mappings if not Path(known).exists()]:
                del self._mappings[gone]
            mapping = self._mappings[path] = _Mapping(Path(path), self.layout.nbytes, create=False)
        mapping.require(sequence)


def free_bytes(directory: Path) -> int:
    """Free bytes of the file system that a directory is on."""
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize
