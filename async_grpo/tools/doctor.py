"""`async-grpo doctor`: what this machine has for a run, and what is missing.

Runs in: a process of its own; starts nothing. Exit code 2 where something that every run needs is
missing or of another version than the one that is tested.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
from collections.abc import Iterator
from importlib import metadata

from async_grpo.config.command_line import Parser

DESCRIPTION = "Say what this machine has for a run, and what is missing."
LIBRARIES = ("torch", "ray", "vllm", "transformers", "deepspeed", "msgpack", "numpy", "mlflow")
SHARED_MEMORY = "/dev/shm"
LEAST_SHARED_GIB, LEAST_MEMORY_GIB, LEAST_DISK_GIB = 1.0, 8.0, 10.0


def arguments(parser: Parser) -> None:
    """Take nothing."""


def run(options: argparse.Namespace) -> int:
    """Print what there is, and then what is missing; the exit code."""
    rows, missing = [], []
    for label, text, fault in _findings():
        rows.append((label, text))
        if fault:
            missing.append(fault)
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        print(f"{label:{width}}  {text}")
    for fault in missing:
        print(f"error: {fault}")
    if not missing:
        print("nothing is missing; next: async-grpo train quickstart")
    return 2 if missing else 0


def _findings() -> Iterator[tuple[str, str, str]]:
    """Find everything: a label, what there is, and a sentence where that will not do, or ""."""
    yield "python", platform.python_version(), ""
    pins = _pins()
    for name in LIBRARIES:
        yield _library(name, pins.get(name))
    yield "cores", str(len(os.sched_getaffinity(0))), ""
    yield _memory()
    yield _room("shared memory", SHARED_MEMORY, LEAST_SHARED_GIB, "docker run --shm-size=8g")
    yield _room("disk here", os.getcwd(), LEAST_DISK_GIB, "run.dir may be on another disk")
    yield from _gpus()
    address = os.environ.get("RAY_ADDRESS")
    yield "ray cluster", address or "none is named (RAY_ADDRESS); a run starts its own", ""


def _pins() -> dict[str, str]:
    try:
        required = metadata.requires("async_grpo") or []
    except metadata.PackageNotFoundError:  # on PYTHONPATH
        return {}
    found = (re.match(r"([\w-]+)(?:\[\w+\])?==([\w.+]+)", line) for line in required)
    return {one[1]: one[2] for one in found if one is not None}


def _library(name: str, pin: str | None) -> tuple[str, str, str]:
    for known in (name, f"{name}-cpu"):  # vLLM's package for machines without a GPU
        try:
            version = metadata.version(known)
        except metadata.PackageNotFoundError:
            continue
        other = pin is not None and version.split("+")[0] != pin.split("+")[0]
        fault = f"{name} is {version}, and {pin} is what is tested: make install" if other else ""
        return name, version, fault
    return name, "missing", f"{name} is not installed: make install"


def _memory() -> tuple[str, str, str]:
    with open("/proc/meminfo", encoding="ascii") as file:
        kib = dict(re.findall(r"^(\w+):\s+(\d+) kB$", file.read(), re.MULTILINE))
    free = int(kib["MemAvailable"]) / 2**20
    little = f"{free:.1f} GiB of memory are free, and a small run needs {LEAST_MEMORY_GIB:g}"
    total = int(kib["MemTotal"]) / 2**20
    return (
        "memory",
        f"{free:.1f} of {total:.1f} GiB are free",
        little if free < LEAST_MEMORY_GIB else "",
    )


def _room(label: str, path: str, least: float, advice: str) -> tuple[str, str, str]:
    try:
        free = shutil.disk_usage(path).free / 2**30
    except OSError as error:
        return label, f"{path}: {error.strerror}", f"{path} is not there: {advice}"
    little = f"{free:.1f} GiB are free in {path}, and a small run needs {least:g}: {advice}"
    return label, f"{free:.1f} GiB are free in {path}", little if free < least else ""


def _gpus() -> Iterator[tuple[str, str, str]]:
    try:
        import torch
    except ImportError:  # as its own row says
        return
    if not torch.cuda.is_available():
        yield "gpu", "none: engine and learner compute on the CPU", ""
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        yield f"gpu {number}", f"{found.name}, {found.total_memory / 2**30:.0f} GiB", ""
