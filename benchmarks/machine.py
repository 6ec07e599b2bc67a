"""The machine that a benchmark ran on, and what its processes used of it.

Runs in: the process of a benchmark.
"""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def machine(*packages: str) -> str:
    """Processor, cores, versions, and how busy it was before the start."""
    found = re.search(
        r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE
    )
    name = found[1] if found else platform.machine()
    versions = [
        f"Python {platform.python_version()}",
        *(f"{one} {_version(one)}" for one in packages),
    ]
    return (
        ", ".join([name, f"{len(os.sched_getaffinity(0))} cores", *versions])
        + f"; load before the start {os.getloadavg()[0]:.1f}"
    )


def _version(package: str) -> str:
    for name in (package, f"{package}-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise RuntimeError(f"{package} is not installed")
