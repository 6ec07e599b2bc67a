"""The order of a publication, in one place.

Runs in: the driver. Draws on two sides that it does not know from the inside:

    publish(version):   wait for the publication before -> learner.stage -> [ engines.receive || learner.send ] -> queue.live
                        |<------- the learner waits ------>|<--- with `overlap`, the next learner step runs here --->|

Invariants: at most one publication is under way; a version is declared live only when every engine of the set serves it; an engine
that fails to receive is dropped by the manager, which forfeits its tickets; newcomers take the newest announcement under the same
lock, so they never race a publication.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from async_grpo.config.schema import Config
from async_grpo.weights.base import SELF_CHECK, Announcement, version_label

SELF_CHECK_SCALE = 0.05
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25}
VISIBLE = 1e-3


class SelfCheckFailed(RuntimeError):
    """An engine does not compute with the weights that it was sent."""


class LearnerSide(Protocol):
    """The learner group as the coordinator sees it."""

    async def connect(self, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]: ...
    async def rendezvous(self) -> None: ...
    async def stage(self, label: str) -> Announcement: ...
    async def send(self) -> None: ...
    async def perturb(self, *, scale: float, seed: int) -> None: ...
    async def restore_weights(self) -> None: ...
    async def logprobs(self, sequences: list[tuple[list[int], list[int]]]) -> list[np.ndarray]: ...


class EngineHandle(Protocol):
    """One engine as the coordinator sees it."""

    actor_id: str
    tensor_parallel_size: int

    async def connect(self, payload: dict[str, Any]) -> None: ...
    async def receive(self, announcement: Announcement) -> dict[str, float]: ...
    async def probe_sequences(self) -> list[tuple[list[int], list[int], np.ndarray]]: ...


class EngineSet(Protocol):
    """The engines that are alive now; `drop` declares one dead."""

    def alive(self) -> Sequence[EngineHandle]: ...
    async def drop(self, actor_id: str, error: BaseException) -> None: ...


@dataclass(slots=True)
class PublicationTimes:
    """Seconds of publications so far: what the learner waited, and what engines were paused (mean over engines)."""

    count: int = 0
    learner_waited: float = 0.0
    engines_paused: float = 0.0
    wall: float = 0.0


class Coordinator:
    """Publishes the learner's weights to every engine."""

    def __init__(
        self, config: Config, *, learner: LearnerSide, engines: EngineSet, backend: str, live: Callable[[int], Awaitable[None]]
    ) -> None:
        self._config, self._learner, self._engines, self._backend, self._live = config, learner, engines, backend, live
        self._lock = asyncio.Lock()
        self._newest: Announcement | None = None
        self._running: asyncio.Task[None] | None = None
        self._connected: set[str] = set()
        self.times = PublicationTimes()

    async def start(self, version: int) -> dict[str, float]:
        """Connect every engine, run the self-check, and make `version` live. Returns the self-check's measurements."""
        async with self._lock:
            await self._connect_all()
            measured: dict[str, float] = {}
            if self._config.weight_sync.self_check:
                measured = await self._self_check(list(self._engines.alive()))
            await self._transfer(version_label(version))
        await self._live(version)
        return measured

    async def publish(self, version: int) -> float:
        """Publish the learner's current weights as `version`; returns the seconds that the learner had to wait."""
        started = time.perf_counter()
        await self.wait()
        await self._lock.acquire()
        try:
            if self._backend == "nccl" and self._members() != self._connected:
                await self._connect_all()  # a group with a dead member would hang in its first collective
            announcement = await self._learner.stage(version_label(version))
        except BaseException:
            self._lock.release()
            raise
        self._running = asyncio.create_task(self._finish(announcement, version))
        if not self._config.weight_sync.overlap or self._backend == "nccl":  # NCCL reads the parameters themselves: nothing is staged
            await self.wait()
        waited = time.perf_counter() - started
        self.times.count += 1
        self.times.learner_waited += waited
        return waited

    async def wait(self) -> None:
        """Wait for the publication under way; raises what it raised."""
        if self._running is not None:
            running, self._running = self._running, None
            await running

    async def join(self, engine: EngineHandle, admit: Callable[[], None]) -> None:
        """Bring a newcomer to the newest published weights and `admit` it to the set before another publication can begin.

        With NCCL it is admitted at once and served by the next publication or `refresh`, which forms a new group.
        """
        if self._backend == "nccl":
            admit()
            return
        async with self._lock:
            assert self._newest is not None, "start() comes first"
            [payload] = await self._learner.connect([engine.tensor_parallel_size])
            await self._deadline(engine.connect(payload), f"connecting {engine.actor_id}")
            await self._deadline(engine.receive(self._newest), f"publishing to {engine.actor_id}")
            admit()

    async def refresh(self, version: int) -> None:
        """Between learner steps: form the NCCL group again when its members changed, and send the current weights to all."""
        if self._backend == "nccl" and self._members() != self._connected:
            await self.wait()
            async with self._lock:
                await self._connect_all()
                await self._transfer(version_label(version))

    async def _finish(self, announcement: Announcement, version: int) -> None:
        started = time.perf_counter()
        try:
            await self._send(announcement)
        finally:
            self._lock.release()
        await self._live(version)
        self.times.wall += time.perf_counter() - started

    async def _connect_all(self) -> None:
        engines = list(self._engines.alive())
        payloads = await self._learner.connect([engine.tensor_parallel_size for engine in engines])
        joins = [engine.connect(payload) for engine, payload in zip(engines, payloads, strict=True)]
        await self._deadline(asyncio.gather(self._learner.rendezvous(), *joins), "connecting the engines to the learner")
        self._connected = {engine.actor_id for engine in engines}

    def _members(self) -> set[str]:
        return {engine.actor_id for engine in self._engines.alive()}

    async def _transfer(self, label: str) -> None:
        await self._send(await self._learner.stage(label))

    async def _send(self, announcement: Announcement) -> None:
        """Every live engine takes the announced weights; those that cannot are dropped."""
        engines = list(self._engines.alive())
        receiving = [self._deadline(engine.receive(announcement), f"publishing to {engine.actor_id}") for engine in engines]
        _, *results = await asyncio.gather(self._learner.send(), *receiving, return_exceptions=True)
        self._newest = announcement
        if isinstance(_, BaseException):
            raise _
        paused = [result["total"] for result in results if isinstance(result, dict)]
        self.times.engines_paused += sum(paused) / max(1, len(paused))
        for engine, result in zip(engines, results, strict=True):
            if isinstance(result, BaseException):
                await self._engines.drop(engine.actor_id, result)

    async def _deadline(self, work: Awaitable[Any], what: str) -> Any:
        seconds = self._config.weight_sync.deadlines.receive_s
        try:
            return await asyncio.wait_for(work, seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{what} took longer than weight_sync.deadlines.receive_s = {seconds:g} s") from error

    async def _self_check(self, engines: list[EngineHandle]) -> dict[str, float]:
        """Publish perturbed weights and compare log-probs: the load path of every engine, seen from both sides."""
        await self._learner.perturb(scale=SELF_CHECK_SCALE, seed=self._config.seed)
        await self._transfer(SELF_CHECK)
        probes = [await engine.probe_sequences() for engine in engines]
        sequences = [(prompt, response) for probe in probes for prompt, response, _ in probe]
        perturbed = await self._learner.logprobs(sequences)
        await self._learner.restore_weights()
        true = await self._learner.logprobs(sequences)
        tolerance = TOLERANCE["bfloat16" if self._config.model.dtype == "bfloat16" or self._backend != "shared_memory" else "float32"]
        worst, moved, rows = 0.0, 0.0, iter(zip(perturbed, true, strict=True))
        for engine, probe in zip(engines, probes, strict=True):
            for _, _, served in probe:
                expected, before = next(rows)
                error = float(np.abs(served - expected).max())
                worst, moved = max(worst, error), max(moved, float(np.abs(expected - before).max()))
                if not error < tolerance:
                    raise SelfCheckFailed(
                        f"after a test publication engine {engine.actor_id} computes log-probs that differ from the learner's by "
                        f"{error:.2g} (allowed {tolerance:g}): weights do not arrive where they should over {self._backend}; training would "
                        "silently use the wrong policy"
                    )
        if moved < VISIBLE:
            raise SelfCheckFailed(f"the test perturbation moved log-probs by {moved:.2g} only, too little to check anything")
        return {"weights/self_check_error": worst, "weights/self_check_moved": moved}
