"""Advantage estimators: what a response was worth compared with the others of its prompt.

Runs in: the driver (one number per row) and learner ranks. Hides the group arithmetic. Row
estimators turn one reward per row into one advantage per row (`row_advantages`), estimators with
returns rewards per token into advantages per token (`token_advantages`); `compute_advantages` does
either on [B, T] tensors.

Invariants: statistics are centred and in float64, results have the type of the input; the standard
deviation is unbiased, with EPSILON added outside the root; for estimators that compare responses, a
group of one, or of equal rewards (within TOLERANCE), has advantage 0 before whitening and never NaN
or a raw reward; the result does not depend on the row order or the padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from async_grpo.algo.catalog import ESTIMATORS, EstimatorTraits
from async_grpo.algo.estimators import EPSILON, Groups, Options

STD_LEVELS = ("group", "batch", "batch_centered", "batch_raw")
"""Whose standard deviation an estimator divides by."""
Collective = Callable[[Tensor], Tensor]


@torch.no_grad()
def row_advantages(
    estimator: str,
    rewards: Tensor,
    group_index: Tensor,
    *,
    lengths: Tensor | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    adv_std_level: str = "group",
    f_norm: float = 1.0,
    options: Any = None,
) -> Tensor:
    """One advantage per row [B] from one reward per row [B] and the group of each row [B] int64,
    before any whitening.

    Rows come in any order, groups in any size. `lengths` [B]: valid tokens per row; `opo` needs
    them. `norm_adv_by_std_in_grpo` (`grpo`, `grpo_passk`): divide by a standard deviation; false is
    Dr. GRPO's advantage (arXiv 2503.20783). `adv_std_level` (`grpo`): whose: that of the group; or
    over the whole call, of the rewards about their mean (`batch`), about the means of their groups
    (`batch_centered`), or about 0 (`batch_raw`). `f_norm`: divisor of `gpg`. `options`: those of
    `asymre` (None: its defaults), or of a plugin's estimator. Each formula and its paper is at the
    function of the estimator. Raises ValueError for an unknown estimator, one that works on
    returns, a shape mismatch or a number that is not finite.
    """
    traits = ESTIMATORS.require(estimator)
    if traits.returns:
        raise ValueError(
            f"estimator {estimator!r} works on returns per token; use compute_advantages or "
            "token_advantages"
        )
    _check_rows(rewards, group_index, lengths)
    if lengths is None and traits.lengths:
        raise ValueError(
            f"estimator {estimator!r} weighs rewards by response length; give lengths, the valid "
            "tokens of each row [B]"
        )
    _check_std_level(traits, adv_std_level, norm_adv_by_std_in_grpo)
    if not f_norm > 0:
        raise ValueError(f"f_norm is {f_norm}; it must be above 0")
    _check_finite("a reward", rewards)
    dtype = _float_type(rewards)
    if rewards.numel() == 0:
        return rewards.to(dtype)
    groups, values = Groups.of(group_index), rewards.double()
    counts = None if lengths is None else lengths.double()
    own = ESTIMATORS.options(estimator, {}) if options is None else options
    constants = Options(counts, norm_adv_by_std_in_grpo, adv_std_level, f_norm, own)
    out = ESTIMATORS.function(estimator)(values, groups, constants)
    if estimator not in ESTIMATORS.built_in:
        _check_plugin(estimator, out, values)
    return (torch.where(groups.varied(values), out, 0) if traits.compares else out).to(dtype)


@torch.no_grad()
def token_advantages(
    estimator: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    times: Tensor | None = None,
    reward_baselines: Tensor | None = None,
    whiten_advantages: bool | str = False,
    advantage_clip: float | None = None,
    counted: Tensor | None = None,
    reduce: Collective | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [B, T], of the estimators with returns, from rewards per token
    [B, T] and the mask of valid tokens [B, T]; masked entries are 0 whatever they held.

    `returns` are G_t of `discounted_returns`, with its `times`. `reinforce`: G_t.
    `reinforce_plus_plus` (arXiv 2501.03262): G_t, always whitened. `remax` (arXiv 2310.10505): G_t
    minus `reward_baselines` [B], the reward of the greedy response to the row's prompt.
    `turn_grpo`: G_t minus `reward_baselines` too, both scaled as `trajectory_baselines` says.
    `counted`, `reduce`: see `whiten`. Raises ValueError for an estimator without returns, a missing
    or useless baseline, a shape mismatch, a reward that is not finite, or a gamma or clip out of
    range.
    """
    traits = ESTIMATORS.require(estimator)
    if not traits.returns:
        raise ValueError(
            f"estimator {estimator!r} gives one advantage per sequence; use compute_advantages or "
            "row_advantages"
        )
    if (traits.baseline or traits.turns) != (reward_baselines is not None):
        whose = "each sequence's greedy response" if traits.baseline else "the group's trajectories"
        need = (
            f"needs reward_baselines, the reward of {whose} [B]"
            if traits.baseline or traits.turns
            else "has no use for reward_baselines"
        )
        raise ValueError(f"estimator {estimator!r} {need}")
    valid = _valid(token_level_rewards, response_mask)
    _check_finite("a token reward", torch.where(valid, token_level_rewards, 0))
    returns = discounted_returns(token_level_rewards.double(), valid, gamma, times)
    advantages = returns
    if reward_baselines is not None:
        if reward_baselines.shape != returns.shape[:1]:
            raise ValueError(
                f"reward_baselines {tuple(reward_baselines.shape)} must be [B], with B = "
                f"{len(returns)}"
            )
        _check_finite("a baseline's reward", reward_baselines)
        advantages = torch.where(valid, returns - reward_baselines.double().unsqueeze(-1), 0)
    advantages = finish_advantages(
        advantages,
        valid,
        whiten_advantages=whiten_advantages or traits.whitens,
        advantage_clip=advantage_clip,
        counted=counted,
        reduce=reduce,
    )
    dtype = _float_type(token_level_rewards)
    return advantages.to(dtype), returns.to(dtype)


