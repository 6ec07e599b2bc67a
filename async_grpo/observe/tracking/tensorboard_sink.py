"""TensorBoard as a tracker: an event file in `tensorboard/` of the run's directory.

Runs in: the tracker's sender thread, or `async-grpo report --sync`. Hides the format of events, for
which the package `tensorboard` has the parts. Invariants: what a call writes is on the disk when it
returns, and no file stays open; what comes again is not written again.
"""

from __future__ import annotations

import html
import os
import shlex
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from async_grpo.observe.tracking.sink import Gone, Point, RunFacts

SAMPLES = 20
"""Responses that are shown, the newest ones."""


class TensorboardSink:
    """See `TrackerSink`. It gets metrics, parameters, tags and samples; status, files and models
    it does not have.
    """

    title = "TensorBoard"
    ends_last = False

    def __init__(self, uri: str | None, run_dir: Path) -> None:
        """Set the directory."""
        self.address = str(run_dir / "tensorboard")
        self._written: dict[str, set[tuple[int, int]]] = {}
        self._tables: dict[tuple[str, str], dict[str, str]] = {}

    def where(self) -> str:
        """See `TrackerSink`."""
        return f"; look at it with: tensorboard --logdir {shlex.quote(self.address)}"

    def start(self, run: RunFacts) -> str:
        """See `TrackerSink`."""
        run_id = f"{run.name}-{run.key[:6]}"
        (Path(self.address) / run_id).mkdir(parents=True, exist_ok=True)
        self._forget(run_id)
        return run_id

    def set_status(self, run_id: str, status: str, ended: int | None) -> None:
        """See `TrackerSink`."""
        self._file(run_id)

    def log(
        self,
        run_id: str,
        *,
        parameters: dict[str, str] | None = None,
        tags: dict[str, str] | None = None,
        points: Sequence[Point] = (),
    ) -> None:
        """See `TrackerSink`; parameters and tags are tables of text."""
        for title, pairs in (("parameters", parameters), ("tags", tags)):
            known = self._tables.get((run_id, title), {})  # they come in parts
            if pairs and (table := known | pairs) != known:
                self._append(run_id, [_text(f"run/{title}", table.items(), step=0)])
                self._tables[run_id, title] = table
        if points:
            self._append(run_id, self._new(run_id, points))

    def show_samples(self, run_id: str, rows: list[dict[str, Any]]) -> None:
        """See `TrackerSink`: prompts and responses as a table of text."""
        shown = [(str(row.get("prompt", "")), str(row.get("response", ""))) for row in rows]
        step = int(rows[-1].get("step", 0))
        self._append(run_id, [_text("run/samples", shown[-SAMPLES:], step=step)])

    def put(self, run_id: str, path: Path, place: str) -> None:
        """Do nothing: files stay in the run's directory."""

    def register(self, run_id: str, model: str, place: str) -> None:
        """Do nothing."""

    def _new(self, run_id: str, points: Sequence[Point]) -> Iterator[Any]:
        """Yield an event for every row of points that the run's file does not have."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        known = self._known(run_id)
        for place, row in groupby(points, lambda point: (point.time, point.step)):
            if place not in known:
                values = [Summary.Value(tag=one.name, simple_value=one.value) for one in row]
                when, step = place
                yield Event(wall_time=when / 1000, step=step, summary=Summary(value=values))

    def _append(self, run_id: str, events: Iterable[Any]) -> None:
        """Write all events, or none and raise OSError."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        path, known, new = self._file(run_id), self._known(run_id), list(events)
        size = path.stat().st_size if path.exists() else 0
        if not size:
            new.insert(0, Event(wall_time=time.time(), file_version="brain.Event:2"))
        try:
            with path.open("ab") as file:
                for event in new:
                    RecordWriter(file).write(event.SerializeToString())
        except OSError:
            os.truncate(path, size)
            raise
        known |= {(round(one.wall_time * 1000), one.step) for one in new}

    def _known(self, run_id: str) -> set[tuple[int, int]]:
        """Return times and steps of the rows in the run's file, without what a killed process left
        of its last one.
        """
        from tensorboard.compat.proto.event_pb2 import Event

        path = self._file(run_id)
        if run_id not in self._written:
            known, end = set(), 0
            with path.open("a+b") as file:
                file.seek(0)
                while len(head := file.read(12)) == 12:  # length, and its checksum
                    data = file.read(*struct.unpack("<Q", head[:8]))
                    if len(file.read(4)) < 4:
                        break
                    event, end = Event.FromString(data), file.tell()
                    known.add((round(event.wall_time * 1000), event.step))
                file.truncate(end)
            self._written[run_id] = known
        return self._written[run_id]

    def _forget(self, run_id: str) -> None:
        self._written.pop(run_id, None)
        for title in ("parameters", "tags"):
            self._tables.pop((run_id, title), None)

    def _file(self, run_id: str) -> Path:
        directory = Path(self.address) / run_id
        if not directory.is_dir():
            raise Gone(f"{directory} is not there")
        return directory / "events.out.tfevents.async_grpo"


def _text(tag: str, rows: Iterable[tuple[str, str]], *, step: int) -> Any:
    """Make an event of a table of two columns."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    cells = [[html.escape(one).replace("\n", "<br>") for one in row] for row in rows]
    lines = [f"<tr><td><code>{a}</code></td><td><code>{b}</code></td></tr>" for a, b in cells]
    table = f"<table>{''.join(lines)}</table>".encode()
    plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    tensor = TensorProto(dtype=DT_STRING, string_val=[table])
    value = Summary.Value(tag=tag, metadata=plugin, tensor=tensor)
    return Event(wall_time=time.time(), step=step, summary=Summary(value=[value]))
