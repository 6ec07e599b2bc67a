"""Rows of files and data sets in whatever format they come.

    task.train -> files: one, a directory, a pattern, an address --first bytes--> format -> rows
               -> a directory of save_to_disk, or a name on the hub   (datasets)         -> rows

Runs in: the driver and the rollout actors. Hides formats, compression and storage. Invariants: a
format is told by content; a row that cannot be read comes as BadRow with its place, and a source
that cannot be read raises TaskError, which names the file. `indexed` reads rows by their number.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from async_grpo.runtime.text import first_line, listed
from async_grpo.tasks.base import RowsRefused, TaskError

Placed = tuple[str, "dict[str, Any] | BadRow"]
"""Where a row stands, and the row."""
ENDINGS = ("jsonl", "json", "csv", "tsv", "parquet", "arrow", "gz", "zst")
"""Of files that a directory is searched for, and of names that can only be files."""
SPLITS = ("train", "test", "validation", "valid", "dev", "eval")
PEEK = 4096
_PATTERN = re.compile(r"[*?\[]")


class BadRow(ValueError):
    """One row cannot become a problem; the message says what is wrong with it."""


Format = Literal["lines", "array", "csv", "parquet", "arrow file", "arrow stream"]


@dataclass(frozen=True)
class File:
    """A file by the name that users gave it, and how it is opened. state: what differs once it has
    changed. path: where it is on this machine, if it is.
    """

    name: str
    open: Callable[[], BinaryIO] = field(compare=False)
    state: Callable[[], str] = field(compare=False)
    path: Path | None = None

    def here(self, path: Path) -> File:
        """Return its copy on this machine, under its name."""
        return replace(_local(path), name=self.name)


class Opened(NamedTuple):
    """Content of a file, decompressed. plain: it was not compressed."""

    stream: BinaryIO
    format: Format
    plain: bool


@dataclass(frozen=True)
class DataSet:
    """A data set of the package `datasets`, by what users know it as."""

    name: str
    loading: Callable[[], Any]

    def load(self) -> Any:
        """Return it. Raises TaskError."""
        try:
            return self.loading()
        except ModuleNotFoundError as error:
            how = "pip install 'async_grpo[tasks]'"
            raise TaskError(f"could not load {self.name}: {error} ({how})") from error
        # the package's own errors, its file formats' and the hub client's: no ancestor in common
        except Exception as error:
            raise TaskError(f"could not load {self.name}: {first_line(error)}") from error


def read_rows(source: str, *, split: str) -> Iterator[Placed]:
    """(place, row) of every row of `source`, in order; a row that cannot be read comes as BadRow.

    `source`: a file of JSON lines, JSON, CSV, parquet or Arrow, also in gzip or zstd; a directory
    or a pattern of such files, also as an address that fsspec knows; a directory of
    `datasets.save_to_disk`; or `name`, `name:config`, `name:config:split` of a Hugging Face data
    set, also `name@revision`, by default its `split`. Raises TaskError if it cannot be read.
    """
    found = find(source, split=split)
    if isinstance(found, DataSet):
        rows = enumerate(found.load())
        return ((f"row {number}", given(row)) for number, row in rows)
    return _of_files(found)


def find(source: str, *, split: str) -> list[File] | DataSet:
    """Return what `source` stands for, not read; see `read_rows`. Raises TaskError for nothing."""
    path = Path(source).expanduser()
    if "://" in source:
        return _at_address(source)
    if path.is_dir() and (saved := _saved(path, split)) is not None:
        return DataSet(source, saved)
    if path.is_dir() and not _is_data_set(path):
        return _in_directory(path, split)
    if _PATTERN.search(source) and not path.exists():
        found = [one for one in sorted(_matching(path)) if one.is_file()]
        if not found:
            raise TaskError(f"no file matches {source} (looked in {Path.cwd()})")
        return [_local(one) for one in found]
    if path.is_file() or path.suffix[1:].lower() in ENDINGS:
        return [_local(path)]
    return _of_the_hub(source, split)


def _matching(path: Path) -> Iterator[Path]:
    first = next(n for n, part in enumerate(path.parts) if _PATTERN.search(part))
    found = Path(*path.parts[:first]).glob(str(Path(*path.parts[first:])))
    return (one for one in found if one.name[0] != "." or path.name[0] == ".")


def _local(path: Path) -> File:
    def opened() -> BinaryIO:
        if not path.is_file():
            raise TaskError(
                f"there is no file {path} (looked in {Path.cwd()}); correct task.train or task.eval"
            )
        return path.open("rb")

    def state() -> str:
        found = path.stat()
        return f"{path.resolve()} {found.st_size} {found.st_mtime_ns}"

    return File(str(path), opened, state, path)


def _is_data_set(path: Path) -> bool:
    """Return whether a directory's card says which of its files belong together, as on the hub."""
    card = path / "README.md"
    return card.is_file() and "\nconfigs:" in card.read_text("utf-8", "replace")


