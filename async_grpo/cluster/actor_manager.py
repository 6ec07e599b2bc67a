"""Rollout actors: started, watched, replaced.

Runs in: the driver. One slot per engine; a slot holds one process at a time, under an id that is never used twice.

    starting --start()--> joining --weights served--> alive --run() ends or a probe fails--> dead --budget left--> starting

Invariants: the moment an actor is declared dead it leaves the live set and its tickets are forfeited; every death counts against one
budget, and the run ends with FaultBudgetSpent when that is spent; no process outlives `stop`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import ray

from async_grpo.cluster.placement import Placement
from async_grpo.cluster.processes import MAX_CALLS, RolloutProcess
from async_grpo.config.schema import Config
from async_grpo.errors import FaultBudgetSpent, RunError, Stalled
from async_grpo.weights.base import UNPUBLISHED, Announcement

PROBE_INTERVAL_S = 5.0
CLOSE_TIMEOUT_S = 5.0


@dataclass
class RemoteEngine:
    """One rollout actor process, as the driver and the coordinator see it."""

    actor_id: str
    slot: int
    tensor_parallel_size: int
    handle: Any

    async def connect(self, payload: dict[str, Any]) -> None:
        await self.handle.connect.remote(payload)

    async def receive(self, announcement: Announcement) -> dict[str, float]:
        return await self.handle.receive.remote(announcement)

    async def probe_sequences(self) -> list[tuple[list[int], list[int], np.ndarray]]:
        return await self.handle.probe_sequences.remote()


class QueueSide(Protocol):
    """The queue as the manager sees it."""

    async def forfeit(self, actor_id: str) -> None: ...
    async def is_over(self) -> bool: ...


Join = Callable[[RemoteEngine, Callable[[], None]], Awaitable[None]]


class ActorManager:
    """All rollout actors of a run. `on_fatal` is told once when the run cannot go on."""

    def __init__(
        self, config: Config, *, placement: Placement, options: list[dict[str, Any]], queue: Any, client: QueueSide, model_dir: str,
        backend: str, on_fatal: Callable[[BaseException], None], note: Callable[[str], None],
    ) -> None:
        self._config, self._placement, self._options, self._queue, self._client = config, placement, options, queue, client
        self._model_dir, self._backend, self._on_fatal, self._note = model_dir, backend, on_fatal, note
        self._alive: list[RemoteEngine] = []
        self._processes: dict[str, RemoteEngine] = {}
        self._counters: dict[str, dict[str, float]] = {}
        self._incarnations = [0] * len(placement.engines)
        self._tasks: set[asyncio.Task[None]] = set()
        self._join: Join | None = None
        self._stopping = False
        self.restarts = 0
        self.deaths: list[str] = []

    async def start(self) -> None:
        """Start one actor per slot and wait until all of them have loaded their engine."""
        engines = [self._create(index) for index in range(len(self._options))]
        await asyncio.gather(*[self._load(engine) for engine in engines])
        self._alive = engines

    def begin(self, join: Join) -> None:
        """Let every actor produce groups, and watch them. `join(engine, admit)` brings a newcomer to the live weights."""
        self._join = join
        for engine in self._alive:
            self._spawn(self._watch(engine))
        self._spawn(self._probe())

    def alive(self) -> Sequence[RemoteEngine]:
        """Engines that hold or may be given tickets."""
        return tuple(self._alive)

    def measurements(self) -> dict[str, float]:
        """What all actors, the dead ones too, have told of errors when they were last probed."""
        told = self._counters.values()
        return {
            "rollout/verifier_errors": sum((counters.get("verifier_errors", 0.0) for counters in told), 0.0),
            "rollout/attempts_failed": sum((counters.get("failed", 0.0) for counters in told), 0.0),
        }

    async def drop(self, actor_id: str, error: BaseException) -> None:
        """Declare an actor dead: forfeit its tickets, kill what is left of it, start another in its slot."""
        engine = next((engine for engine in self._alive if engine.actor_id == actor_id), None)
        if engine is None or self._stopping:
            return
        self._alive.remove(engine)
        await self._client.forfeit(actor_id)
        self._kill(engine)
        self._spawn(self._replace(engine, error))

    async def evaluate(
        self, ready: Callable[[], Sequence[RemoteEngine]], *, total: int, greedy: bool, samples: int
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Held-out accuracy over `total` problems, shared out over the `ready()` engines; and about `samples` of them as text.

        What an engine that dies leaves undone is shared out again.
        """
        left, results = list(range(total)), []
        try:
            async with asyncio.timeout(self._config.evaluation.timeout_s):
                while left:
                    left, done = await self._evaluate(ready(), left, total=total, greedy=greedy, samples=samples)
                    results += done
        except TimeoutError as error:
            raise Stalled(f"the evaluation took longer than evaluation.timeout_s = {self._config.evaluation.timeout_s:g} s") from error
        sums = {name: sum(result[name] for result, _ in results) for name in results[0][0]}
        shown = [row for _, rows in results for row in rows]
        if sums["judged"]:  # a task whose verifier gives no verdicts has no accuracy
            sums["accuracy"] = sums["correct"] / sums["problems"]
        return sums, shown

    async def _evaluate(
        self, engines: Sequence[RemoteEngine], problems: list[int], *, total: int, greedy: bool, samples: int
    ) -> tuple[list[int], list[tuple[dict[str, float], list[dict[str, Any]]]]]:
        """The problems that dead engines left undone, and the answers of the others."""
        if not engines:
            raise FaultBudgetSpent("no rollout actor is alive to evaluate with")
        parts = [problems[index :: len(engines)] for index in range(len(engines))]
        calls = [
            engine.handle.evaluate.remote(indices=part, total=total, greedy=greedy, samples=-(-samples // len(engines)))
            for engine, part in zip(engines, parts, strict=True)
        ]
        left, done = [], []
        for engine, part, answer in zip(engines, parts, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(answer, ray.exceptions.RayActorError):
                if self._join is None:
                    raise FaultBudgetSpent(f"a rollout actor died before training began: {answer}") from answer
                await self.drop(engine.actor_id, answer)
                left += part
            elif isinstance(answer, BaseException):
                raise answer
            else:
                done.append(answer)
        return left, done

    async def stop(self) -> None:
        """Stop all actors and their engines; one that does not answer within its deadline is killed."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        closing = [engine.handle.close.remote() for engine in self._alive]
        if closing:
            await asyncio.wait([asyncio.ensure_future(_settled(call)) for call in closing], timeout=CLOSE_TIMEOUT_S)
        for engine in list(self._processes.values()):  # those that are still starting too
            self._kill(engine)
        self._alive = []

    def _create(self, slot: int) -> RemoteEngine:
        actor_id = f"actor-{slot}.{self._incarnations[slot]}"
        self._incarnations[slot] += 1
        actor = ray.remote(RolloutProcess).options(max_concurrency=MAX_CALLS, **self._options[slot])
        handle = actor.remote(
            self._config, actor_id=actor_id, queue=self._queue, model_dir=self._model_dir, device=self._placement.device,
            cores=self._placement.engines[slot].cores,
        )
        engine = self._processes[actor_id] = RemoteEngine(actor_id, slot, self._config.cluster.engine.tensor_parallel_size, handle)
        return engine

    def _kill(self, engine: RemoteEngine) -> None:
        ray.kill(engine.handle)
        self._processes.pop(engine.actor_id, None)

    async def _load(self, engine: RemoteEngine) -> None:
        seconds = self._config.watchdog.start_timeout_s
        try:
            await asyncio.wait_for(engine.handle.start.remote(backend=self._backend, label=UNPUBLISHED), seconds)
        except TimeoutError as error:
            raise TimeoutError(f"starting {engine.actor_id} took longer than watchdog.start_timeout_s = {seconds:g} s") from error

    async def _watch(self, engine: RemoteEngine) -> None:
        try:
            await engine.handle.run.remote()
            if not self._stopping and not await self._client.is_over():
                await self.drop(engine.actor_id, RunError("it stopped producing before the run was over"))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RunError):
                raise error.cause from error  # not a fault of this process: another one would meet the same
            await self.drop(engine.actor_id, error)
        except ray.exceptions.RayError as error:
            await self.drop(engine.actor_id, error)

    async def _probe(self) -> None:
        timeout_s = self._config.watchdog.probe_timeout_s
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S)
            for engine in self.alive():
                try:
                    self._counters[engine.actor_id] = await asyncio.wait_for(engine.handle.health.remote(), timeout_s)
                except TimeoutError:
                    await self.drop(engine.actor_id, TimeoutError(f"no answer to a probe within watchdog.probe_timeout_s = {timeout_s:g} s"))
                except ray.exceptions.RayError as error:
                    await self.drop(engine.actor_id, error)

    async def _replace(self, dead: RemoteEngine, error: BaseException) -> None:
        cause = f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
        self.deaths.append(f"{dead.actor_id}: {cause}")
        while True:
            if self.restarts >= self._config.cluster.restart_budget:
                if len(self._alive) >= self._config.cluster.rollout_actors.min:
                    self._note(f"{dead.actor_id} died ({cause}); the restart budget is spent, {len(self._alive)} rollout actors go on")
                    return
                self._on_fatal(FaultBudgetSpent(
                    f"rollout actors died {len(self.deaths)} times, more than cluster.restart_budget = "
                    f"{self._config.cluster.restart_budget} allows; the last: {self.deaths[-1]}"
                ))
                return
            self.restarts += 1
            started = time.monotonic()
            engine = self._create(dead.slot)
            self._note(f"{dead.actor_id} died ({cause}); its groups are issued again, {engine.actor_id} takes its place")
            try:
                await self._load(engine)
                assert self._join is not None, "begin() comes before any replacement"
                await self._join(engine, lambda engine=engine: self._alive.append(engine))
            except (TimeoutError, ray.exceptions.RayError) as failure:
                self._kill(engine)
                cause = f"{type(failure).__name__} while starting {engine.actor_id}"
                self.deaths.append(cause)
                continue
            self._note(f"{engine.actor_id} serves the live weights after {time.monotonic() - started:.0f} s")
            self._spawn(self._watch(engine))
            return

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self._stopping:
            self._on_fatal(task.exception())


async def _settled(call: Any) -> None:
    try:
        await call
    except ray.exceptions.RayError:
        pass  # it is being stopped; dead already is just as good
