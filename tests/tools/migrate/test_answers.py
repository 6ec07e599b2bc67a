"""Keys of other systems that mean more than one setting of ours: what a user is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from async_grpo.config.docs import settings
from async_grpo.config.load import ConfigError, load_config
from async_grpo.tools.migrate.answers import ANSWERS, PEERS

BASE = "run: {total_steps: 2}\nmodel: {warm_start: {}}\n"
MORE = {
    "gspo": [
        "algorithm.clip_ratio_low=3e-4",
        "algorithm.clip_ratio_high=4e-4",
        "algorithm.loss_agg_mode=seq-mean-token-mean",
    ],
    "{name: m2po, budget: 0.04}": ["algorithm.clip_ratio_low=0.3", "algorithm.clip_ratio_high=0.5"],
    "{mean: group, std: batch}": ["algorithm.adv_estimator=raw"],
    "token": ["algorithm.anchor=recomputed"],
    "anchor": ["algorithm.anchor=recomputed", "algorithm.opsm_delta=0.1"],
    "mask": ["algorithm.anchor=recomputed", "algorithm.importance.level=token"],
}
"""What a value wants beside it."""
TOLD = [
    ("ROLL", "algorithm.importance_sampling", "seq", "policy_loss: gspo"),
    ("TRL", "algorithm.importance_sampling_level", "sequence", "policy_loss: gspo"),
    ("TRL", "loss_type", "luspo", "loss_agg_mode: seq-mean-token-sum"),
    ("TRL", "loss_type", "dapo", "`loss_type` is `algorithm.loss_agg_mode`"),
    ("TRL", "algorithm.importance_sampling_level", "token", "policy_loss: ppo_clip` has their"),
    ("ROLL", "algorithm.importance_sampling", "token", "nothing to set for tokens"),
    ("AReaL", "actor.adv_norm", "{mean_level: batch}", "algorithm.whiten_advantages: true"),
    ("AReaL", "actor.adv_norm.std_level", "batch", "algorithm.whiten_advantages: true"),
    ("AReaL", "actor.reward_norm", "{mean_level: group}", "of rewards they are"),
    ("ROLL", "algorithm.train_infer_correction", "{a: 1}", "algorithm.importance.level: token"),
    ("ROLL", "algorithm.norm_mean_type", "group", "algorithm.reward_norm: {mean: group"),
    ("ROLL", "algorithm.norm_std_type", "batch", "std: batch}` is both"),
    ("TRL", "task.multi_objective_aggregation", "normalize_then_sum", "task.rewards_norm: group"),
    ("OpenRLHF", "reward.reward_clip_range", "10", "algorithm.advantage_clip"),
    ("OpenRLHF", "vllm.vllm_is_truncated_threshold", "2", "algorithm.importance.level: token"),
    ("OpenRLHF", "train.train_batch_size", "128", "learner.ppo_mini_batch_size"),
    ("TRL", "algorithm.epsilon_high", "0.3", "`epsilon_high` is `algorithm.clip_ratio_high`"),
    ("verl", "data.train_batch_size", "128", "rollout.rollout_batch_size"),
    ("TRL", "algorithm.epsilon_high", "5.0", "algorithm.clip_ratio_low: 1.0"),
    ("TRL", "vllm_importance_sampling_clip_min", "0.1", "algorithm.importance.lower"),
    ("AReaL", "actor.m2_threshold", "0.04", "another algorithm"),
    ("AReaL", "actor.behav_imp_weight_cap", "5", "algorithm.importance.mode: mask"),
    ("AReaL", "actor.reward_norm.std_level", "batch", "algorithm.adv_std_level: batch_centered"),
    ("verl", "algorithm.rollout_rs_threshold", "0.5_2.0", "1/hi to 1/lo"),
    ("verl", "algorithm.rollout_rs", "seq_max_k3", "{score: k3, reduce: max, upper: ...}"),
    ("slime", "rs_veto_threshold", "1e-4", "{score: w, reduce: min, lower: ...}"),
    ("slime", "use_opsm", "true", "opsm_against: anchor"),
    ("SkyRL", "algorithm.outlier_token_is_threshold_high", "100", "reduce: max, upper: ...}"),
    ("SkyRL", "algorithm.geo_mask_high", "1.01", "geometric mean"),
    ("ROLL", "algorithm.train_infer_correction", "{a: 1}", "rules of `algorithm.rejection`"),
    ("verl", "reward_model.path", "x", "a task scores the responses here"),
    ("TRL", "report_to", "wandb", "runs are tracked by MLflow"),
    ("SkyRL", "algorithm.token_tis_ratio_clip_high", "2", "algorithm.importance.upper"),
    ("SkyRL", "algorithm.tis_ratio_type", "token", "algorithm.importance.level"),
    ("NeMo-RL", "loss.truncated_importance_sampling_ratio", "2", "algorithm.importance.level"),
    ("verl", "critic.optim.lr", "1e-5", "no critic"),
    ("AReaL", "learner.steps_per_iteration", "4", "learner.ppo_epochs"),
    ("verl", "trainer.nnodes", "2", "cluster.rollout_actors.max"),
]


@pytest.mark.parametrize(("peer", "key", "value", "says"), TOLD)
def test_a_key_is_answered_with_what_to_do(
    peer: str, key: str, value: str, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(BASE)
    with pytest.raises(ConfigError) as caught:
        load_config(file, [f"{key}={value}"])
    assert says in str(caught.value) and "Did you mean" not in str(caught.value)


def test_every_answer_names_settings_that_there_are_with_values_that_they_take(
    tmp_path: Path,
) -> None:
    known = settings()
    file = tmp_path / "mine.yaml"
    file.write_text(BASE)
    for one in ANSWERS:
        for named in re.findall(r"`([a-z_]+\.[a-z_.]+)(?:: ([^`]+))?`", one.says):
            key, value = named
            assert key in known, f"{one.keys}: {key}"
            if value:
                load_config(file, [*MORE.get(value, []), f"{key}={value}"])


def test_no_key_has_two_answers() -> None:
    plain = {key for one in ANSWERS if one.when is None for key in one.keys.split()}
    assert not plain & set(PEERS)
