"""The pictures of the pages, drawn into docs/assets.

    python docs/generate/pictures.py                         draws all of them
    python docs/generate/pictures.py --runs SYNC ASYNC       takes the timeline from two runs first

Diagrams are drawn from the text below; curves and timelines from benchmarks/results. The timeline
is that of `benchmarks/tails.yaml` (model 14M, --model of benchmarks.throughput writes it) with
`replay.max_staleness` 0 and 2.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).resolve().parents[2]
ASSETS, RESULTS = ROOT / "docs" / "assets", ROOT / "benchmarks" / "results"
TIMELINE, STALENESS = RESULTS / "timeline.json", RESULTS / "staleness_losses.json"
BLUE, ORANGE, GREEN, PURPLE, GREY, INK = (
    "#3b75af",
    "#e08a2e",
    "#4d9a5b",
    "#8568a8",
    "#9aa3ad",
    "#20262c",
)
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "async_grpo",  # the same bytes each time
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Make a drawing whose units are tenths of an inch."""
    figure = Figure(figsize=(width / 10, height / 10))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_xlim(0, width)
    axis.set_ylim(0, height)
    axis.axis("off")
    return figure, axis


def box(axis: Axes, at: tuple[float, float, float, float], text: str, colour: str) -> None:
    """Draw a box at x, y with width, height; the first line of its text is bold."""
    x, y, width, height = at
    axis.add_patch(
        FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0,rounding_size=1",
            facecolor=f"{colour}22", edgecolor=colour, linewidth=1.4,
        )
    )  # fmt: skip
    head, _, rest = text.partition("\n")
    lines = rest.count("\n") + 1 if rest else 0
    middle, top = x + width / 2, y + height / 2 + 0.8 * lines
    axis.text(middle, top, head, ha="center", va="center", weight="bold", size=10)
    if rest:
        axis.text(middle, top - 1.2, rest, ha="center", va="top", size=8.5, linespacing=1.25)


