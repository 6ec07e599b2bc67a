"""What a user is told about a key of another system: our name for it, or what to do.

Runs in: any process. Hides which values matter. Invariants: every setting that is named here is
one of the schema, with a value that it takes (a test holds it); no name here is accepted as a key:
two spellings of one setting would let a file contradict itself. The names are those of ROLL, verl,
TRL, OpenRLHF, AReaL, NeMo-RL, SkyRL, slime, prime-rl and PipelineRL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

_NAMES = """
run.name: run_name exp_name experiment_name
run.dir: output_dir default_local_dir save_path ckpt_path logging_dir checkpoint_dir
run.total_steps: max_steps total_training_steps num_steps max_num_steps num_rollout
    num_training_steps
run.epochs: total_epochs num_train_epochs num_epochs max_num_epochs num_episodes total_train_epochs
model.path: pretrain model_name_or_path model_name model_path pretrained_model_name_or_path
    hf_checkpoint actor_model_path
model.dtype: torch_dtype param_dtype bf16 fp16 precision mixed_precision compute_dtype data_type
model.reference: ref_model ref_model_path reference_pretrain ref_load reference_model ref_path
model.reference_refresh_steps: ref_model_sync_steps sync_ref_model ref_update_interval
model.lm_head_fp32: cast_lm_head_to_fp32 enable_fp32_lm_head fp32_lm_head
task.train: train_files train_file prompt_data train_dataset train_data dataset dataset_name
task.eval: val_files val_file eval_dataset eval_data eval_prompt_data val_data validation_dataset
task.rewards: reward_weights reward_funcs
task.verifier.timeout_s: reward_timeout verifier_timeout
rollout.rollout_batch_size: train_batch_size gen_batch_size batch_size num_prompts_per_step
    prompts_per_step prompts_per_batch generation_batch_size
rollout.group_size: num_return_sequences_in_group num_generations n n_samples n_samples_per_prompt
    num_generations_per_prompt rollouts_per_example rollouts_per_prompt samples_per_prompt attempts
    num_samples_per_prompt
rollout.prompt_length: max_prompt_length prompt_max_len max_prompt_len max_input_length
    rollout_max_prompt_len
rollout.response_length: max_response_length max_completion_length generate_max_len max_new_tokens
    max_tokens max_response_len rollout_max_response_len completion_length max_generate_length
    max_output_tokens
rollout.temperature: rollout_temperature sampling_temperature
rollout.top_p: rollout_top_p
rollout.top_k: rollout_top_k
rollout.group_timeout_s: request_timeout generation_timeout rollout_timeout
replay.max_staleness: async_generation_ratio max_head_offpolicyness staleness_threshold
    max_off_policy_steps max_trajectory_age_steps max_staleness_steps max_lag max_async_level
    async_level max_policy_lag
replay.filter_groups.enable: dynamic_sampling dynamic_filtering use_dynamic_sampling
    enable_dynamic_sampling filter_zero_std
replay.filter_groups.metric: metric_to_filter filter_metric
replay.filter_groups.max_num_gen_batches: dynamic_sampling_max_gen_batches max_gen_batches
    max_sample_batches
replay.filter_groups.accuracy_low: difficulty_low_threshold
replay.filter_groups.accuracy_high: difficulty_high_threshold
algorithm.adv_estimator: advantage_estimator advantage_type adv_type
algorithm.norm_adv_by_std_in_grpo: scale_rewards grpo_std_normalization grpo_norm_by_std
    normalize_by_std
algorithm.policy_loss: policy_loss_fn policy_loss_type loss_mode loss_fn pg_variant
algorithm.clip_ratio: epsilon eps_clip eps_clip_low_high pg_clip cliprange clip_range clip_eps
    ratio_clip
algorithm.clip_ratio_low: epsilon_low eps_clip_low pg_clip_low ratio_clip_min clip_eps_low
    cliprange_low
algorithm.clip_ratio_high: epsilon_high eps_clip_high eps_clip_higher pg_clip_high ratio_clip_max
    clip_eps_high cliprange_high