@torch.no_grad()
def compute_advantages(
    estimator: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    *,
    gamma: float = 1.0,
    reward_baselines: Tensor | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    adv_std_level: str = "group",
    f_norm: float = 1.0,
    options: Any = None,
    whiten_advantages: bool | str = False,
    advantage_clip: float | None = None,
    reduce: Collective | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [B, T], of any estimator, from rewards per token [B, T], valid
    tokens [B, T] and groups [B]; masked entries are 0.

    Row estimators: a row's reward is the sum over its valid tokens, its advantage stands on each of
    them, and `returns` are the advantages before whitening and clipping. Options: see
    `row_advantages`, `token_advantages`, `finish_advantages`. A group must not be split over calls;
    leave truncated responses in this mask, they count in their group. Raises ValueError like those.
    """
    traits = ESTIMATORS.require(estimator)
    if traits.returns:
        return token_advantages(
            estimator,
            token_level_rewards,
            response_mask,
            gamma=gamma,
            reward_baselines=reward_baselines,
            whiten_advantages=whiten_advantages,
            advantage_clip=advantage_clip,
            reduce=reduce,
        )
    _check_no_returns(estimator, gamma, reward_baselines)
    valid = _valid(token_level_rewards, response_mask)
    lengths, rewards = valid.sum(-1).double(), torch.where(valid, token_level_rewards, 0).double()
    before = row_advantages(
        estimator,
        rewards.sum(-1),
        group_index,
        lengths=lengths,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        adv_std_level=adv_std_level,
        f_norm=f_norm,
        options=options,
    )
    after = finish_advantages(
        before,
        lengths,
        whiten_advantages=whiten_advantages or traits.whitens,
        advantage_clip=advantage_clip,
        reduce=reduce,
    )
    after, before = (torch.where(valid, one.unsqueeze(-1), 0) for one in (after, before))
    return after.to(_float_type(token_level_rewards)), before.to(_float_type(token_level_rewards))


@torch.no_grad()
def trajectory_baselines(
    rewards: Tensor, group_index: Tensor, *, norm_adv_by_std_in_grpo: bool = True
) -> tuple[Tensor, Tensor]:
    """Baseline and scale, both [B], of `turn_grpo`, from the reward of each whole trajectory [B]
    and its group [B]: the advantage of a turn is scale * (its return - baseline).

    The baseline is the group's mean, the same for all turns: a mean per turn index would be biased
    where the policy decides how many turns there are. The scale is 1, or with
    `norm_adv_by_std_in_grpo` one over the group's deviation; 0 in groups of one, or of equal
    rewards. With one turn this is `grpo`. Raises ValueError like `row_advantages`.
    """
    _check_rows(rewards, group_index, None)
    _check_finite("a reward", rewards)
    groups, values = Groups.of(group_index), rewards.double()
    baselines = groups.mean(values)
    scales = torch.ones_like(values)
    if norm_adv_by_std_in_grpo:
        scales = 1 / (groups.std(values - baselines) + EPSILON)
    return baselines, torch.where(groups.varied(values), scales, 0)


@torch.no_grad()
def place_rewards(
    rewards: Tensor, response_mask: Tensor, *, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """Rewards per token [B, T] from one per row [B], on the row's last valid token, minus kl_coef *
    kl on every valid token; all others hold 0.

    `kl` [B, T] is the value of a KL estimate per token. Raises ValueError for a shape mismatch.
    """
    if rewards.dim() != 1 or response_mask.dim() != 2 or len(rewards) != len(response_mask):
        raise ValueError(
            f"rewards {tuple(rewards.shape)} must be [B] and the response mask "
            f"{tuple(response_mask.shape)} [B, T]"
        )
    valid = response_mask != 0
    last = valid & (valid.flip(-1).cumsum(-1).flip(-1) == 1)
    placed = torch.where(last, rewards.double().unsqueeze(-1), 0)
    if kl is not None:
        if kl.shape != valid.shape:
            raise ValueError(
                f"kl {tuple(kl.shape)} must have the shape of the response mask "
                f"{tuple(valid.shape)}"
            )
        placed = placed - kl_coef * torch.where(valid, kl.double(), 0)
    return placed.to(_float_type(rewards))


@torch.no_grad()
def discounted_returns(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float, times: Tensor | None = None
) -> Tensor:
    """G_t = sum over s >= t of gamma^(time_s - time_t) * reward_s: [B, T] -> [B, T], 0 on masked
    tokens (arXiv 2501.03262). Loops over T.

    times [B, T]: when a token comes, never falling; by default how many valid tokens there are up
    to it, so that a hole in the mask, which holds no reward, does not discount what comes behind
    it. Raises ValueError for a shape mismatch or a gamma outside [0, 1].
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma}; it must be between 0 and 1")
    valid = _valid(token_level_rewards, response_mask)
    returns = torch.where(valid, token_level_rewards, 0).double()
    times = valid.cumsum(1) if times is None else times
    factors = torch.full_like(returns[:, 1:], gamma) ** times.diff(dim=1)
    for t in reversed(range(returns.shape[1] - 1)):
        returns[:, t] += factors[:, t] * returns[:, t + 1]
    return torch.where(valid, returns, 0).to(_float_type(token_level_rewards))