def arrow(
    axis: Axes,
    begin: tuple[float, float],
    end: tuple[float, float],
    text: str = "",
    *,
    colour: str = INK,
    at: tuple[float, float] | None = None,
    bend: float = 0.0,
    side: str = "center",
) -> None:
    """Draw an arrow, with a text at a place of its own or in its middle."""
    axis.add_patch(
        FancyArrowPatch(
            begin, end, arrowstyle="-|>", mutation_scale=11, color=colour, linewidth=1.4,
            connectionstyle=f"arc3,rad={bend}", shrinkA=1, shrinkB=1,
        )
    )  # fmt: skip
    if text:
        x, y = at or ((begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2 + 1.4)
        axis.text(x, y, text, ha=side, va="center", size=8.5, color=colour)


def architecture() -> Figure:
    """Which process does what, and what goes from one to the other."""
    figure, axis = canvas(86, 42)
    for shift in (1.6, 0.8, 0.0):
        place = (2 + shift, 10 + shift, 22, 18)
        axis.add_patch(
            FancyBboxPatch(
                place[:2], *place[2:], boxstyle="round,pad=0,rounding_size=1",
                facecolor="white", edgecolor=BLUE, linewidth=1.0,
            )
        )  # fmt: skip
    box(
        axis, (2, 10, 22, 18),
        "Rollout actor x N\nvLLM engine\nverifier processes\nenvironments, agents", BLUE,
    )  # fmt: skip
    box(axis, (34, 16, 18, 12), "Replay queue\nadmission, order,\nstaleness, journal", PURPLE)
    box(axis, (62, 10, 22, 18), "Learner rank x M\nDeepSpeed\nloss per token\ncheckpoints", ORANGE)
    box(
        axis, (34, 1.5, 18, 9),
        "Driver\nplans each learner step,\nrestarts what dies", GREEN,
    )  # fmt: skip
    arrow(axis, (25.6, 25), (34, 25), "groups", colour=BLUE)
    arrow(axis, (34, 19.5), (25.6, 19.5), "tickets", colour=PURPLE)
    arrow(axis, (52, 25), (62, 25), "batches", colour=PURPLE)
    arrow(axis, (43, 16), (43, 10.5), "metadata", colour=PURPLE, at=(44, 13.2), side="left")
    arrow(axis, (52, 6), (66, 10), "updates", colour=GREEN, at=(58.5, 6.2), side="left")
    arrow(axis, (73, 28), (73, 37), colour=ORANGE)
    arrow(axis, (73, 36.6), (14, 36.6), "weight sync: NCCL, CUDA IPC or shared memory",
          colour=ORANGE, at=(43, 38.4))  # fmt: skip
    arrow(axis, (14, 37), (14, 30), colour=ORANGE)
    axis.text(43, 32.2, "generation and training overlap", ha="center", size=9, style="italic")
    return figure


def group_life() -> Figure:
    """Draw the states of a group, and where one is dropped."""
    figure, axis = canvas(90, 34)
    states = [
        (1, "waiting", "for a ticket", GREY),
        (20, "in_flight", "an engine\nsamples it", BLUE),
        (39, "ready", "scored, and\nin the queue", PURPLE),
        (57, "training", "in the batch of\na learner step", ORANGE),
        (76, "trained", "step done", GREEN),
    ]
    for x, name, text, colour in states:
        box(axis, (x, 19, 12.5, 10), f"{name}\n{text}", colour)
    for (x, *_), (following, *_), text in zip(
        states, states[1:], ("ticket", "result", "batch", ""), strict=False
    ):
        arrow(axis, (x + 12.5, 24), (following, 24), text)
    for x, name, text, begin in (
        (6, "failed", "deadline, verifier or actor\nfailed max_attempts times", 24),
        (29, "rejected", "filter_groups: no\nlearning signal", 28.5),
        (52, "expired", "older than max_staleness\n(on_stale: expire)", 46),
    ):
        box(axis, (x, 1.5, 20, 8.5), f"{name}\n{text}", GREY)
        arrow(axis, (begin, 19), (x + 10, 10), colour=GREY)
    arrow(axis, (25, 29), (8, 29), "issued again, up to max_attempts times", bend=0.28,
          at=(17.5, 33), colour=BLUE)  # fmt: skip
    return figure


def staleness_bound() -> Figure:
    """Which versions a learner step may train, with max_staleness 2."""
    figure, axis = canvas(86, 30)
    bound, steps = 2, 6
    for step in range(1, steps + 1):
        x = 15 + (step - 1) * 10
        box(axis, (x, 21, 8.5, 5), f"step {step}", ORANGE)
        axis.text(x + 8.6, 18.6, f"v{step}", size=8.5, ha="center", color=ORANGE)
        axis.plot([x + 8.6, x + 8.6], [3, 17.6], color=GREY, linewidth=0.7, linestyle=":")
    axis.text(7, 23.5, "learner", ha="center", va="center", weight="bold")
    axis.text(7, 18.6, "weights", ha="center", va="center", color=ORANGE)
    for row, (begin, end, oldest, trained, versions) in enumerate(
        ((34.5, 51, 2, 5, "versions 2, 3"), (44.5, 52, 3, 4, "version 3"),
         (25, 51, 1, 6, "versions 1, 2, 3"))
    ):  # fmt: skip
        y, age = 13.5 - row * 4.6, trained - 1 - oldest
        axis.add_patch(
            FancyBboxPatch(
                (begin, y), end - begin, 3.2, boxstyle="round,pad=0,rounding_size=1",
                facecolor=f"{GREY if age > bound else BLUE}22",
                edgecolor=GREY if age > bound else BLUE,
            )
        )  # fmt: skip
        axis.text((begin + end) / 2, y + 1.6, versions, ha="center", va="center", size=8.5)
        text = f"trained in step {trained}: staleness {age}"
        text += f" > {bound}: expire or mask" if age > bound else f" ≤ {bound}"
        axis.text(end + 1, y + 1.6, text, va="center", size=8.5)
    axis.text(7, 15.1, "responses", ha="center", va="center", weight="bold")
    axis.text(39, 0.9, "staleness of a token = step − 1 − version that sampled it", ha="center",
              size=9, style="italic")  # fmt: skip
    return figure


def placements() -> Figure:
    """One GPU shared, one node split, two nodes."""
    figure, axis = canvas(90, 34)

    def gpu(x: float, y: float, text: str, colour: str, width: float = 5.6) -> None:
        box(axis, (x, y, width, 5.4), text, colour)

    for x, width, title, text in (
        (1, 18, "colocated", "one GPU: engine and learner\nshare its memory; CUDA IPC"),
        (22, 27, "split", "one node: engines and learner ranks\non GPUs of their own; NCCL"),
        (52, 37, "two nodes", "engines on both nodes, the learner's ranks\non one; NCCL"),
    ):
        axis.add_patch(
            FancyBboxPatch(
                (x, 8), width, 20, boxstyle="round,pad=0,rounding_size=1",
                facecolor="#f6f7f8", edgecolor=GREY, linewidth=1,
            )
        )  # fmt: skip
        axis.text(x + width / 2, 31, title, ha="center", weight="bold")
        axis.text(x + width / 2, 4, text, ha="center", va="center", size=8.5)
    gpu(5, 18, "engine", BLUE, 10)
    gpu(5, 11.5, "rank 0", ORANGE, 10)
    for index in range(4):
        gpu(23 + index * 6.4, 18, f"E{index}", BLUE)
        gpu(23 + index * 6.4, 11.5, f"R{index}", ORANGE)
    axis.plot([70.5, 70.5], [8, 28], color=GREY, linewidth=1)
    for index in range(2):
        for row, name in ((18, "E"), (11.5, "E")):
            number = index + (2 if row == 11.5 else 0)
            gpu(54 + index * 7.6, row, f"{name}{number}", BLUE)
        gpu(73 + index * 7.6, 18, f"R{index}", ORANGE)
        gpu(73 + index * 7.6, 11.5, f"E{index + 4}", BLUE)
    axis.text(61, 26, "node 0", ha="center", size=8.5)
    axis.text(80, 26, "node 1", ha="center", size=8.5)
    return figure


def weight_sync() -> Figure:
    """Who asks whom, and when an engine stands still."""
    figure, axis = canvas(86, 46)
    lanes = (("driver", 8, GREEN), ("learner ranks", 30, ORANGE), ("replay queue", 52, PURPLE),
             ("engines", 74, BLUE))  # fmt: skip
    for name, x, colour in lanes:
        box(axis, (x - 7, 40.5, 14, 4), name, colour)
        axis.plot([x, x], [2, 40.5], color=colour, linewidth=1, linestyle="--")
    messages: Sequence[tuple[float, int, int, str, str]] = (
        (37.0, 0, 1, "stage version v", GREEN),
        (33.0, 1, 1, "a copy is made; the next\nlearner step may begin", ORANGE),
        (28.5, 0, 3, "receive version v", GREEN),
        (24.5, 3, 3, "pause", BLUE),
        (20.5, 1, 3, "weights, in the announced names and shapes", ORANGE),
        (16.5, 3, 3, "check, load, resume;\nKV caches kept or prefilled again", BLUE),
        (11.5, 3, 0, "every engine serves v", BLUE),
        (7.5, 0, 2, "v is live: issue tickets for it", GREEN),
        (3.8, 3, 2, "tokens carry version v", BLUE),
    )
    for y, begin, end, text, colour in messages:
        left, right = lanes[begin][1], lanes[end][1]
        if begin == end:
            turn = -1 if begin == 3 else 1
            axis.plot([left], [y], marker="s", color=colour, markersize=6)
            axis.text(left + turn * 1.6, y, text, size=8.5, va="center",
                      ha="left" if turn > 0 else "right")  # fmt: skip
        else:
            arrow(axis, (left, y), (right, y), text, colour=colour)
    return figure


def timeline() -> Figure:
    """Draw the measured lanes of a synchronous and an asynchronous run, over the same seconds."""
    known = json.loads(TIMELINE.read_text(encoding="utf-8"))
    sides = [(name, known[name]) for name in ("synchronous", "asynchronous")]
    length = min(side["seconds"] for _, side in sides)
    most = max(count for _, side in sides for _, count in side["generating"])
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    axes = figure.subplots(4, 1, sharex=True, height_ratios=(1, 0.6, 1, 0.6))
    for index, (name, side) in enumerate(sides):
        engine, learner = axes[2 * index : 2 * index + 2]
        times, counts = zip(*side["generating"], strict=True)
        engine.fill_between(times, counts, step="post", color=BLUE, alpha=0.75, linewidth=0)
        engine.set_ylim(0, most * 1.1)
        engine.set_ylabel("groups\nsampled", rotation=0, ha="right", va="center")
        engine.set_title(
            f"{name}: {side['steps']} learner steps in {side['seconds']:.1f} s, "
            f"learner idle {side['idle']:.0%}, staleness {side['staleness']:.1f}",
            loc="left", size=10, weight="bold",
        )  # fmt: skip
        for cause, colour in (("train", ORANGE), ("weight_sync", PURPLE)):
            bars = [(begin, end - begin) for begin, end in side[cause]]
            label = (
                {"train": "training", "weight_sync": "weight sync"}[cause] if not index else None
            )
            learner.broken_barh(bars, (0, 1), color=colour, linewidth=0, label=label)
        learner.set_yticks([])
        learner.set_ylabel("learner", rotation=0, ha="right", va="center")
    axes[-1].set_xlim(0, length)
    axes[-1].set_xlabel("seconds")
    figure.legend(loc="outside upper right", ncols=2)
    return figure


def accuracy_over_staleness() -> Figure:
    """Held-out accuracy of each loss at a forced staleness."""
    known: dict[str, Any] = json.loads(STALENESS.read_text(encoding="utf-8"))
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axis = figure.subplots()
    colours = (GREY, BLUE, GREEN, INK, "#c2a13a", "#5aa7a7", ORANGE, PURPLE)
    for (name, points), colour in zip(known["losses"].items(), colours, strict=True):
        xs, means, widths = zip(*points, strict=True)
        axis.errorbar(range(len(xs)), means, yerr=widths, label=name, color=colour, capsize=2,
                      marker="o", markersize=3.5, linewidth=1.4)  # fmt: skip
    axis.set_xticks(range(len(known["staleness"])), [str(k) for k in known["staleness"]])
    axis.set_ylim(82, 100)
    axis.set_xlabel("staleness, learner steps")
    axis.set_ylabel("held-out accuracy, %")
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


DRAWN: dict[str, Callable[[], Figure]] = {
    "architecture": architecture,
    "group-life": group_life,
    "staleness-bound": staleness_bound,
    "placements": placements,
    "weight-sync": weight_sync,
    "sync-vs-async": timeline,
    "accuracy-over-staleness": accuracy_over_staleness,
}


def measured(run: Path, first: int, last: int) -> dict[str, Any]:
    """Return what the timeline of one run needs, in seconds from its beginning."""
    from async_grpo.tools.report.data import read_run
    from async_grpo.tools.report.gantt import _counts, read_window

    data = read_run(run)
    window = read_window(data, steps=(first, last))
    if window is None:
        raise SystemExit(f"{run} has no learner steps {first} to {last}")
    spans = [span for actor in window.generating.values() for span in actor]
    times, [counts] = _counts([spans], window)
    rows = data.between(first, last)
    seconds = window.end - window.begin
    idle = sum(end - begin for begin, end in window.learner["wait"]) / seconds
    staleness = [row.values["train/staleness_mean"] for row in rows]

    def shown(bars: list[tuple[float, float]]) -> list[list[float]]:
        return [[round(end - window.begin, 3) for end in bar] for bar in bars]

    return {
        "steps": last - first + 1,
        "seconds": round(seconds, 2),
        "idle": round(idle, 3),
        "staleness": round(sum(staleness) / len(staleness), 2),
        "generating": [[round(a, 3), b] for a, b in zip(times, counts, strict=True)],
        "train": shown(window.learner["train"]),
        "weight_sync": shown(window.learner["weight_sync"]),
    }


def main() -> None:
    """Draw every picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", nargs=2, type=Path, metavar=("SYNC", "ASYNC"))
    parser.add_argument("--steps", nargs=2, type=int, default=(5, 12), metavar=("FIRST", "LAST"))
    arguments = parser.parse_args()
    if arguments.runs:
        names = ("synchronous", "asynchronous")
        found = {
            name: measured(run, *arguments.steps)
            for name, run in zip(names, arguments.runs, strict=True)
        }
        TIMELINE.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
    ASSETS.mkdir(exist_ok=True)
    for name, draw in DRAWN.items():
        with rc_context(STYLE):
            draw().savefig(ASSETS / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