algorithm.dual_clip_loss: dual_clip use_dual_clip use_dual_clip_loss
algorithm.clip_ratio_c: eps_clip_c c_clip ratio_clip_c dual_clip_c delta
algorithm.loss_agg_mode: loss_type loss_reduction token_level_loss loss_aggregation agg_mode
algorithm.use_kl_loss: use_kl enable_kl_loss
algorithm.kl_loss_coef: beta kl_loss_coeff reference_policy_kl_penalty
algorithm.kl_loss_type: kl_estimator kl_estimator_type reference_policy_kl_type
algorithm.entropy_coef: entropy_coeff entropy_loss_coef ent_coef entropy_bonus
algorithm.kl_loss_unbiased: use_unbiased_kl use_bias_correction_kl
algorithm.behavior_penalty: kl_tau
algorithm.add_token_level_kl: use_kl_in_reward
algorithm.kl_ctrl.type: kl_controller kl_controller_type use_kl_estimator_controller
algorithm.kl_ctrl.kl_type: kl_penalty
algorithm.kl_ctrl.kl_coef: init_kl_coef kl_ctl
algorithm.kl_ctrl.target_kl: kl_target target_kl_value
algorithm.kl_ctrl.horizon: kl_horizon
algorithm.gamma: discount discount_factor
algorithm.whiten_advantages: adv_norm use_adv_norm normalize_advantages advantage_normalization
algorithm.advantage_clip: adv_clip advantage_clip_range reward_clip_range
algorithm.reward_clip: clip_reward
algorithm.reward_norm: norm_reward normalize_reward reward_normalization group_reward_norm
algorithm.policy_loss.sapo.tau_pos: sapo_temperature_pos tau_positive
algorithm.policy_loss.sapo.tau_neg: sapo_temperature_neg tau_negative
algorithm.policy_loss.clip_cov.ratio: clip_cov_ratio
algorithm.policy_loss.clip_cov.lower: clip_cov_lb
algorithm.policy_loss.clip_cov.upper: clip_cov_ub
algorithm.policy_loss.kl_cov.ratio: kl_cov_ratio
algorithm.policy_loss.kl_cov.coef: ppo_kl_coef
algorithm.policy_loss.m2po.budget: M2_budget m2_budget
algorithm.anchor: use_decoupled_loss bypass_mode recompute_logprob prox_logp_method
algorithm.importance.level: rollout_is enable_vllm_is_correction use_tis
    use_importance_sampling_correction vllm_importance_sampling_correction
algorithm.importance.mode: vllm_importance_sampling_mode rollout_is_mode
algorithm.importance.lower: rollout_is_threshold_lower tis_clip_low
algorithm.importance.upper: rollout_is_threshold vllm_importance_sampling_cap
    tis_clip
algorithm.importance.normalize: rollout_is_batch_normalize tis_batch_normalize batch_normalize
algorithm.top_entropy_share: top_entropy_quantile
algorithm.rejection: rejection_sampling use_rs rs_level rs_lower_bound rs_upper_bound
algorithm.opsm_delta: off_policy_mask_threshold
algorithm.overlong_buffer.enable: overlong_reward_penalty overlong_penalty
algorithm.overlong_buffer.len: overlong_buffer_len overlong_tokens overlong_buffer_length
algorithm.overlong_buffer.penalty_factor: overlong_penalty_factor overlong_buffer_penalty_factor
algorithm.mask_truncated: mask_truncated_completions max_len_mask overlong_filtering overlong_filter
learner.ranks: n_gpus_per_node actor_num_gpus_per_node num_gpus num_learners world_size
learner.sequence_parallel: ulysses_sequence_parallel_size sequence_parallel_size ulysses_size
    ring_attn_size context_parallel_size cp_size
learner.routing_replay: router_replay moe_router_replay
learner.zero_stage: deepspeed_stage stage
learner.ppo_epochs: num_iterations num_ppo_epochs update_epochs_per_batch max_epochs update_epochs
learner.ppo_mini_batch_size: mini_batch_size policy_mini_batch_size minibatch_size
    steps_per_generation
learner.tokens_per_micro_batch: ppo_max_token_len_per_gpu max_tokens_per_gpu max_tokens_per_mb
    max_token_len_per_gpu train_max_tokens_per_gpu micro_batch_size ppo_micro_batch_size
    ppo_micro_batch_size_per_gpu micro_train_batch_size per_device_train_batch_size
learner.lr: learning_rate actor_learning_rate actor_lr policy_lr
learner.betas: adam_betas optimizer_betas
learner.warmup_steps: lr_warmup_steps num_warmup_steps
learner.schedule: lr_scheduler lr_scheduler_type lr_schedule lr_decay_style warmup_style
learner.grad_clip: max_grad_norm clip_grad gradient_clipping max_norm grad_norm_clip
learner.gradient_checkpointing: enable_gradient_checkpointing activation_checkpointing
weight_sync.backend: vllm_sync_backend weight_sync_backend weight_update_mode
weight_sync.every_steps: trigger_parameter_sync_step weight_sync_steps update_weights_interval
    weight_sync_interval