@torch.no_grad()
def whiten(
    values: Tensor,
    weights: Tensor,
    *,
    keep_mean: bool = False,
    counted: Tensor | None = None,
    reduce: Collective | None = None,
) -> Tensor:
    """(x - mu) / (std + EPSILON) with mean and unbiased deviation over all valid tokens of all
    ranks, plus mu with `keep_mean`; 0 where the weight is 0.

    `weights`, shaped like `values`: a mask of tokens, or each row's token count, which equals
    whitening its tokens. `counted` (0 or 1, same shape): entries that enter the moments on this
    rank, so that one held by two ranks counts once. `reduce` sums a small float64 tensor over the
    ranks (None: one process); it is called twice, also on a rank without entries. One valid token
    or none gives 0 (plus mu). Raises ValueError for a shape mismatch.
    """
    for name, tensor in (("weights", weights), ("counted", counted)):
        if tensor is not None and tensor.shape != values.shape:
            raise ValueError(
                f"{name} {tuple(tensor.shape)} must have the shape of the values "
                f"{tuple(values.shape)}"
            )
    valid = weights != 0
    x = torch.where(valid, values, 0).double()
    mass = weights.double() if counted is None else weights.double() * (counted != 0)
    count, total = _sum_ranks(torch.stack([mass.sum(), (mass * x).sum()]), reduce).unbind()
    centred = x - total / count.clamp(min=1)
    moments = torch.stack([(mass * centred.square()).sum(), (mass * centred).sum()])
    squares, rest = _sum_ranks(moments, reduce).unbind()
    rounding = rest / count.clamp(min=1)  # what the mean has lost: EPSILON would magnify it
    variance = (squares - count * rounding.square()).clamp(min=0) / (count - 1).clamp(min=1)
    whitened = (centred - rounding) / (variance.sqrt() + EPSILON)
    mean = total / count.clamp(min=1) + rounding if keep_mean else torch.zeros_like(total)
    whitened = mean + torch.where(count > 1, whitened, 0)
    return torch.where(valid, whitened, 0).to(_float_type(values))


