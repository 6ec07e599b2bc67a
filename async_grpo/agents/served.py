"""Tasks whose episodes are played by somebody who asks the policy over HTTP.

Runs in: the driver and rollout actors. Hides that the problems are those of another task; what a
player is told of one is its prompt, its reference and the seed of its group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from async_grpo.config import schema
from async_grpo.config.section import Section
from async_grpo.environments.base import Observation
from async_grpo.tasks.base import Problem, TaskError

LONGEST_SHOWN = 300


class ServedOptions(Section):
    """Options of all such tasks."""

    of: str = "jsonl"
    """Task whose problems are posed; its `train`, `eval` and `fields` are this task's."""
    of_options: dict[str, Any] = Field(default_factory=dict)
    """Options of that task."""
    rewards: dict[str, float] | None = None
    """Weights of the reward components that results may name; null: those of the task `of`."""


class ServedTask:
    """Problems of another task; see `Task`. What plays an episode is its heirs' `environment`."""

    players = "async_grpo.agents.players:ServedPlayers"

    def __init__(self, settings: schema.TaskConfig, options: ServedOptions, seed: int) -> None:
        from async_grpo.tasks.registry import BUILT_IN, create_task

        if BUILT_IN.get(options.of) == BUILT_IN[settings.name]:
            raise TaskError(
                f"task.options.of is `{options.of}`: name the task whose problems are posed"
            )
        self.posed = settings.model_copy(update={"name": options.of, "options": options.of_options})
        """Settings of the task whose problems these are."""
        self._task = create_task(self.posed, seed)
        self.weights = dict(options.rewards or self._task.weights)

    @property
    def fingerprint(self) -> str:
        """Of the problems, which come in the order of their own task; see `Task.fingerprint`."""
        return self._task.fingerprint

    def __len__(self) -> int:
        return len(self._task)

    def train(self, index: int) -> Problem:
        """Training problem `index`; see `Task.train`."""
        return _for_player(self._task.train(index))

    def evaluation(self, n: int) -> list[Problem]:
        """Held-out problems; see `Task.evaluation`."""
        return [_for_player(problem) for problem in self._task.evaluation(n)]

    def notes(self, config: schema.Config) -> Iterator[str]:
        """Say nothing; see `HasPlayers.notes`."""
        yield from ()


def told(reference: dict[str, Any], seed: int) -> dict[str, Any]:
    """Say what a player is told of a problem. reference: of such a task's problem."""
    return {"prompt": reference["prompt"], "reference": reference["reference"], "seed": seed}


def result_of(found: object, said: str) -> Observation:
    """Return what an episode was worth, with its finish reason as content. said: the same, as it
    was written. Raises ValueError.
    """
    if not isinstance(found, dict) or not isinstance(found.get("rewards"), dict):
        raise ValueError(
            'must be JSON like {"rewards": {"correct": 1.0}, "correct": 1}; it was '
            f"{said[:LONGEST_SHOWN]!r}"
        )
    if "verdict" in found:
        raise ValueError('has the key "verdict", which is called "correct" now')
    reason = found.get("finish_reason", "env_done")
    return Observation(
        reason if isinstance(reason, str) else "env_done",
        found["rewards"],
        done=True,
        correct=found.get("correct"),
        metrics=found.get("metrics") or {},
    )


def _for_player(problem: Problem) -> Problem:
    reference = {"prompt": problem.prompt, "reference": problem.reference}
    return Problem(problem.prompt, reference, problem.solution)
