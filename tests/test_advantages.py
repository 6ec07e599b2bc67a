"""Advantage estimators against slow loops written from their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.algo.advantages import compute_advantages, row_advantages
from tests.algo_case import F64, close, fast, seeds


def slow_grpo(rewards: list[float], groups: list[int], norm: bool) -> list[float]:
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        mine = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(mine) < 2 or max(mine) - min(mine) <= 1e-6:
            out.append(0.0)
            continue
        mean = sum(mine) / len(mine)
        std = math.sqrt(sum((r - mean) ** 2 for r in mine) / (len(mine) - 1))
        out.append((reward - mean) / (std + 1e-6) if norm else reward - mean)
    return out


rows_with_groups = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, -2.0, 4096.25]), st.integers(-2, 3)), min_size=1, max_size=20)


@given(rows=rows_with_groups, norm=st.booleans(), seed=seeds)
@fast
def test_grpo_is_the_formula_in_any_row_order(rows: list[tuple[float, int]], norm: bool, seed: int) -> None:
    rewards, groups = torch.tensor([r for r, _ in rows]), torch.tensor([g for _, g in rows])
    value = row_advantages("grpo", rewards, groups, norm_adv_by_std_in_grpo=norm)
    close(value, torch.tensor(slow_grpo([r for r, _ in rows], [g for _, g in rows], norm)), rtol=1e-5, atol=1e-6)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    close(row_advantages("grpo", rewards[order], groups[order], norm_adv_by_std_in_grpo=norm), value[order])


def test_grpo_worked_example() -> None:
    value = row_advantages("grpo", torch.tensor([2.8, 2.8, 2.0, 0.8]), torch.zeros(4, dtype=torch.int64))
    assert [round(x, 2) for x in value.tolist()] == [0.74, 0.74, -0.11, -1.38]


def test_grpo_survives_large_means_and_has_no_signal_in_equal_groups() -> None:
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 2])
    rewards = torch.tensor([4096.0, 4096.5, 4097.0, 0.1, 0.1, 0.1, 4096.0])
    expected = torch.tensor([-1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    close(row_advantages("grpo", rewards, groups), expected, rtol=0, atol=1e-5)
    nearly = torch.tensor([1.0, 1.0 + 9e-7, 0.0, 2e-6], dtype=F64)
    value = row_advantages("grpo", nearly, torch.tensor([0, 0, 1, 1]))
    assert value[:2].tolist() == [0, 0] and value[2] == -value[3] < -0.4


def test_advantages_refuse_what_they_cannot_define() -> None:
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="grpo"):
        row_advantages("gropo", torch.ones(1), one)
    with pytest.raises(ValueError, match="finite"):
        row_advantages("grpo", torch.tensor([math.nan]), one)
    with pytest.raises(ValueError, match=r"\[B\]"):
        row_advantages("grpo", torch.ones(2), one)


def test_token_advantages_ignore_padding() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    rewards = torch.tensor([[0.0, 1.0, math.nan], [0.5, math.inf, math.nan]])
    advantages, returns = compute_advantages("grpo", rewards, mask, torch.tensor([3, 3]))
    a = 0.25 / (math.sqrt(2 * 0.25**2) + 1e-6)
    close(advantages, torch.tensor([[a, a, 0.0], [-a, 0.0, 0.0]]))
    assert torch.equal(returns, advantages)
