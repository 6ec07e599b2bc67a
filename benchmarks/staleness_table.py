"""The tables of `benchmarks.staleness`, from its rows.

Runs in: the process of the benchmark. Cells are means with 95 % intervals over the seeds
(Student's t).
"""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.tables import aim

STUDENT_95 = {
    2: 12.706,
    3: 4.303,
    4: 3.182,
    5: 2.776,
    6: 2.571,
    7: 2.447,
    8: 2.365,
    9: 2.306,
    10: 2.262,
}
"""Two-sided 95 % quantile of Student's t for so many values."""
HARMFUL, HARM_LAG = 0.10, 16
"""What the naive loss must lose at that lag, or the experiment shows nothing."""
BASE = "constant"
"""The loss to which others are compared."""
AIMED, SHARE = ("tis", "topr"), 0.99
"""Losses that are to keep this share of their own accuracy at lag 0."""

Row = dict[str, Any]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval (Student's t)."""
    if len(values) < 2:
        return statistics.mean(values), math.nan
    deviation = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), STUDENT_95[len(values)] * deviation


def cell(values: Sequence[float]) -> str:
    """Mean and 95 % interval in percent."""
    if not values:
        return "-"
    mean, half = interval(values)
    return f"{mean:.1%}" + ("" if math.isnan(half) else f" ± {100 * half:.1f}")


def difference(values: Sequence[float]) -> str:
    """Mean and 95 % interval in points; bold where 0 lies outside."""
    if not values:
        return "-"
    mean, half = interval(values)
    text = f"{100 * mean:+.1f}" + ("" if math.isnan(half) else f" ± {100 * half:.1f}")
    return f"**{text}**" if abs(mean) > half else text


class Runs:
    """The runs of a setting: values by loss, lag and seed."""

    def __init__(self, rows: Sequence[Row], setting: str) -> None:
        self.rows = [row for row in rows if (row["kind"], row["setting"]) == ("run", setting)]
        self.lags = sorted({row["lag"] for row in self.rows})

    def values(self, arm: str, lag: int, what: str = "accuracy") -> dict[int, float]:
        """Seed -> value."""
        return {
            row["seed"]: row["evaluations"][-1] if what == "last" else row[what]
            for row in self.rows
            if (row["arm"], row["lag"]) == (arm, lag)
        }

    def over(self, arm: str, other: str, lag: int) -> list[float]:
        """What an arm has more than another, seed by seed."""
        mine, theirs = self.values(arm, lag), self.values(other, lag)
        return [mine[seed] - theirs[seed] for seed in sorted(mine.keys() & theirs.keys())]

    def shares(self, arm: str, lag: int) -> list[float]:
        """Accuracy of each run as a share of the loss' mean at lag 0."""
        at_0 = list(self.values(arm, 0).values())
        return (
            [one / statistics.mean(at_0) for one in self.values(arm, lag).values()] if at_0 else []
        )


def table(
    rows: Sequence[Row],
    *,
    rates: Mapping[tuple[str, int], float | None],
    arms: Mapping[str, str],
    settings: Mapping[str, str],
) -> list[str]:
    """The result as Markdown. rates: of loss and lag; arms, settings: name -> words."""
    addition = Runs(rows, "addition")
    lines = [*_caption(rows), "", *_by_lag(addition, arms, rates), ""]
    lines += [f"- `{arm}`: {text}" for arm, text in arms.items()]
    lines += ["", *_beside(addition, arms), "", *_over(addition, arms), ""]
    for setting, text in settings.items():
        if setting != "addition" and (runs := Runs(rows, setting)).rows:
            known = {arm: words for arm, words in arms.items() if runs.values(arm, 0)}
            lines += [f"{setting.capitalize()}: {text}, with the rates of addition.", ""]
            lines += [*_by_lag(runs, known, None), ""]
    return [*lines, *_aims(addition)]


def _caption(rows: Sequence[Row]) -> Iterator[str]:
    runs = [row for row in rows if row["kind"] == "run"]
    seeds = {row["seed"] for row in runs}
    one = rows[0] if rows else {"steps": 0, "batch": 0}
    yield (
        f"Held-out greedy accuracy, mean of three evaluations over the last sixth of "
        f"{one['steps']} learner steps of {one['batch']} groups x 8, two updates each, rate "
        f"falling linearly to 0; mean and 95 % interval over {len(seeds)} seeds ({len(runs)} runs, "
        f"and {len(rows) - len(runs)} to tune). A seed fixes the problems, not the responses. "
        f"{platform.machine()}, Python {platform.python_version()}, {os.cpu_count()} cores; the "
        "machine's speed does not matter."
    )


def _header(*columns: str) -> list[str]:
    return ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]


def _by_lag(
    runs: Runs, arms: Mapping[str, str], rates: Mapping[tuple[str, int], float | None] | None
) -> Iterator[str]:
    tuned = [] if rates is None else sorted({lag for _, lag in rates})
    names = [f"rate at {lag}" for lag in tuned]
    yield from _header("loss", *names, *(f"lag {lag}" for lag in runs.lags))
    for arm in arms:
        cells = ["-" if not (rate := rates[arm, lag]) else f"{rate:g}" for lag in tuned]
        cells += [cell(list(runs.values(arm, lag).values())) for lag in runs.lags]
        yield f"| {arm} | {' | '.join(cells)} |"


def _beside(runs: Runs, arms: Mapping[str, str]) -> Iterator[str]:
    yield "The last evaluation alone, and the mean probability of the right answer:"
    yield ""
    lags = [lag for lag in runs.lags if lag in (0, 16, 32)]
    columns = [f"{what}, lag {lag}" for what in ("last", "probability") for lag in lags]
    yield from _header("loss", *columns)
    for arm in arms:
        cells = [
            cell(list(runs.values(arm, lag, what).values()))
            for what in ("last", "probability")
            for lag in lags
        ]
        yield f"| {arm} | {' | '.join(cells)} |"


def _over(runs: Runs, arms: Mapping[str, str]) -> Iterator[str]:
    yield f"Points over `{BASE}`, seed by seed (bold: 0 lies outside of the interval):"
    yield ""
    yield from _header("loss", *(f"lag {lag}" for lag in runs.lags))
    for arm in arms:
        if arm != BASE:
            cells = [difference(runs.over(arm, BASE, lag)) for lag in runs.lags]
            yield f"| {arm} | {' | '.join(cells)} |"


def _aims(runs: Runs) -> Iterator[str]:
    naive = [list(runs.values("naive", lag).values()) for lag in (0, HARM_LAG)]
    if not all(naive):
        yield "Not complete: no verdict yet."
        return
    loss = statistics.mean(naive[0]) - statistics.mean(naive[1])
    yield (
        f"The naive loss loses {100 * loss:.1f} points at lag {HARM_LAG}: "
        + (
            "old data hurts here, and the losses can be told apart."
            if loss >= HARMFUL
            else "too little for this experiment to show anything."
        )
    )
    yield ""
    yield from _header("aim", "measured", "")
    for arm in AIMED:
        for lag in (16, 32):
            if shares := runs.shares(arm, lag):
                met = statistics.mean(shares) >= SHARE
                yield aim(
                    f"{arm}: at least {SHARE:.0%} of its lag 0 at {lag}", cell(shares), met=met
                )
