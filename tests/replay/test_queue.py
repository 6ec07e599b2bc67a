"""The replay queue: one rule at a time, and that no schedule breaks the staleness bound or stops
the run.
"""

from __future__ import annotations

import json
import math
import pickle
import random
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.algo.filters import FilterRule
from async_grpo.algo.rewards import Shaping
from async_grpo.errors import NoSignal, SetupError, StalenessError
from async_grpo.replay import events, ledger
from async_grpo.replay import queue as queue_module
from async_grpo.replay.admission import MAX_FAILED_GROUPS
from async_grpo.replay.events import Rate
from async_grpo.replay.ledger import Ledger
from async_grpo.replay.metrics import batch_metrics
from async_grpo.replay.order import can_leave, is_too_old
from async_grpo.replay.queue import TICKET_GRACE_S, ReplayQueue
from async_grpo.replay.resume import open_queue
from async_grpo.replay.rules import (
    DifficultyRule,
    QueueSettings,
    check_bound,
    fair_share,
    problem_of,
)
from async_grpo.replay.token_ledger import token_counts
from async_grpo.rollout.frozen import demonstration
from async_grpo.tasks.registry import problem_index
from async_grpo.wire.codec import GroupTicket, VersionSpan, decode_meta, encode_group, unpack_frames
from tests.support.frames import frame_of, make_group, with_header
from tests.support.queues import Clock, ids, queue_settings, take

OPEN_STATES = ("waiting", "in_flight", "ready", "training")


# ---- one rule at a time ----


async def state_of(queue: ReplayQueue, group_id: int) -> str | int | None:
    return (await queue.history([group_id]))[group_id]["state"]


async def test_synchronous_training_admits_nothing_before_the_weights_are_live() -> None:
    queue = ReplayQueue(queue_settings(max_staleness=0))
    tickets = await take(queue, 9)
    assert ids(tickets) == [(0, 1), (1, 1)]
    await queue.put("a", [frame_of(tickets[1])])
    assert await queue.get_batch(1) is None
    await queue.put("a", [frame_of(tickets[0])])
    batch = await queue.get_batch(1)
    assert [group.group_id for group in batch.groups] == [0, 1]
    assert await queue.get_batch(2) is None  # step 1 is trained, and still nothing may start
    assert await take(queue, 9) == []
    await queue.live(1)
    assert await take(queue, 9) == []  # this engine serves version 0
    assert [ticket.policy_version for ticket in await take(queue, 9, version=1)] == [1, 1]


async def test_a_filtered_group_frees_its_slot_at_once() -> None:
    queue = ReplayQueue(queue_settings(max_staleness=0))
    tickets = await take(queue, 2)
    verdicts = await queue.put("a", [frame_of(tickets[0], values=(1.0, 1.0)), frame_of(tickets[1])])
    assert [(verdict.status, verdict.reason) for verdict in verdicts] == [
        ("rejected", "all_right"),
        ("accepted", ""),
    ]
    (replacement,) = await take(queue, 9)
    assert (replacement.group_id, replacement.attempt) == (2, 1)
    await queue.put("a", [frame_of(replacement)])
    assert [group.group_id for group in (await queue.get_batch(1)).groups] == [1, 2]
    counts = await queue.counts()
    assert (counts["rejected"], counts["rejected/all_right"], counts["training"]) == (1, 1, 2)


@pytest.mark.parametrize(
    ("metric", "values_", "reason"),
    [
        ("score", (0.0, 1.0), None),
        ("score", (0.0, 0.0), "all_wrong"),
        ("score", (0.4, 0.4), "all_equal"),
        ("acc", (1.0, 0.0), None),
        ("acc", (1.0, 1.0), "all_right"),
        ("correct", (0.0, 1.0), None),
        ("format", (0.0, 1.0), "all_equal"),
        ("missing", (0.0, 1.0), "invalid"),
        ("acc", (None, 1.0), "invalid"),
        ("score", (None, 1.0), None),
        ("seq_reward", (0.0, 1.0), None),
        ("seq_reward", (0.5, 1.0), "all_equal"),
    ],
)
async def test_the_filter_looks_at_the_metric_it_names(
    metric: str, values_: tuple[float | None, ...], reason: str | None
) -> None:
    queue = ReplayQueue(
        queue_settings(filter=FilterRule(metric), shaping=Shaping({"correct": 1.0}, 64, clip=0.5))
    )
    (ticket,) = await take(queue, 1)
    (verdict,) = await queue.put("a", [frame_of(ticket, values=values_)])
    assert verdict.status == {None: "accepted", "invalid": "invalid"}.get(reason, "rejected")
    assert reason in (None, "invalid", verdict.reason)


async def test_calls_repeated_after_a_lost_answer_change_nothing() -> None:
    queue = ReplayQueue(queue_settings(max_staleness=0))
    tickets = await take(queue, 2)
    assert (
        await take(queue, 2, holding=[]) == tickets
    )  # the reply got lost: the same tickets, same attempts
    assert await take(queue, 2, holding=[[0, 1]]) == tickets[1:]
    frames = [bytearray(frame_of(ticket)) for ticket in tickets]
    for status in ("accepted", "duplicate"):
        assert {verdict.status for verdict in await queue.put("a", frames)} == {status}
    assert await take(queue, 2, holding=[]) == []  # results are in: nothing is lost
    frames[0][:] = bytes(len(frames[0]))  # the queue owns its copy
    batch = await queue.get_batch(1)
    assert await queue.get_batch(1) == batch == pickle.loads(pickle.dumps(batch))
    assert tickets == pickle.loads(pickle.dumps(tickets))
    assert [
        decode_meta(view).group_id for view in unpack_frames(await queue.payload(1, [1, 0]))
    ] == [1, 0]
    assert {
        verdict.status for verdict in await queue.put("a", [frame_of(ticket) for ticket in tickets])
    } == {"duplicate"}
    await queue.live(1)
    await queue.live(1)
    assert await queue.get_batch(1) == batch
    for step in (0, 3):
        with pytest.raises(ValueError, match="out of turn"):
            await queue.get_batch(step)
    for step, group_ids in ((1, [0]), (2, [])):
        with pytest.raises(ValueError, match="payload"):
            await queue.payload(step, group_ids)
    for version in (0, 2):
        with pytest.raises(ValueError, match="cannot be live"):
            await queue.live(version)


