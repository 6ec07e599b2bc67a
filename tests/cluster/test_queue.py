"""The queue as a Ray actor: the driver never maps a token array, and a crowd of calls does not lock
out `put`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import pytest

from async_grpo.cluster import queue as queue_module
from async_grpo.cluster.queue import QueueProcess
from async_grpo.errors import JournalError, SetupError, Stalled
from async_grpo.replay.history import RecordedQueue
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.resume import JournalSettings, open_queue
from async_grpo.run import rerun as learner_replay
from async_grpo.wire.codec import unpack_frames
from tests.support.frames import frame_of
from tests.support.queues import ids, queue_settings


@pytest.fixture(scope="module")
def measured() -> dict:
    """Measured by a driver process of its own, whose peak memory is not that of the test
    process.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.queue_driver"],
        check=False,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_the_drivers_peak_memory_is_flat_in_the_size_of_groups(measured):
    small, large = measured["small"], measured["large"]
    assert small["passed_mb"] < 0.3 and large["passed_mb"] > 90, (
        "groups of about 1 KB, then of about 1 MB"
    )
    assert large["fetched_mb"] > 90
    assert large["peak_mb"] - small["peak_mb"] < 10, measured


def test_more_than_a_thousand_waiting_calls_do_not_lock_out_put(measured):
    assert measured["crowd"]["answered"] == 1_200 and measured["crowd"]["put_bytes"] > 0


@pytest.fixture
def queue(monkeypatch) -> QueueProcess:
    """The class of the process, here, with a patience that no test waits out."""
    monkeypatch.setattr(queue_module, "TICKET_PATIENCE_S", 60.0)
    monkeypatch.setattr(queue_module, "die_with_parent", lambda: None)
    return QueueProcess(queue_settings(max_staleness=0))


async def test_an_actor_without_a_ticket_waits_at_the_queue_until_there_is_one(queue):
    tickets = await queue.acquire("a", 0, [], 2)
    waiting = asyncio.create_task(queue.acquire("a", 0, ids(tickets), 1))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await queue.call("fail", "a", tickets[:1], "gone")
    [again] = await asyncio.wait_for(waiting, 10)
    assert (again.group_id, again.attempt) == (tickets[0].group_id, tickets[0].attempt + 1)


async def test_nobody_waits_who_missed_a_publication_or_wants_nothing_or_when_the_run_is_over(
    queue,
):
    tickets = await queue.acquire("a", 0, [], 2)
    assert await asyncio.wait_for(queue.acquire("a", -1, ids(tickets), 1), 10) == []
    assert await asyncio.wait_for(queue.acquire("a", 0, ids(tickets), 0), 10) == []
    waiting = asyncio.create_task(queue.acquire("a", 0, ids(tickets), 1))
    await asyncio.sleep(0.05)
    await queue.call("close")
    assert await asyncio.wait_for(waiting, 10) is None


async def test_who_waits_for_a_ticket_asks_again_as_soon_as_another_version_is_live(
    queue, monkeypatch
):
    """However rarely it looks for tickets: it gets none before it serves that version."""
    monkeypatch.setattr(queue_module, "TICKET_POLL_S", 60.0)
    tickets = await queue.acquire("a", 0, [], 2)
    waiting = [asyncio.create_task(queue.acquire(name, 0, [], 1)) for name in "bcd"]
    await asyncio.sleep(0.05)
    assert not any(call.done() for call in waiting)
    await queue.call("put", "a", [frame_of(ticket) for ticket in tickets])
    assert await queue.next_batch(1) is not None
    await queue.call("live", 1)
    assert await asyncio.wait_for(asyncio.gather(*waiting), 10) == [[], [], []]


async def test_the_more_actors_wait_the_longer_each_does(queue, monkeypatch):
    monkeypatch.setattr(queue_module, "TICKET_PATIENCE_S", 0.01)
    monkeypatch.setattr(queue_module, "TICKET_CALLS_PER_S", 10.0)
    await queue.acquire("a", 0, [], 2)
    took = []

    async def wait(name: str) -> None:
        began = time.monotonic()
        assert await queue.acquire(name, 0, [], 1) == []
        took.append(time.monotonic() - began)

    await asyncio.gather(*map(wait, "bcdef"))
    assert [round(10 * seconds) >= place for place, seconds in enumerate(sorted(took), 1)] == [
        True
    ] * 5


async def test_an_error_of_opening_is_raised_by_every_call(monkeypatch, tmp_path):
    """The process stays: from its constructor Ray would wrap the error into a story of its own."""
    monkeypatch.setattr(queue_module, "die_with_parent", lambda: None)
    (tmp_path / "file").write_text("no folder")
    queue = QueueProcess(queue_settings(), JournalSettings(str(tmp_path / "file"), "start"))
    for call in (
        queue.opened(),
        queue.call("counts"),
        queue.acquire("a", 0, [], 1),
        queue.call("snapshot"),
    ):
        with pytest.raises(JournalError, match="cannot be made"):
            await call


async def test_the_recorded_batches_are_served_by_their_process(tmp_path):
    queue = open_queue(queue_settings(filter=None), JournalSettings(str(tmp_path), "start"))
    tickets = await queue.acquire("a", 0, [], 2)
    frames = [frame_of(ticket) for ticket in tickets]
    await queue.put("a", frames)
    batch = await queue.get_batch(1)
    recorded = RecordedQueue(str(tmp_path))
    assert await recorded.get_batch(1) == batch
    payload = await recorded.payload(1, [meta.group_id for meta in batch.groups])
    assert [bytes(frame) for frame in unpack_frames(payload)] == frames
    assert await recorded.digests() == {}
    with pytest.raises(SetupError, match="no learner step 2"):
        await recorded.get_batch(2)


class SlowQueue:
    """A handle whose queue reads its journal until `read` is set, and answers nobody meanwhile."""

    def __init__(self) -> None:
        self.read = asyncio.Event()
        self.call = self.payload = self
        self.deaf = False

    async def remote(self, *_: object) -> dict[str, Any]:
        await self.read.wait()
        if self.deaf:
            await asyncio.Event().wait()
        return {}


async def test_who_waits_while_the_queue_reads_its_journal_has_as_long(monkeypatch):
    monkeypatch.setattr(queue_module, "CALL_TIMEOUT_S", 0.1)
    handle = SlowQueue()
    queue = queue_module.DriverQueue(handle)
    counts, forfeit = ReplayQueue.counts, ReplayQueue.forfeit
    calls = [queue.call(counts), queue.digests(), queue.payload(1, []), queue.call(forfeit, "a")]
    waiting = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0.5)
    assert not any(call.done() for call in waiting)
    handle.read.set()
    assert await asyncio.gather(*waiting) == [{}] * 4
    handle.deaf = True
    with pytest.raises(Stalled, match=r"did not answer within 0\.1 s"):
        await asyncio.wait_for(queue.call(counts), 30)


async def test_a_recorded_journal_that_is_not_read_in_time_is_a_sentence(monkeypatch):
    monkeypatch.setattr(learner_replay, "REOPEN_TIMEOUT_S", 0.05)

    class Handle:
        digests = get_batch = SlowQueue()

    batches = learner_replay.RecordedBatches(Handle())
    for call in (batches.digests(), batches.get_batch(1)):
        with pytest.raises(Stalled, match="journal could not be read within"):
            await call


def test_every_start_of_a_learner_that_goes_back_has_a_name_of_its_own():
    assert [queue_module._next_start(name) for name in ("s", "s.1", "s.9")] == [
        "s.1",
        "s.2",
        "s.10",
    ]
