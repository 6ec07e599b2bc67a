"""What a run says about its own settings after the first steps."""

from __future__ import annotations

import pytest

from async_grpo.advice import FIRST_STEPS, StalenessAdvice
from async_grpo.config.schema import Config


def advice(*, length: int, speed: float, step_s: float, max_staleness: int = 1, on_stale: str = "wait", steps: int = FIRST_STEPS) -> list[str]:
    config = Config.model_validate({
        "run": {"total_steps": 9}, "model": {"path": "m"}, "rollout": {"response_length": length},
        "replay": {"max_staleness": max_staleness, "on_stale": on_stale},
    })
    observer = StalenessAdvice(config)
    metrics = {"rollout/tokens_per_s_per_response": speed, "time/train": 0.9 * step_s, "time/publish": 0.1 * step_s, "time/wait": 100.0}
    return [said for said in (observer.observe(metrics) for _ in range(steps)) if said is not None]


@pytest.mark.parametrize(("length", "max_staleness", "warned"), [(1000, 1, False), (1001, 1, True), (1001, 2, False), (501, 0, True)])
def test_wait_is_questioned_when_a_response_outlasts_the_bound(length: int, max_staleness: int, warned: bool) -> None:
    said = advice(length=length, speed=50.0, step_s=10.0, max_staleness=max_staleness)
    assert len(said) == int(warned)
    assert not warned or "replay.on_stale=mask" in said[0] and f"{length} tokens" in said[0]


def test_the_bound_that_it_names_is_enough_and_the_one_below_is_not() -> None:
    (said,) = advice(length=5000, speed=50.0, step_s=10.0)
    bound = int(said.split()[-1])
    assert advice(length=5000, speed=50.0, step_s=10.0, max_staleness=bound) == []
    assert advice(length=5000, speed=50.0, step_s=10.0, max_staleness=bound - 1)


def test_nothing_is_said_early_twice_or_where_nobody_waits() -> None:
    assert advice(length=5000, speed=50.0, step_s=1.0, steps=FIRST_STEPS - 1) == []
    assert len(advice(length=5000, speed=50.0, step_s=1.0, steps=3 * FIRST_STEPS)) == 1
    assert advice(length=5000, speed=50.0, step_s=1.0, on_stale="mask") == []
