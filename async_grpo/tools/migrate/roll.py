"""ROLL's keys: flat ones of the pipeline, and `actor_train`, `actor_infer`, `validation`.

Runs in: a terminal. Hides ROLL's names and what it does where a file says nothing. Invariant: as of
`verl`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from async_grpo.tools.migrate.common import (
    DATA_FILES,
    PROCESSES,
    adapters,
    data,
    directory,
    file_name,
    mlflow_among,
    off_is_zero,
    resume,
    schedule,
)
from async_grpo.tools.migrate.rules import (
    Meant,
    Peer,
    Untranslatable,
    answered,
    boolean,
    by,
    every,
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

_RANGE = re.compile(r"list\(range\((?:(\d{1,5}),)?(\d{1,5})\)\)")


def _devices(source: Source, who: str) -> set[int]:
    """Devices of a cluster of ROLL: `list(range(0,8))`, or a list."""
    mapping = source.find(f"{who}.device_mapping")
    if isinstance(mapping, list):
        return {device for device in mapping if isinstance(device, int)}
    found = _RANGE.fullmatch(re.sub(r"\s", "", str(mapping)))
    return set(range(int(found[1] or 0), int(found[2]))) if found else set()


def _data_parallel(source: Source) -> int:
    """Ranks with data of their own."""
    shared = 1.0
    for key in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel"):
        shared *= source.number(f"actor_train.strategy_args.strategy_config.{key}_size", 1)
    return max(1, int(len(_devices(source, "actor_train")) // max(1, shared)))


def _lengths(source: Source) -> tuple[int, int]:
    """Longest prompt, and longest response: what the prompt leaves of sequence_length."""
    prompt = source.number("prompt_length", 1024)
    response = source.number("response_length", 512)
    total = source.number("sequence_length", prompt + response)
    return int(prompt), int(total - prompt)


def _sequence(value: Any, source: Source) -> Meant:
    if whole(value) <= source.number("prompt_length", 1024):
        raise Untranslatable("it leaves no room for a response")
    note = "of prompt and response together"
    return Meant({"rollout.response_length": _lengths(source)[1]}, note)


def _response(value: Any, source: Source) -> Meant:
    if source.has("sequence_length"):
        raise Untranslatable("sequence_length counts, less prompt_length")
    return Meant({"rollout.response_length": whole(value)})


def _mini_batch(value: Any, source: Source) -> Meant:
    accumulated = source.number("actor_train.training_args.gradient_accumulation_steps", 1)
    rows = whole(value) * accumulated * _data_parallel(source)
    size = source.number("num_return_sequences_in_group", 1)
    batch = source.number("rollout_batch_size", 128)
    groups = min(groups_of(rows, size), int(max(1, batch)))
    ranks = _data_parallel(source)
    note = (
        f"{whole(value)} rows x {accumulated:g} accumulated x {ranks} ranks = {rows:g} rows, over "
        f"{size:g} responses per prompt"
    )
    found = {"learner.ppo_mini_batch_size": groups}
    tokens = whole(value) * sum(_lengths(source))
    return Meant(found | {"learner.tokens_per_micro_batch": tokens}, note)


def _accumulated(value: Any, source: Source) -> Meant:
    return Meant({}, "counted in `learner.ppo_mini_batch_size`, which is of groups and global")


def _loss(value: Any, source: Source) -> Meant:
    name = str(value)
    if name == "cispo":
        low, high = (source.number(f"cispo_epsilon_{side}", 0.1) for side in ("low", "high"))
        return Meant({
            "algorithm.policy_loss": "cispo",
            "algorithm.clip_ratio_low": low,
            "algorithm.clip_ratio_high": high,
        })  # fmt: skip
    if name == "kimi15":
        found: dict[str, Any] = {
            "algorithm.policy_loss": "opmd",
            "algorithm.policy_loss.opmd.tau": 0.1,
            "algorithm.norm_adv_by_std_in_grpo": False,
        }
        return Meant(found, "needs R - mean as advantage here")
    table = {"ppo": "ppo_clip", "vanilla": "gpg", "topr": "topr"}
    if name not in table:
        raise Untranslatable(f"there is no loss `{name}` here; ppo_clip is in its place")
    note = "by the ratio of whole responses here, of tokens there" if name == "topr" else ""
    return Meant({"algorithm.policy_loss": table[name]}, note)


def _level(value: Any, source: Source) -> Meant:
    if str(value) == "token":
        return Meant({}, "ppo_clip has the ratio of tokens")
    if str(value) != "seq":
        raise Untranslatable("allowed are token and seq")
    clip = source.number("pg_clip", 0.2)
    return Meant(
        {
            "algorithm.policy_loss": "gspo",
            "algorithm.clip_ratio_low": source.number("pg_clip_low", clip),
            "algorithm.clip_ratio_high": source.number("pg_clip_high", clip),
        },
        "one ratio per response; usual widths of its interval are 3e-4 and 4e-4",
    )


def _dual_clip(value: Any, source: Source) -> Meant:
    if not boolean(value):
        return Meant({"algorithm.dual_clip_loss": False})
    bound = round(1 + 2 * source.number("pg_clip", 0.2), 6)
    found = {"algorithm.dual_clip_loss": True, "algorithm.clip_ratio_c": bound}
    return Meant(found, "the bound is 1 + 2 x pg_clip in ROLL")


def _ranged(source: Source) -> bool:
    return str(source.find("use_pg_clip_range", False)).lower() == "true"


def _clip(value: Any, source: Source) -> Meant:
    if _ranged(source):
        raise Untranslatable("with use_pg_clip_range, pg_clip_low and pg_clip_high count")
    width = number(value)
    return Meant({"algorithm.clip_ratio_low": width, "algorithm.clip_ratio_high": width})


def _clip_side(side: str) -> Any:
    def convert(value: Any, source: Source) -> Meant:
        if not _ranged(source) and source.has("pg_clip"):
            raise Untranslatable("without use_pg_clip_range, pg_clip counts")
        return Meant({f"algorithm.clip_ratio_{side}": number(value)})

    return convert


def _clips_scores(source: Source) -> bool:
    """Whether reward_clip binds, behind the group's mean and deviation."""
    clip, size = source.number("reward_clip"), source.number("num_return_sequences_in_group", 1)
    return 0 < clip < (size - 1) / math.sqrt(max(size, 1))


