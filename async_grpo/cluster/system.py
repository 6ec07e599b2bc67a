"""All processes of a run, started in parallel and taken down in order.

Runs in: the driver. The composition root: it gives the plain parts (loop, coordinator) the
Ray-backed ones (queue, actor manager, learner group). Start-up is a race on purpose: the engines
need longest, so the learner loads beside them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import ray

from async_grpo.algo.filters import FilterRule
from async_grpo.checkpoint.directory import Origin
from async_grpo.cluster.evaluation import Evaluations, Rows, WhenDone
from async_grpo.cluster.learner_group import LearnerGroup
from async_grpo.cluster.learner_recovery import LearnerSupervisor, PendingCheckpoint
from async_grpo.cluster.partial_rollouts import PartialCollector
from async_grpo.cluster.placement import Placement, refuse
from async_grpo.cluster.post_mortem import Scene
from async_grpo.cluster.processes import MAX_CALLS
from async_grpo.cluster.prometheus import Exported
from async_grpo.cluster.queue import DriverQueue, QueueProcess
from async_grpo.cluster.relays import Relays
from async_grpo.cluster.rollout_actors import ActorManager, engine_times, final_reports
from async_grpo.cluster.samples import TrainingSamples
from async_grpo.cluster.session import Session
from async_grpo.cluster.watchdog import whole_step
from async_grpo.config.resume import training_digest
from async_grpo.config.schema import Config
from async_grpo.errors import FaultBudgetSpent, LearnerLost
from async_grpo.learner.drafts import remove_drafts
from async_grpo.loop import Loop
from async_grpo.planning import shaping
from async_grpo.replay.resume import JournalSettings
from async_grpo.replay.rules import QueueSettings
from async_grpo.runtime import stacks
from async_grpo.runtime.lifetime import remove_abandoned
from async_grpo.runtime.listener import RunListener
from async_grpo.runtime.storage import FileSum, StorageFailure, Written
from async_grpo.tasks.registry import problem_index
from async_grpo.weights.coordinator import Coordinator
from async_grpo.weights.shared_memory import remove_segments
from async_grpo.weights.transport import fallback_directory, resolve_backend

POLL_S = 0.1
ACCOUNTS = ("goodput/", "time/learner/", "time/engine/")


class System:
    """Queue, rollout actors, learner ranks, coordinator and loop of one run."""

    def __init__(
        self,
        config: Config,
        *,
        total_steps: int,
        weights: dict[str, float],
        problems: int,
        fingerprint: str,
        key: str,
    ) -> None:
        """`weights` of the reward components; `problems` and `fingerprint` of the training data;
        `key` of this start's segments.
        """
        self._config, self._total_steps, self._weights, self._key = (
            config,
            total_steps,
            weights,
            key,
        )
        self._problems, self._fingerprint, self._directory = (
            problems,
            fingerprint,
            stacks.home(config.run.dir),
        )
        self._session: Session | None = None
        self.actors: ActorManager | None = None
        self.learner: LearnerGroup | None = None
        self._queue_handle: Any = None
        self.loop: Loop | None = None
        self.coordinator: Coordinator | None = None
        self.gang: LearnerSupervisor | None = None
        self.evaluations: Evaluations | None = None
        self._samples: TrainingSamples | None = None
        self._relays: Relays | None = None
        self.device = ""
        self.model_dir = ""
        self._producing = False
        self.queue_restarts = 0
        self.engine_times: dict[str, dict[str, float]] = {}
        """Seconds by cause of every place for an engine, by the time of the last step."""

    def connect(self, session: Session) -> None:
        """Belong to this Ray connection, which ends with `disconnect`."""
        self._session = session
        stacks.end(self._directory)  # of a start that was killed
        stacks.register("driver", self._directory)
        self.exported = Exported(self._config.run.name)

    async def start(
        self, *, model_dir: str, origin: Origin, listener: RunListener, saver: PendingCheckpoint
    ) -> None:
        """Start all processes, load model and checkpoint, and bring the learner to the step that
        the queue is at.
        """
        self._listener, self.event_loop = listener, asyncio.get_running_loop()
        remove_segments(
            self._key, fallback_directory(self._config)
        )  # in the run's own directory those of a start that was killed
        assert self._session is not None, "connect() comes first"
        config, session = self._config, self._session
        self.model_dir = model_dir
        placement = await session.wait_for_room(config)
        self.device = placement.device
        used = {slot.node_id for slot in (*placement.learners, *placement.engines)}
        if len(session.nodes()) > 1:
            await session.check_shared_storage(
                config.run.dir, used, timeout_s=config.cluster.resources_timeout_s
            )
        backend = resolve_backend(config, device=placement.device, colocated=placement.colocated)
        refuse(config, device=placement.device, backend=backend)
        learner_options, engine_options = await self._reserve(placement)
        self._under_way = PartialCollector(config, origin.path, listener)
        self._create_queue(origin)
        self._relays = Relays(
            home=placement.learners[0].node_id,
            key=self._key,
            fallback=fallback_directory(config),
            where=session.on_node,
            listener=listener,
        )
        self.actors = ActorManager(
            config,
            session=session,
            placement=placement,
            options=engine_options,
            queue=self._queue_handle,
            client=self.queue,
            relays=self._relays,
            model_dir=model_dir,
            backend=backend,
            listener=listener,
            failures=self,
            partials=self._under_way.path,
        )
        self.learner = LearnerGroup(
            config,
            placement=placement,
            options=learner_options,
            queue=self._queue_handle,
            model_dir=model_dir,
            backend=backend,
            key=self._key,
            total_updates=self._total_steps * config.updates_per_step,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.actors.start())  # they need longest, and the queue only later
            if (
                report := await self.queue.opened(timeout_s=config.watchdog.start_timeout_s)
            ) is not None:
                listener.note(f"replay queue: {report}")
            progress = await self.queue.progress()
            exact = placement.device == "cpu" and config.model.dtype != "bfloat16"
            self.coordinator = Coordinator(
                config,
                learner=self.learner,
                engines=self.actors,
                backend=backend,
                live=self.queue.live,
                exact=exact,
                listener=listener,
                run_epoch=progress["run_epoch"],
            )
            self._samples = TrainingSamples(
                config,
                queue=self.queue,
                model_dir=model_dir,
                total_steps=self._total_steps,
                weights=self._weights,
                listener=listener,
            )
            self.loop = Loop(
                config,
                queue=self.queue,
                learner=self.learner,
                publisher=self.coordinator,
                weights=self._weights,
                total_steps=self._total_steps,
                steps_done=origin.step,
                listener=self,
                samples=self._samples,
            )
            self.gang = LearnerSupervisor(
                config,
                learner=self.learner,
                loop=self.loop,
                coordinator=self.coordinator,
                queue=self.queue,
                origin=origin,
                nodes_serve=partial(
                    self._nodes_serve, {slot.node_id for slot in placement.learners}
                ),
                saver=saver,
                listener=listener,
            )
            self.evaluations = Evaluations(
                config,
                coordinator=self.coordinator,
                actors=self.actors,
                epochs=self.gang,
                listener=listener,
                failures=self,
                total_steps=self._total_steps,
            )
            await self.gang.start(progress["steps"], run_epoch=progress["run_epoch"])

    async def open_weights(self) -> dict[str, float]:
        """Connect the transport, check it, and make the learner's version live."""
        self.coordinator.held = self.loop.held
        measured = await self.coordinator.start(self.loop.steps_done)
        if note := await self.learner.transport_note():
            self._listener.note(note)
        return measured

    async def step(self) -> dict[str, float]:
        """One learner step; the first one lets the actors produce."""
        if not self._producing:
            self._producing = True
            self.actors.begin(self.coordinator.join, self.coordinator.between_publications)
        return self._with_faults(
            await self.gang.surviving(partial(self._step, self.steps_done), blame=True)
        )

    async def _step(self, before: int) -> dict[str, float]:
        seconds, loop = self._config.watchdog.step_timeout_s, self.loop
        if loop.steps_done > before:
            return loop.latest  # the learner died after this step, and has repeated it
        return await whole_step(
            loop.step(), seconds=seconds, number=loop.steps_done + 1, phase=lambda: loop.phase
        )

    async def settle(self) -> None:
        """Wait until the newest weights are live."""
        await self.gang.surviving(self.loop.finish)

    async def evaluate(self, total: int) -> tuple[dict[str, float], Rows]:
        """Metrics of the newest weights on `total` held-out problems, and some responses; the
        learner waits.
        """
        await self.settle()
        self.loop.phase = "evaluating"
        with self.loop.time.during("evaluating"):
            await self.gang.surviving(self._until_evaluated)
            return await self.evaluations.everywhere(
                total, step=self.steps_done, alone=self._between_steps
            )

    async def _between_steps(self) -> None:
        """Raise what ends the run; with NCCL, let an engine in that has started."""
        await self.settle()
        await self.gang.surviving(lambda: self.coordinator.refresh(self.steps_done))

    async def _until_evaluated(self) -> None:
        """Wait for the evaluation that is under way. Its engine comes back to a learner that may
        have died meanwhile, which shows here.
        """
        while not await self.evaluations.finish(POLL_S):
            await self.coordinator.refresh(self.steps_done)

    async def evaluate_beside(self, total: int, done: WhenDone) -> None:
        """Begin to evaluate the newest weights; `done(step, metrics, responses)` is called while
        training goes on.
        """
        await self.gang.surviving(self.loop.publish_newest)
        await self.evaluations.begin(total, done)

    async def save(self, directory: Path) -> tuple[dict[str, Any], Written]:
        """Write the learner's checkpoint and the exported model, for `finish_save`; the queue's
        snapshot. Raises StorageFailure.
        """
        step = self.steps_done
        saved = await self.gang.surviving(partial(self._save, directory))
        if self.steps_done != step:
            raise StorageFailure(f"the learner went back to step {self.steps_done} meanwhile")
        return saved

    async def _save(self, directory: Path) -> tuple[dict[str, Any], Written]:
        await self.loop.finish()
        self.loop.phase = f"writing the checkpoint of step {self.steps_done}"
        with self.loop.time.during("checkpointing"):
            snapshot = await self.queue.snapshot()
            self._under_way.begin(self.actors.alive(), snapshot)
            return snapshot, await self.learner.write_checkpoint(
                str(directory), {"step": self.steps_done, "rows": self.loop.row_state()}
            )

    async def finish_save(self, directory: Path) -> dict[str, FileSum]:
        """Bring what `save` wrote into its directory, while steps go on; all files in it. Raises
        StorageFailure.
        """
        sums = await self.learner.finish_checkpoint(str(directory))
        await self._under_way.write(directory)
        return sums

    async def forget(self, *, segment: int, step: int) -> None:
        """Let the journal drop what is only in segments before this one, which begins with the
        checkpoint of `step`.
        """
        await self.queue.forget(segment=segment, step=step)

    async def stop(self, *, orderly: bool = True) -> None:
        """Close the queue, stop actors and learner. Every part is stopped whatever happens to the
        others. orderly: nothing went wrong.
        """
        if self.evaluations is not None:
            self.evaluations.cancel()
        if orderly and self._samples is not None:
            await self._samples.finish()
        results = await asyncio.gather(
            *([self._close_queue(orderly=orderly)] if self.loop is not None else []),
            return_exceptions=True,
        )
        if self.coordinator is not None:
            await self.coordinator.close()
        parts = [part for part in (self.actors, self.learner) if part is not None]
        results += await asyncio.gather(*[part.stop() for part in parts], return_exceptions=True)
        if self._relays is not None:
            await self._relays.close()
        self._remove_leftovers()
        # A queue that died for good cannot be closed; the run has ended for that reason.
        failures = [
            result
            for result in results
            if isinstance(result, BaseException) and not isinstance(result, FaultBudgetSpent)
        ]
        if failures:
            raise failures[0]

    async def _close_queue(self, *, orderly: bool) -> None:
        """Close it, and after an orderly end log what became of all tokens and of the time: nothing
        is under way any more.
        """
        await self.queue.close(orderly=orderly)
        if not orderly or not self.loop.time.began:
            return
        reports = await final_reports(self.actors.alive())
        for actor_id, report in reports.items():
            await self.queue.tell(actor_id, report)
        metrics = self._with_faults(await self.queue.metrics() | self.loop.time_metrics())
        self.loop.latest |= (
            last := {name: value for name, value in metrics.items() if name.startswith(ACCOUNTS)}
        )
        self._listener.logged(self.steps_done, last)

    def request_stop(self) -> None:
        """Wait for no more groups and for no evaluation. Safe in a signal handler."""
        if self.loop is not None:
            self.loop.stopping = True
        if self.evaluations is not None:
            self.event_loop.call_soon_threadsafe(self.evaluations.cancel)

    def abandon(self) -> None:
        """What must not outlive a driver that ends at once; its processes go with it."""
        self._remove_leftovers()

    def disconnect(self) -> None:
        """Leave Ray, or end the cluster that was started here."""
        if self._session is not None:
            self._session.close()
            self._session = None
        stacks.end(self._directory)
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Files in memory, of ranks that could not remove them themselves."""
        remove_segments(self._key, fallback_directory(self._config))
        remove_drafts(self._key)
        remove_abandoned("engine")  # what engines left that were killed, not closed

    def scene(self) -> Scene:
        """The parts of the run, as far as they were started, for a post-mortem."""
        return Scene(
            session=self._session,
            queue=self._queue_handle,
            actors=self.actors,
            learner=self.learner,
            loop=self.loop,
        )

    @property
    def run_epoch(self) -> int:
        """How often learner steps of the run were discarded."""
        return self.gang.run_epoch

    @property
    def steps_done(self) -> int:
        """Learner steps contained in the weights."""
        return self.loop.steps_done

    async def _reserve(
        self, placement: Placement
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Ray options of every learner rank and engine; colocated, rank i and engine i share one
        bundle.
        """
        session, timeout_s = self._session, self._config.cluster.resources_timeout_s
        if placement.colocated:
            shared = await session.reserve(list(placement.learners), timeout_s=timeout_s, sharers=2)
            return shared, shared
        learners = await session.reserve(list(placement.learners), timeout_s=timeout_s)
        engines = [await session.reserve([slot], timeout_s=timeout_s) for slot in placement.engines]
        return learners, [option for [option] in engines]

    def _lost_steps(self) -> dict[str, str]:
        """What becomes of learner steps after the checkpoint. Whoever names one wants to go on from
        there, not to be brought to the end.
        """
        settings = self._config.checkpoint
        if settings.resume not in ("auto", "never"):
            return {
                "lost_steps": "discard",
                "reason": "checkpoint.resume names the checkpoint to go on from",
            }
        return {"lost_steps": settings.on_lost_steps}

    async def _nodes_serve(self, node_ids: set[str]) -> bool:
        timeout_s = self._config.cluster.resources_timeout_s
        return all(
            await asyncio.gather(
                *[self._session.node_serves(node_id, timeout_s=timeout_s) for node_id in node_ids]
            )
        )

    def _create_queue(self, origin: Origin) -> None:
        """Let the queue's process start. With a journal, Ray starts it again when it dies and
        repeats the calls that were under way.
        """
        config = self._config
        journal = (
            JournalSettings(
                directory=str(Path(config.run.dir) / "journal"),
                start=self._key,
                identity=self._identity(),
                fsync=config.replay.journal.fsync,
                fresh=config.checkpoint.resume == "never",
                training=training_digest(config),
                **self._lost_steps(),
            )
            if config.replay.journal.enable
            else None
        )
        repairs = (
            {"max_restarts": config.cluster.restart_budget, "max_task_retries": -1}
            if journal is not None
            else {}
        )
        queue = ray.remote(QueueProcess).options(
            max_concurrency=MAX_CALLS, **repairs, **self._session.on_this_node()
        )
        self._queue_handle = queue.remote(
            self._queue_settings(origin.step),
            journal,
            self._under_way.snapshot(origin.snapshot()),
            config.run.dir,
        )
        self.queue = DriverQueue(self._queue_handle)

    def _with_faults(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics of a step with what the actors count; a queue that had to be started again is
        said once.
        """
        if (restarts := int(metrics.get("replay/restarts", 0))) > self.queue_restarts:
            budget = self._config.cluster.restart_budget
            self._listener.note(
                "the replay queue's process died; it was started again from its journal "
                f"(restart {restarts} of at most {budget})"
            )
            self.queue_restarts = restarts
        times, self.engine_times = engine_times(self.queue.engine_seconds)
        return (
            metrics
            | times
            | self.actors.measurements()
            | self._under_way.measurements()
            | {"cluster/learner_restarts": float(self.gang.restarts)}
        )

    def _identity(self) -> str:
        """Digest of everything that a completed group depends on, the weights after the start
        apart.
        """
        config, rollout = self._config, self._config.rollout
        parts = {
            "seed": config.seed,
            "data": self._fingerprint,
            "model": config.model.model_dump(include={"path", "warm_start", "dtype"}),
            "task": config.task.model_dump(exclude={"verifier", "max_bad_fraction"}),
            "baseline": config.algorithm.adv_estimator == "remax",
            "rollout": rollout.model_dump(
                include={"group_size", "prompt_length", "response_length", "temperature"}
            ),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def logged(self, step: int, metrics: dict[str, float]) -> None:
        """Pass on what the loop measured, with what the actors count."""
        self._listener.logged(step, self._with_faults(metrics))

    def fail(self, error: BaseException) -> None:
        """End the run with this error; a learner that died is brought back instead."""
        if isinstance(error, LearnerLost):
            self.coordinator.learner_lost(error)  # no end, but the learner's way back
        elif self.loop is not None:
            self.loop.fail(error)

    def _queue_settings(self, steps_done: int) -> QueueSettings:
        config = self._config
        filters = config.replay.filter_groups
        rule = FilterRule(
            metric=filters.metric,
            tolerance=filters.tolerance,
            zero_variance=filters.zero_variance,
            accuracy_low=filters.accuracy_low,
            accuracy_high=filters.accuracy_high,
            all_truncated=filters.all_truncated,
            custom=filters.custom,
            options=config.algorithm.options.get(filters.custom or "", {}),
        )
        return QueueSettings(
            rollout_batch_size=config.rollout.rollout_batch_size,
            max_staleness=config.replay.max_staleness,
            total_steps=self._total_steps,
            group_size=config.rollout.group_size,
            max_attempts=config.replay.max_attempts,
            max_num_gen_batches=filters.max_num_gen_batches,
            shaping=shaping(config, self._weights),
            filter=rule if filters.enable else None,
            order=config.replay.order,
            on_stale=config.replay.on_stale,
            ticket_timeout_s=config.rollout.group_timeout_s,
            max_failed_fraction=config.task.max_bad_fraction,
            baseline=config.algorithm.adv_estimator == "remax",
            mask_truncated=config.algorithm.mask_truncated,
            retire_at=filters.retire_at if filters.enable else None,
            problem=partial(problem_index, config.seed, self._fingerprint, n=self._problems),
            problems=self._problems,
            max_frame_bytes=config.wire.max_frame_bytes,
            trained_steps=steps_done,
            plugins=tuple(config.replay.plugins),
        )
