"""Experiment tracking: one line of `metrics.jsonl` per learner step, samples, and a tracker.

Runs in: the driver. The tracker (MLflow) is called by one thread only, and not imported with
`tracking.mlflow: false`. Hides that thread, whose queue are the files of the run directory, with
its retries and deadlines.

Invariants: `metrics.jsonl` has every logged step before the tracker hears of it; no call but
`start`, `ready` and `finish` waits for it, and those have deadlines; failures are counted, and the
first of a series is shown; what the tracker does not get is said at the end with the command that
sends it; a tracker that fails after the start, or a full disk, never stops training.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from async_grpo.config.docs import settings as known_settings
from async_grpo.config.schema import Config
from async_grpo.observe.console.console import Console
from async_grpo.observe.tracking.delivery import EVERY, Delivery
from async_grpo.observe.tracking.mlflow_sink import MlflowSink, package
from async_grpo.observe.tracking.outbox import METRICS, SAMPLES, FilePart, Outbox, TrackedRun
from async_grpo.observe.tracking.sink import TrackerSink, TrackingError
from async_grpo.observe.tracking.system_metrics import SystemMetrics
from async_grpo.runtime.provenance import tags, write_code_state
from async_grpo.runtime.text import one_line, visible, without_password

Status = Literal["FINISHED", "FAILED", "KILLED"]
MODEL, PACKAGED = "model", "mlflow_model"
THREAD = "async_grpo-tracking"

START_TIMEOUT_S = 120.0
"""Longest wait for the tracker at the start; a new database takes two seconds or more."""
FINISH_TIMEOUT_S = 30.0
POLL_S = 0.1
UNWRITTEN_BYTES = 16 << 20
_TEXT_LENGTH = 4000
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 60.0

_log = logging.getLogger(__name__)


class Lines:
    """Appends lines to a file; removes what a killed process left of a last line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._unwritten = b""
        size = os.fstat(self._file).st_size
        tail = os.pread(self._file, UNWRITTEN_BYTES, start := max(0, size - UNWRITTEN_BYTES))
        self.size = start + tail.rfind(b"\n") + 1
        """Bytes at the beginning."""
        if self.size < size:
            os.ftruncate(self._file, self.size)

    def append(self, data: bytes) -> None:
        """Write, after what is unwritten. Raises OSError, and keeps UNWRITTEN_BYTES for later."""
        if len(self._unwritten) + len(data) <= UNWRITTEN_BYTES:
            self._unwritten += data
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class Tracker:
    """Tracks one run: `start`, any number of `log` calls, `finish`. Thread-safe."""

    def __init__(
        self,
        config: Config,
        *,
        run_dir: Path,
        resume_run_id: str | None,
        resumed: bool = False,
        tags: dict[str, str] | None = None,
        note: Callable[[str], None] = _log.warning,
        kind: type[TrackerSink] = MlflowSink,
    ) -> None:
        """Open the files in `run_dir`; nothing of the tracker happens yet.

        resume_run_id: the tracker's run to continue; None makes a new one or, if the run is
        `resumed`, continues the one that the directory knows. tags: of the tracker's run. note:
        shows a line to the user.
        """
        self._tracking, self._resumed = config.tracking, resumed
        self._note, self._lock = note, threading.Lock()
        self._metrics, self._samples = Lines(run_dir / METRICS), Lines(run_dir / SAMPLES)
        self._step, self._logged = 0, 0
        self._full, self._finished = False, False
        settings = flatten(config.model_dump(mode="json"))
        settings[EVERY] = config.tracking.metrics  # what `Delivery` sends by
        run = TrackedRun(
            uri=config.tracking.uri,
            experiment=config.tracking.experiment,
            name=_run_name(config.run.name, run_dir),
            parameters={name: without_password(value) for name, value in settings.items()},
            metrics=FilePart(self._metrics.size, self._metrics.size),
            samples=FilePart(self._samples.size, self._samples.size),
            tags=tags or {},
            run_id=resume_run_id,
        )
        self._outbox = Outbox(run_dir, kind.title, run)
        self._delivery = Delivery(self._outbox, kind, lambda: time.monotonic() > self._deadline)
        self._sink = self._delivery.sink(run)
        self._start_s = min(START_TIMEOUT_S, config.watchdog.start_timeout_s)
        self._started_by, self._deadline = math.inf, math.inf
        self._failures, self._last_error = 0, ""
        self._failure: Exception | None = None
        """Why the run does not begin."""
        self._earlier = True
        self._tried, self._finishing = threading.Event(), threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._system: SystemMetrics | None = None
        if config.tracking.mlflow and config.tracking.system_metrics:
            self._system = SystemMetrics(lambda row: self.log(self._step, row) if row else None)

    def start(self) -> None:
        """Connect to the tracker and create or continue the run (two seconds for a new database).

        Raises TrackingError, unless `tracking.offline_ok`.
        """
        self.begin()
        self.ready()

    def begin(self) -> None:
        """Begin to `start`; `ready` waits for it."""
        self._started_by = time.monotonic() + self._start_s
        if self._tracking.mlflow:
            self._thread.start()
        if self._system is not None:
            self._system.start()

    def ready(self, *, check: Callable[[], None] = lambda: None) -> list[str]:
        """Wait for the start and raise its error; return lines that say where to look at the run.
        check: called meanwhile; what it raises ends the wait.
        """
        if not self._tracking.mlflow:
            return []
        while not self._tried.wait(POLL_S):
            check()
            if time.monotonic() > self._started_by:
                if not self._tracking.offline_ok:
                    self._failure = TimeoutError(f"no answer within {self._start_s:.0f} s")
                break
        if isinstance(self._failure, TrackingError):
            raise self._failure
        if self._failure is not None:
            raise TrackingError(
                f"{self._sink.title} at {without_password(self._sink.address)} cannot be used "
                f"({one_line(self._failure)}); check tracking.uri, or set "
                "tracking.offline_ok=true to send later, or tracking.mlflow=false"
            ) from self._failure
        return [f"{self._sink.title}: {self._where()}"]

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics now in `metrics.jsonl` (not finite: null) and later in the tracker."""
        self._step = max(self._step, step)
        row: dict[str, object] = {"step": step, "time": round(time.time(), 3)}
        row.update((key, value if math.isfinite(value) else None) for key, value in metrics.items())
        if self._tracking.mlflow:
            row |= {"tracking/errors": self.errors, "tracking/unsent": self.unsent}
        self._append(self._metrics, [row])

    def log_samples(self, rows: list[dict[str, Any]]) -> None:
        """Append responses to `samples.jsonl`, the newest of which the tracker shows."""
        self._append(self._samples, list(map(flat_sample, rows)))

    def log_artifact(
        self, path: Path, *, name: str | None = None, register: str | None = None
    ) -> None:
        """Copy a file or a directory to the tracker later; until then it must stay unchanged.

        name: of a directory there, else its own. register: the model that gets it as a version.
        """
        place, path, home = name or path.name, path.absolute(), self._outbox.run_dir
        own = path.relative_to(home) if path.is_relative_to(home) else path
        todo = [{"path": str(own), "place": place}]
        if register is not None:
            todo.append({"model": register, "place": place})
        self._outbox.change(todo=todo)
        self._wake.set()

    def tag(self, name: str, value: str) -> None:
        """Set a tag of the tracker's run."""
        self._outbox.change({name: value})
        self._wake.set()

    @property
    def run_id(self) -> str | None:
        """The tracker's id of the run; None until there is one, and with MLflow off."""
        return self._outbox.runs[-1].run_id if self._tracking.mlflow else None

    @property
    def uri(self) -> str | None:
        """The tracker's address; None with MLflow off."""
        return self._sink.address if self._tracking.mlflow else None

    @property
    def unsent(self) -> int:
        """Rows of `metrics.jsonl` that the tracker has not acknowledged; 0 with MLflow off."""
        return self._logged + self._outbox.unsent if self._tracking.mlflow else 0

    @property
    def errors(self) -> int:
        """Attempts to reach the tracker that failed, and what it refused."""
        return self._failures + self._delivery.refused

    @property
    def summary(self) -> str | None:
        """Where the tracker's run is and how it fares, for a person; None with MLflow off."""
        if not self._tracking.mlflow:
            return None
        trouble = f"; {self.errors} calls failed, {self.unsent} lines wait" if self.errors else ""
        return self._where() + trouble

    def conclude(self, status: Status) -> None:
        """Note on the disk how the run ended, in case nothing comes after this."""
        try:
            with self._outbox.idle(self._left_s):
                self._outbox.change(status=status)
        except OSError as error:
            self._last_error = one_line(error)

    def finish(self, status: Status) -> None:
        """Send the rest within a deadline, end the tracker's run, close the files; once."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
        if self._system is not None:
            self._system.stop()
        self._deadline = time.monotonic() + FINISH_TIMEOUT_S
        self.conclude(status)
        self._finishing.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._finish_sending()
        self._metrics.close()
        self._samples.close()

    def _append(self, file: Lines, rows: list[dict[str, Any]]) -> None:
        with self._lock:
            if self._finished:
                return
            self._logged += len(rows) if file is self._metrics else 0
            try:
                file.append("".join(json.dumps(row) + "\n" for row in rows).encode())
                self._full = False
            except OSError as error:
                if not self._full:
                    self._note(
                        f"{file.path} cannot be written ({error.strerror}); training "
                        "continues, and the lines follow when there is room"
                    )
                self._full = True
        self._wake.set()

    @property
    def _left_s(self) -> float:
        """How long `finish` may still wait."""
        return min(FINISH_TIMEOUT_S, max(POLL_S, self._deadline - time.monotonic()))

    def _where(self) -> str:
        return (f"run {self.run_id}" if self.run_id else "not reached yet") + self._sink.where()

    # ---- the thread ----

    def _run(self) -> None:
        delay, failed = _FIRST_RETRY_S, False
        while time.monotonic() < self._deadline:  # else `finish` has given up
            self._wake.clear()
            last = self._finishing.is_set()  # read last: what comes now wakes again
            sent = self._attempt()
            self._tried.set()
            if self._failure is not None:
                return
            if sent and failed:
                self._note(f"{self._sink.title} answers again, and has all metrics")
            failed = not sent
            if last:
                return
            if sent:
                delay = _FIRST_RETRY_S
                self._wake.wait()
            else:
                self._finishing.wait(delay)
                delay = min(2 * delay, _LAST_RETRY_S)

    def _attempt(self) -> bool:
        """Send once; return whether it went well."""
        try:
            self._outbox.open(resumed=self._resumed)
            self._delivery.connect(self._outbox.runs[-1])
            self._tried.set()
            # Once: what is wrong with an earlier run must not hold up this one.
            earlier, self._earlier = self._earlier, False
            self._delivery.send(earlier=earlier)
        except Exception as error:  # noqa: BLE001 - counted and shown
            self._failures += 1
            before, self._last_error = self._last_error, one_line(error)
            if not self._tried.is_set() and not self._tracking.offline_ok:
                self._failure = error
            elif not before:
                self._note(
                    f"{self._sink.title}: {self._last_error}; training continues, metrics are kept "
                    f"in {METRICS} and sent later"
                )
            return False
        self._last_error = ""
        return True

    def _finish_sending(self) -> None:
        """Wait for the thread until the deadline, and say what is left."""
        if self._failure is None:
            self._thread.join(self._left_s)
        if self._thread.is_alive() and not self._last_error:
            self._last_error = f"no answer within {FINISH_TIMEOUT_S:.0f} s"
        lacks: list[str] = []
        try:
            lacks = self._outbox.waiting(*self._outbox.runs)
            with self._outbox.idle(self._left_s):
                self._outbox.close()
        except OSError as error:  # then nobody knows later that it was sent
            self._last_error, lacks = one_line(error), lacks or ["perhaps what was sent last"]
        if lacks and self._failure is None:
            reason = f" ({self._last_error})" if self._last_error else ""
            self._note(
                f"{self._sink.title} does not have all of this run: it lacks {', '.join(lacks)}"
                f"{reason}; send the rest with: "
                f"async-grpo report --sync {shlex.quote(str(self._outbox.run_dir))}"
            )


def begin_tracking(
    config: Config, *, resume_run_id: str | None, resumed: bool, note: Callable[[str], None]
) -> Tracker:
    """Make a tracker that has begun to connect, and let it send the code's state."""
    run_dir = Path(config.run.dir)
    tracker = Tracker(
        config,
        run_dir=run_dir,
        resume_run_id=resume_run_id,
        resumed=resumed,
        tags=tags(),
        note=note,
    )
    tracker.begin()
    for path in write_code_state(run_dir):
        tracker.log_artifact(path)
    return tracker


