"""Policy losses and clip bounds against slow loops, in value and gradient, and their properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from async_grpo.algo.importance import importance_weights
from async_grpo.algo.kl import kl_penalty
from async_grpo.algo.losses import Clip, clip_bounds, policy_loss
from tests.algo_case import F64, clips, close, fast, gradient, seeds, slow_factor, tokens


def slow_ppo(case: dict[str, Tensor], clip: Clip, weights: Tensor | None) -> Tensor:
    """The loss per token as a loop over scalars, differentiable."""
    flat = {key: tensor.reshape(-1) for key, tensor in case.items()}
    out = []
    for i in range(flat["logprobs"].numel()):
        factor = slow_factor(int(flat["staleness"][i]), clip)
        ratio, a = torch.exp(flat["logprobs"][i] - flat["anchor_logprobs"][i]), flat["advantages"][i]
        low, high = 1 - clip.low * factor, 1 + clip.high * factor
        loss = -min(ratio * a, ratio.clamp(low, high) * a)
        if clip.dual is not None and a < 0:
            loss = min(loss, -clip.dual * a)
        out.append(loss * flat["loss_mask"][i] * (1 if weights is None else weights.reshape(-1)[i]))
    return torch.stack(out).reshape(case["logprobs"].shape)


@given(seed=seeds, clip=clips, weighted=st.booleans(), packed=st.booleans())
@fast
def test_ppo_clip_is_the_formula_in_value_and_gradient(seed: int, clip: Clip, weighted: bool, packed: bool) -> None:
    case = tokens(seed, *((12,) if packed else (3, 4)), scale=0.7)
    weights = case["advantages"].abs() if weighted else None
    loss, _ = policy_loss("ppo_clip", **case, clip=clip, weights=weights)
    expected = slow_ppo(case, clip, weights)
    close(loss, expected)
    close(gradient(loss.sum(), case["logprobs"]), gradient(expected.sum(), case["logprobs"]))


@given(seed=seeds, clip=clips, junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
@fast
def test_masked_entries_may_hold_anything(seed: int, clip: Clip, junk: float) -> None:
    case = tokens(seed, 16)
    clean, clean_diagnostics = policy_loss("ppo_clip", **case, clip=clip, weights=torch.ones(16))
    keep = case["loss_mask"] != 0
    dirty = {
        key: torch.where(keep, tensor.detach(), junk) if tensor.is_floating_point() else tensor.clone() for key, tensor in case.items()
    }
    dirty["staleness"] = torch.where(keep, case["staleness"], -9)
    dirty["logprobs"].requires_grad_()
    loss, diagnostics = policy_loss("ppo_clip", **dirty, clip=clip, weights=torch.where(keep, 1.0, junk))
    assert torch.equal(loss, clean) and not loss[~keep].any()
    grad = gradient(loss.sum(), dirty["logprobs"])
    assert torch.equal(grad, gradient(clean.sum(), case["logprobs"])) and not grad[~keep].any()
    for name, tensor in diagnostics.items():
        assert torch.equal(tensor, clean_diagnostics[name]) and not tensor.requires_grad, name


@given(seed=seeds, clip=clips)
@fast
def test_on_policy_gradient_is_reinforce(seed: int, clip: Clip) -> None:
    case = tokens(seed, 10)
    case["anchor_logprobs"] = case["logprobs"].detach()
    loss, _ = policy_loss("ppo_clip", **case, clip=clip)
    reinforce = -(case["advantages"] * case["logprobs"] * case["loss_mask"]).sum()
    close(gradient(loss.sum(), case["logprobs"]), gradient(reinforce, case["logprobs"]))


@given(seed=seeds, clip=clips)
@fast
def test_only_the_current_policy_gets_gradient(seed: int, clip: Clip) -> None:
    case = tokens(seed, 10)
    others = [case[name].requires_grad_() for name in ("anchor_logprobs", "behavior_logprobs", "advantages")]
    weights = torch.ones(10, dtype=F64, requires_grad=True)
    loss, _ = policy_loss("ppo_clip", **case, clip=clip, weights=weights)
    assert torch.autograd.grad(loss.sum(), [*others, weights], allow_unused=True) == (None,) * 4


@pytest.mark.parametrize("shift", [-200.0, 200.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_extreme_log_ratios_stay_finite(shift: float, advantage: float, dtype: torch.dtype) -> None:
    logprobs = torch.full((3,), shift, dtype=dtype, requires_grad=True)
    zero = torch.zeros(3, dtype=dtype)
    loss, diagnostics = policy_loss(
        "ppo_clip", logprobs, anchor_logprobs=zero, behavior_logprobs=zero, advantages=zero + advantage, loss_mask=torch.ones(3),
        staleness=zero, clip=Clip(0.2, 0.2),
    )  # fmt: skip
    assert torch.isfinite(loss).all() and torch.isfinite(gradient(loss.sum(), logprobs)).all()
    assert torch.isfinite(diagnostics["ratio"]).all() and diagnostics["log_ratio"].tolist() == [shift] * 3
    for level in ("token", "sequence"):
        weights = importance_weights(
            logprobs, zero, torch.ones(3), level=level, mode="truncate", lower=0.0, upper=2.0, row_index=torch.zeros(3, dtype=torch.int64)
        )
        assert weights.tolist() == pytest.approx([2.0 if shift > 0 else 0.0] * 3, abs=1e-6)
    kl = kl_penalty(logprobs, zero, "low_var_kl")
    assert torch.isfinite(kl).all() and torch.isfinite(gradient(kl.sum(), logprobs)).all()


@given(clip=clips)
@fast
def test_clip_bounds_never_widen_with_lag(clip: Clip) -> None:
    lags = torch.arange(12)
    lower, upper = clip_bounds(lags.to(F64), clip)
    factors = torch.tensor([slow_factor(int(k), clip) for k in lags], dtype=F64)
    close(lower, 1 - clip.low * factors)
    close(upper, 1 + clip.high * factors)
    assert (lower.diff() >= 0).all() and (upper.diff() <= 0).all()
    constant = clip_bounds(lags.to(F64), Clip(clip.low, clip.high))
    assert lower[0] == constant[0][0] and upper[0] == constant[1][0]
    assert clip_bounds(lags, clip)[0].dtype == torch.float32
    assert all(torch.equal(aged, fresh) for aged, fresh in zip(clip_bounds(-lags, clip), clip_bounds(0 * lags, clip), strict=True))


@given(seed=seeds, low=st.floats(0.05, 0.4), high=st.floats(0.05, 0.6))
@fast
def test_constant_schedule_ignores_lag(seed: int, low: float, high: float) -> None:
    case = tokens(seed, 10)
    aged, _ = policy_loss("ppo_clip", **case, clip=Clip(low, high))
    fresh, _ = policy_loss("ppo_clip", **{**case, "staleness": torch.zeros(10)}, clip=Clip(low, high))
    assert torch.equal(aged, fresh)


def test_diagnostics_say_which_side_was_clipped() -> None:
    log_ratio = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.0, 2.0]).requires_grad_()
    zero = torch.zeros(6)
    loss, diagnostics = policy_loss(
        "ppo_clip", log_ratio, anchor_logprobs=zero, behavior_logprobs=zero, advantages=torch.tensor([1.0, -1, 1, -1, 1, -1]),
        loss_mask=torch.ones(6), staleness=zero, clip=Clip(0.2, 0.28, dual=3.0),
    )  # fmt: skip
    assert diagnostics["clipped_high"].tolist() == [True, False, False, False, False, False]
    assert diagnostics["clipped_low"].tolist() == [False, False, False, True, False, False]
    assert diagnostics["dual_clipped"].tolist() == [False, False, False, False, False, True]
    clipped = diagnostics["clipped_high"] | diagnostics["clipped_low"] | diagnostics["dual_clipped"]
    assert torch.equal(gradient(loss.sum(), log_ratio) == 0, clipped)


def test_losses_refuse_wrong_settings() -> None:
    for wrong in (
        {"kind": "linear"},
        {"kind": "exponential", "rate": 1.1},
        {"kind": "harmonic", "rate": -1.0},
        {"floor": 2.0},
        {"dual": 1.0},
    ):
        with pytest.raises(ValueError):
            Clip(0.2, 0.2, **wrong)
    case = tokens(0, 4)
    with pytest.raises(ValueError, match="ppo_clip"):
        policy_loss("ppo", **case, clip=Clip(0.2, 0.2))
    with pytest.raises(ValueError, match="advantages"):
        policy_loss("ppo_clip", **{**case, "advantages": torch.ones(3)}, clip=Clip(0.2, 0.2))
