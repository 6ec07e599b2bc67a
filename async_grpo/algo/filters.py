"""Which groups carry no learning signal.

Runs in: the replay queue and the driver (plain numbers, no tensor library). Hides the numerics of "all equal". Invariant: agrees with
the advantage estimators, which give such a group advantage 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

TOLERANCE = 1e-6


def zero_variance(values: Sequence[float], *, tolerance: float = TOLERANCE) -> bool:
    """Whether the values of one group are all equal: spread (max - min, in float64) at most `tolerance`.

    The spread and not the standard deviation: three rewards of 0.1 have a computed deviation of 1.4e-17, which is not 0. A group of
    one is all equal. Raises ValueError for a value that is not finite.
    """
    numbers = [float(value) for value in values]
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"a group has values {numbers}; all must be finite")
    return len(numbers) < 2 or max(numbers) - min(numbers) <= tolerance
