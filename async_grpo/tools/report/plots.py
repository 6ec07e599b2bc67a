"""The report's pictures of a run's course: learning, lag, lengths, clipping, tokens and time.

Runs in: the report's process, never in the driver. Hides matplotlib and its output. A function
gives a Figure, or None where the run has nothing to show for it; `as_svg` and `write_png` set the
colours around it. Invariant: a picture in the page has no colour of its own for text and frames, so
that it follows the page from light to dark; the PNG is on white.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from async_grpo.replay.token_ledger import PLACES
from async_grpo.runtime.time_ledger import ENGINE_PREFIX, spent
from async_grpo.tools.report.data import RunData

WIDTH = 9.6
"""Inches of every figure."""
LAGS = ("#3b82c4", "#c79a1b", "#6a9a2d", "#8a63b8", "#d9722e", "#c9404f", "#2aa198", "#5f6673")
"""By lag bucket, from 0 on."""
BLUE, GREEN, ORANGE = "#3b82c4", "#3f9b62", "#d9722e"
RED, PURPLE, GREY = "#c9404f", "#8a63b8", "#8b949e"
SPARSE = 0.25
"""Share of the steps below which points are not joined: a line would invent what lies between."""
_COMPONENT, _ENDED = "rollout/reward/", "rollout/ended/"
FATES = {
    "trained": GREEN,
    "masked": "#9cc46b",
    "rejected": PURPLE,
    "expired": ORANGE,
    "failed": RED,
    "refused": "#b56576",
    "unused": GREY,
    "held": "#b7bec6",
    "baseline": BLUE,
    "probes": "#79aad9",
    "evaluated": "#2aa198",
    "regenerated": "#c79a1b",
    "lost": "#7d3c4a",
    "skipped": "#d0d5da",
}
CAUSES = {
    "working": GREEN,
    "idle": ORANGE,
    "blocked": ORANGE,
    "weight_sync": BLUE,
    "paused": "#79aad9",
    "checkpointing": PURPLE,
    "verifying": "#c79a1b",
    "environment": "#8a6d3b",
    "evaluating": "#2aa198",
    "restarting": RED,
    "other": GREY,
    "wait": ORANGE,
    "train": GREEN,
}


def learning(data: RunData) -> Figure | None:
    """Draw the reward per step, and held-out accuracy with its interval."""
    steps, scores = data.series("rollout/score")
    kept = [row for row in data.evaluations if "eval/accuracy_greedy" in row.values]
    if not steps and not kept:
        return None
    figure, axes = _figure(2 if steps and kept else 1)
    if steps:
        axes[0].plot(steps, scores, color=BLUE, alpha=0.25, linewidth=0.8)
        axes[0].plot(steps, smooth(scores), color=BLUE, linewidth=1.8)
        axes[0].set_ylabel("reward (trained groups)")
    if kept:
        _accuracy(axes[-1], data)
    return figure


def _accuracy(axis: Axes, data: RunData) -> None:
    found = {name for row in data.evaluations for name in row.values if _is_sampled(name)}
    names = ["eval/accuracy_greedy", *(sorted(_tasks(data)) or sorted(found, key=_rank))[:5]]
    colours = (GREEN, ORANGE, PURPLE, BLUE, RED, GREY)
    for colour, name in zip(colours, names, strict=False):
        known = [row for row in data.evaluations if name in row.values]
        steps, values = [row.step for row in known], [row.values[name] for row in known]
        label = _evaluated(name)
        axis.plot(steps, values, "o--", color=colour, markersize=4, linewidth=1.0, label=label)
        low, high = f"{name}/low", f"{name}/high"
        for row in known:
            if low in row.values and high in row.values:
                ends = [row.values[low], row.values[high]]
                axis.plot([row.step] * 2, ends, color=colour, linewidth=3.5, alpha=0.35)
    axis.set_ylim(-0.03, 1.03)
    axis.set_ylabel("held-out accuracy")
    axis.legend(ncols=6, loc="lower right")


def _tasks(data: RunData) -> set[str]:
    """Return the names of the accuracies of several tasks."""
    names = (name for row in data.evaluations for name in row.values)
    return {name for name in names if name.startswith("eval/task/") and name.endswith("_greedy")}


def _evaluated(name: str) -> str:
    """Name an evaluation as a reader does: greedy, pass@4, a task."""
    if name.startswith("eval/task/"):
        return name.split("/")[2]
    return name.removeprefix("eval/").replace("accuracy_", "").replace("pass_at_", "pass@")


def _is_sampled(name: str) -> bool:
    passed = name.startswith(("eval/pass@", "eval/pass_at_"))
    return name == "eval/accuracy_sampled" or (passed and not name.endswith(("/low", "/high")))


def _rank(name: str) -> tuple[int, str]:
    digits = "".join(filter(str.isdigit, name))
    return int(digits or 0), name


def rewards(data: RunData) -> Figure | None:
    """Draw reward components, and the shares of groups and responses that teach little."""
    names = {key for row in data.rows for key in row.values if key.startswith(_COMPONENT)}
    components = {name.removeprefix(_COMPONENT): name for name in sorted(names)[: len(LAGS)]}
    shares = {
        "groups all right": "rollout/all_right_groups",
        "groups all wrong": "rollout/all_wrong_groups",
        "responses cut off": "rollout/truncated",
    }
    parts = [(components, "reward component"), (shares, "share")]
    parts = [
        (curves, label)
        for curves, label in parts
        if any(data.series(name)[0] for name in curves.values())
    ]
    if not parts:
        return None
    figure, axes = _figure(len(parts))
    for axis, (curves, label) in zip(axes, parts, strict=True):
        _curves(axis, data, curves)
        axis.set_ylabel(label)
        _legend_above(axis)
    return figure


def episodes(data: RunData) -> Figure | None:
    """Draw turns per episode, why episodes ended, and what share of their tokens was sampled."""
    if not data.series("rollout/turns")[0]:
        return None
    ends = {name for row in data.rows for name in row.values if name.startswith(_ENDED)}
    figure, axes = _figure(2)
    _curves(axes[0], data, {"mean": "rollout/turns", "most": "rollout/turns_max"})
    axes[0].set_ylabel("turns of an episode")
    shares = {name.removeprefix(_ENDED): name for name in sorted(ends)[: len(LAGS) - 1]}
    _curves(axes[1], data, {"tokens sampled": "rollout/sampled_share"} | shares)
    axes[1].set_ylabel("share")
    for axis in axes:
        _legend_above(axis)
    return figure


def throughput(data: RunData) -> Figure | None:
    """Draw tokens per second, and the parts of a learner step's time."""
    steps, speeds = data.series("train/tokens_per_s")
    times = {"whole": "time/step", "waiting": "time/wait", "training": "time/train"}
    if not steps:
        return None
    figure, axes = _figure(2)
    axes[0].plot(steps, speeds, color=BLUE, alpha=0.25, linewidth=0.8)
    axes[0].plot(steps, smooth(speeds), color=BLUE, linewidth=1.6)
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("response tokens/s")
    _curves(axes[1], data, times)
    axes[1].set_ylim(bottom=0)
    axes[1].set_ylabel("seconds per step")
    _legend_above(axes[1])
    return figure


