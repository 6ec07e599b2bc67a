"""TRL's keys: those of GRPOConfig with the model's and the script's, flat, as TrlParser reads them.

Runs in: a terminal. Hides TRL's names, its sizes in rows per device, and what it does where a file
says nothing. Invariant: as of `verl`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from async_grpo.tools.migrate import rule
from async_grpo.tools.migrate.rule import Outcome, Settings, boolean, groups_of, number, whole
from async_grpo.tools.migrate.source import Source

_ASYNC = ("max_staleness", "max_inflight_tasks", "queue_maxsize", "weight_sync_steps")
"""Keys of the asynchronous trainer alone."""


def _processes(source: Source) -> float:
    """Count the processes of accelerate, or torchrun, that train."""
    of_nodes = source.number("nproc_per_node", 1) * source.number("nnodes", 1)
    return source.number("num_processes", of_nodes)


def _sizes(source: Source) -> tuple[int, int]:
    """Count the groups of a batch, and of an optimizer update, from rows per device."""
    size = source.number("num_generations", 8)
    device = source.number("per_device_train_batch_size", 8) * _processes(source)
    accumulated = source.number("gradient_accumulation_steps", 1)
    generated = device * source.number("steps_per_generation", accumulated)
    batch = groups_of(source.number("generation_batch_size", generated), size)
    mini = groups_of(device * accumulated, size)
    return max(batch, mini), mini


def _updates(source: Source) -> int:
    """Optimizer updates of one learner step."""
    batch, mini = _sizes(source)
    return max(1, batch // mini) * max(1, int(source.number("num_iterations", 1)))


def _groups(source: Source) -> Settings:
    batch, mini = _sizes(source)
    return {"rollout.rollout_batch_size": batch, "learner.ppo_mini_batch_size": mini}


def _per_prompt(source: Source) -> str:
    return f"sequences / {source.number('num_generations', 8):g} responses per prompt"


def _rows(value: Any, source: Source) -> Outcome:
    row = source.number("max_prompt_length", 512) + source.number("max_completion_length", 256)
    return {**_groups(source), "learner.tokens_per_micro_batch": int(whole(value) * row)}, (
        f"sequences of each of {_processes(source):g} processes there (times their number: "
        "accelerate knows it); here groups of all, and tokens"
    )


def _steps(keys: str, ours: str) -> rule.KeyRule:
    """Take a number of optimizer steps in learner steps."""

    def convert(value: Any, source: Source) -> Outcome:
        updates = _updates(source)
        if 0 < number(value) < 1:
            return "a share of all steps; here a number of learner steps"
        note = f"optimizer steps there, learner steps of {updates} updates here"
        found = {ours: max(0, math.ceil(number(value) / updates))}
        return (found, note) if updates > 1 else found

    return rule.by(keys, convert)


def _endless(source: Source) -> bool:
    return not source.number("max_steps") > 0


def _periodic(what: str, ours: str, strategies: str) -> tuple[rule.KeyRule, ...]:
    """Take `save_steps` and the like, and the strategy that may switch them off."""
    never, counts = ("no", "false"), "- `steps` is what there is here; its number counts"
    strategy = {**dict.fromkeys(never, 0), **dict.fromkeys(("steps", "epoch", "true"), counts)}
    off = f"{what}_strategy"
    return rule.words(strategies, ours, strategy), _steps(f"^{what}_steps", ours).unless(
        lambda source: str(source.find(off, "")).lower() in never, f"{off} is no"
    )


_LOSSES = {
    "grpo": ("ppo_clip", "seq-mean-token-mean", ""),
    "bnpo": ("ppo_clip", "token-mean", "of each micro-batch there, global here"),
    "dapo": ("ppo_clip", "token-mean", ""),
    "dr_grpo": ("ppo_clip", "seq-mean-token-sum-norm", ""),
    "cispo": ("cispo", "token-mean", ""),
    "sapo": ("sapo", "seq-mean-token-mean", ""),
    "luspo": ("gspo", "seq-mean-token-sum", rule.spoken("loss_type", "luspo")),
}
"""Loss of TRL -> ours, its aggregation, and what is said."""


def _loss(value: Any, source: Source) -> Outcome:
    if str(value) not in _LOSSES:
        return f"there is no loss `{value}` here; ppo_clip is used instead"
    loss, mode, note = _LOSSES[str(value)]
    found: dict[str, Any] = {"algorithm.loss_agg_mode": mode}
    if loss != "ppo_clip" or source.find("importance_sampling_level") != "sequence":
        found["algorithm.policy_loss"] = loss
    return {**found, **(_interval(source) if loss == "gspo" else {})}, note


def _interval(source: Source) -> Settings:
    return rule.interval(source, "epsilon", "epsilon_high")


def _cispo(source: Source) -> bool:
    return bool(source.find("loss_type") == "cispo")


def _clip(value: Any, source: Source) -> Outcome:
    if _cispo(source):
        return {"algorithm.clip_ratio_low": 1.0}, "cispo has no lower bound in TRL"
    return rule.clip("", "epsilon_high").convert(value, source)


def _clip_high(value: Any, source: Source) -> Outcome:
    if not _cispo(source):
        return {"algorithm.clip_ratio_high": number(value)}
    note = "a cap of the ratio itself there, of its distance to 1 here"
    high = round(number(value) - 1, 9)
    found = {"algorithm.clip_ratio_high": high, "algorithm.clip_ratio_low": 1.0}
    return found, rule.spoken("epsilon_high", value) or note


def _corrected(source: Source) -> bool:
    off = str(source.find("vllm_importance_sampling_correction", True)).lower() == "false"
    return source.on("use_vllm") and not source.has(*_ASYNC) and not off


_MODES = [f"{level}_{mode}" for level in ("token", "sequence") for mode in ("truncate", "mask")]
_ALLOWED = f"allowed as vllm_importance_sampling_mode are {', '.join(_MODES)}"


def _importance(source: Source) -> Settings:
    """Say what corrects vLLM's log-probs; nothing for a mode that TRL does not have."""
    name = str(source.find("vllm_importance_sampling_mode", "sequence_mask"))
    level, _, mode = name.partition("_")
    cap = source.number("vllm_importance_sampling_cap", 3.0)
    upper = source.number("vllm_importance_sampling_clip_max", cap)
    found: dict[str, Any] = {"level": level, "mode": mode, "upper": upper}
    if source.has("vllm_importance_sampling_clip_min"):
        found["lower"] = source.number("vllm_importance_sampling_clip_min")
    return rule.importance(**found) if name in _MODES else {}


