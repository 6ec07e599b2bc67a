"""A real MLflow server that tests kill and start again, and trackers that talk to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_grpo.config.schema import Config, Model, Run, Tracking
from async_grpo.observe.tracking.mlflow_sink import MlflowSink
from async_grpo.observe.tracking.sink import TrackerSink
from async_grpo.observe.tracking.tracker import Tracker
from tests.support.machine_speed import slowness
from tests.support.processes import free_port

WITHIN_S = 120.0


def _config(**tracking: object) -> Config:
    return Config(
        run=Run(name="tracked", total_steps=3),
        model=Model(path="somewhere"),
        tracking=Tracking(**{"system_metrics": False} | tracking),
    )


def _tracker(
    run_dir: Path,
    *,
    resume: str | None = None,
    notes: list[str] | None = None,
    resumed: bool = False,
    kind: type[TrackerSink] = MlflowSink,
    **settings: object,
) -> Tracker:
    note = (lambda line: None) if notes is None else notes.append
    return Tracker(
        _config(**settings),
        run_dir=run_dir,
        resume_run_id=resume,
        resumed=resumed,
        note=note,
        kind=kind,
    )


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S * slowness()
    while not condition():
        assert time.monotonic() < deadline, f"not within {WITHIN_S:.0f} s: {what}"
        time.sleep(0.02)


class Begins(MlflowSink):
    """MLflow that takes a run's beginning, and while `silent` nothing else."""

    silent = False

    def log(self, run_id: str, **what: Any) -> None:
        if self.silent and "points" in what:
            raise ConnectionError("away")
        super().log(run_id, **what)

    def set_status(self, run_id: str, status: str, ended: int | None) -> None:
        if self.silent and status != "RUNNING":
            raise ConnectionError("away")
        super().set_status(run_id, status, ended)


class Server:
    """`mlflow server` on a port of its own, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._port = free_port()  # kept over a restart
        self.uri, self._folder, self._process = f"http://127.0.0.1:{self._port}", folder, None

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            str(self._port),
            "--workers",
            "1",
            "--backend-store-uri",
            f"sqlite:///{self._folder}/server.db",
            "--artifacts-destination",
            str(self._folder / "artifacts"),
        ]
        log = open(self._folder / "log", "ab")  # noqa: SIM115 (closed below)
        environment = os.environ | {
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"
        }  # eight processes that nobody needs here
        self._process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            cwd=self._folder,
            env=environment,
            start_new_session=True,
        )
        log.close()

    def wait(self) -> None:
        _until(self._answers, "mlflow server answers")

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=WITHIN_S)

    def stop_answering(self) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)

    def answer_again(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def _answers(self) -> bool:
        from urllib.error import URLError
        from urllib.request import urlopen

        try:
            return urlopen(f"{self.uri}/health", timeout=1).status == 200
        except (URLError, OSError):
            assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
            return False