@torch.no_grad()
def finish_advantages(
    advantages: Tensor,
    weights: Tensor,
    *,
    whiten_advantages: bool | str,
    advantage_clip: float | None,
    counted: Tensor | None = None,
    reduce: Collective | None = None,
) -> Tensor:
    """Take the last two steps, in order: `whiten` if asked for, then clamp to +-advantage_clip
    (None: off). whiten_advantages: false, `shift` (true says the same), or `keep_mean`. Raises
    ValueError for another word, and a clip that is not above 0.
    """
    if isinstance(whiten_advantages, str) and whiten_advantages not in ("shift", "keep_mean"):
        raise ValueError(
            f"whiten_advantages is {whiten_advantages!r}; choose true, false, shift or keep_mean"
        )
    if advantage_clip is not None and not advantage_clip > 0:
        raise ValueError(
            f"advantage_clip is {advantage_clip}; it must be above 0, or null for none"
        )
    if whiten_advantages:
        advantages = whiten(
            advantages,
            weights,
            keep_mean=whiten_advantages == "keep_mean",
            counted=counted,
            reduce=reduce,
        )
    return (
        advantages if advantage_clip is None else advantages.clamp(-advantage_clip, advantage_clip)
    )


def _sum_ranks(tensor: Tensor, reduce: Collective | None) -> Tensor:
    return tensor if reduce is None else reduce(tensor)


def _float_type(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.is_floating_point() else torch.get_default_dtype()


def _check_rows(rewards: Tensor, group_index: Tensor, lengths: Tensor | None) -> None:
    if rewards.dim() != 1 or rewards.shape != group_index.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and group index {tuple(group_index.shape)} must both "
            "be [B]"
        )
    if lengths is not None and lengths.shape != rewards.shape:
        raise ValueError(
            f"lengths {tuple(lengths.shape)} must be [B] like the rewards {tuple(rewards.shape)}"
        )


def _check_no_returns(estimator: str, gamma: float, baselines: Tensor | None) -> None:
    if gamma != 1:
        raise ValueError(
            f"gamma is {gamma}, but estimator {estimator!r} has no returns per token; it must be 1"
        )
    if baselines is not None:
        raise ValueError(f"estimator {estimator!r} has no use for reward_baselines")


def _check_plugin(estimator: str, advantages: Tensor, rewards: Tensor) -> None:
    if advantages.shape != rewards.shape:
        raise ValueError(
            f"estimator {estimator!r} returned {tuple(advantages.shape)} for rewards "
            f"{tuple(rewards.shape)}; it must return one advantage per sequence"
        )
    _check_finite(f"an advantage of {estimator!r}", advantages)


def _valid(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    if token_level_rewards.dim() != 2 or token_level_rewards.shape != response_mask.shape:
        raise ValueError(
            f"token rewards {tuple(token_level_rewards.shape)} and response mask "
            f"{tuple(response_mask.shape)} must both be [B, T]"
        )
    return response_mask != 0


def _check_std_level(traits: EstimatorTraits, level: str, norm_by_std: bool) -> None:
    if level not in STD_LEVELS:
        raise ValueError(f"adv_std_level is {level!r}; choose {' or '.join(STD_LEVELS)}")
    if level != "group" and not (traits.std_levels and norm_by_std):
        raise ValueError(
            f"adv_std_level {level} belongs to the estimator grpo with norm_adv_by_std_in_grpo"
        )


def _check_finite(what: str, values: Tensor) -> None:
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{what} is not finite; drop the group before its advantages are computed")
