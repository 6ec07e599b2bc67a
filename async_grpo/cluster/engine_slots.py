"""The places of a run's engines: which there are, where another would go, reserve one and give it
back.

Runs in: the driver. Hides reservations and which nodes can be used. Invariants: a place that is
given back leaves no reservation; room in which processes died more often than is allowed is not
used again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from async_grpo.cluster.placement import Node, Placement, Slot, another
from async_grpo.cluster.session import Session
from async_grpo.config.schema import Config


@dataclass(eq=False)
class EngineSlot:
    """Room for one engine. `option` are the Ray options of its reservation, `engine` the process in
    it, once there is one.
    """

    index: int
    slot: Slot
    option: dict[str, Any] | None = None
    engine: Any = None
    incarnations: int = 0
    leaving: bool = False
    filling: asyncio.Task[None] | None = None
    """What starts a process there."""

    def next_id(self) -> str:
        """An actor id that no process had before."""
        self.incarnations += 1
        return f"actor-{self.index}.{self.incarnations - 1}"


class EngineSlots:
    """All places by index. `limit` is how many there may be without being asked for; None is as
    many as have room.
    """

    def __init__(
        self,
        config: Config,
        *,
        session: Session,
        placement: Placement,
        options: Sequence[dict[str, Any]],
    ) -> None:
        self._config, self._session, self._placement = config, session, placement
        self._places = {
            index: EngineSlot(index, slot, option)
            for index, (slot, option) in enumerate(zip(placement.engines, options, strict=True))
        }
        self._opened = len(self._places)
        self._given_up: list[Slot] = []
        self._addresses = {node.node_id: node.address for node in session.nodes()}
        self._sees_run_dir = {
            slot.node_id: True for slot in (*placement.learners, *placement.engines)
        }
        self.limit = config.cluster.rollout_actors.max

    def __len__(self) -> int:
        return len(self._places)

    def all(self) -> list[EngineSlot]:
        """In the order in which they were opened."""
        return list(self._places.values())

    def get(self, index: int) -> EngineSlot | None:
        """The place with this index, unless it was given back."""
        return self._places.get(index)

    def address(self, node_id: str) -> str:
        """A node's address, also after it is gone."""
        return self._addresses[node_id]

    async def nodes(self) -> list[Node]:
        """Living nodes."""
        nodes = await asyncio.to_thread(self._session.nodes)
        self._addresses |= {node.node_id: node.address for node in nodes}
        return nodes

    def room(self, nodes: Sequence[Node], *, crowd: bool = False) -> Slot | None:
        """Where another engine would go; `crowd` is that of `placement.another`."""
        taken = [*[place.slot for place in self._places.values()], *self._given_up]
        usable = [node for node in nodes if self._sees_run_dir.get(node.node_id, True)]
        return another(self._config, self._placement, usable, taken, crowd=crowd)

    def open(self, slot: Slot) -> EngineSlot:
        """A new place, not yet reserved."""
        place = self._places[self._opened] = EngineSlot(self._opened, slot)
        self._opened += 1
        return place

    async def reserve(self, place: EngineSlot) -> None:
        """Reserve a new place, on a node that sees the run's directory. Raises SetupError, or
        RayError when the node goes away meanwhile.
        """
        node_id, timeout_s = place.slot.node_id, self._config.cluster.resources_timeout_s
        if node_id not in self._sees_run_dir:
            await self._session.check_shared_storage(
                self._config.run.dir, {node_id}, timeout_s=timeout_s
            )
            self._sees_run_dir[node_id] = True
        [place.option] = await self._session.reserve([place.slot], timeout_s=timeout_s)

    async def reserved_again(self, place: EngineSlot) -> bool:
        """Whether the place still has its resources, or has them again within
        `cluster.resources_timeout_s`.
        """
        return await self._session.reserved_again(
            place.option, timeout_s=self._config.cluster.resources_timeout_s
        )

    async def node_serves(self, place: EngineSlot) -> bool:
        """Whether the place's node still runs processes."""
        return await self._session.node_serves(
            place.slot.node_id, timeout_s=self._config.cluster.resources_timeout_s
        )

    def drop(self, place: EngineSlot) -> None:
        """The place is none any more. Its reservation stays until `release`."""
        self._places.pop(place.index, None)

    def give_up(self, place: EngineSlot) -> None:
        """Open no other place in this room."""
        self._given_up.append(place.slot)

    def refuse(self, node_id: str) -> None:
        """Open no place on this node, which does not see the run's directory."""
        self._sees_run_dir.setdefault(node_id, False)

    def release(self, place: EngineSlot) -> None:
        """Give the reservation back."""
        if (
            place.option is not None and not self._placement.colocated
        ):  # there the learner's rank holds the same reservation
            self._session.release(place.option)
