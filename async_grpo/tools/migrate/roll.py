"""ROLL's keys: flat ones of the pipeline, and `actor_train`, `actor_infer`, `validation`.

Runs in: a terminal. Hides ROLL's names and what it does where a file says nothing. Invariant: as of
`verl`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from async_grpo.tools.migrate import rule
from async_grpo.tools.migrate.rule import Outcome, Settings, boolean, groups_of, number, whole
from async_grpo.tools.migrate.source import Source

_RANGE = re.compile(r"list\(range\((?:(\d{1,5}),)?(\d{1,5})\)\)")
_TRAINING = "actor_train.training_args"
_OURS_TOO = "the estimator grpo takes mean and deviation of the group, in ROLL too"


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


def _group_size(source: Source) -> float:
    return source.number("num_return_sequences_in_group", 1)


def _lengths(source: Source) -> tuple[int, int]:
    """Longest prompt, and longest response: what the prompt leaves of sequence_length."""
    prompt = source.number("prompt_length", 1024)
    response = source.number("response_length", 512)
    total = source.number("sequence_length", prompt + response)
    return int(prompt), int(total - prompt)


def _sequence(value: Any, source: Source) -> Outcome:
    if whole(value) <= source.number("prompt_length", 1024):
        return "it leaves no room for a response"
    return {"rollout.response_length": _lengths(source)[1]}, "of prompt and response together"


def _mini_batch(value: Any, source: Source) -> Outcome:
    accumulated = source.number(f"{_TRAINING}.gradient_accumulation_steps", 1)
    ranks, size = _data_parallel(source), _group_size(source)
    rows = whole(value) * accumulated * ranks
    batch = int(max(1, source.number("rollout_batch_size", 128)))
    return {
        "learner.ppo_mini_batch_size": min(groups_of(rows, size), batch),
        "learner.tokens_per_micro_batch": whole(value) * sum(_lengths(source)),
    }, (
        f"{whole(value)} sequences x {accumulated:g} accumulated x {ranks} ranks = {rows:g} "
        f"sequences, over {size:g} responses per prompt"
    )


def _interval(source: Source) -> Settings:
    return rule.interval(source, "pg_clip_low", "pg_clip_high", "pg_clip")


_LOSSES = {
    "ppo": "ppo_clip", "vanilla": "gpg", "cispo": "cispo",
    "topr": ("topr", "by the ratio of whole responses here, of tokens there"),
    "kimi15": ({
        "algorithm.policy_loss": "opmd", "algorithm.policy_loss.opmd.tau": 0.1,
        "algorithm.norm_adv_by_std_in_grpo": False}, "needs R - mean as advantage here"),
}  # fmt: skip


def _loss(value: Any, source: Source) -> Outcome:
    found, note = rule.words("", "algorithm.policy_loss", _LOSSES).outcome(value, source)
    sides = ("low", "high") if value == "cispo" else ()
    widths = {side: source.number(f"cispo_epsilon_{side}", 0.1) for side in sides}
    named = {f"algorithm.clip_ratio_{side}": width for side, width in widths.items()}
    return {**found, **named}, note


def _dual_clip(value: Any, source: Source) -> Outcome:
    if not boolean(value):
        return {"algorithm.dual_clip_loss": False}
    bound = round(1 + 2 * source.number("pg_clip", 0.2), 6)
    found = {"algorithm.dual_clip_loss": True, "algorithm.clip_ratio_c": bound}
    return found, "the bound is 1 + 2 x pg_clip in ROLL"


_ranged = rule.on("use_pg_clip_range")


def _unranged(source: Source) -> bool:
    return not _ranged(source) and source.has("pg_clip")


def _most(source: Source) -> float:
    """Highest reward that the group's mean and deviation leave."""
    size = _group_size(source)
    return (size - 1) / math.sqrt(max(size, 1))


def _clips_scores(source: Source) -> bool:
    """Whether reward_clip binds, behind the group's mean and deviation."""
    return 0 < source.number("reward_clip") < _most(source)


