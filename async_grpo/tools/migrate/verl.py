"""verl's keys: `actor_rollout_ref.*`, `data.*`, `algorithm.*`, `trainer.*`, `async_training.*`.

Runs in: a terminal. Hides verl's names and what it does where a file says nothing. Invariant: a
number in a comment is verl's, a number in a setting is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from async_grpo.errors import SetupError
from async_grpo.tools.migrate.common import (
    DATA_FILES,
    LAYOUT_OF_OTHERS,
    adapters,
    data,
    directory,
    experiment,
    file_name,
    kl_word,
    mlflow_among,
    off_is_zero,
    resume,
)
from async_grpo.tools.migrate.rules import (
    Meant,
    Peer,
    Untranslatable,
    answered,
    boolean,
    by,
    every,
    none,
    number,
    pair,
    same,
    spoken,
    switch,
    text,
    to,
    whole,
    words,
)
from async_grpo.tools.migrate.source import Source

_NO_CORRECTION = "off in verl"


def _streams(source: Source) -> bool:
    """Whether it is the fully asynchronous trainer, whose batches are of minibatches."""
    return source.has("async_training.staleness_threshold", "async_training.require_batches")


def _batch(value: Any, source: Source) -> Meant:
    if _streams(source):
        mini, batches = source.number("actor.ppo_mini_batch_size"), whole(value)
        note = "ppo_mini_batch_size x require_batches, in groups"
        return Meant({"rollout.rollout_batch_size": int(mini * batches)}, note)
    raise Untranslatable("the batch is `data.train_batch_size` outside of the streaming trainer")


def _train_batch(value: Any, source: Source) -> Meant:
    if whole(value) == 0 or _streams(source):
        raise Untranslatable("the batch is ppo_mini_batch_size x require_batches when streaming")
    return Meant({"rollout.rollout_batch_size": whole(value)}, "prompts, which are groups")


def _gen_batch(value: Any, source: Source) -> Meant:
    raise Untranslatable(
        "engines generate all the time here, and rejected groups are replaced one by one"
    )


def _staleness(value: Any, source: Source) -> Meant:
    period = source.number("trigger_parameter_sync_step", 4)
    bound = math.ceil((1 + number(value)) * period) - 1
    return Meant(
        {"replay.max_staleness": max(0, bound)},
        f"a share of samples there: (1 + {number(value):g}) x {period:g} batches between two "
        "publications are at most that old; a strict bound per token here",
    )


def _age(value: Any, source: Source) -> Meant:
    note = "an age of 1 there is a lag of 0 here"
    return Meant({"replay.max_staleness": max(0, whole(value) - 1)}, note)


def _clip_ratio(value: Any, source: Source) -> Meant:
    low, high = source.find("actor.clip_ratio_low", 0.2), source.find("actor.clip_ratio_high", 0.2)
    raise Untranslatable(
        f"verl does not read it beside clip_ratio_low and clip_ratio_high, here {low} and {high}"
    )


def _kl_loss(value: Any, source: Source) -> Meant:
    if str(value) in ("kl", "k1") and str(source.find("actor.use_kl_loss")).lower() == "true":
        raise SetupError(
            f"{source.name}: the gradient of verl's kl_loss_type {value} does not depend on the "
            "reference, so it holds the policy to nothing; write what you want into the file: "
            "low_var_kl, kl+ (the same value, with the gradient of the divergence), or "
            "use_kl_loss false."
        )
    return kl_word("actor.kl_loss_type").convert(value, source)


_LOSSES = {
    "vanilla": "ppo_clip",
    "gspo": "gspo_token",
    "sapo": "sapo",
    "gpg": "gpg",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "geo_mean": "gmpo",
    "cispo": "cispo",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
}


def _loss(value: Any, source: Source) -> Meant:
    name = _LOSSES.get(str(value))
    if name is None:
        raise Untranslatable(f"there is no loss `{value}` here; ppo_clip is in its place")
    found: dict[str, Any] = {"algorithm.policy_loss": name}
    if name == "dppo":
        found |= {
            "algorithm.policy_loss.dppo.divergence": str(value).removeprefix("dppo_"),
            "algorithm.policy_loss.dppo.low": source.number("actor.clip_ratio_low", 0.2),
            "algorithm.policy_loss.dppo.high": source.number("actor.clip_ratio_high", 0.2),
            "algorithm.policy_loss.dppo.ratio_cap": source.number("actor.clip_ratio_c", 3.0),
        }
    return Meant(found)


_ESTIMATORS = {
    name: name
    for name in (
        "grpo",
        "grpo_vectorized",
        "grpo_passk",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "opo",
        "gpg",
    )
} | {
    "rloo_vectorized": "rloo",
    "gae": "- it needs a critic, and there is none here: grpo is in its place",
}


def _off_policy(source: Source) -> bool:
    """Whether the sampler's log-probs are the anchor."""
    given = source.find("bypass_mode")
    if given is None:
        given = source.find("use_rollout_log_probs", _streams(source))
    return str(given).lower() == "true"


