"""OpenRLHF's options: `--rollout_batch_size 128`, and the dotted ones (`--rollout.batch_size`).

Runs in: a terminal. Hides OpenRLHF's names, which of its sizes count responses, and what it does
where a command says nothing. Invariant: as of `verl`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from async_grpo.tools.migrate import rule
from async_grpo.tools.migrate.rule import Outcome, Settings, boolean, groups_of, number, pair, whole
from async_grpo.tools.migrate.source import Source

_NO_CAP = 1e9
"""Above the ratio that the clamped logarithm can give."""
_NO_CORRECTION = "the correction is off"


def _group_size(source: Source) -> float:
    """Count the responses of a prompt; `eval.n_samples_per_prompt` is another matter."""
    names = ("n_samples_per_prompt", "rollout.n_samples_per_prompt")
    return next((source.number(name) for name in names if name in source.given), 1)


def _lengths(source: Source) -> tuple[int, int]:
    """Longest prompt and response: each by its own option, or by the dotted one for both."""
    names = ("prompt_max_len", "generate_max_len")
    if source.has(*names) or not any("." in key for key in source.given):
        prompt, response = (int(source.number(name, 1024)) for name in names)
        return prompt, response
    total = int(source.number("data.max_len", 2048))
    response = int(source.number("rollout.max_new_tokens", total // 2))
    return max(1, total - response), response


def _row(value: Any, source: Source) -> Outcome:
    prompt, response = _lengths(source)
    if source.has("rollout.max_new_tokens"):
        return {"rollout.prompt_length": prompt}, "of prompt and response together there"
    found = {"rollout.prompt_length": prompt, "rollout.response_length": response}
    return found, "of prompt and response together there, halved here"


def _mini_batch(value: Any, source: Source) -> Outcome:
    size = _group_size(source)
    told = rule.spoken("train_batch_size", value)
    groups = {"learner.ppo_mini_batch_size": groups_of(whole(value), size)}
    return groups, f"{value} responses over {size:g} per prompt; {told}"


def _asynchronous(source: Source) -> bool:
    return source.on("async_train", "train.async_enable", "train.async_train") or (
        "async" in source.program
    )


def _switched(value: Any, source: Source) -> Outcome:
    queued = max(int(source.number("async_queue_size", 1)), 1)
    bound = {"replay.max_staleness": queued if boolean(value) else 0}
    return bound, "as many batches as its queue holds"


_ESTIMATORS = {
    "reinforce": "reinforce_plus_plus", "reinforce_baseline": "reinforce_plus_plus_baseline",
    "rloo": "rloo", "group_norm": "grpo", "gae": rule.NO_CRITIC,
    "dr_grpo": {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False},
}  # fmt: skip
_in_loss = rule.on("use_kl_loss", "kl.use_loss")


def _no_kl(source: Source) -> bool:
    return not source.number("init_kl_coef", source.number("kl.init_coef", 0.01))


def _nodes(source: Source) -> float:
    return source.number("actor_num_nodes", source.number("actor.num_nodes", 1))


def _kl(weight: float, source: Source) -> Settings:
    if _in_loss(source):
        return {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": weight}
    return {"algorithm.add_token_level_kl": True, "algorithm.kl_ctrl.kl_coef": weight}


def _kl_weight(value: Any, source: Source) -> Outcome:
    if number(value) == 0:
        return {"algorithm.add_token_level_kl": False}, "no KL"
    return _kl(number(value), source), "" if _in_loss(source) else rule.SUMMED


def _kl_estimator(value: Any, source: Source) -> Outcome:
    if not _in_loss(source):
        return rule.same("", "algorithm.kl_ctrl.kl_type").convert(value, source)
    if str(value) in ("k1", "kl"):
        return {"algorithm.kl_loss_type": "kl+"}, "k1 has no expected gradient as a loss"
    return rule.same("", "algorithm.kl_loss_type").convert(value, source)


def _clip_pair(value: Any, source: Source) -> Outcome:
    low, high = pair(value)
    return {"algorithm.clip_ratio_low": low, "algorithm.clip_ratio_high": high}


def _reward_range(value: Any, source: Source) -> Outcome:
    low, high = pair(value)
    if low != -high or high <= 0:
        return "`algorithm.advantage_clip` is one number, for both sides"
    note = "behind the group's baseline; before whitening there, last of all here"
    return {"algorithm.advantage_clip": high}, note


_corrects = rule.on("enable_vllm_is_correction", "is_correction_enable")


def _correction(value: Any, source: Source) -> Outcome:
    threshold = source.find("vllm_is_truncated_threshold", source.find("is_correction_threshold"))
    low, high = pair(threshold) if isinstance(threshold, list) else (0.5, number(threshold or 5.0))
    name = str(source.find("vllm_is_correction_type", source.find("is_correction_type", "tis")))
    mode = {"tis": "truncate", "icepop": "mask", "seq-mask-tis": ""}.get(name)
    if mode is None:
        return "allowed are tis, icepop and seq-mask-tis"
    if not mode:
        kept = {"score": "w", "reduce": "mean", "lower": low, "upper": high}
        found = rule.importance(level="token", upper=_NO_CAP) | {"algorithm.rejection": [kept]}
        return found, "responses by the geometric mean; weights of tokens are not clamped there"
    found = rule.importance(level="token", mode=mode, lower=low, upper=high)
    return found, f"{name}: weights between engine and learner"


def _filter_range(value: Any, source: Source) -> Outcome:
    low, high = pair(value)
    if (low, high) == (0, 1):
        return "strictly inside 0 and 1: for 0/1 rewards, groups whose rewards differ"
    return {
        "replay.filter_groups.accuracy_low": low, "replay.filter_groups.accuracy_high": high,
    }, "of the share of right answers here, of the mean reward there"  # fmt: skip


_RULES = (
    *rule.left(f"""