def _refreshed(value: Any, source: Source) -> Outcome:
    if not boolean(value):
        return {"model.reference_refresh_steps": 0}
    steps = math.ceil(source.number("ref_model_sync_steps", 512) / _updates(source))
    note = "the reference takes the weights over as a whole here, mixed there"
    return {"model.reference_refresh_steps": steps}, note


def _data_set(value: Any, source: Source) -> Outcome:
    found, reason = rule.data("", "task.train").outcome(value, source)
    if not found:
        return reason
    name, _, usual = str(found["task.train"]).partition(":")
    part, split = source.find("dataset_config", usual), source.find("dataset_train_split")
    if part or split:
        name = f"{name}:{part or 'default'}" + (f":{split}" if split else "")
    return {"task.train": name}


def _kl(value: Any, source: Source) -> Outcome:
    if number(value) == 0:
        return {"algorithm.use_kl_loss": False}
    found = {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": number(value)}
    return found, "of the KL to the reference, k3"


_SUMMED = {
    "normalize_then_sum": (
        rule.COMPONENTS, rule.spoken("multi_objective_aggregation", "normalize_then_sum")),
    "sum_then_normalize": "- components are weighted and added up, then compared",
}  # fmt: skip
_BY_STD: dict[str, Any] = {
    "none": False, "false": False, "group": True, "true": True,
    "batch": ({"algorithm.adv_std_level": "batch"}, "the deviation of the learner step"),
}  # fmt: skip

_RULES = (
    *rule.alike("""
^seed ^run_name ^output_dir ^model_name_or_path ^torch_dtype ^dtype ^cast_lm_head_to_fp32
^trust_remote_code ^num_generations ^max_prompt_length ^max_completion_length
^temperature=rollout.temperature ^top_p ^top_k ^min_p ^mask_truncated_completions
^top_entropy_quantile ^off_policy_mask_threshold ^use_bias_correction_kl ^num_iterations
^learning_rate ^weight_decay ^warmup_steps
^lr_scheduler_type ^max_grad_norm ^gradient_checkpointing ^weight_sync_steps
^eval_on_start=evaluation.before ^save_total_limit ^resume_from_checkpoint
^report_to=tracking.mlflow ^vllm_tensor_parallel_size ^vllm_gpu_memory_utilization
^sapo_temperature_pos ^sapo_temperature_neg
    """),
    _steps("^max_steps", "run.total_steps").unless(
        _endless, "-1 leaves it to num_train_epochs"),
    rule.to("^num_train_epochs", "run.epochs", lambda value: max(1, math.ceil(number(value))),
            "whole passes here").when(_endless, "max_steps counts"),
    rule.if_true("^bf16", {"model.dtype": "bfloat16"}, "off there; `model.dtype` is auto here"),
    *rule.adapters("^lora_r", "^lora_alpha", "^lora_target_modules", "^use_peft"),
    rule.by("^dataset_name", _data_set),
    rule.by("^per_device_train_batch_size", _rows),
    rule.by("^gradient_accumulation_steps ^steps_per_generation ^generation_batch_size",
            lambda value, source: (_groups(source), _per_prompt(source))),
    # ---- algorithm
    rule.by("^beta", _kl),
    rule.by("^epsilon", _clip),
    rule.by("^epsilon_high", _clip_high),
    rule.dual_clip("^delta", "a cap of the ratio there, of the loss here: the same"),
    rule.by("^loss_type", _loss),
    rule.ratio_level("^importance_sampling_level", "sequence", _interval),
    rule.by("^scale_rewards", rule.words("", "algorithm.norm_adv_by_std_in_grpo", _BY_STD).convert),
    rule.words("^multi_objective_aggregation", "", _SUMMED),
    rule.by("^sync_ref_model", _refreshed),
    rule.by("^vllm_importance_sampling_*", lambda value, source: _importance(source) or _ALLOWED)
    .when(_corrected, "no correction: without `use_vllm`, or off"),
    rule.same("^max_staleness", note="per token here, per sample there"),
    rule.betas("^adam_beta1", "^adam_beta2"),
    rule.share_of_steps("^warmup_ratio", lambda source: max(0, source.number("max_steps")))
        .unless(lambda source: source.number("warmup_steps") > 0, "warmup_steps counts"),
    rule.words("^vllm_mode", "cluster.layout", {"colocate": "colocated", "server": "split"}),
    *_periodic("save", "checkpoint.every_steps", "^save_strategy"),
    *_periodic("eval", "evaluation.every_steps", "^eval_strategy ^evaluation_strategy"),
    *rule.left(f"""
^overwrite_output_dir -- a run in a directory that has one continues it
^data_seed -- the order of problems is that of `seed`
^config -- the file that it names is not read: TRL's defaults are taken
^fp16 ^tf32 -- learner and engines compute in bfloat16 or float32
^attn_implementation -- attention of packed rows is the learner's own
^model_revision ^model_init_kwargs* ^use_peft ^lora_dropout ^lora_task_type ^lora_modules_to_save
    -- how the model is loaded; adapters are `model.lora`
^load_in_8bit ^load_in_4bit ^use_rslora ^use_dora ^use_bnb* -- weights are not quantised while
    training here
^dataset_config ^dataset_train_split -- a part of `task.train`
^dataset_test_split ^dataset_streaming ^shuffle_dataset ^remove_unused_columns ^dataloader_*
    -- {rule.DATA_FILES}
^reward_funcs ^reward_model_name_or_path -- write the `score` of a task (docs/how-to/rewards.md)
^reward_weights -- `task.rewards`, a weight by the name of each component
^num_processes ^nproc_per_node ^nnodes -- `learner.ranks`, and what groups are counted over
^per_device_eval_batch_size ^num_generations_eval -- engines take what fits
^repetition_penalty ^generation_kwargs* -- not while training here: the learner could not
    repeat it
^ref_model_sync_steps -- of sync_ref_model, as `model.reference_refresh_steps`
^ref_model_mixup_alpha -- the reference takes the weights over as a whole
^max_inflight_tasks ^queue_maxsize -- `replay.outstanding`, by itself
^lr_scheduler_kwargs* ^optim ^optim_args ^adam_epsilon -- AdamW is the optimizer here
^gradient_checkpointing_kwargs* ^use_liger_kernel ^use_liger_loss ^torch_compile*
    ^ds3_gather_for_generation ^deepspeed ^fsdp* ^accelerator_config* ^ddp_* -- how the learner is
    laid out; here `learner.zero_stage` and `learner.deepspeed`
^use_vllm -- the engine is always vLLM
^vllm_* ^use_transformers_paged ^cache_implementation -- {rule.PROCESSES}
^logging_* ^log_completions ^num_completions_to_print ^log_level ^disable_tqdm ^log_unique_prompts
    ^wandb_* -- every learner step is logged
^push_to_hub ^hub_* ^do_train ^do_eval ^save_only_model -- `async-grpo export`
    """),
)  # fmt: skip


def _implied(source: Source) -> Iterator[tuple[Settings, str]]:
    own, streaming = "TRL's default", source.has(*_ASYNC)
    yield {**_groups(source), "rollout.response_length": 256, "learner.betas": [0.9, 0.999],
           "learner.schedule": "linear"}, own  # fmt: skip
    if _cispo(source):
        yield {"algorithm.clip_ratio_low": 1.0}, "cispo has no lower bound in TRL"
        yield {"algorithm.clip_ratio_high": 4.0}, "the ratio's cap of 5 that is usual with cispo"
    elif source.find("loss_type") != "sapo":
        low = source.number("epsilon", 0.2)
        yield {"algorithm.clip_ratio_low": low, "algorithm.clip_ratio_high": low}, own
    anchor = "behavior" if streaming else "recomputed"
    yield {"algorithm.anchor": anchor}, "the log-probs that TRL's ratios are taken against"
    if _corrected(source):
        yield _importance(source), "TRL corrects vLLM's log-probs by default"
    bound = own if streaming else "TRL generates, then trains; 1 and more overlaps"
    yield {"replay.max_staleness": 4 if streaming else 0}, bound
    if _endless(source):
        yield {"run.epochs": 3}, own
    if source.on("use_peft"):
        yield {"model.lora.rank": 16}, own


TRL = rule.Peer("TRL", "trl", ("trl",), _RULES, _implied, signs=(
    "^num_generations ^max_completion_length ^per_device_train_batch_size ^model_name_or_path "
    "^gradient_accumulation_steps ^loss_type ^use_vllm ^vllm_mode ^num_iterations ^scale_rewards "
    "^report_to ^learning_rate ^generation_batch_size ^epsilon ^beta"))  # fmt: skip
