"""Sends a tracker what an outbox says that it does not have.

Runs in: the tracker's sender thread, or `async-grpo report --sync`. Hides the order, and which of
many items a refusal is about.

Invariants: nothing is acknowledged before the tracker has it, except for what it refuses for good,
which is counted; that the disk is full keeps nothing from the tracker.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from async_grpo.observe.tracking.outbox import METRICS, Outbox, TrackedRun
from async_grpo.observe.tracking.shown import is_shown
from async_grpo.observe.tracking.sink import Gone, Point, Refused, TrackerSink
from async_grpo.old_names import metric
from async_grpo.runtime.text import one_line

EVERY = "tracking.metrics"
"""The parameter of a run that says whether the tracker gets all metrics."""
_CALL_PAIRS, _CALL_POINTS = 100, 900
_SAVE_EVERY_S = 5.0
"""How much work is at most repeated after a crash."""


class Delivery:
    """Sends an outbox to trackers of a `kind` until `stop()`, which is asked between calls; for one
    thread.
    """

    def __init__(
        self, outbox: Outbox, kind: type[TrackerSink], stop: Callable[[], bool] = lambda: False
    ) -> None:
        self._outbox, self._stop = outbox, stop
        self._kind = kind
        self._sinks: dict[str | None, TrackerSink] = {}
        self.refused = 0
        """Points, parameters and others that were refused for good, and lines that are no rows."""
        self.refusal = ""
        """Why the last one was refused."""
        self._saved = 0.0
        self._unsaved: OSError | None = None

    def sink(self, run: TrackedRun) -> TrackerSink:
        """Return the tracker that the run goes to."""
        if run.uri not in self._sinks:
            self._sinks[run.uri] = self._kind(run.uri, self._outbox.run_dir)
        return self._sinks[run.uri]

    def connect(self, run: TrackedRun) -> str:
        """Create or continue the run, and return its id. Its status goes before all else, to be
        right even if time runs out, unless the tracker has an end come last.
        """
        sink, asked, known = self.sink(run), run.asked, run.run_id
        run_id = run.run_id = known or sink.start(run)
        if known is None:
            self._save()
        if run.told != asked:
            ends = sink.ends_last and run.status != "RUNNING"
            try:
                if ends:
                    sink.log(run_id)
                else:
                    sink.set_status(run_id, run.status, run.ended)
            except Gone:  # another server than before, or a run that somebody deleted
                self._outbox.forget(run)
                if known is None:
                    raise
                return self.connect(run)
            if not ends:
                run.told = asked  # what was set meanwhile is sent the next time
        return run_id

    def send(self, *, earlier: bool = True, end: bool = True) -> None:
        """Send what the tracker does not have, the newest run first, then `earlier` ones. end:
        whether the newest gets nothing after this.

        Raises what the tracker raises, except for what it refuses for good; at the end OSError, if
        it could not be noted.
        """
        for run in reversed(self._outbox.runs[0 if earlier else -1 :]):
            run_id = self.connect(run)
            try:
                for part in (self._send_rows, self._describe, self._send_samples, self._send_todo):
                    if self._stop():
                        return
                    part(self.sink(run), run, run_id)
                last = end or run is not self._outbox.runs[-1]
                if last and run.told != (asked := run.asked) and not self._stop():
                    self.sink(run).set_status(run_id, run.status, run.ended)
                    run.told = asked
            except Gone:
                run.told = 0  # `connect` is to find out whether the run is gone
                raise
        self._save(_SAVE_EVERY_S)
        if self._unsaved is not None:
            raise self._unsaved

    def _save(self, every_s: float = 0.0) -> None:
        """Note what the tracker has, unless that was done in these seconds; an error waits."""
        if self._unsaved is None and time.monotonic() < self._saved + every_s:
            return
        try:
            self._outbox.save()
            self._saved, self._unsaved = time.monotonic(), None
        except OSError as error:
            self._unsaved = error

    def _send_rows(self, sink: TrackerSink, run: TrackedRun, run_id: str) -> None:
        every = run.parameters.get(EVERY) == "all"
        while not self._stop() and (lines := self._outbox.lines(run)):
            points, read = self._points(lines[0], every=every), 1
            for line in lines[1:]:
                more = self._points(line, every=every)
                if len(points) + len(more) > _CALL_POINTS:
                    break
                points, read = points + more, read + 1
            self._send_all(lambda some: sink.log(run_id, points=some), points, _CALL_POINTS)
            self._outbox.has_rows(run, lines[:read])
            self._save(_SAVE_EVERY_S)

    def _describe(self, sink: TrackerSink, run: TrackedRun, run_id: str) -> None:
        if not run.described:
            pairs = list(run.parameters.items())
            self._send_all(lambda some: sink.log(run_id, parameters=dict(some)), pairs, _CALL_PAIRS)
            run.described = True
        if run.tagged != (asked := run.asked):
            pairs = list(run.tags.items())
            self._send_all(lambda some: sink.log(run_id, tags=dict(some)), pairs, _CALL_PAIRS)
            run.tagged = asked

    def _send_samples(self, sink: TrackerSink, run: TrackedRun, run_id: str) -> None:
        rows, position = self._outbox.samples(run)
        if rows:
            self._send_all(lambda _: sink.show_samples(run_id, rows), [rows])
        run.samples.sent = position

    def _send_todo(self, sink: TrackerSink, run: TrackedRun, run_id: str) -> None:
        while run.todo and not self._stop():
            items = [item := run.todo[0]]
            try:
                if "model" in item:
                    sink.register(run_id, item["model"], item["place"])
                elif (path := self._outbox.run_dir / item["path"]).exists():
                    sink.put(run_id, path, item["place"])
            except Refused as error:
                if "path" in item:  # what is not there is no version of a model
                    models = [one for one in run.todo if "model" in one]
                    items += [one for one in models if one["place"] == item["place"]]
                self._refuse(str(error), len(items))
            self._outbox.has_items(run, items)
            self._save()

    def _points(self, line: bytes, *, every: bool) -> list[Point]:
        try:
            row = json.loads(line)
            step, when = row.pop("step"), round(row.pop("time") * 1000)
            values = {metric(key): float(value) for key, value in row.items() if value is not None}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self._refuse(f"a line of {METRICS} holds no metrics: {one_line(error)}")
            return []
        return [
            Point(name, value, when, step)
            for name, value in values.items()
            if is_shown(name, value, every=every)
        ]

    def _send_all(self, send: Callable[[list[Any]], None], items: list[Any], most: int = 1) -> None:
        """Send at most so many items at once; on a refusal all but those that are to blame."""
        for begin in range(0, len(items), most):
            some = items[begin : begin + most]
            try:
                send(some)
            except Refused as error:
                if len(some) == 1:
                    self._refuse(str(error))
                else:
                    self._send_all(send, some, (len(some) + 1) // 2)

    def _refuse(self, reason: str, count: int = 1) -> None:
        self.refused, self.refusal = self.refused + count, reason
