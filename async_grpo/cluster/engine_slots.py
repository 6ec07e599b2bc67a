"""The slots of a run's engines: list them, find room for another, reserve and give back.

Runs in: the driver. Hides reservations and which nodes can be used. Invariants: a slot that is
given back leaves no reservation; room in which processes died more often than is allowed is not
used again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from async_grpo.cluster.placement import Node, Placement, Slot, another
from async_grpo.cluster.session import RaySession
from async_grpo.config.schema import Config


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
    """All slots by index. limit: how many may open by themselves; None is as many as have room."""

    def __init__(
        self,
        config: Config,
        *,
        session: RaySession,
        placement: Placement,
        options: Sequence[dict[str, Any]],
    ) -> None:
        self._config, self._session = config, session
        self._placement = placement
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
