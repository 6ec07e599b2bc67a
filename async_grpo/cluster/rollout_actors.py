"""Rollout actors: started, watched, replaced, added and removed.

Runs in: the driver. One place per engine: a reservation on a node, which holds one process at a
time, under an id that is never used twice.

    starting --start()--> joining --weights served--> alive --run() ends, a probe fails--> dead
       ^                                                |                                 |
       +------------------------ budget left -----------|---------------------------------+
                                                        |                                 |
         drained: slot given back <---- remove() -------+    node gone, no resources, ----+
                                                              budget spent: drained

Every few seconds the places are compared with the cluster's nodes: those on a node that is gone are
given back, and room for another engine becomes a new place, up to `cluster.rollout_actors.max`.

Invariants: the moment an actor is declared dead it leaves the live set and its tickets are
forfeited; every death counts against one budget, and all that die with a node are one; the run ends
with FaultBudgetSpent when fewer than `cluster.rollout_actors.min` are alive and none is starting; a
place that is given back leaves no reservation; no process outlives `stop`.

How long a place waits before a process is started in it again. A process that dies once is replaced
at once; one that dies again and again must not burn its budget in a second.

The time of engines, place by place, from what their actors told. Hides that a place may have had
several processes: what lies between the last word of one and the first work of its successor is
`restarting`, as soon as the successor tells of itself.

One rollout actor process, as the driver and the coordinator see it. Hides that it is a Ray actor,
and on which node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import ray

from async_grpo.cluster.engine_slots import EngineSlot, EngineSlots
from async_grpo.cluster.placement import Placement, PlacementError, Slot, describe
from async_grpo.cluster.post_mortem import examine, findings_of
from async_grpo.cluster.processes import MAX_CALLS, RolloutProcess
from async_grpo.cluster.relays import Relays
from async_grpo.cluster.session import Session
from async_grpo.config.schema import Config
from async_grpo.errors import FaultBudgetSpent, RunError, SetupError
from async_grpo.replay.partial import PartialStart
from async_grpo.replay.token_ledger import ActorReport, TimeTotals
from async_grpo.runtime.listener import FailureHandler, RunListener
from async_grpo.runtime.time_ledger import ENGINE_CAUSES
from async_grpo.weights.transport import (
    UNPUBLISHED,
    Announcement,
    Receipt,
    TokenSequence,
    TornTransfer,
)

SECONDS = (0.0, 2.0, 10.0, 30.0)


def back_off_s(deaths: int) -> float:
    """Seconds to wait after the `deaths`-th death in a place (from 1)."""
    return SECONDS[min(max(deaths, 1), len(SECONDS)) - 1]


FINAL_REPORT_S = 5.0


class EngineView(Protocol):
    """`handle` is its Ray actor."""

    actor_id: str
    handle: Any


def engine_times(
    spent: Mapping[str, TimeTotals],
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """`time/engine/...`: means over all places that there were; and the seconds by cause of each
    place, under the name of its actors.
    """
    places: dict[str, list[TimeTotals]] = {}
    for actor_id, one in spent.items():
        places.setdefault(actor_id.partition(".")[0], []).append(one)  # `actor-<place>.<process>`
    seconds = {
        name: _of_place(sorted(processes, key=lambda one: one[0]))
        for name, processes in sorted(places.items())
    }
    if not seconds:
        return {}, {}
    return {
        f"time/engine/{cause}": sum(one[cause] for one in seconds.values()) / len(seconds)
        for cause in ENGINE_CAUSES
    }, seconds


def _of_place(processes: Sequence[TimeTotals]) -> dict[str, float]:
    out, until = dict.fromkeys(ENGINE_CAUSES, 0.0), processes[0][0]
    for began, seconds in processes:
        out["restarting"] += max(began - until, 0.0)
        for cause, value in seconds.items():
            out[cause] += value
        until = began + sum(seconds.values())
    return out


async def final_reports(engines: Sequence[EngineView]) -> dict[str, ActorReport]:
    """What they did in all, of those that answer: the queue is closed, so they produce nothing
    more.
    """

    async def ask(engine: EngineView) -> ActorReport | None:
        try:
            return await asyncio.wait_for(engine.handle.final_report.remote(), FINAL_REPORT_S)
        except (TimeoutError, ray.exceptions.RayError):
            return None  # it is about to be ended; what it told last counts

    answers = await asyncio.gather(*[ask(engine) for engine in engines])
    return {
        engine.actor_id: answer
        for engine, answer in zip(engines, answers, strict=True)
        if answer is not None
    }


@dataclass
class RemoteEngine:
    """`localize` gives an announcement the form that this engine's node needs."""

    actor_id: str
    slot: int
    tensor_parallel_size: int
    handle: Any
    localize: Callable[[Announcement], Awaitable[Announcement]]
    acknowledged: str = ""
    """Label of the last weights that it took."""

    async def connect(self, payload: dict[str, Any]) -> Receipt:
        return await self.handle.connect.remote(payload)

    async def receive(self, announcement: Announcement) -> Receipt:
        try:
            local = await self.localize(announcement)
        # the relay's fault: the engine is well and takes the publication when it is repeated
        except ray.exceptions.RayError as error:
            return Receipt(
                "",
                "torn",
                f"the bytes did not reach its node: {str(error).strip().splitlines()[-1]}",
            )
        receipt = await self.handle.receive.remote(local)
        self.acknowledged = receipt.serving if not receipt.failure else self.acknowledged
        return receipt

    async def score(self, sequences: list[TokenSequence]) -> list[tuple[list[str], np.ndarray]]:
        return await self.handle.score.remote(sequences)

    async def partials(self) -> list[tuple[PartialStart, bytes]]:
        return await self.handle.partials.remote()

    async def probe_sequences(self) -> list[tuple[list[int], list[int], np.ndarray]]:
        return await self.handle.probe_sequences.remote()


