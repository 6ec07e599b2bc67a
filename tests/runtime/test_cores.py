"""Cores that waiting processes lend: children that work or wait, registered as rank and engine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from async_grpo.runtime import stacks
from async_grpo.runtime.cores import Lender, compute_in, stay_on

CORES = sorted(os.sched_getaffinity(0))[:2]
LOW, HIGH, BOTH = {CORES[0]}, {CORES[-1]}, set(CORES)
CHILD = """
import os, sys, threading, time
from async_grpo.runtime import stacks
from async_grpo.runtime.cores import stay_on
stay_on([int(sys.argv[2])])
working = threading.Event()
def work():
    while working.wait():
        sum(range(10_000))
threading.Thread(target=work, daemon=True).start()
stacks.register(sys.argv[1], sys.argv[3])
print("ready", flush=True)
for line in sys.stdin:
    working.set() if line == "work\\n" else working.clear()
"""
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be lent")


class Child:
    """A process with a thread that works when it is told to."""

    def __init__(self, role: str, core: int, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, role, str(core), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def tell(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()

    def on(self) -> list[set[int]]:
        """Cores of all of its threads."""
        threads = os.listdir(f"/proc/{self.process.pid}/task")
        return [os.sched_getaffinity(int(thread)) for thread in threads]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Child, Child]]:
    rank = Child("learner-0", max(HIGH), tmp_path)
    engine = Child("actor-0.0+engine", min(LOW), tmp_path)
    yield rank, engine
    rank.end()
    engine.end()


@pytest.fixture
def lender(tmp_path: Path) -> Iterator[Lender]:
    lender = Lender(tmp_path, CORES)
    lender.start()
    yield lender
    lender.stop()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def test_who_waits_lends_its_core_and_takes_it_back(
    pair: tuple[Child, Child], lender: Lender
) -> None:
    rank, engine = pair
    rank.tell("work")
    until(lambda: rank.on() == [BOTH] * 2)  # every thread of it
    engine.tell("work")
    until(lambda: rank.on() == [HIGH] * 2 and engine.on() == [LOW] * 2)
    rank.tell("wait")
    until(lambda: engine.on() == [BOTH] * 2)
    rank.tell("work")
    until(lambda: rank.on() == [HIGH] * 2 and engine.on() == [LOW] * 2)
    lender.stop()
    engine.tell("wait")
    time.sleep(0.3)
    assert rank.on() == [HIGH] * 2


def test_a_process_that_died_lends_all_and_its_successor_is_found(
    pair: tuple[Child, Child], lender: Lender, tmp_path: Path
) -> None:
    rank, engine = pair
    rank.tell("work")
    engine.tell("work")
    until(lambda: rank.on() == [HIGH] * 2)
    engine.end()
    until(lambda: rank.on() == [BOTH] * 2)
    another = Child("actor-0.1+engine", min(LOW), tmp_path)
    try:
        another.tell("work")
        until(lambda: rank.on() == [HIGH] * 2 and another.on() == [LOW] * 2)
    finally:
        another.end()


def test_nothing_is_lent_without_cores(pair: tuple[Child, Child], tmp_path: Path) -> None:
    rank, _ = pair
    lender = Lender(tmp_path, ())
    lender.start()
    rank.tell("work")
    time.sleep(0.3)
    assert rank.on() == [HIGH] * 2
    lender.stop()


def test_libraries_compute_in_as_many_threads_on_one_core(tmp_path: Path) -> None:
    code = "import torch; print(torch.get_num_threads())"
    environment = dict(os.environ)
    before = os.sched_getaffinity(0)
    try:
        compute_in(2)
        stay_on(LOW)
        found = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
        )
    finally:
        stay_on(before)
        os.environ.clear()
        os.environ.update(environment)
    assert found.stdout == "2\n"
    assert not stacks.registered(tmp_path)
