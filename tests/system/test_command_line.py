"""The command line as a user meets it: bad input, signals, deaths, exit codes, and nothing left
behind.
"""

from __future__ import annotations

import ipaddress
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from async_grpo.errors import EXIT_MEANING
from async_grpo.observe.console.status_file import read_status
from async_grpo.run import ending
from async_grpo.runtime.stopping import STOPPED_EARLY
from tests.support.models import write_model
from tests.support.processes import left_by, marked
from tests.support.verbs import check, train

MARK = "ASYNC_GRPO_TEST_MARK"
HEAD_PORTS = (6379, 8265, 10001, 52365)
"""What `ray start --head` takes unless told otherwise."""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("command_line")


@pytest.fixture(scope="module")
def config(home) -> Path:
    """A long run on a small random model: it ends when somebody ends it."""
    model = write_model(home / "model")
    path = home / "long.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "run": {"name": "long", "dir": str(home / "run"), "total_steps": 100_000},
                "model": {"path": model},
                "task": {"name": "arithmetic"},
                "rollout": {
                    "rollout_batch_size": 4,
                    "group_size": 4,
                    "prompt_length": 8,
                    "response_length": 6,
                },
                "evaluation": {"before": False, "max_samples": 4},
                "cluster": {"engine": {"max_num_seqs": 16}, "restart_budget": 0},
                "tracking": {"mlflow": False},
            }
        )
    )
    return path


def start(config: Path, *overrides: str, mark: str, log: Path) -> subprocess.Popen:
    """The command in a process of its own; every process it starts carries the mark in its
    environment.
    """
    with open(log, "w") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "async_grpo.run", str(config), *overrides],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {MARK: mark},
            start_new_session=True,
        )


def send(process: subprocess.Popen, number: int, *, group: bool) -> None:
    """Send a signal to the command, or to its process group, as `timeout` and systemd do."""
    (os.killpg if group else os.kill)(process.pid, number)


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def listeners(pids: list[int]) -> set[tuple[str, int, str]]:
    """(address, port, command) of every TCP socket on which one of these processes listens, from
    the kernel's tables.
    """
    owners = {}
    for pid in pids:
        directory = Path(f"/proc/{pid}/fd")
        for descriptor in list(directory.iterdir()) if directory.exists() else []:
            try:
                link = os.readlink(descriptor)
            except FileNotFoundError:
                continue  # closed while we looked
            if link.startswith("socket:["):
                owners[link[len("socket:[") : -1]] = command_of(pid)
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in owners:
                digits, _, port = fields[1].partition(":")
                raw = b"".join(
                    bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)
                )
                found.add((str(ipaddress.ip_address(raw)), int(port, 16), owners[fields[9]]))
    return found


def is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def test_listeners_are_seen_and_told_apart() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)),
        socket.create_server(("0.0.0.0", 0)),
        socket.create_server(("::1", 0), family=socket.AF_INET6),
    ):
        seen = {address for address, _, _ in listeners([os.getpid()])}
    assert {"127.0.0.1", "0.0.0.0", "::1"} <= seen
    assert [
        is_loopback(address)
        for address in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::", "10.0.0.1")
    ] == [True] * 3 + [False] * 3


def wait_until(condition: Callable[[], object], seconds: float, what: str, log: Path) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, (
            f"{what} did not happen within {seconds} s:\n{log.read_text()[-3000:]}"
        )
        time.sleep(0.1)


BAD = [
    (["rollout.grup_size=4"], "rollout.group_size"),
    (["learner.lr=fast"], "learner.lr"),
    (["weight_sync.every_steps=5"], "every_steps"),
    (["model.path=/nowhere/model"], "/nowhere/model"),
    (["task.name=gsm8k", "task.train=/nowhere/train.jsonl"], "/nowhere/train.jsonl"),
    (["task.name=arithmetik"], "arithmetic"),
    (["task.options.digits=3"], "digits"),
    (["task.rewards.correctness=1.0"], "correct"),
    (["replay.filter_groups.enable=true", "replay.filter_groups.metric=corect"], "correct"),
    (["checkpoint.resume=/nowhere/step_000001"], "/nowhere/step_000001"),
]


@pytest.mark.parametrize(("overrides", "expected"), BAD, ids=[case[0][-1] for case in BAD])
def test_bad_input_is_one_clear_message_before_anything_starts(
    config, capsys, monkeypatch, overrides, expected
):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # joining a cluster would fail in another way
    assert train([str(config), *overrides]) == 2
    out = capsys.readouterr()
    lines = [line for line in (out.out + out.err).splitlines() if line.strip()]
    assert 1 <= len(lines) <= 3, lines
    assert expected in " ".join(lines) and "Traceback" not in " ".join(lines)


