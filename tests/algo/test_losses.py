"""Every policy loss and the clip bounds against slow loops, in value and gradient, and their
properties.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from async_grpo.algo.catalog import POLICY_LOSSES, Constants
from async_grpo.algo.importance import importance_weights
from async_grpo.algo.kl import kl_penalty
from async_grpo.algo.losses import (
    Clip,
    ClipCov,
    Dppo,
    KlCov,
    M2po,
    Opmd,
    Sapo,
    clip_bounds,
    policy_loss,
)
from tests.support.algo_case import F64, clips, close, fast, gradient, seeds, slow_factor, tokens

SELECTING = POLICY_LOSSES.where(lambda traits: traits.selects)
SEQUENCE = POLICY_LOSSES.where(lambda traits: traits.rows)
few = settings(max_examples=12)  # for each of the losses
JUNK = [math.nan, math.inf, -math.inf, 1e30]
NARROW = {
    "dppo": Dppo(low=0.03, high=0.05),
    "sapo": Sapo(tau_pos=1.3, tau_neg=0.8),
    "opmd": Opmd(tau=0.7),
    "kl_cov": KlCov(coef=0.3),
}
"""Constants at which random tokens lie on both sides."""
VARIANTS = {name: (name, NARROW.get(name)) for name in POLICY_LOSSES} | {
    "dppo, capped": ("dppo", replace(NARROW["dppo"], ratio_cap=1.1)),
    "dppo, kl": ("dppo", Dppo(divergence="kl", low=0.005, high=0.01)),
    "dppo, kl, capped": ("dppo", Dppo(divergence="kl", low=0.005, high=0.01, ratio_cap=1.1)),
    "opmd, sequence": ("opmd", replace(NARROW["opmd"], level="sequence")),
}
by_loss = pytest.mark.parametrize("variant", VARIANTS)


def select(name: str, seed: int, *shape: int) -> Tensor | None:
    """A random selection for a loss that needs one."""
    random = torch.Generator().manual_seed(seed + 1)
    if name == "m2po":
        return torch.full(shape, [0.0, 0.3, 1.0, math.inf][seed % 4], dtype=F64)
    return torch.randint(0, 2, shape, generator=random) == 1 if name in SELECTING else None


def example(variant: str, seed: int, *shape: int) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Random tokens [B, T], and the other arguments of the loss."""
    name, options = VARIANTS[variant]
    extra = {"selection": select(name, seed, *shape), "options": options}
    return tokens(seed, *shape, scale=0.7), extra


def slow_clipped(
    ratio: Tensor, a: Tensor, low: float, high: float, dual: float | None = None
) -> Tensor:
    loss = -min(ratio * a, ratio.clamp(low, high) * a)
    return min(loss, -dual * a) if dual is not None and a < 0 else loss


def slow_dppo(cur: Tensor, prox: Tensor, a: Tensor, options: Dppo) -> Tensor:
    p, q = min(math.exp(cur.item()), 1.0), min(math.exp(prox.item()), 1.0)
    distance = abs(p - q)
    if options.divergence == "kl":
        distance = (q * math.log(q / p) if q else 0.0) + (
            (1 - q) * math.log((1 - q) / (1 - p)) if q < 1 and p < 1 else 0.0
        )
        distance = math.inf if q < 1 and p == 1 else distance
    if (a > 0 and p > q and distance > options.high) or (
        a < 0 and p < q and distance > options.low
    ):
        return cur * 0
    ratio = torch.exp(cur - prox)
    return (
        -ratio * a if options.ratio_cap is None else -min(ratio.item(), options.ratio_cap) * a * cur
    )


