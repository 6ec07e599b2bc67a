"""How a run ends: by request and by signals, with which code, and what it leaves to look at."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from async_grpo import errors
from async_grpo.errors import EXIT_MEANING, NonFinite, StalenessError, StopRequested
from async_grpo.observe.console.console import Console
from async_grpo.run.ending import guarded
from async_grpo.runtime import stopping
from async_grpo.runtime.stopping import STOPPED_EARLY
from tests.support.waiting import wait_until_gone

ROOT = Path(__file__).parents[2]


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own, as the trainer has one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


async def after(seconds: float, value: Any = None) -> Any:
    await asyncio.sleep(seconds)
    if isinstance(value, Exception):
        raise value
    return value


def test_a_stoppable_wait_gives_way_and_others_do_not(loop) -> None:
    stop = stopping.Stop()
    assert stop.run(after(0, 7), loop, stoppable=True) == 7
    stop.set()
    with pytest.raises(StopRequested):
        stop.run(after(60), loop, stoppable=True)
    assert stop.run(after(2 * stopping.POLL_S, 8), loop, stoppable=False) == 8, (
        "what must be whole is not cut short"
    )


def test_an_error_of_the_work_is_raised_and_a_stop_asked_meanwhile_ends_the_wait(loop) -> None:
    stop = stopping.Stop()
    with pytest.raises(KeyError):
        stop.run(after(0, KeyError("no")), loop, stoppable=True)
    threading.Timer(stopping.POLL_S, stop.set).start()
    with pytest.raises(StopRequested):
        stop.run(after(60), loop, stoppable=True)


def test_work_that_was_cut_short_has_ended_before_anybody_goes_on(loop) -> None:
    """Else Ray would be shut down under a start that still makes actors."""
    stop, told = stopping.Stop(), []

    async def work() -> None:
        try:
            stop.set()
            time.sleep(3 * stopping.POLL_S)  # a call that does not give way, as Ray's are
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            told.append("ended")

    with pytest.raises(StopRequested):
        stop.run(work(), loop, stoppable=True)
    assert told == ["ended"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_command_is_imported_ends_it_in_order(number: int) -> None:
    code = (
        "import runpy, sys, os, signal\n"
        "from importlib.abc import MetaPathFinder\n"
        "class Finder(MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'async_grpo.config.load':\n"
        f"            os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv = ['run', 'none.yaml']\n"
        "runpy.run_module('async_grpo.run', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == f"{stopping.STOPPED_EARLY}\nexit code 0: {EXIT_MEANING[0]}\n"


def test_after_the_run_signals_mean_what_they_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with stopping.Signals(print):
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    assert before == {number: signal.getsignal(number) for number in before}
    try:
        stopping.stop_early()
        with stopping.Signals(lambda text: None):
            pass
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


CHILD = """
import os, subprocess, sys, time
from async_grpo.runtime.stopping import Signals

def say(text):  # whole lines, whichever thread says them
    os.write(1, f"{text}\\n".encode())

class Trainer:
    def request_stop(self): say("requested")
    def abandon(self): say("abandoned")

with Signals(say) as signals:
    if sys.argv[1] == "early":
        say("ready")
        while not signals.requested:
            time.sleep(0.01)
    signals.attach(Trainer())
    started = subprocess.Popen(["sh", "-c", "echo $$; sleep 600 > /dev/null & wait"])
    if sys.argv[1] == "late":
        say("ready")
    # in short waits, as the trainer's: Python forgets a signal between its handlers and a long one
    for _ in range(600):
        time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("when", ["early", "late"])
def test_the_first_signal_asks_and_the_second_ends(number: signal.Signals, when: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, when],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        first = (
            {child.stdout.readline(), child.stdout.readline()}
            if when == "late"
            else {child.stdout.readline()}
        )
        assert "ready\n" in first
        child.send_signal(number)
        first |= {child.stdout.readline() for _ in range(2 if when == "late" else 3)}
        [shell] = [int(line) for line in first if line.strip().isdigit()]
        assert "requested\n" in first and any(
            line.startswith(f"{number.name}: the run ends after") for line in first
        )
        child.send_signal(number)
        assert child.wait(timeout=30) == 128 + number
        rest = child.stdout.read()
        wait_until_gone([shell])
        assert (
            f"exit code {128 + number}: a second signal ({number.name})" in rest
            and "abandoned" in rest
        )
    finally:
        child.kill()
        child.wait(timeout=10)
        child.stdout.close()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(None, "gives this run 3 s"), ("600", "gives this run 600 s"), ("5", "is too short")],
)
def test_a_job_is_told_how_long_it_has(monkeypatch, seconds: str | None, expected: str) -> None:
    monkeypatch.delenv("RAY_JOB_STOP_WAIT_TIME_S", raising=False)
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    assert stopping.grace_period() is None
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    if seconds is not None:
        monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", seconds)
    line = stopping.grace_period()
    assert (
        expected in line
        and "\n" not in line
        and ("RAY_JOB_STOP_WAIT_TIME_S to 600" in line) is (seconds != "600")
    )


