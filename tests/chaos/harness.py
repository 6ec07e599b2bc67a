"""A run as its users start it, seen from outside: its processes, ports and files, and the record
that `watched` keeps.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.chaos import watched

ROOT = Path(__file__).resolve().parents[2]
MARK = "ASYNC_GRPO_CHAOS_MARK"
POLL_S = 0.01
GONE_S = 60.0


@dataclass(frozen=True)
class Entry:
    """A line of the record."""

    at: float
    pid: int
    what: str
    values: tuple[Any, ...]


@dataclass
class Moment:
    """What was going on at one moment, by the record."""

    ready: set[int]
    """Groups whose put was acknowledged, and that no learner rank had taken into training."""
    generating: dict[int, int]
    """Groups that each rollout actor was generating; those that have produced nothing yet are left
    out.
    """
    at_gate: set[int]
    """Learner ranks that wait in a step."""


class Side:
    """The record, read as it grows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: list[Entry] = []
        self._read: dict[Path, int] = {}

    def poll(self) -> list[Entry]:
        """All entries in the order of time; a line that is being written counts the next time."""
        fresh = []
        for path in sorted(self.folder.glob("*.log")):
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(data)
            pid = int(path.stem.rpartition("-")[2])
            fresh += [
                Entry(at, pid, what, tuple(values))
                for at, what, *values in map(json.loads, data.splitlines())
            ]
        if fresh:
            self.entries = sorted(self.entries + fresh, key=lambda entry: entry.at)
        return self.entries

    def having(self, what: str) -> Iterator[Entry]:
        return (entry for entry in self.entries if entry.what == what)

    def moment(self, at: float) -> Moment:
        """What was going on then."""
        acknowledged: set[int] = set()
        taken: set[int] = set()
        generating: dict[int, int] = {}
        at_gate: set[int] = set()
        for entry in self.entries:
            if entry.at > at:
                break
            if entry.what == "ack":
                acknowledged.add(entry.values[0])
            elif entry.what == "fetch":
                taken.update(entry.values[1])
            elif entry.what in ("begin", "end"):
                generating[entry.pid] = generating.get(entry.pid, 0) + (
                    1 if entry.what == "begin" else -1
                )
            elif entry.what == "gate":
                at_gate.add(entry.pid)
            elif entry.what == "open":
                at_gate.discard(entry.pid)
        return Moment(acknowledged - taken, generating, at_gate)

    def steps(self) -> int:
        """The newest learner step that was trained."""
        return max((entry.values[0] for entry in self.having("trained")), default=0)


