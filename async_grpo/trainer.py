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
import time
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from async_grpo.checkpoint import directory as checkpoint
from async_grpo.checkpoint.directory import Origin
from async_grpo.checkpoint.resume import (
    changes,
    differences,
    find_checkpoint,
    has_past,
    last_logged_step,
    plan_rerun,
    verified,
)
from async_grpo.checkpoint.saver import Saver, saver_of
from async_grpo.cluster.connection import connect
from async_grpo.config.load import dump, preflight_files, resolve
from async_grpo.config.resume import Changes
from async_grpo.config.schema import Config
from async_grpo.errors import RunError, SetupError, StopRequested
from async_grpo.observe.bottleneck import Bottleneck, BottleneckWatch, ThroughputModel
from async_grpo.observe.console.console import Console
from async_grpo.observe.console.status_file import StatusFile
from async_grpo.observe.tracking.tracker import Tracker, begin_tracking
from async_grpo.preflight.model import check_metric_and_journal, look
from async_grpo.report.launch import report_on
from async_grpo.runtime.stopping import Stop
from async_grpo.tasks.base import TaskError, task_weights
from async_grpo.tasks.registry import held_out, load_task

if TYPE_CHECKING:  # torch and Ray take seconds to import
    from async_grpo.cluster.learner_replay import Comparison, Rerun
    from async_grpo.cluster.system import System

WARM_START_TIMEOUT_S = 1800.0
SAVING_AFTER_FAILURE_S = 30.0