@pytest.mark.parametrize(
    "changes",
    [
        {"values": (0.0, 1.0, 1.0)},
        {"values": (0.0,)},
        {"versions": (1, 2)},
        {"versions": (0, 1)},
        {"policy_version": 0, "versions": (1,)},
        {"broken": True},
    ],
)
async def test_an_invalid_result_is_a_counted_error_and_is_produced_again(changes: dict) -> None:
    queue = ReplayQueue(queue_settings(max_staleness=0, trained_steps=1))
    tickets = await take(queue, 2, version=1)
    broken = changes.pop("broken", False)
    frame = frame_of(tickets[0], **changes)
    if broken:
        frame = with_header(frame, lambda header: header["rows"][0].update(finish_reason="abort"))
    (verdict,) = await queue.put("a", [frame])
    assert (verdict.status, verdict.group_id) == ("invalid", 0) and verdict.reason
    assert (await queue.counts())["invalid"] == 1
    assert ids(await take(queue, 2, version=1, holding=ids(tickets[1:]))) == [(0, 2)]


def test_versions_that_go_backwards_and_half_verdicts_are_no_facts() -> None:
    ticket = GroupTicket(0, 1, 1)
    found = {}
    for name, versions, verdict in (
        ("right", (1, 1, 2), 1.0),
        ("unjudged", (1, 2), None),
        ("back", (1, 2, 1), 1.0),
        ("half", (1, 2), 0.5),
    ):
        group = make_group(ticket, versions=versions)
        group.rows[1].verdict = verdict
        meta = decode_meta(encode_group(group))
        found[name] = problem_of(meta, ticket, newest_version=2, group_size=2, baseline=False)
    assert found["right"] is found["unjudged"] is None
    assert found["back"] == "a token of an older version than the one before it"
    assert found["half"] == "a correctness of 0.5, which is neither 0 nor 1"


async def test_a_frame_that_cannot_be_read_leaves_its_ticket_to_be_issued_again() -> None:
    queue = ReplayQueue(queue_settings())
    (ticket,) = await take(queue, 1)
    (verdict,) = await queue.put("a", [frame_of(ticket)[:-3]])
    assert (verdict.status, verdict.group_id) == ("invalid", -1)
    assert await take(queue, 0, holding=[]) == [ticket]


async def test_results_of_tickets_taken_away_are_late() -> None:
    queue = ReplayQueue(queue_settings(max_staleness=0))
    tickets = await take(queue, 2)
    await queue.fail("b", tickets, "not its own")
    await queue.fail("a", tickets[:1], "timeout")
    statuses = [
        v.status
        for v in await queue.put("a", [frame_of(tickets[0])])
        + await queue.put("b", [frame_of(tickets[1])])
    ]
    assert statuses == ["late", "late"]
    assert [(await state_of(queue, 0)), (await state_of(queue, 1))] == ["waiting", "in_flight"]
    await queue.forfeit("a")
    assert (
        await queue.acquire("a", 0, [], 2) is None
    )  # declared dead: it gets no slot that nobody would take back
    assert ids(await take(queue, 9, actor="b")) == [(0, 2), (1, 2)]
    await queue.fail("b", [GroupTicket(0, 2, 0)], "timeout")
    assert await state_of(queue, 0) == "failed"
    assert ids(await take(queue, 9, actor="b", holding=[(1, 2)])) == [(2, 1)]


async def test_a_group_issued_again_keeps_its_slot_and_takes_the_live_version() -> None:
    queue = ReplayQueue(queue_settings(total_steps=9))
    tickets = await take(queue, 9)
    await queue.put("a", [frame_of(ticket) for ticket in tickets[:2]])
    assert (await queue.get_batch(1)) is not None
    await queue.live(1)
    await queue.forfeit("a")
    again = await take(queue, 9, actor="b", version=1)
    assert again == [
        GroupTicket(2, 2, 1),
        GroupTicket(3, 2, 1),
        GroupTicket(4, 1, 1),
        GroupTicket(5, 1, 1),
    ]


async def test_the_learner_waits_for_the_group_that_is_due() -> None:
    queue = ReplayQueue(queue_settings())
    old = await take(queue, 4)
    await queue.put("a", [frame_of(ticket) for ticket in old[:2]])
    assert await queue.get_batch(1) is not None
    await queue.live(1)
    new = await take(queue, 9, version=1, holding=ids(old[2:]))
    await queue.put("a", [frame_of(ticket) for ticket in [*new, old[3]]])
    assert (
        await queue.get_batch(2) is None
    )  # three are ready, but group 2 must be trained now or never
    await queue.put("a", [frame_of(old[2], versions=(0, 1))])
    assert [group.group_id for group in (await queue.get_batch(2)).groups] == [2, 3]


async def test_a_group_that_waits_for_another_attempt_is_not_due() -> None:
    queue = ReplayQueue(queue_settings())
    old = await take(queue, 4)
    await queue.put("a", [frame_of(ticket) for ticket in old[:2]])
    assert await queue.get_batch(1) is not None
    await queue.live(1)
    await queue.put(
        "a", [frame_of(ticket) for ticket in await take(queue, 9, version=1, holding=ids(old[2:]))]
    )
    assert await queue.get_batch(2) is None
    await queue.fail("a", old[2:], "timeout")  # their next tokens are of version 1
    assert [group.group_id for group in (await queue.get_batch(2)).groups] == [4, 5]


async def test_weights_free_only_the_slots_of_the_steps_they_contain() -> None:
    queue = ReplayQueue(queue_settings(max_staleness=2, total_steps=9))
    await queue.put("a", [frame_of(ticket) for ticket in await take(queue, 9)])
    for step in (1, 2, 3):
        assert await queue.get_batch(step) is not None
    await queue.live(1)
    assert len(await take(queue, 9, version=1)) == 2


@pytest.mark.parametrize(
    ("staying", "step", "max_staleness", "expected"),
    [
        ([], 1, 0, True),
        ([0], 1, 0, False),
        ([0, 0], 1, 1, True),
        ([0, 0, 0], 1, 1, False),
        ([1, 0, 0], 1, 1, True),
        ([0, 0, 1], 2, 1, False),
    ],
)
def test_a_batch_leaves_only_if_the_rest_can_follow_in_time(
    staying: list[int], step: int, max_staleness: int, expected: bool
) -> None:
    assert can_leave(staying, step=step, max_staleness=max_staleness, batch_size=2) is expected


