"""How announced weights come to the engines: each fetches them (`PullDelivery`), or all receive
them together (`PushDelivery`).

Runs in: the driver. Hides the transport's kind from the coordinator:

    pull (shared memory, IPC)   learner --copy--> segment <--reads-- engine, whenever it wants:
                                what one engine misses concerns no other, and a newcomer joins at
                                once
    push (NCCL)                 learner --sends--> [ engine, engine, engine ]: one group, formed
                                between learner steps; one torn, all torn, and a new group is formed

Invariants: `deliver` ends when every engine that takes part has the weights or was dropped; an
engine is in `serving` only with the newest weights; an engine that is away stays in a group, where
it takes part without loading; wrong bytes or names end the run.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol

from async_grpo.config.schema import Config
from async_grpo.errors import RunError, SetupError, Stalled, TransferMismatch
from async_grpo.runtime.listener import LATE_S, RunListener
from async_grpo.weights.checks import CheckedLearner, LoadPathCheck, Tolerance
from async_grpo.weights.fan_out import (
    GRACE_S,
    DeliveryOutcome,
    Engine,
    EngineHandle,
    call_all,
    grace,
    require_complete,
)
from async_grpo.weights.pinning import ServingEngines
from async_grpo.weights.transport import (
    Announcement,
    Receipt,
    TornTransfer,
    TransferStuck,
    rendezvous_seconds,
)

ATTEMPTS = 3


@dataclass(slots=True)
class PublicationTimes:
    """Sums over the publications so far: seconds that the learner waited, that engines were paused
    (mean over engines) and until live; tokens that running responses had to compute again, and
    whose caches they kept; how often an engine did either; publications repeated and engines
    dropped because of a fault.
    """

    count: int = 0
    learner_waited: float = 0.0
    engines_paused: float = 0.0
    wall: float = 0.0
    recomputed_tokens: int = 0
    kept_tokens: int = 0
    caches_kept: int = 0
    caches_recomputed: int = 0
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
        self.caches_recomputed += sum(receipt.recomputed_tokens > 0 for receipt in receipts)

    def metrics(self) -> dict[str, float]:
        """Means per publication, and counts."""
        count = max(1, self.count)
        return {
            "weights/syncs": float(self.count),
            "weights/learner_waited_s": self.learner_waited / count,
            "weights/engine_paused_s": self.engines_paused / count,
            "weights/until_live_s": self.wall / count,
            "weights/recomputed_tokens": self.recomputed_tokens / count,
            "weights/kept_tokens": self.kept_tokens / count,
            "weights/caches_kept": float(self.caches_kept),
            "weights/repeated": float(self.repeated),
            "weights/dropped_engines": float(self.dropped),
        }


class DeliveringLearner(CheckedLearner, Protocol):
    """The learner group as a delivery sees it."""

    async def connect(self, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]:
        """Prepare the transport for these engines; one init payload per engine."""

    async def rendezvous(self) -> str:
        """Complete the transport's group, while the engines connect; why it failed, or ""."""

    async def send(self, announcement: Announcement) -> str:
        """Push staged weights where the transport pushes; why the transfer is torn, or ""."""


