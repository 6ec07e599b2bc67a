"""What a simulated run is about: everything that takes time in a run takes it here too."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from async_grpo.tools.predict.engine import Speed
from tests.support.simulation.scenario import Scenario
from tests.support.simulation.simulator import simulate

BASE = Scenario(
    max_staleness=2,
    rollout_batch_size=8,
    group_size=4,
    mean_tokens=32.0,
    spread=0.5,
    longest=4.0,
    speed=Speed(((1, 40.0), (16, 320.0)), prompt=4000.0),
    places=16,
    actors=2,
    total_steps=30,
    learner_s=1.0,
    noise=0.0,
    publish_s=0.05,
    poll_s=0.05,
)


def rate(**changes: object) -> float:
    """Trained groups per second."""
    return simulate(replace(BASE, **changes)).figures(skip=5)["groups_per_s"]


QUICK = {"learner_s": 0.2}
"""A learner that waits for engines."""


@cache
def quick_rate() -> float:
    return rate(**QUICK)


def test_a_scenario_always_gives_the_same_run() -> None:
    busy = replace(BASE, turns=(1, 4), environment_s=0.2, death=0.02, call_s=0.01)
    first, second = simulate(busy), simulate(busy)
    assert first.steps == second.steps and first.metrics == second.metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"speed": Speed(((1, 20.0), (16, 160.0)), prompt=4000.0)},
        {"prompt_tokens": 400.0},
        {"turns": (8, 8), "environment_s": 1.0, "places": 8},
        {"turns": (8, 8), "prompt_tokens": 100.0},
        {"pause_s": 0.5},
        {"verify_s": 0.2},
        {"call_s": 0.05},
        {"places": 4},
        {"actors": 1},
        {"seen": ((64, 64, 64, 128),)},
        {"death": 0.2},
        {"publish_s": 3.0},
    ],
    ids=str,
)
def test_what_takes_longer_trains_fewer_groups(changes: dict[str, object]) -> None:
    assert rate(**QUICK | changes) < 0.9 * quick_rate()


@pytest.mark.slow
def test_a_learner_beside_engines_is_slower_by_the_contention() -> None:
    even = {"learner_s": 1.5, "max_staleness": 4}
    slower = rate(**even) / rate(**even, contention=1.5)
    assert 1.3 < slower <= 1.5, "engines generate nearly all the time"
    rare = {"learner_s": 20.0}
    slower = rate(**rare) / rate(**rare, contention=1.5)
    assert 1.0 < slower < 1.1, "a few seconds of a step"
    alone = {"learner_s": 4.0, "max_staleness": 0}
    assert rate(**alone, contention=1.5) == pytest.approx(rate(**alone)), "engines wait meanwhile"


def test_engines_limit_at_the_speed_of_full_ones() -> None:
    """Two engines of 320 tokens per second, groups of 128 tokens on average."""
    found = rate(learner_s=0.01, max_staleness=8, spread=0.1, total_steps=60)
    assert found == pytest.approx(2 * 320 / 128, rel=0.1)


@pytest.mark.slow
def test_long_episodes_become_too_old() -> None:
    """Thirty turns last longer than the learner steps that the bound allows."""
    long = replace(
        BASE, turns=(1, 30), environment_s=0.3, learner_s=0.3, on_stale="mask", total_steps=18
    )
    masked, few = (
        simulate(one).figures(skip=5)["masked"] for one in (long, replace(long, turns=(1, 2)))
    )
    assert masked > 1.3 * few
    waits, expires = (
        simulate(replace(long, on_stale=mode)).figures(skip=5) for mode in ("wait", "expire")
    )
    assert waits["idle"] > 0.5 and waits["masked"] == 0
    assert expires["expired"] > 0.05
