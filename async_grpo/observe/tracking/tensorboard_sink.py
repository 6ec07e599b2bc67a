"""TensorBoard as a tracker: event files in `tensorboard/` of the run's directory.

Runs in: the tracker's sender thread, or `async-grpo report --sync`. Hides the format of events,
which the package `tensorboard` writes. Invariant: a point that comes again is not written again,
because the points of a metric come in the order of their times and steps.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from async_grpo.observe.tracking.sink import Gone, Point, RunFacts


class TensorboardSink:
    """See `TrackerSink`; it has no status, keeps no files, and knows no models."""

    title = "TensorBoard"

    def __init__(self, uri: str | None, run_dir: Path) -> None:
        """Set the directory."""
        self.address = uri or str(run_dir / "tensorboard")
        self._written: dict[str, dict[str, tuple[int, int]]] = {}
        self._writers: dict[str, Any] = {}
        self._tables: dict[tuple[str, str], dict[str, str]] = {}

    def where(self) -> str:
        """See `TrackerSink`."""
        return f"; look at it with: tensorboard --logdir {shlex.quote(self.address)}"

    def start(self, run: RunFacts) -> str:
        """See `TrackerSink`."""
        run_id = f"{run.name}-{run.key[:6]}"
        (Path(self.address) / run_id).mkdir(parents=True, exist_ok=True)
        return run_id

    def set_status(self, run_id: str, status: str, ended: int | None) -> None:
        """See `TrackerSink`."""
        self._directory(run_id)

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
            if pairs:  # they come in parts, and the newest text is shown
                table = self._tables.setdefault((run_id, title), {})
                table |= pairs
                self._text(run_id, f"run/{title}", table.items(), step=0)
        known = self._known(run_id)
        for point in points:
            if known.get(point.name, (0, 0)) < (place := (point.time, point.step)):
                seconds = point.time / 1000
                self._write(run_id, seconds, point.step, tag=point.name, simple_value=point.value)
                known[point.name] = place
        if run_id in self._writers:
            self._writers[run_id].flush()

    def show_samples(self, run_id: str, rows: list[dict[str, Any]]) -> None:
        """See `TrackerSink`: text of the last 20."""
        shown = [(f"{row.get('step')}", str(row.get("response", ""))) for row in rows[-20:]]
        self._text(run_id, "run/samples", shown, step=int(rows[-1].get("step", 0)))

    def put(self, run_id: str, path: Path, place: str) -> None:
        """Do nothing: files stay in the run's directory."""

    def register(self, run_id: str, model: str, place: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """See `TrackerSink`."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _text(self, run_id: str, tag: str, rows: Iterable[tuple[str, str]], *, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        cells = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in rows]
        table = "\n".join(["| | |", "|---|---|", *(f"| {a} | {b} |" for a, b in cells)])
        plugin = SummaryMetadata.PluginData(plugin_name="text")
        self._write(
            run_id,
            time.time(),
            step,
            tag=tag,
            metadata=SummaryMetadata(plugin_data=plugin),
            tensor=TensorProto(dtype=DT_STRING, string_val=[table.encode()]),
        )

    def _write(self, run_id: str, when: float, step: int, **value: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory = self._directory(run_id)
        if run_id not in self._writers:
            self._known(run_id)  # of the files before this one
            self._writers[run_id] = EventFileWriter(str(directory))
        summary = Summary(value=[Summary.Value(**value)])
        self._writers[run_id].add_event(Event(wall_time=when, step=step, summary=summary))

    def _known(self, run_id: str) -> dict[str, tuple[int, int]]:
        """Return time and step of the newest point of every metric in the run's files."""
        if run_id not in self._written:
            from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

            known: dict[str, tuple[int, int]] = {}
            for path in sorted(self._directory(run_id).glob("events.*")):
                for event in LegacyEventFileLoader(str(path)).Load():
                    place = round(event.wall_time * 1000), event.step
                    known |= {one.tag: place for one in event.summary.value}
            self._written[run_id] = known
        return self._written[run_id]

    def _directory(self, run_id: str) -> Path:
        directory = Path(self.address) / run_id
        if not directory.is_dir():
            raise Gone(f"{directory} is not there")
        return directory
