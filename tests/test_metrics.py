"""Metrics as sums and counts: exact over any split, and per lag bucket."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from async_grpo.algo.losses import Clip, policy_loss
from async_grpo.algo.metrics import MetricSums, lag_bucket, loss_metrics
from tests.algo_case import fast, seeds, tokens


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
