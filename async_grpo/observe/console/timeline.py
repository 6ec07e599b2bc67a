"""When what happened in a run: `timeline.jsonl`, from which the report draws.

Runs in: the driver (writing); the report (reading). Hides the file and its bound. One line per
event:

    {"time": Unix seconds, "kind": "start" | "phase" | "publication" | "note" | "end", ...}

A `phase` has `begin`, `text` and `failed`, a `publication` `begin`, `version` and `paused_s`; both
are written when they are over.

Invariants: events wait in memory, at most EVENTS of them, until `flush`; two files of PART_BYTES
hold the newest ones, however long the run is.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TIMELINE, EARLIER = "timeline.jsonl", "timeline.1.jsonl"
PART_BYTES = 4 << 20
EVENTS = 10_000


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
