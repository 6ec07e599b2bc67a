"""A rollout actor with a real engine is added to a run that trains, and removed again."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import pytest

from async_grpo.config.schema import Config
from async_grpo.observe.console.console import Console
from async_grpo.replay.history import read_history
from async_grpo.replay.ledger import State
from async_grpo.replay.queue import ReplayQueue
from async_grpo.run.trainer import Trainer
from tests.support.models import write_model
from tests.support.waiting import ask

pytestmark = pytest.mark.timeout(280)


@pytest.mark.slow
def test_an_engine_joins_a_training_run_and_leaves_it(tmp_path, monkeypatch) -> None:
    """Two real engines: one is there from the start, one comes and goes while the learner trains.
    No group is lost.
    """
    steps, size = 400, 4
    cores = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: set(cores)
    )  # with two cores a run starts with one engine
    config = Config.model_validate(
        {
            "seed": 3,
            "run": {"name": "elastic", "dir": str(tmp_path / "run"), "total_steps": steps},
            "model": {"path": write_model(tmp_path / "model", positions=64)},
            "task": {"name": "tests.support.mixed_task:Mixed"},
            "rollout": {
                "rollout_batch_size": size,
                "group_size": 4,
                "prompt_length": 32,
                "response_length": 24,
            },
            "evaluation": {"before": False, "max_samples": 4},
            "tracking": {"mlflow": False, "report": False},
            "cluster": {"rollout_actors": {"min": 1, "max": 2}, "engine": {"max_num_seqs": 16}},
        }
    )
    with (
        open(tmp_path / "log.txt", "w") as log,
        Trainer(config, console=Console(log)) as trainer,
        ThreadPoolExecutor(1) as thread,
    ):

        def train_until(done: Callable[[], object]) -> None:
            for _ in range(steps):
                trainer.train(steps=1)
                if done():
                    return
            raise AssertionError(f"not within {steps} steps")

        def meanwhile(work: Callable[..., Any], *arguments: Any) -> Any:
            """The result of `work`, which goes on while the learner trains."""
            pending = thread.submit(work, *arguments)
            train_until(pending.done)
            return pending.result()

        trainer.train(steps=1)
        actors, queue = trainer.system.actors, trainer.system.queue
        added = meanwhile(trainer.add_rollout_actor)
        train_until(lambda: ask(trainer, queue.call(ReplayQueue.held)).get(added))
        began = trainer.steps_done
        meanwhile(trainer.remove_rollout_actor, added)
        trainer.train(steps=2)
        assert added not in ask(trainer, queue.call(ReplayQueue.held))
        done, counts = trainer.steps_done, ask(trainer, queue.call(ReplayQueue.counts))
        states = Counter(
            entry["state"]
            for entry in ask(
                trainer, queue.call(ReplayQueue.history, range(done * size + 64))
            ).values()
        )
        assert not actors.deaths
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    told = [line["cluster/rollout_actors"] for line in lines if "cluster/rollout_actors" in line]
    assert [count for count, _ in groupby(told)] == [1, 2, 1], told
    assert began < done, "the learner trained while the actor left"
    assert counts["trained"] + counts["training"] == done * size
    assert (
        counts["forfeited"] == counts["attempts_lost"] == counts["failed"] == counts["invalid"] == 0
    ), counts
    assert states["trained"] + states["training"] == done * size, states
    history = read_history(tmp_path / "run" / "journal")
    by_actor = Counter(
        group.actor_id for group in history.groups.values() if group.state == State.TRAINED
    )
    assert by_actor[added] > 0 and by_actor["actor-0.0"] > 0, by_actor
