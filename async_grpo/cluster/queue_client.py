"""The replay queue as the driver sees it: every call has a deadline, and says who is late or gone.

Runs in: the driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import numpy as np
import ray

from async_grpo.cluster.processes import CALL_TIMEOUT_S, queue_died
from async_grpo.errors import Stalled
from async_grpo.replay.reports import Report, Spent
from async_grpo.wire import Batch

REOPEN_TIMEOUT_S = 600.0
"""Longest time the queue may take to read its journal again."""


class QueueClient:
    """The queue as the loop sees it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.engine_seconds: dict[str, Spent] = {}
        """Of every actor that told, by the time of the last `metrics`."""

    async def get_batch(self, step: int) -> Batch | None:
        return await self._call(self._handle.next_batch.remote(step))

    async def payload(self, step: int, group_ids: list[int]) -> np.ndarray:
        return await self._call(self._handle.payload.remote(step, group_ids))

    async def metrics(self) -> dict[str, float]:
        """Numbers to log; `engine_seconds` is renewed on the way."""
        metrics, self.engine_seconds = await self._call(self._handle.measurements.remote())
        return metrics

    async def tell(self, actor_id: str, report: Report) -> None:
        await self._call(self._handle.tell.remote(actor_id, report))

    async def live(self, version: int, digest: str) -> None:
        await self._call(self._handle.live.remote(version, digest))

    async def counts(self) -> dict[str, int]:
        return await self._call(self._handle.counts.remote())

    async def digests(self) -> dict[int, str]:
        return await self._call(self._handle.digests.remote(), timeout_s=REOPEN_TIMEOUT_S)

    async def obstacle(self, *, after: int, until: int) -> str:
        return await self._call(self._handle.obstacle.remote(after, until), timeout_s=REOPEN_TIMEOUT_S)

    async def progress(self) -> dict[str, int]:
        return await self._call(self._handle.progress.remote())

    async def discard(self, *, step: int, snapshot: dict[str, Any] | None, why: str) -> tuple[str, int]:
        return await self._call(self._handle.discard.remote(step, snapshot, why), timeout_s=REOPEN_TIMEOUT_S)

    async def history(self, group_ids: list[int]) -> dict[int, dict[str, Any]]:
        return await self._call(self._handle.history.remote(group_ids))

    async def held(self) -> dict[str, list[tuple[int, int]]]:
        return await self._call(self._handle.held.remote())

    async def opened(self, *, timeout_s: float) -> str | None:
        """Wait until the queue has read its journal; what it took over, in words."""
        return await self._call(self._handle.opened.remote(), timeout_s=timeout_s)

    async def forfeit(self, actor_id: str) -> None:
        await self._call(self._handle.forfeit.remote(actor_id))

    async def is_over(self) -> bool:
        return await self._call(self._handle.is_over.remote())

    async def snapshot(self) -> dict[str, Any]:
        return await self._call(self._handle.snapshot.remote())

    async def forget(self, *, segment: int, step: int) -> None:
        await self._call(self._handle.forget.remote(segment=segment, step=step))

    async def close(self, *, orderly: bool) -> None:
        await self._call(self._handle.close.remote(orderly=orderly))

    @staticmethod
    async def _call(reference: Awaitable[Any], *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        try:
            return await asyncio.wait_for(reference, timeout_s)
        except TimeoutError as error:
            raise Stalled(f"the replay queue did not answer within {timeout_s:g} s") from error
        except ray.exceptions.RayActorError as error:
            raise queue_died(error) from error
