"""Trackers get the main metrics, MLflow those first that are looked at first. What never happened
has no chart.
"""

from __future__ import annotations

import pytest

from async_grpo.observe.tracking.shown import is_shown, placed


def test_what_is_looked_at_first_comes_first_in_mlflow() -> None:
    names = ["replay/ready", "train/loss", "weights/drift", "eval/pass_at_1", "rollout/score"]
    assert sorted(placed(one) for one in names if is_shown(one, 0.5)) == [
        "eval/pass_at_1",
        "rollout/score",
        "train/loss",
        "watch/replay/ready",
        "watch/weights/drift",
    ]


@pytest.mark.parametrize("name", ["cluster/restarts", "replay/expired", "rollout/attempts_failed"])
def test_a_counter_is_shown_once_it_counts(name: str) -> None:
    assert not is_shown(name, 0.0) and is_shown(name, 1.0)


def test_the_others_are_asked_for() -> None:
    for name in ("train/abs_log_ratio", "replay/capacity", "replay/expired"):
        assert not is_shown(name, 0.0) and is_shown(name, 0.0, every=True)


def test_metrics_of_ones_own_pass() -> None:
    for name in ("mine", "mine/loss", "system/memory", "train/loss/mine"):
        assert is_shown(name, 0.0) and placed(name) == name


def test_the_lags_of_a_large_bound_are_few_charts() -> None:
    ends = ("score", "token_share", "pg_clipfrac", "ess", "rho", "entropy", "sequence_length")
    lags = ("0", "3-4", "9-16")
    names = [f"train/staleness_{lag}/{end}" for lag in lags for end in ends]
    assert sum(is_shown(name, 1.0) for name in names) == 3 * 4
