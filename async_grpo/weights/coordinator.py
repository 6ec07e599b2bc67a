"""The order of a publication, in one place.

Runs in: the driver. Drives two sides through protocols only, the learner group and the engines:

    publish(version):  wait for the previous publication -> learner.stage ->
                       [ engines.receive || learner.send ] -> queue.live -> drift probes
                       |<-- learner waits ->|<- with `overlap`, the next step runs here ->|

    an engine:         connect -> load-path check (perturbed weights) -> the newest weights ->
                       serving -> pinned: away -> the newest weights -> serving

Invariants: at most one publication is under way; a version is declared live only when every
connected engine of the set serves it (an engine that is not connected serves nothing yet and holds
no tickets); a publication completes on all of them or is repeated, without the engines that died or
did not answer, which the manager drops and whose tickets it forfeits; wrong bytes, names or
log-probs end the run.

Engines that pull (shared memory, IPC) join at once: they read the newest copy. With a transport
that pushes (NCCL) a newcomer waits for the next boundary between learner steps, where the group is
formed again with the newcomer and the current weights are sent. An engine that is away stays in
the group: it takes part in publications without loading them, and serves the first one after its
return.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol

from async_grpo.config.schema import Config
from async_grpo.config.transports import TRANSPORTS
from async_grpo.errors import LearnerLost, RunError, SetupError, Stalled, TransferMismatch
from async_grpo.runtime.listener import LATE_S, RunListener
from async_grpo.weights.checks import CheckedLearner, DriftProbe, LoadPathCheck, Tolerance
from async_grpo.weights.fan_out import (
    GRACE_S,
    DeliveryOutcome,
    Engine,
    EngineHandle,
    call_all,
    consume_exception,
    grace,
    require_complete,
)
from async_grpo.weights.pinning import EngineSet, Pin, ServingEngines, wait_unpinned
from async_grpo.weights.transport import (
    Announcement,
    Receipt,
    Staged,
    TokenSequence,
    TornTransfer,
    TransferStuck,
    Version,
    parse_label,
)

ATTEMPTS = 3


@dataclass(slots=True)
class PublicationTimes:
    """Sums over the publications so far: seconds that the learner waited, that engines were paused
    (mean over engines) and until live; tokens that running responses had to compute again, and
    whose caches they kept; how often an engine kept caches; publications repeated and engines
    dropped because of a fault.
    """

    count: int = 0
    learner_waited: float = 0.0
    engines_paused: float = 0.0
    wall: float = 0.0
    recomputed_tokens: int = 0
    kept_tokens: int = 0
    caches_kept: int = 0
    repeated: int = 0
    dropped: int = 0

    def add(self, outcome: DeliveryOutcome) -> None:
        """Count the receipts of one delivery."""
        receipts = [one for one in outcome.done.values() if one.seconds]  # those that loaded it
        paused = sum(receipt.seconds["total"] for receipt in receipts)
        self.engines_paused += paused / max(1, len(receipts))
        self.recomputed_tokens += sum(receipt.recomputed_tokens for receipt in receipts)
        self.kept_tokens += sum(receipt.kept_tokens for receipt in receipts)
        self.caches_kept += sum(receipt.kept_tokens > 0 for receipt in receipts)

    def metrics(self) -> dict[str, float]:
        """Means per publication, and counts."""
        count = max(1, self.count)
        return {
            "weights/publications": float(self.count),
            "weights/learner_waited_s": self.learner_waited / count,
            "weights/engine_paused_s": self.engines_paused / count,
            "weights/until_live_s": self.wall / count,
            "weights/recomputed_tokens": self.recomputed_tokens / count,
            "weights/kept_tokens": self.kept_tokens / count,
            "weights/caches_kept": float(self.caches_kept),
            "weights/repeated": float(self.repeated),
            "weights/dropped_engines": float(self.dropped),
        }


class PublishingLearner(CheckedLearner, Protocol):
    """The learner group as the coordinator sees it."""

    async def connect(self, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]:
        """Prepare the transport for these engines; one init payload per engine."""

    async def rendezvous(self) -> str:
        """Complete the transport's group, while the engines connect; why it failed, or ""."""

    async def stage(self, label: str, *, verify: bool, sequences: list[TokenSequence]) -> Staged:
        """Copy the weights out of the model, and compute their log-probs of the sequences."""

    async def send(self, announcement: Announcement) -> str:
        """Push staged weights where the transport pushes; why the transfer is torn, or ""."""

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
    ) -> None:
        """exact: learner and engines compute in float32. live(step, digest): tell the queue."""
        self._settings, self._listener = config.weight_sync, listener
        self._learner, self._engines = learner, ServingEngines(engines)
        self._backend, self._pushes = backend, TRANSPORTS[backend].pushes
        self._live = live
        self.run_epoch = run_epoch
        """How often learner steps of the run were discarded: part of every label."""
        self._lock, self._joining = asyncio.Lock(), asyncio.Lock()
        self._newest: Announcement | None = None
        self._lost: LearnerLost | None = None
        self._running: asyncio.Task[None] | None = None
        self._pin: Pin[Engine] | None = None
        self._connected: set[str] = set()
        self._caches: dict[str, str] = {}
        self._group: set[str] = set()
        tolerance = Tolerance(exact)
        self._probe = DriftProbe(config, tolerance)
        self._check = LoadPathCheck(
            config, learner=learner, tolerance=tolerance, backend=backend, deliver=self._deliver_to
        )
        self.times = PublicationTimes()
        self.held: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered while the learner waits for an evaluation that holds the newest version: the wait
        is a cost of the evaluation, not of the publication.
        """

    async def start(self, version: int) -> dict[str, float]:
        """Connect engines, check load path and sampler, make `version` live. Returns metrics."""
        async with self._lock:
            engines, measured = list(self._engines.alive()), {}
            await self._connect(engines, strict=True)
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
        self.times = PublicationTimes()  # of the run, without its start
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
            await self._regroup()
            verify = self._probe.due(self.times.count)
            sequences = self._probe.sequences if verify or self._probe.owed else []
            staged = await self._learner.stage(
                self._label(version), verify=verify, sequences=sequences
            )
            if sequences:
                self._probe.expect(staged.announcement.label, staged.logprobs)
            if self._pushes and self._group and not staged.announcement.streamed:
                # begun in the background, before the next step can keep the learner busy
                await self._learner.send(staged.announcement)
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
    def live_version(self) -> int:
        """Newest version that every serving engine has taken; -1 before the first."""
        return -1 if self._newest is None else parse_label(self._newest.label).step

    def weight_metrics(self) -> dict[str, float]:
        """Metrics of the publications so far, and of the drift probes."""
        return self.times.metrics() | self._probe.metrics()

    def serving(self) -> list[Engine]:
        """Engines that serve the newest publication while none is under way; a newcomer is alive
        before it serves, where the transport pushes.
        """
        return [engine for engine in self._engines.alive() if engine.actor_id in self._connected]

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
        if self._pushes:
            admit()
            return
        while True:
            try:
                await self._join(engine, admit)
            # not the newcomer's fault, which waits for the next learner
            except LearnerLost as error:
                self.learner_lost(error)
                await self._learner.back()
            else:
                return

    async def _join(self, engine: EngineHandle, admit: Callable[[], None]) -> None:
        async with self._joining:
            [payload] = await self._learner.connect([engine.tensor_parallel_size])
            seconds = self._settings.deadlines.rendezvous_s
            require_complete(
                await self._ask(
                    [engine], lambda one: one.connect(payload), seconds=seconds, what="connecting"
                )
            )
            if self._settings.self_check and engine.actor_id not in self._check.passed:
                await self._check.load_path([engine])
            async with self._lock:
                assert self._newest is not None, "start() comes first"
                require_complete(await self._receive([engine], self._newest))
                self._connected.add(engine.actor_id)
                admit()

    @asynccontextmanager
    async def pinned(self) -> AsyncIterator[Pin[Engine]]:
        """Inside the block the version that is newest at its begin is kept: by one engine that
        leaves the set and comes back like a newcomer, while publications go on; where no other
        engine would be left, by all engines, and the next publication waits.
        """
        async with self._lock:
            assert self._newest is not None, "start() comes first"
            serving, label = self.serving(), self._newest.label
            if len(serving) < 2:
                with Pin[Engine](label) as self._pin:
                    yield self._pin
                return
            engine = serving[-1]
            self._engines.leave(engine)
            self._connected.discard(engine.actor_id)
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
        if self._pushes or not self._engines.lives(engine):
            async with self._lock:
                self._engines.back(engine)
                newest = self._newest
                if newest and engine.actor_id in self._group and label == newest.label:
                    self._connected.add(engine.actor_id)
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
        async with self._joining, self._lock:
            yield
            self._lost = None

    async def relink(self, version: int, *, run_epoch: int) -> None:
        """In `without_learner`: connect all engines to the new learner and make `version` live."""
        self.run_epoch = run_epoch
        await self._connect(self._whole_set())
        await self._live(version, await self._publish_now(version))

    def learner_lost(self, error: LearnerLost) -> None:
        """Record a learner death; `refresh` raises it, because a loop that waits for groups makes
        no other call to the learner.
        """
        self._lost = error

    async def refresh(self, version: int) -> None:
        """Between learner steps: raise findings of publications and drift probes; where the
        transport pushes, form a new group with newcomers and send all of it the current weights,
        `version`; also where an engine has come back, and the next publication is steps away.
        """
        self._probe.raise_findings()
        if self._lost is not None:
            raise self._lost
        if self._running is not None and self._running.done():
            await self.wait()
        late = (
            self._settings.every_steps > 1
            and {engine.actor_id for engine in self._engines.alive()} - self._connected
        )
        if self._pushes and (late or self._members() - self._group):
            await self.wait()
            async with self._lock:
                await self._regroup()
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
        await self._deliver(staged.announcement, strict=strict)
        return staged.announcement.digest

    async def _finish(self, announcement: Announcement, version: int, *, verify: bool) -> None:
        started = time.perf_counter()
        try:
            await self._deliver(announcement, sent=not announcement.streamed)
        finally:
            self._lock.release()
        await self._live(version, announcement.digest)
        self.times.wall += (seconds := time.perf_counter() - started)
        self._listener.published(version, seconds)
        self.times.count += 1
        self._probe.start(self.serving(), all_of_them=verify)

    # ---- the set ----

    async def _regroup(self) -> None:
        """Where the transport pushes, between learner steps: check newcomers, each in an own group,
        and form the group of all engines that are alive.
        """
        if not self._pushes or self._members() == self._group:
            return
        if self._settings.self_check:
            newcomers = [
                engine
                for engine in self._engines.alive()
                if engine.actor_id not in self._check.passed
            ]
            for engine in newcomers:
                await self._connect([engine])
                if engine.actor_id in self._connected:
                    await self._check_newcomer(engine)
        await self._connect(self._whole_set())

    async def _check_newcomer(self, engine: EngineHandle) -> None:
        """Check an engine: one that fails to answer is dropped, wrong numbers end the run."""
        try:
            await self._check.load_path([engine])
        except RunError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever its process died of
            self._connected.discard(engine.actor_id)
            await self._engines.drop(engine.actor_id, error)

    async def _connect(self, engines: Sequence[EngineHandle], *, strict: bool = False) -> None:
        """Connect exactly these engines. strict: the first failing engine ends the run; otherwise
        it is dropped, and the others connect without it.
        """
        deadlines = self._settings.deadlines
        payloads: dict[str, dict[str, Any]] = {}
        for _ in range(ATTEMPTS if engines else 0):
            sizes = [engine.tensor_parallel_size for engine in engines]
            names = [engine.actor_id for engine in engines]
            payloads.update(zip(names, await self._learner.connect(sizes), strict=True))
            outcome = await self._ask(
                engines,
                lambda engine: engine.connect(payloads[engine.actor_id]),
                learner=self._learner.rendezvous(),
                seconds=deadlines.rendezvous_s + GRACE_S,
                what="the rendezvous",
                patient=True,
            )
            if strict:
                require_complete(outcome, Stalled)
            await self._drop(outcome.lost)
            engines = [engine for engine in engines if engine.actor_id not in outcome.lost]
            if outcome.complete or not (self._pushes and engines):
                self._group = set(outcome.done)
                self._connected = self._group & {one.actor_id for one in self._engines.alive()}
                return
            self.times.repeated += 1
            self._listener.note(f"learner and engines form their group again: {outcome.reasons()}")
        if not engines:
            self._connected, self._group = set(), set()
            return
        raise Stalled(
            f"learner and engines could not form a group in {ATTEMPTS} attempts: "
            f"{outcome.reasons()}"
        )

    def _whole_set(self) -> list[Engine]:
        """List the engines to connect: where the transport pushes, those that are away too."""
        return list(self._engines.all() if self._pushes else self._engines.alive())

    def _members(self) -> set[str]:
        return {engine.actor_id for engine in self._whole_set()}

    def _recipients(self) -> list[Engine]:
        """List the engines that take part in a publication: those that serve, or a whole group."""
        if not self._pushes:
            return self.serving()
        return [engine for engine in self._whole_set() if engine.actor_id in self._group]

    async def _drop(self, lost: Mapping[str, BaseException]) -> None:
        for actor_id, error in lost.items():
            self._connected.discard(actor_id)
            self.times.dropped += 1
            await self._engines.drop(actor_id, error)

    # ---- one publication ----

    async def _deliver(
        self, announcement: Announcement, *, strict: bool = False, sent: bool = False
    ) -> None:
        """Bring the weights to every connected engine, or drop it. sent: the learner is sending."""
        engines = self._recipients()
        for attempt in range(1, ATTEMPTS + 1 if engines else 1):
            outcome = await self._receive(engines, announcement, sent=sent and attempt == 1)
            if strict:
                require_complete(outcome, Stalled)
            self.times.add(outcome)
            self._say_choices(announcement, outcome)
            if self._pushes:
                self._connected |= outcome.done.keys() & {
                    engine.actor_id for engine in self._engines.alive()
                }
            await self._drop(outcome.lost)
            engines = [engine for engine in engines if engine.actor_id in outcome.failed]
            # one torn, all torn: a new group, and everything again
            if self._pushes and (engines or outcome.learner):
                if attempt < ATTEMPTS:
                    await self._connect(self._recipients())
                engines = self._recipients()
            if not engines:
                break
            if attempt == ATTEMPTS and self._pushes:
                raise Stalled(
                    f"publication {announcement.label} was cut off {ATTEMPTS} times: "
                    f"{outcome.reasons()}"
                )
            if attempt == ATTEMPTS:
                failed = outcome.failed.items()
                await self._drop({name: TornTransfer(receipt.reason) for name, receipt in failed})
                break
            self.times.repeated += 1
            if attempt == 1:
                said = f"publication {announcement.label} was cut off and is repeated"
                self._listener.note(f"{said}: {outcome.reasons()}")
        self._newest = announcement

    def _say_choices(self, announcement: Announcement, outcome: DeliveryOutcome) -> None:
        """Log what an engine did to running responses, where it is not what it did before."""
        for actor_id, receipt in outcome.done.items():
            choice = receipt.kv_cache.partition(":")[0]
            if self._caches.get(actor_id, "") not in ("", choice):
                self._listener.note(f"{actor_id} at {announcement.label}: {receipt.kv_cache}")
            self._caches[actor_id] = choice

    async def _receive(
        self, engines: Sequence[EngineHandle], announcement: Announcement, *, sent: bool = False
    ) -> DeliveryOutcome:
        async def receive(engine: EngineHandle) -> Receipt:
            if self._pushes and self._engines.away(engine):
                return await engine.attend(announcement)
            receipt = await engine.receive(announcement)
            if not receipt.failure and receipt.serving != announcement.label:
                raise RuntimeError(
                    f"{engine.actor_id} acknowledges {receipt.serving} where "
                    f"{announcement.label} was published"
                )
            return receipt

        return await self._ask(
            engines,
            receive,
            learner=None if sent else self._learner.send(announcement),
            seconds=self._settings.deadlines.acknowledge_s,
            what=f"publication {announcement.label}",
        )

    async def _deliver_to(
        self, engines: Sequence[EngineHandle], announcement: Announcement
    ) -> None:
        require_complete(await self._receive(engines, announcement))

    async def _ask(
        self,
        engines: Sequence[EngineHandle],
        call: Callable[[EngineHandle], Awaitable[Receipt]],
        *,
        seconds: float,
        what: str,
        learner: Awaitable[str] | None = None,
        patient: bool = False,
    ) -> DeliveryOutcome:
        """Call engines and learner; raises for wrong bytes or names, and for a learner that hangs.
        patient: engines notice another's failure at `seconds` only, so none is hurried.
        """
        hurried = self._pushes and not patient
        grace_s = grace(self._settings.deadlines) if hurried else None
        outcome = await call_all(
            engines,
            call,
            learner=learner,
            seconds=seconds,
            grace_s=grace_s,
            what=what,
            note=self._listener.note,
            # those that usually take long are not worth a line each
            late_s=max(LATE_S, 3 * self.times.wall / max(1, self.times.count)),
        )
        if outcome.learner_hangs:
            raise TransferStuck(
                f"{outcome.learner}, and a communicator that cannot be aborted cannot be "
                f"mended: {outcome.reasons()}"
            )
        for actor_id, receipt in outcome.failed.items():
            if receipt.failure == "mismatch":
                raise TransferMismatch(
                    f"engine {actor_id}: {receipt.reason}; it does not serve them "
                    f"(weight_sync.backend {self._backend})"
                )
            if receipt.failure == "names":
                raise SetupError(f"engine {actor_id}: {receipt.reason}.")
        return outcome

    def _label(self, version: int) -> str:
        return Version(self.run_epoch, version).label
