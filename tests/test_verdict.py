"""Verdicts on simulated runs whose bottleneck is known: the advice is taken, and throughput rises as it was predicted to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from async_grpo.verdict import Observer, Verdict
from benchmarks.scenario import Scenario
from benchmarks.simulator import simulate

SKIPPED = 8
"""Steps at each end: the queue fills, and the last groups of a run have nobody to overtake them."""
BASE = Scenario(
    rollout_batch_size=8, group_size=4, mean_tokens=32.0, spread=0.3, longest=3.0, tokens_per_s=32.0, actors=8, slots=4, max_staleness=3,
    total_steps=40, learner_s=1.0, publish_s=0.05, poll_s=0.05, measured=True,
)
CASES = {
    "learner": replace(BASE, learner_s=8.0),
    "engines": replace(BASE, learner_s=0.5, actors=2),
    "verifier": replace(BASE, learner_s=0.5, verify_s=0.8, max_staleness=6),
    "publications": replace(BASE, publish_s=1.5),
    "tail": replace(BASE, spread=1.0, longest=8.0, slots=8, max_staleness=1),
    "slots": replace(BASE, max_staleness=0),
}


def verdict_on(scenario: Scenario) -> Verdict:
    lines = simulate(scenario).lines[SKIPPED - 1 : -SKIPPED]
    observer = Observer(scenario.setup(), min_steps=len(lines) - 1, min_s=0.0)
    *before, verdict = [observer.observe(line) for line in lines]
    assert not any(before) and verdict is not None
    return verdict


def throughput(scenario: Scenario) -> float:
    """Trained groups per second, from the times of the steps alone."""
    steps = simulate(scenario).steps[SKIPPED:-SKIPPED]
    return scenario.rollout_batch_size * (len(steps) - 1) / (steps[-1].taken - steps[0].taken)


@pytest.mark.parametrize("kind", CASES)
def test_the_bottleneck_is_found_and_its_advice_brings_what_it_promises(kind: str) -> None:
    scenario = CASES[kind]
    verdict = verdict_on(scenario)
    assert verdict.kind == kind, verdict.text
    assert f"{verdict.predicted_gain / verdict.rate:+.0%}" in verdict.text and "\n" not in verdict.text
    before, after = throughput(scenario), throughput(scenario.advised(verdict.advice))
    assert verdict.rate == pytest.approx(before, rel=0.05)
    assert verdict.predicted_gain > 0.3 * before, "a case that shows something"
    assert 0.5 * verdict.predicted_gain < after - before < 1.5 * verdict.predicted_gain, f"{before} -> {after}: {verdict.text}"


def test_a_run_whose_learner_and_engines_are_both_busy_is_balanced() -> None:
    verdict = verdict_on(replace(BASE, actors=4, learner_s=0.56))
    assert (verdict.kind, verdict.advice, verdict.predicted_gain) == ("balanced", {}, 0.0), verdict.text
