"""What weighs, leaves out and penalises single tokens: against slow loops over them, in value and
gradient, for any split into micro-batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from async_grpo.algo.metrics import MetricSums
from async_grpo.learner.batching import PlanRow, RowKey
from async_grpo.learner.rows import LearnerRow, token_batch
from async_grpo.learner.token_math import TokenMath
from tests.support.algo_case import slow_score
from tests.support.token_case import (
    CPU,
    Alone,
    Token,
    config_of,
    gradient,
    make_rows,
    over_ranks,
    parameters,
    slow_tokens,
    splits,
)

Slow = Callable[[dict[RowKey, list[Token]]], Tensor]
"""The loss of an optimizer step from the tokens of its rows."""


def agree(slow: Slow, rows: dict[RowKey, LearnerRow] | None = None, **algorithm: Any) -> None:
    """The product's loss and gradient are those of the slow loop, however rows are dealt out."""
    rows, theta = make_rows() if rows is None else rows, parameters()
    config, loss = config_of(**algorithm), slow(slow_tokens(rows, theta))
    wanted = torch.autograd.grad(loss, theta)[0]
    assert wanted.abs().max() > 1e-4
    keys = sorted(rows)
    found = [gradient(config, rows, split) for split in splits(keys)]
    found += [
        over_ranks(config, rows, parts)
        for parts in (
            [[keys[:3], keys[3:4]], [keys[4:]]],
            [[keys[1::2]], [[]], [keys[0:1], keys[2::2]]],
        )
    ]
    for value, got in found:
        assert value == pytest.approx(float(loss.detach()), rel=1e-6, abs=1e-9)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-8)


def total(terms: list[Tensor]) -> Tensor:
    return torch.stack(terms).sum()


@pytest.mark.parametrize(
    "rules",
    [
        [("w", "sum", 0.8, 1.3)],
        [("k1", "token", -0.12, 0.12), ("k3", "max", None, 0.04)],
        [("w", "min", 0.85, None), ("w", "max", None, 1.2)],
        [("difference", "token", -0.02, 0.03)],
        [("k2", "mean", None, 0.006), ("k1", "mean", -0.05, None)],
    ],
)
def test_rejection_is_the_slow_loop(rules: list[tuple[Any, ...]]) -> None:
    """Rejected tokens and rows leave the numerator only."""
    counts: list[float] = []

    def inside(row: list[Token], token: Token) -> bool:
        for score, reduce, lower, upper in rules:
            chosen = [token.pair] if reduce == "token" else [one.pair for one in row]
            s = slow_score(chosen, score, reduce.replace("token", "sum"))
            if (lower is not None and s < lower) or (upper is not None and s > upper):
                return False
        return True

    def slow(rows: dict[RowKey, list[Token]]) -> Tensor:
        kept = [[inside(row, token) for token in row] for row in rows.values()]
        counts.append(sum(map(sum, kept)))
        terms = [
            token.clipped(token.ratio) * float(one)
            for row, flags in zip(rows.values(), kept, strict=True)
            for token, one in zip(row, flags, strict=True)
        ]
        return total(terms) / len(terms)

    names = ("score", "reduce", "lower", "upper")
    agree(
        slow, anchor="recomputed", rejection=[dict(zip(names, rule, strict=True)) for rule in rules]
    )
    assert 0 < counts[0] < 37, "some are rejected, some are not"


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("source", ["recomputed", "interpolated", "reinforce"])
def test_normalized_importance_is_the_slow_loop(level: str, source: str) -> None:
    """Weights divided by their mean over the tokens or rows of the whole step, after truncation;
    rejection does not change that mean.
    """
    upper = {"token": 1.15, "sequence": 1.1, "geometric": 1.01}[level]
    mode, lower = ("mask", 0.5) if level == "token" else ("truncate", 0.0)
    rows, largest = make_rows(), [0.0]
    lags = {key: row.lag.tolist() for key, row in rows.items()}

    def log_w(key: RowKey, t: int, token: Token) -> float:
        if source == "recomputed":
            return token.log_w
        current, lag = float(token.current.detach()), lags[key][t]
        return (current - token.behavior) * (
            1 if source == "reinforce" else max(lag - 1, 0) / max(lag, 1)
        )

    def slow(found: dict[RowKey, list[Token]]) -> Tensor:
        logs = {
            key: [log_w(key, t, token) for t, token in enumerate(row)] for key, row in found.items()
        }
        weights = {}
        for key, row in logs.items():
            joint = sum(row) / (len(row) if level == "geometric" else 1)
            ratios = [math.exp(one if level == "token" else joint) for one in row]
            weights[key] = [
                min(w, upper) if mode == "truncate" else w * (lower <= w <= upper) for w in ratios
            ]
        every = [w for row in weights.values() for w in (row if level == "token" else row[:1])]
        mean = sum(every) / len(every)
        largest[0] = max(every) / mean
        terms = []
        for key, row in found.items():
            for token, w, x in zip(row, weights[key], logs[key], strict=True):
                if source == "reinforce":
                    term = -token.advantage * token.current
                else:
                    anchor = token.behavior + x if source == "interpolated" else token.anchor
                    term = token.clipped((token.current - anchor).exp())
                terms.append(term * w / mean * (-x >= -0.3))
        return total(terms) / len(terms)

    importance = {"level": level, "mode": mode, "lower": lower, "upper": upper, "normalize": True}
    settings: dict[str, Any] = {"anchor": source}
    if source == "reinforce":
        settings = {"policy_loss": "reinforce"}
    agree(
        slow,
        rows,
        importance=importance,
        rejection=[{"score": "k1", "reduce": "token", "lower": -0.3}],
        **settings,
    )
    assert largest[0] > upper, "a weight exceeds the cap"


