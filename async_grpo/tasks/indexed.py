"""Rows by their number, for data that do not fit in memory (`task.streaming`).

    file of JSON lines       --where its lines begin-->                              row n
    one that is compressed, a table, or at an address --a plain copy in CACHE-->     row n
    data set of `datasets`, which has its own files-->                               row n

Runs in: the driver and the rollout actors. Hides where a row stands. Invariants: rows, their
numbers and the digest are functions of the content; a file that changes while in use gives none.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from async_grpo.tasks.base import RowsRefused, TaskError
from async_grpo.tasks.sources import (
    DataSet,
    File,
    Opened,
    Placed,
    batches,
    find,
    given,
    parsed,
    reading,
)

CACHE = "~/.cache/async_grpo/rows"
"""Holds copies of files of which no row can be found by its number."""
BLOCK = 1 << 24
SHORTEST = 3
"""Bytes of the shortest JSON object with the end of its line."""


class RowsPart(Protocol):
    """Rows of one file or data set. digest: of its content."""

    digest: bytes

    def __len__(self) -> int:
        """Count the rows."""

    def __getitem__(self, number: int) -> Placed:
        """Return place and row of a number below `len(self)`."""


class Rows:
    """Rows of several parts, one after the other; itself a RowsPart."""

    def __init__(self, parts: Sequence[tuple[str, RowsPart]]) -> None:
        """Take parts, each with what its places begin with."""
        self._parts = parts
        self._ends = list(accumulate(len(part) for _, part in parts))
        self.digest = blake2b(b"".join(part.digest for _, part in parts), digest_size=16).digest()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Placed:
        """Return place and row of a number below `len(self)`."""
        index = bisect_right(self._ends, number)
        where, part = self._parts[index]
        place, row = part[number - (0, *self._ends)[index]]
        return f"{where}{place}", row


def open_rows(source: str, *, split: str) -> Rows:
    """Return the rows of a source; see `sources.read_rows`. Raises TaskError, also for CSV and JSON
    arrays, which can only be read from their beginning.
    """
    found = find(source, split=split)
    if isinstance(found, DataSet):
        return Rows([("", _Saved(found))])
    parts = []
    for file in found:
        with reading(file):
            state = file.state()
        where = f"{Path(file.name).name} " if len(found) > 1 else ""
        parts.append((where, _part(file, state)))
    return Rows(parts)


@lru_cache(maxsize=1024)
def _part(file: File, state: str) -> RowsPart:
    with reading(file) as opened:
        if opened.format in ("array", "csv"):
            raise RowsRefused(
                "task.streaming needs JSON lines, parquet or Arrow, not a JSON array or CSV: "
                "convert it, or leave task.streaming out"
            )
        is_text, path = opened.format == "lines", file.path
        if path is None or not opened.plain or not is_text:
            key = blake2b(f"{file.name}\0{state}".encode(), digest_size=16).hexdigest()
            path = _copy(opened, key)
        return _Lines(file.name, path) if is_text else _Table(path)


def _copy(opened: Opened, name: str) -> Path:
    """Return a plain copy, which another process may have made."""
    path = Path(CACHE).expanduser() / name
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=".draft-")
    try:
        with open(descriptor, "wb") as out:
            if opened.format == "lines":
                shutil.copyfileobj(opened.stream, out, BLOCK)
            else:
                _write_table(opened, out)
        os.replace(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)
    return path


def _write_table(opened: Opened, out: BinaryIO) -> None:
    import pyarrow

    writer = None
    for batch in batches(opened.stream, opened.format):
        writer = writer or pyarrow.ipc.new_stream(out, batch.schema)
        writer.write_batch(batch)
    if writer is not None:
        writer.close()


class _Lines:
    """A file of JSON lines, held open."""

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._file = name, path.open("rb")
        self._state = self._stat()
        digest, bounds, passed = blake2b(digest_size=16), [np.zeros(1, np.int64)], 0
        while block := self._file.read(BLOCK):
            digest.update(block)
            bounds.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + passed + 1)
            passed += len(block)
        self.digest = digest.digest()
        self._bounds = np.concatenate([*bounds, [passed]])
        self._lines = np.flatnonzero(np.diff(self._bounds) >= SHORTEST)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, number: int) -> Placed:
        line = int(self._lines[number])
        begin, end = map(int, self._bounds[line : line + 2])
        raw = os.pread(self._file.fileno(), end - begin, begin)
        if self._stat() != self._state:
            raise TaskError(f"{self._name} has changed while it was in use: start the run again")
        return f"line {line + 1}", parsed(raw)

    def _stat(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns


class _Table:
    """Record batches of a file in Arrow's stream format, which is mapped into memory."""

    def __init__(self, path: Path) -> None:
        import pyarrow

        self._batches = []
        if path.stat().st_size:
            self._batches = list(pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))))
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))
        with path.open("rb") as file:
            self.digest = _digest(iter(partial(file.read, BLOCK), b""))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> Placed:
        index = bisect_right(self._ends, number)
        place = number - (0, *self._ends)[index]
        [row] = self._batches[index].slice(place, 1).to_pylist()
        return f"row {number}", given(row)


class _Saved:
    """A data set of the package `datasets`."""

    def __init__(self, found: DataSet) -> None:
        self._rows = found.load()
        self.digest = _digest(batch.serialize() for batch in self._rows.data.to_batches())

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Placed:
        return f"row {number}", given(self._rows[number])


def _digest(blocks: Iterable[Any]) -> bytes:
    digest = blake2b(digest_size=16)
    for block in blocks:
        digest.update(block)
    return digest.digest()
