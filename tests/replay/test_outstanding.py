"""How many groups may be outstanding: no more than the learner needs, whatever it needs."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from async_grpo.replay.outstanding import WINDOW, OutstandingLimit
from async_grpo.replay.rules import QueueSettings
from async_grpo.tools.predict.engine import Speed
from tests.support.queues import queue_settings
from tests.support.simulation.scenario import Result, Scenario
from tests.support.simulation.simulator import simulate

SIZE = 8
SEEDS = range(1)


def settings(**changes: object) -> QueueSettings:
    values = {"rollout_batch_size": SIZE, "max_staleness": 7, "outstanding": None} | changes
    return queue_settings(**values)


def after(limit: OutstandingLimit, *left: int, starved: bool = False, refused: bool = True) -> int:
    """The limit after departures with these groups left over."""
    for one in left:
        if starved:
            limit.starves()
        if refused:
            limit.refuses()
        limit.departs(one)
    return limit.groups


# ---- the rule


def test_it_begins_with_a_batch_in_training_and_one_that_is_generated() -> None:
    assert OutstandingLimit(settings()).groups == 2 * SIZE
    assert OutstandingLimit(settings(publish_every=3)).groups == 4 * SIZE
    assert OutstandingLimit(settings(max_staleness=1, publish_every=2)).groups == 2 * SIZE


def test_it_rises_faster_as_long_as_the_learner_starves() -> None:
    limit = OutstandingLimit(settings())
    grown = [after(limit, 0, starved=True) for _ in range(7)]
    assert grown == [18, 20, 24, 32, 48, 64, 64], "a quarter of a batch, then ever more, at most B"
    assert after(limit, 3) == 64
    limit.groups = 20
    assert after(limit, 0, starved=True) == 22, "it begins anew"


def test_a_learner_that_starves_for_want_of_engines_changes_nothing() -> None:
    """No actor asked for more tickets."""
    assert after(OutstandingLimit(settings()), 0, 0, 0, starved=True, refused=False) == 2 * SIZE


def test_it_falls_by_half_of_what_is_always_too_many() -> None:
    limit = OutstandingLimit(settings())
    limit.groups = 40
    assert after(limit, 20, 16, 30) == 40
    assert after(limit, 20) == 40 - 6, "16 were always there, and half a batch may be"
    assert after(limit, 9, 9, 9) == 34, "what it has changed must show first"
    assert after(limit, 4) == 34
    assert after(limit, 9, 9, 5) == 34
    assert after(limit, 9) == 33
    assert after(limit, *[12] * WINDOW) == 29
    assert after(limit, *[60] * 40) == SIZE + 1, "enough for a batch, and one more"


def test_groups_that_are_left_over_are_counted_once_there_are_enough_departures() -> None:
    limit = OutstandingLimit(settings(outstanding=20))
    assert [after(limit, left) and limit.standing for left in (5, 4, 9, 6, 7, 8)] == [
        0, 0, 0, 4, 4, 6
    ]  # fmt: skip
    after(limit, 3, starved=True)
    assert limit.standing == 0


def test_publications_keep_the_slots_of_all_steps_since_the_last_one() -> None:
    limit = OutstandingLimit(settings(publish_every=3))
    assert after(limit, *[60] * 60) == 3 * SIZE + 1


@pytest.mark.parametrize(
    ("changes", "groups"),
    [({"outstanding": 20}, 20), ({"max_staleness": 0}, SIZE), ({"outstanding": 64}, 64)],
)
def test_a_number_and_a_synchronous_run_stay_as_they_are(
    changes: dict[str, int], groups: int
) -> None:
    limit = OutstandingLimit(settings(**changes))
    assert after(limit, 0, 0, 0, starved=True) == groups == after(limit, *[60] * 20)
    assert limit.asks_refused == 23


# ---- in simulated runs


def balanced(scenario: Scenario) -> Scenario:
    """With a learner that needs as long for a batch as the producers on average, all of their slots
    taken.
    """
    group = statistics.mean(sum(scenario.lengths(group_id, 1)) for group_id in range(4_000))
    full = scenario.actors * scenario.speed.total(scenario.places)
    step_s = scenario.rollout_batch_size * group / full
    return replace(scenario, learner_s=step_s, publish_s=0.05 * step_s, poll_s=0.25 * step_s)


EVEN = balanced(
    Scenario(
        rollout_batch_size=16,
        group_size=8,
        mean_tokens=32.0,
        spread=1.0,
        longest=8.0,
        speed=Speed(((1, 96.0), (32, 1024.0))),
        actors=8,
        places=32,
        total_steps=80,
    )
)
"""A response alone has three times the speed that it has in a full engine."""
DEEP = replace(EVEN, max_staleness=7)
TAILS = replace(DEEP, learner_s=4 * EVEN.learner_s)
"""Engines are four times as fast as the learner, and the longest responses last two steps."""
SHORT = replace(DEEP, spread=0.3, learner_s=1.5 * EVEN.learner_s)


def runs(scenario: Scenario) -> list[Result]:
    return [simulate(replace(scenario, seed=seed)) for seed in SEEDS]


def figures(scenario: Scenario) -> tuple[float, float]:
    """Share of the time in which the learner is idle, and the mean lag."""
    found = [run.figures(skip=10) for run in runs(scenario)]
    return tuple(statistics.mean(one[name] for one in found) for name in ("idle", "lag_mean"))


@pytest.mark.parametrize(
    "scenario",
    [
        SHORT,
        pytest.param(TAILS, marks=pytest.mark.slow),
        pytest.param(replace(TAILS, on_stale="mask"), marks=pytest.mark.slow),
    ],
)
def test_half_the_lag_for_little_idle_time(scenario: Scenario) -> None:
    deep_idle, deep_lag = figures(replace(scenario, outstanding=(7 + 1) * 16))
    idle, lag = figures(scenario)
    assert lag < 0.5 * deep_lag and idle < deep_idle + 0.02


def test_engines_that_are_too_slow_get_all_that_they_ask_for() -> None:
    slow = replace(DEEP, learner_s=0.3 * EVEN.learner_s, actors=2)
    deep_idle, _ = figures(replace(slow, outstanding=(7 + 1) * 16))
    assert figures(slow)[0] < deep_idle + 0.02


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_it_settles_within_ten_steps_of_a_change_of_the_learner(factor: float) -> None:
    """From step 40 on the learner takes `factor` times as long."""
    half = EVEN.rollout_batch_size / 2
    for seed in SEEDS:
        run = simulate(replace(SHORT, slower=(40, factor), seed=seed))
        limits = [step.limit for step in run.steps]
        assert max(limits[20:40]) - min(limits[20:40]) <= half, limits
        assert max(limits[60:]) - min(limits[60:]) <= half, limits
        settled = statistics.mean(limits[60:])
        assert max(abs(limit - settled) for limit in limits[50:]) <= half, limits
