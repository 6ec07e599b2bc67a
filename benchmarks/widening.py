"""A clip interval that widens with the lag: an arm of `benchmarks.staleness`, and no loss of the
product, whose intervals never widen.

Runs in: learner ranks, as a plugin (`algorithm.plugins`). A token of lag k may move as far as some
steps of a narrow interval would have let it: from 1 - low (1 + rate k) to 1 + high (1 + rate k), up
to a cap. The lag is read from the interval of the harmonic schedule, which is eps / (1 + rate k).
"""

from __future__ import annotations

import torch

from async_grpo.algo.catalog import register_policy_loss
from async_grpo.algo.losses import LossAndDiagnostics, Terms, bounded_exp, clipped_sides

CAP_LOW, CAP_HIGH = 0.6, 1.5


@register_policy_loss("widening", clipped=True)
def widening(terms: Terms) -> LossAndDiagnostics:
    """l = -min(r A, clip(r, 1 - low, 1 + high) A), its widths growing as the schedule's shrink."""
    factor = terms.clip.low / terms.low
    low = (terms.clip.low * factor).clamp(max=CAP_LOW)
    high = (terms.clip.high * factor).clamp(max=CAP_HIGH)
    ratio, lower, upper = bounded_exp(terms.difference), 1 - low, 1 + high
    below, above = clipped_sides(ratio, terms.advantages, lower, upper)
    held = torch.where(below, lower, torch.where(above, upper, ratio))
    return -terms.advantages * held, {"clipped_low": below, "clipped_high": above}
