"""After a run, or while it goes on: `python -m async_grpo.report RUN_DIR` writes its report, with
`--sync` what MLflow lacks is sent.

Runs in: a process of its own, on any machine that sees the run's directory; the driver starts one
at the end of a run. Exit code 2 with one sentence if it cannot be done. Invariant: `report/` of the
run directory is all that is written.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from async_grpo.errors import RunError, SetupError
from async_grpo.replay.inspection import step_range
from async_grpo.report.data import RunData, read_run
from async_grpo.report.gantt import Window, read_window
from async_grpo.report.sync import sync

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
    from async_grpo.report import plots
    from async_grpo.report.gantt import gantt
    from async_grpo.report.page import PLOTS, page

    draw: dict[str, Callable[[], plots.Figure | None]] = {
        "learning": partial(plots.learning, data),
        "rewards": partial(plots.rewards, data),
        "episodes": partial(plots.episodes, data),
        "throughput": partial(plots.throughput, data),
        "lag": partial(plots.lag_histogram, data),
        "length_by_lag": partial(plots.length_by_lag, data),
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m async_grpo.report",
        description="Write a run's report, or send MLflow what it lacks.",
    )
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", type=Path, help="the run's directory (run.dir)"
    )
    parser.add_argument(
        "--sync",
        action="store_true",
        help="send MLflow what it did not get while the run was on; writes no report",
    )
    parser.add_argument(
        "--steps",
        metavar="A-B",
        type=step_range,
        help="learner steps in the timeline (default: some in the middle of the run)",
    )
    arguments = parser.parse_args(argv)
    try:
        print(
            "\n".join(sync(arguments.run_dir))
            if arguments.sync
            else write(arguments.run_dir, steps=arguments.steps)
        )
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
