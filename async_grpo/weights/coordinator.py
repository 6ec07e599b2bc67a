"""The order of a publication, in one place.

Runs in: the driver. Draws on two sides that it does not know from the inside:

    publish(version):   wait for the publication before -> learner.stage -> [ engines.receive ||
                        learner.send ] -> queue.live -> probes |<------- the learner waits
                        ------>|<--- with `overlap`, the next learner step runs here --->|

    an engine:          connect -> load-path check (perturbed weights) -> the newest weights ->
                        serving -> `pinned`: away -> the newest weights -> serving

Invariants: at most one publication is under way; a version is declared live only when every
connected engine of the set serves it (one that is not connected serves nothing yet and holds no
tickets); a publication completes on all of them or is repeated, without those that died or said
nothing, whom the manager drops and whose tickets it forfeits; wrong bytes, names or log-probs end
the run.

Engines that pull (shared memory, IPC) join at once: they read the newest copy. With NCCL a newcomer
waits for the next boundary between learner steps, where the group is formed again with it and the
current weights are sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any, Protocol

from async_grpo.config.schema import Config
from async_grpo.errors import LearnerLost, RunError, SetupError, Stalled, TransferMismatch
from async_grpo.runtime.listener import RunListener
from async_grpo.weights.checks import CheckedLearner as CheckedLearner
from async_grpo.weights.checks import Probes, PublicationTimes, SelfCheck, Tolerance
from async_grpo.weights.delivery import (
    GRACE_S,
    DeliveryOutcome,
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
)

ATTEMPTS = 3


class PublishingLearner(CheckedLearner, Protocol):
    """The learner group as the coordinator sees it."""

    async def connect(self, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]: ...
    async def rendezvous(self) -> str: ...
    async def stage(
        self, label: str, *, verify: bool, sequences: list[TokenSequence]
    ) -> Staged: ...
    async def send(self, announcement: Announcement) -> str: ...
    async def back(self) -> None: ...


class Coordinator:
    """Publishes the learner's weights to every engine."""

    def __init__(
        self,
        config: Config,
        *,
        learner: PublishingLearner,
        engines: EngineSet,
        backend: str,
        live: Callable[[int, str], Awaitable[None]],
        exact: bool,
        listener: RunListener,
        run_epoch: int = 0,
    ) -> None:
        """exact: learner and engines compute in float32. live(step, digest): tell the queue."""
        self._config, self._learner, self._engines, self._backend, self._live = (
            config,
            learner,
            ServingEngines(engines),
            backend,
            live,
        )
        self._pushes, self._run_epoch, self._listener = backend == "nccl", run_epoch, listener
        self._lock, self._joining = asyncio.Lock(), asyncio.Lock()
        self._newest: Announcement | None = None
        self._lost: LearnerLost | None = None
        self._running: asyncio.Task[None] | None = None
        self._pin: Pin | None = None
        self._connected: set[str] = set()
        self._group: set[str] = set()
        tolerance = Tolerance(exact)
        self._probes = Probes(config, tolerance)
        self._check = SelfCheck(
            config, learner=learner, tolerance=tolerance, backend=backend, deliver=self._deliver_to
        )
        self.times = PublicationTimes()
        self.held: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered while the learner waits for an evaluation that holds the newest version: its
        cost, not that of the publication.
        """

    async def start(self, version: int) -> dict[str, float]:
        """Connect every engine, check load path and sampler, and make `version` live. Returns the
        check's measurements.
        """
        async with self._lock:
            engines, measured = list(self._engines.alive()), {}
            await self._connect(engines, strict=True)
            if self._config.weight_sync.self_check or self._config.weight_sync.verify_every:
                self._check.sequences = [
                    (prompt, response)
                    for prompt, response, _ in await self._check.responses(engines[0])
                ]
                self._probes.sequences = self._check.sequences
            if self._config.weight_sync.self_check:
                measured = await self._check.load_path(engines)
            staged = await self._learner.stage(self._label(version), verify=True, sequences=[])
            await self._deliver(staged.announcement, strict=True)
            if self._config.weight_sync.self_check:
                measured |= await self._check.sampler(engines)
        await self._live(version, self._newest.digest)
        self.times = PublicationTimes()  # of the run, without its start
        return measured

    async def publish(self, version: int) -> float:
        """Publish the learner's current weights as `version`; returns the seconds that the learner
        had to wait.
        """
        started = time.perf_counter()
        await self.wait()
        self._probes.raise_findings()
        started += await wait_unpinned(
            lambda: self._pin, self.held
        )  # it may have asked while the publication before was under way
        await self._lock.acquire()  # `_finish` releases it
        try:
            await self._regroup()
            verify = self._probes.due(self.times.count)
            sequences = self._probes.sequences if verify or self._probes.owed else []
            staged = await self._learner.stage(
                self._label(version), verify=verify, sequences=sequences
            )
            if sequences:
                self._probes.expect(staged.announcement.label, staged.logprobs)
            if self._pushes and self._group and not staged.announcement.streamed:
                await self._learner.send(
                    staged.announcement
                )  # begun in the background, before the next step can keep the learner busy
        except BaseException:
            self._lock.release()
            raise
        self._running = asyncio.create_task(
            self._finish(staged.announcement, version, verify=verify)
        )
        self._running.add_done_callback(consume_exception)
        if not self._config.weight_sync.overlap or staged.announcement.streamed:
            await self.wait()
        waited = time.perf_counter() - started
        self.times.learner_waited += waited
        return waited

    def measurements(self) -> dict[str, float]:
        """Publications so far, and what one took; what the probes saw."""
        return self.times.measurements() | self._probes.measurements()

    def serving(self) -> list[EngineHandle]:
        """Engines that serve the newest publication while none is under way: with NCCL a newcomer
        lives before it does.
        """
        return [engine for engine in self._engines.alive() if engine.actor_id in self._connected]

    async def wait(self) -> None:
        """Wait for the publication under way; raises what it raised."""
        if self._running is not None:
            await asyncio.wait(
                {self._running}
            )  # a waiter that gives up leaves the publication alone
            self._running.result()

    async def settle(self) -> None:
        """Wait for the publication under way and for what engines are asked about it; raises what
        was found.
        """
        await self.wait()
        await self._probes.settle()
        self._probes.raise_findings()

    async def join(self, engine: EngineHandle, admit: Callable[[], None]) -> None:
        """Bring a newcomer to the newest published weights and `admit` it to the set before another
        publication can begin.

        With NCCL it is admitted at once and served at the next boundary. Raises what keeps it out;
        SelfCheckFailed and SetupError end the run.
        """
        if self._pushes:
            admit()
            return
        while True:
            try:
                await self._join(engine, admit)
            # not the newcomer's fault: it waits for the learner that takes the place of this one
            except LearnerLost as error:
                self.learner_lost(error)
                await self._learner.back()
            else:
                return

    async def _join(self, engine: EngineHandle, admit: Callable[[], None]) -> None:
        async with self._joining:
            [payload] = await self._learner.connect([engine.tensor_parallel_size])
            seconds = self._config.weight_sync.deadlines.rendezvous_s
            require_complete(
                await self._ask(
                    [engine], lambda one: one.connect(payload), seconds=seconds, what="connecting"
                )
            )
            if (
                self._config.weight_sync.self_check and engine.actor_id not in self._check.passed
            ):  # not one that was away
                await self._check.load_path([engine])
            async with self._lock:
                assert self._newest is not None, "start() comes first"
                require_complete(await self._receive([engine], self._newest))
                self._connected.add(engine.actor_id)
                admit()

    @asynccontextmanager
    async def pinned(self) -> AsyncIterator[Pin]:
        """In the block the newest version of now is kept: by an engine that leaves the set and
        comes back like a newcomer, while publications go on; where no other would be left, by all
        of them, and the next publication waits. Whoever asks first comes before it.
        """
        async with self._lock:
            serving, label = self.serving(), self._newest.label
            if len(serving) < 2:
                with Pin(label) as self._pin:
                    yield self._pin
                return
            pin = Pin(label, serving[-1])
            self._engines.leave(pin.engine)
            self._connected.discard(pin.engine.actor_id)
        try:
            yield pin
        except asyncio.CancelledError:  # the run ends
            raise
        except BaseException:
            await self._return(pin.engine)
            raise
        await self._return(pin.engine)

    async def _return(self, engine: EngineHandle) -> None:
        """Bring one that was away to the newest weights; one that cannot take them is dropped."""
        if self._pushes or not self._engines.lives(engine):
            async with self._lock:
                self._engines.back(engine)
                if (
                    engine.actor_id in self._group
                ):  # there was no publication meanwhile, else the group would be another
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
        """The learner is gone: what is under way ends, however it does, and in the block nothing
        begins; at its end `relink`.
        """
        if self._running is not None:
            await asyncio.wait({self._running})
            self._running = None
        async with self._joining, self._lock:
            yield
            self._lost = None

    async def relink(self, version: int, *, run_epoch: int) -> None:
        """Inside `without_learner`: connect every engine to a learner that was started again, and
        make its `version` live.
        """
        self._run_epoch = run_epoch
        await self._connect(list(self._engines.alive()))
        staged = await self._learner.stage(self._label(version), verify=True, sequences=[])
        await self._deliver(staged.announcement)
        await self._live(version, self._newest.digest)

    def learner_lost(self, error: LearnerLost) -> None:
        """Somebody met a dead learner: `refresh` raises it, for a loop that waits for groups asks
        nothing else of the learner.
        """
        self._lost = error

    async def refresh(self, version: int) -> None:
        """Between learner steps: raise what a publication or a probe has found; with NCCL, bring
        newcomers in.

        That forms a new group and sends the current weights, which are `version`, to all of it:
        newcomers serve what is live, or nothing.
        """
        self._probes.raise_findings()
        if self._lost is not None:
            raise self._lost
        if self._running is not None and self._running.done():
            await self.wait()
        if self._pushes and self._members() - self._group:
            await self.wait()
            async with self._lock:
                await self._regroup()
                staged = await self._learner.stage(self._label(version), verify=True, sequences=[])
                await self._deliver(staged.announcement)
            await self._live(version, self._newest.digest)

    @asynccontextmanager
    async def between_publications(self) -> AsyncIterator[None]:
        """Inside the block none is under way: an engine that leaves tears nothing."""
        async with self._lock:
            yield

    async def close(self) -> None:
        """End what still runs in the background."""
        await self._probes.close()

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
        self._probes.start(self.serving(), all_of_them=verify)

    # ---- the set ----

    async def _regroup(self) -> None:
        """With NCCL, between learner steps: check newcomers, each in a group of its own, and form
        the group of all who live.
        """
        if not self._pushes or self._members() == self._group:
            return
        if self._config.weight_sync.self_check:
            for engine in [
                engine
                for engine in self._engines.alive()
                if engine.actor_id not in self._check.passed
            ]:
                await self._connect([engine])
                if engine.actor_id in self._connected:
                    await self._check_newcomer(engine)
        await self._connect(list(self._engines.alive()))

    async def _check_newcomer(self, engine: EngineHandle) -> None:
        """One that fails its check is dropped; one that passes it with wrong numbers ends the
        run.
        """
        try:
            await self._check.load_path([engine])
        except RunError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever its process died of
            self._connected.discard(engine.actor_id)
            await self._engines.drop(engine.actor_id, error)

    async def _connect(self, engines: Sequence[EngineHandle], *, strict: bool = False) -> None:
        """Connect exactly these engines. strict: the first that fails ends the run; otherwise it is
        dropped, and the others connect without it.
        """
        deadlines = self._config.weight_sync.deadlines
        for _ in range(ATTEMPTS if engines else 0):
            payloads = dict(
                zip(
                    (engine.actor_id for engine in engines),
                    await self._learner.connect(
                        [engine.tensor_parallel_size for engine in engines]
                    ),
                    strict=True,
                )
            )
            outcome = await self._ask(
                engines,
                lambda engine, payloads=payloads: engine.connect(payloads[engine.actor_id]),
                learner=self._learner.rendezvous(),
                seconds=deadlines.rendezvous_s + GRACE_S,
                what="the rendezvous",
                patient=True,
            )
            if strict:
                require_complete(outcome, Stalled)
            await self._drop(outcome)
            engines = [engine for engine in engines if engine.actor_id not in outcome.lost]
            if outcome.complete or not (self._pushes and engines):
                self._connected, self._group = set(outcome.done), set(outcome.done)
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

    def _members(self) -> set[str]:
        return {engine.actor_id for engine in self._engines.alive()}

    async def _drop(self, outcome: DeliveryOutcome) -> None:
        for actor_id, error in outcome.lost.items():
            self._connected.discard(actor_id)
            self.times.dropped += 1
            await self._engines.drop(actor_id, error)

    # ---- one publication ----

    async def _deliver(
        self, announcement: Announcement, *, strict: bool = False, sent: bool = False
    ) -> None:
        """Every connected engine serves the announced weights, or is dropped. sent: the learner is
        sending already.
        """
        engines = self.serving()
        for attempt in range(1, ATTEMPTS + 1 if engines else 1):
            outcome = await self._receive(engines, announcement, sent=sent and attempt == 1)
            if strict:
                require_complete(outcome, Stalled)
            self.times.add(outcome)
            await self._drop(outcome)
            engines = [engine for engine in engines if engine.actor_id in outcome.failed]
            if self._pushes and (
                engines or outcome.learner
            ):  # one torn, all torn: a new group, and everything again
                if attempt < ATTEMPTS:
                    await self._connect(self.serving())
                engines = self.serving()
            if not engines:
                break
            if attempt == ATTEMPTS and self._pushes:
                raise Stalled(
                    f"publication {announcement.label} was cut off {ATTEMPTS} times: "
                    f"{outcome.reasons()}"
                )
            if attempt == ATTEMPTS:
                await self._drop(
                    DeliveryOutcome(
                        lost={
                            name: TornTransfer(receipt.reason)
                            for name, receipt in outcome.failed.items()
                        }
                    )
                )
                break
            self.times.repeated += 1
            self._listener.note(
                f"publication {announcement.label} was cut off and is repeated: {outcome.reasons()}"
            )
        self._newest = announcement

    async def _receive(
        self, engines: Sequence[EngineHandle], announcement: Announcement, *, sent: bool = False
    ) -> DeliveryOutcome:
        async def receive(engine: EngineHandle) -> Receipt:
            receipt = await engine.receive(announcement)
            if not receipt.failure and receipt.serving != announcement.label:
                raise RuntimeError(
                    f"{engine.actor_id} acknowledges {receipt.serving} where "
                    f"{announcement.label} was published"
                )
            return receipt

        seconds = self._config.weight_sync.deadlines.acknowledge_s
        what = f"publication {announcement.label}"
        return await self._ask(
            engines,
            receive,
            learner=None if sent else self._learner.send(announcement),
            seconds=seconds,
            what=what,
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
        """The call's outcome; wrong bytes and wrong names raise here, because no repetition mends
        them; so does a learner that hangs.

        patient: those who depend on one that failed notice it at `seconds` only.
        """
        grace_s = (
            grace(self._config.weight_sync.deadlines) if self._pushes and not patient else None
        )
        outcome = await call_all(
            engines, call, learner=learner, seconds=seconds, grace_s=grace_s, what=what
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
        return Version(self._run_epoch, version).label
