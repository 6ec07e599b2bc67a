"""Numbers that a user's task or environment returns.

Runs in: verifiers, environments and rollout actors. Hides how a wrong one is named.
"""

from __future__ import annotations

import math
from numbers import Real


def finite(name: str, value: object) -> float:
    """Return a plain number. Raises TypeError for another type, ValueError if not finite."""
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def checked_correct(value: object) -> float | None:
    """Return `correct` as a plain number. Raises TypeError or ValueError for another than 0, 1 and
    None.
    """
    number = None if value is None else finite("correct", value)
    if number not in (None, 0, 1):
        raise ValueError(f"correct must be 0, 1 or None, got {number}; part of a point is a reward")
    return number
