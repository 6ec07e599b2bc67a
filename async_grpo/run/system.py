"""All processes of a run, started in parallel and taken down in order.

Runs in: the driver. The composition root: gives the plain parts (loop, coordinator) the Ray-backed
ones (queue, actor manager, learner group). A System exists once its places are reserved, and then
has all of its parts, whether their processes serve yet or not. From the trainer's `start` to the
first learner step (`||`: beside each other, `->`: waits for; times are of the engines, which need
longest):

    check           configuration, task, checkpoint: files only
    connect         Ray joins or starts || torch and this module are imported
    reserve         room for all -> the run directory is seen by all nodes -> places of the ranks
                    -> places of the engines                (cluster.resources_timeout_s)
                    -> micro-batches that fit the memory there
    download        models of the hub, on every node that loads them; no deadline runs
                    || MLflow connects, in a thread until step 1
    start           queue opens its journal                 || every rollout actor loads its engine
                                                            ||   and every frozen model
                      -> ranks load model or checkpoint     ||
                      -> ranks repeat the recorded steps up ||
                         to the step that the queue is at   ||     (watchdog.start_timeout_s each)
    open_weights    engines connect -> load-path check -> the learner's weights are published
                      -> the queue declares their version live
                      -> their processes and the cluster are watched
    step 1          actors take tickets and produce -> the queue has a batch -> the loop trains it
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from async_grpo.cluster.deaths import CallFailed, cannot_be_reached
from async_grpo.cluster.engine_processes import ActorSpec, EngineSlots
from async_grpo.cluster.evaluation import Evaluations, Rows, WhenDone
from async_grpo.cluster.frozen_models import FrozenModels
from async_grpo.cluster.learner_group import LearnerGroup
from async_grpo.cluster.placement import Placement, Slot, lent_cores, refuse
from async_grpo.cluster.queue import MAX_CALLS, DriverQueue, QueueProcess
from async_grpo.cluster.relays import Relays
from async_grpo.cluster.rollout_actors import ActorManager
from async_grpo.cluster.samples import TrainingSamples
from async_grpo.cluster.session import RaySession
from async_grpo.cluster.verifier_errors import VerifierErrors
from async_grpo.config.schema import Config
from async_grpo.errors import FaultBudgetSpent, LearnerLost
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.resume import JournalSettings
from async_grpo.replay.rules import QueueSettings
from async_grpo.run.checkpoint.directory import Origin
from async_grpo.run.checkpoint.saver import Saver
from async_grpo.run.loop import BETWEEN, Loop
from async_grpo.run.partial_rollouts import PartialCollector
from async_grpo.run.planning import shaping
from async_grpo.run.post_mortem import Scene
from async_grpo.run.recovery import LearnerSupervisor
from async_grpo.runtime import stacks
from async_grpo.runtime.cores import Lender
from async_grpo.runtime.listener import RunListener
from async_grpo.runtime.storage import FileSum, StorageFailure, Written
from async_grpo.runtime.variables import variables
from async_grpo.tasks.mixture import ProblemOrder
from async_grpo.weights.coordinator import Coordinator
from async_grpo.weights.deliveries import ATTEMPTS
from async_grpo.weights.shared_gpu import SharedGpu
from async_grpo.weights.transport import TransferStuck, resolve_backend

POLL_S = 0.1
ACCOUNTS = ("goodput/", "time/learner/", "time/engine/")


@dataclass(frozen=True, slots=True)
class StartFacts:
    """Facts of a start before any process: weights of the reward components; problems by group, and
    fingerprint of the training data; `origin`, where it begins; `key`, the name of its memory
    segments; pass rates of problems, by an earlier run.
    """

    total_steps: int
    weights: dict[str, float]
    order: ProblemOrder
    fingerprint: str
    model_dir: str
    origin: Origin
    key: str
    pass_rates: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Places:
    """Reserved places, Ray options of each rank, engine and frozen model, and the weight transport
    they need.
    """

    session: RaySession
    placement: Placement
    backend: str
    learners: list[dict[str, Any]]
    engines: list[dict[str, Any]]
    frozen: list[dict[str, Any]] = field(default_factory=list)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Of all ranks, engines and frozen models."""
        where = self.placement
        return (*where.learners, *where.engines, *where.frozen)


