"""A script that has initialised Ray, trains beside its own actor, and uses Ray afterwards."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file

from async_grpo import Callback, RunError, Trainer
from async_grpo.observe.console.console import Console
from tests.support.library import residents, settings
from tests.support.models import write_model

pytestmark = pytest.mark.timeout(400)


class Heard(Callback):
    """Keeps the events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def on_start(self, trainer: Trainer) -> None:
        self.events.append(("start", trainer.steps_done))

    def on_step(self, trainer: Trainer, result: dict[str, Any]) -> None:
        self.events.append(("step", result["training_iteration"]))

    def on_weight_sync(self, trainer: Trainer, version: int, seconds: float) -> None:
        self.events.append(("weight_sync", version))

    def on_evaluation(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        self.events.append(("evaluation", step))

    def on_checkpoint(self, trainer: Trainer, step: int, path: Path) -> None:
        self.events.append(("checkpoint", step))

    def on_fault(self, trainer: Trainer, text: str) -> None:
        self.events.append(("fault", text))

    def on_end(self, trainer: Trainer, status: str) -> None:
        self.events.append(("end", status))


@ray.remote(num_cpus=1)
class Own:
    """The script's own actor."""

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    home = tmp_path_factory.mktemp("library")
    model = write_model(home / "model")
    told: dict[str, Any] = {"home": home, "model": model, "heard": Heard()}
    ray.init(num_cpus=6, include_dashboard=False, log_to_driver=False)
    try:
        own = Own.remote()
        told["pid"] = ray.get(own.pid.remote())
        told["log"] = home / "log.txt"
        with open(told["log"], "w") as log:
            play(told, Console(log))
        told["pid after"] = ray.get(own.pid.remote())
        told["left"] = residents()
        yield told
    finally:
        ray.shutdown()


def play(told: dict[str, Any], console: Console) -> None:
    config = settings(told["home"] / "run", told["model"])
    with Trainer(config, console=console, callbacks=[told["heard"]]) as trainer:
        told["results"] = results = []
        for result in trainer:
            results.append(result)
            if len(results) == 3:
                told["state"] = trainer.get_state()
                told["weights"] = trainer.call(trainer.system.learner.get_weights())
                told["generated"] = trainer.generate(["1+1=", "2+3="], n=2, temperature=0.7)
                actors = trainer.system.actors
                told["ids"] = actors.healthy_actor_ids()
                told["asked"] = trainer.call(
                    actors.foreach_actor(lambda actor, x: (os.getpid(), x), 5)
                )
                told["raised"] = trainer.call(actors.foreach_actor(lambda actor: 1 / 0))
                with pytest.raises(RunError, match="no option stop"):
                    trainer.generate(["1"], stop="x")
                saved = trainer.save()
                files = (saved / "hf").glob("*.safetensors")
                told["saved"] = {
                    name: one for file in files for name, one in load_file(file).items()
                }
            if len(results) == 5:
                trainer.restore(saved)
                told["back"] = trainer.get_state()
        told["second"] = trainer.train()
        told["evaluated"] = trainer.evaluate()
        trainer.save()


def test_ray_is_left_as_it_was(story: dict[str, Any]) -> None:
    assert story["pid after"] == story["pid"] and story["left"] == ["Own"]


def test_steps_come_one_by_one_and_go_back_where_asked(story: dict[str, Any]) -> None:
    results = story["results"]
    assert [one["training_iteration"] for one in results] == [1, 2, 3, 4, 5, 4, 5, 6]
    assert [one["done"] for one in results] == [False] * 7 + [True]
    assert all("train/loss" in one and one["time_this_iter_s"] > 0 for one in results)
    total = sum(one["time_this_iter_s"] for one in results)
    assert total == pytest.approx(results[-1]["time_total_s"])
    assert story["second"] == {}
    assert "nothing is left to train: all 6 learner steps" in story["log"].read_text()
    assert (story["state"]["training_iteration"], story["state"]["run_epoch"]) == (3, 0)
    assert (story["back"]["training_iteration"], story["back"]["run_epoch"]) == (3, 1)
    assert story["back"]["live_version"] == 3 and story["state"]["live_version"] in (2, 3)
    json.dumps(story["state"])


def test_actors_and_weights_can_be_asked(story: dict[str, Any]) -> None:
    assert story["ids"] == ["actor-0.0"]
    [(pid, x)] = story["asked"].values()
    assert x == 5 and pid not in (os.getpid(), story["pid"])
    assert isinstance(story["raised"]["actor-0.0"], ZeroDivisionError)
    assert set(story["saved"]) <= set(story["weights"])
    for name, weight in story["saved"].items():
        assert torch.equal(weight, story["weights"][name])


def test_the_live_weights_generate(story: dict[str, Any]) -> None:
    assert [len(responses) for responses in story["generated"]] == [2, 2]
    for responses in story["generated"]:
        for one in responses:
            assert isinstance(one.text, str) and 1 <= len(one.token_ids) <= 6
            assert len(one.logprobs) == len(one.weights) == len(one.token_ids)
            assert np.all(np.array(one.logprobs) <= 0)
            assert set(one.weights) <= {"v0.2", "v0.3"}


def test_callbacks_hear_what_happened_in_its_order(story: dict[str, Any]) -> None:
    events = story["heard"].events
    assert events[0] == ("start", 0) and events[-1] == ("end", "FINISHED")
    of = {kind: [what for one, what in events if one == kind] for kind, _ in events}
    assert of["step"] == [1, 2, 3, 4, 5, 4, 5, 6]
    assert of["evaluation"] == [6]
    assert of["checkpoint"] == [2, 3, 4, 4, 6]
    assert {1, 2, 3, 4, 5, 6} <= set(of["weight_sync"]) and "fault" not in of
