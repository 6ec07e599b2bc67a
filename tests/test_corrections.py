"""Importance weights, KL penalties and aggregation against slow loops, in value and gradient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from async_grpo.algo.aggregation import AGGREGATIONS, aggregate, aggregate_loss, row_weights
from async_grpo.algo.importance import importance_weights
from async_grpo.algo.kl import kl_penalty
from tests.algo_case import F64, close, fast, gradient, seeds, tokens


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
