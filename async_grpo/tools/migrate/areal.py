"""AReaL's keys: `gconfig`, `actor`, `rollout`, `train_dataset` and what operates them.

Runs in: a terminal. Hides AReaL's names, its normalisations, and what it does where a file says
nothing. Invariant: as of `verl`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from async_grpo.tools.migrate import rule
from async_grpo.tools.migrate.rule import Outcome, Settings, number, text, whole
from async_grpo.tools.migrate.source import Source


def _mini_batch(value: Any, source: Source) -> Outcome:
    batch = source.number("train_dataset.batch_size", 1)
    groups = max(1, int(batch // max(1, whole(value))))
    note = f"a number of minibatches there: {batch:g} prompts over {whole(value)}"
    return {"learner.ppo_mini_batch_size": groups}, note


_decoupled = rule.on("actor.use_decoupled_loss")


def _anchor(source: Source) -> str:
    if not _decoupled(source):
        return "recomputed" if source.on("actor.recompute_logprob") else "behavior"
    loglinear = source.find("actor.prox_logp_method") == "loglinear"
    return "interpolated" if loglinear else "recomputed"


def _rejected(value: Any, source: Source) -> Outcome:
    def of(key: str, default: Any) -> Any:
        return source.find(f"actor.rejection_sampling.{key}", default)

    if value is None:
        return "off"
    if _anchor(source) == "behavior":
        return "with the sampler's policy as proximal policy there is nothing to weigh"
    if of("metric", "ratio") != "ratio":
        return "other scores of the ratio are rules of `algorithm.rejection`"
    levels = {"token": "token", "mean": "geometric", "sum": "sequence"}
    over = of("level", "token")
    level = levels.get(str(of("agg", "mean") if over == "sequence" else over))
    mode = {"mask": "mask", "clamp": "truncate"}.get(str(of("action", "mask")))
    if level is None or mode is None:
        return "allowed are token and sequence, mean and sum, mask and clamp"
    lower = source.number("actor.rejection_sampling.lower", 0.0)
    upper = source.number("actor.rejection_sampling.upper", 5.0)
    note = "the geometric mean decides and weighs there" if level == "geometric" else ""
    return rule.importance(level=level, mode=mode, upper=upper, lower=lower), note


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


_GROUPED, _RAW = {"algorithm.adv_estimator": "grpo"}, {"algorithm.adv_estimator": "raw"}
_NORMS: dict[tuple[str, str], Settings] = {
    ("none", "none"): _RAW,
    ("batch", "batch"): {**_RAW, "algorithm.reward_norm": "batch"},
    ("batch", "none"): {**_RAW, "algorithm.reward_norm": {"mean": "batch", "std": "none"}},
    ("group", "none"): {**_GROUPED, "algorithm.norm_adv_by_std_in_grpo": False},
    ("group", "group"): _GROUPED,
    ("group", "batch"): {**_GROUPED, "algorithm.adv_std_level": "batch_centered"},
}
"""Levels of a reward's mean and deviation -> what they are here."""


def _advantages(value: Any, source: Source) -> Outcome:
    mean, deviation = levels = _norms(source, "reward_norm")
    note = f"reward_norm: mean {mean}, deviation {deviation}"
    if source.on("actor.reward_norm.mean_leave1out"):
        if levels != ("group", "none"):
            return "leave-one-out means are of groups, without a deviation here (rloo)"
        return {"algorithm.adv_estimator": "rloo"}, note
    if levels not in _NORMS:
        return f"mean {mean} with deviation {deviation} is not here: grpo is used instead"
    return _NORMS[levels], note


def _whitened(value: Any, source: Source) -> Outcome:
    over = {("batch", "batch"): True, ("none", "none"): False}.get(_norms(source, "adv_norm"))
    if over is None:
        return "advantages are whitened over the whole batch here, or not"
    return {"algorithm.whiten_advantages": over}, "over all tokens of the step" if over else ""


_referred = rule.given("ref.path", "ref.experiment_name")


