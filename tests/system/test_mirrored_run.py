"""A run whose machine is lost goes on from its copy on another one: the same steps, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_grpo.config.load import load_config
from async_grpo.observe.console.console import Console
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.trainer import Trainer
from tests.support.models import write_model
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
MORE = 4
pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]


def settings(directory: Path) -> dict[str, Any]:
    return {
        "seed": 5,
        "run": {"dir": str(directory / "here" / "run"), "total_steps": 100_000},
        "model": {"path": write_model(directory / "model")},
        "task": {"name": "tests.support.mixed_task:Mixed", "max_bad_fraction": 1.0},
        "rollout": {
            "rollout_batch_size": 8,
            "group_size": 4,
            "prompt_length": 8,
            "response_length": 4,
        },
        "replay": {"max_staleness": 0},
        "evaluation": {"before": False},
        "checkpoint": {"every_steps": 3, "mirror": f"file://{directory}/far"},
        "tracking": {"also": ["tensorboard"], "report": False},
        "cluster": {"rollout_actors": {"max": 1}, "engine": {"max_num_seqs": 64}},
    }


def losses(run_dir: Path) -> dict[int, float]:
    """Loss by learner step, as far as the metrics tell."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def copied(far: Path) -> int:
    """Step of the newest checkpoint of a copy."""
    if not (far / "mirror.json").exists():
        return 0
    names = json.loads((far / "mirror.json").read_text())["files"]
    return max((int(name[17:23]) for name in names if name.startswith("checkpoints/")), default=0)


def test_a_lost_machines_run_goes_on_from_its_copy(tmp_path: Path) -> None:
    file, log, here = tmp_path / "run.yaml", tmp_path / "first.txt", tmp_path / "here" / "run"
    file.write_text(yaml.safe_dump(settings(tmp_path)))
    with open(log, "wb") as out:
        driver = subprocess.Popen(
            [sys.executable, "-m", "async_grpo.run", str(file)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    far = tmp_path / "far" / "run"
    try:
        wait_until(lambda: copied(far) or driver.poll() is not None, 150, "a copy", log=log)
        enough = lambda: len(losses(here)) >= copied(far) + 2 or driver.poll() is not None  # noqa: E731
        wait_until(enough, 60, "two more steps", log=log)
        assert driver.poll() is None, log.read_text()
    finally:
        driver.kill()
        driver.wait(timeout=30)
    assert f"copied to file://{far}" in log.read_text()
    known = losses(here)
    shutil.rmtree(tmp_path / "here")

    begin = copied(far)
    there = tmp_path / "there" / "another"
    config = load_config(
        file,
        [f"checkpoint.resume=file://{far}", f"run.dir={there}", f"run.total_steps={begin + MORE}"],
    )
    said = tmp_path / "second.txt"
    with open(said, "w") as second, Trainer(config, console=Console(second)) as trainer:
        trainer.start()
        assert trainer.steps_done >= begin > 0
        trainer.train()
        trainer.save()
    assert trainer.mirror_error == "", said.read_text()
    found = losses(there)
    both = [step for step in found if step in known]
    assert max(both) > begin, "a step that both machines trained"
    assert {step: found[step] for step in both} == {step: known[step] for step in both}
    assert max(found) == begin + MORE
    own = tmp_path / "far" / "another"
    assert copied(own) == begin + MORE
    assert checkpoint.verify(checkpoint.path_for(own, begin + MORE))["step"] == begin + MORE
    assert "is not complete" not in said.read_text() and "error" not in said.read_text().lower()
