"""A learner rank is killed in a real run: the gang comes back bit for bit while the rollout actors
keep their engines; and so does a new start.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_grpo.cluster import engine_processes, learner_group
from async_grpo.config.schema import Config
from async_grpo.observe.console.console import Console
from async_grpo.replay.history import read_history
from async_grpo.replay.queue import ReplayQueue
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.trainer import Trainer
from tests.support import ack_log
from tests.support.models import write_model

STEPS, R, K = 6, 4, 1
REPEATED = re.compile(
    r"learner steps (\d+) to (\d+) are trained again from their recorded batches; the "
    r"weights are the same bits at (\d+) of (\d+)"
)

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]


def settings(home: Path, model: str) -> Config:
    return Config.model_validate(
        {
            "seed": 5,
            "run": {"name": "death", "dir": str(home / "run"), "total_steps": STEPS + 3},
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
            "learner": {
                "lr": 1e-3,
                "ranks": 2,
                "zero_stage": 2,
                "tokens_per_micro_batch": 4096,
                "schedule": "linear",
            },
            "evaluation": {"before": False, "max_samples": 4},
            "tracking": {"mlflow": False, "report": False},
            "weight_sync": {"self_check": False},
            "checkpoint": {"every_steps": 3},
            "cluster": {
                "rollout_actors": {"min": 1, "max": 1},
                "engine": {"max_num_seqs": 32},
                "restart_budget": 4,
            },
        }
    )


def ask(trainer: Trainer, work: Any) -> Any:
    """Run a coroutine of the system on the trainer's loop."""
    return asyncio.run_coroutine_threadsafe(work, trainer.system.event_loop).result(timeout=90)


def kill_at(trainer: Trainer, deaths: list[tuple[int, str, int]]) -> None:
    """(step, call, rank): this rank is killed when the learner is asked for that, once each."""
    learner, left = trainer.system.learner, list(deaths)

    async def deadly(name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        step = trainer.steps_done + 1
        for death in left:
            if death[:2] == (step, name):
                left.remove(death)
                os.kill((await learner.pids())[death[2]], signal.SIGKILL)
                break
        return await original(*args, **kwargs)

    for name in ("prepare", "train", "stage", "save"):
        original = getattr(learner, name)
        setattr(
            learner,
            name,
            lambda *args, name=name, original=original, **kwargs: deadly(
                name, original, *args, **kwargs
            ),
        )


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> Iterator[dict]:
    """Two ranks with a checkpoint every third step. One is killed in step 3, and one at step 5,
    twice; then all of it ends.
    """
    home = tmp_path_factory.mktemp("death")
    told: dict = {"side": home / "run-side", "run": home / "run"}
    config = settings(home, write_model(home / "model", positions=64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_processes, "RolloutProcess", ack_log.LoggedRolloutProcess)
        patch.setattr(learner_group, "LearnerProcess", ack_log.LoggedLearnerProcess)
        with open(home / "first.txt", "w") as log, Trainer(config, console=Console(log)) as trainer:
            trainer.train(steps=1)
            engine = trainer.system.actors.alive()[0]
            told["engine"] = (engine.actor_id, ask(trainer, pid_of(engine)))
            kill_at(trainer, [(3, "train", 1), (5, "prepare", 0), (5, "prepare", 1)])
            told["metrics"] = trainer.train(steps=2)
            told["first"] = (home / "first.txt").read_text()
            trainer.train(steps=STEPS - trainer.steps_done)
            told["still"] = (
                engine.actor_id,
                ask(trainer, pid_of(trainer.system.actors.alive()[0])),
            )
            told["restarts"] = (
                trainer.system.supervisor.restarts,
                trainer.system.actors.budget.restarts,
            )
            told["epoch"] = trainer.system.supervisor.run_epoch
            trainer.train(steps=1)
            told["digests"] = ask(trainer, trainer.system.queue.digests())
            told["steps"] = trainer.steps_done
        told["discarded"] = (home / "first.txt").read_text()[len(told["first"]) :]
        told["checkpoints"] = checkpoint.steps(home / "run")
        with (
            open(home / "second.txt", "w") as log,
            Trainer(config, console=Console(log)) as trainer,
        ):
            trainer.start()
            told["resumed_at"] = trainer.steps_done
            told["resumed_digests"] = ask(trainer, trainer.system.queue.digests())
            trainer.train()
            told["counts"] = ask(trainer, trainer.system.queue.call(ReplayQueue.counts))
        told["second"] = (home / "second.txt").read_text()
    told["history"] = read_history(home / "run" / "journal")
    yield told


async def pid_of(engine: Any) -> int:
    return await engine.handle.pid.remote()


def test_the_gang_comes_back_bit_for_bit_and_the_actors_stay(story):
    assert story["restarts"] == (3, 0) and story["still"] == story["engine"], (
        "the rollout actor and its engine are the same processes"
    )
    assert story["metrics"]["cluster/learner_restarts"] == 1
    repeated = [tuple(map(int, match)) for match in REPEATED.findall(story["first"])]
    assert repeated == [(1, 2, 2, 2)], "from the initial model: there was no checkpoint yet"


def test_two_deaths_at_one_step_discard_what_came_after_the_checkpoint(story):
    assert story["epoch"] == 1
    assert "1 learner step after the checkpoint (step 3) discarded" in story["discarded"], story[
        "discarded"
    ]
    assert "the learner died twice in step 5" in story["discarded"], story["discarded"]


def test_a_new_start_repeats_what_the_checkpoint_does_not_have(story):
    assert story["steps"] == story["resumed_at"] == STEPS + 1 and story["checkpoints"][-1] == STEPS
    assert (
        f"resumed {story['run']}/checkpoints/step_00000{STEPS} at step {STEPS + 1} of {STEPS + 3}"
        in story["second"]
    ), story["second"]
    assert [tuple(map(int, match)) for match in REPEATED.findall(story["second"])] == [
        (STEPS + 1, STEPS + 1, 1, 1)
    ], story["second"]
    recorded = {version: digest for version, digest in story["digests"].items() if version >= STEPS}
    assert recorded and recorded.items() <= story["resumed_digests"].items()


def test_no_completed_group_is_lost_and_none_is_trained_twice_in_the_history(story):
    steps = story["history"].steps
    first = min(steps)
    assert first in (1, 4), "the journal may forget what was trained before its oldest checkpoint"
    assert sorted(steps) == list(range(first, STEPS + 4))
    assert {len(ids) for ids in steps.values()} == {R}
    trained = [group_id for ids in steps.values() for group_id in ids]
    assert len(trained) == len(set(trained)), "a group is in two steps"
    assert (
        story["counts"]["trained"] == R * (STEPS + 3)
        and story["counts"]["failed"] == story["counts"]["invalid"] == 0
    )
    fetched = {tuple(pair) for pair in ack_log.read(story["side"], "trained")}
    assert {(step, group_id) for step, ids in steps.items() for group_id in ids} <= fetched, (
        "a step of the history was never trained"
    )
    acknowledged = Counter(group_id for group_id, _ in ack_log.read(story["side"], "put"))
    assert set(trained) <= set(acknowledged), "a group was trained that nobody saw acknowledged"
