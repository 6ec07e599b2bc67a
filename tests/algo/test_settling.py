"""When the learning rate of a run without a known end is halved."""

from __future__ import annotations

import json

import pytest

from async_grpo.algo.settling import BLOCK, FALLS, LEAST, NEAR, SettlingRate


def fed(rule: SettlingRate, *shortfalls: float, length: int = BLOCK) -> list[float]:
    """Factors after blocks of steps with these shortfalls."""
    out = []
    for shortfall in shortfalls:
        for _ in range(length):
            rule.update(1 - shortfall)
        out.append(rule.factor)
    return out


def test_a_shortfall_that_stays_halves_the_rate_and_one_that_falls_does_not() -> None:
    assert fed(SettlingRate(0), 0.1, 0.1, 0.1) == [1, 0.5, 0.25]
    falling = [0.3 * (0.99 * FALLS) ** k for k in range(8)]
    assert fed(SettlingRate(0), *falling) == [1] * 8
    assert fed(SettlingRate(0), 0.3, 0.2, 0.2, 0.05) == [1, 1, 0.5, 0.5]


def test_a_small_shortfall_does_no_harm() -> None:
    assert fed(SettlingRate(0), *[0.99 * NEAR] * 5) == [1] * 5
    assert fed(SettlingRate(0), 0.001, 1.01 * NEAR) == [1, 0.5], "it rose"


def test_the_rate_does_not_fall_without_end() -> None:
    assert fed(SettlingRate(0), *[0.5] * 12)[-1] == LEAST


@pytest.mark.parametrize("bound", [4, 16, 40])
def test_data_ages_first_and_a_block_sees_what_the_one_before_has_changed(bound: int) -> None:
    rule, halved = SettlingRate(bound), []
    for step in range(1, 4 * (bound + BLOCK)):
        if rule.update(0.9):
            halved.append(step)
    length = max(BLOCK, bound + 1)
    assert halved[:2] == [bound + 2 * length, bound + 3 * length]


def test_a_rule_goes_on_from_a_checkpoint_as_if_nothing_had_been() -> None:
    whole, parts = SettlingRate(20), SettlingRate(20)
    sizes = [0.7 + 0.3 * (k * 37 % 11) / 11 for k in range(200)]
    factors = []
    for size in sizes:
        whole.update(size)
        factors.append(whole.factor)
    again = []
    for size in sizes:
        parts = SettlingRate(20, json.loads(json.dumps(parts.to_dict())))
        parts.update(size)
        again.append(parts.factor)
    assert again == factors and len(set(factors)) > 2