@given(
    actors=st.dictionaries(
        st.sampled_from("abcde"), st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1
    ),
    free=st.integers(0, 25),
)
def test_free_slots_go_to_the_actors_with_the_fewest_in_flight(
    actors: dict[str, tuple[int, int]], free: int
) -> None:
    in_flight, wants = ({name: pair[i] for name, pair in actors.items()} for i in (0, 1))
    left = free
    while True:  # every actor asks in turn until nobody gets anything
        name = min(
            (name for name in wants if wants[name]), key=lambda name: in_flight[name], default=None
        )
        share = (
            0
            if name is None
            else fair_share(name, {k: v for k, v in wants.items() if v}, in_flight, free=left)
        )
        if not share:
            break
        in_flight[name], wants[name], left = (
            in_flight[name] + share,
            wants[name] - share,
            left - share,
        )
    assert left == max(0, free - sum(want for _, want in actors.values()))
    hungry = [in_flight[name] for name in actors if wants[name]]
    served = [in_flight[name] for name in actors if in_flight[name] > actors[name][0]]
    assert not hungry or not served or max(served) <= min(hungry) + 1


@pytest.mark.parametrize("other", ["asking", "silent", "forfeited", "stale"])
async def test_only_actors_that_can_take_slots_reserve_them(other: str) -> None:
    clock = Clock()
    queue = ReplayQueue(queue_settings(rollout_batch_size=4), clock=clock)
    tickets = await take(queue, 9)
    assert len(tickets) == 8
    assert await take(queue, 4, actor="b", version=7 if other == "stale" else 0) == []
    await queue.fail("a", tickets[:4], "timeout")
    clock.now += 60.0 if other == "silent" else 0.1
    if other == "forfeited":
        await queue.forfeit("b")
    mine = await take(queue, 9, holding=ids(tickets[4:]))
    assert ids(mine) == (
        [] if other == "asking" else [(0, 2), (1, 2), (2, 2), (3, 2)]
    )  # b has none in flight, a has four
    if other == "asking":
        assert len(await take(queue, 4, actor="b")) == 4


async def test_a_run_without_signal_ends_with_the_reasons() -> None:
    queue = ReplayQueue(queue_settings(max_num_gen_batches=2, max_staleness=0))
    for values_ in ((0.0, 0.0), (0.0, 0.0), (1.0, 1.0)):
        await queue.put("a", [frame_of(ticket, values=values_) for ticket in await take(queue, 1)])
    assert await queue.get_batch(1) is None
    await queue.put("a", [frame_of(ticket, values=(1.0, 1.0)) for ticket in await take(queue, 1)])
    with pytest.raises(
        NoSignal,
        match=r"4 groups.*2 x all_wrong.*2 x all_right|4 groups.*2 x all_right.*2 x all_wrong",
    ):
        await queue.get_batch(1)
    await queue.put("a", [frame_of(ticket) for ticket in await take(queue, 2)])
    assert (
        await queue.get_batch(1) is not None
    )  # a batch counts more than the limit, and starts the count anew
    await queue.live(1)
    assert await queue.get_batch(2) is None


async def test_a_run_in_which_everything_fails_ends_with_the_reasons() -> None:
    queue = ReplayQueue(queue_settings(max_attempts=1, max_staleness=0))
    for _ in range(MAX_FAILED_GROUPS // 2 + 4):
        assert await queue.get_batch(1) is None
        await queue.fail("a", await take(queue, 2), "verifier timeout")
    with pytest.raises(NoSignal, match=rf"{MAX_FAILED_GROUPS + 8} x verifier timeout"):
        await queue.get_batch(1)


async def test_the_bound_is_asserted_when_a_batch_leaves() -> None:
    queue = ReplayQueue(queue_settings(trained_steps=1, total_steps=9))
    tickets = await take(queue, 2, version=1)
    await queue.put("a", [frame_of(ticket) for ticket in tickets])
    entry = queue._ledger.entries[0]
    for version in (0, -1, 2):
        rows = tuple(replace(row, versions=((version, 1), (1, 1))) for row in entry.meta.rows)
        entry.meta = replace(entry.meta, rows=rows)
        if version == 0:
            continue  # lag 1 is allowed
        with pytest.raises(StalenessError, match="group 0"):
            await queue.get_batch(2)


async def test_close_leaves_nothing_open_and_stops_the_actors() -> None:
    queue = ReplayQueue(queue_settings())
    tickets = await take(queue, 3)
    await queue.put("a", [frame_of(tickets[0])])
    await queue.fail("a", tickets[1:2], "timeout")
    await queue.close()
    await queue.close()
    counts = await queue.counts()
    assert counts["unused"] == 3 and not any(counts[state] for state in OPEN_STATES)
    assert await queue.acquire("a", 0, [], 1) is None
    assert [verdict.status for verdict in await queue.put("a", [frame_of(tickets[2])])] == ["late"]
    assert await queue.get_batch(1) is None


async def test_memory_stays_bounded_over_a_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "RECENT_GROUPS", 50)
    steps = 100
    queue = ReplayQueue(queue_settings(max_staleness=0, total_steps=steps, filter=None))
    for step in range(1, steps + 1):
        tickets = await take(queue, 2, version=step - 1)
        await queue.put("a", [frame_of(ticket) for ticket in tickets])
        assert await queue.get_batch(step) is not None
        await queue.live(step)
    assert (await queue.counts())["trained"] == 2 * steps
    known = await queue.history(range(2 * steps))
    assert list(known) == list(range(2 * steps - 50, 2 * steps))
    assert known[2 * steps - 1] == {"attempt": 1, "state": "trained", "step": steps}
    assert (
        not queue._ledger.entries
        and not queue._ledger.held
        and await queue.acquire("a", steps, [], 2) is None
    )


