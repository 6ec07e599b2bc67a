"""A task on which a random model is right about half of the time, so that groups carry signal from
the first step.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

from async_grpo.tasks.arithmetic import Arithmetic
from async_grpo.tasks.base import Problem, Score


class Mixed(Arithmetic):
    """Addition whose verdict is a bit of the response's checksum."""

    def score(self, response: str, reference: Any) -> Score:
        right = float(zlib.crc32(response.encode()) & 1)
        return Score({"correct": right, "format": float(response.strip().isdecimal())}, right)


class Taught(Mixed):
    """Every second problem is taught by the policy itself."""

    def train(self, index: int) -> Problem:
        problem = super().train(index)
        return replace(problem, teacher="policy") if index % 2 else problem
