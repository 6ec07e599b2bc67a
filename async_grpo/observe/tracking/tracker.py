"""Experiment tracking: one line of `metrics.jsonl` per learner step, samples, and MLflow.

Runs in: the driver. MLflow is called by one sender thread only, and not imported with
`tracking.mlflow: false`. Hides that thread, whose queue are the files of the run directory
(`async_grpo.observe.tracking.outbox`), and where code version, host and packages come from.

Invariants: `metrics.jsonl` has every logged step before MLflow hears of it; no call but `start` and
`finish` waits for MLflow, and those have deadlines; what MLflow does not get is counted, and said
at the end with the command that sends it; an MLflow that fails after the start, a full disk or an
unknown code version never stops training.
"""

from __future__ import annotations

import difflib
import getpass
import json
import logging
import math
import os
import platform
import re
import shlex
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from async_grpo.config.schema import Config
from async_grpo.observe.console.console import Console
from async_grpo.observe.tracking.files import Lines, flat_sample, flatten
from async_grpo.observe.tracking.mlflow_sender import EVERY, Delivery, package
from async_grpo.observe.tracking.outbox import METRICS, SAMPLES, Outbox, OutboxEntry, TrackingError
from async_grpo.observe.tracking.system_metrics import SystemMetrics
from async_grpo.runtime.provenance import code_version, git, package_versions
from async_grpo.runtime.text import one_line, without_password

_SCHEMES = (
    *("http", "https", "file", "sqlite", "postgresql", "mysql", "mssql"),
    *("databricks", "databricks-uc", "uc"),
)
"""How the addresses of MLflow's own stores begin."""
Status = Literal["FINISHED", "FAILED", "KILLED"]

START_TIMEOUT_S = 120.0
"""Longest wait for MLflow at the start; a new database takes two seconds or more."""
FINISH_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
POLL_S = 0.1
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 60.0

