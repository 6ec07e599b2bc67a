"""The processes of the queue benchmark: producers and a consumer that call as rollout actors and
learner do, and the rival.

Runs in: Ray actors that `benchmarks.queue` starts. A producer is a rollout actor without an engine:
a group is complete the moment its ticket arrives. Its frames are made once; for a ticket only the
header and the checksum are new.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import ray

from async_grpo.cluster.queue import BATCH_PATIENCE_S, BATCH_POLL_S, ActorQueue
from async_grpo.replay.queue import Verdict
from async_grpo.rollout.producer import POLL_S
from async_grpo.wire.codec import Buffer, encode_group, pack_frames, unpack_frames
from async_grpo.wire.groups import Group, GroupTicket, Row, VersionSpan

CALL_TIMEOUT_S = 60.0
FIXED = struct.Struct("<4sHHII")
CHECKSUM_AT, LARGEST_ID, LARGEST_VERSION = 12, 2**31, 2**15


@dataclass(frozen=True)
class Shape:
    """One kind of groups: `rows` responses of `tokens` tokens. A batch has `batch` groups, a call
    of a producer at most `call`.
    """

    rows: int
    tokens: int
    batch: int
    call: int
    steps: int


class Frames:
    """Frames of one shape for any ticket, in buffers that are used again: one per group of a
    call.
    """

    def __init__(self, shape: Shape, actor_id: str, count: int) -> None:
        rows = [
            Row(
                np.arange(shape.tokens, dtype=np.int32),
                np.full(shape.tokens, -1, np.float32),
                [(0, shape.tokens)],
                [VersionSpan(LARGEST_VERSION, 0, shape.tokens)],
                {"correct": float(row % 2)},
                float(row % 2),
                "stop",
            )
            for row in range(shape.rows)
        ]
        times = {"queued": 1.7e9, "first_token": 1.7e9, "done": 1.7e9, "scored": 1.7e9}
        # The largest numbers make the longest header; shorter ones are padded to its length, so
        # that the arrays keep their place.
        frame = encode_group(
            Group(
                LARGEST_ID,
                1,
                LARGEST_VERSION,
                actor_id,
                [np.arange(16, dtype=np.int32)],
                rows,
                times,
            )
        )
        self._length = FIXED.unpack_from(frame)[3]
        unpacker = msgpack.Unpacker(raw=False)
        unpacker.feed(frame[FIXED.size : FIXED.size + self._length])
        self._header = unpacker.unpack()
        self._buffers = [bytearray(frame) for _ in range(count)]
        self.count = count

    def make(self, tickets: Sequence[GroupTicket]) -> list[Buffer]:
        """Frames for the tickets; valid until the next call."""
        return [
            self._fill(buffer, ticket)
            for buffer, ticket in zip(self._buffers, tickets, strict=False)
        ]

    def _fill(self, buffer: bytearray, ticket: GroupTicket) -> bytearray:
        self._header |= {
            "group_id": ticket.group_id,
            "attempt": ticket.attempt,
            "policy_version": ticket.policy_version,
        }
        self._header["span_versions"] = [ticket.policy_version] * len(
            self._header["segment_counts"]
        )
        packed = msgpack.packb(self._header)
        buffer[FIXED.size : FIXED.size + self._length] = packed.ljust(self._length, b"\0")
        struct.pack_into("<I", buffer, CHECKSUM_AT, zlib.crc32(memoryview(buffer)[FIXED.size :]))
        return buffer


class Producer:
    """A rollout actor's half of the traffic: acquire in one task, put what is ready in another."""

    def __init__(self, actor_id: str) -> None:
        self._actor_id = actor_id
        self._changed, self._ready = asyncio.Event(), asyncio.Event()
        self._version, self._stopping = 0, False

    async def serve(self, version: int) -> None:
        """The engine serves `version` now."""
        self._version = version
        self._changed.set()

    async def stop(self) -> None:
        """Put what is ready and end `produce`."""
        self._stopping = True
        self._changed.set()
        self._ready.set()

    async def produce(self, queue: Any, shape: Shape, version: int) -> list[tuple[int, float]]:
        """Until `stop`: (groups, seconds) of each put."""
        self._queue, self._shape, self._version, self._stopping = (
            ActorQueue(queue),
            shape,
            version,
            False,
        )
        self._frames = Frames(shape, self._actor_id, shape.call)
        self._holding: dict[tuple[int, int], GroupTicket] = {}
        self._outbox: deque[GroupTicket] = deque()
        _, calls = await asyncio.gather(self._acquire(), self._send())
        return calls

    async def _acquire(self) -> None:
        while not self._stopping:
            want = 2 * self._shape.call - len(self._holding)
            if want:
                for ticket in (
                    await self._queue.acquire(
                        self._actor_id, self._version, list(self._holding), want
                    )
                    or []
                ):
                    self._holding[ticket.group_id, ticket.attempt] = ticket
                    self._outbox.append(ticket)
                self._ready.set()
            try:
                await asyncio.wait_for(self._changed.wait(), POLL_S)
            except TimeoutError:
                continue
            self._changed.clear()

    async def _send(self) -> list[tuple[int, float]]:
        calls = []
        while self._outbox or not self._stopping:
            if not self._outbox:
                await self._ready.wait()
                self._ready.clear()
                continue
            tickets = [
                self._outbox.popleft() for _ in range(min(len(self._outbox), self._shape.call))
            ]
            frames = self._frames.make(tickets)
            started = time.perf_counter()
            verdicts = await self._queue.put(self._actor_id, frames)
            calls.append((len(tickets), time.perf_counter() - started))
            wrong = [verdict for verdict in verdicts if verdict.status != "accepted"]
            if wrong:
                raise RuntimeError(f"a frame was not accepted: {wrong[0]}")
            for ticket in tickets:
                del self._holding[ticket.group_id, ticket.attempt]
            self._changed.set()
        return calls


