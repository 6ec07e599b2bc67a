"""Experiment tracking: one line of `metrics.jsonl` per learner step, and MLflow.

Runs in: the driver; MLflow is called by one sender thread only. Hides MLflow completely: it is imported by that thread, and never
with `tracking.mlflow: false`.

Invariants: `metrics.jsonl` has every logged step before MLflow hears of it; no call but `start` and `finish` waits for MLflow;
nothing is dropped silently (`dropped` and `errors` count, the first error is logged); an MLflow that fails after the start never
stops training.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from async_grpo.config.schema import Config

if TYPE_CHECKING:
    from mlflow import MlflowClient

Status = Literal["FINISHED", "FAILED", "KILLED"]

_QUEUE_SIZE = 4096
_FLUSH_TIMEOUT_S = 30.0
_PARAMETERS_PER_CALL = 100
_METRICS_PER_CALL = 900
_PARAMETER_LENGTH = 500
_TEXT_LENGTH = 4000

_log = logging.getLogger(__name__)


class TrackingError(RuntimeError):
    """The tracking server could not be reached or set up at the start."""


class Tracker:
    """Metrics, samples and files of one run. Thread-safe; use `start`, any number of `log` calls, `finish`."""

    def __init__(self, config: Config, *, run_dir: Path, resume_run_id: str | None) -> None:
        """`run_dir` exists; `resume_run_id` continues an MLflow run, None makes a new one. Nothing of MLflow happens yet."""
        self._settings = config
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._file = open(run_dir / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115 (closed by `finish`)
        self._sender = _Sender(config, run_dir, resume_run_id) if config.tracking.mlflow else None
        self._refused = 0

    def start(self) -> None:
        """Connect to MLflow and create or continue the run (about two seconds for a new database).

        May run in another thread while `log` is already used. Does nothing with MLflow off. Raises TrackingError.
        """
        if self._sender is not None:
            self._sender.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of a learner step: at once in `metrics.jsonl`, later in MLflow. Non-finite values are kept as null
        in the file and left out of MLflow."""
        row: dict[str, object] = {"step": step, "time": round(time.time(), 3)}
        row.update((key, value if math.isfinite(value) else None) for key, value in metrics.items())
        with self._lock:
            if self._file.closed:
                self._refused += 1
                return
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        if self._sender is not None:
            finite = {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
            self._sender.submit(lambda client, run_id: _send_metrics(client, run_id, step, finite))

    def log_samples(self, rows: list[dict[str, Any]]) -> None:
        """Append responses to `samples.jsonl` (always) and to the MLflow table `samples.json`.

        All rows of a run have the same keys. Text is shortened and control characters become visible escapes.
        """
        if not rows:
            return
        clean = [{key: _shorten(value) for key, value in row.items()} for row in rows]
        with self._lock, open(self._run_dir / "samples.jsonl", "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in clean)
        if self._sender is not None:
            columns = {key: [row.get(key) for row in clean] for key in clean[0]}
            self._sender.submit(lambda client, run_id: client.log_table(run_id, data=columns, artifact_file="samples.json"))

    def log_artifact(self, path: Path) -> None:
        """Copy a file or a directory to the MLflow run's artifacts when its turn comes; it must stay unchanged until `finish`."""
        if self._sender is not None:
            send = _send_directory if path.is_dir() else _send_file
            self._sender.submit(lambda client, run_id: send(client, run_id, path))

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None before `start` and with MLflow off."""
        return self._sender.run_id if self._sender is not None else None

    @property
    def uri(self) -> str | None:
        """MLflow tracking URI; None with MLflow off."""
        return self._sender.uri if self._sender is not None else None

    @property
    def dropped(self) -> int:
        """Records that did not reach MLflow because its queue was full or it had ended. All of them but those after `finish` are
        in the run directory's files."""
        return self._refused + (self._sender.dropped if self._sender is not None else 0)

    @property
    def errors(self) -> int:
        """Calls to MLflow that failed after the start."""
        return self._sender.errors if self._sender is not None else 0

    def finish(self, status: Status) -> None:
        """Send what is queued within a deadline, end the MLflow run with this status, close the files. A second call does nothing."""
        with self._lock:
            if self._file.closed:
                return
            self._file.close()
        if self._sender is not None:
            self._sender.finish(status)


Job = Callable[["MlflowClient", str], object]


class _Sender:
    """The thread that talks to MLflow, and its bounded queue."""

    def __init__(self, config: Config, run_dir: Path, resume_run_id: str | None) -> None:
        self.uri = config.tracking.uri or f"sqlite:///{run_dir.absolute() / 'mlflow.db'}"
        self.run_id = resume_run_id
        self.dropped = 0
        self.errors = 0
        self._config = config
        self._run_dir = run_dir.absolute()
        self._jobs: queue.Queue[Job | None] = queue.Queue(_QUEUE_SIZE)
        self._deadline = math.inf
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._status: Status = "FAILED"
        self._count = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="mlflow-sender", daemon=True)

    def start(self) -> None:
        """Start the thread and wait until the run exists."""
        self._thread.start()
        if not self._ready.wait(self._config.watchdog.start_timeout_s):
            raise TrackingError(
                f"MLflow at {self.uri} did not answer within {self._config.watchdog.start_timeout_s:.0f} s; check tracking.uri, "
                "or set tracking.mlflow=false"
            )
        if self._failure is not None:
            raise TrackingError(
                f"MLflow at {self.uri} cannot be used: {self._failure}; check tracking.uri, or set tracking.mlflow=false"
            ) from self._failure

    def submit(self, job: Job) -> None:
        """Queue a call, or count it as dropped when the queue is full or the thread is gone."""
        if self._failure is None:
            try:
                self._jobs.put_nowait(job)
                return
            except queue.Full:
                reason = f"{_QUEUE_SIZE} records are already waiting"
        else:
            reason = str(self._failure)
        self._drop(1, reason)

    def finish(self, status: Status) -> None:
        """Let the thread empty the queue and end the run; gives up after a deadline."""
        self._status = status
        self._deadline = time.monotonic() + _FLUSH_TIMEOUT_S
        if not self._thread.is_alive():
            if waiting := self._jobs.qsize():
                self._drop(waiting, "MLflow was never started")
            return
        try:
            self._jobs.put(None, timeout=_FLUSH_TIMEOUT_S)
        except queue.Full:
            self._drop(self._jobs.qsize(), "MLflow does not answer")
            return
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive():
            self._drop(self._jobs.qsize(), f"MLflow did not take the rest within {_FLUSH_TIMEOUT_S:.0f} s")

    def _run(self) -> None:
        try:
            client = self._connect()
        except Exception as error:  # noqa: BLE001 (handed to `start`, which raises it)
            self._failure = error
            return
        finally:
            self._ready.set()
        assert self.run_id is not None
        while (job := self._jobs.get()) is not None:
            if time.monotonic() > self._deadline:
                self._drop(1, "the deadline of the final flush has passed")
                continue
            self._attempt(lambda job=job: job(client, self.run_id))
        self._attempt(lambda: client.set_terminated(self.run_id, status=self._status))

    def _attempt(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 (counted and reported once: tracking never stops training)
            with self._count:
                self.errors += 1
                first = self.errors == 1
            if first:
                _log.warning("MLflow call failed (%s: %s); training goes on, metrics stay in metrics.jsonl", type(error).__name__, error)

    def _drop(self, number: int, reason: str) -> None:
        with self._count:
            first = self.dropped == 0
            self.dropped += number
        if first and number:
            _log.warning("records are not sent to MLflow (%s); training goes on, metrics stay in metrics.jsonl", reason)

    def _connect(self) -> MlflowClient:
        # The schema migration of a new database logs a hundred lines through these.
        for name in ("alembic", "mlflow.store.db.utils", "mlflow.tracking.fluent", "mlflow.store.db"):
            logging.getLogger(name).setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", module=r"mlflow\.")  # deprecations inside MLflow, none of which a user can act on
        # Appending to the sample table would draw progress bars into the console.
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=self.uri)
        if self.run_id is None:
            run = client.create_run(self._experiment(client), run_name=self._config.run.name)
            self.run_id = run.info.run_id
            _send_parameters(client, self.run_id, self._config)
        else:
            client.update_run(self.run_id, status="RUNNING")
        if (self._run_dir / "config.yaml").exists():
            client.log_artifact(self.run_id, str(self._run_dir / "config.yaml"))
        return client

    def _experiment(self, client: MlflowClient) -> str:
        name = self._config.tracking.experiment
        if (found := client.get_experiment_by_name(name)) is not None:
            return found.experiment_id
        # A server decides where its artifacts go; a local database would put them into the working directory.
        local = self._config.tracking.uri is None
        from mlflow.exceptions import MlflowException

        try:
            return client.create_experiment(name, artifact_location=(self._run_dir / "mlartifacts").as_uri() if local else None)
        except MlflowException:
            # Another run created it in between.
            if (found := client.get_experiment_by_name(name)) is None:
                raise
            return found.experiment_id


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names and text, e.g. `learner.lr` -> `1e-06`."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = "null" if value is None else str(value)
    return flat


def _send_parameters(client: MlflowClient, run_id: str, config: Config) -> None:
    from mlflow.entities import Param

    parameters = [Param(key, value[:_PARAMETER_LENGTH]) for key, value in flatten(config.model_dump(mode="json")).items()]
    for start in range(0, len(parameters), _PARAMETERS_PER_CALL):
        client.log_batch(run_id, params=parameters[start : start + _PARAMETERS_PER_CALL])


def _send_metrics(client: MlflowClient, run_id: str, step: int, metrics: dict[str, float]) -> None:
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    entities = [Metric(key, value, now, step) for key, value in metrics.items()]
    for start in range(0, len(entities), _METRICS_PER_CALL):
        client.log_batch(run_id, metrics=entities[start : start + _METRICS_PER_CALL])


def _send_file(client: MlflowClient, run_id: str, path: Path) -> None:
    client.log_artifact(run_id, str(path))


def _send_directory(client: MlflowClient, run_id: str, path: Path) -> None:
    client.log_artifacts(run_id, str(path), artifact_path=path.name)


def _shorten(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    visible = "".join(
        character if character.isprintable() or character == "\n" else character.encode("unicode_escape", "backslashreplace").decode()
        for character in value
    )
    return visible if len(visible) <= _TEXT_LENGTH else f"{visible[:_TEXT_LENGTH]}... ({len(visible)} characters)"
