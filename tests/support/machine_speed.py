"""How slow this machine computes. Limits of time of tests were chosen on usual ones; a virtual
machine whose host is throttled can be six times slower for hours.
"""

from __future__ import annotations

import os
import time
from functools import cache

USUAL_S = 0.0133
"""Measured where `make test` and `make test-system` took what docs/contributing/testing.md says."""
TOO_SLOW = 2.5
"""On a machine that is so many times slower, `make test-system` would not end within its time."""
_MEASURED = "ASYNC_GRPO_TESTS_SLOWNESS"


@cache
def slowness() -> float:
    """CPU time of a small loop here, against a usual machine; 1 where it is not slower. Measured
    once: processes that this one starts take it over, so that all of them choose the same tests.
    """
    if _MEASURED not in os.environ:
        os.environ[_MEASURED] = str(max(1.0, min(_loop_s() for _ in range(5)) / USUAL_S))
    return float(os.environ[_MEASURED])


def _loop_s() -> float:
    began, total = time.process_time(), 0
    for number in range(200_000):
        total += number * number % 7
    return time.process_time() - began
