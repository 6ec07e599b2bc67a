"""Values of other systems' keys, read strictly.

Runs in: a terminal. Hides YAML 1.1's words, and numbers in texts. Invariant: what is no such value
raises Untranslatable, which says so.
"""

from __future__ import annotations

import math
import re
from typing import Any

from async_grpo.config.docs import show

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "none")


class Untranslatable(Exception):
    """The value has no counterpart; the text says why."""


def boolean(value: Any) -> bool:
    """Return a boolean, also of text. Raises Untranslatable."""
    if (word := str(value).lower()) not in TRUE + FALSE:
        raise Untranslatable(f"{show(value)} is not true or false")
    return word in TRUE


def number(value: Any) -> float:
    """Return a finite number, also of text. Raises Untranslatable."""
    if not isinstance(value, bool):
        try:
            result = float(value)
        except (TypeError, ValueError, OverflowError):
            result = math.nan
        if math.isfinite(result):
            return value if isinstance(value, int | float) else result
    raise Untranslatable(f"{show(value)} is not a number")


def whole(value: Any) -> int:
    """Return an integer. Raises Untranslatable."""
    result = number(value)
    if result != int(result):
        raise Untranslatable(f"{show(value)} is not an integer")
    return int(result)


def natural(value: Any) -> int:
    """Return an integer, 0 for those below, which elsewhere mean never or all."""
    return max(0, whole(value))


def pair(value: Any) -> tuple[float, float]:
    """Return two numbers of a list, or of `lo_hi`. Raises Untranslatable."""
    parts = value.split("_") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        raise Untranslatable(f"{show(value)} is not a pair of numbers")
    return number(parts[0]), number(parts[1])


def text(value: Any) -> str:
    """Return a text. Raises Untranslatable."""
    if not isinstance(value, str) or not value.strip():
        raise Untranslatable(f"{show(value)} is not a text")
    return value.strip()


def texts(value: Any) -> list[str]:
    """Return the texts of a list, or of one text with commas or spaces. Raises Untranslatable."""
    return [text(part) for part in (value if isinstance(value, list) else _parts(text(value)))]


def _parts(value: str) -> list[str]:
    return re.split(r"[\s,]+", value)


def groups_of(rows: float, group_size: float) -> int:
    """Return how many groups so many rows are, at least 1; parts of groups count as one."""
    return max(1, math.ceil(rows / max(1, group_size)))
