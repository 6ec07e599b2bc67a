"""The command line as a user meets it: bad input, signals, deaths, exit codes, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from async_grpo import run
from tests.models import write_model

MARK = "ASYNC_GRPO_TEST_MARK"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("command_line")


@pytest.fixture(scope="module")
def config(home) -> Path:
    """A long run on a small random model: it ends when somebody ends it."""
    model = write_model(home / "model")
    path = home / "long.yaml"
    path.write_text(yaml.safe_dump({
        "run": {"name": "long", "dir": str(home / "run"), "total_steps": 100_000},
        "model": {"path": model},
        "task": {"name": "arithmetic"},
        "rollout": {"rollout_batch_size": 4, "group_size": 4, "prompt_length": 8, "response_length": 6},
        "evaluation": {"before": False, "max_samples": 4},
        "cluster": {"engine": {"max_num_seqs": 16}, "restart_budget": 0},
        "tracking": {"mlflow": False},
    }))
    return path


def start(config: Path, *overrides: str, mark: str, log: Path) -> subprocess.Popen:
    """The command in a process of its own; every process it starts carries the mark in its environment."""
    with open(log, "w") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "async_grpo.run", str(config), *overrides], stdout=out, stderr=subprocess.STDOUT,
            env=os.environ | {MARK: mark},
        )


def marked(mark: str) -> list[int]:
    """Living processes that carry the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it ended while we looked, or is not ours
    return found


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def wait_until(condition: Callable[[], object], seconds: float, what: str, log: Path) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s:\n{log.read_text()[-3000:]}"
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
def test_bad_input_is_one_clear_message_before_anything_starts(config, capsys, monkeypatch, overrides, expected):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # joining a cluster would fail in another way
    assert run.main([str(config), *overrides]) == 2
    out = capsys.readouterr()
    lines = [line for line in (out.out + out.err).splitlines() if line.strip()]
    assert 1 <= len(lines) <= 3, lines
    assert expected in " ".join(lines) and "Traceback" not in " ".join(lines)


def test_a_missing_file_is_exit_2(tmp_path, capsys):
    assert run.main([str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().out


@pytest.mark.timeout(240)
def test_sigterm_saves_and_the_same_command_continues_until_the_budget_is_spent(config, home):
    mark, log = uuid.uuid4().hex, home / "first.txt"
    process = start(config, mark=mark, log=log)
    try:
        wait_until(lambda: "step " in log.read_text() and "tok/s" in log.read_text(), 120, "the first learner step", log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
    assert "SIGTERM" in log.read_text() and "stopped early" in log.read_text()
    [saved] = (home / "run" / "checkpoints").iterdir()
    wait_until(lambda: not marked(mark), 20, "the end of all processes", log)

    mark, log = uuid.uuid4().hex, home / "second.txt"
    process = start(config, mark=mark, log=log)
    try:
        wait_until(lambda: "tok/s" in log.read_text(), 120, "the first learner step", log)
        assert f"resumed {saved}" in log.read_text()
        [engine] = [pid for pid in marked(mark) if "VLLM::EngineCore" in command_of(pid) or "EngineCore" in command_of(pid)]
        os.kill(engine, signal.SIGKILL)
        assert process.wait(timeout=90) == 4, log.read_text()[-3000:]
    finally:
        process.kill()
    text = log.read_text()
    assert "restart_budget = 0" in text and re.search(r"exit code 4: .+", text.splitlines()[-1])
    wait_until(lambda: not marked(mark), 20, "the end of all processes", log)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("async_grpo-") and "-test-" not in name]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_killed_driver_leaves_no_process_of_ours(config, home):
    """Ray's own two agents outlive a raylet that was killed with its driver by a minute or two; they hold no weights."""
    mark, log = uuid.uuid4().hex, home / "third.txt"
    process = start(config, f"run.dir={home / 'killed'}", mark=mark, log=log)
    wait_until(lambda: "tok/s" in log.read_text(), 120, "the first learner step", log)
    process.kill()
    process.wait(timeout=10)
    wait_until(lambda: not [pid for pid in marked(mark) if "Agent" not in command_of(pid)], 30, "the end of all processes", log)
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)
