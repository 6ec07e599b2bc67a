"""Minibatches and the dealing of rows: completeness, equal counts, budgets, balance, determinism."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.batching import ATTENTION_TOKENS, PADDING, PlanRow, deal, make_rank_plans, minibatches

fast = settings(max_examples=60, deadline=None)
row_lengths = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 200)), max_size=40)


@given(ids=st.lists(st.integers(0, 10**6), unique=True, max_size=30), size=st.integers(1, 10), seed=st.integers(0, 99))
@fast
def test_minibatches_are_a_partition_that_depends_on_the_ids_alone(ids: list[int], size: int, seed: int) -> None:
    parts = minibatches(ids, seed=seed, step=3, epoch=1, groups_per_minibatch=size)
    assert sorted(group for part in parts for group in part) == sorted(ids)
    assert all(len(part) == size for part in parts[:-1]) and all(parts)
    assert parts == minibatches(sorted(ids, reverse=True), seed=seed, step=3, epoch=1, groups_per_minibatch=size)


def test_minibatches_change_with_seed_step_and_epoch() -> None:
    plans = [
        minibatches(range(64), seed=seed, step=step, epoch=epoch, groups_per_minibatch=8)
        for seed, step, epoch in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0))
    ]
    assert len({str(plan) for plan in plans}) == len(plans)
    # written down: another process or another day must get the same order
    assert minibatches(range(6), seed=0, step=0, epoch=0, groups_per_minibatch=2) == [[1, 3], [0, 5], [2, 4]]


def test_minibatches_refuse_repeated_ids() -> None:
    with pytest.raises(ValueError, match="twice"):
        minibatches([1, 1], seed=0, step=0, epoch=0, groups_per_minibatch=1)
    with pytest.raises(ValueError, match="at least 1"):
        minibatches([1], seed=0, step=0, epoch=0, groups_per_minibatch=0)


@given(rows=row_lengths, ranks=st.integers(1, 5), budget=st.integers(1, 400))
@fast
def test_deal_places_every_row_once_within_the_budget(rows: list[tuple[int, int]], ranks: int, budget: int) -> None:
    dealt = deal(rows, ranks=ranks, token_budget=budget)
    assert len(dealt) == ranks and len({len(batches) for batches in dealt}) == 1 and len(dealt[0]) >= 1
    assert sorted(position for batches in dealt for batch in batches for position in batch) == list(range(len(rows)))
    for batch in (batch for batches in dealt for batch in batches):
        lengths = [sum(rows[position]) for position in batch]
        assert len(batch) <= 1 or (sum(lengths) <= budget and max(lengths) * len(lengths) <= PADDING * budget)
    for batches in dealt:
        filled = [[sum(rows[position]) for position in batch] for batch in batches if batch]
        lengths = [length for batch in filled for length in batch]
        assert lengths == sorted(lengths, reverse=True)
        for batch, following in itertools.pairwise(filled):
            grown = [*batch, following[0]]
            assert sum(grown) > budget or max(grown) * len(grown) > PADDING * budget
    assert dealt == deal(rows, ranks=ranks, token_budget=budget)


def test_deal_balances_tokens_and_attention() -> None:
    generator = random.Random(0)
    rows = [(generator.randint(20, 200), int(generator.paretovariate(1.2) * 100) % 8000 + 1) for _ in range(512)]
    dealt = deal(rows, ranks=4, token_budget=16384)

    def cost(positions: list[int]) -> float:
        return sum((length := sum(rows[position])) + length**2 / ATTENTION_TOKENS for position in positions)

    costs = [cost([position for batch in batches for position in batch]) for batches in dealt]
    assert max(costs) / min(costs) < 1.02


def test_deal_gives_idle_ranks_empty_micro_batches() -> None:
    assert deal([], ranks=2, token_budget=8) == [[[]], [[]]]
    assert deal([(1, 1)], ranks=3, token_budget=1) == [[[0]], [[]], [[]]]
    assert deal([(1, 5), (1, 5), (1, 2)], ranks=2, token_budget=6) == [[[0], [2]], [[1], []]]
    for ranks, budget in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            deal([], ranks=ranks, token_budget=budget)


@given(lengths=st.lists(row_lengths, min_size=1, max_size=3), ranks=st.integers(1, 4))
@fast
def test_rank_plans_hold_every_row_of_every_update_once(lengths: list[list[tuple[int, int]]], ranks: int) -> None:
    updates = [
        [PlanRow(position // 4, position % 4, prompt, length, 0.1) for position, (prompt, length) in enumerate(rows)]
        for rows in lengths
    ]
    plans = make_rank_plans(7, updates, ranks=ranks, token_budget=300, epoch_updates=1)
    assert len(plans) == ranks and all(plan.step == 7 and len(plan.updates) == len(updates) for plan in plans)
    for index, rows in enumerate(updates):
        assert len({len(plan.updates[index]) for plan in plans}) == 1
        dealt = [row for plan in plans for batch in plan.updates[index] for row in batch]
        assert sorted(dealt, key=lambda row: (row.group_id, row.row)) == rows
    for plan in plans:
        needed = {row.group_id for batches in plan.updates for batch in batches for row in batch}
        assert plan.group_ids == tuple(sorted(needed))