def _weights(value: Any, source: Source) -> Meant:
    if str(value).lower() in ("none", "null"):
        raise Untranslatable(_NO_CORRECTION)
    if _off_policy(source):
        raise Untranslatable("with bypass_mode the ratio itself is that to the sampler")
    threshold = source.find("rollout_is_threshold", 2.0)
    found: dict[str, Any] = {"algorithm.importance.level": text(value)}
    if isinstance(threshold, str) and "_" in threshold:
        low, high = pair(threshold)
        found |= {"algorithm.importance.mode": "mask", "algorithm.importance.lower": low}
    else:
        high = number(threshold)
        found["algorithm.importance.mode"] = "truncate"
    return Meant(found | {"algorithm.importance.upper": high})


def _threshold(value: Any, source: Source) -> Meant:
    if str(source.find("rollout_is")).lower() in ("none", "null"):
        raise Untranslatable(_NO_CORRECTION)
    if isinstance(value, str) and "_" in value:
        low, high = pair(value)
        return Meant({"algorithm.importance.lower": low, "algorithm.importance.upper": high})
    return Meant({"algorithm.importance.upper": number(value)})


_REDUCED = {
    "token": "token",
    "seq_sum": "sum",
    "seq_mean": "mean",
    "seq_max": "max",
    "sequence": "sum",
    "geometric": "mean",
}
"""Part of an option of `rollout_rs`, or one of older versions as a whole -> `reduce`."""


def _ruled(source: Source) -> bool:
    return str(source.find("rollout_rs", "none")).lower() != "none"


def _rules(source: Source) -> dict[str, Any]:
    """Join the rules of `rollout_rs` (`token_k1,seq_max_k3`, or one level of older versions) and
    the veto: a response stays where all of them keep it.
    """
    rules = []
    if _ruled(source):
        names = [part.strip() for part in str(source.find("rollout_rs")).split(",")]
        given = str(source.find("rollout_rs_threshold", 2.0)).split(",")
        bounds = given * len(names) if len(given) == 1 else given
        if _off_policy(source):
            raise Untranslatable("with bypass_mode the ratio itself is that to the sampler")
        if len(bounds) != len(names):
            raise Untranslatable(f"{len(names)} options and {len(bounds)} thresholds")
        rules += [_rule(name, bound, source) for name, bound in zip(names, bounds, strict=True)]
    veto = source.find("rollout_token_veto_threshold")
    if veto is not None:
        rules.append({"score": "w", "reduce": "min", "lower": number(veto)})
    return {"algorithm.rejection": rules}


def _rejected(value: Any, source: Source) -> Meant:
    if not _ruled(source):
        return Meant({}, _NO_CORRECTION)
    return Meant(_rules(source), spoken(["rollout_rs"], value))


def _rule(name: str, bound: str, source: Source) -> dict[str, Any]:
    level, _, score = name.rpartition("_")
    if name in _REDUCED:
        high = number(bound)
        low = source.number("rollout_rs_threshold_lower", 1 / high if high > 0 else 0)
        return {"score": "w", "reduce": _REDUCED[name], "lower": low, "upper": high}
    if level not in _REDUCED or score not in ("k1", "k2", "k3"):
        raise Untranslatable(f"there is no rejection `{name}` here")
    rule = {"score": score, "reduce": _REDUCED[level]}
    if score != "k1":
        return rule | {"upper": number(bound)}
    low, high = pair(bound) if "_" in bound else (1 / max(number(bound), 1e-9), number(bound))
    if not 0 < low < high:
        raise Untranslatable(f"{bound} is no interval of ratios")
    return rule | {"lower": round(math.log(low), 9), "upper": round(math.log(high), 9)}


