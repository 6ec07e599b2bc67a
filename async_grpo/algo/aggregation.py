"""From losses per token to the one number of an optimizer step.

Runs in: the driver (`row_weights`) and learner ranks (`aggregate_loss`). Hides the normalisers.
Invariant: every mode is one weight per row, computed over all rows of the optimizer step, so that
the sum of weighted losses over any split of the rows into ranks and micro-batches is the same
number with the same gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Totals(NamedTuple):
    """Tokens, rows and prompts with tokens of a step; `limit`: the response budget in tokens."""

    tokens: int
    rows: int
    prompts: int
    limit: int


def row_weights(
    mode: str,
    row_tokens: Sequence[int],
    *,
    max_response_length: int,
    group_index: Sequence[int] | None = None,
) -> list[float]:
    """Weight of each token of each row, for all rows of one optimizer step; `row_tokens` are tokens
    in the loss, per row.

    With N tokens and S non-empty rows in total and L_i tokens in the row: "token-mean" 1 / N,
    "token-sum" 1, "seq-mean-token-sum" 1 / S, "seq-mean-token-mean" 1 / (S L_i),
    "seq-mean-token-sum-norm" 1 / (S max_response_length) (Dr. GRPO, arXiv 2503.20783: a constant
    for the whole run), "prompt-mean" 1 / (prompts with tokens x tokens of the row's prompt) (arXiv
    2510.13786; `group_index`, the prompt of each row, is needed). Rows without tokens have weight 0
    and do not count in S. Raises ValueError for an unknown mode, negative lengths, or a missing or
    mismatched `group_index`.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown loss aggregation {mode!r}; choose one of {sorted(AGGREGATIONS)}")
    if min(row_tokens, default=0) < 0 or max_response_length < 1:
        raise ValueError(
            f"sequences of {list(row_tokens)} tokens with max_response_length "
            f"{max_response_length}; lengths cannot be negative"
        )
    if mode == "prompt-mean" and group_index is None:
        raise ValueError("loss aggregation prompt-mean needs group_index, a prompt per sequence")
    if group_index is not None and len(group_index) != len(row_tokens):
        raise ValueError(
            f"group_index has {len(group_index)} entries for {len(row_tokens)} sequences; it holds "
            "the prompt of each sequence"
        )
    groups = [0] * len(row_tokens) if group_index is None else list(group_index)
    prompts: Counter[int] = Counter()
    for group, length in zip(groups, row_tokens, strict=True):
        prompts[group] += length
    totals = Totals(
        sum(row_tokens),
        sum(length > 0 for length in row_tokens),
        sum(count > 0 for count in prompts.values()),
        max_response_length,
    )
    divisor = AGGREGATIONS[mode]
    return [
        1 / divisor(totals, length, prompts[group]) if length else 0.0
        for length, group in zip(row_tokens, groups, strict=True)
    ]


def aggregate_loss(token_loss: Tensor, token_weights: Tensor) -> Tensor:
    """Scalar sum of loss times weight per token, of equal shapes; weight 0 gives value and gradient
    0. Add up all micro-batches and ranks: the weights hold the normalisers.
    """
    return (torch.where(token_weights != 0, token_loss, 0) * token_weights).sum()


AGGREGATIONS: dict[str, Callable[[Totals, int, int], int]] = {
    "token-mean": lambda totals, length, prompt: totals.tokens,
    "token-sum": lambda totals, length, prompt: 1,
    "seq-mean-token-sum": lambda totals, length, prompt: totals.rows,
    "seq-mean-token-mean": lambda totals, length, prompt: totals.rows * length,
    "seq-mean-token-sum-norm": lambda totals, length, prompt: totals.rows * totals.limit,
    "prompt-mean": lambda totals, length, prompt: totals.prompts * prompt,
}
"""Mode -> (totals of the step, tokens of the row, of its prompt) -> divisor of its token losses."""
