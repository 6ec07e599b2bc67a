"""What one node shows of a run's processes: stacks, log tails, resource use.

Runs in: the driver for its own node; a Ray task pinned to each other node. Everything is read from
/proc, the run's directory and Ray's log files, so a process that is stuck or gone is described too.
Nothing here waits for a process longer than `stacks.ANSWER_S`.
"""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

from async_grpo.runtime import stacks

LOG_TAIL = 16_000
"""Bytes of the end of each log that are kept."""
_TICKS = os.sysconf("SC_CLK_TCK")


def gather(run_dir: str, *, role: str = "") -> dict[str, Any]:
    """Describe this host: its processes (all, or a role and its parts) and its state."""
    directory = stacks.home(run_dir)
    usage = {
        process.pid: _usage(process.pid) for process in stacks.registered(directory, role=role)
    }  # before they write their stacks
    looks = stacks.look(directory, role=role)
    processes = [_described(one, usage.get(one.process.pid, {})) for one in looks]
    processes += _children(looks)
    return {"host": socket.gethostname(), "processes": processes, "machine": machine(run_dir)}


def _described(one: stacks.Look, usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "role": one.process.role,
        "name": one.process.name,
        "pid": one.process.pid,
        "alive": one.alive,
        "trouble": one.trouble,
        "where": one.where,
        "stacks": one.text,
        "usage": usage,
        "logs": {Path(path).name: tail(Path(path)) for path in one.process.logs},
    }


def _children(looks: list[stacks.Look]) -> list[dict[str, Any]]:
    """Describe children of registered processes that have not registered themselves."""
    known = {one.process.pid for one in looks}
    living = [one.process for one in looks if one.alive and one.process.role != "driver"]
    parents = {process.pid: process.role for process in living}
    found = []
    for entry in Path("/proc").iterdir():
        status = stacks.status(int(entry.name)) if entry.name.isdigit() else {}
        pid, parent = int(status.get("Pid", 0)), parents.get(int(status.get("PPid", 0)))
        if parent is not None and pid not in known:
            name, state = status.get("Name", "?"), status["State"][0]
            child = stacks.Process(f"{parent}{stacks.PART}{name}", pid, entry, (), 0)
            trouble = stacks.STATES[state] if state in "TtZX" else ""
            one = _described(stacks.Look(child, trouble, state not in "ZX"), _usage(pid))
            found.append(one | {"name": f"{name}, a child of {parent} (pid {pid})"})
    return found


def _usage(pid: int) -> dict[str, Any]:
    """Read memory, processor time and open files of a process; empty when it is gone."""
    status = stacks.status(pid)
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = stat.rpartition(")")[2].split()
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return {}
    return {
        "state": status.get("State", "?"),
        "rss": status.get("VmRSS", "0 kB"),
        "rss_peak": status.get("VmHWM", "0 kB"),
        "threads": int(status.get("Threads", 0)),
        "cpu_s": (int(fields[11]) + int(fields[12])) / _TICKS,
        "open_files": files,
    }


def tail(path: Path) -> str:
    """Read the last LOG_TAIL bytes of a file as text."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_TAIL))
            return file.read(LOG_TAIL).decode(errors="replace")
    except OSError as error:
        return f"(cannot be read: {error.strerror})"


def machine(run_dir: str) -> dict[str, Any]:
    """Read memory, disks, load and kills for want of memory of this host."""
    memory, shown = stacks.pairs("/proc/meminfo"), ("MemTotal", "MemAvailable", "SwapFree", "Shmem")
    return {
        "memory": {name: memory.get(name, "?") for name in shown},
        "disk_free_gib": {
            path: round(shutil.disk_usage(path).free / 2**30, 2)
            for path in ("/dev/shm", "/tmp", run_dir)
            if os.path.isdir(path)
        },
        "load": list(os.getloadavg()),
        "cores": len(os.sched_getaffinity(0)),
        "cgroup": {
            name: _read(f"/sys/fs/cgroup/{name}")
            for name in ("memory.max", "memory.current", "memory.events")
        },
        "oom_kills": stacks.pairs("/proc/vmstat", " ").get("oom_kill", "?"),
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