def _veto(value: Any, source: Source) -> Meant:
    if value is None:
        return Meant({}, _NO_CORRECTION)
    return Meant(_rules(source), spoken(["rollout_token_veto_threshold"], value))


def _normalized(value: Any, source: Source) -> Meant:
    if str(source.find("rollout_is")).lower() in ("none", "null") or _off_policy(source):
        return Meant({}, _NO_CORRECTION)
    return Meant({"algorithm.importance.normalize": boolean(value)})


def _estimator(value: Any, source: Source) -> Meant:
    if str(value) == "gdpo":
        return Meant(
            {
                "algorithm.adv_estimator": "raw",
                "algorithm.whiten_advantages": True,
                "task.rewards_norm": "group",
            },
            "components normalised one by one, then whitened",
        )
    known = words("algorithm.adv_estimator", "algorithm.adv_estimator", _ESTIMATORS)
    return known.convert(value, source)


def _kl_in_reward(value: Any, source: Source) -> Meant:
    if boolean(value) and str(source.find("actor.use_kl_loss")).lower() == "true":
        raise Untranslatable("the KL is in the loss too; here it is punished once")
    return Meant({"algorithm.add_token_level_kl": boolean(value)})


def _micro_batch(value: Any, source: Source) -> Meant:
    if str(source.find("actor.use_dynamic_bsz", False)).lower() == "true":
        raise Untranslatable("with use_dynamic_bsz verl counts tokens")
    row = source.number("data.max_prompt_length", 512) + source.number(
        "data.max_response_length", 512
    )
    note = f"rows there, tokens here: x {row:g}, the longest row"
    return Meant({"learner.tokens_per_micro_batch": int(whole(value) * row)}, note)


def _tokens(value: Any, source: Source) -> Meant:
    if str(source.find("actor.use_dynamic_bsz", False)).lower() != "true":
        raise Untranslatable("without use_dynamic_bsz verl counts rows")
    return Meant({"learner.tokens_per_micro_batch": whole(value)})


