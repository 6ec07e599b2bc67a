"""The report at the end of a run, written by a process of its own: matplotlib never enters the one
that trains.

Runs in: the driver, after its processes are gone. Invariant: whatever happens here is a line for
the user, and changes nothing of how the run ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from async_grpo.config.schema import Config
from async_grpo.observe.console.console import Console
from async_grpo.observe.tracking.tracker import Tracker
from async_grpo.run.checkpoint.resume import last_logged_step

TIMEOUT_S = 180.0
PAGE = Path("report") / "report.html"

_SOURCE = str(Path(__file__).resolve().parents[3])


def report_on(config: Config, console: Console, tracker: Tracker) -> None:
    """Write the report of a run that has a learner step, and let the tracker send it."""
    run_dir = Path(config.run.dir)
    try:
        if config.tracking.report and last_logged_step(run_dir):
            written, line = write_report(run_dir)
            console.info(line)
            if written is not None:
                tracker.log_artifact(written)
    except Exception as error:  # noqa: BLE001 - shown; MLflow's run must end
        console.error(_failed(str(error) or type(error).__name__, run_dir))


def write_report(run_dir: Path) -> tuple[Path | None, str]:
    """Write a run directory's report; return its directory or None, and a line for people."""
    command = [sys.executable, "-m", "async_grpo", "report", str(run_dir)]
    path = os.pathsep.join(filter(None, (_SOURCE, os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(  # a session of its own: Ctrl-C is for the run
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, _failed(str(error), run_dir)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return None, _failed(said[-1], run_dir)
    return run_dir / PAGE.parent, f"report: {run_dir / PAGE}"


def _failed(reason: str, run_dir: Path) -> str:
    return f"the report could not be written ({reason}); to try again: async-grpo report {run_dir}"