_log = logging.getLogger(__name__)


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
    ) -> None:
        """Open the files in `run_dir`; nothing of MLflow happens yet.

        resume_run_id: the MLflow run to continue; None makes a new one or, if the run is `resumed`,
        continues the one that the directory knows. tags: of the MLflow run. note: shows a line to
        the user.
        """
        self._lock = threading.Lock()
        self._note = note
        self._finished = False
        self._starting = threading.Thread(
            target=self._start, name="async_grpo-tracking", daemon=True
        )
        self._start_error: Exception | None = None
        self._full = False
        self._late = 0
        self._metrics, self._samples = Lines(run_dir / METRICS), Lines(run_dir / SAMPLES)
        self._sender: _Sender | None = None
        self._system: SystemMetrics | None = None
        if config.tracking.mlflow:
            settings = flatten(config.model_dump(mode="json"))
            settings[EVERY] = config.tracking.metrics  # what `Delivery` sends by
            entry = OutboxEntry(
                config.tracking.uri,
                config.tracking.experiment,
                _run_name(config.run.name, run_dir),
                {name: without_password(value) for name, value in settings.items()},
                begin=self._metrics.size,
                samples_begin=self._samples.size,
                tags=tags or {},
            )
            self._sender = _Sender(config, run_dir, entry, resume_run_id, resumed, note)
            if config.tracking.system_metrics:
                self._system = SystemMetrics(self._log_system)
        self._step = 0

    def start(self) -> None:
        """Connect to MLflow and create or continue the run (two seconds for a new database).

        May run in another thread while `log` is used. Raises TrackingError, unless
        `tracking.offline_ok`.
        """
        if self._sender is not None:
            self._sender.start()
        if self._system is not None:
            self._system.start()

    def begin(self) -> None:
        """Call `start` in a thread; `ready` waits for it."""
        self._starting.start()

    def ready(self, *, check: Callable[[], None] = lambda: None) -> list[str]:
        """Wait for `begin` and raise its error; return lines that say where to look at the run.
        check: called meanwhile; what it raises ends the wait.
        """
        while self._starting.is_alive():
            self._starting.join(POLL_S)
            check()
        if self._start_error is not None:
            raise self._start_error
        return [f"MLflow: {self._sender.where()}"] if self._sender is not None else []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics now in `metrics.jsonl` (not finite: null) and later in MLflow."""
        self._step = max(self._step, step)
        row: dict[str, object] = {"step": step, "time": round(time.time(), 3)}
        row.update((key, value if math.isfinite(value) else None) for key, value in metrics.items())
        if self._sender is not None:
            row |= {"tracking/errors": self.errors, "tracking/unsent": self.unsent}
        if self._append(self._metrics, [row]) and self._sender is not None:
            self._sender.notice(rows=1)

    def log_samples(self, rows: list[dict[str, Any]]) -> None:
        """Append responses to `samples.jsonl`, whose newest MLflow gets as `samples.json`."""
        if self._append(self._samples, list(map(flat_sample, rows))) and self._sender is not None:
            self._sender.notice(rows=0)

    def log_artifact(
        self, path: Path, *, name: str | None = None, register: str | None = None
    ) -> None:
        """Copy a file or a directory to the MLflow run later; until then it must stay unchanged.

        name: of a directory there, else its own. register: the model that gets it as a version.
        """
        if self._sender is not None:
            self._sender.add_artifact(path, name, register)

    def tag(self, name: str, value: str) -> None:
        """Set a tag of the MLflow run."""
        if self._sender is not None:
            self._sender.tag(name, value)

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None until there is one, and with MLflow off."""
        return self._sender.run_id if self._sender is not None else None

    @property
    def uri(self) -> str | None:
        """MLflow tracking URI; None with MLflow off."""
        return self._sender.uri if self._sender is not None else None

    @property
    def unsent(self) -> int:
        """Rows of `metrics.jsonl` that MLflow has not acknowledged; 0 with MLflow off."""
        return self._sender.unsent if self._sender is not None else 0

    @property
    def dropped(self) -> int:
        """Records that never reach MLflow: refused ones, and those logged after `finish`."""
        return self._late + (self._sender.refused if self._sender is not None else 0)

    @property
    def errors(self) -> int:
        """Attempts to reach MLflow that failed, and what it refused."""
        return self._sender.errors if self._sender is not None else 0

    @property
    def summary(self) -> str | None:
        """Where the MLflow run is and how it fares, for a person; None with MLflow off."""
        return self._sender.summary() if self._sender is not None else None

    def conclude(self, status: Status) -> None:
        """Note on the disk how the run ended, in case nothing comes after this."""
        if self._sender is not None:
            self._sender.conclude(status)

    def finish(self, status: Status) -> None:
        """Send the rest within a deadline, end the MLflow run, close the files; once."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
        if self._system is not None:
            self._system.stop()
        if self._sender is not None:
            self._sender.finish(status)
        self._metrics.close()
        self._samples.close()

    def _log_system(self, row: dict[str, float]) -> None:
        if row:
            self.log(self._step, row)

    def _start(self) -> None:
        try:
            self.start()
        except Exception as error:  # noqa: BLE001 - raised again by `ready`
            self._start_error = error

    def _append(self, file: Lines, rows: list[dict[str, Any]]) -> bool:
        with self._lock:
            if self._finished:
                self._late += len(rows)
                return False
            try:
                file.append("".join(json.dumps(row) + "\n" for row in rows).encode())
                self._full = False
            except OSError as error:
                if not self._full:
                    self._note(
                        f"{file.path} cannot be written ({error.strerror}); training goes "
                        "on, and the rows follow when there is room"
                    )
                self._full = True
        return True


class _Sender:
    """Runs the thread that sends what is in the run directory, as fast as MLflow takes it."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        entry: OutboxEntry,
        resume_run_id: str | None,
        resumed: bool,
        note: Callable[[str], None],
    ) -> None:
        self.run_id = resume_run_id
        self._offline_ok = config.tracking.offline_ok
        self._timeout_s = min(START_TIMEOUT_S, config.watchdog.start_timeout_s)
        self._run_dir, self._note = run_dir, note
        self._entry, self._resumed = entry, resumed or resume_run_id is not None
        self._outbox = Outbox(run_dir)
        self._delivery = Delivery(self._outbox, lambda: time.monotonic() > self._deadline)
        self.uri = self._delivery.uri(entry)
        self._artifacts: list[tuple[Path, str | None, str | None]] = []
        self._tags: dict[str, str] = {}
        self._lock = threading.Lock()
        self._logged, self._backlog = 0, 0
        self._failures = 0
        self._last_error = ""
        self._failure: Exception | None = None
        self._deadline = math.inf
        self._status: Status | None = None
        self._earlier = True
        self._closed = False
        self._tried, self._finishing = threading.Event(), threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlflow-sender", daemon=True)

    @property
    def refused(self) -> int:
        return self._delivery.refused

    @property
    def errors(self) -> int:
        return self._failures + self.refused

    @property
    def unsent(self) -> int:
        return self._backlog + self._logged + self._outbox.rows_forgotten - self._outbox.rows_sent

    def start(self) -> None:
        """Start the thread; wait for the MLflow run, with `offline_ok` for the first attempt."""
        self._thread.start()
        if not self._tried.wait(self._timeout_s) and not self._offline_ok:
            self._failure = TimeoutError(f"no answer within {self._timeout_s:.0f} s")
        if isinstance(self._failure, TrackingError):
            raise self._failure
        if self._failure is not None:
            raise TrackingError(
                f"MLflow at {without_password(self.uri)} cannot be used "
                f"({one_line(self._failure)}); check tracking.uri, or set "
                "tracking.offline_ok=true to send later, or tracking.mlflow=false"
            ) from self._failure

    def notice(self, *, rows: int) -> None:
        """Wake the thread for new lines in the files."""
        with self._lock:
            self._logged += rows
        self._wake.set()

    def add_artifact(self, path: Path, name: str | None, register: str | None) -> None:
        self._artifacts.append((path, name, register))
        self._wake.set()

    def tag(self, name: str, value: str) -> None:
        self._tags[name] = value
        self._wake.set()

    def finish(self, status: Status) -> None:
        """Note the status, let the thread send the rest until a deadline, and say what is left."""
        self._deadline = time.monotonic() + FINISH_TIMEOUT_S
        self._status = status
        self._finishing.set()
        self._wake.set()
        if self._thread.ident is None:
            return
        try:
            self._outbox.conclude(status)
            if self._failure is None:
                self._thread.join(FINISH_TIMEOUT_S)
            if self._thread.is_alive() and not self._last_error:
                self._last_error = f"no answer within {FINISH_TIMEOUT_S:.0f} s"
            outbox = self._outbox
            complete = outbox.is_open and all(map(outbox.is_complete, outbox.entries))
            self._closed = True
            self._outbox.close()
        except OSError as error:
            self._last_error, complete = one_line(error), False
        if not complete and self._failure is None:
            reason = f" ({self._last_error})" if self._last_error else ""
            self._note(
                f"MLflow does not have all of this run: {self.unsent} rows of {METRICS} "
                f"are not sent{reason}; send the rest with: "
                f"async-grpo report --sync {shlex.quote(str(self._run_dir))}"
            )

    def conclude(self, status: Status) -> None:
        """Note the status on the disk; `finish` or `--sync` sends it."""
        try:
            self._outbox.conclude(status)
        except OSError as error:
            self._last_error = one_line(error)

    def summary(self) -> str:
        """Say where the MLflow run is, and what is not in it yet."""
        trouble = f"; {self.errors} calls failed, {self.unsent} rows wait" if self.errors else ""
        return self.where() + trouble

    def where(self) -> str:
        """Say where the MLflow run is, and how to look at it."""
        uri = without_password(self.uri)
        local = f"; look at it with: mlflow ui --backend-store-uri {shlex.quote(uri)}"
        where = f" at {uri}" if uri.startswith("http") else local
        return f"run {self.run_id}{where}" if self.run_id else f"not reached yet{where}"

    def _run(self) -> None:
        delay, failed = _FIRST_RETRY_S, False
        while True:
            last = self._finishing.is_set()
            self._wake.clear()
            sent = self._attempt()
            self._tried.set()
            if self._failure is not None:
                return
            if sent and failed:
                self._note("MLflow answers again, and has all metrics")
            failed = not sent
            if last:
                return
            if sent:
                delay = _FIRST_RETRY_S
                self._wake.wait()
            else:
                self._finishing.wait(delay)
                delay = min(2 * delay, _LAST_RETRY_S)

    def _send(self) -> None:
        if self._closed:
            return
        if not self._outbox.is_open:
            self._outbox.open()
            first = self._entry.begin  # which is another one where a run goes on
            self._outbox.begin(self._entry, run_id=self.run_id, resumed=self._resumed)
            self._backlog = self._outbox.rows_waiting(before=first)
        while self._artifacts:
            path, name, register = self._artifacts.pop(0)
            self._outbox.add_artifact(path, name=name, register=register)
        while self._tags:
            self._outbox.set_tag(*self._tags.popitem())
        if self._status is not None:
            self._outbox.conclude(self._status)
        self._delivery.connect()
        self.run_id = self._outbox.entries[-1].run_id
        self._tried.set()
        # Once: what is wrong with an earlier run must not hold up this one.
        earlier, self._earlier = self._earlier, False
        self._delivery.send(earlier=earlier)

    def _attempt(self) -> bool:
        """Send once; return whether it went well. The first failure of a series is shown."""
        try:
            self._send()
        except Exception as error:  # noqa: BLE001 - counted and shown
            self._failures += 1
            before, self._last_error = self._last_error, one_line(error)
            if not self._tried.is_set() and not self._offline_ok:
                self._failure = error
            elif not before:
                self._note(
                    f"MLflow: {self._last_error}; training goes on, metrics are kept in "
                    f"{METRICS} and sent later"
                )
            return False
        self._last_error = ""
        return True


