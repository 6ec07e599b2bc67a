"""The order of a publication, in one place.

Runs in: the driver. Draws on two sides that it does not know from the inside:

    publish(version):   wait for the publication before -> learner.stage -> [ engines.receive || learner.send ] -> queue.live
                        |<------- the learner waits ------>|<--- with `overlap`, the next learner step runs here --->|

Invariants: at most one publication is under way; a version is declared live only when every connected engine of the set serves it (one
that is not connected serves nothing yet and holds no tickets); an engine that fails to receive is dropped by the manager, which forfeits
its tickets; newcomers take the newest announcement under the same lock, so they never race a publication.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from async_grpo.config.schema import Config
from async_grpo.errors import RunError
from async_grpo.weights.base import SELF_CHECK, Announcement, version_label

SELF_CHECK_SCALES = (0.05, 0.1, 0.2, 0.4)
"""Perturbations tried in turn until one moves log-probs by more than CONTRAST times what sampler and learner may differ by anyway."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25}
CONTRAST = 2.0


class SelfCheckFailed(RunError):
    """An engine does not compute with the weights that it was sent."""

    exit_code = 6


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
        self, config: Config, *, learner: LearnerSide, engines: EngineSet, backend: str, live: Callable[[int, str], Awaitable[None]]
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
            _raise_first(await self._transfer(version_label(version)))
        await self._live(version, self._newest.digest)
        self.times = PublicationTimes()  # of the run, without its start
        return measured

    async def publish(self, version: int) -> float:
        """Publish the learner's current weights as `version`; returns the seconds that the learner had to wait."""
        started = time.perf_counter()
        await self.wait()
        await self._lock.acquire()  # `_finish` releases it
        try:
            if self._backend == "nccl" and self._members() != self._connected:
                await self._connect_all()  # a group with a dead member would hang in its first collective
            announcement = await self._learner.stage(version_label(version))
        except BaseException:
            self._lock.release()
            raise
        self._running = asyncio.create_task(self._finish(announcement, version))
        self._running.add_done_callback(_looked_at)
        if not self._config.weight_sync.overlap or self._backend == "nccl":  # NCCL reads the parameters themselves: nothing is staged
            await self.wait()
        waited = time.perf_counter() - started
        self.times.learner_waited += waited
        return waited

    def measurements(self) -> dict[str, float]:
        """Publications so far, and seconds per publication: waited by the learner, paused by an engine, until live."""
        times, count = self.times, max(1, self.times.count)
        return {
            "weights/publications": float(times.count), "weights/learner_waited_s": times.learner_waited / count,
            "weights/engine_paused_s": times.engines_paused / count, "weights/until_live_s": times.wall / count,
        }

    def serving(self) -> list[EngineHandle]:
        """Engines that serve the newest publication while none is under way: with NCCL a newcomer lives before it does."""
        return [engine for engine in self._engines.alive() if engine.actor_id in self._connected]

    async def wait(self) -> None:
        """Wait for the publication under way; raises what it raised."""
        if self._running is not None:
            await asyncio.wait({self._running})  # a waiter that gives up leaves the publication alone
            self._running.result()

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
            self._connected.add(engine.actor_id)
            admit()

    async def refresh(self, version: int) -> None:
        """Between learner steps: raise what a publication under way has raised; with NCCL, bring newcomers in.

        That forms a new group and sends the current weights, which are `version`, to all of it: newcomers serve what is live, or nothing.
        """
        if self._running is not None and self._running.done():
            await self.wait()
        if self._backend == "nccl" and self._members() - self._connected:
            await self.wait()
            async with self._lock:
                await self._connect_all()
                await self._drop(await self._transfer(version_label(version)))
            await self._live(version, self._newest.digest)

    async def _finish(self, announcement: Announcement, version: int) -> None:
        started = time.perf_counter()
        try:
            await self._drop(await self._send(announcement))
        finally:
            self._lock.release()
        await self._live(version, announcement.digest)
        self.times.wall += time.perf_counter() - started
        self.times.count += 1

    async def _connect_all(self) -> None:
        engines = list(self._engines.alive())
        payloads = await self._learner.connect([engine.tensor_parallel_size for engine in engines])
        joins = [engine.connect(payload) for engine, payload in zip(engines, payloads, strict=True)]
        await self._deadline(asyncio.gather(self._learner.rendezvous(), *joins), "connecting the engines to the learner")
        self._connected = {engine.actor_id for engine in engines}

    def _members(self) -> set[str]:
        return {engine.actor_id for engine in self._engines.alive()}

    async def _transfer(self, label: str) -> dict[str, BaseException]:
        return await self._send(await self._learner.stage(label))

    async def _send(self, announcement: Announcement) -> dict[str, BaseException]:
        """Every connected engine takes the announced weights; what went wrong by actor id."""
        engines = self.serving()
        receiving = [self._deadline(engine.receive(announcement), f"publishing to {engine.actor_id}") for engine in engines]
        sent, *results = await asyncio.gather(self._learner.send(), *receiving, return_exceptions=True)
        if isinstance(sent, BaseException):
            raise sent
        self._newest = announcement
        paused = [result["total"] for result in results if isinstance(result, dict)]
        self.times.engines_paused += sum(paused) / max(1, len(paused))
        return {engine.actor_id: result for engine, result in zip(engines, results, strict=True) if isinstance(result, BaseException)}

    async def _drop(self, failures: dict[str, BaseException]) -> None:
        for actor_id, error in failures.items():
            await self._engines.drop(actor_id, error)

    async def _deadline(self, work: Awaitable[Any], what: str) -> Any:
        seconds = self._config.weight_sync.deadlines.receive_s
        try:
            return await asyncio.wait_for(work, seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{what} took longer than weight_sync.deadlines.receive_s = {seconds:g} s") from error

    async def _self_check(self, engines: list[EngineHandle]) -> dict[str, float]:
        """Publish perturbed weights and compare log-probs: the load path of every engine, seen from both sides."""
        tolerance = TOLERANCE["bfloat16" if self._config.model.dtype == "bfloat16" or self._backend != "shared_memory" else "float32"]
        for scale in SELF_CHECK_SCALES:
            errors, moved = await self._measure(engines, scale=scale)
            for actor_id, error in errors.items():
                if not error < tolerance:
                    raise SelfCheckFailed(
                        f"after a test publication engine {actor_id} computes log-probs that differ from the learner's by {error:.2g} "
                        f"(allowed {tolerance:g}): weights do not arrive where they should over {self._backend}; training would silently "
                        "use the wrong policy"
                    )
            if moved > CONTRAST * tolerance:
                return {"weights/self_check_error": max(errors.values()), "weights/self_check_moved": moved}
        raise SelfCheckFailed(
            f"the test perturbation moved log-probs by {moved:.2g} only, too little to tell whether weights arrive (engine and learner may "
            f"differ by {tolerance:g}); set weight_sync.self_check: false to start without the check"
        )

    async def _measure(self, engines: list[EngineHandle], *, scale: float) -> tuple[dict[str, float], float]:
        """Largest error of every engine under perturbed weights, and the smallest of what the perturbation moved on each one's answers."""
        await self._learner.perturb(scale=scale, seed=self._config.seed)
        _raise_first(await self._transfer(SELF_CHECK))
        asking = [self._deadline(engine.probe_sequences(), f"the test responses of {engine.actor_id}") for engine in engines]
        probes = await asyncio.gather(*asking)
        sequences = [(prompt, response) for probe in probes for prompt, response, _ in probe]
        perturbed = await self._learner.logprobs(sequences)
        await self._learner.restore_weights()
        true = await self._learner.logprobs(sequences)
        rows = iter(zip(perturbed, true, strict=True))
        errors, moved = {}, []
        for engine, probe in zip(engines, probes, strict=True):
            own = [(served, *next(rows)) for _, _, served in probe]
            errors[engine.actor_id] = _largest([served - expected for served, expected, _ in own])
            moved.append(_largest([expected - before for _, expected, before in own]))
        return errors, float(np.min(moved))


def _largest(differences: list[np.ndarray]) -> float:
    """Largest absolute entry; not a number if one entry is not, 0 without entries."""
    return float(np.abs(np.concatenate(differences)).max()) if differences else 0.0


def _looked_at(task: asyncio.Task[None]) -> None:
    """Whoever waits gets the error; when the run ends first, nobody does."""
    if not task.cancelled():
        task.exception()


def _raise_first(failures: dict[str, BaseException]) -> None:
    for error in failures.values():
        raise error
