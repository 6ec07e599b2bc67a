"""Runs that an earlier program recorded (a2108c3) go on, and can be looked at: one that ended, and
one that was killed two steps after its checkpoint. tests/data/recorded has them, with their model.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from async_grpo.config.stored import read_settings
from async_grpo.run.checkpoint import directory as checkpoint
from tests.support import verbs

ROOT = Path(__file__).resolve().parents[3]
RECORDED = ROOT / "tests" / "data" / "recorded"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    shutil.copytree(RECORDED, tmp_path, dirs_exist_ok=True)
    return tmp_path


def goes_on(home: Path, name: str, steps: int, *more: str) -> str:
    """What the run says that goes on until step `steps`. more: settings."""
    command = [sys.executable, "-m", "async_grpo", "train", str(home / name / "config.yaml")]
    settings = [f"run.dir={home / name}", f"run.total_steps={steps}", *more]
    done = subprocess.run(
        [*command, *settings],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_CACHE": str(home / "hub"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_run_that_had_ended_trains_on(home: Path) -> None:
    said = goes_on(home, "ended", 6)
    assert "at step 4 of 6" in said and "2 in " in said
    assert (home / "ended" / "checkpoints" / "step_000006" / "hf").is_dir()


@pytest.mark.slow  # its files are read by a fast test too
@pytest.mark.timeout(200)
def test_a_run_that_was_killed_repeats_what_its_journal_has_and_goes_on(home: Path) -> None:
    more = ["learner.tokens_per_micro_batch=auto", "learner.gradient_checkpointing=auto"]
    said = goes_on(home, "killed", 10, *more)  # as they were: the recorded batches fit
    assert "learner: 16,384 tokens per micro-batch without gradient checkpointing" in said
    assert "resumed with another learner" not in said
    for settings in (
        read_settings(home / "killed" / "config.yaml"),
        checkpoint.read(checkpoint.path_for(home / "killed", 10))["config"],
    ):
        learner = settings["learner"]
        assert learner["tokens_per_micro_batch"] == 16384
        assert learner["gradient_checkpointing"] is False
    assert "rolled forward from the recorded batches" in said
    assert "learner steps 7 to 8 are trained again from their recorded batches" in said
    # equal bits on the machine that recorded them, or one like it
    assert re.search(r"at [012] of 2 recorded versions", said), said
    assert "at step 8 of 10" in said


@pytest.mark.parametrize("name", ["ended", "killed"])
def test_a_recorded_run_can_be_inspected(
    name: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verbs.inspect([str(home / name)]) == verbs.status([str(home / name)]) == 0
    said = capsys.readouterr().out
    assert "trained" in said and "actor-0.0" in said


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_bundled_run_is_repeated_bit_for_bit(tmp_path: Path) -> None:
    """As docs/runs/index.md says it."""
    page = (ROOT / "docs" / "runs" / "index.md").read_text(encoding="utf-8")
    [exported] = re.findall(r"^export (\S+) (\S+) ", page, re.MULTILINE)
    environment = dict(one.split("=") for one in exported)
    command = [sys.executable, "-m", "async_grpo", "retrain", "docs/runs/quickstart"]
    done = subprocess.run(
        [*command, f"run.dir={tmp_path}/again"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit-equal at all 10 weight syncs" in done.stdout