def log_model(config: Config, console: Console, tracker: Tracker, directory: Path) -> None:
    """Let the tracker send the final model, unless it is too large, and register it."""
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) / 2**30
    limit, register = config.tracking.log_model_max_gb, config.tracking.register_model
    if size > limit:
        if limit and config.tracking.mlflow:
            unregistered = f" and is not registered as {register}" if register else ""
            console.info(
                f"MLflow does not get the final model, which has {size:.1f} GiB "
                f"(tracking.log_model_max_gb is {limit:g}){unregistered}; it is in {directory}"
            )
        return
    if register is not None:
        packaged = Path(config.run.dir) / PACKAGED
        try:
            package(directory, packaged)
            directory = packaged
        # the libraries' own errors have no ancestor in common; the run is trained and saved
        except Exception as error:  # noqa: BLE001 - shown
            console.error(
                f"the model is not registered as {register}, since MLflow cannot package it "
                f"({one_line(error)}); it is in {directory}"
            )
            register = None
    tracker.log_artifact(directory, name=MODEL, register=register)


def _run_name(name: str, run_dir: Path) -> str:
    """Name the MLflow run so that it is told from others: as its directory, where that says more
    than the run's name.
    """
    if run_dir.name != name and name in run_dir.name:
        return run_dir.name
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten settings to dotted names and text, e.g. `learner.lr` -> `1e-06`; the name of what is
    chosen stands under the setting's own name, whether it has options or not.
    """
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            known = known_settings().get(f"{prefix}{key}")
            if known is not None and known.kind:
                value = dict(value)
                flat[f"{prefix}{key}"] = str(value.pop("name"))
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = "null" if value is None else str(value)
    return flat


def flat_sample(row: dict[str, Any]) -> dict[str, Any]:
    """Give a response a column for each reward component, and only values that a table can show."""
    rewards = row.get("rewards")
    if isinstance(rewards, dict):
        row = {key: value for key, value in row.items() if key != "rewards"} | {
            f"reward/{name}": value for name, value in rewards.items()
        }
    return {key: clean(value) for key, value in row.items()}


def clean(value: Any) -> Any:
    """Make a value fit for JSON, terminal and web page: bounded printable text, finite numbers."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    text = value if isinstance(value, str) else repr(value)
    shown = visible(text[:_TEXT_LENGTH], keep="\n")
    if len(text) <= _TEXT_LENGTH and len(shown) <= _TEXT_LENGTH:
        return shown
    return f"{shown[:_TEXT_LENGTH]}... ({len(text)} characters)"
