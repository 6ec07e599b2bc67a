"""Reward shaping and group filters against their formulas, on plain numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.algo.filters import zero_variance
from async_grpo.algo.rewards import overlong_penalty, score
from tests.support.algo_case import fast


def test_score_is_the_weighted_sum_and_names_what_is_missing() -> None:
    assert score(
        {"correct": 1.0, "format": 0.5, "length": 7.0}, {"correct": 1.0, "format": -0.2}
    ) == pytest.approx(0.9)
    with pytest.raises(ValueError, match="format"):
        score({"correct": 1.0}, {"format": 1.0})


def test_a_component_without_a_value_is_left_out_of_the_sum() -> None:
    weights = {"correct": 1.0, "format": -0.2, "seen": 0.0}
    assert score({"format": 0.5, "seen": 1.0}, weights) == pytest.approx(-0.1)
    with pytest.raises(ValueError, match="correct"):
        score({"seen": 1.0}, weights)  # what has no weight says nothing


@given(length=st.integers(0, 60), buffer=st.integers(1, 40), factor=st.floats(0, 3))
@fast
def test_overlong_penalty_is_the_paper_formula(length: int, buffer: int, factor: float) -> None:
    limit = 40
    if length <= limit - buffer:
        expected = 0.0
    elif length <= limit:
        expected = factor * ((limit - buffer) - length) / buffer
    else:
        expected = -factor
    value = overlong_penalty(length, max_length=limit, buffer_length=buffer, factor=factor)
    assert value == pytest.approx(expected) and -factor <= value <= 0
    assert value >= overlong_penalty(
        length + 1, max_length=limit, buffer_length=buffer, factor=factor
    )


def test_overlong_penalty_refuses_an_impossible_buffer() -> None:
    for buffer, factor in ((0, 1.0), (41, 1.0), (4, -1.0)):
        with pytest.raises(ValueError, match="overlong"):
            overlong_penalty(1, max_length=40, buffer_length=buffer, factor=factor)


def test_zero_variance() -> None:
    assert (
        zero_variance([0.1, 0.1, 0.1]) and zero_variance([5.0]) and zero_variance([1.0, 1.0 + 9e-7])
    )
    assert not zero_variance([0.0, 1.0]) and not zero_variance([1.0, 1.0 + 2e-6])
    assert zero_variance([0.0, 1.0], tolerance=1.0)
    with pytest.raises(ValueError, match="finite"):
        zero_variance([1.0, math.nan])
