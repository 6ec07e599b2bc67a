"""Stacks of processes that are stuck, the bundle of a run that ended badly, and who is named as the culprit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from async_grpo import stacks

START = "import sys; from async_grpo import stacks; stacks.register(sys.argv[1], sys.argv[2]); print('ready', flush=True)\n"
STUCK = {
    "lock": "import threading\ndef waits_for_a_lock():\n    lock = threading.Lock()\n    lock.acquire()\n    lock.acquire()\nwaits_for_a_lock()",
    "c": "import ctypes\ndef is_in_c():\n    ctypes.CDLL(None).pause()\nwhile True:\n    is_in_c()",
    "gil": "import ctypes\ndef holds_the_gil():\n    ctypes.PyDLL(None).sleep(1000)\nwhile True:\n    holds_the_gil()",
    "thread": (
        "import threading, time\ndef other_thread():\n    time.sleep(1000)\n"
        "threading.Thread(target=other_thread).start()\nwhile True:\n    time.sleep(1000)"
    ),
}


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start a registered process that then does this."""
    children = []

    def start(role: str, code: str, *, environment: dict[str, str] | None = None) -> subprocess.Popen:
        with open(tmp_path / f"{role}.log", "w") as log:
            child = subprocess.Popen(
                [sys.executable, "-c", START + code, role, str(tmp_path / "stacks")], stdout=subprocess.PIPE, stderr=log, text=True,
                env=os.environ | (environment or {}),
            )
        children.append(child)
        assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.wait(timeout=10)
        child.stdout.close()


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> object:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.01)
    return value


@pytest.mark.parametrize(("kind", "frame"), [("lock", "waits_for_a_lock"), ("c", "is_in_c"), ("gil", "holds_the_gil"), ("thread", "other_thread")])
def test_a_stuck_process_shows_its_stacks(spawn, tmp_path: Path, kind: str, frame: str) -> None:
    child = spawn("actor-0.0", STUCK[kind])
    wait_until(lambda: frame in "".join(one.text for one in stacks.look(tmp_path / "stacks")), 20, f"{kind}: the stack")
    [one] = stacks.look(tmp_path / "stacks")
    assert (one.process.pid, one.trouble, one.alive) == (child.pid, "", True) and frame in one.text
    assert child.poll() is None, "to be looked at harms nobody"


def test_who_does_not_answer_is_described(spawn, tmp_path: Path) -> None:
    stopped, dead, deaf = (spawn(role, STUCK["lock"]) for role in ("learner-0", "queue", "actor-0.0"))
    masked = spawn("actor-1.0", "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])\ntime.sleep(1000)")
    spawn("actor-2.0", "import faulthandler, signal, time\nfaulthandler.unregister(signal.SIGUSR2)\nprint('deaf', flush=True)\ntime.sleep(1000)")
    os.kill(stopped.pid, signal.SIGSTOP)
    dead.kill()  # not collected: a zombie
    blocked = 1 << (signal.SIGUSR2 - 1)
    wait_until(lambda: int(stacks.status(masked.pid)["SigBlk"], 16) & blocked, 20, "the mask")
    wait_until(lambda: stacks.status(dead.pid)["State"][0] == "Z" and stacks.status(stopped.pid)["State"][0] == "T", 20, "the signals")
    wait_until(lambda: not any(stacks._has_handler(one.pid) for one in stacks.registered(tmp_path / "stacks", role="actor-2.0")), 20, "deafness")
    started = time.monotonic()
    found = {one.process.role: one for one in stacks.look(tmp_path / "stacks", seconds=1.0)}
    assert time.monotonic() - started < 10
    assert {role: one.trouble for role, one in found.items()} == {
        "learner-0": "is stopped (by SIGSTOP)", "queue": "has ended", "actor-0.0": "", "actor-1.0": "does not write its stacks when it is asked",
        "actor-2.0": "has no handler for the signal",
    }
    assert [role for role, one in found.items() if not one.alive] == ["queue"]
    assert found["actor-0.0"].text and deaf.poll() is None
    assert found["learner-0"].process.name == f"learner-0 (pid {stopped.pid})"


def test_a_process_id_of_somebody_else_is_not_signalled(spawn, tmp_path: Path) -> None:
    child = spawn("queue", STUCK["lock"])
    [file] = (tmp_path / "stacks").iterdir()
    file.write_text('{"begun": 1, "logs": []}\n')
    [one] = stacks.look(tmp_path / "stacks")
    assert (one.trouble, one.alive, one.text) == ("has ended", False, "") and child.poll() is None


def test_children_are_parts_of_their_parent_and_the_end_removes_all(spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "stacks"
    for name in ("ASYNC_GRPO_STACKS", "ASYNC_GRPO_ROLE"):
        monkeypatch.delenv(name, raising=False)
    stacks.register_child("verifier")
    assert not directory.exists(), "a process of no run registers nowhere"
    stacks.register("actor-1.0", directory)
    child = subprocess.Popen([sys.executable, "-c", "from async_grpo import stacks; stacks.register_child('engine'); input()"], stdin=subprocess.PIPE)
    try:
        wait_until(lambda: len(stacks.registered(directory)) == 2, 20, "the registration of the child")
        spawn("actor-1.01", STUCK["lock"])
        assert [process.role for process in stacks.registered(directory, role="actor-1.0")] == ["actor-1.0", "actor-1.0+engine"]
        [engine] = [process for process in stacks.registered(directory) if process.parent == "actor-1.0"]
        assert engine.name == f"engine of actor-1.0 (pid {child.pid})"
    finally:
        child.communicate(b"\n", timeout=20)
        stacks.end(directory)
    assert not directory.exists() and stacks.environment() == {} and not stacks._has_handler(os.getpid())


def test_where_a_thread_is() -> None:
    text = (
        'Thread 0x1 (most recent call first):\n  File "/x/threading.py", line 5 in wait\n  File "/x/threading.py", line 6 in run\n\n'
        'Current thread 0x2 (most recent call first):\n  File "/x/torch/distributed/c10d.py", line 7 in all_reduce\n'
        '  File "/y/async_grpo/learner/learner.py", line 8 in update\n  File "/y/async_grpo/cluster/processes.py", line 9 in call\n'
    )
    assert stacks.where(text) == ["update (learner/learner.py:8), inside all_reduce (distributed/c10d.py:7)"]
