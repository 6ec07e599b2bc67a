"""The report's timeline: engines, queue, learner and publications side by side in a few learner steps.

Runs in: the report's process. Hides how spans become lanes.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from async_grpo.report.plots import BLUE, CAUSES, GREEN, GREY, ORANGE, PURPLE, WIDTH
from async_grpo.report.window import Span, Window

LANES = 12
"""Engines that get a lane of their own."""


def gantt(window: Window | None) -> Figure | None:
    """One lane per engine (groups at work), queue (groups ready), learner (wait, train, publish), publications and phases."""
    if window is None or not window.learner:
        return None
    engines = sorted(window.generating)[:LANES]
    marks = bool(window.publications or window.phases)
    heights = [1.0] * len(engines) + ([1.0] if window.ready else []) + [0.55] + ([0.55] if marks else [])
    figure = Figure(figsize=(WIDTH, 0.9 + 0.72 * sum(heights)), layout="constrained")
    axes = list(figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0])
    lanes = iter(axes)
    for actor in engines:
        _engine(next(lanes), window, actor)
    if window.ready:
        _area(next(lanes), window, [(window.ready, PURPLE, "ready")], "queue")
    _learner(next(lanes), window)
    if marks:
        _marks(next(lanes), window)
    for axis in axes:
        axis.set_xlim(0, window.end - window.begin)
        axis.grid(visible=True, axis="x")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(f"seconds, learner steps {window.first} to {window.last}")
    return figure


def _engine(axis: Axes, window: Window, actor: str) -> None:
    parts = [(window.generating[actor], BLUE, "generating"), (window.scoring.get(actor, []), ORANGE, "scoring")]
    _area(axis, window, parts, actor)


def _area(axis: Axes, window: Window, parts: list[tuple[list[Span], str, str]], label: str) -> None:
    """How many groups are under way at every moment, one part on the other."""
    times, counts = _counts([spans for spans, _, _ in parts], window)
    base = [0] * len(times)
    for (_, colour, name), count in zip(parts, counts, strict=True):
        top = [a + b for a, b in zip(base, count, strict=True)]
        axis.fill_between(times, base, top, step="post", color=colour, alpha=0.75, linewidth=0, label=name)
        base = top
    axis.set_ylim(0, max([*base, 1]) * 1.15)
    axis.yaxis.get_major_locator().set_params(integer=True, nbins=3)
    _label(axis, label)


def _counts(kinds: list[list[Span]], window: Window) -> tuple[list[float], list[list[int]]]:
    """Moments from the window's beginning, and for every kind how many of its spans are open from each moment on."""
    changes = sorted(
        [(begin, kind, 1) for kind, spans in enumerate(kinds) for begin, _ in spans] + [(end, kind, -1) for kind, spans in enumerate(kinds) for _, end in spans]
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


def _learner(axis: Axes, window: Window) -> None:
    for cause, spans in window.learner.items():
        axis.broken_barh([(begin - window.begin, end - begin) for begin, end in spans], (0, 1), color=CAUSES[cause], label=cause, linewidth=0)
    axis.set_yticks([])
    _label(axis, "learner")


def _marks(axis: Axes, window: Window) -> None:
    if window.publications:
        spans = [(begin - window.begin, end - begin) for begin, end, _ in window.publications]
        axis.broken_barh(spans, (0, 1), color=GREEN, alpha=0.8, label="publication", linewidth=0)
    for colour, text in zip((GREY, ORANGE, PURPLE), dict.fromkeys(text for _, _, text in window.phases), strict=False):
        spans = [(begin - window.begin, end - begin) for begin, end, name in window.phases if name == text]
        axis.broken_barh(spans, (0, 1), color=colour, alpha=0.55, label=text[:24], linewidth=0)
    axis.set_yticks([])
    _label(axis, "weights")


def _label(axis: Axes, text: str) -> None:
    axis.set_ylabel(text, rotation=0, ha="right", va="center")
    axis.legend(ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5), borderaxespad=0.3)
