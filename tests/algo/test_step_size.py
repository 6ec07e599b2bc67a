"""The factor of a step by its effective sample size, against a loop over tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from async_grpo.algo.step_size import EffectiveStep
from tests.support.algo_case import F64, fast

rows = st.lists(
    st.lists(st.tuples(st.floats(-1, 1), st.integers(0, 1)), min_size=1, max_size=5),
    min_size=1,
    max_size=8,
)


def slow(responses: Sequence[Sequence[tuple[float, int]]]) -> float:
    weights = []
    for tokens in responses:
        if any(valid for _, valid in tokens):
            weights.append(math.exp(sum(ratio for ratio, valid in tokens if valid)))
    if not weights:
        return 1.0
    return math.sqrt(sum(weights) ** 2 / sum(one * one for one in weights) / len(weights))


def sums(step: EffectiveStep, responses: Sequence[Sequence[tuple[float, int]]]) -> None:
    """Adds a micro-batch; without responses, the token of a dummy."""
    tokens = [token for row in responses for token in row] or [(0.0, 0)]
    index = [place for place, row in enumerate(responses) for _ in row] or [0]
    ratios, mask = (torch.tensor(column, dtype=F64) for column in zip(*tokens, strict=True))
    behavior = torch.where(mask != 0, torch.linspace(-2, -1, len(mask), dtype=F64), math.nan)
    step.add(behavior + ratios, behavior, mask, torch.tensor(index))


@given(responses=rows, cuts=st.lists(st.integers(0, 8), min_size=3, max_size=3))
@fast
def test_the_factor_is_its_formula_in_any_split_over_micro_batches_and_ranks(
    responses: list[list[tuple[float, int]]], cuts: list[int]
) -> None:
    first, second, third = sorted(cuts)
    parts = [responses[:first], responses[first:second], responses[second:third], responses[third:]]
    ranks = [EffectiveStep(), EffectiveStep()]
    for place, part in enumerate(parts):
        sums(ranks[place // 2], part)
    seen: list[Tensor] = []

    def one(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    ranks[0].factor(one)
    got = ranks[1].factor(lambda tensor: tensor + seen[0])
    assert got == pytest.approx(slow(responses), rel=1e-9) and 0 < got <= 1 + 1e-12


def test_an_update_begins_with_nothing_and_far_ratios_stay_finite() -> None:
    step = EffectiveStep()
    for _ in range(2):
        sums(step, [[(0.5, 1), (0.5, 1)], [(-0.5, 1)]])
        assert step.factor(lambda one: one) == pytest.approx(
            slow([[(0.5, 1), (0.5, 1)], [(-0.5, 1)]])
        )
    sums(step, [[(400.0, 1)], [(0.0, 1)], [(-400.0, 1)], [(3.0, 0)]])
    assert step.factor(lambda one: one) == pytest.approx(math.sqrt(1 / 3), rel=1e-6)
    sums(step, [])
    assert step.factor(lambda one: one) == 1.0
