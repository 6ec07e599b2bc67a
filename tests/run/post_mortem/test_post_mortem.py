"""Stacks of processes that are stuck, the bundle of a run that ended badly, and who is named as the
culprit.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from async_grpo.cluster import watchdog
from async_grpo.observe import diagnosis as diagnose
from async_grpo.run import post_mortem
from async_grpo.runtime import stacks

START = (
    "import sys; from async_grpo.runtime import stacks; stacks.register(sys.argv[1], sys.argv[2]); "
    "print('ready', flush=True)\n"
)
STUCK = {
    "lock": "import threading\ndef waits_for_a_lock():\n    lock = threading.Lock()\n    "
    "lock.acquire()\n    lock.acquire()\nwaits_for_a_lock()",
    "c": "import ctypes\ndef is_in_c():\n    ctypes.CDLL(None).pause()\nwhile True:\n    is_in_c()",
    "gil": "import ctypes\ndef holds_the_gil():\n    ctypes.PyDLL(None).sleep(1000)\nwhile "
    "True:\n    holds_the_gil()",
    "thread": (
        "import threading, time\ndef other_thread():\n    time.sleep(1000)\n"
        "threading.Thread(target=other_thread).start()\nwhile True:\n    time.sleep(1000)"
    ),
}


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start a registered process that then does this."""
    children = []

    def start(
        role: str, code: str, *, environment: dict[str, str] | None = None
    ) -> subprocess.Popen:
        with open(tmp_path / f"{role}.log", "w") as log:
            child = subprocess.Popen(
                [sys.executable, "-c", START + code, role, str(tmp_path / "stacks")],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
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


@pytest.mark.parametrize(
    ("kind", "frame"),
    [
        ("lock", "waits_for_a_lock"),
        ("c", "is_in_c"),
        ("gil", "holds_the_gil"),
        ("thread", "other_thread"),
    ],
)
def test_a_stuck_process_shows_its_stacks(spawn, tmp_path: Path, kind: str, frame: str) -> None:
    child = spawn("actor-0.0", STUCK[kind])
    wait_until(
        lambda: frame in "".join(one.text for one in stacks.look(tmp_path / "stacks")),
        20,
        f"{kind}: the stack",
    )
    [one] = stacks.look(tmp_path / "stacks")
    assert (one.process.pid, one.trouble, one.alive) == (child.pid, "", True) and frame in one.text
    assert child.poll() is None, "to be looked at harms nobody"


def test_who_does_not_answer_is_described(spawn, tmp_path: Path) -> None:
    stopped, dead, deaf = (
        spawn(role, STUCK["lock"]) for role in ("learner-0", "queue", "actor-0.0")
    )
    masked = spawn(
        "actor-1.0",
        "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, "
        "[signal.SIGUSR2])\ntime.sleep(1000)",
    )
    spawn(
        "actor-2.0",
        "import faulthandler, signal, "
        "time\nfaulthandler.unregister(signal.SIGUSR2)\nprint('deaf', "
        "flush=True)\ntime.sleep(1000)",
    )
    os.kill(stopped.pid, signal.SIGSTOP)
    dead.kill()  # not collected: a zombie
    blocked = 1 << (signal.SIGUSR2 - 1)
    wait_until(lambda: int(stacks.status(masked.pid)["SigBlk"], 16) & blocked, 20, "the mask")
    wait_until(
        lambda: (
            stacks.status(dead.pid)["State"][0] == "Z"
            and stacks.status(stopped.pid)["State"][0] == "T"
        ),
        20,
        "the signals",
    )
    wait_until(
        lambda: (
            not any(
                stacks._has_handler(one.pid)
                for one in stacks.registered(tmp_path / "stacks", role="actor-2.0")
            )
        ),
        20,
        "deafness",
    )
    started = time.monotonic()
    found = {one.process.role: one for one in stacks.look(tmp_path / "stacks", seconds=1.0)}
    assert time.monotonic() - started < 10
    assert {role: one.trouble for role, one in found.items()} == {
        "learner-0": "is stopped (by SIGSTOP)",
        "queue": "has ended",
        "actor-0.0": "",
        "actor-1.0": "does not write its stacks when it is asked",
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


def test_children_are_parts_of_their_parent_and_the_end_removes_all(
    spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "stacks"
    for name in ("ASYNC_GRPO_STACKS", "ASYNC_GRPO_ROLE"):
        monkeypatch.delenv(name, raising=False)
    stacks.register_child("verifier")
    assert not directory.exists(), "a process of no run registers nowhere"
    stacks.register("actor-1.0", directory)
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from async_grpo.runtime import stacks; stacks.register_child('engine'); input()",
        ],
        stdin=subprocess.PIPE,
    )
    try:
        wait_until(
            lambda: len(stacks.registered(directory)) == 2, 20, "the registration of the child"
        )
        spawn("actor-1.01", STUCK["lock"])
        assert [process.role for process in stacks.registered(directory, role="actor-1.0")] == [
            "actor-1.0",
            "actor-1.0+engine",
        ]
        [engine] = [
            process for process in stacks.registered(directory) if process.parent == "actor-1.0"
        ]
        assert engine.name == f"engine of actor-1.0 (pid {child.pid})"
    finally:
        child.communicate(b"\n", timeout=20)
        stacks.end(directory)
    assert (
        not directory.exists()
        and stacks.environment() == {}
        and not stacks._has_handler(os.getpid())
    )


def test_who_takes_the_place_of_a_dead_process_removes_its_file(spawn, tmp_path: Path) -> None:
    dead, alive = (
        spawn("actor-0.0+verifier", STUCK["lock"]),
        spawn("actor-0.0+verifier", STUCK["lock"]),
    )
    dead.kill()
    wait_until(lambda: stacks.status(dead.pid)["State"][0] == "Z", 20, "its end")
    new = spawn("actor-0.0+verifier", STUCK["lock"])
    assert {process.pid for process in stacks.registered(tmp_path / "stacks", role="actor")} == {
        alive.pid,
        new.pid,
    }


def test_where_a_thread_is() -> None:
    text = (
        'Thread 0x1 (most recent call first):\n  File "/x/threading.py", line 5 in wait\n '
        ' File "/x/threading.py", line 6 in run\n\n'
        "Current thread 0x2 (most recent call first):\n  File "
        '"/x/torch/distributed/c10d.py", line 7 in all_reduce\n'
        '  File "/y/async_grpo/learner/learner.py", line 8 in _update\n  File '
        '"/y/async_grpo/cluster/learner_group.py", line 9 in call\n'
    )
    assert stacks.where(text) == [
        "_update (learner/learner.py:8), inside all_reduce (distributed/c10d.py:7)"
    ]


# ---- what is concluded ----


def facts(**changes: object) -> dict:
    """A run of one actor that waits for groups, in which all is well."""
    processes = [
        {
            "role": role,
            "name": name,
            "pid": pid,
            "alive": True,
            "trouble": "",
            "where": [],
            "usage": {},
        }
        for role, name, pid in [
            ("driver", "driver (pid 1)", 1),
            ("queue", "queue (pid 2)", 2),
            ("learner-0", "learner-0 (pid 3)", 3),
            ("learner-1", "learner-1 (pid 4)", 4),
            ("actor-0.0", "actor-0.0 (pid 5)", 5),
            ("actor-0.0+engine", "engine of actor-0.0 (pid 6)", 6),
        ]
    ]
    status = {"serving": "v0.2", "paused": False, "in_flight": [], "verifying": [], "counts": {}}
    return {
        "exit_code": 5,
        "meaning": "stalled",
        "error": "no batch",
        "time": "now",
        "phase": "waiting for the groups of learner step 3",
        "steps_done": 2,
        "silent": {},
        "versions": {},
        "queue": None,
        "learner": [],
        "nodes": [{"host": "a", "processes": processes, "machine": {}}],
        "deaths": [],
        "dropped": {},
        "actors": {"actor-0.0": {"serving_set": True, "acknowledged": "v0.2", "status": status}},
    } | changes


def change(given: dict, role: str, **changes: object) -> None:
    [process] = [process for process in given["nodes"][0]["processes"] if process["role"] == role]
    process |= changes


def in_flight(stage: str, seconds: float, group_id: int = 7) -> dict:
    return {
        "group_id": group_id,
        "attempt": 1,
        "stage": stage,
        "stage_s": seconds,
        "age_s": seconds + 1,
    }


def test_nobody_is_blamed_without_a_reason() -> None:
    where, found = diagnose.conclude(facts())
    assert (where, found) == (
        "it was waiting for the groups of learner step 3; nobody stands out: see the stacks",
        [],
    )


def test_a_stopped_process_is_blamed_before_those_who_wait_for_it() -> None:
    given = facts(silent={"actor actor-0.0": "no answer within 3 s"}, deaths=["actor-9.0 died"])
    change(given, "actor-0.0", trouble="does not write its stacks when it is asked")
    change(given, "learner-0", trouble="is stopped (by SIGSTOP)")
    where, found = diagnose.conclude(given)
    assert where.endswith("; learner-0 (pid 3) is stopped (by SIGSTOP)")
    assert found[1:] == [
        "actor-0.0 (pid 5) does not write its stacks when it is asked",
        "actor-0.0 does not answer (no answer within 3 s)",
        "earlier: actor-9.0 died",
    ]


@pytest.mark.parametrize(
    ("role", "replaced", "blamed"),
    [
        ("queue", False, True),
        ("queue", True, False),
        ("actor-0.0+engine", False, True),
        ("actor-3.1", False, False),
        ("actor-0.0+verifier", False, False),
    ],
)
def test_who_has_ended_is_blamed_unless_it_was_replaced(
    role: str, replaced: bool, blamed: bool
) -> None:
    given = facts()
    processes = given["nodes"][0]["processes"]
    if not replaced:
        processes[:] = [process for process in processes if process["role"] != role]
    processes.append(
        {
            "role": role,
            "name": "it",
            "pid": 9,
            "alive": False,
            "trouble": "has ended",
            "where": [],
            "usage": {},
        }
    )
    _, found = diagnose.conclude(given)
    assert found == (["it has ended"] if blamed else [])


@pytest.mark.parametrize(
    ("stage", "status", "says"),
    [
        ("generating", {}, "engine of actor-0.0 (pid 6) has been generating group 7 for 30 s"),
        (
            "generating",
            {"paused": True},
            "engine of actor-0.0 (pid 6) is paused for new weights for 30 s",
        ),
        (
            "verifying",
            {"verifying": [(8, 1.0), (9, 20.0)]},
            "verifier of actor-0.0 (pid 9) has been at one response for 20 s",
        ),
        (
            "verifying",
            {"verifying": [(8, 1.0)]},
            "group 7 of actor-0.0 has waited for its verifiers for 30 s",
        ),
        (
            "verifying",
            {"verifying": [(9, 20.0)], "asks": "teacher big"},
            "group 7 of actor-0.0 has waited for teacher big for 30 s",
        ),
        ("put", {}, "actor-0.0 has had group 7 in stage put for 30 s"),
    ],
)
def test_whom_the_oldest_group_waits_for(stage: str, status: dict, says: str) -> None:
    given, asks = facts(), status.get("asks", "its verifiers")
    given["actors"]["actor-0.0"]["status"] |= {
        "in_flight": [in_flight(stage, 30.0) | {"asks": asks}, in_flight("put", 1.0, 8)],
        **status,
    }
    where, found = diagnose.conclude(given)
    assert found == [says] and where.endswith(says)
    assert says in diagnose.text(given | {"where": where, "findings": found})


def test_a_rank_outside_the_collective_is_the_late_one() -> None:
    given = facts(
        learner=[
            {"call": "the learner's call train", "seconds": 40.0, "waits_for": "rank 0, rank 1"}
        ],
        phase="training learner step 3",
    )
    change(
        given,
        "learner-0",
        where=[
            "_update (learner/learner.py:8), inside all_reduce (distributed/distributed_c10d.py:7)"
        ],
    )
    change(
        given,
        "learner-1",
        where=["_fetch (cluster/learner_group.py:9), inside get (ray/worker.py:1)"],
    )
    _, found = diagnose.conclude(given)
    assert found == [
        "the learner's call train has been waiting for learner-1 (pid 4), in _fetch "
        "(cluster/learner_group.py:9), inside get (ray/worker.py:1) for 40 s"
    ]
    change(
        given,
        "learner-1",
        where=[
            "_update (learner/learner.py:8), inside all_reduce (distributed/distributed_c10d.py:7)"
        ],
    )
    assert (
        "learner-0 (pid 3)" in diagnose.conclude(given)[1][0]
        and "learner-1 (pid 4)" in diagnose.conclude(given)[1][0]
    )
    where, found = diagnose.conclude(given | {"exit_code": 4, "error": "a rank died"})
    assert found == [] and where.endswith("; a rank died"), (
        "after an error of one rank the others wait for it"
    )


# ---- the bundle ----


class Handle:
    """An actor of which nothing comes back."""

    def __getattr__(self, name: str) -> Handle:
        return self

    def remote(self, *args: object) -> object:
        time.sleep(1000)


def test_a_bundle_is_written_in_bounded_time_whatever_hangs(
    spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(post_mortem, "LIMIT_S", 3.0)
    child = spawn("learner-0", "print('last words', flush=True)\n" + STUCK["lock"])
    os.kill(child.pid, signal.SIGSTOP)
    engine = SimpleNamespace(actor_id="actor-0.0", handle=Handle(), acknowledged="v0.3")
    actors = SimpleNamespace(
        processes=lambda: [engine], alive=lambda: [engine], deaths=["actor-0.9 died"], examined={}
    )
    learner = SimpleNamespace(calls=SimpleNamespace(status=lambda: 1 / 0))
    session = SimpleNamespace(nodes=lambda: time.sleep(1000))
    scene = post_mortem.Scene(session=session, queue=Handle(), actors=actors, learner=learner)
    started = time.monotonic()
    where, path = post_mortem.write(tmp_path, scene, code=5, meaning="stalled", message="no batch")
    assert time.monotonic() - started < 3 + 10
    assert not ray.is_initialized(), "to look at a run starts nothing"
    assert where == f"it was starting; learner-0 (pid {child.pid}) is stopped (by SIGSTOP)"
    told = json.loads((path / "summary.json").read_text())
    assert (
        set(told["silent"]) == {"queue", "actor actor-0.0", "learner", "other_nodes"}
        and "ZeroDivisionError" in told["silent"]["learner"]
    )
    assert told["actors"]["actor-0.0"] == {
        "serving_set": True,
        "acknowledged": "v0.3",
        "status": None,
    }
    assert "did not answer" in (path / "summary.txt").read_text()


def test_a_bundle_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    where, path = post_mortem.write(
        tmp_path / "file", post_mortem.Scene(), code=1, meaning="a bug", message="it"
    )
    assert path is None and "could not be written" in where


# ---- the watchdog ----


def test_a_loop_that_does_not_turn_is_noticed_and_one_that_does_is_left_alone() -> None:
    loop, stuck = asyncio.new_event_loop(), threading.Event()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    release = threading.Event()
    with watchdog.watched(loop, seconds=0.2, stuck=stuck.set):
        assert not stuck.wait(1.0), "it turns"
        loop.call_soon_threadsafe(release.wait)
        assert stuck.wait(20), "it is held up"
    release.set()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=10)
    assert not thread.is_alive()
    loop.close()


async def test_late_ranks_are_named_while_their_call_goes_on_and_when_it_was_given_up() -> None:
    calls, answers = (
        watchdog.Calls(),
        [asyncio.get_running_loop().create_future() for _ in range(3)],
    )
    answers[1].set_result(None)
    with pytest.raises(TimeoutError), calls.under_way("update", answers) as late:
        assert late() == "rank 0, rank 2" and [one["waits_for"] for one in calls.status()] == [
            "rank 0, rank 2"
        ]
        await asyncio.wait_for(asyncio.gather(*answers), 0.01)
    assert [(one["call"], one["waits_for"]) for one in calls.status()] == [
        ("update", "rank 0, rank 2")
    ]
    with calls.under_way("end", answers[1:2]) as late:
        assert late() == ""


def test_a_driver_whose_loop_is_stuck_exits_5_with_its_stacks(tmp_path: Path) -> None:
    """The command's own end, with a trainer whose event loop is blocked."""
    code = (
        "import asyncio, contextlib, sys, threading, time\nfrom pathlib import Path\nfrom types "
        "import SimpleNamespace\n"
        "from async_grpo.run import command as run\nfrom async_grpo.run.ending import guarded\n"
        "from async_grpo.runtime import stacks\n"
        "from async_grpo.run.post_mortem import "
        "Scene\nfrom async_grpo.observe.console.console import Console\n"
        "home = Path(sys.argv[1])\nstacks.register('driver', stacks.home(home))\nloop = "
        "asyncio.new_event_loop()\n"
        "threading.Thread(target=loop.run_forever, daemon=True).start()\n"
        "def blocks_the_loop():\n    time.sleep(1000)\n"
        "def train():\n    loop.call_soon_threadsafe(blocks_the_loop)\n    "
        "asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()\n"
        "off = SimpleNamespace(step_timeout_s=0.5)\n"
        "trainer = SimpleNamespace(run_dir=home, start=lambda: None, steps=train, "
        "stop_requested=False, steps_done=0, abandon=lambda: None,\n"
        "    system=SimpleNamespace(scene=Scene, event_loop=loop), "
        "config=SimpleNamespace(watchdog=off, evaluation=SimpleNamespace(before=False)))\n"
        "@contextlib.contextmanager\n"
        "def command(config):\n"
        "    with guarded(trainer, console := Console()):\n"
        "        yield run.Command(console, trainer)\n"
        "run.command = command\nrun.run(SimpleNamespace())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 5, ended.stderr
    assert (
        "the driver's event loop has not turned" in ended.stdout
        and "exit code 5" in ended.stdout.splitlines()[-1]
    )
    [stack] = (tmp_path / "post_mortem").glob("*-stall/stacks/driver-*.txt")
    assert "blocks_the_loop" in stack.read_text()


def test_a_directory_with_placeholders_is_refused() -> None:
    with pytest.raises(ValueError, match="not resolved"):
        stacks.home("runs/{name}")
