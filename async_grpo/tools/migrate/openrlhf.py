"""OpenRLHF's options: `--rollout_batch_size 128`, and the dotted ones (`--rollout.batch_size`).

Runs in: a terminal. Hides OpenRLHF's names, which of its sizes count responses, and what it does
where a command says nothing. Invariant: as of `verl`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from async_grpo.tools.migrate.common import (
    A_PART,
    DATA_FILES,
    PROCESSES,
    SUMMED,
    adapters,
    data,
    directory,
    experiment,
    file_name,
    kl_word,
    precision,
    schedule,
)
from async_grpo.tools.migrate.rules import (
    Convert,
    Meant,
    Peer,
    Untranslatable,
    boolean,
    by,
    every,
    groups_of,
    none,
    number,
    pair,
    same,
    spoken,
    switch,
    to,
    whole,
    words,
)
from async_grpo.tools.migrate.source import Source

_NO_CAP = 1e9
"""Above the ratio that the clamped logarithm can give."""
_NO_CORRECTION = "the correction is off"


def _first(source: Source, names: Iterable[str], default: float) -> float:
    return next((source.number(name) for name in names if source.has(name)), default)


def _group_size(source: Source) -> float:
    """Count the responses of a prompt; `eval.n_samples_per_prompt` is another matter."""
    names = ("n_samples_per_prompt", "rollout.n_samples_per_prompt")
    return next((source.number(name) for name in names if name in source.given), 1)


def _lengths(source: Source) -> tuple[int, int]:
    """Longest prompt and response: each by its own option, or by the dotted one for both."""
    if source.has("prompt_max_len", "generate_max_len") or not any(
        "." in key for key in source.given
    ):
        return int(source.number("prompt_max_len", 1024)), int(
            source.number("generate_max_len", 1024)
        )
    total = int(source.number("data.max_len", 2048))
    response = int(source.number("rollout.max_new_tokens", total // 2))
    return max(1, total - response), response


def _row(value: Any, source: Source) -> Meant:
    prompt, response = _lengths(source)
    found = {"rollout.prompt_length": prompt}
    if source.has("rollout.max_new_tokens"):
        return Meant(found, "of prompt and response together there")
    found["rollout.response_length"] = response
    return Meant(found, "of prompt and response together there, halved here")


def _on(source: Source, *names: str) -> bool:
    return any(str(source.find(name, False)).lower() == "true" for name in names)


def _mini_batch(value: Any, source: Source) -> Meant:
    size = _group_size(source)
    note = f"{value} responses over {size:g} per prompt; {spoken(['train_batch_size'], value)}"
    return Meant({"learner.ppo_mini_batch_size": groups_of(whole(value), size)}, note)


def _micro_batch(value: Any, source: Source) -> Meant:
    if _on(source, "use_dynamic_batch", "train.dynamic_batch_enable"):
        raise Untranslatable("with dynamic batches OpenRLHF counts tokens")
    row = sum(_lengths(source))
    note = f"rows there, tokens here: x {row:g}, the longest row"
    return Meant({"learner.tokens_per_micro_batch": int(whole(value) * row)}, note)


def _queue(value: Any, source: Source) -> Meant:
    if not _asynchronous(source):
        return Meant({}, "of --async_train, which is off")
    return Meant({"replay.max_staleness": whole(value)}, "batches in the queue there, a strict "
                 "bound per token here")  # fmt: skip


def _asynchronous(source: Source) -> bool:
    return _on(source, "async_train", "train.async_enable", "train.async_train") or (
        "async" in source.program
    )


def _switched(value: Any, source: Source) -> Meant:
    queued = max(_first(source, ("async_queue_size",), 1), 1)
    bound = int(queued) if boolean(value) else 0
    return Meant({"replay.max_staleness": bound}, "as many batches as its queue holds")


def _estimator(value: Any, source: Source) -> Meant:
    table = {
        "reinforce": "reinforce_plus_plus",
        "reinforce_baseline": "reinforce_plus_plus_baseline",
        "rloo": "rloo",
        "group_norm": "grpo",
        "dr_grpo": "grpo",
    }
    if str(value) not in table:
        why = "it needs a critic, and there is none here" if value == "gae" else "not here"
        raise Untranslatable(f"{why}: grpo is in its place")
    found: dict[str, Any] = {"algorithm.adv_estimator": table[str(value)]}
    if value == "dr_grpo":
        found["algorithm.norm_adv_by_std_in_grpo"] = False
    return Meant(found)


def _kl_weight(value: Any, source: Source) -> Meant:
    if number(value) == 0:
        return Meant({"algorithm.add_token_level_kl": False}, "no KL")
    if _on(source, "use_kl_loss", "kl.use_loss"):
        return Meant({"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": number(value)})
    return Meant(
        {"algorithm.add_token_level_kl": True, "algorithm.kl_ctrl.kl_coef": number(value)}, SUMMED
    )


def _kl_switch(value: Any, source: Source) -> Meant:
    if not _first(source, ("init_kl_coef", "kl.init_coef"), 0.01):
        return Meant({}, "without a weight")
    return Meant({"algorithm.use_kl_loss": boolean(value)})


def _kl_estimator(value: Any, source: Source) -> Meant:
    if not _first(source, ("init_kl_coef", "kl.init_coef"), 0.01):
        return Meant({}, "no KL")
    if _on(source, "use_kl_loss", "kl.use_loss"):
        found = kl_word("kl_estimator").convert(value, source)
        if found.values["algorithm.kl_loss_type"] == "kl":
            return Meant({"algorithm.kl_loss_type": "kl+"}, "k1 has no expected gradient as a loss")
        return found
    table = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
    return words("kl_estimator", "algorithm.kl_ctrl.kl_type", table).convert(value, source)


def _kl_target(value: Any, source: Source) -> Meant:
    if _on(source, "use_kl_loss", "kl.use_loss"):
        raise Untranslatable("the weight of the KL in the loss is fixed here")
    return Meant(
        {"algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.target_kl": number(value)}
    )


def _clip_pair(value: Any, source: Source) -> Meant:
    low, high = pair(value)
    return Meant({"algorithm.clip_ratio_low": low, "algorithm.clip_ratio_high": high})


def _clip(value: Any, source: Source) -> Meant:
    if source.has("eps_clip_low_high"):
        raise Untranslatable("eps_clip_low_high counts")
    width = number(value)
    return Meant({"algorithm.clip_ratio_low": width, "algorithm.clip_ratio_high": width})


def _dual_clip(value: Any, source: Source) -> Meant:
    return Meant({"algorithm.dual_clip_loss": True, "algorithm.clip_ratio_c": number(value)})


def _reward_range(value: Any, source: Source) -> Meant:
    low, high = pair(value)
    if low != -high or high <= 0:
        raise Untranslatable("`algorithm.advantage_clip` is one number, for both sides")
    note = "behind the group's baseline; before whitening there, last of all here"
    return Meant({"algorithm.advantage_clip": high}, note)


def _correction(value: Any, source: Source) -> Meant:
    if not boolean(value):
        return Meant({}, _NO_CORRECTION)
    threshold = source.find("vllm_is_truncated_threshold", source.find("is_correction_threshold"))
    low, high = pair(threshold) if isinstance(threshold, list) else (0.5, number(threshold or 5.0))
    name = str(source.find("vllm_is_correction_type", source.find("is_correction_type", "tis")))
    if name not in ("tis", "icepop", "seq-mask-tis"):
        raise Untranslatable("allowed are tis, icepop and seq-mask-tis")
    if name == "seq-mask-tis":
        found = {"algorithm.importance.level": "token", "algorithm.importance.upper": _NO_CAP}
        rule = {"score": "w", "reduce": "mean", "lower": low, "upper": high}
        note = "responses by the geometric mean; weights of tokens are not clamped there"
        return Meant({**found, "algorithm.rejection": [rule]}, note)
    found = {
        "algorithm.importance.level": "token",
        "algorithm.importance.mode": "mask" if name == "icepop" else "truncate",
        "algorithm.importance.lower": low,
        "algorithm.importance.upper": high,
    }
    return Meant(found, f"{name}: weights between engine and learner")


def _part(value: Any, source: Source) -> Meant:
    on = _on(source, "enable_vllm_is_correction", "is_correction_enable")
    return Meant({}, "counted in `algorithm.importance`" if on else _NO_CORRECTION)


def _ranks(value: Any, source: Source) -> Meant:
    nodes = _first(source, ("actor_num_nodes", "actor.num_nodes"), 1)
    return Meant({"learner.ranks": int(whole(value) * nodes)}, "of all nodes")


def _overlong(value: Any, source: Source) -> Meant:
    found = {
        "algorithm.overlong_buffer.enable": True,
        "algorithm.overlong_buffer.len": whole(value),
    }
    return Meant(found)


def _filter_range(value: Any, source: Source) -> Meant:
    low, high = pair(value)
    if not _on(source, "dynamic_filtering", "algo.dynamic_filtering_enable"):
        return Meant({}, "dynamic filtering is off")
    if (low, high) == (0, 1):
        return Meant({}, "strictly inside 0 and 1: for 0/1 rewards, groups whose rewards differ")
    return Meant({
        "replay.filter_groups.accuracy_low": low, "replay.filter_groups.accuracy_high": high,
    }, "of the share of right answers here, of the mean reward there")  # fmt: skip


def _offloaded(value: Any, source: Source) -> Meant:
    if not boolean(value):
        return Meant({}, "off")
    zero = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    return Meant({"learner.deepspeed": zero}, "")


def _layout(value: Any, source: Source) -> Meant:
    return Meant({"cluster.layout": "colocated" if boolean(value) else "split"})


def _warmup_share(value: Any, source: Source) -> Meant:
    raise Untranslatable(
        "a share of all steps: `learner.warmup_steps` counts optimizer updates, set it in these"
    )


def _only(ours: str, value: Any) -> Convert:
    def convert(given: Any, source: Source) -> Meant:
        return Meant({ours: value} if boolean(given) else {}, "off" if not boolean(given) else "")

    return convert


_RULES = (
    none("critic_* critic.* value_clip *critic_num_* lambd gae.*", "there is no critic here: "
         "advantages come from groups"),
    same("pretrain actor.model_name_or_path"),
    none("reward_pretrain remote_rm_url agent_func_path reward.remote_url "
         "reward.model_name_or_path", "rewards come from the task's `score` (docs/tasks.md)"),
    none("reward_num_* ref_num_* ref_reward_offload", PROCESSES),
    data("prompt_data data.prompt_dataset", "task.train", "prompt_split data.prompt_split"),
    by("data.max_len", _row),
    # ---- evaluation, whose options have the names of those of rollouts
    none("prompt_split data.prompt_split eval_split eval.split", A_PART),
    data("eval_dataset eval.dataset", "task.eval", "eval_split eval.split", "train"),
    every("eval_steps eval.steps", "evaluation.every_steps"),
    same("eval_n_samples_per_prompt eval.n_samples_per_prompt", "evaluation.n"),
    same("eval_temperature eval.temperature", "evaluation.temperature"),
    none("eval.*", DATA_FILES),
    none("input_key label_key output_key apply_chat_template input_template "
         "prompt_data_probs max_samples train_split data.*", DATA_FILES),
    # ---- batch
    same("rollout_batch_size rollout.batch_size", "rollout.rollout_batch_size",
         "prompts, which are groups"),
    by("train_batch_size train.batch_size", _mini_batch),
    by("micro_train_batch_size train.micro_batch_size", _micro_batch),
    same("train_max_tokens_per_gpu train.max_tokens_per_gpu"),
    none("use_dynamic_batch *dynamic_batch_enable", "micro-batches are always counted in tokens"),
    none("micro_rollout_batch_size rollout.micro_batch_size rollout_max_tokens_per_gpu",
         "one limit for all passes: `learner.tokens_per_micro_batch`"),
    none("vllm_generate_batch_size", "engines generate all the time here"),
    same("n_samples_per_prompt"),
    same("max_epochs train.max_epochs"),
    same("num_episodes train.num_episodes"),
    same("prompt_max_len"),
    same("generate_max_len rollout.max_new_tokens", "rollout.response_length"),
    none("max_len", "`rollout.prompt_length` + `rollout.response_length`"),
    same("temperature", "rollout.temperature"),
    same("top_p", "rollout.top_p"),
    to("top_k", "rollout.top_k", lambda value: max(0, whole(value))),
    # ---- algorithm
    by("advantage_estimator algo.advantage.estimator", _estimator),
    same("gamma", "algorithm.gamma"),
    by("init_kl_coef kl.init_coef", _kl_weight),
    by("use_kl_loss kl.use_loss", _kl_switch),
    by("kl_estimator kl.estimator", _kl_estimator),
    by("kl_target kl.target", _kl_target),
    same("kl_horizon kl.horizon", "algorithm.kl_ctrl.horizon"),
    by("eps_clip_low_high", _clip_pair),
    by("eps_clip", _clip),
    by("dual_clip", _dual_clip),
    words("policy_loss_type", "algorithm.policy_loss", {"ppo": "ppo_clip", "gspo": "gspo"}),
    same("entropy_loss_coef actor.entropy_coef", "algorithm.entropy_coef"),
    by("reward_clip_range reward.clip_range", _reward_range),
    none("normalize_reward reward.normalize_enable", "of a reward model's values; see "
         "`algorithm.reward_norm`"),
    by("overlong_buffer_len", _overlong),
    same("overlong_penalty_factor"),
    none("stop_properly_penalty_coef", "`algorithm.mask_truncated`, or a shaping of your own "
         "(docs/extending.md)"),
    switch("dynamic_filtering algo.dynamic_filtering_enable", "replay.filter_groups.enable"),
    by("dynamic_filtering_reward_range dynamic_filtering_range", _filter_range),
    by("enable_vllm_is_correction is_correction_enable", _correction),
    by("vllm_is_* is_correction_*", _part),
    # ---- asynchronous training
    by("async_train train.async_enable", _switched),
    by("async_queue_size", _queue),
    none("partial_rollout partial_rollout_enable", "responses always go on under new weights here"),
    # ---- optimizer
    same("actor_learning_rate actor.adam.lr"),
    same("l2 actor.adam.weight_decay", "learner.weight_decay"),
    same("adam_betas actor.adam.betas", "learner.betas"),
    none("actor.adam.* actor.muon.* actor.optim actor.min_lr_ratio", "AdamW is the optimizer here, "
         "and schedules fall to 0"),
    same("max_norm"),
    schedule("lr_scheduler"),
    by("lr_warmup_ratio", _warmup_share),
    same("zero_stage ds.zero_stage", "learner.zero_stage"),
    by("adam_offload ds.adam_offload", _offloaded),
    precision("bf16", "bfloat16"),
    words("param_dtype ds.param_dtype", "model.dtype", {
        "bf16": "bfloat16", "fp32": "float32", "bfloat16": "bfloat16", "float32": "float32",
    }),
    by("gradient_checkpointing *gradient_checkpointing_enable",
       _only("learner.gradient_checkpointing", True)),
    *adapters("ds.lora.rank", "ds.lora.alpha", "ds.lora.target_modules"),
    *adapters("lora_rank", "lora_alpha", "target_modules"),
    none("packing_samples *packing_samples", "rows are always packed here"),
    none("flash_attn attn_implementation load_in_4bit lora_dropout zpg overlap_comm deepcompile "
         "ring_* aux_loss_coef gradient_checkpointing_use_reentrant grad_accum_dtype "
         "deepspeed_enable_sleep ds_tensor_parallel_size use_liger_kernel enable_ema ema_beta "
         "freezing_actor_steps ds.*", "how the learner computes; see `learner.deepspeed`"),
    # ---- processes
    by("actor_num_gpus_per_node actor.num_gpus_per_node", _ranks),
    none("actor_num_nodes actor.num_nodes", "counted in `learner.ranks`"),
    same("vllm_num_engines vllm.num_engines"),
    same("vllm_tensor_parallel_size vllm.tensor_parallel_size"),
    same("vllm_gpu_memory_utilization vllm.gpu_memory_utilization"),
    switch("enforce_eager vllm.enforce_eager", "cluster.engine.enforce_eager"),
    by("colocate_all_models colocate_all", _layout),
    none("colocate_actor_ref", "the reference lives in the learner"),
    none("vllm_sync_backend vllm.sync_backend", "NCCL between GPUs, shared memory on one, by "
         "`weight_sync.backend: auto`"),
    none("vllm_* vllm.* enable_prefix_caching", "an argument of the engine: `cluster.engine.vllm`"),
    # ---- operation
    same("seed", "seed"),
    directory("save_path ckpt.output_dir"),
    none("ckpt_path save_hf_ckpt disable_ds_ckpt save_value_network max_ckpt_mem "
         "use_ds_universal_ckpt", "checkpoints are in `run.dir`, the model beside them"),
    every("save_steps", "checkpoint.every_steps"),
    same("max_ckpt_num ckpt.max_num", "checkpoint.keep"),
    by("load_checkpoint ckpt.load_enable", _only("checkpoint.resume", "auto")),
    none("ckpt.*", "checkpoints are in `run.dir`, the model beside them"),
    none("logging_steps", "every learner step is logged"),
    experiment("wandb_project logger.wandb.project"),
    file_name("wandb_run_name logger.wandb.run_name"),
    none("use_wandb use_tensorboard wandb_* logger.*", "the tracker is MLflow here "
         "(`tracking.mlflow`)"),
    none("local_rank use_ms perf full_determinism", PROCESSES),
)  # fmt: skip


def _implied(source: Source) -> Iterable[tuple[str, Any, str]]:
    """Say what OpenRLHF does where a command says nothing, and we do not."""
    own = "OpenRLHF's default"
    size = _group_size(source)
    prompt, response = _lengths(source)
    yield "rollout.rollout_batch_size", 1024, own
    yield "rollout.group_size", int(size), own
    yield "rollout.prompt_length", prompt, own
    yield "rollout.response_length", response, own
    yield "learner.schedule", "cosine", f"{own}: it falls to a tenth there, to 0 here"
    yield "learner.zero_stage", 2, own
    if not source.has("advantage_estimator", "advantage.estimator"):
        yield "algorithm.adv_estimator", "grpo", f"{own} is gae, which needs a critic"
    yield "algorithm.advantage_clip", 10.0, f"{own}: reward_clip_range"
    yield "learner.ppo_mini_batch_size", groups_of(128, size), f"{own}: 128 responses"
    if not source.has("init_kl_coef", "kl.init_coef"):
        loss = _on(source, "use_kl_loss", "kl.use_loss")
        name = "kl_loss_coef" if loss else "kl_ctrl.kl_coef"
        yield f"algorithm.{name}", 0.01, own
        yield "algorithm.use_kl_loss" if loss else "algorithm.add_token_level_kl", True, own
    if _on(source, "use_kl_loss", "kl.use_loss"):
        found = _kl_estimator("k1", source)
        for name, value in found.values.items():
            yield name, value, f"{own}: k1; {found.note}"
    yield "algorithm.anchor", "recomputed", "OpenRLHF's old log-probs are always the learner's"
    asynchronous = _asynchronous(source)
    why = "a queue of one batch" if asynchronous else "synchronous there; 1 and more overlaps"
    yield "replay.max_staleness", int(asynchronous), why
    yield "run.epochs", 1, own


OPENRLHF = Peer(
    name="OpenRLHF",
    option="openrlhf",
    signs="n_samples_per_prompt pretrain advantage_estimator micro_train_batch_size "
    "actor_num_gpus_per_node vllm_num_engines init_kl_coef generate_max_len prompt_data",
    programs=("openrlhf",),
    rules=_RULES,
    implied=_implied,
)
