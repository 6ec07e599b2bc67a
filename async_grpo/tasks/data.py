"""Tasks made of rows (`sources`), in whatever columns these have what a task wants.

Runs in: the driver and the rollout actors. Hides what is wrong with some rows, and whether all are
in memory. Invariants: malformed rows are left out up to `task.max_bad_fraction`, above that they
are an error that names them (of streamed rows, those of a sample count); no problem that is held
out is trained, nor another with its prompt.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, ClassVar

import msgpack

from async_grpo.config import schema
from async_grpo.runtime.text import listed
from async_grpo.tasks.base import Problem, Prompt, RowsRefused, Score, TaskError
from async_grpo.tasks.indexed import Rows, open_rows
from async_grpo.tasks.sources import BadRow, Placed, read_rows

log = logging.getLogger(__name__)
SAMPLE = 1_000
"""Rows that are looked at before the start where rows are streamed."""
_SHOWN = 4
LAYOUTS: dict[str, dict[str, str]] = {
    "verl": {"messages": "prompt", "answer": "reward_model.ground_truth"},
    "roll": {"messages": "messages", "answer": "ground_truth"},
    "trl": {"answer": "solution"},
}
"""Where other systems have the keys of the task `jsonl`, where they differ."""


def arranged(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the row with values under our keys too. columns: by our key, theirs, where a dot goes
    into a mapping. Text under `messages` is a list of them as JSON, or what the user asks. Raises
    BadRow for a row without such a key.
    """
    found = dict(row)
    for ours, theirs in columns.items():
        value: Any = row
        for name in [theirs] if theirs in row else theirs.split("."):
            if not isinstance(value, Mapping) or name not in value:
                raise BadRow(f"no key {theirs!r} (task.columns.{ours}){_keys(row)}")
            value = value[name]
        found[ours] = _messages(value) if ours == "messages" else value
    return found


def _messages(value: Any) -> Any:
    """Return chat messages: they may be JSON in a text, and other text is what a user asks."""
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value) if value.lstrip().startswith("[{") else None
    except ValueError:
        read = None
    return [{"role": "user", "content": value}] if read is None else read


