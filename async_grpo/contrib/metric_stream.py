"""Streams a run's events as JSON lines, to a file, a named pipe or a URL.

Runs in: the driver, with a thread of its own, so that a reader who is slow or gone costs no
training. Invariants: lines leave in their order; a reader who does not take them is tried again,
and the run goes on; what does not fit `BACKLOG` lines meanwhile is dropped, and counted in the next
line (`dropped`).
"""

from __future__ import annotations

import http.client
import json
import math
import os
import stat
import threading
import time
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.run.callbacks.base import Callback
from async_grpo.runtime.text import one_line, without_password

if TYPE_CHECKING:
    from async_grpo.run.trainer import Trainer

BACKLOG = 10_000
REQUEST_S = 10.0
CLOSE_S = 10.0
MOST_AT_ONCE = 1_000
PAUSE_S = 1.0
"""Between two requests, and two attempts at a reader that is not there."""


class MetricStream(Callback):
    """Writes a JSON line per event: {"event", "time", "run", "step", ...and its metrics}.

    A URL gets them as POST requests of type application/x-ndjson, at most one a second; a named
    pipe once somebody reads it. A file that cannot be written is an error of `on_start`.
    """

    def __init__(self, to: str) -> None:
        """to: path, or a URL that begins with http:// or https://. Raises ValueError."""
        self._to, self._path = to, Path(to).expanduser()
        self._remote = to.startswith(("http://", "https://"))
        if self._remote and not _is_url(to):
            raise ValueError(
                f"{without_password(to)!r} is no URL that can be posted to: give it as "
                "http://host:port/path, in ASCII, without spaces, user and password"
            )
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._change, self._ending = threading.Condition(), False
        self._trouble = ""
        """Why the reader takes nothing, until that has been said."""
        self._thread: threading.Thread | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Begin to write. Raises OSError."""
        if not self._remote and not _is_pipe(self._path):
            with open(self._path, "ab"):
                pass
        self._thread = threading.Thread(target=self._run, name="metric-stream", daemon=True)
        self._thread.start()
        self._say(trainer, "start", trainer.steps_done, {"total_steps": trainer.total_steps})

    def on_step(self, trainer: Trainer, result: dict[str, Any]) -> None:
        """Write the result."""
        self._say(trainer, "step", result["training_iteration"], result)

    def on_weight_sync(self, trainer: Trainer, version: int, seconds: float) -> None:
        """Write the version."""
        self._say(trainer, "weight_sync", version, {"seconds": seconds})

    def on_evaluation(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics."""
        self._say(trainer, "evaluation", step, metrics)

    def on_checkpoint(self, trainer: Trainer, step: int, path: Path) -> None:
        """Write the path."""
        self._say(trainer, "checkpoint", step, {"path": str(path)})

    def on_restore(self, trainer: Trainer, step: int) -> None:
        """Write that the steps after `step` are rolled back."""
        self._say(trainer, "restore", step, {})

    def on_fault(self, trainer: Trainer, text: str) -> None:
        """Write the line."""
        self._say(trainer, "fault", trainer.steps_done, {"text": text})

    def on_end(self, trainer: Trainer, status: str) -> None:
        """Write the status, and wait a while until all is written."""
        if self._thread is None:
            return
        self._say(trainer, "end", trainer.steps_done, {"status": status})
        with self._change:
            self._ending = True
            self._change.notify()
        self._thread.join(CLOSE_S + REQUEST_S)
        if self._lines or self._dropped:
            trainer.console.error(
                f"metric_stream: {self._to} did not take the last {len(self._lines)} lines, and "
                f"{self._dropped} before them"
            )

    def _say(self, trainer: Trainer, event: str, step: int, facts: dict[str, Any]) -> None:
        trouble, self._trouble = self._trouble, ""
        if trouble:
            trainer.console.error(f"metric_stream: {self._to} takes no lines now: {trouble}")
        head = {"event": event, "time": time.time(), "run": trainer.config.run.name, "step": step}
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in facts.items()
        }
        with self._change:
            if len(self._lines) >= BACKLOG:
                self._dropped += 1
                return
            if self._dropped:
                head["dropped"], self._dropped = self._dropped, 0
            self._lines.append(json.dumps({**finite, **head}) + "\n")
            self._change.notify()

    def _run(self) -> None:
        if self._remote:
            self._send_all(partial(_post, self._to))
        else:
            with closing(_Appender(self._path)) as file:
                self._send_all(file.send)

    def _send_all(self, send: Callable[[bytes], None]) -> None:
        """Send what there is, until the end; what was not taken again and again."""
        said, until = "", math.inf
        while time.monotonic() < until:
            with self._change:
                if self._ending:
                    until = min(until, time.monotonic() + CLOSE_S)
                if not self._lines:
                    if self._ending:
                        return
                    self._change.wait()
                    continue
                lines = [self._lines[at] for at in range(min(len(self._lines), MOST_AT_ONCE))]
            try:
                send("".join(lines).encode())
            except (OSError, http.client.HTTPException, ValueError) as error:
                if one_line(error) != said:
                    said = self._trouble = one_line(error)
            else:
                said = ""
                with self._change:
                    for _ in lines:
                        self._lines.popleft()
                if not self._remote:
                    continue
            with self._change:  # the end is worth another attempt at once
                self._change.wait_for(lambda: self._ending, PAUSE_S)
            if self._ending and said:
                time.sleep(min(PAUSE_S, 0.1))


def _post(url: str, data: bytes) -> None:
    """Post it. Raises OSError, as most of urllib's errors are, HTTPException for an answer that is
    not HTTP, and ValueError for one that redirects to no URL.
    """
    kind = {"Content-Type": "application/x-ndjson"}
    request = urllib.request.Request(url, data, kind, method="POST")
    urllib.request.urlopen(request, timeout=REQUEST_S).close()


class _Appender:
    """Appends to a file or a named pipe, which it opens when there is something to write."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, -1

    def send(self, data: bytes) -> None:
        """Write all of it. Raises OSError; then nothing is known to have been taken."""
        try:
            if self._file < 0:
                # does not wait for a reader of a pipe: without one it is an error
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
                self._file = os.open(self._path, flags, 0o644)
                os.set_blocking(self._file, True)
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close it, if it is open."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _is_pipe(path: Path) -> bool:
    return path.exists() and stat.S_ISFIFO(path.stat().st_mode)


def _is_url(text: str) -> bool:
    """Whether urllib can open a connection for this URL."""
    try:
        parts = urllib.parse.urlsplit(text)
        host, user = (parts.hostname if parts.port != 0 else None), parts.username
    except ValueError:  # of a bracket, or of the port
        return False
    printable = text.isascii() and text.isprintable() and " " not in text
    return bool(host) and user is None and printable