def lag_histogram(data: RunData) -> Figure | None:
    """Draw the share of the trained tokens by lag, over the steps."""
    buckets = data.buckets("token_share")
    names = {f"staleness {one}": f"train/staleness_{one}/token_share" for one in buckets}
    figure = _stacked(data, names, list(map(lag_colour, buckets)), "share of trained tokens")
    if figure is not None:
        figure.axes[0].set_ylim(0, 1)
    return figure


def pass_rates(data: RunData) -> Figure | None:
    """Draw how many problems have which pass rate, over the steps (`replay.difficulty`)."""
    names = {f"{20 * n} to {20 * n + 20} %": f"replay/pass_rate/{n}" for n in range(5)}
    return _stacked(data, names, [RED, ORANGE, "#c79a1b", "#9cc46b", GREEN], "problems")


def _stacked(data: RunData, names: dict[str, str], colours: list[str], what: str) -> Figure | None:
    rows = [row for row in data.rows if any(name in row.values for name in names.values())]
    if not rows:
        return None
    figure, [axis] = _figure(1)
    layers = [smooth([row.values.get(name, 0.0) for row in rows]) for name in names.values()]
    steps = [row.step for row in rows]
    if len(steps) == 1:
        steps, layers = [steps[0], steps[0] + 1], [layer * 2 for layer in layers]
    axis.stackplot(steps, layers, colors=colours, labels=list(names), alpha=0.9)
    axis.set_xlim(steps[0], steps[-1])
    axis.set_ylabel(what)
    _legend_above(axis)
    return figure


