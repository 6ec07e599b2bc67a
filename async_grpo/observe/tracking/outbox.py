"""What MLflow has of a run directory, and what it is still to get.

Runs in: the driver, and `async-grpo report --sync`. Hides the file `mlflow_sent.json`:
one entry per MLflow run of the directory, with how far into `metrics.jsonl` and `samples.jsonl` the
server has acknowledged. Those files are the queue, so that nothing is kept in memory, however long
a server is gone. Knows nothing of MLflow itself.

Invariants: one process sends from a directory at a time (a lock on `metrics.jsonl`, which the
kernel releases when the process dies); an entry without an end whose process is gone was killed;
the file is replaced whole.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from async_grpo.errors import SetupError
from async_grpo.runtime.text import one_line

STATE, METRICS, SAMPLES = "mlflow_sent.json", "metrics.jsonl", "samples.jsonl"

_READ_BYTES = 1 << 20
_SAMPLE_ROWS, _SAMPLE_BYTES = 1000, 16 << 20
_SAVE_EVERY_S = 5.0
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a network file system without locks."""


class TrackingError(SetupError):
    """MLflow, or the run directory's record of what it has, cannot be used."""


@dataclass
class OutboxEntry:
    """One MLflow run of a run directory. Positions are bytes; an end of None is the file's end."""

    uri: str | None
    """None: the database in the run directory, wherever that is now."""
    experiment: str
    name: str
    parameters: dict[str, str]
    begin: int = 0
    sent: int = 0
    end: int | None = None
    samples_begin: int = 0
    samples_sent: int = 0
    samples_end: int | None = None
    run_id: str | None = None
    parameters_sent: bool = False
    artifacts: list[str] = field(default_factory=lambda: ["config.yaml"])
    """Files and directories still to be sent; relative paths begin in the run directory."""
    places: dict[str, str] = field(default_factory=dict)
    """Where in MLflow an artifact goes, for those that do not keep their name."""
    tags: dict[str, str] = field(default_factory=dict)
    tags_sent: bool = False
    models: dict[str, str] = field(default_factory=dict)
    """Registered models that still get a version: name -> the artifact that becomes it."""
    status: str = "RUNNING"
    status_sent: str | None = None
    created: int = field(default_factory=lambda: int(time.time() * 1000))
    ended: int | None = None
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """A tag of the MLflow run, by which it is found again."""

    def go_on(self, newer: OutboxEntry) -> None:
        """Continue this MLflow run with what another start brings."""
        self.uri, self.status = newer.uri, "RUNNING"
        self.status_sent, self.ended = None, None
        self.end, self.samples_end = None, None
        self.artifacts = list(dict.fromkeys([*self.artifacts, *newer.artifacts]))
        self.tags, self.tags_sent = self.tags | newer.tags, False
        # The user may have removed the files in between.
        self.begin, self.sent = min(self.begin, newer.begin), min(self.sent, newer.begin)
        self.samples_begin = min(self.samples_begin, newer.samples_begin)
        self.samples_sent = min(self.samples_sent, newer.samples_begin)

    def end_before(self, newer: OutboxEntry) -> None:
        """End the run's part of the files where another run begins."""
        self.end = newer.begin if self.end is None else self.end
        self.samples_end = newer.samples_begin if self.samples_end is None else self.samples_end

    def forget(self) -> None:
        """Note that MLflow has nothing of this run."""
        self.run_id, self.status_sent = None, None
        self.parameters_sent, self.tags_sent = False, False
        self.sent, self.samples_sent = self.begin, self.samples_begin
        self.artifacts = list(dict.fromkeys(["config.yaml", *self.artifacts]))


