"""Rollout actors without engines, many in a process, and a learner rank that only fetches.

Runs in: Ray actors that `benchmarks.many_actors` starts. A client talks to the queue as
`RolloutActor` does: it asks for tickets when it has room, reports twice a second, and puts a group
when its time has passed; between two calls it sleeps.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Any

import ray

from async_grpo.cluster.queue import ActorQueue
from async_grpo.replay.actor_reports import ActorReport, TokenTotals
from async_grpo.rollout.actor import HEARTBEAT_S, HEARTBEATS_PER_S, POLL_S
from async_grpo.wire.codec import unpack_frames
from async_grpo.wire.groups import GroupTicket
from benchmarks.queue_actors import Frames, Shape


class Client:
    """One rollout actor of `actors`. hold: groups under way; group_s: mean seconds of each,
    which lasts from half to one and a half times as long.
    """

    def __init__(
        self,
        name: str,
        queue: ActorQueue,
        frames: Frames,
        *,
        hold: int,
        group_s: float,
        actors: int,
    ) -> None:
        self._heartbeat_s = max(HEARTBEAT_S, actors / HEARTBEATS_PER_S)
        self._name, self._queue = name, queue
        self._frames, self._hold = frames, hold
        self._group_s = group_s
        self._random = random.Random(name)
        self._holding: dict[tuple[int, int], GroupTicket] = {}
        self._changed = asyncio.Event()
        self.version = self.calls = self.groups = 0
        self.waits: list[float] = []
        """Seconds of each put."""
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, version: int) -> None:
        """Serve another version."""
        self.version = version
        self._changed.set()

    async def run(self) -> None:
        """Produce groups until it is cancelled."""
        reported = 0.0
        while True:
            want, now = self._hold - len(self._holding), time.monotonic()
            if want or now - reported > self._heartbeat_s:
                report = None
                if now - reported > self._heartbeat_s:
                    reported, report = now, ActorReport(TokenTotals(sampled=self.groups))
                self.calls += 1
                held = list(self._holding)
                found = await self._queue.acquire(self._name, self.version, held, want, report)
                for ticket in found or []:
                    self._begin(ticket)
                if want and not found:
                    await asyncio.sleep(POLL_S)
                    continue
            try:
                await asyncio.wait_for(self._changed.wait(), self._heartbeat_s)
            except TimeoutError:
                continue
            self._changed.clear()

    def _begin(self, ticket: GroupTicket) -> None:
        if (ticket.group_id, ticket.attempt) not in self._holding:
            self._holding[ticket.group_id, ticket.attempt] = ticket
            task = asyncio.create_task(self._produce(ticket))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _produce(self, ticket: GroupTicket) -> None:
        await asyncio.sleep(self._group_s * self._random.uniform(0.5, 1.5))
        frames = self._frames.make([ticket])
        started = time.perf_counter()
        (verdict,) = await self._queue.put(self._name, frames)
        self.waits.append(time.perf_counter() - started)
        if verdict.status != "accepted":
            raise RuntimeError(f"a frame was not accepted: {verdict}")
        self.groups += 1
        del self._holding[ticket.group_id, ticket.attempt]
        self._changed.set()


class Clients:
    """Many of them in one process."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._clients: list[Client] = []

    async def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    async def run(
        self, queue: Any, shape: Shape, *, count: int, actors: int, hold: int, group_s: float
    ) -> None:
        """Let them produce until this call is cancelled."""
        frames, asks = Frames(shape, f"clients-{self._number}", 1), ActorQueue(queue)
        self._clients = [
            Client(
                f"actor-{self._number}-{index}",
                asks,
                frames,
                hold=hold,
                group_s=group_s,
                actors=actors,
            )
            for index in range(count)
        ]
        async with asyncio.TaskGroup() as group:
            for client in self._clients:
                group.create_task(client.run())

    async def serve(self, version: int) -> None:
        """Serve another version."""
        for client in self._clients:
            client.serve(version)

    async def done(self) -> tuple[int, int, list[float]]:
        """Return groups, calls for tickets, and seconds of each put, since they were asked last."""
        groups = sum(len(client.waits) for client in self._clients)
        waits = [wait for client in self._clients for wait in client.waits]
        calls = sum(client.calls for client in self._clients)
        for client in self._clients:
            client.waits, client.calls = [], 0
        return groups, calls, waits


class Rank:
    """A learner rank that fetches and counts."""

    def fetch(self, queue: Any, step: int, group_ids: list[int]) -> int:
        """Fetch a batch; its frames."""
        payload = ray.get(queue.payload.remote(step, group_ids), timeout=60)
        return len(unpack_frames(payload))