def _grouped(source: Source) -> bool:
    return bool(source.find("adv_estimator") == "grpo")


def _estimator(value: Any, source: Source) -> Outcome:
    name = str(value)
    if name == "grpo" and (_clips_scores(source) or source.on("add_token_level_kl")):
        found = {"algorithm.adv_estimator": "reinforce", "algorithm.reward_norm": "group"}
        return found, "normalised by group, then clipped or paid for its KL, then returns"
    if name in ("grpo", "reinforce"):
        return {"algorithm.adv_estimator": name}
    return rule.NO_CRITIC.removeprefix("- ") if name == "gae" else "not here: grpo is used instead"


def _clipped(value: Any, source: Source) -> Outcome:
    if not _grouped(source) or _clips_scores(source):
        return {"algorithm.reward_clip_after": number(value)}, "after the normalisation"
    return (
        f"it changes nothing: of {_group_size(source):g} normalised rewards none is above "
        f"{_most(source):.3g}"
    )


def _norm_apart(value: Any, source: Source) -> Outcome:
    norm = {part: str(source.find(f"norm_{part}_type", "none")).lower() for part in ("mean", "std")}
    return {"algorithm.reward_norm": norm}, rule.spoken("norm_mean_type", value)


def _shift(name: str) -> rule.KeyRule:
    def convert(value: Any, source: Source) -> Outcome:
        if boolean(value) and not source.has("reward_norm"):
            return "without reward_norm it does nothing in ROLL"
        if boolean(value) and _grouped(source):
            return _OURS_TOO
        if boolean(value) and name == "reward_scale" and source.find("reward_norm") != "running":
            return "ROLL reads it with reward_norm: running alone"
        return {f"algorithm.{name}": boolean(value)}

    return rule.by(f"^{name}", convert)


def _no_kl(source: Source) -> bool:
    return source.on("use_kl_loss") and source.number("kl_loss_coef") == 0


def _difficulty(side: str) -> rule.KeyRule:
    def convert(value: Any, source: Source) -> Outcome:
        accuracy = {f"replay.filter_groups.accuracy_{side}": number(value)}
        note = "groups outside are replaced here, masked there"
        return {"replay.filter_groups.enable": True, **accuracy}, note

    return rule.by(f"^difficulty_{side}_threshold", convert).when(
        rule.on("difficulty_mask"), "without difficulty_mask it does nothing in ROLL"
    )


def _ranks(value: Any, source: Source) -> Outcome:
    devices = _devices(source, "actor_train")
    if not devices:
        return "not of the form list(range(0,8)): set `learner.ranks`"
    return {"learner.ranks": len(devices)}, "devices that train"


def _layout(value: Any, source: Source) -> Outcome:
    engines, learner = _devices(source, "actor_infer"), _devices(source, "actor_train")
    if not engines & learner:
        return {"cluster.layout": "split"}, "other devices than the learner's"
    if engines == learner:
        return {"cluster.layout": "colocated"}, "the learner's devices"
    return "some of the learner's devices: here all of them are shared, or none"


