"""A user's own rows: `prompt` (text) or `messages` (chat), and `answer`; `rewards` and `solution`
are optional, and with judges that have a weight so is `answer`.

Runs in: the driver, the rollout actors and verifier children. Hides how a response is compared.
Reward `correct`: 1 if the response matches `answer`; else the largest value among the answers in
`rewards`, e.g. {"Lyon": 0.2}, that it matches; else 0. `correct` is 1 only for `answer` itself.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from async_grpo.config import schema
from async_grpo.config.section import Section
from async_grpo.tasks.base import Problem, Score, is_judged, parse_options
from async_grpo.tasks.data import RowTask, chat_or_text, text_of
from async_grpo.tasks.sources import BadRow

VERL = "a row in verl's layout: set task.layout=verl"


class JsonlOptions(Section):
    """Options of the task `jsonl`."""

    match: Literal["exact", "contains", "regex"] = "exact"
    """The stripped response is the answer, contains it, or matches it as a regular expression."""


class Jsonl(RowTask):
    """Rows with a prompt and an answer, compared as text."""

    def __init__(self, settings: schema.TaskConfig, seed: int) -> None:
        super().__init__(settings, seed)
        self._match = parse_options(JsonlOptions, settings).match
        self._judged = is_judged(settings.rewards, settings.judges)

    def problem(self, row: dict[str, Any]) -> Problem:
        """Parse prompt, answers and solution; see `RowTask.problem`."""
        if "answer" not in row and isinstance(row.get("reward_model"), dict):
            raise BadRow(VERL)
        given = text_of(row, "solution") if row.get("solution") is not None else None
        if self._judged and row.get("answer") is None:
            return Problem(chat_or_text(row), None, given)
        answer, partial = _answer(row), row.get("rewards") or {}
        if not isinstance(partial, dict) or not all(
            isinstance(value, int | float) and math.isfinite(value) for value in partial.values()
        ):
            raise BadRow(f"'rewards' must map other answers to finite numbers, got {partial!r:.60}")
        if self._match == "regex":
            for pattern in (answer, *partial):
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise BadRow(
                        f"{pattern!r:.40} is not a regular expression ({error})"
                    ) from error
        solution = answer if given is None and self._match != "regex" else given
        rewards = {key: float(value) for key, value in partial.items()}
        return Problem(chat_or_text(row), {"answer": answer, "rewards": rewards}, solution)

    def score(self, response: str, reference: Any) -> Score:
        """Compare the stripped response with the answers of the row."""
        if reference is None:
            return Score({"correct": None}, None)
        response = response.strip()
        if self._matches(response, reference["answer"]):
            return Score({"correct": 1.0}, 1.0)
        rewards = reference["rewards"].items()
        partial = [value for answer, value in rewards if self._matches(response, answer)]
        return Score({"correct": max(partial, default=0.0)}, 0.0)

    def _matches(self, response: str, answer: str) -> bool:
        if self._match == "regex":
            return re.search(answer, response) is not None
        answer = answer.strip()
        return answer in response if self._match == "contains" else response == answer


def _answer(row: dict[str, Any]) -> str:
    answer = row.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer):
        return str(answer)
    return text_of(row, "answer")