def slow_loss(
    name: str, case: dict[str, Tensor], clip: Clip, selection: Tensor | None, options: Any
) -> Tensor:
    """The loss per token of [B, T] as a loop over scalars, straight from the formulas,
    differentiable.
    """
    loss = case["logprobs"] * 0
    for i in range(loss.shape[0]):
        valid = [t for t in range(loss.shape[1]) if case["loss_mask"][i, t]]
        cur, prox, beh = (
            {t: case[f"{key}logprobs"][i, t] for t in valid} for key in ("", "anchor_", "behavior_")
        )
        mean = sum(cur[t] - prox[t] for t in valid) / max(len(valid), 1)
        drift = sum(cur[t] - beh[t] for t in valid)
        clipped = {}
        for t in valid:
            a, x, factor = (
                case["advantages"][i, t],
                cur[t] - prox[t],
                slow_factor(int(case["staleness"][i, t]), clip),
            )
            clipped[t] = min(x, clip.high * factor) if a > 0 else max(x, -clip.low * factor)
        for t in valid:
            a, ratio, factor = (
                case["advantages"][i, t],
                torch.exp(cur[t] - prox[t]),
                slow_factor(int(case["staleness"][i, t]), clip),
            )
            low, high = 1 - clip.low * factor, 1 + clip.high * factor
            if name == "ppo_clip":
                value = slow_clipped(ratio, a, low, high, clip.dual)
            elif name == "gspo":
                value = slow_clipped(torch.exp(mean), a, low, high)
            elif name == "gspo_token":
                value = slow_clipped(
                    torch.exp(mean).item() * torch.exp(cur[t] - cur[t].item()), a, low, high
                )
            elif name == "cispo":
                value = -min(max(ratio.item(), low), high) * a * cur[t]
            elif name == "sapo":
                tau = options.tau_pos if a > 0 else options.tau_neg
                value = -a * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
            elif name == "gmpo":
                value = -a * torch.exp(sum(clipped.values(), 0 * cur[t]) / len(valid))
            elif name == "clip_cov":
                value = slow_clipped(ratio, a, low, high) * (0 if selection[i, t] else 1)
            elif name == "kl_cov":
                value = -ratio * a + (
                    options.coef * abs(cur[t] - prox[t]) if selection[i, t] else 0
                )
            elif name == "m2po":
                bound = selection[i, t].item()
                value = slow_clipped(
                    ratio, a, min(low, math.exp(-bound)), max(high, math.exp(bound)), clip.dual
                )
            elif name == "dppo":
                value = slow_dppo(cur[t], prox[t], a, options)
            elif name == "opmd":
                square = (
                    drift**2 / len(valid) if options.level == "sequence" else (cur[t] - beh[t]) ** 2
                )
                value = -a * cur[t] + options.tau / 2 * square
            elif name == "topr":
                value = -(1 if a >= 0 else min(math.exp(drift.item()), 1)) * a * cur[t]
            else:
                value = -a * cur[t]
            loss[i, t] = value
    return loss


@by_loss
@given(seed=seeds, clip=clips, weighted=st.booleans())
@few
def test_losses_are_their_formulas_in_value_and_gradient(
    variant: str, seed: int, clip: Clip, weighted: bool
) -> None:
    name, options = VARIANTS[variant]
    case, extra = example(variant, seed, 3, 4)
    weights = (
        torch.rand(3, 4, generator=torch.Generator().manual_seed(seed), dtype=F64)
        if weighted
        else None
    )
    loss, diagnostics = policy_loss(name, **case, clip=clip, weights=weights, **extra)
    expected = slow_loss(name, case, clip, extra["selection"], options) * (
        1 if weights is None else weights
    )
    close(loss, expected)
    close(gradient(loss.sum(), case["logprobs"]), gradient(expected.sum(), case["logprobs"]))
    assert set(diagnostics) == {"log_ratio", "ratio", "clipped_low", "clipped_high", "dual_clipped"}
    for key, tensor in diagnostics.items():
        assert (
            tensor.shape == loss.shape
            and (tensor[case["loss_mask"] == 0] == (key == "ratio")).all()
        ), key


