"""What a killed process would leave behind, its files and its children, and how they go.

Runs in: any process. Hides how a file's name tells its owner, and how the kernel ties one process
to another. Invariant: nothing is removed whose owner lives, or may live where it cannot be seen:
containers may share a directory and not their processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Collection
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_SHORT = "/tmp"
_LONGEST = 70
"""Bytes of a directory's path: a socket's has 107, and vLLM names its own by 36 characters."""


def die_with_parent(parent: int | None = None) -> None:
    """Die, even when stopped, with the thread that started this process; exit if not `parent`'s."""
    before = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != before:
        sys.exit(f"process {before}, which started this one, is gone")


def die_with(ancestor: int) -> None:
    """Kill this process and the one in between when `ancestor`, a parent's parent, ends."""
    if os.getpid() == ancestor:
        return
    if os.getppid() == ancestor:
        die_with_parent(ancestor)
        return
    between, watched = os.getppid(), os.pidfd_open(ancestor)

    def watch() -> None:
        select.select([watched], [], [])
        if os.getppid() == between:
            os.kill(between, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="async_grpo-ancestor", daemon=True).start()


def kill_descendants() -> None:
    """Kill all descendants; first stop them all, so that none starts another meanwhile."""
    known: list[int] = []
    while new := [pid for pid in descendants() if pid not in known]:
        _signal(new, signal.SIGSTOP)
        known += new
    _signal(known, signal.SIGKILL)


def descendants() -> list[int]:
    """Return the process ids of all children, their children, and so on."""
    parents = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                stat = (entry / "stat").read_text()
                parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
    found, unseen = [], [os.getpid()]
    while unseen:
        parent = unseen.pop()
        children = [pid for pid, its in parents.items() if its == parent]
        found += children
        unseen += children
    return found


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)


def owner() -> str:
    """Name this process, as a part of a file name."""
    return f"{_processes()}.{os.getpid()}"


def is_gone(owner: str) -> bool:
    """Whether the process that `owner()` named is known to be gone. One that has ended and that
    nobody reaps, as in containers, is; one whose first thread alone has ended is not.
    """
    processes, _, pid = owner.partition(".")
    if processes != _processes() or not pid.isdigit():
        return False
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    fields = stat.rpartition(")")[2].split()
    return fields[0] in "ZX" and int(fields[17]) <= 1


def own_directory(purpose: str) -> Path:
    """Create a private temporary directory, and remove those that killed processes left. Sockets
    fit into it: where TMPDIR is too long for that, it lies in /tmp.
    """
    remove_abandoned(purpose)
    prefix, parent = f"async_grpo-{purpose}-{owner()}-", tempfile.gettempdir()
    fits = len(os.fsencode(f"{parent}/{prefix}")) + 8 <= _LONGEST
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent if fits else _SHORT))


def remove_abandoned(purpose: str, *, ending: Collection[int] = (), wait_s: float = 0.0) -> None:
    """Remove the directories that `own_directory` made in processes that are gone.

    ending: processes that were killed; those that own a directory are waited for, all together
    `wait_s` seconds at most.
    """
    deadline, awaited = time.monotonic() + wait_s, {str(pid) for pid in ending}
    pattern = f"async_grpo-{purpose}-*"
    for path in {*Path(tempfile.gettempdir()).glob(pattern), *Path(_SHORT).glob(pattern)}:
        owner = path.name.split("-")[2]
        while not (gone := is_gone(owner)) and time.monotonic() < deadline:
            if owner.rpartition(".")[2] not in awaited:
                break
            time.sleep(0.02)
        if gone:
            shutil.rmtree(path, ignore_errors=True)  # another user's


def _processes() -> str:
    """Whose process ids these are: the machine since it was started, and the name space in it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").replace("-", "")[:8]
    return boot + "".join(filter(str.isdigit, os.readlink("/proc/self/ns/pid")))
