"""Tasks that are slow, that fail, and of which a filter rejects half."""

from __future__ import annotations

import random
import time
from typing import Any

from async_grpo.tasks.base import Score
from tests.support.mixed_task import Mixed


class Slow(Mixed):
    """Scoring takes a while."""

    def score(self, response: str, reference: Any) -> Score:
        time.sleep(0.02)
        return super().score(response, reference)


class Failing(Mixed):
    """Scoring fails now and then."""

    def score(self, response: str, reference: Any) -> Score:
        if random.random() < 0.1:
            raise RuntimeError("a bad day")
        return super().score(response, reference)
