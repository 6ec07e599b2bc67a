"""The GPUs of a machine, by `nvidia-smi`: which there are, what they can do, and their memory.

Runs in: the process of `make gpu-check`, without CUDA, which would take memory of its own. Only the
GPUs of CUDA_VISIBLE_DEVICES count, where it is set. What a GPU does not tell (`[N/A]`) is None.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

PEAK_FLOPS = {
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "4090": 165e12,
    "3090": 71e12,
}
"""Dense bfloat16 operations a second by name, from the makers' data sheets."""
SLACK_MIB = 512.0
"""A GPU counts as free when it has no more than this in use beyond what it had at first."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as `nvidia-smi` names it, and its memory in MiB."""

    name: str
    total_mib: float | None

    def __str__(self) -> str:
        memory = "memory unknown" if self.total_mib is None else f"{self.total_mib:,.0f} MiB"
        return f"{self.name} ({memory})"

    @property
    def peak_flops(self) -> float | None:
        """Dense bfloat16 operations a second, where it is known."""
        return next((flops for name, flops in PEAK_FLOPS.items() if name in self.name), None)


def gpus() -> list[Gpu]:
    """The GPUs of this machine that programs see, none where there is no driver."""
    found = []
    for line in smi("name,memory.total"):
        name, _, total = line.rpartition(",")
        found.append(Gpu(name.strip(), number(total)))
    return found


def number(text: str) -> float | None:
    """A figure of `nvidia-smi`; None where it has none."""
    try:
        return float(text)
    except ValueError:
        return None


def smi(fields: str) -> list[str]:
    """Ask `nvidia-smi` for the visible GPUs; nothing where it is not there."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        chosen = visible(os.environ["CUDA_VISIBLE_DEVICES"])
        if not chosen:
            return []
        command.append(f"--id={','.join(chosen)}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def visible(setting: str) -> list[str]:
    """The GPUs of a value of CUDA_VISIBLE_DEVICES, by index or UUID: those before the first one
    that cannot be, as CUDA reads it.
    """
    chosen: list[str] = []
    for one in setting.split(","):
        if not (one.strip().isdigit() or one.strip().startswith(("GPU-", "MIG-"))):
            break
        chosen.append(one.strip())
    return chosen


def used_mib() -> list[float]:
    """The memory in use of each GPU, 0 where it does not tell."""
    return [number(line) or 0.0 for line in smi("memory.used")]


def until_free(before: Sequence[float], *, limit_s: float = 60.0, pause_s: float = 1.0) -> float:
    """Wait until every GPU has as much memory in use as `before`, or the limit: drivers free it
    some time after a process has ended. Returns the MiB that one still has too many.
    """
    deadline = time.monotonic() + limit_s
    while True:
        now = used_mib()
        excess = max((a - b for a, b in zip(now, before, strict=False)), default=0.0)
        if excess <= SLACK_MIB:
            return 0.0
        if time.monotonic() >= deadline:
            return excess
        time.sleep(pause_s)


class Memory:
    """The most memory that each GPU had in use inside the block, in MiB, by asking every second."""

    def __enter__(self) -> Memory:
        self.peaks = used_mib()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        while True:
            self.peaks = [max(pair) for pair in zip(self.peaks, used_mib(), strict=False)]
            if self._over.wait(1.0):
                return

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=40)
