"""The advantage estimators, each with its traits and options: what a row is worth beside the others
of its group.

Runs in: the driver; the settings read the traits, without torch. Hides the group arithmetic.
Invariants: as of `advantages`, which calls these and checks what goes in and comes out. The
estimators with returns are formulas over tokens, which stand there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from async_grpo.algo.catalog import ESTIMATORS, Constants, number
from async_grpo.algo.filters import TOLERANCE
from async_grpo.algo.late import torch

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-6
COMPARED: dict[str, Any] = {"shift": "vanishes", "scale": "follows"}
"""Differences of rewards."""
SCORED: dict[str, Any] = {"shift": "vanishes", "scale": "vanishes", "divides": True}
"""Differences of rewards, divided by a deviation."""
FOLLOWING: dict[str, Any] = {"shift": "follows", "scale": "follows", "compares": False}
"""The rewards themselves."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows by group: `index` [B] int64 in [0, G), `size` [G] float64."""

    index: Tensor
    size: Tensor

    @classmethod
    def of(cls, group_index: Tensor) -> Groups:
        """Find the groups of rows with equal values in `group_index` [B]; any values serve."""
        _, index, counts = torch.unique(group_index, return_inverse=True, return_counts=True)
        return cls(index, counts.double())

    def sum(self, values: Tensor) -> Tensor:
        """Sum per group: [B] -> [G]."""
        return torch.zeros_like(self.size).index_add_(0, self.index, values)

    def largest(self, values: Tensor) -> Tensor:
        """Largest value per group: [B] -> [G]."""
        return torch.zeros_like(self.size).scatter_reduce(
            0, self.index, values, "amax", include_self=False
        )

    def spread(self, values: Tensor) -> Tensor:
        """Largest minus smallest value per group: [B] -> [G]."""
        return self.largest(values) + self.largest(-values)

    def expand(self, values: Tensor) -> Tensor:
        """Return the value of each row's group: [G] -> [B]."""
        return values[self.index]

    def mean(self, values: Tensor) -> Tensor:
        """Mean of each row's group, on the row: [B] -> [B]."""
        return self.expand(self.sum(values) / self.size)

    def std(self, centred: Tensor) -> Tensor:
        """Unbiased standard deviation of each row's group, on the row, from values minus their
        group's mean: [B] -> [B]; 0 in groups of one.
        """
        return self.expand((self.sum(centred.square()) / (self.size - 1).clamp(min=1)).sqrt())

    def varied(self, values: Tensor) -> Tensor:
        """Whether values of the row's group spread by more than TOLERANCE: [B] -> [B] bool."""
        return self.expand(self.spread(values) > TOLERANCE)


@dataclass(frozen=True, slots=True)
class Options:
    """What an estimator per sequence may use. `lengths` is [B] float64; `own`: its options."""

    lengths: Tensor | None
    norm_by_std: bool
    std_level: str
    f_norm: float
    own: Any = None


@ESTIMATORS.register("grpo_vectorized", std_levels=True, **SCORED)
@ESTIMATORS.register("grpo", std_levels=True, **SCORED)
def _grpo(rewards: Tensor, groups: Groups, options: Options) -> Tensor:
    """(R - mean_g) / (std + eps), std of group (arXiv 2402.03300) or batch (arXiv 2508.08221)."""
    centred = rewards - groups.mean(rewards)
    if not options.norm_by_std:
        return centred
    if options.std_level == "group":
        return centred / (groups.std(centred) + EPSILON)
    deviations = {
        "batch": rewards - rewards.mean(),
        "batch_centered": centred,
        "batch_raw": rewards,
    }[options.std_level]
    return centred / ((deviations.square().sum() / max(len(rewards) - 1, 1)).sqrt() + EPSILON)


@ESTIMATORS.register("reinforce_plus_plus_baseline", whitens=True, **COMPARED)
@ESTIMATORS.register("dr_grpo", divides=True, **COMPARED)
def _dr_grpo(rewards: Tensor, groups: Groups, options: Options) -> Tensor:
    """R - mean_g (arXiv 2503.20783); reinforce_plus_plus_baseline starts from the same."""
    return rewards - groups.mean(rewards)


