"""Learner steps after the last checkpoint: trained again from the journal, or discarded with a
reason and another run epoch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from async_grpo.replay.history import read_history
from async_grpo.replay.journal import segment_path, segments
from async_grpo.replay.ledger import State
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.resume import JournalSettings, open_queue
from async_grpo.wire.codec import GroupTicket
from tests.support.frames import frame_of
from tests.support.journal_life import (
    RULES,
    Life,
    journal_in,
    produce,
    queue_settings,
    saved,
    train,
)


@pytest.mark.parametrize("runs", [5, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("order", "on_stale"), RULES)
async def test_lost_steps_are_served_again_and_nothing_else_changes(
    tmp_path: Path, order: str, on_stale: str, runs: int
) -> None:
    happened = Counter()

    for seed in range(runs):
        life = Life(tmp_path / str(seed), 3000 + seed, order=order, on_stale=on_stale)
        rolled_to = None
        for _ in range(200):
            await life.call()
            chance, newest = life.random.random(), life.queue._ledger.newest_version
            if chance < 0.02:
                await life.die()
            elif (
                chance < 0.04 and life.checkpoints
            ):  # the gang restarts: the queue stays, its learner goes back
                await life.repeat(life.random.choice(life.checkpoints).step)
                happened["gang"] += 1
            elif chance < 0.09 and (life.checkpoints or not life.batches) and newest != rolled_to:
                checkpoint = life.random.choice(life.checkpoints) if life.checkpoints else None
                if newest > (checkpoint.step if checkpoint else 0):
                    happened["rolled"] += await life.roll_forward(checkpoint)
                    rolled_to = newest
        await life.finish()
    assert happened["rolled"] > 4 * runs and happened["gang"] > 2 * runs, happened


async def interrupted(
    directory: Path, **changes: object
) -> tuple[dict, JournalSettings, list[GroupTicket]]:
    """A run with a checkpoint of step 2 that ended in learner step 5; its snapshot, and a group
    that was in flight.
    """
    journal = journal_in(directory, lost_steps="replay", **changes)
    queue = open_queue(queue_settings(), journal)
    await train(queue, 1, 2)
    await queue.live(2, "digest-2")
    snapshot = await saved(queue)
    await train(queue, 3, 5)
    await queue.live(5, "digest-5")
    tickets = await queue.acquire("a", 5, [], 1)
    await produce(queue, 1, version=5, actor="b")
    return snapshot, journal, tickets


async def again(
    journal: JournalSettings,
    snapshot: dict | None,
    *,
    start: str = "second",
    step: int = 2,
    **changes: object,
) -> ReplayQueue:
    return open_queue(
        queue_settings(trained_steps=step),
        replace(journal, start=start, **changes),
        snapshot=snapshot,
    )


async def test_what_was_lost_is_rolled_forward_and_said(tmp_path: Path) -> None:
    snapshot, journal, [ticket] = await interrupted(tmp_path)
    queue = await again(journal, snapshot)
    ledger = queue._ledger
    assert (ledger.steps, ledger.live, ledger.run_epoch) == (5, 5, 0)
    assert str(queue.report) == (
        "3 completed groups restored, 1 to be issued again (1 in flight); 3 learner steps "
        "after the checkpoint (step 2) rolled forward from the "
        "recorded batches"
    )
    assert await queue.digests() == {
        1: "digest-1",
        2: "digest-2",
        3: "digest-3",
        4: "digest-4",
        5: "digest-5",
    }
    assert [group.group_id for group in (await queue.get_batch(4)).groups] == list(
        read_history(tmp_path).steps[4]
    )
    assert await queue.acquire("c", 2, [], 1) == [], (
        "an engine of the checkpoint's version must not get tickets"
    )
    assert [one.group_id for one in await queue.acquire("c", 5, [], 1)] == [ticket.group_id]


async def test_without_a_checkpoint_the_run_is_rolled_forward_from_its_beginning(
    tmp_path: Path,
) -> None:
    _, journal, _ = await interrupted(tmp_path)
    queue = await again(journal, None, step=0)
    assert (
        queue._ledger.steps == 5
        and "5 learner steps after the checkpoint (step 0) rolled forward" in str(queue.report)
    )
    assert [(await queue.get_batch(step)).step for step in range(1, 6)] == [1, 2, 3, 4, 5]


async def damage(journal: JournalSettings, step: int = 3) -> None:
    """A byte in a frame of this step turns."""
    history = read_history(Path(journal.directory))
    place = history.groups[history.steps[step][0]].frames[-1][1]
    path = segment_path(Path(journal.directory), place.segment)
    data = bytearray(path.read_bytes())
    data[place.offset + place.length // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("how", "changes", "why"),
    [
        ("asked", {"lost_steps": "discard"}, "checkpoint.on_lost_steps is discard"),
        ("training", {"training": "other"}, "settings of training have changed"),
        ("identity", {"identity": "other"}, "another model, data or sampling"),
        ("damage", {}, "of step 3 cannot be read"),
    ],
)
async def test_steps_that_cannot_be_repeated_are_discarded_with_the_reason(
    tmp_path: Path, how: str, changes: dict, why: str
) -> None:
    snapshot, journal, [old] = await interrupted(tmp_path)
    if how == "damage":
        await damage(journal)
    queue = await again(journal, snapshot, **changes)
    assert (queue._ledger.steps, queue._ledger.live, queue._ledger.run_epoch) == (2, 2, 1)
    assert "3 learner steps after the checkpoint (step 2) discarded and trained anew" in str(
        queue.report
    ) and why in str(queue.report)
    verdicts = await queue.put("a", [frame_of(old)])
    assert [verdict.status for verdict in verdicts] == [
        "abandoned"
    ] and "after 2, which were discarded" in verdicts[0].reason
    assert (await queue.counts())["abandoned"] == 1
    await train(queue, 3, 6)
    assert (await queue.counts())["trained"] == 2 * 5 and {
        ticket.run_epoch for ticket in await queue.acquire("a", 5, [], 99)
    } <= {1}


async def test_only_what_comes_after_damage_is_discarded(tmp_path: Path) -> None:
    snapshot, journal, [old] = await interrupted(tmp_path)
    await damage(journal, step=5)
    queue = await again(journal, snapshot)
    ledger, said = queue._ledger, str(queue.report)
    assert (ledger.steps, ledger.live, ledger.run_epoch, ledger.epoch_step) == (4, 4, 1, 4), said
    assert (
        "2 learner steps after the checkpoint (step 2) rolled forward from the recorded batches; "
        "1 learner step after step 4 discarded and trained anew: group "
    ) in said and "of step 5 cannot be read" in said
    recorded = read_history(tmp_path).steps
    for step in (3, 4):
        assert [one.group_id for one in (await queue.get_batch(step)).groups] == list(
            recorded[step]
        )
    assert [verdict.status for verdict in await queue.put("a", [frame_of(old)])] == ["abandoned"]
    assert all(ticket.policy_version == 4 for ticket in await queue.acquire("b", 4, [], 99))
    third = await again(journal, snapshot, start="third")
    assert (third._ledger.steps, third._ledger.run_epoch) == (2, 2), "it ended twice at step 4"
    assert (await third.counts())["trained"] == 4


async def test_tokens_as_old_as_the_restored_step_are_no_reason_to_refuse(tmp_path: Path) -> None:
    snapshot, journal, [old] = await interrupted(tmp_path)
    queue = await again(journal, snapshot, lost_steps="discard")
    early = replace(old, policy_version=2)
    assert [verdict.status for verdict in await queue.put("a", [frame_of(early)])] == ["late"], (
        "of an older epoch, but not of a lost step"
    )


async def test_after_two_ends_at_one_step_it_is_discarded(tmp_path: Path) -> None:
    snapshot, journal, _ = await interrupted(tmp_path)
    second = await again(journal, snapshot)
    assert second._ledger.steps == 5 and (await second.get_batch(3)).step == 3
    third = await again(journal, snapshot, start="third")
    assert (third._ledger.steps, third._ledger.run_epoch) == (
        2,
        1,
    ) and "ended twice at learner step 5" in str(third.report)
    await train(third, 3, 4)
    fourth = await again(journal, snapshot, start="fourth")
    assert (fourth._ledger.steps, fourth._ledger.training_step, fourth._ledger.run_epoch) == (
        3,
        4,
        1,
    ), "this end was at another step"


@pytest.mark.parametrize("end", ["before its learner began", "in order"])
async def test_a_start_that_did_not_fail_at_the_step_is_no_second_end(
    tmp_path: Path, end: str
) -> None:
    snapshot, journal, _ = await interrupted(tmp_path)
    second = await again(journal, snapshot)
    if end == "in order":
        await second.get_batch(3)
        await second.close()
    third = await again(journal, snapshot, start="third")
    assert (third._ledger.steps, third._ledger.run_epoch) == (5, 0), third.report


async def test_a_start_that_came_further_is_rolled_forward_again(tmp_path: Path) -> None:
    snapshot, journal, _ = await interrupted(tmp_path)
    second = await again(journal, snapshot)
    await produce(second, 99, version=5)
    assert await second.get_batch(6) is not None
    third = await again(journal, snapshot, start="third")
    assert (third._ledger.steps, third._ledger.training_step, third._ledger.run_epoch) == (5, 6, 0)
    assert len((await third.get_batch(6)).groups) == 2 == len(third._ledger.slots[State.TRAINING])


async def test_nothing_lost_raises_no_epoch(tmp_path: Path) -> None:
    journal = journal_in(tmp_path, lost_steps="replay")
    queue = open_queue(queue_settings(), journal)
    await train(queue, 1, 2)
    await queue.live(2)
    snapshot = await saved(queue)
    restored = await again(journal, snapshot)
    assert (
        restored._ledger.run_epoch == 0
        and "discarded" not in str(restored.report)
        and len(segments(tmp_path)) == 3
    )
