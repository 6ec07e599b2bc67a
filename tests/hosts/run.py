"""A run over several hosts, seen from outside: its steps, its lines with their times, its files,
and what it leaves on every host.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from async_grpo.run.checkpoint import directory as checkpoint
from tests.chaos import account, watched
from tests.chaos.harness import Side
from tests.support.hosts import RAY_PORT, Host, Hosts
from tests.support.models import write_model

R, CHECKPOINT_EVERY = 8, 40
PROBE_S = 15.0
START_S, SERVING_S, STEPS_S, END_S, LEFT_S = 240.0, 240.0, 120.0, 120.0, 60.0
COLOURS = re.compile(r"\x1b\[\d*m")
RAYS = ("raylet", "gcs_server", "/ray/", "ray.util.client", "ray::IDLE", "Agent")
"""What belongs to `ray start` and stays after a run."""
CACHES = ("torchinductor_", "__KMP_REGISTERED_LIB")
"""Of torch, for the user; and of its threads, which a killed process leaves."""


def settings(
    home: Path, run_dir: Path, *, weight_sync: dict[str, Any] | None = None, **cluster: Any
) -> dict[str, Any]:
    """Small steps, deadlines of seconds, a checkpoint now and then, and a task with which a random
    model is right half of the time, so that there is something to learn for long.
    """
    return {
        "seed": 5,
        "run": {"name": "hosts", "dir": str(run_dir), "total_steps": 100_000},
        "model": {"path": write_model(home / "model", hidden=128, positions=64)},
        "task": {"name": "tests.support.mixed_task:Mixed"},
        "rollout": {
            "rollout_batch_size": R,
            "group_size": 4,
            "prompt_length": 16,
            "response_length": 8,
        },
        "replay": {"max_staleness": 1, "max_attempts": 20},
        "algorithm": {"use_kl_loss": False},
        "learner": {"lr": 1e-5, "tokens_per_micro_batch": 4096},
        "checkpoint": {"every_steps": CHECKPOINT_EVERY, "keep": 1000},
        "evaluation": {"before": False, "max_samples": 2},
        "tracking": {"mlflow": False, "report": False},
        "weight_sync": weight_sync or {},
        "watchdog": {"probe_timeout_s": PROBE_S},
        "cluster": {
            "rollout_actors": {"min": 1, "max": 2},
            "engine": {"max_num_seqs": 32},
            "restart_budget": 20,
        }
        | cluster,
    }


@dataclass
class Event:
    """Something that happened to a host, and what the run did."""

    what: str
    begin: float
    end: float = 0.0
    gap: float = 0.0
    """Seconds without a learner step, the longest."""
    lines: list[tuple[float, str]] = field(default_factory=list)
    """What the run said, with the seconds since the beginning."""
    note: str = ""

    def said(self, *words: str) -> float | None:
        """After how many seconds the first line had all of these words."""
        found = (at for at, line in self.lines if all(word in line for word in words))
        return next(found, None)


class HostsRun:
    """One run directory on the storage that all hosts share, and the driver on one of them."""

    def __init__(self, home: Path, hosts: Hosts, driver: Host, **options: Any) -> None:
        """options: of `settings`."""
        self.hosts, self.host, self.dir = hosts, driver, home / "run"
        self.side = Side(watched.side_folder(self.dir))
        self.side.folder.mkdir(parents=True)
        self.log, self.config = home / "log.txt", home / "run.yaml"
        self.config.write_text(yaml.safe_dump(settings(home, self.dir, **options)))
        self.lines: list[tuple[float, str]] = []
        self.events: list[Event] = []
        self.process: subprocess.Popen[str] | None = None

    # ---- the driver ----

    def start(self) -> None:
        """The same command each time."""
        command = [sys.executable, "-m", "tests.chaos.entry", str(self.config)]
        self.lines = []
        self.process = self.host.start(
            ["env", f"RAY_ADDRESS={self.host.address}:{RAY_PORT}", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        threading.Thread(target=self._read, args=(self.process, self.lines), daemon=True).start()

    def _read(self, process: subprocess.Popen[str], lines: list[tuple[float, str]]) -> None:
        with open(self.log, "a") as log, process.stdout as said:
            for line in said:
                lines.append((time.time(), COLOURS.sub("", line.rstrip())))
                log.write(line)
                log.flush()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the driver."""
        [pid] = [
            pid
            for pid, command in self.host.processes().items()
            if "-m tests.chaos.entry" in command and command.startswith(sys.executable)
        ]
        os.kill(pid, number)

    def ends(self, seconds: float = END_S) -> int:
        """Wait for the end of the driver; its exit code."""
        try:
            code = self.process.wait(seconds)
            print(f"ended {time.time() - self.lines[-1][0]:.1f} s after its last line", flush=True)
            return code
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {seconds} s\n{self.text()}") from None

    def text(self) -> str:
        """The last lines of the current start, with the time of day."""
        last = ((time.strftime("%X", time.gmtime(at)), line) for at, line in self.lines[-60:])
        return "\n".join(map(" ".join, last))

    def wait(self, condition: Callable[[], Any], seconds: float, what: str) -> Any:
        """The condition's value as soon as it holds. Fails when the run ends meanwhile."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            code = self.process.poll()
            assert code is None, f"it ended with {code}, waiting for {what}\n{self.text()}"
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self.text()}"
            time.sleep(0.1)
        return value

    # ---- what it did ----

    def rows(self) -> list[dict[str, Any]]:
        """Complete lines of its metrics that tell of a learner step."""
        try:
            lines = (self.dir / "metrics.jsonl").read_text().split("\n")[:-1]
        except FileNotFoundError:
            return []
        return [row for row in map(json.loads, lines) if "train/loss" in row]

    def steps(self) -> int:
        """The newest learner step."""
        return max((row["step"] for row in self.rows()), default=0)

    def actors(self) -> int:
        """How many rollout actors the newest step knows."""
        rows = self.rows()
        return int(rows[-1]["cluster/rollout_actors"]) if rows else 0

    def goes_on(self, steps: int = 10) -> None:
        """Wait for further learner steps."""
        until = self.steps() + steps
        self.wait(lambda: self.steps() >= until, STEPS_S, f"learner step {until}")

    def has_actors(self, number: int) -> float:
        """Wait until so many serve; the seconds that it took."""
        begin = time.monotonic()
        self.wait(lambda: self.actors() == number, SERVING_S, f"{number} rollout actors")
        return time.monotonic() - begin

    def gap(self, begin: float, end: float) -> float:
        """The longest time between two learner steps in a stretch of time."""
        times = sorted(row["time"] for row in self.rows())
        pairs = zip(times, [*times[1:], time.time()], strict=True)
        return max(after - before for before, after in pairs if after > begin and before < end)

    def begins(self, what: str) -> Event:
        """Something is about to happen."""
        self.events.append(Event(what, time.time()))
        return self.events[-1]

    def is_over(self, event: Event, note: str = "") -> Event:
        """The run has come through it; what it did meanwhile."""
        event.end, event.note = time.time(), note
        event.gap = self.gap(event.begin, event.end)
        event.lines = [
            (at - event.begin, line) for at, line in self.lines if event.begin <= at <= event.end
        ]
        said = [
            f"    {at:5.1f} {line[:300]}"
            for at, line in event.lines
            if not line.startswith(("step ", "(raylet) ")) and " at v0." not in line
        ]
        print(f"{event.what}: longest gap {event.gap:.1f} s; {note}", *said, sep="\n", flush=True)
        return event

    def has_said(self, event: Event, *words: str) -> bool:
        """Whether a line since the beginning has all of these words."""
        since = (line for at, line in list(self.lines) if at >= event.begin)
        return any(all(word in line for word in words) for line in since)

    def newest_checkpoint(self) -> int:
        """The step of the newest complete checkpoint; 0 without one."""
        found = checkpoint.latest(self.dir)
        return 0 if found is None else checkpoint.verify(found)["step"]

    def comes_to_its_end(self) -> None:
        """SIGTERM saves and ends it; it leaves nothing, and nothing was lost or trained twice."""
        self.signal(signal.SIGTERM)
        assert self.ends() == 0, self.text()
        self.leaves_nothing()
        counts = account.check(self, batch=R)
        assert counts["trained"] == R * counts["steps"]
        print(table(self.events), counts, flush=True)

    # ---- what it leaves ----

    def leftovers(self, *, files: bool = True) -> dict[str, list[str]]:
        """By host: processes, and files in /tmp and /dev/shm, that are neither Ray's nor ours.
        files: those too that a killed run leaves to the next one.
        """
        found = {}
        for host in self.hosts:
            if host.init is None:
                continue
            known = {"home", "ray", *(path.parts[2] for path in host.covered)}
            left = [
                f"{pid} {command}"
                for pid, command in host.processes().items()
                if not any(mark in command for mark in RAYS)
            ]
            left += [
                f"{place}/{name}"
                for place in ("/tmp", "/dev/shm")
                for name in host.files_in(place)
                if name not in known
                and not name.startswith(CACHES)
                and (files or not name.startswith("async_grpo-"))
            ]
            if left:
                found[host.name] = left
        return found

    def leaves_nothing(self, *, files: bool = True) -> None:
        """Wait until nothing is left on any host."""
        deadline = time.monotonic() + LEFT_S
        while left := self.leftovers(files=files):
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.2)
        assert not files or not [*(self.dir / "checkpoints").glob("*.tmp")]


def table(events: list[Event]) -> str:
    """Rows of the table in the documentation."""
    return "\n".join(f"| {event.what} | {event.gap:.1f} s | {event.note} |" for event in events)


def lose_power(hosts: Hosts, host: Host) -> None:
    """No process of it says goodbye."""
    hosts.change(host.name, cut=True)
    host.kill()


def power_on(hosts: Hosts, host: Host, head: Host, *, shares: bool = True) -> None:
    """Boot it, with Ray's daemons in the cluster of `head`."""
    hosts.change(host.name)
    host.boot(shares=shares)
    host.start_ray(head, cpus=1)
