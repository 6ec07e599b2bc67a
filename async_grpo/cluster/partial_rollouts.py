"""Responses under way, gathered for a checkpoint and handed to a run that resumes from one.

Runs in: the driver. Hides where the beginnings come from (rollout actors are asked, while they and
the learner go on) and which of them belong to the checkpoint: those of tickets that were out when
its queue was written down, and those that wait to be continued still.

Invariant: an actor that does not answer in time is left out and counted; nobody waits for it but
the file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from async_grpo.checkpoint import directory as checkpoint
from async_grpo.cluster.rollout_actors import RemoteEngine
from async_grpo.config.schema import Config
from async_grpo.replay.ledger import State
from async_grpo.replay.partial import PartialStart
from async_grpo.rollout.partial import FILE, PartialError, PartialFile, write_file
from async_grpo.runtime.listener import RunListener

PATIENCE_S = 10.0
GroupsInPart = list[tuple[PartialStart, bytes]]


class PartialCollector:
    """The beginnings of one start of the run; without `checkpoint.partial_rollouts` there are
    none.
    """

    def __init__(self, config: Config, origin: Path | None, listener: RunListener) -> None:
        """origin: the checkpoint that the run continues, its sums verified."""
        self._on, self._listener = config.checkpoint.partial_rollouts, listener
        self._restored = self._read(origin) if self._on and origin is not None else None
        self._gathering: asyncio.Task[GroupsInPart] | None = None
        self.silent = 0
        self.path = None if self._restored is None else str(origin / FILE)
        """What rollout actors continue from."""

    def snapshot(self, snapshot: dict[str, Any] | None) -> dict[str, Any] | None:
        """The queue of the checkpoint, with what it has to know of the beginnings."""
        return (
            snapshot
            if self._restored is None or snapshot is None
            else {**snapshot, "beginnings": self._restored.beginnings}
        )

    def begin(self, engines: Sequence[RemoteEngine], snapshot: dict[str, Any]) -> None:
        """Ask the actors; snapshot: the queue of the checkpoint that is being written."""
        if self._on:
            if self._gathering is not None:
                self._gathering.cancel()
            self._gathering = asyncio.ensure_future(self._gather(engines, snapshot))

    async def write(self, directory: Path) -> None:
        """Write what they answered into the checkpoint. Raises OSError."""
        if self._gathering is not None:
            groups, self._gathering = await self._gathering, None
            await asyncio.to_thread(write_file, directory, groups)

    def measurements(self) -> dict[str, float]:
        """Actors that did not answer, since the start."""
        return {"cluster/partial_silent": float(self.silent)} if self._on else {}

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
    ) -> GroupsInPart:
        rows = [
            tuple(row[:5]) for row in snapshot["ledger"]["groups"]
        ]  # id, attempt, version, state, actor
        out = {
            (group_id, attempt, version, actor)
            for group_id, attempt, version, state, actor in rows
            if state == State.IN_FLIGHT
        }
        answers = await asyncio.gather(*[self._ask(engine) for engine in engines])
        found = [
            (beginning, packed)
            for engine, groups in zip(engines, answers, strict=True)
            for beginning, packed in groups
            if (beginning.group_id, beginning.attempt, beginning.version, engine.actor_id) in out
        ]
        if self._restored is not None:
            waiting = {
                (group_id, attempt + 1)
                for group_id, attempt, _, state, _ in rows
                if state == State.WAITING
            }
            found += [
                (one, self._restored.packed(one.group_id))
                for one in self._restored.beginnings
                if (one.group_id, one.attempt) in waiting
            ]
        return found

    async def _ask(self, engine: RemoteEngine) -> GroupsInPart:
        try:
            return await asyncio.wait_for(engine.partials(), PATIENCE_S)
        except (TimeoutError, ray.exceptions.RayError) as error:
            self.silent += 1
            why = (
                f"nothing within {PATIENCE_S:g} s"
                if isinstance(error, TimeoutError)
                else str(error).strip().splitlines()[-1]
            )
            self._listener.note(
                f"{engine.actor_id} did not tell of its responses under way ({why}): they "
                "are not in the checkpoint"
            )
            return []