def _returns(source: Source) -> bool:
    """Whether ROLL's grpo is more than a score of each response in its group."""
    return _clips_scores(source) or str(source.find("add_token_level_kl")).lower() == "true"


def _estimator(value: Any, source: Source) -> Meant:
    name = str(value)
    if name == "grpo" and _returns(source):
        found = {"algorithm.adv_estimator": "reinforce", "algorithm.reward_norm": "group"}
        return Meant(found, "normalised by group, then clipped or paid for its KL, then returns")
    if name in ("grpo", "reinforce"):
        return Meant({"algorithm.adv_estimator": name})
    reason = "it needs a critic, and there is none here" if name == "gae" else "not here"
    raise Untranslatable(f"{reason}: grpo is in its place")


def _clipped(value: Any, source: Source) -> Meant:
    if source.find("adv_estimator") != "grpo" or _clips_scores(source):
        return Meant({"algorithm.reward_clip_after": number(value)}, "after the normalisation")
    size = source.number("num_return_sequences_in_group", 1)
    most = (size - 1) / math.sqrt(max(size, 1))
    return Meant({}, f"it changes nothing: of {size:g} normalised rewards none is above {most:.3g}")


def _norm(value: Any, source: Source) -> Meant:
    if source.find("adv_estimator") == "grpo":
        raise Untranslatable("the estimator grpo normalises by group, in ROLL too")
    return Meant({"algorithm.reward_norm": value})


def _norm_apart(value: Any, source: Source) -> Meant:
    if source.find("adv_estimator") == "grpo":
        raise Untranslatable("the estimator grpo normalises by group, in ROLL too")
    norm = {part: str(source.find(f"norm_{part}_type", "none")).lower() for part in ("mean", "std")}
    return Meant({"algorithm.reward_norm": norm}, spoken(["norm_mean_type"], value))