@pytest.mark.parametrize("learner_step", [0, 1])
async def test_a_snapshot_continues_for_a_learner_before_or_after_the_step_in_training(
    learner_step: int,
) -> None:
    queue = ReplayQueue(queue_settings())
    tickets = await take(queue, 4)
    await queue.put("a", [frame_of(ticket) for ticket in tickets[:3]])
    assert await queue.get_batch(1) is not None
    snapshot = msgpack.unpackb(msgpack.packb(await queue.snapshot()))
    restored = open_queue(queue_settings(trained_steps=learner_step), snapshot=snapshot)
    expected = (
        [(2, 2, 1), (3, 2, 1), (4, 1, 1), (5, 1, 1)]
        if learner_step
        else [(0, 2, 0), (1, 2, 0), (2, 2, 0), (3, 2, 0)]
    )
    assert await take(restored, 9, actor="b", version=learner_step) == [
        GroupTicket(*ticket, run_epoch=1) for ticket in expected
    ]
    assert (await restored.counts())["trained"] == 2 * learner_step
    with pytest.raises(SetupError, match="not from the same checkpoint"):
        open_queue(queue_settings(trained_steps=2), snapshot=snapshot)
    with pytest.raises(SetupError, match="continue the run with the version that wrote it"):
        open_queue(queue_settings(), snapshot=snapshot | {"format": 99})
    smaller = open_queue(queue_settings(max_staleness=0), snapshot=snapshot)
    assert (
        ids(await take(smaller, 9)) == [(0, 2), (1, 2)] and (await smaller.counts())["waiting"] == 2
    )


# ---- order and what happens to old groups ----


async def produce(
    queue: ReplayQueue,
    tickets: list[GroupTicket],
    *,
    actor: str = "a",
    versions: tuple[int, ...] = (),
) -> None:
    verdicts = await queue.put(
        actor, [frame_of(ticket, versions=versions, actor=actor) for ticket in tickets]
    )
    assert {verdict.status for verdict in verdicts} <= {"accepted"}, verdicts


async def batch_ids(queue: ReplayQueue, step: int) -> list[int] | None:
    batch = await queue.get_batch(step)
    return None if batch is None else [group.group_id for group in batch.groups]


async def test_fifo_trains_strictly_by_id() -> None:
    queue = ReplayQueue(queue_settings(order="fifo"))
    tickets = await take(queue, 4)
    await produce(queue, tickets[1:])
    assert await batch_ids(queue, 1) is None  # three are ready, the first one is not
    await queue.fail("a", tickets[:1], "bad luck")
    assert await batch_ids(queue, 1) is None  # it waits for another attempt, and the learner for it
    await produce(queue, await take(queue, 1))
    assert await batch_ids(queue, 1) == [0, 1]
    assert await batch_ids(queue, 2) == [2, 3]


async def test_oldest_goes_by_the_ticket_and_fifo_by_the_id() -> None:
    for order, expected in (("oldest", [1, 3]), ("fifo", [0, 1])):
        queue = ReplayQueue(queue_settings(order=order, max_staleness=2, total_steps=9))
        tickets = await take(queue, 6)
        await produce(
            queue,
            [tickets[1], tickets[2], tickets[4], tickets[3], tickets[5]]
            if order == "fifo"
            else tickets[1:],
        )
        await queue.fail("a", tickets[:1], "bad luck")
        if order == "fifo":
            await produce(queue, await take(queue, 1))
            assert await batch_ids(queue, 1) == expected
            continue
        assert await batch_ids(queue, 1) == [1, 2]
        await queue.live(1)
        (again,) = [ticket for ticket in await take(queue, 1, version=1) if ticket.group_id == 0]
        assert again == GroupTicket(0, 2, 1)
        await produce(queue, [again])
        assert await batch_ids(queue, 2) == [3, 4], "group 0 has a newer ticket now"


async def test_ready_goes_by_completion() -> None:
    clock = Clock()
    queue = ReplayQueue(queue_settings(order="ready", on_stale="mask"), clock=clock)
    tickets = await take(queue, 4)
    for index in (3, 1, 0):
        clock.now += 1.0
        await produce(queue, [tickets[index]])
    assert await batch_ids(queue, 1) == [1, 3]


def test_the_order_of_completion_has_no_bound_to_wait_for() -> None:
    with pytest.raises(ValueError, match="mask"):
        queue_settings(order="ready", on_stale="wait")


@pytest.mark.parametrize("on_stale", ["mask", "expire"])
async def test_the_learner_goes_on_without_a_late_group(on_stale: str) -> None:
    queue = ReplayQueue(
        queue_settings(on_stale=on_stale, total_steps=9, max_attempts=2, rollout_batch_size=1)
    )
    late, *others = await take(queue, 2)
    for step in range(1, 4):
        await produce(queue, others, versions=(step - 1,))
        assert await batch_ids(queue, step) == [others[0].group_id]
        await queue.live(step)
        others = await take(queue, 1, version=step, holding=[(late.group_id, late.attempt)])
    await produce(queue, [late], versions=(0, 2, 3))
    if on_stale == "mask":
        assert await batch_ids(queue, 4) == [0]
        metrics = await queue.metrics()
        # Lag 3, 1 and 0 for two tokens each of two rollouts: the first ones are masked, and no
        # longer count as lag.
        assert (
            metrics["replay/stale_tokens"],
            metrics["replay/staleness_max"],
            metrics["replay/expirations"],
        ) == (4.0, 1.0, 0.0)
        return
    assert await batch_ids(queue, 4) is None
    counts = await queue.counts()
    assert (counts["waiting"], counts["expirations"], counts["expired"]) == (1, 1, 0)
    (again,) = await take(
        queue, 1, version=3, holding=[(ticket.group_id, ticket.attempt) for ticket in others]
    )
    assert again == GroupTicket(0, 2, 3)


async def test_a_group_of_nothing_but_old_tokens_expires_and_in_the_end_for_good() -> None:
    queue = ReplayQueue(
        queue_settings(on_stale="mask", total_steps=20, max_attempts=2, rollout_batch_size=1)
    )
    step, other = 0, (await take(queue, 2))[1]
    late = GroupTicket(0, 1, 0)
    for attempt in (1, 2):
        for _ in range(2):
            step += 1
            await produce(queue, [other], versions=(other.policy_version,))
            assert await batch_ids(queue, step) == [other.group_id]
            await queue.live(step)
            (other,) = await take(queue, 1, version=step, holding=[(0, attempt)])
        assert other.group_id != 0
        await produce(queue, [late])
        assert await batch_ids(queue, step + 1) is None
        counts = await queue.counts()
        assert (counts["expirations"], counts["expired"]) == (attempt, int(attempt == 2))
        if attempt == 1:
            (late,) = await take(queue, 1, version=step, holding=[(other.group_id, 1)])
            assert late == GroupTicket(0, 2, step)
    (replacement,) = await take(queue, 1, version=step, holding=[(other.group_id, 1)])
    assert (replacement.group_id, replacement.attempt) == (other.group_id + 1, 1)