async def reserve(config: Config, session: RaySession) -> Places:
    """Reserve a place for all processes with a model; colocated, rank i and engine i share one.
    Raises SetupError where the cluster or the configuration does not fit.
    """
    timeout_s = config.cluster.resources_timeout_s
    placement = await session.wait_for_room(config)
    slots = (*placement.learners, *placement.engines, *placement.frozen)
    if len(session.nodes()) > 1:
        used = {slot.node_id for slot in slots}
        await session.check_shared_storage(config.run.dir, used, timeout_s=timeout_s)
    backend = resolve_backend(config, device=placement.device, colocated=placement.colocated)
    refuse(config, device=placement.device, backend=backend)
    ranks = list(placement.learners)
    sharers = 2 if placement.colocated else 1
    learners = engines = await session.reserve(ranks, timeout_s=timeout_s, sharers=sharers)

    async def apart(slots: tuple[Slot, ...]) -> list[dict[str, Any]]:
        options = [await session.reserve([slot], timeout_s=timeout_s) for slot in slots]
        return [option for [option] in options]

    if not placement.colocated:
        engines = await apart(placement.engines)
    return Places(session, placement, backend, learners, engines, await apart(placement.frozen))


def _less_memory(config: Config, model_dir: str, places: Places) -> str:
    """Name settings with which a learner rank needs less."""
    from async_grpo.run.preflight.fit import what_helps
    from async_grpo.run.preflight.memory import shape_of

    return what_helps(config, shape_of(config, model_dir), places.placement, places.backend, most=0)


