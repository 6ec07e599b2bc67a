"""Processes that carry a mark in their environment, what they leave behind, and free ports."""

from __future__ import annotations

import os
import random
import signal
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path

from async_grpo.runtime import lifetime

_PORTS, _WORKERS, _TRIES = range(20_000, 28_000), 8, 1_000
_TAKEN: set[int] = set()


def marked(name: str, mark: str) -> list[int]:
    """Living processes with this environment variable."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and f"{name}={mark}".encode() in (entry / "environ").read_bytes()
            ):
                found.append(int(entry.name))
        except OSError:
            continue  # it ended while we looked, or is not ours
    return found


def left_by(pids: Iterable[int]) -> list[Path]:
    """Files in memory and temporary directories whose names tell that one of these processes made
    them.
    """
    boot = lifetime.owner().partition(".")[0]
    found = [*Path("/dev/shm").iterdir(), *Path(tempfile.gettempdir()).iterdir()]
    return [path for path in found if any(f"-{boot}.{pid}-" in path.name for pid in pids)]


def kill_marked(name: str, mark: str) -> None:
    """Kill what still lives, one by one."""
    for pid in marked(name, mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def free_port() -> int:
    """A port that is free now, and stays so until the test uses it: below those that the kernel
    hands out to whoever connects, above those of Ray's workers, never the same twice, and no other
    worker of the test run takes it.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    choose = random.Random(f"{os.getpid()} {len(_TAKEN)}")
    for _ in range(_TRIES):
        port = choose.randrange(_PORTS.start, _PORTS.stop, _WORKERS) + worker % _WORKERS
        if port not in _TAKEN and _is_free(port):
            _TAKEN.add(port)
            return port
    raise RuntimeError(f"no free port in {_PORTS}")


def free_ports(count: int) -> list[int]:
    """So many of them."""
    return [free_port() for _ in range(count)]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