async def test_a_baseline_that_is_too_old_does_not_expire_a_group_that_is_masked() -> None:
    queue = ReplayQueue(queue_settings(on_stale="mask", baseline=True, filter=None))
    (ticket,) = await take(queue, 1)
    meta = decode_meta(frame_of(ticket, versions=(2,), baselines=(1.0,), policy_version=0))
    old = replace(meta, rows=(*meta.rows[:-1], replace(meta.rows[-1], versions=((0, 4),))))
    assert not is_too_old(old, step=3, max_staleness=1, on_stale="mask") and is_too_old(
        old, step=3, max_staleness=1, on_stale="expire"
    )


# ---- deadlines, failures, waits ----


async def test_a_group_lost_inside_a_living_actor_is_issued_again_at_its_deadline() -> None:
    clock = Clock()
    queue = ReplayQueue(
        queue_settings(max_staleness=0, ticket_timeout_s=10.0, max_attempts=3), clock=clock
    )
    tickets = await take(queue, 2)
    await produce(queue, tickets[1:])
    held = [(0, 1)]
    clock.now = 10.0 + TICKET_GRACE_S
    assert await take(queue, 5, holding=held) == [] and await queue.get_batch(1) is None
    clock.now += 0.1
    assert await take(queue, 5, actor="b") == [GroupTicket(0, 2, 0)]
    (verdict,) = await queue.put("a", [frame_of(tickets[0])])
    assert verdict.status == "late"
    clock.now += 10.0 + TICKET_GRACE_S + 0.1
    assert await queue.get_batch(1) is None  # asking for a batch looks at the deadlines too
    counts = await queue.counts()
    assert (counts["waiting"], counts["overdue"], counts["late"], counts["attempts_lost"]) == (
        1,
        2,
        1,
        2,
    )


@pytest.mark.parametrize(
    ("fraction", "groups", "ends_after"),
    [(0.0, 400, 1), (0.01, 400, 5), (0.01, 5000, 11), (1.0, 400, None)],
)
async def test_more_failed_groups_than_tolerated_end_the_run(
    fraction: float, groups: int, ends_after: int | None
) -> None:
    queue = ReplayQueue(
        queue_settings(
            rollout_batch_size=1,
            max_staleness=40,
            total_steps=groups,
            max_attempts=1,
            max_failed_fraction=fraction,
        )
    )
    for failed in range(1, 20):
        (ticket,) = await take(queue, 1)
        await queue.fail("a", [ticket], "too long a prompt")
        if ends_after is not None and failed >= ends_after:
            with pytest.raises(
                NoSignal,
                match=rf"{failed} of {failed} groups failed for good, replay.max_attempts 1 "
                rf"\({failed} x too long a prompt\)",
            ) as caught:
                await queue.get_batch(1)
            assert caught.value.exit_code == 3 and "task.max_bad_fraction" in str(caught.value)
            return
        assert await queue.get_batch(1) is None
    assert ends_after is None


async def test_many_different_reasons_do_not_fill_the_memory() -> None:
    queue = ReplayQueue(
        queue_settings(rollout_batch_size=1, max_staleness=200, total_steps=400, max_attempts=1)
    )
    for index in range(3 * ledger.REASONS):
        (ticket,) = await take(queue, 1)
        await queue.fail("a", [ticket], f"reason {index} {'x' * 10_000}")
    reasons = queue._ledger.failed
    assert len(reasons) == ledger.REASONS + 1 and reasons.total() == 3 * ledger.REASONS
    assert max(map(len, reasons)) <= events.REASON_CHARS


async def test_waits_of_producers_and_learner_are_measured() -> None:
    clock = Clock()
    queue = ReplayQueue(queue_settings(max_staleness=0), clock=clock)
    tickets = await take(queue, 2)
    assert await take(queue, 1, actor="b") == []  # from here on b holds nothing and gets nothing
    assert await queue.get_batch(1) is None
    clock.now = 3.0
    assert await take(queue, 1, actor="b") == []
    metrics = await queue.metrics()
    assert (metrics["replay/blocked_s"], metrics["replay/learner_idle_s"]) == (3.0, 3.0)
    await produce(queue, tickets)
    clock.now = 4.0
    assert await queue.get_batch(1) is not None
    assert (await queue.metrics())["replay/learner_wait_s"] == 4.0
    clock.now = 10.0
    await queue.live(1)
    assert len(await take(queue, 1, actor="b", version=1)) == 1
    clock.now = 20.0
    metrics = await queue.metrics()
    assert (metrics["replay/blocked_s"], metrics["replay/learner_idle_s"]) == (10.0, 4.0)


async def test_the_share_of_slow_groups_among_the_trained_ones() -> None:
    """Order of completion with expiry never trains the slowest answers, the oldest first does."""
    shares = {}
    for order, on_stale in (("oldest", "wait"), ("ready", "expire")):
        rng, clock = random.Random(1), Clock()
        settings = queue_settings(
            order=order,
            on_stale=on_stale,
            rollout_batch_size=8,
            max_staleness=1,
            total_steps=400,
            max_attempts=50,
            filter=None,
        )
        queue, ends, live = ReplayQueue(settings, clock=clock), {}, 0
        while (step := live + 1) <= 120:
            for ticket in await take(queue, 16, version=live, holding=list(ends)):
                ends[ticket.group_id, ticket.attempt] = (
                    clock.now + (20.0 if rng.random() < 0.1 else 1.0 + rng.random()),
                    ticket,
                )
            clock.now = max(clock.now, min(end for end, _ in ends.values())) if ends else clock.now
            for key in [key for key, (end, _) in ends.items() if end <= clock.now]:
                await produce(queue, [ends.pop(key)[1]])
            if await queue.get_batch(step) is not None:
                clock.now += 1.0
                live = step
                await queue.live(live)
        shares[order] = (await queue.metrics())["replay/slowest_tenth"]
    assert shares["oldest"] > 0.07 and shares["ready"] < 0.02, shares


# ---- another start of the run ----


async def started_again(queue: ReplayQueue, **changes: object) -> ReplayQueue:
    return open_queue(
        replace(queue.settings, **changes),
        snapshot=msgpack.unpackb(msgpack.packb(await queue.snapshot())),
    )


