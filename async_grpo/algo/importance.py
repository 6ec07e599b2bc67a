"""Off-policy weights: the anchor policy against the policy that sampled the tokens.

Runs in: learner ranks. Hides the numerics of the weights. Invariants: weights carry no gradient, are finite, and are 1 on masked
entries whatever those hold; a weight never changes the divisors of the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_grpo.algo.losses import MAX_LOG_RATIO


def importance_weights(
    anchor_logprobs: Tensor,
    behavior_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    level: str,
    mode: str,
    lower: float,
    upper: float,
    row_index: Tensor | None = None,
) -> Tensor:
    """Weight per token, in the shape of the inputs ([B, T], or packed [N]), detached.

    `level`: "none" is 1 everywhere, "token" is w = exp(anchor - behavior), "sequence" the product of w over the row's unmasked tokens,
    on each of them. `mode`: "truncate" clamps into [lower, upper] (truncated importance sampling), "mask" is 0 outside (IcePop,
    masked importance sampling). `row_index` [N] int64, the row of each packed token, is needed for packed sequences.
    Raises ValueError for an unknown level or mode, an empty interval, or a packed sequence level without `row_index`.
    """
    if level not in ("none", "token", "sequence") or mode not in ("truncate", "mask") or not 0 <= lower <= upper:
        raise ValueError(
            f"importance level {level!r}, mode {mode!r}, interval [{lower}, {upper}]; the level is none, token or sequence, "
            "the mode truncate or mask, and 0 <= lower <= upper"
        )
    dtype = torch.promote_types(anchor_logprobs.dtype, torch.float32)
    if level == "none":
        return torch.ones_like(anchor_logprobs, dtype=dtype)
    valid = loss_mask != 0
    # float64: the sum over a long row is compared with a threshold, and must not depend on the order of its terms
    log_ratio = torch.where(valid, anchor_logprobs.detach().double() - behavior_logprobs.detach().double(), 0)
    if level == "sequence":
        log_ratio = _row_sums(log_ratio, row_index)
    weights = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if mode == "truncate":
        weights = weights.clamp(lower, upper)
    else:
        weights = torch.where((weights >= lower) & (weights <= upper), weights, 0)
    return torch.where(valid, weights, 1).to(dtype)


def _row_sums(values: Tensor, row_index: Tensor | None) -> Tensor:
    """The sum of its row on every entry, in the shape of `values`."""
    if values.dim() == 2:
        return values.sum(-1, keepdim=True).expand_as(values)
    if row_index is None:
        raise ValueError("sequence weights of packed tokens need row_index, the row of each token")
    if values.numel() == 0:
        return values
    return values.new_zeros(int(row_index.max()) + 1).index_add_(0, row_index, values)[row_index]
