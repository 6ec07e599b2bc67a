"""The limits of throughput in closed form."""

from __future__ import annotations

import math

import pytest

from async_grpo.observe.throughput import FIELDS, ThroughputSettings, Times, limits

SETTINGS = ThroughputSettings(
    batch=8,
    responses=4,
    max_staleness=1,
    every_steps=1,
    actors=2,
    places=16,
    verifiers=3,
    open_episodes=10,
)
TIMES = Times(
    learner_s=3.0,
    other_s=1.0,
    exposed_s=4.0,
    response_s=2.0,
    pause_s=6.0,
    verify_s=0.5,
    tail_s=32.0,
    slot_s=16.0,
    episode_s=2.5,
)


def test_each_limit_is_what_can_be_computed_by_hand() -> None:
    assert limits(SETTINGS, TIMES) == {
        "learner": 8 / (3 + 1 + 4),
        "engines": 8 / (8 * 4 * 2 / (2 * 16) + 6),
        "verifiers": 2 * 3 / (4 * 0.5),
        "tail": 2 * 8 / 32,
        "slots": 2 * 8 / 16,
        "environments": 2 * 10 / (4 * 2.5),
    }


def test_what_takes_no_time_is_no_limit() -> None:
    found = limits(SETTINGS, Times(learner_s=2.0, other_s=0.0, exposed_s=0.0, response_s=1.0))
    none = math.inf
    assert found == {"learner": 4, "engines": 8, "verifiers": none, "tail": none, "slots": none}


@pytest.mark.parametrize(
    ("setting", "value", "changed"),
    [
        ("learner.ranks", 2, {"learner": 8 / 6.5}),
        ("weight_sync.every_steps", 2, {"learner": 8 / 6, "engines": 8 / 5}),
        ("cluster.rollout_actors.max", 4, {"engines": 8 / 7, "verifiers": 6, "environments": 4}),
        ("cluster.engine.max_num_seqs", 32, {"engines": 8 / 7}),
        ("task.verifier.workers", 6, {"verifiers": 6}),
        ("task.verifier.concurrency", 2, {"verifiers": 6}),
        ("replay.max_staleness", 3, {"tail": 1, "slots": 2}),
        ("replay.outstanding", 12, {"slots": 12 / 16}),
        ("rollout.max_open_episodes", 20, {"environments": 4}),
    ],
)
def test_a_setting_changes_its_own_limits(
    setting: str, value: float, changed: dict[str, float]
) -> None:
    assert setting in FIELDS
    before = limits(SETTINGS, TIMES)
    assert limits(SETTINGS.with_settings({setting: value}), TIMES) == pytest.approx(
        before | changed
    )


def test_a_setting_that_is_not_known_is_refused() -> None:
    with pytest.raises(KeyError):
        SETTINGS.with_settings({"learner.lr": 1.0})
