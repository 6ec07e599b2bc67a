"""The learner's token mathematics: the gradient of every policy loss in every aggregation is the
same for any split and row order.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from async_grpo.algo.aggregation import AGGREGATIONS
from async_grpo.algo.catalog import POLICY_LOSSES
from async_grpo.algo.metrics import MetricSums
from async_grpo.errors import StalenessError
from async_grpo.learner.batching import PlanRow, RankPlan, RowValue
from async_grpo.learner.rows import NGRAM, LearnerRow, decode_rows, repeats, token_batch
from async_grpo.learner.token_math import TokenMath, compare_sampler
from async_grpo.wire.codec import GroupTicket, encode_group, pack_frames
from tests.support.frames import frame_of, make_group
from tests.support.thread_ranks import Collective, Ranks
from tests.support.token_case import (
    CPU,
    LENGTHS,
    Alone,
    config_of,
    gradient,
    logprobs_of,
    make_rows,
    splits,
)

TIGHT = {"m2po": {"budget": 0.005}}
"""Options with which the loss is at work on these few tokens."""
CLIPPED = POLICY_LOSSES.where(lambda traits: traits.clipped)


@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_the_gradient_does_not_depend_on_the_split(loss: str, mode: str) -> None:
    extra: dict[str, Any] = {"clip_schedule": "harmonic"} if loss in CLIPPED else {}
    own = {"clip_cov": {"ratio": 0.2, "lower": -5.0}, "kl_cov": {"ratio": 0.2}, **TIGHT}
    config = config_of(
        policy_loss={"name": loss, **own.get(loss, {})},
        loss_agg_mode=mode,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        kl_loss_unbiased=True,
        entropy_coef=0.01,
        anchor="recomputed",
        importance={"level": "geometric"},
        rejection={"level": "sequence", "lower": 0.7, "upper": 1.5},
        opsm_delta=0.2,
        **extra,
    )
    rows = make_rows()
    value, wanted = gradient(config, rows, [sorted(rows)])
    assert wanted.abs().max() > 1e-4 and wanted.isfinite().all()
    for split in splits(sorted(rows)):
        got_value, got = gradient(config, rows, split)
        assert got_value == pytest.approx(value, rel=1e-9, abs=1e-12)
        torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("against", [False, True, "anchor", "behavior"])
@pytest.mark.parametrize("kind", ["k1", "k2", "mse", "k3", "k1+", "k3+"])
def test_the_kl_loss_is_corrected_by_the_ratio_that_is_named(kind: str, against: Any) -> None:
    """Value and gradient of every token, against a loop over tokens, in any split."""
    given = {"anchor": "recomputed", "policy_loss": "gpg"}
    config = config_of(
        use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type=kind, kl_loss_unbiased=against, **given
    )
    rows = make_rows()
    value, wanted = gradient(config, rows, [sorted(rows)])
    plain = gradient(config_of(**given), rows, [sorted(rows)])
    theta = torch.tensor([0.3, -0.8, 0.5], dtype=torch.float64, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    for key, row in rows.items():
        batch = token_batch([PlanRow(*key, 2, len(row.lag), 1.0, len(row.lag))], [row], CPU)
        for t, x in enumerate(logprobs_of(batch, rows, theta)):
            d = x - float(row.reference[t])
            k2 = d * d / 2
            k = {"k1": d, "k2": k2, "mse": k2, "k3": torch.exp(-d) - 1 + d}[kind.removesuffix("+")]
            k = float(k.detach()) + k2 - float(k2.detach()) if kind.endswith("+") else k
            if against:
                sampled = row.behavior[t] if against == "behavior" else row.anchor[t]
                ratio = torch.exp(x - float(sampled))
                k = (ratio if kind in ("k1", "k3") else float(ratio.detach())) * k
            total = total + 0.3 * k / sum(LENGTHS)
    assert value - plain[0] == pytest.approx(float(total.detach()), rel=1e-6)
    slope = torch.autograd.grad(total, theta)[0]
    torch.testing.assert_close(wanted - plain[1], slope, rtol=1e-6, atol=1e-9)
    for split in splits(sorted(rows))[1:3]:
        torch.testing.assert_close(gradient(config, rows, split)[1], wanted, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("loss", sorted(CLIPPED - {"m2po"}))
def test_a_recomputed_anchor_that_did_not_move_is_the_behaviour_policy(loss: str) -> None:
    rows = make_rows()
    for row in rows.values():
        row.anchor = row.behavior.copy()
    split = [sorted(rows)]
    base = {"policy_loss": loss, "loss_agg_mode": "seq-mean-token-mean"}
    weighted = {"importance": {"level": "token"}, "rejection": {"level": "geometric"}}
    got = gradient(config_of(**base, anchor="recomputed", **weighted), rows, split)
    wanted = gradient(config_of(**base, anchor="behavior"), rows, split)
    assert got[0] == wanted[0] and torch.equal(got[1], wanted[1])


def test_the_interpolated_anchor_is_the_behaviour_policy_up_to_lag_one() -> None:
    rows = make_rows()
    for row in rows.values():
        row.lag, row.anchor = np.minimum(row.lag, 1), None
    got, wanted = (
        gradient(config_of(anchor=anchor), rows, [sorted(rows)])
        for anchor in ("interpolated", "behavior")
    )
    assert got[0] == pytest.approx(wanted[0]) and torch.allclose(got[1], wanted[1])
    for row in rows.values():
        row.lag = row.lag + 2
    assert not torch.allclose(
        gradient(config_of(anchor="interpolated"), rows, [sorted(rows)])[1], wanted[1]
    )


OFF_POLICY: list[dict[str, Any]] = [
    {"importance": {"level": level, "normalize": True}, "anchor": "recomputed"}
    for level in ("token", "sequence", "geometric")
]
OFF_POLICY += [{"opsm_delta": 0.11}, {"rejection": [{"score": "k1", "reduce": "mean", "upper": 0}]}]


@pytest.mark.parametrize(
    ("loss", "mode", "correction"),
    [
        (loss, mode, {"importance": {"level": "token"}})
        for loss in ("ppo_clip", "cispo", "reinforce", "sapo")
        for mode in sorted(AGGREGATIONS)
    ]
    + [("ppo_clip", "token-mean", correction) for correction in OFF_POLICY],
)
def test_tokens_that_are_too_old_have_no_weight_and_stay_in_the_divisors(
    loss: str, mode: str, correction: dict[str, Any]
) -> None:
    """Nor do they count where a row is weighted, masked or rejected as a whole, or weights are
    divided by their mean.
    """
    config = config_of(
        policy_loss=loss,
        loss_agg_mode=mode,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        entropy_coef=0.01,
        **correction,
    )
    bounded, whole, without = make_rows(1), make_rows(1), make_rows(1)
    for key, row in bounded.items():
        row.max_lag = 1
        young = row.lag <= 1
        for name in ("behavior", "lag", "anchor", "reference"):
            setattr(without[key], name, getattr(without[key], name)[young])
    assert any((row.lag > 1).any() for row in whole.values())
    without = {key: row for key, row in without.items() if len(row.lag)}
    split = [sorted(bounded)]
    got = gradient(config, bounded, split)
    wanted = gradient(config, without, [sorted(without)], counted=whole)
    assert got[0] == pytest.approx(wanted[0], rel=1e-9) and torch.allclose(
        got[1], wanted[1], rtol=1e-9
    )
    assert not torch.allclose(got[1], gradient(config, whole, split)[1], rtol=1e-3)


@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_whatever_stands_on_tokens_that_are_too_old_is_no_matter(loss: str) -> None:
    """Neither in the loss nor in the statistics of their row: log-probs of sampler, anchor and
    reference may be anything there.
    """
    config = config_of(
        policy_loss={"name": loss, **TIGHT.get(loss, {})},
        loss_agg_mode="seq-mean-token-mean",
        use_kl_loss=True,
        kl_loss_coef=0.1,
        anchor="recomputed",
        importance={"level": "geometric"},
        rejection={"level": "sequence", "lower": 0.7, "upper": 1.5},
        opsm_delta=0.2,
    )
    rows, junk, metrics = make_rows(), make_rows(), MetricSums()
    for key, row in rows.items():
        row.max_lag = junk[key].max_lag = 1
        for name in ("reference", "anchor"):
            setattr(
                junk[key], name, np.where(row.lag > 1, -9.0, getattr(row, name)).astype(np.float32)
            )
    got, other = (
        gradient(config, rows, [sorted(rows)], metrics=metrics),
        gradient(config, junk, [sorted(rows)]),
    )
    assert got[0] == other[0] and torch.equal(got[1], other[1])
    means = metrics.means()
    tokens = sum(len(row.lag) for row in rows.values())
    assert means["train/staleness_max"] == 1
    assert (
        means["train/stale_share"]
        == sum(int((row.lag > 1).sum()) for row in rows.values()) / tokens
        > 0
    )


@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_no_gradient_reaches_a_token_that_is_too_old(loss: str) -> None:
    config = config_of(
        policy_loss={"name": loss, **TIGHT.get(loss, {})}, loss_agg_mode="seq-mean-token-mean"
    )
    rows, math = (make_rows(), TokenMath(config, Alone()))
    for row in rows.values():
        row.max_lag = 1
    math.assign(rows, owned=rows, values={key: RowValue(1.0 + key[1]) for key in rows}, kl_coef=0.0)
    batch = token_batch(
        [PlanRow(*key, 2, len(row.lag), 0.1, len(row.lag)) for key, row in rows.items()],
        list(rows.values()),
        CPU,
    )
    logprobs = (batch.behavior.double() + 0.01).requires_grad_()
    selection = math.select(3, [batch], [logprobs.detach()])[0] if math.selects else None
    loss_value = math.loss(batch, logprobs, -logprobs.exp(), selection=selection, metrics=None)
    (given,) = torch.autograd.grad(loss_value, logprobs)
    assert (given[batch.lag > 1] == 0).all() and (given[batch.trained == 1] != 0).any()


@pytest.mark.parametrize("mask_stale", [True, False])
def test_old_tokens_of_a_payload_are_masked_or_refused(mask_stale: bool) -> None:
    frame = frame_of(GroupTicket(7, 1, 0), versions=(0, 3))
    row = PlanRow(7, 1, 3, 4, 0.5, 4)
    plan = RankPlan(step=5, group_ids=(7,), updates=(((row,),),), epoch_updates=1)
    if not mask_stale:
        with pytest.raises(StalenessError, match="staleness 1 to 4"):
            decode_rows(plan, pack_frames([frame]), max_staleness=3)
        return
    rows = decode_rows(plan, pack_frames([frame]), max_staleness=3, mask_stale=True)
    assert rows[7, 1].lag.tolist() == [4, 4, 1, 1] and rows[7, 1].trained.tolist() == [0, 0, 1, 1]
    rows[7, 1].advantages = np.ones(4, np.float32)
    batch = token_batch([row], [rows[7, 1]], CPU)
    assert batch.weights.tolist() == [0, 0, 0.5, 0.5] and batch.mask.tolist() == [1] * 4
    future = RankPlan(step=3, group_ids=(7,), updates=(((row,),),), epoch_updates=1)
    with pytest.raises(StalenessError, match="staleness -1"):
        decode_rows(future, pack_frames([frame]), max_staleness=3, mask_stale=True)


@pytest.mark.parametrize("white", [False, "shift", "keep_mean"])
@pytest.mark.parametrize("clip", [None, 0.9])
@pytest.mark.parametrize(
    ("estimator", "gamma"),
    list(itertools.product(["reinforce", "reinforce_plus_plus", "remax"], [1.0, 0.9])),
)
def test_returns_on_the_ranks_are_those_of_the_formula(
    estimator: str, gamma: float, clip: float | None, white: bool | str
) -> None:
    """Token KL in the reward, the reward on the last valid token, discounted returns, baseline or
    whitening: against a plain loop.
    """
    config = config_of(
        adv_estimator=estimator,
        gamma=gamma,
        add_token_level_kl=True,
        advantage_clip=1.5,
        reward_clip_after=clip,
        whiten_advantages=white,
    )
    rows = make_rows()
    math, coef = TokenMath(config, Alone()), 0.3
    sums = {key: math.reward_kl(row) for key, row in rows.items()}
    values = {key: RowValue(1.0 + 0.5 * key[1], 0.25 * key[0]) for key in rows}
    math.assign(rows, owned=rows, values=values, kl_coef=coef)
    returns = {}
    for key, row in rows.items():
        kl = [(float(a) - float(r)) for a, r in zip(row.anchor, row.reference, strict=True)]
        valid = list(range(len(row.lag)))
        assert sums[key] == pytest.approx(sum(kl[t] for t in valid), abs=1e-6)
        rewards = [
            (-coef * kl[t] + (values[key].value if t == valid[-1] else 0.0)) if t in valid else 0.0
            for t in range(len(kl))
        ]
        if clip is not None:
            rewards = [max(-clip, min(clip, reward)) for reward in rewards]
        baseline = values[key].baseline if estimator == "remax" else 0.0
        returns[key] = {
            t: sum(gamma ** (s - t) * rewards[s] for s in range(t, len(kl))) - baseline
            for t in valid
        }
    flat = [value for row in returns.values() for value in row.values()]
    mean = sum(flat) / len(flat)
    std = (sum((value - mean) ** 2 for value in flat) / (len(flat) - 1)) ** 0.5
    for key, row in rows.items():
        for t, value in returns[key].items():
            advantage = value
            if white or estimator == "reinforce_plus_plus":
                advantage = (value - mean) / (std + 1e-6) + mean * (white == "keep_mean")
            assert row.advantages[t] == pytest.approx(
                max(-1.5, min(1.5, advantage)), rel=1e-5, abs=1e-5
            ), (key, t)


def test_each_row_is_whitened_once_whichever_ranks_hold_it() -> None:
    """In later epochs a rank trains rows of others too, which count where they are owned."""
    config = config_of(adv_estimator="reinforce_plus_plus")
    values = {key: RowValue(1.0 + key[1] - 0.5 * (key[0] == 10)) for key in make_rows()}
    alone = make_rows()
    TokenMath(config, Alone()).assign(alone, owned=alone, values=values, kl_coef=0.0)
    parts = [sorted(alone)[:3], sorted(alone)[3:]]
    held = [make_rows(), {key: row for key, row in make_rows().items() if key != (10, 0)}]

    def work(reduce: Collective, gather: Collective, rank: int) -> torch.Tensor:
        math = TokenMath(config, SimpleNamespace(sum=reduce, gather=gather))
        math.assign(held[rank], owned=parts[rank], values=values, kl_coef=0.0)
        return torch.empty(0)

    Ranks(2).run(work)
    for rows in held:
        for key, row in rows.items():
            assert row.advantages.tolist() == pytest.approx(alone[key].advantages.tolist()), key


@pytest.mark.parametrize(
    ("per", "episode", "times"),
    [
        (None, False, [0, 1, 2, 3]),
        (None, True, [0, 0, 1, 1]),
        ("token", True, [0, 1, 2, 3]),
        ("turn", False, [0, 0, 0, 0]),
        ("turn", True, [0, 0, 1, 1]),
    ],
)
def test_what_gamma_discounts_by(per: str | None, episode: bool, times: list[int]) -> None:
    config = config_of(adv_estimator="remax", gamma=0.5, gamma_per=per)
    row = LearnerRow(
        np.zeros(2, np.int32),
        np.zeros(9, np.int32),
        np.array([0, 1, 6, 8]),  # what an environment says in between discounts nothing
        np.full(4, -1.0, np.float32),
        np.zeros(4, np.int64),
        turns=np.array([0, 0, 1, 1]) if episode else None,
    )
    math = TokenMath(config, Alone())
    math.assign({(0, 0): row}, owned=[(0, 0)], values={(0, 0): RowValue(8.0)}, kl_coef=0.0)
    assert row.advantages.tolist() == [8.0 * 0.5 ** (times[-1] - time) for time in times]


def test_rewards_of_turns_stand_at_their_ends() -> None:
    """The return of a turn is what comes from it on, less the baseline of the trajectories."""
    math, rows = TokenMath(config_of(adv_estimator="turn_grpo", gamma=0.5), Alone()), {}
    for key, turns in (((0, 0), np.array([0, 0, 1, 2])), ((0, 1), None)):
        row = LearnerRow(
            np.zeros(2, np.int32),
            np.zeros(4, np.int32),
            np.arange(4),
            np.full(4, -1.0, np.float32),
            np.zeros(4, np.int64),
            turns=turns,
        )
        rows[key] = row
    values = {(0, 0): RowValue(7.0, 2.0, (1.0, 2.0, 4.0)), (0, 1): RowValue(3.0, 2.0, (3.0,))}
    math.assign(rows, owned=list(rows), values=values, kl_coef=0.0)
    assert rows[0, 0].advantages.tolist() == [1.0, 1.0, 2.0, 2.0]
    # without turns it is a plain response, discounted by token
    assert rows[0, 1].advantages.tolist() == [3 / 8 - 2, 3 / 4 - 2, 3 / 2 - 2, 3 - 2]
    values[0, 0] = RowValue(7.0, 2.0, (1.0, 2.0))
    with pytest.raises(ValueError, match="a sequence of 3 turns has rewards of 2"):
        math.assign(rows, owned=list(rows), values=values, kl_coef=0.0)


def test_what_responses_repeat_of_themselves_and_of_each_other() -> None:
    """Against sets of tuples; context and demonstrations are not what a policy said."""
    rng = np.random.default_rng(0)

    def row(tokens: list[int], context: int = 0, given: bool = False) -> LearnerRow:
        places = np.arange(context, context + len(tokens))
        response = np.array([*[9] * context, *tokens], np.int32)
        nothing = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int64)
        return LearnerRow(np.zeros(1, np.int32), response, places, *nothing, given=given)

    texts = [rng.integers(0, 3, rng.integers(1, 60)).tolist() for _ in range(20)]
    rows = {(index // 4, index % 4): row(text) for index, text in enumerate(texts)}
    for group_id in (0, 2, 4):
        rows[group_id, 9] = row([1, 2, 3], context=group_id)
        rows[group_id, 8] = row([1, 2, 3])
        rows[group_id + 1, 9] = row([1, 2, 3], given=True)
    again = windows = 0
    for text in texts:
        found = [tuple(text[at : at + NGRAM]) for at in range(len(text) - NGRAM + 1)]
        again, windows = again + len(found) - len(set(found)), windows + len(found)
    assert again > 50
    shares = {"train/repeated_tokens": (again, windows), "train/same_response": (3, 5)}
    assert repeats(rows) == shares
    assert repeats({}) == {name: (0, 0) for name in shares}


def test_turns_come_with_the_rows_of_episodes() -> None:
    group = make_group(GroupTicket(7, 1, 0), versions=(0, 1))
    one, two = group.rows
    one.turn_rewards, two.turn_rewards = [0.0, 1.0], [0.5]
    one.segments, one.response_ids = [(1, 1), (2, 3)], np.arange(7)
    planned = (PlanRow(7, 0, 3, 7, 0.5, 4), PlanRow(7, 1, 3, 4, 0.5, 4))
    plan = RankPlan(step=2, group_ids=(7,), updates=((planned,),), epoch_updates=1)
    rows = decode_rows(plan, pack_frames([encode_group(group)]), max_staleness=3)
    assert rows[7, 0].turns.tolist() == [0, 1, 1, 1] and rows[7, 1].turns.tolist() == [0] * 4
    assert rows[7, 0].sampled.tolist() == [1, 4, 5, 6]
    for row in group.rows:
        row.turn_rewards = None
    rows = decode_rows(plan, pack_frames([encode_group(group)]), max_staleness=3)
    assert rows[7, 0].turns is None


def test_the_sampler_is_compared_by_what_sets_it_apart() -> None:
    rows = make_rows()
    planned = [PlanRow(*key, 2, len(row.lag), 1.0, len(row.lag)) for key, row in rows.items()]
    rows[10, 2].lag[:] = 0
    for row in rows.values():
        row.advantages = np.zeros(len(row.lag), np.float32)
    batch = token_batch(planned, [rows[row.key] for row in planned], CPU)
    logprobs = batch.behavior + torch.linspace(-0.1, 0.2, len(batch.behavior))
    metrics = MetricSums()
    compare_sampler(metrics, batch, logprobs)
    causes = ("sampler", "kv_cache", "version")
    differences: dict[str, list[float]] = {cause: [] for cause in causes}
    position = 0
    for row in planned:
        one = rows[row.key]
        for lag in one.lag:
            fresh = "sampler" if max(one.lag) == 0 else "kv_cache"
            error = abs(float(logprobs[position] - batch.behavior[position]))
            differences["version" if lag else fresh].append(error)
            position += 1
    assert all(differences.values())
    wanted: dict[str, float] = {}
    for cause, values in differences.items():
        name = f"weights/{cause}_error"
        wanted |= {name: np.mean(values), f"{name}_max": max(values)}
        wanted[f"{name}_share"] = len(values) / position
    assert metrics.means() == pytest.approx(wanted, rel=1e-5)


def test_tokens_outside_the_comparison_count_for_no_cause() -> None:
    """Of a demonstration, which nobody has sampled; a cause that does not occur has a share of 0
    and no difference.
    """
    rows = make_rows()
    for row in rows.values():
        row.lag[:] = 0
        row.advantages = np.zeros(len(row.lag), np.float32)
    [given, *_] = rows
    rows[given].given = True
    planned = [PlanRow(*key, 2, len(row.lag), 1.0, len(row.lag)) for key, row in rows.items()]
    batch = token_batch(planned, [rows[row.key] for row in planned], CPU)
    apart = torch.where(batch.mask != 0, 0.25, 7.0)
    metrics = MetricSums()
    compare_sampler(metrics, batch, batch.behavior + apart)
    found = metrics.means()
    assert found["weights/sampler_error"] == pytest.approx(0.25, rel=1e-5)
    assert found["weights/sampler_error_max"] == pytest.approx(0.25, rel=1e-5)
    shares = [found[f"weights/{cause}_error_share"] for cause in ("sampler", "kv_cache", "version")]
    assert shares == [1.0, 0.0, 0.0] and "weights/version_error_max" not in found
