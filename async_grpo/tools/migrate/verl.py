"""verl's keys: `actor_rollout_ref.*`, `data.*`, `algorithm.*`, `trainer.*`, `async_training.*`.

Runs in: a terminal. Hides verl's names and what it does where a file says nothing. Invariant: a
number in a comment is verl's, a number in a setting is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from async_grpo.errors import SetupError
from async_grpo.tools.migrate import rule
from async_grpo.tools.migrate.rule import (
    Outcome,
    Settings,
    Untranslatable,
    boolean,
    number,
    pair,
    text,
    whole,
)
from async_grpo.tools.migrate.source import Source

_OFF, _BATCH = "off in verl", "rollout.rollout_batch_size"
_BYPASSED = "with bypass_mode the ratio itself is that to the sampler"


def _streams(source: Source) -> bool:
    """Whether it is the fully asynchronous trainer, whose batches are of minibatches."""
    return source.has("async_training.staleness_threshold", "async_training.require_batches")


def _staleness(value: Any, source: Source) -> Outcome:
    period = source.number("trigger_parameter_sync_step", 4)
    bound = math.ceil((1 + number(value)) * period) - 1
    return {"replay.max_staleness": max(0, bound)}, (
        f"a share of samples there: (1 + {number(value):g}) x {period:g} batches between two "
        "weight syncs are at most that old; a strict bound per token here"
    )


def _clip_ratio(value: Any, source: Source) -> Outcome:
    low, high = (source.find(f"actor.clip_ratio_{side}", 0.2) for side in ("low", "high"))
    return f"verl does not read it with clip_ratio_low and clip_ratio_high, here {low} and {high}"


def _kl_loss(value: Any, source: Source) -> Outcome:
    if str(value) in ("kl", "k1") and source.on("actor.use_kl_loss"):
        raise SetupError(
            f"{source.name}: the gradient of verl's kl_loss_type {value} does not depend on the "
            "reference, so it holds the policy to nothing; write what you want into the file: "
            "low_var_kl, kl+ (the same value, with the gradient of the divergence), or "
            "use_kl_loss false."
        )
    return rule.same("kl_loss_type").convert(value, source)


_LOSSES = {
    "vanilla": "ppo_clip", "gspo": "gspo_token", "sapo": "sapo", "gpg": "gpg",
    "clip_cov": "clip_cov", "kl_cov": "kl_cov", "geo_mean": "gmpo", "cispo": "cispo",
}  # fmt: skip


def _dppo(value: Any, source: Source) -> Outcome:
    if str(value) not in ("dppo_tv", "dppo_kl"):
        return rule.words("", "algorithm.policy_loss", _LOSSES).convert(value, source)
    options = {
        "divergence": str(value).removeprefix("dppo_"),
        "low": source.number("actor.clip_ratio_low", 0.2),
        "high": source.number("actor.clip_ratio_high", 0.2),
        "ratio_cap": source.number("actor.clip_ratio_c", 3.0),
    }
    named = {f"algorithm.policy_loss.dppo.{name}": option for name, option in options.items()}
    return {"algorithm.policy_loss": "dppo"} | named


_ESTIMATORS: dict[str, Any] = {
    name: name
    for name in ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "reinforce_plus_plus",
                 "reinforce_plus_plus_baseline", "remax", "opo", "gpg")
} | {
    "rloo_vectorized": "rloo",
    "gdpo": (rule.COMPONENTS, "components normalised one by one, then whitened"),
    "gae": rule.NO_CRITIC,
}  # fmt: skip


def _off_policy(source: Source) -> bool:
    """Whether the sampler's log-probs are the anchor."""
    usual = source.on("use_rollout_log_probs")
    usual = usual or (_streams(source) and not source.has("use_rollout_log_probs"))
    return source.on("bypass_mode") if source.has("bypass_mode") else usual


def _anchor(source: Source) -> str:
    return "behavior" if _off_policy(source) else "recomputed"


def _weighs(source: Source) -> bool:
    return str(source.find("rollout_is", "none")).lower() not in ("none", "null")


