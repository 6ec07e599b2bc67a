"""The parts of the queue benchmark that need no traffic of two sides: cost by age, a crowd of
waiting actors, opening a journal again.

Runs in: the process of `benchmarks.queue`.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from async_grpo.cluster.processes import MAX_CALLS
from async_grpo.cluster.queue import ActorQueue, QueueProcess
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.resume import JournalSettings, open_queue
from async_grpo.replay.rules import QueueSettings
from async_grpo.wire.codec import pack_frames, unpack_frames
from benchmarks.algo import kilobytes
from benchmarks.queue.actors import Frames, Shape

ACTOR = "producer"
WINDOW = 10_000
"""Groups over which the cost at an age is taken."""
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Age:
    """The queue when this many groups have passed. CPU microseconds per group: put, get_batch,
    payload and live.
    """

    groups: int
    us_per_group: float
    memory_mb: float


async def ages(settings: QueueSettings, shape: Shape, marks: Sequence[int]) -> list[Age]:
    """Pass groups through the queue object of this process: what one costs in the `WINDOW` groups
    after each mark (before the last).
    """
    queue, size = ReplayQueue(settings), shape.batch
    frames = Frames(shape, ACTOR, settings.capacity)
    starts = [min(mark, marks[-1] - WINDOW) for mark in marks]
    costs: list[list[float]] = [[] for _ in marks]
    memory = [0.0] * len(marks)
    for step in range(1, -(-marks[-1] // size) + 1):
        tickets = await queue.acquire(ACTOR, step - 1, [], settings.capacity)
        packed = pack_frames(frames.make(tickets or []))
        started = time.process_time()
        await queue.put(ACTOR, list(unpack_frames(packed)))
        batch = await queue.get_batch(step)
        if batch is None:
            raise RuntimeError(f"step {step} has no batch")
        await queue.payload(step, [group.group_id for group in batch.groups])
        await queue.live(step)
        cost = (time.process_time() - started) / size * 1e6
        for index, start in enumerate(starts):
            if start <= step * size < start + WINDOW:
                costs[index].append(cost)
                memory[index] = kilobytes("/proc/self/status", "VmRSS") / 1024
    return [
        Age(mark, statistics.median(cost), mb)
        for mark, cost, mb in zip(marks, costs, memory, strict=True)
    ]


@dataclass(frozen=True)
class Recovery:
    """Opening a journal of `gb`: seconds under the same start of the run, and under another from a
    checkpoint after `trained` groups.
    """

    gb: float
    trained: int
    ready: int
    same_s: float
    other_s: float


async def recovery(settings: QueueSettings, shape: Shape, journal: JournalSettings) -> Recovery:
    """Write a journal of `shape.steps` trained batches and a queue full of ready groups, then open
    it twice.
    """
    queue, frames = open_queue(settings, journal), Frames(shape, ACTOR, shape.batch)
    for step in range(1, shape.steps + 1):
        while await queue.get_batch(step) is None:
            await _put_some(queue, frames, step - 1)
        await queue.live(step)
    snapshot = await queue.snapshot()
    while await _put_some(queue, frames, shape.steps):
        pass
    counts = await queue.counts()
    del queue
    nbytes = sum(path.stat().st_size for path in Path(journal.directory).iterdir())
    seconds = []
    for again in (
        lambda: open_queue(settings, journal),
        lambda: open_queue(
            replace(settings, trained_steps=shape.steps),
            replace(journal, start="another"),
            snapshot=snapshot,
        ),
    ):
        started = time.perf_counter()
        opened = again()
        seconds.append(time.perf_counter() - started)
        ready = (await opened.counts())["ready"]
        if ready != counts["ready"]:
            raise RuntimeError(
                f"{ready} groups are ready after opening again, before it were "
                f"{counts['ready']}: {opened.report}"
            )
        del opened
    return Recovery(nbytes / 1e9, counts["trained"], counts["ready"], *seconds)


async def _put_some(queue: ReplayQueue, frames: Frames, version: int) -> int:
    """Acquire as many tickets as there are frames at most, and put them all."""
    tickets = await queue.acquire(ACTOR, version, [], frames.count) or []
    if tickets:
        await queue.put(ACTOR, list(unpack_frames(pack_frames(frames.make(tickets)))))
    return len(tickets)


@dataclass(frozen=True)
class Crowd:
    """One wave: calls of `acquire` sent at once, answers that came, seconds until the last, seconds
    of a put sent after them.
    """

    calls: int
    answers: int
    answered_s: float
    put_s: float


async def crowd(settings: QueueSettings, shape: Shape, *, actors: int, waves: int) -> list[Crowd]:
    """Waves of `actors` actors that want tickets from a full queue, and a put of `shape.call`
    groups behind each.
    """
    process = (
        ray.remote(QueueProcess).options(max_concurrency=MAX_CALLS, num_cpus=0).remote(settings)
    )
    queue, frames = ActorQueue(process), Frames(shape, ACTOR, shape.call)
    tickets = await queue.acquire(ACTOR, 0, [], settings.capacity) or []
    found = []
    for wave in range(waves):
        mine = tickets[wave * shape.call : (wave + 1) * shape.call]
        ready = frames.make(mine)
        started = time.perf_counter()
        waiting = asyncio.gather(*[_one(process, index) for index in range(actors)])
        await asyncio.sleep(0)  # the calls leave before the put does
        verdicts = await queue.put(ACTOR, ready)
        put_s = time.perf_counter() - started
        if any(verdict.status != "accepted" for verdict in verdicts):
            raise RuntimeError(f"a put behind {actors} waiting actors came back with {verdicts[0]}")
        answers = await asyncio.wait_for(waiting, TIMEOUT_S)
        found.append(Crowd(actors, len(answers), time.perf_counter() - started, put_s))
    ray.kill(process)
    return found


async def _one(process: Any, index: int) -> Any:
    return await process.acquire.remote(f"actor-{index}", 0, [], 4)
