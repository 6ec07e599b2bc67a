"""The report's timeline: engines, queue, learner and publications in a few learner steps.

Runs in: the report's process. Hides where the times come from (a learner step ends when its row was
logged and lasts as long as it says; a group's frame in the journal has its times at the engine;
publications and phases are in the timeline file) and how spans become lanes. Clocks of several
machines are taken as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from async_grpo.errors import RunError
from async_grpo.replay.history import Stretch
from async_grpo.replay.journal import segments
from async_grpo.tools.report.data import MetricsRow, RunData
from async_grpo.tools.report.plots import BLUE, CAUSES, GREY, ORANGE, PURPLE, WIDTH
from async_grpo.wire.codec import WireError

Span = tuple[float, float]
Bars = tuple[list[Span], str, float, str]
"""Spans, with their colour, its opacity, and what they are called."""
UNSHOWN = "Engines and queue are not shown"
STEPS, GROUPS = 10, 3000
"""Learner steps in the window by default; groups that are looked at, at most."""


@dataclass
class Window:
    """Spans in Unix seconds, of the learner by cause, of groups by actor and in the queue."""

    first: int
    last: int
    begin: float
    end: float
    learner: dict[str, list[Span]] = field(default_factory=dict)
    generating: dict[str, list[Span]] = field(default_factory=dict)
    scoring: dict[str, list[Span]] = field(default_factory=dict)
    ready: list[Span] = field(default_factory=list)
    publications: list[Span] = field(default_factory=list)
    phases: dict[str, list[Span]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_window(data: RunData, *, steps: tuple[int, int] | None) -> Window | None:
    """Read the window of these steps, by default some in the middle; None without a step."""
    if not data.rows:
        return None
    rows = data.between(*(steps or _middle(data)))
    if not rows:
        return None
    window = Window(
        rows[0].step, rows[-1].step, rows[0].time - rows[0].values["time/step"], rows[-1].time
    )
    for row in rows:
        _learner_spans(window, row)
    for event in data.events:
        begin = event.get("begin")
        if isinstance(begin, int | float) and begin < window.end and event["time"] > window.begin:
            if event["kind"] == "publication":
                window.publications.append((begin, event["time"]))
            elif event["kind"] == "phase":
                spans = window.phases.setdefault(str(event.get("text", "")), [])
                spans.append((begin, event["time"]))
    lines = [(row, "eval/seconds", "evaluation") for row in data.evaluations]
    lines += [(row, "checkpoint/seconds", "checkpoint") for row in data.checkpoints]
    for row, name, what in lines:
        begin = row.time - row.values.get(name, 0.0)
        if begin < min(row.time, window.end) and row.time > window.begin:
            window.phases.setdefault(what, []).append((begin, row.time))
    _groups(window, rows, data.directory / "journal")
    return window


def _middle(data: RunData) -> tuple[int, int]:
    batch = data.setting("rollout.rollout_batch_size") or 1
    count = max(3, min(STEPS, GROUPS // (2 * batch)))
    first, last = data.rows[0].step, data.rows[-1].step
    start = max(first, (first + last - count) // 2 + 1)
    return start, min(last, start + count - 1)


def _learner_spans(window: Window, row: MetricsRow) -> None:
    at = row.time - row.values["time/step"]
    for cause in ("wait", "train", "weight_sync"):
        seconds = row.values.get(f"time/{cause}", 0.0)
        window.learner.setdefault(cause, []).append((at, at + seconds))
        at += seconds


def _groups(window: Window, rows: list[MetricsRow], journal: Path) -> None:
    """Read the spans of engines and queue from the results of these steps."""
    if not segments(journal):
        window.notes.append(f"{UNSHOWN}: the run kept no journal (replay.journal.enable).")
        return
    try:
        stretch = Stretch(journal, first=window.first, last=window.last)
    except RunError as error:
        window.notes.append(f"{UNSHOWN}: {error}")
        return
    if not stretch.steps:
        window.notes.append(
            f"{UNSHOWN}: the journal does not have the groups of these steps any more."
        )
        return
    taken = {
        row.step: row.time - row.values["time/step"] + row.values.get("time/wait", 0.0)
        for row in rows
    }
    for group_id in sorted(stretch.groups)[:GROUPS]:
        _group(window, stretch, group_id, taken)


def _group(window: Window, stretch: Stretch, group_id: int, taken: dict[int, float]) -> None:
    result = stretch.groups[group_id]
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
    left = window.end if result.waits else None
    if result.step is not None:
        left = taken.get(result.step, window.end)
    if left is not None and left > window.begin and times["scored"] < window.end:
        window.ready.append((times["scored"], max(times["scored"], left)))


LANES = 12
"""Engines that get a lane of their own."""


def gantt(window: Window | None) -> Figure | None:
    """Draw a lane per engine, and lanes of queue, learner, publications and phases."""
    if window is None or not window.learner:
        return None
    engines = sorted(window.generating)[:LANES]
    marks = bool(window.publications or window.phases)
    heights = [1.0] * (len(engines) + bool(window.ready)) + [0.55] * (1 + marks)
    figure = Figure(figsize=(WIDTH, 0.9 + 0.72 * sum(heights)), layout="constrained")
    grid = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)
    axes = list(grid[:, 0])
    lanes = iter(axes)
    for actor in engines:
        generating, scoring = window.generating[actor], window.scoring.get(actor, [])
        parts = [(generating, BLUE, "generating"), (scoring, ORANGE, "scoring")]
        _area(next(lanes), window, parts, actor)
    if window.ready:
        _area(next(lanes), window, [(window.ready, PURPLE, "ready")], "queue")
    learner: list[Bars] = [(spans, CAUSES[name], 1, name) for name, spans in window.learner.items()]
    _bars(next(lanes), window, learner, "learner")
    if marks:
        published: list[Bars] = [(window.publications, BLUE, 0.8, "weight sync")]
        coloured = zip((GREY, ORANGE, PURPLE), window.phases.items(), strict=False)
        phases: list[Bars] = [(spans, one, 0.55, text[:24]) for one, (text, spans) in coloured]
        _bars(next(lanes), window, published * bool(window.publications) + phases, "weights")
    for axis in axes:
        axis.set_xlim(0, window.end - window.begin)
        axis.grid(visible=True, axis="x")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(f"seconds, learner steps {window.first} to {window.last}")
    return figure


def _area(axis: Axes, window: Window, parts: list[tuple[list[Span], str, str]], label: str) -> None:
    """Draw how many groups are at work at every moment, one part on the other."""
    times, counts = _counts([spans for spans, _, _ in parts], window)
    base = [0] * len(times)
    for (_, colour, name), count in zip(parts, counts, strict=True):
        top = [a + b for a, b in zip(base, count, strict=True)]
        axis.fill_between(
            times, base, top, step="post", color=colour, alpha=0.75, linewidth=0, label=name
        )
        base = top
    axis.set_ylim(0, max([*base, 1]) * 1.15)
    axis.locator_params(axis="y", integer=True, nbins=3)
    _label(axis, label)


def _counts(kinds: list[list[Span]], window: Window) -> tuple[list[float], list[list[int]]]:
    """Count each kind's open spans from each moment on; moments from the window's beginning."""
    changes = sorted(
        [(begin, kind, 1) for kind, spans in enumerate(kinds) for begin, _ in spans]
        + [(end, kind, -1) for kind, spans in enumerate(kinds) for _, end in spans]
    )
    times, counts, now = [window.begin], [[0] for _ in kinds], [0] * len(kinds)
    for moment, kind, change in changes:
        now[kind] += change
        times.append(min(max(moment, window.begin), window.end))
        for index, value in enumerate(now):
            counts[index].append(value)
    times.append(window.end)
    for index in range(len(kinds)):
        counts[index].append(counts[index][-1])
    return [moment - window.begin for moment in times], counts


def _bars(axis: Axes, window: Window, parts: list[Bars], label: str) -> None:
    for spans, colour, alpha, name in parts:
        bars, text = (
            [(begin - window.begin, end - begin) for begin, end in spans],
            name.replace("_", " "),
        )
        axis.broken_barh(bars, (0, 1), color=colour, alpha=alpha, label=text, linewidth=0)
    axis.set_yticks([])
    _label(axis, label)


def _label(axis: Axes, text: str) -> None:
    axis.set_ylabel(text, rotation=0, ha="right", va="center")
    axis.legend(ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5), borderaxespad=0.3)
