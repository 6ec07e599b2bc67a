"""Policy losses per token, and the clip interval of a token by its lag.

Runs in: learner ranks. Hides the numerics of importance ratios: masked entries may hold anything (NaN and infinity included) and still
give loss 0 and gradient 0, and no log ratio overflows.

Invariants: inputs are sanitised before any arithmetic, because masking a result does not stop 0 * inf in the backward pass; the log
ratio is clamped to [-20, 20] before `exp`; the clip interval never widens with the lag, and at lag 0 it is the constant one; only
`logprobs` receives gradient. Losses are minimised; aggregation over tokens is another module's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Clip:
    """The clip interval [1 - low f(k), 1 + high f(k)] of a token with lag k.

    `kind` of f: "constant" 1, "harmonic" 1 / (1 + rate k), "exponential" rate^k; never below `floor`. `dual`: bound c > 1 of the loss
    for negative advantages (dual clip, arXiv 1912.09729), None for off. Raises ValueError for values that would widen the interval.
    """

    low: float
    high: float
    kind: str = "constant"
    rate: float = 0.0
    floor: float = 0.0
    dual: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in CLIP_SCHEDULES:
            raise ValueError(f"unknown clip schedule {self.kind!r}; choose one of {sorted(CLIP_SCHEDULES)}")
        if self.rate < 0 or (self.kind == "exponential" and self.rate > 1) or not 0 <= self.floor <= 1:
            raise ValueError(
                f"clip schedule {self.kind} with rate {self.rate} and floor {self.floor}; the rate must be at least 0 "
                "(exponential: at most 1) and the floor between 0 and 1, so that the interval never widens with lag"
            )
        if self.low < 0 or self.high < 0 or (self.dual is not None and self.dual <= 1):
            raise ValueError(f"clip widths {self.low} and {self.high} must not be negative and the dual clip {self.dual} must exceed 1")


@dataclass(frozen=True, slots=True)
class Terms:
    """What every loss is made of, all [B, T] or [N], masked entries neutral: log ratio 0, ratio 1, advantage 0, lag 0."""

    logprobs: Tensor
    log_ratio: Tensor
    """Clamped; carries the gradient."""
    advantages: Tensor
    lower: Tensor
    upper: Tensor
    clip: Clip


def clip_bounds(staleness: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """Lower and upper bound of the ratio for tokens with lag `staleness` (any shape, in learner steps; below 0 counts as 0).

    Both sides shrink by the same factor. The result has the type of `staleness` if that is a float, else the default float type.
    """
    lag = staleness if staleness.is_floating_point() else staleness.to(torch.get_default_dtype())
    factor = CLIP_SCHEDULES[clip.kind](lag.clamp(min=0), clip.rate).clamp(min=clip.floor)
    return 1 - clip.low * factor, 1 + clip.high * factor


def policy_loss(
    name: str,
    logprobs: Tensor,
    *,
    anchor_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    staleness: Tensor,
    clip: Clip,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss per token, to be minimised, and detached diagnostics; every tensor is [B, T], or every one is packed [N].

    `logprobs` are the current policy's, with gradient; `anchor_logprobs` the trust region's centre; `behavior_logprobs` the sampler's
    (equal to the anchor when that is the behaviour policy); `advantages` one per token; `staleness` the lag per token in learner
    steps; `weights` off-policy weights, applied without gradient. Where `loss_mask` is 0 the loss and its gradient are exactly 0.
    Diagnostics: `log_ratio` (current - anchor, not clamped), `ratio`, and the bool tensors `clipped_low`, `clipped_high` (the minimum
    chose the clipped side, by negative and positive advantage) and `dual_clipped`.
    Raises ValueError for an unknown name or a shape mismatch.
    """
    if name not in POLICY_LOSSES:
        raise ValueError(f"unknown policy loss {name!r}; choose one of {sorted(POLICY_LOSSES)}")
    others = {
        "anchor_logprobs": anchor_logprobs,
        "behavior_logprobs": behavior_logprobs,
        "advantages": advantages,
        "loss_mask": loss_mask,
        "staleness": staleness,
        **({} if weights is None else {"weights": weights}),
    }
    for key, tensor in others.items():
        if tensor.shape != logprobs.shape:
            raise ValueError(f"{key} has shape {tuple(tensor.shape)}, logprobs {tuple(logprobs.shape)}; they must be equal")
    valid = loss_mask != 0
    dtype = torch.promote_types(logprobs.dtype, torch.float32)

    def clean(tensor: Tensor) -> Tensor:
        return torch.where(valid, tensor.to(dtype), 0)

    current = clean(logprobs)
    log_ratio = current - clean(anchor_logprobs.detach())
    lower, upper = clip_bounds(clean(staleness), clip)
    terms = Terms(current, log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), clean(advantages.detach()), lower, upper, clip)
    loss, diagnostics = POLICY_LOSSES[name](terms)
    if weights is not None:
        loss = loss * clean(weights.detach())
    diagnostics["log_ratio"] = log_ratio
    return torch.where(valid, loss, 0), {key: tensor.detach() for key, tensor in diagnostics.items()}


def _ppo_clip(terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
    """l = -min(r A, clip(r, lower, upper) A) (arXiv 1707.06347); dual clip: l <= -c A where A < 0 (arXiv 1912.09729).

    Written as a choice of the ratio: the same value, and a ratio exactly on a bound keeps its whole gradient, where `minimum` would
    halve it. That matters for an interval that has shrunk to the point 1, at ratio 1.
    """
    ratio, advantages = terms.log_ratio.exp(), terms.advantages
    clipped_low, clipped_high = (advantages < 0) & (ratio < terms.lower), (advantages > 0) & (ratio > terms.upper)
    loss = -advantages * torch.where(clipped_low, terms.lower, torch.where(clipped_high, terms.upper, ratio))
    dual_clipped = torch.zeros_like(advantages, dtype=torch.bool)
    if terms.clip.dual is not None:
        bound = -terms.clip.dual * advantages
        dual_clipped = (advantages < 0) & (loss > bound)
        loss = torch.where(dual_clipped, bound, loss)
    return loss, {"ratio": ratio, "clipped_low": clipped_low, "clipped_high": clipped_high, "dual_clipped": dual_clipped}


POLICY_LOSSES: dict[str, Callable[[Terms], tuple[Tensor, dict[str, Tensor]]]] = {"ppo_clip": _ppo_clip}
"""Name -> terms -> (loss per token, diagnostics)."""

CLIP_SCHEDULES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "constant": lambda lag, rate: torch.ones_like(lag),
    "harmonic": lambda lag, rate: 1 / (1 + rate * lag),
    "exponential": lambda lag, rate: torch.pow(rate, lag),
}
"""Kind -> (lag, rate) -> factor in (0, 1], 1 at lag 0, not increasing."""
