"""What a killed process would leave behind: directories that the next start removes, and children
that go with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from async_grpo.runtime import lifetime
from tests.support.waiting import alive, wait_until, wait_until_gone

ROOT = Path(__file__).parents[2]
CHAIN = """
import os, subprocess, sys, time
from async_grpo.runtime.lifetime import die_with, die_with_parent

role, tie, ancestor = sys.argv[1:]
if role == "last":
    die_with(int(ancestor)) if tie == "ancestor" else die_with_parent(os.getppid())
    print(os.getpid(), flush=True)
else:
    if role == "first":
        ancestor = str(os.getpid())
    following = {"first": "middle", "middle": "last"}[role] if tie == "ancestor" else "last"
    subprocess.Popen([sys.executable, "-c", os.environ["CHAIN"], following, tie, ancestor])
    print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("tie", "length", "stop"), [("parent", 2, True), ("ancestor", 3, False)])
def test_descendants_of_a_killed_process_are_killed(tie: str, length: int, stop: bool) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CHAIN": CHAIN}
    first = subprocess.Popen(
        [sys.executable, "-c", CHAIN, "first", tie, "0"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    pids: list[int] = []
    try:
        pids = [int(first.stdout.readline()) for _ in range(length)]
        assert all(map(alive, pids)) and first.pid in pids
        if stop:  # the kernel's signal reaches one that cannot run
            [last] = set(pids) - {first.pid}
            os.kill(last, signal.SIGSTOP)
        first.kill()
        wait_until_gone(pids)
    finally:
        first.kill()
        first.wait(timeout=10)
        first.stdout.close()
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_sockets_fit_where_the_temporary_directory_is_long(monkeypatch, tmp_path) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(lifetime, "_SHORT", str(tmp_path))
    for parent, where in ((long, tmp_path), ("/tmp", Path("/tmp"))):
        monkeypatch.setattr(lifetime.tempfile, "tempdir", str(parent))
        mine = lifetime.own_directory("sockets")
        assert mine.parent == where
        mine.rmdir()
    monkeypatch.setattr(lifetime.tempfile, "tempdir", str(long))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(timeout=30)
    processes = lifetime.owner().partition(".")[0]
    abandoned = tmp_path / f"async_grpo-sockets-{processes}.{ended.pid}-a"
    abandoned.mkdir()
    lifetime.remove_abandoned("sockets")
    assert not abandoned.exists()


def test_a_directory_goes_once_its_owner_is_gone(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(lifetime.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(lifetime, "_LONGEST", 1_000)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(timeout=30)
    processes = lifetime.owner().partition(".")[0]
    abandoned, elsewhere, other = (
        tmp_path / name
        for name in (
            f"async_grpo-engine-{processes}.{ended.pid}-a",
            f"async_grpo-engine-ffffffff1.{ended.pid}-a",
            f"async_grpo-other-{processes}.{ended.pid}-a",
        )
    )
    for path in (abandoned, elsewhere, other):
        path.mkdir()
        (path / "socket").write_text("")
    mine = lifetime.own_directory("engine")
    assert {path.name for path in tmp_path.iterdir()} == {mine.name, elsewhere.name, other.name}
    assert (
        mine.stat().st_mode & 0o077 == 0
        and lifetime.own_directory("engine") != mine
        and mine.exists()
    )
    assert not lifetime.is_gone(lifetime.owner()) and lifetime.is_gone(f"{processes}.{ended.pid}")


def test_a_process_that_nobody_reaps_is_gone_and_one_whose_first_thread_ended_is_not() -> None:
    processes = lifetime.owner().partition(".")[0]
    code = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    ended = subprocess.Popen([sys.executable, "-c", ""])
    headless = subprocess.Popen([sys.executable, "-c", code])
    try:
        for process in (ended, headless):
            stat = Path(f"/proc/{process.pid}/stat")
            wait_until(lambda stat=stat: ") Z " in stat.read_text(), 30, "the end of a thread")
        assert lifetime.is_gone(f"{processes}.{ended.pid}")
        assert not lifetime.is_gone(f"{processes}.{headless.pid}")
    finally:
        headless.kill()
        for process in (ended, headless):
            process.wait(timeout=30)


def test_owners_that_were_killed_just_now_are_waited_for_and_others_are_not(
    monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(lifetime.tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    killed, serving = (subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(2))
    processes = lifetime.owner().partition(".")[0]
    paths = {
        owner.pid: tmp_path / f"async_grpo-engine-{processes}.{owner.pid}-a"
        for owner in (killed, serving)
    }
    for path in paths.values():
        path.mkdir()
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            killed.kill()
            killed.wait(timeout=30)

    try:
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=nap)
        monkeypatch.setattr(lifetime, "time", clock)
        assert {killed.pid, serving.pid} <= set(lifetime.descendants())
        lifetime.remove_abandoned("engine", wait_s=60.0)
        assert naps == [] and all(path.exists() for path in paths.values())
        lifetime.remove_abandoned("engine", ending=[killed.pid], wait_s=60.0)
        assert len(naps) == 3 and not paths[killed.pid].exists() and paths[serving.pid].exists()
        lifetime.remove_abandoned("engine", ending=[serving.pid], wait_s=0.0)
        assert paths[serving.pid].exists(), "it did not end in time: the next start removes it"
    finally:
        for process in (killed, serving):
            process.kill()
            process.wait(timeout=30)