def _shift(name: str) -> Any:
    def convert(value: Any, source: Source) -> Meant:
        if boolean(value) and not source.has("reward_norm"):
            raise Untranslatable("without reward_norm it does nothing in ROLL")
        if boolean(value) and source.find("adv_estimator") == "grpo":
            raise Untranslatable("grpo takes mean and deviation of the group, in ROLL too")
        if boolean(value) and name == "reward_scale" and source.find("reward_norm") != "running":
            raise Untranslatable("ROLL reads it with reward_norm: running alone")
        return Meant({f"algorithm.{name}": boolean(value)})

    return convert


def _kl_switch(value: Any, source: Source) -> Meant:
    if boolean(value) and source.number("kl_loss_coef") == 0:
        return Meant({"algorithm.use_kl_loss": False}, "kl_loss_coef is 0")
    return Meant({"algorithm.use_kl_loss": boolean(value)})


def _kl_weight(value: Any, source: Source) -> Meant:
    return Meant({"algorithm.kl_loss_coef": number(value)} if number(value) else {}, "k3; 0 is off")


def _warmup_share(value: Any, source: Source) -> Meant:
    if source.number("actor_train.training_args.warmup_steps"):
        raise Untranslatable("warmup_steps counts")
    if number(value) == 0:
        return Meant({}, "none")
    raise Untranslatable("a share of all updates; `learner.warmup_steps` is a number of them")


def _staleness(value: Any, source: Source) -> Meant:
    ratio = number(value)
    note = "batches ahead there, a strict bound per token here"
    return Meant({"replay.max_staleness": math.ceil(ratio)}, note)


def _difficulty(side: str) -> Any:
    def convert(value: Any, source: Source) -> Meant:
        if str(source.find("difficulty_mask", False)).lower() != "true":
            raise Untranslatable("without difficulty_mask it does nothing in ROLL")
        found = {
            "replay.filter_groups.enable": True,
            f"replay.filter_groups.accuracy_{side}": number(value),
        }
        return Meant(found, "groups outside are replaced here, masked there")

    return convert


def _ranks(value: Any, source: Source) -> Meant:
    devices = _devices(source, "actor_train")
    if not devices:
        raise Untranslatable("not of the form list(range(0,8)): set `learner.ranks`")
    return Meant({"learner.ranks": len(devices)}, "devices that train")


def _layout(value: Any, source: Source) -> Meant:
    engines, learner = _devices(source, "actor_infer"), _devices(source, "actor_train")
    if not engines & learner:
        return Meant({"cluster.layout": "split"}, "other devices than the learner's")
    if engines == learner:
        return Meant({"cluster.layout": "colocated"}, "the learner's devices")
    raise Untranslatable("some of the learner's devices: here all of them are shared, or none")


def _corrected(value: Any, source: Source) -> Meant:
    on = source.find("train_infer_correction.enable", True)
    told = spoken(["train_infer_correction"], value)
    raise Untranslatable(told if str(on).lower() == "true" else "the correction is off")