CODE, DIFF, MODEL, PACKAGED = "code.json", "code.diff", "model", "mlflow_model"
DIFF_BYTES = 1 << 20


def tags() -> dict[str, str]:
    """Collect code, host, user, Python and packages; `mlflow.` tags are shown by its pages."""
    code = {name: str(value) for name, value in code_version().items()}
    found = {f"code.{name}": value for name, value in code.items()} | {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "mlflow.user": _user(),
        "mlflow.source.name": "async_grpo",
    }
    if "commit" in code:
        found["mlflow.source.git.commit"] = code["commit"]
    if job := _ray_job():
        found["ray.job"] = job
    return found | {f"packages.{name}": version for name, version in package_versions().items()}


def _check_store(scheme: str, path: str) -> None:
    """Refuse a scheme that is misspelt, and a SQLite file in a directory that does not exist."""
    close = difflib.get_close_matches(scheme, _SCHEMES, n=1, cutoff=0.7)
    if scheme and close and scheme not in _SCHEMES:
        raise TrackingError(
            f"`tracking.uri` begins with {scheme}:, which MLflow does not have: is {close[0]}: "
            "meant?"
        )
    if scheme == "sqlite" and not Path(path[1:]).parent.is_dir():
        raise TrackingError(
            f"`tracking.uri` is a SQLite file in {Path(path[1:]).parent}, which is no directory: "
            "make it, or choose another place"
        )