class System:
    """All parts of one start of a run. Made on the event loop that it belongs to."""

    def __init__(
        self,
        config: Config,
        facts: StartFacts,
        *,
        places: Places,
        listener: RunListener,
        saver: Saver,
    ) -> None:
        self._config, self._listener = config, listener
        self.event_loop = asyncio.get_running_loop()
        self._queue_open = self._producing = False
        self.queue_restarts = 0
        session, placement = places.session, places.placement
        shared = SharedGpu() if config.cluster.engine.sleep is True else None
        self._session = session
        self._lender = Lender(stacks.home(config.run.dir), lent_cores(config, placement))
        # on CPU all of them run on the driver's machine
        self.cores = len(os.sched_getaffinity(0)) if placement.device == "cpu" else None
        """Cores that engines and learner ranks share; None where models run on GPUs."""
        self._partials = PartialCollector(config, facts.origin.path, listener)
        snapshot = self._partials.snapshot(facts.origin.snapshot())
        self._queue_handle = _queue_process(config, facts, session=session, snapshot=snapshot)
        self.queue = DriverQueue(self._queue_handle)
        self.verifier_errors = VerifierErrors(config, self.queue, listener, self)
        self._relays = Relays(
            config,
            home=placement.learners[0].node_id,
            key=facts.key,
            where=session.on_node,
            listener=listener,
        )
        self.frozen = FrozenModels(
            config,
            options=places.frozen,
            device=placement.device,
            threads=len(lent_cores(config, placement)),
            listener=listener,
            failures=self,
        )
        slots = EngineSlots(
            config,
            session=session,
            placement=placement,
            options=places.engines,
            spec=ActorSpec(
                self._queue_handle,
                model_dir=facts.model_dir,
                device=placement.device,
                backend=places.backend,
                partials=self._partials.path,
                frozen=self.frozen.handles | self.frozen.addresses,
                env_vars=variables(config.env_vars, "task.env_vars"),
                order=facts.order,
            ),
            relays=self._relays,
        )
        self.actors = ActorManager(
            config, slots=slots, client=self.queue, listener=listener, failures=self, gpu=shared
        )
        self.learner = LearnerGroup(
            config,
            placement=placement,
            options=places.learners,
            queue=self._queue_handle,
            model_dir=facts.model_dir,
            backend=places.backend,
            key=facts.key,
            total_updates=facts.total_steps * config.updates_per_step,
            gpu=shared,
        )
        self.learner.less_memory = partial(_less_memory, config, facts.model_dir, places)
        if shared is not None:
            shared.between(
                take=self.learner.take_back,
                give=self.learner.give_back,
                sleep=self.actors.sleep,
                wake=self.actors.wake,
            )
        self.coordinator = Coordinator(
            config,
            learner=self.learner,
            engines=self.actors,
            backend=places.backend,
            live=lambda version, digest: self.queue.call(ReplayQueue.live, version, digest),
            exact=placement.device == "cpu" and config.model.dtype != "bfloat16",
            listener=listener,
            gpu=shared,
        )
        self._samples = TrainingSamples(
            config,
            queue=self.queue,
            model_dir=facts.model_dir,
            total_steps=facts.total_steps,
            weights=facts.weights,
            listener=listener,
        )
        self.loop = Loop(
            config,
            queue=self.queue,
            learner=self.learner,
            publisher=self.coordinator,
            weights=facts.weights,
            total_steps=facts.total_steps,
            steps_done=facts.origin.step,
            listener=self,
            samples=self._samples,
        )
        self.coordinator.held = self.loop.held
        self.supervisor = LearnerSupervisor(
            config,
            learner=self.learner,
            loop=self.loop,
            coordinator=self.coordinator,
            queue=self.queue,
            session=session,
            placement=placement,
            origin=facts.origin,
            saver=saver,
            listener=listener,
        )
        self.evaluations = Evaluations(
            config,
            coordinator=self.coordinator,
            actors=self.actors,
            epochs=self.supervisor,
            listener=listener,
            failures=self,
            total_steps=facts.total_steps,
            tell=lambda found: self.queue.call(ReplayQueue.evaluated, found),
        )

    async def start(self) -> None:
        """Start all processes, load the learner, and bring it to the step of the queue."""
        self._lender.start()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.actors.start())  # they need longest, and the queue only later
            tasks.create_task(self.frozen.start())
            report = await self.queue.opened(timeout_s=self._config.watchdog.start_timeout_s)
            self._queue_open = True
            if report is not None:
                self._listener.note(f"replay queue: {report}")
            progress = await self.queue.progress()
            await self.supervisor.start(progress["steps"], run_epoch=progress["run_epoch"])

    async def open_weights(self) -> dict[str, float]:
        """Connect the transport, check it, and make the learner's version live, again where a
        process died meanwhile. From then on the actors are watched.
        """
        self.loop.phase = "connecting the weights"
        unreachable = 0
        while True:
            try:
                measured = await self.supervisor.surviving(
                    lambda: self.coordinator.start(self.steps_done)
                )
                break
            except CallFailed as error:
                unreachable += cannot_be_reached(error)
                if not await self.actors.start() and not 0 < unreachable < ATTEMPTS:
                    raise  # it was none of them, or is one that is never reached
        self.actors.begin(self.coordinator)
        self.loop.phase = BETWEEN
        if note := await self.learner.transport_note():
            self._listener.note(note)
        return measured

    async def step(self) -> dict[str, float]:
        """Train one learner step, again after each recovery of a learner that died in it; its
        metrics. The first step lets the actors produce.
        """
        if not self._producing:
            self._producing = True
            self.actors.produce()
            self.verifier_errors.begin()
        loop, before = self.loop, self.steps_done
        while True:
            try:
                if loop.steps_done <= before:  # else it died after the step, and has repeated it
                    await loop.step()
                return self._with_faults(loop.latest)
            except (LearnerLost, TransferStuck) as error:
                await self.supervisor.recover(error, blame=loop.steps_done == before)

    async def settle(self) -> None:
        """Wait until the newest weights are live."""
        await self.supervisor.surviving(self.loop.finish)

    async def evaluate(self, total: int) -> tuple[dict[str, float], Rows]:
        """Evaluate on `total` problems while the learner waits; metrics, and some responses."""
        await self.settle()
        self.loop.phase = "evaluating"
        with self.loop.time.during("evaluating"):
            await self.supervisor.surviving(self._until_evaluated)
            return await self.evaluations.everywhere(
                total, step=self.steps_done, alone=self._between_steps
            )

    async def _between_steps(self) -> None:
        """Raise what ends the run; with NCCL, let an engine in that has started."""
        await self.settle()
        await self.supervisor.surviving(lambda: self.coordinator.refresh(self.steps_done))

    async def _until_evaluated(self) -> None:
        """Wait for an evaluation under way; raise for a learner that died meanwhile."""
        while not await self.evaluations.finish(POLL_S):
            await self.coordinator.refresh(self.steps_done)

    async def evaluate_beside(self, total: int, done: WhenDone) -> None:
        """Begin to evaluate the newest weights; `done(step, metrics, responses)` when complete."""
        await self.supervisor.surviving(self.loop.publish_newest)
        await self.evaluations.begin(total, done)

    async def restore(self, origin: Origin) -> None:
        """Go back to an earlier checkpoint of this run."""
        await self.settle()
        await self.supervisor.restore(origin)

    async def save(self, directory: Path) -> tuple[dict[str, Any], Written]:
        """Write learner and exported model; the queue's snapshot. Raises StorageFailure."""
        step = self.steps_done
        saved = await self.supervisor.surviving(partial(self._save, directory))
        if self.steps_done != step:
            raise StorageFailure(f"the learner was rolled back to step {self.steps_done} meanwhile")
        return saved

    async def _save(self, directory: Path) -> tuple[dict[str, Any], Written]:
        await self.loop.finish()
        self.loop.phase = f"writing the checkpoint of step {self.steps_done}"
        with self.loop.time.during("checkpointing"):
            snapshot = await self.queue.call(ReplayQueue.snapshot)
            self._partials.begin(self.actors.alive(), snapshot)
            return snapshot, await self.learner.write_checkpoint(
                str(directory), {"step": self.steps_done, "rows": self.loop.row_state()}
            )

    async def finish_save(self, directory: Path) -> dict[str, FileSum]:
        """Bring what `save` wrote to the disk beside training; its files. Raises StorageFailure."""
        sums = await self.learner.finish_checkpoint(str(directory))
        await self._partials.write(directory)
        return sums

    async def forget(self, *, segment: int, step: int) -> None:
        """Drop groups that only segments before this one, of the checkpoint of `step`, need."""
        await self.queue.call(ReplayQueue.forget, segment=segment, step=step)

    async def stop(self, *, orderly: bool = True) -> None:
        """Stop every part, whatever happens to the others. orderly: nothing went wrong."""
        self._lender.stop()
        self.evaluations.cancel()
        self.verifier_errors.cancel()
        if orderly:
            await self._samples.finish()
        closing = [self._close_queue(orderly=orderly)] if self._queue_open else []
        results = await asyncio.gather(*closing, return_exceptions=True)
        await self.coordinator.close()
        results += await asyncio.gather(
            self.actors.stop(), self.frozen.stop(), self.learner.stop(), return_exceptions=True
        )
        await self._relays.close()
        # A queue that died for good cannot be closed; the run has ended for that reason.
        self._session.end(self._queue_handle)
        failures = [
            result
            for result in results
            if isinstance(result, BaseException) and not isinstance(result, FaultBudgetSpent)
        ]
        if failures:
            raise failures[0]

    async def _close_queue(self, *, orderly: bool) -> None:
        """Close the queue; after an orderly end log the final accounts of tokens and time."""
        await self.verifier_errors.tell()
        await self.queue.call(ReplayQueue.close, orderly=orderly)
        if not orderly or not self.loop.time.began:
            return
        for actor_id, report in (await self.actors.final_reports()).items():
            await self.queue.call(ReplayQueue.tell, actor_id, report)
        metrics = self._with_faults(await self.queue.metrics() | self.loop.time_metrics())
        last = {name: value for name, value in metrics.items() if name.startswith(ACCOUNTS)}
        self.loop.latest |= last
        self._listener.logged(self.steps_done, last)

    def request_stop(self) -> None:
        """Wait for no more groups and for no evaluation. Safe in a signal handler."""
        self.loop.stopping = True
        self.event_loop.call_soon_threadsafe(self.evaluations.cancel)

    def scene(self) -> Scene:
        """Return the parts of the run, for a post-mortem."""
        return Scene(
            session=self._session,
            queue=self._queue_handle,
            actors=self.actors,
            learner=self.learner,
            loop=self.loop if self._queue_open else None,
        )

    @property
    def max_num_seqs(self) -> int:
        """Responses that an engine generates at the same time, as the engines have it."""
        return max(engine.max_num_seqs for engine in self.actors.alive())

    @property
    def run_epoch(self) -> int:
        """How often learner steps of the run were discarded."""
        return self.supervisor.run_epoch

    @property
    def steps_done(self) -> int:
        """Learner steps contained in the weights."""
        return self.loop.steps_done

    def _with_faults(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add what the actors count to the metrics; say once that the queue was restarted."""
        if (restarts := int(metrics.get("replay/restarts", 0))) > self.queue_restarts:
            budget = self._config.cluster.restart_budget
            died = "the replay queue's process died; it was started again from its journal"
            self._listener.note(f"{died} (restart {restarts} of at most {budget})")
            self._listener.fault(died)
            self.queue_restarts = restarts
        return (
            metrics
            | self.actors.metrics()
            | self._partials.metrics()
            | {"cluster/learner_restarts": float(self.supervisor.restarts)}
        )

    def logged(self, step: int, metrics: dict[str, float]) -> None:
        """Pass on what the loop measured, with what the actors count."""
        self._listener.logged(step, self._with_faults(metrics))

    def note(self, text: str) -> None:
        """Pass on what the loop has to say."""
        self._listener.note(text)

    def fail(self, error: BaseException) -> None:
        """End the run with this error; a learner that died is brought back instead."""
        if isinstance(error, LearnerLost):
            self.coordinator.learner_lost(error)  # no end, but the learner's way back
        else:
            self.loop.fail(error)


def _queue_process(
    config: Config, facts: StartFacts, *, session: RaySession, snapshot: dict[str, Any] | None
) -> Any:
    """Start the queue's process. Ray repeats calls that did not reach it, which all may come twice;
    with a journal, it starts the process again.
    """
    journal, repairs = None, {"max_task_retries": -1}
    if config.replay.journal.enable:
        journal = JournalSettings.of(config, start=facts.key, fingerprint=facts.fingerprint)
        repairs["max_restarts"] = config.cluster.restart_budget
    settings = QueueSettings.of(
        config,
        shaping=shaping(config, facts.weights),
        total_steps=facts.total_steps,
        trained_steps=facts.origin.step,
        problem=facts.order,
        problems=facts.order.problems,
        task_of=facts.order.task,
        pass_rates=facts.pass_rates,
    )
    return session.start_here(
        QueueProcess,
        settings,
        journal,
        snapshot,
        config.run.dir,
        max_concurrency=MAX_CALLS,
        **repairs,
    )
