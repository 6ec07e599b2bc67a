"""The panel of a run: what `progress` knows, as lines for a terminal of any size.

Runs in: the driver and the status command. Hides layout. Invariants: what is not known has no
place, so there is no empty frame; no line is longer than the terminal is wide, and there are no
more lines than it has; no text from a run can move the cursor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from async_grpo.runtime.text import visible

WIDEST_TEXT, WIDEST = 110, 170
"""Columns: longer sentences are hard to read; bar and curves use the room of a wide terminal."""
LABEL_CELLS, BAR_CELLS, CURVE_CELLS, HEADLINE_CELLS = 12, 20, 64, 60
"""Cells of a label, least of the bar, most of a curve; what the headline has beside its bar."""
COMPACT_ROWS, ROOMY_ROWS = 8, 16
"""A terminal with fewer rows gets a single line; one with at least so many, long lines in full."""
_BARS = "▁▂▃▄▅▆▇█"
_LINES = {
    "tokens/s": (
        ("tokens_generated_per_s", "{rate} generated"),
        ("tokens_trained_per_s", "{rate} trained"),
        ("rollout/response_length", "length {:.1f}"),
        ("rollout/truncated", "cut off {:.0%}"),
    ),
    "episodes": (
        ("rollout/turns", "{:.1f} turns"),
        ("rollout/turns_max", "at most {:.0f}"),
        ("rollout/sampled_share", "sampled {:.0%}"),
        ("rollout/environment_s", "{:.2g} s in environments"),
    ),
    "queue": (
        ("replay/ready", "{:.0f} ready"),
        ("replay/in_flight", "{:.0f} in flight"),
        ("replay/limit", "limit {:.0f}"),
        ("replay/capacity", "of {:.0f} groups"),
        ("train/staleness_mean", "staleness mean {:.2f}"),
        ("train/staleness_max", "max {:.0f}"),
    ),
    "idle": (
        ("learner_idle", "learner {:.0%}"),
        ("engine_idle", "engines {:.0%}"),
        ("cluster/rollout_actors", "actors up {:.0f}"),
        ("cluster/restarts", "{:.0f} actors restarted"),
        ("cluster/learner_restarts", "{:.0f} learner restarts"),
        ("replay/restarts", "{:.0f} queue restarts"),
    ),
    "weights": (
        ("replay/live_version", "version {:.0f} live for {age:.0f} s"),
        ("weights/until_live_s", "{:.2f} s to sync"),
        ("seconds_per_step", "{:.2f} s per step"),
    ),
}
"""Metrics of each line and their text."""


def sparkline(values: Sequence[float], cells: int) -> str:
    """Draw the values as at most `cells` bars, lowest to highest; neighbours are averaged."""
    values = [value for value in values if math.isfinite(value)]
    if not values or cells < 1:
        return ""
    count = min(cells, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def duration(seconds: float) -> str:
    """Write seconds as 1:05, 12:05 or 3:12:05."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rate(value: float) -> str:
    """Shorten a number: 1234 -> 1.2k."""
    for unit, letter in ((1e6, "M"), (1000, "k")):
        if value >= unit:
            return f"{value / unit:.1f}{letter}"
    return f"{value:.0f}"


def known(
    metrics: Mapping[str, float], columns: Iterable[tuple[str, str]], *, age: float = 0.0
) -> list[str]:
    """Write those of the columns, each a metric and its text, that have a value; restarts once
    there were some. age: seconds since the newest publication.
    """
    return [
        text.format(value, rate=rate(value), age=age)
        for key, text in columns
        if math.isfinite(value := metrics.get(key, math.nan))
        and (value or not key.endswith("restarts"))
    ]


def panel(
    facts: Mapping[str, Any], *, width: int, height: int, now: float, title: str = ""
) -> Group | Text:
    """Draw the panel for a terminal of `width` x `height`, or one line where it is too low."""
    wide, width = max(1, min(width, WIDEST)), max(1, min(width, WIDEST_TEXT))
    if height < COMPACT_ROWS:
        return _fit(Text(headline(facts, now, bar=0)), width)
    lines = [_fit(Text(visible(title), style="dim"), width)] if title else []
    bar = 0 if width < 60 else max(BAR_CELLS, wide - HEADLINE_CELLS)
    lines.append(_fit(Text(headline(facts, now, bar=bar), style="bold"), wide))
    for label, text, style in rows(facts, now, cells=max(4, min(CURVE_CELLS, (wide - 44) // 2))):
        room = max(1, (wide if label == "reward" else width) - LABEL_CELLS)
        folds = label == "bottleneck" or (label != "reward" and height >= ROOMY_ROWS)
        parts = Text(visible(text), style=style).wrap(
            Console(width=room), room, no_wrap=not folds, overflow="fold" if folds else "ellipsis"
        )
        for head, part in zip_longest([label], parts, fillvalue=""):
            lines.append(_fit(Text.assemble((f"{head:{LABEL_CELLS}}", "dim"), part), wide))
    return Group(*lines[: height - 1])


def headline(facts: Mapping[str, Any], now: float, *, bar: int) -> str:
    """Say how far the run is; bar: cells of its bar."""
    step, total, phase = facts["step"], facts["total"], facts["phase"]
    parts = []
    if total:
        parts.append(f"step {step}/{total}")
        if bar:
            done = round(bar * min(1.0, step / total))
            parts.append("━" * done + "─" * (bar - done))
    if step and phase == "training":
        if (eta := facts.get("eta_s")) is not None and "exit_code" not in facts:
            parts.append(f"ETA {duration(eta)}" if step < total else "done")
    elif facts.get("exit_code") != 0:
        parts.append(f"{visible(phase)} {duration(now - facts['phase_since'])}")
    parts.append(f"elapsed {duration(now - facts['started'])}")
    return "  ".join(parts)


def rows(facts: Mapping[str, Any], now: float, *, cells: int) -> Iterator[tuple[str, str, str]]:
    """Yield (label, text, style) of the lines for which something is known. cells: of a curve."""
    metrics, evaluations = facts["metrics"], facts["evaluations"]
    curves = []
    if facts["reward"]:
        last = metrics.get("rollout/score", facts["reward"][-1])
        curves.append(f"{sparkline(facts['reward'], cells)} {last:.2f}")
    if evaluations:
        step, accuracy = evaluations[-1]
        curve = sparkline([value for _, value in evaluations], cells // 2)
        curves.append(f"eval {curve} {accuracy:.1%} at step {step}")
    if curves:
        yield "reward" if facts["reward"] else "", "   ".join(curves), "green"
    age = max(0.0, now - (facts["published_at"] or now))
    for label, columns in _LINES.items():
        if parts := known(metrics, columns, age=age):
            yield label, "   ".join(parts), ""
    if "quiet" in facts:
        yield "quiet", f"for {duration(now - facts['step_at'])}: {facts['quiet']}", "yellow"
    if bottleneck := facts["bottleneck"]:
        quiet = bottleneck["kind"] in ("balanced", "unclear")
        yield "bottleneck", bottleneck["text"], "" if quiet else "yellow"


def _fit(line: Text, width: int) -> Text:
    """Cut the line at `width` columns."""
    line.truncate(width, overflow="ellipsis")
    return line