def _kl(value: Any, source: Source) -> Outcome:
    if number(value) == 0:
        return {"algorithm.add_token_level_kl": False}
    if not _referred(source):
        return "without a reference AReaL pays every token its own log-prob; here it is off"
    found = {"algorithm.add_token_level_kl": True, "algorithm.kl_ctrl.kl_coef": number(value)}
    return found, rule.SUMMED


def _one_ratio(source: Source) -> Settings:
    sides = rule.interval(source, "actor.eps_clip", "actor.eps_clip_higher")
    return {**sides, "algorithm.loss_agg_mode": "seq-mean-token-mean"}


def _scaling(source: Source) -> float:
    return abs(source.number("actor.reward_scaling", 1.0)) or 1.0


def _concurrent(value: Any, source: Source) -> Outcome:
    where = source.find("allocation_mode") or source.find("rollout.backend")
    engines = max(1, _sizes(str(where).partition("+")[0]).get("d", 1))
    responses = whole(value) * source.number("gconfig.n_samples", 1)
    note = f"groups on all engines there, responses on each of {engines} here"
    return {"cluster.engine.max_num_seqs": math.ceil(responses / engines)}, note


def _sizes(side: str) -> dict[str, int]:
    """Read `sglang:d4p1t1`, the sizes by their letters."""
    parts = re.findall(r"([dptc])(\d{1,4})", side.rpartition(":")[2])
    return {kind: int(size) for kind, size in parts}


def _engines(sizes: dict[str, int]) -> Settings:
    tensor_parallel = {"cluster.engine.tensor_parallel_size": sizes.get("t", 1)}
    return {"cluster.rollout_actors.max": sizes["d"], **tensor_parallel}


def _ranks(sizes: dict[str, int]) -> Settings:
    return {"learner.ranks": sizes["d"] * sizes.get("t", 1) * sizes.get("p", 1)}


def _allocation(value: Any, source: Source) -> Outcome:
    """Read `sglang:d4p1t1+d4p1t1`: engines, then the learner; or one side, of a backend."""
    sides = [_sizes(side) for side in text(value).split("+")]
    if len(sides) != 2 or not all("d" in one for one in sides):
        return "not two sides of the form d4p1t1"
    found = {"cluster.layout": "split", **_engines(sides[0]), **_ranks(sides[1])}
    return found, "engines d x t, then GPUs of the learner"


def _backend(keys: str, of: Any) -> rule.KeyRule:
    def convert(value: Any, source: Source) -> Outcome:
        sizes = _sizes(text(value))
        return (of(sizes), "d x t x p") if "d" in sizes else "not of the form fsdp:d4p1t1"

    return rule.by(keys, convert)


_overlong = rule.on("actor.overlong_reward_penalty")
_TOGETHER = "of use_decoupled_loss, recompute_logprob and prox_logp_method together"
_NO_PENALTY = "overlong_reward_penalty is off"

