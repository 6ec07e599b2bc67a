"""Minibatches and the dealing of rows: completeness, equal counts, budgets, balance,
determinism.
"""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.learner.batching import (
    ATTENTION_TOKENS,
    REPEATED,
    PlanRow,
    RowShape,
    deal,
    make_rank_plans,
    micro_batches,
    minibatches,
)

fast = settings(max_examples=60)
row_lengths = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 200)), max_size=40)
shapes = st.lists(
    st.tuples(st.integers(1, 120), st.lists(st.integers(1, 200), min_size=1, max_size=9)),
    max_size=10,
).map(
    lambda groups: [
        (group, prompt, length)
        for group, (prompt, lengths) in enumerate(groups)
        for length in lengths
    ]
)


@given(
    ids=st.lists(st.integers(0, 10**6), unique=True, max_size=30),
    size=st.integers(1, 10),
    seed=st.integers(0, 99),
)
@fast
def test_minibatches_are_a_partition_that_depends_on_the_ids_alone(
    ids: list[int], size: int, seed: int
) -> None:
    parts = minibatches(ids, seed=seed, step=3, epoch=1, groups_per_minibatch=size)
    assert sorted(group for part in parts for group in part) == sorted(ids)
    assert all(len(part) == size for part in parts[:-1]) and all(parts)
    assert parts == minibatches(
        sorted(ids, reverse=True), seed=seed, step=3, epoch=1, groups_per_minibatch=size
    )


def test_minibatches_change_with_seed_step_and_epoch() -> None:
    plans = [
        minibatches(range(64), seed=seed, step=step, epoch=epoch, groups_per_minibatch=8)
        for seed, step, epoch in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0))
    ]
    assert len({str(plan) for plan in plans}) == len(plans)
    # written down: another process or another day must get the same order
    assert minibatches(range(6), seed=0, step=0, epoch=0, groups_per_minibatch=2) == [
        [1, 3],
        [0, 5],
        [2, 4],
    ]


def test_minibatches_refuse_repeated_ids() -> None:
    with pytest.raises(ValueError, match="twice"):
        minibatches([1, 1], seed=0, step=0, epoch=0, groups_per_minibatch=1)
    with pytest.raises(ValueError, match="at least 1"):
        minibatches([1], seed=0, step=0, epoch=0, groups_per_minibatch=0)


def computed(rows: list[RowShape], batch: list[int]) -> int:
    """Tokens of a micro-batch, each prompt once."""
    return sum({rows[position][0]: rows[position][1] for position in batch}.values()) + sum(
        rows[position][2] for position in batch
    )


def attended(rows: list[RowShape], batch: list[int]) -> int:
    """Tokens of its rows, each with its prompt."""
    return sum(rows[position][1] + rows[position][2] for position in batch)


def cost(rows: list[RowShape], batches: list[list[int]]) -> float:
    """What a rank does, in tokens."""
    return sum(
        computed(rows, batch)
        + sum((rows[place][1] + rows[place][2]) ** 2 / ATTENTION_TOKENS for place in batch)
        for batch in batches
    )


@given(rows=shapes, ranks=st.integers(1, 5), budget=st.integers(1, 400))
@fast
def test_deal_places_every_row_once_within_the_budget(
    rows: list[RowShape], ranks: int, budget: int
) -> None:
    dealt = deal(rows, ranks=ranks, token_budget=budget)
    assert (
        len(dealt) == ranks and len({len(batches) for batches in dealt}) == 1 and len(dealt[0]) >= 1
    )
    assert sorted(position for batches in dealt for batch in batches for position in batch) == list(
        range(len(rows))
    )
    for batch in (batch for batches in dealt for batch in batches):
        assert len(batch) <= 1 or (
            computed(rows, batch) <= budget and attended(rows, batch) <= REPEATED * budget
        )
    for batches in dealt:
        for batch, following in itertools.pairwise([batch for batch in batches if batch]):
            grown = [*batch, following[0]]
            assert computed(rows, grown) > budget or attended(rows, grown) > REPEATED * budget
    assert dealt == deal(rows, ranks=ranks, token_budget=budget)


