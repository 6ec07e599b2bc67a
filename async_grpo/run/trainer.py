"""A run, from its configuration to its end: everything built, connected, and taken down again.

Runs in: the driver. `Trainer(config)` starts nothing; its calls block, so that a script or a
notebook can drive it step by step, while an event loop in a thread of its own keeps rollout actors,
publications and health probes going between the calls.

    with Trainer(load_config("cfg.yaml")) as trainer, trainer.draining():
        for result in trainer:                  # a learner step; its publication goes on meanwhile
            print(result["training_iteration"], result["rollout/score"])
        trainer.save()

It brings three parts together, which know nothing of each other, and hides in which order they are
taken and given back:

    RunDirectory    who has the directory of the run, and where the run goes on
    RunningSystem   Ray, the processes of the run, the event loop
    RunLog          console, metrics, tracking, callbacks

    check -> directory taken -> Ray -> places -> processes -> weights -> callbacks' `on_start`
    `on_end` -> checkpoint under way -> processes -> Ray as it was -> report -> directory free

Invariants: whatever way a run ends, `stop` leaves no process, shared-memory segment or open MLflow
run behind, and a Ray that was there before as it was; a checkpoint is taken between learner steps
only; callbacks are called there too, in the thread that drives the trainer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from async_grpo.cluster.placement import without_engines
from async_grpo.config.load import load_settings, resolve
from async_grpo.config.resume import keep_chosen
from async_grpo.config.schema import Config
from async_grpo.config.stored import read_settings, renewed
from async_grpo.errors import RunError, SetupError, StopRequested
from async_grpo.observe.bottleneck import Bottleneck
from async_grpo.observe.console.console import Console
from async_grpo.observe.reward_hacking import RewardWatch
from async_grpo.observe.tracking.kinds import check_trackers
from async_grpo.observe.tracking.tracker import Status, Tracker, begin_tracking
from async_grpo.replay.resume import last_logged_step
from async_grpo.rollout.generation import Generated, prompts_of, sampling_of
from async_grpo.run.callbacks.base import Callback, Callbacks
from async_grpo.run.callbacks.registry import given_callbacks, make_callbacks
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.checkpoint.directory import Origin
from async_grpo.run.checkpoint.mirror import Mirror
from async_grpo.run.checkpoint.resume import (
    Course,
    differences,
    earlier_evaluations,
    has_past,
    plan_rerun,
    verified,
)
from async_grpo.run.checkpoint.saver import Saver, saver_of
from async_grpo.run.connection import uses_cluster
from async_grpo.run.directory import RunDirectory
from async_grpo.run.preflight.devices import check_device
from async_grpo.run.preflight.model import look, made_model
from async_grpo.run.preflight.run_check import Checked, check_run
from async_grpo.run.run_log import RunLog
from async_grpo.run.running import RunningSystem
from async_grpo.run.speed_watch import SpeedWatch
from async_grpo.runtime.stopping import Signals, Stop
from async_grpo.runtime.text import counted
from async_grpo.tasks.mixture import load_tasks

if TYPE_CHECKING:  # torch and Ray take seconds to import
    from async_grpo.run.loop import Comparison
    from async_grpo.run.system import System
    from async_grpo.tasks.base import Prompt

Result = TypeVar("Result")
SAVING_AFTER_FAILURE_S = 30.0


class Trainer:
    """One run. Use it as a context manager, or call `stop`."""

    def __init__(
        self, config: Config, *, console: Console | None = None, callbacks: Sequence[Callback] = ()
    ) -> None:
        """callbacks: called at the events of the run, before those of `run.callbacks`. Raises
        SetupError, ConfigError.
        """
        self.config = resolve(config)
        self.run_dir = Path(self.config.run.dir)
        self.console = console or Console()
        self._callbacks = given_callbacks(callbacks)
        self.finished: str | None = None
        """Why training ends before its last step, once `finish` was called."""
        self.ending: tuple[int, str] | None = None
        """Exit code and message of a run that failed, once it ends."""
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.model_notes: list[str] | None = None
        self.resumed_at = 0
        """Learner steps that were trained before this start."""
        self._checked: Checked | None = None
        self._started = False
        self._stop_requested = Stop()
        self._log = RunLog(self.console, self.run_dir)
        self._running = RunningSystem(self._stop_requested)
        self._directory = RunDirectory(self.run_dir, lost=self._running.fail)
        self._speed: SpeedWatch | None = None

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, overrides: Sequence[str] = (), **more: Any
    ) -> Trainer:
        """Build the trainer that continues from this checkpoint, with its settings.

        overrides: `section.key=value`, such as another `learner.lr`, or a `run.dir` for a run of
        its own; without one it goes on in the directory of the run that wrote the checkpoint. more:
        arguments of Trainer. Raises SetupError, ConfigError.
        """
        path = Path(path).expanduser().resolve()
        try:
            settings = renewed(checkpoint.read(path)["config"])
        except checkpoint.CheckpointError as error:
            raise SetupError(str(error)) from error
        settings.setdefault("checkpoint", {})["resume"] = str(path)
        return cls(load_settings(settings, overrides, source=str(path)), **more)

    def check(self) -> None:
        """Check configuration, files and task before any process starts. Raises SetupError."""
        if not self._log.callbacks:
            run = self.config.run
            called = [*self._callbacks, *make_callbacks(run.callbacks)]
            self._log.callbacks = Callbacks(called, run.on_callback_error, error=self.console.error)
        self._checked = check_run(self.config, notes=self.model_notes)
        self.config = self._checked.config
        self.model_notes = self._checked.notes
        self._log.total_steps = self._checked.total_steps
        idle = [name for name, weight in self._checked.weights.items() if not weight]
        self._log.reward_watch = RewardWatch(idle)

    def start(self) -> None:
        """Start the run's processes, check the weight transport, and resume, if there is a past."""
        if self._started:
            return
        self._running.refuse_second()
        self._own_directory()
        config, console, log = self.config, self.console, self._log
        self._checked, manifest = self._directory.whole_checkpoint(
            config, self._facts, note=console.info
        )
        self._directory.begin(config, console)
        steps = counted(self.total_steps, "learner step")
        console.info(f"run {config.run.name}: {steps}; everything it writes is in {self.run_dir}")
        model_dir = made_model(config, note=console.info, check=self._stop_requested.check)
        notes = self.model_notes
        if notes is None:  # the model has just been made
            notes = look(config, load_tasks(config), model_dir=model_dir)
        console.info(*(notes or []))
        if not self._facts.held_out:
            console.info("no evaluation: the task has no held-out problems (set task.eval)")
        saver = log.saver = saver_of(
            config,
            model_dir=model_dir,
            manifest=manifest,
            total_steps=self.total_steps,
            data=self._facts.fingerprint,
            listener=log,
        )
        if (address := config.checkpoint.mirror) is not None:
            log.mirror = Mirror(address, self.run_dir, note=console.info)
            log.mirror.begin()
        with console.phase("joining Ray" if uses_cluster() else "starting Ray"):
            self._running.connect(config, note=console.info)
            config = self._running.find_room(config, model_dir, note=console.info)
        self.config = config
        self._directory.write(config)  # in numbers, which a resumed run keeps
        from async_grpo.cluster.prometheus import Exported

        log.gauges = Exported(config.run.name)
        tracker = log.tracker = begin_tracking(
            config,
            resume_run_id=None if manifest is None else manifest["mlflow_run_id"],
            resumed=manifest is not None or has_past(config),
            note=console.info,
        )
        if log.mirror is not None:
            console.info(log.mirror.ready(self._stop_requested.check))
        origin = Origin(self._facts.checkpoint, manifest["step"] if manifest else 0)
        self._start_system(model_dir, origin, saver)
        tracker.tag("run_epoch", str(self.system.run_epoch))
        console.info(*tracker.ready(check=self._stop_requested.check))
        self._speed = SpeedWatch(
            config,
            max_num_seqs=self.system.max_num_seqs,
            actors=len(self.system.actors.alive()),
            cores=self.system.cores,
            console=console,
        )
        self._started = True
        self._tell_origin(origin)
        log.callbacks.tell("on_start")
        log.callbacks.deliver(self)

    def train(self, steps: int | None = None) -> dict[str, Any]:
        """Train to the end of the run, or `steps` more learner steps, and wait until their weights
        are live; the last result of `steps`, {} where nothing is trained, which the console says.
        """
        result: dict[str, Any] = {}
        for result in self.steps(steps):  # noqa: B007 - the last one counts
            pass
        return result

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.steps()

    def steps(self, steps: int | None = None) -> Iterator[dict[str, Any]]:
        """Train learner steps one by one, to the end of the run or `steps` of them.

        Gives the metrics of each (docs/reference/metrics.md) with `training_iteration` (the step),
        `time_this_iter_s`, `time_total_s` (of this start) and `done` (it was the run's last). A
        publication goes on while the caller has the result, as between the steps of `train`; at
        the end the newest weights are live. The caller may save, evaluate, restore or break.
        """
        try:
            self.start()
        except StopRequested as asked:  # before there was anything to train
            self.console.info(f"nothing is trained: {asked}")
            return
        began = before = time.monotonic()
        last = self.total_steps if steps is None else min(self.total_steps, self.steps_done + steps)
        if why := self._why_nothing_is_trained():
            self.console.info(why)
        while True:
            while self.steps_done < last and not self._ends:
                self._directory.check_own()  # lost during the start, or between two calls
                done = self.steps_done
                try:
                    metrics = self._running.run(self.system.step())
                except StopRequested:  # while it waited for groups
                    break
                self._begin_what_is_due(metrics, before=done)
                now = time.monotonic()
                result = metrics | {
                    "training_iteration": self.steps_done,
                    "time_this_iter_s": now - before,
                    "time_total_s": now - began,
                }
                before = now
                self._log.callbacks.tell("on_step", result)
                self._log.callbacks.deliver(self)
                yield result | {"done": self.steps_done >= self.total_steps or self._ends}
            self._running.run(self.system.settle())
            # A learner that died while it settled may be at an earlier step.
            if self.steps_done >= last or self._ends:
                break
        self._log.callbacks.deliver(self)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the newest weights while the learner waits; {} without problems, if stopped."""
        self.start()
        total = self._facts.held_out
        if not total:
            return {}  # as `start` has said
        with self.console.phase(f"evaluating on {total} held-out problems"):
            self._running.run(self.system.settle())  # a publication is not cut short
            try:
                result, samples = self._running.run(self.system.evaluate(total), stoppable=True)
            except StopRequested:
                return {}
        self._evaluated(self.steps_done, result, samples)
        self._log.callbacks.deliver(self)
        return result

    def save(self, *, keep_groups: bool = False) -> Path:
        """Write a checkpoint with the model in Hugging Face format; its directory. The journal
        forgets groups that no kept checkpoint needs, unless `keep_groups`. Raises FaultBudgetSpent
        on failure.
        """
        path = self._save(keep_groups=keep_groups, wait=True)
        self._log.callbacks.deliver(self)
        return path

    def restore(self, path: str | Path) -> None:
        """Go on from this checkpoint, and take back the learner steps after it.

        Before `start` any complete checkpoint will do; a run that has been started goes back to one
        of its own, between learner steps, while its rollout actors go on. Raises SetupError for one
        that is not complete, RunError for one that is not its own or once all steps are trained.
        """
        path = Path(path).expanduser().resolve()
        if self._running.system is not None:
            self._running.run(self._saver.wait())  # one under way may prune this one
            origin = Origin(path, verified(path)["step"])
            own = path == checkpoint.path_for(self.run_dir.resolve(), origin.step)
            if not own or origin.step > self.steps_done:
                raise RunError(
                    f"{path} is no earlier checkpoint of {self.run_dir}, and a started run "
                    "can only go back in its own history; use Trainer.from_checkpoint"
                )
            self._running.run(self.system.restore(origin))
            self.finished = None
            self.evaluations = [one for one in self.evaluations if one[0] <= origin.step]
            self._log.callbacks.tell("on_restore", origin.step)
            self._log.callbacks.deliver(self)
            self.console.info(f"went back to step {self.steps_done}, the checkpoint {path}")
            return
        if self._running.connection is not None:
            raise RunError("restore comes before start, or once it has returned")
        section = self.config.checkpoint.model_copy(update={"resume": str(path)})
        self.config = self.config.model_copy(update={"checkpoint": section})
        self.check()

    def get_state(self) -> dict[str, Any]:
        """Return where the run is, as plain values: steps, versions, evaluations, faults, and the
        newest complete checkpoint, from which `from_checkpoint` continues.
        """
        system, newest = self.system, checkpoint.latest(self.run_dir)
        return {
            "run_dir": str(self.run_dir),
            "training_iteration": self.steps_done,
            "total_steps": self.total_steps,
            "run_epoch": system.run_epoch,
            "live_version": system.coordinator.live_version,
            "checkpoint": None if newest is None else str(newest),
            "mlflow_run_id": self.tracker.run_id if self.tracker else None,
            "evaluations": [{"step": step, **found} for step, found in self.evaluations],
            "faults": list(system.actors.deaths),
        }

    def generate(self, prompts: Sequence[Prompt], **sampling: Any) -> list[list[Generated]]:
        """Sample from the live weights: for each prompt (text, or chat messages) its `n` responses.

        sampling: `n` (1), `max_tokens`, `temperature`, `top_p`, `top_k`, `min_p`; by default those
        of `rollout`. Actors go on with their groups meanwhile. A response has `text`, `token_ids`,
        `logprobs`, `weights` (label per token) and `finish_reason`. Raises RunError.
        """
        asked = prompts_of(prompts), sampling_of(self.config.rollout, sampling)
        self.start()
        return self._running.run(self.system.actors.generate(*asked))

    def add_rollout_actor(self) -> str:
        """Start one more rollout actor, also from another thread; its id once it serves. Raises
        PlacementError without room, RunError at `cluster.rollout_actors.max` or when it did not
        start.
        """
        return self._running.run(self.system.actors.add())

    def remove_rollout_actor(self, actor_id: str) -> None:
        """Drain and end a rollout actor. Raises ValueError (unknown id), RunError (below `min`)."""
        self._running.run(self.system.actors.remove(actor_id))

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine of the running system, such as `trainer.system.learner.get_weights()` or
        `trainer.system.actors.foreach_actor(...)`, and wait for its result.
        """
        if not self._started:
            work.close()
            raise RunError("the run is not started, or stopped already")
        return self._running.run(work)

    def finish(self, why: str) -> None:
        """Train no further step, as if the run had reached its end: it is saved and evaluated."""
        if self.finished is None:
            self.finished = why
            self.console.info(f"training ends here: {why}")

    @contextmanager
    def draining(self) -> Iterator[Self]:
        """Let SIGTERM and SIGINT end `train`, `steps` and `evaluate` between learner steps, inside
        of this context; the script continues after them, to save. A second signal ends the process.
        Raises RunError outside of the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RunError("signals reach the main thread only: use draining() there")
        with Signals(self.console.info) as signals:
            signals.attach(self)
            yield self

    def replay(self, source: str | Path, *, after: int | None = None) -> Comparison:
        """Train the learner alone on the batches that the run in directory `source` recorded, in
        order.

        Begins at the checkpoint of step `after` in `source`, by default as early as it can, and
        ends with `run.total_steps` or the last step recorded. Metrics go to this run's directory.
        Returns which weights are the recorded ones, bit for bit. Raises SetupError for what cannot
        be repeated.
        """
        self._running.refuse_second()
        source = Path(source).expanduser().resolve()
        if source == self.run_dir:
            raise SetupError(
                f"a replay writes its own metrics: set run.dir to another directory than {source}"
            )
        self._own_directory(learner_only=True)
        course = plan_rerun(source, after=after, until=self.total_steps)
        chosen = ("tokens_per_micro_batch", "gradient_checkpointing")
        self.config = keep_chosen(self.config, read_settings(source / "config.yaml"), *chosen)
        for line in differences(self.config, source / "config.yaml"):
            self.console.info(f"other than recorded: {line}")
        self.console.info(
            f"steps {course.first} to {course.last}, "
            + (f"from {course.checkpoint}" if course.checkpoint else "from the initial model")
        )
        return self._repeat(source, course)

    def request_stop(self) -> None:
        """Ask `start` or `train` to end between learner steps (safe in a signal handler)."""
        self._stop_requested.set()
        self.console.stopping()
        if self._running.system is not None:
            self._running.system.request_stop()

    def abandon(self) -> None:
        """Remove what would outlive this process (for the last act of a signal handler)."""
        self._running.abandon()

    def stop(self, status: Status = "FINISHED", *, ending: tuple[int, str] | None = None) -> None:
        """Stop all processes, write the report and close tracking; also twice, and after an error.
        ending: exit code and message for the report; by default the code that `status` stands for.
        """
        try:
            if self._started and self._running.system is not None:
                self.ending = ending
                self._log.callbacks.tell("on_end", status)
                self._log.callbacks.deliver(self)
        finally:
            self._take_down(status, ending)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        status: Status = "FAILED"
        if error is None or isinstance(error, StopRequested):
            status = "FINISHED"
        elif isinstance(error, SystemExit):
            status = "FAILED" if error.code else "FINISHED"
        elif isinstance(error, KeyboardInterrupt):
            status = "KILLED"
        self.stop(status)

    @property
    def steps_done(self) -> int:
        """Learner steps contained in the weights."""
        return self.system.steps_done

    @property
    def total_steps(self) -> int:
        """Learner steps of the whole run; 0 before `check`."""
        return 0 if self._checked is None else self._checked.total_steps

    @property
    def stop_requested(self) -> bool:
        """Whether somebody asked the run to end early."""
        return self._stop_requested.is_set()

    @property
    def mirror_error(self) -> str:
        """Why the copy of a run that has ended (`checkpoint.mirror`) is not complete, or ""."""
        return self._log.mirror_error

    @property
    def tracker(self) -> Tracker | None:
        """Where the metrics go, while the run is on."""
        return self._log.tracker

    @property
    def system(self) -> System:
        """The running system, for those who want to look inside. Raises RunError without one,
        StopRequested where the run was asked to end before it started.
        """
        if self._running.system is None:
            self._stop_requested.check()
            raise RunError("the run is not started, or stopped already")
        return self._running.system

    @property
    def bottleneck(self) -> Bottleneck | None:
        """Who limited the last interval of steps, and what to change; None before the first."""
        return None if self._speed is None else self._speed.latest

    @property
    def speed(self) -> SpeedWatch | None:
        """What the run is expected to come to, and comes to; None before it is started."""
        return self._speed

    @property
    def step_under_way(self) -> int | None:
        """The learner step that is being trained, or comes next; None while nothing runs."""
        return self._running.step_under_way

    @property
    def _ends(self) -> bool:
        """Whether no further step is to be trained."""
        return self.stop_requested or self.finished is not None

    def _why_nothing_is_trained(self) -> str:
        """Return why there is no step to train, or ""."""
        if self.steps_done >= self.total_steps:
            return (
                f"nothing is left to train: all {counted(self.total_steps, 'learner step')} of the "
                "run are done; raise run.total_steps to go on from its checkpoint"
            )
        if self.finished is not None:
            return (
                f"nothing is trained: the run is finished ({self.finished}); restore a checkpoint "
                "to continue from there"
            )
        if self.stop_requested:
            return "nothing is trained: the run was asked to end; continue in a new trainer"
        return ""

    def _begin_what_is_due(self, metrics: dict[str, float], *, before: int) -> None:
        """After a learner step: predict, save and evaluate, where it is time."""
        system = self.system
        self._saver.check()
        assert self._speed is not None, "start() comes first"
        if predicted := self._speed.observe(metrics, system.loop.lengths, system.loop.generation_s):
            self._log.logged(self.steps_done, predicted)
        if self._due(self.config.checkpoint.every_steps, before):
            self._save(keep_groups=False, wait=False)
        if self._facts.held_out and self._due(self.config.evaluation.every_steps, before):
            self._running.run(system.evaluate_beside(self._facts.held_out, self._evaluated))

    def _due(self, every: int, before: int) -> bool:
        """Whether a multiple of `every` lies after step `before`; never at the end of the run."""
        step = self.steps_done
        return step < self.total_steps and every > 0 and step // every > before // every

    def _save(self, *, keep_groups: bool, wait: bool) -> Path:
        """Write a checkpoint; without `wait` beside training, where failures are only counted."""
        system, step = self.system, self.steps_done
        # What a finished run leaves can be looked at and replayed.
        forget = step < self.total_steps and not self.stop_requested and not keep_groups
        facts = {
            "config": self.config.model_dump(mode="json"),
            "run_epoch": system.run_epoch,
            "mlflow_run_id": self.tracker.run_id if self.tracker else None,
        }
        work = self._saver.save(system, step=step, facts=facts, forget=forget, wait=wait)
        return self._running.run(work)

    def _repeat(self, source: Path, course: Course) -> Comparison:
        """Start a learner alone, and train the recorded steps of this course."""
        from async_grpo.run.rerun import Rerun

        self._log.total_steps = course.last
        model_dir = made_model(
            self.config, note=self.console.info, check=self._stop_requested.check
        )
        connection = self._running.connect(self.config, note=self.console.info, learner_only=True)
        self._directory.begin_again(self.config)
        rerun = self._running.rerun = Rerun(
            self.config,
            total_steps=self.total_steps,
            weights=self._facts.weights,
            key=connection.key,
        )
        self._log.tracker = Tracker(
            self.config, run_dir=self.run_dir, resume_run_id=None, note=self.console.info
        )
        self._log.tracker.start()
        work = rerun.run(
            connection.session,
            str(source / "journal"),
            model_dir=model_dir,
            checkpoint=None if course.checkpoint is None else str(course.checkpoint / "learner"),
            first=course.first,
            last=course.last,
            listener=self._log,
        )
        return self._running.run(work, stoppable=True)

    def _evaluated(
        self, step: int, result: dict[str, float], samples: list[dict[str, Any]]
    ) -> None:
        """Record an evaluation, perhaps of an earlier step than the last one that was logged."""
        self.evaluations.append((step, result))
        self._log.logged(step, result)
        self._log.callbacks.tell("on_evaluation", step, dict(result))
        self._log.samples([{"step": step, "source": "evaluation", **sample} for sample in samples])

    def _own_directory(self, *, learner_only: bool = False) -> None:
        """Check everything, and take the run directory. Raises SetupError where another run has
        it.
        """
        self.check()
        check_trackers(self.config)
        check_device(without_engines(self.config) if learner_only else self.config)
        copied = self.config.checkpoint.resume_address
        note, check = self.console.info, self._stop_requested.check
        if self._directory.take(copied=copied, note=note, check=check):
            self.check()  # the run before may have gone on until now

    def _start_system(self, model_dir: str, origin: Origin, saver: Saver) -> None:
        """Start engines and learner, and let the learner's weights reach the engines."""
        config, log, facts = self.config, self._log, self._facts
        with self.console.phase("starting engines and learner"):
            log.newest_step = last_logged_step(self.run_dir)
            self._running.start(
                config, facts, model_dir=model_dir, origin=origin, saver=saver, listener=log
            )
            log.newest_step = self.steps_done
        checking = " and checking them" if config.weight_sync.self_check else ""
        with self.console.phase(f"connecting weights{checking}"):
            arriving = self.system.open_weights()
            self.console.weights_arrive(self._running.run(arriving, stoppable=True))

    def _tell_origin(self, origin: Origin) -> None:
        """Say where the run goes on, after what is of another history was set aside."""
        self._directory.go_on(origin.step, note=self.console.info)
        self.console.info(*self._facts.changes.lines())
        self.resumed_at = self.steps_done
        if self.steps_done:
            self.evaluations[:0] = earlier_evaluations(self.run_dir, self.steps_done)
            self.console.info(
                f"resumed {origin.path or 'the journal'} at step {self.steps_done} of "
                f"{self.total_steps}"
            )

    def _take_down(self, status: Status, ending: tuple[int, str] | None) -> None:
        orderly, repeated = status != "FAILED", self._running.rerun is not None
        self._started = False
        with ExitStack() as last:  # the last one that is named comes first, whatever the others do
            last.callback(self._end_console, status, ending)
            last.callback(self._directory.release)
            last.callback(self._running.close)
            last.callback(self._conclude, status, ending, report=not repeated)
            last.callback(self._running.disconnect)
            last.callback(self._running.end, orderly=orderly)
            if self._running.on:
                self._finish_saving(orderly=orderly)
                speed = None if self._log.tracker is None else self._speed
                if speed is not None and (errors := speed.end()):
                    self._log.logged(self._log.newest_step, errors)

    def _conclude(self, status: Status, ending: tuple[int, str] | None, *, report: bool) -> None:
        asked, log = self.stop_requested, self._log
        log.conclude(self.config, status, ending=ending, asked=asked, report=report)

    def _end_console(self, status: Status, ending: tuple[int, str] | None) -> None:
        if ending is None or self.console.progress.ended:
            self.console.stopped(status)
        else:
            self.console.end(*ending)

    def _finish_saving(self, *, orderly: bool) -> None:
        """Let a checkpoint under way be completed; after a failure in a short while only."""
        limit = self.config.watchdog.step_timeout_s if orderly else SAVING_AFTER_FAILURE_S
        if self._log.saver is not None:
            self._running.run(self._log.saver.close(limit))

    @property
    def _saver(self) -> Saver:
        assert self._log.saver is not None, "start() comes first"
        return self._log.saver

    @property
    def _facts(self) -> Checked:
        assert self._checked is not None, "check() comes first"
        return self._checked
