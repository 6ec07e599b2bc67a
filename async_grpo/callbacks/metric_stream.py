"""Streams a run's events as JSON lines, to a file, a named pipe or a URL.

Runs in: the driver, with a thread of its own, so that a reader who is slow or gone costs no
training. Invariant: lines leave in their order; what does not fit `BACKLOG` lines is dropped, and
said in the line after it (`dropped`).
"""

from __future__ import annotations

import json
import math
import os
import queue
import stat
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.callbacks.base import Callback

if TYPE_CHECKING:
    from async_grpo.trainer import Trainer

BACKLOG = 10_000
REQUEST_S = 10.0
CLOSE_S = 10.0
MOST_PER_REQUEST = 1_000
PAUSE_S = 1.0
"""Between two requests."""


class MetricStream(Callback):
    """Writes a JSON line per event: {"event", "time", "run", "step", ...and its metrics}.

    A URL gets them as POST requests of type application/x-ndjson, at most one a second; a named
    pipe once somebody reads it. An error of the reader's side is raised at the next event.
    """

    def __init__(self, to: str) -> None:
        """to: path, or a URL that begins with http:// or https://."""
        self._to = to
        self._remote = to.startswith(("http://", "https://"))
        self._ending = threading.Event()
        self._lines: queue.Queue[str | None] = queue.Queue(BACKLOG)
        self._dropped = 0
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Begin to write."""
        self._thread = threading.Thread(target=self._write, name="metric-stream", daemon=True)
        self._thread.start()
        self._say(trainer, "start", trainer.steps_done, {"total_steps": trainer.total_steps})

    def on_step(self, trainer: Trainer, result: dict[str, Any]) -> None:
        """Write the result."""
        self._say(trainer, "step", result["training_iteration"], result)

    def on_publication(self, trainer: Trainer, version: int, seconds: float) -> None:
        """Write the version."""
        self._say(trainer, "publication", version, {"seconds": seconds})

    def on_evaluation(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics."""
        self._say(trainer, "evaluation", step, metrics)

    def on_checkpoint(self, trainer: Trainer, step: int, path: Path) -> None:
        """Write the path."""
        self._say(trainer, "checkpoint", step, {"path": str(path)})

    def on_fault(self, trainer: Trainer, text: str) -> None:
        """Write the line."""
        self._say(trainer, "fault", trainer.steps_done, {"text": text})

    def on_end(self, trainer: Trainer, status: str) -> None:
        """Write the status, and wait a while until all is written."""
        if self._thread is None:
            return
        self._say(trainer, "end", trainer.steps_done, {"status": status})
        self._ending.set()
        late = TimeoutError(f"{self._to} did not take all lines within {CLOSE_S:g} s")
        try:
            self._lines.put(None, timeout=CLOSE_S)
        except queue.Full:
            raise late from None
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise late
        self._check()

    def _say(self, trainer: Trainer, event: str, step: int, facts: dict[str, Any]) -> None:
        self._check()
        head = {"event": event, "time": time.time(), "run": trainer.config.run.name, "step": step}
        if self._dropped:
            head["dropped"] = self._dropped
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in facts.items()
        }
        try:
            self._lines.put_nowait(json.dumps({**finite, **head}) + "\n")
            self._dropped = 0
        except queue.Full:
            self._dropped += 1

    def _check(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise RuntimeError(f"{self._to} did not take the lines: {failure}") from failure

    def _write(self) -> None:
        ended, file = False, -1
        while not ended:
            lines = [self._lines.get()]
            while len(lines) < MOST_PER_REQUEST and not self._lines.empty():
                lines.append(self._lines.get_nowait())
            ended = lines[-1] is None
            data = "".join(line for line in lines if line is not None).encode()
            try:
                if self._remote and data:
                    self._post(data)
                elif data:
                    file = self._open() if file < 0 else file
                    while data:
                        data = data[os.write(file, data) :]
            except (OSError, ValueError) as error:  # a URLError is an OSError
                self._failure = error
                if file >= 0:  # a reader that has gone may come back
                    os.close(file)
                    file = -1
            if self._remote and not ended:
                self._ending.wait(PAUSE_S)
        if file >= 0:
            os.close(file)

    def _post(self, data: bytes) -> None:
        kind = {"Content-Type": "application/x-ndjson"}
        request = urllib.request.Request(self._to, data, kind, method="POST")
        urllib.request.urlopen(request, timeout=REQUEST_S).close()

    def _open(self) -> int:
        """Open the file; a named pipe, as soon as somebody reads it."""
        path = Path(self._to).expanduser()
        flags = os.O_WRONLY | os.O_APPEND
        if path.exists() and stat.S_ISFIFO(path.stat().st_mode):
            return os.open(path, flags)
        return os.open(path, flags | os.O_CREAT, 0o644)
