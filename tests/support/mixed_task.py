"""A task on which a random model is right about half of the time, so that groups carry signal from
the first step.
"""

from __future__ import annotations

import zlib
from typing import Any

from async_grpo.tasks.arithmetic import Arithmetic
from async_grpo.tasks.base import Score


class Mixed(Arithmetic):
    """Addition whose verdict is a bit of the response's checksum."""

    def score(self, response: str, reference: Any) -> Score:
        right = float(zlib.crc32(response.encode()) & 1)
        return Score({"correct": right, "format": float(response.strip().isdecimal())}, right)