_RULES = (
    answered("^critic.* ^critic"),
    none("^value_clip ^critic_warmup", "there is no critic here"),
    file_name("^exp_name"),
    same("^seed", "seed"),
    directory("^output_dir"),
    none("^logging_dir", "logs are in `run.dir`"),
    same("^max_steps", "run.total_steps"),
    every("^save_steps", "checkpoint.every_steps"),
    every("^eval_steps", "evaluation.every_steps"),
    none("^logging_steps", "every learner step is logged"),
    resume("^resume_from_checkpoint"),
    mlflow_among("^track_with"),
    none("^tracker_kwargs.* ^tracker_kwargs", "of another tracker"),
    by("^max_ckpt_to_keep", lambda value, source: Meant(
        {"checkpoint.keep": whole(value)} if whole(value) > 0 else {}, "all; here the newest")),
    none("^checkpoint_config.*", "checkpoints are in `run.dir`"),
    same("^pretrain", "model.path"),
    none("^reward_pretrain", "rewards come from the task's `score`"),
    # ---- batch
    same("^rollout_batch_size", "rollout.rollout_batch_size", "prompts, which are groups"),
    same("^num_return_sequences_in_group"),
    none("^is_num_return_sequences_expand", "the responses of a prompt always run side by side"),
    same("^prompt_length", "rollout.prompt_length"),
    by("^response_length", _response),
    by("^sequence_length", _sequence),
    by("^async_generation_ratio", _staleness),
    same("^ppo_epochs", "learner.ppo_epochs"),
    none("^generate_opt_level ^is_use_additional_prompts ^max_additional_running_prompts",
         "prompts are always issued one by one here, as many as `replay.max_staleness` allows"),
    same("^max_running_requests", "cluster.engine.max_num_seqs"),
    # ---- advantages and rewards
    by("^adv_estimator", _estimator),
    switch("^whiten_advantages", "algorithm.whiten_advantages"),
    same("^advantage_clip", "algorithm.advantage_clip"),
    by("^reward_clip", _clipped),
    by("^reward_norm", _norm),
    by("^norm_mean_type ^norm_std_type", _norm_apart),
    by("^reward_shift", _shift("reward_shift")),
    by("^reward_scale", _shift("reward_scale")),
    switch("^add_token_level_kl", "algorithm.add_token_level_kl"),
    same("^init_kl_coef"),
    words("^kl_penalty", "algorithm.kl_ctrl.kl_type", {"kl": "kl", "abs": "abs", "mse": "mse"}),
    same("^kl_horizon"),
    same("^target_kl", "algorithm.kl_ctrl.target_kl"),
    same("^gamma", "algorithm.gamma"),
    none("^lambd", "of GAE, which needs a critic"),
    switch("^max_len_mask", "algorithm.mask_truncated"),
    none("^difficulty_mask", "its thresholds are `replay.filter_groups.accuracy_low` and `_high`"),
    by("^difficulty_low_threshold", _difficulty("low")),
    by("^difficulty_high_threshold", _difficulty("high")),
    # ---- loss
    by("^pg_variant", _loss),
    by("^importance_sampling", _level),
    by("^pg_clip", _clip),
    by("^pg_clip_low", _clip_side("low")),
    by("^pg_clip_high", _clip_side("high")),
    none("^use_pg_clip_range", "`algorithm.clip_ratio_low` and `_high` are what counts there"),
    by("^dual_clip_loss", _dual_clip),
    by("^train_infer_correction*", _corrected),
    by("^use_kl_loss", _kl_switch),
    by("^kl_loss_coef", _kl_weight),
    same("^entropy_loss_coef"),
    same("^loss_agg_mode", "algorithm.loss_agg_mode", "S counts rows with tokens in the loss here"),
    # ---- actor_train
    *adapters("actor_train.model_args.lora_rank", "actor_train.model_args.lora_alpha",
              "actor_train.model_args.lora_target"),
    words("actor_train.model_args.dtype", "model.dtype", {"bf16": "bfloat16", "fp32": "float32"}),
    same("actor_train.training_args.learning_rate", "learner.lr"),
    same("actor_train.training_args.weight_decay", "learner.weight_decay"),
    same("actor_train.training_args.warmup_steps", "learner.warmup_steps"),
    same("^max_grad_norm actor_train.training_args.max_grad_norm", "learner.grad_clip"),
    schedule("actor_train.training_args.lr_scheduler_type"),
    to("actor_train.model_args.disable_gradient_checkpointing", "learner.gradient_checkpointing",
       lambda value: not boolean(value)),
    switch("actor_train.*gradient_checkpointing", "learner.gradient_checkpointing"),
    by("actor_train.training_args.per_device_train_batch_size", _mini_batch),
    by("actor_train.training_args.gradient_accumulation_steps", _accumulated),
    by("actor_train.training_args.adam_beta1 actor_train.training_args.adam_beta2",
       lambda value, source: Meant({"learner.betas": [
           source.number("actor_train.training_args.adam_beta1", 0.9),
           source.number("actor_train.training_args.adam_beta2", 0.999)]})),
    by("actor_train.training_args.warmup_ratio", _warmup_share),
    none("actor_train.training_args.num_train_epochs", "max_steps counts"),
    none("actor_train.training_args.*", "of the trainer there"),
    data("actor_train.data_args.file_name", "task.train"),
    none("actor_train.data_args.*", DATA_FILES),
    by("actor_train.device_mapping", _ranks),
    none("actor_train.*", PROCESSES),
    # ---- actor_infer
    none("actor_infer.generating_args.max_new_tokens", "`rollout.response_length` counts"),
    none("actor_infer.generating_args.num_return_sequences", "`rollout.group_size` counts"),
    none("actor_infer.generating_args.num_beams", "responses are sampled"),
    same("actor_infer.generating_args.temperature", "rollout.temperature"),
    same("actor_infer.generating_args.top_p", "rollout.top_p"),
    to("actor_infer.generating_args.top_k", "rollout.top_k", off_is_zero),
    same("actor_infer.*.gpu_memory_utilization", "cluster.engine.gpu_memory_utilization"),
    same("actor_infer.*.tensor_parallel_size", "cluster.engine.tensor_parallel_size"),
    by("actor_infer.device_mapping", _layout),
    none("actor_infer.*", "an argument of the engine: see `cluster.engine.vllm`"),
    none("^reference.*", "the reference is the initial policy, or `model.reference`"),
    none("^rewards.*.query_filter_config.*", "a filter of groups by their mean score, of one "
         "domain: `replay.filter_groups`, with accuracy_low and accuracy_high, is of all"),
    none("^rewards.* ^reward.*", "write it as the `score` of a task (docs/tasks.md)"),
    data("validation.data_args.file_name", "task.eval"),
    same("validation.generating_args.temperature", "evaluation.temperature"),
    none("validation.*", "evaluations here are greedy, and `evaluation.n` sampled"),
    none("^defaults* ^config_name ^config_path", "the files that it names are not read: ROLL's "
         "defaults are taken"),
    none("^num_gpus_per_node ^rpc_timeout ^system_envs.* ^model_update_buffer_size_mb", PROCESSES),
    none("^hydra.* ^pipeline_cls ^profiler_* ^enable_* ^tracing.*", "of the program"),
)  # fmt: skip


