"""Penalties for moving away from the reference policy.

Runs in: learner ranks. Hides the estimators' numerics. Invariant: only the input is clamped (log ratio to [-20, 20]), never the value, so
the penalty does not let go when the drift is worst.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from async_grpo.algo.losses import MAX_LOG_RATIO


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Estimate per token of the divergence from the reference, in the shape of the inputs; gradient to `logprobs` only.

    With d = log-prob - reference: "low_var_kl" is k3 = exp(-d) - 1 + d, unbiased, never negative, low variance
    (http://joschu.net/blog/kl-approx.html). Entries must be finite: leave masked tokens out, or overwrite them first.
    Raises ValueError for an unknown kind.
    """
    if kind not in KL_PENALTIES:
        raise ValueError(f"unknown KL penalty {kind!r}; choose one of {sorted(KL_PENALTIES)}")
    return KL_PENALTIES[kind]((logprobs - ref_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def _k3(log_ratio: Tensor) -> Tensor:
    return torch.expm1(-log_ratio) + log_ratio


KL_PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {"low_var_kl": _k3}
"""Name -> (log-prob - reference) -> estimate per token."""
