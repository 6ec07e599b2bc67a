"""Tokens that statistics of the whole optimizer step pick: for `clip_cov`, `kl_cov` and `m2po`, and
those of the highest entropy.

Runs in: learner ranks, after a pass without gradient over all micro-batches of the optimizer step.
Hides how ranks agree: they add up a few sums and exchange only what can still be chosen.
Invariants: the result does not depend on how tokens are split over ranks and micro-batches, nor on
their order or padding (up to the rounding of two float64 means); draws are hashes of what
identifies a token, never a random generator; every rank makes the same calls in the same order,
also without tokens; masked entries may hold anything and are never selected. Nothing here carries
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from async_grpo.algo.catalog import POLICY_LOSSES
from async_grpo.algo.losses import Clip, Terms, clean_terms, clipped_sides, loss_options
from async_grpo.algo.rows import check_shapes

SelectionCollective = Callable[[Tensor], Tensor]


def token_hashes(
    seed: int, step: int, group_ids: Tensor, rows: Tensor, positions: Tensor
) -> Tensor:
    """Return a non-negative int64 hash per token of (seed, step, group, row in the group, position
    in the response), the same on every rank and in every layout; shapes [N] or [B, T], of integers.

    Each part enters by exclusive or, followed by the mixer of SplitMix64 (Steele, Lea, Flood,
    OOPSLA 2014). Raises ValueError for other shapes or types.
    """
    parts = {"group_ids": group_ids, "rows": rows, "positions": positions}
    for name, tensor in parts.items():
        integers = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        if tensor.shape != group_ids.shape or not integers or tensor.dtype == torch.bool:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must hold integers in the "
                f"shape {tuple(group_ids.shape)}"
            )
    state = torch.zeros_like(group_ids, dtype=torch.int64)
    for number in (seed, step):
        state = _mix(state ^ _signed(number))
    for tensor in parts.values():
        state = _mix(state ^ tensor.to(torch.int64))
    return state & (2**63 - 1)


def _signed(value: int) -> int:
    """Return the low 64 bits as a signed integer."""
    return (value + 2**63) % 2**64 - 2**63


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's output, int64 with wrap-around; shifts are logical: sign bits are masked."""
    z = z + _signed(0x9E3779B97F4A7C15)
    for shift, factor in (
        (30, _signed(0xBF58476D1CE4E5B9)),
        (27, _signed(0x94D049BB133111EB)),
        (31, 1),
    ):
        z = (z ^ ((z >> shift) & (2 ** (64 - shift) - 1))) * factor
    return z


@torch.no_grad()
def select_tokens(
    name: str,
    *,
    logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    staleness: Tensor,
    clip: Clip,
    hashes: Tensor,
    options: Any = None,
    reduce: SelectionCollective | None = None,
    gather: SelectionCollective | None = None,
) -> Tensor:
    """Return the `selection` that `policy_loss(name, ...)` needs, in the shape of `logprobs`: all
    tokens of this rank, [B, T] or packed [N].

    Bool for clip_cov and kl_cov, and for m2po the bound T on every entry, in the type that the loss
    computes in. `hashes` are those of `token_hashes`. `reduce` adds a small float64 tensor up over
    the ranks; `gather` joins 1-D tensors of different lengths from all ranks, in the same order on
    each; None: there is one process. Every rank calls them equally often. clip_cov and kl_cov use
    cov = (A - mean A)(current - mean current), with means over all N valid tokens, and select
    `counted_share` of them (arXiv 2505.22617); see `_candidates` and `_second_moment_bound`. Raises
    ValueError for a name that selects nothing, or a shape mismatch.
    """
    selecting = POLICY_LOSSES.where(lambda traits: traits.selects)
    if name not in selecting:
        raise ValueError(
            f"policy loss {name!r} selects no tokens; those that do are {sorted(selecting)}"
        )
    check_shapes(logprobs, hashes=hashes)
    terms = clean_terms(
        logprobs,
        anchor_logprobs=anchor_logprobs,
        behavior_logprobs=anchor_logprobs,
        advantages=advantages,
        loss_mask=loss_mask,
        staleness=staleness,
        clip=clip,
        options=loss_options(name, options),
    )
    reduce, gather = reduce or _alone, gather or _alone
    if name == "m2po":
        return torch.full_like(terms.log_ratio, _second_moment_bound(terms, gather))
    covariance, total = _covariance(terms, reduce)
    candidates, keys = _candidates(name, terms, covariance)
    count, selected = counted_share(terms.options.ratio, total), torch.zeros_like(candidates)
    selected[candidates] = _lowest(keys[candidates], hashes[candidates], count=count, gather=gather)
    return selected


