"""A run that is looked at while it goes on: its panel, and what is new in its curves.

Runs in: the process of `async-grpo watch`; reads only. Hides files, and how one that was cut off or
replaced is told from one that grew. Invariants: a file that only grows is read once; a last line
without an end waits for it; memory is bounded as that of `report.data`.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_grpo.errors import SetupError
from async_grpo.observe.console.panel import headline, rows
from async_grpo.observe.console.status_file import condition, newest_run, read_status
from async_grpo.observe.tracking.outbox import METRICS
from async_grpo.runtime.text import one_line
from async_grpo.tools.report.data import MetricsRow, RunData


class FollowedRun:
    """A run directory, or the first run that a directory of runs has; neither need be there yet."""

    def __init__(self, directory: Path, metrics: Sequence[str]) -> None:
        self._metrics, self._made = metrics, time.time_ns()
        self._data, self._end = RunData(directory, {}), 0
        self._last, self._points = b"", list[MetricsRow]()

    def look(self, after: str) -> dict[str, Any]:
        """Return the panel, and the points since the look whose `after` is in this `after`; where
        there is none, or some points were taken back, all of them: `fresh`.
        """
        try:
            self._data.directory = newest_run(self._data.directory)
            self._read()
            shown = self._panel()
        except (OSError, SetupError) as error:
            shown = {"text": one_line(error)}
        known = re.search(rf"\b{self._made}-(\d{{1,9}})\b", after)
        shown["directory"], shown["fresh"] = str(self._data.directory), known is None
        shown["after"] = f"{self._made}-{len(self._points)}"
        shown["points"] = [  # as text, since JSON has no NaN
            [row.step, *(f"{row.values.get(name, math.nan):.6g}" for name in self._metrics)]
            for row in self._points[int(known[1]) if known else 0 :]
        ]
        return shown

    def _read(self) -> None:
        """Take new lines; all lines, where the one that was read last is not where it was."""
        path = self._data.directory / METRICS
        with open(path if path.exists() else os.devnull, "rb") as file:
            file.seek(self._end - len(self._last))
            if file.read(len(self._last)) != self._last:
                self._data, self._last = RunData(self._data.directory, {}), b""
                self._end = file.seek(0)
            for line in file:
                if line.endswith(b"\n"):
                    self._data.take(line)
                    self._end, self._last = self._end + len(line), line
        points = sorted([*self._data.rows, *self._data.evaluations], key=lambda row: row.time)
        if points[: len(self._points)] != self._points:
            self._made = time.time_ns()
        self._points = points

    def _panel(self) -> dict[str, Any]:
        """Say what the terminal's panel says. Raises SetupError."""
        facts, now = read_status(self._data.directory), time.time()
        state = condition(facts, now=now)
        if state.kind not in ("running", "slow"):
            now = facts.get("ended", facts["written"])
        said = {"kind": state.kind, "text": state.text, "head": headline(facts, now, bar=0)}
        known = {key: facts.get(key) for key in ("run", "step", "total", "exit_code", "notes")}
        return known | said | {"lines": list(rows(facts, now, cells=0))}
