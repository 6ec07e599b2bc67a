"""A learner alone, on the batches that another run recorded.

Runs in: the driver. Starts the learner ranks and a queue that repeats a journal; no engine, no
rollout actor, nothing is published:

    journal -> RecordedQueue -- metadata --> loop -> learner ranks -> digest of the weights,
        compared with the recorded one

Invariant: everything between a batch and the weights is the same code as in a run, so with the same
settings and ranks the weights are the same bits.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import ray

from async_grpo.cluster.learner_group import LearnerGroup
from async_grpo.cluster.processes import CALL_TIMEOUT_S, MAX_CALLS
from async_grpo.cluster.queue import RecordedProcess
from async_grpo.cluster.session import Session
from async_grpo.config.schema import Config
from async_grpo.loop import Loop, StepListener
from async_grpo.runtime import stacks
from async_grpo.weights.shared_memory import remove_segments
from async_grpo.weights.transport import Version, fallback_directory


@dataclass
class Comparison:
    """Versions whose weights are the recorded ones bit for bit, versions that differ, and versions
    without a recorded digest.
    """

    same: list[int] = field(default_factory=list)
    different: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)


class _Digests:
    """What the loop takes for a publisher: it only looks at the weights."""

    def __init__(self, learner: LearnerGroup, recorded: dict[int, str]) -> None:
        self._learner = learner
        self._recorded = recorded
        self.comparison = Comparison()

    async def publish(self, version: int) -> float:
        digest = (
            await self._learner.stage(Version(0, version).label, verify=False, sequences=[])
        ).announcement.digest
        expected = self._recorded.get(version)
        known = self.comparison.same if digest == expected else self.comparison.different
        (self.comparison.unknown if not digest or expected is None else known).append(version)
        return 0.0

    def weight_metrics(self) -> dict[str, float]:
        return {"weights/differ": float(len(self.comparison.different))}

    async def refresh(self, version: int) -> None: ...
    async def settle(self) -> None: ...


class Rerun:
    """One repetition: connect, run, disconnect."""

    def __init__(
        self, config: Config, *, source: str, total_steps: int, weights: dict[str, float], key: str
    ) -> None:
        """source: directory of the journal. total_steps: of the recorded run, for the learning
        rate. weights: of the rewards.
        """
        self._config = config
        self._source = source
        self._total_steps = total_steps
        self._weights = weights
        self._key = key
        self._session: Session | None = None
        self._learner: LearnerGroup | None = None
        self.loop: Loop | None = None

    def connect(self) -> None:
        """Join or start Ray; from the main thread."""
        self._session = Session.open(processes=self._config.learner.ranks + 1)

    async def run(
        self,
        *,
        model_dir: str,
        checkpoint: str | None,
        first: int,
        last: int,
        listener: StepListener,
    ) -> Comparison:
        """Train the recorded steps `first` to `last`. checkpoint: the learner's, of the step
        before; None starts from the model.
        """
        config, session = self._config, self._session
        placement = await session.wait_for_room(config)
        options = await session.reserve(
            list(placement.learners), timeout_s=config.cluster.resources_timeout_s
        )
        queue = (
            ray.remote(RecordedProcess)
            .options(max_concurrency=MAX_CALLS, **session.on_this_node())
            .remote(self._source)
        )
        self._learner = LearnerGroup(
            config,
            placement=placement,
            options=options,
            queue=queue,
            model_dir=model_dir,
            backend="shared_memory",
            key=self._key,
            total_updates=self._total_steps * config.updates_per_step,
        )
        await self._learner.start(checkpoint)
        await self._learner.connect([])
        digests = _Digests(
            self._learner, await asyncio.wait_for(queue.digests.remote(), CALL_TIMEOUT_S)
        )
        loop = self.loop = Loop(
            config,
            queue=_Client(queue),
            learner=self._learner,
            publisher=digests,
            weights=self._weights,
            total_steps=last,
            steps_done=first - 1,
            listener=listener,
            row_state=None if self._learner.state is None else self._learner.state["rows"],
        )
        while loop.steps_done < last:
            await loop.step()
        return digests.comparison

    async def stop(self, *, orderly: bool = True) -> None:
        """Stop the learner."""
        if self._learner is not None:
            await self._learner.stop()

    def disconnect(self) -> None:
        """Leave Ray, or end the cluster that was started here."""
        if self._session is not None:
            self._session.close()
        stacks.end(stacks.home(self._config.run.dir))
        remove_segments(self._key, fallback_directory(self._config))


class _Client:
    """The recorded queue as the loop sees it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def get_batch(self, step: int) -> Any:
        return await asyncio.wait_for(self._handle.get_batch.remote(step), CALL_TIMEOUT_S)

    async def metrics(self) -> dict[str, float]:
        return {}
