"""AReaL's keys: `gconfig`, `actor`, `rollout`, `train_dataset` and what operates them.

Runs in: a terminal. Hides AReaL's names, its normalisations, and what it does where a file says
nothing. Invariant: as of `verl`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from async_grpo.tools.migrate.common import (
    A_PART,
    DATA_FILES,
    LAYOUT_OF_OTHERS,
    PROCESSES,
    SUMMED,
    adapters,
    data,
    experiment,
    file_name,
    off_is_zero,
)
from async_grpo.tools.migrate.rules import (
    Convert,
    Meant,
    Peer,
    Untranslatable,
    answered,
    boolean,
    by,
    every,
    none,
    number,
    same,
    spoken,
    switch,
    text,
    to,
    whole,
    words,
)
from async_grpo.tools.migrate.source import Source


def _mini_batch(value: Any, source: Source) -> Meant:
    batch = source.number("train_dataset.batch_size", 1)
    groups = max(1, int(batch // max(1, whole(value))))
    note = f"a number of minibatches there: {batch:g} prompts over {whole(value)}"
    return Meant({"learner.ppo_mini_batch_size": groups}, note)


def _decoupled(source: Source) -> bool:
    return str(source.find("actor.use_decoupled_loss", False)).lower() == "true"


def _anchor(source: Source) -> str:
    if not _decoupled(source):
        again = str(source.find("actor.recompute_logprob", False)).lower() == "true"
        return "recomputed" if again else "behavior"
    between = str(source.find("actor.prox_logp_method", "recompute")) == "loglinear"
    return "interpolated" if between else "recomputed"


def _anchored(value: Any, source: Source) -> Meant:
    return Meant({"algorithm.anchor": _anchor(source)}, "of use_decoupled_loss, recompute_logprob "
                 "and prox_logp_method together")  # fmt: skip


def _cap(value: Any, source: Source) -> Meant:
    if not _decoupled(source):
        return Meant({}, "of the decoupled loss, which is off")
    return Meant(
        {
            "algorithm.importance.level": "token",
            "algorithm.importance.mode": "mask",
            "algorithm.importance.upper": number(value),
        },
        spoken(["behav_imp_weight_cap"], value),
    )


def _rejected(value: Any, source: Source) -> Meant:
    def of(key: str, default: str) -> str:
        return str(source.find(f"actor.rejection_sampling.{key}", default))

    if value is None:
        return Meant({}, "off")
    if not _decoupled(source) and _anchor(source) == "behavior":
        return Meant({}, "with the sampler's log-probs as anchor there is nothing to weigh")
    if of("metric", "ratio") != "ratio":
        raise Untranslatable("other scores of the ratio are rules of `algorithm.rejection`")
    levels = {"token": "token", "mean": "geometric", "sum": "sequence"}
    whole_response = of("level", "token") == "sequence"
    level = levels.get(of("agg", "mean") if whole_response else of("level", "token"))
    mode = {"mask": "mask", "clamp": "truncate"}.get(of("action", "mask"))
    if level is None or mode is None:
        raise Untranslatable("allowed are token and sequence, mean and sum, mask and clamp")
    found = {
        "algorithm.importance.level": level,
        "algorithm.importance.mode": mode,
        "algorithm.importance.upper": source.number("actor.rejection_sampling.upper", 5.0),
        "algorithm.importance.lower": source.number("actor.rejection_sampling.lower", 0.0),
    }
    note = "the geometric mean decides and weighs there" if level == "geometric" else ""
    return Meant(found, note)


def _norms(source: Source, which: str) -> tuple[str, str]:
    """Levels of mean and deviation: `none` for null, the batch where the section leaves one out."""
    section = f"actor.{which}"
    used = source.given.get(section) is not None or any(
        key.startswith(f"{section}.") for key in source.given
    )
    mean, deviation = (
        str(source.given.get(f"{section}.{part}_level", "batch" if used else None)).lower()
        for part in ("mean", "std")
    )
    return mean, deviation


def _advantages(value: Any, source: Source) -> Meant:
    mean, deviation = _norms(source, "reward_norm")
    left_out = str(source.find("actor.reward_norm.mean_leave1out", False)).lower() == "true"
    note = f"reward_norm: mean {mean}, deviation {deviation}"
    if left_out:
        if (mean, deviation) != ("group", "none"):
            raise Untranslatable(
                "leave-one-out means are of groups, without a deviation here (rloo)"
            )
        return Meant({"algorithm.adv_estimator": "rloo"}, note)
    if mean == "group":
        found: dict[str, Any] = {"algorithm.adv_estimator": "grpo"}
        if deviation == "none":
            found["algorithm.norm_adv_by_std_in_grpo"] = False
        elif deviation == "batch":
            found["algorithm.adv_std_level"] = "batch_centered"
        return Meant(found, note)
    norms: dict[tuple[str, str], Any] = {
        ("none", "none"): None,
        ("batch", "batch"): "batch",
        ("batch", "none"): {"mean": "batch", "std": "none"},
    }
    if (mean, deviation) not in norms:
        raise Untranslatable(
            f"mean {mean} with deviation {deviation} is not here: grpo is in its place"
        )
    found = {"algorithm.adv_estimator": "raw"}
    norm = norms[mean, deviation]
    return Meant(found | ({"algorithm.reward_norm": norm} if norm else {}), note)


def _whitened(value: Any, source: Source) -> Meant:
    levels = _norms(source, "adv_norm")
    if levels == ("batch", "batch"):
        return Meant({"algorithm.whiten_advantages": True}, "over all tokens of the step")
    if levels == ("none", "none"):
        return Meant({"algorithm.whiten_advantages": False})
    raise Untranslatable("advantages are whitened over the whole batch here, or not")


def _kl(value: Any, source: Source) -> Meant:
    if number(value) == 0:
        return Meant({"algorithm.add_token_level_kl": False})
    if not source.has("ref.path", "ref.experiment_name"):
        raise Untranslatable(
            "without a reference AReaL pays every token its own log-prob; here it is off"
        )
    return Meant(
        {"algorithm.add_token_level_kl": True, "algorithm.kl_ctrl.kl_coef": number(value)}, SUMMED
    )


def _clip(value: Any, source: Source) -> Meant:
    found = {"algorithm.clip_ratio_low": number(value)}
    if not source.has("actor.eps_clip_higher"):
        found["algorithm.clip_ratio_high"] = number(value)
    return Meant(found)


def _dual_clip(value: Any, source: Source) -> Meant:
    if value is None:
        return Meant({"algorithm.dual_clip_loss": False})
    return Meant({"algorithm.dual_clip_loss": True, "algorithm.clip_ratio_c": number(value)})


def _level(value: Any, source: Source) -> Meant:
    if str(value) == "token":
        return Meant({}, "ppo_clip has the ratio of tokens")
    if str(value) != "sequence":
        raise Untranslatable("allowed are token and sequence")
    low = source.number("actor.eps_clip", 0.2)
    return Meant(
        {
            "algorithm.policy_loss": "gspo",
            "algorithm.clip_ratio_low": low,
            "algorithm.clip_ratio_high": source.number("actor.eps_clip_higher", low),
            "algorithm.loss_agg_mode": "seq-mean-token-mean",
        },
        "responses weigh by their length there, alike here; "
        + spoken(["importance_sampling_level"], value),
    )


def _scaling(source: Source) -> float:
    return abs(source.number("actor.reward_scaling", 1.0)) or 1.0


def _reward_clip(value: Any, source: Source) -> Meant:
    if source.number("actor.reward_bias"):
        raise Untranslatable("around the shifted reward there, around 0 here")
    note = "of the raw reward here, of the scaled one there; before any statistic on both sides"
    return Meant({"algorithm.reward_clip": number(value) / _scaling(source)}, note)


def _epochs(value: Any, source: Source) -> Meant:
    if source.has("total_train_steps"):
        raise Untranslatable("total_train_steps ends it")
    return Meant({"run.epochs": whole(value)})


def _concurrent(value: Any, source: Source) -> Meant:
    where = source.find("allocation_mode") or source.find("rollout.backend")
    engines = max(1, _sizes(str(where).partition("+")[0]).get("d", 1))
    responses = whole(value) * source.number("gconfig.n_samples", 1)
    note = f"groups on all engines there, responses on each of {engines} here"
    return Meant({"cluster.engine.max_num_seqs": math.ceil(responses / engines)}, note)


def _unscaled(neutral: float) -> Convert:
    def convert(value: Any, source: Source) -> Meant:
        if number(value) == neutral:
            return Meant({}, "changes nothing")
        raise Untranslatable("weights of rewards are `task.rewards`; a shift is the task's")

    return convert


def _asked(ours: str, key: str) -> Convert:
    def convert(value: Any, source: Source) -> Meant:
        if str(source.find("actor.overlong_reward_penalty", False)).lower() != "true":
            return Meant({}, "overlong_reward_penalty is off")
        return Meant({ours: value if key == "factor" else whole(value)})

    return convert


def _sizes(side: str) -> dict[str, int]:
    """Read `sglang:d4p1t1`, the sizes by their letters."""
    parts = re.findall(r"([dptc])(\d{1,4})", side.rpartition(":")[2])
    return {kind: int(size) for kind, size in parts}


def _allocation(value: Any, source: Source) -> Meant:
    """Read `sglang:d4p1t1+d4p1t1`: engines, then the learner."""
    sides = [_sizes(side) for side in text(value).split("+")]
    if len(sides) != 2 or not all("d" in one for one in sides):
        raise Untranslatable("not two sides of the form d4p1t1")
    note = "engines d x t, then GPUs of the learner"
    return Meant({"cluster.layout": "split", **_engines(sides[0]), **_ranks(sides[1])}, note)


def _engines(sizes: dict[str, int]) -> dict[str, int]:
    return {
        "cluster.rollout_actors.max": sizes["d"],
        "cluster.engine.tensor_parallel_size": sizes.get("t", 1),
    }


def _ranks(sizes: dict[str, int]) -> dict[str, int]:
    return {"learner.ranks": sizes["d"] * sizes.get("t", 1) * sizes.get("p", 1)}


def _backend(of: Callable[[dict[str, int]], dict[str, int]]) -> Convert:
    def convert(value: Any, source: Source) -> Meant:
        sizes = _sizes(text(value))
        if "d" not in sizes:
            raise Untranslatable("not of the form fsdp:d4p1t1")
        return Meant(of(sizes), "d x t x p")

    return convert


def _greedy(value: Any, source: Source) -> Meant:
    if boolean(value):
        raise Untranslatable("responses are sampled while training")
    return Meant({}, "responses are sampled")


_RULES = (
    answered("^critic.* ^critic"),
    none("^ref.* ^teacher.*", "the reference is the initial policy, or `model.reference`"),
    none("^config", "the file that it names is not read: AReaL's defaults are taken"),
    experiment("^experiment_name"),
    file_name("^trial_name"),
    by("^cluster.fileroot", lambda value, source: Meant(
        {"run.dir": f"{text(value).rstrip('/')}/{{name}}"}, "the directory of all runs there")),
    same("^seed", "seed"),
    by("^total_train_epochs", _epochs),
    same("^total_train_steps", "run.total_steps"),
    same("^actor.path", "model.path"),
    words("^actor.dtype", "model.dtype", {
        "bfloat16": "bfloat16", "float32": "float32",
        "float16": "- learner and engines compute in bfloat16 or float32",
    }),
    none("^tokenizer_path", "the tokenizer is the model's"),
    data("^train_dataset.path", "task.train", "train_dataset.split"),
    data("^valid_dataset.path", "task.eval", "valid_dataset.split"),
    none("^train_dataset.split ^valid_dataset.split", A_PART),
    same("^train_dataset.batch_size", "rollout.rollout_batch_size", "prompts, which are groups"),
    same("^train_dataset.max_length", "rollout.prompt_length", "longer prompts are left out there"),
    none("^train_dataset.* ^valid_dataset.*", DATA_FILES),
    # ---- sampling
    same("^gconfig.n_samples", "rollout.group_size"),
    same("^gconfig.max_new_tokens", "rollout.response_length"),
    same("^gconfig.temperature", "rollout.temperature"),
    same("^gconfig.top_p", "rollout.top_p"),
    to("^gconfig.top_k", "rollout.top_k", off_is_zero),
    by("^gconfig.greedy", _greedy),
    none("^gconfig.max_tokens ^gconfig.min_new_tokens ^gconfig.*", "lengths are "
         "`rollout.prompt_length` and `rollout.response_length`; nothing else is sampled by"),
    same("^eval_gconfig.temperature", "evaluation.temperature"),
    none("^eval_gconfig.*", "evaluations here are greedy, and `evaluation.n` sampled"),
    same("^rollout.max_head_offpolicyness", "replay.max_staleness",
         "a strict bound per token here, of admission there"),
    by("^rollout.max_concurrent_rollouts", _concurrent),
    none("^rollout.consumer_batch_size", "`rollout.rollout_batch_size` is what a step takes"),
    same("^rollout.request_timeout"),
    none("^rollout.queue_size", "`replay.outstanding`, by itself"),
    by("^rollout.backend", _backend(_engines)),
    none("^rollout.*", PROCESSES),
    # ---- the loss
    by("^actor.ppo_n_minibatches", _mini_batch),
    by("^actor.eps_clip", _clip),
    same("^actor.eps_clip_higher", "algorithm.clip_ratio_high"),
    by("^actor.c_clip", _dual_clip),
    same("^actor.temperature", "rollout.temperature"),
    none("^actor.group_size ^actor.max_new_tokens", "`gconfig` counts"),
    by("^actor.use_decoupled_loss ^actor.recompute_logprob ^actor.prox_logp_method", _anchored),
    by("^actor.behav_imp_weight_cap", _cap),
    by("^actor.rejection_sampling ^actor.rejection_sampling.*", _rejected),
    by("^actor.importance_sampling_level", _level),
    answered("^actor.m2_threshold"),
    by("^actor.use_sapo_loss", lambda value, source: Meant(
        {"algorithm.policy_loss": "sapo"} if boolean(value) else {}, "off")),
    same("^actor.sapo_tau_pos", "algorithm.policy_loss.sapo.tau_pos"),
    same("^actor.sapo_tau_neg", "algorithm.policy_loss.sapo.tau_neg"),
    same("^actor.entropy_coeff", "algorithm.entropy_coef"),
    # ---- rewards and advantages
    by("^actor.reward_norm ^actor.reward_norm.*", _advantages),
    by("^actor.adv_norm ^actor.adv_norm.*", _whitened),
    none("^actor.group_reward_norm ^actor.use_adv_norm", "`reward_norm` and `adv_norm` count"),
    by("^actor.kl_ctl", _kl),
    words("^actor.kl_estimator", "algorithm.kl_ctrl.kl_type", {
        "k1": "kl", "k2": "mse", "k3": "low_var_kl",
    }),
    by("^actor.reward_scaling", _unscaled(1)),
    by("^actor.reward_bias", _unscaled(0)),
    by("^actor.reward_clip", _reward_clip),
    same("^actor.discount", "algorithm.gamma"),
    none("^actor.gae_lambda", "of GAE, which needs a critic"),
    none("^actor.mask_no_eos_with_zero", "it makes the reward 0 there; `algorithm.mask_truncated` "
         "leaves the row out of the loss"),
    switch("^actor.overlong_reward_penalty", "algorithm.overlong_buffer.enable"),
    by("^actor.overlong_tokens", _asked("algorithm.overlong_buffer.len", "len")),
    by("^actor.overlong_penalty_factor",
       _asked("algorithm.overlong_buffer.penalty_factor", "factor")),
    none("^actor.dynamic_sampling ^dynamic_bs", "`replay.filter_groups`"),
    # ---- optimizer
    same("^actor.optimizer.lr", "learner.lr"),
    same("^actor.optimizer.weight_decay", "learner.weight_decay"),
    by("^actor.optimizer.beta1 ^actor.optimizer.beta2", lambda value, source: Meant({
        "learner.betas": [source.number("actor.optimizer.beta1", 0.9),
                          source.number("actor.optimizer.beta2", 0.999)]})),
    same("^actor.optimizer.gradient_clipping"),
    words("^actor.optimizer.lr_scheduler_type", "learner.schedule", {
        "constant": "constant", "linear": "linear", "cosine": "cosine",
    }),
    none("^actor.optimizer.warmup_steps_proportion", "a share of all steps: `learner.warmup_steps` "
         "counts optimizer updates"),
    none("^actor.optimizer.*", "AdamW is the optimizer here"),
    same("^actor.mb_spec.max_tokens_per_mb"),
    switch("^actor.gradient_checkpointing", "learner.gradient_checkpointing"),
    none("^actor.fsdp.* ^actor.megatron.* ^actor.archon.* ^actor.mb_spec.*", LAYOUT_OF_OTHERS),
    by("^actor.backend", _backend(_ranks)),
    *adapters("^actor.lora_rank", "^actor.lora_alpha", "^actor.target_modules", "^actor.use_lora"),
    none("^actor.use_lora ^actor.peft_type", "adapters are `model.lora`"),
    none("^actor.weight_update_mode", "`weight_sync.backend` is auto: the fastest that there is"),
    none("^actor.*", "how the learner is built there"),
    # ---- operation
    by("^allocation_mode", _allocation),
    none("^async_training", "0 of `replay.max_staleness` is synchronous"),
    every("^saver.freq_steps", "checkpoint.every_steps"),
    every("^evaluator.freq_steps", "evaluation.every_steps"),
    none("^saver.* ^evaluator.* ^recover.* ^checkpointer.*", "periods are learner steps: "
         "`checkpoint.every_steps`, `evaluation.every_steps`"),
    none("^sglang.* ^launcher.* ^scheduler.* ^enable_offload ^perf_tracer.*", PROCESSES),
    same("^vllm.gpu_memory_utilization", "cluster.engine.gpu_memory_utilization"),
    same("^vllm.max_num_seqs", "cluster.engine.max_num_seqs"),
    switch("^vllm.enforce_eager", "cluster.engine.enforce_eager"),
    none("^vllm.*", "an argument of the engine: see `cluster.engine.vllm`"),
    none("^stats_logger.*", "the tracker is MLflow here (`tracking.mlflow`)"),
    none("^cluster.*", "the cluster decides: all nodes of the Ray cluster are used"),
)  # fmt: skip


def _implied(source: Source) -> Iterable[tuple[str, Any, str]]:
    """Say what AReaL does where a file says nothing, and we do not."""
    own = "AReaL's default"
    yield "rollout.group_size", 1, own
    yield "rollout.response_length", 16384, own
    batch = int(source.number("train_dataset.batch_size", 1))
    yield "rollout.rollout_batch_size", batch, own
    yield "learner.ppo_mini_batch_size", max(1, batch // 4), f"{own}: 4 minibatches"
    yield "learner.lr", 1e-3, own
    yield "learner.weight_decay", 0.01, own
    yield "learner.betas", [0.9, 0.999], own
    if "actor.kl_ctl" not in source.given and source.has("ref.path", "ref.experiment_name"):
        yield "algorithm.add_token_level_kl", True, f"{own}, with a reference"
        yield "algorithm.kl_ctrl.kl_coef", 0.1, own
    yield "algorithm.anchor", _anchor(source), "the log-probs that AReaL's ratios are taken against"
    yield "replay.max_staleness", 0, own
    low = source.number("actor.eps_clip", 0.2)
    yield "algorithm.clip_ratio_low", low, own
    yield "algorithm.clip_ratio_high", low, own
    if _norms(source, "reward_norm") == ("none", "none"):
        yield "algorithm.adv_estimator", "raw", "no reward_norm"
    if not source.has("actor.reward_clip", "actor.reward_bias"):
        yield "algorithm.reward_clip", 20.0 / _scaling(source), own
    if not source.has("total_train_steps"):
        yield "run.epochs", 1, own
    if str(source.find("actor.use_lora", False)).lower() == "true":
        yield "model.lora.rank", 32, own


AREAL = Peer(
    name="AReaL",
    option="areal",
    signs="gconfig.* rollout.max_head_offpolicyness train_dataset.* actor.eps_clip "
    "actor.ppo_n_minibatches allocation_mode actor.use_decoupled_loss ^total_train_epochs "
    "stats_logger.* ^trial_name actor.mb_spec.* actor.reward_norm.*",
    programs=("areal",),
    rules=_RULES,
    implied=_implied,
)
