"""The rehearsal of a run against the real queue in invented time, and against what can be computed
by hand.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from async_grpo.tools.predict.advice import best_split, least_outstanding, one_change, said
from async_grpo.tools.predict.engine import Speed
from async_grpo.tools.predict.rehearsal import Prediction, Rehearsal, predict
from tests.support.plan_case import BASE
from tests.support.simulation.scenario import Scenario
from tests.support.simulation.simulator import simulate


def test_one_after_the_other() -> None:
    """With one group of one response of 80 tokens at 40 tokens/s and steps of 4 s: 2 + 4 s."""
    alone = replace(BASE, batch=1, responses=1, lengths=((80,),), actors=1, max_staleness=0)
    found = predict(alone)
    assert found.step_s == pytest.approx(6.0) and found.idle == pytest.approx(2 / 6)
    assert found.groups_per_s == pytest.approx(1 / 6) == found.tokens_per_s / 80
    assert (found.staleness_mean, found.staleness_max, found.outstanding) == (0, 0, 1)


def test_a_learner_that_is_the_limit_sets_the_pace() -> None:
    found = predict(replace(BASE, learner_s=100.0, max_staleness=4))
    assert found.step_s == pytest.approx(100.0) and found.idle == 0
    full = predict(replace(BASE, learner_s=100.0, max_staleness=4, outstanding=40))
    assert full.staleness_mean == 4 > found.staleness_mean
    assert full.groups_per_s == pytest.approx(replace(BASE, learner_s=100.0).limits()["learner"])


@pytest.mark.parametrize(
    ("change", "slower"),
    [
        ({"learner_s": 4.0}, True),
        ({"contention": 1.5}, True),
        ({"actors": 1}, True),
        ({"places": 2}, True),
        ({"verify_s": 0.5}, True),
        ({"verify_s": 0.02, "verifiers": 8}, False),
        ({"pause_s": 3.0}, True),
        ({"exposed_s": 2.0}, True),
        ({"publish_s": 6.0, "max_staleness": 0}, True),
        ({"publish_s": 6.0, "exposed_s": 6.0}, True),
        ({"publish_s": 6.0, "exposed_s": 6.0, "every_steps": 3}, True),
        ({"delay_s": 9.0, "max_staleness": 1}, True),
        ({"speed": Speed(((1.0, 4.0), (16.0, 32.0)))}, True),
        ({"max_staleness": 0}, True),
        ({"outstanding": 9}, True),
        ({"on_stale": "mask"}, False),
    ],
    ids=str,
)
def test_what_takes_longer_trains_fewer_groups(change: dict[str, object], slower: bool) -> None:
    fast = replace(BASE, learner_s=1.5)
    before, after = predict(fast), predict(replace(fast, **change))
    assert (after.groups_per_s < 0.97 * before.groups_per_s) == slower


def test_a_publication_in_two_steps_costs_half() -> None:
    often = replace(BASE, learner_s=1.0, exposed_s=2.0, publish_s=2.0, speed=Speed.alone(1e4))
    seldom = replace(often, every_steps=2, max_staleness=3)
    assert predict(often).step_s == pytest.approx(3.0, rel=0.01)
    assert predict(seldom).step_s == pytest.approx(2.0, rel=0.01)


def test_too_old_tokens_have_no_weight() -> None:
    """A response of 400 tokens at 40 tokens/s lives through ten steps of 1 s; others are short."""
    tails = replace(BASE, lengths=(*((4, 4, 4, 4),) * 7, (4, 4, 4, 400)), learner_s=1.0)
    waits, masks = predict(tails), predict(replace(tails, on_stale="mask"))
    assert waits.masked == 0 < masks.masked < 1
    assert waits.idle > masks.idle + 0.3
    assert waits.staleness_max == 2 and masks.staleness_max == 2
    expired = predict(replace(tails, on_stale="expire"))
    assert expired.masked > 0 and expired.staleness_max <= 2


@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize(
    ("learner_s", "verify_s"), [(1.0, 0.0), (2.5, 0.0), (6.0, 0.0), (2.0, 0.15)]
)
def test_against_the_real_queue(bound: int, learner_s: float, verify_s: float) -> None:
    """Throughput within 10 %, idle within 5 points; lag within 10 % or 0.3, as `auto` follows the
    draws.
    """
    work = replace(BASE, max_staleness=bound, learner_s=learner_s, verify_s=verify_s)
    found = predict(work)
    scenario = replace(Scenario.of(work, steps=60), poll_s=0.05, noise=0.0, measured=True)
    result = simulate(scenario, checked=False)
    real = result.figures(skip=10)
    assert found.groups_per_s == pytest.approx(real["groups_per_s"], rel=0.10)
    assert abs(found.idle - real["idle"]) <= 0.05
    lag = fmean(line["replay/staleness_mean"] for line in result.lines[10:-10])
    assert found.staleness_mean == pytest.approx(lag, rel=0.10, abs=0.3)
    assert found.staleness_max == real["lag_max"]


def test_a_workload_and_its_scenario_are_the_same() -> None:
    work = replace(BASE, verify_s=0.1, publish_s=0.5, pause_s=0.1, contention=1.2)
    again = Scenario.of(work, steps=9).workload()
    assert replace(again, lengths=work.lengths) == work
    assert set(again.lengths) == set(work.lengths)


def test_limits_in_closed_form() -> None:
    work = replace(BASE, verify_s=0.5, exposed_s=1.0, pause_s=0.5, contention=1.5)
    found, tokens = work.limits(), (100 + 95 + 100) / 3
    assert found["learner"] == pytest.approx(8 / (4.0 * 1.5 + 1.0))
    assert found["engines"] == pytest.approx(8 / (8 * tokens / (2 * 320) + 0.5))
    assert found["verifiers"] == pytest.approx(2 / (4 * 0.5))
    assert found["tail"] == pytest.approx(3 * 8 / (80 / 20 + 7))
    assert found["slots"] == pytest.approx(24 / ((40 + 80 + 25) / 3 / 20 + 7))
    assert replace(work, outstanding=12).limits()["slots"] == pytest.approx(found["slots"] / 2)
    assert replace(work, on_stale="mask").limits()["tail"] == float("inf")
    assert BASE.limits()["verifiers"] == float("inf")
    assert replace(work, max_staleness=0).limits()["learner"] == pytest.approx(8 / 5)


def test_no_rehearsal_is_above_the_limits() -> None:
    for bound in (0, 1, 3):
        for learner_s in (0.2, 2.0, 20.0):
            work = replace(BASE, max_staleness=bound, learner_s=learner_s, verify_s=0.05)
            found = work.limits()
            least = min(found[name] for name in ("learner", "engines", "verifiers"))
            assert predict(work).groups_per_s <= 1.02 * least


def test_the_queue_need_not_be_deeper_than_that() -> None:
    work = replace(BASE, max_staleness=7, learner_s=4.0)
    least = least_outstanding(work)
    most = predict(replace(work, outstanding=64))
    assert 9 <= least < 40
    enough = predict(replace(work, outstanding=least))
    assert (
        enough.groups_per_s >= 0.98 * most.groups_per_s
        and enough.staleness_mean < most.staleness_mean
    )
    fewer = predict(replace(work, outstanding=max(9, least - 4)))
    assert least <= 10 or fewer.groups_per_s < enough.groups_per_s
    assert least_outstanding(replace(work, max_staleness=0)) == 8


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"max_staleness": 0, "learner_s": 3.0}, "replay.max_staleness"),
        ({"verify_s": 0.5}, "task.verifier.workers"),
        ({"verify_s": 1.0, "concurrency": 2}, "task.verifier.concurrency"),
        ({"exposed_s": 6.0, "publish_s": 6.0, "max_staleness": 3}, "weight_sync.every_steps"),
        ({"learner_s": 50.0, "max_staleness": 1}, "learner.ranks"),
        ({"learner_s": 0.05, "max_staleness": 6}, "cluster.rollout_actors.max"),
        ({"outstanding": 9, "max_staleness": 6, "learner_s": 2.0}, "replay.outstanding"),
        ({"outstanding": 56, "max_staleness": 6, "learner_s": 6.0}, "replay.max_staleness"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_one_number_to_change(change: dict[str, object], setting: str) -> None:
    work = replace(BASE, **change)
    now = predict(work)
    found = one_change(work, now)
    assert found is not None and found.setting == setting
    assert setting in said(found, now)
    better = found.prediction.groups_per_s >= 1.05 * now.groups_per_s
    assert better or found.prediction.staleness_mean <= now.staleness_mean - 0.5
    assert bool(found.needs) == (setting in ("learner.ranks", "cluster.rollout_actors.max"))


@pytest.mark.parametrize(
    ("learner_s", "each", "ranks"), [(0.3, 1, 2), (1.2, 1, 4), (3.0, 1, 5), (20.0, 2, 10)]
)
def test_the_split_of_the_gpus(learner_s: float, each: int, ranks: int) -> None:
    """learner_s: of a step with four ranks, beside four engines."""
    work = replace(BASE, ranks=4, actors=4, learner_s=learner_s, max_staleness=6, batch=16)
    gpus, now = 4 + 4 * each, predict(work)
    rates = {}
    for engines in range(1, (gpus - 1) // each + 1):
        factor = (gpus - engines * each) / 4
        rates[gpus - engines * each] = predict(
            replace(work, actors=engines, rank_factor=factor)
        ).groups_per_s
    found = best_split(work, engine_gpus=each)
    best = max(rates, key=rates.__getitem__)
    if rates[best] < 1.05 * now.groups_per_s:
        assert found is None
        best = 4
    else:
        assert found is not None
        assert found.prediction.groups_per_s == rates[best]
        engines = (gpus - best) // each
        assert found.value == f"{best}, cluster.rollout_actors.max: {engines}"
        assert f"learner.ranks: {best}, cluster.rollout_actors.max: {engines}: " in said(found, now)
    assert best == ranks, rates


def test_gpus_are_split_into_whole_teams_of_ranks() -> None:
    """The best split for ranks that are alone leaves none over."""
    work = replace(BASE, ranks=4, actors=4, learner_s=3.0, max_staleness=6, batch=16)
    alone = best_split(work, engine_gpus=1)
    shared = best_split(replace(work, team=4), engine_gpus=1)
    assert alone is not None and alone.value.startswith("5,")
    assert shared is None, "four or none"


def test_groups_that_wait_for_environments_hold_their_slots() -> None:
    """Engines and learner hardly work: the slots and the waits alone decide, by Little's law."""
    quick = replace(BASE, learner_s=0.01, speed=Speed(((1.0, 4e4), (16.0, 3.2e5))), max_staleness=3)
    even = predict(replace(quick, waits=(5.0, 5.0, 5.0)))
    assert even.step_s == pytest.approx(5.0 / 4, rel=0.1)
    assert predict(replace(quick, waits=(5.0,) * 3, max_staleness=0)).step_s > 0.99 * 5.0
    tail = predict(replace(quick, waits=(1.0, 1.0, 13.0)))
    assert tail.step_s > 1.3 * even.step_s, "the same mean, and the learner waits for the slowest"
    most = replace(quick, waits=(1.0, 1.0, 13.0)).limits()
    assert tail.groups_per_s <= 1.05 * min(most["tail"], most["slots"])


def test_the_same_workload_has_the_same_rehearsal() -> None:
    assert predict(BASE) == predict(BASE)
    assert isinstance(Rehearsal(BASE, seed=1).run(), Prediction)