@ESTIMATORS.register("grpo_passk", **SCORED)
def _passk(rewards: Tensor, groups: Groups, options: Options) -> Tensor:
    """Best minus second best reward for the best, 0 for others and in a tie (arXiv 2503.19595)."""
    best = rewards == groups.expand(groups.largest(rewards))
    alone = best & (groups.expand(groups.sum(best.double())) == 1)
    second = groups.expand(groups.largest(torch.where(alone, -torch.inf, rewards)))
    gap = torch.where(alone & second.isfinite(), rewards - second, 0)
    return (
        gap / (groups.std(rewards - groups.mean(rewards)) + EPSILON) if options.norm_by_std else gap
    )


@ESTIMATORS.register("rloo", **COMPARED)
def _rloo(rewards: Tensor, groups: Groups, options: Options) -> Tensor:
    """R minus the mean of the others = n / (n - 1) (R - mean_g) (arXiv 2402.14740)."""
    return (rewards - groups.mean(rewards)) * groups.expand(
        groups.size / (groups.size - 1).clamp(min=1)
    )


@ESTIMATORS.register("opo", lengths=True, **COMPARED)
def _opo(rewards: Tensor, groups: Groups, options: Options) -> Tensor:
    """R - sum_g(L R) / sum_g(L), L the lengths (arXiv 2505.23585); without tokens R - mean_g."""
    centred, lengths = rewards - groups.mean(rewards), options.lengths
    assert lengths is not None, "the trait `lengths` demands them"
    total = groups.expand(groups.sum(lengths)).clamp(min=1)
    # Shares, not a quotient of sums: a row that alone has tokens gets exactly 0, which whitening
    # would magnify otherwise.
    return centred - groups.expand(groups.sum(lengths / total * centred))


@ESTIMATORS.register(
    "gpg",
    losses=("gpg", "reinforce"),
    reason="its factor belongs to a loss without ratio",
    **COMPARED,
)
def _gpg(rewards: Tensor, groups: Groups, options: Options) -> Tensor:
    """alpha (R - mean_g) / f_norm, alpha = B / rows of groups with variance (arXiv 2504.02546)."""
    rows = groups.varied(rewards).sum(dtype=torch.float64).clamp(min=1)
    return (rewards - groups.mean(rewards)) * (len(rewards) / rows) / options.f_norm


@ESTIMATORS.register("maxrl", scale="vanishes")
def _maxrl(rewards: Tensor, groups: Groups, options: Options) -> Tensor:
    """(R - mean_g) / mean_g for rewards of at least 0 (arXiv 2602.02710); 0 where the mean is 0 or
    below.

    A mean under 1e-6 of the group's largest magnitude is 0 up to rounding: only rewards of both
    signs can have it (or a million rows).
    """
    mean = groups.mean(rewards)
    positive = mean > TOLERANCE * groups.expand(groups.largest(rewards.abs()))
    return torch.where(positive, (rewards - mean) / torch.where(positive, mean, 1), 0)


@ESTIMATORS.register("raw", **FOLLOWING)
def _raw(rewards: Tensor, groups: Groups, options: Options) -> Tensor:
    """R."""
    return rewards


@dataclass(frozen=True)
class Asymre(Constants):
    """Constants of the estimator `asymre`."""

    shift: float = number(
        -0.1, "Added to the group mean in the baseline; below 0 keeps off-policy learning stable."
    )


@ESTIMATORS.register(
    "asymre",
    compares=False,
    losses=("asymre",),
    options=Asymre,
    reason="its shifted baseline is meant for a loss without ratio",
    **COMPARED,
)
def _asymre(rewards: Tensor, groups: Groups, options: Options) -> Tensor:
    """R - (mean_g + shift) (arXiv 2506.20520)."""
    shift: float = options.own.shift
    return rewards - groups.mean(rewards) - shift


ESTIMATORS.declare("reinforce", returns=True, **FOLLOWING)
ESTIMATORS.declare("reinforce_plus_plus", whitens=True, returns=True, **FOLLOWING)
ESTIMATORS.declare("remax", compares=False, returns=True, baseline=True, **COMPARED)
ESTIMATORS.declare("turn_grpo", divides=True, returns=True, turns=True)
