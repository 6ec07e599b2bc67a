"""One rollout actor process, as the driver and the coordinator see it.

Runs in: the driver. Hides that it is a Ray actor, and on which node.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from async_grpo.replay.continued import Beginning
from async_grpo.weights.base import Announcement, Receipt, TokenSequence


@dataclass
class RemoteEngine:
    """`localize` gives an announcement the form that this engine's node needs."""

    actor_id: str
    slot: int
    tensor_parallel_size: int
    handle: Any
    localize: Callable[[Announcement], Awaitable[Announcement]]
    acknowledged: str = ""
    """Label of the last weights that it took."""

    async def connect(self, payload: dict[str, Any]) -> Receipt:
        return await self.handle.connect.remote(payload)

    async def receive(self, announcement: Announcement) -> Receipt:
        try:
            local = await self.localize(announcement)
        except ray.exceptions.RayError as error:  # the relay's fault: the engine is well and takes the publication when it is repeated
            return Receipt("", "torn", f"the bytes did not reach its node: {str(error).strip().splitlines()[-1]}")
        receipt = await self.handle.receive.remote(local)
        self.acknowledged = receipt.serving if not receipt.failure else self.acknowledged
        return receipt

    async def score(self, sequences: list[TokenSequence]) -> list[tuple[list[str], np.ndarray]]:
        return await self.handle.score.remote(sequences)

    async def partials(self) -> list[tuple[Beginning, bytes]]:
        return await self.handle.partials.remote()

    async def probe_sequences(self) -> list[tuple[list[int], list[int], np.ndarray]]:
        return await self.handle.probe_sequences.remote()