def _updates(source: Source) -> float:
    """Optimizer updates of one step."""
    batch = source.number("data.train_batch_size", 1)
    mini = source.number("actor.ppo_mini_batch_size", batch) or 1
    return max(1.0, batch // mini) * source.number("actor.ppo_epochs", 1)


def _warmup(value: Any, source: Source) -> Meant:
    if whole(value) < 0:
        raise Untranslatable("-1 leaves it to lr_warmup_steps_ratio")
    updates = int(whole(value) * _updates(source))
    note = f"verl counts steps, we optimizer updates: x {_updates(source):g}"
    return Meant({"learner.warmup_steps": updates}, note)


def _warmup_share(value: Any, source: Source) -> Meant:
    steps = source.number("total_training_steps")
    if source.number("actor.optim.lr_warmup_steps", -1) >= 0:
        raise Untranslatable("lr_warmup_steps counts")
    if steps <= 0 and number(value):
        raise Untranslatable("a share of steps whose number is not in the file; set it in updates")
    updates = round(number(value) * steps * _updates(source))
    return Meant({"learner.warmup_steps": updates}, "a share of all steps there, updates here")


def _steps(value: Any, source: Source) -> Meant:
    return Meant({"run.total_steps": whole(value)})


def _epochs(value: Any, source: Source) -> Meant:
    if source.has("total_training_steps"):
        raise Untranslatable("total_training_steps counts")
    return Meant({"run.epochs": whole(value)})


def _gpus(value: Any, source: Source) -> Meant:
    ranks = whole(value) * source.number("trainer.nnodes", 1)
    return Meant({"learner.ranks": int(ranks)}, "GPUs of all nodes that train")


def _rollout_gpus(value: Any, source: Source) -> Meant:
    nodes = whole(source.find("rollout.nnodes", 1))
    size = whole(source.find("tensor_model_parallel_size", 1))
    note = "GPUs of all nodes that generate, over GPUs per engine"
    actors = max(1, whole(value) * nodes // max(1, size))
    return Meant({"cluster.rollout_actors.max": actors, "cluster.layout": "split"}, note)


def _prompts(value: Any, source: Source) -> Meant:
    mini, batches = source.number("ppo_mini_batch_size", 256), source.number("require_batches", 1)
    steps = whole(value) / max(1, mini * batches)
    raise Untranslatable(
        f"a count of prompts, {steps:g} learner steps: the run ends with `run.total_steps`, or "
        "after its epochs"
    )


def _samples(value: Any, source: Source) -> Meant:
    if str(source.find("val_kwargs.do_sample", False)).lower() != "true":
        return Meant({}, "without do_sample evaluations are greedy")
    return Meant({"evaluation.n": whole(value)}, "beside the greedy one here")


def _sampled(value: Any, source: Source) -> Meant:
    if boolean(value):
        return Meant({}, "evaluations here give greedy and sampled accuracy")
    return Meant({"evaluation.n": 0}, "greedy only")


_RULES = (
    answered("^critic.* ^critic"),
    none("^reward_model.enable reward_model.model.*", "rewards come from the task's `score`"),
    none("rollout.log_prob_* ref.log_prob_*", "one limit for all passes: "
         "`learner.tokens_per_micro_batch`"),
    none("^actor_rollout_ref.ref.*", "the reference is the initial policy, or `model.reference`"),
    # ---- data
    by("data.train_batch_size", _train_batch),
    by("data.gen_batch_size", _gen_batch),
    data("data.train_files", "task.train"),
    data("data.val_files", "task.eval"),
    same("data.max_prompt_length"),
    same("data.max_response_length"),
    same("data.val_max_samples", "evaluation.max_samples"),
    same("data.seed", "seed"),
    none("data.filter_overlong_prompts data.truncation", "a longer prompt is refused here"),
    none("data.*", DATA_FILES),
    none("custom_reward_function.* reward.custom_reward_function.*", "write it as the `score` of a "
         "task (docs/tasks.md)"),
    # ---- rewards
    switch("overlong_buffer.enable overlong_buffer_cfg.enable", "algorithm.overlong_buffer.enable"),
    same("overlong_buffer.len overlong_buffer_cfg.len", "algorithm.overlong_buffer.len"),
    same(
        "overlong_buffer.penalty_factor overlong_buffer_cfg.penalty_factor",
        "algorithm.overlong_buffer.penalty_factor",
        "floored at -factor here, as in the paper",
    ),
    none("overlong_buffer.log overlong_buffer_cfg.log", "it is logged as `rollout/overlong`"),
    none("reward_manager reward_manager.*", "the task scores"),
    # ---- model
    same("actor_rollout_ref.model.path model.path", "model.path"),
    *adapters("model.lora_rank", "model.lora_alpha", "model.target_modules"),
    switch("model.trust_remote_code", "model.trust_remote_code"),
    switch("enable_gradient_checkpointing"),
    switch("enable_activation_offload", "learner.activation_offload"),
    none("model.use_remove_padding", "rows are always packed here"),
    none("model.*", "how verl loads and computes the model"),
    # ---- algorithm
    by("algorithm.adv_estimator", _estimator),
    switch("algorithm.norm_adv_by_std_in_grpo", "algorithm.norm_adv_by_std_in_grpo"),
    same("algorithm.gamma", "algorithm.gamma"),
    none("algorithm.lam", "of GAE, which needs a critic"),
    by("algorithm.use_kl_in_reward", _kl_in_reward),
    words("algorithm.kl_penalty", "algorithm.kl_ctrl.kl_type", {
        "kl": "kl", "k1": "kl", "abs": "abs", "mse": "mse", "k2": "mse", "low_var_kl": "low_var_kl",
        "k3": "low_var_kl",
    }),
    same("kl_ctrl.type", "algorithm.kl_ctrl.type"),
    same("kl_ctrl.kl_coef", "algorithm.kl_ctrl.kl_coef"),
    same("kl_ctrl.horizon", "algorithm.kl_ctrl.horizon"),
    same("kl_ctrl.target_kl", "algorithm.kl_ctrl.target_kl"),
    switch("filter_groups.enable", "replay.filter_groups.enable"),
    same("filter_groups.metric", "replay.filter_groups.metric"),
    same(
        "filter_groups.max_num_gen_batches",
        "replay.filter_groups.max_num_gen_batches",
        "counted in rejected batches of a step here",
    ),
    by("rollout_is", _weights),
    by("rollout_is_threshold", _threshold),
    by("rollout_is_batch_normalize", _normalized),
    by("rollout_rs rollout_rs_threshold rollout_rs_threshold_lower", _rejected),
    by("rollout_token_veto_threshold", _veto),
    by("bypass_mode use_rollout_log_probs", lambda value, source: Meant(
        {"algorithm.anchor": "behavior" if _off_policy(source) else "recomputed"}
    )),
    none("algorithm.pf_ppo.* use_pf_ppo", "preference feedback is not here"),
    # ---- actor
    same("actor.ppo_mini_batch_size", "learner.ppo_mini_batch_size", "prompts, which are groups"),
    by("actor.ppo_micro_batch_size_per_gpu actor.ppo_micro_batch_size", _micro_batch),
    by("actor.ppo_max_token_len_per_gpu", _tokens),
    none("use_dynamic_bsz log_prob_use_dynamic_bsz", "micro-batches are always counted in tokens"),
    same("actor.ppo_epochs", "learner.ppo_epochs"),
    by("actor.clip_ratio", _clip_ratio),
    same("actor.clip_ratio_low", "algorithm.clip_ratio_low"),
    same("actor.clip_ratio_high", "algorithm.clip_ratio_high"),
    same("actor.clip_ratio_c", "algorithm.clip_ratio_c"),
    by("policy_loss.loss_mode", _loss),
    same("clip_cov_ratio"),
    same("clip_cov_lb"),
    same("clip_cov_ub"),
    same("kl_cov_ratio"),
    same("ppo_kl_coef"),
    same("policy_loss.tau_pos actor.tau_pos", "algorithm.policy_loss.sapo.tau_pos"),
    same("policy_loss.tau_neg actor.tau_neg", "algorithm.policy_loss.sapo.tau_neg"),
    same("actor.loss_agg_mode", "algorithm.loss_agg_mode", "divided by global counts here"),
    none("loss_scale_factor", "the constant of seq-mean-token-sum-norm is the response length"),
    switch("actor.use_kl_loss", "algorithm.use_kl_loss"),
    same("actor.kl_loss_coef", "algorithm.kl_loss_coef"),
    by("actor.kl_loss_type", _kl_loss),
    same("actor.entropy_coeff"),
    same("actor.grad_clip actor.optim.clip_grad", "learner.grad_clip"),
    same("actor.optim.lr", "learner.lr"),
    same("actor.optim.betas", "learner.betas"),
    same("actor.optim.weight_decay", "learner.weight_decay"),
    by("actor.optim.lr_warmup_steps", _warmup),
    by("actor.optim.lr_warmup_steps_ratio", _warmup_share),
    words("actor.optim.warmup_style actor.optim.lr_scheduler_type", "learner.schedule", {
        "constant": "constant", "cosine": "cosine", "linear": "linear",
    }, "counted in optimizer updates here"),
    none("actor.optim.*", "AdamW is the optimizer here, and schedules fall to 0"),
    words("actor.strategy", "learner.zero_stage", {
        "fsdp": 3, "fsdp2": 3, "megatron": "- DeepSpeed shards here, by `learner.zero_stage`",
    }, "FSDP shards parameters, as ZeRO-3 does; a lower stage is faster where they fit"),
    none("actor.shuffle", "minibatches are drawn by the seed"),
    # ---- rollout
    same("rollout.n", "rollout.group_size"),
    same("rollout.temperature", "rollout.temperature"),
    same("rollout.top_p", "rollout.top_p"),
    to("rollout.top_k", "rollout.top_k", off_is_zero),
    by("rollout.val_kwargs.n", _samples),
    same("rollout.val_kwargs.temperature", "evaluation.temperature"),
    by("rollout.val_kwargs.do_sample", _sampled),
    same("rollout.tensor_model_parallel_size"),
    same("rollout.gpu_memory_utilization", "cluster.engine.gpu_memory_utilization"),
    same("rollout.max_num_seqs", "cluster.engine.max_num_seqs"),
    switch("rollout.enforce_eager", "cluster.engine.enforce_eager"),
    same("multi_turn.max_assistant_turns", "rollout.max_turns"),
    none("multi_turn.*", "episodes: `environment.tools`, or a task with an environment"),
    none("rollout.name", "the engine is vLLM"),
    none("rollout.prompt_length rollout.response_length", "`data.max_prompt_length` and "
         "`data.max_response_length` count"),
    none("rollout.calculate_log_probs", "engines always return their log-probs"),
    by("^rollout.n_gpus_per_node", _rollout_gpus),
    none("^rollout.nnodes", "counted in `cluster.rollout_actors.max`"),
    by("^rollout.total_rollout_steps", _prompts),
    none("rollout.*", "an argument of the engine: see `cluster.engine`, `cluster.engine.vllm`"),
    # ---- asynchronous training
    by("async_training.staleness_threshold", _staleness),
    same("async_training.trigger_parameter_sync_step"),
    by("async_training.require_batches", _batch),
    none("async_training.use_trainer_do_validate", "engines evaluate"),
    none("async_training.partial_rollout", "responses always go on under new weights here"),
    none("async_training.compute_prox_log_prob", "`algorithm.anchor: recomputed` does that"),
    by("sampler.max_off_policy_threshold", _age),
    words("sampler.max_off_policy_strategy", "replay.on_stale", {"drop": "expire", "wait": "wait"}),
    # ---- trainer
    by("total_training_steps", _steps),
    by("total_epochs", _epochs),
    experiment("trainer.project_name"),
    file_name("trainer.experiment_name"),
    directory("trainer.default_local_dir"),
    by("trainer.n_gpus_per_node", _gpus),
    every("trainer.save_freq", "checkpoint.every_steps"),
    every("trainer.test_freq", "evaluation.every_steps"),
    switch("trainer.val_before_train"),
    same("trainer.max_actor_ckpt_to_keep"),
    resume("trainer.resume_mode"),
    mlflow_among("trainer.logger"),
    none("trainer.val_only", "`async-grpo eval`"),
    none("trainer.critic_warmup", "there is no critic here"),
    none("trainer.balance_batch", "ranks always get the same load"),
    none("trainer.use_v1 trainer.v1.*", "one trainer, whose `replay.max_staleness` is its mode"),
    none("*.fsdp_config.* *.megatron.* hybrid_engine", LAYOUT_OF_OTHERS),
    none("^ray_kwargs.* ^ray_init.* ^global_profiler.* *.profiler.* ^transfer_queue.*",
         "how verl starts and measures its processes"),
    none("^config_name ^config_path ^defaults*", "the files that it names are not read: verl's "
         "defaults are taken"),
    none("^hydra.*", "of the program"),
)  # fmt: skip


def _implied(source: Source) -> Iterable[tuple[str, Any, str]]:
    """Say what verl does where a file says nothing, and we do not."""
    own = "verl's default"
    if not source.has("algorithm.adv_estimator"):
        yield "algorithm.adv_estimator", "grpo", f"{own} is gae, which needs a critic"
    yield "rollout.group_size", 1, own
    streamed = source.number("actor.ppo_mini_batch_size", 256)
    yield "rollout.rollout_batch_size", int(streamed) if _streams(source) else 1024, own
    yield "learner.ppo_mini_batch_size", 256, own
    loss = str(source.find("policy_loss.loss_mode", "vanilla"))
    if loss == "vanilla":
        yield "algorithm.dual_clip_loss", True, "always on in verl"
    if loss not in ("sapo", "gpg", "kl_cov", "dppo_tv", "dppo_kl"):
        yield "algorithm.clip_ratio_low", 0.2, own
        yield "algorithm.clip_ratio_high", 0.2, own
    if loss == "gspo":
        yield "algorithm.loss_agg_mode", "seq-mean-token-mean", "always with gspo in verl"
    anchored = "behavior" if _off_policy(source) else "recomputed"
    yield "algorithm.anchor", anchored, "the log-probs that verl's ratios are taken against"
    off_by_one = "one_step_off" in source.program
    why = "one step off" if off_by_one else "verl's synchronous trainer; 1 and more overlaps"
    yield "replay.max_staleness", int(off_by_one), why
    yield "learner.betas", [0.9, 0.999], own
    yield "learner.weight_decay", 0.01, own
    if not source.has("total_training_steps"):
        yield "run.epochs", 30, own
    if not source.has("rollout.n_gpus_per_node") and source.has("trainer.n_gpus_per_node"):
        yield "cluster.layout", "colocated", "engines and learner share GPUs in verl"


VERL = Peer(
    name="verl",
    option="verl",
    signs="actor_rollout_ref.* data.train_batch_size data.max_response_length trainer.total_epochs "
    "trainer.default_local_dir actor.ppo_mini_batch_size algorithm.adv_estimator "
    "trainer.n_gpus_per_node async_training.* data.train_files actor.clip_ratio actor.use_kl_loss "
    "actor.kl_loss_type actor.clip_ratio_low actor.entropy_coeff actor.ppo_epochs",
    programs=("verl",),
    rules=_RULES,
    implied=_implied,
)
