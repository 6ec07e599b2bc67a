"""One run of the whole system, or of its learner alone, as a command whose metrics and CPU time are
read.

Runs in: the process of `benchmarks.throughput`. Everything counted lies in a window of learner
steps: what comes before (start, full queue) and after (end, checkpoint) is left out.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import ROOT, tail

TIMEOUT_S = 1_200.0
POLL_S = 0.1
KINDS = {
    "ray::LearnerProcess": "learner",
    "ray::RolloutProcess": "rollout actor",
    "ray::QueueProcess": "queue",
    "ray::RecordedQueue": "queue",
    "VLLM::EngineCore": "engine",
    "multiprocessing.spawn": "engine",
    "verifier_child": "verifiers",
}
"""Parts of a command line, and what is called by them here; Ray's own processes are `ray`, the
command itself is `driver`.
"""
PARTS = ("learner", "engine")
"""What a bare learner and a bare engine consist of; the rest is `all other processes`."""

Row = dict[str, Any]


def measured(command: list[str], directory: Path, *, skip: int, last: int) -> Row:
    """Run the command, whose run.dir is `directory`; what it did between the ends of steps `skip`
    and `last`.
    """
    with open(directory.with_suffix(".txt"), "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            follow = Follower(process, directory / "metrics.jsonl")
            follow.until(skip)
            before, busy = cpu_seconds(process.pid), _machine_cpu()
            follow.until(last)
            after, busy = cpu_seconds(process.pid), _machine_cpu() - busy
            process.wait(timeout=TIMEOUT_S)
        finally:
            process.kill()
    if process.returncode != 0:
        raise RuntimeError(
            f"exit code {process.returncode}:\n" + tail(directory.with_suffix(".txt"))
        )
    used = {kind: after[kind] - before[kind] for kind in after}
    row = summed(follow.lines, skip=skip, last=last)
    cpu = {kind: value / row["seconds"] for kind, value in used.items()}
    return row | {"cpu": cpu, "foreign": busy / row["seconds"] - sum(cpu.values())}


def summed(lines: dict[int, dict[str, float]], *, skip: int, last: int) -> Row:
    """From the metrics of the steps: tokens and samples per second, seconds per step, and shares of
    the window by cause.
    """
    steps = [lines[number] for number in range(skip + 1, last + 1)]
    first, final = lines[skip], lines[last]
    seconds = final["time"] - first["time"]

    def total(name: str) -> float:
        return sum(line.get(name, 0.0) for line in steps)

    def mean(name: str) -> float:
        return statistics.fmean(line.get(name, 0.0) for line in steps)

    def grown(value: Callable[[dict[str, float]], float]) -> float:
        return (value(final) - value(first)) / seconds

    tokens = total("rollout/response_tokens")
    shares = {name: total(f"time/{name}") / seconds for name in ("train", "wait")}
    for name in final:  # cumulative seconds by cause; a learner alone has none
        if name.startswith(("time/learner/", "time/engine/")):
            shares[name.removeprefix("time/")] = grown(lambda line, name=name: line.get(name, 0.0))
    return {
        "seconds": seconds,
        "steps": len(steps),
        "tokens": tokens,
        "samples": tokens / mean("rollout/response_length"),
        "train_s": mean("time/train"),
        "response_length": mean("rollout/response_length"),
        "shares": shares,
        "longest": max(line["rollout/response_length_max"] for line in steps),
        "lag_mean": mean("train/staleness_mean"),
        "until_live_s": final.get("weights/until_live_s", 0.0),
        "padding": mean("train/padding"),
    }


class Follower:
    """Reads the metrics of a run while it goes on."""

    def __init__(self, process: subprocess.Popen, path: Path) -> None:
        self._process, self._path, self._read = process, path, 0
        self._deadline = time.monotonic() + TIMEOUT_S
        self.lines: dict[int, dict[str, float]] = {}

    def until(self, step: int) -> None:
        """Wait for the metrics of this step."""
        while step not in self.lines:
            ended = self._process.poll() is not None
            self._take()
            if step not in self.lines and (ended or time.monotonic() > self._deadline):
                raise RuntimeError(
                    f"the run ended, or took too long, before step {step}:\n"
                    + tail(self._path.parent.with_suffix(".txt"))
                )
            time.sleep(POLL_S)

    def _take(self) -> None:
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._read)
            whole, _, _ = file.read().rpartition(b"\n")
        if whole:
            self._read += len(whole) + 1
            for line in map(json.loads, whole.splitlines()):
                if "time/train" in line:
                    self.lines[line["step"]] = line


def cpu_seconds(pid: int) -> Counter[str]:
    """CPU seconds so far of a command and its descendants, by what they are."""
    used: Counter[str] = Counter()
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            times, line = process.cpu_times(), " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue  # it ended while we looked
        kind = next(
            (kind for part, kind in KINDS.items() if part in line),
            "driver" if process.pid == pid else "ray",
        )
        used[kind] += times.user + times.system
    return used


def _machine_cpu() -> float:
    """CPU seconds that anybody has used on this machine."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


def overhead(row: Row) -> float:
    """CPUs that all processes but learner and engine used."""
    return sum(value for kind, value in row["cpu"].items() if kind not in PARTS)


def median_of(rows: list[Row], value: Callable[[Row], float]) -> float:
    """The median over rounds."""
    return statistics.median(map(value, rows))
