"""The slots of a run's engines, and the processes in them: find room for another, reserve, begin,
load, end, give back.

Runs in: the driver. Hides that an engine is a Ray actor and what it starts with, reservations, and
which nodes can be used; knows nothing of budgets and of the live set. Invariants: a slot that is
given back leaves no reservation; room in which processes died more often than is allowed is not
used again; no process outlives `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from async_grpo.cluster.placement import Node, Placement, Slot, another, shared_threads
from async_grpo.cluster.queue import MAX_CALLS
from async_grpo.cluster.relays import Relays
from async_grpo.cluster.remote_engine import RemoteEngine, RolloutProcess
from async_grpo.cluster.session import RaySession, settled
from async_grpo.config.schema import Config
from async_grpo.errors import RunError
from async_grpo.tasks.mixture import ProblemOrder
from async_grpo.weights.transport import UNPUBLISHED

CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ActorSpec:
    """What rollout actors start with. queue: Ray actor. frozen: those of the frozen models.
    partials: `PartialCollector.path`. env_vars: `task.env_vars` with their values. order: problems
    by group, as the run has them.
    """

    queue: Any
    model_dir: str
    device: str
    backend: str
    partials: str | None = None
    frozen: Mapping[str, Any] = field(default_factory=dict)
    env_vars: Mapping[str, str] = field(default_factory=dict, repr=False)
    order: ProblemOrder | None = None


@dataclass(eq=False)
class EngineSlot:
    """Room for one engine: node and cores, Ray options once reserved, `RemoteEngine` once begun."""

    index: int
    where: Slot
    option: dict[str, Any] | None = None
    engine: Any = None
    incarnations: int = 0
    leaving: bool = False
    filling: asyncio.Task[None] | None = None
    """Task that starts a process here."""

    @property
    def node_id(self) -> str:
        """Node of the slot."""
        return self.where.node_id

    def next_id(self) -> str:
        """Make an actor id that no process had before."""
        self.incarnations += 1
        return f"actor-{self.index}.{self.incarnations - 1}"


class EngineSlots:
    """All slots by index, and all processes that were begun and not ended. limit: how many slots
    may open by themselves; None is as many as have room.
    """

    def __init__(
        self,
        config: Config,
        *,
        session: RaySession,
        placement: Placement,
        options: Sequence[dict[str, Any]],
        spec: ActorSpec,
        relays: Relays,
    ) -> None:
        """options: Ray's, one per engine."""
        self._config, self._session = config, session
        self._placement, self._spec = placement, spec
        self._relays = relays
        self._running: dict[str, RemoteEngine] = {}
        self._slots = {
            index: EngineSlot(index, where, option)
            for index, (where, option) in enumerate(zip(placement.engines, options, strict=True))
        }
        self._opened = len(self._slots)
        self._given_up: list[Slot] = []
        self._addresses = {node.node_id: node.address for node in session.nodes()}
        self._sees_run_dir = {
            where.node_id: True for where in (*placement.learners, *placement.engines)
        }
        self._timeout_s = config.cluster.resources_timeout_s
        self.limit = config.cluster.rollout_actors.max

    def __len__(self) -> int:
        return len(self._slots)

    def processes(self) -> Sequence[RemoteEngine]:
        """Return the processes, serving or not."""
        return tuple(self._running.values())

    def all(self) -> list[EngineSlot]:
        """All slots in the order in which they were opened."""
        return list(self._slots.values())

    def get(self, index: int) -> EngineSlot | None:
        """Return the slot with this index, unless it was given back."""
        return self._slots.get(index)

    def address(self, node_id: str) -> str:
        """Return a node's address, also after it is gone."""
        return self._addresses[node_id]

    async def nodes(self) -> list[Node]:
        """Living nodes."""
        nodes = await asyncio.to_thread(self._session.nodes)
        self._addresses |= {node.node_id: node.address for node in nodes}
        return nodes

    def room(self, nodes: Sequence[Node], *, crowd: bool = False) -> Slot | None:
        """Where another engine would go; `crowd` is that of `placement.another`."""
        taken = [*[slot.where for slot in self._slots.values()], *self._given_up]
        usable = [node for node in nodes if self._sees_run_dir.get(node.node_id, True)]
        return another(self._config, self._placement, usable, taken, crowd=crowd)

    def free_room(self, nodes: Sequence[Node]) -> Slot | None:
        """Where another engine would go; None also where as many are open as may be."""
        return self.room(nodes) if self.limit is None or len(self) < self.limit else None

    def lost_nodes(self, nodes: Sequence[Node]) -> set[str]:
        """Nodes of slots that are not among the living ones."""
        return {slot.node_id for slot in self.all()} - {node.node_id for node in nodes}

    def open(self, where: Slot) -> EngineSlot:
        """Open a slot, not yet reserved."""
        slot = self._slots[self._opened] = EngineSlot(self._opened, where)
        self._opened += 1
        return slot

    async def reserve(self, slot: EngineSlot) -> None:
        """Reserve a new slot on a node that sees `run.dir`. Raises SetupError or RayError."""
        session, seconds, node_id = self._session, self._timeout_s, slot.node_id
        if node_id not in self._sees_run_dir:
            await session.check_shared_storage(self._config.run.dir, {node_id}, timeout_s=seconds)
            self._sees_run_dir[node_id] = True
        [slot.option] = await session.reserve([slot.where], timeout_s=seconds)

    async def reserved_again(self, slot: EngineSlot) -> bool:
        """Whether the slot has its resources, at the latest in `cluster.resources_timeout_s`."""
        assert slot.option is not None, "reserve() comes first"
        return await self._session.reserved_again(slot.option, timeout_s=self._timeout_s)

    async def node_serves(self, slot: EngineSlot) -> bool:
        """Whether the slot's node still runs processes."""
        return await self._session.node_serves(slot.node_id, timeout_s=self._timeout_s)

    def drop(self, slot: EngineSlot) -> None:
        """Forget the slot. Its reservation stays until `release`."""
        self._slots.pop(slot.index, None)

    def give_up(self, slot: EngineSlot) -> None:
        """Open no other slot in this room."""
        self._given_up.append(slot.where)

    def refuse(self, node_id: str) -> None:
        """Open no slot on this node, which does not see the run's directory."""
        self._sees_run_dir.setdefault(node_id, False)

    def release(self, slot: EngineSlot) -> None:
        """Give the reservation back; colocated, the learner's rank still holds it."""
        if slot.option is not None and not self._placement.colocated:
            self._session.release(slot.option)

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
            threads=shared_threads(self._config, self._placement, slot.where),
            partials=spec.partials,
            actors=len(self),
            frozen=spec.frozen,
            env_vars=spec.env_vars,
            order=spec.order,
        )
        slot.engine = self._running[actor_id] = RemoteEngine(
            actor_id,
            slot.index,
            self.address(node_id),
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
        for engine in self.processes():  # starting ones included
            self.kill(engine)
