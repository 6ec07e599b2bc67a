"""Metrics as sums and counts: exact over any split, and per lag bucket."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from async_grpo.algo.losses import Clip, policy_loss
from async_grpo.algo.metrics import MetricSums, lag_bucket, loss_metrics
from tests.support.algo_case import F64, fast, seeds, tokens

CLIP = Clip(0.2, 0.28, dual=3.0)
OF_ROWS = {
    "mismatch_chi2_seq",
    "mismatch_ppl_ratio",
    "rho_seq",
    "ess_seq",
    "rejected_sequences",
    "sequence_length",
    "staleness_span",
    "ppl_current",
    "ppl_behavior",
    "ppl_ratio",
    "ppl_log_diff",
    "ppl_log_diff_abs",
}


@given(st.integers(0, 5000))
@fast
def test_lag_buckets_are_ranges_by_powers_of_two(lag: int) -> None:
    low, _, high = lag_bucket(lag).partition("-")
    assert int(low) <= lag <= int(high or low)
    assert lag_bucket(int(low)) == lag_bucket(int(high or low)) == lag_bucket(lag)


def test_lag_bucket_names() -> None:
    assert [lag_bucket(k) for k in (0, 1, 2, 3, 4, 5, 8, 9, 16, 17)] == [
        "0",
        "1",
        "2",
        "3-4",
        "3-4",
        "5-8",
        "5-8",
        "9-16",
        "9-16",
        "17-32",
    ]


def add_metrics(
    sums: MetricSums, case: dict[str, Tensor], rows: slice, clip: Clip, **extra: Any
) -> None:
    part = {key: tensor[rows] for key, tensor in case.items()}
    loss, diagnostics = policy_loss("ppo_clip", **part, clip=clip)
    extra = {key: tensor[rows] for key, tensor in extra.items()}
    arguments = {
        key: part[key]
        for key in ("anchor_logprobs", "behavior_logprobs", "advantages", "staleness")
    }
    loss_metrics(
        sums,
        token_loss=loss,
        diagnostics=diagnostics,
        logprobs=part["logprobs"].detach(),
        recomputed=True,
        mask=part["loss_mask"],
        **arguments,
        **extra,
    )


def by_hand(
    case: dict[str, Tensor], weights: Tensor, kept: Tensor, keep: Tensor
) -> dict[str, float]:
    """Every metric as a plain loop over the tokens in `keep` [B, T], and the rows that have one."""
    at = [(i, t) for i in range(len(keep)) for t in range(keep.shape[1]) if keep[i, t]]
    keys = ("logprobs", "anchor_logprobs", "behavior_logprobs", "advantages", "staleness")
    lists = [tensor.tolist() for tensor in (*(case[key] for key in keys), weights, kept)]
    cur, anchor, beh, adv, lags, weights, kept = (
        {(i, t): values[i][t] for i, t in at} for values in lists
    )
    d, w, rho = (
        [x[it] - y[it] for it in at] for x, y in ((cur, anchor), (anchor, beh), (cur, beh))
    )
    rho, n = [math.exp(x) for x in rho], len(at)
    rows = {i: [t for j, t in at if j == i] for i in {i for i, _ in at}}
    seq = {
        i: (sum(anchor[i, t] - beh[i, t] for t in row), sum(cur[i, t] - beh[i, t] for t in row))
        for i, row in rows.items()
    }
    means = [
        (sum(cur[i, t] for t in row) / len(row), sum(beh[i, t] for t in row) / len(row))
        for i, row in rows.items()
    ]
    perplexities = {
        "ppl_current": [math.exp(-c) for c, _ in means],
        "ppl_behavior": [math.exp(-b) for _, b in means],
        "ppl_ratio": [math.exp(-c) / math.exp(-b) for c, b in means],
        "ppl_log_diff": [b - c for c, b in means],
        "ppl_log_diff_abs": [abs(b - c) for c, b in means],
    }
    out = {
        "ppo_kl": -sum(d) / n,
        "approx_kl": sum(x * x for x in d) / n / 2,
        "approx_kl_k3": sum(math.exp(x) - 1 - x for x in d) / n,
        "ratio": sum(map(math.exp, d)) / n,
        "ratio_max": math.exp(max(d)),
        "ratio_min": math.exp(min(d)),
        "abs_log_ratio": sum(map(abs, d)) / n,
        "log_ratio_abs_max": max(map(abs, d)),
        "far_ratio": sum(abs(x) > math.log(2) for x in d) / n,
        "rho": sum(rho) / n,
        "ess": sum(rho) ** 2 / (n * sum(x * x for x in rho)),
        "mismatch": sum(map(abs, w)) / n,
        "mismatch_max": max(map(abs, w)),
        "mismatch_kl": -sum(w) / n,
        "mismatch_kl_k3": sum(math.exp(x) - 1 - x for x in w) / n,
        "mismatch_prob_error": sum(math.exp(abs(x)) for x in w) / n,
        "mismatch_chi2": sum(math.exp(2 * x) for x in w) / n - 1,
        "mismatch_prob_max": max(abs(math.exp(anchor[i, t]) - math.exp(beh[i, t])) for i, t in at),
        "advantage": sum(adv[i, t] for i, t in at) / n,
        "advantage_abs_max": max(abs(adv[i, t]) for i, t in at),
        "importance_weight": sum(weights[i, t] for i, t in at) / n,
        "importance_ess": sum(weights[i, t] for i, t in at) ** 2
        / (n * sum(weights[i, t] ** 2 for i, t in at)),
        "importance_zero": sum(weights[i, t] == 0 for i, t in at) / n,
        "applied_weight": sum(weights[i, t] * kept[i, t] for i, t in at) / n,
        "rejected": sum(kept[i, t] == 0 for i, t in at) / n,
        "rejected_sequences": sum(all(kept[i, t] == 0 for t in row) for i, row in rows.items())
        / len(rows),
        "mismatch_chi2_seq": sum(math.exp(2 * mis) for mis, _ in seq.values()) / len(seq) - 1,
        "mismatch_ppl_ratio": sum(math.exp(-mis / len(rows[i])) for i, (mis, _) in seq.items())
        / len(seq),
        **{name: sum(found) / len(rows) for name, found in perplexities.items()},
        "rho_seq": sum(math.exp(r) for _, r in seq.values()) / len(seq),
        "ess_seq": sum(math.exp(r) for _, r in seq.values()) ** 2
        / (len(seq) * sum(math.exp(2 * r) for _, r in seq.values())),
        "staleness_mean": sum(lags.values()) / n,
        "staleness_max": max(lags.values()),
        "sequence_length": n / len(rows),
        "staleness_span": sum(
            max(lags[i, t] for t in row) - min(lags[i, t] for t in row) for i, row in rows.items()
        )
        / len(rows),
        "pg_loss": sum(slow_loss(cur[i, t] - anchor[i, t], adv[i, t]) for i, t in at) / n,
    }
    return out


def slow_loss(log_ratio: float, advantage: float) -> float:
    """PPO with `CLIP`."""
    ratio = math.exp(log_ratio)
    loss = max(-ratio * advantage, -min(max(ratio, 1 - CLIP.low), 1 + CLIP.high) * advantage)
    return min(loss, -CLIP.dual * advantage) if advantage < 0 else loss


@given(seed=seeds, cut=st.integers(0, 8), packed=st.booleans())
@fast
def test_metrics_are_the_formulas_exact_over_any_split_and_over_processes(
    seed: int, cut: int, packed: bool
) -> None:
    case, clip = tokens(seed, 8, 5, scale=0.6), CLIP
    case["loss_mask"][0, 0], case["staleness"][0, 0] = 1, 3
    kept = torch.ones(8, 5, dtype=F64)
    kept[2], kept[3, 1] = 0, 0
    weights = case["advantages"].abs().clamp(min=0.3)
    weights[4, 2] = 0
    whole, first, second = MetricSums(), MetricSums(), MetricSums()
    if packed:
        flat = {key: tensor.detach().reshape(-1) for key, tensor in case.items()}
        index = torch.arange(8).repeat_interleave(5)
        add_metrics(
            whole,
            flat,
            slice(0, 40),
            clip,
            weights=weights.reshape(-1),
            kept=kept.reshape(-1),
            row_index=index,
        )
    else:
        add_metrics(whole, case, slice(0, 8), clip, weights=weights, kept=kept)
    add_metrics(first, case, slice(0, cut), clip, weights=weights, kept=kept)
    add_metrics(second, case, slice(cut, 8), clip, weights=weights, kept=kept)
    merged = MetricSums.from_wire(first.to_wire())
    merged.merge(second)
    means = merged.means()
    assert means == pytest.approx(whole.means())
    keep = case["loss_mask"] != 0
    for name, value in by_hand(case, weights, kept, keep).items():
        assert means[f"train/{name}"] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    bucket = keep & ((case["staleness"] == 3) | (case["staleness"] == 4))
    oldest = torch.where(keep, case["staleness"], 0).amax(-1, keepdim=True)
    rows = keep & ((oldest == 3) | (oldest == 4))
    by_token, by_row = (
        by_hand(case, weights, kept, bucket),
        by_hand(case, weights, kept, rows) if rows.any() else {},
    )
    for name, value in by_token.items():
        if name not in OF_ROWS:
            assert means[f"train/staleness_3-4/{name}"] == pytest.approx(
                value, rel=1e-6, abs=1e-9
            ), name
        elif by_row:
            assert means[f"train/staleness_3-4/{name}"] == pytest.approx(
                by_row[name], rel=1e-6, abs=1e-9
            ), name
        else:
            assert f"train/staleness_3-4/{name}" not in means
    assert means["train/staleness_3-4/token_share"] == pytest.approx(
        float(bucket.sum() / keep.sum())
    )
    assert means["train/pg_clipfrac"] == pytest.approx(
        means["train/pg_clipfrac_low"] + means["train/pg_clipfrac_high"]
    )
    seen = {
        name.split("/")[1]
        for name in means
        if name.startswith("train/staleness_") and name.count("/") == 2
    }
    assert seen == {f"staleness_{lag_bucket(int(k))}" for k in case["staleness"][keep]}


def test_a_response_is_counted_in_the_bucket_of_its_oldest_token() -> None:
    case, sums = tokens(3, 2, 4), MetricSums()
    case["loss_mask"], case["staleness"] = (
        torch.ones(2, 4),
        torch.tensor([[2, 1, 0, 0], [0, 0, 0, 0]]),
    )
    add_metrics(sums, case, slice(0, 2), Clip(0.2, 0.2))
    means = sums.means()
    rho = (case["logprobs"] - case["behavior_logprobs"]).detach().sum(-1).exp()
    assert means["train/staleness_2/rho_seq"] == pytest.approx(float(rho[0])) and means[
        "train/staleness_0/rho_seq"
    ] == pytest.approx(float(rho[1]))
    assert "train/staleness_1/rho_seq" not in means and means["train/staleness_1/rho"] > 0


@given(st.integers(0, 2**20))
@fast
def test_a_token_is_counted_in_the_bucket_of_its_lag(lag: int) -> None:
    case, sums = tokens(5, 1, 2), MetricSums()
    case["loss_mask"], case["staleness"] = torch.ones(1, 2), torch.tensor([[lag, lag]])
    add_metrics(sums, case, slice(0, 1), CLIP)
    label = lag_bucket(lag) if lag <= 2**17 else f"{2**17 + 1}+"
    shares = {name: value for name, value in sums.means().items() if name.endswith("/token_share")}
    assert shares == {f"train/staleness_{label}/token_share": 1}


def test_rows_may_have_any_numbers_and_any_order() -> None:
    case = {key: tensor.detach() for key, tensor in tokens(6, 6, 5).items()}
    case["loss_mask"][0, 0] = 1
    plain, shuffled = MetricSums(), MetricSums()
    add_metrics(plain, case, slice(0, 6), CLIP)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(7))
    numbers = torch.tensor([900, 3, 40, 41, 2**40, 0]).repeat_interleave(5)
    flat = {key: tensor.reshape(-1)[order] for key, tensor in case.items()}
    add_metrics(shuffled, flat, slice(0, 30), CLIP, row_index=numbers[order])
    assert shuffled.means() == pytest.approx(plain.means())


class NoReading(TorchDispatchMode):
    """Fails where a value is read or a shape depends on one, which would wait for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.nonzero,
            torch.ops.aten._unique2,
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [False, True])
def test_metrics_do_not_wait_for_the_device(packed: bool) -> None:
    case = {
        key: tensor.detach() for key, tensor in tokens(8, *((12,) if packed else (3, 4))).items()
    }
    ones = torch.ones_like(case["logprobs"])
    with NoReading():
        index = {"row_index": case["staleness"]} if packed else {}
        add_metrics(
            MetricSums(),
            case,
            slice(None),
            CLIP,
            weights=ones,
            kept=ones,
            kl=ones,
            entropy=ones,
            **index,
        )


