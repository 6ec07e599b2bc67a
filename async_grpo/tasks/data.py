"""Rows from a local JSONL file or a Hugging Face data set, and tasks made of rows.

Runs in: the driver and the rollout actors. Hides where rows come from and what is wrong with some
of them. Invariants: a malformed row is skipped and counted only up to `task.max_bad_fraction`,
above that it is an error that names the rows; a held-out problem whose prompt also occurs in
training is left out.
"""

from __future__ import annotations

import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import msgpack

from async_grpo.config import schema
from async_grpo.runtime.text import first_line, listed
from async_grpo.tasks.base import Problem, RowsRefused, Score, TaskError

_SHOWN = 4


class BadRow(ValueError):
    """One row cannot become a problem; the message says what is wrong with it."""


def read_rows(source: str, *, split: str) -> Iterator[tuple[str, dict[str, Any] | BadRow]]:
    """(place, row) of every row of `source`; a line that is not a JSON object comes as BadRow.

    `source`: a JSONL file, or `name`, `name:config`, `name:config:split` of a Hugging Face data
    set, by default its `split`. Raises TaskError if it cannot be read.
    """
    _refuse_format(Path(source).expanduser())
    if source.endswith((".jsonl", ".json")) or Path(source).is_file():
        return _read_jsonl(Path(source).expanduser())
    return _read_dataset(source, split)


def _refuse_format(path: Path) -> None:
    """Raise TaskError for a local file or directory in another format, with what converts it."""
    kind = path.suffix.lstrip(".").lower()
    if path.is_dir() and (path / "dataset_info.json").is_file():
        kind, loads = "datasets' save_to_disk", f"datasets.load_from_disk({str(path)!r})"
    elif path.is_file() and kind in ("parquet", "csv"):
        loads = f"datasets.Dataset.from_{kind}({str(path)!r})"
    elif path.is_file() and (kind == "gz" or _is_array(path)):
        kind = "gzip" if kind == "gz" else "JSON array"
        loads = f"datasets.Dataset.from_json({str(path)!r})"
    else:
        return
    target = path.name.partition(".")[0] + ".jsonl"
    raise RowsRefused(
        f"{path} is in the format {kind}, and rows are read from JSONL: convert it with "
        f'python -c "import datasets; {loads}.to_json({target!r})"'
    )


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return re.match(rb"\s*\[\s*\{", file.read(256)) is not None


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any] | BadRow]]:
    if not path.is_file():
        raise TaskError(
            f"there is no file {path} (looked in {Path.cwd()}); correct task.train or task.eval"
        )
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"line {number}", _parsed(line)
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}") from error


def _parsed(line: bytes) -> dict[str, Any] | BadRow:
    try:
        row = json.loads(line)
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


def _read_dataset(source: str, split: str) -> Iterator[tuple[str, dict[str, Any] | BadRow]]:
    from datasets import load_dataset

    name, _, rest = source.partition(":")
    config, _, named_split = rest.partition(":")
    try:
        with quiet_hub():
            dataset = load_dataset(name, config or None, split=named_split or split)
    # the package's own errors, its file formats' and the hub client's have no ancestor in common
    except Exception as error:
        what = f"data set {name!r}, config {config or 'default'!r}, split {named_split or split!r}"
        raise TaskError(f"could not load {what}: {first_line(error)}") from error
    for number, row in enumerate(dataset):
        yield f"row {number}", row


