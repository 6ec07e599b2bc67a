"""A run's report: the page and its pictures, written whole.

Runs in: the process of `async-grpo report`. Invariant: `report/` of the run directory is all that
is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from async_grpo.errors import SetupError
from async_grpo.tools.report import plots
from async_grpo.tools.report.data import RunData, read_run
from async_grpo.tools.report.gantt import Window, gantt, read_window
from async_grpo.tools.report.page import PLOTS, page

DIRECTORY, PAGE = "report", "report.html"


def write(run_dir: Path, *, steps: tuple[int, int] | None) -> Path:
    """Write the page and its pictures, and return the page's path. Raises SetupError."""
    data = read_run(run_dir)
    window = read_window(data, steps=steps)
    if steps is not None and window is None:
        raise SetupError(f"no learner step from {steps[0]} to {steps[1]} was logged in {run_dir}")
    out = run_dir / DIRECTORY
    try:
        out.mkdir(exist_ok=True)
        return _write(data, window, out)
    except OSError as error:
        raise SetupError(f"{out} cannot be written: {error.strerror}") from error


def _write(data: RunData, window: Window | None, out: Path) -> Path:
    draw: dict[str, Callable[[], plots.Figure | None]] = {
        "learning": partial(plots.learning, data),
        "rewards": partial(plots.rewards, data),
        "episodes": partial(plots.episodes, data),
        "pass_rates": partial(plots.pass_rates, data),
        "throughput": partial(plots.throughput, data),
        "staleness": partial(plots.lag_histogram, data),
        "length_by_staleness": partial(plots.length_by_lag, data),
        "clip_ess": partial(plots.clip_and_ess, data),
        "health": partial(plots.health, data),
        "goodput": partial(plots.goodput, data),
        "timeline": partial(gantt, window),
    }
    for name, one in draw.items():
        if not plots.write_png(one, out / f"{name}.png"):
            (out / f"{name}.png").unlink(missing_ok=True)  # of an earlier report
    pictures = [(plot, plots.as_svg(draw[plot.name], name=plot.name)) for plot in PLOTS]
    config = data.directory / "config.yaml"
    text = page(
        data,
        pictures=pictures,
        notes={"timeline": window.notes} if window is not None else {},
        config_text=config.read_text(encoding="utf-8") if config.is_file() else "",
    )
    temporary = out / f"{PAGE}.tmp"
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, out / PAGE)
    return out / PAGE