class Consumer:
    """The loop and a learner rank in one: takes batches, fetches their payload, publishes a version
    after every step.
    """

    def take(
        self, queue: Any, producers: list[Any], first_step: int, warm_up: int, steps: int
    ) -> dict[str, Any]:
        """`warm_up` steps that are not measured, then `steps` that are: seconds in all, bytes, and
        seconds of each get.

        A get is next_batch and payload, without the time that groups of the batch were still
        missing.
        """
        gets, nbytes = [], 0
        for step in range(first_step, first_step + warm_up + steps):
            if step == first_step + warm_up:
                gets, nbytes, began = [], 0, time.perf_counter()
            started = time.perf_counter()
            deadline = time.monotonic() + CALL_TIMEOUT_S
            while (batch := _result(queue.next_batch.remote(step))) is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no batch for step {step} within {CALL_TIMEOUT_S:g} s")
            payload = _result(
                queue.payload.remote(step, [group.group_id for group in batch.groups])
            )
            elapsed = time.perf_counter() - started
            if len(unpack_frames(payload)) != len(batch.groups):
                raise RuntimeError("the payload has another number of frames than the batch")
            nbytes += payload.nbytes
            for producer in producers:
                producer.serve.remote(step)
            _result(queue.call.remote("live", step))
            gets.append(elapsed - _result(queue.call.remote("metrics"))["replay/learner_wait_s"])
        return {"seconds": time.perf_counter() - began, "bytes": nbytes, "gets": gets}


def _result(reference: Any) -> Any:
    return ray.get(reference, timeout=CALL_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class PlainGroup:
    """What the plain actor knows of a group."""

    group_id: int


@dataclass(frozen=True, slots=True)
class PlainBatch:
    """R groups of the plain actor."""

    groups: tuple[PlainGroup, ...]


class PlainQueue:
    """The rival: a Ray actor around a deque. It answers the same calls with the same arrays and
    looks at no byte of a frame.

    Frames stay where Ray put them: it does not even copy. Tickets are a counter with the same bound
    on groups outstanding.
    """

    def __init__(self, batch_size: int, capacity: int) -> None:
        self._batch_size, self._capacity = batch_size, capacity
        self._frames: deque[memoryview] = deque()
        self._issued = self._freed = self._version = 0
        self._taken: list[memoryview] = []
        self._step, self._asked_at, self._waited = 0, 0.0, 0.0

    async def acquire(
        self,
        actor_id: str,
        serving_version: int,
        holding: Sequence[tuple[int, int]],
        want: int,
        report: object,
    ) -> list[GroupTicket]:
        first = self._issued
        self._issued += min(want, self._capacity - (self._issued - self._freed))
        return [GroupTicket(group_id, 1, self._version) for group_id in range(first, self._issued)]

    async def put_packed(self, actor_id: str, packed: np.ndarray) -> list[Verdict]:
        frames = unpack_frames(packed)
        self._frames.extend(frames)
        return [Verdict(0, 1, "accepted")] * len(frames)

    async def next_batch(self, step: int) -> PlainBatch | None:
        now = time.monotonic()
        if step != self._step:
            self._step, self._asked_at = step, now
        while len(self._frames) < self._batch_size:
            if time.monotonic() - now > BATCH_PATIENCE_S:
                return None
            await asyncio.sleep(BATCH_POLL_S)
        self._waited = time.monotonic() - self._asked_at
        self._taken = [self._frames.popleft() for _ in range(self._batch_size)]
        return PlainBatch(tuple(PlainGroup(index) for index in range(self._batch_size)))

    async def payload(self, step: int, group_ids: Sequence[int]) -> np.ndarray:
        return pack_frames([self._taken[group_id] for group_id in group_ids])

    async def live(self, version: int) -> None:
        self._version = version
        self._freed = version * self._batch_size

    async def metrics(self) -> dict[str, float]:
        return {"replay/learner_wait_s": self._waited}

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method by its name, as the queue's process does for those of the queue."""
        return await getattr(self, method)(*arguments)

    async def pid(self) -> int:
        """Process id."""
        return os.getpid()
