"""One rollout actor process, as the driver and the coordinator see it.

Runs in: the driver. Hides that it is a Ray actor, and on which node.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from async_grpo.weights.base import Announcement, Receipt, TokenSequence


@dataclass
class RemoteEngine:
    """`localize` gives an announcement the form that this engine's node needs."""

    actor_id: str
    slot: int
    tensor_parallel_size: int
    handle: Any
    localize: Callable[[Announcement], Awaitable[Announcement]]

    async def connect(self, payload: dict[str, Any]) -> Receipt:
        return await self.handle.connect.remote(payload)

    async def receive(self, announcement: Announcement) -> Receipt:
        return await self.handle.receive.remote(await self.localize(announcement))

    async def score(self, sequences: list[TokenSequence]) -> list[tuple[list[str], np.ndarray]]:
        return await self.handle.score.remote(sequences)

    async def probe_sequences(self) -> list[tuple[list[int], list[int], np.ndarray]]:
        return await self.handle.probe_sequences.remote()
