"""What changed between two copies of the weights, as bytes.

Runs in: relays, learner ranks, engine workers (numpy alone). A copy is a flat buffer (`layout`) in
the engines' dtype, so that rounded weights are compared. It is read as words of 16 bits in blocks
of 2^16 words, and a block is written as its changed words, or whole where that is shorter:

    header   magic, bytes of a copy, changed words, whole words, CRC-32 of all and of `way`
    counts   [blocks] uint32: changed words of each block, or WHOLE
    places   [changed] uint16: where in their blocks they are, rising
    words    [changed] uint16: their new values
    whole    [whole words] uint16: the blocks that are written whole

Invariants: `apply` makes the new copy of the old one, bit for bit; what is no delta for a copy of
this size and way, or was cut off or changed on its way, raises before anything is written. `way`
names the old copy and the new one; sender and receiver have to call them the same.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import numpy as np

from async_grpo.errors import TransferMismatch

_HEADER = struct.Struct("<8sQQQI")
_MAGIC = b"AGRPDLT1"
_BLOCK = 2**16
_WHOLE = 2**32 - 1
_AT_ONCE = 64
"""Blocks that are compared or written in one operation: 8 MiB, about a processor's cache."""


def encode(old: np.ndarray, new: np.ndarray, way: object = None) -> np.ndarray:
    """Return the delta [bytes] uint8 from copy `old` to `new`, both [nbytes] uint8, nbytes even."""
    before, after = old.view(np.uint16), new.view(np.uint16)
    counts, places, words, whole = [], [], [], []
    for start, end in _spans(len(after)):
        part = after[start:end]
        differs = part != before[start:end]
        starts = np.arange(0, len(part), _BLOCK)
        found = np.add.reduceat(differs, starts, dtype=np.uint32)
        lengths = np.diff(starts, append=len(part))
        dense = 2 * found > lengths
        found[dense] = _WHOLE
        counts.append(found)
        for block in np.flatnonzero(dense):
            span = slice(starts[block], starts[block] + lengths[block])
            differs[span] = False
            whole.append(part[span])
        changed = np.flatnonzero(differs)
        places.append((changed % _BLOCK).astype(np.uint16))
        words.append(part[changed])
    sums = np.concatenate(counts or [np.zeros(0, np.uint32)]).view(np.uint16)
    parts = [sums, *places, *words, *whole]
    delta = np.empty(_HEADER.size + 2 * sum(map(len, parts)), np.uint8)
    np.concatenate(parts, out=delta[_HEADER.size :].view(np.uint16))
    sizes = new.nbytes, sum(map(len, words)), sum(map(len, whole))
    delta[: _HEADER.size] = np.frombuffer(_header(sizes, delta[_HEADER.size :], way), np.uint8)
    return delta


def apply(delta: np.ndarray, copy: np.ndarray, way: object = None) -> None:
    """Make the new copy of the old one, [nbytes] uint8, in place. Raises TransferMismatch."""
    counts, places, words, whole = _parts(delta, copy.nbytes, way)
    target = copy.view(np.uint16)
    done = taken = 0
    for start, end in _spans(len(target)):
        part, found = target[start:end], counts[start // _BLOCK : -(-end // _BLOCK)]
        dense = found == _WHOLE
        sparse = np.where(dense, 0, found)
        after = done + int(sparse.sum())
        first = np.repeat(np.arange(len(found)) * _BLOCK, sparse)
        part[first + places[done:after]] = words[done:after]
        done = after
        for block in np.flatnonzero(dense):
            values = part[block * _BLOCK : (block + 1) * _BLOCK]
            values[:] = whole[taken : taken + len(values)]
            taken += len(values)


def _spans(words: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the words that are worked on at once."""
    step = _AT_ONCE * _BLOCK
    for start in range(0, words, step):
        yield start, min(start + step, words)


def _header(sizes: tuple[int, int, int], body: np.ndarray, way: object) -> bytes:
    crc = zlib.crc32(body, zlib.crc32(repr((sizes, way)).encode()))
    return _HEADER.pack(_MAGIC, *sizes, crc)


def _parts(delta: np.ndarray, nbytes: int, way: object) -> list[np.ndarray]:
    """Return counts, places, words and whole blocks of a delta for a copy of `nbytes`."""
    if delta.nbytes < _HEADER.size:
        raise TransferMismatch(f"a delta of weights was cut off: it has {delta.nbytes} bytes")
    header, body = delta[: _HEADER.size].tobytes(), delta[_HEADER.size :]
    magic, of, changed, whole, _ = _HEADER.unpack(header)
    blocks = -(-(nbytes // 2) // _BLOCK)
    if magic != _MAGIC or of != nbytes:
        raise TransferMismatch(f"what came is no delta for weights of {nbytes} bytes")
    wrong = body.nbytes != 4 * blocks + 4 * changed + 2 * whole
    if wrong or header != _header((of, changed, whole), body, way):
        raise TransferMismatch("a delta arrived with other bytes than were sent, or is another one")
    ends = np.cumsum([4 * blocks, 2 * changed, 2 * changed])
    counts, places, values, rest = np.split(body, ends)
    return [counts.view(np.uint32), *(part.view(np.uint16) for part in (places, values, rest))]
