"""Processes that carry a mark in their environment, what they leave behind, and free ports."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path

from async_grpo.runtime import lifetime


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


def free_ports(count: int) -> list[int]:
    """Ports that are free now and differ from each other."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in sockets]
    finally:
        for probe in sockets:
            probe.close()
