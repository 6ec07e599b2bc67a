"""A reward function of verl, unchanged: `compute_score(data_source, solution_str, ground_truth,
extra_info)` as `task.name: module:compute_score`, on rows in verl's layout.

Runs in: the driver, the rollout actors and verifier children. Hides verl's form. Reward `score`:
what the function returns, or its `score` in a mapping; `correct`: whether `acc` of the mapping,
or else the score, is at least 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from async_grpo.config import schema
from async_grpo.tasks.base import Problem, Score, TaskError
from async_grpo.tasks.data import LAYOUTS, RowTask, arranged, chat_or_text

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def is_reward_function(found: object) -> bool:
    """Return whether this is a function of verl's form."""
    return (
        inspect.isfunction(found)
        and {*ARGUMENTS[1:3]} <= inspect.signature(found).parameters.keys()
    )


class VerlReward(RowTask):
    """Rows in verl's layout, scored by a function."""

    weights: ClassVar[dict[str, float]] = {"score": 1.0}

    def __init__(
        self, function: Callable[..., Any], settings: schema.TaskConfig, seed: int
    ) -> None:
        """Take the function. Raises TaskError for a coroutine function."""
        super().__init__(settings, seed)
        if inspect.iscoroutinefunction(function):
            raise TaskError(
                f"{settings.name} is a coroutine function: write a task with `async def score` "
                "(docs/how-to/rewards.md)"
            )
        self._function = function
        wanted = inspect.signature(function).parameters
        self._takes = [
            name
            for name in ARGUMENTS
            if name in wanted or any(one.kind is one.VAR_KEYWORD for one in wanted.values())
        ]

    def problem(self, row: dict[str, Any]) -> Problem:
        """Parse a row in verl's layout; see `RowTask.problem`."""
        row = arranged(row, LAYOUTS["verl"]) if self._settings.layout is None else row
        facts = row.get("data_source"), row.get("answer"), row.get("extra_info")
        return Problem(chat_or_text(row), list(facts))

    def score(self, response: str, reference: Any) -> Score:
        """Score one response by the function."""
        source, truth, extra = reference
        facts = dict(zip(ARGUMENTS, (source, response, truth, extra), strict=True))
        found = self._function(**{name: facts[name] for name in self._takes})
        score = right = found
        if isinstance(found, Mapping):
            score = found["score"]
            right = found.get("acc", score)
        return Score({"score": float(score)}, float(float(right) >= 1))