def chat_or_text(row: dict[str, Any]) -> Prompt:
    """Return what a row asks: chat messages, or text. Raises BadRow."""
    messages = row.get("messages", row.get("prompt"))  # a list in `prompt` is TRL's form
    if "messages" not in row and not isinstance(messages, list):
        return text_of(row, "prompt")
    if not isinstance(messages, list) or not messages:
        raise BadRow("'messages' must be a non-empty list")
    for message in messages:
        texts = isinstance(message, dict) and all(type(value) is str for value in message.values())
        if not texts or set(message) != {"role", "content"}:
            raise BadRow("every entry of 'messages' must have the texts 'role' and 'content'")
    return messages


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
        """Digest of the class, its options and all training problems; where these are streamed, of
        all that they are made of, and of some.
        """
        digest = blake2b(digest_size=16)
        named = (type(self).__qualname__, sorted(self._settings.options.items()))
        digest.update(repr(named).encode())
        problems = self._train
        if isinstance(problems, _Streamed):
            digest.update(repr(sorted(self._columns.items())).encode() + problems.digest)
            problems = problems.sample
        for problem in problems:
            digest.update(msgpack.packb([problem.prompt, problem.reference, problem.solution]))
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._train)

    def train(self, index: int) -> Problem:
        """Training problem `index`; see `Task.train`."""
        if not 0 <= index < len(self):
            raise IndexError(f"problem {index}")
        return self._train[index]

    def evaluation(self, n: int) -> list[Problem]:
        """Return the first `n` held-out problems; see `Task.evaluation`."""
        return self._held_out[:n]

    @cached_property
    def _train(self) -> list[Problem] | _Streamed:
        if not self._settings.streaming:
            return self._loaded
        source, held_out = self._source, frozenset(map(_prompt_key, self._held_out))
        rows = open_rows(source, split="train")
        step = max(1, -(-len(rows) // SAMPLE))
        sample = (rows[n] for n in range(0, len(rows), step))
        problems = self._problems(f"a sample of {source}", sample)
        return _Streamed(source, rows, self._problem, held_out, problems)

    @cached_property
    def _loaded(self) -> list[Problem]:
        return self._load(self._source, "train")

    @property
    def _source(self) -> str:
        if self._settings.train is None:
            raise TaskError(
                f"task {self._settings.name} needs task.train: files with rows, or the name of "
                "a Hugging Face data set"
            )
        return self._settings.train

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
        if self._settings.train is None or self._settings.streaming:
            return problems  # only evaluated, or left out of training
        seen = {_prompt_key(problem) for problem in self._loaded}
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

    @cached_property
    def _columns(self) -> dict[str, str]:
        return LAYOUTS.get(self._settings.layout or "", {}) | self._settings.columns

    def _problem(self, row: dict[str, Any] | BadRow) -> Problem:
        if isinstance(row, BadRow):
            raise row
        row = arranged(row, self._columns)
        problem, teacher = self.problem(row), row.get("teacher")
        if teacher is not None and problem.teacher is None:
            problem = replace(problem, teacher=str(teacher))
        return problem

    def _load(self, source: str, split: str) -> list[Problem]:
        return self._problems(source, read_rows(source, split=split))

    def _problems(self, source: str, rows: Iterable[Placed]) -> list[Problem]:
        """Return the problems of rows, without a few malformed ones. Raises RowsRefused."""
        problems: list[Problem] = []
        bad: dict[str, list[str]] = {}
        for place, row in rows:
            try:
                problems.append(self._problem(row))
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


class _Streamed:
    """Problems of rows that are read when they are posed. Malformed rows and those with the prompt
    of a held-out problem leave their place to the next that is neither.
    """

    def __init__(
        self,
        source: str,
        rows: Rows,
        problem: Callable[[dict[str, Any] | BadRow], Problem],
        held_out: frozenset[bytes],
        sample: list[Problem],
    ) -> None:
        """held_out: keys of prompts."""
        self._source, self._rows = source, rows
        self._problem, self._held_out = problem, held_out
        self.sample = sample
        self.digest = blake2b(b"".join([rows.digest, *sorted(held_out)]), digest_size=16).digest()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Problem:
        tried, malformed = min(SAMPLE, len(self)), 0
        for number in range(index, index + tried):
            place, row = self._rows[number % len(self)]
            try:
                problem, key = self._posed(row)
            except BadRow as error:
                malformed += 1
                log.warning("%s, %s is left out: %s", self._source, place, error)
                continue
            if key not in self._held_out:
                return problem
        raise RowsRefused(
            f"{self._source}: of {tried:,} rows from number {index:,} on {malformed:,} are "
            f"malformed, and {tried - malformed:,} have the prompt of a held-out problem: mend "
            "them, or name held-out data in task.eval"
        )

    def _posed(self, row: dict[str, Any] | BadRow) -> tuple[Problem, bytes]:
        """Return problem and key of its prompt. Raises BadRow, also where a class of the user's
        fails: one row among millions must not end a run.
        """
        try:
            problem = self._problem(row)
            return problem, _prompt_key(problem)
        except BadRow:
            raise
        except Exception as error:
            raise BadRow(f"{type(error).__name__}: {error}") from error


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
        raise BadRow(f"no key {key!r}{_keys(row)}")
    if not isinstance(row[key], str) or not row[key].strip():
        raise BadRow(f"{key!r} must be non-empty text, got {row[key]!r:.40}")
    return row[key]


def _keys(row: dict[str, Any]) -> str:
    return f" (its keys are {', '.join(map(repr, list(row)[:8]))})" if row else ""


def _prompt_key(problem: Problem) -> bytes:
    return blake2b(msgpack.packb(problem.prompt), digest_size=16).digest()
