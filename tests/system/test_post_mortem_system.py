"""A real run in which something hangs: it ends within its deadline, and the bundle names the
culprit.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_grpo.config.schema import Config
from async_grpo.errors import Stalled
from async_grpo.observe.console.console import Console
from async_grpo.run import post_mortem
from async_grpo.run.ending import guarded
from async_grpo.run.trainer import Trainer
from async_grpo.runtime import stacks
from tests.support.models import write_model
from tests.support.waiting import ask, wait_until

STEP_S, VERIFIER_S, LATE_S, CLEAN_UP_S = 6.0, 16.0, 10.0, 90.0
pytestmark = [pytest.mark.timeout(600), pytest.mark.alone]


def settings(home: Path, **changes: Any) -> dict[str, Any]:
    (home / "verifier").write_text("")
    return {
        "run": {"name": "hangs", "dir": str(home / "run"), "total_steps": 100_000},
        "model": {"path": write_model(home / "model", positions=64)},
        "task": {
            "name": "tests.support.hanging_task:Hanging",
            "train": str(home / "verifier"),
            "verifier": {"timeout_s": VERIFIER_S},
        },
        "rollout": {
            "rollout_batch_size": 4,
            "group_size": 4,
            "prompt_length": 8,
            "response_length": 6,
        },
        "evaluation": {"before": False, "max_samples": 4},
        "cluster": {
            "rollout_actors": {"min": 1, "max": 1},
            "engine": {"max_num_seqs": 16},
            "restart_budget": 0,
        },
        "tracking": {"mlflow": False, "report": False},
        "watchdog": {"step_timeout_s": STEP_S},
    } | changes


def _counts(trainer: Trainer) -> dict[str, float]:
    [engine] = trainer.system.actors.alive()
    return ask(trainer, engine.handle.status.remote())["counts"]


def bundle(directory: Path) -> tuple[dict[str, Any], str, dict[str, str]]:
    """The newest bundle of a run: its facts, its summary, and its stacks by file."""
    path = max((directory / "post_mortem").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    texts = {file.name: file.read_text() for file in (path / "stacks").iterdir()}
    return (
        json.loads((path / "summary.json").read_text()),
        (path / "summary.txt").read_text(),
        texts,
    )


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if stacks.status(pid).get("State", "X")[0] not in "ZX"]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """One run, told once: its verifiers hang and go on, then its only engine is stopped, which ends
    it.
    """
    home = tmp_path_factory.mktemp("hangs")
    told: dict[str, Any] = {"home": home}
    with open(home / "log.txt", "w") as log:
        console = Console(log)
        trainer = Trainer(Config.model_validate(settings(home)), console=console)
        try:
            trainer.start()
            trainer.train(steps=2)
            told["processes"] = {
                process.role: process.pid
                for process in stacks.registered(stacks.home(trainer.run_dir))
            }
            _the_verifiers_hang(trainer, home, told)
            told["after"] = trainer.train(steps=2)
            engine, started = told["processes"]["actor-0.0+engine"], time.monotonic()
            with guarded(trainer, console) as ended:
                _stop_and_train(trainer, engine)
            told["code"] = ended.code
            told["seconds"] = time.monotonic() - started
        finally:
            trainer.stop()
    told["log"], told["engine"] = (home / "log.txt").read_text(), bundle(home / "run")
    yield told


def _the_verifiers_hang(trainer: Trainer, home: Path, told: dict[str, Any]) -> None:
    (home / "verifier").write_text("hang")
    started = time.monotonic()
    with pytest.raises(Stalled, match="no batch for learner step") as raised:
        trainer.train()
    told["verifier_seconds"] = time.monotonic() - started
    post_mortem.write(
        trainer.run_dir, trainer.system.scene(), code=5, meaning="stall", message=str(raised.value)
    )
    told["verifier"] = bundle(home / "run")
    wait_until(
        lambda: not alive([told["processes"]["actor-0.0+verifier"]]),
        started + VERIFIER_S + LATE_S - time.monotonic(),
        "the verifier's end",
    )
    (home / "verifier").write_text("")
    told["errors"] = wait_until(
        lambda: _counts(trainer).get("verifier_errors"), 60, "the count of verifier errors"
    )


def _stop_and_train(trainer: Trainer, engine: int) -> None:
    os.kill(engine, signal.SIGSTOP)
    trainer.train()


def test_every_process_registers(story: dict[str, Any]) -> None:
    assert sorted(story["processes"]) == [
        "actor-0.0",
        "actor-0.0+engine",
        "actor-0.0+verifier",
        "driver",
        "learner-0",
        "queue",
    ]


def test_hanging_verifiers_are_named_and_counted_and_the_run_can_go_on(
    story: dict[str, Any],
) -> None:
    facts, summary, texts = story["verifier"]
    assert re.search(
        r"waiting for the groups of learner step \d+; verifier of actor-0\.0 \(pid \d+\) "
        r"has been at one response for",
        facts["where"],
    )
    pid = re.search(r"\(pid (\d+)\)", facts["where"])[1]
    assert "hanging_task.py" in texts[f"actor-0.0+verifier-{pid}.txt"] and facts["where"] in summary
    stages = {one["stage"] for one in facts["actors"]["actor-0.0"]["status"]["in_flight"]}
    assert "verifying" in stages and not facts["silent"]
    assert facts["queue"]["in_flight"]["actor-0.0"] and facts["queue"]["counts"]["trained"] >= 8
    assert {"driver", "learner-0", "queue", "actor-0.0", "actor-0.0+engine"} <= {
        name.rpartition("-")[0] for name in texts
    }
    told = "a verifier failed, the group is issued again (task.verifier.on_error): timeout"
    assert story["log"].count(told) == 1, "the first of its kind is on the screen"
    assert story["errors"] >= 1 and story["after"]["rollout/response_tokens"] > 0
    assert (
        story["verifier_seconds"] < STEP_S + LATE_S + STEP_S
    )  # groups that were ready are trained first


def test_a_stopped_engine_ends_the_run_and_is_named(story: dict[str, Any]) -> None:
    facts, summary, texts = story["engine"]
    pid = story["processes"]["actor-0.0+engine"]
    culprit = f"engine of actor-0.0 (pid {pid}) is stopped (by SIGSTOP)"
    assert story["code"] == 5 and facts["where"].endswith(culprit) and culprit in summary
    assert (
        facts["actors"]["actor-0.0"]["acknowledged"].startswith("v0.")
        and f"actor-0.0+engine-{pid}.txt" not in texts
    )
    assert culprit in story["log"].replace("\n", " ") and "post-mortem: " in story["log"]
    assert (
        story["log"].rstrip().splitlines()[-1].startswith("exit code 5")
        or "exit code 5" in story["log"].splitlines()[-1]
    )
    [driver] = [
        process
        for node in facts["nodes"]
        for process in node["processes"]
        if process["role"] == "driver"
    ]
    assert (
        driver["usage"]["open_files"] > 0 and facts["nodes"][0]["machine"]["memory"]["MemAvailable"]
    )


def test_nothing_is_left_of_it(story: dict[str, Any]) -> None:
    pids = [pid for role, pid in story["processes"].items() if role != "driver"]
    wait_until(lambda: not alive(pids), 30, f"the end of {story['processes']}")
    assert not (story["home"] / "run" / "stacks").exists()


# ---- the command, with other culprits ----


def command(home: Path, log: Path, **changes: Any) -> subprocess.Popen:
    path = home / "config.yaml"
    path.write_text(yaml.safe_dump(settings(home, **changes)))
    with open(log, "w") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "async_grpo.run", str(path)],
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def stopped(home: Path, role: str, *, exit_s: float, **changes: Any) -> tuple[int, int, str]:
    """Run the command and stop this process after the first steps: exit code, the process's id, and
    the log.
    """
    log = home / "log.txt"
    process = command(home, log, **changes)
    try:
        wait_until(
            lambda: "tok/s" in log.read_text() or process.poll() is not None,
            400,
            "the first learner step",
        )
        pids = {one.role: one.pid for one in stacks.registered(stacks.home(home / "run"))}
        os.kill(pids[role], signal.SIGSTOP)
        code = process.wait(timeout=exit_s)
    finally:
        process.kill()
        process.wait(timeout=10)
    wait_until(
        lambda: not alive([pid for one, pid in pids.items() if one != "driver"]),
        30,
        f"the end of {pids}",
    )
    return code, pids[role], log.read_text()


@pytest.mark.slow
def test_a_stalled_publication_names_the_engine(tmp_path: Path) -> None:
    """The engine is stopped while there is always a batch, so that the publication is the first to
    notice.
    """
    changes = {
        "weight_sync": {"deadlines": {"pause_s": 3, "resume_s": 3, "acknowledge_s": 8}},
        "watchdog": {"step_timeout_s": 60},
        "replay": {"max_staleness": 4},
    }
    code, pid, log = stopped(
        tmp_path, "actor-0.0+engine", exit_s=8 + LATE_S + CLEAN_UP_S, **changes
    )
    facts, summary, _ = bundle(tmp_path / "run")
    text = " ".join(log.split())
    assert (
        code == 4 and f"engine of actor-0.0 (pid {pid}) is stopped (by SIGSTOP)" in facts["where"]
    ), summary
    assert "exit code 4" in log.splitlines()[-1] and f"(pid {pid}) is stopped" in text
    [seen] = facts["dropped"].values()
    assert [one["trouble"] for one in seen["processes"] if one["pid"] == pid] == [
        "is stopped (by SIGSTOP)"
    ]


@pytest.mark.slow
def test_a_stopped_learner_rank_is_named(tmp_path: Path) -> None:
    code, pid, log = stopped(tmp_path, "learner-0", exit_s=STEP_S + LATE_S + CLEAN_UP_S)
    facts, _, _ = bundle(tmp_path / "run")
    assert code in (4, 5) and f"learner-0 (pid {pid}) is stopped (by SIGSTOP)" in facts["where"]
    assert f"exit code {code}" in log.splitlines()[-1]


@pytest.mark.slow
def test_a_verifier_that_may_not_fail_ends_the_run_with_its_name(tmp_path: Path) -> None:
    changes = {
        "task": settings(tmp_path)["task"] | {"verifier": {"timeout_s": 2, "on_error": "fail"}},
        "watchdog": {"step_timeout_s": 120},
    }
    log = tmp_path / "log.txt"
    process = command(tmp_path, log, **changes)
    try:
        wait_until(
            lambda: "tok/s" in log.read_text() or process.poll() is not None,
            400,
            "the first learner step",
        )
        (tmp_path / "verifier").write_text("hang")
        code = process.wait(timeout=4 * 2 + LATE_S + CLEAN_UP_S)  # a group has four responses
    finally:
        process.kill()
        process.wait(timeout=10)
    facts, _, _ = bundle(tmp_path / "run")
    assert (
        code == 4
        and "a verifier of actor-0.0: group" in facts["error"]
        and "timeout" in facts["error"]
    )
