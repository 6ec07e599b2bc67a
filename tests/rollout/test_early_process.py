"""The process that is started before EngineCore is wanted: it becomes what multiprocessing would
have spawned, or goes.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from async_grpo.rollout.engine.vllm import early_process
from async_grpo.rollout.engine.vllm.early_process import ENGINE_CORE, EarlyProcess

CORE = min(os.sched_getaffinity(0))
TITLE = "VLLM::EngineCore"
"""What vLLM calls the process, by which people and tests find it."""


def report(path: str) -> None:
    """What a child is: who, since when it knows a module, on which cores, with which
    environment.
    """
    import tempfile

    import setproctitle

    setproctitle.setproctitle(TITLE)
    facts = [
        os.getpid(),
        "colorsys" in sys.modules,
        sorted(os.sched_getaffinity(0)),
        os.environ.get("EARLY_TEST"),
        tempfile.gettempdir(),
    ]
    title = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode()
    Path(path).write_text(repr([*facts, os.environ.get("PYTHONPATH"), title]))


def spawned(path: Path, *, name: str = ENGINE_CORE) -> tuple[int, list]:
    """Pid that multiprocessing knows, and what the child reported."""
    child = multiprocessing.get_context("spawn").Process(
        target=report, args=(str(path),), name=name
    )
    child.start()
    child.join(30)
    assert child.exitcode == 0
    return child.pid, eval(path.read_text())


@pytest.fixture
def early() -> Iterator[EarlyProcess]:
    process = EarlyProcess(cores=[CORE], modules=["colorsys"])
    yield process
    process.end()


def is_gone(pid: int) -> bool:
    """Whether the process has ended, waiting for it a while."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                return True
        except ChildProcessError:
            return True
        time.sleep(0.02)
    return False


def test_enginecore_is_the_process_that_was_started_early(
    early: EarlyProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EARLY_TEST", "set after it was started")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("LD_PRELOAD", early_process.preload())
    with early.offered():
        pid, found = spawned(tmp_path / "report")
    assert pid == early.pid
    assert found == [
        pid,
        True,
        [CORE],
        "set after it was started",
        str(tmp_path),
        os.environ.get("PYTHONPATH"),
        TITLE,
    ]
    assert is_gone(pid)


@pytest.mark.parametrize("why", ["another name", "other libraries", "died", "taken"])
def test_otherwise_a_process_of_its_own_is_spawned(
    early: EarlyProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setenv("LD_PRELOAD", "" if why == "other libraries" else early_process.preload())
    if why == "died":
        os.kill(early.pid, 9)
        os.waitid(os.P_PID, early.pid, os.WEXITED | os.WNOWAIT)
    usual = SpawnProcess._Popen
    with early.offered():
        if why == "taken":
            assert spawned(tmp_path / "first")[0] == early.pid
        name = "Worker" if why == "another name" else ENGINE_CORE
        pid, found = spawned(tmp_path / "report", name=name)
    assert pid != early.pid and found[:2] == [pid, False]
    assert found[2] == (sorted(os.sched_getaffinity(0)) if name == "Worker" else [CORE])
    assert SpawnProcess._Popen is usual and is_gone(early.pid)


def test_one_that_nobody_wants_goes(early: EarlyProcess) -> None:
    pid = early.pid
    os.close(early.writer)  # what happens when its parent forgets it
    early.finalizer.detach()
    os.close(early.sentinel)
    early._waits = False
    assert is_gone(pid)


def test_the_libraries_are_those_that_vllm_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/lib/libomp.so")
    assert (
        early_process.preload().endswith("/lib/libomp.so")
        and "libgomp" not in early_process.preload()
    )
    monkeypatch.delenv("LD_PRELOAD")
    assert all(Path(path).exists() for path in early_process.preload().split(":") if path)


def test_transformers_models_come_without_scikit_learn() -> None:
    code = (
        "import importlib.util, sys, async_grpo.runtime.light_imports, "
        "transformers.generation.candidate_generator;"
        "print(importlib.util.find_spec('sklearn') is not None, 'sklearn' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert out.stdout.split() == ["True", "False"], (
        "transformers asks elsewhere now whether scikit-learn is there"
    )