class RowTask(ABC):
    """A task whose problems are rows of `task.train` and `task.eval`, read on first use."""

    weights: ClassVar[dict[str, float]] = {"correct": 1.0}

    def __init__(self, settings: schema.TaskConfig, seed: int) -> None:
        """`seed` is not used: `problem_index` decides the order of problems."""
        self._settings = settings
        self._notes: list[str] = []

    @abstractmethod
    def problem(self, row: dict[str, Any]) -> Problem:
        """Return the problem of one row. Raises BadRow."""

    @abstractmethod
    def score(self, response: str, reference: Any) -> Score:
        """Score one response; see `Task.score`."""

    @property
    def notes(self) -> list[str]:
        """A line for every source of which rows are left out, with examples of malformed ones."""
        return list(self._notes)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the class, its options and all training problems."""
        digest = blake2b(digest_size=16)
        named = (type(self).__qualname__, sorted(self._settings.options.items()))
        digest.update(repr(named).encode())
        for problem in self._train:
            digest.update(msgpack.packb([problem.prompt, problem.reference, problem.solution]))
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._train)

    def train(self, index: int) -> Problem:
        """Training problem `index`; see `Task.train`."""
        if index < 0:
            raise IndexError(f"problem {index}")
        return self._train[index]

    def evaluation(self, n: int) -> list[Problem]:
        """Return the first `n` held-out problems; see `Task.evaluation`."""
        return self._held_out[:n]

    @cached_property
    def _train(self) -> list[Problem]:
        if self._settings.train is None:
            raise TaskError(
                f"task {self._settings.name} needs task.train: a JSONL file or the name of "
                "a Hugging Face data set"
            )
        return self._load(self._settings.train, "train")

    @cached_property
    def _held_out(self) -> list[Problem]:
        if self._settings.eval is None:
            return []
        problems = self._load(self._settings.eval, "test")
        if not problems:
            raise TaskError(
                f"task.eval ({self._settings.eval}) has no problem; name held-out data, or "
                "leave task.eval out"
            )
        if self._settings.train is None:  # a task that is only evaluated
            return problems
        seen = {_prompt_key(problem) for problem in self._train}
        kept = [problem for problem in problems if _prompt_key(problem) not in seen]
        if problems and not kept:
            raise TaskError(
                f"every problem of task.eval ({self._settings.eval}) is also in "
                "task.train; name held-out data"
            )
        if left := len(problems) - len(kept):
            self._notes.append(
                f"note: {self._settings.eval}: {left} of {len(problems)} held-out problems have "
                "the prompt of a training problem, and are left out"
            )
        return kept

    def _load(self, source: str, split: str) -> list[Problem]:
        problems: list[Problem] = []
        bad: dict[str, list[str]] = {}
        for place, row in read_rows(source, split=split):
            try:
                if isinstance(row, BadRow):
                    raise row
                problem, teacher = self.problem(row), row.get("teacher")
                if teacher is not None and problem.teacher is None:
                    problem = replace(problem, teacher=str(teacher))
                problems.append(problem)
            except BadRow as error:
                bad.setdefault(str(error), []).append(place)
        count, allowed = sum(map(len, bad.values())), self._settings.max_bad_fraction
        if not count:
            return problems
        found = f"{source}: {count} of {len(problems) + count} rows are malformed"
        if count > allowed * (len(problems) + count):
            raise RowsRefused(
                f"{found}: {_examples(bad)}. Mend them, or leave them out "
                f"(task.max_bad_fraction, now {allowed:g})"
            )
        self._notes.append(
            f"note: {found} and left out, as task.max_bad_fraction {allowed:g} allows: "
            f"{_examples(bad)}"
        )
        return problems


def _examples(bad: dict[str, list[str]]) -> str:
    """Say what is wrong with rows, the most frequent first, each with the places where it
    begins.
    """
    kinds = sorted(bad.items(), key=lambda entry: -len(entry[1]))
    examples = [f"{listed(places, _SHOWN)}: {what}" for what, places in kinds[:_SHOWN]]
    return "; ".join(examples) + (
        f"; and {len(kinds) - _SHOWN} other kinds" if len(kinds) > _SHOWN else ""
    )


def text_of(row: dict[str, Any], key: str) -> str:
    """Return the non-empty text under `key`. Raises BadRow."""
    if key not in row:
        keys = f" (its keys are {', '.join(map(repr, list(row)[:8]))})" if row else ""
        raise BadRow(f"no key {key!r}{keys}")
    if not isinstance(row[key], str) or not row[key].strip():
        raise BadRow(f"{key!r} must be non-empty text, got {row[key]!r:.40}")
    return row[key]


def _prompt_key(problem: Problem) -> bytes:
    return blake2b(msgpack.packb(problem.prompt), digest_size=16).digest()
