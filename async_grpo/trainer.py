"""A run, from its configuration to its end: everything built, connected, and taken down again.

Runs in: the driver. `Config.build()` returns a Trainer; its calls block, so that a script or a
notebook can drive it step by step, while an event loop in a thread of its own keeps rollout actors,
publications and health probes going between the calls.

Invariants: whatever way a run ends, `stop` leaves no process, shared-memory segment or open MLflow
run behind; a checkpoint is taken between learner steps only.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from async_grpo.checkpoint import directory as checkpoint
from async_grpo.checkpoint.directory import Origin
from async_grpo.checkpoint.resume import (
    Course,
    changes,
    differences,
    find_checkpoint,
    first_evaluation,
    has_past,
    last_logged_step,
    plan_rerun,
    verified,
)
from async_grpo.checkpoint.saver import Saver, saver_of
from async_grpo.cluster.connection import Connection
from async_grpo.cluster.placement import without_engines
from async_grpo.config.load import dump, preflight_files, resolve
from async_grpo.config.resume import Changes
from async_grpo.config.schema import Config
from async_grpo.errors import DirectoryTaken, RunError, SetupError, StopRequested
from async_grpo.observe.bottleneck import AGREE, Bottleneck, BottleneckWatch, ThroughputModel
from async_grpo.observe.console.console import Console
from async_grpo.observe.console.status_file import StatusFile
from async_grpo.observe.run_log import RunLog
from async_grpo.observe.tracking.tracker import Status, Tracker, begin_tracking, check_server
from async_grpo.plan.forecast import Forecast, describe
from async_grpo.preflight.devices import check_device, look_at_gpus
from async_grpo.preflight.model import check_metric_and_journal, look
from async_grpo.report.launch import report_on
from async_grpo.runtime.run_lock import RunLock
from async_grpo.runtime.stopping import Stop
from async_grpo.runtime.text import counted
from async_grpo.tasks.base import TaskError, task_weights
from async_grpo.tasks.registry import held_out, load_task

if TYPE_CHECKING:  # torch and Ray take seconds to import
    from async_grpo.cluster.learner_replay import Rerun
    from async_grpo.cluster.system import System
    from async_grpo.loop import Comparison

WARM_START_TIMEOUT_S = 1800.0
SAVING_AFTER_FAILURE_S = 30.0


@dataclass(frozen=True, slots=True)
class Checked:
    """What `Trainer.check` found. weights: of the reward components. problems, fingerprint: of the
    training data; held_out: problems to evaluate on. checkpoint: where the run goes on.
    """

    weights: dict[str, float]
    problems: int
    held_out: int
    fingerprint: str
    total_steps: int
    checkpoint: Path | None
    changes: Changes


class Trainer:
    """One run. Use it as a context manager, or call `stop`."""

    def __init__(self, config: Config, *, console: Console | None = None) -> None:
        self.config = resolve(config)
        self.run_dir = Path(self.config.run.dir)
        self.console = console or Console()
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.model_notes: list[str] | None = None
        self.resumed_at = 0
        """Learner steps that were trained before this start."""
        self._checked: Checked | None = None
        self._taken: DirectoryTaken | None = None
        self._lock = RunLock(self.run_dir, lost=self._lost)
        self._log = RunLog(self.console, self.run_dir)
        self._connection: Connection | None = None
        self._system: System | None = None
        self._rerun: Rerun | None = None
        self._started = False
        self._stop_requested = Stop()
        self._verdicts: BottleneckWatch | None = None
        self.forecast: Forecast | None = None
        """What the run is expected to come to; None before it is started."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="async_grpo-loop", daemon=True
        )

    # ---- the calls of a user ----

    def check(self) -> None:
        """Check configuration, files and task before any process starts. Raises SetupError."""
        try:
            preflight_files(self.config)
            task = load_task(self.config.task, self.config.seed)
            weights = task_weights(self.config.task, task)
            check_metric_and_journal(self.config, list(weights))
            evaluated = held_out(self.config, task)
            if self.model_notes is None:  # once: a trainer is checked more than once
                self.model_notes = look(self.config, task)
        except (TaskError, ValueError) as error:
            raise SetupError(str(error)) from error
        except OSError as error:  # a name that no file can have, a disk that does not answer
            raise SetupError(f"{error.filename} cannot be read: {error.strerror}") from error
        total_steps = self._total_steps(len(task))
        found = find_checkpoint(self.config, total_steps=total_steps)
        self._log.total_steps = total_steps
        self._checked = Checked(
            weights,
            problems=len(task),
            held_out=evaluated,
            fingerprint=task.fingerprint,
            total_steps=total_steps,
            checkpoint=found,
            changes=changes(self.config, found),
        )

    def start(self) -> None:
        """Start the run's processes, check the weight transport, and resume, if there is a past."""
        if self._started:
            return
        self._refuse_second_start()
        self._own_directory()
        (self.run_dir / "config.yaml").write_text(dump(self.config), encoding="utf-8")
        begun = self.console.begin_run()
        self.console.attach(StatusFile(self.run_dir, begun, run=self.config.run.name))
        manifest = verified(self._facts.checkpoint)
        self.console.info(
            f"staleness bound: {counted(self.config.replay.max_staleness, 'learner step')}, "
            f"{counted(self.config.max_lag_updates, 'optimizer update')}; at most "
            f"{self.config.max_outstanding} groups under way"
        )
        model_dir = self._model_dir()
        notes = self.model_notes
        if notes is None:  # the model has just been made
            task = load_task(self.config.task, self.config.seed)
            notes = look(self.config, task, model_dir=model_dir)
        self.console.info(*notes)
        saver = self._log.saver = saver_of(
            self.config,
            model_dir=model_dir,
            manifest=manifest,
            total_steps=self.total_steps,
            data=self._facts.fingerprint,
            listener=self._log,
        )
        with self.console.phase("starting Ray"):
            self._connect()
        from async_grpo.cluster.prometheus import Exported

        self._log.gauges = Exported(self.config.run.name)
        tracker = self._log.tracker = begin_tracking(
            self.config,
            resume_run_id=None if manifest is None else manifest["mlflow_run_id"],
            resumed=manifest is not None or has_past(self.config),
            note=self.console.info,
        )
        origin = Origin(self._facts.checkpoint, manifest["step"] if manifest else 0)
        self._start_system(model_dir, origin, saver)
        tracker.tag("run_epoch", str(self.system.run_epoch))
        self.console.info(*tracker.ready(check=self._stop_requested.check))
        self._watch_speed()
        self._started = True
        self._tell_origin(origin)

    def _watch_speed(self) -> None:
        """Say what to expect, and look at who limits the run from now on."""
        system, config = self.system, self.config
        forecast = self.forecast = Forecast(
            config,
            run_dir=self.run_dir,
            max_num_seqs=system.max_num_seqs,
            actors=len(system.actors.alive()),
            cores=system.cores,
            error=self.console.error,
        )
        if forecast.predicted is not None:
            self.console.info(f"expected, from {forecast.source}: {describe(forecast.predicted)}")
        model = ThroughputModel.of(config, max_num_seqs=system.max_num_seqs, cores=system.cores)
        self._verdicts = BottleneckWatch(model, agree=AGREE, gain=forecast.gain)

    def _refuse_second_start(self) -> None:
        """Raise RunError where this trainer has joined or started Ray before."""
        if self._thread.ident is not None:
            raise RunError(
                "this trainer has run, or its start failed: call its stop, and build another one"
            )

    def _own_directory(self, *, learner_only: bool = False) -> None:
        """Check everything, and take the run directory. Raises SetupError where another run has
        it.
        """
        self.check()
        check_server(self.config)
        check_device(without_engines(self.config) if learner_only else self.config)
        found = self._lock.acquire(note=self.console.info, check=self._stop_requested.check)
        if checkpoint.finish_replacing(self.run_dir) or found:
            self.check()  # the run before may have gone on until now

    def _lost(self, why: str) -> None:
        """End this run, because another one has its directory."""
        error = self._taken = DirectoryTaken(why)
        if self._system is not None:
            self._loop.call_soon_threadsafe(self._system.fail, error)

    def _connect(self, *, learner_only: bool = False) -> Connection:
        """Join or start Ray; from the main thread."""
        self._thread.start()
        self._connection = Connection(
            self.config, self._loop, check=self._stop_requested.check, learner_only=learner_only
        )
        return self._connection

    def _start_system(self, model_dir: str, origin: Origin, saver: Saver) -> None:
        """Start engines and learner, and let the learner's weights reach the engines."""
        from async_grpo.cluster.downloads import download_everywhere
        from async_grpo.cluster.system import StartFacts, System, reserve

        config, checked, connection = self.config, self._facts, self._connection
        facts = StartFacts(
            total_steps=checked.total_steps,
            weights=checked.weights,
            problems=checked.problems,
            fingerprint=checked.fingerprint,
            model_dir=model_dir,
            origin=origin,
            key=connection.key,
        )

        async def start() -> None:
            places = await reserve(config, connection.session)
            if places.placement.device == "cuda":
                memory = await asyncio.to_thread(connection.session.gpu_memory)
                for warning in look_at_gpus(config, model_dir, places, memory):
                    self.console.info(f"warning: {warning}")
            nodes = {slot.node_id for slot in places.slots}
            models = (model_dir, config.model.reference)
            await download_everywhere(models, nodes, note=self.console.info)
            self._system = System(config, facts, places=places, listener=self._log, saver=saver)
            await self._system.start()

        with self.console.phase("starting engines and learner"):
            self._log.newest_step = last_logged_step(self.run_dir)
            self._run(start(), stoppable=True)
            self._log.newest_step = self.steps_done
        checking = " and checking them" if config.weight_sync.self_check else ""
        with self.console.phase(f"connecting weights{checking}"):
            self.console.weights_arrive(self._run(self.system.open_weights(), stoppable=True))

    def _tell_origin(self, origin: Origin) -> None:
        """Set checkpoints of another history aside, and say where the run goes on."""
        for path in checkpoint.set_aside(self.run_dir, origin.step):
            self.console.info(
                "a checkpoint of a later step is set aside, because this run goes its own "
                f"way: {path}"
            )
        self.console.info(*self._facts.changes.lines())
        self.resumed_at = self.steps_done
        if self.steps_done:
            if (first := first_evaluation(self.run_dir)) is not None:
                self.evaluations.insert(0, first)
            self.console.info(
                f"resumed {origin.path or 'the journal'} at step {self.steps_done} of "
                f"{self.total_steps}"
            )

    def train(self, steps: int | None = None) -> dict[str, float]:
        """Train to the end of the run, or `steps` more learner steps; metrics of the last step."""
        self.start()
        system = self.system
        metrics: dict[str, float] = {}
        last = self.total_steps if steps is None else min(self.total_steps, self.steps_done + steps)
        while True:
            metrics = self._train(last) or metrics
            self._run(system.settle())
            # A learner that died while it settled may be at an earlier step.
            if self.steps_done >= last or self.stop_requested:
                break
        return metrics

    def _train(self, last: int) -> dict[str, float]:
        system, held_out, verdicts = self.system, self._facts.held_out, self._verdicts
        metrics: dict[str, float] = {}
        while self.steps_done < last and not self.stop_requested:
            if self._taken is not None:  # during the start, or between two calls
                raise self._taken
            before = self.steps_done
            try:
                metrics = self._run(system.step())
            except StopRequested:  # it was waiting for groups
                break
            self._log.saver.check()
            predicted = self.forecast.observe(metrics, system.loop.lengths)
            if predicted:
                self._log.logged(self.steps_done, predicted)
            if (verdict := verdicts.observe(metrics)) is not None:
                self.console.verdict(kind=verdict.kind, text=verdict.text)
            if self._due(self.config.checkpoint.every_steps, before):
                self._save(keep_groups=False, wait=False)
            if held_out and self._due(self.config.evaluation.every_steps, before):
                self._run(system.evaluate_beside(held_out, self._evaluated))
        return metrics

    def _due(self, every: int, before: int) -> bool:
        """Whether a multiple of `every` lies after step `before`; never at the end of the run."""
        step = self.steps_done
        return step < self.total_steps and every > 0 and step // every > before // every

    def evaluate(self) -> dict[str, float]:
        """Evaluate the newest weights while the learner waits; {} without problems, if stopped."""
        self.start()
        total = self._facts.held_out
        if not total:
            self.console.info("no evaluation: the task has no held-out problems (set task.eval)")
            return {}
        with self.console.phase(f"evaluating on {total} held-out problems"):
            self._run(self.system.settle())  # a publication is not cut short
            try:
                result, samples = self._run(self.system.evaluate(total), stoppable=True)
            except StopRequested:
                return {}
        self._evaluated(self.steps_done, result, samples)
        return result

    def add_rollout_actor(self) -> str:
        """Start one more rollout actor, also from another thread; its id once it serves. Raises
        PlacementError without room, RunError at `cluster.rollout_actors.max` or when it did not
        start.
        """
        return self._run(self.system.actors.add())

    def remove_rollout_actor(self, actor_id: str) -> None:
        """Drain and end a rollout actor. Raises ValueError (unknown id), RunError (below `min`)."""
        self._run(self.system.actors.remove(actor_id))

    def save(self, *, keep_groups: bool = False) -> Path:
        """Write a checkpoint with the model in Hugging Face format; its directory. The journal
        forgets groups that no kept checkpoint needs, unless `keep_groups`. Raises FaultBudgetSpent
        on failure.
        """
        return self._save(keep_groups=keep_groups, wait=True)

    def restore(self, path: str | Path) -> None:
        """Resume from this checkpoint; before `start`. Raises SetupError if it is not complete."""
        if self._connection is not None:
            raise RunError("restore comes before start: a running system cannot be set back")
        section = self.config.checkpoint.model_copy(update={"resume": str(path)})
        self.config = self.config.model_copy(update={"checkpoint": section})
        self.check()

    def replay(self, source: str | Path, *, after: int | None = None) -> Comparison:
        """Train the learner alone on the batches that the run in directory `source` recorded, in
        order.

        Begins at the checkpoint of step `after` in `source`, by default as early as it can, and
        ends with `run.total_steps` or the last step recorded. Metrics go to this run's directory.
        Returns which weights are the recorded ones, bit for bit. Raises SetupError for what cannot
        be repeated.
        """
        self._refuse_second_start()
        source = Path(source).expanduser().resolve()
        if source == self.run_dir:
            raise SetupError(
                f"a replay writes its own metrics: set run.dir to another directory than {source}"
            )
        self._own_directory(learner_only=True)
        course = plan_rerun(source, after=after, until=self.total_steps)
        for line in differences(self.config, source / "config.yaml"):
            self.console.info(f"other than recorded: {line}")
        self.console.info(
            f"steps {course.first} to {course.last}, "
            + (f"from {course.checkpoint}" if course.checkpoint else "from the initial model")
        )
        return self._repeat(source, course)

    def _repeat(self, source: Path, course: Course) -> Comparison:
        """Start a learner alone, and train the recorded steps of this course."""
        from async_grpo.cluster.learner_replay import Rerun

        self._log.total_steps = course.last
        model_dir = self._model_dir()
        connection = self._connect(learner_only=True)
        # of an earlier replay: they are compared with each other
        (self.run_dir / "metrics.jsonl").write_text("", encoding="utf-8")
        (self.run_dir / "config.yaml").write_text(dump(self.config), encoding="utf-8")
        self._rerun = Rerun(
            self.config,
            total_steps=self.total_steps,
            weights=self._facts.weights,
            key=connection.key,
        )
        self._log.tracker = Tracker(
            self.config, run_dir=self.run_dir, resume_run_id=None, note=self.console.info
        )
        self._log.tracker.start()
        work = self._rerun.run(
            connection.session,
            str(source / "journal"),
            model_dir=model_dir,
            checkpoint=None if course.checkpoint is None else str(course.checkpoint / "learner"),
            first=course.first,
            last=course.last,
            listener=self._log,
        )
        return self._run(work, stoppable=True)

    def request_stop(self) -> None:
        """Ask `start` or `train` to end between learner steps (safe in a signal handler)."""
        self._stop_requested.set()
        self.console.stopping()
        if self._system is not None:
            self._system.request_stop()

    def abandon(self) -> None:
        """Remove what would outlive this process (for the last act of a signal handler)."""
        if self._connection is not None:
            self._connection.remove_leftovers()

    def stop(self, status: Status = "FINISHED", *, ending: tuple[int, str] | None = None) -> None:
        """Stop all processes, write the report and close tracking; also twice, and after an error.
        ending: exit code and message for the report; by default the code that `status` stands for.
        """
        running, repeated = self._system or self._rerun, self._rerun is not None
        connection = self._connection
        self._system = self._rerun = None
        self._connection, self._started = None, False
        orderly = status != "FAILED"
        try:
            if self._thread.is_alive():
                try:
                    self._finish_saving(failed=not orderly)
                    self._end_forecast()
                finally:
                    if running is not None:
                        self._run(running.stop(orderly=orderly))
        finally:
            if connection is not None:
                connection.close()
            self._conclude(status, ending, report=not repeated)
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(timeout=10)
                if not self._thread.is_alive():
                    self._loop.close()
            self._lock.release()
            self.console.stopped(status)

    def _end_forecast(self) -> None:
        """Record what the run came to, and how far that is from what was expected of it."""
        if self.forecast is not None and self._log.tracker is not None:
            self.forecast.write()
            if errors := self.forecast.errors():
                self._log.logged(self._log.newest_step, errors)

    def _conclude(
        self, status: Status, ending: tuple[int, str] | None, *, report: bool = True
    ) -> None:
        """Say how the run ended, write its report, and close tracking, if it was open."""
        tracker, self._log.tracker = self._log.tracker, None
        self._log.gauges = None
        if tracker is None:
            return
        tracker.conclude(status)  # the report takes a while, and somebody may lose patience
        self.console.stopped(status) if ending is None else self.console.end(*ending)
        if report:
            report_on(self.config, self.console, tracker)
        tracker.finish(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self.stop("FINISHED" if error is None else "FAILED")

    @property
    def steps_done(self) -> int:
        """Learner steps contained in the weights."""
        return self.system.steps_done

    @property
    def step_under_way(self) -> int | None:
        """The learner step that is being trained, or comes next; None while nothing runs."""
        running = self._system or self._rerun
        return None if running is None or running.loop is None else running.loop.steps_done + 1

    @property
    def stop_requested(self) -> bool:
        """Whether somebody asked the run to end early."""
        return self._stop_requested.is_set()

    @property
    def total_steps(self) -> int:
        """Learner steps of the whole run; 0 before `check`."""
        return 0 if self._checked is None else self._checked.total_steps

    @property
    def tracker(self) -> Tracker | None:
        """Where the metrics go, while the run is on."""
        return self._log.tracker

    @property
    def system(self) -> System:
        """The running system, for those who want to look inside. Raises RunError without one."""
        if self._system is None:
            raise RunError("the run is not started, or stopped already")
        return self._system

    @property
    def verdict(self) -> Bottleneck | None:
        """Who limited the last interval of steps, and what to change; None before the first."""
        return None if self._verdicts is None else self._verdicts.latest

    # ---- inside ----

    def _run(self, work: Coroutine[Any, Any, Any], *, stoppable: bool = False) -> Any:
        return self._stop_requested.run(work, self._loop, stoppable=stoppable)

    @property
    def _facts(self) -> Checked:
        assert self._checked is not None, "check() comes first"
        return self._checked

    def _total_steps(self, problems: int) -> int:
        """`run.total_steps`, or the steps of `run.epochs`. Raises SetupError for none."""
        run, batch = self.config.run, self.config.rollout.rollout_batch_size
        epochs = run.epochs or 0
        steps = run.total_steps if run.total_steps is not None else epochs * problems // batch
        if steps < 1:
            raise SetupError(
                f"{run.epochs} epochs of {problems} problems are less than one batch of "
                f"{batch} groups; raise run.epochs"
            )
        return steps

    def _finish_saving(self, *, failed: bool) -> None:
        """Let a checkpoint under way be completed; after a failure in a short while only."""
        limit = SAVING_AFTER_FAILURE_S if failed else self.config.watchdog.step_timeout_s
        if self._log.saver is not None:
            self._run(self._log.saver.close(limit))

    def _save(self, *, keep_groups: bool, wait: bool) -> Path:
        """Write a checkpoint; without `wait` beside training, where failures are only counted."""
        system, step = self.system, self.steps_done
        # What a finished run leaves can be looked at and replayed.
        forget = step < self.total_steps and not self.stop_requested and not keep_groups
        facts = {
            "run_epoch": system.run_epoch,
            "mlflow_run_id": self.tracker.run_id if self.tracker else None,
        }
        saver = self._log.saver
        return self._run(saver.save(system, step=step, facts=facts, forget=forget, wait=wait))

    def _model_dir(self) -> str:
        if self.config.model.warm_start is None:
            local = Path(self.config.model.path).expanduser()
            return str(local) if local.exists() else self.config.model.path
        from async_grpo.warm_start.cache import WarmStartError, ensure_warm_start

        try:
            return ensure_warm_start(
                self.config,
                progress=self.console.info,
                timeout_s=WARM_START_TIMEOUT_S,
                check=self._stop_requested.check,
            )
        except WarmStartError as error:
            raise SetupError(str(error)) from error

    def _evaluated(
        self, step: int, result: dict[str, float], samples: list[dict[str, Any]]
    ) -> None:
        """Record an evaluation, perhaps of an earlier step than the last one that was logged."""
        self.evaluations.append((step, result))
        self._log.logged(step, result)
        self._log.samples([{"step": step, "source": "evaluation", **sample} for sample in samples])
