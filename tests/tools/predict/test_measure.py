"""What a run shows of itself, from lines of metrics whose truth is known."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from async_grpo.rollout.engine.speeds import Speeds, size
from async_grpo.tools.predict.measure import Meter, relative_errors
from async_grpo.tools.predict.workload import Measured, Workload
from tests.support.plan_case import BASE, lines

TOKEN_S = (0.001 + 0.5 + 1.5) / (1 + 20 + 25)
"""What the engine of `lines` takes for a token."""


def test_measured() -> None:
    meter = Meter(skip=2, batch=8, contention=1.2)
    for number, line in enumerate(lines(20)):
        meter.observe(line, [(number, number)], [1.5 + number * TOKEN_S])
        if number < 7:
            assert meter.measured(every_steps=1) is None
    found = meter.measured(every_steps=2)
    assert found is not None and meter.steps == 17
    assert found.lengths[0] == (0, 0) and len(found.lengths) == 20
    assert found.curve == ((6.0, 240.0), (24.0, 400.0))  # one response: too seldom to count
    assert found.learner_s == pytest.approx(3.0 / 1.1)
    assert found.exposed_s == pytest.approx(2 * 0.5)
    assert (found.step_tokens, found.verify_s, found.delay_s) == (700.0, 0.25, 0.0)
    assert found.waits == pytest.approx([1.5] * 20)
    assert (found.publish_s, found.pause_s, found.contention) == (0.75, 0.125, 1.2)
    assert meter.groups_per_s == pytest.approx(8 / 4) and meter.time.idle == pytest.approx(1 / 8)
    assert meter.time.tokens_per_s == pytest.approx(700 / 4)
    assert meter.staleness_mean == pytest.approx(1.5, abs=0.05)
    assert Measured.of(asdict(found)) == found


def test_other_processes_begin_anew() -> None:
    meter = Meter(skip=0, batch=8, contention=1.0)
    for line in (*lines(9), *lines(4)):
        meter.observe(line, [], [])
    assert meter.steps == 3 and meter.measured(every_steps=1) is None


def test_waits_for_a_full_engine_are_none_for_environments() -> None:
    meter = Meter(skip=0, batch=8, contention=1.0)
    for line in lines(9):
        meter.observe(line | {"rollout/environment_s": 0.01}, [(10, 10)] * 2, [4.0, 8.0])
    found = meter.measured(every_steps=1)
    assert found is not None and sum(found.waits) / len(found.waits) == pytest.approx(2 * 0.01)
    assert min(found.waits) < 0.6 * max(found.waits), "who waits longer does so afterwards"


def test_groups_without_environments_wait_for_none() -> None:
    meter = Meter(skip=0, batch=8, contention=1.0)
    for line in lines(9):
        meter.observe(line | {"rollout/environment_s": 0.0}, [(1,)], [9.0])
    found = meter.measured(every_steps=1)
    assert found is not None and found.waits == ()


def test_lines_without_times_do_not_count() -> None:
    meter = Meter(skip=0, batch=8, contention=1.0)
    for line in lines(9):
        meter.observe(line, [(1,)], [1.0])
        meter.observe({"train/repeated": 1.0}, [(2,)], [1.0])
    assert meter.steps == 8
    found = meter.measured(every_steps=1)
    assert found is not None and set(found.lengths) == {(1,)}


def test_errors_of_a_prediction() -> None:
    predicted = {"groups_per_s": 1.1, "idle": 0.25, "staleness_mean": 1.5}
    found = {"groups_per_s": 1.0, "idle": 0.20, "staleness_mean": 2.0}
    assert relative_errors(predicted=predicted, found=found) == pytest.approx(
        {"plan/error_throughput": 0.1, "plan/error_idle": 0.05, "plan/error_staleness": -0.25}
    )
    none = relative_errors(predicted=predicted, found=found | {"staleness_mean": 0.0})
    assert none["plan/error_staleness"] == pytest.approx(15.0)


def test_speeds_of_an_engine() -> None:
    """Steps count from the one before; a pause, and a moment without requests, count for none."""
    now = 10.0
    speeds = Speeds(clock=lambda: now)
    for tokens, passed, goes_on in [
        (3, 0.5, True),  # the first one: nobody knows when it began
        (3, 0.5, True),
        (4, 0.25, True),
        (0, 0.25, True),  # a step of prompts alone
        (9, 1.0, False),
        (5, 7.0, True),  # after a moment without requests
        (5, 1.0, True),
    ]:
        now += passed
        speeds.stepped(tokens, goes_on=goes_on)
    speeds.interrupted()
    now += 3.0
    speeds.stepped(5, goes_on=True)
    assert speeds.totals() == {
        "engine_4_s": 0.75,
        "engine_4_tokens": 7,
        "engine_4_steps": 2,
        "engine_16_s": 1.0,
        "engine_16_tokens": 9,
        "engine_16_steps": 1,
        "engine_8_s": 1.0,
        "engine_8_tokens": 5,
        "engine_8_steps": 1,
    }
    assert [size(tokens) for tokens in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]


def test_an_idle_engine_begins_with_the_first_request() -> None:
    now = 10.0
    speeds = Speeds(clock=lambda: now)
    for passed in (0.0, 0.5):  # two requests; the first one counts
        now += passed
        speeds.asked()
    now += 1.0
    speeds.stepped(2, goes_on=True)
    speeds.asked()
    now += 0.25
    speeds.stepped(2, goes_on=False)
    assert speeds.totals() == {"engine_2_s": 1.75, "engine_2_tokens": 4, "engine_2_steps": 2}


def test_what_is_computed_again_behind_a_publication() -> None:
    """Of 8 responses that take 1 s a step: 3 s and two steps until all have another token."""
    now = 10.0
    speeds = Speeds(clock=lambda: now)

    def step(passed: float, tokens: int) -> None:
        nonlocal now
        now += passed
        speeds.stepped(tokens, goes_on=True)

    speeds.asked()
    for _ in range(2):
        step(1.0, 8)
    before = speeds.totals()
    speeds.interrupted()
    now += 50.0
    speeds.asked()  # it stands still
    speeds.resumed([10] * 8)
    step(2.0, 3)
    step(1.0, 5)
    again = {"engine_again_s": 2.0, "engine_again_tokens": 80, "engine_again_steps": 1}
    assert speeds.totals() == before | again
    step(1.0, 8)
    speeds.interrupted()
    speeds.resumed([])  # the caches were kept: a step like any other
    step(1.0, 8)
    assert speeds.totals()["engine_8_steps"] == 4
    assert speeds.totals()["engine_again_steps"] == 1


def test_a_workload_takes_what_was_measured(tmp_path) -> None:
    from async_grpo.config.load import load_config

    measured = Measured(
        lengths=((10, 20), (30, 40)),
        curve=((1.0, 10.0), (8.0, 40.0)),
        learner_s=2.0,
        step_tokens=400.0,
        verify_s=0.5,
        delay_s=0.25,
        publish_s=0.125,
        exposed_s=0.0625,
        pause_s=0.03125,
        again_s=0.015625,
        contention=1.25,
        crowd=1.5,
    )
    config = load_config(
        "configs/quickstart.yaml",
        [
            "rollout.rollout_batch_size=16",
            "rollout.group_size=4",
            "replay.max_staleness=3",
            "replay.on_stale=mask",
            "replay.outstanding=40",
            "weight_sync.every_steps=2",
            "task.verifier.workers=3",
        ],
    )
    found = Workload.of(config, measured, max_num_seqs=24, actors=5, cores=4)
    assert found.slow(5, learning=True) == pytest.approx(1.5)
    assert found.slow(2, learning=True) == 1 == found.slow(4, learning=False)
    assert replace(found, cores=None).slow(5, learning=True) == 1
    assert Workload.of(config, measured, max_num_seqs=24).speed.total(8) == pytest.approx(60.0)
    assert found.lengths == ((10, 20, 10, 20), (30, 40, 30, 40))
    assert found.learner_s == pytest.approx(2.0 / 1.5 * 16 * 100 / 400)
    assert (found.batch, found.responses, found.max_staleness, found.every_steps) == (16, 4, 3, 2)
    assert (found.outstanding, found.on_stale, found.actors, found.places) == (40, "mask", 5, 24)
    assert (found.verifiers, found.verify_s, found.delay_s) == (3, 0.5, 0.25)
    assert (found.publish_s, found.exposed_s, found.pause_s) == (0.125, 0.0625, 0.03125)
    assert found.again_s == 0.015625
    assert found.contention == 1.25 and found.speed.total(8) == pytest.approx(60.0)
    faster = BASE.with_settings({"learner.ranks": 2, "replay.max_staleness": 5})
    assert faster.limits()["learner"] == 2 * BASE.limits()["learner"]
