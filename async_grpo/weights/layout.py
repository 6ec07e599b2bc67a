"""The flat buffer of a publication: where each tensor lies in it, and checksums over its buckets.

Runs in: learner ranks (fill, checksums), engine workers (views, verification). All transports that
copy the weights share this layout, so a digest means the same everywhere. Invariants: tensors lie
in the order of `weight_metadata`, each aligned; a bucket is a run of whole tensors; both sides
compute checksums with the same function, on any device.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from async_grpo.errors import TransferMismatch
from async_grpo.runtime.text import listed

BUCKET_BYTES = 64 * 2**20
DIGEST_BYTES = 2**28
"""Weights up to this size get checksums, and so a digest, at every publication (at most 40 ms)."""
AHEAD_BYTES = 2**29
"""Weights on a GPU that are still being copied while the next are gathered: as many as are gathered
at once there (`learner.division`).
"""
KEPT_VIEWS = 2
_ALIGN = 64
_BLOCK = 2**16
_ODD = 0x9E3779B97F4A7C15
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: bytes [offset, offset + nbytes) of the buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without alignment."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Whole tensors `names` in bytes [start, end) of the buffer; both are multiples of 64."""

    start: int
    end: int
    names: tuple[str, ...]


class Layout:
    """The table of contents of the buffer; `nbytes` is a multiple of 64."""

    def __init__(self, metadata: Iterable[Sequence[Any]]) -> None:
        """metadata: name, shape and dtype name of every tensor."""
        self.metadata = [(name, tuple(shape), dtype) for name, shape, dtype in metadata]
        self.entries: list[TensorEntry] = []
        offset = 0
        for name, shape, dtype in self.metadata:
            self.entries.append(TensorEntry(name, getattr(torch, dtype), shape, offset))
            offset += -(-self.entries[-1].nbytes // _ALIGN) * _ALIGN
        self.nbytes = offset
        self.buckets = tuple(self._cut())
        self._views: dict[int, list[Tensor]] = {}

    def fill(
        self,
        buffer: Tensor | None,
        weights: Iterable[tuple[str, Tensor]],
        *,
        once: bool = False,
        stream: Any = None,
    ) -> None:
        """Copy the weights into `buffer` [nbytes] uint8, or only exhaust them, as the gather needs
        of every rank. once: the buffer will not come again, so no view of it is kept. stream: of a
        GPU, to copy on into pinned memory while the current one makes the next weights.
        """
        copies = _Copies(stream)
        views: list[Tensor] | None = None
        if buffer is not None:
            views = [view for _, view in self.tensors(buffer)] if once else self._views_of(buffer)
        for index, (name, weight) in enumerate(weights):
            entry = self.entries[index]
            if (name, tuple(weight.shape), weight.dtype) != (entry.name, entry.shape, entry.dtype):
                raise RuntimeError(
                    f"the learner sent {name} {tuple(weight.shape)} where "
                    f"{entry.name} {entry.shape} was announced"
                )
            if views is not None:
                copies.add(views[index], weight)
        copies.wait()

    def view(self, buffer: Tensor, entry: TensorEntry) -> Tensor:
        """Return the tensor of `entry` inside `buffer`."""
        return (
            buffer[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).view(entry.shape)
        )

    def tensors(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, view) of every tensor."""
        for entry in self.entries:
            yield entry.name, self.view(buffer, entry)

    def checksums(self, buffer: Tensor, device: str | None = None) -> list[int]:
        """One checksum per bucket, computed on `device` (None: where the buffer is)."""
        parts = (buffer[bucket.start : bucket.end] for bucket in self.buckets)
        return [checksum(part.to(device, non_blocking=True)) for part in parts]

    def sums(
        self, buffer: Tensor, *, verify: bool, device: str | None = None
    ) -> tuple[list[int], str]:
        """Checksums to carry (none without `verify`), and digest ("" if large and not verified)."""
        if not verify and self.nbytes > DIGEST_BYTES:
            return [], ""
        checksums = self.checksums(buffer, device)
        return checksums if verify else [], digest(checksums) if checksums else ""

    def verify(self, buffer: Tensor, expected: Sequence[int]) -> None:
        """Raise TransferMismatch, naming bucket and tensors, for the first unexpected checksum."""
        pairs = zip(self.checksums(buffer), expected, strict=True)
        for index, (found, sent) in enumerate(pairs):
            if found != sent:
                names = self.buckets[index].names
                raise TransferMismatch(mismatch(index, len(self.buckets), names))

    def _views_of(self, buffer: Tensor) -> list[Tensor]:
        """Return views of all tensors, kept for the few buffers that come again and again: making
        views of small tensors takes as long as filling them.
        """
        if buffer.data_ptr() not in self._views:
            if len(self._views) == KEPT_VIEWS:  # they keep their buffer alive
                del self._views[next(iter(self._views))]
            self._views[buffer.data_ptr()] = [view for _, view in self.tensors(buffer)]
        return self._views[buffer.data_ptr()]

    def _cut(self) -> Iterator[WeightBucket]:
        start = 0
        names: list[str] = []
        for index, entry in enumerate(self.entries):
            end = self.entries[index + 1].offset if index + 1 < len(self.entries) else self.nbytes
            if names and end - start > BUCKET_BYTES:
                yield WeightBucket(start, entry.offset, tuple(names))
                start, names = entry.offset, []
            names.append(entry.name)
        if names:
            yield WeightBucket(start, self.nbytes, tuple(names))


class _Copies:
    """Copies of weights, on `stream` if there is one: a copy begins when its weight is made, and
    holds it until it was read. Invariant: after `add` at most `AHEAD_BYTES` are held.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._held = stream, 0
        self._reading: deque[tuple[Any, Tensor]] = deque()

    def add(self, target: Tensor, weight: Tensor) -> None:
        """Begin a copy."""
        if self._stream is None:
            target.copy_(weight)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(weight, non_blocking=True)
        self._reading.append((self._stream.record_event(), weight))
        self._held += weight.nbytes
        self.wait(AHEAD_BYTES)

    def wait(self, most: int = 0) -> None:
        """Wait for the oldest copies until no more bytes are held."""
        while self._reading and self._held > most:
            read, weight = self._reading.popleft()
            read.synchronize()
            self._held -= weight.nbytes


def packs(layout: Layout, size: int) -> list[list[int]]:
    """Cut the tensors, by their numbers, into packs as vLLM's transfer does: a pack ends with the
    tensor that brings it above `size` bytes; 0: each tensor alone.
    """
    found: list[list[int]] = []
    held = size + 1
    for index, entry in enumerate(layout.entries):
        if held > size:
            found.append([])
            held = 0
        found[-1].append(index)
        held += entry.nbytes or 1
    return found


def pieces(nbytes: int) -> Layout:
    """Return the layout of bytes that are one after another, in pieces as long as buckets."""
    starts = range(0, nbytes, BUCKET_BYTES)
    sizes = [min(BUCKET_BYTES, nbytes - start) for start in starts]
    return Layout([(f"piece {n}", (size,), "uint8") for n, size in enumerate(sizes, 1)])


def mismatch(bucket: int, buckets: int | None, names: Sequence[str]) -> str:
    """Return the sentence about a bucket with a wrong checksum."""
    of = "" if buckets is None else f" of {buckets}"
    return (
        f"bucket {bucket + 1}{of} of the weights arrived with other bytes than were "
        f"sent; it holds {listed(names, _SHOWN)}"
    )


def checksum(data: Tensor) -> int:
    """64-bit checksum of a contiguous uint8 tensor that sees any changed or moved word, on every
    device: words times odd numbers by their place in a block, modulo 2^64; block sums folded in
    order.
    """
    if spare := -len(data) % 8:
        data = torch.cat([data, data.new_zeros(spare)])
    words = data.view(torch.int64)
    whole = len(words) // _BLOCK * _BLOCK
    tail = words.new_zeros(_BLOCK if whole < len(words) else 0)
    tail[: len(words) - whole] = words[whole:]
    weights = torch.arange(1, 2 * _BLOCK, 2, dtype=torch.int64, device=data.device)
    # in the processor's cache; on a GPU in a few kernels
    rows = 1 if data.device.type == "cpu" else 64
    parts = [
        part.view(-1, _BLOCK)
        for blocks in (words[:whole], tail)
        for part in blocks.split(rows * _BLOCK)
        if len(part)
    ]
    # one for all parts: fresh pages would cost more than the arithmetic
    scratch = words.new_empty(rows, _BLOCK)
    sums = [torch.mul(part, weights, out=scratch[: len(part)]).sum(1) for part in parts]
    return _fold(torch.cat(sums).tolist() if sums else [])


def digest(checksums: Sequence[int]) -> str:
    """Name the bits of all weights, from the checksums of their buckets."""
    return f"sum64-{_fold(checksums):016x}"


def _fold(values: Sequence[int]) -> int:
    total = len(values)
    for value in values:
        total = (total * _ODD + value) % 2**64
    return total


def to_wire(layout: Layout) -> list[list[Any]]:
    """Return [name, shape, dtype] per tensor, the `metadata` of init payloads."""
    return [[name, list(shape), dtype] for name, shape, dtype in layout.metadata]