PROBE_INTERVAL_S = 5.0
SURVEY_INTERVAL_S = 5.0
CLOSE_TIMEOUT_S = 5.0
DRAIN_TIMEOUT_S = 60.0
EXAMINED = 8


class ForfeitQueue(Protocol):
    """The queue as the manager sees it."""

    async def forfeit(self, actor_id: str) -> None: ...
    async def is_over(self) -> bool: ...


Join = Callable[[RemoteEngine, Callable[[], None]], Awaitable[None]]


class ActorManager:
    """All rollout actors of a run."""

    def __init__(
        self,
        config: Config,
        *,
        session: Session,
        placement: Placement,
        options: list[dict[str, Any]],
        queue: Any,
        client: ForfeitQueue,
        relays: Relays,
        model_dir: str,
        backend: str,
        listener: RunListener,
        failures: FailureHandler,
        partials: str | None = None,
    ) -> None:
        """failures: told when the run cannot go on. partials: `PartialCollector.path`."""
        self._config, self._device, self._queue, self._client, self._partials = (
            config,
            placement.device,
            queue,
            client,
            partials,
        )
        self._model_dir, self._backend = model_dir, backend
        self._listener, self._failures = listener, failures
        self._places = EngineSlots(config, session=session, placement=placement, options=options)
        self._relays = relays
        self._alive: list[RemoteEngine] = []
        self._processes: dict[str, RemoteEngine] = {}
        self._counters: dict[str, dict[str, float]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._look = asyncio.Event()
        self._join: Join | None = None
        self._stopping = False
        self.faults = self.restarts = 0
        self.deaths: list[str] = []
        self.examined: dict[str, dict[str, Any]] = {}
        """What the processes of the last actors that were dropped showed before they were killed.
        """

    async def start(self) -> None:
        """Start one actor per place and wait until all of them have loaded their engine."""
        engines = [self._create(place) for place in self._places.all()]
        await asyncio.gather(*[self._load(engine) for engine in engines])
        self._alive = engines

    def begin(self, join: Join, calm: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        """Let every actor produce groups, and watch them and the cluster.

        `join(engine, admit)` brings a newcomer to the live weights; in the block of `calm()` no
        publication is under way.
        """
        self._join, self._calm = join, calm
        for engine in self._alive:
            self._spawn(self._watch(engine))
        self._spawn(self._probe())
        self._spawn(self._survey())

    async def add(self) -> str:
        """Start one more rollout actor; its id, once it is in the set (over NCCL it serves after
        the next boundary between learner steps).

        On CPU it may share cores with others. Raises PlacementError where the cluster has no room,
        RunError when it is not to be or did not start.
        """
        self._need_run()
        actors, nodes = self._config.cluster.rollout_actors, await self._places.nodes()
        if actors.max is not None and len(self._places) >= actors.max:
            raise RunError(
                f"there are {len(self._places)} rollout actors and "
                f"cluster.rollout_actors.max is {actors.max}; raise it"
            )
        slot = self._places.room(nodes, crowd=True)
        if slot is None:
            raise PlacementError(
                f"the cluster has no room for another rollout actor: {describe(nodes)}"
            )
        place = self._open(slot)
        if self._places.limit is not None:
            self._places.limit = max(self._places.limit, len(self._places))
        await asyncio.wait({place.filling})
        if place.engine is None or place.engine not in self._alive:
            raise RunError(
                "the rollout actor did not start: "
                f"{self.deaths[-1] if self.deaths else 'its place is gone'}"
            )
        return place.engine.actor_id

    async def remove(self, actor_id: str, *, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """End one rollout actor for good: it takes no new tickets, and what it has not finished at
        the deadline is issued again.

        It is not replaced; the cluster's room for it stays empty until `add`. Raises ValueError for
        an id that is not alive, RunError when fewer than `cluster.rollout_actors.min` would be
        left.
        """
        self._need_run()
        place = next(
            (
                place
                for place in self._places.all()
                if place.engine in self._alive and place.engine.actor_id == actor_id
            ),
            None,
        )
        if place is None:
            raise ValueError(
                f"{actor_id} is not alive; these are: "
                f"{', '.join(engine.actor_id for engine in self._alive)}"
            )
        staying = sum(not other.leaving for other in self._places.all() if other is not place)
        if staying < self._config.cluster.rollout_actors.min:
            raise RunError(
                f"without {actor_id} there would be {staying} rollout actors; "
                "cluster.rollout_actors.min forbids it"
            )
        place.leaving, engine = True, place.engine
        self._places.limit = staying
        drained, _ = await asyncio.wait(
            {asyncio.ensure_future(_settled(engine.handle.drain.remote()))}, timeout=timeout_s
        )
        async with self._calm():
            await self._vacate(place)
        unfinished = " before it had finished all of its groups, which are issued again"
        self._listener.note(
            f"{actor_id} was removed{'' if drained else unfinished}; "
            f"{len(self._alive)} rollout actors go on"
        )

    def alive(self) -> Sequence[RemoteEngine]:
        """Engines that hold or may be given tickets."""
        return tuple(self._alive)

    def processes(self) -> Sequence[RemoteEngine]:
        """All that were started and not ended, those that do not serve yet too."""
        return tuple(self._processes.values())

    def measurements(self) -> dict[str, float]:
        """Actors that are alive, and what all of them, the dead ones too, have told when they were
        last probed.
        """
        told = self._counters.values()
        kinds = {
            "continued_tokens",
            *(
                name
                for counters in told
                for name in counters
                if name.startswith("verifier_errors_")
            ),
        }
        return {
            "cluster/rollout_actors": float(len(self._alive)),
            "cluster/faults": float(self.faults),
            "cluster/restarts": float(self.restarts),
            **{
                f"rollout/{name}": sum((counters.get(name, 0.0) for counters in told), 0.0)
                for name in ("verifier_errors", *sorted(kinds))
            },
            "rollout/attempts_failed": sum((counters.get("failed", 0.0) for counters in told), 0.0),
        }

    async def drop(self, actor_id: str, error: BaseException) -> None:
        """Declare an actor dead: forfeit its tickets, kill what is left of it, start another in its
        place.
        """
        engine = next((engine for engine in self._alive if engine.actor_id == actor_id), None)
        if engine is None or self._stopping:
            return
        self._alive.remove(engine)
        await self._client.forfeit(actor_id)
        place = self._places.get(engine.slot)
        seen = await examine(
            self._config.run.dir, actor_id, error, node_id=place and place.slot.node_id
        )
        self.examined = dict([*self.examined.items(), (actor_id, seen)][-EXAMINED:])
        self._kill(engine)
        place = self._places.get(engine.slot)  # which may be gone meanwhile
        if place is not None and not place.leaving and not self._stopping:
            place.filling = self._spawn(
                self._replace(place, _fault(engine, error) + findings_of(seen))
            )

    async def died(self, engine: RemoteEngine, error: BaseException) -> None:
        """`drop` it. Raises FaultBudgetSpent before training has begun, when none is replaced."""
        if self._join is None:
            raise FaultBudgetSpent(
                f"a rollout actor died before training began: {error}"
            ) from error
        await self.drop(engine.actor_id, error)

    async def stop(self) -> None:
        """Stop all actors and their engines; one that does not answer within its deadline is
        killed.
        """
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        closing = [engine.handle.close.remote() for engine in self._alive]
        if closing:
            await asyncio.wait(
                [asyncio.ensure_future(_settled(call)) for call in closing], timeout=CLOSE_TIMEOUT_S
            )
        for engine in list(self._processes.values()):  # those that are still starting too
            self._kill(engine)
        self._alive = []

    def _create(self, place: EngineSlot) -> RemoteEngine:
        actor_id = place.next_id()
        actor = ray.remote(RolloutProcess).options(max_concurrency=MAX_CALLS, **place.option)
        handle = actor.remote(
            self._config,
            actor_id=actor_id,
            queue=self._queue,
            model_dir=self._model_dir,
            device=self._device,
            cores=place.slot.cores,
            partials=self._partials,
        )
        size, node_id = self._config.cluster.engine.tensor_parallel_size, place.slot.node_id
        place.engine = RemoteEngine(
            actor_id,
            place.index,
            size,
            handle,
            lambda announcement: self._relays.local(announcement, node_id),
        )
        self._processes[actor_id] = place.engine
        return place.engine

    def _kill(self, engine: RemoteEngine) -> None:
        ray.kill(engine.handle)
        self._processes.pop(engine.actor_id, None)

    async def _load(self, engine: RemoteEngine) -> None:
        seconds = self._config.watchdog.start_timeout_s
        try:
            await asyncio.wait_for(
                engine.handle.start.remote(backend=self._backend, label=UNPUBLISHED), seconds
            )
        except TimeoutError as error:
            raise TimeoutError(
                f"starting {engine.actor_id} took longer than watchdog.start_timeout_s = "
                f"{seconds:g} s"
            ) from error

    async def _watch(self, engine: RemoteEngine) -> None:
        try:
            await engine.handle.run.remote()
            place = self._places.get(engine.slot)
            leaving = place is None or place.leaving
            if not leaving and not self._stopping and not await self._client.is_over():
                await self.drop(
                    engine.actor_id, RunError("it stopped producing before the run was over")
                )
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RunError):
                # not a fault of this process: another one would meet the same
                raise error.cause from error
            await self.drop(engine.actor_id, error)
        except ray.exceptions.RayError as error:
            await self.drop(engine.actor_id, error)

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S)
            await asyncio.gather(*[self._probe_one(engine) for engine in self._alive])

    async def _probe_one(self, engine: RemoteEngine) -> None:
        timeout_s = self._config.watchdog.probe_timeout_s
        try:
            self._counters[engine.actor_id] = await asyncio.wait_for(
                engine.handle.health.remote(), timeout_s
            )
        except TimeoutError:
            await self.drop(
                engine.actor_id,
                TimeoutError(
                    f"no answer to a probe within watchdog.probe_timeout_s = {timeout_s:g} s"
                ),
            )
        except ray.exceptions.RayError as error:
            await self.drop(engine.actor_id, error)

    async def _survey(self) -> None:
        """Follow the cluster: give back what was on nodes that are gone, use new room, and see
        whether enough is left.
        """
        while True:
            self._look.clear()
            nodes = await self._places.nodes()
            for node_id in {place.slot.node_id for place in self._places.all()} - {
                node.node_id for node in nodes
            }:
                await self._lose(node_id)
            while (self._places.limit is None or len(self._places) < self._places.limit) and (
                slot := self._places.room(nodes)
            ) is not None:
                self._open(slot)
            least = self._config.cluster.rollout_actors.min
            starting = sum(
                place.engine not in self._alive and not place.leaving
                for place in self._places.all()
            )
            if len(self._alive) < least and not starting:
                self._failures.fail(
                    FaultBudgetSpent(
                        f"{len(self._alive)} rollout actors are alive, "
                        f"cluster.rollout_actors.min is {least}, and the cluster has no "
                        "room for "
                        f"another; {self.deaths[-1]}; the faults so far are {self.faults} "
                        "of cluster.restart_budget = "
                        f"{self._config.cluster.restart_budget}; it has {describe(nodes)}"
                    )
                )
                return
            try:
                await asyncio.wait_for(self._look.wait(), SURVEY_INTERVAL_S)
            except TimeoutError:
                continue

    def _need_run(self) -> None:
        if self._join is None:
            raise RunError(
                "rollout actors can be added and removed once the first learner step has begun"
            )

    def _open(self, slot: Slot) -> EngineSlot:
        """A new place, which fills itself."""
        place = self._places.open(slot)
        place.filling = self._spawn(self._settle(place))
        return place

    async def _settle(self, place: EngineSlot) -> None:
        """Reserve a new place and start an actor there."""
        address = self._places.address(place.slot.node_id)
        try:
            await self._places.reserve(place)
        except (SetupError, ray.exceptions.RayError) as error:
            if isinstance(error, SetupError):
                self._places.refuse(place.slot.node_id)
            await self._vacate(place)
            self._listener.note(f"no rollout actor is started on node {address} ({_line(error)})")
            return
        engine = self._create(place)
        self._listener.note(f"node {address} has room: {engine.actor_id} starts there")
        fault = await self._serve(place, engine)
        if fault is not None:
            await self._replace(place, fault)

    async def _replace(self, place: EngineSlot, fault: str) -> None:
        """Start processes in this place until one serves, the place is of no use any more or the
        budget is spent.
        """
        while await self._may_restart(place, fault):
            engine = self._create(place)
            self._listener.note(
                f"{fault}; its groups are issued again, {engine.actor_id} takes its place"
            )
            fault = await self._serve(place, engine)
            if fault is None:
                return

    async def _may_restart(self, place: EngineSlot, fault: str) -> bool:
        """Count a fault; False when it ended the place."""
        cluster = self._config.cluster
        if not await self._places.node_serves(place):
            await self._lose(place.slot.node_id)  # not a fault of this process
            return False
        self.deaths.append(fault)
        if self.faults >= cluster.restart_budget:
            self._places.give_up(place)
            await self._retire(place, f"{fault}; the restart budget is spent")
            return False
        self.faults += 1
        if not await self._places.reserved_again(place):
            await self._retire(
                place,
                f"{fault}; it got no resources within cluster.resources_timeout_s = "
                f"{cluster.resources_timeout_s:g} s",
            )
            return False
        self.restarts += 1
        await asyncio.sleep(back_off_s(place.incarnations))
        return True

    async def _serve(self, place: EngineSlot, engine: RemoteEngine) -> str | None:
        """Bring a new process to the live weights and into the set; the fault that it met, if it
        did.
        """
        started = time.monotonic()
        if self._join is None:
            raise FaultBudgetSpent(
                "a rollout actor died before the first learner step, and is not replaced "
                f"then: {self.deaths[-1]}"
            )
        try:
            await self._load(engine)
            await self._join(engine, lambda: self._alive.append(engine))
        except (TimeoutError, TornTransfer, ray.exceptions.RayError) as failure:
            self._kill(engine)
            return f"{engine.actor_id} did not start ({_line(failure)})"
        self._listener.note(
            f"{engine.actor_id} serves the live weights after {time.monotonic() - started:.0f} s"
        )
        self._spawn(self._watch(engine))
        return None

    async def _lose(self, node_id: str) -> None:
        """A node is gone: one fault, whatever was on it."""
        places = [place for place in self._places.all() if place.slot.node_id == node_id]
        if not places:
            return
        for place in places:
            self._places.drop(place)
        self.faults = min(self.faults + 1, self._config.cluster.restart_budget)
        names = (
            ", ".join(place.engine.actor_id for place in places if place.engine is not None)
            or "a place for one"
        )
        self.deaths.append(f"node {self._places.address(node_id)} is gone, and with it {names}")
        for place in places:
            await self._vacate(place)
        self._listener.note(f"{self.deaths[-1]}; {len(self._alive)} rollout actors go on")
        self._look.set()

    async def _retire(self, place: EngineSlot, why: str) -> None:
        await self._vacate(place)
        self._listener.note(f"{why}; {len(self._alive)} rollout actors go on")
        self._look.set()

    async def _vacate(self, place: EngineSlot) -> None:
        """End what is in this place and give its reservation back."""
        self._places.drop(place)
        if place.filling is not None and place.filling is not asyncio.current_task():
            place.filling.cancel()
        if place.engine in self._alive:
            self._alive.remove(place.engine)
            await self._client.forfeit(place.engine.actor_id)
        if place.engine is not None and place.engine.actor_id in self._processes:
            self._kill(place.engine)
        self._places.release(place)

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self._stopping:
            self._failures.fail(task.exception())


def _fault(engine: RemoteEngine, error: BaseException) -> str:
    return f"{engine.actor_id} died ({_line(error)})"


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


async def _settled(call: Any) -> None:
    with suppress(ray.exceptions.RayError):  # it is being stopped; dead already is just as good
        await call
