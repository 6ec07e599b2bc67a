"""What a tracker has of a run directory, and what it is still to get.

Runs in: the driver, and `async-grpo report --sync`. Hides the file `TRACKER_sent.json`: one entry
per run of the directory, with how far into `metrics.jsonl` and `samples.jsonl` the tracker has
acknowledged. Those files are the queue, so that nothing is kept in memory, however long a server is
gone.

Invariants: one process sends a tracker what is in a directory (a lock, for MLflow on
`metrics.jsonl`, which the kernel releases when the process dies); an entry without an end whose
process is gone was killed; the file is replaced whole, and has a run's key before there is a run,
and its id soon after.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from async_grpo.observe.tracking.sink import RunFacts, TrackingError
from async_grpo.runtime.text import one_line

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
_CONFIG = {"path": "config.yaml", "place": "config.yaml"}
_READ_BYTES, _COUNT_BYTES = 256 << 10, 1 << 20
_SAMPLE_ROWS, _SAMPLE_BYTES = 1000, 16 << 20
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a network file system without locks."""


@dataclass
class FilePart:
    """A run's part of a file, in bytes; an end of None is the file's end."""

    begin: int
    sent: int
    end: int | None = None


@dataclass(kw_only=True)
class TrackedRun(RunFacts):
    """One run of a run directory: what the tracker is to have of it, and what it has."""

    metrics: FilePart
    samples: FilePart
    tags: dict[str, str]
    run_id: str | None
    status: str = "RUNNING"
    ended: int | None = None
    asked: int = 1
    """How often status or tags were set."""
    told: int = 0
    tagged: int = 0
    """How much of `asked` the tracker has, of the status and of the tags."""
    described: bool = False
    """Whether it has the parameters."""
    todo: list[dict[str, str]] = field(default_factory=lambda: [_CONFIG])
    """What is sent once: a `path` (relative: in the run directory), to be called `place` there; and
    what is there at `place` as a version of a `model`.
    """

    def change(
        self,
        tags: Mapping[str, str],
        todo: Sequence[dict[str, str]],
        status: str | None = None,
        ended: int | None = None,
    ) -> None:
        """Add tags and things to be sent; set the status if there is one."""
        self.tags |= tags
        self.todo += [item for item in todo if item not in self.todo]
        if status is not None:
            self.status, self.ended = status, ended
        self.asked += 1  # last: who reads this number first reads nothing older afterwards


