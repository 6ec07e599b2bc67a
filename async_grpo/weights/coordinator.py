"""The order of a publication, in one place.

Runs in: the driver. Drives two sides through protocols only, the learner group and the engines:

    publish(version):  wait for the previous publication -> learner.stage ->
                       [ engines.receive || learner.send ] -> queue.live -> drift probes
                       |<-- learner waits ->|<- with `overlap`, the next step runs here ->|

    an engine:         connect -> load-path check (perturbed weights) -> the newest weights ->
                       serving -> pinned: away -> the newest weights -> serving

How the weights come to the engines, and who takes part, is the delivery's (`deliveries`).

Invariants: at most one publication is under way; a version is declared live only when every
connected engine of the set serves it (an engine that is not connected serves nothing yet and holds
no tickets); a publication completes on all of them or is repeated, without the engines that died or
did not answer, which the manager drops and whose tickets it forfeits; wrong bytes, names or
log-probs end the run.

Engines that pull (shared memory, IPC) join at once: they read the newest copy. With a transport
that pushes (NCCL) a newcomer waits for the next boundary between learner steps, where the group is
formed again with the newcomer and the current weights are sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Generic, Protocol

from async_grpo.config.schema import Config
from async_grpo.config.transports import TRANSPORTS
from async_grpo.errors import LearnerLost, RunError
from async_grpo.runtime.listener import RunListener
from async_grpo.weights.checks import DriftProbe, Tolerance
from async_grpo.weights.deliveries import (
    DeliveringLearner,
    PublicationTimes,
    PullDelivery,
    PushDelivery,
    WeightDelivery,
)
from async_grpo.weights.fan_out import Engine, consume_exception
from async_grpo.weights.pinning import EngineSet, Pin, ServingEngines, wait_unpinned
from async_grpo.weights.shared_gpu import Apart
from async_grpo.weights.transport import Announcement, Staged, TokenSequence, Version, parse_label


class PublishingLearner(DeliveringLearner, Protocol):
    """The learner group as the coordinator sees it."""

    async def stage(self, label: str, *, verify: bool, sequences: list[TokenSequence]) -> Staged:
        """Copy the weights out of the model, and compute their log-probs of the sequences."""

    async def back(self) -> None:
        """Wait until a lost learner has been started again, or the run has ended."""


class Coordinator(Generic[Engine]):
    """Publishes the learner's weights to every engine."""

    def __init__(
        self,
        config: Config,
        *,
        learner: PublishingLearner,
        engines: EngineSet[Engine],
        backend: str,
        live: Callable[[int, str], Awaitable[None]],
        exact: bool,
        listener: RunListener,
        run_epoch: int = 0,
        gpu: Apart | None = None,
    ) -> None:
        """exact: learner and engines compute in float32. live(step, digest): tell the queue. gpu:
        whose turn it is on shared GPUs.
        """
        self._settings, self._listener = config.weight_sync, listener
        self._learner, self._engines = learner, ServingEngines(engines, gpu or Apart())
        tolerance = Tolerance(exact)
        delivery = PushDelivery if TRANSPORTS[backend].pushes else PullDelivery
        self._delivery: WeightDelivery[Engine] = delivery(
            config,
            learner=learner,
            engines=self._engines,
            backend=backend,
            listener=listener,
            tolerance=tolerance,
        )
        self._live = live
        self.run_epoch = run_epoch
        """How often learner steps of the run were discarded: part of every label."""
        self._lock, self._check = self._delivery.lock, self._delivery.check
        self._lost: LearnerLost | None = None
        self._running: asyncio.Task[None] | None = None
        self._pin: Pin[Engine] | None = None
        self._probe = DriftProbe(config, tolerance, self._engines.gpu)
        self.held: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered while the learner waits for an evaluation that holds the newest version: the wait
        is a cost of the evaluation, not of the publication.
        """

    async def start(self, version: int) -> dict[str, float]:
        """Connect engines, check load path and sampler, make `version` live. Returns metrics."""
        async with self._lock:
            engines, measured = list(self._engines.alive()), {}
            await self._delivery.connect(strict=True)
            if self._settings.self_check or self._settings.verify_every:
                answers = await self._check.responses(engines[0])
                sequences = [(prompt, response) for prompt, response, _ in answers]
                self._check.sequences = self._probe.sequences = sequences
            if self._settings.self_check:
                measured = await self._check.load_path(engines)
            digest = await self._publish_now(version, strict=True)
            if self._settings.self_check:
                measured |= await self._check.sampler(engines)
        await self._live(version, digest)
        self._delivery.times = PublicationTimes()  # of the run, without its start
        return measured

    async def publish(self, version: int) -> float:
        """Publish the current weights as `version`; returns the seconds that the learner waited."""
        started = time.perf_counter()
        await self.wait()
        self._probe.raise_findings()
        # an evaluation may have pinned the version while the previous publication was under way
        started += await wait_unpinned(lambda: self._pin, self.held)
        await self._lock.acquire()  # `_finish` releases it
        try:
            await self._delivery.regroup()
            verify = self._probe.due(self.times.count)
            sequences = self._probe.sequences if verify or self._probe.owed else []
            staged = await self._learner.stage(
                self._label(version), verify=verify, sequences=sequences
            )
            if sequences:
                self._probe.expect(staged.announcement.label, staged.logprobs)
            if not staged.announcement.streamed:
                await self._delivery.begin(staged.announcement)
        except BaseException:
            self._lock.release()
            raise
        self._running = asyncio.create_task(
            self._finish(staged.announcement, version, verify=verify)
        )
        self._running.add_done_callback(consume_exception)
        if not self._settings.overlap or staged.announcement.streamed:
            await self.wait()
        waited = time.perf_counter() - started
        self.times.learner_waited += waited
        return waited

    @property
    def times(self) -> PublicationTimes:
        """What the publications so far took."""
        return self._delivery.times

    @property
    def live_version(self) -> int:
        """Newest version that every serving engine has taken; -1 before the first."""
        newest = self._delivery.newest
        return -1 if newest is None else parse_label(newest.label).step

    def weight_metrics(self) -> dict[str, float]:
        """Metrics of the publications so far, and of the drift probes."""
        return self.times.metrics() | self._probe.metrics()

    def serving(self) -> list[Engine]:
        """Engines that serve the newest publication while none is under way; a newcomer is alive
        before it serves, where the transport pushes.
        """
        return self._delivery.serving()

    async def wait(self) -> None:
        """Wait for the publication under way; raises what it raised."""
        if self._running is not None:
            await asyncio.wait({self._running})  # cancelling the wait does not cancel the task
            self._running.result()

    async def settle(self) -> None:
        """Wait for the publication under way and its drift probes; raises their findings."""
        await self.wait()
        await self._probe.settle()
        self._probe.raise_findings()

    async def join(self, engine: Engine, admit: Callable[[], None]) -> None:
        """Bring a newcomer to the newest published weights and `admit` it to the set before another
        publication can begin.

        A transport that pushes admits the newcomer at once and serves it at the next boundary.
        Raises what keeps the newcomer out; SelfCheckFailed and SetupError end the run.
        """
        while True:
            try:
                await self._delivery.join(engine, admit)
            # not the newcomer's fault, which waits for the next learner
            except LearnerLost as error:
                self.learner_lost(error)
                await self._learner.back()
            else:
                return

    @asynccontextmanager
    async def pinned(self) -> AsyncIterator[Pin[Engine]]:
        """Inside the block the version that is newest at its begin is kept: by one engine that
        leaves the set and comes back like a newcomer, while publications go on; where no other
        engine would be left, by all engines, and the next publication waits.
        """
        async with self._lock:
            assert self._delivery.newest is not None, "start() comes first"
            serving, label = self.serving(), self._delivery.newest.label
            if len(serving) < 2:
                with Pin[Engine](label) as self._pin:
                    yield self._pin
                return
            engine = serving[-1]
            self._engines.leave(engine)
            self._delivery.leave(engine)
        try:
            yield Pin(label, engine)
        except asyncio.CancelledError:  # the run ends
            raise
        except BaseException:
            await self._return(engine, label)
            raise
        await self._return(engine, label)

    async def _return(self, engine: Engine, label: str) -> None:
        """Re-admit an engine that was away, and serves `label`, at the newest version, or where the
        transport pushes with the next publication; drop it if it cannot load.
        """
        if not self._delivery.joins_at_once or not self._engines.lives(engine):
            async with self._lock:
                self._engines.back(engine)
                self._delivery.back(engine, label)
            return
        try:
            await self.join(engine, lambda: self._engines.back(engine))
        except RunError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever its process died of
            await self._engines.drop(engine.actor_id, error)

    @asynccontextmanager
    async def without_learner(self) -> AsyncIterator[None]:
        """Wait, when the learner is gone, for the end of the publication under way, whatever its
        result; inside the block, which ends with `relink`, no other begins.
        """
        if self._running is not None:
            await asyncio.wait({self._running})
            self._running = None
        async with self._delivery.joining, self._lock:
            yield
            self._lost = None

    async def relink(self, version: int, *, run_epoch: int) -> None:
        """In `without_learner`: connect all engines to the new learner and make `version` live."""
        self.run_epoch = run_epoch
        await self._delivery.connect()
        await self._live(version, await self._publish_now(version))

    def learner_lost(self, error: LearnerLost) -> None:
        """Record a learner death; `refresh` raises it, because a loop that waits for groups makes
        no other call to the learner.
        """
        self._lost = error

    async def refresh(self, version: int) -> None:
        """Between learner steps: raise findings of publications and drift probes; wake engines, but
        not before weights that are on their way; where the transport pushes, form a new group with
        newcomers and send all of it the current weights, `version`; also where an engine has come
        back, and the next publication is steps away.
        """
        self._probe.raise_findings()
        if self._lost is not None:
            raise self._lost
        if self._running is not None and self._running.done():
            await self.wait()
        if not self._lock.locked():
            async with self._engines.gpu.turn("engines"):
                pass
        if self._delivery.waits(long=self._settings.every_steps > 1):
            await self.wait()
            async with self._lock:
                await self._delivery.regroup()
                digest = await self._publish_now(version)
            await self._live(version, digest)

    @asynccontextmanager
    async def between_publications(self) -> AsyncIterator[None]:
        """Inside the block no publication is under way, so an engine may leave."""
        async with self._lock:
            yield

    async def close(self) -> None:
        """End the drift probes."""
        await self._probe.close()

    async def _publish_now(self, version: int, *, strict: bool = False) -> str:
        """Stage, verify and deliver the current weights, while the learner waits; their digest."""
        staged = await self._learner.stage(self._label(version), verify=True, sequences=[])
        await self._delivery.deliver(staged.announcement, strict=strict)
        return staged.announcement.digest

    async def _finish(self, announcement: Announcement, version: int, *, verify: bool) -> None:
        started = time.perf_counter()
        try:
            await self._delivery.deliver(announcement, begun=not announcement.streamed)
        finally:
            self._lock.release()
        await self._live(version, announcement.digest)
        self.times.wall += (seconds := time.perf_counter() - started)
        self._listener.published(version, seconds)
        self.times.count += 1
        self._probe.start(self.serving(), all_of_them=verify)

    def _label(self, version: int) -> str:
        return Version(self.run_epoch, version).label
