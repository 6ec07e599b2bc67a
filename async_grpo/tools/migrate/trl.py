"""TRL's keys: those of GRPOConfig with the model's and the script's, flat, as TrlParser reads them.

Runs in: a terminal. Hides TRL's names, its sizes in rows per device, and what it does where a file
says nothing. Invariant: as of `verl`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from async_grpo.tools.migrate.common import (
    DATA_FILES,
    PROCESSES,
    adapters,
    data,
    directory,
    file_name,
    kl_in_loss,
    mlflow_among,
    off_is_zero,
    precision,
    resume,
    schedule,
)
from async_grpo.tools.migrate.rules import (
    Convert,
    Meant,
    Peer,
    Untranslatable,
    boolean,
    by,
    groups_of,
    none,
    number,
    same,
    spoken,
    switch,
    to,
    whole,
    words,
)
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


def _rows(value: Any, source: Source) -> Meant:
    batch, mini = _sizes(source)
    row = source.number("max_prompt_length", 512) + source.number("max_completion_length", 256)
    return Meant(
        {
            "rollout.rollout_batch_size": batch,
            "learner.ppo_mini_batch_size": mini,
            "learner.tokens_per_micro_batch": int(whole(value) * row),
        },
        f"rows of each of {_processes(source):g} processes there (times their "
        "number: accelerate knows it); here groups of all, and tokens",
    )


def _counted(value: Any, source: Source) -> Meant:
    batch, mini = _sizes(source)
    found = {"rollout.rollout_batch_size": batch, "learner.ppo_mini_batch_size": mini}
    return Meant(found, f"rows / {source.number('num_generations', 8):g} responses per prompt")


def _period(ours: str) -> Convert:
    def convert(value: Any, source: Source) -> Meant:
        updates = _updates(source)
        if 0 < number(value) < 1:
            raise Untranslatable("a share of all steps; here a number of learner steps")
        steps = max(0, math.ceil(number(value) / updates))
        return Meant({ours: steps}, _unit(updates))

    return convert


def _unit(updates: int) -> str:
    return f"optimizer steps there, learner steps of {updates} updates here" if updates > 1 else ""


def _steps(value: Any, source: Source) -> Meant:
    if whole(value) <= 0:
        raise Untranslatable("-1 leaves it to num_train_epochs")
    updates = _updates(source)
    return Meant({"run.total_steps": math.ceil(whole(value) / updates)}, _unit(updates))


def _epochs(value: Any, source: Source) -> Meant:
    if source.number("max_steps") > 0:
        raise Untranslatable("max_steps counts")
    note = "" if number(value) == int(number(value)) else "whole passes here"
    return Meant({"run.epochs": max(1, math.ceil(number(value)))}, note)


def _saving(strategy: str) -> Convert:
    def convert(value: Any, source: Source) -> Meant:
        if str(value) in ("no", "false", "False"):
            return Meant({strategy: 0})
        raise Untranslatable("`steps` is what there is here; its number counts")

    return convert


def _saved(ours: str, switch_key: str) -> Convert:
    def convert(value: Any, source: Source) -> Meant:
        if str(source.find(switch_key, "")) in ("no", "False"):
            raise Untranslatable(f"{switch_key} is no")
        return _period(ours)(value, source)

    return convert


def _warmup_share(value: Any, source: Source) -> Meant:
    if source.number("warmup_steps") > 0:
        raise Untranslatable("warmup_steps counts")
    steps = source.number("max_steps")
    if number(value) and steps <= 0:
        raise Untranslatable("a share of steps whose number is not in the file; set it in updates")
    return Meant({"learner.warmup_steps": math.ceil(number(value) * max(0, steps))}, "in updates")


_LOSSES: dict[str, tuple[str, str, str]] = {
    "grpo": ("ppo_clip", "seq-mean-token-mean", ""),
    "bnpo": ("ppo_clip", "token-mean", "of each micro-batch there, global here"),
    "dapo": ("ppo_clip", "token-mean", ""),
    "dr_grpo": ("ppo_clip", "seq-mean-token-sum-norm", ""),
    "cispo": ("cispo", "token-mean", ""),
    "sapo": ("sapo", "seq-mean-token-mean", ""),
}


def _sequence(source: Source) -> bool:
    return bool(source.find("importance_sampling_level") == "sequence")


def _loss(value: Any, source: Source) -> Meant:
    if str(value) == "luspo":
        low = source.number("epsilon", 0.2)
        summed: dict[str, Any] = {
            "algorithm.policy_loss": "gspo",
            "algorithm.loss_agg_mode": "seq-mean-token-sum",
            "algorithm.clip_ratio_low": low,
            "algorithm.clip_ratio_high": source.number("epsilon_high", low),
        }
        return Meant(summed, spoken(["loss_type"], value))
    if str(value) not in _LOSSES:
        raise Untranslatable(f"there is no loss `{value}` here; ppo_clip is in its place")
    loss, mode, note = _LOSSES[str(value)]
    found: dict[str, Any] = {"algorithm.loss_agg_mode": mode}
    if loss != "ppo_clip" or not _sequence(source):
        found["algorithm.policy_loss"] = loss
    return Meant(found, note)


def _level(value: Any, source: Source) -> Meant:
    if str(value) == "token":
        return Meant({}, "the losses have the ratio of tokens")
    if str(value) != "sequence":
        raise Untranslatable("allowed are token and sequence")
    told = spoken(["importance_sampling_level"], value)
    low = source.number("epsilon", 0.2)
    return Meant(
        {
            "algorithm.policy_loss": "gspo",
            "algorithm.clip_ratio_low": low,
            "algorithm.clip_ratio_high": source.number("epsilon_high", low),
        },
        told,
    )


def _summed(value: Any, source: Source) -> Meant:
    if str(value) != "normalize_then_sum":
        return Meant({}, "components are weighted and added up, then compared")
    return Meant(
        {
            "algorithm.adv_estimator": "raw",
            "algorithm.whiten_advantages": True,
            "task.rewards_norm": "group",
        },
        spoken(["multi_objective_aggregation"], value),
    )


def _clip(value: Any, source: Source) -> Meant:
    if source.find("loss_type") == "cispo":
        return Meant({"algorithm.clip_ratio_low": 1.0}, "cispo has no lower bound in TRL")
    found = {"algorithm.clip_ratio_low": number(value)}
    if not source.has("epsilon_high"):
        found["algorithm.clip_ratio_high"] = number(value)
    return Meant(found)


def _clip_high(value: Any, source: Source) -> Meant:
    if source.find("loss_type") == "cispo":
        return Meant(
            {
                "algorithm.clip_ratio_high": round(number(value) - 1, 9),
                "algorithm.clip_ratio_low": 1.0,
            },
            spoken(["epsilon_high"], value)
            or "a cap of the ratio itself there, of its distance to 1 here",
        )
    return Meant({"algorithm.clip_ratio_high": number(value)})


def _delta(value: Any, source: Source) -> Meant:
    found = {"algorithm.dual_clip_loss": True, "algorithm.clip_ratio_c": number(value)}
    return Meant(found, "caps the ratio there, the loss of negative advantages here: the same")


def _scale(value: Any, source: Source) -> Meant:
    meant = str(value).lower()
    if meant in ("none", "false"):
        return Meant({"algorithm.norm_adv_by_std_in_grpo": False})
    if meant == "batch":
        return Meant({"algorithm.adv_std_level": "batch"}, "the deviation of the learner step")
    if meant in ("group", "true"):
        return Meant({"algorithm.norm_adv_by_std_in_grpo": True})
    raise Untranslatable("allowed are group, batch and none")


def _corrected(source: Source) -> bool:
    used = str(source.find("use_vllm", False)).lower() == "true" and not source.has(*_ASYNC)
    given = source.find("vllm_importance_sampling_correction", True)
    return used and str(given).lower() != "false"


_MODES = {
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "mask"),
    "sequence_truncate": ("sequence", "truncate"),
    "sequence_mask": ("sequence", "mask"),
}
_NO_CORRECTION = "no correction: without `use_vllm`, or off"


def _importance(source: Source) -> dict[str, Any]:
    """Say what corrects vLLM's log-probs; nothing for a mode that TRL does not have."""
    name = str(source.find("vllm_importance_sampling_mode", "sequence_mask"))
    if name not in _MODES:
        return {}
    level, mode = _MODES[name]
    cap = source.number("vllm_importance_sampling_cap", 3.0)
    found = {
        "algorithm.importance.level": level,
        "algorithm.importance.mode": mode,
        "algorithm.importance.upper": source.number("vllm_importance_sampling_clip_max", cap),
    }
    if source.has("vllm_importance_sampling_clip_min"):
        found["algorithm.importance.lower"] = source.number("vllm_importance_sampling_clip_min")
    return found