critic_* critic.* value_clip *critic_num_* lambd gae.* -- there is no critic here: advantages come
    from groups
reward_num_* ref_num_* ref_reward_offload -- {rule.PROCESSES}
    """),
    rule.same("pretrain actor.model_name_or_path"),
    rule.data("prompt_data data.prompt_dataset", "task.train", "prompt_split data.prompt_split"),
    rule.by("data.max_len", _row),
    # ---- evaluation, whose options have the names of those of rollouts
    rule.data("eval_dataset eval.dataset", "task.eval", "eval_split eval.split", "train"),
    rule.same("eval_steps eval.steps"),
    rule.same("eval_n_samples_per_prompt eval.n_samples_per_prompt"),
    rule.same("eval_temperature eval.temperature"),
    rule.none("prompt_split data.prompt_split eval_split eval.split", rule.A_PART),
    rule.none("eval.*", rule.DATA_FILES),
    rule.by("train_batch_size train.batch_size", _mini_batch),
    rule.rows("micro_train_batch_size train.micro_batch_size",
              lambda source: sum(_lengths(source))).unless(
        rule.on("use_dynamic_batch", "train.dynamic_batch_enable"),
        "with dynamic batches OpenRLHF counts tokens"),
    *rule.alike("""
seed wandb_run_name=run.name logger.wandb.run_name save_path ckpt.output_dir num_episodes
param_dtype rollout_batch_size rollout.batch_size n_samples_per_prompt prompt_max_len
generate_max_len rollout.max_new_tokens temperature=rollout.temperature top_p top_k
dynamic_filtering algo.dynamic_filtering_enable=replay.filter_groups.enable gamma kl_horizon
kl.horizon overlong_penalty_factor entropy_loss_coef actor.entropy_coef zero_stage max_epochs
train_max_tokens_per_gpu train.max_tokens_per_gpu actor_learning_rate actor.adam.lr=learner.lr
adam_betas actor.adam.betas l2=learner.weight_decay actor.adam.weight_decay lr_scheduler max_norm
ring_attn_size=learner.sequence_parallel
save_steps max_ckpt_num ckpt.max_num=checkpoint.keep wandb_project logger.wandb.project
vllm_num_engines vllm.num_engines vllm_tensor_parallel_size vllm.tensor_parallel_size
vllm_gpu_memory_utilization vllm.gpu_memory_utilization enforce_eager
    """),
    # ---- algorithm
    rule.words("advantage_estimator algo.advantage.estimator", "algorithm.adv_estimator",
               _ESTIMATORS),
    rule.by("init_kl_coef kl.init_coef", _kl_weight),
    rule.same("use_kl_loss kl.use_loss").unless(_no_kl, "without a weight"),
    rule.by("kl_estimator kl.estimator", _kl_estimator).unless(_no_kl, "no KL"),
    rule.by("kl_target kl.target", lambda value, source: {
        "algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.target_kl": number(value)})
    .unless(_in_loss, "the weight of the KL in the loss is fixed here"),
    rule.by("eps_clip_low_high", _clip_pair),
    rule.clip("eps_clip").unless(rule.given("eps_clip_low_high"), "eps_clip_low_high counts"),
    rule.dual_clip("dual_clip"),
    rule.words("policy_loss_type", "algorithm.policy_loss", {"ppo": "ppo_clip", "gspo": "gspo"}),
    rule.by("reward_clip_range reward.clip_range", _reward_range),
    rule.by("overlong_buffer_len", lambda value, source: {
        "algorithm.overlong_buffer.enable": True, "algorithm.overlong_buffer.len": whole(value)}),
    rule.by("dynamic_filtering_reward_range dynamic_filtering_range", _filter_range).when(
        rule.on("dynamic_filtering", "algo.dynamic_filtering_enable"), "dynamic filtering is off"),
    rule.by("enable_vllm_is_correction is_correction_enable", _correction).when(
        _corrects, _NO_CORRECTION),
    rule.none("vllm_is_* is_correction_*", "counted in `algorithm.importance`").when(
        _corrects, _NO_CORRECTION),
    rule.by("async_train train.async_enable", _switched),
    rule.same("async_queue_size", "replay.max_staleness",
              "batches in the queue there, a strict bound per token here").when(
        _asynchronous, "of --async_train, which is off"),
    # ---- optimizer
    rule.share_of_steps("lr_warmup_ratio", lambda source: 0),
    rule.if_true("adam_offload ds.adam_offload", {
        "learner.deepspeed": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}}),
    rule.if_true("bf16", {"model.dtype": "bfloat16"}, "off there; `model.dtype` is auto here"),
    rule.if_true("gradient_checkpointing *gradient_checkpointing_enable",
                 {"learner.gradient_checkpointing": True}),
    *rule.adapters("ds.lora.rank", "ds.lora.alpha", "ds.lora.target_modules"),
    *rule.adapters("lora_rank", "lora_alpha", "target_modules"),
    rule.by("actor_num_gpus_per_node actor.num_gpus_per_node", lambda value, source: ({
        "learner.ranks": int(whole(value) * _nodes(source))}, "of all nodes")),
    rule.to("colocate_all_models colocate_all", "cluster.layout",
            lambda value: "colocated" if boolean(value) else "split"),
    rule.if_true("load_checkpoint ckpt.load_enable", {"checkpoint.resume": "auto"}),
    *rule.left(f"""