evaluation.every_steps: test_freq eval_steps eval_interval eval_freq val_period val_check_interval
evaluation.before: val_before_train val_at_start eval_before_train
evaluation.n: sampled eval_n n_eval_samples val_n eval_num_samples n_samples_per_eval_prompt
    eval_n_samples_per_prompt
evaluation.temperature: eval_temperature val_temperature
evaluation.max_samples: max_val_samples max_eval_samples num_eval_samples
checkpoint.every_steps: save_steps save_freq save_interval save_period ckpt_interval
checkpoint.keep: save_total_limit max_ckpt_num max_actor_ckpt_to_keep keep_top_k max_ckpts_to_keep
checkpoint.resume: resume_mode resume_from_checkpoint resume_from_path load_checkpoint resume_from
tracking.uri: tracking_uri mlflow_tracking_uri
tracking.experiment: project_name project wandb_project mlflow_experiment
cluster.layout: colocate colocate_all colocate_all_models hybrid_engine vllm_mode
cluster.rollout_actors.max: num_engines vllm_num_engines num_inference_engines num_workers
    rollout_num_engines
cluster.engine.tensor_parallel_size: tensor_model_parallel_size vllm_tensor_parallel_size
    inference_engine_tensor_parallel_size tp_size
cluster.engine.max_num_seqs: max_concurrent_rollouts max_running_requests max_num_batched_seqs
cluster.engine.gpu_memory_utilization: vllm_gpu_memory_utilization mem_fraction_static
"""
"""Our dotted name: the names of others; a line that is indented goes on with the one before."""

LOSSES = {name: "ppo_clip" for name in ("vanilla", "regular", "ppo", "grpo", "dapo")} | {
    "geo_mean": "gmpo", "dppo_tv": "dppo", "dppo_kl": "dppo",
}  # fmt: skip
"""What others call a policy loss: its name here."""
PEERS: dict[str, str] = {}
for _entry in re.split(r"\n(?=\S)", _NAMES.strip()):
    _ours, *_peers = _entry.split()
    PEERS |= dict.fromkeys(_peers, _ours.rstrip(":"))
"""Another system's key (its last part) -> our dotted name."""


@dataclass(frozen=True)
class Answer:
    """An answer. keys: patterns, as `matches` takes them; when: for which values it is."""

    peers: str
    keys: str
    says: str
    when: Callable[[Any], bool] | None = None


_LEVEL = "set `algorithm.anchor: recomputed` and `algorithm.importance.level: token`"
_SETS = f"{_LEVEL}, and choose `algorithm.importance.mode` and `algorithm.importance.upper`"