def _correction(value: Any, source: Source) -> Meant:
    if not _corrected(source):
        return Meant({}, _NO_CORRECTION)
    found = _importance(source)
    if not found:
        raise Untranslatable(f"allowed as vllm_importance_sampling_mode are {', '.join(_MODES)}")
    return Meant(found)


def _refreshed(value: Any, source: Source) -> Meant:
    if not boolean(value):
        return Meant({"model.reference_refresh_steps": 0})
    updates = _updates(source)
    steps = math.ceil(source.number("ref_model_sync_steps", 512) / updates)
    note = "the reference takes the weights over as a whole here, mixed there"
    return Meant({"model.reference_refresh_steps": steps}, note)


def _data_set(value: Any, source: Source) -> Meant:
    found = data("dataset_name", "task.train").convert(value, source)
    name, _, usual = str(found.values["task.train"]).partition(":")
    part, split = source.find("dataset_config", usual), source.find("dataset_train_split")
    if part or split:
        name = f"{name}:{part or 'default'}" + (f":{split}" if split else "")
    return Meant({"task.train": name})


def _mode(value: Any, source: Source) -> Meant:
    layout = {"colocate": "colocated", "server": "split"}.get(str(value))
    if layout is None:
        raise Untranslatable("allowed are colocate and server")
    return Meant({"cluster.layout": layout})


