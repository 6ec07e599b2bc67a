"""Who did what when, in a few learner steps: what the timeline of the report is drawn from.

Runs in: the report's process; reads only. Hides where the times come from: learner steps end when their row was logged and last as long as it says; a
group's frame in the journal has its times at the engine; publications and phases are in the timeline. Clocks of several machines are taken as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from async_grpo.errors import RunError
from async_grpo.replay.journal import segments
from async_grpo.replay.stretch import Stretch
from async_grpo.report.data import Row, RunData
from async_grpo.wire import WireError

Span = tuple[float, float]
STEPS, GROUPS = 10, 3000
"""Learner steps in the window by default; groups that are looked at, at most."""


@dataclass
class Window:
    """Spans in Unix seconds. `learner`: cause -> spans; `generating`, `scoring`: actor -> spans of its groups; `ready`: spans of groups in the queue."""

    first: int
    last: int
    begin: float
    end: float
    learner: dict[str, list[Span]] = field(default_factory=dict)
    generating: dict[str, list[Span]] = field(default_factory=dict)
    scoring: dict[str, list[Span]] = field(default_factory=dict)
    ready: list[Span] = field(default_factory=list)
    publications: list[tuple[float, float, int]] = field(default_factory=list)
    phases: list[tuple[float, float, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_window(data: RunData, *, steps: tuple[int, int] | None) -> Window | None:
    """The window of these learner steps, or by default a few in the middle of the run; None where no step was logged."""
    if not data.rows:
        return None
    rows = data.between(*(steps or _middle(data)))
    if not rows:
        return None
    window = Window(rows[0].step, rows[-1].step, rows[0].time - rows[0].values["time/step"], rows[-1].time)
    for row in rows:
        _learner(window, row)
    for event in data.events:
        begin = event.get("begin")
        if isinstance(begin, int | float) and begin < window.end and event["time"] > window.begin:
            if event["kind"] == "publication":
                window.publications.append((begin, event["time"], int(event.get("version", -1))))
            elif event["kind"] == "phase":
                window.phases.append((begin, event["time"], str(event.get("text", ""))))
    for row, name, what in [(row, "eval/seconds", "evaluation") for row in data.evaluations] + [(row, "checkpoint/seconds", "checkpoint") for row in data.checkpoints]:
        begin = row.time - row.values.get(name, 0.0)
        if begin < min(row.time, window.end) and row.time > window.begin:
            window.phases.append((begin, row.time, what))
    _groups(window, rows, data.directory / "journal")
    return window


def _middle(data: RunData) -> tuple[int, int]:
    batch = data.setting("rollout.rollout_batch_size") or 1
    count = max(3, min(STEPS, GROUPS // (2 * batch)))
    first, last = data.rows[0].step, data.rows[-1].step
    start = max(first, (first + last - count) // 2 + 1)
    return start, min(last, start + count - 1)


def _learner(window: Window, row: Row) -> None:
    at = row.time - row.values["time/step"]
    for cause in ("wait", "train", "publish"):
        seconds = row.values.get(f"time/{cause}", 0.0)
        window.learner.setdefault(cause, []).append((at, at + seconds))
        at += seconds


def _groups(window: Window, rows: list[Row], journal: Path) -> None:
    """Engines and queue, from the results of these steps."""
    if not segments(journal):
        window.notes.append("Engines and queue are not shown: the run kept no journal (replay.journal.enable).")
        return
    try:
        stretch = Stretch(journal, first=window.first, last=window.last)
    except RunError as error:
        window.notes.append(f"Engines and queue are not shown: {error}")
        return
    if not stretch.steps:
        window.notes.append("Engines and queue are not shown: the journal does not have the groups of these steps any more.")
        return
    taken = {row.step: row.time - row.values["time/step"] + row.values.get("time/wait", 0.0) for row in rows}
    for group_id in sorted(stretch.results)[:GROUPS]:
        _group(window, stretch, group_id, taken)


def _group(window: Window, stretch: Stretch, group_id: int, taken: dict[int, float]) -> None:
    result = stretch.results[group_id]
    try:
        meta = stretch.meta(group_id)
    except WireError:
        return  # damaged: the replay command says so
    if meta is None or not {"queued", "done", "scored"} <= meta.times.keys():
        return
    times = meta.times
    if times["queued"] < window.end and times["scored"] > window.begin:
        window.generating.setdefault(meta.actor_id, []).append((times["queued"], times["done"]))
        window.scoring.setdefault(meta.actor_id, []).append((times["done"], times["scored"]))
    left = taken.get(result.step, window.end) if result.waits or result.step is not None else None
    if left is not None and left > window.begin and times["scored"] < window.end:
        window.ready.append((times["scored"], max(times["scored"], left)))