async def test_an_actor_of_the_next_start_is_not_the_dead_one_of_the_same_name() -> None:
    queue = ReplayQueue(queue_settings())
    await take(queue, 2, actor="actor-0.0")
    await queue.forfeit("actor-0.0")
    assert await queue.acquire("actor-0.0", 0, [], 2) is None and not await queue.is_over()
    again = await started_again(queue)
    assert len(await take(again, 2, actor="actor-0.0")) == 2


@pytest.mark.parametrize("way", ["rejected", "failed"])
async def test_a_run_that_ended_without_signal_may_be_tried_again(way: str) -> None:
    limits = {"max_num_gen_batches": 2, "max_failed_fraction": 0.0, "max_attempts": 1}
    queue = ReplayQueue(queue_settings(total_steps=40, **limits))
    tickets = await take(queue, 4)
    if way == "failed":
        await queue.fail("a", tickets[:1], "no such file")
    else:
        await queue.put("a", [frame_of(ticket, values=(0.0, 0.0)) for ticket in tickets])
    with pytest.raises(NoSignal):
        await queue.get_batch(1)
    again = await started_again(queue)
    assert await again.get_batch(1) is None
    tickets = await take(again, 4)
    if way == "failed":
        await again.fail("a", tickets[:1], "no such file")
        with pytest.raises(NoSignal, match=r"^1 of "):
            await again.get_batch(1)
    assert (await again.counts())[way] == {"failed": 2, "rejected": 4}[way]


async def test_starts_of_the_run_do_not_count_as_failures_of_a_group() -> None:
    queue = ReplayQueue(queue_settings(max_attempts=2))
    for _ in range(4):
        await take(queue, 1)
        queue = await started_again(queue)
    (ticket,) = await take(queue, 1)
    assert (ticket.group_id, ticket.attempt) == (0, 5)
    await queue.fail("a", [ticket], "bad luck")
    assert (await queue.counts())["waiting"] == 1
    queue = await started_again(queue)
    await queue.fail("a", await take(queue, 1), "bad luck")
    assert (await queue.counts())["failed"] == 1


async def test_rejections_beside_a_slow_group_do_not_end_the_run() -> None:
    queue = ReplayQueue(queue_settings(max_num_gen_batches=2, max_staleness=1, total_steps=9))
    tickets = await take(queue, 4)
    await produce(queue, tickets[1:3])
    await produce(queue, [])
    assert [group.group_id for group in (await queue.get_batch(1)).groups] == [1, 2]
    await queue.live(1)
    queue = ReplayQueue(
        queue_settings(
            max_num_gen_batches=2,
            max_staleness=0,
            total_steps=9,
            rollout_batch_size=2,
            order="fifo",
        )
    )
    slow, *_ = await take(queue, 2)
    for _ in range(6):
        (ticket,) = [
            ticket
            for ticket in await take(queue, 2, holding=[(slow.group_id, 1)])
            if ticket != slow
        ]
        await queue.put("a", [frame_of(ticket, values=(0.0, 0.0))])
    with pytest.raises(NoSignal):  # fewer than a batch is ready: waiting is for more groups
        await queue.get_batch(1)
    queue = ReplayQueue(queue_settings(max_num_gen_batches=2, total_steps=9, order="fifo"))
    slow, *others = await take(queue, 4)
    await produce(queue, others[:2])
    holding = [(slow.group_id, 1), (others[2].group_id, 1)]
    for _ in range(6):
        await queue.put("a", [frame_of(GroupTicket(*holding[1], 0), values=(0.0, 0.0))])
        holding[1:] = ids(await take(queue, 2, holding=holding[:1]))
    assert (
        await queue.get_batch(1) is None
    )  # a batch is ready, and the learner waits for the slow group alone


@pytest.mark.parametrize(
    ("versions", "refused"),
    [
        ((0, 3), {"wait", "expire"}),  # the newest tokens are trained, the oldest masked
        ((0, 1), {"wait", "mask", "expire"}),  # every token is too old
        ((2, 3), set()),
        ((2, 4), {"wait", "mask", "expire"}),  # from the future
    ],
)
def test_a_group_outside_the_bound_is_a_bug_unless_some_token_of_it_is_trained(
    versions: tuple[int, int], refused: set[str]
) -> None:
    meta = decode_meta(frame_of(GroupTicket(0, 1, 0), versions=versions))
    for on_stale in ("wait", "mask", "expire"):
        with pytest.raises(StalenessError) if on_stale in refused else nullcontext():
            check_bound(meta, step=4, max_staleness=1, on_stale=on_stale)


def test_a_lag_above_the_bound_would_show() -> None:
    meta = decode_meta(frame_of(GroupTicket(0, 1, 0), versions=(0, 3)))
    entries = [ledger.GroupEntry(0, 1, 0, ledger.State.READY, meta=meta)]
    seen = {
        on_stale: batch_metrics(entries, queue_settings(on_stale=on_stale), step=4, now=0.0)
        for on_stale in ("wait", "mask", "expire")
    }
    assert [seen[name]["replay/staleness_max"] for name in seen] == [3, 0, 3] and [
        seen[name]["replay/stale_tokens"] for name in seen
    ] == [0, 4, 0]


# ---- baselines and retired problems ----


@pytest.mark.parametrize(
    ("wanted", "given_", "status"),
    [
        (True, (0.0,), "accepted"),
        (True, (), "invalid"),
        (True, (0.0, 1.0), "invalid"),
        (False, (), "accepted"),
        (False, (0.0,), "invalid"),
    ],
)
async def test_a_group_carries_exactly_the_baselines_that_the_run_needs(
    wanted: bool, given_: tuple[float, ...], status: str
) -> None:
    queue = ReplayQueue(queue_settings(baseline=wanted))
    (ticket,) = await take(queue, 1)
    (verdict,) = await queue.put("a", [frame_of(ticket, baselines=given_)])
    assert verdict.status == status
    assert (
        status == "accepted"
        or f"{len(given_)} baseline rollouts instead of {int(wanted)}" in verdict.reason
    )


async def test_a_group_has_one_demonstration_at_most_which_counts_nowhere() -> None:
    queue = ReplayQueue(queue_settings(retire_at=0.6, problem=lambda _: 0, problems=9))
    for count, ticket in enumerate(await take(queue, 3)):
        group = make_group(ticket)
        counts = token_counts(decode_meta(encode_group(group)))
        group.rows += [demonstration([1], limit=9, version=ticket.policy_version, ends=[])] * count
        meta = decode_meta(encode_group(group))
        assert (
            token_counts(meta) == counts and len(meta.episodes_to_train) == len(group.rows) - count
        )
        (verdict,) = await queue.put("a", [encode_group(group)])
        assert verdict.status == ("invalid" if count > 1 else "accepted")
        assert verdict.reason == ("2 demonstrations instead of one" if count > 1 else "")


