"""What the stages of `make gpu-check` share: commands with a deadline, and what a run has left.

Runs in: the process of `make gpu-check`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu_check.machine import used_mib
from benchmarks.harness import ROOT

LIMIT_S = 600.0
TAIL = 60
_SELF_CHECK = re.compile(r"by at most ([\d.e+-]+) \(the test moved them by ([\d.]+)\)")


class CheckFailed(Exception):
    """What a stage found wrong, in a sentence."""


@dataclass(frozen=True)
class Done:
    """A command that has ended: exit code (124: the deadline), seconds, output."""

    code: int
    seconds: float
    output: str


class LeftOut(Exception):
    """Why a stage cannot run on this machine, in a sentence."""


@dataclass
class Result:
    """A stage: `passed`, `failed` or `left out`; what it measured or why it did not."""

    stage: str
    outcome: str
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    tail: list[str] = field(default_factory=list)


class Running:
    """A command in a process group of its own, which is killed at its deadline."""

    def __init__(self, command: Sequence[str], log: Path, *, limit_s: float = LIMIT_S) -> None:
        self._log, self._started, self._limit_s = log, time.monotonic(), limit_s
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "w", encoding="utf-8") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> Done:
        """Wait for the end, or the deadline."""
        left = self._limit_s - (time.monotonic() - self._started)
        try:
            code = self.process.wait(max(0.1, left))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
            code = 124
        seconds = time.monotonic() - self._started
        return Done(code, seconds, self._log.read_text(encoding="utf-8", errors="replace"))


class Check:
    """What stages share: the device, where they write, and the commands that they run."""

    def __init__(
        self, *, device: str, directory: Path, model: str | None = None, address: str | None = None
    ) -> None:
        """model: of the stage one_gpu. address: of the Ray cluster of the stage two_nodes."""
        self.device, self.directory, self.model = device, directory, model
        self.address = address
        self.start: Callable[..., Running] = Running
        self.pause: Callable[[float], None] = time.sleep
        self.steps = 30 if device == "cuda" else 4
        self.used_mib = used_mib()

    def command(self, name: str, command: Sequence[str]) -> Done:
        """Run a command; its output is kept in `NAME.log`."""
        return self.start(command, self.directory / f"{name}.log").wait()

    def python(self, name: str, *arguments: str) -> Done:
        """Run a command of this Python to its end. Raises CheckFailed unless that is 0."""
        done = self.command(name, [sys.executable, "-m", *arguments])
        require(done)
        return done

    def on_gpus(self, *settings: str) -> list[str]:
        """The settings on GPUs, none on CPU."""
        return list(settings) if self.device == "cuda" else []

    def train(self, name: str, config: str, *settings: str) -> dict[str, Any]:
        """Run a configuration to its end; what it printed and measured."""
        done = self.command(name, self.run_command(name, config, *settings))
        require(done)
        return self.measured(name, done)

    def run_command(self, name: str, config: str, *settings: str) -> list[str]:
        """Write the command of a run, without what a bare machine may lack."""
        common = [
            f"run.dir={self.run_dir(name)}",
            f"cluster.device={self.device}",
            "tracking.mlflow=false",
            "evaluation.max_samples=100",
        ]
        if not self.model_of(settings):
            # beside the directory of this start: the next one finds it
            common.append(f"model.warm_start.cache_dir={self.directory.parent / 'warm_start'}")
            if self.device == "cpu":
                common += [
                    "model.warm_start.target_accuracy=0.05",
                    "model.warm_start.blur_max_steps=0",
                ]
        return [sys.executable, "-m", "async_grpo.run", config, *common, *settings]

    @staticmethod
    def model_of(settings: Sequence[str]) -> bool:
        """Whether the settings name a model, so that there is no warm start."""
        return any(one.startswith("model.path=") for one in settings)

    def run_dir(self, name: str) -> Path:
        """The run directory of a stage."""
        return self.directory / "runs" / name

    def measured(self, name: str, done: Done) -> dict[str, Any]:
        """Figures of a run: its self-check, and the last metrics of each name."""
        figures: dict[str, Any] = {"seconds": round(done.seconds, 1)}
        if found := _SELF_CHECK.search(done.output):
            figures["self_check_error"] = float(found[1])
            figures["self_check_moved"] = float(found[2])
        figures["metrics"] = self.metrics(name)
        return figures

    def lines(self, name: str) -> list[dict[str, float]]:
        """What a run has logged so far."""
        path = self.run_dir(name) / "metrics.jsonl"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def metrics(self, name: str) -> dict[str, float]:
        """The last value of every metric of a run."""
        latest: dict[str, float] = {}
        for line in self.lines(name):
            latest |= line
        return latest

    def per_second(self, name: str, counter: str) -> float:
        """How fast a counter rose between the first and the last line of steps that have it."""
        seen = [line for line in self.lines(name) if counter in line and "train/loss" in line]
        if len(seen) < 2:
            return 0.0
        first, last = seen[0], seen[-1]
        return (last[counter] - first[counter]) / max(1e-9, last["time"] - first["time"])

    def until_step(self, name: str, running: Running, step: int) -> None:
        """Wait until a run has trained `step`. Raises CheckFailed when it ends before."""
        deadline = time.monotonic() + LIMIT_S / 2
        while self.metrics(name).get("replay/steps", 0) < step:
            if running.process.poll() is not None or time.monotonic() > deadline:
                raise CheckFailed(f"the run did not reach step {step}")
            time.sleep(0.5)


def require(done: Done, *, code: int = 0) -> None:
    """Raise CheckFailed for another exit code."""
    if done.code != code:
        last = next((line for line in reversed(done.output.splitlines()) if line.strip()), "")
        what = "did not end in time" if done.code == 124 else f"ended with exit code {done.code}"
        raise CheckFailed(f"the command {what}: {last.strip()[:200]}")


def last_json(done: Done) -> dict[str, Any]:
    """The last line of a command's output that is JSON; nothing where there is none."""
    lines = [line for line in done.output.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {}


def processes(called: str) -> Iterator[psutil.Process]:
    """The processes of this machine with this in their name or their command."""
    for process in psutil.process_iter(["name", "cmdline"]):
        if called in " ".join([process.info["name"] or "", *(process.info["cmdline"] or [])]):
            yield process
