"""Experiment tracking: one line of `metrics.jsonl` per learner step, samples, and trackers.

    Trainer -> Tracker -> metrics.jsonl, samples.jsonl
                       -> a Sender of MLflow, and of each of `tracking.also`

Runs in: the driver. A tracker is called by one thread only (`sender`), and not imported where it is
not asked for. Invariants: `metrics.jsonl` has every logged step before a tracker hears of it; no
call but `start`, `ready` and `finish` waits for one, and those have deadlines; a tracker that fails
after the start, or a full disk, never stops training.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from async_grpo.config.docs import settings as known_settings
from async_grpo.config.schema import Config
from async_grpo.observe.console.console import Console
from async_grpo.observe.tracking import sender
from async_grpo.observe.tracking.delivery import EVERY
from async_grpo.observe.tracking.kinds import ALSO
from async_grpo.observe.tracking.mlflow_sink import MlflowSink, package
from async_grpo.observe.tracking.outbox import METRICS, SAMPLES, FilePart, TrackedRun
from async_grpo.observe.tracking.sender import Sender
from async_grpo.observe.tracking.sink import TrackerSink
from async_grpo.observe.tracking.system_metrics import SystemMetrics
from async_grpo.runtime.provenance import tags, write_code_state
from async_grpo.runtime.text import one_line, visible, without_password

Status = Literal["FINISHED", "FAILED", "KILLED"]
MODEL, PACKAGED = "model", "mlflow_model"
UNWRITTEN_BYTES = 16 << 20
_TEXT_LENGTH = 4000

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
        """Open the files in `run_dir`; nothing of a tracker happens yet.

        resume_run_id: MLflow's run to continue; None makes a new one or, if the run is `resumed`,
        continues the one that the directory knows. tags: of the tracker's run. note: shows a line
        to the user. kind: in the place of MLflow.
        """
        self._tracking = config.tracking
        self._note, self._lock = note, threading.Lock()
        self._metrics, self._samples = Lines(run_dir / METRICS), Lines(run_dir / SAMPLES)
        self._step = 0
        self._full, self._finished = False, False
        settings = flatten(config.model_dump(mode="json"))
        settings[EVERY] = config.tracking.metrics  # what `Delivery` sends by
        name = _run_name(config.run.name, run_dir)
        kinds = [kind] * config.tracking.mlflow + [
            ALSO[one] for one in dict.fromkeys(config.tracking.also)
        ]
        self._senders = [
            Sender(
                TrackedRun(
                    uri=config.tracking.uri if one is kind else None,
                    experiment=config.tracking.experiment,
                    name=name,
                    parameters={name: without_password(value) for name, value in settings.items()},
                    metrics=FilePart(self._metrics.size, self._metrics.size),
                    samples=FilePart(self._samples.size, self._samples.size),
                    tags=dict(tags or {}),
                    run_id=resume_run_id if one is kind else None,
                ),
                one,
                run_dir=run_dir,
                resumed=resumed,
                offline_ok=config.tracking.offline_ok or one is not kind,
                start_s=config.watchdog.start_timeout_s,
                note=note,
            )
            for one in kinds
        ]
        self._system: SystemMetrics | None = None
        if config.tracking.mlflow and config.tracking.system_metrics:
            self._system = SystemMetrics(lambda row: self.log(self._step, row) if row else None)

    def start(self) -> None:
        """Connect to the trackers and create or continue the run (two seconds for a new database of
        MLflow). Raises TrackingError where MLflow cannot be used, unless `tracking.offline_ok`.
        """
        self.begin()
        self.ready()

    def begin(self) -> None:
        """Begin to `start`; `ready` waits for it, and begins with the others after MLflow."""
        for one in self._senders[:1]:
            one.begin()
        if self._system is not None:
            self._system.start()

    def ready(self, *, check: Callable[[], None] = lambda: None) -> list[str]:
        """Wait for the start and raise its error; return lines that say where to look at the run.
        check: called meanwhile; what it raises ends the wait.
        """
        for number, one in enumerate(self._senders):
            if number and not one.begun:
                one.begin()
            one.ready(check)
        return [f"{one.title}: {one.where}" for one in self._senders]

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics now in `metrics.jsonl` (not finite: null) and later in the trackers."""
        self._step = max(self._step, step)
        row: dict[str, object] = {"step": step, "time": round(time.time(), 3)}
        row.update((key, value if math.isfinite(value) else None) for key, value in metrics.items())
        if self._senders:
            row |= {"tracking/errors": self.errors, "tracking/unsent": self.unsent}
        self._append(self._metrics, [row])

    def log_samples(self, rows: list[dict[str, Any]]) -> None:
        """Append responses to `samples.jsonl`, the newest of which the trackers show."""
        self._append(self._samples, list(map(flat_sample, rows)))

    def log_artifact(
        self, path: Path, *, name: str | None = None, register: str | None = None
    ) -> None:
        """Copy a file or a directory to the trackers later; until then it must stay unchanged.

        name: of a directory there, else its own. register: the model that gets it as a version.
        """
        place, path = name or path.name, path.absolute()
        for one in self._senders:
            home = one.outbox.run_dir
            own = path.relative_to(home) if path.is_relative_to(home) else path
            todo = [{"path": str(own), "place": place}]
            if register is not None:
                todo.append({"model": register, "place": place})
            one.outbox.change(todo=todo)
            one.wake()

    def tag(self, name: str, value: str) -> None:
        """Set a tag of the trackers' runs."""
        for one in self._senders:
            one.outbox.change({name: value})
            one.wake()

    @property
    def _mlflow(self) -> Sender | None:
        return self._senders[0] if self._tracking.mlflow else None

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None until there is one, and with MLflow off."""
        return None if self._mlflow is None else self._mlflow.run_id

    @property
    def uri(self) -> str | None:
        """MLflow's address; None with MLflow off."""
        return None if self._mlflow is None else self._mlflow.address

    @property
    def unsent(self) -> int:
        """Rows of `metrics.jsonl` that a tracker has not acknowledged."""
        return max((one.unsent for one in self._senders), default=0)

    @property
    def errors(self) -> int:
        """Attempts to reach trackers that failed, and what they refused."""
        return sum(one.errors for one in self._senders)

    @property
    def summary(self) -> dict[str, str]:
        """Where the run of each tracker is and how it fares, for a person."""
        return {
            one.title: one.where
            + (f"; {one.errors} calls failed, {one.unsent} lines wait" if one.errors else "")
            for one in self._senders
        }

    def conclude(self, status: Status) -> None:
        """Note on the disk how the run ended, in case nothing comes after this."""
        for one in self._senders:
            one.conclude(status)

    def finish(self, status: Status) -> None:
        """Send the rest within a deadline, end the trackers' runs, close the files; once."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
        if self._system is not None:
            self._system.stop()
        deadline = time.monotonic() + sender.FINISH_TIMEOUT_S
        for one in self._senders:
            one.end(status, deadline)
        for one in self._senders:
            one.finish()
        self._metrics.close()
        self._samples.close()

    def _append(self, file: Lines, rows: list[dict[str, Any]]) -> None:
        with self._lock:
            if self._finished:
                return
            for one in self._senders:
                one.expect(len(rows) if file is self._metrics else 0)
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
        for one in self._senders:
            one.wake()


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