@torch.no_grad()
def select_top_share(
    values: Tensor,
    loss_mask: Tensor,
    *,
    share: float,
    hashes: Tensor,
    reduce: SelectionCollective | None = None,
    gather: SelectionCollective | None = None,
) -> Tensor:
    """Which tokens are among the `counted_share`(share, N) with the largest values of all N valid
    tokens, equal ones by smaller hash: bool, in the shape of `values`. The other arguments are as
    for `select_tokens`. Raises ValueError for a share outside (0, 1], or a shape mismatch.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share {share} of the tokens; it must be above 0 and at most 1")
    check_shapes(values, loss_mask=loss_mask, hashes=hashes)
    valid = loss_mask != 0
    total = int((reduce or _alone)(valid.sum(dtype=torch.float64).reshape(1)))
    selected, keys = torch.zeros_like(valid), -values[valid].double()
    selected[valid] = _lowest(
        keys, hashes[valid], count=counted_share(share, total), gather=gather or _alone
    )
    return selected


def counted_share(share: float, total: int) -> int:
    """Return how many of `total` tokens a share is: at least 1, and rounded down, but a product
    within float error of a whole number is that number (0.29 of 100 is 29).
    """
    return max(1, int(share * total * (1 + 1e-12)))


def _candidates(name: str, terms: Terms, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens may be selected, and their keys: the lowest are, equal ones by smaller hash.

    clip_cov: tokens with lower < cov < upper that PPO does not clip, drawn by hash alone. kl_cov:
    those with the largest cov.
    """
    if name == "kl_cov":
        return terms.valid, -covariance
    low, high = clipped_sides(terms.log_ratio.exp(), terms.advantages, *terms.bounds())
    inside = (covariance > terms.options.lower) & (covariance < terms.options.upper)
    return terms.valid & ~low & ~high & inside, torch.zeros_like(covariance)


def _alone(tensor: Tensor) -> Tensor:
    return tensor


def _covariance(terms: Terms, reduce: SelectionCollective) -> tuple[Tensor, int]:
    """Return (A - mean A)(current - mean current) per token, float64, and the count of all
    ranks.
    """
    advantages, current = terms.advantages.double(), terms.current.double()
    count, first, second = reduce(
        torch.stack([terms.valid.sum(dtype=torch.float64), advantages.sum(), current.sum()])
    ).unbind()
    divisor = count.clamp(min=1)
    return (advantages - first / divisor) * (current - second / divisor), int(count)


def _lowest(keys: Tensor, hashes: Tensor, *, count: int, gather: SelectionCollective) -> Tensor:
    """Which of this rank's [n] entries are in the `count` lowest of all by (key, hash): bool."""
    best = _order(keys, hashes)[:count]
    all_keys, all_hashes = gather(keys[best]), gather(hashes[best])
    if all_keys.numel() == 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    last = _order(all_keys, all_hashes)[:count][-1]
    return (keys < all_keys[last]) | ((keys == all_keys[last]) & (hashes <= all_hashes[last]))


def _order(keys: Tensor, hashes: Tensor) -> Tensor:
    """Return indices that sort by key, then by hash."""
    by_hash = hashes.argsort()
    return by_hash[keys[by_hash].argsort(stable=True)]


def _second_moment_bound(terms: Terms, gather: SelectionCollective) -> float:
    """M2PO's T (arXiv 2510.01161): a bound on |x|, x = current - anchor, that keeps the second
    moment of harmful tokens (A > 0 and x > 0, or A < 0 and x < 0, over all ranks) in the budget.

    Infinity if there are none or the mean of x^2 is within the budget; else the largest observed
    |x| for which the mean of min(x^2, T^2) is below the budget, 0 if there is none.
    """
    x, advantages = terms.log_ratio, terms.advantages
    harmful = ((advantages > 0) & (x > 0)) | ((advantages < 0) & (x < 0))
    sizes = gather(x[harmful].abs()).double().sort().values
    if sizes.numel() == 0:
        return math.inf
    squares = sizes.square()
    below = squares.cumsum(0)  # in sorted order: the same sums whatever the ranks held
    if float(below[-1]) <= terms.options.budget * sizes.numel():
        return math.inf
    larger = torch.arange(sizes.numel() - 1, -1, -1, device=sizes.device)
    within = int((below + larger * squares < terms.options.budget * sizes.numel()).sum())
    return float(sizes[within - 1]) if within else 0.0
