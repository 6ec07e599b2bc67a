"""Importance weights, rejection, KL penalties and aggregation against slow loops, in value and
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from async_grpo.algo.aggregation import AGGREGATIONS, aggregate_loss, row_weights
from async_grpo.algo.importance import (
    importance_weights,
    interpolated_anchor,
    normalized_weights,
    opsm_mask,
    rejection_mask,
    weight_sums,
)
from async_grpo.algo.kl import KL_PENALTIES, AdaptiveKL, kl_penalty
from tests.support.algo_case import (
    F64,
    aggregate,
    close,
    fast,
    full_kl,
    gradient,
    seeds,
    slow_score,
    tokens,
)

JUNK = [math.nan, math.inf, -math.inf, 1e30]
levels = st.sampled_from(["none", "token", "sequence", "geometric"])


# ---- weights


def slow_ratio(case: dict[str, Tensor], level: str, i: int, t: int) -> float:
    """The ratio of anchor and behaviour policy at this level for token t of row i."""
    difference = case["anchor_logprobs"] - case["behavior_logprobs"]
    valid = [s for s in range(difference.shape[1]) if case["loss_mask"][i, s]]
    chosen = [t] if level == "token" else valid
    total = sum(float(difference[i, s]) for s in chosen)
    return math.exp(max(-20.0, min(20.0, total / len(valid) if level == "geometric" else total)))


def in_both_layouts(
    function: Callable[..., Tensor],
    columns: list[Tensor],
    mask: Tensor,
    seed: int,
    junk: float,
    **options: object,
) -> Tensor:
    """The result for [B, T] tensors with junk off the mask; the same packed in any token order, and
    with more padding.
    """
    dirty = [torch.where(mask != 0, column, junk) for column in columns]
    padded = function(*dirty, mask, **options)
    order = torch.randperm(mask.numel(), generator=torch.Generator().manual_seed(seed))
    index = torch.arange(len(mask)).repeat_interleave(mask.shape[1])[order]
    packed = function(
        *[column.reshape(-1)[order] for column in dirty],
        mask.reshape(-1)[order],
        row_index=index,
        **options,
    )
    close(packed, padded.reshape(-1)[order])
    wider = [
        torch.cat([column, torch.full((len(mask), 2), junk, dtype=column.dtype)], -1)
        for column in dirty
    ]
    close(
        function(
            *wider, torch.cat([mask, torch.zeros(len(mask), 2, dtype=mask.dtype)], -1), **options
        )[:, :-2],
        padded,
    )
    assert not padded.requires_grad
    return padded


@given(
    seed=seeds, level=levels, mode=st.sampled_from(["truncate", "mask"]), junk=st.sampled_from(JUNK)
)
@fast
def test_importance_weights_are_the_formula(seed: int, level: str, mode: str, junk: float) -> None:
    case = tokens(seed, 4, 5)
    lower, upper = 0.9, 1.1
    columns = [case["anchor_logprobs"], case["behavior_logprobs"]]
    got = in_both_layouts(
        importance_weights,
        columns,
        case["loss_mask"],
        seed,
        junk,
        level=level,
        mode=mode,
        lower=lower,
        upper=upper,
    )
    for i in range(4):
        for t in range(5):
            if level == "none" or not case["loss_mask"][i, t]:
                assert got[i, t] == 1
                continue
            w = slow_ratio(case, level, i, t)
            expected = (
                min(max(w, lower), upper)
                if mode == "truncate"
                else (w if lower <= w <= upper else 0.0)
            )
            assert float(got[i, t]) == pytest.approx(expected)


BOUNDS = {
    "w": (0.93, 1.08),
    "k1": (-0.08, 0.12),
    "k2": (None, 0.006),
    "k3": (None, 0.006),
    "difference": (-0.02, 0.03),
}


@pytest.mark.parametrize("reduce", ["token", "sum", "mean", "min", "max"])
@pytest.mark.parametrize("score", BOUNDS)
@given(seed=seeds, junk=st.sampled_from(JUNK), one_sided=st.sampled_from([None, 0, 1]))
@settings(max_examples=10)
def test_rejection_keeps_what_lies_inside(
    score: str, reduce: str, seed: int, junk: float, one_sided: int | None
) -> None:
    case = tokens(seed, 4, 5)
    lower, upper = (
        None if side == one_sided else bound for side, bound in enumerate(BOUNDS[score])
    )
    columns = [case["anchor_logprobs"], case["behavior_logprobs"]]
    got = in_both_layouts(
        rejection_mask,
        columns,
        case["loss_mask"],
        seed,
        junk,
        score=score,
        reduce=reduce,
        lower=lower,
        upper=upper,
    )
    pairs = torch.stack(columns, -1).tolist()
    for i in range(4):
        valid = [t for t in range(5) if case["loss_mask"][i, t]]
        for t in range(5):
            chosen = [t] if reduce == "token" else valid
            kept = t not in valid
            if not kept:
                s = slow_score(
                    [pairs[i][at] for at in chosen], score, reduce.replace("token", "sum")
                )
                kept = (lower is None or lower <= s) and (upper is None or s <= upper)
            assert float(got[i, t]) == float(kept)


def test_extreme_ratios_are_rejected_and_nothing_is_not() -> None:
    """Log ratios of 200 both ways; a row without tokens is kept."""
    anchor, behavior = torch.tensor([[200.0, 0.0], [-200.0, 0.0], [0.0, 0.0]]), torch.zeros(3, 2)
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    for score, reduce, lower, upper, kept in (
        ("w", "min", 1e-4, None, [1, 0, 1]),
        ("w", "max", None, 1e4, [0, 1, 1]),
        ("w", "sum", 1e-4, 1e4, [0, 0, 1]),
        ("k1", "sum", -9.0, 9.0, [0, 0, 1]),
        ("k2", "mean", None, 9.0, [0, 0, 1]),
        ("k3", "max", None, 15.0, [0, 0, 1]),
    ):
        rule = {"score": score, "reduce": reduce, "lower": lower, "upper": upper}
        got = rejection_mask(anchor, behavior, mask, **rule)
        assert got[:, 0].tolist() == kept and got.dtype == torch.float32


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@given(seed=seeds, junk=st.sampled_from(JUNK))
@settings(max_examples=10)
def test_normalized_weights_have_mean_one(level: str, seed: int, junk: float) -> None:
    """Over tokens, or over rows with tokens, from the sums of two parts."""
    case = tokens(seed, 4, 5)
    mask, weights = case["loss_mask"].clone(), case["advantages"].abs() * 3
    mask[1] = 0
    if level != "token":
        weights = weights[:, :1].expand(4, 5)
    dirty = torch.where(mask != 0, weights, junk)
    sums = sum(weight_sums(dirty[rows], mask[rows], level=level) for rows in ([0, 1], [2, 3]))
    got = normalized_weights(dirty, mask, sums)
    kept = [(i, t) for i in range(4) for t in range(5) if mask[i, t]]
    rows = {i for i, _ in kept}
    counted = kept if level == "token" else [next(at for at in kept if at[0] == i) for i in rows]
    mean = sum(float(weights[at]) for at in counted) / max(len(counted), 1)
    for i in range(4):
        for t in range(5):
            wanted = float(weights[i, t]) / mean if mask[i, t] else 1.0
            assert float(got[i, t]) == pytest.approx(wanted)
    index = torch.arange(4).repeat_interleave(5)
    packed = weight_sums(dirty.reshape(-1), mask.reshape(-1), level=level, row_index=index)
    close(packed, sums)
    close(normalized_weights(0 * weights, mask, 0 * sums), (mask == 0).double())


@given(seed=seeds, delta=st.floats(0, 0.3), junk=st.sampled_from(JUNK))
@fast
def test_opsm_drops_negative_rows_that_have_fallen(seed: int, delta: float, junk: float) -> None:
    case = tokens(seed, 4, 5)
    mask = case["loss_mask"]

    def in_order(cur: Tensor, beh: Tensor, adv: Tensor, mask: Tensor, **options: object) -> Tensor:
        return opsm_mask(cur, beh, adv, mask, delta=delta, **options)

    columns = [case["logprobs"].detach(), case["behavior_logprobs"], case["advantages"]]
    got = in_both_layouts(in_order, columns, mask, seed, junk)
    for i in range(4):
        valid = [t for t in range(5) if mask[i, t]]
        fallen = sum(float(columns[1][i, t] - columns[0][i, t]) for t in valid) / max(len(valid), 1)
        for t in range(5):
            dropped = bool(mask[i, t]) and float(case["advantages"][i, t]) < 0 and fallen > delta
            assert float(got[i, t]) == float(not dropped)
    nothing, ones = torch.zeros(1, 2), torch.ones(1, 2)
    assert opsm_mask(-ones, nothing, nothing, ones, delta=delta).all(), (
        "advantage 0 is not negative"
    )


@given(seed=seeds)
@fast
def test_the_interpolated_anchor_is_the_formula(seed: int) -> None:
    case = tokens(seed, 4, 5)
    cur, beh = case["logprobs"].detach(), case["behavior_logprobs"]
    got = interpolated_anchor(case["logprobs"], beh, case["staleness"])
    assert not got.requires_grad
    for i in range(4):
        for t in range(5):
            k = int(case["staleness"][i, t])
            alpha = min(max((k - 1) / k, 0.0), 1.0) if k else 0.0
            assert float(got[i, t]) == pytest.approx(
                float(beh[i, t] + alpha * (cur[i, t] - beh[i, t]))
            )
    dirty = case["logprobs"].detach().clone()
    dirty[0, 0] = math.nan
    close(interpolated_anchor(dirty, beh, case["staleness"])[1:], got[1:])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_extreme_ratios_and_empty_tensors_are_finite(level: str) -> None:
    anchor, behavior = torch.tensor([[200.0, 0.0], [-200.0, 0.0], [0.0, 0.0]]), torch.zeros(3, 2)
    options = {"level": level, "lower": 0.0, "upper": math.inf}
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    weights = importance_weights(anchor, behavior, mask, mode="truncate", **options)
    assert (
        weights.isfinite().all()
        and weights.dtype == torch.float32
        and weights.max() <= math.exp(20.001)
    )
    empty = torch.zeros(0)
    index = torch.zeros(0, dtype=torch.int64)
    assert importance_weights(
        empty, empty, empty, mode="mask", row_index=index, **options
    ).shape == (0,)
    for reduce in ("token", "sum", "mean", "min", "max"):
        rule = {"score": "k3", "reduce": reduce, "upper": 1.0}
        assert rejection_mask(empty, empty, empty, row_index=index, **rule).shape == (0,)
    assert opsm_mask(empty, empty, empty, empty, delta=0.1, row_index=index).shape == (0,)


def test_weights_refuse_wrong_arguments() -> None:
    ones = torch.ones(3)
    good = {"level": "token", "mode": "mask", "lower": 0.5, "upper": 2.0}
    for wrong, word in (
        ({"level": "row"}, "geometric"),
        ({"mode": "drop"}, "truncate"),
        ({"lower": 3.0}, "interval"),
        ({"level": "sequence"}, "row_index"),
    ):
        with pytest.raises(ValueError, match=word):
            importance_weights(ones, ones, ones, **{**good, **wrong})
    rule = {"score": "w", "reduce": "max", "lower": 0.5, "upper": 2.0}
    for wrong, word in (
        ({"score": "k4"}, "k3"),
        ({"reduce": "row"}, "token, sum, mean"),
        ({"lower": 3.0}, "interval"),
        ({}, "row_index"),
    ):
        with pytest.raises(ValueError, match=word):
            rejection_mask(ones, ones, ones, **{**rule, **wrong})
    with pytest.raises(ValueError, match="behavior_logprobs has shape"):
        importance_weights(ones, torch.ones(2), ones, **good)
    with pytest.raises(ValueError, match="delta"):
        opsm_mask(ones, ones, ones, ones, delta=-1.0)
    with pytest.raises(ValueError, match="staleness has shape"):
        interpolated_anchor(ones, ones, torch.ones(2))


# ---- KL

VALUES: dict[str, Callable[[float], float]] = {
    "kl": lambda d: d,
    "abs": abs,
    "mse": lambda d: d * d / 2,
    "low_var_kl": lambda d: math.exp(-d) - 1 + d,
}
SLOPES: dict[str, Callable[[float], float]] = {
    "kl": lambda d: 1.0,
    "abs": lambda d: math.copysign(1.0, d) if d else 0.0,
    "mse": lambda d: d,
    "low_var_kl": lambda d: 1 - math.exp(-d),
}
SHORT = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}


@pytest.mark.parametrize("kind", sorted(KL_PENALTIES))
@given(log_ratios=st.lists(st.floats(-15, 15), min_size=1, max_size=8), shift=st.floats(-2, 2))
@fast
def test_kl_penalties_are_the_formulas(kind: str, log_ratios: list[float], shift: float) -> None:
    base = SHORT.get(kind.removesuffix("+"), kind.removesuffix("+"))
    slope = SLOPES["mse"] if kind.endswith("+") else SLOPES[base]
    x = torch.tensor(log_ratios, dtype=F64, requires_grad=True)
    ref = torch.full_like(x, -1.0).detach().requires_grad_()
    value = kl_penalty(x - 1, ref, kind)
    d = [float(entry) for entry in (x - 1 - ref).detach()]
    close(value, torch.tensor([VALUES[base](entry) for entry in d], dtype=F64), atol=1e-6)
    close(
        gradient(value.sum(), x), torch.tensor([slope(entry) for entry in d], dtype=F64), atol=1e-6
    )
    assert torch.autograd.grad(value.sum(), ref, allow_unused=True) == (None,)
    # the correction: gradient through the ratio and through the penalty, or through k2 alone
    anchor = torch.full_like(x, -1.0 + shift).detach() + x.detach()
    corrected = kl_penalty(x - 1, ref, kind, anchor_logprobs=anchor)
    ratio = math.exp(-shift)
    close(
        corrected,
        torch.tensor([ratio * VALUES[base](entry) for entry in d], dtype=F64),
        rtol=1e-6,
        atol=1e-6,
    )
    detached = base == "mse" or kind.endswith("+")
    expected = [ratio * (slope(entry) + (0 if detached else VALUES[base](entry))) for entry in d]
    close(gradient(corrected.sum(), x), torch.tensor(expected, dtype=F64), rtol=1e-6, atol=1e-6)


def test_kl_does_not_let_go_and_does_not_mix_entries() -> None:
    x = torch.tensor([-200.0, -19.0, 200.0, math.nan], requires_grad=True)
    value = kl_penalty(x, torch.zeros(4), "low_var_kl")
    assert value[:3].isfinite().all() and float(value[0].detach()) == pytest.approx(
        math.exp(20) - 21
    )
    slopes = torch.autograd.grad(value[:3].sum(), x)[0]
    assert slopes.isfinite().all() and slopes[1] == pytest.approx(1 - math.exp(19), rel=1e-5)
    half = torch.zeros(4, dtype=torch.bfloat16)
    assert kl_penalty(half, half, "kl", anchor_logprobs=half).dtype == torch.float32
    assert kl_penalty(torch.zeros(0), torch.zeros(0), "low_var_kl+").shape == (0,)
    with pytest.raises(ValueError, match="low_var_kl"):
        kl_penalty(x, torch.zeros(4), "k9")
    far = torch.tensor([25.0, -200.0], requires_grad=True)
    for kind, slope in (
        ("kl", [1, 1]),
        ("abs", [1, -1]),
        ("mse", [25, -200]),
        ("low_var_kl+", [25, -200]),
    ):
        assert (
            torch.autograd.grad(kl_penalty(far, torch.zeros(2), kind).sum(), far)[0].tolist()
            == slope
        )
    assert torch.autograd.grad(kl_penalty(far, torch.zeros(2), "low_var_kl")[0], far)[0][
        0
    ] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="ref_logprobs has shape"):
        kl_penalty(x, torch.zeros(1), "kl")
    with pytest.raises(ValueError, match="anchor_logprobs has shape"):
        kl_penalty(x, torch.zeros(4), "kl", anchor_logprobs=torch.zeros(1))


def softmax_case() -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.tensor([0.5, -1.0, 0.2, 1.5, -0.3], dtype=F64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, -0.6, 0.9, 0.0], dtype=F64)
    return logits, reference, full_kl(logits, reference)


def test_full_kl_is_the_divergence() -> None:
    logits, reference, value = softmax_case()
    p, q = torch.softmax(logits.detach(), -1).tolist(), torch.softmax(reference, -1).tolist()
    assert float(value.detach()) == pytest.approx(
        sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    )
    half = full_kl(logits.detach(), reference, temperature=2.0)
    assert float(half) == pytest.approx(float(full_kl(logits.detach() / 2, reference / 2)))
    banned = logits.detach().clone()
    banned[1] = -math.inf
    banned.requires_grad_()
    other = torch.where(torch.arange(5) == 1, -math.inf, reference)
    got = full_kl(banned, other)
    keep = [0, 2, 3, 4]
    assert float(got.detach()) == pytest.approx(
        float(full_kl(logits.detach()[keep], reference[keep]))
    )
    slopes = gradient(got, banned)
    assert slopes.isfinite().all() and slopes[1] == 0
    close(slopes[keep], gradient(full_kl(logits[keep], reference[keep]), logits)[keep])
    # forbidden by one side only: the reference keeps its mass on the token, or the divergence is
    # infinite
    r = torch.softmax(banned.detach(), -1).tolist()
    one_sided = full_kl(banned, reference)
    assert float(one_sided.detach()) == pytest.approx(
        sum(r[v] * math.log(r[v] / q[v]) for v in keep)
    )
    assert gradient(one_sided, banned).isfinite().all()
    assert float(full_kl(logits.detach(), other)) == math.inf
    far = torch.tensor([[0.0, -1000.0], [200.0, 0.0]], requires_grad=True)
    wide = full_kl(far, torch.tensor([[0.0, -math.inf], [0.0, 200.0]]), temperature=0.1)
    assert wide.tolist() == [0.0, 2000.0] and gradient(wide.sum(), far).isfinite().all()
    with pytest.raises(ValueError, match="logits"):
        full_kl(logits, reference[:3])


@pytest.mark.parametrize(
    ("kind", "corrected"),
    [("mse", False), ("low_var_kl+", False), ("kl+", False), ("low_var_kl", True), ("kl", True)],
)
def test_the_expected_gradient_is_that_of_the_divergence(kind: str, corrected: bool) -> None:
    """Exact expectation over a distribution of five tokens, no sampling."""
    logits, reference, exact = softmax_case()
    logprobs = torch.log_softmax(logits, -1)
    anchor = logprobs.detach() if corrected else None
    penalties = kl_penalty(logprobs, torch.log_softmax(reference, -1), kind, anchor_logprobs=anchor)
    expected = (logprobs.detach().exp() * penalties).sum()
    close(gradient(expected, logits), gradient(exact, logits))


@pytest.mark.parametrize("kind", ["low_var_kl", "kl", "mse", "kl+", "low_var_kl+"])
def test_the_correction_is_unbiased_for_tokens_of_another_policy(kind: str) -> None:
    """Value (but for k2's) and gradient, in exact expectation over the anchor's distribution."""
    logits, reference, exact = softmax_case()
    anchor = torch.log_softmax(torch.tensor([-0.2, 0.7, 0.3, 0.6, -1.1], dtype=F64), -1)
    penalties = kl_penalty(
        torch.log_softmax(logits, -1),
        torch.log_softmax(reference, -1),
        kind,
        anchor_logprobs=anchor,
    )
    expected = (anchor.exp() * penalties).sum()
    if kind != "mse":
        close(expected, exact)
    close(gradient(expected, logits), gradient(exact, logits))


@pytest.mark.parametrize("corrected", [False, True])
def test_k3_has_the_gradient_of_its_formula(corrected: bool) -> None:
    x, y, a = (
        torch.linspace(low, high, 9, dtype=F64)
        for low, high in ((-3, -0.1), (-1, -2), (-2.5, -0.4))
    )
    x.requires_grad_()
    formula = (torch.exp(x - a) if corrected else 1) * (torch.exp(y - x) - 1 - (y - x))
    got = kl_penalty(x, y, "low_var_kl", anchor_logprobs=a if corrected else None)
    close(got, formula)
    close(gradient(got.sum(), x), gradient(formula.sum(), x))


def test_k1_as_a_loss_has_no_expected_gradient() -> None:
    logits, reference, _ = softmax_case()
    logprobs = torch.log_softmax(logits, -1)
    expected = (
        logprobs.detach().exp() * kl_penalty(logprobs, torch.log_softmax(reference, -1), "kl")
    ).sum()
    assert gradient(expected, logits).abs().max() < 1e-12


def test_the_adaptive_coefficient_steers_to_its_target() -> None:
    control = AdaptiveKL(coef=0.1, target=0.05, horizon=1000)
    control.update(0.1, 64)
    assert control.coef == pytest.approx(0.1 * (1 + 0.2 * 64 / 1000))
    again = AdaptiveKL.from_dict(control.to_dict())
    again.update(0.0495, 100)
    assert again.coef == pytest.approx(control.coef * (1 - 0.01 * 100 / 1000))
    low = AdaptiveKL(coef=0.1, target=0.05, horizon=10)
    low.update(0.0, 1000)
    assert low.coef == 0.0, "a step of more responses than the horizon never turns the sign"
    for broken in (math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            control.update(broken, 64)
    for wrong in ({"target": 0.0}, {"horizon": 0.0}, {"coef": -1.0}):
        with pytest.raises(ValueError, match="KL coefficient"):
            AdaptiveKL(**{"coef": 0.1, "target": 0.1, "horizon": 1.0, **wrong})


# ---- aggregation

GROUPS = [7, 7, 3, 3, 3, 9]


def slow_aggregate(loss: Tensor, mask: Tensor, mode: str, limit: int) -> Tensor:
    rows = {i: loss[i][mask[i] != 0] for i in range(len(loss)) if mask[i].any()}
    n, s = sum(len(row) for row in rows.values()), len(rows)
    if mode in ("token-mean", "token-sum"):
        return sum(row.sum() for row in rows.values()) / (n if mode == "token-mean" else 1)
    if mode == "prompt-mean":
        prompts = {GROUPS[i] for i in rows}
        means = [
            torch.cat([row for i, row in rows.items() if GROUPS[i] == prompt]).mean()
            for prompt in prompts
        ]
        return sum(means) / len(means)
    per_row = [
        row.sum() / len(row) if mode == "seq-mean-token-mean" else row.sum()
        for row in rows.values()
    ]
    return sum(per_row) / s / (limit if mode == "seq-mean-token-sum-norm" else 1)


@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
@pytest.mark.parametrize("empty", [[2], [0, 1], []])
def test_aggregation_is_the_formula_for_any_split(mode: str, empty: list[int]) -> None:
    case = tokens(5, 6, 7)
    mask = case["loss_mask"].clone()
    mask[empty] = 0
    loss = torch.where(mask != 0, case["logprobs"].square(), math.nan)
    total = aggregate(loss, mask, mode, max_response_length=9, group_index=GROUPS)
    expected = slow_aggregate(loss, mask, mode, 9)
    close(total, expected)
    grad = gradient(total, case["logprobs"])
    close(grad, gradient(expected, case["logprobs"]))
    assert not grad[empty].any()

    per_row = row_weights(mode, mask.sum(-1).tolist(), max_response_length=9, group_index=GROUPS)
    weights = torch.tensor(per_row, dtype=F64).unsqueeze(-1) * mask
    for split in ([[0, 1, 2, 3, 4, 5]], [[3], [2], [5, 0], [1, 4]], [[2], [0, 1, 3, 4, 5], []]):
        parts = [
            aggregate_loss(loss[rows].reshape(-1), weights[rows].reshape(-1)) for rows in split
        ]
        close(sum(parts), total)
        close(sum(gradient(part, case["logprobs"]) for part in parts), grad)


def test_row_weights_of_empty_steps_and_wrong_arguments() -> None:
    assert row_weights("token-mean", [0, 0], max_response_length=4) == [0.0, 0.0]
    assert row_weights("prompt-mean", [0, 0], max_response_length=4, group_index=[1, 2]) == [
        0.0,
        0.0,
    ]
    assert row_weights("seq-mean-token-mean", [], max_response_length=4) == []
    with pytest.raises(ValueError, match="token-mean"):
        row_weights("mean", [1], max_response_length=4)
    for wrong in (None, [1]):
        with pytest.raises(ValueError, match="group_index"):
            row_weights("prompt-mean", [1, 2], max_response_length=4, group_index=wrong)
    with pytest.raises(ValueError, match="group_index has 3 entries"):
        row_weights("token-mean", [1, 2], max_response_length=4, group_index=[1, 1, 2])
    with pytest.raises(ValueError, match="negative"):
        row_weights("token-mean", [-1], max_response_length=4)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_weights_of_a_nan_are_nan_and_reject_nothing_silently(mode: str) -> None:
    anchor, zeros, mask = torch.tensor([[math.nan, -1.0]]), torch.zeros(1, 2), torch.ones(1, 2)
    weights = importance_weights(
        anchor, zeros, mask, level="token", mode=mode, lower=0.5, upper=2.0
    )
    assert weights.isnan().tolist() == [[True, False]]
    for score in ("w", "k3", "difference"):
        kept = rejection_mask(
            anchor, zeros, mask, score=score, reduce="token", lower=-9.0, upper=9.0
        )
        assert kept.isnan().tolist() == [[True, False]] and kept[0, 1] == 1
        masked = rejection_mask(
            anchor, zeros, torch.tensor([[0, 1]]), score=score, reduce="mean", upper=9.0
        )
        assert masked.tolist() == [[1, 1]]