def _weights(value: Any, source: Source) -> Outcome:
    threshold = source.find("rollout_is_threshold", 2.0)
    level = text(source.find("rollout_is"))
    if isinstance(threshold, str) and "_" in threshold:
        low, high = pair(threshold)
        return rule.importance(level=level, mode="mask", lower=low, upper=high)
    return rule.importance(level=level, mode="truncate", upper=number(threshold))


_REDUCED = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max",
            "sequence": "sum", "geometric": "mean"}  # fmt: skip
"""Part of an option of `rollout_rs`, or one of older versions as a whole -> `reduce`."""


def _rejects(source: Source) -> bool:
    return str(source.find("rollout_rs", "none")).lower() != "none"


def _rejected(value: Any, source: Source) -> Outcome:
    """Join the rules of `rollout_rs` (`token_k1,seq_max_k3`, or one level of older versions) and
    the veto: a response stays where all of them keep it.
    """
    rules, key = list[Settings](), "rollout_token_veto_threshold"
    veto = source.find(key)
    if _rejects(source):
        key = "rollout_rs"
        names = [part.strip() for part in str(source.find("rollout_rs")).split(",")]
        bounds = str(source.find("rollout_rs_threshold", 2.0)).split(",")
        bounds *= len(names) if len(bounds) == 1 else 1
        if _off_policy(source):
            return _BYPASSED
        if len(bounds) != len(names):
            return f"{len(names)} options and {len(bounds)} thresholds"
        rules += [_rejection(*one, source) for one in zip(names, bounds, strict=True)]
    if veto is not None:
        rules.append({"score": "w", "reduce": "min", "lower": number(veto)})
    return {"algorithm.rejection": rules}, rule.spoken(key, value)


def _rejection(name: str, bound: str, source: Source) -> Settings:
    level, _, score = name.rpartition("_")
    if name in _REDUCED:
        high = number(bound)
        low = source.number("rollout_rs_threshold_lower", 1 / high if high > 0 else 0)
        return {"score": "w", "reduce": _REDUCED[name], "lower": low, "upper": high}
    if level not in _REDUCED or score not in ("k1", "k2", "k3"):
        raise Untranslatable(f"there is no rejection `{name}` here")
    found = {"score": score, "reduce": _REDUCED[level]}
    if score != "k1":
        return found | {"upper": number(bound)}
    low, high = pair(bound) if "_" in bound else (1 / max(number(bound), 1e-9), number(bound))
    if not 0 < low < high:
        raise Untranslatable(f"{bound} is no interval of ratios")
    return found | {"lower": round(math.log(low), 9), "upper": round(math.log(high), 9)}


def _row(source: Source) -> float:
    lengths = ("data.max_prompt_length", "data.max_response_length")
    return sum(source.number(name, 512) for name in lengths)