reward_pretrain remote_rm_url agent_func_path reward.remote_url reward.model_name_or_path -- rewards
    come from the task's `score` (docs/how-to/rewards.md)
input_key label_key output_key apply_chat_template input_template prompt_data_probs max_samples
    train_split data.* -- {rule.DATA_FILES}
use_dynamic_batch *dynamic_batch_enable -- micro-batches are always counted in tokens
micro_rollout_batch_size rollout.micro_batch_size rollout_max_tokens_per_gpu -- one limit for all
    passes: `learner.tokens_per_micro_batch`
vllm_generate_batch_size -- engines generate all the time here
max_len -- `rollout.prompt_length` + `rollout.response_length`
normalize_reward reward.normalize_enable -- of a reward model's values; see `algorithm.reward_norm`
stop_properly_penalty_coef -- `algorithm.mask_truncated`, or a shaping of your own
    (docs/how-to/extend.md)
partial_rollout partial_rollout_enable -- responses always go on under new weights here
actor.adam.* actor.muon.* actor.optim actor.min_lr_ratio -- AdamW is the optimizer here, and
    schedules fall to 0
packing_samples *packing_samples -- rows are always packed here
flash_attn attn_implementation load_in_4bit lora_dropout zpg overlap_comm deepcompile ring_*
    aux_loss_coef gradient_checkpointing_use_reentrant grad_accum_dtype deepspeed_enable_sleep
    ds_tensor_parallel_size use_liger_kernel enable_ema ema_beta freezing_actor_steps ds.*
    -- how the learner computes; see `learner.deepspeed`
