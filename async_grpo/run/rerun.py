"""A learner alone, on the batches that another run recorded.

Runs in: the driver. Starts the learner ranks and a queue that serves a journal; no engine, no
rollout actor, nothing is published:

    journal -> RecordedQueue -- metadata --> StepTrainer.repeat -> learner ranks -> digest of the
        weights, compared with the recorded one

Invariant: everything between a batch and the weights is the same code as in a run, so with the same
settings and ranks the weights are the same bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from async_grpo.cluster.learner_group import LearnerGroup
from async_grpo.cluster.placement import lent_cores, without_engines
from async_grpo.cluster.queue import MAX_CALLS, REOPEN_TIMEOUT_S
from async_grpo.cluster.session import RaySession
from async_grpo.config.schema import Config
from async_grpo.errors import Stalled
from async_grpo.replay.history import RecordedQueue
from async_grpo.run.loop import Comparison, StepListener, StepTrainer
from async_grpo.runtime import stacks
from async_grpo.runtime.cores import Lender
from async_grpo.weights.transport import Version
from async_grpo.wire.codec import Batch


class Rerun:
    """One repetition, on its way. `loop` is None until the learner has started."""

    def __init__(
        self, config: Config, *, total_steps: int, weights: dict[str, float], key: str
    ) -> None:
        """total_steps: of the recorded run, for the learning rate. weights: of the rewards."""
        self._config = config
        self._total_steps = total_steps
        self._weights = weights
        self._key = key
        self._learner: LearnerGroup | None = None
        self._queue: Any = None
        self._lender: Lender | None = None
        self.loop: StepTrainer | None = None

    async def run(
        self,
        session: RaySession,
        source: str,
        *,
        model_dir: str,
        checkpoint: str | None,
        first: int,
        last: int,
        listener: StepListener,
    ) -> Comparison:
        """Train steps of the journal in `source`. checkpoint: the learner's; None: the model."""
        config = self._config
        placement = await session.wait_for_room(without_engines(config))
        options = await session.reserve(
            list(placement.learners), timeout_s=config.cluster.resources_timeout_s
        )
        queue = self._queue = session.start_here(RecordedQueue, source, max_concurrency=MAX_CALLS)
        learner = self._learner = LearnerGroup(
            config,
            placement=placement,
            options=options,
            queue=queue,
            model_dir=model_dir,
            backend="shared_memory",
            key=self._key,
            total_updates=self._total_steps * config.updates_per_step,
        )
        self._lender = Lender(stacks.home(config.run.dir), lent_cores(config, placement))
        self._lender.start()
        await learner.start(checkpoint)
        await learner.connect([])
        batches = RecordedBatches(queue)
        recorded = await batches.digests()
        self.loop = StepTrainer(
            config,
            queue=batches,
            learner=learner,
            weights=self._weights,
            total_steps=last,
            steps_done=first - 1,
            listener=listener,
            row_state=None if learner.state is None else learner.state["rows"],
        )

        async def digest(version: int) -> str:
            staged = await learner.stage(Version(0, version).label, verify=False, sequences=[])
            return staged.announcement.digest

        with self.loop.time.during("working"):
            return await self.loop.repeat(last, recorded=recorded, digest=digest)

    async def stop(self, *, orderly: bool = True) -> None:
        """Stop the learner and the queue."""
        if self._lender is not None:
            self._lender.stop()
        if self._learner is not None:
            await self._learner.stop()
        if self._queue is not None:
            RaySession.end(self._queue)


class RecordedBatches:
    """The recorded queue as the loop sees it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def get_batch(self, step: int) -> Batch:
        """Return the recorded batch. Raises SetupError where the journal has none."""
        return await self._asked(self._handle.get_batch.remote(step))

    async def digests(self) -> dict[int, str]:
        """Return the recorded digests of the weights, by version."""
        return await self._asked(self._handle.digests.remote())

    async def metrics(self) -> dict[str, float]:
        """Return nothing: a journal has no queue to measure."""
        return {}

    @staticmethod
    async def _asked(reference: Awaitable[Any]) -> Any:
        try:
            return await asyncio.wait_for(reference, REOPEN_TIMEOUT_S)
        except TimeoutError as error:
            raise Stalled(
                f"the recorded journal could not be read within {REOPEN_TIMEOUT_S:g} s"
            ) from error
