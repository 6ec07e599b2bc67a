"""Sums written out step by step: a task whose answers differ in length by design, for
`benchmarks.async_vs_sync`.

Runs in: every process of a run, by the name in long_sums.yaml. `3+5+9=` wants
`8,17`: every total up to the last. The number of addends is 2 and a geometric number more, up to
24, so that few problems have answers several times as long as the mean, in training and held out
alike. A problem is training or held out by a hash of itself.
"""

from __future__ import annotations

import random
from hashlib import blake2b
from itertools import accumulate
from typing import Any, ClassVar

from async_grpo.config import schema
from async_grpo.tasks.base import Problem, Score, refuse_rows

ENDS, LONGEST = 0.2, 24
"""Chance that an addend is the last one; most addends."""
TRAIN_PROBLEMS, HELD_OUT_ONE_IN = 2**20, 8
_TRIES = 64


class LongSums:
    """Sums of 2 to 24 digits from 1 to 9; 2^20 indices over the training problems."""

    weights: ClassVar[dict[str, float]] = {"correct": 1.0}
    fingerprint = f"long-sums-1-{ENDS}-{LONGEST}"

    def __init__(self, settings: schema.TaskConfig, seed: int) -> None:
        refuse_rows(settings)

    def __len__(self) -> int:
        return TRAIN_PROBLEMS

    def train(self, index: int) -> Problem:
        """Training problem `index`; see `Task.train`."""
        if not 0 <= index < TRAIN_PROBLEMS:
            raise IndexError(f"problem {index} of {TRAIN_PROBLEMS}")
        return _problem("train", index, held_out=False)

    def evaluation(self, n: int) -> list[Problem]:
        """`n` distinct held-out problems, or as many as were found."""
        found: dict[str, Problem] = {}
        for index in range(_TRIES * n):
            if len(found) >= n:
                break
            problem = _problem("held out", index, held_out=True)
            found.setdefault(str(problem.prompt), problem)
        return list(found.values())

    def score(self, response: str, reference: Any) -> Score:
        """Compare the stripped response with the totals."""
        correct = float(response.strip() == reference)
        return Score({"correct": correct}, correct)


def _problem(domain: str, index: int, *, held_out: bool) -> Problem:
    addends = _addends(domain, index, held_out=held_out)
    totals = ",".join(map(str, list(accumulate(addends))[1:]))
    return Problem("+".join(map(str, addends)) + "=", reference=totals, solution=totals)


def _addends(domain: str, index: int, *, held_out: bool) -> tuple[int, ...]:
    """Draw the first problem of a sequence that is on this side of the split."""
    draw = random.Random(f"{domain} {index}")
    while True:
        addends = [draw.randint(1, 9), draw.randint(1, 9)]
        while len(addends) < LONGEST and draw.random() >= ENDS:
            addends.append(draw.randint(1, 9))
        split = blake2b(bytes(addends), digest_size=8).digest()[0]
        if (split % HELD_OUT_ONE_IN == 0) == held_out:
            return tuple(addends)
