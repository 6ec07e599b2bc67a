"""Python stacks of the processes of a run, also of those that are stuck in C code or wait for a
lock.

Runs in: every process of a run (`register`, `register_child`), and where a post-mortem is written
(`look`). A process registers by opening one small file, `<run dir>/stacks/<role>@<host>@<pid>`; on
SIGUSR2 a handler in C appends the stacks of all its threads to it. Ray and vLLM leave that signal
free in their workers. Not py-spy: Yama and containers forbid ptrace, so both would be needed.

Invariants: only a process that has the handler is signalled (to any other the signal would be
deadly); a process that does not answer is described by what the kernel says of it; a process id
that meanwhile belongs to somebody else is taken for one that has ended. The handler looks at
threads while they run, which in rare cases ends the process: only those are signalled that end
anyway, and never the asking one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from async_grpo.runtime import lifetime

SIGNAL = signal.SIGUSR2
PART = "+"
"""Between the role of a process and the name of its child, as in `actor-1.0+engine`."""
ANSWER_S = 2.0
"""Longest time a process may take to write its stacks."""
_QUIET_S, _POLL_S = 0.1, 0.02
_DIRECTORY, _ROLE = "ASYNC_GRPO_STACKS", "ASYNC_GRPO_ROLE"
STATES = {
    "T": "is stopped (by SIGSTOP)",
    "t": "is held by a debugger",
    "D": "waits inside the kernel (for a disk, network storage or a driver)",
    "Z": "has ended",
    "X": "has ended",
}
"""What is wrong with a process in such a state of /proc/<pid>/status."""
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_PACKAGE = f"{os.sep}async_grpo{os.sep}"
_file: IO[str] | None = None


@dataclass(frozen=True, slots=True)
class Process:
    """A registered process of this host. `parent`: its role without the last part, or ""."""

    role: str
    pid: int
    path: Path
    logs: tuple[str, ...]
    begun: int

    @property
    def parent(self) -> str:
        """Role of the process that this one is a part of, or ""."""
        return self.role.rpartition(PART)[0]

    @property
    def name(self) -> str:
        """For people: `engine of actor-1.0 (pid 123)`."""
        part, parent = self.role.rpartition(PART)[2], self.parent
        return f"{part} of {parent} (pid {self.pid})" if parent else f"{self.role} (pid {self.pid})"


@dataclass(slots=True)
class Look:
    """What a process showed. `trouble`: why it shows no stacks, or what is wrong with it, or ""."""

    process: Process
    trouble: str = ""
    alive: bool = True
    text: str = ""
    where: list[str] = field(default_factory=list)


def home(run_dir: str | Path) -> Path:
    """Where the processes of the run in this directory register. Raises ValueError for a
    `run.dir` with placeholders, of which a directory with such a name would be made.
    """
    if "{" in str(run_dir):
        raise ValueError(f"run.dir {run_dir} is not resolved (config.load.resolve)")
    return Path(run_dir) / "stacks"


def register(role: str, directory: str | Path) -> None:
    """Let this process, and its children, write stacks into a file in `directory` when asked."""
    global _file
    path = Path(directory) / f"{role}@{socket.gethostname()}@{os.getpid()}"
    for process in registered(directory, role=role):
        if process.role == role and not is_alive(process):
            process.path.unlink(missing_ok=True)  # this one takes its place
    logs = [target for descriptor in (1, 2) if os.path.isfile(target := _target(descriptor))]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # open as long as the process lives: a signal handler cannot open it
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115
        facts = {"begun": begun(os.getpid()), "logs": list(dict.fromkeys(logs))}
        file.write(json.dumps(facts) + "\n")
        file.flush()
    except OSError as error:  # a full disk must not keep an actor from being replaced
        print(f"{role}: no stacks will be written if this run gets stuck: {error}", file=sys.stderr)
        return
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
    if _file is not None:
        _file.close()
    _file = file
    os.environ[_DIRECTORY], os.environ[_ROLE] = str(directory), role


def register_child(part: str) -> None:
    """Register as a part of the registered process that started this one (not of a fork)."""
    mine = _file is not None and _file.name.endswith(f"@{os.getpid()}")
    if _DIRECTORY in os.environ and not mine:
        register(f"{os.environ[_ROLE]}{PART}{part}", os.environ[_DIRECTORY])


def environment() -> dict[str, str]:
    """Return what a child with a clean environment needs to register."""
    return {name: os.environ[name] for name in (_DIRECTORY, _ROLE) if name in os.environ}


def end(directory: str | Path) -> None:
    """Unregister this process and remove the files of all: the run is over."""
    global _file
    if _file is not None and Path(_file.name).parent == Path(directory):
        faulthandler.unregister(SIGNAL)
        _file.close()
        _file = None
        del os.environ[_DIRECTORY], os.environ[_ROLE]
    shutil.rmtree(directory, ignore_errors=True)


def registered(directory: str | Path, *, role: str = "") -> list[Process]:
    """List processes of this host, also ended ones: of all roles, or this one with ranks and
    parts.
    """
    found = []
    for path in Path(directory).glob("*@*@*"):
        name, host, pid = path.name.split("@")
        if host != socket.gethostname() or (
            role and name != role and not name.startswith((f"{role}{PART}", f"{role}-"))
        ):
            continue
        with contextlib.suppress(OSError, ValueError):  # cut off, or removed by the end of the run
            head = json.loads(path.read_text(encoding="utf-8", errors="replace").partition("\n")[0])
            found.append(Process(name, int(pid), path, tuple(head["logs"]), head["begun"]))
    return sorted(found, key=lambda process: (process.role, process.pid))


def look(directory: str | Path, *, role: str = "", seconds: float = ANSWER_S) -> list[Look]:
    """Ask all of them (or one role with its parts) at once; what they wrote within the deadline."""
    looks = [Look(process) for process in registered(directory, role=role)]
    before = {one.process: one.process.path.stat().st_size for one in looks}
    asked = [one for one in looks if _ask(one)]
    deadline, sizes, changed = time.monotonic() + seconds, dict(before), time.monotonic()
    while asked and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = {one.process: one.process.path.stat().st_size for one in asked}
        answered = all(now[process] > before[process] for process in now)
        if any(now[process] != sizes[process] for process in now):
            sizes, changed = sizes | now, time.monotonic()
        elif answered and time.monotonic() - changed > _QUIET_S:
            break
    for one in looks:
        with open(one.process.path, encoding="utf-8", errors="replace") as file:
            file.seek(before[one.process])
            one.text = file.read()
        one.where = where(one.text)
        if one in asked and not one.text:
            one.trouble = _trouble(one.process) or "does not write its stacks when it is asked"
            one.alive = one.trouble != "has ended"  # meanwhile
    return looks


def is_alive(process: Process) -> bool:
    """Whether it runs, or could if it was not stopped."""
    return _trouble(process, "ZX") == ""


def where(text: str) -> list[str]:
    """Per thread that is in this package: its innermost frame there, and the innermost of all."""
    found = []
    for thread in text.split("\n\n"):
        # innermost first
        frames = [
            (match["file"], match["line"], match["name"]) for match in _FRAME.finditer(thread)
        ]
        own = [
            frame
            for frame in frames
            if _PACKAGE in frame[0] and not frame[0].endswith(f"{os.sep}stacks.py")
        ]
        if own:
            inside = "" if own[0] == frames[0] else f", inside {_short(frames[0])}"
            found.append(_short(own[0]) + inside)
    return found


def _short(frame: tuple[str, str, str]) -> str:
    file, line, name = frame
    return f"{name} ({os.sep.join(Path(file).parts[-2:])}:{line})"


def _ask(one: Look) -> bool:
    """Signal a process if it can answer; what keeps it from that is noted."""
    process = one.process
    if _file is not None and _file.name == str(process.path):
        # The handler in C looks at the other threads while they run, which can crash a living
        # process. Here nobody else holds the interpreter.
        faulthandler.dump_traceback(_file, all_threads=True)
        return True
    one.trouble = _trouble(process, "TtZX")
    one.alive = one.trouble != "has ended"
    if not one.alive:
        return False
    if not _has_handler(process.pid):
        one.trouble = one.trouble or "has no handler for the signal"
        return False
    try:
        os.kill(process.pid, SIGNAL)
    except OSError as error:
        one.trouble = f"cannot be signalled: {error.strerror}"
        return False
    return not one.trouble  # one that is stopped answers when it is continued, which may be never


def _trouble(process: Process, states: str = "TtZXD") -> str:
    """Say which of these states a process is in, or "". All are in D (kernel) now and then."""
    state = status(process.pid).get("State", "X")[0] if begun(process.pid) == process.begun else "X"
    return STATES[state] if state in states else ""


def _has_handler(pid: int) -> bool:
    return bool(int(status(pid).get("SigCgt", "0"), 16) >> (SIGNAL - 1) & 1)


def status(pid: int) -> dict[str, str]:
    """`/proc/<pid>/status`; empty when there is none."""
    return pairs(f"/proc/{pid}/status")


def pairs(path: str, separator: str = ":") -> dict[str, str]:
    """Read what a file of the kernel has line by line, by name; empty when there is none."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    parts = (line.partition(separator) for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in parts}


def begun(pid: int) -> int:
    """Ticks since boot when a process began: names it for good with its id. 0 for none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


def lives(owner: str, begun_at: int) -> bool | None:
    """Whether the process lives that `lifetime.owner()` named and that began at `begun_at`; None
    where process ids are other ones than here.
    """
    processes, _, pid = owner.partition(".")
    if processes != lifetime.owner().partition(".")[0]:
        return None
    state = status(int(pid)).get("State", "X")[0]
    return state not in "ZX" and begun(int(pid)) == begun_at


def _target(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
