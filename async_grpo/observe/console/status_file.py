"""`status.json`: how a run is doing, for those who look at it from outside; and `timeline.jsonl`,
when what happened, from which the report draws. One line per event:

    {"time": Unix seconds, "kind": "start" | "phase" | "publication" | "note" | "end", ...}

A `phase` has `begin`, `text` and `failed`, a `publication` `begin`, `version` and `paused_s`; both
are written when they are over.

Runs in: the driver, in a thread of its own (writing); status command and report (reading). Hides
how a reader finds out that the writer is gone.

Invariants: a reader sees a whole status, the one before or the new one; no learner step waits for
it; it is written every `EVERY_S` while there is something new, else every `BEAT_S`, so that its age
says whether the driver lives where its process cannot be seen. Events wait in memory, at most
EVENTS of them; two files of PART_BYTES hold the newest ones, however long the run is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from async_grpo.errors import EXIT_MEANING, SetupError
from async_grpo.observe.console.progress import Progress
from async_grpo.old_names import metric
from async_grpo.runtime import lifetime, stacks
from async_grpo.runtime.text import ago

STATUS = "status.json"
FORMAT = 1
EVERY_S, BEAT_S = 2.0, 10.0
SILENT_S = 60.0
"""A file this old, of a process that cannot be seen from here, is of a run or node that is gone."""
SLOW_FACTOR, SLOW_S = 10.0, 120.0
"""A learner step that takes so many times as long as those before, and so long, is worth a word."""

TIMELINE, EARLIER = "timeline.jsonl", "timeline.1.jsonl"
PART_BYTES = 4 << 20
EVENTS = 10_000

_log = logging.getLogger(__name__)


class StatusFile:
    """Writes the progress and the timeline until `close`."""

    def __init__(self, run_dir: Path, progress: Progress, *, run: str) -> None:
        self._path, self._progress = run_dir / STATUS, progress
        self._timeline = Timeline(run_dir)
        self._who = {
            "format": FORMAT,
            "run": run,
            "run_dir": str(run_dir),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "owner": lifetime.owner(),
            "begun": stacks.begun(os.getpid()),
        }
        self._written, self._full = 0.0, False
        self._ending: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._lock, self._closing = threading.Lock(), threading.Event()
        with contextlib.suppress(SetupError):  # the first start here
            progress.remember(read_status(run_dir))
        self.event("start", host=self._who["host"], pid=self._who["pid"])
        self._write(force=True)
        self._thread = threading.Thread(target=self._run, name="async_grpo-status", daemon=True)
        self._thread.start()

    def event(self, kind: str, /, **facts: Any) -> None:
        """Add an event of this moment to the timeline; `facts` are plain values."""
        self._timeline.add({"time": time.time(), "kind": kind} | facts)

    def close(self) -> None:
        """Write the last state. A second call does nothing new."""
        self._closing.set()
        facts = self._progress.facts()
        ending = {"exit_code": facts.get("exit_code"), "message": facts.get("message", "")}
        if ending != self._ending:
            self._ending = ending
            self.event("end", **ending)
        self._write(force=True)

    def _run(self) -> None:
        while not self._closing.wait(EVERY_S):
            self._write(force=False)

    def _write(self, *, force: bool) -> None:
        with self._lock:
            try:
                self._timeline.flush()
                facts, now = self._progress.facts(), time.time()
                if not force and facts == self._last and now - self._written < BEAT_S:
                    return
                temporary = self._path.with_suffix(".tmp")
                temporary.write_text(
                    json.dumps(self._who | {"written": now} | facts) + "\n", encoding="utf-8"
                )
                os.replace(temporary, self._path)
                self._written, self._last = now, facts
                self._full = False
            except OSError as error:
                if not self._full:
                    text = "%s cannot be written (%s); training continues"
                    _log.warning(text, self._path, error.strerror)
                self._full = True


@dataclass(frozen=True, slots=True)
class Condition:
    """States what is the matter with a run; `kind` for programs."""

    kind: Literal["running", "ended", "killed", "silent", "slow"]
    text: str


def newest_run(directory: Path) -> Path:
    """Find the run directory whose status was written last in a directory of runs; a run directory
    is itself.
    """
    if not os.path.isdir(directory) or (directory / STATUS).exists():
        return directory
    written = {path.parent: path.stat().st_mtime for path in directory.glob(f"*/{STATUS}")}
    return max(written, key=lambda path: written[path], default=directory)


def read_status(run_dir: Path) -> dict[str, Any]:
    """Read the file. Raises SetupError if there is none or its format is another."""
    path = run_dir / STATUS
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SetupError(
            f"{run_dir} has no {STATUS}: it is no run directory (run.dir), or the run has not begun"
        ) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SetupError(f"{path} cannot be read: {reason}") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise SetupError(f"{path} is not of this version of async_grpo")
    return of_now(facts)


def of_now(facts: dict[str, Any]) -> dict[str, Any]:
    """Return what a status.json says, maybe one of before, under the names of now."""
    metrics = {metric(name): value for name, value in facts.get("metrics", {}).items()}
    return {"bottleneck": facts.pop("verdict", None), **facts, "metrics": metrics}


def condition(facts: dict[str, Any], *, now: float) -> Condition:
    """Find out whether the run goes on, has ended or was killed, as far as seen from here."""
    if "exit_code" in facts:
        code = facts["exit_code"]
        message = facts.get("message") or EXIT_MEANING.get(code, "")
        return Condition(
            "ended", f"ended {ago(now - facts['ended'])} ago with exit code {code}: {message}"
        )
    age = now - facts["written"]
    alive = stacks.lives(facts["owner"], facts["begun"])
    where = f"process {facts['pid']} on {facts['host']}"
    if alive is False:
        return Condition(
            "killed",
            f"{where} is gone without saying how it ended: it was killed about {ago(age)} "
            f"ago; async-grpo train {shlex.quote(facts['run_dir'] + '/config.yaml')} "
            "continues the run",
        )
    if age > SILENT_S:
        return Condition(
            "silent",
            f"{where} has written nothing for {ago(age)}: it is stopped or gone, or its storage is",
        )
    usual = facts["metrics"].get("seconds_per_step")
    if usual is not None and facts["phase"] == "training":
        since = now - facts["step_at"]
        if since > max(SLOW_S, SLOW_FACTOR * usual):
            text = f"the last learner step ended {ago(since)} ago; the ones before took "
            return Condition("slow", f"{text}{usual:.3g} s each")
    return Condition("running", "")


class Timeline:
    """Appends events to one run's file. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._earlier = run_dir / TIMELINE, run_dir / EARLIER
        self._lock = threading.Lock()
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS)

    def add(self, event: dict[str, Any]) -> None:
        """Remember an event for the next `flush`."""
        self._events.append(event)

    def flush(self) -> None:
        """Write new events. Raises OSError, and keeps the events for the next call."""
        with self._lock:
            taken = list(self._events)
            if not taken:
                return
            data = "".join(json.dumps(event) + "\n" for event in taken).encode()
            if self._path.exists() and self._path.stat().st_size > PART_BYTES:
                os.replace(self._path, self._earlier)
            with open(self._path, "ab") as file:
                file.write(data)
            for _ in taken:
                self._events.popleft()


def read_timeline(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield all events that are kept, oldest first, without lines that were cut off."""
    for path in (run_dir / EARLIER, run_dir / TIMELINE):
        if path.is_file():
            yield from json_objects(path.read_bytes(), time=(int, float), kind=str)


def json_objects(data: bytes, **types: type | tuple[type, ...]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects, one a line, that have values of these types under these keys."""
    for line in data.split(b"\n"):
        try:
            found = json.loads(line)
        except ValueError:
            continue  # cut off by the death of its writer
        if isinstance(found, dict) and all(isinstance(found.get(key), types[key]) for key in types):
            yield found
