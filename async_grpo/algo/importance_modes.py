"""The importance modes: what becomes of the ratio of anchor to behaviour policy.

Runs in: learner ranks; the settings read the names, without torch. Hides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from async_grpo.algo.catalog import IMPORTANCE

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ratios:
    """What an importance mode makes weights of; tensors have one shape, [B, T] or packed [N].

    `ratio`: w on every token at the configured level, float64, 1 on masked entries. `staleness`:
    the staleness per token in learner steps, None where the caller has none.
    """

    ratio: Tensor
    valid: Tensor
    lower: float
    upper: float
    staleness: Tensor | None
    row_index: Tensor | None
    options: Any


@IMPORTANCE.register("truncate")
def _truncate(ratios: Ratios) -> Tensor:
    """Clamped into [lower, upper] (truncated importance sampling)."""
    return ratios.ratio.clamp(ratios.lower, ratios.upper)


@IMPORTANCE.register("mask")
def _mask(ratios: Ratios) -> Tensor:
    """0 outside [lower, upper] (IcePop, masked importance sampling)."""
    inside = (ratios.ratio >= ratios.lower) & (ratios.ratio <= ratios.upper)
    return ratios.ratio * inside  # NaN stays NaN