@pytest.mark.parametrize(
    ("loss", "mode", "level"),
    [
        ("gspo", "seq-mean-token-sum", "geometric"),
        ("gspo", "token-sum", "none"),
        ("gspo", "seq-mean-token-sum-norm", "none"),
        ("gspo_token", "seq-mean-token-mean", "token"),
        ("gspo_token", "seq-mean-token-sum", "token"),
    ],
)
def test_gspo_by_length_and_with_token_weights_is_the_slow_loop(
    loss: str, mode: str, level: str
) -> None:
    def slow(rows: dict[RowKey, list[Token]]) -> Tensor:
        responses = []
        for row in rows.values():
            mean = total([token.current - token.anchor for token in row]) / len(row)
            joint = math.exp(sum(token.log_w for token in row) / len(row))
            terms = []
            for token in row:
                ratio = mean.exp()
                if loss == "gspo_token":
                    ratio = ratio.detach() * (token.current - token.current.detach()).exp()
                w = {"none": 1.0, "geometric": joint, "token": math.exp(token.log_w)}[level]
                terms.append(token.clipped(ratio, 0.02, 0.03) * min(w, 1.1))
            responses.append(total(terms) / (len(row) if mode == "seq-mean-token-mean" else 1))
        divisor = 1 if mode == "token-sum" else len(rows)
        return total(responses) / divisor / (16 if mode == "seq-mean-token-sum-norm" else 1)

    agree(
        slow,
        policy_loss=loss,
        loss_agg_mode=mode,
        anchor="recomputed",
        clip_ratio_low=0.02,
        clip_ratio_high=0.03,
        importance={"level": level, "upper": 1.1},
    )


def test_opsm_measures_from_the_anchor_that_the_loss_has() -> None:
    """From an interpolated one too, which is not that of the batch."""
    rows = make_rows(1)
    dropped: dict[str, set[RowKey]] = {"interpolated": set(), "sampler": set()}
    for row in rows.values():
        row.anchor = row.behavior.copy()
    lags = {key: row.lag.tolist() for key, row in rows.items()}

    def slow(found: dict[RowKey, list[Token]]) -> Tensor:
        terms = []
        for key, row in found.items():
            fallen = {
                name: [
                    float(token.behavior - token.current.detach())
                    / (1 if name == "sampler" else max(lag, 1))
                    for token, lag in zip(row, lags[key], strict=True)
                ]
                for name in dropped
            }
            for name, values in fallen.items():
                if row[0].advantage < 0 and sum(values) / len(row) > 0.12:
                    dropped[name].add(key)
            for token, x in zip(row, fallen["interpolated"], strict=True):
                anchor = float(token.current.detach()) + x
                kept = key not in dropped["interpolated"]
                terms.append(token.clipped((token.current - anchor).exp()) * kept)
        return total(terms) / len(terms)

    agree(slow, rows, anchor="interpolated", opsm_delta=0.12, opsm_against="anchor")
    assert dropped["sampler"] != dropped["interpolated"] and all(dropped.values())


def test_clip_cov_selects_by_the_interval_of_the_lag() -> None:
    """Tokens that the interval of their lag clips are none to select from."""
    rows, clipped = make_rows(), {"now": 0, "without lag": 0}
    lags = [rows[key].lag.tolist() for key in sorted(rows)]

    def slow(found: dict[RowKey, list[Token]]) -> Tensor:
        every = [token for row in found.values() for token in row]
        now = [float(token.current.detach()) for token in every]
        mean = sum(now) / len(now)
        center = sum(token.advantage for token in every) / len(every)
        terms = []
        for token, at, lag in zip(every, now, [k for row in lags for k in row], strict=True):
            sign, width = math.copysign(1, token.advantage), 0.2 / (1 + lag)
            moved = sign * (math.exp(at - token.anchor) - 1)
            inside = -0.5 < (token.advantage - center) * (at - mean) < 2
            clipped["now"] += inside and moved > width
            clipped["without lag"] += inside and moved > 0.2
            kept = not inside or moved > width
            terms.append(token.clipped(token.ratio, width, width) * kept)
        return total(terms) / len(terms)

    agree(
        slow,
        rows,
        policy_loss={"name": "clip_cov", "ratio": 1.0, "lower": -0.5, "upper": 2.0},
        anchor="recomputed",
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        clip_schedule={"name": "harmonic", "rate": 1.0},
    )
    assert clipped["now"] > clipped["without lag"] > 0


