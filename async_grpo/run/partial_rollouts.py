"""Partial rollouts: gathered for a checkpoint, and handed to a run that resumes from one.

Runs in: the driver. Hides where partial responses come from (rollout actors are asked, while they
and the learner go on) and which of them belong to the checkpoint: those of tickets that were out
when its queue was written down, and those that still wait to be continued.

Invariant: an actor that does not answer in time is left out and counted; only the file waits for
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_grpo.cluster.deaths import CallFailed
from async_grpo.cluster.remote_engine import RemoteEngine
from async_grpo.config.schema import Config
from async_grpo.replay.ledger import State
from async_grpo.replay.partial import PartialStart
from async_grpo.rollout.partial import FILE, PartialError, PartialFile, write_file
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.runtime.listener import RunListener
from async_grpo.runtime.text import last_line

PATIENCE_S = 10.0
EncodedGroups = list[tuple[PartialStart, bytes]]


class PartialCollector:
    """Partial rollouts of one start of the run; none without `checkpoint.partial_rollouts`."""

    def __init__(self, config: Config, origin: Path | None, listener: RunListener) -> None:
        """origin: the checkpoint that the run resumes from, its sums verified."""
        self._enabled, self._listener = config.checkpoint.partial_rollouts, listener
        self._restored = None
        self.path: str | None = None
        """File from which rollout actors continue."""
        if self._enabled and origin is not None:
            self._restored = self._read(origin)
            self.path = None if self._restored is None else str(origin / FILE)
        self._gathering: asyncio.Task[EncodedGroups] | None = None
        self.silent = 0

    def snapshot(self, snapshot: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the checkpoint's queue snapshot, with the facts of its partial rollouts added."""
        if self._restored is None or snapshot is None:
            return snapshot
        return {**snapshot, "beginnings": self._restored.starts}

    def begin(self, engines: Sequence[RemoteEngine], snapshot: dict[str, Any]) -> None:
        """Ask the actors. snapshot: of the queue, for the checkpoint that is being written."""
        if self._enabled:
            if self._gathering is not None:
                self._gathering.cancel()
            self._gathering = asyncio.ensure_future(self._gather(engines, snapshot))

    async def write(self, directory: Path) -> None:
        """Write the actors' answers into the checkpoint. Raises OSError."""
        if self._gathering is not None:
            groups, self._gathering = await self._gathering, None
            await asyncio.to_thread(write_file, directory, groups)

    def metrics(self) -> dict[str, float]:
        """Actors that did not answer, since the start."""
        return {"cluster/partial_silent": float(self.silent)} if self._enabled else {}

    def _read(self, origin: Path) -> PartialFile | None:
        if FILE not in checkpoint.read(origin)["files"]:
            return None
        try:
            return PartialFile.at(origin / FILE)
        except PartialError as error:
            self._listener.note(
                f"responses that were under way are generated from their beginning: {error}"
            )
            return None

    async def _gather(
        self, engines: Sequence[RemoteEngine], snapshot: dict[str, Any]
    ) -> EncodedGroups:
        # id, attempt, version, state, actor
        rows = [tuple(row[:5]) for row in snapshot["ledger"]["groups"]]
        issued = {
            (group_id, attempt, version, actor)
            for group_id, attempt, version, state, actor in rows
            if state == State.IN_FLIGHT
        }
        answers = await asyncio.gather(*[self._ask(engine) for engine in engines])
        found = [
            (start, packed)
            for engine, groups in zip(engines, answers, strict=True)
            for start, packed in groups
            if (start.group_id, start.attempt, start.version, engine.actor_id) in issued
        ]
        if self._restored is not None:
            waiting = {
                (group_id, attempt + 1)
                for group_id, attempt, _, state, _ in rows
                if state == State.WAITING
            }
            found += [
                (start, self._restored.packed(start.group_id))
                for start in self._restored.starts
                if (start.group_id, start.attempt) in waiting
            ]
        return found

    async def _ask(self, engine: RemoteEngine) -> EncodedGroups:
        try:
            return await asyncio.wait_for(engine.partials(), PATIENCE_S)
        except (TimeoutError, CallFailed) as error:
            self.silent += 1
            late = f"nothing within {PATIENCE_S:g} s"
            why = late if isinstance(error, TimeoutError) else last_line(error)
            self._listener.note(
                f"{engine.actor_id} did not report its responses under way ({why}): they "
                "are not in the checkpoint"
            )
            return []
