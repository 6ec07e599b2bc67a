"""examples/workers with doubles of a rollout actor and of docker: what is begun, what ends with an
episode, and what with a worker.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.snippets import ROOT
from tests.support.waiting import alive, wait_until, wait_until_gone
from tests.support.worker_doubles import ActorDouble

WORKER, CONTAINER = (ROOT / "examples" / "workers" / name for name in ("worker.py", "container.sh"))
BEGUN = 'sleep 600 & echo $$ $! >"$DOUBLES/pids.new"; mv "$DOUBLES/pids.new" "$DOUBLES/pids"; wait'
"""A shell command with a child; both say who they are."""
RESULT = '{"rewards": {"correct": 1.0}, "correct": 1, "answer": "a\u2028b\u0085c"}'
CALL = (
    r"run --init --rm --interactive --name (episode-[\w.-]+) --network host "
    "--env OPENAI_BASE_URL --env OPENAI_API_KEY "
)
"""All of them options that docker documents."""


def pids(home: Path) -> list[int]:
    wait_until((home / "pids").exists, 30, "the command to have begun")
    return [int(pid) for pid in (home / "pids").read_text().split()]


def test_a_command_gets_the_problem_and_its_last_line_is_the_result(tmp_path: Path) -> None:
    """Also with characters in it that end lines in Unicode, and with children that stay."""
    said = f"cat >$DOUBLES/problem; sleep 600 & echo $! >$DOUBLES/pids; echo '{RESULT}'"
    with ActorDouble(tmp_path) as actor:
        actor.worker(WORKER, "sh", "-c", said)
        wait_until(lambda: actor.results, 30, "the result")
        assert actor.results == [json.loads(RESULT)]
        assert json.loads((tmp_path / "problem").read_text())["prompt"] == "2:7>"
        wait_until_gone(pids(tmp_path))


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_command_ends_with_its_episode(stubborn: bool, tmp_path: Path) -> None:
    """With what it has started; the slot goes on."""
    with ActorDouble(tmp_path, episodes=2) as actor:
        command = "trap '' TERM; " * stubborn + BEGUN
        actor.worker(WORKER, "sh", "-c", command, grace=0.5 if stubborn else 60.0)
        begun = pids(tmp_path)
        assert all(map(alive, begun)) and actor.left == 1
        actor.going_on = False
        wait_until_gone(begun)
        wait_until(lambda: actor.left == 0, 30, "the next episode")
        how = signal.SIGKILL if stubborn else signal.SIGTERM
        assert actor.results[0] == {"failure": f"exit status {-how}"}


@pytest.mark.parametrize("with_worker", [False, True], ids=["episode", "worker"])
def test_what_a_command_started_has_its_grace_too(with_worker: bool, tmp_path: Path) -> None:
    """Though the command itself ends at once."""
    agent = (
        'trap "sleep 0.5; : >$DOUBLES/saved; exit" TERM; echo $$ >$DOUBLES/pids.new; '
        "mv $DOUBLES/pids.new $DOUBLES/pids; while :; do sleep 0.1; done"
    )
    with ActorDouble(tmp_path) as actor:
        command = f"sh -c '{agent}'; true"
        worker = actor.worker(WORKER, "sh", "-c", command, grace=60.0)
        begun = pids(tmp_path)
        if with_worker:
            worker.terminate()
        else:
            actor.going_on = False
        wait_until_gone(begun)
        assert (tmp_path / "saved").exists()


def test_orphans_that_ended_are_not_waited_for(tmp_path: Path) -> None:
    """Where they become the worker's own children: in a container whose process 1 it is."""
    script = tmp_path / "first.py"
    script.write_text(
        "import ctypes, runpy\n"
        "pr_set_child_subreaper = 36\n"
        "assert ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0) == 0\n"
        f"runpy.run_path({str(WORKER)!r}, run_name='__main__')\n"
    )
    with ActorDouble(tmp_path) as actor:
        actor.worker(script, "sh", "-c", BEGUN, grace=60.0)
        pids(tmp_path)
        actor.going_on = False
        wait_until(lambda: actor.results, 30, "the result")
        assert actor.results == [{"failure": f"exit status {-signal.SIGTERM}"}]


