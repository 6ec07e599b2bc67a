"""What keys of other systems mean here, one by one, and what these systems do by themselves."""

from __future__ import annotations

from typing import Any

import pytest

from async_grpo.config.docs import settings as schema
from async_grpo.tools.migrate.draft import walk
from async_grpo.tools.migrate.page import page
from async_grpo.tools.migrate.peers import PEER_TABLES
from async_grpo.tools.migrate.settle import settle
from async_grpo.tools.migrate.source import Source
from tests.support.chosen import chosen_value
from tests.support.migrated import unnamed

BARE = {
    "verl": {"data.train_batch_size": 64, "data.max_response_length": 64},
    "roll": {"rollout_batch_size": 64, "num_return_sequences_in_group": 8},
    "areal": {"gconfig.n_samples": 8, "train_dataset.batch_size": 64},
    "trl": {"num_generations": 8, "per_device_train_batch_size": 64},
    "openrlhf": {"n_samples_per_prompt": 8, "rollout_batch_size": 64},
    "prime-rl": {"rollouts_per_example": 8, "orchestrator.batch_size": 512},
}


@pytest.mark.parametrize(
    ("option", "given", "expected"),
    [
        ("verl", {"model.lora_rank": 0, "model.lora_alpha": 16}, {"model.lora": None}),
        ("verl", {"actor.clip_ratio": 0.3}, {"algorithm.clip_low": 0.2}),
        ("verl", {"policy_loss.loss_mode": "sapo"}, {"algorithm.dual_clip_loss": False}),
        ("verl", {"policy_loss.loss_mode": "dppo_kl"},
         {"algorithm.policy_loss.dppo.ratio_cap": 3.0}),
        ("verl", {"actor.use_dynamic_bsz": False, "actor.ppo_max_token_len_per_gpu": 9999},
         {"learner.tokens_per_micro_batch": "auto"}),
        ("verl", {"actor.use_dynamic_bsz": True, "actor.ppo_max_token_len_per_gpu": 300,
                  "data.max_prompt_length": 512},
         {"learner.tokens_per_micro_batch": 576}),
        ("verl", {"sampler.max_off_policy_threshold": 8, "sampler.max_off_policy_strategy": "drop"},
         {"replay.max_staleness": 7, "replay.on_stale": "expire"}),
        ("verl", {"rollout_is": "sequence", "rollout_is_threshold": 3, "bypass_mode": True},
         {"algorithm.importance.level": "none", "algorithm.anchor": "behavior"}),
        ("verl", {"algorithm.adv_estimator": "reinforce_plus_plus", "filter_groups.enable": True},
         {"replay.filter_groups.enable": False}),
        ("verl", {"actor.use_kl_loss": True, "algorithm.use_kl_in_reward": True},
         {"algorithm.add_token_level_kl": False, "algorithm.use_kl_loss": True}),
        ("verl", {"actor.optim.lr": "2e-6", "rollout.n": "4", "rollout.temperature": "0.7",
                  "actor.kl_loss_coef": "0.01", "actor.use_kl_loss": True,
                  "actor.optim.betas": ["0.8", 0.9], "data.max_response_length": 128.0},
         {"learner.lr": 2e-6, "rollout.group_size": 4, "rollout.temperature": 0.7,
          "algorithm.kl_loss_coef": 0.01, "learner.betas": [0.8, 0.9],
          "rollout.response_length": 128}),
        ("openrlhf", {"n_samples_per_prompt": "4"},
         {"rollout.group_size": 4, "learner.ppo_mini_batch_size": 32}),
        ("verl", {"rollout_rs": "geometric", "rollout_rs_threshold": 1.5,
                  "rollout_token_veto_threshold": 1e-4},
         {"algorithm.rejection": [
             {"score": "w", "reduce": "mean", "lower": 1 / 1.5, "upper": 1.5},
             {"score": "w", "reduce": "min", "lower": 1e-4, "upper": None}]}),
        ("verl", {"rollout_rs": None, "rollout_token_veto_threshold": 1e-4},
         {"algorithm.rejection": [
             {"score": "w", "reduce": "min", "lower": 1e-4, "upper": None}]}),
        ("trl", {"use_vllm": True, "vllm_importance_sampling_mode": "token_trunc"},
         {"algorithm.importance.level": "none"}),
        ("trl", {"use_vllm": True}, {"algorithm.importance.level": "sequence",
                                     "algorithm.importance.mode": "mask"}),
        ("roll", {"pg_variant": "cispo"}, {"algorithm.clip_ratio_high": 0.1}),
        ("roll", {"pg_variant": "kimi15", "adv_estimator": "grpo"},
         {"algorithm.policy_loss.opmd.tau": 0.1}),
        ("roll", {"importance_sampling": "seq", "loss_agg_mode": "token-mean"},
         {"algorithm.policy_loss": "gspo", "algorithm.loss_agg_mode": "seq-mean-token-mean"}),
        ("roll", {"sequence_length": 4096},
         {"rollout.prompt_length": 1024, "rollout.response_length": 3072}),
        ("roll", {"sequence_length": 4096, "prompt_length": 512, "response_length": 99},
         {"rollout.prompt_length": 512, "rollout.response_length": 3584}),
        ("roll", {"actor_infer.generating_args.max_new_tokens": 512},
         {"rollout.temperature": 0.95, "rollout.top_p": 0.7, "rollout.top_k": 50}),
        ("roll", {"use_kl_loss": True}, {"algorithm.use_kl_loss": False}),
        ("roll", {"add_token_level_kl": True}, {"algorithm.kl_ctrl.kl_coef": 0.2}),
        ("roll", {"actor_train.training_args.gradient_accumulation_steps": 16},
         {"learner.ppo_mini_batch_size": 16}),
        ("roll", {"actor_train.training_args.adam_beta2": 0.95}, {"learner.betas": [0.9, 0.95]}),
        ("roll", {"pg_clip": 0.3, "pg_clip_low": 0.1}, {"algorithm.clip_low": 0.3}),
        ("verl", {"rollout_rs": "token_k1,seq_max_k3", "rollout_rs_threshold": "0.5_2.0,0.1"},
         {"algorithm.rejection": [
             {"score": "k1", "reduce": "token", "lower": -0.693147181, "upper": 0.693147181},
             {"score": "k3", "reduce": "max", "lower": None, "upper": 0.1}]}),
        ("verl", {"rollout_rs": "geometric", "rollout_rs_threshold": 1.001},
         {"algorithm.rejection": [{"score": "w", "reduce": "mean", "lower": 1 / 1.001,
                                   "upper": 1.001}]}),
        ("verl", {"rollout_is": "token", "rollout_is_batch_normalize": True},
         {"algorithm.importance.normalize": True, "algorithm.importance.upper": 2.0}),
        ("verl", {"algorithm.adv_estimator": "gdpo", "rollout.n": 8},
         {"task.rewards_norm": "group", "algorithm.whiten_advantages": True}),
        ("roll", {"adv_estimator": "reinforce"}, {"algorithm.adv_estimator": "reinforce"}),
        ("roll", {"adv_estimator": "grpo", "reward_clip": 1.5},
         {"algorithm.adv_estimator": "reinforce", "algorithm.reward_norm": "group",
          "algorithm.reward_clip_after": 1.5, "algorithm.reward_clip": None}),
        ("roll", {"adv_estimator": "reinforce", "reward_norm": "batch", "reward_scale": True},
         {"algorithm.reward_norm": "batch", "algorithm.reward_scale": False}),
        ("roll", {"adv_estimator": "grpo", "add_token_level_kl": True, "init_kl_coef": 0.1},
         {"algorithm.adv_estimator": "reinforce", "algorithm.reward_norm": "group",
          "algorithm.kl_ctrl.kl_coef": 0.1}),
        ("roll", {"adv_estimator": "grpo", "reward_clip": 10},
         {"algorithm.adv_estimator": "grpo", "algorithm.reward_clip_after": None}),
        ("roll",
         {"adv_estimator": "reinforce", "norm_mean_type": "group", "norm_std_type": "batch"},
         {"algorithm.reward_norm": {"mean": "group", "std": "batch"}}),
        ("areal", {"actor.kl_ctl": 0.1}, {"algorithm.add_token_level_kl": False}),
        ("areal", {"actor.behav_imp_weight_cap": 5.0}, {"algorithm.importance.level": "none",
                                                        "algorithm.anchor": "behavior"}),
        ("areal", {}, {"algorithm.adv_estimator": "raw", "algorithm.reward_clip": 20.0}),
        ("areal", {"ref.path": "x"}, {"algorithm.add_token_level_kl": True,
                                      "algorithm.kl_ctrl.kl_coef": 0.1}),
        ("areal", {"train_dataset.batch_size": 64}, {"learner.ppo_mini_batch_size": 16}),
        ("areal", {"train_dataset.max_length": 2048}, {"rollout.prompt_length": 2048}),
        ("areal", {"actor.reward_norm.mean_level": "group", "actor.reward_norm.std_level": "batch"},
         {"algorithm.adv_std_level": "batch_centered"}),
        ("areal", {"actor.reward_norm.mean_level": "group"},
         {"algorithm.adv_estimator": "grpo", "algorithm.adv_std_level": "batch_centered",
          "algorithm.norm_adv_by_std_in_grpo": True}),
        ("areal", {"actor.reward_norm.mean_level": "batch"},
         {"algorithm.adv_estimator": "raw", "algorithm.reward_norm": "batch"}),
        ("areal", {"actor.reward_norm": {}},
         {"algorithm.adv_estimator": "raw", "algorithm.reward_norm": "batch"}),
        ("areal", {"actor.reward_norm.mean_level": "batch", "actor.reward_norm.std_level": None},
         {"algorithm.adv_estimator": "raw",
          "algorithm.reward_norm": {"mean": "batch", "std": "none"}}),
        ("areal", {"actor.reward_norm.mean_level": "group", "actor.reward_norm.std_level": None},
         {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False}),
        ("areal", {"actor.reward_norm": None, "actor.adv_norm": None},
         {"algorithm.adv_estimator": "raw", "algorithm.whiten_advantages": False}),
        ("areal", {"actor.adv_norm.mean_level": "batch"}, {"algorithm.whiten_advantages": True}),
        ("areal", {"actor.adv_norm.eps": 1e-5}, {"algorithm.whiten_advantages": True}),
        ("areal", {"actor.adv_norm.std_level": None}, {"algorithm.whiten_advantages": False}),
        ("areal", {"train_dataset.path": "a/b", "train_dataset.split": "dev",
                   "valid_dataset.path": "openai/gsm8k", "valid_dataset.split": "train"},
         {"task.train": "a/b:default:dev", "task.eval": "openai/gsm8k:main:train"}),
        ("openrlhf", {"prompt_data": "a/b", "eval_dataset": "a/b", "prompt_split": "train"},
         {"task.train": "a/b", "task.eval": "a/b:default:train"}),
        ("openrlhf", {"eval.dataset": "a/b", "eval.split": "test"}, {"task.eval": "a/b"}),
        ("areal", {"actor.use_lora": True}, {"model.lora.rank": 32}),
        ("areal", {"actor.use_lora": True, "actor.lora_rank": 8}, {"model.lora.rank": 8}),
        ("areal", {"actor.lora_rank": 8}, {"model.lora": None}),
        ("areal", {"actor.backend": "fsdp:d2t2", "rollout.backend": "sglang:d4t2"},
         {"learner.ranks": 4, "cluster.rollout_actors.max": 4,
          "cluster.engine.tensor_parallel_size": 2}),
        ("areal", {"actor.use_decoupled_loss": True, "actor.rejection_sampling.level": "sequence",
                   "actor.rejection_sampling.agg": "sum"},
         {"algorithm.importance.level": "sequence", "algorithm.importance.mode": "mask"}),
        ("areal", {"actor.use_decoupled_loss": True, "actor.rejection_sampling.level": "token"},
         {"algorithm.importance.level": "token"}),
        ("roll", {"max_ckpt_to_keep": 3}, {"checkpoint.keep": 3}),
        ("prime-rl", {"trainer.model.lora.rank": 16}, {"model.lora.rank": 16}),
        ("trl", {"lr_scheduler_type": "cosine_with_min_lr"}, {"learner.schedule": "cosine"}),
        ("trl", {"lr_scheduler_type": "polynomial"}, {"learner.schedule": "constant"}),
        ("trl", {"lr_scheduler_type": None}, {"learner.schedule": "linear"}),
        ("trl", {"loss_type": "luspo", "epsilon": 3e-4},
         {"algorithm.policy_loss": "gspo", "algorithm.loss_agg_mode": "seq-mean-token-sum",
          "algorithm.clip_high": 3e-4}),
        ("trl", {"top_entropy_quantile": 0.2, "multi_objective_aggregation": "normalize_then_sum"},
         {"algorithm.top_entropy_share": 0.2, "task.rewards_norm": "group"}),
        ("trl", {"use_peft": True}, {"model.lora.rank": 16}),
        ("trl", {"lora_r": 8, "lora_alpha": 8}, {"model.lora": None}),
        ("trl", {"loss_type": "cispo"}, {"algorithm.clip_high": 4.0, "algorithm.clip_low": 1.0}),
        ("trl", {"delta": 4.0}, {"algorithm.clip_ratio_c": 4.0, "algorithm.dual_clip_loss": True}),
        ("trl", {"importance_sampling_level": "sequence", "epsilon": 3e-4, "loss_type": "grpo"},
         {"algorithm.policy_loss": "gspo", "algorithm.clip_high": 3e-4}),
        ("trl", {"max_staleness": 3, "use_vllm": True},
         {"algorithm.anchor": "behavior", "algorithm.importance.level": "none",
          "replay.max_staleness": 3}),
        ("trl", {"num_processes": 4}, {"rollout.rollout_batch_size": 32}),
        ("trl", {"nproc_per_node": 4, "nnodes": 2}, {"rollout.rollout_batch_size": 64}),
        ("openrlhf", {"async_queue_size": 4}, {"replay.max_staleness": 0}),
        ("openrlhf", {}, {"algorithm.add_token_level_kl": True, "algorithm.kl_ctrl.kl_coef": 0.01}),
        ("openrlhf", {"is_correction_enable": True, "is_correction_type": "seq-mask-tis",
                      "is_correction_threshold": [0.5, 5.0]},
         {"algorithm.importance.level": "token", "algorithm.rejection": [
             {"score": "w", "reduce": "mean", "lower": 0.5, "upper": 5.0}]}),
        ("openrlhf", {"use_kl_loss": True}, {"algorithm.kl_loss_type": "kl+",
                                             "algorithm.kl_loss_coef": 0.01}),
        ("openrlhf", {"kl_target": 0.2}, {"algorithm.kl_ctrl.type": "adaptive",
                                          "algorithm.kl_ctrl.target_kl": 0.2}),
        ("openrlhf", {"eval.temperature": 0.6, "eval.n_samples_per_prompt": 4, "eval.steps": 3},
         {"rollout.temperature": 1.0, "rollout.group_size": 8, "evaluation.temperature": 0.6,
          "evaluation.n": 4, "evaluation.every_steps": 3}),
        ("openrlhf", {"ds.lora.rank": 8, "data.max_len": 4096},
         {"model.lora.rank": 8, "rollout.prompt_length": 2048, "rollout.response_length": 2048}),
        ("openrlhf", {"data.max_len": 4096, "rollout.max_new_tokens": 3072},
         {"rollout.prompt_length": 1024, "rollout.response_length": 3072}),
        ("openrlhf", {"train.micro_batch_size": 4}, {"learner.tokens_per_micro_batch": 8192}),
        ("openrlhf", {"lora_rank": 0, "lora_alpha": 16}, {"model.lora": None}),
        ("openrlhf", {"advantage_estimator": "dr_grpo"},
         {"algorithm.norm_adv_by_std_in_grpo": False, "algorithm.adv_estimator": "grpo"}),
        ("prime-rl", {}, {"replay.max_staleness": 8, "algorithm.policy_loss": "dppo"}),
    ],
)  # fmt: skip
def test_what_a_system_does_by_itself_is_kept(
    option: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    draft = walk(Source("their.yaml", BARE[option] | given), PEER_TABLES[option])
    config = settle(draft)
    dumped = config.model_dump()
    for key, value in expected.items():
        found = dumped["algorithm"]["rejection"] if key.endswith("rejection") else None
        assert (chosen_value(config, key) if found is None else found) == value, key
    assert unnamed(draft.source, page(draft)) == []


CLIPPED = {"algorithm.clip_ratio_low": 0.2, "algorithm.clip_ratio_high": 0.2}
BY_ITSELF: dict[str, tuple[str, dict[str, Any]]] = {
    "verl": ("actor_rollout_ref.rollout.n", CLIPPED | {
        "run.epochs": 30,
        "rollout.rollout_batch_size": 1024,
        "replay.max_staleness": 0,
        "learner.ppo_mini_batch_size": 256,
        "learner.betas": [0.9, 0.999],
        "learner.weight_decay": 0.01,
        "algorithm.dual_clip_loss": True,
        "algorithm.anchor": "recomputed",
    }),
    "roll": ("num_return_sequences_in_group", CLIPPED | {
        "run.total_steps": 500,
        "checkpoint.every_steps": 50,
        "rollout.rollout_batch_size": 128,
        "rollout.prompt_length": 1024,
        "replay.max_staleness": 0,
        "learner.ppo_mini_batch_size": 2,  # 8 rows
        "learner.tokens_per_micro_batch": 8 * 1536,
        "learner.lr": 5e-5,
        "learner.betas": [0.9, 0.999],
        "learner.schedule": "linear",
        "algorithm.loss_agg_mode": "seq-mean-token-mean",
        "algorithm.anchor": "recomputed",
    }),
    "areal": ("gconfig.n_samples", CLIPPED | {
        "run.epochs": 1,
        "rollout.rollout_batch_size": 1,
        "rollout.response_length": 16384,
        "replay.max_staleness": 0,
        "learner.ppo_mini_batch_size": 1,
        "learner.lr": 1e-3,
        "learner.betas": [0.9, 0.999],
        "learner.weight_decay": 0.01,
        "algorithm.adv_estimator": "raw",
        "algorithm.reward_clip": 20.0,
    }),
    "trl": ("num_generations", CLIPPED | {
        "run.epochs": 3,
        "rollout.rollout_batch_size": 2,  # 8 rows
        "rollout.response_length": 256,
        "replay.max_staleness": 0,
        "learner.ppo_mini_batch_size": 2,
        "learner.betas": [0.9, 0.999],
        "learner.schedule": "linear",
        "algorithm.anchor": "recomputed",
    }),
    "openrlhf": ("n_samples_per_prompt", {
        "run.epochs": 1,
        "rollout.rollout_batch_size": 1024,
        "rollout.prompt_length": 1024,
        "rollout.response_length": 1024,
        "replay.max_staleness": 0,
        "learner.ppo_mini_batch_size": 32,  # 128 rows
        "learner.schedule": "cosine",
        "learner.zero_stage": 2,
        "algorithm.advantage_clip": 10.0,
        "algorithm.add_token_level_kl": True,
        "algorithm.kl_ctrl.kl_coef": 0.01,
        "algorithm.anchor": "recomputed",
    }),
    "prime-rl": ("rollouts_per_example", {
        "run.total_steps": 500,  # which it does not say
        "replay.max_staleness": 8,
        "replay.on_stale": "expire",
        "learner.betas": [0.9, 0.999],
        "learner.weight_decay": 0.01,
        "algorithm.policy_loss": "dppo",
        "algorithm.norm_adv_by_std_in_grpo": False,
        "algorithm.behavior_penalty": 1e-3,
    }),
}  # fmt: skip
"""The key of a group's size, and what a file with that alone sets apart from our defaults."""


@pytest.mark.parametrize("option", BY_ITSELF)
def test_a_bare_file_has_the_defaults_of_its_system(option: str) -> None:
    key, expected = BY_ITSELF[option]
    draft = walk(Source("their.yaml", {key: 4}), PEER_TABLES[option])
    settle(draft)
    apart = {
        name: kept.value
        for name, kept in draft.kept.items()
        if name.split(".")[0] not in ("task", "model") and kept.value != schema()[name].default
    }
    assert apart == expected | {"run.name": "migrated", "rollout.group_size": 4}
    assert draft.left == []