@given(rows=shapes, ranks=st.integers(1, 5), budget=st.integers(100, 400))
@fast
def test_sharing_prompts_never_makes_the_slowest_rank_slower(
    rows: list[RowShape], ranks: int, budget: int
) -> None:
    strangers = [
        (position, *row[1:]) for position, row in enumerate(rows)
    ]  # the same rows, each with a prompt of its own
    alone = max(
        cost(strangers, batches) for batches in deal(strangers, ranks=ranks, token_budget=budget)
    )
    assert (
        max(cost(rows, batches) for batches in deal(rows, ranks=ranks, token_budget=budget))
        <= alone + 1e-6
    )


def test_deal_balances_tokens_and_attention() -> None:
    generator = random.Random(0)
    rows = [
        (position, generator.randint(20, 200), int(generator.paretovariate(1.2) * 100) % 8000 + 1)
        for position in range(512)
    ]
    costs = [cost(rows, batches) for batches in deal(rows, ranks=4, token_budget=16384)]
    assert max(costs) / min(costs) < 1.02


def test_deal_keeps_groups_together_where_that_is_faster() -> None:
    groups = [(group, 100, 30 + group) for group in range(8) for _ in range(8)]
    dealt = deal(groups, ranks=2, token_budget=2000)
    homes = [{groups[place][0] for batch in batches for place in batch} for batches in dealt]
    assert (
        not homes[0] & homes[1]
        and sum(computed(groups, batch) for batches in dealt for batch in batches)
        < 8 * 100 + 8 * 8 * 34 + 8 * 100
    )
    one = deal([(0, 10, 100)] * 8, ranks=4, token_budget=2000)
    assert [len(batch) for [batch] in one] == [2, 2, 2, 2], "a single group is for all ranks"


def test_a_long_prompt_is_not_repeated_for_attention_without_bound() -> None:
    batches = micro_batches([(0, 1000, 10)] * 9, 2000)
    assert [len(batch) for batch in batches] == [3, 3, 3]


def test_deal_gives_idle_ranks_empty_micro_batches() -> None:
    assert deal([], ranks=2, token_budget=8) == [[[]], [[]]]
    assert deal([(0, 1, 1)], ranks=3, token_budget=1) == [[[0]], [[]], [[]]]
    assert deal([(0, 1, 5), (1, 1, 5), (2, 1, 2)], ranks=2, token_budget=6) == [
        [[0], [2]],
        [[1], []],
    ]
    for ranks, budget in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            deal([], ranks=ranks, token_budget=budget)


@given(lengths=st.lists(row_lengths, min_size=1, max_size=3), ranks=st.integers(1, 4))
@fast
def test_rank_plans_hold_every_row_of_every_update_once(
    lengths: list[list[tuple[int, int]]], ranks: int
) -> None:
    updates = [
        [
            PlanRow(position // 4, position % 4, prompt, length, 0.1, length)
            for position, (prompt, length) in enumerate(rows)
        ]
        for rows in lengths
    ]
    plans = make_rank_plans(7, updates, ranks=ranks, token_budget=300, epoch_updates=1)
    assert len(plans) == ranks and all(
        plan.step == 7 and len(plan.updates) == len(updates) for plan in plans
    )
    for index, rows in enumerate(updates):
        assert len({len(plan.updates[index]) for plan in plans}) == 1
        dealt = [row for plan in plans for batch in plan.updates[index] for row in batch]
        assert sorted(dealt, key=lambda row: (row.group_id, row.row)) == rows
    for plan in plans:
        needed = {row.group_id for batches in plan.updates for batch in batches for row in batch}
        assert plan.group_ids == tuple(sorted(needed))
