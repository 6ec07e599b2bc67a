"""The group filter against its rules written as plain loops."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.algo.filters import FilterRule, accuracy, filter_reason, zero_variance
from async_grpo.algo.rewards import Shaping
from async_grpo.replay.rules import rejection
from async_grpo.wire.codec import GroupMeta, RowMeta
from tests.support.algo_case import fast

rates = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0])
rules = st.builds(
    FilterRule,
    tolerance=st.sampled_from([0.0, 1e-6, 0.1]),
    zero_variance=st.booleans(),
    accuracy_low=st.none() | rates.filter(lambda low: low < 0.5),
    accuracy_high=st.none() | rates.filter(lambda high: high >= 0.5),
    all_truncated=st.booleans(),
)
rows = st.lists(
    st.tuples(
        st.sampled_from([0.0, 1e-7, 0.05, 0.5, 1.0, 4096.0]),
        st.sampled_from([0.0, 1.0]),
        st.booleans(),
    ),
    min_size=1,
    max_size=10,
)


def slow_reason(rule: FilterRule, group: list[tuple[float, float, bool]]) -> str | None:
    right = 0
    for _, verdict, _ in group:
        if verdict == 1.0:
            right += 1
    if rule.zero_variance:
        equal = True
        for value, _, _ in group:
            for other, _, _ in group:
                if abs(value - other) > rule.tolerance:
                    equal = False
        if equal:
            return (
                "all_wrong" if right == 0 else "all_right" if right == len(group) else "all_equal"
            )
    if rule.accuracy_low is not None and right / len(group) <= rule.accuracy_low:
        return "too_hard"
    if rule.accuracy_high is not None and right / len(group) >= rule.accuracy_high:
        return "too_easy"
    if rule.all_truncated:
        for _, _, truncated in group:
            if not truncated:
                return None
        return "all_truncated"
    return None


def reason(rule: FilterRule, group: list[tuple[float, float, bool]]) -> str | None:
    values, verdicts, truncated = zip(*group, strict=True)
    return filter_reason(rule, values=values, verdicts=verdicts, truncated=truncated)


@fast
@given(rule=rules, group=rows, seed=st.integers(0, 99))
def test_the_filter_is_its_rules_in_any_order_of_rows(
    rule: FilterRule, group: list[tuple[float, float, bool]], seed: int
) -> None:
    want = slow_reason(rule, group)
    assert reason(rule, group) == want
    random.Random(seed).shuffle(group)
    assert reason(rule, group) == want


@pytest.mark.parametrize(
    ("verdicts", "low", "high", "want"),
    [
        ([1] * 9 + [0], None, 0.9, "too_easy"),
        ([1] * 8 + [0] * 2, None, 0.9, None),
        ([1] + [0] * 9, 0.1, None, "too_hard"),
        ([1, 1] + [0] * 8, 0.1, None, None),
        ([0.0] * 4, 0.0, None, "too_hard"),
        ([1.0] * 4, None, 1.0, "too_easy"),
        ([1, 0, 0], 1 / 3, 0.9, "too_hard"),
    ],
)
def test_the_band_is_open_on_both_sides(
    verdicts: list[float], low: float | None, high: float | None, want: str | None
) -> None:
    rule = FilterRule(zero_variance=False, accuracy_low=low, accuracy_high=high)
    assert (
        filter_reason(rule, values=[], verdicts=verdicts, truncated=[False] * len(verdicts)) == want
    )


def test_dapo_keeps_a_group_iff_some_but_not_all_are_right() -> None:
    for n in (2, 5, 8):
        for right in range(n + 1):
            verdicts = [1.0] * right + [0.0] * (n - right)
            band = FilterRule(zero_variance=False, accuracy_low=0.0, accuracy_high=1.0)
            for rule in (FilterRule("acc"), band):
                kept = (
                    filter_reason(rule, values=verdicts, verdicts=verdicts, truncated=[False] * n)
                    is None
                )
                assert kept == (0 < right < n)


def test_equal_rewards_are_equal_whatever_their_computed_deviation() -> None:
    assert np.std([0.1] * 3) > 0
    assert zero_variance([0.1] * 3, tolerance=0.0)
    assert zero_variance([4096.0, 4096.0 + 5e-7]) and not zero_variance([4096.0, 4096.0 + 2e-6])
    assert zero_variance([0.3]) and not zero_variance([0.0, 1e-5])


@pytest.mark.parametrize(
    ("tolerance", "other", "want"),
    [(0.0, 1e-7, None), (1e-6, 1e-7, "all_equal"), (0.1, 0.05, "all_equal"), (1e-6, 0.05, None)],
)
def test_the_tolerance_is_the_rules(tolerance: float, other: float, want: str | None) -> None:
    group = {"values": [0.0, other], "verdicts": [0.0, 1.0], "truncated": [False, False]}
    assert filter_reason(FilterRule(tolerance=tolerance), **group) == want


def test_accuracy_is_the_rounded_quotient() -> None:
    for n in range(1, 65):
        for right in range(n + 1):
            assert accuracy([1.0] * right + [0.0] * (n - right)) == right / n


@given(verdicts=st.lists(st.sampled_from([0.0, 1.0, None]), max_size=8))
def test_accuracy_needs_every_verdict(verdicts: list[float | None]) -> None:
    if not verdicts or None in verdicts:
        assert accuracy(verdicts) is None
    else:
        assert accuracy(verdicts) == verdicts.count(1.0) / len(verdicts)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"verdicts": [1.0, None]}, "a response is not judged"),
        ({"values": [1.0, math.nan]}, "finite"),
        ({"values": [1.0]}, "1 values"),
        ({"values": [], "verdicts": [], "truncated": []}, "must be equal and not 0"),
        ({"truncated": [True]}, "1 lengths"),
    ],
)
def test_a_group_that_cannot_be_judged_is_an_error(arguments: dict, said: str) -> None:
    rule = FilterRule(accuracy_low=0.1)
    with pytest.raises(ValueError, match=said):
        filter_reason(
            rule,
            **(
                {"values": [0.0, 1.0], "verdicts": [0.0, 1.0], "truncated": [False, False]}
                | arguments
            ),
        )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"metric": ""}, "metric is empty"),
        ({"tolerance": -1.0}, "tolerance"),
        ({"tolerance": math.nan}, "tolerance"),
        ({"accuracy_low": 0.5, "accuracy_high": 0.5}, "accuracy_low is 0.5"),
        ({"accuracy_high": 1.5}, "accuracy_high is 1.5"),
        ({"accuracy_low": math.nan}, "accuracy_low"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(settings: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FilterRule(**settings)


def group_of(*given_rows: tuple[dict[str, float], float | None, int, str, str]) -> GroupMeta:
    metas = tuple(
        RowMeta(
            role=role,
            length=length,
            rewards=rewards,
            verdict=verdict,
            finish_reason=finish,
            versions=((0, length),),
        )
        for rewards, verdict, length, finish, role in given_rows
    )
    return GroupMeta(0, 1, 0, "a", (3,), metas, {}, 99)


def test_every_metric_is_what_its_name_says() -> None:
    shaping = Shaping({"correct": 1.0, "format": 0.5}, 10, clip=1.2, overlong_length=4)
    group = group_of(
        ({"correct": 1.0, "format": 1.0}, 1.0, 6, "stop", "train"),
        ({"correct": 1.0, "format": 0.5}, 1.0, 6, "stop", "train"),
        ({"correct": 0.0, "format": 0.0}, 0.0, 2, "length", "baseline"),
    )
    want = {
        "score": None,
        "seq_reward": "all_right",
        "acc": "all_right",
        "correct": "all_right",
        "format": None,
    }
    assert {metric: rejection(group, FilterRule(metric), shaping) for metric in want} == want
    spoken = replace(group, rows=(replace(group.rows[0], context=20), *group.rows[1:]))
    assert rejection(spoken, FilterRule("seq_reward"), shaping) == "all_right", (
        "the penalty is of sampled tokens, in the filter too: what an environment says is free"
    )
    same = ({"correct": 1.0, "format": 0.0}, 1.0)
    longer = group_of((*same, 6, "length", "train"), (*same, 9, "length", "train"))
    assert (
        rejection(longer, FilterRule("seq_reward"), shaping) is None
    )  # the penalty makes the difference
    assert rejection(longer, FilterRule("score"), shaping) == "all_right"
    assert (
        rejection(longer, FilterRule(zero_variance=False, all_truncated=True), shaping)
        == "all_truncated"
    )


def test_a_component_that_a_response_lacks_has_no_part_in_the_metric() -> None:
    shaping = Shaping({"correct": 1.0, "format": 0.5}, 10)
    rows = [
        ({"correct": 1.0, "format": value} if value is not None else {"correct": 1.0})
        for value in (None, 0.2, 0.7)
    ]
    group = group_of(*((row, 1.0, 2, "stop", "train") for row in rows))
    two = group_of(*((row, 1.0, 2, "stop", "train") for row in rows[:2]))
    none = group_of(*((rows[0], 1.0, 2, "stop", "train") for _ in range(2)))
    for metric, wanted in (("format", [None, "all_right", "all_right"]), ("score", [None, None])):
        found = [rejection(one, FilterRule(metric), shaping) for one in (group, two, none)]
        assert found[: len(wanted)] == wanted


def test_what_a_response_lacks_is_named() -> None:
    group = group_of(
        ({"correct": 1.0}, None, 2, "stop", "train"), ({"correct": 1.0}, None, 2, "stop", "train")
    )
    for rule, said in (
        (FilterRule("acc"), "a response is not judged"),
        (FilterRule("style"), "no reward component 'style'.*correct"),
        (FilterRule(zero_variance=False, accuracy_low=0.0), "a response is not judged"),
    ):
        with pytest.raises(ValueError, match=said):
            rejection(group, rule, Shaping({"correct": 1.0}, 10))
    assert rejection(group, FilterRule(), Shaping({"correct": 1.0}, 10)) == "all_equal"


def test_filters_and_queue_do_without_torch() -> None:
    code = (
        "import sys, async_grpo.algo.filters, async_grpo.replay.queue; print(sorted({'torch', "
        "'ray', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
