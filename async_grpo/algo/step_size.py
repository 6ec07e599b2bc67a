"""The size of an optimizer step by how many of its responses really count.

Runs in: learner ranks. Hides how the effective sample size comes together: sums of one update, over
micro-batches and ranks, so that the split does not matter. Invariant: the factor is in (0, 1], and
1 where every response has the same weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_grpo.algo.advantages import Collective
from async_grpo.algo.losses import bounded_exp


class EffectiveStep:
    """The factor sqrt(ESS / B) of an update (VCPO, arXiv 2602.17616): ESS = (sum W)^2 / sum W^2
    over its B responses, W the product of the tokens' current / behavior ratios.
    """

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    @torch.no_grad()
    def add(
        self, logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, row_index: Tensor
    ) -> None:
        """Add the responses of a micro-batch, packed [N]; those without a token in the mask are no
        part of the update.
        """
        valid = mask != 0
        log_ratio = torch.where(valid, logprobs.double() - behavior_logprobs.double(), 0)
        totals = torch.zeros_like(log_ratio).index_add_(0, row_index, log_ratio)
        present = torch.zeros_like(log_ratio).index_add_(0, row_index, valid.double()) > 0
        weights = torch.where(present, bounded_exp(totals), 0)
        self._sums.append(
            torch.stack([weights.sum(), weights.square().sum(), present.double().sum()])
        )

    def factor(self, reduce: Collective) -> float:
        """Return the factor of the update whose responses were added, and begin another. reduce:
        sums a tensor over the ranks, each of which has added at least once.
        """
        total, squares, rows = reduce(torch.stack(self._sums).sum(0)).tolist()
        self._sums.clear()
        return (total * total / (rows * squares)) ** 0.5 if rows else 1.0