_RULES = (
    file_name("^run_name"),
    directory("^output_dir"),
    none("^overwrite_output_dir", "a run in a directory that has one continues it"),
    same("^seed", "seed"),
    none("^data_seed", "the order of problems is that of `seed`"),
    by("^max_steps", _steps),
    by("^num_train_epochs", _epochs),
    none("^config", "the file that it names is not read: TRL's defaults are taken"),
    # ---- model
    same("^model_name_or_path"),
    words("^torch_dtype ^dtype", "model.dtype", {
        "bfloat16": "bfloat16", "float32": "float32", "auto": "auto",
        "float16": "- learner and engines compute in bfloat16 or float32",
    }),
    precision("^bf16", "bfloat16"),
    none("^fp16 ^tf32", "learner and engines compute in bfloat16 or float32"),
    switch("^trust_remote_code", "model.trust_remote_code"),
    switch("^cast_lm_head_to_fp32"),
    none("^attn_implementation", "attention of packed rows is the learner's own"),
    none("^model_revision ^model_init_kwargs* ^use_peft ^lora_dropout ^lora_task_type "
         "^lora_modules_to_save", "how the model is loaded; adapters are `model.lora`"),
    *adapters("^lora_r", "^lora_alpha", "^lora_target_modules", "^use_peft"),
    none("^load_in_8bit ^load_in_4bit ^use_rslora ^use_dora ^use_bnb*", "weights are not quantised "
         "while training here"),
    # ---- data and rewards
    by("^dataset_name", _data_set),
    none("^dataset_config ^dataset_train_split", "a part of `task.train`"),
    none("^dataset_test_split ^dataset_streaming ^shuffle_dataset ^remove_unused_columns "
         "^dataloader_*", DATA_FILES),
    none("^reward_funcs ^reward_model_name_or_path", "write them as the `score` of a task "
         "(docs/tasks.md)"),
    none("^reward_weights", "`task.rewards`, a weight by the name of each component"),
    # ---- batch
    same("^num_generations"),
    by("^per_device_train_batch_size", _rows),
    by("^gradient_accumulation_steps ^steps_per_generation ^generation_batch_size", _counted),
    none("^num_processes ^nproc_per_node ^nnodes",
         "`learner.ranks`, and what groups are counted over"),
    none("^per_device_eval_batch_size ^num_generations_eval", "engines take what fits"),
    same("^max_prompt_length"),
    same("^max_completion_length"),
    same("^num_iterations"),
    same("^temperature", "rollout.temperature"),
    same("^top_p", "rollout.top_p"),
    to("^top_k", "rollout.top_k", off_is_zero),
    none("^min_p ^repetition_penalty ^generation_kwargs*", "not while training here: the learner "
         "could not repeat it"),
    # ---- algorithm
    kl_in_loss("^beta"),
    by("^epsilon", _clip),
    by("^epsilon_high", _clip_high),
    by("^delta", _delta),
    by("^loss_type", _loss),
    by("^importance_sampling_level", _level),
    by("^scale_rewards", _scale),
    switch("^mask_truncated_completions"),
    switch("^use_bias_correction_kl"),
    same("^off_policy_mask_threshold"),
    same("^top_entropy_quantile"),
    by("^multi_objective_aggregation", _summed),
    same("^sapo_temperature_pos"),
    same("^sapo_temperature_neg"),
    by("^sync_ref_model", _refreshed),
    none("^ref_model_sync_steps", "of sync_ref_model, as `model.reference_refresh_steps`"),
    none("^ref_model_mixup_alpha", "the reference takes the weights over as a whole"),
    by("^vllm_importance_sampling_*", _correction),
    same("^max_staleness", "replay.max_staleness", "per token here, per sample there"),
    same("^weight_sync_steps", "weight_sync.every_steps"),
    none("^max_inflight_tasks ^queue_maxsize", "`replay.outstanding`, by itself"),
    # ---- optimizer
    same("^learning_rate", "learner.lr"),
    same("^weight_decay", "learner.weight_decay"),
    by("^adam_beta1 ^adam_beta2", lambda value, source: Meant({"learner.betas": [
        source.number("adam_beta1", 0.9), source.number("adam_beta2", 0.999)]})),
    same("^warmup_steps", "learner.warmup_steps"),
    by("^warmup_ratio", _warmup_share),
    schedule("^lr_scheduler_type"),
    none("^lr_scheduler_kwargs* ^optim ^optim_args ^adam_epsilon", "AdamW is the optimizer here"),
    same("^max_grad_norm"),
    switch("^gradient_checkpointing", "learner.gradient_checkpointing"),
    none("^gradient_checkpointing_kwargs* ^use_liger_kernel ^use_liger_loss ^torch_compile* "
         "^ds3_gather_for_generation ^deepspeed ^fsdp* ^accelerator_config* ^ddp_*",
         "how the learner is laid out; here `learner.zero_stage` and `learner.deepspeed`"),
    # ---- engines
    none("^use_vllm", "the engine is always vLLM"),
    by("^vllm_mode", _mode),
    same("^vllm_gpu_memory_utilization"),
    same("^vllm_tensor_parallel_size"),
    none("^vllm_* ^use_transformers_paged ^cache_implementation", PROCESSES),
    # ---- operation
    by("^save_strategy", _saving("checkpoint.every_steps")),
    by("^save_steps", _saved("checkpoint.every_steps", "save_strategy")),
    same("^save_total_limit"),
    by("^eval_strategy ^evaluation_strategy", _saving("evaluation.every_steps")),
    by("^eval_steps", _saved("evaluation.every_steps", "eval_strategy")),
    switch("^eval_on_start", "evaluation.before"),
    resume("^resume_from_checkpoint"),
    mlflow_among("^report_to"),
    none("^logging_* ^log_completions ^num_completions_to_print ^log_level ^disable_tqdm "
         "^log_unique_prompts ^wandb_*", "every learner step is logged"),
    none("^push_to_hub ^hub_* ^do_train ^do_eval ^save_only_model",
         "`async-grpo export`"),
)  # fmt: skip