def test_extreme_log_ratios_and_junk_give_finite_metrics() -> None:
    case = {
        key: tensor.float() if tensor.is_floating_point() else tensor
        for key, tensor in tokens(4, 3, 4).items()
    }
    case = {key: tensor.detach() for key, tensor in case.items()}
    case["logprobs"][0], case["behavior_logprobs"][1] = -200.0, -200.0
    case["loss_mask"] = torch.ones(3, 4)
    case["loss_mask"][2, 3] = 0
    for key in ("logprobs", "anchor_logprobs", "behavior_logprobs", "advantages"):
        case[key][2, 3] = math.nan
    sums = MetricSums()
    add_metrics(sums, case, slice(0, 3), Clip(0.2, 0.2))
    assert all(math.isfinite(value) for value in sums.means().values())


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
    with pytest.raises(ValueError, match="2 extremes"):
        sums.maximum(["train/a", "train/b"], torch.ones(3))
    assert sums.means() == {"train/x": 3.0, "train/top": 5.0, "train/bottom": 2.0}
    none = MetricSums()
    add_metrics(none, {**tokens(1, 4), "loss_mask": torch.zeros(4)}, slice(0, 4), Clip(0.2, 0.2))
    add_metrics(none, tokens(1, 4), slice(0, 0), Clip(0.2, 0.2))
    assert none.means() == {}


def test_mismatch_is_reported_only_for_another_forward_pass() -> None:
    case, sums = tokens(3, 6), MetricSums()
    loss, diagnostics = policy_loss("ppo_clip", **case, clip=Clip(0.2, 0.2))
    loss_metrics(
        sums,
        token_loss=loss,
        diagnostics=diagnostics,
        logprobs=case["logprobs"],
        anchor_logprobs=case["behavior_logprobs"],
        behavior_logprobs=case["behavior_logprobs"],
        recomputed=False,
        advantages=case["advantages"],
        staleness=case["staleness"],
        mask=torch.ones(6),
        kl=torch.ones(6),
        entropy=torch.ones(6),
    )
    means = sums.means()
    assert not any(
        "mismatch" in name or name.endswith("_seq") or "weight" in name or "rejected" in name
        for name in means
    )
    assert means["train/kl"] == means["train/entropy"] == 1