def length_by_lag(data: RunData) -> Figure | None:
    """Draw the mean response length by lag bucket."""
    figure, [axis] = _figure(1)
    if not _by_lag(axis, data, "sequence_length"):
        return None
    steps, lengths = data.series("rollout/response_length")
    axis.plot(steps, smooth(lengths), color=GREY, linewidth=1.2, linestyle="--", label="all")
    axis.set_ylabel("tokens per response")
    _legend_above(axis)
    return figure


def clip_and_ess(data: RunData) -> Figure | None:
    """Draw the share of clipped tokens and the effective sample size, by lag bucket."""
    figure, axes = _figure(2)
    clipped, sizes = _by_lag(axes[0], data, "pg_clipfrac"), _by_lag(axes[1], data, "ess")
    if not clipped and not sizes:
        return None
    axes[0].set_ylabel("clipped tokens")
    axes[0].yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    axes[1].set_ylim(min(0.9, axes[1].get_ylim()[0]), 1.005)  # 0.996 is not far from 1
    axes[1].set_ylabel("effective sample size")
    _legend_above(axes[0])
    return figure


def health(data: RunData) -> Figure | None:
    """Draw loss, entropy, gradient norm and KL between updates."""
    labels = {
        "train/loss": "loss",
        "train/entropy": "entropy (nats)",
        "train/grad_norm": "gradient norm",
        "train/approx_kl": "KL of the updates",
    }
    shown = [(label, *data.series(name)) for name, label in labels.items() if data.series(name)[0]]
    if not shown:
        return None
    figure = Figure(figsize=(WIDTH, 2.5), layout="constrained")
    all_axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for axis, (label, steps, values) in zip(all_axes, shown, strict=True):
        axis.plot(steps, values, color=PURPLE, alpha=0.25, linewidth=0.8)
        axis.plot(steps, smooth(values), color=PURPLE, linewidth=1.6)
        axis.set_title(label)
        axis.set_xlabel("learner step")
        axis.grid(visible=True)
    return figure


def goodput(data: RunData) -> Figure | None:
    """Draw what became of everything generated, and where learner and engines spent time."""
    unit, fates = tokens_by_fate(data)
    bars = [(unit, fates, FATES)] if fates else []
    bars += [(who, times, CAUSES) for who, times in times_by_cause(data) if sum(times.values()) > 0]
    if not bars:
        return None
    figure = Figure(figsize=(WIDTH, 0.3 + 0.72 * len(bars)), layout="constrained")
    all_axes = figure.subplots(len(bars), 1, squeeze=False)[:, 0]
    for axis, (label, parts, colours) in zip(all_axes, bars, strict=True):
        _bar(axis, label, parts, colours)
    return figure


def tokens_by_fate(data: RunData) -> tuple[str, dict[str, float]]:
    """Sum response tokens (or, where not counted, groups) by fate; the unit first."""
    tokens = {fate: count for fate in PLACES if (count := data.totals.get(f"goodput/{fate}"))}
    groups = {fate: count for fate in FATES if (count := data.totals.get(f"replay/{fate}"))}
    return ("tokens", tokens) if tokens else ("groups", groups)


def times_by_cause(data: RunData) -> list[tuple[str, dict[str, float]]]:
    """Return (who, cause -> seconds) of learner and engines, in the order of `CAUSES`."""
    learner = data.learner_time.seconds or {  # an older run: sums over the rows that are kept
        cause: sum(row.values.get(f"time/{cause}", 0.0) for row in data.rows)
        for cause in ("train", "wait", "weight_sync")
    }
    both = {"learner time": learner, "engine time": spent({}, data.totals, ENGINE_PREFIX)}
    return [
        (who, {cause: times[cause] for cause in dict.fromkeys([*CAUSES, *times]) if cause in times})
        for who, times in both.items()
    ]


def _bar(axis: Axes, label: str, parts: dict[str, float], colours: dict[str, str]) -> None:
    whole, left = sum(parts.values()), 0.0
    for name, value in parts.items():
        share = value / whole
        if share >= 0.0005:  # below, its number would be 0.0 %
            colour, text = colours.get(name, GREY), f"{name.replace('_', ' ')} {share:.1%}"
            axis.barh(0, share, left=left, height=0.8, color=colour, label=text)
        left += share
    axis.set_xlim(0, 1)
    axis.set_yticks([0], [label])
    axis.set_xticks([])
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)
    axis.legend(ncols=7, loc="upper left", bbox_to_anchor=(0, -0.02), borderaxespad=0)


