"""Every recipe in configs/ trains two real learner steps on recorded groups, through the wire, the
row mathematics and DeepSpeed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from async_grpo.config.load import load_config
from async_grpo.config.schema import Config
from async_grpo.learner.learner import Learner
from tests.support.models import write_model
from tests.support.recipes import CONFIGS, RECIPES
from tests.support.recorded_steps import two_steps


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("models") / "policy")


def recipe(name: str, model: str, tmp_path: Path) -> Config:
    """The recipe as it is, made small: the test's model, few groups, two steps."""
    config = load_config(CONFIGS / f"{name}.yaml")
    groups = 8 if config.rollout.group_size == 1 else 4
    overrides = [
        f"run={{total_steps: 2, dir: {tmp_path}}}",
        "model.warm_start=null",
        f"model.path={model}",
        f"rollout.rollout_batch_size={groups}",
        "learner.tokens_per_micro_batch=64",
        "learner.lr=1e-3",
    ]
    if config.learner.ppo_mini_batch_size is not None:
        overrides.append(f"learner.ppo_mini_batch_size={groups // 2}")
    if config.model.reference_refresh_steps:
        overrides.append("model.reference_refresh_steps=2")
    return load_config(CONFIGS / f"{name}.yaml", overrides)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_two_steps(name: str, model: str, tmp_path: Path) -> None:
    config = recipe(name, model, tmp_path)
    with two_steps(config, model) as (learner, found):
        for step, metrics in enumerate(found, 1):
            assert (metrics["rollout/zero_std_groups"] == 1) == (config.rollout.group_size == 1)
            assert metrics["train/staleness_max"] == min(step - 1, config.replay.max_staleness)
        expect(config, found[-1], learner)


def expect(config: Config, metrics: dict[str, float], learner: Learner) -> None:
    """The parts that the recipe names have left their traces."""
    algorithm = config.algorithm
    assert ("train/kl" in metrics) == algorithm.use_kl_loss
    assert ("train/teacher_kl" in metrics) == (algorithm.distill.teacher is not None)
    assert ("rollout/reward_kl" in metrics) == algorithm.add_token_level_kl
    assert ("rollout/baseline_reward" in metrics) == (algorithm.adv_estimator.name == "remax")
    assert ("train/importance_weight" in metrics) == (algorithm.importance.level != "none")
    assert ("time/learner_proximal" in metrics) == (algorithm.anchor == "recomputed")
    if algorithm.advantage_clip is not None:
        assert metrics["rollout/advantage_abs_max"] <= algorithm.advantage_clip
    if config.model.reference_refresh_steps:
        ours, theirs = learner.policy.module.parameters(), learner._reference.module.parameters()
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)), (
            "refreshed after step 2"
        )
