"""Rollout actors: started, watched, replaced, added and removed.

Runs in: the driver. One slot per engine: a reservation on a node, which holds one process at a
time, under an id that is never used twice.

    starting --start()--> joining --weights served--> alive --run() ends, a probe fails--> dead
       ^                                                |                                 |
       +---------------------- budget: again -----------|---------------------------------+
                                                        |                                 |
         drained: slot given back <---- remove() -------+    node gone, budget: not again-+

    RestartBudget     decides: again, when, or not again; whether the run goes on
    EngineSlots       does: reservations, nodes, room for another; the process of a slot
    ActorManager      brings them together: who is alive, whose tickets are forfeited

Every few seconds the slots are compared with the cluster's nodes: slots on a node that is gone are
given back, and room for another engine becomes a new slot, up to `cluster.rollout_actors.max`.

Invariants: the moment an actor is declared dead it leaves the live set and its tickets are
forfeited; every death counts against one budget, and all that die with a node are one; the run ends
with FaultBudgetSpent when fewer than `cluster.rollout_actors.min` are alive and none is starting; a
slot that is given back leaves no reservation; no process outlives `stop`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import ray

from async_grpo.cluster.deaths import is_death, told
from async_grpo.cluster.engine_processes import EngineSlot, EngineSlots
from async_grpo.cluster.examination import examine, findings_of
from async_grpo.cluster.placement import Node, PlacementError, Slot, describe
from async_grpo.cluster.queue import DriverQueue
from async_grpo.cluster.remote_engine import GivenUp, RemoteEngine
from async_grpo.cluster.restart_budget import RestartBudget
from async_grpo.cluster.session import settled
from async_grpo.config.schema import Config
from async_grpo.errors import FaultBudgetSpent, RunError, SetupError
from async_grpo.replay.actor_reports import ActorReport
from async_grpo.replay.queue import ReplayQueue
from async_grpo.rollout.engine.base import Sampling
from async_grpo.rollout.generation import Generated
from async_grpo.runtime.listener import FailureHandler, RunListener, long_wait
from async_grpo.runtime.text import last_line
from async_grpo.tasks.base import Prompt
from async_grpo.weights.coordinator import Coordinator
from async_grpo.weights.shared_gpu import Apart
from async_grpo.weights.transport import TornTransfer

Result = TypeVar("Result")
PROBE_INTERVAL_S = 5.0
SURVEY_INTERVAL_S = 5.0
DRAIN_TIMEOUT_S = 60.0
FINAL_REPORT_S = 5.0
FOREACH_TIMEOUT_S = 60.0
EXAMINED = 8


class ActorManager:
    """All rollout actors of a run."""

    def __init__(
        self,
        config: Config,
        *,
        slots: EngineSlots,
        client: DriverQueue,
        listener: RunListener,
        failures: FailureHandler,
        gpu: Apart | None = None,
    ) -> None:
        """failures: told when the run cannot go on. gpu: whose turn it is on shared GPUs."""
        self._config, self._slots = config, slots
        self.gpu = gpu or Apart()
        self._client = client
        self._listener, self._failures = listener, failures
        self._alive: list[RemoteEngine] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._look = asyncio.Event()
        self._publications: Coordinator[RemoteEngine] | None = None
        self._stopping = self._producing = False
        self.budget = RestartBudget(config.cluster)
        self.late_probes = 0
        self.examined: dict[str, dict[str, Any]] = {}
        """State of the last dropped actors' processes, as seen before they were killed."""

    async def start(self) -> bool:
        """Bring an actor with a loaded engine into every slot, also where one has died since;
        whether there was such. Raises FaultBudgetSpent below `cluster.rollout_actors.min`.
        """
        before = self._alive[:]
        await asyncio.gather(*[self._fill(slot) for slot in self._slots.all()])
        self._alive = [slot.engine for slot in self._slots.all()]
        if not self.budget.enough(len(self._alive)):
            raise self._too_few("the run has not begun", await self._slots.nodes())
        return self._alive != before

    def begin(self, publications: Coordinator[RemoteEngine]) -> None:
        """Watch the actors, which serve the first weights, and the cluster."""
        self._publications = publications
        for engine in self._alive:
            self._spawn(self._probe(engine))
        self._spawn(self._survey())

    def produce(self) -> None:
        """Let every actor produce groups."""
        self._producing = True
        for engine in self._alive:
            self._spawn(self._watch(engine))

    async def add(self) -> str:
        """Start one more rollout actor, on CPU perhaps on shared cores; its id once it is in the
        set (over NCCL it serves after the next boundary between learner steps).

        Raises PlacementError where the cluster has no room, RunError when it may not or did not
        start.
        """
        self._need_run()
        actors, nodes = self._config.cluster.rollout_actors, await self._slots.nodes()
        if actors.max is not None and len(self._slots) >= actors.max:
            raise RunError(
                f"there are {len(self._slots)} rollout actors and "
                f"cluster.rollout_actors.max is {actors.max}; raise it"
            )
        room = self._slots.room(nodes, crowd=True)
        if room is None:
            raise PlacementError(
                f"the cluster has no room for another rollout actor: {describe(nodes)}"
            )
        slot = self._open(room)
        if self._slots.limit is not None:
            self._slots.limit = max(self._slots.limit, len(self._slots))
        assert slot.filling is not None
        await asyncio.wait({slot.filling})
        if slot.engine is None or slot.engine not in self._alive:
            raise RunError(
                "the rollout actor did not start: "
                f"{self.deaths[-1] if self.deaths else 'its engine slot is gone'}"
            )
        return slot.engine.actor_id

    async def remove(self, actor_id: str, *, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """End one rollout actor for good: it takes no tickets, and groups unfinished at the
        deadline are issued again. Its room in the cluster stays empty until `add`.

        Raises ValueError for an id that is not alive, RunError below `cluster.rollout_actors.min`.
        """
        self._need_run()
        alive = {slot.engine.actor_id: slot for slot in self._slots.all() if self._lives(slot)}
        if actor_id not in alive:
            raise ValueError(
                f"{actor_id} is not alive; these are: "
                f"{', '.join(engine.actor_id for engine in self._alive)}"
            )
        slot, engine = alive[actor_id], alive[actor_id].engine
        staying = sum(not other.leaving for other in self._slots.all() if other is not slot)
        if staying < self._config.cluster.rollout_actors.min:
            raise RunError(
                f"without {actor_id} there would be {staying} rollout actors; "
                "cluster.rollout_actors.min forbids it"
            )
        slot.leaving, self._slots.limit = True, staying
        drained, _ = await asyncio.wait(
            {asyncio.ensure_future(settled(engine.handle.drain.remote()))}, timeout=timeout_s
        )
        assert self._publications is not None, "begin() comes first"
        async with self._publications.between_publications():
            await self._vacate(slot)
        unfinished = " before it had finished all of its groups, which are issued again"
        self._listener.note(
            f"{actor_id} was removed{'' if drained else unfinished}; "
            f"{len(self._alive)} rollout actors go on"
        )

    @property
    def deaths(self) -> list[str]:
        """What was said of each death, the newest last."""
        return self.budget.deaths

    def alive(self) -> Sequence[RemoteEngine]:
        """Engines that hold tickets or may get some."""
        return tuple(self._alive)

    def processes(self) -> Sequence[RemoteEngine]:
        """All engines that were started and not ended, serving or not."""
        return self._slots.processes()

    def healthy_actor_ids(self) -> list[str]:
        """Ids of the actors that are alive."""
        return [engine.actor_id for engine in self._alive]

    async def foreach_actor(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float = FOREACH_TIMEOUT_S
    ) -> dict[str, Any]:
        """Call function(actor, *arguments) in the process of every healthy actor, at once; actor is
        its `GroupProducer`, on whose event loop a coroutine function runs, another one in a thread.
        Results by id; for one that raised, died or did not answer the error.
        """

        async def ask(engine: RemoteEngine) -> Any:
            try:
                answer = engine.handle.apply.remote(function, *arguments)
                return await asyncio.wait_for(answer, timeout_s)
            except TimeoutError:
                return TimeoutError(f"{engine.actor_id} did not answer within {timeout_s:g} s")
            except ray.exceptions.RayTaskError as error:
                return error.cause
            except ray.exceptions.RayError as error:
                return error

        return await self._of_all(ask)

    async def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> list[list[Generated]]:
        """Generate responses to each prompt, by turns on all engines (`generation.generate`).
        Raises RunError, also where an actor dies meanwhile.
        """
        engines = self.alive()
        if not engines:
            raise RunError("no rollout actor is alive now; ask again")
        limit = self._config.watchdog.step_timeout_s
        try:
            async with self.gpu.turn("engines"):
                calls = [
                    engines[index % len(engines)].handle.generate.remote(prompt, sampling)
                    for index, prompt in enumerate(prompts)
                ]
                return await asyncio.wait_for(asyncio.gather(*calls), limit)
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, RunError) else error) from error
        except ray.exceptions.RayError as error:
            raise RunError(
                f"a rollout actor died while it generated; ask again ({last_line(error)})"
            ) from error

    def metrics(self) -> dict[str, float]:
        """`cluster/...`: actors that are alive; since the start faults, restarts, late probes."""
        return {
            "cluster/rollout_actors": float(len(self._alive)),
            "cluster/faults": float(self.budget.faults),
            "cluster/restarts": float(self.budget.restarts),
            "cluster/late_probes": float(self.late_probes),
        }

    async def final_reports(self) -> dict[str, ActorReport]:
        """Last reports of the actors that answer in time, once the queue is closed."""

        async def ask(engine: RemoteEngine) -> ActorReport | None:
            try:
                return await asyncio.wait_for(engine.handle.final_report.remote(), FINAL_REPORT_S)
            except (TimeoutError, ray.exceptions.RayError):
                return None  # its last report counts

        found = await self._of_all(ask)
        return {actor_id: report for actor_id, report in found.items() if report is not None}

    async def drop(self, actor_id: str, error: BaseException) -> None:
        """Declare an actor dead: forfeit its tickets, kill it, start another in its slot. Raises
        the error before `begin`, when `start` does so.
        """
        if self._publications is None:
            raise error
        engine = next((engine for engine in self._alive if engine.actor_id == actor_id), None)
        if engine is None or self._stopping:
            return
        self._alive.remove(engine)
        engine.give_up(error)
        end = "is given up" if isinstance(error, TimeoutError) else "died"
        fault = f"{actor_id} on {engine.host} {end} ({told(error)})"
        self._listener.note(f"{fault}; its groups are issued again")
        await self._client.call(ReplayQueue.forfeit, actor_id)
        slot = self._slots.get(engine.slot)
        node_id = None if slot is None else slot.node_id
        seen = await examine(self._config.run.dir, actor_id, error, node_id=node_id)
        self.examined = dict([*self.examined.items(), (actor_id, seen)][-EXAMINED:])
        self._slots.kill(engine)
        slot = self._slots.get(engine.slot)  # which may be gone meanwhile
        if slot is not None and not slot.leaving and not self._stopping:
            slot.filling = self._spawn(self._replace(slot, fault + findings_of(seen)))

    async def sleep(self) -> None:
        """See `Sleepers.sleep`."""
        loaded = [one for one in self._slots.processes() if one.max_num_seqs]
        await asyncio.gather(*[self._let(one, one.sleep) for one in loaded])

    async def wake(self) -> None:
        """See `Sleepers.wake`."""
        asleep = [one for one in self._slots.processes() if one.asleep]
        await asyncio.gather(*[self._let(one, one.wake) for one in asleep])

    async def _let(self, engine: RemoteEngine, call: Callable[[], Awaitable[None]]) -> None:
        """Let an engine sleep or wake; drop one that does not."""
        try:
            async with asyncio.timeout(self._config.weight_sync.deadlines.acknowledge_s):
                await call()
        except (TimeoutError, ray.exceptions.RayError) as error:
            if engine in self._alive and self._publications is not None:
                await self.drop(engine.actor_id, error)
            self._slots.kill(engine)  # also one that is not in the set yet

    async def stop(self) -> None:
        """Stop all actors and their engines; kill those that do not answer within the deadline."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._slots.close(self._alive)
        self._alive = []

    async def _of_all(self, ask: Callable[[RemoteEngine], Awaitable[Result]]) -> dict[str, Result]:
        """Ask all that are alive at once; the answers by id."""
        engines = self.alive()
        answers = await asyncio.gather(*map(ask, engines))
        return {engine.actor_id: one for engine, one in zip(engines, answers, strict=True)}

    def _lives(self, slot: EngineSlot) -> bool:
        return slot.engine is not None and slot.engine in self._alive

    async def _fill(self, slot: EngineSlot) -> None:
        """Start processes in this slot until one has loaded or the slot is given back."""
        while True:
            loaded = slot.engine is not None
            engine = slot.engine or self._slots.begin(slot)
            health_s = self._config.watchdog.probe_timeout_s
            try:
                if loaded:
                    await asyncio.wait_for(engine.answer(), health_s)
                else:
                    await self._load(engine)
                return
            except (TimeoutError, ray.exceptions.RayError) as error:
                if not loaded and not is_death(error):
                    raise  # another one would meet the same
                fault = f"{engine.actor_id} died while the run started ({told(error)})"
            self._slots.kill(engine)
            if not await self._may_restart(slot, fault):
                return
            slot.engine = None
            self._listener.note(f"{fault}; another actor replaces it")

    async def _load(self, engine: RemoteEngine) -> None:
        async with self.gpu.turn("engines", wake=False):
            await self._slots.load(engine)

    async def _watch(self, engine: RemoteEngine) -> None:
        try:
            await engine.run()
            slot = self._slots.get(engine.slot)
            leaving = slot is None or slot.leaving or self._stopping
            if not leaving and not await self._client.call(ReplayQueue.is_over):
                await self.drop(
                    engine.actor_id, RunError("it stopped producing before the run was over")
                )
        except GivenUp:
            return
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RunError):
                # not a fault of this process: another one would meet the same
                raise error.cause from error
            await self.drop(engine.actor_id, error)
        except ray.exceptions.RayError as error:
            await self.drop(engine.actor_id, error)

    async def _probe(self, engine: RemoteEngine) -> None:
        """Probe an engine until its end, and give it up when it does not answer in time."""
        limit = self._config.watchdog.probe_timeout_s

        def late(text: str) -> None:
            self.late_probes += 1
            self._listener.note(text)

        while engine in self._slots.processes():
            await asyncio.sleep(PROBE_INTERVAL_S)
            try:
                with long_wait(f"a probe of {engine.actor_id}", lambda: engine.host, late):
                    async with asyncio.timeout(limit):  # `wait_for` may swallow a cancellation
                        await engine.answer()
                continue
            except TimeoutError:
                error: Exception = TimeoutError(
                    f"no answer to a probe within watchdog.probe_timeout_s = {limit:g} s"
                )
            except ray.exceptions.RayError as failure:
                error = failure
            engine.give_up(error)  # before it is in the set, too
            await self.drop(engine.actor_id, error)

    async def _survey(self) -> None:
        """Give back slots of lost nodes, open slots in new room, and fail below the minimum."""
        while True:
            self._look.clear()
            nodes = await self._slots.nodes()
            for node_id in self._slots.lost_nodes(nodes):
                await self._lose(node_id)
            while (room := self._slots.free_room(nodes)) is not None:
                self._open(room)
            starting = any(not self._lives(slot) and not slot.leaving for slot in self._slots.all())
            if not starting and not self.budget.enough(len(self._alive)):
                raise self._too_few("the cluster has no room for another", nodes)
            try:
                await asyncio.wait_for(self._look.wait(), SURVEY_INTERVAL_S)
            except TimeoutError:
                continue

    def _too_few(self, why: str, nodes: Sequence[Node]) -> FaultBudgetSpent:
        return self.budget.too_few(len(self._alive), why, cluster=describe(nodes))

    def _need_run(self) -> None:
        if self._publications is None:
            raise RunError(
                "rollout actors can be added and removed once the run serves its weights"
            )

    def _open(self, where: Slot) -> EngineSlot:
        """Open a slot, which fills itself."""
        slot = self._slots.open(where)
        slot.filling = self._spawn(self._settle(slot))
        return slot

    async def _settle(self, slot: EngineSlot) -> None:
        """Reserve a new slot and start an actor there."""
        address = self._slots.address(slot.node_id)
        try:
            await self._slots.reserve(slot)
        except (SetupError, ray.exceptions.RayError) as error:
            if isinstance(error, SetupError):
                self._slots.refuse(slot.node_id)
            await self._vacate(slot)
            self._listener.note(f"no rollout actor is started on node {address} ({told(error)})")
            return
        engine = self._slots.begin(slot)
        self._listener.note(f"node {address} has room: {engine.actor_id} starts there")
        fault = await self._serve(engine)
        if fault is not None:
            await self._replace(slot, fault)

    async def _replace(self, slot: EngineSlot, fault: str) -> None:
        """Start processes in this slot until one serves or the slot is given back."""
        while await self._may_restart(slot, fault):
            engine = self._slots.begin(slot)
            self._listener.note(f"{fault}; {engine.actor_id} replaces it")
            again = await self._serve(engine)
            if again is None:
                return
            fault = again

    async def _may_restart(self, slot: EngineSlot, fault: str) -> bool:
        """Decide after a fault, and wait; False when it ended the slot."""
        if not await self._slots.node_serves(slot):
            await self._lose(slot.node_id)  # not a fault of this process
            return False
        decision = self.budget.died(fault, deaths=slot.incarnations)
        self._listener.fault(fault)
        if not decision.again:
            self._slots.give_up(slot)
        elif not await self._slots.reserved_again(slot):
            decision = self.budget.unplaced(fault)
        if not decision.again:
            await self._vacate(slot)
            self._listener.note(f"{decision.why}; {self._rest()}")
            self._look.set()
            return False
        self.budget.restarts += 1
        await asyncio.sleep(decision.after_s)
        return True

    async def _serve(self, engine: RemoteEngine) -> str | None:
        """Bring a new process to the live weights and into the live set; its fault, if any."""
        started = time.monotonic()
        assert self._publications is not None, "begin() comes first"
        try:
            await self._load(engine)
            self._spawn(self._probe(engine))
            await self._publications.join(engine, lambda: self._alive.append(engine))
        except (TimeoutError, TornTransfer, ray.exceptions.RayError) as failure:
            self._slots.kill(engine)
            return f"{engine.actor_id} did not start ({told(failure)})"
        self._listener.note(
            f"{engine.actor_id} serves the live weights after {time.monotonic() - started:.0f} s"
        )
        if self._producing:
            self._spawn(self._watch(engine))
        return None

    async def _lose(self, node_id: str) -> None:
        """Count a lost node as one fault, whatever was on it."""
        slots = [slot for slot in self._slots.all() if slot.node_id == node_id]
        if not slots:
            return
        for slot in slots:
            self._slots.drop(slot)
        names = [slot.engine.actor_id for slot in slots if slot.engine is not None]
        lost = self.budget.node_left(self._slots.address(node_id), names)
        self._listener.fault(lost)
        for slot in slots:
            await self._vacate(slot)
        self._listener.note(f"{lost}; {self._rest()}; run `ray start` there again")
        self._look.set()

    def _rest(self) -> str:
        """Say who goes on; in the start those that are about to be."""
        count = len(self._slots if self._publications is None else self._alive)
        return f"{count} rollout actors go on"

    async def _vacate(self, slot: EngineSlot) -> None:
        """End the process in this slot and give its reservation back."""
        self._slots.drop(slot)
        if slot.filling is not None and slot.filling is not asyncio.current_task():
            slot.filling.cancel()
        if self._lives(slot):
            self._alive.remove(slot.engine)
            await self._client.call(ReplayQueue.forfeit, slot.engine.actor_id)
        if slot.engine in self._slots.processes():
            self._slots.kill(slot.engine)
        self._slots.release(slot)

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._stopping:
            self._failures.fail(error)