def test_orphans_that_nobody_buries_are_not_waited_for(tmp_path: Path) -> None:
    """As in a container whose process 1 is no init: they stay as zombies."""
    script = tmp_path / "first.py"
    script.write_text(
        "import ctypes, signal, subprocess, sys\n"
        "pr_set_child_subreaper = 36\n"
        "assert ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0) == 0\n"
        f"worker = subprocess.Popen([sys.executable, {str(WORKER)!r}, *sys.argv[1:]])\n"
        "signal.signal(signal.SIGTERM, lambda *_: worker.terminate())\n"
        "sys.exit(worker.wait())\n"
    )
    with ActorDouble(tmp_path) as actor:
        actor.worker(script, "sh", "-c", BEGUN, grace=60.0)
        _, orphan = pids(tmp_path)
        actor.going_on = False
        wait_until(lambda: actor.results, 30, "the result")
        assert actor.results == [{"failure": f"exit status {-signal.SIGTERM}"}]
        assert ") Z " in Path(f"/proc/{orphan}/stat").read_text()


def test_a_command_that_may_not_be_signalled_spares_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killpg = os.killpg
    sleep = ["sleep", "600"]
    with (
        subprocess.Popen(sleep, start_new_session=True) as foreign,
        subprocess.Popen(sleep, start_new_session=True) as own,
    ):

        def kill(group: int, how: int) -> None:
            if group == foreign.pid:
                raise PermissionError
            killpg(group, how)

        monkeypatch.setattr(os, "killpg", kill)
        try:
            runpy.run_path(str(WORKER))["end"](0.5, foreign, own)
            assert own.wait(20) == -signal.SIGTERM and foreign.poll() is None
        finally:
            foreign.kill()
            own.kill()


def test_a_command_that_is_not_there_is_refused(tmp_path: Path) -> None:
    words = [sys.executable, WORKER, tmp_path, "--", "no-such-agent", "--fast"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    said = "error: no-such-agent is no program: give a path, or a name on PATH"
    assert ended.stderr.rstrip().endswith(said)


def test_a_command_that_cannot_be_started_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By its name, and as shells do by the status."""
    agent = tmp_path / "agent"
    agent.write_text("#!/no/such/interpreter\n")
    agent.chmod(0o755)
    with ActorDouble(tmp_path) as actor:
        actor.worker(WORKER, str(agent))
        wait_until(lambda: actor.results, 30, "the result")
        assert actor.results == [{"failure": "exit status 127"}]
    said = capfd.readouterr().err
    assert f"cannot be started: {agent}: No such file or directory" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_commands_end_with_their_worker(how: signal.Signals, tmp_path: Path) -> None:
    with ActorDouble(tmp_path, episodes=9) as actor:
        worker = actor.worker(WORKER, "sh", "-c", BEGUN)
        begun = pids(tmp_path)
        worker.send_signal(how)
        assert worker.wait(30) == 128 + how
        wait_until_gone(begun)


@pytest.mark.parametrize("ends", ["episode", signal.SIGTERM, signal.SIGKILL], ids=str)
def test_a_container_ends_with_its_episode_and_its_worker(
    ends: str | signal.Signals, tmp_path: Path
) -> None:
    """Though it is no child of theirs, and takes no notice of SIGTERM."""
    with ActorDouble(tmp_path) as actor:
        image = ["my-agent", "sh", "-c", "trap '' TERM; " + BEGUN]
        worker = actor.worker(WORKER, "sh", str(CONTAINER), *image, grace=60.0)
        [container, child] = pids(tmp_path)
        assert alive(container)
        if isinstance(ends, signal.Signals):
            worker.send_signal(ends)
        else:
            actor.going_on = False
        wait_until_gone([container])
        subprocess.run(["kill", "-KILL", str(child)], check=True, timeout=10)  # docker's part
        begun, removed = actor.calls()
        [name] = re.fullmatch(CALL + "my-agent sh -c .*", begun).groups()
        assert removed == f"rm --force {name}"


def test_a_container_plays_an_episode(tmp_path: Path) -> None:
    with ActorDouble(tmp_path) as actor:
        agent = f"cat >$DOUBLES/problem; echo $OPENAI_API_KEY >&2; echo '{RESULT}'"
        actor.worker(WORKER, "sh", str(CONTAINER), "--read-only", "my-agent", "sh", "-c", agent)
        wait_until(lambda: actor.results, 30, "the result")
        assert actor.results == [json.loads(RESULT)]
        assert json.loads((tmp_path / "problem").read_text())["seed"] == 1
        [call] = actor.calls()
        assert re.fullmatch(CALL + "--read-only my-agent sh -c .*", call)


def test_the_script_is_clean() -> None:
    subprocess.run(["sh", "-n", CONTAINER], check=True, timeout=30)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", CONTAINER], check=True, timeout=60)
