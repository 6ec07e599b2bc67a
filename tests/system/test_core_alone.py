"""The core without agents, tools and contrib: it trains, evaluates, is killed, resumes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from async_grpo.run.checkpoint import directory as checkpoint
from tests.support.models import write_model
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "async_grpo"
WITHOUT = ("agents", "contrib", "tools")
STEPS = 8
WITHOUT_CHECKOUT = """import sys

sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in repr(one).lower()]
"""
"""What an editable install puts into every process would find the folders in the checkout."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package without the folders that the core does without, and a run's YAML."""
    home = tmp_path_factory.mktemp("core")
    leave = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, home / "async_grpo", ignore=leave)
    for name in WITHOUT:
        shutil.rmtree(home / "async_grpo" / name)
    (home / "tests").symlink_to(ROOT / "tests")
    (home / "sitecustomize.py").write_text(WITHOUT_CHECKOUT)
    settings = {
        "run": {"name": "core", "dir": str(home / "run"), "total_steps": STEPS},
        "model": {"path": write_model(home / "model")},
        "task": {"name": "tests.support.mixed_task:Mixed"},
        "rollout": {
            "rollout_batch_size": 4,
            "group_size": 4,
            "prompt_length": 16,
            "response_length": 6,
        },
        "algorithm": {"use_kl_loss": False},
        "checkpoint": {"every_steps": 2},
        "evaluation": {"before": False, "every_steps": 2, "max_samples": 4},
        "cluster": {"engine": {"max_num_seqs": 16}},
        "tracking": {"mlflow": False},
    }
    (home / "cfg.yaml").write_text(yaml.safe_dump(settings))
    return home


def begun(checkout: Path, log: Path, *settings: str) -> subprocess.Popen[bytes]:
    """A run of the copy, in a session of its own."""
    with open(log, "wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "async_grpo.run", "cfg.yaml", *settings],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout)},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.mark.slow
def test_the_core_trains_evaluates_is_killed_and_resumes(checkout: Path) -> None:
    first, second = checkout / "first.txt", checkout / "second.txt"
    run = begun(checkout, first, "run.total_steps=100000")
    try:
        wait_until(
            lambda: 4 in checkpoint.steps(checkout / "run") or run.poll() is not None,
            150,
            "a checkpoint",
            log=first,
        )
        assert run.poll() is None, first.read_text()
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.wait(timeout=30)
    reached = max(checkpoint.steps(checkout / "run"))

    run = begun(checkout, second, f"run.total_steps={reached + STEPS}")
    assert run.wait(timeout=150) == 0, second.read_text()
    text = second.read_text()
    assert "resumed " in text and "held-out accuracy" in text and "report" not in text, text
    metrics = (checkout / "run" / "metrics.jsonl").read_text()
    assert "eval/accuracy_greedy" in metrics


def test_what_is_not_there_is_a_sentence(checkout: Path) -> None:
    for words, says in (
        (["report"], "`async-grpo report` is not installed here"),
        (["train", "cfg.yaml", "task.name=program"], "there is no module 'async_grpo.agents'"),
        (
            ["train", str(ROOT / "configs" / "quickstart.yaml"), f"run.dir={checkout / 'quick'}"],
            "`model.warm_start` needs async_grpo.contrib.warm_start.cache",
        ),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "async_grpo", *words],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 2 and says in said, said