class Outbox:
    """The runs of one run directory, for one tracker. One thread sends; any thread may `change` and
    `close`.
    """

    def __init__(self, run_dir: Path, title: str, run: TrackedRun | None = None) -> None:
        """Set the directory; nothing is read or locked before `open`. title: of the tracker. run:
        what this start begins, or continues.
        """
        self.run_dir = run_dir.absolute()
        self.runs = [] if run is None else [run]
        """The runs that are not complete, and last the newest."""
        self.rows_sent = 0
        """Rows that the tracker has acknowledged to this object."""
        self.unsent = 0
        """Rows of before this start that it has not, less those of this start that it has."""
        self.state = self.run_dir / f"{title.lower()}_sent.json"
        """The file that says what the tracker has."""
        own = self.state.with_suffix(".lock")
        self._locked = self.run_dir / METRICS if title == "MLflow" else own  # as older versions do
        self._title = title
        self._lock = threading.RLock()
        self._file: BinaryIO | None = None

    def open(self, *, resumed: bool = False) -> None:
        """Lock the directory and read what the tracker has, unless that is done. Raises
        TrackingError, as when another sends.

        The directory's last run is continued if it has the id that this start's run was given, or,
        for a `resumed` run that was given none, whatever it is. Runs without an end become KILLED.
        """
        if self._file is not None:
            return
        with ExitStack() as opened:
            file = opened.enter_context(open(self._locked, "a+b"))
            try:
                _lock(file)
                known = json.loads(self.state.read_bytes()) if self.state.exists() else []
                earlier = [
                    run
                    for run in map(_run_of, known)  # without those of which there is nothing
                    if run.run_id or self._limit(METRICS, run.metrics.end) > run.metrics.begin
                ]
            except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
                raise TrackingError(
                    f"another process sends the metrics of {self.run_dir} to {self._title}; wait "
                    "until it has ended"
                    if isinstance(error, BlockingIOError)
                    else f"{self.state} cannot be used ({one_line(error)}); move it away to begin "
                    f"a new {self._title} run"
                ) from error
            with self._lock:
                new = self.runs[-1] if self.runs else None
                first = self._limit(METRICS, None if new is None else new.metrics.sent)
                runs = self._joined(earlier, new, resumed=resumed)
                unsent = sum(self._rows(run, before=first) for run in runs)
                self._write(runs)  # a run's key is on the disk before there is a run with it
                self.runs, self.unsent = runs, unsent
                self._file = file
            opened.pop_all()  # `close` closes it

    def _joined(
        self, earlier: list[TrackedRun], new: TrackedRun | None, *, resumed: bool
    ) -> list[TrackedRun]:
        last = earlier[-1] if earlier else None
        if last and new and (last.run_id == new.run_id if new.run_id else resumed):
            last.uri = new.uri
            last.change(new.tags, new.todo, new.status, new.ended)
            for part, begun in ((last.metrics, new.metrics), (last.samples, new.samples)):
                part.begin = min(part.begin, begun.sent)  # the user may have removed the files
                part.sent, part.end = min(part.sent, begun.sent), None
            return earlier
        if last is not None and last.status == "RUNNING":  # its process is gone: the lock was free
            killed = int(os.stat(self.run_dir / METRICS).st_mtime * 1000)
            last.change({}, [], "KILLED", killed)
        if new is None:
            return earlier
        for run in earlier:
            for part, begun in ((run.metrics, new.metrics), (run.samples, new.samples)):
                part.end = begun.sent if part.end is None else min(part.end, begun.sent)
            if new.run_id is not None and run.run_id == new.run_id:
                run.told, run.tagged = run.asked, run.asked  # the new one's affair now
        if new.run_id is not None:  # begun in another directory, from which the tracker has what is
            new.metrics.begin = new.samples.begin = 0  # here, unless it lost the run
            new.described = True
        return [*(run for run in earlier if self.waiting(run)), new]

    # ---- what is to be sent ----

    def change(
        self,
        tags: Mapping[str, str] | None = None,
        todo: Sequence[dict[str, str]] = (),
        status: str | None = None,
    ) -> None:
        """Change the current run (see `TrackedRun.change`); a status is on the disk at once."""
        with self._lock:
            self.runs[-1].change(tags or {}, todo, status, int(time.time() * 1000))
            if status is not None:
                self.save()

    @contextmanager
    def idle(self, within_s: float) -> Iterator[None]:
        """Keep other threads from writing. Raises TimeoutError if one does so all the time."""
        if not self._lock.acquire(timeout=within_s):
            raise TimeoutError(f"the disk does not take {self.state}")
        try:
            yield
        finally:
            self._lock.release()

    def lines(self, run: TrackedRun) -> list[bytes]:
        """Read the next rows that the tracker does not have: some whole lines."""
        part, lines = run.metrics, []
        left = self._limit(METRICS, part.end) - part.sent
        with open(self.run_dir / METRICS, "rb") as file:
            file.seek(part.sent)
            for line in file.readlines(min(_READ_BYTES, left)) if left > 0 else []:
                left -= len(line)
                if left >= 0 and line.endswith(b"\n"):
                    lines.append(line)
        return lines

    def samples(self, run: TrackedRun) -> tuple[list[dict[str, Any]], int]:
        """Read the run's newest samples and the position after them; none if all are sent."""
        part = run.samples
        limit = self._limit(SAMPLES, part.end)
        if limit <= part.sent:
            return [], part.sent
        start = max(part.begin, limit - _SAMPLE_BYTES)
        with open(self.run_dir / SAMPLES, "rb") as file:
            file.seek(start)
            *lines, rest = file.read(limit - start).split(b"\n")
        if (end := limit - len(rest)) <= part.sent:  # the rest is being written, or torn
            return [], part.sent
        rows = lines[int(start > part.begin) :][-_SAMPLE_ROWS:]
        return [json.loads(line) for line in rows], end

    def waiting(self, *runs: TrackedRun) -> list[str]:
        """Name what the tracker does not have of these runs."""
        rows = sum(map(self._rows, runs))
        names = [f"{rows} lines of {METRICS}"] if rows else []
        for run in runs:
            names += [] if run.told == run.tagged == run.asked else ["status or tags"]
            names += [] if run.described else ["parameters"]
            names += ["samples"] if self.samples(run)[0] else []
            names += [item.get("model", item["place"]) for item in run.todo]
        return list(dict.fromkeys(names))

    # ---- what the tracker has ----

    def has_rows(self, run: TrackedRun, lines: list[bytes]) -> None:
        """Note that the tracker has these next rows, or never will."""
        run.metrics.sent += sum(map(len, lines))
        self.rows_sent += len(lines)
        self.unsent -= len(lines)

    def has_items(self, run: TrackedRun, items: list[dict[str, str]]) -> None:
        """Note that the tracker has these of `todo`, or never will."""
        with self._lock:
            run.todo = [item for item in run.todo if item not in items]

    def forget(self, run: TrackedRun) -> None:
        """Note that the tracker does not have this run (any more)."""
        with self._lock:
            sent = run.metrics.sent
            run.metrics.sent, run.samples.sent = run.metrics.begin, run.samples.begin
            self.unsent += self._rows(run, before=sent)
            run.run_id, run.described = None, False
            run.told, run.tagged = 0, 0
            run.todo = [_CONFIG, *(item for item in run.todo if item != _CONFIG)]

    # ---- the files ----

    def save(self) -> None:
        """Write the file, unless the lock is another's by now."""
        with self._lock:
            if self._file is not None:
                self._write(self.runs)

    def close(self) -> None:
        """Write the file and release the lock; what a thread still sends is not noted."""
        with self._lock:
            try:
                self.save()
            finally:
                if self._file is not None:
                    self._file.close()
                    self._file = None

    def _write(self, runs: list[TrackedRun]) -> None:
        temporary = self.state.with_suffix(".json.tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump([asdict(run) for run in runs], file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.state)

    def _limit(self, name: str, end: int | None) -> int:
        path = self.run_dir / name
        size = path.stat().st_size if path.exists() else 0
        return size if end is None else min(size, end)

    def _rows(self, run: TrackedRun, before: float = math.inf) -> int:
        part, count = run.metrics, 0
        left = int(min(before, self._limit(METRICS, part.end))) - part.sent
        with open(self.run_dir / METRICS, "rb") as file:
            file.seek(part.sent)
            while left > 0 and (chunk := file.read(min(_COUNT_BYTES, left))):
                count += chunk.count(b"\n")
                left -= len(chunk)
        return count


def _run_of(entry: dict[str, Any]) -> TrackedRun:
    """Read an entry of the file, also one of when MLflow was the only tracker."""
    if "sent" in entry:
        old: dict[str, Any] = {"places": {}, "models": {}, "tags": {}, "tags_sent": False} | entry
        kept = ("uri", "experiment", "name", "parameters", "created", "key", "tags", "status")
        paths = {path: old["places"].get(path, Path(path).name) for path in old["artifacts"]}
        entry = {name: old[name] for name in (*kept, "ended", "run_id")} | {
            "described": old["parameters_sent"],
            "told": int(old["status_sent"] == old["status"]),
            "tagged": int(old["tags_sent"] or not old["tags"]),
            "metrics": {name: old[name] for name in ("begin", "sent", "end")},
            "samples": {name: old[f"samples_{name}"] for name in ("begin", "sent", "end")},
            "todo": [{"path": path, "place": place} for path, place in paths.items()]
            + [{"model": model, "place": place} for model, place in old["models"].items()],
        }
    # Once a run's id was noted only after its parameters, and `told` included the tags.
    entry = {"described": entry["run_id"] is not None, "tagged": entry["told"]} | entry
    metrics, samples = FilePart(**entry.pop("metrics")), FilePart(**entry.pop("samples"))
    return TrackedRun(metrics=metrics, samples=samples, **entry)


def _lock(file: BinaryIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
