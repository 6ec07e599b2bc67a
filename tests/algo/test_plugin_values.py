"""What a user's function returns is checked where it is used, with a sentence that names it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from async_grpo.algo.advantages import row_advantages
from async_grpo.algo.catalog import (
    ESTIMATORS,
    POLICY_LOSSES,
    import_plugins,
    register_estimator,
    register_group_filter,
    register_importance,
    register_policy_loss,
    register_reward_shaping,
)
from async_grpo.algo.filters import FilterRule, filter_reason
from async_grpo.algo.importance import importance_weights
from async_grpo.algo.rewards import Shaping
from tests.support.registers import registers_put_back


@pytest.fixture(autouse=True)
def registers() -> Iterator[None]:
    with registers_put_back():
        yield


def test_an_estimator_returns_one_advantage_per_row() -> None:
    register_estimator("short")(lambda rewards, groups, options: rewards[1:])
    with pytest.raises(ValueError, match=r"'short' returned \(1,\) for rewards \(2,\)"):
        row_advantages("short", torch.tensor([0.0, 1.0]), torch.tensor([0, 0]))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("Too Long!", "'odd' returned 'Too Long!'; a reason is None or one word"),
        (3, "'odd' returned 3"),
        (ZeroDivisionError("no rows"), r"'odd' failed: ZeroDivisionError\('no rows'\)"),
    ],
)
def test_a_group_filter_returns_a_reason_or_nothing(answer: object, says: str) -> None:
    @register_group_filter("odd")
    def odd(group, options):
        if isinstance(answer, Exception):
            raise answer
        return answer

    rule = FilterRule(zero_variance=False, custom="odd")
    with pytest.raises(ValueError, match=says):
        filter_reason(rule, values=[0.0, 1.0], verdicts=[0.0, 1.0], truncated=[False, False])


def test_an_importance_mode_returns_finite_weights() -> None:
    register_importance("endless")(lambda ratios: ratios.ratio / 0)
    logprobs, mask = torch.zeros(1, 2), torch.ones(1, 2)
    with pytest.raises(ValueError, match="'endless' returned a weight that is not finite"):
        importance_weights(
            logprobs, logprobs, mask, level="token", mode="endless", lower=0.0, upper=2.0
        )


def test_a_reward_shaping_returns_a_finite_number() -> None:
    register_reward_shaping("lost")(lambda reward, response, options: math.nan)
    with pytest.raises(ValueError, match="'lost' returned nan, no finite number"):
        Shaping({"correct": 1.0}, 8, plugins=(("lost", {}),)).shape({"correct": 1.0}, 3)


def test_a_name_has_options_of_its_own_in_every_kind() -> None:
    @dataclass(frozen=True)
    class First:
        size: int = 1

    @dataclass(frozen=True)
    class Second:
        size: int = 1

    register_policy_loss("sized", options=First)(lambda terms: (terms.current, {}))
    register_estimator("sized", options=Second)(lambda rewards, groups, options: rewards)
    assert POLICY_LOSSES.options("sized", {"size": 3}) == First(3)
    assert ESTIMATORS.options("sized", {}) == Second()


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="plugin module no_such_module cannot be imported"):
        import_plugins(["no_such_module"])