class Trainer:
    """One run. Use it as a context manager, or call `stop`."""

    def __init__(self, config: Config, *, console: Console | None = None) -> None:
        self.config = resolve(config)
        self.run_dir = Path(self.config.run.dir)
        self.console = console or Console()
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self._task_weights: dict[str, float] = {}
        self._held_out = self._problems = self.total_steps = self._shown_steps = self._logged = 0
        self._fingerprint = ""
        self.model_notes: list[str] | None = None
        self._system: System | None = None
        self._rerun: Rerun | None = None
        self._started = False
        self._tracker: Tracker | None = None
        self._checkpoint: Path | None = None
        self._changes = Changes()
        self._stop_requested = Stop()
        self._verdicts = BottleneckWatch(ThroughputModel.of(self.config))
        self._saver: Saver | None = None
        self._rl_seconds = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="async_grpo-loop", daemon=True
        )

    # ---- the calls of a user ----

    def check(self) -> None:
        """Find everything that is wrong with the configuration, its files and its task, before any
        process starts. Raises SetupError.
        """
        try:
            preflight_files(self.config)
            task = load_task(self.config.task, self.config.seed)
            self._task_weights = task_weights(self.config.task, task)
            problems = self._problems = len(task)
            self._fingerprint, self._held_out = task.fingerprint, held_out(self.config, task)
            check_metric_and_journal(self.config, list(self._task_weights))
            if self.model_notes is None:  # once: a trainer is checked more than once
                self.model_notes = look(self.config, task)
        except (TaskError, ValueError) as error:
            raise SetupError(str(error)) from error
        run, batch = self.config.run, self.config.rollout.rollout_batch_size
        self.total_steps = (
            run.total_steps
            if run.total_steps is not None
            else (run.epochs or 0) * problems // batch
        )
        if self.total_steps < 1:
            raise SetupError(
                f"{run.epochs} epochs of {problems} problems are less than one batch of "
                f"{batch} groups; raise run.epochs"
            )
        self._checkpoint = find_checkpoint(self.config, total_steps=self.total_steps)
        self._changes = changes(self.config, self._checkpoint)

    def start(self) -> None:
        """Start the run's processes, verify the weight transport, and continue from a checkpoint if
        there is one.
        """
        if self._started:
            return
        if self._system is not None:
            raise RunError("the start failed; call stop, and build a new trainer")
        self.check()
        (self.run_dir / "config.yaml").write_text(dump(self.config), encoding="utf-8")
        self.console.attach(
            StatusFile(self.run_dir, self.console.begin_run(), run=self.config.run.name)
        )
        manifest = verified(self._checkpoint)
        self.console.info(
            f"staleness bound: {self.config.replay.max_staleness} learner steps, "
            f"{self.config.max_lag_updates} optimizer updates; at most "
            f"{self.config.max_outstanding} groups under way"
        )
        model_dir = self._model_dir()
        notes = self.model_notes  # None: the model has just been made
        self.console.info(
            *(
                look(
                    self.config, load_task(self.config.task, self.config.seed), model_dir=model_dir
                )
                if notes is None
                else notes
            )
        )
        self._saver = saver_of(
            self.config,
            model_dir=model_dir,
            manifest=manifest,
            total_steps=self.total_steps,
            data=self._fingerprint,
            listener=_Listener(self),
        )
        with self.console.phase("starting Ray"):
            self._thread.start()
            system_of, session = connect(self.config, self._loop)
            self._system = system = system_of(
                self.config,
                total_steps=self.total_steps,
                weights=self._task_weights,
                problems=self._problems,
                fingerprint=self._fingerprint,
                key=uuid.uuid4().hex[:8],
            )
            system.connect(session)
        self._tracker = begin_tracking(
            self.config,
            resume_run_id=manifest and manifest["mlflow_run_id"],
            resumed=manifest is not None or has_past(self.config),
            note=self.console.info,
        )
        with self.console.phase("starting engines and learner"):
            origin, self._logged = (
                Origin(self._checkpoint, manifest["step"] if manifest else 0),
                last_logged_step(self.run_dir),
            )
            starting = system.start(
                model_dir=model_dir, origin=origin, listener=_Listener(self), saver=self._saver
            )
            self._run(starting, stoppable=True)
            self._logged = self.steps_done
        with self.console.phase(
            "connecting weights"
            + (" and checking them" if self.config.weight_sync.self_check else "")
        ):
            self.console.weights_arrive(self._run(system.open_weights(), stoppable=True))
        self._tracker.tag("run_epoch", str(system.run_epoch))
        self.console.info(*self._tracker.ready())
        self._started = True
        for path in checkpoint.set_aside(self.run_dir, manifest["step"] if manifest else 0):
            self.console.info(
                "a checkpoint of a later step is set aside, because this run goes its own "
                f"way: {path}"
            )
        self.console.info(*self._changes.lines())
        if self.steps_done:
            self.console.info(
                f"resumed {self._checkpoint if manifest else 'the journal'} at step "
                f"{self.steps_done} of {self.total_steps}"
            )

    def train(self, steps: int | None = None) -> dict[str, float]:
        """Train until the end of the run, or `steps` more learner steps; metrics of the last
        step.
        """
        self.start()
        system, metrics = self._running(), {}
        last = self.total_steps if steps is None else min(self.total_steps, self.steps_done + steps)
        started = time.perf_counter()
        while True:
            metrics = self._train(last) or metrics
            self._run(system.settle())
            if (
                self.steps_done >= last or self._stop_requested.is_set()
            ):  # a learner that died while it settled may be at an earlier step
                break
        self._rl_seconds += time.perf_counter() - started
        return metrics

    def _train(self, last: int) -> dict[str, float]:
        system, metrics = self._running(), {}
        evaluation, saving = self.config.evaluation.every_steps, self.config.checkpoint.every_steps
        while self.steps_done < last and not self._stop_requested.is_set():
            before = self.steps_done
            try:
                metrics = self._run(system.step())
            except StopRequested:  # it was waiting for groups
                break
            self._saver.check()
            if (verdict := self._verdicts.observe(metrics)) is not None:
                self.console.verdict(kind=verdict.kind, text=verdict.text)
            if (
                saving
                and self.steps_done // saving > before // saving
                and self.steps_done < self.total_steps
            ):
                self._save(keep_groups=False, wait=False)
            if (
                evaluation
                and self._held_out
                and self.steps_done // evaluation > before // evaluation
                and self.steps_done < self.total_steps
            ):
                self._run(system.evaluate_beside(self._held_out, self._evaluated))
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Held-out accuracy of the newest weights, and pass@k of `evaluation.n` samples; the
        learner waits for it.

        Empty when the task has no held-out problems, or somebody asks the run to end meanwhile.
        """
        self.start()
        if not self._held_out:
            self.console.info("no evaluation: the task has no held-out problems (set task.eval)")
            return {}
        with self.console.phase(f"evaluating on {self._held_out} held-out problems"):
            self._run(self._running().settle())  # a publication is not cut short
            try:
                result, samples = self._run(
                    self._running().evaluate(self._held_out), stoppable=True
                )
            except StopRequested:
                return {}
        self._evaluated(self.steps_done, result, samples)
        return result

    def add_rollout_actor(self) -> str:
        """Start one more rollout actor and return its id once it serves. May be called from another
        thread while `train` runs.

        Raises PlacementError where the cluster has no room, RunError when there are
        `cluster.rollout_actors.max` or it did not start.
        """
        return self._run(self._running().actors.add())

    def remove_rollout_actor(self, actor_id: str) -> None:
        """Let one rollout actor finish its groups, and end it for good. Raises ValueError for an
        unknown id, RunError below `min`.
        """
        self._run(self._running().actors.remove(actor_id))

    def save(self, *, keep_groups: bool = False) -> Path:
        """Write a checkpoint of the run as it is now, with the model in Hugging Face format, and
        return its directory when it is complete.

        The journal forgets the groups that no kept checkpoint needs, unless `keep_groups`. Raises
        FaultBudgetSpent if it cannot be written.
        """
        return self._save(keep_groups=keep_groups, wait=True)

    def restore(self, path: str | Path) -> None:
        """Continue from this checkpoint instead of the configured one; before `start`. Raises
        SetupError if it is not complete.
        """
        if self._system is not None:
            raise RunError("restore comes before start: a running system cannot be set back")
        self.config = self.config.model_copy(
            update={"checkpoint": self.config.checkpoint.model_copy(update={"resume": str(path)})}
        )
        self.check()

    def replay(self, source: str | Path, *, after: int | None = None) -> Comparison:
        """Train the learner alone on the batches that the run in directory `source` recorded, in
        its order; no engine is started.

        Begins at the checkpoint of step `after` in `source`, by default as early as it can, and
        ends with `run.total_steps` or the last step recorded. Metrics go to this run's directory.
        Returns which published weights are the recorded ones, bit for bit. Raises SetupError for
        what cannot be repeated.
        """
        if self._system is not None:
            raise RunError("a replay is a run of its own; build another trainer")
        source = Path(source).expanduser().resolve()
        if source == self.run_dir:
            raise SetupError(
                f"a replay writes its own metrics: set run.dir to another directory than {source}"
            )
        self.check()
        course = plan_rerun(source, after=after, until=self.total_steps)
        self.console.info(
            *[
                f"other than recorded: {line}"
                for line in differences(self.config, source / "config.yaml")
            ]
        )
        self.console.info(
            f"steps {course.first} to {course.last}, "
            + (f"from {course.checkpoint}" if course.checkpoint else "from the initial model")
        )
        (self.run_dir / "metrics.jsonl").unlink(
            missing_ok=True
        )  # of an earlier replay: they are compared with each other
        (self.run_dir / "config.yaml").write_text(dump(self.config), encoding="utf-8")
        from async_grpo.cluster.learner_replay import Rerun

        rerun = self._rerun = Rerun(
            self.config,
            source=str(source / "journal"),
            total_steps=self.total_steps,
            weights=self._task_weights,
            key=uuid.uuid4().hex[:8],
        )
        self._shown_steps = course.last
        model_dir = self._model_dir()
        self._thread.start()
        rerun.connect()
        self._tracker = Tracker(
            self.config, run_dir=self.run_dir, resume_run_id=None, note=self.console.info
        )
        self._tracker.start()
        return self._run(
            rerun.run(
                model_dir=model_dir,
                checkpoint=None
                if course.checkpoint is None
                else str(course.checkpoint / "learner"),
                first=course.first,
                last=course.last,
                listener=_Listener(self),
            ),
            stoppable=True,
        )

    def request_stop(self) -> None:
        """Ask `start` or `train` to end: not in the middle of a learner step (safe in a signal
        handler).
        """
        self._stop_requested.set()
        if self._system is not None:
            self._system.request_stop()

    def abandon(self) -> None:
        """Remove what would outlive this process if it ended now (for the last act of a signal
        handler).
        """
        if self._system is not None:
            self._system.abandon()

    def stop(self, status: str = "FINISHED", *, ending: tuple[int, str] | None = None) -> None:
        """Stop every process of the run, write its report and close tracking. Safe to call twice,
        and after an error.

        ending: exit code and message, of which the report is to tell; without it the code that
        `status` stands for.
        """
        replayed = self._rerun is not None
        system, self._system, self._rerun, self._started = (
            self._system or self._rerun,
            None,
            None,
            False,
        )
        try:
            if system is not None and self._thread.is_alive():
                try:
                    self._finish_saving(failed=status == "FAILED")
                finally:
                    self._run(system.stop(orderly=status != "FAILED"))
        finally:
            if system is not None:
                system.disconnect()
            tracker, self._tracker = self._tracker, None
            if tracker is not None:
                tracker.conclude(status)  # the report takes a while, and somebody may lose patience
                self.console.stopped(status) if ending is None else self.console.end(*ending)
                if not replayed:
                    report_on(self.config, self.console, tracker)
                tracker.finish(status)
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(timeout=10)
            self.console.stopped(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self.stop("FINISHED" if error is None else "FAILED")

    @property
    def steps_done(self) -> int:
        """Learner steps contained in the weights."""
        return self._running().steps_done

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
    def tracker(self) -> Tracker | None:
        """Where the metrics go, while the run is on."""
        return self._tracker

    @property
    def system(self) -> System:
        """The running system, for those who want to look inside."""
        return self._running()

    @property
    def verdict(self) -> Bottleneck | None:
        """Who limited the last interval of learner steps, and what to change; None while none is
        complete.
        """
        return self._verdicts.latest

    @property
    def rl_seconds(self) -> float:
        """Wall time spent in `train`."""
        return self._rl_seconds

    @property
    def saved_at(self) -> int | None:
        """Step of the newest checkpoint that this process wrote."""
        return self._saver and self._saver.saved_at

    # ---- inside ----

    def _run(self, work: Coroutine[Any, Any, Any], *, stoppable: bool = False) -> Any:
        return self._stop_requested.result(
            asyncio.run_coroutine_threadsafe(work, self._loop), stoppable=stoppable
        )

    def _running(self) -> System:
        if self._system is None:
            raise RunError("the run is not started, or stopped already")
        return self._system

    def _finish_saving(self, *, failed: bool) -> None:
        """Let a checkpoint that is under way be completed; after a failure it gets a short while
        only.
        """
        if self._saver is not None:
            self._run(
                self._saver.close(
                    SAVING_AFTER_FAILURE_S if failed else self.config.watchdog.step_timeout_s
                )
            )

    def _save(self, *, keep_groups: bool, wait: bool) -> Path:
        """Write a checkpoint; without `wait` it is completed while training goes on, and a failure
        is only said and counted.
        """
        system, step = self._running(), self.steps_done
        # What a finished run leaves can be looked at and replayed.
        forget = step < self.total_steps and not self.stop_requested and not keep_groups
        facts = {
            "run_epoch": system.run_epoch,
            "mlflow_run_id": self._tracker.run_id if self._tracker else None,
        }
        return self._run(self._saver.save(system, step=step, facts=facts, forget=forget, wait=wait))

    def _model_dir(self) -> str:
        if self.config.model.warm_start is None:
            local = Path(self.config.model.path).expanduser()
            return str(local) if local.exists() else self.config.model.path
        from async_grpo.warm_start.cache import WarmStartError, ensure_warm_start

        try:
            return ensure_warm_start(
                self.config,
                progress=self._stop_requested.watching(self.console.info),
                timeout_s=WARM_START_TIMEOUT_S,
            )
        except WarmStartError as error:
            raise SetupError(str(error)) from error

    def _evaluated(
        self, step: int, result: dict[str, float], samples: list[dict[str, Any]]
    ) -> None:
        """Keep the result of one evaluation, which may be of an earlier step than the last one that
        was logged.
        """
        self.evaluations.append((step, result))
        _Listener(self).logged(step, result)
        if self._tracker is not None:
            self._tracker.log_samples(
                [{"step": step, "source": "evaluation", **sample} for sample in samples]
            )


class _Listener:
    """What the parts of a trainer's run tell: shown, recorded, and exported as gauges."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def note(self, text: str) -> None:
        self._trainer.console.info(text)

    def error(self, text: str) -> None:
        self._trainer.console.error(text)

    def samples(self, rows: list[dict[str, Any]]) -> None:
        self._trainer.tracker.log_samples(rows)

    def published(self, version: int, seconds: float) -> None:
        self._trainer.console.published(version, seconds)

    def rolled_back(self, step: int) -> None:
        """What was saved and logged of the steps after this one is of another history."""
        trainer = self._trainer
        checkpoint.set_aside(trainer.run_dir, step)
        trainer._saver.saved_at, trainer._logged = None, step

    def logged(self, step: int, metrics: dict[str, float]) -> None:
        trainer = self._trainer
        if "train/repeated" in metrics and step <= trainer._logged:
            # a step that is trained again was logged the first time, if its log came that far
            return
        if "train/loss" in metrics:
            trainer._logged = max(step, trainer._logged)
        if trainer._tracker is not None:
            trainer._tracker.log(step, metrics)
        if trainer._system is not None:
            trainer._system.exported.update(step, metrics)
        trainer.console.logged(step, trainer._shown_steps or trainer.total_steps, metrics)
