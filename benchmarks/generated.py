"""Tasks that make their problems themselves, without end, for the benchmarks.

Runs in: every process of a run. Hides the bounds of indices. A problem is training or held out by a
hash of itself, which `problem` of a task decides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from async_grpo.config import schema
from async_grpo.tasks.base import Problem, refuse_rows

TRAIN_PROBLEMS, HELD_OUT_ONE_IN = 2**20, 8
_TRIES = 64


class Generated(ABC):
    """2^20 indices over the training problems."""

    def __init__(self, settings: schema.TaskConfig, seed: int) -> None:
        refuse_rows(settings)

    @abstractmethod
    def problem(self, domain: str, index: int, *, held_out: bool) -> Problem:
        """The first problem of a sequence that is on this side of the split."""

    def __len__(self) -> int:
        return TRAIN_PROBLEMS

    def train(self, index: int) -> Problem:
        """Training problem `index`; see `Task.train`."""
        if not 0 <= index < TRAIN_PROBLEMS:
            raise IndexError(f"problem {index} of {TRAIN_PROBLEMS}")
        return self.problem("train", index, held_out=False)

    def evaluation(self, n: int) -> list[Problem]:
        """`n` distinct held-out problems, or as many as were found."""
        found: dict[str, Problem] = {}
        for index in range(_TRIES * n):
            if len(found) >= n:
                break
            problem = self.problem("held out", index, held_out=True)
            found.setdefault(str(problem.prompt), problem)
        return list(found.values())
