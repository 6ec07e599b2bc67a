"""Advantage estimators: what a response was worth compared with the others of its prompt.

Runs in: the driver (one number per row) and learner ranks. Hides the group arithmetic: groups may come in any order and size.

Invariants: statistics are centred and in float64; the standard deviation is unbiased, with EPSILON added outside the root; a group of
one, or one whose rewards are all equal, has advantage 0 and never NaN or a raw reward; the result does not depend on the row order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from async_grpo.algo.filters import TOLERANCE

EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows by group: `index` [B] int64 in [0, G), `size` [G] float64."""

    index: Tensor
    size: Tensor

    @classmethod
    def of(cls, group_index: Tensor) -> Groups:
        """Groups of rows with equal values in `group_index` [B]; the values themselves do not matter."""
        _, index, counts = torch.unique(group_index, return_inverse=True, return_counts=True)
        return cls(index, counts.double())

    def sum(self, values: Tensor) -> Tensor:
        """Sum per group: [B] -> [G]."""
        return torch.zeros_like(self.size).index_add_(0, self.index, values)

    def spread(self, values: Tensor) -> Tensor:
        """Largest minus smallest value per group: [B] -> [G]."""
        empty = torch.zeros_like(self.size)
        high = empty.scatter_reduce(0, self.index, values, "amax", include_self=False)
        return high - empty.scatter_reduce(0, self.index, values, "amin", include_self=False)

    def expand(self, values: Tensor) -> Tensor:
        """The value of each row's group: [G] -> [B]."""
        return values[self.index]


def row_advantages(estimator: str, rewards: Tensor, group_index: Tensor, *, norm_adv_by_std_in_grpo: bool = True) -> Tensor:
    """One advantage per row [B] from one reward per row [B] and the group of each row [B] int64.

    Rows come in any order, groups in any size. `norm_adv_by_std_in_grpo=False` is Dr. GRPO's advantage (arXiv 2503.20783).
    Raises ValueError for an unknown estimator, a shape mismatch or a reward that is not finite.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown advantage estimator {estimator!r}; choose one of {sorted(ESTIMATORS)}")
    if rewards.dim() != 1 or rewards.shape != group_index.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group index {tuple(group_index.shape)} must both be [B]")
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError("a reward is not finite; drop the group before its advantages are computed")
    dtype = rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype()
    if rewards.numel() == 0:
        return rewards.to(dtype)
    groups = Groups.of(group_index)
    return ESTIMATORS[estimator](rewards.detach().double(), groups, norm_adv_by_std_in_grpo).to(dtype)


def compute_advantages(
    estimator: str, token_level_rewards: Tensor, response_mask: Tensor, group_index: Tensor, *, norm_adv_by_std_in_grpo: bool = True
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [B, T], from rewards per token [B, T], the mask of valid response tokens [B, T] and groups [B].

    A row's reward is the sum over its valid tokens, its advantage stands on each of them, and masked entries are 0 whatever they held.
    Leave truncated responses in this mask even if the loss leaves them out: they count in the statistics of their group.
    """
    valid = response_mask != 0
    rewards = torch.where(valid, token_level_rewards, 0).sum(-1)
    rows = row_advantages(estimator, rewards, group_index, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo)
    advantages = torch.where(valid, rows.unsqueeze(-1), 0)
    return advantages, advantages.clone()


def _grpo(rewards: Tensor, groups: Groups, norm_by_std: bool) -> Tensor:
    """A = (R - mean_g) / (std_g + eps) (arXiv 2402.03300); without the division: arXiv 2503.20783."""
    centred = rewards - groups.expand(groups.sum(rewards) / groups.size)
    varied = groups.spread(rewards) > TOLERANCE
    if norm_by_std:
        std = (groups.sum(centred.square()) / (groups.size - 1).clamp(min=1)).sqrt()
        centred = centred / (groups.expand(std) + EPSILON)
    return torch.where(groups.expand(varied), centred, 0)


ESTIMATORS: dict[str, Callable[[Tensor, Groups, bool], Tensor]] = {"grpo": _grpo}
"""Name -> (rewards [B] float64, groups, norm_adv_by_std_in_grpo) -> advantages [B] float64."""