def _updates(source: Source) -> float:
    """Optimizer updates of one step."""
    batch = source.number("data.train_batch_size", 1)
    mini = source.number("actor.ppo_mini_batch_size", batch) or 1
    return max(1.0, batch // mini) * source.number("actor.ppo_epochs", 1)


def _warmup(value: Any, source: Source) -> Outcome:
    if whole(value) < 0:
        return "-1 leaves it to lr_warmup_steps_ratio"
    found = {"learner.warmup_steps": int(whole(value) * _updates(source))}
    return found, f"verl counts steps, we optimizer updates: x {_updates(source):g}"


def _rollout_gpus(value: Any, source: Source) -> Outcome:
    nodes = whole(source.find("rollout.nnodes", 1))
    size = whole(source.find("tensor_model_parallel_size", 1))
    actors = max(1, whole(value) * nodes // max(1, size))
    note = "GPUs of all nodes that generate, over GPUs per engine"
    return {"cluster.rollout_actors.max": actors, "cluster.layout": "split"}, note


def _prompts(value: Any, source: Source) -> Outcome:
    mini, batches = source.number("ppo_mini_batch_size", 256), source.number("require_batches", 1)
    steps = whole(value) / max(1, mini * batches)
    return (
        f"a count of prompts, {steps:g} learner steps: the run ends with `run.total_steps`, or "
        "after its epochs"
    )


_RULES = (
    rule.answered("^critic.* ^critic"),
    *rule.left("""
^reward_model.enable reward_model.model.* -- rewards come from the task's `score`
rollout.log_prob_* ref.log_prob_* -- one limit for all passes: `learner.tokens_per_micro_batch`
^actor_rollout_ref.ref.* -- the reference is the initial policy, or `model.reference`
    """),
    rule.same("data.train_batch_size").unless(
        lambda source: _streams(source) or source.number("data.train_batch_size", 1) == 0,
        "the batch is ppo_mini_batch_size x require_batches when streaming"),
    rule.data("data.train_files", "task.train"),
    rule.data("data.val_files", "task.eval"),
    *rule.alike("""
data.seed trainer.experiment_name trainer.default_local_dir trainer.total_training_steps
^total_training_steps actor_rollout_ref.model.path model.path model.trust_remote_code
rollout.n=rollout.group_size data.max_prompt_length data.max_response_length
multi_turn.max_assistant_turns=rollout.max_turns rollout.temperature=rollout.temperature
rollout.top_p rollout.top_k filter_groups.enable=replay.filter_groups.enable filter_groups.metric
algorithm.norm_adv_by_std_in_grpo algorithm.gamma kl_ctrl.type algorithm.kl_penalty kl_ctrl.kl_coef
kl_ctrl.target_kl kl_ctrl.horizon overlong_buffer.enable=algorithm.overlong_buffer.enable
overlong_buffer_cfg.enable=algorithm.overlong_buffer.enable overlong_buffer.len
overlong_buffer_cfg.len actor.clip_ratio_low actor.clip_ratio_high actor.clip_ratio_c
actor.use_kl_loss actor.kl_loss_coef actor.entropy_coeff actor.calculate_entropy actor.ppo_epochs
actor.optim.lr=learner.lr actor.optim.betas actor.optim.weight_decay actor.grad_clip
actor.optim.clip_grad enable_gradient_checkpointing
enable_activation_offload=learner.activation_offload
actor.ulysses_sequence_parallel_size=learner.sequence_parallel
async_training.trigger_parameter_sync_step trainer.test_freq trainer.val_before_train
data.val_max_samples=evaluation.max_samples rollout.val_kwargs.temperature=evaluation.temperature
trainer.save_freq trainer.max_actor_ckpt_to_keep trainer.resume_mode trainer.logger=tracking.mlflow
trainer.project_name rollout.tensor_model_parallel_size rollout.max_num_seqs
rollout.gpu_memory_utilization rollout.enforce_eager
policy_loss.tau_pos=algorithm.policy_loss.sapo.tau_pos
actor.tau_pos=algorithm.policy_loss.sapo.tau_pos
policy_loss.tau_neg=algorithm.policy_loss.sapo.tau_neg
actor.tau_neg=algorithm.policy_loss.sapo.tau_neg clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio
ppo_kl_coef
    """),
    rule.same("overlong_buffer.penalty_factor overlong_buffer_cfg.penalty_factor",
              note="floored at -factor here, as in the paper"),
    *rule.adapters("model.lora_rank", "model.lora_alpha", "model.target_modules"),
    # ---- algorithm
    rule.words("algorithm.adv_estimator", "algorithm.adv_estimator", _ESTIMATORS),
    rule.same("algorithm.use_kl_in_reward").unless(
        lambda source: source.on("algorithm.use_kl_in_reward") and source.on("actor.use_kl_loss"),
        "the KL is in the loss too; here it is punished once"),
    rule.same("filter_groups.max_num_gen_batches",
              note="counted in rejected batches of a step here"),
    rule.by("rollout_is rollout_is_threshold", _weights).unless(_off_policy, _BYPASSED)
        .when(_weighs, _OFF),
    rule.same("rollout_is_batch_normalize").unless(_off_policy, _OFF).when(_weighs, _OFF),
    rule.by("rollout_rs rollout_rs_threshold rollout_rs_threshold_lower", _rejected)
        .when(_rejects, _OFF),
    rule.by("rollout_token_veto_threshold", _rejected)
        .when(rule.given("rollout_token_veto_threshold"), _OFF),
    rule.by("bypass_mode use_rollout_log_probs",
            lambda value, source: {"algorithm.anchor": _anchor(source)}),
    # ---- actor
    rule.same("actor.ppo_mini_batch_size", note="prompts, which are groups"),
    rule.rows("actor.ppo_micro_batch_size_per_gpu actor.ppo_micro_batch_size", _row)
        .unless(rule.on("actor.use_dynamic_bsz"), "with use_dynamic_bsz verl counts tokens"),
    rule.same("actor.ppo_max_token_len_per_gpu")
        .when(rule.on("actor.use_dynamic_bsz"), "without use_dynamic_bsz verl counts sequences"),
    rule.by("actor.clip_ratio", _clip_ratio),
    rule.by("policy_loss.loss_mode", _dppo),
    rule.same("actor.loss_agg_mode", note="divided by global counts here"),
    rule.by("actor.kl_loss_type", _kl_loss),
    rule.by("actor.optim.lr_warmup_steps", _warmup),
    rule.share_of_steps("actor.optim.lr_warmup_steps_ratio", lambda source: (
        source.number("total_training_steps") * _updates(source))
    ).unless(lambda source: source.number("actor.optim.lr_warmup_steps", -1) >= 0,
             "lr_warmup_steps counts"),
    rule.same("actor.optim.warmup_style actor.optim.lr_scheduler_type",
              note="counted in optimizer updates here"),
    rule.words("actor.strategy", "learner.zero_stage", {
        "fsdp": 3, "fsdp2": 3, "megatron": "- DeepSpeed shards here, by `learner.zero_stage`",
    }, "FSDP shards parameters, as ZeRO-3 does; a lower stage is faster where they fit"),
    rule.words("actor.router_replay.mode", "learner.routing_replay",
               {"disabled": "off", "R2": "r2", "R3": "r3"}),
    rule.same("rollout.val_kwargs.n", "evaluation.n", "besides the greedy one here")
        .when(rule.on("val_kwargs.do_sample"), "without do_sample evaluations are greedy"),
    rule.by("rollout.val_kwargs.do_sample", lambda value, source: (
        "evaluations here give greedy and sampled accuracy" if boolean(value)
        else ({"evaluation.n": 0}, "greedy only"))),
    rule.by("^rollout.n_gpus_per_node", _rollout_gpus),
    rule.by("^rollout.total_rollout_steps", _prompts),
    rule.by("async_training.staleness_threshold", _staleness),
    rule.by("async_training.require_batches", lambda value, source: (
        {_BATCH: int(source.number("actor.ppo_mini_batch_size") * whole(value))},
        "ppo_mini_batch_size x require_batches, in groups")),
    rule.to("sampler.max_off_policy_threshold", "replay.max_staleness",
            lambda value: max(0, whole(value) - 1), "an age of 1 there is a staleness of 0 here"),
    rule.words("sampler.max_off_policy_strategy", "replay.on_stale",
               {"drop": "expire", "wait": "wait"}),
    rule.same("trainer.total_epochs ^total_epochs")
        .unless(rule.given("total_training_steps"), "total_training_steps counts"),
    rule.by("trainer.n_gpus_per_node", lambda value, source: (
        {"learner.ranks": int(whole(value) * source.number("trainer.nnodes", 1))},
        "GPUs of all nodes that train")),
    *rule.left(f"""
data.gen_batch_size -- engines generate all the time here, and rejected groups are replaced one by
    one
data.filter_overlong_prompts data.truncation -- a longer prompt is refused here
data.* -- {rule.DATA_FILES}
custom_reward_function.* reward.custom_reward_function.* -- its function runs unchanged, as
    `task.name: module:function` (docs/how-to/data.md#columns)
overlong_buffer.log overlong_buffer_cfg.log -- it is logged as `rollout/overlong`
reward_manager reward_manager.* -- the task scores
model.use_remove_padding -- rows are always packed here
model.* -- how verl loads and computes the model
algorithm.lam -- of GAE, which needs a critic
algorithm.pf_ppo.* use_pf_ppo -- preference feedback is not here
use_dynamic_bsz log_prob_use_dynamic_bsz -- micro-batches are always counted in tokens
loss_scale_factor -- the constant of seq-mean-token-sum-norm is the response length
actor.optim.* -- AdamW is the optimizer here, and schedules fall to 0
actor.shuffle -- minibatches are drawn by the seed
multi_turn.* -- episodes: `environment.tools`, or a task with an environment
rollout.name -- the engine is vLLM
rollout.prompt_length rollout.response_length -- `data.max_prompt_length` and
    `data.max_response_length` count
rollout.calculate_log_probs -- engines always return their log-probs
^rollout.nnodes -- counted in `cluster.rollout_actors.max`
rollout.* -- an argument of the engine: see `cluster.engine`, `cluster.engine.vllm`
async_training.use_trainer_do_validate -- engines evaluate
async_training.partial_rollout -- responses always go on under new weights here
async_training.compute_prox_log_prob -- `algorithm.anchor: recomputed` does that
trainer.val_only -- `async-grpo eval`
trainer.critic_warmup -- there is no critic here
trainer.balance_batch -- ranks always get the same load
trainer.use_v1 trainer.v1.* -- one trainer, whose `replay.max_staleness` is its mode
*.fsdp_config.* *.megatron.* hybrid_engine -- {rule.LAYOUT}
^ray_kwargs.* ^ray_init.* ^global_profiler.* *.profiler.* ^transfer_queue.* -- how verl starts and
    measures its processes
^config_name ^config_path ^defaults* -- the files that it names are not read: verl's defaults are
    taken
^hydra.* -- of the program
    """),
)  # fmt: skip


def _implied(source: Source) -> Iterator[tuple[Settings, str]]:
    own = "verl's default"
    streamed = int(source.number("actor.ppo_mini_batch_size", 256))
    if not source.has("algorithm.adv_estimator"):
        yield {"algorithm.adv_estimator": "grpo"}, f"{own} is gae, which needs a critic"
    yield (
        {
            "rollout.group_size": 1,
            "rollout.rollout_batch_size": streamed if _streams(source) else 1024,
            "learner.ppo_mini_batch_size": 256,
            "learner.betas": [0.9, 0.999],
            "learner.weight_decay": 0.01,
        },
        own,
    )
    loss = str(source.find("policy_loss.loss_mode", "vanilla"))
    if loss == "vanilla":
        yield {"algorithm.dual_clip_loss": True}, "always on in verl"
    if loss not in ("sapo", "gpg", "kl_cov", "dppo_tv", "dppo_kl"):
        yield {"algorithm.clip_ratio_low": 0.2, "algorithm.clip_ratio_high": 0.2}, own
    if loss == "gspo":
        yield {"algorithm.loss_agg_mode": "seq-mean-token-mean"}, "always with gspo in verl"
    why = "the log-probs that verl's ratios are taken against"
    yield {"algorithm.anchor": _anchor(source)}, why
    off_by_one = "one_step_off" in source.program
    why = "one step off" if off_by_one else "verl's synchronous trainer; 1 and more overlaps"
    yield {"replay.max_staleness": int(off_by_one)}, why
    if not source.has("total_training_steps"):
        yield {"run.epochs": 30}, own
    if not source.has("rollout.n_gpus_per_node") and source.has("trainer.n_gpus_per_node"):
        yield {"cluster.layout": "colocated"}, "engines and learner share GPUs in verl"


VERL = rule.Peer("verl", "verl", ("verl",), _RULES, _implied, signs=(
    "actor_rollout_ref.* data.train_batch_size data.max_response_length trainer.total_epochs "
    "trainer.default_local_dir actor.ppo_mini_batch_size algorithm.adv_estimator "
    "trainer.n_gpus_per_node async_training.* data.train_files actor.clip_ratio actor.use_kl_loss "
    "actor.kl_loss_type actor.clip_ratio_low actor.entropy_coeff actor.ppo_epochs"))  # fmt: skip
