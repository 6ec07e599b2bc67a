"""Runs as trials of Ray Tune: two at once on two cores, and one that goes on from another's
checkpoint with another learning rate; and a run that a task of Ray drives.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

from async_grpo.config.schema import Config
from async_grpo.contrib.tune import trainable
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.trainer import Trainer
from tests.support.library import residents, settings
from tests.support.models import write_model
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow, pytest.mark.alone]


@pytest.fixture
def config(tmp_path: Path) -> Any:
    model = write_model(tmp_path / "model")
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield settings(tmp_path / "runs", model)
    ray.shutdown()


def segments() -> set[Path]:
    """Memory segments of runs on this machine."""
    return set(Path("/dev/shm").glob("async_grpo-*"))


def fit(config: Config, storage: Path, *, stop: Any = None, **options: Any) -> list[Any]:
    tuner = tune.Tuner(
        trainable(config),
        param_space={"learner.lr": tune.grid_search([1e-4, 1e-2])},
        tune_config=tune.TuneConfig(**options),
        run_config=tune.RunConfig(
            name="sweep",
            storage_path=str(storage),
            stop=stop,
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
        ),
    )
    before = segments()
    found = list(tuner.fit())
    assert [one.error for one in found] == [None, None]
    assert segments() <= before
    return found


def check_ended(home: Path, status: str) -> None:
    """The run in this directory has ended in order, and nothing of it is left."""
    assert not (home / "lock.json").exists()
    with sqlite3.connect(home / "mlflow.db") as database:
        assert database.execute("select status from runs").fetchall() == [(status,)]


def test_two_trials_at_once_keep_apart(config: Config, tmp_path: Path) -> None:
    tracked = config.model_copy(update={"tracking": {"report": False, "system_metrics": False}})
    found = fit(tracked, tmp_path / "tune", metric="rollout/score", mode="max")
    frames = [one.metrics_dataframe for one in found]
    for lr, one, frame in zip([1e-4, 1e-2], found, frames, strict=True):
        assert list(frame["training_iteration"]) == [1, 2, 3, 4, 5, 6]
        assert set(frame["train/lr"]) == {lr} and one.config == {"learner.lr": lr}
        assert one.metrics["eval/problems"] == 8
        with one.checkpoint.as_directory() as directory:
            assert checkpoint.verify(Path(directory))["step"] == 6
    begun = [frame["timestamp"].min() for frame in frames]
    ended = [frame["timestamp"].max() for frame in frames]
    homes = sorted((tmp_path / "runs").iterdir())
    assert len(homes) == 2 and all((home / "metrics.jsonl").exists() for home in homes)
    assert max(begun) - min(ended) < 60, "they ran one after the other"
    for home in homes:
        check_ended(home, "FINISHED")
    assert residents() == []


def test_trials_that_tune_stops_end_in_order(config: Config, tmp_path: Path) -> None:
    tracked = config.model_copy(
        update={
            "run": config.run.model_copy(update={"total_steps": 5000}),
            "tracking": {"report": False, "system_metrics": False},
        }
    )
    stop = {"training_iteration": 3}
    found = fit(tracked, tmp_path / "tune", metric="rollout/score", mode="max", stop=stop)
    assert [one.metrics["training_iteration"] for one in found] == [3, 3]
    for home in (tmp_path / "runs").iterdir():
        check_ended(home, "KILLED")
    assert residents() == []


def test_a_trial_goes_on_from_anothers_checkpoint(config: Config, tmp_path: Path) -> None:
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=4,
        burn_in_period=4,
        quantile_fraction=0.5,
        hyperparam_mutations={"learner.lr": [5e-4]},
        resample_probability=1.0,
        synch=True,
    )
    found = fit(config, tmp_path / "tune", metric="train/lr", mode="max", scheduler=scheduler)
    changed = [one for one in found if one.config["learner.lr"] == 5e-4]
    assert changed, [one.config for one in found]
    frame = changed[0].metrics_dataframe
    assert list(frame[frame["train/lr"] == 5e-4]["training_iteration"]) == [5, 6]
    log = tmp_path / "runs" / changed[0].metrics["trial_id"] / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rates = {row["step"]: row["train/lr"] for row in rows if "train/loss" in row}
    assert rates == {1: 1e-4, 2: 1e-4, 3: 1e-4, 4: 1e-4, 5: 5e-4, 6: 5e-4}


@ray.remote(num_cpus=1)
def train_in_a_task(config: Config) -> tuple[list[int], str]:
    """A whole run, driven by a task of Ray."""
    with Trainer(config) as trainer:
        return [result["training_iteration"] for result in trainer], trainer.save().name


def test_a_task_of_ray_drives_a_run(config: Config) -> None:
    steps, saved = ray.get(train_in_a_task.remote(config), timeout=600)
    assert steps == [1, 2, 3, 4, 5, 6] and saved == "step_000006"
    wait_until(lambda: residents() == [], 30, "the run's processes to be gone")
