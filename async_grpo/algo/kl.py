"""Penalties for moving away from the reference policy.

Runs in: learner ranks (tensors) and the driver (the adaptive coefficient). Hides the estimators'
numerics. Invariants: only what goes into `exp` is clamped, never a value, so a penalty does not let
go when the drift is worst (k3 does beyond a log ratio of -20, where it is 5e8); entries do not mix,
so whatever a masked entry holds stays there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from async_grpo.algo.losses import MAX_LOG_RATIO, bounded_exp
from async_grpo.algo.rows import check_shapes


def kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor, kind: str, *, anchor_logprobs: Tensor | None = None
) -> Tensor:
    """Estimate the divergence from the reference per token, in the (equal) shape of the inputs, in
    float32 or better; gradient to `logprobs` only.

    With d = log-prob - reference (http://joschu.net/blog/kl-approx.html): "kl" (k1) is d, "abs" is
    |d|, "mse" (k2) is d^2 / 2, "low_var_kl" (k3) is exp(-d) - 1 + d; k1, k2 and k3 are names too. A
    "+" at the end keeps the value and takes the gradient of k2, whose expectation under the policy
    is that of the divergence. `anchor_logprobs`: multiplies the penalty by exp(log-prob - anchor),
    for tokens that the anchor sampled: k1 and k3 with gradient through both factors, which gives
    the expected value and gradient of the divergence (arXiv 2512.02556); k2 and every "+" with a
    detached ratio, which gives that gradient. Entries must be finite: leave masked tokens out.
    Raises ValueError for an unknown kind or a shape mismatch.
    """
    base = kind.removesuffix("+")
    if base not in _ESTIMATORS:
        raise ValueError(f"unknown KL penalty {kind!r}; choose one of {sorted(KL_PENALTIES)}")
    check_shapes(logprobs, ref_logprobs=ref_logprobs, anchor_logprobs=anchor_logprobs)
    log_ratio = _log_ratio(logprobs, ref_logprobs)
    penalty = _ESTIMATORS[base](log_ratio)
    if kind.endswith("+"):
        k2 = _k2(log_ratio)
        penalty = k2 - k2.detach() + penalty.detach()
    if anchor_logprobs is not None:
        ratio = bounded_exp(_log_ratio(logprobs, anchor_logprobs))
        penalty = (ratio.detach() if _slope_of_k2(kind) else ratio) * penalty
    return penalty


@dataclass(slots=True)
class AdaptiveKL:
    """Steer the KL to `target` (per token, in nats) by a coefficient; `horizon` counts responses
    (arXiv 1909.08593 section 2.2). Raises ValueError for a target or horizon that is not above 0.
    """

    coef: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        if not (self.target > 0 and self.horizon > 0 and self.coef >= 0):
            raise ValueError(
                f"KL coefficient {self.coef}, target {self.target}, horizon {self.horizon}; at "
                "least 0, and above 0"
            )

    def update(self, kl: float, rows: int) -> None:
        """Set coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * rows / horizon, after a step of `rows`
        responses with mean KL `kl`. Raises ValueError for a KL that is not finite, which no later
        step mends.
        """
        if not math.isfinite(kl):
            raise ValueError(f"mean KL {kl} of a step; it must be finite")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef = max(self.coef * (1 + error * rows / self.horizon), 0.0)

    def to_dict(self) -> dict[str, float]:
        """Return plain numbers for a checkpoint."""
        return {"coef": self.coef, "target": self.target, "horizon": self.horizon}

    @classmethod
    def from_dict(cls, state: Mapping[str, float]) -> AdaptiveKL:
        """Restore the controller that `to_dict` described."""
        return cls(**state)


def _log_ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """Subtract `other`, in float32 or better, with gradient to `logprobs` only."""
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    return logprobs.to(dtype) - other.detach().to(dtype)


def _slope_of_k2(kind: str) -> bool:
    """Whether the gradient of this penalty is that of k2."""
    return kind.endswith("+") or kind in ("mse", "k2")


def _k1(log_ratio: Tensor) -> Tensor:
    return log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return log_ratio.square() / 2


def _k3(log_ratio: Tensor) -> Tensor:
    log_ratio = log_ratio.clamp(min=-MAX_LOG_RATIO)
    return torch.expm1(-log_ratio) + log_ratio


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": _k1,
    "k1": _k1,
    "abs": torch.abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}
"""Name -> (log-prob - reference) -> estimate per token."""
KL_PENALTIES = frozenset(_ESTIMATORS) | {f"{name}+" for name in _ESTIMATORS}
"""Names that `kl_penalty` knows."""
