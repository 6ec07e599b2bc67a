"""A trial of Ray Tune in a process of a test, with a system whose steps cost nothing. The same with
real parts: tests/system/test_tune_runs.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_grpo.config.schema import Config
from async_grpo.contrib.tune import RunTrial, trainable
from tests.support.wiring import tiny_model
from tests.wiring.run import doubles

SETTINGS: dict[str, Any] = {
    "run": {"dir": "runs/mine", "total_steps": 2},
    "model": {"path": "models/a"},
    "task": {"name": "arithmetic"},
    "rollout": {"prompt_length": 16, "response_length": 6},
    "evaluation": {"max_samples": 4, "before": False},
    "tracking": {"mlflow": False, "report": False},
    "cluster": {"device": "cpu"},
}


@pytest.mark.parametrize("named", [False, True], ids=["configured", "parameter"])
def test_relative_paths_begin_where_the_trainable_was_made(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, trials = tmp_path / "home", tmp_path / "trials"
    trials.mkdir()
    (home / "models").mkdir(parents=True)
    for name in ("a", "b"):
        (home / "models" / name).symlink_to(tiny_model())
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path / "tune"))
    monkeypatch.chdir(home)
    made = trainable(Config.model_validate(SETTINGS))
    assert made.settings["run"]["dir"] == str(home / "runs/mine")
    monkeypatch.chdir(trials)  # as Tune does
    parameters = {"model.path": "models/b", "run.dir": "runs/other"} if named else {}
    trial: RunTrial = made(config=parameters)
    monkeypatch.setattr(made, "trial_id", "t1")
    with doubles([]):
        assert [trial.step()["done"], trial.step()["done"]] == [False, True]
        trial.cleanup()
    expected = home / ("runs/other" if named else "runs/mine/t1")
    assert (expected / "config.yaml").exists() and list(trials.iterdir()) == []
    model = home / "models" / ("b" if named else "a")
    assert f"path: {model}\n" in (expected / "config.yaml").read_text()