def check_server(config: Config) -> None:
    """Look whether anything listens where an HTTP `tracking.uri` points, before processes start.
    Raises TrackingError, unless `tracking.offline_ok`. Behind a proxy only the start itself tells.
    """
    settings, uri = config.tracking, urlsplit(config.tracking.uri or "")
    if settings.mlflow and re.match(r"[\w.-]+:\d+(/|$)", settings.uri or ""):
        raise TrackingError(
            f"`tracking.uri` is {settings.uri}, which has no scheme: write http://{settings.uri}"
        )
    if not settings.mlflow:
        return
    _check_store(uri.scheme.partition("+")[0], uri.path)
    if uri.scheme not in ("http", "https"):
        return
    try:
        port = uri.port or (443 if uri.scheme == "https" else 80)
    except ValueError as error:
        raise TrackingError(
            f"`tracking.uri` is {without_password(settings.uri or '')}: {error}"
        ) from error
    if settings.offline_ok:
        return
    host = uri.hostname or ""
    if uri.scheme in getproxies() and not proxy_bypass(host):
        return
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise TrackingError(
            f"`tracking.uri` is {without_password(settings.uri or '')}, where nothing answers "
            f"({error.strerror or error}): start the server, or set tracking.offline_ok=true to "
            "begin without it, or tracking.mlflow=false"
        ) from error


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


def write_code_state(run_dir: Path) -> list[Path]:
    """Write which code runs, and its uncommitted changes; return the files."""
    code, written = run_dir / CODE, [run_dir / CODE]
    (run_dir / DIFF).unlink(missing_ok=True)  # of an earlier start
    state = code_version()
    if state.get("dirty"):
        diff = git("diff", "HEAD", "--", ".")
        for kind, command in (
            ("changed", ("diff", "--name-only", "HEAD", "--", ".")),
            ("untracked", ("ls-files", "--others", "--exclude-standard")),
        ):
            state[kind] = (git(*command) or "").splitlines()
        if diff:
            data = diff.encode("utf-8", "surrogateescape")[:DIFF_BYTES]
            (run_dir / DIFF).write_bytes(data + b"\n")
            written.append(run_dir / DIFF)
    code.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    return written


def _run_name(name: str, run_dir: Path) -> str:
    """Name the MLflow run so that it is told from others: as its directory, where that says more
    than the run's name.
    """
    if run_dir.name != name and name in run_dir.name:
        return run_dir.name
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container without a name for its user id
        return str(os.getuid())


def _ray_job() -> str | None:
    """Return the id under which this process was submitted as a Ray job."""
    try:
        job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
        return job["metadata"]["job_submission_id"]
    except (ValueError, LookupError, TypeError):
        return None  # not a job
