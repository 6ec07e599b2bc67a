"""A rollout actor as driver and coordinator see it.

Runs in: the driver. Hides Ray's handle.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from async_grpo.replay.partial import PartialStart
from async_grpo.runtime.text import last_line
from async_grpo.weights.transport import Announcement, Receipt, TokenSequence


@dataclass
class RemoteEngine:
    """One rollout actor process for driver and coordinator. localize: to what its node needs."""

    actor_id: str
    slot: int
    tensor_parallel_size: int
    handle: Any
    localize: Callable[[Announcement], Awaitable[Announcement]]
    acknowledged: str = ""
    """Label of the last weights that the engine took."""
    max_num_seqs: int = 0
    """Responses that it generates at the same time; known once it has started."""

    async def connect(self, payload: dict[str, Any]) -> Receipt:
        """Prepare the engine for publications."""
        return await self.handle.connect.remote(payload)

    async def receive(self, announcement: Announcement) -> Receipt:
        """Let the engine take and serve the announced weights."""
        try:
            local = await self.localize(announcement)
        # the relay's fault: the engine is well and takes the publication when it is repeated
        except ray.exceptions.RayError as error:
            why = f"the bytes did not reach its node: {last_line(error)}"
            return Receipt("", "torn", why)
        receipt = await self.handle.receive.remote(local)
        self.acknowledged = receipt.serving if not receipt.failure else self.acknowledged
        return receipt

    async def attend(self, announcement: Announcement) -> Receipt:
        """Let the engine take part in a publication that is pushed, without loading it."""
        return await self.handle.attend.remote(announcement)

    async def score(self, sequences: list[TokenSequence]) -> list[tuple[list[str], np.ndarray]]:
        """Log-probs of these responses, with the labels of the weights."""
        return await self.handle.score.remote(sequences)

    async def partials(self) -> list[tuple[PartialStart, bytes]]:
        """Partial responses of the groups that are being generated."""
        return await self.handle.partials.remote()

    async def probe_sequences(self) -> list[tuple[list[int], list[int], np.ndarray]]:
        """Return a few short responses as (prompt, response, log-probs)."""
        return await self.handle.probe_sequences.remote()
