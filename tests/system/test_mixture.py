"""Several tasks in a real run whose driver, queue and rollout actor are killed: every one has its
share of what is trained.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_grpo.config.load import load_config
from async_grpo.observe.console.console import Console
from async_grpo.replay.history import read_history
from async_grpo.replay.ledger import State
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.trainer import Trainer
from async_grpo.tasks.mixture import ProblemOrder, load_tasks
from async_grpo.wire.codec import decode_meta
from tests.support.models import write_model
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
STEPS, GROUPS, WEIGHTS = 10, 9, {"slow": 5, "failing": 3, "filtered": 1}
LOST = (State.REJECTED, State.FAILED, State.EXPIRED)
pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]


def settings(directory: Path) -> dict[str, Any]:
    tasks = "tests.support.mixture_tasks"
    return {
        "run": {"dir": str(directory / "run"), "total_steps": 100_000},
        "model": {"path": write_model(directory / "model")},
        "task": {"name": "tests.support.mixed_task:Mixed", "max_bad_fraction": 1.0},
        "tasks": {
            "slow": {"name": f"{tasks}:Slow", "weight": 5},
            "failing": {"name": f"{tasks}:Failing", "weight": 3},
            "filtered": {"weight": 1, "group_size": 2, "filter_groups": {"enable": True}},
        },
        "rollout": {
            "rollout_batch_size": GROUPS,
            "group_size": 4,
            "prompt_length": 8,
            "response_length": 4,
        },
        "replay": {"quota": "trained", "max_attempts": 2, "max_staleness": 2},
        "evaluation": {"max_samples": 12},
        "checkpoint": {"every_steps": 2, "keep": 100},
        "tracking": {"mlflow": False, "report": False},
        "cluster": {"rollout_actors": {"max": 1}, "engine": {"max_num_seqs": 64}},
    }


def kill(trainer: Trainer, whose: Any) -> None:
    async def pid() -> int:
        answer: int = await whose.pid.remote()
        return answer

    os.kill(trainer.call(pid()), signal.SIGKILL)


def test_tasks_keep_their_shares_of_what_is_trained_whatever_dies(tmp_path: Path) -> None:
    file, log = tmp_path / "mix.yaml", tmp_path / "first.txt"
    file.write_text(yaml.safe_dump(settings(tmp_path)))
    with open(log, "wb") as out:
        driver = subprocess.Popen(
            [sys.executable, "-m", "async_grpo.run", str(file)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        saved = lambda: 4 in checkpoint.steps(tmp_path / "run") or driver.poll() is not None  # noqa: E731
        wait_until(saved, 150, "a checkpoint", log=log)
        assert driver.poll() is None, log.read_text()
    finally:
        driver.kill()
        driver.wait(timeout=30)
    total = max(checkpoint.steps(tmp_path / "run")) + STEPS
    config = load_config(file, [f"run.total_steps={total}"])
    with (
        open(tmp_path / "second.txt", "w") as out,
        Trainer(config, console=Console(out)) as trainer,
    ):
        for number, result in enumerate(trainer.steps()):
            shares = {name: result.get(f"rollout/task/{name}/groups", 0) for name in WEIGHTS}
            assert sum(shares.values()) == GROUPS
            if number == 2:
                kill(trainer, trainer.system.actors.alive()[0].handle)
            if number == 5:
                kill(trainer, trainer.system.queue._handle)
        assert trainer.steps_done == total
        accuracy = trainer.evaluations[-1][1]
        assert {f"eval/task/{name}/accuracy_greedy" for name in WEIGHTS} <= accuracy.keys()

    history = read_history(tmp_path / "run" / "journal")
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    steps = {
        line["step"]: {name: int(line.get(f"rollout/task/{name}/groups", 0)) for name in WEIGHTS}
        for line in lines
        if "rollout/score" in line
    }
    order = ProblemOrder.of(config, load_tasks(config))
    lost = Counter(order.task(n) for n, one in history.groups.items() if one.state in LOST)
    for group_id in (group_id for step in history.steps.values() for group_id in step):
        meta = decode_meta(history.frame(group_id))
        assert {name.partition(".")[0] for name in meta.rows[0].rewards} == {order.task(group_id)}
        assert len(meta.rows) == (2 if order.task(group_id) == "filtered" else 4)
    assert lost["filtered"] and lost["failing"], "nothing was lost: nothing is shown"
    trained = Counter[str]()
    for shares in steps.values():  # of both starts
        trained.update(shares)
    assert len(steps) == total and trained.total() == total * GROUPS
    assert all(abs(trained[name] - total * weight) <= 1 for name, weight in WEIGHTS.items())
