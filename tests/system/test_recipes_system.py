"""Recipes of configs/ end to end: Ray, a vLLM engine, the queue, DeepSpeed and publications; a
small random model on a task of chance.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from async_grpo.config.load import load_config
from async_grpo.observe.console.console import Console
from async_grpo.replay.queue import ReplayQueue
from async_grpo.run.trainer import Trainer
from tests.support.models import write_model
from tests.support.recipes import CONFIGS, RECIPES

STEPS = 4
GOES_ON = "decoupled_ppo"
"""The recipe that is run in the order of completion, with old tokens masked."""

pytestmark = pytest.mark.timeout(200)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(RECIPES))
def test_a_recipe_runs_end_to_end(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", positions=64)
    whole = load_config(CONFIGS / f"{name}.yaml")
    groups = 16 if whole.rollout.group_size == 1 else 4
    overrides = [
        f"run={{name: {name}, dir: {tmp_path}/run, total_steps: {STEPS}}}",
        "model.warm_start=null",
        f"model.path={model}",
        "task.name=tests.support.mixed_task:Mixed",
        f"rollout.rollout_batch_size={groups}",
        "evaluation={before: false, max_samples: 8}",
        "tracking.mlflow=false",
        "tracking.report=false",
        "cluster.rollout_actors.max=1",
        "cluster.engine.max_num_seqs=64",
    ]
    if whole.frozen:
        teacher = write_model(tmp_path / "teacher", positions=64, seed=1)
        overrides.append(f"frozen={{teacher: {{path: {teacher}}}}}")
    if name == GOES_ON:
        overrides += ["replay.order=ready", "replay.on_stale=mask"]
    if whole.learner.ppo_mini_batch_size is not None:
        overrides.append(f"learner.ppo_mini_batch_size={groups // 2}")
    if whole.model.reference_refresh_steps:
        overrides.append("model.reference_refresh_steps=2")
    config = load_config(CONFIGS / f"{name}.yaml", overrides)
    with open(tmp_path / "log.txt", "w") as log, Trainer(config, console=Console(log)) as trainer:
        trainer.train()
        counts = asyncio.run_coroutine_threadsafe(
            trainer.system.queue.call(ReplayQueue.counts), trainer.system.event_loop
        ).result(timeout=30)
        assert trainer.steps_done == STEPS
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    for line in steps:
        assert (
            0
            <= line["train/staleness_mean"]
            <= line["train/staleness_max"]
            <= config.replay.max_staleness
        )
        assert np.isfinite(line["train/loss"]) and np.isfinite(line["train/grad_norm"])
        if config.replay.filter_groups.enable:
            assert line["rollout/zero_std_groups"] == 0 == line["rollout/all_wrong_groups"], (
                "only groups with signal are trained"
            )
        if config.algorithm.adv_estimator.name == "remax":
            assert line["rollout/baseline_tokens"] > 0
    trained = counts["trained"] + counts["training"]
    assert trained == STEPS * groups and counts["failed"] == counts["invalid"] == 0, counts
    if config.replay.filter_groups.enable:
        assert (
            sum(count for reason, count in counts.items() if reason.startswith("rejected/"))
            == counts["rejected"]
        )