def test_there_is_one_console(config, monkeypatch):
    """A second one would not know of the panel of the first, and write into it."""
    seen = []
    monkeypatch.setattr(
        ending,
        "guarded",
        lambda trainer, console, work: seen.append((trainer.console, console)) or 0,
    )
    assert check([str(config)]) == 0
    assert seen[0][0] is seen[0][1]


def test_a_missing_file_is_exit_2(tmp_path, capsys):
    assert train([str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().out


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "group", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["group", "driver"]
)
def test_sigterm_saves_and_leaves_nothing_behind(config, home, group):
    home = home / f"first-{group}"
    home.mkdir()
    mark, log = uuid.uuid4().hex, home / "first.txt"
    process = start(config, f"run.dir={home / 'run'}", mark=mark, log=log)
    try:
        wait_until(
            lambda: "step " in log.read_text() and "tok/s" in log.read_text(),
            240,
            "the first learner step",
            log,
        )
        pids = marked(MARK, mark)
        found = listeners(pids)
        assert len(found) >= 5 and not [entry for entry in found if not is_loopback(entry[0])], (
            found
        )
        assert not [entry for entry in found if entry[1] in HEAD_PORTS], found
        assert (home / "run").stat().st_mode & 0o777 == 0o700
        send(process, signal.SIGTERM, group=group)
        assert process.wait(timeout=60) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
    assert "SIGTERM" in log.read_text() and "stopped early" in log.read_text()
    assert log.read_text().splitlines()[-1] == f"exit code 0: {EXIT_MEANING[0]}"
    assert len(list((home / "run" / "checkpoints").iterdir())) == 1
    assert (
        read_status(home / "run")["exit_code"] == 0
        and f"report: {home / 'run' / 'report' / 'report.html'}" in log.read_text()
    )
    assert "exit code 0" in (home / "run" / "report" / "report.html").read_text()
    wait_until(lambda: not marked(MARK, mark), 20, "the end of all processes", log)
    assert not left_by(pids)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_command_continues_until_the_fault_budget_is_spent(config, home):
    run_dir = f"run.dir={home / 'spent'}"
    mark, log = uuid.uuid4().hex, home / "first_part.txt"
    process = start(config, run_dir, "run.total_steps=2", mark=mark, log=log)
    try:
        assert process.wait(timeout=300) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
    mark, log = uuid.uuid4().hex, home / "second_part.txt"
    process = start(config, run_dir, mark=mark, log=log)
    try:
        wait_until(lambda: "tok/s" in log.read_text(), 240, "the first learner step", log)
        [saved] = (home / "spent" / "checkpoints").iterdir()
        assert f"resumed {saved}" in log.read_text()
        pids = marked(MARK, mark)
        engines = [pid for pid in pids if "EngineCore" in command_of(pid)]
        assert len(engines) == 1, [*map(command_of, pids), log.read_text()[-3000:]]
        os.kill(engines[0], signal.SIGKILL)
        assert process.wait(timeout=90) == 4, log.read_text()[-3000:]
    finally:
        process.kill()
    text = log.read_text()
    assert (
        read_status(home / "spent")["exit_code"] == 4
        and "restart_budget = 0" in (home / "spent" / "report" / "report.html").read_text()
    )
    assert "restart_budget = 0" in text and re.search(r"exit code 4: .+", text.splitlines()[-1])
    wait_until(lambda: not marked(MARK, mark), 20, "the end of all processes", log)
    assert not left_by(pids)


@pytest.mark.alone  # a run that starts beside it would remove the files first
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_outlives_a_killed_driver_and_the_next_start_removes_its_files(config, home):
    """The engine is stopped first: the kernel ends it all the same. The next one is asked to end
    while it starts.
    """
    mark, log = uuid.uuid4().hex, home / "third.txt"
    process = start(config, f"run.dir={home / 'killed'}", mark=mark, log=log)
    try:
        wait_until(lambda: "tok/s" in log.read_text(), 240, "the first learner step", log)
        [engine] = [pid for pid in marked(MARK, mark) if "EngineCore" in command_of(pid)]
        os.kill(engine, signal.SIGSTOP)
        pids = marked(MARK, mark)
    finally:
        process.kill()
    process.wait(timeout=10)
    wait_until(
        lambda: not [pid for pid in marked(MARK, mark) if "Agent" not in command_of(pid)],
        30,
        "the end of all processes of ours",
        log,
    )
    wait_until(
        lambda: not marked(MARK, mark),
        240,
        "the end of Ray's own two agents, which look for their parent now and then",
        log,
    )
    files = left_by(pids)
    assert files, "a killed run leaves its segments: nothing can be said about who removes them"

    mark, log = uuid.uuid4().hex, home / "fourth.txt"
    process = start(config, f"run.dir={home / 'killed'}", mark=mark, log=log)
    try:
        wait_until(
            lambda: not any(path.exists() for path in files),
            180,
            "the removal of what the killed run left",
            log,
        )
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=90) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
    assert log.read_text().splitlines()[-1] == f"exit code 0: {EXIT_MEANING[0]}"
    wait_until(lambda: not marked(MARK, mark), 30, "the end of all processes", log)