def _by_lag(axis: Axes, data: RunData, name: str) -> bool:
    """Draw a line per lag bucket, or dots where few steps have it. Return whether one was drawn."""
    buckets = data.buckets(name)
    for bucket in buckets:
        steps, values = data.series(f"train/staleness_{bucket}/{name}")
        sparse = len(steps) < max(5, SPARSE * len(data.rows))
        axis.plot(
            steps,
            values if sparse else smooth(values),
            "o" if sparse else "-",
            linewidth=1.6,
            markersize=3,
            color=lag_colour(bucket),
            label=f"staleness {bucket}",
        )
    return bool(buckets)


def _curves(axis: Axes, data: RunData, names: dict[str, str]) -> None:
    """Draw a smoothed line for each (label, metric) that the run has."""
    for colour, (label, name) in zip(LAGS, names.items(), strict=False):
        steps, values = data.series(name)
        if steps:
            axis.plot(steps, smooth(values), color=colour, linewidth=1.6, label=label)


def lag_colour(bucket: str) -> str:
    """Choose the colour of a lag bucket: 0, 1, 2, 3-4, 5-8, ..."""
    low = int(bucket.partition("-")[0])
    return LAGS[min(len(LAGS) - 1, low if low <= 2 else 2 + int(math.log2(low - 1)))]


def smooth(values: Sequence[float]) -> list[float]:
    """Average about a thirtieth of the series around each value."""
    reach, sums = len(values) // 60, [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    count = len(values)
    spans = [(max(0, at - reach), min(count, at + reach + 1)) for at in range(count)]
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in spans]


def _figure(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH, 2.9 if count == 1 else 2.2 * count), layout="constrained")
    axes = list(figure.subplots(count, 1, squeeze=False, sharex=True)[:, 0])
    for axis in axes:
        axis.grid(visible=True)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[-1].set_xlabel("learner step")
    return figure, axes


def _legend_above(axis: Axes) -> None:
    axis.legend(ncols=8, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)


_INK, _FAINT = "#010203", "#040506"
"""Colours that nothing else has; the page replaces them by its own."""
_PNG_INK, _PNG_FAINT = "#24292f", "#d8dee4"


def _style(ink: str, faint: str) -> dict[str, object]:
    inked = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    transparent = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    return {
        **dict.fromkeys((*inked, "xtick.labelcolor", "ytick.labelcolor"), ink),
        **dict.fromkeys(("axes.edgecolor", "grid.color"), faint),
        **dict.fromkeys(transparent, "none"),
        **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 9.0),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
        "grid.linewidth": 0.6,
        "axes.linewidth": 0.8,
        "axes.axisbelow": True,
        "legend.fontsize": 8.0,
        "legend.handlelength": 1.0,
        "legend.handletextpad": 0.4,
        "legend.columnspacing": 1.2,
        "svg.fonttype": "none",
    }


def as_svg(draw: Callable[[], Figure | None], *, name: str) -> str | None:
    """Draw the picture as an element of a page; None where there is nothing to draw."""
    with mpl.rc_context(_style(_INK, _FAINT) | {"svg.hashsalt": name}):
        figure = draw()
        if figure is None:
            return None
        out = io.StringIO()
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=metadata)
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = text.replace(_INK, "var(--ink)").replace(_FAINT, "var(--faint)")
    # Names inside a picture must differ from those in another one.
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r'font: [^;"]*?(\d+(?:\.\d+)?px) [^;"]*', r"font: \1 var(--font)", text)
    return re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>',
        rf'<svg xmlns:xlink="http://www.w3.org/1999/xlink" \1 role="img" aria-label="{name}">',
        text,
        count=1,
    )


def write_png(draw: Callable[[], Figure | None], path: Path) -> bool:
    """Write the picture; return whether there was one."""
    with mpl.rc_context(_style(_PNG_INK, _PNG_FAINT)):
        figure = draw()
        if figure is None:
            return False
        figure.savefig(path, format="png", dpi=130, facecolor="white")
    return True
