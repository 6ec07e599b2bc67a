"""How fast an engine samples, by how many responses run.

Runs in: rollout actors. Reads the tokens of every step of the engine, each response's next one:

    step with n tokens, dt seconds after the one before it -> sums of n and dt, by size of n

The planner makes the engine's curve of them (`plan.measure`). A step behind a pause, or behind a
moment without requests, is left out: dt is not its own. So is what an engine samples in a step for
nobody; on GPUs with speculation a response may have several tokens of a step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

KINDS = ("s", "tokens", "steps")


def size(tokens: int) -> int:
    """Return the largest number that is counted together with this one: 1, 2, 4, 8, ..."""
    return 1 << (tokens - 1).bit_length()


class Speeds:
    """Adds up steps of an engine."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._since = clock, 0.0
        self._sums: Counter[str] = Counter()

    def stepped(self, tokens: int, *, goes_on: bool) -> None:
        """Note a step. goes_on: responses are left, so that the next one follows at once."""
        now, since = self._clock(), self._since
        self._since = now if goes_on else 0.0
        if since and tokens > 0:
            for kind, more in zip(KINDS, (now - since, tokens, 1), strict=True):
                self._sums[f"engine_{size(tokens)}_{kind}"] += more  # type: ignore[assignment]

    def interrupted(self) -> None:
        """Note that the engine stands still."""
        self._since = 0.0

    def totals(self) -> dict[str, float]:
        """Return sums since the process began: `engine_<size>_s`, `_tokens`, `_steps`."""
        return dict(self._sums)