@pytest.mark.parametrize("against", ["behavior", "anchor"])
def test_opsm_is_the_slow_loop(against: str) -> None:
    dropped: dict[str, set[RowKey]] = {"behavior": set(), "anchor": set()}

    def slow(rows: dict[RowKey, list[Token]]) -> Tensor:
        terms = []
        for key, row in rows.items():
            for name, keys in dropped.items():
                past = [token.anchor if name == "anchor" else token.behavior for token in row]
                now = [float(token.current.detach()) for token in row]
                if row[0].advantage < 0 and (sum(past) - sum(now)) / len(row) > 0.11:
                    keys.add(key)
            terms += [token.clipped(token.ratio) * (key not in dropped[against]) for token in row]
        return total(terms) / len(terms)

    agree(slow, make_rows(1), anchor="recomputed", opsm_delta=0.11, opsm_against=against)
    assert dropped["behavior"] != dropped["anchor"] and all(dropped.values())


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_penalty_towards_the_sampler_is_the_slow_loop(mode: str) -> None:
    """On every token, whatever its weight."""

    def slow(rows: dict[RowKey, list[Token]]) -> Tensor:
        found = []
        for row in rows.values():
            weight = 1 / len(row) if mode == "seq-mean-token-mean" else 1.0
            for token in row:
                inside = 0.9 <= math.exp(token.log_w) <= 1.1
                penalty = 0.3 * (token.current - token.behavior) ** 2
                found.append((token.clipped(token.ratio) * inside + penalty) * weight)
        return total(found) / (len(rows) if mode == "seq-mean-token-mean" else len(found))

    agree(
        slow,
        anchor="recomputed",
        loss_agg_mode=mode,
        behavior_penalty=0.3,
        rejection=[{"score": "w", "reduce": "token", "lower": 0.9, "upper": 1.1}],
    )


def test_the_penalty_does_not_let_go_of_far_tokens_and_leaves_out_those_that_are_too_old() -> None:
    rows, metrics = make_rows(), MetricSums()
    for row in rows.values():
        row.max_lag, row.advantages = 1, np.zeros(len(row.lag), np.float32)
    planned = [PlanRow(*key, 2, len(row.lag), 0.1, len(row.lag)) for key, row in rows.items()]
    batch = token_batch(planned, list(rows.values()), CPU)
    logprobs = (batch.behavior.double() - 100).requires_grad_()
    loss = TokenMath(config_of(behavior_penalty=0.5), Alone()).loss(
        batch, logprobs, -logprobs.exp(), selection=None, metrics=metrics
    )
    (given,) = torch.autograd.grad(loss, logprobs)
    old = batch.lag > 1
    assert 0 < old.sum() < len(old) and not given[old].any()
    assert given[~old].tolist() == pytest.approx([0.1 * 0.5 * 2 * -100] * int((~old).sum()))
    assert metrics.means()["train/behavior_distance"] == pytest.approx(100**2)


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo_token"])
def test_the_top_entropy_share_is_the_slow_loop(loss: str) -> None:
    """Of all tokens of the step; the others stay in the divisors."""
    share, chosen = 0.3, set[RowKey]()
    mode = "token-mean" if loss == "ppo_clip" else "seq-mean-token-mean"

    def slow(rows: dict[RowKey, list[Token]]) -> Tensor:
        every = sorted(float(token.entropy.detach()) for row in rows.values() for token in row)
        least = every[-int(share * len(every))]
        found = []
        for key, row in rows.items():
            ratio = (total([token.current - token.anchor for token in row]) / len(row)).exp()
            for token in row:
                if loss == "gspo_token":
                    own = ratio.detach() * (token.current - token.current.detach()).exp()
                    term = token.clipped(own) / len(row) / len(rows)
                else:
                    term = token.clipped(token.ratio) / len(every)
                inside = float(token.entropy.detach()) >= least
                chosen.update([key] * inside)
                bonus = token.entropy / (
                    len(every) if mode == "token-mean" else len(row) * len(rows)
                )
                found.append(term * inside - 0.05 * bonus)
        return total(found)

    agree(
        slow,
        policy_loss=loss,
        loss_agg_mode=mode,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        anchor="recomputed",
        entropy_coef=0.05,
        top_entropy_share=share,
    )
    assert 1 < len(chosen) < 8
