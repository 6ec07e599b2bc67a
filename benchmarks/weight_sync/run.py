"""What publications cost the learner of a whole run: the quickstart, with and without overlap, by
its own metrics.

Runs in: the process of `benchmarks.weight_sync`; every run is a command of its own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT

TIMEOUT_S = 600.0
STEPS_PER_S = 2.0
"""The aim is about a run that takes so many steps in a second."""


@dataclass(frozen=True)
class RunResult:
    """One run: per step, seconds in all, waited for the publication, and trained; of a publication,
    an engine's pause and until live.
    """

    steps: int
    step_s: float
    publish_s: float
    train_s: float
    paused_s: float
    until_live_s: float

    @property
    def lost(self) -> float:
        """Share of the learner's time that publications took, at the run's own rate."""
        return self.publish_s / self.step_s

    @property
    def lost_at_rate(self) -> float:
        """The same share if the run took STEPS_PER_S steps per second."""
        return self.publish_s * STEPS_PER_S


def run_result(lines: list[dict[str, Any]]) -> RunResult:
    """From a run's metrics.jsonl. The first step, which waits for the first responses, is
    left out.
    """
    steps = [line for line in lines if "time/step" in line][1:]
    if not steps:
        raise RuntimeError("the run made no step that counts; give it at least two")

    def mean(name: str) -> float:
        return statistics.fmean(line[name] for line in steps)

    last = steps[-1]
    return RunResult(
        len(steps),
        mean("time/step"),
        mean("time/publish"),
        mean("time/train"),
        last["weights/engine_paused_s"],
        last["weights/until_live_s"],
    )


def run_once(directory: Path, *, overlap: bool, steps: int) -> RunResult:
    """One quickstart of so many steps in `directory`."""
    directory.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "async_grpo.run",
        "configs/quickstart.yaml",
        f"run.dir={directory / 'run'}",
        f"run.total_steps={steps}",
        f"weight_sync.overlap={str(overlap).lower()}",
        "evaluation.before=false",
    ]
    with open(directory / "output.txt", "w", encoding="utf-8") as log:
        ended = subprocess.run(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False
        )
    if ended.returncode != 0:
        tail = "\n".join((directory / "output.txt").read_text(encoding="utf-8").splitlines()[-15:])
        raise RuntimeError(f"the quickstart ended with exit code {ended.returncode}:\n{tail}")
    return run_result(
        [
            json.loads(line)
            for line in (directory / "run" / "metrics.jsonl")
            .read_text(encoding="utf-8")
            .splitlines()
        ]
    )
