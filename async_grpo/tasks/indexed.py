"""Rows by their number, for data that do not fit in memory (`task.streaming`).

    at an address ----- a copy in CACHE -->  file
    file of JSON lines  -- where its lines begin -->                                    row n
    compressed or table -- a plain copy in CACHE, by the digest of the file -->         row n
    data set of `datasets`, which maps files of its own -->                             row n

Runs in: the driver and the rollout actors. Hides where a row stands. Invariants: rows, their
numbers and the digest are functions of the content; no row comes from a file that has changed.
"""

from __future__ import annotations

import fcntl
import gzip
import os
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from hashlib import blake2b
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from async_grpo.tasks.base import RowsRefused, TaskError
from async_grpo.tasks.sources import (
    DataSet,
    File,
    Opened,
    Placed,
    batches,
    find,
    given,
    naming,
    parsed,
    reading,
)

CACHE = "~/.cache/async_grpo/rows"
"""Holds copies of files; what is not in use may be deleted."""
BLOCK = 1 << 24
ROWS_AT_ONCE = 1_000


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
        place, row = part[number - (self._ends[index - 1] if index else 0)]
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
        with naming(file):
            state = file.state()
        where = f"{Path(file.name).name} " if len(found) > 1 else ""
        parts.append((where, _part(file, state)))
    return Rows(parts)


@cache
def _part(file: File, state: str) -> RowsPart:
    """Index a file, once while it stays as it is."""
    local = file.here(_fetched(file, state)) if file.path is None else file
    with reading(local) as opened:
        if opened.format in ("array", "csv"):
            raise RowsRefused(
                "task.streaming needs JSON lines, parquet or Arrow, not a JSON array or CSV: "
                "convert it, or leave task.streaming out"
            )
        assert local.path is not None, "it is here"
        if opened.format == "lines" and opened.plain:
            return _Lines(file.name, local.path)
        digest = _digest_of(local.path)
        if opened.format == "lines":
            write = partial(shutil.copyfileobj, opened.stream, length=BLOCK)
            return _Lines(file.name, _copied(file, digest.hex(), write))
        return _Table(_copied(file, digest.hex(), partial(_write_table, opened)), digest)


def _fetched(file: File, state: str) -> Path:
    name = blake2b(f"{file.name}\0{state}".encode(), digest_size=16).hexdigest()

    def write(out: BinaryIO) -> None:
        with file.open() as stream:
            shutil.copyfileobj(stream, out, BLOCK)

    with naming(file):
        return _copied(file, name, write)


def _copied(file: File, name: str, write: Callable[[BinaryIO], object]) -> Path:
    """Return the whole copy of this name, which one process makes while others wait for it."""
    path = Path(CACHE).expanduser() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _write(path, write)
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile) or error.errno is None:
            raise  # of the file that is read
        where = f"{file.name} cannot be copied to {path.parent}"
        raise TaskError(f"{where}: {error.strerror}") from error
    return path


def _write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    draft = path.with_suffix(".draft")
    try:
        with draft.open("wb") as out:
            write(out)
            out.flush()
            os.fsync(out.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _write_table(opened: Opened, out: BinaryIO) -> None:
    import pyarrow

    writer = None
    for batch in batches(opened.stream, opened.format):
        writer = writer or pyarrow.ipc.new_stream(out, batch.schema)
        writer.write_batch(batch)
    if writer is not None:
        writer.close()


class _Lines:
    """A file of JSON lines without the blank ones."""

    def __init__(self, name: str, path: Path) -> None:
        import numpy as np

        self._name, self._path = name, path
        digest, begins, firsts = blake2b(digest_size=16), [], []
        passed, at_begin = 0, True
        with path.open("rb") as file:
            self._state = _state(file)
            while block := file.read(BLOCK):
                digest.update(block)
                letters = np.frombuffer(block, np.uint8)
                found = np.flatnonzero(letters == ord("\n")) + 1
                at_end = bool(len(found)) and found[-1] == len(block)
                found = np.concatenate([[0] if at_begin else [], found[:-1] if at_end else found])
                found = found.astype(np.int64)
                begins.append(found + passed)
                firsts.append(letters[found])
                passed, at_begin = passed + len(block), at_end
        self.digest = digest.digest()
        self._bounds = np.concatenate([*begins, np.array([passed])]).astype(np.int64)
        first = np.concatenate([*firsts, np.zeros(0, np.uint8)])
        filled = first > ord(" ")
        for line in np.flatnonzero(~filled):
            filled[line] = bool(self._raw(int(line)).strip())
        self._lines = np.flatnonzero(filled)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, number: int) -> Placed:
        line = int(self._lines[number])
        return f"line {line + 1}", parsed(self._raw(line))

    def _raw(self, line: int) -> bytes:
        begin, end = map(int, self._bounds[line : line + 2])
        with self._path.open("rb", buffering=0) as file:
            raw = os.pread(file.fileno(), end - begin, begin)
            if _state(file) != self._state:
                raise TaskError(f"{self._name} has changed while it was in use")
        return raw


def _state(file: Any) -> tuple[int, int, int]:
    found = os.fstat(file.fileno())
    return found.st_ino, found.st_size, found.st_mtime_ns


class _Table:
    """Record batches of a copy in Arrow's stream format, which is mapped into memory."""

    def __init__(self, path: Path, digest: bytes) -> None:
        import pyarrow

        self._batches, self.digest = [], digest
        if path.stat().st_size:
            self._batches = list(pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))))
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> Placed:
        index = bisect_right(self._ends, number)
        place = number - (self._ends[index - 1] if index else 0)
        [row] = self._batches[index].slice(place, 1).to_pylist()
        return f"row {number}", given(row)


class _Saved:
    """A data set of the package `datasets`."""

    def __init__(self, found: DataSet) -> None:
        self._rows = found.load()
        tables = self._rows.with_format("arrow").iter(ROWS_AT_ONCE)  # however they are stored
        blocks = (table.combine_chunks().to_batches()[0].serialize() for table in tables)
        self.digest = _digest([str(self._rows.features).encode()], blocks)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Placed:
        return f"row {number}", given(self._rows[number])


def _digest_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return _digest(iter(partial(file.read, BLOCK), b""))


def _digest(*blocks: Iterable[Any]) -> bytes:
    digest = blake2b(digest_size=16)
    for block in chain.from_iterable(blocks):
        digest.update(block)
    return digest.digest()
