"""Every recipe in configs/ trains two real learner steps on recorded groups, through the wire, the
row mathematics and DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from async_grpo.algo.metrics import MetricSums
from async_grpo.config.load import load_config
from async_grpo.config.schema import Config
from async_grpo.learner.learner import Learner
from async_grpo.planning import RowMath
from async_grpo.wire import codec
from tests.support.learners import picked, plain_model, row_distribution, set_rank
from tests.support.models import write_model
from tests.support.processes import free_port
from tests.support.recipes import CONFIGS, RECIPES

WEIGHTS = {"correct": 1.0, "format": 0.2}


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


def record(config: Config, directory: str, step: int) -> list[bytes]:
    """The frames of one learner step: responses that the model in `directory` may have sampled,
    with its own log-probs, nearly.
    """
    policy, rng = plain_model(directory), np.random.default_rng(step)
    oldest = step - 1 - min(config.replay.max_staleness, step - 1)
    frames = []
    for group_id in range(10 * step, 10 * step + config.rollout.rollout_batch_size):
        prompt = rng.integers(3, 100, int(rng.integers(2, 8))).astype(np.int32)
        roles = ["train"] * config.rollout.group_size + ["baseline"] * (
            config.algorithm.adv_estimator == "remax"
        )
        rows = []
        for index, role in enumerate(roles):
            length = int(rng.integers(2, config.rollout.response_length + 1))
            response = rng.integers(3, 100, length).astype(np.int32)
            with torch.no_grad():
                logprobs = picked(
                    row_distribution(policy, prompt, response), response
                ).numpy() + rng.normal(0, 0.05, length)
            spans = [codec.VersionSpan(oldest, 0, 1), codec.VersionSpan(step - 1, 1, length)]
            right = float(index % 2 == group_id % 2)
            rows.append(
                codec.Row(
                    response_ids=response,
                    behavior_logprobs=np.minimum(logprobs, 0).astype(np.float32),
                    segments=[(0, length)],
                    versions=spans if oldest < step - 1 else [codec.VersionSpan(oldest, 0, length)],
                    rewards={"correct": right, "format": rng.random()},
                    verdict=right,
                    finish_reason="length" if length == config.rollout.response_length else "stop",
                    role=role,
                )
            )
        times = {"queued": 0.0, "first_token": 0.5, "done": 1.0, "scored": 1.5}
        frames.append(
            codec.encode_group(codec.Group(group_id, 1, oldest, "actor", [prompt], rows, times))
        )
    return frames


def train_step(
    learner: Learner, rows: RowMath, frames: Sequence[bytes], step: int
) -> dict[str, float]:
    """One learner step as the loop makes it; its metrics."""
    metas = [codec.decode_meta(frame) for frame in frames]
    batch = codec.Batch(step, tuple(metas))
    by_id = {meta.group_id: frame for meta, frame in zip(metas, frames, strict=True)}
    learner._fetch = lambda _, group_ids: codec.pack_frames(
        [by_id[group_id] for group_id in group_ids]
    )
    [plan], kl_coef = rows.plans(batch), rows.kl_coef
    values, metrics = rows.values(batch, learner.begin(plan))
    learner.assign(values, kl_coef)
    for index in range(len(plan.updates)):
        learner.update(index)
    return metrics | MetricSums.from_wire(learner.end()).means()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_two_steps(name: str, model: str, tmp_path: Path) -> None:
    config = recipe(name, model, tmp_path)
    set_rank(0, 1, free_port())
    learner = Learner(
        config,
        model_dir=model,
        fetch=lambda *_: codec.pack_frames([]),
        device="cpu",
        total_updates=2 * config.updates_per_step,
    )
    try:
        before = {key: tensor.clone() for key, tensor in learner.named_weights()}
        rows = RowMath(config, WEIGHTS)
        for step in (1, 2):
            metrics = train_step(learner, rows, record(config, model, step), step)
            assert all(np.isfinite(value) for value in metrics.values()), metrics
            assert metrics["train/grad_norm"] > 0
            assert (metrics["rollout/zero_std_groups"] == 1) == (config.rollout.group_size == 1)
            assert metrics["train/lag_max"] == min(step - 1, config.replay.max_staleness)
        assert learner.updates == 2 * config.updates_per_step
        moved = {
            key: float((tensor - before[key]).abs().max())
            for key, tensor in learner.named_weights()
        }
        assert max(moved.values()) > 1e-5
        expect(config, metrics, learner)
    finally:
        learner.close()


def expect(config: Config, metrics: dict[str, float], learner: Learner) -> None:
    """The parts that the recipe names have left their traces."""
    algorithm = config.algorithm
    assert ("train/kl" in metrics) == algorithm.use_kl_loss
    assert ("rollout/reward_kl" in metrics) == algorithm.add_token_level_kl
    assert ("rollout/baseline_reward" in metrics) == (algorithm.adv_estimator == "remax")
    assert ("train/importance_weight" in metrics) == (algorithm.importance.level != "none")
    assert ("time/learner_anchor" in metrics) == (algorithm.anchor == "recomputed")
    if algorithm.advantage_clip is not None:
        assert metrics["rollout/advantage_abs_max"] <= algorithm.advantage_clip
    if config.model.reference_refresh_steps:
        ours, theirs = learner.engine.module.parameters(), learner._reference.parameters()
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)), (
            "refreshed after step 2"
        )
