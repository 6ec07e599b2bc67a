"""Random tokens and comparisons that the tests of `async_grpo.algo` share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from async_grpo.algo.aggregation import aggregate_loss, row_weights
from async_grpo.algo.losses import Clip

F64 = torch.float64
fast = settings(max_examples=40)
seeds = st.integers(0, 2**31)
clips = st.builds(
    Clip,
    low=st.floats(0.05, 0.4),
    high=st.floats(0.05, 0.6),
    kind=st.sampled_from(["constant", "harmonic", "exponential"]),
    rate=st.floats(0, 1),
    floor=st.floats(0, 1),
    dual=st.sampled_from([None, 1.5, 3.0]),
)


def tokens(seed: int, *shape: int, scale: float = 0.4) -> dict[str, Tensor]:
    """Random arguments of `policy_loss`, with ratios on both sides of the clip interval."""
    random = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(shape, generator=random, dtype=F64)

    anchor = normal() - 2
    return {
        "logprobs": (anchor + scale * normal()).requires_grad_(),
        "anchor_logprobs": anchor,
        "behavior_logprobs": anchor + 0.1 * normal(),
        "advantages": normal(),
        "loss_mask": torch.randint(0, 4, shape, generator=random).clamp(max=1),
        "staleness": torch.randint(0, 7, shape, generator=random),
    }


def close(got: Tensor, want: Tensor, *, rtol: float | None = None, atol: float = 1e-7) -> None:
    """Equal shape and type, and nearly equal values (`torch.testing.assert_close` takes seconds to
    import).
    """
    assert got.shape == want.shape and got.dtype == want.dtype
    rtol = (1e-7 if got.dtype == F64 else 1e-5) if rtol is None else rtol
    assert torch.allclose(got, want, rtol=rtol, atol=atol), f"{got}\n!=\n{want}"


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(loss, of, retain_graph=True)[0]


def slow_factor(lag: int, clip: Clip) -> float:
    factor = {
        "constant": 1.0,
        "harmonic": 1 / (1 + clip.rate * lag),
        "exponential": clip.rate**lag,
    }[clip.kind]
    return max(factor, clip.floor)


def slow_score(pairs: list[tuple[float, float]], score: str, reduce: str) -> float:
    """The score of a response from the log-probs (anchor, behaviour) of its tokens."""
    log_w = [anchor - behavior for anchor, behavior in pairs]
    if score == "w" and reduce in ("sum", "mean"):
        return math.exp(sum(log_w) / (len(log_w) if reduce == "mean" else 1))
    scores = {
        "w": [math.exp(x) for x in log_w],
        "k1": [-x for x in log_w],
        "k2": [x * x / 2 for x in log_w],
        "k3": [math.exp(x) - 1 - x for x in log_w],
        "difference": [math.exp(min(a, 0)) - math.exp(min(b, 0)) for a, b in pairs],
    }[score]
    mean = sum(scores) / len(scores)
    return {"sum": sum(scores), "mean": mean, "min": min(scores), "max": max(scores)}[reduce]


def full_kl(logits: Tensor, ref_logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Exact divergence sum_v p (log p - log q) from the logits [..., V] of both policies at the
    same temperature: [...], in nats.

    Softmax in float32 or better. A token that the policy forbids (logit -inf) adds 0; one that only
    the reference forbids makes the divergence infinite. Gradient to `logits` only. Raises
    ValueError for a shape mismatch or a temperature that is not above 0.
    """
    if logits.shape != ref_logits.shape or not temperature > 0:
        raise ValueError(
            f"logits {tuple(logits.shape)} and {tuple(ref_logits.shape)} at temperature "
            f"{temperature}; shapes equal, above 0"
        )
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_p, log_q = (
        torch.log_softmax(values.to(dtype) / temperature, -1)
        for values in (logits, ref_logits.detach())
    )
    p = log_p.exp()
    return (p * torch.where(p > 0, log_p - log_q, 0)).sum(
        -1
    )  # a probability of 0 has gradient 0 too: `where` keeps inf - inf out


def aggregate(
    token_loss: Tensor,
    mask: Tensor,
    mode: str,
    *,
    max_response_length: int,
    group_index: Sequence[int] | None = None,
) -> Tensor:
    """The aggregated loss of a whole optimizer step held in one tensor: `token_loss` and `mask` are
    [B, T], `group_index` has B entries.
    """
    valid = mask != 0
    weights = row_weights(
        mode,
        valid.sum(-1).tolist(),
        max_response_length=max_response_length,
        group_index=group_index,
    )
    return aggregate_loss(token_loss, valid * token_loss.new_tensor(weights).unsqueeze(-1))
