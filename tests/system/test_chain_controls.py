"""The chain where it must not be learned, where the learner is given wrong tokens, and where its
environments are slow.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chain_runs import run_chain

STEPS = 60
"""Steps of the recipe, after which every one of five seeds was right on all held-out chains."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("control", ["BlankChain", "ShiftedChain"])
def test_nothing_is_learned_without_the_answers(control: str, tmp_path: Path) -> None:
    """One digit in ten is right by chance."""
    found = run_chain(
        tmp_path,
        f"task.name=tests.support.chain_controls:{control}",
        f"run.total_steps={STEPS}",
        "checkpoint.every_steps=0",
    )
    assert len(found["steps"]) == STEPS
    assert found["accuracy"][-1] <= 0.3, found["accuracy"]


def test_wrong_tokens_of_the_environment_are_seen_in_the_log_probs(tmp_path: Path) -> None:
    """With the right ones both sides agree to 1e-4 (test_chain.py)."""
    found = run_chain(
        tmp_path,
        "task.name=tests.support.chain_controls:TurnedChain",
        "run.total_steps=6",
        "checkpoint.every_steps=0",
    )
    name = "weights/sampler_error"
    seen = [line[name] for line in found["steps"] if name in line]
    assert seen and min(seen) > 1e-2, seen


def test_slow_environments_keep_no_engine_waiting(tmp_path: Path) -> None:
    """Waiting episodes hold no place, so that others are generated meanwhile."""
    found = run_chain(
        tmp_path,
        "task.name=tests.support.chain_controls:SlowChain",
        "run.total_steps=30",
        "checkpoint.every_steps=0",
    )
    last = found["steps"][-1]
    waiting, working = last["time/engine/environment"], last["time/engine/working"]
    assert last["rollout/environment_s"] > 0.1
    assert working / (working + waiting) >= 0.9, (working, waiting)