ANSWERS = (
    Answer("TRL", "loss_type",
           "choose `algorithm.policy_loss: gspo`, with clip ratios of its scale, and "
           "`algorithm.loss_agg_mode: seq-mean-token-sum`", lambda value: value == "luspo"),
    Answer("ROLL, TRL, AReaL", "importance_sampling importance_sampling_level",
           "choose `algorithm.policy_loss: gspo`, with clip ratios of its scale: its ratio is "
           "that of a whole response", lambda value: value in ("seq", "sequence")),
    Answer("ROLL, TRL, AReaL", "importance_sampling importance_sampling_level",
           "it is the level of the ratio in the loss, and there is nothing to set for tokens: "
           "`algorithm.policy_loss: ppo_clip` has their ratio"),
    Answer("ROLL", "train_infer_correction*",
           f"{_SETS}: weights between engine and learner; its filters are rules of "
           "`algorithm.rejection`: `score: w` for the ratio, `difference` for that of "
           "probabilities"),
    Answer("ROLL", "norm_mean_type norm_std_type",
           "`algorithm.reward_norm: {mean: group, std: batch}` is both here (null is none), for "
           "an estimator that does not divide by the group's deviation itself, such as "
           "`algorithm.adv_estimator: raw`; ROLL's reward_clip, after it, is "
           "`algorithm.reward_clip_after`"),
    Answer("TRL", "multi_objective_aggregation",
           "`task.rewards_norm: group` normalises each component before they are added up, and "
           "`algorithm.whiten_advantages: true` whitens what comes of it",
           lambda value: value == "normalize_then_sum"),
    Answer("OpenRLHF", "vllm_is_*", f"{_SETS}: weights between engine and learner"),
    Answer("OpenRLHF", "train.train_batch_size ^train_batch_size",
           "in OpenRLHF it is the minibatch: `learner.ppo_mini_batch_size`, in groups (divide "
           "by samples per prompt); in verl it is the batch: `rollout.rollout_batch_size`, in "
           "groups"),
    Answer("TRL", "epsilon_high",
           "for CISPO it is a cap of the ratio itself: set `algorithm.clip_ratio_high` to one "
           "less, and `algorithm.clip_ratio_low: 1.0`",
           lambda value: isinstance(value, int | float) and value >= 1),
    Answer("TRL", "vllm_importance_sampling_clip_min vllm_importance_sampling_min",
           "`algorithm.importance.lower` is that bound here"),
    Answer("AReaL", "m2_threshold",
           "it is another algorithm than the paper's, whose is here: `algorithm.policy_loss: "
           "{name: m2po, budget: 0.04}`; choose that, or `algorithm.policy_loss: ppo_clip`"),
    Answer("AReaL", "behav_imp_weight_cap",
           f"{_LEVEL}, `algorithm.importance.mode: mask`, and the cap as "
           "`algorithm.importance.upper`: tokens above it are left out"),
    Answer("AReaL", "adv_norm.*",
           "of advantages: `algorithm.whiten_advantages: true` takes mean and deviation of the "
           "batch, over all tokens of the step; other levels are not here"),
    Answer("AReaL", "mean_level std_level",
           "of rewards they are `algorithm.reward_norm: {mean: group, std: batch}`, with the "
           "deviation about the batch's mean; AReaL's is about what was subtracted: "
           "`algorithm.adv_std_level: batch_centered` for group and batch, batch_raw without a "
           "mean"),
    Answer("verl", "rollout_rs rollout_rs_threshold*",
           "each of its options is a rule of `algorithm.rejection`: `seq_max_k3` is `{score: "
           "k3, reduce: max, upper: ...}`, `token_k1` `{score: k1, reduce: token, ...}`; for "
           "k1, `lo_hi` is `lower: log(lo), upper: log(hi)`, which keeps 1/hi to 1/lo of the "
           "ratio of learner to engine"),
    Answer("slime, verl, SkyRL",
           "rs_veto_threshold rollout_token_veto_threshold outlier_token_is_threshold_low",
           "a rule of `algorithm.rejection`, `{score: w, reduce: min, lower: ...}`, leaves out "
           "responses with such a token"),
    Answer("slime", "use_opsm opsm_delta",
           "set `algorithm.opsm_delta`, and `algorithm.opsm_against: anchor` for the log-probs "
           "of the learner, which slime takes unless `use_rollout_logprobs` is set"),
    Answer("SkyRL", "outlier_token_is_threshold_high",
           "a rule of `algorithm.rejection`, `{score: w, reduce: max, upper: ...}`, leaves out "
           "responses with such a token"),
    Answer("SkyRL", "sequence_mask_metric geo_mask_* product_mask_* token_mask_is_threshold_*",
           "a rule of `algorithm.rejection`: `{score: w, reduce: mean, ...}` is the geometric "
           "mean, with `sum` the product, with `token` each token"),
    Answer("SkyRL", "token_tis_ratio_clip_high tis_imp_ratio_cap",
           f"{_LEVEL}, and the cap as `algorithm.importance.upper`"),
    Answer("SkyRL", "tis_ratio_type", "`algorithm.importance.level` is that here"),
    Answer("NeMo-RL", "truncated_importance_sampling*", f"{_SETS}: truncate, or mask for IcePop"),
    Answer("all", "critic.* critic", "there is no critic here: advantages come from groups"),
    Answer("verl, OpenRLHF", "reward_model.* reward_model reward_pretrain remote_rm_url",
           "a task scores the responses here, in its own code: `task.name: my_module:MyTask` "
           "may ask a model or a service (docs/how-to/rewards.md)"),
    Answer("TRL, verl", "report_to logger trainer.logger use_wandb wandb wandb.*",
           "runs are tracked by MLflow, at `tracking.uri` (null: a database in `run.dir`)"),
    Answer("AReaL, PipelineRL", "steps_per_iteration",
           "it is `learner.ppo_epochs` times the minibatches of `learner.ppo_mini_batch_size` "
           "here"),
    Answer("verl", "trainer.nnodes nnodes num_nodes",
           "the cluster decides: all nodes of the Ray cluster are used, `learner.ranks` and "
           "`cluster.rollout_actors.max` say how many processes"),
)  # fmt: skip


def answer(path: Sequence[str], value: Any) -> str:
    """Say what to do about an unknown key, "" where nothing special is known."""
    for one in ANSWERS:
        if (one.when is None or one.when(value)) and matches(one.keys, ".".join(path)):
            return f"`{path[-1]}`: {one.says}."
    return ""


def matches(patterns: str, key: str) -> bool:
    """Whether a dotted key ends like one of the patterns, or is like one behind `^`."""
    return any(
        fnmatchcase(key, one.removeprefix("^")) or fnmatchcase(key, f"*.{one}")
        for one in patterns.split()
    )