actor_num_nodes actor.num_nodes -- counted in `learner.ranks`
colocate_actor_ref -- the reference lives in the learner
vllm_sync_backend vllm.sync_backend -- NCCL between GPUs, shared memory on one, by
    `weight_sync.backend: auto`
vllm_* vllm.* enable_prefix_caching -- an argument of the engine: `cluster.engine.vllm`
ckpt_path save_hf_ckpt disable_ds_ckpt save_value_network max_ckpt_mem use_ds_universal_ckpt ckpt.*
    -- checkpoints are in `run.dir`, the model beside them
logging_steps -- every learner step is logged
use_wandb use_tensorboard wandb_* logger.* -- trackers are `tracking.mlflow` and `tracking.also`
local_rank use_ms perf full_determinism -- {rule.PROCESSES}
    """),
)  # fmt: skip


def _implied(source: Source) -> Iterator[tuple[Settings, str]]:
    own, size = "OpenRLHF's default", _group_size(source)
    prompt, response = _lengths(source)
    yield {
        "run.epochs": 1, "rollout.rollout_batch_size": 1024, "rollout.group_size": int(size),
        "rollout.prompt_length": prompt, "rollout.response_length": response,
        "learner.zero_stage": 2,
    }, own  # fmt: skip
    falls = "it falls to a tenth there, to 0 here"
    yield {"learner.schedule": "cosine"}, f"{own}: {falls}"
    if not source.has("advantage_estimator", "advantage.estimator"):
        yield {"algorithm.adv_estimator": "grpo"}, f"{own} is gae, which needs a critic"
    yield {"algorithm.advantage_clip": 10.0}, f"{own}: reward_clip_range"
    yield {"learner.ppo_mini_batch_size": groups_of(128, size)}, f"{own}: 128 responses"
    if not source.has("init_kl_coef", "kl.init_coef"):
        yield _kl(0.01, source), own
    if _in_loss(source):
        yield {"algorithm.kl_loss_type": "kl+"}, f"{own}: k1, which has no gradient as a loss"
    anchor = {"algorithm.anchor": "recomputed"}
    yield anchor, "OpenRLHF's old log-probs are always the learner's"
    queued = _asynchronous(source)
    why = "a queue of one batch" if queued else "synchronous there; 1 and more overlaps"
    yield {"replay.max_staleness": int(queued)}, why


OPENRLHF = rule.Peer("OpenRLHF", "openrlhf", ("openrlhf",), _RULES, _implied, signs=(
    "n_samples_per_prompt pretrain advantage_estimator micro_train_batch_size "
    "actor_num_gpus_per_node vllm_num_engines init_kl_coef generate_max_len prompt_data"
))  # fmt: skip
