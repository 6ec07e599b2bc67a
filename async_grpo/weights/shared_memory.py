"""Weights through shared memory: engines and learner on one node, no collective group.

Runs in: learner rank 0 (SharedMemorySender), EngineCore processes (SegmentReader). Hides the segments: two files of a fixed size in
/dev/shm, written in turn, so that a publication is staged while engines still read the one before; the mappings are reused, because
fresh pages cost several times the copy itself.

Invariants: segment files are private to the user (0600) and carry the run's key and their owner's process id; the owner removes them on
`close`, the driver by key at the end of the run, and the next run those of owners that no longer live. The header's sequence number is odd while a write is in progress and is
checked before and after a read: a torn copy is an error, never loaded silently.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from async_grpo.weights.base import Announcement, WeightOwner

SEGMENT_DIR = Path("/dev/shm")
DIGEST_BYTES = 2**28
"""Weights up to this size get a digest at every publication (some 0.1 s at the most)."""
_HEADER = struct.Struct("<8sQ")
_MAGIC = b"AGRPWTS1"
_HEADER_BYTES = 4096
_ALIGN = 64


class TornRead(RuntimeError):
    """The segment changed while it was read, or is not the announced one."""


def segment_path(key: str, index: int) -> Path:
    """File of segment `index` (0 or 1) that this process owns in the run with this key."""
    return SEGMENT_DIR / f"async_grpo-{key}-{os.getpid()}-weights-{index}"


def remove_segments(key: str) -> None:
    """Remove the segments of a run on this machine, also of one whose learner was killed."""
    for path in SEGMENT_DIR.glob(f"async_grpo-{key}-*-weights-?"):
        path.unlink(missing_ok=True)


def remove_abandoned_segments() -> None:
    """Remove segments whose owner, named in the file name, no longer lives: what a killed run left behind."""
    for path in SEGMENT_DIR.glob("async_grpo-*-weights-?"):
        owner = path.name.split("-")[-3]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            path.unlink(missing_ok=True)


class _Mapping:
    """A whole segment mapped into this process."""

    def __init__(self, path: Path, nbytes: int, *, create: bool) -> None:
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                os.posix_fallocate(fd, 0, nbytes)  # a full /dev/shm is an error now, not a bus error in the middle of a copy
            elif os.fstat(fd).st_size < nbytes:
                raise TornRead(f"{path} has {os.fstat(fd).st_size} bytes, the announcement says {nbytes}")
            self.inode = os.fstat(fd).st_ino
            self.map = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        self.data = torch.frombuffer(self.map, dtype=torch.uint8)

    def sequence(self) -> int:
        magic, sequence = _HEADER.unpack_from(self.map)
        return sequence if magic == _MAGIC else -1

    def mark(self, sequence: int) -> None:
        _HEADER.pack_into(self.map, 0, _MAGIC, sequence)

    def digest(self) -> str:
        """Checksum of everything behind the header; "" for a segment whose reading would hold up the learner."""
        if len(self.map) > DIGEST_BYTES:
            return ""
        with memoryview(self.map) as view:
            return f"crc32-{zlib.crc32(view[_HEADER_BYTES:]):08x}"

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        return self.data[offset : offset + nbytes].view(dtype).view(shape)


class SharedMemorySender:
    """The learner's half. Rank 0 writes; the other ranks only take part in the gather."""

    def __init__(self, owner: WeightOwner, *, key: str) -> None:
        self._owner, self._key = owner, key
        self._layout, self._nbytes = _layout(owner.weight_metadata())
        self._segments: list[_Mapping] = []
        self._sequence = 0

    def connect(self, address: str, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]:
        if self._owner.rank == 0 and not self._segments:
            remove_abandoned_segments()
            self._segments = [_Mapping(segment_path(self._key, index), self._nbytes, create=True) for index in (0, 1)]
        return [{"layout": self._layout, "nbytes": self._nbytes} for _ in tensor_parallel_sizes]

    def rendezvous(self) -> None:
        pass

    def stage(self, label: str) -> Announcement:
        self._sequence += 2
        index = (self._sequence // 2) % 2
        segment = self._segments[index] if self._owner.rank == 0 else None
        if segment is not None:
            segment.mark(self._sequence - 1)
        entries = iter(self._layout)
        for name, weight in self._owner.named_weights():
            expected, dtype, shape, offset = next(entries)
            if segment is not None:
                if name != expected or list(weight.shape) != shape:
                    raise RuntimeError(f"the learner published {name} {list(weight.shape)} where {expected} {shape} was announced")
                segment.tensor(offset, tuple(shape), _dtype(dtype)).copy_(weight)
        if segment is not None:
            segment.mark(self._sequence)
        payload = {"path": str(segment_path(self._key, index)), "sequence": self._sequence}
        return Announcement(label, "shared_memory", payload, "" if segment is None else segment.digest())

    def send(self) -> None:
        pass

    def close(self) -> None:
        self._segments = []
        if self._owner.rank == 0:
            remove_segments(self._key)


class SegmentReader:
    """An engine worker's half: the tensors of an announced segment, as views."""

    def __init__(self, layout: list[list[Any]], nbytes: int) -> None:
        self._layout, self._nbytes = layout, nbytes
        self._mappings: dict[str, _Mapping] = {}

    def tensors(self, path: str, sequence: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, view) of every tensor. Raises TornRead unless the segment holds exactly the announced write."""
        self._verify(path, sequence)
        for name, dtype, shape, offset in self._layout:
            yield name, self._mappings[path].tensor(offset, tuple(shape), _dtype(dtype))

    def verify(self, path: str, sequence: int) -> None:
        """Check after loading that nothing was written meanwhile."""
        self._verify(path, sequence)

    def _verify(self, path: str, sequence: int) -> None:
        mapping = self._mappings.get(path)
        if mapping is None or mapping.inode != os.stat(path).st_ino:
            mapping = self._mappings[path] = _Mapping(Path(path), self._nbytes, create=False)
        found = mapping.sequence()
        if found != sequence:
            raise TornRead(f"{path} holds write {found}, the announcement is for write {sequence}; weights were not loaded")


def _layout(metadata: list[tuple[str, tuple[int, ...], str]]) -> tuple[list[list[Any]], int]:
    layout, offset = [], _HEADER_BYTES
    for name, shape, dtype in metadata:
        layout.append([name, dtype, list(shape), offset])
        offset += -(-math.prod(shape) * _dtype(dtype).itemsize // _ALIGN) * _ALIGN
    return layout, offset


def _dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