_RULES = (
    rule.answered("^critic.* ^critic"),
    *rule.alike("""
^seed ^exp_name ^output_dir ^max_steps ^pretrain actor_train.model_args.dtype ^rollout_batch_size
^num_return_sequences_in_group ^prompt_length
actor_infer.generating_args.temperature=rollout.temperature actor_infer.generating_args.top_p
actor_infer.generating_args.top_k ^gamma ^whiten_advantages ^advantage_clip ^add_token_level_kl
^kl_penalty ^init_kl_coef ^target_kl ^kl_horizon ^max_len_mask ^entropy_loss_coef ^ppo_epochs
actor_train.training_args.learning_rate actor_train.training_args.weight_decay
actor_train.training_args.warmup_steps actor_train.training_args.lr_scheduler_type ^max_grad_norm
actor_train.training_args.max_grad_norm ^eval_steps
validation.generating_args.temperature=evaluation.temperature ^save_steps ^resume_from_checkpoint
^track_with=tracking.mlflow actor_infer.*.tensor_parallel_size ^max_running_requests
actor_infer.*.gpu_memory_utilization
    """),
    rule.by("^max_ckpt_to_keep", lambda value, source: (
        {"checkpoint.keep": whole(value)} if whole(value) > 0 else "all; here the newest")),
    rule.same("^response_length").unless(
        rule.given("sequence_length"), "sequence_length counts, less prompt_length"),
    rule.by("^sequence_length", _sequence),
    rule.to("^async_generation_ratio", "replay.max_staleness",
            lambda value: math.ceil(number(value)),
            "batches ahead there, a strict bound per token here"),
    # ---- advantages and rewards
    rule.by("^adv_estimator", _estimator),
    rule.by("^reward_clip", _clipped),
    rule.to("^reward_norm", "algorithm.reward_norm", lambda value: value).unless(
        _grouped, _OURS_TOO),
    rule.by("^norm_mean_type ^norm_std_type", _norm_apart).unless(_grouped, _OURS_TOO),
    _shift("reward_shift"),
    _shift("reward_scale"),
    _difficulty("low"),
    _difficulty("high"),
    # ---- loss
    rule.by("^pg_variant", _loss),
    rule.ratio_level("^importance_sampling", "seq", _interval,
                     "usual widths of its interval are 3e-4 and 4e-4; "),
    rule.clip("^pg_clip").unless(
        _ranged, "with use_pg_clip_range, pg_clip_low and pg_clip_high count"),
    rule.same("^pg_clip_low").unless(_unranged, "without use_pg_clip_range, pg_clip counts"),
    rule.same("^pg_clip_high").unless(_unranged, "without use_pg_clip_range, pg_clip counts"),
    rule.by("^dual_clip_loss", _dual_clip),
    rule.answered("^train_infer_correction*").unless(
        lambda source: source.find("train_infer_correction.enable") is False,
        "the correction is off"),
    rule.same("^use_kl_loss").unless(_no_kl, "kl_loss_coef is 0, which is off"),
    rule.same("^kl_loss_coef", note="of k3").unless(_no_kl, "0 is off"),
    rule.same("^loss_agg_mode", note="S counts sequences with tokens in the loss here"),
    # ---- actor_train
    *rule.adapters("actor_train.model_args.lora_rank", "actor_train.model_args.lora_alpha",
                   "actor_train.model_args.lora_target"),
    rule.to("actor_train.model_args.disable_gradient_checkpointing",
            "learner.gradient_checkpointing", lambda value: not boolean(value)),
    rule.same("actor_train.*gradient_checkpointing", "learner.gradient_checkpointing"),
    rule.by(f"{_TRAINING}.per_device_train_batch_size", _mini_batch),
    rule.betas(f"{_TRAINING}.adam_beta1", f"{_TRAINING}.adam_beta2"),
    rule.share_of_steps(f"{_TRAINING}.warmup_ratio", lambda source: 0).unless(
        lambda source: bool(source.number(f"{_TRAINING}.warmup_steps")), "warmup_steps counts"),
    rule.data("actor_train.data_args.file_name", "task.train"),
    rule.by("actor_train.device_mapping", _ranks),
    rule.by("actor_infer.device_mapping", _layout),
    rule.data("validation.data_args.file_name", "task.eval"),
    *rule.left(f"""
^value_clip ^critic_warmup -- there is no critic here
^logging_dir -- logs are in `run.dir`
^logging_steps -- every learner step is logged
^tracker_kwargs.* ^tracker_kwargs -- of another tracker
^checkpoint_config.* -- checkpoints are in `run.dir`
^reward_pretrain -- rewards come from the task's `score`
^is_num_return_sequences_expand -- the responses of a prompt always run side by side
^generate_opt_level ^is_use_additional_prompts ^max_additional_running_prompts -- prompts are always
    issued one by one here, as many as `replay.max_staleness` allows
^lambd -- of GAE, which needs a critic
^difficulty_mask -- its thresholds are `replay.filter_groups.accuracy_low` and `_high`
^use_pg_clip_range -- `algorithm.clip_ratio_low` and `_high` are what counts there
{_TRAINING}.gradient_accumulation_steps -- counted in `learner.ppo_mini_batch_size`, which is of
    groups and global
{_TRAINING}.num_train_epochs -- max_steps counts
{_TRAINING}.* -- of the trainer there
actor_train.data_args.* -- {rule.DATA_FILES}
actor_train.* -- {rule.PROCESSES}
actor_infer.generating_args.max_new_tokens -- `rollout.response_length` counts
actor_infer.generating_args.num_return_sequences -- `rollout.group_size` counts
actor_infer.generating_args.num_beams -- responses are sampled
actor_infer.* -- an argument of the engine: see `cluster.engine.vllm`
^reference.* -- the reference is the initial policy, or `model.reference`
^rewards.*.query_filter_config.* -- a filter of groups by their mean score, of one domain:
    `replay.filter_groups`, with accuracy_low and accuracy_high, is of all
^rewards.* ^reward.* -- write it as the `score` of a task (docs/how-to/rewards.md)
validation.* -- evaluations here are greedy, and `evaluation.n` sampled
^defaults* ^config_name ^config_path -- the files that it names are not read: ROLL's defaults are
    taken
^num_gpus_per_node ^rpc_timeout ^system_envs.* ^model_update_buffer_size_mb -- {rule.PROCESSES}
^hydra.* ^pipeline_cls ^profiler_* ^enable_* ^tracing.* -- of the program
    """),
)  # fmt: skip


