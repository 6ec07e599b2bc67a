"""Relays: shared-memory weights on nodes without learner rank 0.

Runs in: the driver (Relays), one small process per node (RelayProcess). Once per publication and
node:

    learner's segment --home relay reads--> Ray's object store --network-->
        node's relay writes --> node's segment --> its engines

Hides the node of an engine, which gets the path of its own node. Invariants: the learner does not
wait for relays; the bytes are fetched once per node, for the first engine that asks; the announced
bytes arrive in time, or the engines that asked get an error; a relay that hangs is replaced.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from async_grpo.config.transports import TRANSPORTS
from async_grpo.runtime import stacks
from async_grpo.runtime.lifetime import die_with_parent
from async_grpo.runtime.listener import RunListener
from async_grpo.weights.fan_out import consume_exception
from async_grpo.weights.shared_memory import SegmentCopy, read_segment
from async_grpo.weights.transport import Announcement

RETRIES = 1
CLOSE_TIMEOUT_S = 5.0
KEPT = 1
"""Publications beside the newest whose paths are known: a node has two segments."""


class RelayProcess:
    """The relay of one node."""

    def __init__(self, *, key: str, fallback: str, role: str) -> None:
        die_with_parent()
        stacks.register(role, stacks.home(Path(fallback).parent))
        self._copy = SegmentCopy(key=key, fallback=Path(fallback))

    def read(self, path: str, sequence: int, nbytes: int) -> np.ndarray:
        """Read the learner's segment, on its node: [nbytes] uint8."""
        return read_segment(Path(path), sequence, nbytes)

    def write(self, source: tuple[str, int], data: np.ndarray) -> tuple[str, str]:
        """Copy the bytes into this node's segment; its path, and a note for the user or ""."""
        return str(self._copy.write(source, data)), self._copy.note

    def pid(self) -> int:
        """Process id, for tests and post-mortems."""
        return os.getpid()

    def close(self) -> None:
        """Remove the segments."""
        self._copy.close()


class Relays:
    """Relay processes by node, started when the first engine of a node asks."""

    def __init__(
        self,
        *,
        home: str,
        key: str,
        fallback: Path,
        where: Callable[[str], dict[str, Any]],
        deadline_s: float,
        listener: RunListener,
    ) -> None:
        """home: node of rank 0. where(node_id): Ray options. fallback: a directory in the run's.
        deadline_s: of the way to one node.
        """
        self._home, self._where = home, where
        self._key, self._fallback = key, fallback
        self._deadline_s = deadline_s
        self._listener = listener
        self._relays: dict[str, Any] = {}
        self._paths: dict[tuple[str, str, int], asyncio.Task[str]] = {}
        self._newest: tuple[tuple[str, int] | None, Any] = (None, None)
        self._noted: set[str] = set()

    async def local(self, announcement: Announcement, node_id: str) -> Announcement:
        """Return the announcement for engines on this node. Raises Ray's error for a dead
        relay, TimeoutError for one that hangs.
        """
        if not TRANSPORTS[announcement.backend].relayed or node_id == self._home:
            return announcement
        payload = announcement.payload
        key = (node_id, payload["path"], payload["sequence"])
        if key not in self._paths:
            for old in [known for known in self._paths if known[0] == node_id][:-KEPT]:
                del self._paths[old]
            self._paths[key] = asyncio.ensure_future(self._fetch(announcement, node_id))
            self._paths[key].add_done_callback(consume_exception)  # when nobody waits any more
        try:
            path = await asyncio.shield(self._paths[key])
        except BaseException:
            self._paths.pop(key, None)  # the next engine that asks tries again
            self._newest = (None, None)
            raise
        return replace(announcement, payload=payload | {"path": path})

    async def close(self) -> None:
        """Remove the segments and end the relays."""
        relays, self._relays = list(self._relays.values()), {}
        calls = [relay.close.remote() for relay in relays]
        with suppress(TimeoutError):  # ended below either way, and dead already is as good
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), CLOSE_TIMEOUT_S)
        for relay in relays:
            ray.kill(relay)

    async def _fetch(self, announcement: Announcement, node_id: str) -> str:
        # by path too: a learner that was started again counts from the beginning, in own files
        write = announcement.payload["path"], announcement.payload["sequence"]
        if self._newest[0] != write:  # read once, however many nodes there are
            self._newest = write, self._relay(self._home).read.remote(*write, announcement.nbytes)
        relay = self._relay(node_id)
        try:
            async with asyncio.timeout(self._deadline_s):
                path, note = await relay.write.remote(write, self._newest[1])
        except TimeoutError as error:
            self._relays.pop(node_id, None)
            ray.kill(relay)
            raise TimeoutError(f"its relay took longer than {self._deadline_s:g} s") from error
        if note and node_id not in self._noted:
            self._noted.add(node_id)
            self._listener.note(f"node {node_id[:8]}: {note}")
        return path

    def _relay(self, node_id: str) -> Any:
        if node_id not in self._relays:
            actor = ray.remote(RelayProcess).options(
                max_restarts=-1, max_task_retries=RETRIES, **self._where(node_id)
            )
            self._relays[node_id] = actor.remote(
                key=self._key, fallback=str(self._fallback), role=f"relay-{node_id[:8]}"
            )
        return self._relays[node_id]
