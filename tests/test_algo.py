"""Every formula of `async_grpo.algo` against a slow loop written from its definition, in value and gradient, and its properties."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from async_grpo.algo.advantages import compute_advantages, row_advantages
from async_grpo.algo.aggregation import AGGREGATIONS, aggregate, aggregate_loss, row_weights
from async_grpo.algo.filters import zero_variance
from async_grpo.algo.importance import importance_weights
from async_grpo.algo.kl import kl_penalty
from async_grpo.algo.logprobs import token_logprobs
from async_grpo.algo.losses import Clip, clip_bounds, policy_loss
from async_grpo.algo.metrics import MetricSums, lag_bucket, loss_metrics
from async_grpo.algo.rewards import overlong_penalty, score

F64 = torch.float64
fast = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**31)
clips = st.builds(
    Clip,
    low=st.floats(0.05, 0.4), high=st.floats(0.05, 0.6), kind=st.sampled_from(["constant", "harmonic", "exponential"]),
    rate=st.floats(0, 1), floor=st.floats(0, 1), dual=st.sampled_from([None, 1.5, 3.0]),
)  # fmt: skip


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
    """Equal shape and type, and nearly equal values (`torch.testing.assert_close` takes seconds to import)."""
    assert got.shape == want.shape and got.dtype == want.dtype
    rtol = (1e-7 if got.dtype == F64 else 1e-5) if rtol is None else rtol
    assert torch.allclose(got, want, rtol=rtol, atol=atol), f"{got}\n!=\n{want}"


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(loss, of, retain_graph=True)[0]


# ---- rewards and filters


def test_score_is_the_weighted_sum_and_names_what_is_missing() -> None:
    assert score({"correct": 1.0, "format": 0.5, "length": 7.0}, {"correct": 1.0, "format": -0.2}) == pytest.approx(0.9)
    with pytest.raises(ValueError, match="format"):
        score({"correct": 1.0}, {"format": 1.0})


@given(length=st.integers(0, 60), buffer=st.integers(1, 40), factor=st.floats(0, 3))
@fast
def test_overlong_penalty_is_the_paper_formula(length: int, buffer: int, factor: float) -> None:
    limit = 40
    if length <= limit - buffer:
        expected = 0.0
    elif length <= limit:
        expected = factor * ((limit - buffer) - length) / buffer
    else:
        expected = -factor
    value = overlong_penalty(length, max_length=limit, buffer_length=buffer, factor=factor)
    assert value == pytest.approx(expected) and -factor <= value <= 0
    assert value >= overlong_penalty(length + 1, max_length=limit, buffer_length=buffer, factor=factor)


def test_overlong_penalty_refuses_an_impossible_buffer() -> None:
    for buffer, factor in ((0, 1.0), (41, 1.0), (4, -1.0)):
        with pytest.raises(ValueError, match="overlong"):
            overlong_penalty(1, max_length=40, buffer_length=buffer, factor=factor)


def test_zero_variance() -> None:
    assert zero_variance([0.1, 0.1, 0.1]) and zero_variance([5.0]) and zero_variance([1.0, 1.0 + 9e-7])
    assert not zero_variance([0.0, 1.0]) and not zero_variance([1.0, 1.0 + 2e-6])
    assert zero_variance([0.0, 1.0], tolerance=1.0)
    with pytest.raises(ValueError, match="finite"):
        zero_variance([1.0, math.nan])


# ---- advantages


def slow_grpo(rewards: list[float], groups: list[int], norm: bool) -> list[float]:
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        mine = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(mine) < 2 or max(mine) - min(mine) <= 1e-6:
            out.append(0.0)
            continue
        mean = sum(mine) / len(mine)
        std = math.sqrt(sum((r - mean) ** 2 for r in mine) / (len(mine) - 1))
        out.append((reward - mean) / (std + 1e-6) if norm else reward - mean)
    return out


rows_with_groups = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, -2.0, 4096.25]), st.integers(-2, 3)), min_size=1, max_size=20)


@given(rows=rows_with_groups, norm=st.booleans(), seed=seeds)
@fast
def test_grpo_is_the_formula_in_any_row_order(rows: list[tuple[float, int]], norm: bool, seed: int) -> None:
    rewards, groups = torch.tensor([r for r, _ in rows]), torch.tensor([g for _, g in rows])
    value = row_advantages("grpo", rewards, groups, norm_adv_by_std_in_grpo=norm)
    close(value, torch.tensor(slow_grpo([r for r, _ in rows], [g for _, g in rows], norm)), rtol=1e-5, atol=1e-6)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    close(row_advantages("grpo", rewards[order], groups[order], norm_adv_by_std_in_grpo=norm), value[order])


def test_grpo_worked_example() -> None:
    value = row_advantages("grpo", torch.tensor([2.8, 2.8, 2.0, 0.8]), torch.zeros(4, dtype=torch.int64))
    assert [round(x, 2) for x in value.tolist()] == [0.74, 0.74, -0.11, -1.38]


def test_grpo_survives_large_means_and_has_no_signal_in_equal_groups() -> None:
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 2])
    rewards = torch.tensor([4096.0, 4096.5, 4097.0, 0.1, 0.1, 0.1, 4096.0])
    expected = torch.tensor([-1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    close(row_advantages("grpo", rewards, groups), expected, rtol=0, atol=1e-5)
    nearly = torch.tensor([1.0, 1.0 + 9e-7, 0.0, 2e-6], dtype=F64)
    value = row_advantages("grpo", nearly, torch.tensor([0, 0, 1, 1]))
    assert value[:2].tolist() == [0, 0] and value[2] == -value[3] < -0.4


def test_advantages_refuse_what_they_cannot_define() -> None:
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="grpo"):
        row_advantages("gropo", torch.ones(1), one)
    with pytest.raises(ValueError, match="finite"):
        row_advantages("grpo", torch.tensor([math.nan]), one)
    with pytest.raises(ValueError, match=r"\[B\]"):
        row_advantages("grpo", torch.ones(2), one)


def test_token_advantages_ignore_padding() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    rewards = torch.tensor([[0.0, 1.0, math.nan], [0.5, math.inf, math.nan]])
    advantages, returns = compute_advantages("grpo", rewards, mask, torch.tensor([3, 3]))
    a = 0.25 / (math.sqrt(2 * 0.25**2) + 1e-6)
    close(advantages, torch.tensor([[a, a, 0.0], [-a, 0.0, 0.0]]))
    assert torch.equal(returns, advantages)


# ---- clip bounds and policy loss


def slow_factor(lag: int, clip: Clip) -> float:
    factor = {"constant": 1.0, "harmonic": 1 / (1 + clip.rate * lag), "exponential": clip.rate**lag}[clip.kind]
    return max(factor, clip.floor)


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


# ---- importance weights


@given(seed=seeds, level=st.sampled_from(["none", "token", "sequence"]), mode=st.sampled_from(["truncate", "mask"]))
@fast
def test_importance_weights_are_the_formula(seed: int, level: str, mode: str) -> None:
    case = tokens(seed, 4, 5)
    lower, upper = 0.9, 1.1
    anchor, mask = case["anchor_logprobs"], case["loss_mask"]
    dirty = torch.where(mask != 0, case["behavior_logprobs"], math.nan)
    padded = importance_weights(anchor, dirty, mask, level=level, mode=mode, lower=lower, upper=upper)
    row_index = torch.arange(4).repeat_interleave(5)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(seed))
    packed = importance_weights(
        anchor.reshape(-1)[order], dirty.reshape(-1)[order], mask.reshape(-1)[order], level=level, mode=mode, lower=lower, upper=upper,
        row_index=row_index[order],
    )  # fmt: skip
    close(packed, padded.reshape(-1)[order])
    for i in range(4):
        for t in range(5):
            if level == "none" or not mask[i, t]:
                assert padded[i, t] == 1
                continue
            chosen = range(5) if level == "sequence" else [t]
            w = math.exp(sum(float((anchor - case["behavior_logprobs"])[i, s]) for s in chosen if mask[i, s]))
            expected = min(max(w, lower), upper) if mode == "truncate" else (w if lower <= w <= upper else 0.0)
            assert float(padded[i, t]) == pytest.approx(expected)


def test_importance_weights_refuse_wrong_arguments() -> None:
    ones = torch.ones(3)
    good = {"level": "token", "mode": "mask", "lower": 0.5, "upper": 2.0}
    for wrong in ({"level": "row"}, {"mode": "drop"}, {"lower": 3.0}, {"level": "sequence"}):
        with pytest.raises(ValueError):
            importance_weights(ones, ones, ones, **{**good, **wrong})


# ---- KL


@given(st.lists(st.floats(-15, 15), min_size=1, max_size=8))
@fast
def test_k3_is_the_formula(log_ratios: list[float]) -> None:
    x = torch.tensor(log_ratios, dtype=F64, requires_grad=True)
    ref = torch.full_like(x, -1.0).detach().requires_grad_()
    value = kl_penalty(x - 1, ref, "low_var_kl")
    close(value, torch.tensor([math.exp(-d) - 1 + d for d in log_ratios], dtype=F64))
    assert (value >= 0).all()
    close(gradient(value.sum(), x), torch.tensor([1 - math.exp(-d) for d in log_ratios], dtype=F64))
    assert torch.autograd.grad(value.sum(), ref, allow_unused=True) == (None,)
    with pytest.raises(ValueError, match="low_var_kl"):
        kl_penalty(x, ref, "k9")


# ---- aggregation


def slow_aggregate(loss: Tensor, mask: Tensor, mode: str, limit: int) -> Tensor:
    rows = [loss[i][mask[i] != 0] for i in range(len(loss)) if mask[i].any()]
    n, s = sum(len(row) for row in rows), len(rows)
    if mode == "token-mean":
        return sum(row.sum() for row in rows) / n
    per_row = [row.sum() / len(row) if mode == "seq-mean-token-mean" else row.sum() for row in rows]
    return sum(per_row) / s / (limit if mode == "seq-mean-token-sum-norm" else 1)


@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_aggregation_is_the_formula_for_any_split(mode: str) -> None:
    case = tokens(5, 6, 7)
    mask = case["loss_mask"].clone()
    mask[2] = 0
    loss = torch.where(mask != 0, case["logprobs"].square(), math.nan)
    total = aggregate(loss, mask, mode, max_response_length=9)
    expected = slow_aggregate(loss, mask, mode, 9)
    close(total, expected)
    grad = gradient(total, case["logprobs"])
    close(grad, gradient(expected, case["logprobs"]))
    assert not grad[2].any()

    weights = torch.tensor(row_weights(mode, mask.sum(-1).tolist(), max_response_length=9), dtype=F64).unsqueeze(-1) * mask
    for split in ([[0, 1, 2, 3, 4, 5]], [[3], [2], [5, 0], [1, 4]], [[2], [0, 1, 3, 4, 5], []]):
        parts = [aggregate_loss(loss[rows].reshape(-1), weights[rows].reshape(-1)) for rows in split]
        close(sum(parts), total)
        close(sum(gradient(part, case["logprobs"]) for part in parts), grad)


def test_row_weights_of_empty_steps_and_unknown_modes() -> None:
    assert row_weights("token-mean", [0, 0], max_response_length=4) == [0.0, 0.0]
    assert row_weights("seq-mean-token-mean", [], max_response_length=4) == []
    with pytest.raises(ValueError, match="token-mean"):
        row_weights("mean", [1], max_response_length=4)


# ---- chunked log-probabilities


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("size", [1, 3, 10, 100])
def test_chunked_logprobs_are_the_naive_ones(temperature: float, with_entropy: bool, size: int) -> None:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 4, generator=random, dtype=F64, requires_grad=True)
    head = torch.randn(4, 13, generator=random, dtype=F64, requires_grad=True)
    targets = torch.randint(0, 13, (10,), generator=random)
    up = torch.randn(2, 10, generator=random, dtype=F64)
    calls = []

    def project(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x @ head

    logprobs, entropy = token_logprobs(
        hidden, targets, project, vocab_size=13, temperature=temperature, with_entropy=with_entropy, chunk_bytes=size * 13 * 4
    )
    assert max(calls) <= size and sum(calls) == 10
    naive = torch.log_softmax(hidden @ head / temperature, -1)
    picked, naive_entropy = naive[torch.arange(10), targets], -(naive.exp() * naive).sum(-1)
    close(logprobs, picked)
    value, expected = (logprobs * up[0]).sum(), (picked * up[0]).sum()
    if with_entropy:
        close(entropy, naive_entropy)
        value, expected = value + (entropy * up[1]).sum(), expected + (naive_entropy * up[1]).sum()
    else:
        assert entropy is None
    for got, want in zip(torch.autograd.grad(value, [hidden, head]), torch.autograd.grad(expected, [hidden, head]), strict=True):
        close(got, want)
    assert sum(calls) == (10 if size >= 10 else 20)


def test_logprobs_of_low_precision_forbidden_and_no_tokens() -> None:
    head = torch.randn(4, 13, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    hidden, targets = torch.ones(5, 4, dtype=torch.bfloat16), torch.arange(5)
    logprobs, entropy = token_logprobs(hidden, targets, lambda x: x @ head, vocab_size=13, temperature=1.0, with_entropy=True)
    assert logprobs.dtype == entropy.dtype == torch.float32
    close(logprobs, torch.log_softmax((hidden @ head).float(), -1)[torch.arange(5), targets])

    forbidden = torch.zeros(13).index_fill(0, torch.tensor([12]), -math.inf)
    logits = torch.zeros(5, 13, requires_grad=True)
    logprobs, entropy = token_logprobs(
        torch.zeros(5, 1), targets, lambda x: logits + forbidden, vocab_size=13, temperature=1.0, with_entropy=True
    )
    close(entropy, torch.full((5,), math.log(12)))
    assert torch.isfinite(gradient((logprobs + 3e6 * entropy).sum(), logits)).all()

    logprobs, _ = token_logprobs(hidden[:0], targets[:0], lambda x: x @ head, vocab_size=13, temperature=1.0, with_entropy=False)
    assert logprobs.shape == (0,) and gradient(logprobs.sum(), head).shape == head.shape
    with pytest.raises(ValueError, match="targets"):
        token_logprobs(hidden, targets[:3], lambda x: x @ head, vocab_size=13, temperature=1.0, with_entropy=False)


# ---- metrics


@given(st.integers(0, 5000))
@fast
def test_lag_buckets_are_ranges_by_powers_of_two(lag: int) -> None:
    low, _, high = lag_bucket(lag).partition("-")
    assert int(low) <= lag <= int(high or low)
    assert lag_bucket(int(low)) == lag_bucket(int(high or low)) == lag_bucket(lag)


def test_lag_bucket_names() -> None:
    assert [lag_bucket(k) for k in (0, 1, 2, 3, 4, 5, 8, 9, 16, 17)] == ["0", "1", "2", "3-4", "3-4", "5-8", "5-8", "9-16", "9-16", "17-32"]


def add_metrics(sums: MetricSums, case: dict[str, Tensor], rows: slice, clip: Clip) -> None:
    part = {key: tensor[rows] for key, tensor in case.items()}
    loss, diagnostics = policy_loss("ppo_clip", **part, clip=clip)
    mask = part.pop("loss_mask")
    del part["logprobs"]
    loss_metrics(sums, token_loss=loss, mask=mask, **diagnostics, **part)


@given(seed=seeds, cut=st.integers(0, 8))
@fast
def test_metrics_are_exact_over_any_split_and_over_processes(seed: int, cut: int) -> None:
    case, clip = tokens(seed, 8, 5), Clip(0.2, 0.28, dual=3.0)
    case["loss_mask"][0, 0], case["staleness"][0, 0] = 1, 3
    whole, first, second = MetricSums(), MetricSums(), MetricSums()
    add_metrics(whole, case, slice(0, 8), clip)
    add_metrics(first, case, slice(0, cut), clip)
    add_metrics(second, case, slice(cut, 8), clip)
    merged = MetricSums.from_wire(first.to_wire())
    merged.merge(second)
    means = merged.means()
    assert means == pytest.approx(whole.means())

    keep = case["loss_mask"] != 0
    log_ratio = (case["logprobs"] - case["anchor_logprobs"]).detach()[keep]
    rho = (case["logprobs"] - case["behavior_logprobs"]).detach()[keep].exp()
    lag = case["staleness"][keep]
    expected = {
        "train/ppo_kl": -log_ratio.mean(),
        "train/approx_kl": (log_ratio.exp() - 1 - log_ratio).mean(),
        "train/ratio": log_ratio.exp().mean(),
        "train/ratio_min": log_ratio.exp().min(),
        "train/ratio_max": log_ratio.exp().max(),
        "train/ess": rho.sum() ** 2 / (len(rho) * rho.square().sum()),
        "train/rollout_mismatch": (case["anchor_logprobs"] - case["behavior_logprobs"])[keep].abs().mean(),
        "train/lag_mean": lag.double().mean(),
        "train/lag_max": lag.max(),
        "train/lag_3-4/ppo_kl": -log_ratio[(lag == 3) | (lag == 4)].mean(),
        "train/lag_3-4/token_share": ((lag == 3) | (lag == 4)).double().mean(),
    }
    for name, value in expected.items():
        assert means[name] == pytest.approx(float(value)), name
    assert means["train/pg_clipfrac"] == pytest.approx(means["train/pg_clipfrac_low"] + means["train/pg_clipfrac_high"])
    seen = {name.split("/")[1] for name in means if name.startswith("train/lag_") and name.count("/") == 2}
    assert seen == {f"lag_{lag_bucket(int(k))}" for k in lag}


def test_metrics_ignore_masked_junk_and_absent_values() -> None:
    sums = MetricSums()
    sums.add("train/x", torch.tensor([1.0, math.nan, 3.0]), torch.tensor([1, 0, 1]))
    sums.add("train/empty", torch.zeros(0))
    sums.add_value("train/x", 8.0, 2)
    sums.maximum("train/high", -math.inf)
    sums.maximum("train/top", 1.0)
    sums.maximum("train/top", torch.tensor(5.0))
    sums.minimum("train/bottom", torch.tensor(2.0))
    sums.minimum("train/bottom", 3.0)
    assert sums.means() == {"train/x": 3.0, "train/top": 5.0, "train/bottom": 2.0}
    none = MetricSums()
    add_metrics(none, {**tokens(1, 4), "loss_mask": torch.zeros(4)}, slice(0, 4), Clip(0.2, 0.2))
    add_metrics(none, tokens(1, 4), slice(0, 0), Clip(0.2, 0.2))
    assert none.means() == {}


def test_mismatch_is_reported_only_for_another_anchor() -> None:
    case, sums = tokens(3, 6), MetricSums()
    loss, diagnostics = policy_loss("ppo_clip", **case, clip=Clip(0.2, 0.2))
    anchor = case["anchor_logprobs"]
    loss_metrics(
        sums, token_loss=loss, **diagnostics, anchor_logprobs=anchor, behavior_logprobs=anchor, advantages=case["advantages"],
        staleness=case["staleness"], mask=torch.ones(6), weights=torch.tensor([0.0, 1, 1, 1, 2, 2]), kl=torch.ones(6), entropy=torch.ones(6),
    )  # fmt: skip
    means = sums.means()
    assert "train/rollout_mismatch" not in means and means["train/rho"] == pytest.approx(means["train/ratio"])
    assert means["train/importance_weight"] == pytest.approx(7 / 6) and means["train/importance_zero"] == pytest.approx(1 / 6)
    assert means["train/kl"] == means["train/entropy"] == 1


# ---- imports

BLOCKER = """
import sys
{first}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {allowed!r} or top in sys.stdlib_module_names:
            return None
        raise ImportError("third-party import of " + name)
sys.meta_path.insert(0, Refuse())
import {modules}
loaded = {{name.partition(".")[0] for name in sys.modules}}
assert not loaded & {{"ray", "vllm", "deepspeed", "mlflow", "transformers", "pydantic", "msgpack"}}, loaded
"""
MATH = "advantages losses importance kl aggregation logprobs metrics rewards filters"


@pytest.mark.parametrize(
    ("first", "allowed", "modules"),
    [
        ("import torch", ("async_grpo", "torch", "numpy"), ", ".join(f"async_grpo.algo.{name}" for name in MATH.split())),
        ("", ("async_grpo",), "async_grpo.algo.filters, async_grpo.algo.rewards, async_grpo.batching"),
    ],
    ids=["torch_alone", "nothing"],
)
def test_imports_need_no_other_package(first: str, allowed: tuple[str, ...], modules: str) -> None:
    code = BLOCKER.format(first=first, allowed=allowed, modules=modules)
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
