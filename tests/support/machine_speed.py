"""How slow this machine computes. Limits of time of tests were chosen on usual ones; a virtual
machine whose host is throttled can be six times slower for hours.
"""

from __future__ import annotations

import time
from functools import cache

USUAL_S = 0.012


@cache
def slowness() -> float:
    """CPU time of a small loop here, against a usual machine; 1 where it is not slower."""
    return max(1.0, min(_loop_s() for _ in range(5)) / USUAL_S)


def _loop_s() -> float:
    began, total = time.process_time(), 0
    for number in range(200_000):
        total += number * number % 7
    return time.process_time() - began