class Run:
    """One run directory and the processes that work on it, start after start."""

    def __init__(self, home: Path, settings: dict[str, Any], *, name: str = "run") -> None:
        """settings: the configuration, without `run.dir` and the task."""
        self.home, self.dir = home, home / name
        self.side = Side(watched.side_folder(self.dir))
        self.side.folder.mkdir()
        self.config = home / f"{name}.yaml"
        task = {
            "name": "tests.chaos.task:Chaotic",
            "options": {"side": str(self.side.folder)},
        } | settings.pop("task", {})
        self.config.write_text(
            yaml.safe_dump(
                settings | {"run": settings["run"] | {"dir": str(self.dir)}, "task": task}
            )
        )
        self.temporary = Path(
            tempfile.mkdtemp(prefix="agc-")
        )  # short: names of sockets begin with it
        self.mark = uuid.uuid4().hex
        self.process: subprocess.Popen | None = None
        self.starts = 0
        self._seen: dict[int, float] = {}
        self._sockets: set[str] = set()
        self._log_from = 0

    def __getstate__(self) -> dict[str, Any]:
        """For a test in another process than the one that started it."""
        assert self.process is None or self.process.poll() is not None, "it has not ended"
        return vars(self) | {"process": None}

    # ---- starting and waiting ----

    @property
    def log(self) -> Path:
        return self.home / f"{self.dir.name}-log.txt"

    def text(self) -> str:
        """The output of the current start."""
        with open(self.log, "rb") as file:
            file.seek(self._log_from)
            return file.read().decode(errors="replace")

    def start(self, **environment: str) -> None:
        """The same command each time, in a process of its own."""
        self.starts += 1
        self._log_from = self.log.stat().st_size if self.log.exists() else 0
        own = {
            MARK: self.mark,
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": str(ROOT),
        } | environment
        with open(self.log, "a") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.entry", str(self.config)],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ | own,
            )

    def wait(self, condition: Callable[[], Any], seconds: float, what: str) -> Any:
        """The condition's value as soon as it holds. Fails at the deadline, and when the run ends
        meanwhile.
        """
        deadline = time.monotonic() + seconds
        while True:
            ended = self.process.poll() is not None
            self.side.poll()
            if value := condition():
                return value
            assert not ended, (
                f"the run ended with {self.process.returncode} while waiting for "
                f"{what}:\n{self.text()[-4000:]}"
            )
            assert time.monotonic() < deadline, (
                f"not within {seconds:.0f} s: {what}\n{self.text()[-4000:]}"
            )
            time.sleep(POLL_S)

    def ends(self, seconds: float) -> int:
        """Wait for the end of the driver; its exit code."""
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the run did not end within {seconds:.0f} s:\n{self.text()[-4000:]}"
            ) from None

    def kill_driver(self) -> None:
        """SIGKILL, and wait until all processes of the run are gone by themselves."""
        self.process.kill()
        self.wait_until_gone()

    def wait_until_gone(self) -> None:
        """Wait until no process of the run is left. Ray's own agents outlive a killed raylet by up
        to two minutes; they are ended here.
        """
        self.process.wait(timeout=GONE_S)
        deadline = time.monotonic() + GONE_S
        while left := [
            pid
            for pid in self.processes()
            if "Agent" not in command(pid) and "agent" not in command(pid)
        ]:
            assert time.monotonic() < deadline, (
                f"still running: { {pid: command(pid)[:200] for pid in left} }"
            )
            time.sleep(0.05)
        for pid in self.processes():
            kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End whatever a failed test left."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=GONE_S)
        for pid in self.processes():
            kill(pid, signal.SIGCONT)
            kill(pid, signal.SIGKILL)
        shutil.rmtree(self.temporary, ignore_errors=True)

    # ---- processes ----

    def processes(self) -> list[int]:
        """Living processes of the run: those that carry its mark or keep a record, and all that
        they started (verifiers have a clean environment).
        """
        found = {
            entry.pid
            for entry in self.side.entries
            if entry.what in ("driver", "actor", "rank") and self._is_ours(entry)
        }
        own = f"{MARK}={self.mark}".encode()
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and own in (entry / "environ").read_bytes():
                    found.add(int(entry.name))
            except OSError:
                continue  # it ended while we looked, or is not ours
        for pid in list(found):
            found.update(children(pid))
        self._seen.update({pid: born(pid) for pid in found if pid not in self._seen})
        return sorted(
            pid for pid, birth in self._seen.items() if birth and born(pid) == birth and alive(pid)
        )

    @staticmethod
    def _is_ours(entry: Entry) -> bool:
        """Whether the process that wrote this lives still, and not another one with its number."""
        return 0 < born(entry.pid) <= entry.at + 1.0

    def actors(self) -> list[int]:
        """Rollout actors that live and have begun to produce."""
        return [
            entry.pid
            for entry in self.side.having("actor")
            if alive(entry.pid) and not stopped(entry.pid) and self._produces(entry.pid)
        ]

    def _produces(self, pid: int) -> bool:
        return any(entry.pid == pid for entry in self.side.having("ack"))

    def engine_of(self, actor: int) -> int:
        [engine] = [pid for pid in children(actor) if "EngineCore" in command(pid)]
        return engine

    def children_of(self, actor: int) -> list[int]:
        """Processes of an actor that run the task's code: verifiers, or environments."""
        names = ("verifier_child", "environments.child")
        return [pid for pid in children(actor) if any(name in command(pid) for name in names)]

    def ranks(self) -> list[int]:
        """Living learner ranks, in order."""
        found = {
            entry.values[0]: entry.pid for entry in self.side.having("rank") if alive(entry.pid)
        }
        return [found[rank] for rank in sorted(found)]

    def teacher(self) -> int:
        """Process of the frozen model; that of its engine is its child."""
        [teacher] = self._teachers()
        return teacher

    def engines_of_teacher(self, *, but: int) -> list[int]:
        """Engine of the frozen model once another process than this one has it."""
        found = [pid for pid in self._teachers() if pid != but]
        return [one for pid in found for one in children(pid) if "EngineCore" in command(one)]

    def _teachers(self) -> list[int]:
        return [pid for pid in self.processes() if command(pid).startswith("ray::FrozenProcess")]

    def queue(self) -> int:
        [queue] = [pid for pid in self.processes() if command(pid).startswith("ray::QueueProcess")]
        return queue

    # ---- what must not be left ----

    def note_belongings(self) -> None:
        """Remember the processes and listening sockets that the run has now."""
        listening = listeners()
        for pid in self.processes():
            try:
                targets = [os.readlink(handle) for handle in Path(f"/proc/{pid}/fd").iterdir()]
            except OSError:
                continue  # it ended while we looked
            self._sockets.update(
                inode
                for target in targets
                if (inode := target.removeprefix("socket:[").rstrip("]")) in listening
            )

    def leftovers(self) -> list[str]:
        """Processes, listening sockets, memory segments and temporary files of the run that are
        still there.
        """
        keys = {entry.values[1] for entry in self.side.having("rank")}
        left = [f"process {pid}: {command(pid)[:200]}" for pid in self.processes()]
        left += [f"port {listeners()[inode]}" for inode in self._sockets & set(listeners())]
        left += [
            str(path)
            for path in Path("/dev/shm").iterdir()
            if any(path.name.startswith(f"async_grpo-{key}-") for key in keys)
        ]
        left += [
            str(path) for path in self.temporary.iterdir() if path.name != "ray"
        ]  # its logs stay, as everywhere
        left += [str(path) for path in (self.dir / "checkpoints").glob("*.tmp")]
        return left


def alive(pid: int) -> bool:
    """Whether the process is there; a zombie is not."""
    return _status(pid) not in ("", "Z", "X")


def stopped(pid: int) -> bool:
    """Whether it was stopped by a signal."""
    return _status(pid) == "T"


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def born(pid: int) -> float:
    """When the process was started, in seconds since the machine was; 0 once it is gone."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK")


def command(pid: int) -> str:
    """Its command line, "" once it is gone."""
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    """Living children of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except OSError:
            continue  # the thread ended while we looked
    return [child for child in found if alive(child)]


def kill(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def listeners() -> dict[str, str]:
    """Inode and address of every listening TCP socket."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found[fields[9]] = re.sub(r"^.*:", "", fields[1])
    return found
