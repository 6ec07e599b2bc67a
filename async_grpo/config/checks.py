"""Rules that span several settings.

Runs in: any process (imports what the settings import). Hides which traits decide what belongs
together. Invariant: each rule yields one sentence that names the keys, their values and what is
allowed; a configuration that passes can be trained as far as its numbers tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from async_grpo.algo.catalog import ESTIMATORS, POLICY_LOSSES
from async_grpo.config.deepspeed_keys import unknown_keys
from async_grpo.config.plugins import Known, check_plugins
from async_grpo.config.schema import REFUSED_DEEPSPEED_KEYS, UNBOUNDED_ORDERS, Config
from async_grpo.config.section import Section
from async_grpo.config.transports import TRANSPORTS, Transport
from async_grpo.config.vllm_keys import SPECULATION, refused_arguments


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _estimator(config: Config, known: Known) -> Iterator[str]:
    algorithm, name = config.algorithm, config.algorithm.adv_estimator
    traits = known.estimator(config)
    if traits.compares and config.rollout.group_size < 2:
        yield (
            f"`rollout.group_size` is {config.rollout.group_size}; `algorithm.adv_estimator: "
            f"{name}` compares responses, so it needs at least 2."
        )
    if name == "dr_grpo" and algorithm.loss_agg_mode != "seq-mean-token-sum-norm":
        yield (
            f"`algorithm.loss_agg_mode` is {algorithm.loss_agg_mode}; with "
            "`algorithm.adv_estimator: dr_grpo` it is seq-mean-token-sum-norm, the other half of "
            "Dr. GRPO (`grpo` with `norm_adv_by_std_in_grpo: false` is its advantage alone)."
        )
    if not algorithm.norm_adv_by_std_in_grpo and not traits.divides:
        yield (
            f"`algorithm.norm_adv_by_std_in_grpo` is false, but `adv_estimator: {name}` has no "
            "such division; remove it."
        )
    levels = traits.std_levels and algorithm.norm_adv_by_std_in_grpo
    if algorithm.adv_std_level != "group" and not levels:
        yield (
            "`algorithm.adv_std_level: batch` belongs to `adv_estimator: grpo` with "
            "`norm_adv_by_std_in_grpo: true`; remove it."
        )
    if algorithm.gamma != 1 and not traits.returns:
        returns = ESTIMATORS.where(lambda other: other.returns)
        yield (
            f"`algorithm.gamma` is {algorithm.gamma:g}, but `adv_estimator: {name}` has no "
            f"returns; allowed is 1, or {_listed(returns)}."
        )
    if name == "maxrl" and (algorithm.overlong_buffer.enable or algorithm.add_token_level_kl):
        yield (
            "`algorithm.adv_estimator: maxrl` needs rewards of at least 0, but `overlong_buffer` "
            "and `add_token_level_kl` make them negative; unset them."
        )
    if name == "maxrl" and (algorithm.reward_norm is not None or algorithm.reward_shift):
        yield (
            "`algorithm.adv_estimator: maxrl` divides by the group's mean reward, which "
            "`reward_norm` and `reward_shift` remove; unset them."
        )


def _pairs(config: Config, known: Known) -> Iterator[str]:
    algorithm = config.algorithm
    name, loss = algorithm.adv_estimator, algorithm.policy_loss
    wanted, partners = known.loss(config), known.estimator(config)
    if wanted.estimators and name not in wanted.estimators:
        yield (
            f"`algorithm.policy_loss: {loss}` goes with `adv_estimator` "
            f"{' or '.join(wanted.estimators)}, not {name}: {wanted.reason}."
        )
    if partners.losses and loss not in partners.losses:
        yield (
            f"`algorithm.adv_estimator: {name}` goes with `policy_loss: "
            f"{' or '.join(partners.losses)}`, not {loss}: {partners.reason}."
        )
    if loss == "opmd":
        if partners.std_levels and algorithm.norm_adv_by_std_in_grpo:
            yield (
                "`algorithm.policy_loss: opmd` needs R - mean as advantage: set "
                "`norm_adv_by_std_in_grpo: false`, or `adv_estimator: rloo`."
            )
        if algorithm.whiten_advantages:
            yield (
                "`algorithm.policy_loss: opmd` needs R - mean as advantage: set "
                "`whiten_advantages: false`."
            )


def _clip(config: Config, known: Known) -> Iterator[str]:
    algorithm, loss, traits = config.algorithm, config.algorithm.policy_loss, known.loss(config)
    schedule = algorithm.clip_schedule
    if schedule.kind == "exponential" and schedule.rate > 1:
        yield (
            f"`algorithm.clip_schedule.rate` is {schedule.rate:g}; with `kind: exponential` it is "
            "at most 1, since the clip interval must not widen with lag."
        )
    if schedule.kind != "constant" and not traits.clipped:
        yield (
            f"`algorithm.clip_schedule.kind` is {schedule.kind}, but `policy_loss: {loss}` has no "
            "clip interval; losses with one: "
            f"{_listed(POLICY_LOSSES.where(lambda other: other.clipped))}."
        )
    if algorithm.dual_clip_loss and not traits.dual_clip:
        yield (
            f"`algorithm.dual_clip_loss` is true, but `policy_loss: {loss}` has no dual clip; "
            "only ppo_clip and m2po have."
        )
    sides = (algorithm.clip_ratio_low, algorithm.clip_ratio_high)
    if not traits.clipped and sides != (None, None):
        yield (
            f"`algorithm.clip_ratio_low` or `clip_ratio_high` is given, but `policy_loss: {loss}` "
            "has no clip interval; remove it."
        )
    if traits.widths and None in sides:
        yield (
            f"`algorithm.policy_loss: {loss}` clips on another scale than PPO: give "
            "`algorithm.clip_ratio_low` and `algorithm.clip_ratio_high` (usual are "
            f"{traits.widths})."
        )


def _anchor(config: Config, known: Known) -> Iterator[str]:
    algorithm, loss, traits = config.algorithm, config.algorithm.policy_loss, known.loss(config)
    anchor = algorithm.anchor
    if traits.sampler_anchor and anchor != "behavior":
        yield (
            f"`algorithm.anchor` is {anchor}; `policy_loss: {loss}` measures and clips the ratio "
            "to the policy that sampled: use behavior."
        )
    for_reward = anchor == "recomputed" and algorithm.add_token_level_kl
    if traits.ratio_free and anchor != "behavior" and not for_reward:
        yield (
            f"`algorithm.anchor` is {anchor}, but `policy_loss: {loss}` has no trust region that "
            "would use it; use behavior."
        )


def _row_losses(config: Config, known: Known) -> Iterator[str]:
    algorithm, loss, traits = config.algorithm, config.algorithm.policy_loss, known.loss(config)
    mode = algorithm.loss_agg_mode
    if traits.response_ratio and mode != "seq-mean-token-mean":
        yield (
            f"`algorithm.loss_agg_mode` is {mode}; `policy_loss: {loss}` has one ratio per "
            "response and is a mean over responses: use seq-mean-token-mean, others would weigh "
            "responses by length."
        )
    if (
        loss == "opmd"
        and algorithm.opmd.level == "sequence"
        and mode not in ("seq-mean-token-sum", "seq-mean-token-sum-norm")
    ):
        yield (
            f"`algorithm.loss_agg_mode` is {mode}; `algorithm.opmd.level: sequence` is a sum over "
            "each response: use seq-mean-token-sum or seq-mean-token-sum-norm."
        )
    for key, section in (("importance", algorithm.importance), ("rejection", algorithm.rejection)):
        if traits.response_ratio and section.level == "token":
            yield (
                f"`algorithm.{key}.level` is token, but `policy_loss: {loss}` has one ratio per "
                "response; allowed are none, sequence, geometric."
            )
    varying = algorithm.gamma != 1 or algorithm.add_token_level_kl
    if traits.one_advantage and varying and known.estimator(config).returns:
        yield (
            f"`algorithm.policy_loss: {loss}` needs one advantage per response, but "
            f"`adv_estimator: {algorithm.adv_estimator}` with `gamma` below 1 or "
            "`add_token_level_kl` gives one per token; use gspo_token."
        )


def _weights(config: Config, known: Known) -> Iterator[str]:
    algorithm, loss, traits = config.algorithm, config.algorithm.policy_loss, known.loss(config)
    anchor, importance = algorithm.anchor, algorithm.importance
    sections = (("importance", importance), ("rejection", algorithm.rejection))
    if importance.level != "none" and traits.ratio_free and not traits.weighed:
        yield (
            f"`algorithm.importance.level` is {importance.level}, but `policy_loss: {loss}` is "
            "defined without it; use none, or policy_loss: reinforce."
        )
    elif anchor == "behavior" and not traits.ratio_free:
        for key, section in sections:
            if section.level != "none":
                yield (
                    f"`algorithm.{key}.level: {section.level}` weighs the anchor against the "
                    "behaviour policy and needs `algorithm.anchor: recomputed` or interpolated; "
                    f"with `{anchor}` both are the same policy."
                )
    for key, section in sections:
        if section.lower >= section.upper:
            yield (
                f"`algorithm.{key}.lower` is {section.lower:g}; it must be below "
                f"`algorithm.{key}.upper`, {section.upper:g}."
            )


def _kl(config: Config, _: Known) -> Iterator[str]:
    algorithm, model = config.algorithm, config.model
    if algorithm.use_kl_loss and algorithm.add_token_level_kl:
        yield (
            "`algorithm.use_kl_loss` and `algorithm.add_token_level_kl` are both true: the KL "
            "would be punished twice; keep one."
        )
    if algorithm.use_kl_loss and algorithm.kl_loss_type == "kl" and not algorithm.kl_loss_unbiased:
        yield (
            "`algorithm.kl_loss_type: kl` has an expected gradient of 0 as a loss; use kl+ (same "
            "value, the gradient of the divergence), low_var_kl, or `kl_loss_unbiased: true`."
        )
    if algorithm.kl_loss_unbiased and not algorithm.use_kl_loss:
        yield (
            "`algorithm.kl_loss_unbiased` is true, but `algorithm.use_kl_loss` is false; set it "
            "to true, or remove the correction."
        )
    if algorithm.kl_loss_unbiased and algorithm.kl_loss_type not in ("kl", "low_var_kl"):
        yield (
            f"`algorithm.kl_loss_type` is {algorithm.kl_loss_type}; with `kl_loss_unbiased` it is "
            "kl or low_var_kl: the others have a bias of their own, or already hold the gradient "
            "of the divergence."
        )
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.add_token_level_kl:
        yield (
            "`algorithm.kl_ctrl.type: adaptive` steers the KL in the reward: set "
            "`algorithm.add_token_level_kl: true`, or use fixed."
        )
    if not algorithm.uses_reference:
        for key, given in (
            ("reference", model.reference is not None),
            ("reference_refresh_steps", model.reference_refresh_steps > 0),
        ):
            if given:
                yield (
                    f"`model.{key}` is given but nothing uses a reference: set "
                    "`algorithm.use_kl_loss: true` or `algorithm.add_token_level_kl: true`, or "
                    "remove it."
                )


def _rewards(config: Config, _: Known) -> Iterator[str]:
    if config.algorithm.reward_norm == "group" and config.rollout.group_size < 2:
        yield (
            "`algorithm.reward_norm: group` makes every reward of a group of one 0: use batch or "
            "running, or a `rollout.group_size` of at least 2."
        )
    overlong, limit = config.algorithm.overlong_buffer, config.rollout.response_length
    if overlong.enable and overlong.len > limit:
        yield (
            f"`algorithm.overlong_buffer.len` is {overlong.len}; allowed is at most "
            f"`rollout.response_length`, {limit}."
        )


def _filter(config: Config, known: Known) -> Iterator[str]:
    groups, name = config.replay.filter_groups, config.algorithm.adv_estimator
    band = groups.accuracy_low is not None or groups.accuracy_high is not None
    if groups.metric == "seq_final_reward":
        yield (
            "`replay.filter_groups.metric: seq_final_reward` holds the token KL, which exists "
            "only after the learner's forward pass, and groups are filtered before; use "
            "seq_reward (shaped), score, acc or the name of a reward component."
        )
    if not groups.metric:
        yield (
            "`replay.filter_groups.metric` is empty; allowed are score, acc, seq_reward, or the "
            "name of a reward component."
        )
    more = band or groups.all_truncated or groups.custom is not None
    if not groups.enable and (more or groups.retire_at is not None):
        yield (
            "`replay.filter_groups` has conditions, but `enable` is false; set it to true, or "
            "remove them."
        )
    if groups.enable and groups.zero_variance and not known.estimator(config).compares:
        yield (
            "`replay.filter_groups.zero_variance` is true, but with `algorithm.adv_estimator: "
            f"{name}` a group of equal rewards carries signal: its baseline is not the group's "
            "mean; set it to false."
        )
    if groups.enable and not (groups.zero_variance or more or groups.retire_at is not None):
        yield (
            "`replay.filter_groups.enable` is true, but no condition is set; set one, or enable: "
            "false."
        )
    low, high = groups.accuracy_low, groups.accuracy_high
    for key, bound, worst in (("accuracy_low", low, 1), ("accuracy_high", high, 0)):
        if bound == worst:
            yield (
                f"`replay.filter_groups.{key}` is {bound:g}, which rejects every group; allowed is "
                f"{'less than 1' if worst else 'more than 0'}, or null."
            )
    if low is not None and high is not None and low >= high:
        yield (
            f"`replay.filter_groups.accuracy_low` is {low:g}; it must be below `accuracy_high`, "
            f"{high:g}."
        )


_ABSENT = object()
_DECIDED_BY = {
    "train_batch_size": "rollout.rollout_batch_size",
    "train_micro_batch_size_per_gpu": "learner.tokens_per_micro_batch",
    "gradient_accumulation_steps": "learner.ppo_mini_batch_size",
    "optimizer": "learner.lr, learner.betas and learner.weight_decay",
    "scheduler": "learner.schedule and learner.warmup_steps",
    "gradient_clipping": "learner.grad_clip",
    **dict.fromkeys(("bf16", "bfloat16", "fp16"), "model.dtype"),
    "zero_optimization.stage": "learner.zero_stage",
}
"""The setting that a user of a refused DeepSpeed key is looking for."""
HEAD_SIZES = (32, 64, 96, 128, 256)
"""Head sizes that vLLM supports on CPU as well as on GPU."""
_LARGEST = 2**53
"""Larger integers do not survive floats, and integers of 64 bits not the wire."""


class RuleError(ValueError):
    """The rules that a configuration breaks; `str(error)` is the first sentence."""

    def __init__(self, sentences: list[str]) -> None:
        super().__init__(sentences[0])
        self.sentences = tuple(sentences)


def check(config: Config) -> None:
    """Raise RuleError with a sentence for every rule that `config` breaks, SettingError for a name
    or an option that no plugin has.
    """
    known = check_plugins(config)
    run = (_sizes, _run, _trained, _batches, _staleness, _partial)
    algorithm = (_estimator, _pairs, _clip, _anchor, _row_losses, _weights, _kl, _rewards, _filter)
    sentences = [sentence for rules in run for sentence in rules(config)]
    sentences += [sentence for rules in algorithm for sentence in rules(config, known)]
    operation = (_learner, _evaluation, _tracking, _cluster)
    sentences += [sentence for rules in operation for sentence in rules(config)]
    if sentences:
        raise RuleError(sentences)


def _sizes(section: Section, prefix: str = "") -> Iterator[str]:
    for key in type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, Section):
            yield from _sizes(value, f"{prefix}{key}.")
        elif isinstance(value, int) and value > _LARGEST:
            yield (
                f"`{prefix}{key}` is an integer of {len(str(value))} digits; allowed is at most "
                f"2^53 = {_LARGEST}."
            )


def _run(config: Config) -> Iterator[str]:
    run, model = config.run, config.model
    if (run.total_steps is None) == (run.epochs is None):
        both = "both are" if run.epochs is not None else "neither is"
        yield f"Set exactly one of `run.total_steps` and `run.epochs`; {both} set."
    if run.name in (".", ".."):
        yield (
            f"`run.name` is {run.name}, which is not a name; allowed are letters, digits, `.`, "
            "`_` and `-`."
        )
    if (model.path is None) == (model.warm_start is None):
        both = "both are (set the other to null)" if model.path is not None else "neither is"
        yield (
            "Set exactly one of `model.path` (a model to load) and `model.warm_start` (a small "
            f"one to build, `{{}}` for its defaults); {both}."
        )
    if model.warm_start is not None:
        hidden, heads = model.warm_start.hidden_size, model.warm_start.heads
        if hidden % heads or hidden // heads not in HEAD_SIZES:
            yield (
                f"`model.warm_start.hidden_size` is {hidden} and `model.warm_start.heads` is "
                f"{heads}: hidden_size / heads must be one of the head sizes that the engines' "
                f"attention has everywhere: {', '.join(map(str, HEAD_SIZES))}."
            )


def _trained(config: Config) -> Iterator[str]:
    model = config.model
    for pattern in model.freeze:
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"`model.freeze` has {pattern!r}, which is no regular expression: {error}."
    if model.lora is not None and model.freeze:
        yield (
            "`model.freeze` and `model.lora` are both set, but with adapters all weights stay as "
            "they are: leave one out, or choose `model.lora.target_modules`."
        )
    if model.lora is not None and model.reference_refresh_steps:
        yield (
            f"`model.reference_refresh_steps` is {model.reference_refresh_steps}, but with "
            "`model.lora` the reference is a model that no update changes: set it to 0, or train "
            "without adapters."
        )


def _batches(config: Config) -> Iterator[str]:
    rollout, learner = config.rollout, config.learner
    if rollout.rollout_batch_size % config.mini_batch_groups:
        yield (
            f"`rollout.rollout_batch_size` is {rollout.rollout_batch_size}, which is not a "
            f"multiple of `learner.ppo_mini_batch_size` {config.mini_batch_groups} (both count "
            "groups)."
        )
    if rollout.longest_row < rollout.prompt_length + rollout.response_length:
        yield (
            f"`rollout.context_length` is {rollout.context_length}, less than "
            f"`rollout.response_length` {rollout.response_length}, which is a part of it: raise it."
        )
    total = rollout.longest_row
    if total > learner.tokens_per_micro_batch:
        yield (
            f"`learner.tokens_per_micro_batch` is {learner.tokens_per_micro_batch}, but one "
            f"response may need {rollout.longest_row_in_words} tokens: give at least {total}."
        )
    if rollout.top_p != 1 or rollout.top_k != 0:
        yield (
            f"`rollout.top_p` is {rollout.top_p:g} and `rollout.top_k` is {rollout.top_k}; "
            "allowed are 1 and 0, because the learner does not renormalise over the sampler's "
            "kept set and its ratios would be biased."
        )


def _staleness(config: Config) -> Iterator[str]:
    every, bound = config.weight_sync.every_steps, config.replay.max_staleness
    batch = config.rollout.rollout_batch_size
    if every > bound + 1:
        yield (
            f"`weight_sync.every_steps` is {every}, allowed is at most `replay.max_staleness` + 1 "
            f"= {bound + 1}: no more than {bound + 1} x {batch} = {config.max_outstanding} groups "
            f"may be outstanding, {every} steps need {every} x {batch} = {every * batch} before a "
            "publication frees any, so the slots would never return."
        )
    if config.replay.order in UNBOUNDED_ORDERS and config.replay.on_stale == "wait":
        yield (
            f"`replay.order: {config.replay.order}` lets groups leave as they are completed, so "
            "one that takes longer than the others may become older than `replay.max_staleness` "
            f"= {bound} by any number of steps: use `replay.on_stale: mask` or `expire` with it, "
            "or order oldest or fifo."
        )


def _partial(config: Config) -> Iterator[str]:
    if not config.checkpoint.partial_rollouts:
        return
    if config.seeded:
        yield (
            "`checkpoint.partial_rollouts` is true and `rollout.seeded` is "
            f"{config.rollout.seeded} (`replay.max_staleness` is {config.replay.max_staleness}): "
            "a seeded response that is continued would be another one than its seed makes; set "
            "one of them to false or off."
        )
    if not config.replay.journal.enable:
        yield (
            "`checkpoint.partial_rollouts` is true and `replay.journal.enable` is false: only "
            "the journal tells which responses were still under way when the run ended; enable "
            "it, or set the other to false."
        )


def _learner(config: Config) -> Iterator[str]:
    for key in sorted(REFUSED_DEEPSPEED_KEYS):
        node: Any = config.learner.deepspeed
        for part in key.split("."):
            node = node.get(part, _ABSENT) if isinstance(node, dict) else _ABSENT
        if node is not _ABSENT:
            instead = f"; use {_DECIDED_BY[key]}" if key in _DECIDED_BY else "; remove it"
            yield (
                f"`learner.deepspeed.{key}` must not be given, because the learner sets it "
                f"itself{instead}."
            )
    zero = config.learner.deepspeed.get("zero_optimization", {})
    if not isinstance(zero, dict):
        yield f"`learner.deepspeed.zero_optimization` is {zero!r}; allowed is a mapping."
        return
    for key, meant in unknown_keys(config.learner.deepspeed):
        ours = _DECIDED_BY.get(meant or "")
        known = f"use {ours}" if ours else f"is `{meant}` meant?" if meant else "remove it"
        yield f"`learner.deepspeed.{key}` is no setting of DeepSpeed: {known}."
    stage = config.learner.zero_stage
    if config.learner.compile and stage == 3:
        yield (
            "`learner.compile` is true and `learner.zero_stage` is 3, which gathers weights inside "
            "the layers that would be compiled: use stage 2, or leave `compile` out."
        )
    if config.learner.activation_offload and not config.learner.gradient_checkpointing:
        yield (
            "`learner.activation_offload` is true and `learner.gradient_checkpointing` is false: "
            "without it every activation of every layer would move; set it to true too."
        )
    for key, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
        if zero.get(key) and stage < lowest:
            yield (
                f"`learner.deepspeed.zero_optimization.{key}` is given, but `learner.zero_stage` "
                f"{stage} keeps what it would move away: set the stage to "
                f"{lowest}{' or more' if lowest < 3 else ''}, or leave it out."
            )


def _evaluation(config: Config) -> Iterator[str]:
    evaluation, step_s = config.evaluation, config.watchdog.step_timeout_s
    if evaluation.every_steps and evaluation.timeout_s > step_s:
        yield (
            f"`evaluation.timeout_s` is {evaluation.timeout_s:g} and `watchdog.step_timeout_s` is "
            f"{step_s:g}: with one engine a learner step may wait for an evaluation before it "
            "publishes, which is no reason to end the run; give the step at least as long."
        )


def _tracking(config: Config) -> Iterator[str]:
    tracking = config.tracking
    if tracking.register_model is not None and not (tracking.mlflow and tracking.log_model_max_gb):
        without = "log_model_max_gb` is 0" if tracking.mlflow else "mlflow` is false"
        yield (
            f"`tracking.register_model` is {tracking.register_model}, but `tracking.{without}, so "
            "MLflow never gets the model: set that, or leave the name out."
        )


def _cluster(config: Config) -> Iterator[str]:
    cluster, actors = config.cluster, config.cluster.rollout_actors
    if actors.max is not None and actors.min > actors.max:
        yield (
            f"`cluster.rollout_actors.min` is {actors.min}; it must not exceed "
            f"`cluster.rollout_actors.max`, {actors.max}."
        )
    for name, why in refused_arguments(cluster.engine.vllm):
        yield f"`cluster.engine.vllm.{name}` {why}."
    if cluster.device == "cpu":
        yield from speculation_on_cpu(config)
    yield from _transport(config)
    if cluster.layout == "colocated":
        yield from _colocated(config, config.learner.ranks)


def speculation_on_cpu(config: Config) -> Iterator[str]:
    """Find arguments of speculative decoding, with which vLLM samples wrongly on CPU."""
    for name in sorted(SPECULATION & config.cluster.engine.vllm.keys()):
        yield (
            f"`cluster.engine.vllm.{name}` is given, and engines are on CPU, where vLLM's "
            "speculative decoding does not sample from the model's distribution: remove it."
        )


def _transport(config: Config) -> Iterator[str]:
    cluster, transport = config.cluster, TRANSPORTS.get(config.weight_sync.backend)
    if transport is None:  # `auto` fits
        return
    if cluster.device == "cpu" and transport.needs_gpu:
        yield (
            f"`weight_sync.backend: {transport.name}` needs GPUs, but `cluster.device` is cpu; "
            f"use {_or_auto(other for other in TRANSPORTS.values() if not other.needs_gpu)}."
        )
    if transport.colocated and cluster.layout != "colocated":
        yield (
            f"`weight_sync.backend: {transport.name}` needs learner and engine on one GPU: set "
            "`cluster.layout: colocated`, or use "
            f"{_or_auto(other for other in TRANSPORTS.values() if other.colocated is False)}."
        )
    if transport.colocated is False and cluster.layout == "colocated":
        yield (
            f"`weight_sync.backend: {transport.name}` cannot join two processes on one GPU; with "
            "`cluster.layout: colocated` use "
            f"{_or_auto(other for other in TRANSPORTS.values() if other.colocated)}."
        )


def _or_auto(transports: Iterable[Transport]) -> str:
    return " or ".join(["auto", *(transport.name for transport in transports)])


def _colocated(config: Config, ranks: int) -> Iterator[str]:
    cluster, actors = config.cluster, config.cluster.rollout_actors
    if cluster.device == "cpu":
        yield "`cluster.layout: colocated` shares GPUs, but `cluster.device` is cpu; use split."
    if cluster.engine.tensor_parallel_size != 1:
        yield (
            f"`cluster.engine.tensor_parallel_size` is {cluster.engine.tensor_parallel_size}; with "
            "`cluster.layout: colocated` it is 1 (learner rank i and engine i share one GPU)."
        )
    for key, count in (
        ("max", actors.max),
        ("min", actors.min if actors.max is None and actors.min > ranks else None),
    ):
        if count is not None and count != ranks:
            limit = "equal" if key == "max" else "be at most"
            yield (
                f"`cluster.rollout_actors.{key}` is {count}; with `cluster.layout: colocated` it "
                f"must {limit} `learner.ranks`, {ranks} (learner rank i and engine i share one "
                "GPU)."
            )