def _implied(source: Source) -> Iterable[tuple[str, Any, str]]:
    """Say what TRL does where a file says nothing, and we do not."""
    own = "TRL's default"
    batch, mini = _sizes(source)
    yield "rollout.rollout_batch_size", batch, own
    yield "learner.ppo_mini_batch_size", mini, own
    yield "rollout.response_length", 256, own
    low = source.number("epsilon", 0.2)
    if source.find("loss_type") == "cispo":
        yield "algorithm.clip_ratio_low", 1.0, "cispo has no lower bound in TRL"
        yield "algorithm.clip_ratio_high", 4.0, "the ratio's cap of 5 that is usual with cispo"
    elif source.find("loss_type") != "sapo":
        yield "algorithm.clip_ratio_low", low, own
        yield "algorithm.clip_ratio_high", low, own
    streaming = source.has(*_ASYNC)
    anchor = "behavior" if streaming else "recomputed"
    yield "algorithm.anchor", anchor, "the log-probs that TRL's ratios are taken against"
    if _corrected(source):
        for name, value in _importance(source).items():
            yield name, value, "TRL corrects vLLM's log-probs by default"
    bound = "TRL's default" if streaming else "TRL generates, then trains; 1 and more overlaps"
    yield "replay.max_staleness", 4 if streaming else 0, bound
    if not source.number("max_steps") > 0:
        yield "run.epochs", 3, own
    if str(source.find("use_peft", False)).lower() == "true":
        yield "model.lora.rank", 16, own
    yield "learner.betas", [0.9, 0.999], own
    yield "learner.schedule", "linear", own


TRL = Peer(
    name="TRL",
    option="trl",
    signs="^num_generations ^max_completion_length ^per_device_train_batch_size "
    "^model_name_or_path ^gradient_accumulation_steps ^loss_type ^use_vllm ^vllm_mode "
    "^num_iterations ^scale_rewards "
    "^report_to ^learning_rate ^generation_batch_size ^epsilon ^beta",
    programs=("trl",),
    rules=_RULES,
    implied=_implied,
)
