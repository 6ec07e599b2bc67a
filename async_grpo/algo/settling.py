"""The learning rate of a run without a known end: halved while data from old policies keeps the
policy swinging.

Pure. The sign is the effective sample size of the trained tokens (`train/ess`), current against
sampling policy. While a run learns from data that is K steps old it falls short of 1 by as much as
the policy moves in K steps; where it stops rising, the policy moves to and fro. The rule is this
project's own; its figures are in docs/explanation/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BLOCK = 16
"""Learner steps that are averaged, at least."""
NEAR = 0.02
"""A shortfall below this does no harm."""
FALLS = 0.8
"""A shortfall that is at most so much of the one before is falling by itself."""
LEAST = 1 / 16
"""Smallest factor: a shortfall that rounding makes does not end a run."""


class SettlingRate:
    """The factor of the learning rate, step after step.

    Steps are averaged in blocks of `BLOCK`, and of more than `max_staleness`, so that a block sees
    what the block before has changed. A block whose shortfall 1 - ESS is above `NEAR` and has not
    fallen to `FALLS` of that of the block before halves the rate. The first `max_staleness` steps,
    in which data ages, are left out.
    """

    def __init__(self, max_staleness: int, state: Mapping[str, Any] | None = None) -> None:
        """state: of another rule (`to_dict`), which this one continues."""
        self._length = max(BLOCK, max_staleness + 1)
        known = state or {}
        self.factor: float = known.get("factor", 1.0)
        self._to_skip: int = known.get("to_skip", max_staleness)
        self._before: float | None = known.get("before")
        self._block: list[float] = list(known.get("block", ()))

    def update(self, ess: float) -> bool:
        """Take the effective sample size of a learner step, in (0, 1]; whether the rate was halved
        by it.
        """
        if self._to_skip:
            self._to_skip -= 1
            return False
        self._block.append(1 - ess)
        if len(self._block) < self._length:
            return False
        before, self._before = self._before, sum(self._block) / len(self._block)
        self._block.clear()
        swings = before is not None and self._before > max(NEAR, FALLS * before)
        if not swings or self.factor <= LEAST:
            return False
        self.factor /= 2
        return True

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {
            "factor": self.factor,
            "to_skip": self._to_skip,
            "before": self._before,
            "block": list(self._block),
        }
