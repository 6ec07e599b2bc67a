"""The beginning and the end of a run: its directory, Ray, its processes, tracking and report.

Runs in: the driver; the base of the trainer, which has what is done in between. Hides in which
order things are taken and given back:

    check -> directory taken -> Ray -> places -> processes -> weights -> callbacks' `on_start`
    `on_end` -> checkpoint under way -> processes -> Ray as it was -> report -> directory free

An event loop in a thread of its own keeps rollout actors, publications and health probes going
between the calls of the trainer, which block.

Invariant: whatever way a run ends, `stop` leaves no process, shared-memory segment or open MLflow
run behind, and a Ray that was there before as it was.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from async_grpo.cluster.placement import crowded, without_engines
from async_grpo.config.load import dump, resolve
from async_grpo.config.schema import Config
from async_grpo.errors import DirectoryTaken, RunError, StopRequested
from async_grpo.observe.bottleneck import Bottleneck
from async_grpo.observe.console.console import Console
from async_grpo.observe.console.status_file import StatusFile
from async_grpo.observe.tracking.tracker import Status, Tracker, begin_tracking, check_server
from async_grpo.replay.resume import last_logged_step
from async_grpo.run.callbacks.base import Callback, Callbacks
from async_grpo.run.callbacks.registry import given_callbacks, make_callbacks
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.checkpoint.directory import Origin
from async_grpo.run.checkpoint.resume import changes, find_checkpoint, first_evaluation, has_past
from async_grpo.run.checkpoint.saver import Saver, saver_of
from async_grpo.run.connection import Connection, uses_cluster
from async_grpo.run.preflight.devices import check_device, look_at_gpus
from async_grpo.run.preflight.model import known_model, look
from async_grpo.run.preflight.run_check import Checked, check_run
from async_grpo.run.run_log import RunLog
from async_grpo.run.speed_watch import SpeedWatch
from async_grpo.runtime.parts import needed, part
from async_grpo.runtime.run_lock import RunLock
from async_grpo.runtime.stopping import Stop
from async_grpo.runtime.text import counted
from async_grpo.tasks.registry import load_task

if TYPE_CHECKING:  # torch and Ray take seconds to import
    from async_grpo.run.rerun import Rerun
    from async_grpo.run.system import System

Result = TypeVar("Result")
SAVING_AFTER_FAILURE_S = 30.0


class Lifecycle:
    """Start, state and end of one run. Use it as a context manager, or call `stop`."""

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
        self._speed: SpeedWatch | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="async_grpo-loop", daemon=True
        )

    def check(self) -> None:
        """Check configuration, files and task before any process starts. Raises SetupError."""
        if not self._log.callbacks:
            run = self.config.run
            called = [*self._callbacks, *make_callbacks(run.callbacks)]
            self._log.callbacks = Callbacks(called, run.on_callback_error, error=self.console.error)
        self._checked = check_run(self.config, notes=self.model_notes)
        self.model_notes = self._checked.notes
        self._log.total_steps = self._checked.total_steps

    def start(self) -> None:
        """Start the run's processes, check the weight transport, and resume, if there is a past."""
        if self._started:
            return
        self._refuse_second_start()
        self._own_directory()
        manifest = self._whole_checkpoint()
        (self.run_dir / "config.yaml").write_text(dump(self.config), encoding="utf-8")
        begun = self.console.begin_run()
        self.console.attach(StatusFile(self.run_dir, begun, run=self.config.run.name))
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
        self.console.info(*(notes or []))
        if not self._facts.held_out:
            self.console.info("no evaluation: the task has no held-out problems (set task.eval)")
        saver = self._log.saver = saver_of(
            self.config,
            model_dir=model_dir,
            manifest=manifest,
            total_steps=self.total_steps,
            data=self._facts.fingerprint,
            listener=self._log,
        )
        with self.console.phase("joining Ray" if uses_cluster() else "starting Ray"):
            connection = self._connect()
        from async_grpo.cluster.prometheus import Exported

        self._log.gauges = Exported(self.config.run.name)
        tracker = self._log.tracker = begin_tracking(
            self.config,
            resume_run_id=None if manifest is None else manifest["mlflow_run_id"],
            resumed=manifest is not None or has_past(self.config),
            note=self.console.info,
        )
        origin = Origin(self._facts.checkpoint, manifest["step"] if manifest else 0)
        self._start_system(connection, model_dir, origin, saver)
        tracker.tag("run_epoch", str(self.system.run_epoch))
        self.console.info(*tracker.ready(check=self._stop_requested.check))
        system = self.system
        self._speed = SpeedWatch(
            self.config,
            max_num_seqs=system.max_num_seqs,
            actors=len(system.actors.alive()),
            cores=system.cores,
            console=self.console,
        )
        self._started = True
        self._tell_origin(origin)
        self._log.callbacks.tell("on_start")
        self._log.callbacks.deliver(self)

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
        try:
            if self._started and self._system is not None:
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
        if error is None:
            status = "FINISHED"
        elif isinstance(error, SystemExit):
            status = "FAILED" if error.code else "KILLED"
        elif isinstance(error, StopRequested | KeyboardInterrupt):
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
    def tracker(self) -> Tracker | None:
        """Where the metrics go, while the run is on."""
        return self._log.tracker

    @property
    def system(self) -> System:
        """The running system, for those who want to look inside. Raises RunError without one,
        StopRequested where the run was asked to end before it started.
        """
        if self._system is None:
            self._stop_requested.check()
            raise RunError("the run is not started, or stopped already")
        return self._system

    @property
    def verdict(self) -> Bottleneck | None:
        """Who limited the last interval of steps, and what to change; None before the first."""
        return None if self._speed is None else self._speed.latest

    @property
    def speed(self) -> SpeedWatch | None:
        """What the run is expected to come to, and comes to; None before it is started."""
        return self._speed

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

    def _whole_checkpoint(self) -> dict[str, Any] | None:
        """Choose the checkpoint again, by the contents of all files, and say why; its manifest."""
        config, facts = self.config, self._facts
        found, notes = find_checkpoint(
            config, total_steps=self.total_steps, data=facts.fingerprint, check=checkpoint.verify
        )
        self.console.info(*(f"warning: {note}" for note in notes))
        self._checked = replace(facts, checkpoint=found, changes=changes(config, found))
        return None if found is None else checkpoint.read(found)

    def _lost(self, why: str) -> None:
        """End this run, because another one has its directory."""
        error = self._taken = DirectoryTaken(why)
        if self._system is not None:
            self._loop.call_soon_threadsafe(self._system.fail, error)

    def _connect(self, *, learner_only: bool = False) -> Connection:
        """Join or start Ray; from the main thread."""
        self._thread.start()
        connection = self._connection = Connection(
            self.config, self._loop, check=self._stop_requested.check, learner_only=learner_only
        )
        if (warning := connection.session.exposed_token()) is not None:
            self.console.info(warning)
        return connection

    def _start_system(
        self, connection: Connection, model_dir: str, origin: Origin, saver: Saver
    ) -> None:
        """Start engines and learner, and let the learner's weights reach the engines."""
        from async_grpo.cluster.downloads import download_everywhere
        from async_grpo.run.system import StartFacts, System, reserve

        config, checked = self.config, self._facts
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
            if why := crowded(places.placement):
                self.console.info(f"warning: {why}")
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
                f"a checkpoint of a later step than {origin.step}, where this run goes on, is set "
                f"aside: {path}"
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

    def _finish_saving(self, *, failed: bool) -> None:
        """Let a checkpoint under way be completed; after a failure in a short while only."""
        limit = SAVING_AFTER_FAILURE_S if failed else self.config.watchdog.step_timeout_s
        if self._log.saver is not None:
            self._run(self._log.saver.close(limit))

    def _take_down(self, status: Status, ending: tuple[int, str] | None) -> None:
        running, repeated = self._system or self._rerun, self._rerun is not None
        connection = self._connection
        self._system = self._rerun = None
        self._connection, self._started = None, False
        orderly = status != "FAILED"
        with ExitStack() as last:  # the last one that is named comes first, whatever the others do
            last.callback(self.console.stopped, status)
            last.callback(self._lock.release)
            last.callback(self._end_loop)
            last.callback(self._conclude, status, ending, report=not repeated)
            if connection is not None:
                last.callback(connection.close)
            if running is not None:
                last.callback(lambda: self._run(running.stop(orderly=orderly)))
            if self._thread.is_alive():
                self._finish_saving(failed=not orderly)
                speed = None if self._log.tracker is None else self._speed
                if speed is not None and (errors := speed.end()):
                    self._log.logged(self._log.newest_step, errors)

    def _end_loop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)
            if not self._thread.is_alive():
                self._loop.close()

    def _conclude(
        self, status: Status, ending: tuple[int, str] | None, *, report: bool = True
    ) -> None:
        """Say how the run ended, write its report, and close tracking, if it was open."""
        tracker, self._log.tracker = self._log.tracker, None
        self._log.gauges = None
        if tracker is None:
            return
        asked = f"on request, after step {self._log.newest_step}" if self.stop_requested else "no"
        tracker.tag("async_grpo.stopped", asked)  # a resumed run may have one from before
        tracker.conclude(status)  # the report takes a while, and somebody may lose patience
        self.console.stopped(status) if ending is None else self.console.end(*ending)
        if report and (report_on := part("report")) is not None:
            report_on(self.config, self.console, tracker)
        tracker.finish(status)

    def _model_dir(self) -> str:
        """Return the directory of the model, which is made where there is none."""
        if self.config.model.path is not None and (known := known_model(self.config)):
            return known
        made = needed("warm_start", "`model.warm_start`")
        return made.model_directory(
            self.config, progress=self.console.info, check=self._stop_requested.check
        )

    def _run(self, work: Coroutine[Any, Any, Any], *, stoppable: bool = False) -> Any:
        if threading.current_thread() is self._thread:
            work.close()
            raise RunError("a coroutine of the run cannot wait for a call of its trainer")
        return self._stop_requested.run(work, self._loop, stoppable=stoppable)

    @property
    def _saver(self) -> Saver:
        assert self._log.saver is not None, "start() comes first"
        return self._log.saver

    @property
    def _facts(self) -> Checked:
        assert self._checked is not None, "check() comes first"
        return self._checked
