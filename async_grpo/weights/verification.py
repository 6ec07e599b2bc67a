"""When log-probs of an engine are those of the learner.

Runs in: the driver. Two ways of computing the same numbers differ by rounding: in float32 by less than 1e-4, in bfloat16 by some hundredths per
token, whose size is measured on the true weights when the run starts. A check that could not fail shows nothing, so the self-check's perturbation has to
move log-probs by several times what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SELF_CHECK_SCALES = (0.05, 0.1, 0.2, 0.4)
"""Perturbations tried in turn until one moves log-probs by more than CONTRAST times what is allowed."""
CONTRAST = 4.0
EXACT = 1e-4
NOISY_MEAN, NOISY_CORRELATION, NOISE_FACTOR = 0.03, 0.95, 4.0


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two lists of log-probs: largest and mean absolute difference, and their correlation. Not a number if one entry is not."""

    largest: float
    mean: float
    correlation: float

    @classmethod
    def of(cls, served: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> Difference:
        """served, expected: the same number of arrays [L]."""
        ours, theirs = (np.concatenate(list(rows)).astype(np.float64) if rows else np.zeros(0) for rows in (served, expected))
        if not len(ours):
            return cls(0.0, 0.0, 1.0)
        apart, varies = np.abs(ours - theirs), len(ours) > 1 and ours.std() > 0 and theirs.std() > 0
        return cls(float(apart.max()), float(apart.mean()), float(np.corrcoef(ours, theirs)[0, 1]) if varies else 1.0)


@dataclass(slots=True)
class Tolerance:
    """What is allowed. exact: learner and engine compute in float32; `noise`: mean difference measured on the true weights."""

    exact: bool
    noise: float = 0.0

    @property
    def bound(self) -> float:
        """Largest difference (exact), or mean difference."""
        return EXACT if self.exact else max(NOISY_MEAN, NOISE_FACTOR * self.noise)

    def size(self, difference: Difference) -> float:
        """The number that `bound` is about."""
        return difference.largest if self.exact else difference.mean

    def objection(self, difference: Difference) -> str:
        """What is wrong with this difference, or ""."""
        size = self.size(difference)
        if not size <= self.bound:  # not a number is too much
            return f"log-probs differ by {size:.2g} {'at worst' if self.exact else 'on average'}, and {self.bound:.2g} is allowed"
        if not self.exact and not difference.correlation >= NOISY_CORRELATION:
            return f"log-probs correlate by {difference.correlation:.2f} only, and {NOISY_CORRELATION} is the least"
        return ""

    def shows(self, moved: Difference) -> bool:
        """Whether a perturbation that moves log-probs so far tells right from wrong weights."""
        return self.size(moved) > CONTRAST * self.bound
