"""A driver that only ever sees metadata: run as a process of its own by test_queue_process, prints
what it measured as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import ray

from async_grpo.algo.rewards import Shaping
from async_grpo.cluster.queue import MAX_CALLS, ActorQueue, QueueProcess
from async_grpo.cluster.session import RaySession
from async_grpo.replay.rules import QueueSettings
from async_grpo.wire.codec import Group, Row, VersionSpan, encode_group, unpack_frames

R, STEPS = 8, 12
WAITING = 1_200
SETTINGS = QueueSettings(
    rollout_batch_size=R,
    max_staleness=0,
    total_steps=STEPS,
    group_size=2,
    max_attempts=3,
    max_num_gen_batches=0,
    shaping=Shaping({"correct": 1.0}, 64),
)


def peak_mb() -> float:
    """Peak resident memory of this process so far, in MB."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


@ray.remote
class Producer:
    """Acquires tickets and puts groups of a given size, like a rollout actor."""

    def __init__(self, queue, tokens: int) -> None:
        self._queue, self._tokens = ActorQueue(queue), tokens

    async def produce(self, version: int) -> int:
        tickets = await self._queue.acquire("producer", version, [], 2 * R)
        n = self._tokens
        rows = [
            Row(
                np.arange(n, dtype=np.int32),
                np.full(n, -1, np.float32),
                [(0, n)],
                [VersionSpan(version, 0, n)],
                {"correct": float(row)},
                float(row),
                "stop",
            )
            for row in range(2)
        ]
        frames = [
            encode_group(
                Group(
                    t.group_id,
                    t.attempt,
                    t.policy_version,
                    "producer",
                    [np.arange(4, dtype=np.int32)],
                    rows,
                    run_epoch=t.run_epoch,
                )
            )
            for t in tickets
        ]
        verdicts = await self._queue.put("producer", frames)
        assert all(verdict.status == "accepted" for verdict in verdicts), verdicts
        return sum(len(frame) for frame in frames)


async def drive(tokens: int) -> dict[str, float]:
    """All steps of a run whose groups have 2 x `tokens` tokens; peak memory afterwards and bytes
    that went through the queue.
    """
    queue = ray.remote(QueueProcess).options(max_concurrency=MAX_CALLS, num_cpus=0).remote(SETTINGS)
    producer = Producer.options(num_cpus=0).remote(queue, tokens)
    passed = fetched = 0
    for step in range(1, STEPS + 1):
        passed += await asyncio.wait_for(producer.produce.remote(step - 1), 60)
        batch = await asyncio.wait_for(queue.call.remote("get_batch", step), 60)
        ids = [group.group_id for group in batch.groups]
        fetched += await asyncio.wait_for(fetch.remote(queue, step, ids), 60)
        if step < STEPS:
            await queue.call.remote("get_batch", step + 1)
        await queue.call.remote("live", step)
    ray.kill(producer), ray.kill(queue)
    return {"peak_mb": peak_mb(), "passed_mb": passed / 1e6, "fetched_mb": fetched / 1e6}


@ray.remote(num_cpus=0)
def fetch(queue, step: int, ids: list[int]) -> int:
    """What a learner rank does: fetch the payload."""
    payload = ray.get(queue.payload.remote(step, ids), timeout=60)
    assert len(unpack_frames(payload)) == len(ids)
    return payload.nbytes


async def crowd() -> dict[str, float]:
    """1,200 calls of actors are on the queue at once; a put goes through all the same."""
    queue = ray.remote(QueueProcess).options(max_concurrency=MAX_CALLS, num_cpus=0).remote(SETTINGS)
    await queue.call.remote("counts")
    producer = Producer.options(num_cpus=0).remote(queue, 8)
    waiting = [queue.acquire.remote(f"actor-{index}", 0, [], 0) for index in range(WAITING)]
    put_bytes = await asyncio.wait_for(producer.produce.remote(0), 30)
    answers = await asyncio.wait_for(asyncio.gather(*waiting), 30)
    return {"answered": len(answers), "put_bytes": put_bytes}


def main() -> None:
    session = RaySession.open(processes=2)
    try:
        small = asyncio.run(drive(60))
        large = asyncio.run(drive(65_000))
        print(json.dumps({"small": small, "large": large, "crowd": asyncio.run(crowd())}))
        sys.stdout.flush()
    finally:
        session.close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
