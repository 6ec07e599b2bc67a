"""Relays: shared-memory weights on nodes without learner rank 0.

Runs in: the driver (Relays), one small process per node (RelayProcess). Per publication and node:

    learner's segments --home relay: `offer`--> the copy, or what changed since the one before
        --network--> node's relay: `write` --> node's segment --> its engines

    network    Ray's object store, read or encoded once; or `weight_sync.files`, written once: a
               chain [whole, delta, ..., newest], of which each node reads what it lacks

What changed (`weight_sync.delta`) is for a node whose relay holds the version in the learner's
other segment; all others get the whole, and so does an attempt after a failure.

Hides the node of an engine, which gets the path of its own node. Invariants: the learner does not
wait for relays; a segment has a version bit for bit, or is refused; the bytes are fetched once per
node, for the first engine that asks; they arrive in time, or the engines that asked get an error; a
relay that hangs is replaced.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from async_grpo.config.schema import Config
from async_grpo.config.transports import TRANSPORTS
from async_grpo.runtime import stacks
from async_grpo.runtime.lifetime import die_with_parent
from async_grpo.runtime.listener import RunListener
from async_grpo.weights import delta
from async_grpo.weights.fan_out import consume_exception
from async_grpo.weights.files import ChainPart, WeightFiles, Write
from async_grpo.weights.shared_memory import SegmentCopy, changes, written
from async_grpo.weights.transport import Announcement, fallback_directory, is_version

RETRIES = 1
CLOSE_TIMEOUT_S = 5.0
KEPT = 1
"""Publications beside the newest whose paths are known: a node has two segments."""
IN_VAIN = 3
"""Deltas that were not shorter, after which a node gets all weights: one may be a restart's."""
SHOWN = 0.8
"""Share of the time left in which a storage has to show a file, so that the relay can say so."""


class RelayProcess:
    """The relay of one node."""

    def __init__(self, *, key: str, fallback: str, role: str, files: str | None) -> None:
        """files: `weight_sync.files`."""
        die_with_parent()
        place = Path(fallback)
        stacks.register(role, stacks.home(place.parent))
        self._copy = SegmentCopy(key=key, fallback=place)
        self._files = None if files is None else WeightFiles(files, key=key, fallback=place)

    @ray.method(num_returns=2)
    def offer(self, source: Write, nbytes: int, base: Write | None, version: bool) -> Any:
        """Read the learner's segment, on its node: the chain that leads there, and the bytes of its
        only part, unless they are files. base: None for a whole copy, or a write to begin from, for
        which files take their newest. version: later ones may begin from this.
        """
        files = self._files
        if files is not None and base is not None:
            if files.chain and files.chain[-1].source == source:
                return files.chain, None
            base = files.next_base()
        data = None if base is None else changes(base, source, nbytes)
        base = None if data is None else base
        with written(source, nbytes) if data is None else nullcontext(data) as found:
            if files is None:
                data = found.copy() if data is None else data
            else:
                part = files.save(source, found, of=nbytes, base=base)
        if files is None:
            return [ChainPart(source, nbytes, found.nbytes, base)], data
        return files.add(part, version=version), None

    def write(
        self, chain: list[ChainPart], data: Any, seconds: float
    ) -> tuple[Write | None, int, str]:
        """Bring this node's segment to the end of a chain: where it lies, or None if the chain
        begins from another write than is held; how many parts it took; a note for the user, or "".
        seconds: for a storage to show a file.
        """
        held, until = self._copy.held, time.monotonic() + seconds
        begin = max((place for place, part in enumerate(chain) if part.base == held), default=0)
        last, parts = chain[-1], chain[begin:]
        if held != last.source and parts[0].base not in (None, held):
            return None, 0, ""

        def fill(buffer: np.ndarray) -> None:
            for part in parts:
                if self._files is not None:
                    self._files.fill(part, buffer, until=until)
                elif part.base is None:
                    np.copyto(buffer, data)
                else:
                    delta.apply(data, buffer, (part.base, part.source))

        found = self._copy.write(last.source, last.of, fill, on_held=parts[0].base is not None)
        return found, 0 if held == last.source else len(parts), self._copy.note

    def pid(self) -> int:
        """Process id, for tests and post-mortems."""
        return os.getpid()

    def close(self) -> None:
        """Remove the segments, and the files."""
        self._copy.close()
        if self._files is not None:
            self._files.close()


