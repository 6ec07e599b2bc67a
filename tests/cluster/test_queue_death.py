"""The queue's process is killed at random moments of a real run: no completed group is lost, none
is trained twice.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from async_grpo.cluster import engine_processes, learner_group
from async_grpo.config.load import dump
from async_grpo.config.schema import Config
from async_grpo.observe.console.console import Console
from async_grpo.replay.history import read_history
from async_grpo.replay.queue import ReplayQueue
from async_grpo.run.ending import coded
from async_grpo.run.trainer import Trainer
from tests.support import ack_log
from tests.support.models import write_model
from tests.support.verbs import retrain, train
from tests.support.waiting import ask

STEPS, R, K, KILLS = 14, 6, 2, 3

pytestmark = [pytest.mark.timeout(280), pytest.mark.slow]


def settings(home: Path, model: str) -> Config:
    return Config.model_validate(
        {
            "seed": 5,
            "run": {"name": "death", "dir": str(home / "run"), "total_steps": STEPS + 4},
            "model": {"path": model},
            "task": {"name": "tests.support.mixed_task:Mixed"},
            "rollout": {
                "rollout_batch_size": R,
                "group_size": 4,
                "prompt_length": 32,
                "response_length": 24,
            },
            "replay": {"max_staleness": K},
            "algorithm": {"use_kl_loss": False},
            "learner": {"lr": 1e-4, "tokens_per_micro_batch": 4096},
            "evaluation": {"before": False, "max_samples": 4},
            "tracking": {"mlflow": False, "report": False},
            "weight_sync": {"self_check": False},
            "cluster": {
                "rollout_actors": {"min": 1, "max": 1},
                "engine": {"max_num_seqs": 32},
                "restart_budget": KILLS,
            },
        }
    )


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> Iterator[dict]:
    """One run whose queue is killed `KILLS` times while actors produce and the learner trains."""
    home, rng = tmp_path_factory.mktemp("death"), random.Random(time.time_ns())
    told: dict = {"side": home / "run-side", "kills": [], "run": home / "run"}
    config = settings(home, write_model(home / "model", positions=64))
    (home / "cfg.yaml").write_text(dump(config))
    with pytest.MonkeyPatch.context() as patch, open(home / "log.txt", "w") as log:
        patch.setattr(engine_processes, "RolloutProcess", ack_log.LoggedRolloutProcess)
        patch.setattr(learner_group, "LearnerProcess", ack_log.LoggedLearnerProcess)
        with Trainer(config, console=Console(log)) as trainer, ThreadPoolExecutor(1) as thread:
            trainer.train(steps=1)
            handle = trainer.system._queue_handle
            for kill in range(KILLS):
                pid = ask(trainer, handle.pid.remote())
                training = thread.submit(trainer.train, steps=3)
                time.sleep(rng.uniform(0.0, 0.6))
                os.kill(pid, signal.SIGKILL)
                told["kills"].append((pid, trainer.steps_done))
                training.result(timeout=120)
                assert ask(trainer, handle.pid.remote()) != pid, (
                    f"kill {kill}: the queue's process is still the old one"
                )
            trainer.train(steps=STEPS - trainer.steps_done)
            told["counts"] = ask(trainer, trainer.system.queue.call(ReplayQueue.counts))
            told["metrics"] = ask(trainer, trainer.system.queue.metrics())
            os.kill(ask(trainer, handle.pid.remote()), signal.SIGKILL)
            try:
                trainer.train()
            except Exception as error:  # noqa: BLE001 - whatever it is, its code is what the test is about
                told["end"] = coded(error)
    told["history"] = read_history(home / "run" / "journal")
    told["log"] = (home / "log.txt").read_text()
    yield told


def test_no_completed_group_is_lost_and_none_is_trained_twice(story):
    trained = ack_log.read(story["side"], "trained")
    per_step = Counter(step for step, _ in trained)
    assert {step: per_step[step] for step in range(1, STEPS + 1)} == dict.fromkeys(
        range(1, STEPS + 1), R
    )
    group_ids = [group_id for _, group_id in trained]
    assert len(group_ids) == len(set(group_ids)), "a group was trained twice"
    acknowledged = Counter(group_id for group_id, _ in ack_log.read(story["side"], "put"))
    assert set(acknowledged) >= set(group_ids), "a group was trained that nobody saw acknowledged"
    assert set(acknowledged.values()) == {1}, "two attempts of one group were taken"
    for group_id in set(acknowledged) - set(group_ids):
        assert story["history"].groups[group_id].state in ("ready", "training"), (
            f"the completed group {group_id} was lost"
        )


def test_a_queue_that_dies_too_often_ends_the_run_and_says_so(story):
    code, message = story["end"]
    assert (
        code == 4
        and "replay queue" in message
        and "restart_budget" in message
        and "learner rank" not in message
    ), story["end"]


def test_the_ledger_went_on_where_it_was(story):
    counts = story["counts"]
    assert counts["restarts"] == KILLS and counts["trained"] + counts["training"] == STEPS * R
    assert counts["failed"] == counts["invalid"] == counts["unreadable"] == 0
    assert story["metrics"]["replay/staleness_max"] <= K
    assert "the replay queue's process died" in story["log"], "the run says so"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("learner.weight_decay=0.0", "bit-equal at all"),
        pytest.param(
            "learner.lr=2e-4", "different from version 1 on (0 of", marks=pytest.mark.slow
        ),
    ],
)
def test_a_learner_alone_repeats_the_recorded_run(story, capfd, change: str, says: str):
    """Whatever happened to the queue meanwhile, its record gives the same weights, bit for bit; and
    another learner other ones.
    """
    home = story["run"].parent
    assert (
        retrain(
            [
                str(story["run"]),
                "--config",
                str(home / "cfg.yaml"),
                f"run.dir={home / change}",
                change,
            ]
        )
        == 0
    )
    assert says in capfd.readouterr().out


def test_a_replay_that_cannot_be_is_refused_in_a_sentence(story, capfd):
    home = story["run"].parent
    for arguments, says in (
        ([story["run"], f"run.dir={story['run']}"], "set run.dir to another directory"),
        ([story["run"] / "checkpoints", f"run.dir={home / 'x'}"], "has no journal"),
        (
            [story["run"], "--after", "3", f"run.dir={home / 'x'}"],
            "the checkpoints to begin with are: none",
        ),
    ):
        words = [str(word) for word in arguments]
        assert retrain([*words, "--config", str(home / "cfg.yaml")]) == 2
        assert says in capfd.readouterr().out
    with pytest.raises(SystemExit):
        train([str(home / "cfg.yaml"), "--after", "3"])
    assert "--after is no option" in capfd.readouterr().err
