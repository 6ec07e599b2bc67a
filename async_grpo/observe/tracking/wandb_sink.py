"""Weights & Biases as a tracker: its client, and a run in `wandb/` of the run's directory.

Runs in: the tracker's sender thread, or `async-grpo report --sync`. Hides the client, which hands
all on to a process of its own that keeps it in files and uploads it when it can.

Invariants: nobody is asked for anything at the terminal; at the exit of this process the client's
own ends too. What comes again changes nothing, since a row's time is its step of W&B, which takes
no step before its last one, also of a run that goes on; so a run that this process did not begin
is Gone, and is sent from its first row, and W&B's process may die at any time. Offline, where W&B
does not know its last step, every start writes all rows, so that its newest directory is complete.

What the client cannot do: a clock that is set back loses rows until it has caught up; an upload
that the server refuses for good is told in W&B's own log alone.
"""

from __future__ import annotations

import atexit
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.observe.tracking.sink import Gone, Point, RunFacts

if TYPE_CHECKING:
    from wandb import Run

STEP = "learner_step"
"""The metric over which W&B draws the others."""
INIT_TIMEOUT_S, UPLOAD_TIMEOUT_S = 10.0, 15.0
_EXIT_CODES = {"FINISHED": 0, "FAILED": 1, "KILLED": 255}
_ENVIRONMENT = {"WANDB_ERROR_REPORTING": "false"}
"""Unless the user has set it: the client sends nobody reports of its own."""


class WandbSink:
    """See `TrackerSink`. It gets metrics, parameters, tags, samples and the status; files and
    models it does not have.
    """

    title = "WandB"
    ends_last = True

    def __init__(self, uri: str | None, run_dir: Path) -> None:
        """Set the address, which is the environment's."""
        self.address = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        self._offline = os.environ.get("WANDB_MODE") == "offline"
        self._run_dir, self._url = run_dir, ""
        self._runs: dict[str, Run] = {}
        self._unfinished: set[str] = set()

    def where(self) -> str:
        """See `TrackerSink`."""
        if self._offline:
            latest = self._run_dir / "wandb" / "latest-run"
            return f"; send it when it has ended: wandb sync {shlex.quote(str(latest))}"
        return f" at {self._url or self.address}"

    def start(self, run: RunFacts) -> str:
        """See `TrackerSink`; without a key this raises what wandb says."""
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import wandb

        # Silent: nothing is printed, and nobody is asked.
        wandb.setup(wandb.Settings(silent=True)).ensure_service()
        self._unfinished.add(run.key)
        atexit.register(self._let_go)  # after wandb's own hook, so it is called before that
        try:
            begun = wandb.init(
                project=run.experiment,
                id=run.key,
                name=run.name,
                dir=self._run_dir,
                resume="allow",
                reinit="create_new",
                settings=wandb.Settings(
                    console="off",
                    disable_git=True,
                    save_code=False,
                    x_disable_stats=True,  # as `tracking.system_metrics` has them
                    init_timeout=INIT_TIMEOUT_S,
                    finish_timeout=UPLOAD_TIMEOUT_S,
                    finish_timeout_raises=True,
                ),
            )
        except Exception:
            self._let_go()
            raise
        begun.define_metric(STEP, hidden=True)
        begun.define_metric("*", step_metric=STEP)
        self._runs[run.key], self._url = begun, begun.url or ""
        return run.key

    def set_status(self, run_id: str, status: str, ended: int | None) -> None:
        """See `TrackerSink`; an end waits until W&B has all, and raises TimeoutError if not."""
        run = self._run(run_id)
        if status != "RUNNING":
            del self._runs[run_id]
            run.finish(_EXIT_CODES[status])
            self._runs[run_id] = run
            self._unfinished.discard(run_id)

    def log(
        self,
        run_id: str,
        *,
        parameters: dict[str, str] | None = None,
        tags: dict[str, str] | None = None,
        points: Sequence[Point] = (),
    ) -> None:
        """See `TrackerSink`; parameters and tags are the run's config, since W&B's tags have no
        values.
        """
        run = self._run(run_id)
        pairs = (parameters or {}) | {f"tags.{name}": text for name, text in (tags or {}).items()}
        if pairs:
            run.config.update(pairs, allow_val_change=True)
        ordered = sorted(points, key=_place)  # rows of several threads may lie a millisecond off
        for (when, step), row in groupby(ordered, key=_place):
            values: dict[str, Any] = {point.name: point.value for point in row}
            run.log(values | {STEP: step, "_timestamp": when / 1000}, step=when)

    def show_samples(self, run_id: str, rows: list[dict[str, Any]]) -> None:
        """See `TrackerSink`: the table `samples`."""
        from wandb import Table

        columns: list[Any] = list(dict.fromkeys(key for row in rows for key in row))
        data = [[row.get(column) for column in columns] for row in rows]
        self._run(run_id).summary["samples"] = Table(columns, data, allow_mixed_types=True)

    def put(self, run_id: str, path: Path, place: str) -> None:
        """Do nothing: files stay in the run's directory."""

    def register(self, run_id: str, model: str, place: str) -> None:
        """Do nothing."""

    def _run(self, run_id: str) -> Run:
        if run_id not in self._runs:
            raise Gone(f"this process did not begin {run_id}")
        return self._runs[run_id]

    def _let_go(self) -> None:
        """End W&B's process if it has not sent all: wandb's own exit waits for that, and a run that
        could not be begun is in use there.
        """
        import wandb

        if self._unfinished and (process := (service := wandb.setup().ensure_service())._proc):
            self._unfinished.clear()
            service._finalizer.close()
            process._process.kill()
            with suppress(ConnectionError, SystemExit):  # it cannot say goodbye
                wandb.teardown()


def _place(point: Point) -> tuple[int, int]:
    return point.time, point.step
