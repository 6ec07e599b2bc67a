"""Verdicts on simulated runs whose bottleneck is known: the advice is taken, and throughput rises
as it was predicted to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from async_grpo.config.schema import Config
from async_grpo.observe.bottleneck import MIN_STEPS, Bottleneck, BottleneckWatch, Gain
from async_grpo.observe.throughput import ThroughputSettings
from async_grpo.tools.predict.engine import Speed
from async_grpo.tools.predict.rehearsal import predict
from tests.support.simulation.scenario import Scenario
from tests.support.simulation.simulator import simulate

SKIPPED = 8
"""Steps at each end: the queue fills, and the last groups of a run have nobody to overtake them."""
BASE = Scenario(
    rollout_batch_size=8,
    group_size=4,
    mean_tokens=32.0,
    spread=0.3,
    longest=3.0,
    speed=Speed.alone(32.0),
    actors=8,
    places=16,
    max_staleness=3,
    total_steps=40,
    learner_s=1.0,
    publish_s=0.05,
    poll_s=0.05,
    measured=True,
)
CASES = {
    "learner": replace(BASE, learner_s=8.0),
    "engines": replace(BASE, learner_s=0.5, actors=2),
    "verifier": replace(BASE, learner_s=0.5, verify_s=0.8, max_staleness=6),
    "weight_sync": replace(BASE, publish_s=1.5),
    "tail": replace(BASE, spread=1.0, longest=8.0, places=32, max_staleness=1),
    "slots": replace(BASE, max_staleness=0),
    "slots, as set": replace(BASE, outstanding=9),
}


def verdict_on(
    scenario: Scenario, *, gain: Gain | None = None, checked: bool = False, **known: int
) -> Bottleneck:
    lines = simulate(scenario, checked=checked).lines[SKIPPED - 1 : -SKIPPED]
    settings = replace(scenario.workload(), **known)
    observer = BottleneckWatch(settings, min_steps=len(lines) - 1, min_s=0.0, gain=gain)
    *before, verdict = [observer.observe(line) for line in lines]
    assert not any(before) and verdict is not None
    return verdict


def throughput(scenario: Scenario) -> float:
    """Trained groups per second, from the times of the steps alone."""
    steps = simulate(scenario, checked=False).steps[SKIPPED:-SKIPPED]
    return scenario.rollout_batch_size * (len(steps) - 1) / (steps[-1].taken - steps[0].taken)


def planned(scenario: Scenario) -> Gain:
    """What settings bring, as the planner says who knows the scenario."""
    work = scenario.workload()
    now = predict(work).groups_per_s
    return lambda advice: predict(work.with_settings(advice)).groups_per_s / now


def test_an_advice_of_which_the_planner_expects_nothing_is_not_given() -> None:
    told: list[dict[str, float]] = []

    def nothing(advice: Mapping[str, float]) -> float:
        told.append(dict(advice))
        return 1.0

    verdict = verdict_on(CASES["learner"], gain=nothing)
    assert verdict.advice == {} and verdict.kind == "balanced"
    assert {tuple(advice) for advice in told} == {("learner.ranks",)}
    assert verdict_on(CASES["learner"], gain=lambda advice: None).kind == "learner"


@pytest.mark.parametrize("kind", CASES)
def test_the_bottleneck_is_found_and_its_advice_brings_what_it_promises(kind: str) -> None:
    scenario = CASES[kind]
    verdict = verdict_on(scenario)
    assert verdict.kind == kind.partition(",")[0], verdict.text
    assert "\n" not in verdict.text and "groups/s" not in verdict.text, "it promises no figure"
    before, after = throughput(scenario), throughput(scenario.advised(verdict.advice))
    assert verdict.rate == pytest.approx(before, rel=0.05)
    assert verdict.predicted_gain > 0.3 * before, "a case that shows something"
    assert 0.5 * verdict.predicted_gain < after - before < 1.5 * verdict.predicted_gain, (
        f"{before} -> {after}: {verdict.text}"
    )
    known = verdict_on(scenario, gain=planned(scenario))  # the planner knows what it brings
    assert (known.kind, known.advice) == (verdict.kind, verdict.advice), known.text
    assert 0.75 < (after - before) / known.predicted_gain < 1.35, f"{before} -> {after}"


def test_ranks_that_share_sequences_are_advised_in_whole_teams() -> None:
    """Of the five cores that eight engines leave."""
    alone, shared = (
        verdict_on(CASES["learner"], ranks=2, cores=13, team=team, gain=lambda _: 2.0)
        for team in (1, 2)
    )
    assert (alone.advice, shared.advice) == ({"learner.ranks": 5}, {"learner.ranks": 4})


def test_where_coroutines_score_more_of_them_are_advised() -> None:
    scenario = replace(CASES["verifier"], verifiers=2, verify_s=1.6)
    children = verdict_on(scenario)
    [(setting, value)] = children.advice.items()
    assert setting == "task.verifier.workers" and value > 2
    coroutines = verdict_on(scenario, verifiers=1, concurrency=2)
    assert coroutines.advice == {"task.verifier.concurrency": value}
    assert coroutines.text == children.text.replace("workers", "concurrency")
    assert coroutines.predicted_gain == children.predicted_gain


def test_a_larger_bound_is_no_advice_while_fewer_groups_are_outstanding_than_it_allows() -> None:
    told = lines(steps=6, starved=0.5, blocked=0.5, length=40.0)
    told = [line | {"replay/limit": 5.0, "replay/capacity": 8.0} for line in told]
    verdict = observed(told)[-1]
    assert (verdict.kind, verdict.advice) == ("unclear", {})
    assert verdict.text == (
        "learner idle 50%: 5 of 8 groups may be outstanding; the limit grows while the learner "
        "stays idle"
    )
    full = observed([line | {"replay/limit": 8.0} for line in told])[-1]
    assert full.kind == "slots" and "replay.max_staleness" in full.advice


def test_a_run_whose_learner_and_engines_are_both_busy_is_balanced() -> None:
    verdict = verdict_on(replace(BASE, actors=4, learner_s=0.5), checked=True)
    assert (verdict.kind, verdict.advice, verdict.predicted_gain) == ("balanced", {}, 0.0), (
        verdict.text
    )


def config() -> Config:
    return Config.model_validate(
        {
            "run": {"total_steps": 9},
            "model": {"path": "m"},
            "rollout": {"rollout_batch_size": 4, "group_size": 8},
        }
    )


def lines(*, steps: int, starved: float, blocked: float, length: float) -> list[dict[str, float]]:
    """A run that trains 4 groups per second on 2 actors with 16 places for responses each; a token
    takes 10 ms.
    """
    out = []
    for step in range(steps):
        shares = {"working": 1 - starved, "idle": starved, "weight_sync": 0.0}
        out.append(
            {f"time/learner/{cause}": step * share for cause, share in shares.items()}
            | {
                "time/engine/working": step * (1 - blocked),
                "time/engine/blocked": step * blocked,
                "time/engine/paused": 0.0,
            }
            | {
                "replay/trained": 4.0 * step,
                "cluster/rollout_actors": 2.0,
                "rollout/generate_s": 0.02 * length,
                "rollout/verify_s": 0.01,
            }
            | {
                "rollout/response_length": length,
                "rollout/tokens_per_s_per_response": 100.0,
                "replay/ready_wait_s": 0.1,
            }
        )
    return out


def observed(told: list[dict[str, float]], **changed: int) -> list[Bottleneck | None]:
    setup = ThroughputSettings.configured(config(), max_num_seqs=16)
    observer = BottleneckWatch(replace(setup, **changed))
    return [observer.observe(line) for line in told]


def test_in_a_run_each_response_takes_its_own_place() -> None:
    full = observed(
        lines(steps=6, starved=0.5, blocked=0.0, length=95.0)
    )  # 4 x 8 x 0.95 s of 32 places
    assert (full[-1].kind, full[-1].advice["cluster.rollout_actors.max"]) == ("engines", 4), full[
        -1
    ].text
    half = observed(lines(steps=6, starved=0.5, blocked=0.0, length=40.0))
    assert half[-1].kind == "slots" and half[-1].predicted_gain == pytest.approx(4.0), half[-1].text


def test_engines_that_stand_still_for_environments_need_more_open_episodes() -> None:
    told = lines(steps=6, starved=0.5, blocked=0.0, length=40.0)
    for step, line in enumerate(told):
        line["time/engine/working"] = line["time/engine/environment"] = step * 0.5
    verdict = observed(told, open_episodes=16)[-1]
    assert verdict.kind == "environments" and "for environments 50% of their" in verdict.text
    assert verdict.advice == {"rollout.max_open_episodes": 32}
    assert verdict.predicted_gain == pytest.approx(4.0), "engines that generate all the time"


def test_open_episodes_are_no_limit_where_the_slots_allow_fewer() -> None:
    told = lines(steps=6, starved=0.5, blocked=0.0, length=40.0)
    for step, line in enumerate(told):
        line["time/engine/working"] = line["time/engine/environment"] = step * 0.5
    verdict = observed(told, open_episodes=1000)[-1]
    assert verdict.kind == "slots" and "replay.max_staleness" in verdict.advice, verdict.text
    assert "wait for environments 50% of their time, and all slots are taken" in verdict.text
    slow = [line | {"replay/ready_wait_s": 5.0} for line in told]
    verdict = observed(slow, open_episodes=1000)[-1]
    assert verdict.kind == "tail"
    assert "wait for environments 50% of their time, and finished groups wait 5 s" in verdict.text
    assert "faster environments" in verdict.text and "response_length" not in verdict.text


@pytest.mark.parametrize(("waits_s", "kind"), [(0.5, "slots"), (0.05, "engines"), (2.0, "slots")])
def test_an_episode_that_waits_takes_no_place(waits_s: float, kind: str) -> None:
    """From its first token to its last one an episode of 95 tokens takes 0.95 s."""
    told = lines(steps=6, starved=0.5, blocked=0.0, length=95.0)
    verdict = observed([line | {"rollout/environment_s": waits_s} for line in told])[-1]
    assert verdict.kind == kind, verdict.text


def test_engines_that_stand_still_for_weights_need_fewer_publications() -> None:
    told = lines(steps=6, starved=0.5, blocked=0.0, length=40.0)
    for step, line in enumerate(told):
        line["time/engine/working"], line["time/engine/paused"] = step * 0.7, step * 0.3
    verdict = observed(told)[-1]
    assert verdict.kind == "weight_sync" and "paused for weight sync 30%" in verdict.text
    assert verdict.advice == {"weight_sync.every_steps": 4, "replay.max_staleness": 4}
    assert verdict.predicted_gain == pytest.approx(4 / (0.7 + 0.3 / 4) - 4)


@pytest.mark.parametrize(("slowest_s", "masks", "says"), [(1.9, 0, 0), (3.0, 0, 1), (3.0, 1, 0)])
def test_a_group_that_outlasts_its_steps_is_named_and_masking_advised(
    slowest_s: float, masks: int, says: int
) -> None:
    """A learner step takes 1 s, and max_staleness is 1."""
    told = [
        line | {"replay/ready_wait_s": 9.0, "rollout/longest_group_s": slowest_s}
        for line in lines(steps=6, starved=0.5, blocked=0.4, length=40.0)
    ]
    settings = config()
    settings = settings.unchecked_copy(
        update={
            "replay": settings.replay.unchecked_copy(
                update={"on_stale": "mask" if masks else "wait", "max_staleness": 1}
            )
        }
    )
    observer = BottleneckWatch(ThroughputSettings.configured(settings, max_num_seqs=16))
    verdict = [observer.observe(line) for line in told][-1]
    assert verdict.kind == "tail"
    named = f"the slowest takes {slowest_s:.2g} s, longer than the 2 learner steps" in verdict.text
    assert named == bool(says)
    assert ("replay.on_stale=mask" in verdict.text) != bool(masks)


def test_one_verdict_per_interval_and_none_from_numbers_that_begin_again() -> None:
    told = lines(steps=14, starved=0.5, blocked=0.5, length=40.0)
    found = observed(told)
    assert [index for index, verdict in enumerate(found) if verdict is not None] == [
        MIN_STEPS,
        2 * MIN_STEPS,
    ]
    again = observed(told[2:5] + told[:6])
    assert [index for index, verdict in enumerate(again) if verdict is not None] == [3 + MIN_STEPS]
    assert observed([{"train/repeated": 1.0}] * 9) == [None] * 9


def steady(starved: list[float], *, agree: int) -> list[Bottleneck | None]:
    """One interval after the other, with these shares of starving."""
    watch = BottleneckWatch(ThroughputSettings.configured(config(), max_num_seqs=16), agree=agree)
    before: dict[str, float] = {}
    found: list[Bottleneck | None] = []
    for share in starved:
        told = lines(steps=MIN_STEPS + 1, starved=share, blocked=0.0, length=95.0)
        moved = [
            line
            | {
                name: value + before.get(name, 0.0)
                for name, value in line.items()
                if name.startswith("time/") or name == "replay/trained"
            }
            for line in told
        ]
        seen = [watch.observe(line) for line in (moved if not before else moved[1:])]
        found.append(seen[-1])
        before = moved[-1]
    return found


def test_a_limit_is_told_when_several_intervals_agree_and_their_times_are_taken_together() -> None:
    told = steady([0.5, 0.5, 0.5, 0.3], agree=3)
    assert told[:2] == [None, None] and told[2].kind == told[3].kind == "engines"
    assert "learner idle 50%" in told[2].text and "learner idle 43%" in told[3].text


def test_intervals_that_disagree_say_nothing_and_then_that_nothing_is_clear() -> None:
    told = steady([0.5, 0.0] * 6, agree=3)
    assert [verdict is None for verdict in told] == [True] * 5 + [False] + [True] * 5 + [False]
    assert told[5].kind == "unclear" and "the last intervals disagree (" in told[5].text
    assert told[5].advice == {}


@pytest.mark.parametrize(
    "name", ["cluster/rollout_actors", "cluster/late_probes", "cluster/learner_restarts"]
)
def test_an_interval_with_a_fault_is_not_judged(name: str) -> None:
    told = lines(steps=4 * MIN_STEPS, starved=0.5, blocked=0.5, length=40.0)
    for step, line in enumerate(told):
        line[name] = 1.0 if step < MIN_STEPS else 2.0
    found = [index for index, verdict in enumerate(observed(told)) if verdict is not None]
    assert found == [2 * MIN_STEPS, 3 * MIN_STEPS]


def test_advice_stays_within_the_cores_of_the_machine() -> None:
    full = lines(steps=6, starved=0.5, blocked=0.0, length=95.0)
    for cores, expected in ((None, 4), (4, 3), (3, None)):
        watch = BottleneckWatch(
            ThroughputSettings.configured(config(), max_num_seqs=16, cores=cores)
        )
        verdict = [watch.observe(line) for line in full][-1]
        assert verdict.advice.get("cluster.rollout_actors.max") == expected, verdict.text
        if expected is None:
            assert verdict.kind == "unclear" and "another rollout actor would help" in verdict.text
    busy = lines(steps=6, starved=0.0, blocked=0.6, length=30.0)
    watch = BottleneckWatch(ThroughputSettings.configured(config(), max_num_seqs=16, cores=2))
    verdict = [watch.observe(line) for line in busy][-1]
    assert (verdict.kind, verdict.advice) == ("unclear", {}) and "(2 cores)" in verdict.text


def test_a_learner_that_waits_is_not_called_balanced() -> None:
    """Publications stop the engines, whose places are taken all the same: nothing would help."""
    idle = lines(steps=6, starved=0.3, blocked=0.2, length=97.0)
    for line in idle:
        line["time/engine/paused"] = line["time/engine/blocked"]
        line["time/engine/blocked"] = 0.0
    watch = BottleneckWatch(ThroughputSettings.configured(config(), max_num_seqs=16))
    verdict = [watch.observe(line) for line in idle][-1]
    assert (verdict.kind, verdict.advice) == ("unclear", {}), verdict.text
    assert verdict.text.startswith("no clear limit: learner idle 30%")


@pytest.mark.parametrize(("cores", "actors"), [(1, 1.0), (2, 2.0)])
def test_a_machine_whose_cores_are_all_engines_gets_a_verdict_too(
    cores: int, actors: float
) -> None:
    busy = lines(steps=6, starved=0.0, blocked=0.05, length=95.0)
    for line in busy:
        line["cluster/rollout_actors"] = actors
    watch = BottleneckWatch(ThroughputSettings.configured(config(), max_num_seqs=16, cores=cores))
    assert [watch.observe(line) for line in busy][-1] is not None


@pytest.mark.parametrize("whom", ["teacher", "judge"])
def test_a_frozen_model_that_takes_longer_than_generating_is_named(whom: str) -> None:
    scenario = replace(BASE, learner_s=0.5, actors=2)
    lines = simulate(scenario, checked=False).lines[SKIPPED - 1 : -SKIPPED]
    for seconds, named in ((0.01, False), (50.0, True)):
        watch = BottleneckWatch(scenario.workload(), min_steps=len(lines) - 1, min_s=0.0)
        *_, verdict = [watch.observe(line | {f"rollout/{whom}_s": seconds}) for line in lines]
        assert verdict is not None
        assert (f"a group waits 50 s for its {whom}" in verdict.text) is named
