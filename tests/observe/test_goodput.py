"""What became of every token, one rule at a time, and the clock of causes. Random schedules:
`test_schedules` compares every one with its own count.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.cluster.queue import DriverQueue
from async_grpo.replay.actor_reports import (
    ActorReport,
    ActorReports,
    QueueMetrics,
    TokenTotals,
    engine_times,
)
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.resume import JournalSettings, open_queue
from async_grpo.replay.token_ledger import PLACES, masked_tokens
from async_grpo.rollout.time_accounting import EngineTime
from async_grpo.runtime.time_ledger import ENGINE_CAUSES, TimeByCause
from async_grpo.wire.codec import decode_meta
from async_grpo.wire.groups import GroupMeta, RowMeta
from tests.support.frames import frame_of
from tests.support.queues import Clock, queue_settings, take


def size(frame: bytes) -> int:
    return sum(row.length for row in decode_meta(frame).rows)


async def places(queue: ReplayQueue) -> dict[str, int]:
    metrics = await queue.metrics()
    found = {place: int(metrics[f"goodput/{place}"]) for place in PLACES}
    assert sum(found.values()) == metrics["goodput/generated"]
    return {place: tokens for place, tokens in found.items() if tokens}


def told(sampled: int, **others: int) -> ActorReport:
    return ActorReport(TokenTotals(sampled, **others))


def opened(
    folder: Path, start: str, steps: int = 0, snapshot: dict | None = None, **journal: Any
) -> ReplayQueue:
    settings = JournalSettings(str(folder), start=start, fsync="never", **journal)
    return open_queue(queue_settings(trained_steps=steps), settings, snapshot=snapshot)


async def test_a_token_moves_from_place_to_place() -> None:
    queue = ReplayQueue(queue_settings())
    tickets = await queue.acquire("a", 0, [], 4, told(1000, probes=7, evaluated=13))
    assert await places(queue) == {"held": 980, "probes": 7, "evaluated": 13}, (
        "980 are under way at the engine"
    )
    frames = [frame_of(tickets[0]), frame_of(tickets[1]), frame_of(tickets[2], values=(1.0, 1.0))]
    sizes = [size(frame) for frame in frames]
    for _ in range(2):  # the answer was lost
        await queue.put("a", frames)
    assert await places(queue) == {
        "held": 980 - sizes[2],
        "rejected": sizes[2],
        "probes": 7,
        "evaluated": 13,
    }
    await queue.get_batch(1)
    await queue.get_batch(2)
    assert (await places(queue))["trained"] == sizes[0] + sizes[1]
    await queue.fail("a", [tickets[3]], "timeout", [30])
    await queue.fail("a", [tickets[3]], "timeout", [30])
    assert (await places(queue))["regenerated"] == 30
    await queue.put("a", [frame_of(tickets[3])])
    assert "refused" not in await places(queue), "it told of these tokens when it gave up"
    (again,) = await take(queue, 1, holding=())
    await queue.fail("a", [again], "timeout", [40])
    assert (await places(queue))["failed"] == 40, "that was the last attempt"
    left = 1000 - 7 - 13 - sum(sizes) - 30 - 40
    assert (await places(queue))["held"] == left
    await queue.close()
    assert (await places(queue))["unused"] == left


async def test_what_was_under_way_at_a_dead_actor_is_lost_until_it_arrives_after_all() -> None:
    queue = ReplayQueue(queue_settings())
    (ticket,) = await queue.acquire("a", 0, [], 1, told(500))
    await queue.forfeit("a")
    assert await places(queue) == {"lost": 500}
    frame = frame_of(ticket)
    await queue.put("a", [frame])
    assert await places(queue) == {"lost": 500 - size(frame), "refused": size(frame)}
    await queue.tell("a", told(400))
    assert sum((await places(queue)).values()) == 500, "a report that comes late is left aside"


@pytest.mark.parametrize("orderly", [True, False])
async def test_the_account_goes_on_when_the_run_starts_again(tmp_path: Path, orderly: bool) -> None:
    queue = opened(tmp_path, "first")
    tickets = await queue.acquire("a", 0, [], 4, told(300, probes=5))
    frames = [frame_of(ticket) for ticket in tickets[:3]]
    await queue.put("a", frames)
    await queue.get_batch(1)
    await queue.live(1)
    snapshot = json.loads(json.dumps(await queue.snapshot()))
    sizes = [size(frame) for frame in frames]
    under_way = 300 - 5 - sum(sizes)
    before = {"trained": sizes[0] + sizes[1], "held": sizes[2] + under_way, "probes": 5}
    assert await places(queue) == before
    died = opened(tmp_path, "first")
    assert await places(died) == before, "a queue whose process died"
    if orderly:
        await died.close()
    del before["held"]
    again = opened(tmp_path, "second", 1, snapshot)
    gone = {"unused" if orderly else "lost": under_way}
    assert await places(again) == before | gone | {"held": sizes[2]}
    await again.acquire("a", 1, [], 1, told(20, continued=under_way))
    assert await places(again) == before | {"held": sizes[2] + under_way + 20}, (
        "what is continued counts once"
    )


async def test_what_a_dead_actor_lost_stays_lost_when_steps_are_discarded(tmp_path: Path) -> None:
    queue = opened(tmp_path, "first", lost_steps="discard")
    tickets = await queue.acquire("a", 0, [], 4, told(300))
    frames = [frame_of(ticket) for ticket in tickets[:2]]
    await queue.put("a", frames)
    await queue.forfeit("a")
    lost = 300 - sum(map(size, frames))
    assert (await places(queue))["lost"] == lost
    await queue.get_batch(1)
    await queue.live(1)
    again = opened(tmp_path, "first.2", lost_steps="discard")  # the actors did not go back
    assert await places(again) == {"lost": lost, "held": sum(map(size, frames))}


async def test_batches_that_are_taken_back_are_generated_again(tmp_path: Path) -> None:
    queue = opened(tmp_path, "first", lost_steps="discard")
    sizes = []
    for step in (1, 2):
        frames = [frame_of(ticket) for ticket in await take(queue, 2, version=step - 1)]
        await queue.put("a", frames)
        sizes.append(sum(map(size, frames)))
        await queue.get_batch(step)
        await queue.live(step)
    assert await places(queue) == {"trained": sum(sizes)}
    again = opened(tmp_path, "second", lost_steps="discard")
    assert await places(again) == {"held": sizes[0], "regenerated": sizes[1]}, (
        "the first batch can be trained as it is, the second has newer tokens"
    )


@pytest.mark.parametrize(
    ("mask_truncated", "stale_before", "masked"),
    [(False, None, 0), (True, None, 8), (False, 3, 4), (True, 3, 11)],
)
def test_masked_tokens(mask_truncated: bool, stale_before: int | None, masked: int) -> None:
    rows = (
        RowMeta("train", 8, {"r": 1.0}, None, "length", ((2, 1), (3, 7))),
        RowMeta("train", 4, {"r": 1.0}, None, "stop", ((2, 3), (4, 1)), context=1),
        RowMeta("baseline", 6, {"r": 1.0}, None, "length", ((2, 6),)),
    )
    meta = GroupMeta(0, 1, 2, "a", (3,), rows, {}, 0)
    assert masked_tokens([meta], mask_truncated=mask_truncated, stale_before=stale_before) == masked


@given(st.lists(st.tuples(st.sampled_from(ENGINE_CAUSES), st.floats(0.0, 1e3)), min_size=1))
def test_the_causes_add_up_to_the_time_that_passed(switches: list[tuple[str, float]]) -> None:
    clock, expected = Clock(), dict.fromkeys(ENGINE_CAUSES, 0.0)
    time = TimeByCause(ENGINE_CAUSES, clock=clock)
    for cause, seconds in switches:
        time.switch(cause)
        clock.now += seconds
        expected[cause] += seconds
    assert time.seconds() == pytest.approx(expected) and sum(
        time.seconds().values()
    ) == pytest.approx(clock.now)


def test_a_block_gives_the_time_back_to_the_cause_before_it() -> None:
    clock = Clock()
    time = TimeByCause(("a", "b", "other"), clock=clock)
    with pytest.raises(KeyError), time.during("a"):
        clock.now = 1.0
        with time.during("b"):
            clock.now = 3.0
        clock.now = 7.0
        time.switch("c")
    clock.now = 15.0
    assert time.seconds() == {"a": 5.0, "b": 2.0, "other": 8.0}


def test_the_time_of_an_engine_follows_its_groups() -> None:
    clock, key, other = Clock(), (0, 1), (1, 1)
    engine = EngineTime(clock=clock, wall=lambda: 100.0)

    def passes(seconds: float) -> None:
        clock.now += seconds

    passes(50.0)  # it has not begun
    engine.producing(True)
    passes(1.0)
    engine.stage(key, "generating")
    passes(2.0)
    engine.stage(other, "generating")
    engine.stage(key, "verifying")
    with engine.during("paused"):
        passes(4.0)
    engine.stage(other, "verifying")
    passes(8.0)
    engine.stage(key, "environment")
    passes(0.5)
    engine.stage(key, None)
    engine.stage(other, None)
    with engine.during("evaluating"):
        passes(16.0)
    engine.producing(False)
    passes(32.0)
    report = engine.report(
        {"total": 9, "probes": 2, "evaluated": 3},
        {"continued_tokens": 4, "reprefilled": 5},
        errors={"crash": "killed"},
    )
    assert report.errors == (("crash", "killed"),)
    assert dict(report.seconds) == {
        "working": 2.0,
        "blocked": 1.0,
        "verifying": 8.0,
        "environment": 0.5,
        "paused": 4.0,
        "evaluating": 16.0,
        "restarting": 0.0,
        "other": 32.0,
    }
    assert (report.began, report.tokens) == (100.0, TokenTotals(9, 2, 3, 4, 5))
    assert not engine.is_due(0.5)
    passes(0.5)
    assert engine.is_due(0.5)


def test_a_place_whose_process_was_replaced() -> None:
    means, places = engine_times(
        {
            "actor-0.0": (10.0, {"working": 5.0, "other": 1.0}),
            "actor-0.1": (20.0, {"working": 2.0}),
            "actor-1.0": (10.0, {"working": 12.0}),
        }
    )
    assert places["actor-0"]["restarting"] == 4.0 and sum(places["actor-0"].values()) == 12.0
    assert means["time/engine/working"] == 9.5 and sum(means.values()) == 12.0
    assert engine_times({}) == ({}, {})


def test_counters_are_summed_over_all_actors_and_an_older_report_is_left_aside() -> None:
    reports = ActorReports()
    assert reports.metrics() == {
        "rollout/attempts_failed": 0.0,
        "rollout/continued_tokens": 0.0,
        "rollout/verifier_errors": 0.0,
    }
    reports.tell("c", ActorReport(TokenTotals(), errors=(("crash", "first"), ("timeout", "late"))))
    assert reports.verifier_errors() == {"crash": "first", "timeout": "late"}
    errors = (("failed", 2.0), ("verifier_errors", 1.0), ("verifier_errors_crash", 1.0))
    reports.tell("a", ActorReport(TokenTotals(9), 100.0, (("working", 3.0),), errors))
    reports.tell("a", ActorReport(TokenTotals(8), 100.0, (("working", 1.0),), ()))
    reports.tell("b", ActorReport(TokenTotals(5), counters=(("failed", 1.0), ("groups", 7.0))))
    metrics = reports.metrics()
    assert metrics["time/engine/working"] == 3.0, "actor b has not begun to count its time"
    assert {name: metrics[name] for name in metrics if name.startswith("rollout/")} == {
        "rollout/attempts_failed": 3.0,
        "rollout/continued_tokens": 0.0,
        "rollout/verifier_errors": 1.0,
        "rollout/verifier_errors_crash": 1.0,
    }


async def test_the_driver_still_counts_a_dead_actor_when_the_queue_was_started_again() -> None:
    failed = {
        name: ActorReport(TokenTotals(1), counters=(("failed", count),))
        for name, count in (("dead", 2.0), ("alive", 1.0))
    }
    answers = [
        QueueMetrics({"replay/restarts": 0.0}, failed),
        QueueMetrics({"replay/restarts": 1.0}, {"alive": failed["alive"]}),
    ]

    class Handle:
        class full_metrics:
            @staticmethod
            async def remote() -> QueueMetrics:
                return answers.pop(0)

    queue = DriverQueue(Handle())
    assert (await queue.metrics())["rollout/attempts_failed"] == 3.0
    again = await queue.metrics()
    assert (again["replay/restarts"], again["rollout/attempts_failed"]) == (1.0, 3.0)


def test_what_episodes_count_is_told_where_there_are_any() -> None:
    reports = ActorReports()
    counters = (
        *(("turns", 9.0), ("forks", 2.0), ("environment_crash", 1.0)),
        *(("episodes_env_done", 3.0), ("episodes_length", 1.0), ("waited_ms", 6000.0)),
        *(("prefilled_weights", 70.0), ("prefilled_cache", 5.0), ("seen_tool_calls", 8.0)),
    )
    reports.tell("a", ActorReport(TokenTotals(), counters=counters))
    reports.tell("b", ActorReport(TokenTotals(), counters=(("environment_crash", 2.0),)))
    told = reports.metrics()
    assert told["rollout/forks"] == 2.0 and told["rollout/environment_failures/crash"] == 3.0
    assert told["rollout/environment_s"] == 1.5 and told["rollout/environment/tool_calls"] == 2.0
    assert told["rollout/context_prefilled/weights"] == 70.0
    assert told["rollout/context_prefilled/cache"] == 5.0
    plain = ActorReports()
    plain.tell("a", ActorReport(TokenTotals(), counters=(("groups", 7.0),)))
    assert not [name for name in plain.metrics() if "environment_f" in name or "forks" in name]
