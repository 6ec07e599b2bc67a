"""Normalisation of shaped rewards before any advantage is computed.

Runs in: the driver, once per learner step, in the order in which batches are consumed. Hides whose
statistics are used: those of the group, of the batch, or of all batches so far.

Invariants: statistics are centred and in float64, the standard deviation is unbiased with EPSILON
added outside the root; equal rewards are never divided by their rounding errors; rows that do not
count (greedy baselines) change no statistic and are transformed like the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from async_grpo.algo.estimators import EPSILON, Groups
from async_grpo.algo.filters import TOLERANCE
from async_grpo.algo.invariance import norm_levels
from async_grpo.algo.rewards import score


@dataclass(slots=True)
class RunningMoments:
    """Accumulate number, mean and sum of centred squares (`m2`) of all values seen so far."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    def update(self, values: Tensor) -> None:
        """Merge a batch of any shape, exactly up to rounding and in any split (Chan, Golub, LeVeque
        1979). Raises ValueError for a value that is not finite.
        """
        batch = values.detach().double().reshape(-1)
        if not bool(torch.isfinite(batch).all()):
            raise ValueError("a reward is not finite; the running moments would never recover")
        if batch.numel() == 0:
            return
        size, mean = batch.numel(), float(batch.mean())
        total, delta = self.count + size, mean - self.mean
        self.m2 += float((batch - mean).square().sum()) + delta * delta * self.count * size / total
        self.mean += delta * size / total
        self.count = total

    @property
    def std(self) -> float:
        """Return the unbiased standard deviation; 0 for fewer than two values."""
        return math.sqrt(self.m2 / (self.count - 1)) if self.count > 1 else 0.0

    def to_dict(self) -> dict[str, float]:
        """Return plain numbers for a checkpoint."""
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    @classmethod
    def from_dict(cls, state: Mapping[str, float]) -> RunningMoments:
        """Restore the moments that `to_dict` described."""
        return cls(int(state["count"]), float(state["mean"]), float(state["m2"]))


@torch.no_grad()
def normalize_rewards(
    rewards: Tensor,
    group_index: Tensor,
    *,
    reward_norm: str | Mapping[Any, str] | None,
    reward_shift: bool = False,
    reward_scale: bool = False,
    counted: Tensor | None = None,
    running: RunningMoments | None = None,
) -> Tensor:
    """Normalise rewards [B], in their type: (R - mean) / (std + EPSILON).

    `reward_norm` says whose statistics: those of the row's `group` (`group_index` [B] int64), of
    all rows (`batch`), or `running`, which is updated with this batch first. `reward_shift` alone
    only subtracts, `reward_scale` alone only divides; both or neither is the full formula. Without
    `reward_norm`, shift and scale use the statistics of all rows, and with neither the rewards stay
    as they are. A mapping says whose `mean` and whose `std`, each one of these or `none`, as where
    it is left out; then there is no shift or scale. `counted` [B] bool: rows that enter the
    statistics; None is all. Statistics without spread (one row, all equal within TOLERANCE; a
    `running` deviation within TOLERANCE) divide nothing, and what a subtraction leaves within
    TOLERANCE is 0; without any row the rewards stay. Raises ValueError for an unknown
    `reward_norm`, `running` without moments, a shape mismatch or a reward that is not finite.
    """
    levels = norm_levels(reward_norm, reward_shift, reward_scale)
    if "running" in levels and running is None:
        raise ValueError("reward_norm running needs the running moments")
    included = torch.ones_like(rewards, dtype=torch.bool) if counted is None else counted != 0
    if rewards.dim() != 1 or rewards.shape != group_index.shape or rewards.shape != included.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, group index {tuple(group_index.shape)} and counted "
            f"{tuple(included.shape)} must all be [B]"
        )
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError("a reward is not finite; drop the group before its rewards are normalised")
    dtype = rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype()
    if rewards.numel() == 0 or levels == (None, None):
        return rewards.to(dtype)
    values = rewards.double()
    if "running" in levels and running is not None:
        running.update(values[included])
    mean_of, std_of = (
        None
        if level is None
        else _statistics(level, rewards.double(), included, group_index, running)
        for level in levels
    )
    if mean_of is not None:
        values = values - mean_of.mean
        values = torch.where(~mean_of.varied & (values.abs() <= TOLERANCE), 0, values)
    if std_of is not None:
        values = torch.where(std_of.varied, values / (std_of.std + EPSILON), values)
    return values.to(dtype)


@torch.no_grad()
def component_scores(
    rewards: Sequence[Mapping[str, float]],
    group_index: Tensor,
    weights: Mapping[str, float],
    *,
    level: Literal["group", "batch"],
) -> list[float]:
    """Weighted sums of components that are normalised one by one, as GDPO does (arXiv 2601.05242):
    each (R - mean) / (std + EPSILON) with the statistics of the rows of its group, or of all rows,
    that have it. A row that lacks a component has no part of it; equal values give 0. Raises
    ValueError where a row has no component with a weight.
    """
    for row in rewards:
        score(row, weights)
    parts: list[list[float]] = [[] for _ in rewards]
    for name, weight in weights.items():
        rows = [place for place, row in enumerate(rewards) if name in row]
        values = torch.tensor([rewards[place][name] for place in rows], dtype=torch.float64)
        normal = normalize_rewards(values, group_index[rows], reward_norm=level)
        for place, value in zip(rows, normal.tolist(), strict=True):
            parts[place].append(weight * value)
    return [math.fsum(part) for part in parts]


class _Statistics(NamedTuple):
    """Mean, unbiased deviation and presence of a spread of what each row is compared with: [B]."""

    mean: Tensor
    std: Tensor
    varied: Tensor


def _statistics(
    level: str,
    values: Tensor,
    included: Tensor,
    group_index: Tensor,
    running: RunningMoments | None,
) -> _Statistics:
    """Statistics of a level, on every row."""
    if level == "running" and running is not None:
        std = torch.full_like(values, running.std)
        return _Statistics(torch.full_like(values, running.mean), std, std > TOLERANCE)
    groups = Groups.of(group_index if level == "group" else torch.zeros_like(group_index))
    count = groups.sum(included.double())
    mean = groups.expand(groups.sum(torch.where(included, values, 0)) / count.clamp(min=1))
    # a row that does not count has no deviation, so that it widens no spread
    centred = torch.where(included, values - mean, 0)
    std = groups.expand((groups.sum(centred.square()) / (count - 1).clamp(min=1)).sqrt())
    return _Statistics(mean, std, groups.varied(centred))