async def test_a_baseline_counts_for_the_bound_and_not_for_filter_and_retirement() -> None:
    queue = ReplayQueue(
        queue_settings(
            baseline=True,
            retire_at=0.6,
            problem=lambda group_id: group_id % 9,
            problems=9,
            trained_steps=1,
        )
    )
    tickets = await take(queue, 3, version=1)
    late = make_group(tickets[0], baselines=(1.0,))
    late.rows[-1].versions = [VersionSpan(0, 0, 2)]
    frames = [
        encode_group(late),
        frame_of(tickets[1], values=(0.0, 0.0), baselines=(1.0,)),
        frame_of(tickets[2], baselines=(1.0,)),
    ]
    verdicts = await queue.put("a", frames)
    assert [verdict.status for verdict in verdicts] == ["invalid", "rejected", "accepted"]
    assert (
        "version 0 under a ticket of version 1" in verdicts[0].reason
        and verdicts[1].reason == "all_wrong"
    )
    assert (await queue.snapshot())["ledger"][
        "retired"
    ] == []  # 2 of 3 right with the baseline, 1 of 2 without


async def test_problems_are_posed_by_the_pass_rates_of_trained_and_rejected_groups() -> None:
    rule = DifficultyRule("window", target=0.5, width=0.4, explore=1e-9, seed=3)
    queue = ReplayQueue(
        queue_settings(
            rollout_batch_size=2,
            max_staleness=3,
            total_steps=50,
            filter=FilterRule(),
            difficulty=rule,
            problem=lambda group_id: group_id % 4,
            problems=4,
        )
    )
    tickets = await take(queue, 4)
    await queue.put("a", [frame_of(tickets[0], values=(1.0, 1.0))])  # rejected at once
    await queue.put("a", [frame_of(ticket) for ticket in tickets[1:3]])
    assert queue.ledger.rates == {0: 1.0}, "those that are only completed say nothing yet"
    assert await queue.get_batch(1) is not None and queue.ledger.rates == {0: 1.0}
    assert await queue.get_batch(2) is None  # step 1 is done
    assert queue.ledger.rates == {0: 1.0, 1: 0.5, 2: 0.5}
    await queue.fail("a", [tickets[3]], "lost")
    again, *new = await take(queue, 4)
    assert (again.group_id, [ticket.group_id for ticket in new]) == (3, [5, 6, 7])
    metrics = await queue.metrics()
    assert metrics["replay/pass_rate/4"] == 1 and metrics["replay/pass_rate/2"] == 2
    await queue.put("a", [frame_of(new[0], values=(1.0, 1.0))])
    assert queue.ledger.rates[1] == 0.75, "the last group counts half"
    assert (await queue.counts())["skipped"] == 1


async def test_a_bandit_poses_problems_as_often_as_those_like_them_gave_mixed_groups() -> None:
    rule = DifficultyRule("bandit", target=0.0, width=0.1, explore=1e-9, seed=3)
    queue = ReplayQueue(queue_settings(total_steps=50, difficulty=rule, problem=lambda _: 0))
    ledger = queue.ledger
    for rate in (0.9, 0.95, 0.975, 0.9875):  # groups: 0.9 at first, then all right
        queue.record(Rate(0, rate))
    assert ledger.mixed == {4: pytest.approx(0.95**3)}
    queue.record(Rate(0, (0.9875 + 0.5) / 2))  # half right
    assert ledger.mixed[4] == pytest.approx(0.95**4 + 0.05)
    queue.record(Rate(0, 0.7437 / 2))  # all wrong, from the fourth fifth
    assert ledger.mixed[3] == pytest.approx(0.95)
    again = Ledger.from_snapshot(json.loads(json.dumps(ledger.snapshot())))
    assert again.mixed == ledger.mixed
    for mixed, chance in ((1.0, 1.0), (0.3, 0.3), (0.0, 0.0)):
        assert sum(rule.poses(n, 0.9, mixed) for n in range(4000)) / 4000 == pytest.approx(
            chance, abs=0.03
        )
    ledger.mixed[1] = 0.0
    assert queue._pass_rates.skips(7), "its rate is in the second fifth"


async def test_a_run_may_begin_with_the_pass_rates_of_another() -> None:
    settings_ = queue_settings(
        rollout_batch_size=2,
        max_staleness=3,
        difficulty=DifficultyRule("window", target=0.5, width=0.4, explore=1e-9, seed=3),
        pass_rates={0: 1.0, 2: 0.0, 3: 0.4},
        problem=lambda group_id: group_id % 4,
        problems=4,
    )
    queue = ReplayQueue(settings_)
    assert [one.group_id for one in await take(queue, 4)] == [1, 3, 5, 7]
    queue.ledger.rates.clear()
    later = ReplayQueue(settings_, ledger=queue.ledger)
    assert not later.ledger.rates, "only of a run that is new"


def test_the_chance_of_a_problem_is_that_of_its_rate_and_always_the_same() -> None:
    gaussian = DifficultyRule("gaussian", target=0.5, width=0.25, explore=0.1, seed=0)
    window = DifficultyRule("window", target=0.5, width=0.25, explore=0.1, seed=0)
    for rule, rate, chance in (
        (gaussian, 0.5, 1.0),
        (gaussian, 0.75, math.exp(-0.5)),
        (gaussian, 1.0, math.exp(-2.0)),
        (window, 0.75, 1.0),
        (window, 0.8, 0.1),
    ):
        posed = [rule.poses(group_id, rate, 0.0) for group_id in range(4000)]
        assert sum(posed) / 4000 == pytest.approx(chance, abs=0.03)
        assert posed == [rule.poses(group_id, rate, 1.0) for group_id in range(4000)]


def retiring(*, problems: int = 5, **changes: object) -> QueueSettings:
    """A run without filter that retires problems at a pass rate of one half."""
    problem = partial(problem_index, 7, "data", n=problems)
    retires = {"retire_at": 0.5, "problem": problem, "problems": problems}
    return queue_settings(**{"filter": None, "total_steps": 50} | retires | changes)