class Relays:
    """Relay processes by node, started when the first engine of a node asks."""

    def __init__(
        self,
        config: Config,
        *,
        home: str,
        key: str,
        where: Callable[[str], dict[str, Any]],
        listener: RunListener,
    ) -> None:
        """home: node of rank 0. key: of the start. where(node_id): Ray options."""
        self._settings, self._fallback = config.weight_sync, fallback_directory(config)
        self._home, self._where = home, where
        self._key, self._listener = key, listener
        # whoever waits for a relay that hangs can say so before its own deadline
        self._deadline_s = config.weight_sync.deadlines.acknowledge_s / 2
        self._relays: dict[str, Any] = {}
        self._paths: dict[tuple[str, Write], asyncio.Task[Write]] = {}
        self._offers: dict[tuple[Write, Write | None], asyncio.Task[Any]] = {}
        self._held: dict[str, Write] = {}
        """The newest version by node; where weights are files, of all of them (key "")."""
        self._whole: set[str] = set()
        self._in_vain: Counter[str] = Counter()
        self._failed: set[str] = set()
        self._whole_s: dict[str, float] = {}
        self._noted: set[str] = set()

    async def local(self, announcement: Announcement, node_id: str) -> Announcement:
        """Return the announcement for engines on this node. Raises Ray's error for a dead
        relay, TimeoutError for one that hangs.
        """
        if not TRANSPORTS[announcement.backend].relayed or node_id == self._home:
            return announcement
        key = node_id, _source(announcement)
        if key not in self._paths:
            for old in [known for known in self._paths if known[0] == node_id][:-KEPT]:
                del self._paths[old]
            self._paths[key] = asyncio.ensure_future(self._fetch(announcement, node_id))
            self._paths[key].add_done_callback(consume_exception)  # when nobody waits any more
        here = dict(zip(("path", "sequence"), await asyncio.shield(self._paths[key]), strict=True))
        return replace(announcement, payload=announcement.payload | here)

    async def close(self) -> None:
        """Remove the segments and end the relays."""
        relays, self._relays = list(self._relays.values()), {}
        calls = [relay.close.remote() for relay in relays]
        with suppress(TimeoutError):  # ended below either way, and dead already is as good
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), CLOSE_TIMEOUT_S)
        for relay in relays:
            ray.kill(relay)

    async def _fetch(self, announcement: Announcement, node_id: str) -> Write:
        source, until = _source(announcement), time.monotonic() + self._deadline_s
        way = node_id if self._settings.files is None else ""
        version, base = is_version(announcement.label), None
        if version and not (self._settings.delta == "off" or way in self._whole):
            base = None if node_id in self._failed else self._held.get(way)
        try:
            for one in (self._home, node_id):
                if one not in self._relays:
                    await self._ask(one, until, "pid")  # its start is no part of the way
            found = await self._bring(announcement, node_id, base, until)
            if found is None:  # its relay holds something else
                found = await self._bring(announcement, node_id, None, until)
        except Exception as error:
            if (
                base is not None
                and isinstance(error, TimeoutError)
                and self._settings.delta == "auto"
            ):
                self._whole.add(way)
            self._paths.pop((node_id, source), None)  # the next engine that asks tries again
            self._offers.clear()
            self._failed.add(node_id)
            raise
        self._failed.discard(node_id)
        if version:
            self._held[way] = source
        return found

    async def _bring(
        self, announcement: Announcement, node_id: str, base: Write | None, until: float
    ) -> Any:
        """Let the node's relay write what the home relay offers; None: it lacks `base`."""
        key = _source(announcement), base
        if key not in self._offers:  # once, however many nodes there are
            offers = {one: task for one, task in self._offers.items() if one[0] == key[0]}
            offers[key] = asyncio.ensure_future(self._offer(announcement, base, until))
            offers[key].add_done_callback(consume_exception)
            self._offers = offers
        (chain, data), seconds = await asyncio.shield(self._offers[key])
        started, left = time.perf_counter(), SHOWN * (until - time.monotonic())
        found, taken, note = await self._ask(node_id, until, "write", chain, data, left)
        if note and node_id not in self._noted:
            self._noted.add(node_id)
            self._listener.note(f"node {node_id[:8]}: {note}")
        if taken == 1:
            seconds += time.perf_counter() - started
            self._compare(node_id, chain[-1], seconds, asked=base is not None)
        return found

    async def _offer(self, announcement: Announcement, base: Write | None, until: float) -> Any:
        started, version = time.perf_counter(), is_version(announcement.label)
        what = _source(announcement), announcement.nbytes, base, version
        return await self._ask(self._home, until, "offer", *what), time.perf_counter() - started

    async def _ask(self, node_id: str, until: float, method: str, *given: Any) -> Any:
        """Call the relay of a node, and end it if it is late; Ray's reference to what is second."""
        if (left := until - time.monotonic()) <= 0:
            raise TimeoutError(f"no time was left to bring weights to node {node_id[:8]}")
        relay, limit = self._relay(node_id), asyncio.timeout(left)
        try:
            async with limit:
                answer = getattr(relay, method).remote(*given)
                return (await answer[0], answer[1]) if isinstance(answer, list) else await answer
        except TimeoutError as error:
            if not limit.expired():
                raise
            self._relays = {one: other for one, other in self._relays.items() if other is not relay}
            ray.kill(relay)
            said = f"the relay of node {node_id[:8]} took longer than {self._deadline_s:g} s"
            raise TimeoutError(said) from error

    def _compare(self, node_id: str, part: ChainPart, seconds: float, *, asked: bool) -> None:
        """Note what a part took; with `auto`, whether the whole is faster. asked: for a delta, in
        whose place the whole came if that is not longer, or if what it begins from is gone.
        """
        before = self._whole_s.get(node_id)
        if part.base is None and asked and self._settings.files is None:
            self._in_vain[node_id] += 1
            if self._settings.delta == "auto" and self._in_vain[node_id] == IN_VAIN:
                self._whole.add(node_id)
        elif part.base is None:
            self._whole_s[node_id] = seconds
        elif before is not None:
            share, then = f"{100 * part.nbytes / part.of:.1f} % of the bytes", ""
            if self._settings.delta == "auto" and seconds > before:
                self._whole.add(node_id if self._settings.files is None else "")
                then = "; whole from now on"
            if f"delta{then}" not in self._noted:
                self._noted.add(f"delta{then}")
                self._listener.note(
                    f"weights reach node {node_id[:8]} as what changed: {share}, {seconds:.1f} s "
                    f"instead of {before:.1f} s{then}"
                )

    def _relay(self, node_id: str) -> Any:
        if node_id not in self._relays:
            actor = ray.remote(RelayProcess).options(
                max_restarts=-1, max_task_retries=RETRIES, **self._where(node_id)
            )
            role, files = f"relay-{node_id[:8]}", self._settings.files
            self._relays[node_id] = actor.remote(
                key=self._key, fallback=str(self._fallback), role=role, files=files
            )
        return self._relays[node_id]


def _source(announcement: Announcement) -> Write:
    # by path too: a learner that was started again counts from the beginning, in own files
    return announcement.payload["path"], announcement.payload["sequence"]