@pytest.mark.slow
@pytest.mark.parametrize("group", [True, False], ids=["group", "driver"])
@pytest.mark.parametrize(
    "moment", ["starting Ray ...", "starting engines and learner ...", "connecting weights"]
)
def test_a_signal_during_the_start_ends_it_with_nothing_left(config, home, moment, group):
    mark, log = uuid.uuid4().hex, home / f"{uuid.uuid4().hex}.txt"
    process = start(config, f"run.dir={home / log.stem}", mark=mark, log=log)
    try:
        wait_until(lambda: moment in log.read_text(), 120, moment, log)
        pids = marked(MARK, mark)
        send(process, signal.SIGTERM, group=group)
        assert process.wait(timeout=120) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
    text = log.read_text()
    trains = moment == "connecting weights" and "stopped early, resumable" in text  # meanwhile
    assert "Traceback" not in text and (STOPPED_EARLY in text or trains)
    assert text.splitlines()[-1] == f"exit code 0: {EXIT_MEANING[0]}"
    wait_until(lambda: not marked(MARK, mark), 30, "the end of all processes", log)
    assert not left_by(pids)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("process_class", "budget", "code", "says"),
    [
        ("RolloutProcess", 1, 0, "actor-0.0 died while the run started (ActorDiedError: "),
        ("RolloutProcess", 0, 4, "0 rollout actors are alive, cluster.rollout_actors.min is 1"),
        ("LearnerProcess", 1, 0, "a learner rank died during "),
        ("LearnerProcess", 0, 4, "the learner was started again 0 times already"),
    ],
)
def test_who_is_killed_in_the_start_is_replaced_or_ends_the_run_in_a_sentence(
    config, home, process_class, budget, code, says
):
    mark, log = uuid.uuid4().hex, home / f"{uuid.uuid4().hex}.txt"
    settings = [f"run.dir={home / log.stem}", f"cluster.restart_budget={budget}"]
    process = start(config, *settings, "run.total_steps=1", mark=mark, log=log)

    def named() -> list[int]:
        return [pid for pid in marked(MARK, mark) if process_class in command_of(pid)]

    try:
        wait_until(named, 240, f"a {process_class}", log)
        os.kill(named()[0], signal.SIGKILL)
        assert process.wait(timeout=300) == code, log.read_text()[-3000:]
    finally:
        process.kill()
    text = log.read_text()
    assert says in text and "Traceback" not in text, text[-3000:]
    assert text.splitlines()[-1].endswith(f"exit code {code}: {EXIT_MEANING[code]}")
    if code:
        assert "error: it was starting; " in text
    wait_until(lambda: not marked(MARK, mark), 30, "the end of all processes", log)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_second_signal_to_the_group_ends_the_run_at_once(config, home):
    mark, log = uuid.uuid4().hex, home / "twice.txt"
    process = start(config, f"run.dir={home / 'twice'}", mark=mark, log=log)
    try:
        wait_until(lambda: "tok/s" in log.read_text(), 240, "the first learner step", log)
        send(process, signal.SIGTERM, group=True)
        wait_until(lambda: "SIGTERM" in log.read_text(), 30, "the first signal's line", log)
        if process.poll() is None:
            send(process, signal.SIGTERM, group=True)
        assert process.wait(timeout=60) in (0, 128 + signal.SIGTERM), log.read_text()[-3000:]
    finally:
        process.kill()
    assert "Traceback" not in log.read_text()
    assert re.search(r"exit code (0|143): .+", log.read_text().splitlines()[-1])
    wait_until(lambda: not marked(MARK, mark), 60, "the end of all processes", log)