class Outbox:
    """The MLflow runs of one run directory. One thread sends; any thread may note and close."""

    def __init__(self, run_dir: Path) -> None:
        """Set the directory; nothing is read or locked before `open`."""
        self.run_dir = run_dir.absolute()
        self.entries: list[OutboxEntry] = []
        """The MLflow runs that are not complete, and last the newest."""
        self.rows_sent = 0
        """Rows that MLflow has acknowledged to this object."""
        self.rows_forgotten = 0
        """Rows that were acknowledged and have to be sent again."""
        self._lock = threading.RLock()
        self._file: BinaryIO | None = None
        self._saved = 0.0

    def open(self) -> None:
        """Lock the directory and read the state. Raises TrackingError, as when another sends."""
        file = open(self.run_dir / METRICS, "r+b")  # noqa: SIM115 (closed by `close`)
        try:
            _lock(file)
            state = self.run_dir / STATE
            known = json.loads(state.read_text(encoding="utf-8")) if state.exists() else []
            entries = [OutboxEntry(**entry) for entry in known]
        except BlockingIOError as error:
            file.close()
            raise TrackingError(
                f"another process sends the metrics of {self.run_dir} to MLflow; wait until it "
                "has ended"
            ) from error
        except (OSError, ValueError, TypeError) as error:
            file.close()
            raise TrackingError(
                f"{self.run_dir / STATE} cannot be used ({one_line(error)}); move it away "
                "to begin a new MLflow run"
            ) from error
        with self._lock:
            self._file = file
            self.entries = [  # without those of which there is nothing
                one for one in entries if one.run_id is not None or self._limit(one) > one.begin
            ]

    @property
    def is_open(self) -> bool:
        """Whether this object holds the directory's lock."""
        return self._file is not None

    def begin(self, entry: OutboxEntry, *, run_id: str | None, resumed: bool) -> None:
        """Make `entry` the current MLflow run, whose rows start at its `begin`.

        The directory's last run is continued instead if it is `run_id`, or, for a `resumed` run
        whose checkpoint knows no id, whatever it is. Earlier runs without an end become KILLED.
        """
        with self._lock:
            last = self.entries[-1] if self.entries else None
            if last is not None and (last.run_id == run_id if run_id is not None else resumed):
                last.go_on(entry)
                self.save()
                return
            self.mark_killed()
            entry.sent, entry.samples_sent = entry.begin, entry.samples_begin
            for earlier in self.entries:
                earlier.end_before(entry)
                if run_id is not None and earlier.run_id == run_id:
                    earlier.status_sent = earlier.status  # which is the new entry's affair now
            if run_id is not None:  # begun in another directory, from which MLflow has what is here
                entry.run_id, entry.parameters_sent = run_id, True
                entry.begin, entry.samples_begin = 0, 0  # unless the run itself is gone
            kept = [earlier for earlier in self.entries if not self.is_complete(earlier)]
            self.entries = [*kept, entry]
            self.save()

    def mark_killed(self) -> None:
        """Set a newest run without an end to KILLED: this object has the lock."""
        for entry in self.entries[-1:]:  # those before it were ended when it began
            if entry.status == "RUNNING":
                entry.status = "KILLED"
                entry.ended = int(os.stat(self.run_dir / METRICS).st_mtime * 1000)

    def conclude(self, status: str) -> None:
        """Note on the disk how the current run ended."""
        with self._lock:
            if self._file is not None and self.entries:
                self.entries[-1].status, self.entries[-1].ended = status, int(time.time() * 1000)
                self.save()

    def set_tag(self, name: str, value: str) -> None:
        """Set a tag of the current run."""
        with self._lock:
            self.entries[-1].tags[name], self.entries[-1].tags_sent = value, False

    def add_artifact(
        self, path: Path, *, name: str | None = None, register: str | None = None
    ) -> None:
        """Add a file, or a directory under `name`, of which the model `register` gets a version."""
        path = path.absolute()
        own = str(path.relative_to(self.run_dir) if path.is_relative_to(self.run_dir) else path)
        with self._lock:
            entry = self.entries[-1]
            if own not in entry.artifacts:
                entry.artifacts.append(own)
            if name is not None:
                entry.places[own] = name
            if register is not None:
                entry.models[register] = name or path.name

    def remove_artifact(self, entry: OutboxEntry, name: str) -> None:
        """Drop an artifact that has been sent."""
        with self._lock:
            entry.artifacts.remove(name)

    # ---- what is to be sent ----

    def lines(self, entry: OutboxEntry) -> list[bytes]:
        """Read the next rows that MLflow does not have: about a MiB of whole lines."""
        left, lines = self._limit(entry) - entry.sent, []
        with open(self.run_dir / METRICS, "rb") as file:
            file.seek(entry.sent)
            for line in file.readlines(min(_READ_BYTES, left)) if left > 0 else []:
                left -= len(line)
                if left >= 0 and line.endswith(b"\n"):
                    lines.append(line)
        return lines

    def acknowledge(self, entry: OutboxEntry, lines: list[bytes]) -> None:
        """Note that MLflow has these next rows, or never will."""
        entry.sent += sum(map(len, lines))
        self.rows_sent += len(lines)
        self.save_sometimes()

    def forget(self, entry: OutboxEntry) -> None:
        """Note that the server does not have this run (any more)."""
        with self._lock:
            self.rows_forgotten += self._rows(entry.begin, entry.sent)
            entry.forget()
            self.save()  # its key is on the disk before there is a run with it

    def samples(self, entry: OutboxEntry) -> tuple[list[dict[str, Any]], int]:
        """Read the run's newest samples and the position after them; none if all are sent."""
        limit = self._samples_limit(entry)
        if limit <= entry.samples_sent:
            return [], entry.samples_sent
        start = max(entry.samples_begin, limit - _SAMPLE_BYTES)
        with open(self.run_dir / SAMPLES, "rb") as file:
            file.seek(start)
            lines = file.read(limit - start).split(b"\n")
        end = limit - len(lines[-1])  # what follows the last newline is being written
        if end <= entry.samples_sent:
            return [], entry.samples_sent
        rows = lines[int(start > entry.samples_begin) : -1][-_SAMPLE_ROWS:]
        return [json.loads(line) for line in rows], end

    def rows_waiting(self, before: float = math.inf) -> int:
        """Count the rows that MLflow has not acknowledged, before byte `before` of the file."""
        return sum(
            self._rows(entry.sent, int(min(before, self._limit(entry)))) for entry in self.entries
        )

    def _rows(self, start: int, end: int) -> int:
        count, left = 0, end - start
        with open(self.run_dir / METRICS, "rb") as file:
            file.seek(start)
            while left > 0 and (chunk := file.read(min(_READ_BYTES, left))):
                count += chunk.count(b"\n")
                left -= len(chunk)
        return count

    def is_complete(self, entry: OutboxEntry) -> bool:
        """Whether MLflow has everything of this run, the status included."""
        waiting = entry.artifacts or entry.models or (entry.tags and not entry.tags_sent)
        return (
            entry.run_id is not None
            and entry.status_sent == entry.status
            and entry.parameters_sent
            and not (waiting or self.lines(entry) or self.samples(entry)[0])
        )

    def _limit(self, entry: OutboxEntry) -> int:
        size = os.stat(self.run_dir / METRICS).st_size
        return size if entry.end is None else min(size, entry.end)

    def _samples_limit(self, entry: OutboxEntry) -> int:
        path = self.run_dir / SAMPLES
        size = path.stat().st_size if path.exists() else 0
        return size if entry.samples_end is None else min(size, entry.samples_end)

    # ---- the file ----

    def save(self) -> None:
        """Write the file, unless the lock is another's by now."""
        with self._lock:
            if self._file is None:
                return
            temporary = self.run_dir / f"{STATE}.tmp"
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump([asdict(entry) for entry in self.entries], file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.run_dir / STATE)
            self._saved = time.monotonic()

    def save_sometimes(self) -> None:
        """Write the file every few seconds: what is sent twice after a crash changes nothing."""
        if time.monotonic() - self._saved > _SAVE_EVERY_S:
            self.save()

    def close(self) -> None:
        """Write the file and release the lock; what a thread still sends is not noted."""
        with self._lock:
            if self._file is not None:
                try:
                    self.save()
                finally:
                    self._file.close()
                    self._file = None


def _lock(file: BinaryIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
