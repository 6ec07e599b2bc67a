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
from tests.support.waiting import wait_until

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


class Command:
    """The command in a process of its own, as a context; every process it starts carries a mark in
    its environment.
    """

    def __init__(self, config: Path, *overrides: str, log: Path) -> None:
        self.log, self._mark = log, uuid.uuid4().hex
        with open(log, "w") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "async_grpo.run", str(config), *overrides],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | {MARK: self._mark},
                start_new_session=True,
            )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()

    @property
    def text(self) -> str:
        """What it printed so far."""
        return self.log.read_text()

    def until(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        wait_until(condition, seconds, what, log=self.log)

    def trains(self) -> None:
        """Wait for the first learner step."""
        self.until(lambda: "step " in self.text and "tok/s" in self.text, 240, "the first step")

    def pids(self, word: str = "") -> list[int]:
        """Its processes with this word in their command."""
        found = marked(MARK, self._mark)
        return [pid for pid in found if not word or word in command_of(pid)]

    def send(self, number: int, *, group: bool) -> None:
        """Send a signal to the command, or to its process group, as `timeout` and systemd do."""
        (os.killpg if group else os.kill)(self._process.pid, number)

    def lives(self) -> bool:
        return self._process.poll() is None

    def ends(self, *codes: int, seconds: float) -> None:
        """Wait for its end, with one of these exit codes."""
        assert self._process.wait(timeout=seconds) in codes, self.text[-3000:]

    def leaves_nothing(self, pids: list[int], *, seconds: float = 30) -> None:
        """Wait for the end of all its processes; no file of these is left."""
        self.until(lambda: not self.pids(), seconds, "the end of all processes")
        assert not left_by(pids)


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

    def ends(trainer, console):
        seen.append((trainer.console, console))
        raise SystemExit(0)

    monkeypatch.setattr(ending, "guarded", ends)
    with pytest.raises(SystemExit):
        check([str(config)])
    assert seen[0][0] is seen[0][1]


def test_a_missing_file_is_exit_2(tmp_path, capsys):
    assert train([str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().out


@pytest.mark.later
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "group", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["group", "driver"]
)
def test_sigterm_saves_and_leaves_nothing_behind(config, home, group):
    home = home / f"first-{group}"
    home.mkdir()
    with Command(config, f"run.dir={home / 'run'}", log=home / "first.txt") as run:
        run.trains()
        pids = run.pids()
        found = listeners(pids)
        assert len(found) >= 5 and not [entry for entry in found if not is_loopback(entry[0])], (
            found
        )
        assert not [entry for entry in found if entry[1] in HEAD_PORTS], found
        assert (home / "run").stat().st_mode & 0o777 == 0o700
        run.send(signal.SIGTERM, group=group)
        run.ends(0, seconds=60)
    assert "SIGTERM" in run.text and "stopped early" in run.text
    assert run.text.splitlines()[-1] == f"exit code 0: {EXIT_MEANING[0]}"
    assert len(list((home / "run" / "checkpoints").iterdir())) == 1
    assert (
        read_status(home / "run")["exit_code"] == 0
        and f"report: {home / 'run' / 'report' / 'report.html'}" in run.text
    )
    assert "exit code 0" in (home / "run" / "report" / "report.html").read_text()
    run.leaves_nothing(pids, seconds=20)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_command_continues_until_the_fault_budget_is_spent(config, home):
    run_dir = f"run.dir={home / 'spent'}"
    with Command(config, run_dir, "run.total_steps=2", log=home / "first_part.txt") as run:
        run.ends(0, seconds=300)
    with Command(config, run_dir, log=home / "second_part.txt") as run:
        run.trains()
        [saved] = (home / "spent" / "checkpoints").iterdir()
        assert f"resumed {saved}" in run.text
        pids, engines = run.pids(), run.pids("EngineCore")
        assert len(engines) == 1, [*map(command_of, pids), run.text[-3000:]]
        os.kill(engines[0], signal.SIGKILL)
        run.ends(4, seconds=90)
    assert (
        read_status(home / "spent")["exit_code"] == 4
        and "restart_budget = 0" in (home / "spent" / "report" / "report.html").read_text()
    )
    last = run.text.splitlines()[-1]
    assert "restart_budget = 0" in run.text and re.search(r"exit code 4: .+", last)
    run.leaves_nothing(pids, seconds=20)


@pytest.mark.alone  # a run that starts beside it would remove the files first
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_outlives_a_killed_driver_and_the_next_start_removes_its_files(config, home):
    """The engine is stopped first: the kernel ends it all the same. The next one is asked to end
    while it starts.
    """
    run_dir = f"run.dir={home / 'killed'}"
    with Command(config, run_dir, log=home / "third.txt") as run:
        run.trains()
        [engine] = run.pids("EngineCore")
        os.kill(engine, signal.SIGSTOP)
        pids = run.pids()
    run.ends(-signal.SIGKILL, seconds=10)
    run.until(
        lambda: not [pid for pid in run.pids() if "Agent" not in command_of(pid)],
        30,
        "the end of all processes of ours",
    )
    what = "the end of Ray's own two agents, which look for their parent now and then"
    run.until(lambda: not run.pids(), 240, what)
    files = left_by(pids)
    assert files, "a killed run leaves its segments: nothing can be said about who removes them"

    with Command(config, run_dir, log=home / "fourth.txt") as run:
        what = "the removal of what the killed run left"
        run.until(lambda: not any(path.exists() for path in files), 180, what)
        run.send(signal.SIGINT, group=False)
        run.ends(0, seconds=90)
    assert run.text.splitlines()[-1] == f"exit code 0: {EXIT_MEANING[0]}"
    run.leaves_nothing([])


@pytest.mark.slow
@pytest.mark.parametrize("group", [True, False], ids=["group", "driver"])
@pytest.mark.parametrize(
    "moment", ["starting Ray ...", "starting engines and learner ...", "connecting weights"]
)
def test_a_signal_during_the_start_ends_it_with_nothing_left(config, home, moment, group):
    log = home / f"{uuid.uuid4().hex}.txt"
    with Command(config, f"run.dir={home / log.stem}", log=log) as run:
        run.until(lambda: moment in run.text, 120, moment)
        pids = run.pids()
        run.send(signal.SIGTERM, group=group)
        run.ends(0, seconds=120)
    text = run.text
    trains = moment == "connecting weights" and "stopped early, resumable" in text  # meanwhile
    assert "Traceback" not in text and (STOPPED_EARLY in text or trains)
    assert text.splitlines()[-1] == f"exit code 0: {EXIT_MEANING[0]}"
    run.leaves_nothing(pids)


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
    log = home / f"{uuid.uuid4().hex}.txt"
    settings = [f"run.dir={home / log.stem}", f"cluster.restart_budget={budget}"]
    with Command(config, *settings, "run.total_steps=1", log=log) as run:
        run.until(lambda: run.pids(process_class), 240, f"a {process_class}")
        os.kill(run.pids(process_class)[0], signal.SIGKILL)
        run.ends(code, seconds=300)
    text = run.text
    assert says in text and "Traceback" not in text, text[-3000:]
    assert text.splitlines()[-1].endswith(f"exit code {code}: {EXIT_MEANING[code]}")
    if code:
        assert "error: it was starting; " in text
    run.leaves_nothing([])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_second_signal_to_the_group_ends_the_run_at_once(config, home):
    with Command(config, f"run.dir={home / 'twice'}", log=home / "twice.txt") as run:
        run.trains()
        run.send(signal.SIGTERM, group=True)
        run.until(lambda: "SIGTERM" in run.text, 30, "the first signal's line")
        if run.lives():
            run.send(signal.SIGTERM, group=True)
        run.ends(0, 128 + signal.SIGTERM, seconds=60)
    assert "Traceback" not in run.text
    assert re.search(r"exit code (0|143): .+", run.text.splitlines()[-1])
    run.leaves_nothing([], seconds=60)