class WeightDelivery(ABC, Generic[Engine]):
    """Brings announced weights to the engines of a set, and knows which of them serve."""

    joins_at_once = True
    """Whether an engine may join at any time; else between learner steps only."""
    together = False
    """Whether engines depend on each other, so that the others of a torn delivery are hurried."""

    def __init__(
        self,
        config: Config,
        *,
        learner: DeliveringLearner,
        engines: ServingEngines[Engine],
        backend: str,
        listener: RunListener,
        tolerance: Tolerance,
    ) -> None:
        """tolerance: of the checks, which learns the noise between learner and engines."""
        self._settings, self._listener = config.weight_sync, listener
        self._backend = backend
        self._learner, self._engines = learner, engines
        self._connected: set[str] = set()
        self._group: set[str] = set()
        """Engines that receive together, also those that are away; of a push alone."""
        self._said_caches = False
        self.lock = asyncio.Lock()
        """Held while weights are on their way."""
        self.joining = asyncio.Lock()
        self.newest: Announcement | None = None
        """What was delivered last."""
        self.times = PublicationTimes()
        self.check = LoadPathCheck(
            config,
            learner=learner,
            tolerance=tolerance,
            backend=backend,
            deliver=self._deliver_to,
            gpu=engines.gpu,
        )

    def serving(self) -> list[Engine]:
        """Engines that serve the newest publication while none is under way; a newcomer is alive
        before it serves, where the transport pushes.
        """
        return [engine for engine in self._engines.alive() if engine.actor_id in self._connected]

    @abstractmethod
    async def connect(self, *, strict: bool = False) -> None:
        """Connect the whole set. strict: the first failing engine ends the run; otherwise it is
        dropped, and the others connect without it.
        """

    @abstractmethod
    async def join(self, engine: Engine, admit: Callable[[], None]) -> None:
        """Bring a newcomer to the newest weights, and `admit` it to the set before others are
        delivered. Raises what keeps it out.
        """

    async def begin(self, announcement: Announcement) -> None:
        """Begin to send, before the next learner step can keep the learner busy."""

    async def regroup(self) -> None:
        """Between learner steps: take in newcomers that wait for one."""

    def waits(self, *, long: bool) -> bool:
        """Whether engines wait for `regroup`. long: the next publication is steps away, so also
        those that the group has, and that do not serve.
        """
        return False

    def leave(self, engine: Engine) -> None:
        """Let an engine serve nobody until it is back."""
        self._connected.discard(engine.actor_id)

    def back(self, engine: Engine, label: str) -> None:
        """Let an engine that serves `label` serve again, if that is the newest."""

    async def deliver(
        self, announcement: Announcement, *, strict: bool = False, begun: bool = False
    ) -> None:
        """Bring the weights to every connected engine, or drop it. begun: the learner is sending.
        strict: the first failure ends the run.
        """
        engines = self._recipients()
        for attempt in range(1, ATTEMPTS + 1 if engines else 1):
            outcome = await self._receive(engines, announcement, begun=begun and attempt == 1)
            if strict:
                require_complete(outcome, Stalled)
            self.times.add(outcome)
            self._say_first_choice(outcome)
            self._note_done(outcome)
            await self._drop(outcome.lost)
            left = [engine for engine in engines if engine.actor_id in outcome.failed]
            engines = await self._again(
                left, outcome, label=announcement.label, last=attempt == ATTEMPTS
            )
            if not engines:
                break
            self.times.repeated += 1
            announcement = announcement.whole()
            if attempt == 1:
                said = f"weight sync {announcement.label} was cut off and is repeated"
                self._listener.note(f"{said}: {outcome.reasons()}")
        self.newest = announcement

    @abstractmethod
    def _recipients(self) -> list[Engine]:
        """List the engines that take part in a publication."""

    @abstractmethod
    async def _again(
        self, left: list[Engine], outcome: DeliveryOutcome, *, label: str, last: bool
    ) -> list[Engine]:
        """Return who takes part in the next attempt, of which there is none after the last."""

    def _note_done(self, outcome: DeliveryOutcome) -> None:
        """Note who has the weights."""

    async def _call(self, engine: EngineHandle, announcement: Announcement) -> Receipt:
        receipt = await engine.receive(announcement)
        if not receipt.failure and receipt.serving != announcement.label:
            raise RuntimeError(
                f"{engine.actor_id} acknowledges {receipt.serving} where "
                f"{announcement.label} was sent"
            )
        return receipt

    async def _receive(
        self, engines: Sequence[EngineHandle], announcement: Announcement, *, begun: bool = False
    ) -> DeliveryOutcome:
        return await self._ask(
            engines,
            lambda engine: self._call(engine, announcement),
            learner=None if begun else self._learner.send(announcement),
            seconds=self._settings.deadlines.acknowledge_s,
            what=f"weight sync {announcement.label}",
            hurried=self.together,
        )

    async def _deliver_to(
        self, engines: Sequence[EngineHandle], announcement: Announcement
    ) -> None:
        require_complete(await self._receive(engines, announcement))

    async def _rendezvous(
        self, engines: Sequence[EngineHandle], *, strict: bool
    ) -> DeliveryOutcome:
        """Let learner and engines connect; drop whoever does not."""
        names = [engine.actor_id for engine in engines]
        sizes = [engine.tensor_parallel_size for engine in engines]
        payloads = dict(zip(names, await self._learner.connect(sizes), strict=True))
        groups = max((len(one.get("groups", ())) for one in payloads.values()), default=1)
        outcome = await self._ask(
            engines,
            lambda engine: engine.connect(payloads[engine.actor_id]),
            learner=self._learner.rendezvous(),
            seconds=rendezvous_seconds(self._settings.deadlines, groups) + GRACE_S,
            what="the rendezvous",
        )
        if strict:
            require_complete(outcome, Stalled)
        await self._drop(outcome.lost)
        return outcome

    def _grouped(self, names: Iterable[str]) -> None:
        """Let these engines be the group, and serve."""
        self._group = set(names)
        self._serve_only(self._group)

    def _serve_only(self, names: Iterable[str]) -> None:
        """Let these engines serve, as far as they are in the set, and no other."""
        self._connected = set(names) & {engine.actor_id for engine in self._engines.alive()}

    async def _drop(self, lost: Mapping[str, BaseException]) -> None:
        for actor_id, error in lost.items():
            self._connected.discard(actor_id)
            self.times.dropped += 1
            await self._engines.drop(actor_id, error)

    def _say_first_choice(self, outcome: DeliveryOutcome) -> None:
        """Log once what became of the KV caches of running responses; later ones are counted."""
        for receipt in outcome.done.values():
            running = receipt.kept_tokens or receipt.recomputed_tokens
            if running and receipt.kv_cache and not self._said_caches:
                self._said_caches = True
                self._listener.note(
                    "first weight sync while responses are running: their KV caches are "
                    f"{receipt.kv_cache}; the summary counts every choice"
                )

    async def _ask(
        self,
        engines: Sequence[EngineHandle],
        call: Callable[[EngineHandle], Awaitable[Receipt]],
        *,
        seconds: float,
        what: str,
        learner: Awaitable[str] | None = None,
        hurried: bool = False,
    ) -> DeliveryOutcome:
        """Call engines and learner; raises for wrong bytes or names, and for a learner that hangs.
        hurried: engines notice another's failure by themselves; else at `seconds` only.
        """
        async with self._engines.gpu.turn("engines", wake=False):
            outcome = await call_all(
                engines,
                call,
                learner=learner,
                seconds=seconds,
                grace_s=grace(self._settings.deadlines) if hurried else None,
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


class PullDelivery(WeightDelivery[Engine]):
    """Engines fetch the weights, each when it wants."""

    async def connect(self, *, strict: bool = False) -> None:
        """See `WeightDelivery.connect`."""
        engines = self._engines.alive()
        self._serve_only((await self._rendezvous(engines, strict=strict)).done if engines else ())

    async def join(self, engine: Engine, admit: Callable[[], None]) -> None:
        """See `WeightDelivery.join`: at once."""
        async with self.joining:
            [payload] = await self._learner.connect([engine.tensor_parallel_size])
            seconds = self._settings.deadlines.rendezvous_s
            require_complete(
                await self._ask(
                    [engine], lambda one: one.connect(payload), seconds=seconds, what="connecting"
                )
            )
            if self._settings.self_check and engine.actor_id not in self.check.passed:
                await self.check.load_path([engine])
            async with self.lock:
                assert self.newest is not None, "the start comes first"
                require_complete(await self._receive([engine], self.newest))
                self._connected.add(engine.actor_id)
                admit()

    def _recipients(self) -> list[Engine]:
        return self.serving()

    async def _again(
        self, left: list[Engine], outcome: DeliveryOutcome, *, label: str, last: bool
    ) -> list[Engine]:
        """Those that failed; the last time they are dropped."""
        if not last:
            return left
        failed = outcome.failed.items()
        await self._drop({name: TornTransfer(receipt.reason) for name, receipt in failed})
        return []


class PushDelivery(WeightDelivery[Engine]):
    """Learner and engines form a group, and all of it receives the weights at the same time."""

    joins_at_once, together = False, True

    async def connect(self, *, strict: bool = False) -> None:
        """See `WeightDelivery.connect`."""
        await self._form(self._engines.all(), strict=strict)

    async def join(self, engine: Engine, admit: Callable[[], None]) -> None:
        """See `WeightDelivery.join`: the newcomer serves from the next boundary on."""
        admit()

    async def begin(self, announcement: Announcement) -> None:
        """See `WeightDelivery.begin`."""
        if self._group:
            await self._learner.send(announcement)

    async def regroup(self) -> None:
        """Check newcomers, each in an own group, and form the group of all engines that are alive
        (see `WeightDelivery.regroup`).
        """
        if self._members() == self._group:
            return
        if self._settings.self_check:
            newcomers = [
                engine
                for engine in self._engines.alive()
                if engine.actor_id not in self.check.passed
            ]
            for engine in newcomers:
                await self._form([engine])
                if engine.actor_id in self._connected:
                    await self._check_newcomer(engine)
        await self.connect()

    def waits(self, *, long: bool) -> bool:
        """See `WeightDelivery.waits`."""
        here = {engine.actor_id for engine in self._engines.alive()}
        return bool(self._members() - self._group or (long and here - self._connected))

    def back(self, engine: Engine, label: str) -> None:
        """See `WeightDelivery.back`."""
        if self.newest and engine.actor_id in self._group and label == self.newest.label:
            self._connected.add(engine.actor_id)

    async def _check_newcomer(self, engine: EngineHandle) -> None:
        """Check an engine: one that fails to answer is dropped, wrong numbers end the run."""
        try:
            await self.check.load_path([engine])
        except RunError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever its process died of
            self._connected.discard(engine.actor_id)
            await self._engines.drop(engine.actor_id, error)

    async def _form(self, engines: Sequence[EngineHandle], *, strict: bool = False) -> None:
        """Form the group of exactly these engines, or of those of them that do not fail."""
        reasons = ""
        for _ in range(ATTEMPTS if engines else 0):
            outcome = await self._rendezvous(engines, strict=strict)
            engines = [engine for engine in engines if engine.actor_id not in outcome.lost]
            if outcome.complete or not engines:
                self._grouped(outcome.done)
                return
            self.times.repeated += 1
            reasons = outcome.reasons()
            self._listener.note(f"learner and engines form their group again: {reasons}")
        if engines:
            raise Stalled(
                f"learner and engines could not form a group in {ATTEMPTS} attempts: {reasons}"
            )
        self._grouped(())

    def _members(self) -> set[str]:
        return {engine.actor_id for engine in self._engines.all()}

    def _recipients(self) -> list[Engine]:
        return [engine for engine in self._engines.all() if engine.actor_id in self._group]

    def _note_done(self, outcome: DeliveryOutcome) -> None:
        self._serve_only(self._connected | outcome.done.keys())

    async def _call(self, engine: EngineHandle, announcement: Announcement) -> Receipt:
        if self._engines.away(engine):
            return await engine.attend(announcement)
        return await super()._call(engine, announcement)

    async def _again(
        self, left: list[Engine], outcome: DeliveryOutcome, *, label: str, last: bool
    ) -> list[Engine]:
        """One torn, all torn: a new group, and everything again."""
        if not (left or outcome.learner):
            return []
        if not last:
            await self._form(self._recipients())
        engines = self._recipients()
        if last and engines:
            raise Stalled(f"weight sync {label} was cut off {ATTEMPTS} times: {outcome.reasons()}")
        return engines
