"""The order rules by themselves: the registry is the schema's, and what is in time is what a
schedule of batches can train.
"""

from __future__ import annotations

import random
from typing import get_args

import pytest

from async_grpo.config.schema import UNBOUNDED_ORDERS, Replay
from async_grpo.replay.order import ORDERS, Due, Others


def test_the_schema_names_every_order_and_those_without_a_bound() -> None:
    assert tuple(ORDERS) == get_args(Replay.model_fields["order"].annotation)
    assert tuple(name for name, rule in ORDERS.items() if not rule.bounded) == UNBOUNDED_ORDERS


def steps_of(order: str, kept: list[Due], waiting: set[int], *, steps: int, size: int) -> dict:
    """Group -> the step that trains it when nothing else comes, one batch after the other."""
    if order == "oldest":
        line = [one.group_id for one in sorted(kept)]
    else:
        line = sorted({one.group_id for one in kept} | waiting)
    return {group_id: steps + 1 + place // size for place, group_id in enumerate(line)}


@pytest.mark.parametrize("order", ["oldest", "fifo"])
def test_what_is_in_time_is_trained_within_the_bound_and_no_more_can_be(order: str) -> None:
    draw = random.Random(order)
    dropped = 0
    for _ in range(300):
        size, bound, steps = draw.randint(1, 3), draw.randint(0, 3), draw.randint(0, 4)
        ids = draw.sample(range(30), 9)
        versions = [draw.randint(max(steps - bound, 0), steps) for _ in ids]
        groups = [Due(*one) for one in zip(versions, ids, strict=True)]
        candidates, waiting = groups[:6], set(ids[6:])
        rule = ORDERS[order](batch_size=size, max_staleness=bound)
        kept = rule.in_time(candidates, Others(waiting=waiting), steps=steps)
        chosen = [one for one in candidates if one.group_id in kept]
        everything = waiting | set(ids) if order == "fifo" else waiting
        trained = steps_of(order, chosen, everything, steps=steps, size=size)
        assert all(trained[one.group_id] - 1 - one.version <= bound for one in chosen)
        for one in (one for one in candidates if one.group_id not in kept):
            dropped += 1
            more = [*chosen, one]
            trained = steps_of(order, more, everything, steps=steps, size=size)
            assert any(trained[other.group_id] - 1 - other.version > bound for other in more)
    assert dropped > 50


def test_the_first_candidates_are_preferred() -> None:
    rule = ORDERS["oldest"](batch_size=1, max_staleness=1)
    old, young = Due(1, 0), Due(1, 1)
    assert rule.in_time([old, young], Others(), steps=2) == {0}
    assert rule.in_time([young, old], Others(), steps=2) == {1}
    assert rule.in_time([old], Others([young]), steps=2) == set()
