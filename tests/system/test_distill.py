"""A teacher in a real run: what it says is what transformers computes, also after its process was
killed; without it the run ends, and nothing is trained on less.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from async_grpo.config.load import load_config
from async_grpo.config.schema import Config
from async_grpo.errors import FaultBudgetSpent
from async_grpo.observe.console.console import Console
from async_grpo.replay.history import read_history
from async_grpo.rollout.engine.base import stop_tokens
from async_grpo.run.trainer import Trainer
from async_grpo.tasks.registry import load_task, problem_index
from async_grpo.wire.codec import Group, decode_group
from tests.support.learners import plain_model
from tests.support.models import write_model
from tests.support.recipes import CONFIGS
from tests.support.teachers import agrees

STEPS, GROUPS = 6, 4
pytestmark = pytest.mark.timeout(300)


def config_of(path: Path, *settings: str) -> Config:
    student = write_model(path / "student", positions=64)
    teacher = write_model(path / "teacher", positions=64, seed=1)
    return load_config(
        CONFIGS / "distill.yaml",
        [
            f"run={{dir: {path}/run, total_steps: {STEPS}}}",
            "model.warm_start=null",
            f"model.path={student}",
            f"frozen={{teacher: {{path: {teacher}, engine: {{max_num_seqs: 32}}}}}}",
            "task.name=tests.support.mixed_task:Mixed",
            f"rollout.rollout_batch_size={GROUPS}",
            "evaluation={before: false, max_samples: 8}",
            "tracking={mlflow: false, report: false}",
            "cluster.rollout_actors.max=1",
            "cluster.engine.max_num_seqs=64",
            *settings,
        ],
    )


def kill_teacher(trainer: Trainer) -> None:
    async def pid() -> int:
        answer: int = await trainer.system.frozen.handles["teacher"].health.remote()
        return answer

    os.kill(trainer.call(pid()), signal.SIGKILL)


def trained_groups(directory: Path) -> list[Group]:
    history = read_history(directory / "journal")
    numbers = [group_id for step in sorted(history.steps) for group_id in history.steps[step]]
    return [decode_group(history.frame(group_id)) for group_id in numbers]


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_trained_token_has_the_word_of_its_teacher(tmp_path: Path, dies: bool) -> None:
    """The policy is a second teacher, which sees what it saw: what it says is what it said. dies:
    the teacher is killed, and comes back.
    """
    config = config_of(
        tmp_path,
        "algorithm.distill.teacher_top_k=4",
        "algorithm.distill.teacher=[teacher, policy]",
        'algorithm.distill.teacher_prompt="{prompt}"',
        "algorithm.sft_loss_coef=0.1",
        "algorithm.sft_model=teacher",
        "task.name=tests.support.mixed_task:Taught",
        "rollout.prompt_length=12",
    )
    log = tmp_path / "log.txt"
    with open(log, "w") as out, Trainer(config, console=Console(out)) as trainer:
        for result in trainer.steps():
            assert np.isfinite(result["train/teacher_kl"])
            assert result["train/teacher_top_k_kl"] > -1e-6 and result["train/sft_loss"] > 0
            assert result["rollout/demonstrations"] == 1
            if dies and result["training_iteration"] == 2:
                kill_teacher(trainer)
        assert trainer.steps_done == STEPS and result["rollout/teacher_s"] > 0
    assert ("frozen model teacher died" in log.read_text()) == dies
    groups = trained_groups(tmp_path / "run")
    assert len(groups) == STEPS * GROUPS
    teacher = plain_model(config.frozen["teacher"].path).eval()
    task, close = load_task(config.task, config.seed), 0
    for group in groups:
        assert group.planes["teacher_ids"].shape[1] == 4
        index = problem_index(config.seed, task.fingerprint, group.group_id, len(task))
        if task.train(index).teacher != "policy":
            agrees(teacher, group)
            continue
        rows = [row for row in group.rows if row.role == "train"]
        own = np.concatenate([row.behavior_logprobs for row in rows])
        said = group.planes["teacher_logprobs"][: len(own), 0]
        close += np.abs(said - own).max() < 1e-3  # others met newer weights
        [given] = [row for row in group.rows if row.role == "demonstration"]
        tokens, limit = given.response_ids, config.rollout.response_length
        ended = int(tokens[-1]) in stop_tokens(str(config.model.path), None)
        assert len(tokens) == limit or ended
        assert given.finish_reason == ("stop" if ended else "length")
    assert close > 0


@pytest.mark.slow
def test_without_its_teacher_a_run_ends(tmp_path: Path) -> None:
    config = config_of(tmp_path, "cluster.restart_budget=0", "run.total_steps=1000")
    with (
        open(tmp_path / "log.txt", "w") as out,
        Trainer(config, console=Console(out)) as trainer,
        pytest.raises(FaultBudgetSpent, match="frozen model teacher died"),
    ):
        for result in trainer.steps():
            if result["training_iteration"] == 2:
                kill_teacher(trainer)
    groups = trained_groups(tmp_path / "run")
    assert groups and all("teacher_logprobs" in group.planes for group in groups)
