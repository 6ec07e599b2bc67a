"""How other GRPO systems spell our settings, so that a pasted configuration gets our name as
answer.

Runs in: any process. Hides nothing. Invariant: every value is a setting of the schema
(a test holds it), and no name here is accepted as a key: two spellings of one setting would let a
file contradict itself. The names are those of ROLL, verl, TRL, OpenRLHF, AReaL, NeMo-RL, SkyRL,
slime, prime-rl and PipelineRL. Keys that mean more than one setting are in `peer_answers`.
"""

from __future__ import annotations

import re

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