async def test_a_retired_problem_is_not_posed_again() -> None:
    settings_ = pickle.loads(pickle.dumps(retiring()))
    queue, problem = ReplayQueue(settings_), settings_.problem
    tickets = await take(queue, 4)
    values_ = [
        (1.0, 1.0),
        (0.0, 0.0),
        (0.0, 1.0),
        (None, 1.0),
    ]  # right at a rate of 1, 0, 1/2, and unknown
    verdicts = await queue.put(
        "a",
        [frame_of(ticket, values=value) for ticket, value in zip(tickets, values_, strict=True)],
    )
    assert {verdict.status for verdict in verdicts} == {"accepted"}
    retired = {problem(0), problem(2)}
    assert (await queue.metrics())["replay/retired"] == 2.0
    issued, skipped, step = [], 0, 0
    for step in range(1, 6):
        assert await queue.get_batch(step) is not None
        await queue.live(step)
        new = await take(queue, 9, version=step)
        issued += [ticket.group_id for ticket in new]
        await queue.put("a", [frame_of(ticket, values=(0.0, 0.0)) for ticket in new])
        skipped = (await queue.counts())["skipped"]
    assert {problem(group_id) for group_id in issued} == set(range(5)) - retired
    expected = [
        group_id for group_id in range(4, max(issued) + 1) if problem(group_id) not in retired
    ]
    assert issued == expected and skipped == max(issued) + 1 - 4 - len(issued) > 0


async def test_retirement_does_not_touch_ids_that_are_issued() -> None:
    settings_ = retiring(problems=2, max_staleness=3)  # ids 0 to 7 pose both problems four times
    queue = ReplayQueue(settings_)
    tickets = await take(queue, 8)
    await queue.put("a", [frame_of(tickets[0])])
    await queue.fail("a", tickets[2:4], "timeout")
    assert ids(await take(queue, 9, holding=ids(tickets[1:2] + tickets[4:]))) == [(2, 2), (3, 2)]
    verdicts = await queue.put("a", [frame_of(ticket) for ticket in tickets[4:]])
    assert {verdict.status for verdict in verdicts} == {"accepted"}
    assert (await queue.counts())["skipped"] == 0


@pytest.mark.parametrize("values_", [(1.0, 1.0), (0.0, 1.0)])  # rejected by the filter, and trained
async def test_a_run_whose_problems_are_all_retired_ends_with_the_reason(
    values_: tuple[float, ...],
) -> None:
    queue = ReplayQueue(
        retiring(problems=3, rollout_batch_size=4, max_staleness=0, filter=FilterRule())
    )
    tickets = await take(queue, 9)
    await queue.put("a", [frame_of(ticket, values=values_) for ticket in tickets[:3]])
    if values_ == (0.0, 1.0):
        assert await queue.get_batch(1) is None  # the fourth is still to come
        await queue.put("a", [frame_of(tickets[3])])
        assert await queue.get_batch(1) is not None
        await queue.live(1)
    step = (await queue.snapshot())["ledger"]["steps"] + 1
    assert await take(queue, 9, version=step - 1, holding=ids(tickets[3:])) == []
    with pytest.raises(
        NoSignal,
        match=rf"all 3 problems are retired.*0.5 or better.*after {step - 1} of 50 "
        r"steps.*retire_at",
    ):
        await queue.get_batch(step)
    assert (await queue.counts())["skipped"] == 0


async def test_a_call_passes_over_a_limited_number_of_retired_problems(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue_module, "MAX_SKIPS", 6)
    settings_ = retiring(problems=20, max_staleness=9, rollout_batch_size=4)
    queue, problem = ReplayQueue(settings_), settings_.problem
    tickets = await take(queue, 20)  # the first epoch: every problem once
    kept = problem(37)
    values_ = {True: (0.0, 0.0), False: (1.0, 1.0)}
    await queue.put(
        "a",
        [frame_of(ticket, values=values_[problem(ticket.group_id) == kept]) for ticket in tickets],
    )
    assert [ids(await take(queue, 1)) for _ in range(3)] == [
        [],
        [],
        [(37, 1)],
    ]  # 20 to 26, 27 to 33, 34 to 37
    assert (await queue.counts())["skipped"] == 17


async def test_a_snapshot_keeps_the_retired_problems() -> None:
    settings_ = retiring()
    queue, problem = ReplayQueue(settings_), settings_.problem
    tickets = await take(queue, 4)
    await queue.put(
        "a",
        [
            frame_of(ticket, values=(1.0, 1.0) if ticket.group_id in (1, 3) else (0.0, 0.0))
            for ticket in tickets
        ],
    )
    assert await queue.get_batch(1) is not None
    snapshot = json.loads(json.dumps(msgpack.unpackb(msgpack.packb(await queue.snapshot()))))
    assert snapshot["ledger"]["retired"] == sorted({problem(1), problem(3)})
    restored = open_queue(replace(settings_, trained_steps=1), snapshot=snapshot)
    tickets = await take(restored, 9, actor="b", version=1)
    assert ids(tickets)[:2] == [(2, 2), (3, 2)]  # issued before: unaffected
    assert not {problem(ticket.group_id) for ticket in tickets[2:]} & {problem(1), problem(3)}
    assert (await restored.metrics())["replay/retired"] == 2.0
    with pytest.raises(SetupError, match="not the same data"):
        open_queue(
            replace(retiring(problems=1), trained_steps=1),
            snapshot={**snapshot, "ledger": snapshot["ledger"] | {"retired": [3]}},
        )
    off = open_queue(replace(settings_, trained_steps=1, retire_at=None), snapshot=snapshot)
    assert [ticket.group_id for ticket in await take(off, 9, version=1)] == [2, 3, 4, 5]


@pytest.mark.parametrize(
    "changes", [{"retire_at": 0.0}, {"retire_at": 1.1}, {"problem": None}, {"problems": 0}]
)
def test_settings_that_cannot_retire_are_refused(changes: dict) -> None:
    with pytest.raises(ValueError, match="retire_at"):
        replace(retiring(), **changes)


def test_the_process_of_the_queue_imports_nothing_large() -> None:
    """A queue that died is back before anything large would have been imported."""
    code = (
        "import sys, async_grpo.cluster.queue, async_grpo.replay.resume\n"
        "large = ('torch', 'vllm', 'transformers', 'deepspeed', 'async_grpo.rollout')\n"
        "print(*[name for name in sys.modules if name.startswith(large)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