@by_loss
@given(seed=seeds, clip=clips, junk=st.sampled_from(JUNK))
@few
def test_masked_entries_may_hold_anything(variant: str, seed: int, clip: Clip, junk: float) -> None:
    case, extra = example(variant, seed, 3, 5)
    case["loss_mask"][1] = 0
    name, keep = VARIANTS[variant][0], case["loss_mask"] != 0
    clean, clean_diagnostics = policy_loss(
        name, **case, clip=clip, weights=torch.ones(3, 5), **extra
    )
    dirty = {
        key: torch.where(keep, tensor.detach(), junk)
        if tensor.is_floating_point()
        else tensor.clone()
        for key, tensor in case.items()
    }
    dirty["staleness"] = torch.where(keep, case["staleness"], -9)
    dirty["logprobs"].requires_grad_()
    if name in SELECTING:
        extra["selection"] = torch.where(keep, extra["selection"], True if name != "m2po" else junk)
    loss, diagnostics = policy_loss(
        name, **dirty, clip=clip, weights=torch.where(keep, 1.0, junk), **extra
    )
    assert torch.equal(loss, clean) and not loss[~keep].any()
    grad = gradient(loss.sum(), dirty["logprobs"])
    assert torch.equal(grad, gradient(clean.sum(), case["logprobs"])) and not grad[~keep].any()
    for key, tensor in diagnostics.items():
        assert torch.equal(tensor, clean_diagnostics[key]) and not tensor.requires_grad, key