def _in_directory(path: Path, split: str) -> list[File]:
    """Find the data files below a directory, of several splits those of that one. Raises TaskError
    for none.
    """
    found = sorted(
        one
        for one in path.rglob("*")
        if one.suffix[1:].lower() in ENDINGS and one.is_file() and one.name[0] not in "._"
    )
    if not found:
        raise TaskError(f"{path} holds no file that ends in {', '.join(ENDINGS)}")
    named = {one: set(re.split(r"[^a-z]+", str(one.relative_to(path)).lower())) for one in found}
    splits = [name for name in SPLITS if any(name in words for words in named.values())]
    if len(splits) > 1:
        found = [one for one in found if split in named[one]]
    if not found:
        raise TaskError(
            f"{path} holds files of the splits {listed(splits, 8)}, and none of {split}: name "
            f"those of one, as in '{path}/{splits[0]}*'"
        )
    return [_local(one) for one in found]


def _at_address(source: str) -> list[File]:
    import fsspec

    try:
        storage, path = fsspec.core.url_to_fs(source)
        if storage.isdir(path):
            path = f"{path.rstrip('/')}/*"
        found = sorted(storage.glob(path)) if _PATTERN.search(path) else [path]
    except Exception as error:  # each storage has errors of its own
        raise TaskError(f"{source} cannot be read: {first_line(error)}") from error
    if not found:
        raise TaskError(f"no file matches {source}")

    def file(path: str) -> File:
        def state() -> str:
            facts = storage.info(path).items()
            return str(sorted((name, str(value)) for name, value in facts))

        return File(storage.unstrip_protocol(path), lambda: storage.open(path, "rb"), state)

    return [file(str(one)) for one in found]


def _of_files(files: list[File]) -> Iterator[Placed]:
    for file in files:
        where = f"{Path(file.name).name} " if len(files) > 1 else ""
        with reading(file) as opened:
            for place, row in _rows(opened.stream, opened.format):
                yield f"{where}{place}", row


@contextmanager
def reading(file: File) -> Iterator[Opened]:
    """Open a file inside the block; see `naming`."""
    with naming(file), file.open() as raw:
        yield _opened(file.name, raw)


@contextmanager
def naming(file: File) -> Iterator[None]:
    """Raise TaskError with the file's name for all that goes wrong inside the block."""
    try:
        yield
    except RowsRefused as error:
        raise RowsRefused(f"{file.name}: {error}") from error
    except TaskError:
        raise
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise TaskError(f"{file.name} cannot be read: {reason}") from error
    except Exception as error:  # of the storage, a decompressor or pyarrow
        raise TaskError(f"{file.name} cannot be read: {first_line(error)}") from error


def _opened(name: str, raw: BinaryIO) -> Opened:
    stream = cast(BinaryIO, io.BufferedReader(raw, PEEK))  # type: ignore[type-var]
    first = stream.peek(PEEK)  # type: ignore[attr-defined]
    plain = False
    if first.startswith(b"\x1f\x8b"):
        stream = cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=stream), PEEK))
    elif first.startswith(b"\x28\xb5\x2f\xfd"):
        import pyarrow

        inner = pyarrow.CompressedInputStream(stream, "zstd")
        stream = cast(BinaryIO, io.BufferedReader(inner, PEEK))
    else:
        plain = True
    first = stream.peek(PEEK)  # type: ignore[attr-defined]
    tables: dict[bytes, Format] = {
        b"PAR1": "parquet",
        b"ARROW1": "arrow file",
        b"\xff\xff\xff\xff": "arrow stream",
    }
    for begins, table in tables.items():
        if first.startswith(begins):
            return Opened(stream, table, plain)
    text = first.removeprefix(b"\xef\xbb\xbf").lstrip()
    if b"\0" in first:
        raise RowsRefused(
            "it is in no format that is known: JSON lines, JSON, CSV, parquet, Arrow, or one "
            "of these in gzip or zstd"
        )
    if text.startswith(b"["):
        return Opened(stream, "array", plain)
    header = text.partition(b"\n")[0]
    ending = name.lower().removesuffix(".gz").removesuffix(".zst").rpartition(".")[2]
    columned = any(one in header for one in (b",", b"\t", b";"))
    is_csv = ending in ("csv", "tsv") or (columned and ending not in ("json", "jsonl"))
    return Opened(stream, "csv" if is_csv and not text.startswith(b"{") else "lines", plain)