def _implied(source: Source) -> Iterable[tuple[str, Any, str]]:
    """Say what ROLL does where a file says nothing, and we do not."""
    own = "ROLL's default"
    yield "run.total_steps", 500, own
    yield "checkpoint.every_steps", 50, own
    if any(key.startswith("validation.") for key in source.given):
        yield "evaluation.every_steps", 10, own
    yield "rollout.rollout_batch_size", 128, own
    yield "rollout.prompt_length", 1024, own
    if any(key.startswith("actor_infer.generating_args.") for key in source.given):
        yield "rollout.temperature", 0.95, own
        yield "rollout.top_p", 0.7, own
        yield "rollout.top_k", 50, own
    if not source.has("actor_train.training_args.per_device_train_batch_size"):
        for name, value in _mini_batch(8, source).values.items():
            yield name, value, f"{own}: 8 rows of a device"
    yield "learner.lr", 5e-5, own
    yield "learner.betas", [0.9, 0.999], own
    yield "learner.schedule", "linear", own
    if not source.has("adv_estimator"):
        yield "algorithm.adv_estimator", "grpo", f"{own} is gae, which needs a critic"
    if str(source.find("add_token_level_kl")).lower() == "true":
        yield "algorithm.kl_ctrl.kl_coef", 0.2, own
    yield (
        "algorithm.loss_agg_mode",
        "seq-mean-token-mean",
        f"{own} in 0.3; before, seq-mean-token-sum",
    )
    clip = source.number("pg_clip", 0.2)
    for side in ("low", "high"):
        yield f"algorithm.clip_ratio_{side}", clip, own
    yield "algorithm.anchor", "recomputed", "ROLL's old log-probs are always the learner's"
    yield "replay.max_staleness", 0, "async_generation_ratio is 0 by default; 1 and more overlaps"
    yield "rollout.group_size", 1, own


ROLL = Peer(
    name="ROLL",
    option="roll",
    signs="^num_return_sequences_in_group ^actor_train.* ^actor_infer.* ^async_generation_ratio "
    "^pg_clip ^is_num_return_sequences_expand ^rollout_batch_size ^dual_clip_loss "
    "^add_token_level_kl ^exp_name",
    programs=("start_rlvr_pipeline", "roll."),
    rules=_RULES,
    implied=_implied,
)