class Ending:
    """A trainer whose run ends with an error."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.step_under_way, self.stopped = run_dir, 12, []

    @property
    def system(self) -> None:
        raise errors.RunError("there are no processes to look at")

    def stop(self, status: str, *, ending: tuple[int, str] | None = None) -> None:
        self.stopped.append(status)
        self.ending = ending


def remote(error: Exception) -> Exception:
    """The error as it arrives from a process of the run, in a task group of the driver."""
    copy = pickle.loads(pickle.dumps(error))
    told = ray.exceptions.RayTaskError(
        "update", "a traceback", copy, proctitle="learner", pid=1, ip="127.0.0.1"
    )
    return ExceptionGroup("unhandled errors", [told.as_instanceof_cause()])


@pytest.mark.parametrize(
    ("error", "code", "ids"),
    [
        (NonFinite("loss", [41, 7]), 6, [7, 41]),
        (NonFinite("gradient norm of update 0, nan,", [3]), 6, [3]),
        (StalenessError("step 12 would train group 9"), 6, None),
        (errors.VerifierFailed("group 3 could not be scored"), 4, None),
        (errors.Stalled("no batch"), 5, None),
        (KeyError("a bug"), 1, None),
    ],
)
def test_errors_end_with_their_code_and_non_finite_groups_are_kept(
    tmp_path, capsys, error, code, ids
) -> None:
    trainer = Ending(tmp_path)

    with guarded(trainer, Console()) as ended:
        raise remote(error)
    assert ended.code == code and trainer.stopped == ["FAILED"]
    assert trainer.ending[0] == code and trainer.ending[1], "the report tells of it"
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == f"error: exit code {code}: {EXIT_MEANING[code]}"
    path = tmp_path / "non_finite.json"
    assert path.exists() is (ids is not None)
    if ids is not None:
        assert json.loads(path.read_text()) == {"step": 12, "group_ids": ids, "reason": str(error)}
        assert any(str(path) in line for line in out)


def test_a_stop_during_the_start_is_exit_0(tmp_path, capsys) -> None:
    trainer = Ending(tmp_path)

    with guarded(trainer, Console()) as ended:
        raise StopRequested("the run was asked to end")
    assert ended.code == 0 and trainer.stopped == ["FINISHED"]
    assert capsys.readouterr().out.splitlines() == [
        STOPPED_EARLY,
        f"exit code 0: {EXIT_MEANING[0]}",
    ]


CONTRACT = {
    0: ("stopped on request", {"StopRequested"}),
    1: ("unexpected error", {"RunError"}),
    2: ("configuration", {"SetupError", "DirectoryTaken"}),
    3: ("no learning signal left", {"NoSignal"}),
    4: ("process deaths", {"FaultBudgetSpent", "LearnerLost", "VerifierFailed"}),
    5: ("stalled", {"Stalled"}),
    6: ("wrong numbers", {"NonFinite", "StalenessError", "TransferMismatch"}),
    7: ("journal", {"JournalError", "JournalDamage"}),
}
"""Exit code, on which scripts of users rely -> words of its meaning, and the errors with it."""


def test_exit_codes_stay_what_they_are() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", page, re.MULTILINE)
    assert [int(code) for code, _ in rows] == list(EXIT_MEANING) == list(CONTRACT)
    kinds = [one for one in vars(errors).values() if hasattr(one, "exit_code")]
    for (code, meaning), (words, named) in zip(rows, CONTRACT.values(), strict=True):
        assert words in meaning
        assert {one.__name__ for one in kinds if one.exit_code == int(code)} == named


@pytest.mark.parametrize(
    "error",
    [
        NonFinite("loss", [41, 7]),
        errors.LearnerLost("rank 1 is silent", silent=True),
        *[
            kind("what is wrong")
            for kind in vars(errors).values()
            if isinstance(kind, type)
            and issubclass(kind, errors.RunError)
            and kind not in (NonFinite, errors.LearnerLost)
        ],
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_the_same_after_it_crossed_a_process(error: errors.RunError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_waiting_for_groups_ends_when_asked() -> None:
    import asyncio

    from async_grpo.run.loop import Loop

    class Queue:
        async def get_batch(self, step: int) -> None:
            loop.stopping = True

    class Publisher:
        async def refresh(self, version: int) -> None:
            return None

    loop = object.__new__(Loop)

    async def main() -> None:
        loop._config = SimpleNamespace(watchdog=SimpleNamespace(step_timeout_s=60.0))
        loop._queue, loop._publisher = Queue(), Publisher()
        loop.stopping = loop._repeating = False
        loop._failure = None
        await asyncio.wait_for(loop._take(1), 30)

    began = time.monotonic()
    with pytest.raises(StopRequested, match="learner step 1"):
        asyncio.run(main())
    assert time.monotonic() - began < 30