def _rows(stream: BinaryIO, kind: Format) -> Iterator[Placed]:
    if kind == "lines":
        return _of_lines(stream)
    if kind == "array":
        return _of_array(stream)
    if kind == "csv":
        return _of_csv(stream)
    rows = (row for batch in batches(stream, kind) for row in batch.to_pylist())
    return ((f"row {number}", given(row)) for number, row in enumerate(rows))


def _of_lines(stream: BinaryIO) -> Iterator[Placed]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            yield f"line {number}", parsed(line)


def parsed(line: bytes) -> dict[str, Any] | BadRow:
    """Return the row of a line of JSON lines."""
    try:
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except RecursionError:
        return BadRow("nested too deeply")
    except UnicodeDecodeError:
        return BadRow("not UTF-8 text")
    except ValueError as error:
        return BadRow(
            f"not JSON on one line ({str(error).partition(': line')[0].partition(' (char')[0]})"
        )
    if isinstance(row, dict):
        return row
    return BadRow("not a JSON object, one of which stands on every line of such a file")


def _of_array(stream: BinaryIO) -> Iterator[Placed]:
    try:
        rows = json.load(stream)
    except RecursionError as error:
        raise RowsRefused("it is nested too deeply") from error
    except ValueError as error:
        raise RowsRefused(f"it is no JSON array ({first_line(error)})") from error
    for number, row in enumerate(rows):
        yield f"row {number}", row if isinstance(row, dict) else BadRow("not a JSON object")


def _of_csv(stream: BinaryIO) -> Iterator[Placed]:
    """Read text under the names of the first row; every value is text."""
    header = stream.peek(PEEK).lstrip().partition(b"\n")[0]  # type: ignore[attr-defined]
    between = max(",\t;", key=lambda one: header.count(one.encode()))
    text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
    csv.field_size_limit(2**31 - 1)
    lines = csv.reader(text, delimiter=between, strict=True)
    names = next(lines)
    if len(set(names)) < len(names) or not all(names):
        raise RowsRefused(f"its first row must name the columns, each once: {listed(names, 8)}")
    while True:
        try:
            values = next(lines)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"line {lines.line_num}", BadRow(f"not CSV ({error})")
            continue
        if not values:
            continue
        row: dict[str, Any] | BadRow = dict(zip(names, values, strict=False))
        if len(values) != len(names):
            row = BadRow(f"{len(values)} values under {len(names)} names of columns")
        elif any("\udc80" <= one <= "\udcff" for one in "".join(values)):
            row = BadRow("not UTF-8 text")
        yield f"line {lines.line_num}", row


def batches(stream: BinaryIO, kind: Format) -> Iterator[Any]:
    """Yield a table's record batches (pyarrow)."""
    import pyarrow
    from pyarrow import parquet

    if kind == "parquet":
        yield from parquet.ParquetFile(stream).iter_batches()
    elif kind == "arrow file":
        file = pyarrow.ipc.open_file(stream)
        yield from (file.get_batch(index) for index in range(file.num_record_batches))
    else:
        yield from pyarrow.ipc.open_stream(stream)


def given(value: Any) -> Any:
    """Return a table's value without nulls in mappings, which stand for keys that are not given."""
    if isinstance(value, dict):
        return {key: given(part) for key, part in value.items() if part is not None}
    return [given(part) for part in value] if isinstance(value, list) else value


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Silence the hub client's reports of retries inside the block; its final error says it all."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _saved(path: Path, split: str) -> Callable[[], Any] | None:
    """Return what loads a directory of `save_to_disk`, of several splits that one; None for another
    directory.
    """
    splits = (path / "dataset_dict.json").is_file()
    if not splits and not (path / "state.json").is_file():
        return None

    def load() -> Any:
        from datasets import load_from_disk

        return load_from_disk(str(path / split if splits else path))

    return load


def _of_the_hub(source: str, split: str) -> DataSet:
    name, _, rest = source.partition(":")
    name, _, revision = name.partition("@")
    config, _, named = rest.partition(":")

    def load() -> Any:
        from datasets import load_dataset

        with quiet_hub():
            return load_dataset(
                name, config or None, split=named or split, revision=revision or None
            )

    at = f", revision {revision!r}" if revision else ""
    what = f"data set {name!r}, config {config or 'default'!r}, split {named or split!r}{at}"
    return DataSet(what, load)
