"""Off-policy correction: the anchor policy against the policy that sampled the tokens.

Runs in: learner ranks. Hides the numerics of the weights. Invariants: weights carry no gradient,
are finite, and are 1 on masked entries whatever those hold; a weight never changes the divisors of
the loss; statistics of a row are in float64, so that comparing them with a threshold does not
depend on the order of the terms.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from async_grpo.algo.catalog import IMPORTANCE
from async_grpo.algo.importance_modes import Ratios
from async_grpo.algo.kl import kl_penalty
from async_grpo.algo.losses import bounded_exp
from async_grpo.algo.rows import check_shapes, row_extremes, row_means, row_sums

LEVELS = ("none", "token", "sequence", "geometric")
SCORES = ("w", "k1", "k2", "k3", "difference")
"""What a rejection compares with its bounds."""
REDUCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "token": lambda values, valid, rows: values,
    "sum": lambda values, valid, rows: row_sums(torch.where(valid, values, 0), rows),
    "mean": row_means,
    "min": partial(row_extremes, largest=False),
    "max": partial(row_extremes, largest=True),
}
"""How scores of tokens become that of a row: name -> (scores, valid, row_index) -> on each token.
"""


@torch.no_grad()
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
    staleness: Tensor | None = None,
    options: Any = None,
) -> Tensor:
    """Weight per token, in the shape of the inputs ([B, T], or packed [N]), detached.

    `level`: "none" is 1 everywhere, "token" is w = exp(anchor - behavior), "sequence" the product
    of w over the row's unmasked tokens and "geometric" its geometric mean, on each of them. `mode`:
    "truncate", "mask", or a plugin's, which may look at the lags `staleness` and has `options`.
    `row_index` [N] int64, the row of each packed token, is needed for packed rows. Raises
    ValueError for an unknown level or mode, an empty interval, a shape mismatch, packed rows
    without `row_index`, or a plugin's weights that are not finite.
    """
    function = IMPORTANCE.function(mode)
    dtype = torch.promote_types(anchor_logprobs.dtype, torch.float32)
    valid, ratio = _ratio(
        anchor_logprobs, behavior_logprobs, loss_mask, level, lower, upper, row_index
    )
    if level == "none":
        return torch.ones_like(anchor_logprobs, dtype=dtype)
    weights = function(Ratios(ratio, valid, lower, upper, staleness, row_index, options))
    weights = torch.where(valid, weights, 1).to(dtype)
    if mode not in IMPORTANCE.built_in:
        check_shapes(anchor_logprobs, weights=weights)
        if not bool(torch.isfinite(weights).all()):
            raise ValueError(f"importance mode {mode!r} returned a weight that is not finite")
    return weights


@torch.no_grad()
def weight_sums(
    weights: Tensor, loss_mask: Tensor, *, level: str, row_index: Tensor | None = None
) -> Tensor:
    """Sum and number of the importance weights of a part of a step, [2] float64: of unmasked tokens
    at level "token", else of rows with such tokens, each with the mean of its own. Add up all parts
    and ranks; the mean is what `normalized_weights` divides by. Raises ValueError for a shape
    mismatch, or packed rows without `row_index`.
    """
    check_shapes(weights, loss_mask=loss_mask)
    valid = loss_mask != 0
    shares = valid.double()
    if level != "token":
        shares = shares / row_sums(shares, row_index).clamp(min=1)
    return torch.stack([(torch.where(valid, weights.double(), 0) * shares).sum(), shares.sum()])


@torch.no_grad()
def normalized_weights(weights: Tensor, loss_mask: Tensor, sums: Tensor) -> Tensor:
    """Divide importance weights by their mean over a whole step, from the total of `weight_sums`; 1
    on masked entries. A weight may then exceed the bound that truncation gave it. Weights that are
    all 0 stay 0.
    """
    mean = sums[0] / sums[1].clamp(min=1)
    divided = weights / torch.where(mean > 0, mean, 1).to(weights.dtype)
    return torch.where(loss_mask != 0, divided, 1)


@torch.no_grad()
def rejection_mask(
    anchor_logprobs: Tensor,
    behavior_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    score: str,
    reduce: str,
    lower: float | None = None,
    upper: float | None = None,
    row_index: Tensor | None = None,
) -> Tensor:
    """1 where lower <= s <= upper, else 0; None is no bound, and 1 stands on masked entries.
    Multiply it into the weights of the loss.

    `score` per token, with x = anchor - behavior: "w" exp(x), "k1" -x, "k2" x^2 / 2, "k3" w - 1 -
    x, "difference" exp(anchor) - exp(behavior), of probabilities. `reduce`: "token" looks at every
    token for itself; "sum", "mean", "min" and "max" of a row's unmasked tokens decide over the
    whole row. Sum and mean of "w" are of its logarithm: the product and the geometric mean. Raises
    ValueError for an unknown score or reduction, an empty interval, a shape mismatch, or packed
    rows without `row_index`.
    """
    if score not in SCORES or reduce not in REDUCTIONS:
        raise ValueError(
            f"rejection by {reduce!r} of {score!r}; choose a score of {', '.join(SCORES)} and a "
            f"reduction of {', '.join(REDUCTIONS)}"
        )
    if lower is not None and upper is not None and not lower <= upper:
        raise ValueError(f"rejection interval [{lower}, {upper}]; it must hold lower <= upper")
    valid, log_ratio = _log_ratio(anchor_logprobs, behavior_logprobs, loss_mask)
    reduced = REDUCTIONS[reduce]
    if score == "w":  # exp grows: of all reductions of the logarithm only sum and mean differ
        found = bounded_exp(reduced(log_ratio, valid, row_index))
    elif score == "difference":
        now, then = (
            torch.where(valid, logprobs.double(), 0).clamp(max=0).exp()
            for logprobs in (anchor_logprobs, behavior_logprobs)
        )
        found = reduced(now - then, valid, row_index)
    else:
        scores = kl_penalty(-log_ratio, torch.zeros_like(log_ratio), score)
        found = reduced(scores, valid, row_index)
    kept = torch.ones_like(valid)
    if lower is not None:
        kept &= found >= lower
    if upper is not None:
        kept &= found <= upper
    kept = torch.where(valid, kept + 0 * found, 1)  # NaN where a score is not finite
    return kept.to(torch.promote_types(anchor_logprobs.dtype, torch.float32))


@torch.no_grad()
def opsm_mask(
    logprobs: Tensor,
    past_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    delta: float,
    row_index: Tensor | None = None,
) -> Tensor:
    """Off-policy sequence mask (arXiv 2512.02556): 0 where the advantage is negative and the row's
    mean of past - current exceeds delta, else 1. `logprobs` are the current policy's,
    `past_logprobs` the sampler's or the anchor's. Raises ValueError for a negative delta or a shape
    mismatch.
    """
    if not delta >= 0:
        raise ValueError(f"opsm delta {delta}; it must be at least 0")
    check_shapes(logprobs, past_logprobs=past_logprobs, advantages=advantages, loss_mask=loss_mask)
    valid = loss_mask != 0
    fallen = row_means(
        torch.where(valid, past_logprobs.double() - logprobs.double(), 0), valid, row_index
    )
    dropped = valid & (advantages < 0) & (fallen > delta)
    return (~dropped).to(torch.promote_types(logprobs.dtype, torch.float32))


@torch.no_grad()
def interpolated_anchor(logprobs: Tensor, behavior_logprobs: Tensor, staleness: Tensor) -> Tensor:
    """Anchor between sampling and current policy by the token's lag k (A-3PO, arXiv 2512.06547),
    detached: behavior + alpha (current - behavior), alpha = (k - 1) / k, and 0 at lag 0 and 1.
    Entries do not mix. Raises ValueError for a shape mismatch.
    """
    check_shapes(logprobs, behavior_logprobs=behavior_logprobs, staleness=staleness)
    lag = staleness.to(torch.promote_types(logprobs.dtype, torch.float32)).clamp(min=0)
    alpha = (lag - 1) / lag.clamp(min=1)
    moved = behavior_logprobs + alpha * (logprobs - behavior_logprobs)
    return torch.where(alpha > 0, moved, behavior_logprobs.to(moved.dtype))


def _ratio(
    anchor_logprobs: Tensor,
    behavior_logprobs: Tensor,
    loss_mask: Tensor,
    level: str,
    lower: float,
    upper: float,
    row_index: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Where the mask is set, and the ratio at this level, float64, clamped before exp."""
    if level not in LEVELS:
        raise ValueError(f"importance level {level!r}; choose one of {', '.join(LEVELS)}")
    if not 0 <= lower <= upper:
        raise ValueError(
            f"importance interval [{lower}, {upper}]; it must hold 0 <= lower <= upper"
        )
    valid, log_ratio = _log_ratio(anchor_logprobs, behavior_logprobs, loss_mask)
    if level == "sequence":
        log_ratio = row_sums(log_ratio, row_index)
    elif level == "geometric":
        log_ratio = row_means(log_ratio, valid, row_index)
    return valid, bounded_exp(log_ratio)


def _log_ratio(
    anchor_logprobs: Tensor, behavior_logprobs: Tensor, loss_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Where the mask is set, and log w of every token, float64, 0 on masked entries."""
    check_shapes(anchor_logprobs, behavior_logprobs=behavior_logprobs, loss_mask=loss_mask)
    valid = loss_mask != 0
    return valid, torch.where(valid, anchor_logprobs.double() - behavior_logprobs.double(), 0)
