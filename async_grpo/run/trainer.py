"""A run, from its configuration to its end: everything built, connected, and taken down again.

Runs in: the driver. `Trainer(config)` starts nothing; its calls block, so that a script or a
notebook can drive it step by step, while an event loop in a thread of its own keeps rollout actors,
publications and health probes going between the calls.

    with Trainer(load_config("cfg.yaml")) as trainer, trainer.draining():
        for result in trainer:                  # a learner step; its publication goes on meanwhile
            print(result["training_iteration"], result["rollout/score"])
        trainer.save()

Invariants: whatever way a run ends, `stop` leaves no process, shared-memory segment or open MLflow
run behind, and a Ray that was there before as it was; a checkpoint is taken between learner steps
only; callbacks are called there too, in the thread that drives the trainer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from async_grpo.config.load import dump, load_settings
from async_grpo.errors import RunError, SetupError, StopRequested
from async_grpo.observe.tracking.tracker import Tracker
from async_grpo.rollout.generation import Generated, prompts_of, sampling_of
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.checkpoint.directory import Origin
from async_grpo.run.checkpoint.resume import Course, differences, plan_rerun, verified
from async_grpo.run.lifecycle import Lifecycle
from async_grpo.runtime.stopping import Signals
from async_grpo.runtime.text import counted

if TYPE_CHECKING:  # torch and Ray take seconds to import
    from async_grpo.run.loop import Comparison
    from async_grpo.tasks.base import Prompt

Result = TypeVar("Result")


class Trainer(Lifecycle):
    """One run. Use it as a context manager, or call `stop`."""

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, overrides: Sequence[str] = (), **more: Any
    ) -> Trainer:
        """Build the trainer that goes on from this checkpoint, with its settings.

        overrides: `section.key=value`, such as another `learner.lr`, or a `run.dir` for a run of
        its own; without one it goes on in the directory of the run that wrote the checkpoint. more:
        arguments of Trainer. Raises SetupError, ConfigError.
        """
        path = Path(path).expanduser().resolve()
        try:
            settings = checkpoint.read(path)["config"]
        except checkpoint.CheckpointError as error:
            raise SetupError(str(error)) from error
        settings.setdefault("checkpoint", {})["resume"] = str(path)
        return cls(load_settings(settings, overrides, source=str(path)), **more)

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

        Gives the metrics of each (docs/metrics.md) with `training_iteration` (the step),
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
        if self.steps_done >= self.total_steps:
            self.console.info(
                f"nothing is left to train: all {counted(self.total_steps, 'learner step')} of the "
                "run are done; raise run.total_steps to go on from its checkpoint"
            )
        elif self._ends:
            self.console.info(f"nothing is trained: {self._why_it_ends()}")
        while True:
            while self.steps_done < last and not self._ends:
                metrics = self._step()
                if metrics is None:  # asked to end while it waited for groups
                    break
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
            self._run(self.system.settle())
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
            self._run(self.system.settle())  # a publication is not cut short
            try:
                result, samples = self._run(self.system.evaluate(total), stoppable=True)
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
        if self._system is not None:
            self._run(self._saver.wait())  # one under way may prune this one
            origin = Origin(path, verified(path)["step"])
            own = path == checkpoint.path_for(self.run_dir.resolve(), origin.step)
            if not own or origin.step > self.steps_done:
                raise RunError(
                    f"{path} is no earlier checkpoint of {self.run_dir}, and a run that is started "
                    "goes back in its own history only; use Trainer.from_checkpoint"
                )
            self._run(self.system.restore(origin))
            self.finished = None
            self.evaluations = [one for one in self.evaluations if one[0] <= origin.step]
            self._log.callbacks.tell("on_restore", origin.step)
            self._log.callbacks.deliver(self)
            self.console.info(f"went back to step {self.steps_done}, the checkpoint {path}")
            return
        if self._connection is not None:
            raise RunError("restore comes before start, or once it has returned")
        section = self.config.checkpoint.model_copy(update={"resume": str(path)})
        self.config = self.config.model_copy(update={"checkpoint": section})
        self.check()

    def get_state(self) -> dict[str, Any]:
        """Return where the run is, as plain values: steps, versions, evaluations, faults, and the
        newest complete checkpoint, from which `from_checkpoint` goes on.
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

        sampling: `n` (1), `max_tokens`, `temperature`, `top_p`, `top_k`; by default those of
        `rollout`. Actors go on with their groups meanwhile. A response has `text`, `token_ids`,
        `logprobs`, `weights` (label per token) and `finish_reason`. Raises RunError.
        """
        asked = prompts_of(prompts), sampling_of(self.config.rollout, sampling)
        self.start()
        return self._run(self.system.actors.generate(*asked))

    def add_rollout_actor(self) -> str:
        """Start one more rollout actor, also from another thread; its id once it serves. Raises
        PlacementError without room, RunError at `cluster.rollout_actors.max` or when it did not
        start.
        """
        return self._run(self.system.actors.add())

    def remove_rollout_actor(self, actor_id: str) -> None:
        """Drain and end a rollout actor. Raises ValueError (unknown id), RunError (below `min`)."""
        self._run(self.system.actors.remove(actor_id))

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine of the running system, such as `trainer.system.learner.get_weights()` or
        `trainer.system.actors.foreach_actor(...)`, and wait for its result.
        """
        if not self._started:
            work.close()
            raise RunError("the run is not started, or stopped already")
        return self._run(work)

    def finish(self, why: str) -> None:
        """Train no further step, as if the run had reached its end: it is saved and evaluated."""
        if self.finished is None:
            self.finished = why
            self.console.info(f"training ends here: {why}")

    @contextmanager
    def draining(self) -> Iterator[Self]:
        """Let SIGTERM and SIGINT end `train`, `steps` and `evaluate` between learner steps, inside
        of this context; the script goes on behind them, to save. A second signal ends the process.
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

    @property
    def step_under_way(self) -> int | None:
        """The learner step that is being trained, or comes next; None while nothing runs."""
        running = self._system or self._rerun
        return None if running is None or running.loop is None else running.loop.steps_done + 1

    @property
    def _ends(self) -> bool:
        """Whether no further step is to be trained."""
        return self.stop_requested or self.finished is not None

    def _why_it_ends(self) -> str:
        if self.finished is None:
            return "the run was asked to end; another trainer goes on from its checkpoint"
        return f"the run is finished ({self.finished}); restore a checkpoint to go on from there"

    def _step(self) -> dict[str, Any] | None:
        """Train a learner step, and begin what is due after it; its metrics, None if stopped."""
        if self._taken is not None:  # during the start, or between two calls
            raise self._taken
        system, before = self.system, self.steps_done
        try:
            metrics = self._run(system.step())
        except StopRequested:
            return None
        self._saver.check()
        assert self._speed is not None, "start() comes first"
        if predicted := self._speed.observe(metrics, system.loop.lengths):
            self._log.logged(self.steps_done, predicted)
        if self._due(self.config.checkpoint.every_steps, before):
            self._save(keep_groups=False, wait=False)
        if self._facts.held_out and self._due(self.config.evaluation.every_steps, before):
            self._run(system.evaluate_beside(self._facts.held_out, self._evaluated))
        return metrics

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
            "run_epoch": system.run_epoch,
            "mlflow_run_id": self.tracker.run_id if self.tracker else None,
        }
        work = self._saver.save(system, step=step, facts=facts, forget=forget, wait=wait)
        return self._run(work)

    def _repeat(self, source: Path, course: Course) -> Comparison:
        """Start a learner alone, and train the recorded steps of this course."""
        from async_grpo.run.rerun import Rerun

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

    def _evaluated(
        self, step: int, result: dict[str, float], samples: list[dict[str, Any]]
    ) -> None:
        """Record an evaluation, perhaps of an earlier step than the last one that was logged."""
        self.evaluations.append((step, result))
        self._log.logged(step, result)
        self._log.callbacks.tell("on_evaluation", step, dict(result))
        self._log.samples([{"step": step, "source": "evaluation", **sample} for sample in samples])
