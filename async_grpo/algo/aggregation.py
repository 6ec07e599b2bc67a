"""From losses per token to the one number of an optimizer step.

Runs in: the driver (`row_weights`) and learner ranks (`aggregate_loss`). Hides the normalisers. Invariant: every mode is one weight per
row, computed over all rows of the optimizer step, so that the sum of weighted losses over any split of the rows into ranks and
micro-batches is the same number with the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def row_weights(mode: str, row_tokens: Sequence[int], *, max_response_length: int) -> list[float]:
    """Weight of each token of each row, for all rows of one optimizer step; `row_tokens` are tokens in the loss, per row.

    With N tokens and S non-empty rows in total and L_i tokens in the row: "token-mean" 1 / N, "seq-mean-token-sum" 1 / S,
    "seq-mean-token-mean" 1 / (S L_i), "seq-mean-token-sum-norm" 1 / (S max_response_length) (Dr. GRPO, arXiv 2503.20783: a constant
    for the whole run). Rows without tokens have weight 0 and do not count in S. Raises ValueError for an unknown mode.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown loss aggregation {mode!r}; choose one of {sorted(AGGREGATIONS)}")
    if min(row_tokens, default=0) < 0 or max_response_length < 1:
        raise ValueError(f"rows of {list(row_tokens)} tokens with max_response_length {max_response_length}; lengths cannot be negative")
    tokens, rows = sum(row_tokens), sum(length > 0 for length in row_tokens)
    divisor = AGGREGATIONS[mode]
    return [1 / divisor(tokens, rows, length, max_response_length) if length else 0.0 for length in row_tokens]


def aggregate_loss(token_loss: Tensor, token_weights: Tensor) -> Tensor:
    """Scalar sum of loss times weight per token, [N] or any equal shapes; entries of weight 0 give value and gradient 0.

    Add the results of all micro-batches and ranks: the weights hold the normalisers.
    """
    return (torch.where(token_weights != 0, token_loss, 0) * token_weights).sum()


def aggregate(token_loss: Tensor, mask: Tensor, mode: str, *, max_response_length: int) -> Tensor:
    """The aggregated loss of a whole optimizer step held in one tensor: `token_loss` and `mask` are [B, T]."""
    valid = mask != 0
    weights = row_weights(mode, valid.sum(-1).tolist(), max_response_length=max_response_length)
    return aggregate_loss(token_loss, valid * token_loss.new_tensor(weights).unsqueeze(-1))


AGGREGATIONS: dict[str, Callable[[int, int, int, int], int]] = {
    "token-mean": lambda tokens, rows, length, limit: tokens,
    "seq-mean-token-sum": lambda tokens, rows, length, limit: rows,
    "seq-mean-token-mean": lambda tokens, rows, length, limit: rows * length,
    "seq-mean-token-sum-norm": lambda tokens, rows, length, limit: rows * limit,
}
"""Mode -> (N, S, L_i, response budget) -> divisor of a row's token losses."""