_RULES = (
    rule.answered("^critic.* ^critic"),
    rule.to("^cluster.fileroot", "run.dir", lambda value: f"{text(value).rstrip('/')}/{{name}}",
            "the directory of all runs there"),
    rule.same("^total_train_epochs").unless(
        rule.given("total_train_steps"), "total_train_steps ends it"),
    rule.data("^train_dataset.path", "task.train", "train_dataset.split"),
    rule.data("^valid_dataset.path", "task.eval", "valid_dataset.split"),
    rule.same("^train_dataset.max_length", "rollout.prompt_length",
              "longer prompts are left out there"),
    *rule.alike("""
^seed ^trial_name=run.name ^total_train_steps=run.total_steps ^actor.path ^actor.dtype
^train_dataset.batch_size ^gconfig.n_samples ^gconfig.max_new_tokens
^gconfig.temperature=rollout.temperature ^actor.temperature=rollout.temperature ^gconfig.top_p
^gconfig.top_k ^rollout.request_timeout ^actor.discount
^actor.kl_estimator=algorithm.kl_ctrl.kl_type ^actor.overlong_reward_penalty ^actor.eps_clip_higher
^actor.entropy_coeff ^actor.mb_spec.max_tokens_per_mb ^actor.optimizer.lr=learner.lr
^actor.optimizer.weight_decay ^actor.optimizer.lr_scheduler_type ^actor.optimizer.gradient_clipping
^actor.gradient_checkpointing ^evaluator.freq_steps=evaluation.every_steps
^eval_gconfig.temperature=evaluation.temperature ^saver.freq_steps=checkpoint.every_steps
^experiment_name=tracking.experiment ^vllm.max_num_seqs ^vllm.gpu_memory_utilization
^vllm.enforce_eager ^actor.sapo_tau_pos=algorithm.policy_loss.sapo.tau_pos
^actor.sapo_tau_neg=algorithm.policy_loss.sapo.tau_neg
    """),
    rule.same("^rollout.max_head_offpolicyness",
              note="a strict bound per token here, of admission there"),
    rule.by("^rollout.max_concurrent_rollouts", _concurrent),
    _backend("^rollout.backend", _engines),
    # ---- the loss
    rule.by("^actor.ppo_n_minibatches", _mini_batch),
    rule.clip("^actor.eps_clip", "actor.eps_clip_higher"),
    rule.dual_clip("^actor.c_clip"),
    rule.by("^actor.use_decoupled_loss ^actor.recompute_logprob ^actor.prox_logp_method",
            lambda value, source: ({"algorithm.anchor": _anchor(source)}, _TOGETHER)),
    rule.by("^actor.behav_imp_weight_cap", lambda value, source: (
        rule.importance(level="token", mode="mask", upper=number(value)),
        rule.spoken("behav_imp_weight_cap", value)))
    .when(_decoupled, "of the decoupled loss, which is off"),
    rule.by("^actor.rejection_sampling ^actor.rejection_sampling.*", _rejected),
    rule.ratio_level("^actor.importance_sampling_level", "sequence", _one_ratio,
                     "responses weigh by their length there, alike here; "),
    rule.answered("^actor.m2_threshold"),
    rule.if_true("^actor.use_sapo_loss", {"algorithm.policy_loss": "sapo"}),
    # ---- rewards and advantages
    rule.by("^actor.reward_norm ^actor.reward_norm.*", _advantages),
    rule.by("^actor.adv_norm ^actor.adv_norm.*", _whitened),
    rule.by("^actor.kl_ctl", _kl),
    rule.by("^actor.reward_clip", lambda value, source: (
        {"algorithm.reward_clip": number(value) / _scaling(source)},
        "of the raw reward here, of the scaled one there; before any statistic on both sides"))
    .unless(lambda source: bool(source.number("actor.reward_bias")),
            "around the shifted reward there, around 0 here"),
    rule.same("^actor.overlong_tokens").when(_overlong, _NO_PENALTY),
    rule.same("^actor.overlong_penalty_factor").when(_overlong, _NO_PENALTY),
    rule.betas("^actor.optimizer.beta1", "^actor.optimizer.beta2"),
    rule.share_of_steps("^actor.optimizer.warmup_steps_proportion", lambda source: 0),
    _backend("^actor.backend", _ranks),
    *rule.adapters("^actor.lora_rank", "^actor.lora_alpha", "^actor.target_modules",
                   "^actor.use_lora"),
    rule.by("^allocation_mode", _allocation),
    *rule.left(f"""
^ref.* ^teacher.* -- the reference is the initial policy, or `model.reference`
^config -- the file that it names is not read: AReaL's defaults are taken
^tokenizer_path -- the tokenizer is the model's
^train_dataset.split ^valid_dataset.split -- {rule.A_PART}
^train_dataset.* ^valid_dataset.* -- {rule.DATA_FILES}
^gconfig.greedy -- responses are sampled while training
^gconfig.max_tokens ^gconfig.min_new_tokens ^gconfig.* -- lengths are `rollout.prompt_length` and
    `rollout.response_length`; nothing else is sampled by
^eval_gconfig.* -- evaluations here are greedy, and `evaluation.n` sampled
^rollout.consumer_batch_size -- `rollout.rollout_batch_size` is what a step takes
^rollout.queue_size -- `replay.outstanding`, by itself
^rollout.* -- {rule.PROCESSES}
^actor.group_size ^actor.max_new_tokens -- `gconfig` counts
^actor.group_reward_norm ^actor.use_adv_norm -- `reward_norm` and `adv_norm` count
^actor.reward_scaling ^actor.reward_bias -- weights of rewards are `task.rewards`; a shift is the
    task's
^actor.gae_lambda -- of GAE, which needs a critic
^actor.mask_no_eos_with_zero -- it makes the reward 0 there; `algorithm.mask_truncated` leaves the
    row out of the loss
^actor.dynamic_sampling ^dynamic_bs -- `replay.filter_groups`
^actor.optimizer.* -- AdamW is the optimizer here
^actor.fsdp.* ^actor.megatron.* ^actor.archon.* ^actor.mb_spec.* -- {rule.LAYOUT}
^actor.use_lora ^actor.peft_type -- adapters are `model.lora`
^actor.weight_update_mode -- `weight_sync.backend` is auto: the fastest that there is
^actor.* -- how the learner is built there
^async_training -- 0 of `replay.max_staleness` is synchronous
^saver.* ^evaluator.* ^recover.* ^checkpointer.* -- periods are learner steps:
    `checkpoint.every_steps`, `evaluation.every_steps`
^sglang.* ^launcher.* ^scheduler.* ^enable_offload ^perf_tracer.* -- {rule.PROCESSES}
^vllm.* -- an argument of the engine: see `cluster.engine.vllm`
^stats_logger.* -- trackers are `tracking.mlflow` and `tracking.also`
^cluster.* -- the cluster decides: all nodes of the Ray cluster are used
    """),
)  # fmt: skip


