"""MLflow shows the main metrics, those first that are looked at first; what never happened has no
chart.
"""

from __future__ import annotations

import pytest

from async_grpo.observe.tracking.shown import shown


def test_what_is_looked_at_first_comes_first() -> None:
    names = ["replay/ready", "train/loss", "weights/drift", "eval/pass_at_1", "rollout/score"]
    sent = sorted(name for one in names if (name := shown(one, 0.5)) is not None)
    assert sent == [
        "eval/pass_at_1",
        "rollout/score",
        "train/loss",
        "watch/replay/ready",
        "watch/weights/drift",
    ]


@pytest.mark.parametrize("name", ["cluster/restarts", "replay/expired", "rollout/attempts_failed"])
def test_a_counter_is_shown_once_it_counts(name: str) -> None:
    assert shown(name, 0.0) is None
    assert shown(name, 1.0) in (name, f"watch/{name}")


def test_the_others_are_asked_for() -> None:
    assert shown("train/abs_log_ratio", 1.0) is None
    assert shown("train/abs_log_ratio", 1.0, every=True) == "train/abs_log_ratio"
    assert shown("replay/capacity", 0.0, every=True) == "watch/replay/capacity"


def test_metrics_of_ones_own_pass() -> None:
    for name in ("mine", "mine/loss", "system/memory", "train/loss/mine"):
        assert shown(name, 0.0) == name


def test_the_lags_of_a_large_bound_are_few_charts() -> None:
    ends = ("score", "token_share", "pg_clipfrac", "ess", "rho", "entropy", "sequence_length")
    sent = [
        shown(f"train/staleness_{lag}/{end}", 1.0) for lag in ("0", "3-4", "9-16") for end in ends
    ]
    assert sum(name is not None for name in sent) == 3 * 4