def _implied(source: Source) -> Iterator[tuple[Settings, str]]:
    own, clip = "ROLL's default", source.number("pg_clip", 0.2)
    yield {
        "run.total_steps": 500, "checkpoint.every_steps": 50, "rollout.rollout_batch_size": 128,
        "rollout.group_size": 1, "rollout.prompt_length": 1024,
        "algorithm.clip_ratio_low": clip, "algorithm.clip_ratio_high": clip,
        "learner.lr": 5e-5, "learner.betas": [0.9, 0.999], "learner.schedule": "linear",
    }, own  # fmt: skip
    if any(key.startswith("validation.") for key in source.given):
        yield {"evaluation.every_steps": 10}, own
    if any(key.startswith("actor_infer.generating_args.") for key in source.given):
        yield {"rollout.temperature": 0.95, "rollout.top_p": 0.7, "rollout.top_k": 50}, own
    if not source.has(f"{_TRAINING}.per_device_train_batch_size"):
        sizes, _ = rule.by("", _mini_batch).outcome(8, source)
        yield sizes, f"{own}: 8 sequences of a device"
    if not source.has("adv_estimator"):
        yield {"algorithm.adv_estimator": "grpo"}, f"{own} is gae, which needs a critic"
    if source.on("add_token_level_kl"):
        yield {"algorithm.kl_ctrl.kl_coef": 0.2}, own
    mode = {"algorithm.loss_agg_mode": "seq-mean-token-mean"}
    yield mode, f"{own} in 0.3; before, seq-mean-token-sum"
    anchor = {"algorithm.anchor": "recomputed"}
    yield anchor, "ROLL's old log-probs are always the learner's"
    why = "async_generation_ratio is 0 by default; 1 and more overlaps"
    yield {"replay.max_staleness": 0}, why


ROLL = rule.Peer("ROLL", "roll", ("start_rlvr_pipeline", "roll."), _RULES, _implied, signs=(
    "^num_return_sequences_in_group ^actor_train.* ^actor_infer.* ^async_generation_ratio "
    "^pg_clip ^is_num_return_sequences_expand ^rollout_batch_size ^dual_clip_loss "
    "^add_token_level_kl ^exp_name"))  # fmt: skip