def _implied(source: Source) -> Iterator[tuple[Settings, str]]:
    own = "AReaL's default"
    batch = int(source.number("train_dataset.batch_size", 1))
    low = source.number("actor.eps_clip", 0.2)
    yield {
        "rollout.group_size": 1, "rollout.response_length": 16384,
        "rollout.rollout_batch_size": batch, "replay.max_staleness": 0,
        "algorithm.clip_ratio_low": low, "algorithm.clip_ratio_high": low,
        "learner.lr": 1e-3, "learner.weight_decay": 0.01, "learner.betas": [0.9, 0.999],
    }, own  # fmt: skip
    yield {"learner.ppo_mini_batch_size": max(1, batch // 4)}, f"{own}: 4 minibatches"
    if "actor.kl_ctl" not in source.given and _referred(source):
        paid = {"algorithm.add_token_level_kl": True, "algorithm.kl_ctrl.kl_coef": 0.1}
        yield paid, f"{own}, with a reference"
    why = "the log-probs that AReaL's ratios are taken against"
    yield {"algorithm.anchor": _anchor(source)}, why
    if _norms(source, "reward_norm") == ("none", "none"):
        yield _RAW, "no reward_norm"
    if not source.has("actor.reward_clip", "actor.reward_bias"):
        yield {"algorithm.reward_clip": 20.0 / _scaling(source)}, own
    if not source.has("total_train_steps"):
        yield {"run.epochs": 1}, own
    if source.on("actor.use_lora"):
        yield {"model.lora.rank": 32}, own


AREAL = rule.Peer("AReaL", "areal", ("areal",), _RULES, _implied, signs=(
    "gconfig.* rollout.max_head_offpolicyness train_dataset.* actor.eps_clip "
    "actor.ppo_n_minibatches allocation_mode actor.use_decoupled_loss ^total_train_epochs "
    "stats_logger.* ^trial_name actor.mb_spec.* actor.reward_norm.*"))  # fmt: skip
