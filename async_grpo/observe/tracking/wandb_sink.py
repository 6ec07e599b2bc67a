"""Weights & Biases as a tracker: metrics, parameters, tags, samples and status, in `wandb/` too.

Runs in: the tracker's sender thread, or `async-grpo report --sync`. Hides wandb's client. Where
that falls short: a clock that is set back loses rows until it has caught up, and what the server
refuses for good is told in wandb's log alone. Invariants: nobody is asked for a key, and no exit
waits for an upload. What comes again changes nothing, since a row's time is its step, and there is
none before the last; so a run that this process did not begin is Gone, and comes whole.
"""

from __future__ import annotations

import atexit
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from async_grpo.observe.tracking.sink import Gone, Point, RunFacts

STEP, INIT_TIMEOUT_S, UPLOAD_TIMEOUT_S = "learner_step", 10.0, 15.0


class WandbSink:
    """See `TrackerSink`."""

    title, ends_last = "WandB", True

    def __init__(self, uri: str | None, run_dir: Path) -> None:
        """Set the address, which the environment has."""
        self.address = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        self._run_dir, self._where = run_dir, f" at {self.address}"
        self._runs, self._unfinished = dict[str, Any](), set[str]()

    def where(self) -> str:
        """See `TrackerSink`."""
        return self._where

    def start(self, run: RunFacts) -> str:
        """See `TrackerSink`."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        wandb.setup(wandb.Settings(silent=True)).ensure_service()  # so that nothing is asked
        self._unfinished.add(run.key)
        atexit.register(self._let_go)  # after wandb's own hook, so it is called before that
        own: dict[str, Any] = {"init_timeout": INIT_TIMEOUT_S, "finish_timeout": UPLOAD_TIMEOUT_S}
        own |= dict.fromkeys(("disable_git", "x_disable_stats", "finish_timeout_raises"), True)
        own |= {"console": "off", "save_code": False}
        to: dict[str, Any] = {"project": run.experiment, "id": run.key, "name": run.name}
        to |= {"dir": self._run_dir, "resume": "allow", "reinit": "create_new"}
        try:
            begun = wandb.init(**to, settings=wandb.Settings(**own))
        except Exception:
            self._let_go()
            raise
        begun.define_metric("*", step_metric=STEP)
        latest = shlex.quote(f"{self._run_dir}/wandb/latest-run")
        self._where = f" at {begun.url}" if begun.url else f"; send it with: wandb sync {latest}"
        self._runs[run.key] = begun
        return run.key

    def set_status(self, run_id: str, status: str, ended: int | None) -> None:
        """See `TrackerSink`; an end waits for the upload, and raises TimeoutError."""
        run = self._run(run_id)
        if status != "RUNNING":
            del self._runs[run_id]
            run.finish({"FINISHED": 0, "FAILED": 1, "KILLED": 255}[status])
            self._runs[run_id] = run  # not if that failed
            self._unfinished.discard(run_id)

    def log(
        self,
        run_id: str,
        *,
        parameters: dict[str, str] | None = None,
        tags: dict[str, str] | None = None,
        points: Sequence[Point] = (),
    ) -> None:
        """See `TrackerSink`; parameters and tags are its config: its own tags have no values."""
        run = self._run(run_id)
        pairs = (parameters or {}) | {f"tags.{key}": text for key, text in (tags or {}).items()}
        if pairs:
            run.config.update(pairs, allow_val_change=True)
        ordered = sorted(points, key=lambda point: point[2:])  # threads may overtake each other
        for (when, step), row in groupby(ordered, key=lambda point: point[2:]):
            own = {STEP: step, "_timestamp": when / 1000}
            run.log(dict(point[:2] for point in row) | own, step=when)

    def show_samples(self, run_id: str, rows: list[dict[str, Any]]) -> None:
        """See `TrackerSink`: the table `samples`."""
        from wandb import Table

        names: list[Any] = list(dict.fromkeys(name for row in rows for name in row))
        cells = [[row.get(name) for name in names] for row in rows]
        self._run(run_id).summary["samples"] = Table(names, cells, allow_mixed_types=True)

    def put(self, run_id: str, path: Path, place: str) -> None:
        """Do nothing: files stay in the run's directory."""

    def register(self, run_id: str, model: str, place: str) -> None:
        """Do nothing."""

    def _run(self, run_id: str) -> Any:
        if run_id not in self._runs:
            raise Gone(f"this process did not begin {run_id}")
        return self._runs[run_id]

    def _let_go(self) -> None:
        """Kill wandb's process with what it has not sent: its end would be waited for."""
        import wandb

        if self._unfinished and (process := (service := wandb.setup().ensure_service())._proc):
            self._unfinished.clear()
            service._finalizer.close()
            process._process.kill()
            with suppress(ConnectionError, SystemExit):  # it cannot say goodbye
                wandb.teardown()
