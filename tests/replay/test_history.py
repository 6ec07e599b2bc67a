"""A part of the journal tells of a few steps what the whole of it does, and the rest is not
read.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from async_grpo.replay import queue as queue_module
from async_grpo.replay.history import Stretch, lineage, read_history
from async_grpo.replay.journal import Segment, segments
from async_grpo.replay.ledger import State
from async_grpo.replay.resume import open_queue
from tests.support.frames import frame_of
from tests.support.journal_life import Life, journal_in
from tests.support.queues import queue_settings, take


@pytest.mark.parametrize("seed", range(8))
async def test_steps_are_those_of_the_whole_history(tmp_path: Path, seed: int) -> None:
    """Small segments, deaths of the queue, and starts from older checkpoints that take steps
    back.
    """
    life, rng = (
        Life(tmp_path, seed, order="oldest", on_stale="mask", total_steps=60),
        random.Random(seed),
    )
    life.forgets = False
    for _ in range(400):
        await life.call()
        if rng.random() < 0.03:
            await life.die()
        if rng.random() < 0.02 and life.checkpoints:
            await life.resume(rng.choice(life.checkpoints[-3:]))
    history = read_history(tmp_path)
    newest = max(history.steps)
    assert newest > 2 and len(segments(tmp_path)) > 3
    for first in range(1, newest + 1):
        last = rng.randint(first, min(newest, first + 3))
        stretch = Stretch(tmp_path, first=first, last=last)
        assert stretch.steps == {
            step: ids for step, ids in history.steps.items() if first <= step <= last + 1
        }
        for group_id, result in stretch.groups.items():
            assert result.step == next(
                (step for step, ids in stretch.steps.items() if group_id in ids), None
            )
            if result.step is not None:
                assert stretch.meta(group_id) == history.meta(group_id)
    everything = Stretch(tmp_path, first=1, last=newest)
    ready = {group_id for group_id, record in history.groups.items() if record.state == State.READY}
    assert {group_id for group_id, result in everything.groups.items() if result.waits} == ready


async def test_what_does_not_tell_of_these_steps_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(
        tmp_path,
        1,
        rollout_batch_size=2,
        max_staleness=1,
        order="oldest",
        on_stale="wait",
        total_steps=80,
    )
    life.forgets = False
    life.queue._journal._segment_bytes = 4000
    await life.finish()
    read: dict[int, int] = {}
    following = Segment._next

    def counted(self: Segment, expected: int | None) -> object:
        read[self.number] = read.get(self.number, 0) + (expected is not None)
        return following(self, expected)

    monkeypatch.setattr(Segment, "_next", counted)
    links, _ = lineage(tmp_path)
    assert len(links) > 10
    stretch = Stretch(tmp_path, first=40, last=42)
    assert set(stretch.steps) == {40, 41, 42, 43}
    assert sum(count > 0 for count in read.values()) <= 5, "a step takes about half a segment"


async def test_rejected_groups_at_most_double_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted ones have results in any case; of rejected ones as many bytes, or a budget."""
    frames = {}
    for budget in (0, 10**6):
        monkeypatch.setattr(queue_module, "REJECTED_BYTES", budget)
        directory = tmp_path / str(budget)
        queue = open_queue(queue_settings(max_staleness=3), journal_in(directory))
        tickets = await take(queue, 8)
        for flat, ticket in zip((1, 1, 0, 1, 1, 0, 1, 1), tickets, strict=True):
            values = (1.0, 1.0) if flat else (0.0, 1.0)
            await queue.put("a", [frame_of(ticket, values=values)])
        await queue.commit()
        groups = read_history(directory).groups
        frames[budget] = [bool(groups[ticket.group_id].frames) for ticket in tickets]
    assert frames == {0: [False, False, True, True, False, True, True, False], 10**6: [True] * 8}