@by_loss
@given(seed=seeds, clip=clips)
@few
def test_packed_padded_and_permuted_tokens_have_the_same_loss(
    variant: str, seed: int, clip: Clip
) -> None:
    case, extra = example(variant, seed, 4, 5)
    name = VARIANTS[variant][0]
    order = torch.randperm(20, generator=torch.Generator().manual_seed(seed))
    order = order[
        (torch.arange(20) % 5 < torch.tensor([5, 3, 4, 0])[torch.arange(20) // 5])[order]
    ]  # rows of unequal length, shuffled
    case["loss_mask"] *= (torch.arange(5) < torch.tensor([[5], [3], [4], [0]])).to(torch.int64)
    loss, diagnostics = policy_loss(name, **case, clip=clip, **extra)
    packed = {key: tensor.detach().flatten()[order] for key, tensor in case.items()}
    packed["logprobs"].requires_grad_()
    extra["selection"] = None if extra["selection"] is None else extra["selection"].flatten()[order]
    alone, alone_diagnostics = policy_loss(name, **packed, clip=clip, row_index=order // 5, **extra)
    close(alone, loss.flatten()[order])
    close(
        gradient(alone.sum(), packed["logprobs"]),
        gradient(loss.sum(), case["logprobs"]).flatten()[order],
    )
    for key, tensor in diagnostics.items():
        assert torch.allclose(alone_diagnostics[key].double(), tensor.flatten()[order].double()), (
            key
        )


def constant_rows(case: dict[str, Tensor]) -> dict[str, Tensor]:
    """One advantage and one lag per row."""
    return case | {
        key: case[key][:, :1].expand_as(case[key]).contiguous()
        for key in ("advantages", "staleness")
    }


@by_loss
@given(seed=seeds, clip=clips)
@few
def test_on_policy_gradient_is_reinforce(variant: str, seed: int, clip: Clip) -> None:
    case, extra = example(variant, seed, 3, 5)
    case = constant_rows(case)
    case["anchor_logprobs"] = case["behavior_logprobs"] = case["logprobs"].detach()
    if VARIANTS[variant][0] == "clip_cov":
        extra["selection"] = torch.zeros(3, 5, dtype=torch.bool)
    if VARIANTS[variant][0] == "dppo":
        extra["options"] = replace(extra["options"], ratio_cap=None)
    loss, _ = policy_loss(VARIANTS[variant][0], **case, clip=clip, **extra)
    reinforce = -(case["advantages"] * case["logprobs"] * case["loss_mask"]).sum()
    close(gradient(loss.sum(), case["logprobs"]), gradient(reinforce, case["logprobs"]))


@pytest.mark.parametrize(
    "variant", ["ppo_clip", "gspo", "gspo_token", "gmpo", "clip_cov", "m2po", "dppo", "dppo, kl"]
)
@given(seed=seeds, clip=clips)
@few
def test_no_gradient_exactly_where_the_bound_was_taken(variant: str, seed: int, clip: Clip) -> None:
    case, extra = example(variant, seed, 4, 5)
    case = constant_rows(case)
    if variant == "clip_cov":
        extra["selection"] = torch.zeros(4, 5, dtype=torch.bool)
    loss, diagnostics = policy_loss(VARIANTS[variant][0], **case, clip=clip, **extra)
    grad = gradient(loss.sum(), case["logprobs"])
    bounded = diagnostics["clipped_low"] | diagnostics["clipped_high"] | diagnostics["dual_clipped"]
    assert torch.equal(grad == 0, bounded | (case["loss_mask"] == 0))
    assert (case["advantages"][diagnostics["clipped_low"]] < 0).all() and (
        case["advantages"][diagnostics["clipped_high"]] > 0
    ).all()


@by_loss
@given(seed=seeds, clip=clips)
@few
def test_only_the_current_policy_gets_gradient(variant: str, seed: int, clip: Clip) -> None:
    case, extra = example(variant, seed, 2, 5)
    others = [
        case[name].requires_grad_()
        for name in ("anchor_logprobs", "behavior_logprobs", "advantages")
    ]
    others += [
        torch.ones(2, 5, dtype=F64, requires_grad=True),
        case["staleness"].to(F64).requires_grad_(),
    ]
    case |= {"staleness": others[-1]}
    loss, _ = policy_loss(VARIANTS[variant][0], **case, clip=clip, weights=others[3], **extra)
    assert torch.autograd.grad(loss.sum(), others, allow_unused=True) == (None,) * 5


@by_loss
@pytest.mark.parametrize("shift", [-200.0, 200.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_extreme_log_ratios_stay_finite(
    variant: str, shift: float, advantage: float, dtype: torch.dtype
) -> None:
    name, options = VARIANTS[variant]
    for start in (0.0, -300.0):  # the second: log-probs as they are, below 0
        anchor = torch.full((2, 3), start, dtype=dtype)
        logprobs = (anchor + shift).requires_grad_()
        loss, diagnostics = policy_loss(
            name,
            logprobs,
            anchor_logprobs=anchor,
            behavior_logprobs=anchor,
            advantages=torch.full_like(anchor, advantage),
            loss_mask=torch.ones(2, 3),
            staleness=torch.zeros_like(anchor),
            clip=Clip(0.2, 0.2),
            selection=select(name, 3, 2, 3),
            options=options,
        )
        assert (
            loss.dtype == dtype
            and torch.isfinite(loss).all()
            and torch.isfinite(gradient(loss.sum(), logprobs)).all()
        )
        assert (
            torch.isfinite(diagnostics["ratio"]).all() and (diagnostics["log_ratio"] == shift).all()
        )


@by_loss
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_no_tokens_give_no_loss(variant: str, shape: tuple[int, ...]) -> None:
    case, extra = example(variant, 0, *shape)
    row_index = torch.zeros(shape, dtype=torch.int64) if len(shape) == 1 else None
    loss, diagnostics = policy_loss(
        VARIANTS[variant][0], **case, clip=Clip(0.2, 0.2, dual=3.0), row_index=row_index, **extra
    )
    assert loss.shape == shape and gradient(loss.sum(), case["logprobs"]).shape == shape
    assert all(tensor.shape == shape for tensor in diagnostics.values())


@given(seed=seeds, clip=clips)
@fast
def test_gspo_token_is_gspo_where_a_response_has_one_advantage(seed: int, clip: Clip) -> None:
    case = constant_rows(tokens(seed, 3, 5, scale=0.7))
    (whole, _), (split, _) = (
        policy_loss(name, **case, clip=clip) for name in ("gspo", "gspo_token")
    )
    close(whole, split)
    close(gradient(whole.sum(), case["logprobs"]), gradient(split.sum(), case["logprobs"]))


@given(seed=seeds, clip=clips)
@fast
def test_m2po_lies_between_plain_and_no_clip(seed: int, clip: Clip) -> None:
    case = tokens(seed, 12, scale=0.7)
    plain, _ = policy_loss("ppo_clip", **case, clip=clip)
    tight, _ = policy_loss("m2po", **case, clip=clip, selection=torch.zeros(12))
    assert torch.equal(plain, tight)
    free, diagnostics = policy_loss(
        "m2po", **case, clip=replace(clip, dual=None), selection=torch.full((12,), math.inf)
    )
    close(
        free,
        -torch.exp(case["logprobs"] - case["anchor_logprobs"])
        * case["advantages"]
        * case["loss_mask"],
    )
    assert not diagnostics["clipped_low"].any() and not diagnostics["clipped_high"].any()


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_the_ratio_of_a_response_is_of_its_log_ratios_as_they_are(name: str) -> None:
    """Clamped one by one, -29 would be -20, and the ratio 1.3e-3 in place of 6.3e-5."""
    case = tokens(0, 1, 3) | {"logprobs": torch.tensor([[-30.0, -1.0, -1.0]], dtype=F64)}
    case |= {"anchor_logprobs": torch.full((1, 3), -1.0, dtype=F64)}
    case |= {"advantages": torch.ones(1, 3, dtype=F64), "loss_mask": torch.ones(1, 3)}
    loss, diagnostics = policy_loss(name, **case, clip=Clip(0.2, 0.2))
    wanted = torch.full((1, 3), math.exp(-29 / 3), dtype=F64)
    close(diagnostics["ratio"], wanted)
    close(loss, -wanted)


def test_opmd_pulls_at_tokens_however_far_they_are() -> None:
    case = {**tokens(0, 1, 2), "logprobs": torch.full((1, 2), -5.0, dtype=F64, requires_grad=True)}
    case |= {
        "behavior_logprobs": torch.full((1, 2), -30.0, dtype=F64),
        "advantages": torch.zeros(1, 2),
        "loss_mask": torch.ones(1, 2),
    }
    for level, value, slope in (
        ("token", 31.25, 2.5),
        ("sequence", 62.5, 5.0),
    ):  # d = 25 for a token, 50 for the response
        loss, _ = policy_loss(
            "opmd", **case, clip=Clip(0.2, 0.2), options=Opmd(tau=0.1, level=level)
        )
        close(loss, torch.full((1, 2), value, dtype=F64))
        close(gradient(loss.sum(), case["logprobs"]), torch.full((1, 2), slope, dtype=F64))


def test_m2po_without_a_bound_still_stops_at_1e5() -> None:
    case = {
        **tokens(0, 2),
        "logprobs": torch.tensor([11.0, 12.0], dtype=F64),
        "anchor_logprobs": torch.zeros(2, dtype=F64),
    }
    case |= {
        "advantages": torch.ones(2, dtype=F64),
        "loss_mask": torch.ones(2),
        "staleness": torch.zeros(2),
    }
    loss, diagnostics = policy_loss(
        "m2po", **case, clip=Clip(0.3, 0.5), selection=torch.full((2,), math.inf, dtype=F64)
    )
    close(loss, torch.tensor([-math.exp(11), -1e5], dtype=F64))
    assert diagnostics["clipped_high"].tolist() == [False, True]


def changes(variant: str, key: str) -> bool:
    """Whether the loss of a token depends on `key`: the clip interval, the anchor, or ("row") the
    log-probs beside it.
    """
    case, extra = example(variant, 4, 6, 5)
    case["loss_mask"] = torch.ones(6, 5)
    name = VARIANTS[variant][0]
    before, _ = policy_loss(name, **case, clip=Clip(0.1, 0.1), **extra)
    if key == "row":
        case["logprobs"] = torch.cat([case["logprobs"][:, :-1], case["logprobs"][:, -1:] - 1], -1)
    elif key == "anchor":
        case["anchor_logprobs"] = case["anchor_logprobs"] - 0.5
    after, _ = policy_loss(
        name, **case, clip=Clip(0.3, 0.3) if key == "clip" else Clip(0.1, 0.1), **extra
    )
    return not torch.equal(before[:, :-1], after[:, :-1])


def test_the_sets_of_losses_say_what_the_losses_use() -> None:
    assert {name for name in POLICY_LOSSES if changes(name, "clip")} == POLICY_LOSSES.where(
        lambda traits: traits.clipped
    )
    assert {name for name in POLICY_LOSSES if changes(name, "row")} == SEQUENCE
    assert {name for name in POLICY_LOSSES if not changes(name, "anchor")} == POLICY_LOSSES.where(
        lambda traits: traits.ratio_free
    )
    assert changes("opmd, sequence", "row")


def test_dppo_follows_the_direction_of_the_advantage() -> None:
    now, then = (
        torch.tensor([0.6, 0.6, 0.1, 0.1]).log().requires_grad_(),
        torch.tensor([0.3, 0.3, 0.4, 0.4]).log(),
    )
    advantages = torch.tensor([1.0, -1, 1, -1])
    for options in (Dppo(), Dppo(divergence="kl"), Dppo(ratio_cap=1.5)):
        loss, diagnostics = policy_loss(
            "dppo",
            now,
            anchor_logprobs=then,
            behavior_logprobs=then,
            advantages=advantages,
            loss_mask=torch.ones(4),
            staleness=torch.zeros(4),
            clip=Clip(0.2, 0.2),
            options=replace(options, low=0.15, high=0.15),
        )
        assert diagnostics["clipped_high"].tolist() == [True, False, False, False] and loss[0] == 0
        assert diagnostics["clipped_low"].tolist() == [False, False, False, True] and loss[3] == 0
        assert (gradient(loss.sum(), now) != 0).tolist() == [False, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_binary_divergence_is_finite_at_certain_tokens(dtype: torch.dtype) -> None:
    now, then, advantages = torch.tensor(
        [[0.0, 0.0, -1.0, -300.0], [0.0, -1.0, 0.0, 0.0], [1.0, 1.0, -1.0, -1.0]], dtype=dtype
    )
    _, diagnostics = policy_loss(
        "dppo",
        now,
        anchor_logprobs=then,
        behavior_logprobs=then,
        advantages=advantages,
        loss_mask=torch.ones(4),
        staleness=torch.zeros(4),
        clip=Clip(0.2, 0.2),
        options=Dppo(divergence="kl"),
    )
    assert (diagnostics["clipped_low"] | diagnostics["clipped_high"]).tolist() == [
        False,
        True,
        True,
        True,
    ]


def test_extreme_weights_and_penalties_stay_finite() -> None:
    zero = torch.zeros(3)
    for shift in (-200.0, 200.0):
        logprobs = (zero + shift).requires_grad_()
        for level in ("token", "sequence"):
            weights = importance_weights(
                logprobs,
                zero,
                torch.ones(3),
                level=level,
                mode="truncate",
                lower=0.0,
                upper=2.0,
                row_index=torch.zeros(3, dtype=torch.int64),
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
    assert all(
        torch.equal(aged, fresh)
        for aged, fresh in zip(clip_bounds(-lags, clip), clip_bounds(0 * lags, clip), strict=True)
    )


@by_loss
@given(seed=seeds, low=st.floats(0.05, 0.4), high=st.floats(0.05, 0.6))
@few
def test_constant_schedule_ignores_lag(variant: str, seed: int, low: float, high: float) -> None:
    case, extra = example(variant, seed, 2, 5)
    aged, _ = policy_loss(VARIANTS[variant][0], **case, clip=Clip(low, high), **extra)
    fresh, _ = policy_loss(
        VARIANTS[variant][0],
        **{**case, "staleness": torch.zeros(2, 5)},
        clip=Clip(low, high),
        **extra,
    )
    assert torch.equal(aged, fresh)


def test_diagnostics_say_which_side_was_clipped() -> None:
    log_ratio = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.0, 2.0]).requires_grad_()
    zero = torch.zeros(6)
    loss, diagnostics = policy_loss(
        "ppo_clip",
        log_ratio,
        anchor_logprobs=zero,
        behavior_logprobs=zero,
        advantages=torch.tensor([1.0, -1, 1, -1, 1, -1]),
        loss_mask=torch.ones(6),
        staleness=zero,
        clip=Clip(0.2, 0.28, dual=3.0),
    )
    assert diagnostics["clipped_high"].tolist() == [True, False, False, False, False, False]
    assert diagnostics["clipped_low"].tolist() == [False, False, False, True, False, False]
    assert diagnostics["dual_clipped"].tolist() == [False, False, False, False, False, True]
    clipped = diagnostics["clipped_high"] | diagnostics["clipped_low"] | diagnostics["dual_clipped"]
    assert torch.equal(gradient(loss.sum(), log_ratio) == 0, clipped)


@by_loss
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("key", ["logprobs", "anchor_logprobs"])
def test_a_log_prob_that_is_not_finite_never_gives_a_finite_loss(
    variant: str, bad: float, key: str
) -> None:
    """Not where a clip or a weight of 0 would hide it: the learner ends a step by its loss."""
    for advantage in (-1.0, 0.0, 1.0):
        case, extra = example(variant, 1, 2, 3)
        case |= {"loss_mask": torch.ones(2, 3), "advantages": torch.full((2, 3), advantage)}
        case[key] = case[key].detach().clone()
        case[key][0, 1] = bad
        weights = torch.ones(2, 3, dtype=F64)
        weights[0, 1] = 0
        loss, _ = policy_loss(
            VARIANTS[variant][0], **case, clip=Clip(0.2, 0.2), weights=weights, **extra
        )
        assert not loss[0, 1].isfinite()


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
    for low, high in ((math.nan, 0.2), (2.0, 0.2), (-0.1, 0.2), (0.2, math.inf), (0.2, math.nan)):
        with pytest.raises(ValueError, match=f"clip widths {low} and {high} "):
            Clip(low, high)
    case = tokens(0, 4)
    with pytest.raises(ValueError, match=r"unknown policy loss 'ppo'.*ppo_clip"):
        policy_loss("ppo", **case, clip=Clip(0.2, 0.2))
    with pytest.raises(ValueError, match="advantages"):
        policy_loss("ppo_clip", **{**case, "advantages": torch.ones(3)}, clip=Clip(0.2, 0.2))
    with pytest.raises(ValueError, match="weights"):
        policy_loss("ppo_clip", **case, clip=Clip(0.2, 0.2), weights=torch.ones(1))
    for name in (*SEQUENCE, "opmd"):
        with pytest.raises(ValueError, match=f"{name} .*row_index"):
            policy_loss(
                name,
                **case,
                clip=Clip(0.2, 0.2),
                options=Opmd(level="sequence") if name == "opmd" else None,
            )
        with pytest.raises(ValueError, match="row_index"):
            policy_loss(
                name, **case, clip=Clip(0.2, 0.2), row_index=torch.zeros(3, dtype=torch.int64)
            )
    for name in SELECTING:
        wrong = torch.zeros(4) if name != "m2po" else torch.zeros(4, dtype=torch.bool)
        for selection in (None, wrong):
            with pytest.raises(ValueError, match=f"{name} needs selection"):
                policy_loss(name, **case, clip=Clip(0.2, 0.2), selection=selection)


@pytest.mark.parametrize(
    ("constants", "option", "value"),
    [
        (Sapo, "tau_pos", 0.0),
        (Sapo, "tau_neg", -1.0),
        (Dppo, "divergence", "js"),
        (Dppo, "low", -0.1),
        (Dppo, "high", math.inf),
        (Dppo, "ratio_cap", 0.0),
        (Opmd, "tau", math.nan),
        (Opmd, "level", "row"),
        (ClipCov, "ratio", 0.0),
        (ClipCov, "lower", 5.0),
        (KlCov, "ratio", 1.5),
        (KlCov, "coef", -1.0),
        (M2po, "budget", 0.0),
    ],
)
def test_options_refuse_wrong_values(
    constants: type[Constants], option: str, value: float | str
) -> None:
    with pytest.raises(ValueError, match=option):
        constants(**{option: value})


def test_a_loss_takes_its_own_options_only() -> None:
    case = tokens(0, 4)
    for name, options in (("sapo", Dppo()), ("ppo_clip", Sapo())):
        with pytest.raises(ValueError, match=f"policy loss {name} takes "):
            policy_loss(name, **case, clip=Clip(0.2, 0.2), options=options)
