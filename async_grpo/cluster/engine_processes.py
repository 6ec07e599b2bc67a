"""The processes of rollout actors: begun in a slot, loaded, and ended.

Runs in: the driver. Hides that an engine is a Ray actor, on which node, and what it starts with;
knows nothing of budgets and of the live set. Invariant: no process outlives `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from async_grpo.cluster.engine_slots import EngineSlot, EngineSlots
from async_grpo.cluster.processes import MAX_CALLS, RolloutProcess
from async_grpo.cluster.relays import Relays
from async_grpo.cluster.remote_engine import RemoteEngine
from async_grpo.cluster.session import settled
from async_grpo.config.schema import Config
from async_grpo.errors import RunError
from async_grpo.weights.transport import UNPUBLISHED

CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ActorSpec:
    """What rollout actors start with. queue: Ray actor. partials: `PartialCollector.path`."""

    queue: Any
    model_dir: str
    device: str
    backend: str
    partials: str | None = None


class EngineProcesses:
    """All processes that were begun and not ended, by actor id."""

    def __init__(
        self, config: Config, *, slots: EngineSlots, spec: ActorSpec, relays: Relays
    ) -> None:
        self._config, self._relays = config, relays
        self._slots, self._spec = slots, spec
        self._running: dict[str, RemoteEngine] = {}

    def __contains__(self, engine: object) -> bool:
        return engine in self._running.values()

    def all(self) -> Sequence[RemoteEngine]:
        """Return them, serving or not."""
        return tuple(self._running.values())

    def begin(self, slot: EngineSlot) -> RemoteEngine:
        """Begin a process in a slot that is reserved."""
        assert slot.option is not None, "the slot is reserved first"
        actor_id, node_id, spec = slot.next_id(), slot.node_id, self._spec
        actor = ray.remote(RolloutProcess).options(max_concurrency=MAX_CALLS, **slot.option)
        handle = actor.remote(
            self._config,
            actor_id=actor_id,
            queue=spec.queue,
            model_dir=spec.model_dir,
            device=spec.device,
            cores=slot.where.cores,
            partials=spec.partials,
            actors=len(self._slots),
        )
        slot.engine = self._running[actor_id] = RemoteEngine(
            actor_id,
            slot.index,
            self._slots.address(node_id),
            self._config.cluster.engine.tensor_parallel_size,
            handle,
            lambda announcement: self._relays.local(announcement, node_id),
        )
        return slot.engine

    async def load(self, engine: RemoteEngine) -> None:
        """Load its model. Raises TimeoutError, RayError."""
        seconds = self._config.watchdog.start_timeout_s
        try:
            engine.max_num_seqs = await asyncio.wait_for(
                engine.handle.start.remote(backend=self._spec.backend, label=UNPUBLISHED), seconds
            )
        except TimeoutError as error:
            raise TimeoutError(
                f"starting {engine.actor_id} took longer than watchdog.start_timeout_s = "
                f"{seconds:g} s"
            ) from error

    def kill(self, engine: RemoteEngine) -> None:
        """End a process at once."""
        engine.give_up(RunError("its process is ended"))
        ray.kill(engine.handle)
        self._running.pop(engine.actor_id, None)

    async def close(self, asked: Sequence[RemoteEngine]) -> None:
        """End all processes; those that are asked may close their engines within a deadline."""
        closing = [asyncio.ensure_future(settled(one.handle.close.remote())) for one in asked]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_TIMEOUT_S)
        for engine in self.all():  # starting ones included
            self.kill(engine)
