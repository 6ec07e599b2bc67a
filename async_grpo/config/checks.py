"""Rules that span several settings.

Runs in: any process (no third-party import). Hides nothing. Invariant: each rule yields one sentence that names the keys, their
values and what is allowed; a configuration that passes here can be trained as far as its numbers tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from async_grpo.config.algorithm_checks import check_algorithm
from async_grpo.config.schema import REFUSED_DEEPSPEED_KEYS, Config
from async_grpo.config.section import Section

_ABSENT = object()
_DECIDED_BY = {
    "train_batch_size": "rollout.rollout_batch_size",
    "train_micro_batch_size_per_gpu": "learner.tokens_per_micro_batch",
    "gradient_accumulation_steps": "learner.ppo_mini_batch_size",
    "optimizer": "learner.lr, learner.betas and learner.weight_decay",
    "scheduler": "learner.schedule and learner.warmup_steps",
    "gradient_clipping": "learner.grad_clip",
    "bf16": "model.dtype",
    "bfloat16": "model.dtype",
    "fp16": "model.dtype",
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
    """Raise RuleError with a sentence for every rule that `config` breaks."""
    sentences = [sentence for rules in (_sizes, _run, _trained, _batches, _staleness, _partial, check_algorithm, _learner, _evaluation, _tracking, _cluster) for sentence in rules(config)]
    if sentences:
        raise RuleError(sentences)


def _sizes(section: Section, prefix: str = "") -> Iterator[str]:
    for key in type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, Section):
            yield from _sizes(value, f"{prefix}{key}.")
        elif isinstance(value, int) and value > _LARGEST:
            yield f"`{prefix}{key}` is an integer of {len(str(value))} digits; allowed is at most 2^53 = {_LARGEST}."


def _run(config: Config) -> Iterator[str]:
    run, model = config.run, config.model
    if (run.total_steps is None) == (run.epochs is None):
        both = "both are" if run.epochs is not None else "neither is"
        yield f"Set exactly one of `run.total_steps` and `run.epochs`; {both} set."
    if run.name in (".", ".."):
        yield f"`run.name` is {run.name}, which is not a name; allowed are letters, digits, `.`, `_` and `-`."
    if (model.path is None) == (model.warm_start is None):
        both = "both are (set the other to null)" if model.path is not None else "neither is"
        yield (
            "Set exactly one of `model.path` (a model to load) and `model.warm_start` (a small one to build, `{}` for its defaults); "
            f"{both}."
        )
    if model.warm_start is not None:
        hidden, heads = model.warm_start.hidden_size, model.warm_start.heads
        if hidden % heads or hidden // heads not in HEAD_SIZES:
            yield (
                f"`model.warm_start.hidden_size` is {hidden} and `model.warm_start.heads` is {heads}: hidden_size / heads must be one of "
                f"the head sizes that the engines' attention has everywhere: {', '.join(map(str, HEAD_SIZES))}."
            )


def _trained(config: Config) -> Iterator[str]:
    model = config.model
    for pattern in model.freeze:
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"`model.freeze` has {pattern!r}, which is no regular expression: {error}."
    if model.lora is not None and model.freeze:
        yield "`model.freeze` and `model.lora` are both set, but with adapters all weights stay as they are: leave one out, or choose `model.lora.target_modules`."
    if model.lora is not None and model.reference_refresh_steps:
        yield (
            f"`model.reference_refresh_steps` is {model.reference_refresh_steps}, but with `model.lora` the reference is a model that no "
            "update changes: set it to 0, or train without adapters."
        )


def _batches(config: Config) -> Iterator[str]:
    rollout, learner = config.rollout, config.learner
    if rollout.rollout_batch_size % config.mini_batch_groups:
        yield (
            f"`rollout.rollout_batch_size` is {rollout.rollout_batch_size}, which is not a multiple of `learner.ppo_mini_batch_size` "
            f"{config.mini_batch_groups} (both count groups)."
        )
    if rollout.prompt_length + rollout.response_length > learner.tokens_per_micro_batch:
        total = rollout.prompt_length + rollout.response_length
        yield (
            f"`learner.tokens_per_micro_batch` is {learner.tokens_per_micro_batch}, but one response may need `rollout.prompt_length` "
            f"{rollout.prompt_length} + `rollout.response_length` {rollout.response_length} = {total} tokens: give at least {total}."
        )
    if rollout.top_p != 1 or rollout.top_k != 0:
        yield (
            f"`rollout.top_p` is {rollout.top_p:g} and `rollout.top_k` is {rollout.top_k}; allowed are 1 and 0, because the learner does "
            "not renormalise over the sampler's kept set and its ratios would be biased."
        )


def _staleness(config: Config) -> Iterator[str]:
    every, bound, batch = config.weight_sync.every_steps, config.replay.max_staleness, config.rollout.rollout_batch_size
    if every > bound + 1:
        yield (
            f"`weight_sync.every_steps` is {every}, allowed is at most `replay.max_staleness` + 1 = {bound + 1}: no more than "
            f"{bound + 1} x {batch} = {config.max_outstanding} groups may be outstanding, {every} steps need {every} x {batch} = "
            f"{every * batch} before a publication frees any, so the slots would never return."
        )
    if config.replay.order == "ready" and config.replay.on_stale == "wait":
        yield (
            "`replay.order: ready` lets groups leave as they are completed, so one that takes longer than the others may become older than "
            f"`replay.max_staleness` = {bound} by any number of steps: use `replay.on_stale: mask` or `expire` with it, or order oldest or fifo."
        )


def _partial(config: Config) -> Iterator[str]:
    if not config.checkpoint.partial_rollouts:
        return
    if config.seeded:
        yield (
            f"`checkpoint.partial_rollouts` is true and `rollout.seeded` is {config.rollout.seeded} (`replay.max_staleness` is "
            f"{config.replay.max_staleness}): a seeded response that is continued would be another one than its seed makes; set one of them to false or off."
        )
    if not config.replay.journal.enable:
        yield (
            "`checkpoint.partial_rollouts` is true and `replay.journal.enable` is false: only the journal tells which responses were still under "
            "way when the run ended; enable it, or set the other to false."
        )


def _learner(config: Config) -> Iterator[str]:
    for key in sorted(REFUSED_DEEPSPEED_KEYS):
        node: Any = config.learner.deepspeed
        for part in key.split("."):
            node = node.get(part, _ABSENT) if isinstance(node, dict) else _ABSENT
        if node is not _ABSENT:
            instead = f"; use {_DECIDED_BY[key]}" if key in _DECIDED_BY else "; remove it"
            yield f"`learner.deepspeed.{key}` must not be given, because the learner sets it itself{instead}."
    zero = config.learner.deepspeed.get("zero_optimization", {})
    if not isinstance(zero, dict):
        yield f"`learner.deepspeed.zero_optimization` is {zero!r}; allowed is a mapping."
        return
    stage = config.learner.zero_stage
    for key, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
        if zero.get(key) and stage < lowest:
            yield (
                f"`learner.deepspeed.zero_optimization.{key}` is given, but `learner.zero_stage` {stage} keeps what it would move away: "
                f"set the stage to {lowest}{' or more' if lowest < 3 else ''}, or leave it out."
            )


def _evaluation(config: Config) -> Iterator[str]:
    evaluation, step_s = config.evaluation, config.watchdog.step_timeout_s
    if evaluation.every_steps and evaluation.timeout_s > step_s:
        yield (
            f"`evaluation.timeout_s` is {evaluation.timeout_s:g} and `watchdog.step_timeout_s` is {step_s:g}: with one engine a learner step may "
            "wait for an evaluation before it publishes, which is no reason to end the run; give the step at least as long."
        )


def _tracking(config: Config) -> Iterator[str]:
    tracking = config.tracking
    if tracking.register_model is not None and not (tracking.mlflow and tracking.log_model_max_gb):
        without = "`tracking.mlflow` is false" if not tracking.mlflow else "`tracking.log_model_max_gb` is 0"
        yield f"`tracking.register_model` is {tracking.register_model}, but {without}, so MLflow never gets the model: set that, or leave the name out."


def _cluster(config: Config) -> Iterator[str]:
    cluster, actors, ranks, backend = config.cluster, config.cluster.rollout_actors, config.learner.ranks, config.weight_sync.backend
    if actors.max is not None and actors.min > actors.max:
        yield f"`cluster.rollout_actors.min` is {actors.min}; it must not exceed `cluster.rollout_actors.max`, {actors.max}."
    if cluster.device == "cpu" and backend in ("nccl", "ipc"):
        yield f"`weight_sync.backend: {backend}` needs GPUs, but `cluster.device` is cpu; use auto or shared_memory."
    if backend == "ipc" and cluster.layout != "colocated":
        yield "`weight_sync.backend: ipc` needs learner and engine on one GPU: set `cluster.layout: colocated`, or use auto or nccl."
    if backend == "nccl" and cluster.layout == "colocated":
        yield "`weight_sync.backend: nccl` cannot join two processes on one GPU; with `cluster.layout: colocated` use auto or ipc."
    if cluster.layout == "colocated":
        yield from _colocated(config, ranks)


def _colocated(config: Config, ranks: int) -> Iterator[str]:
    cluster, actors = config.cluster, config.cluster.rollout_actors
    if cluster.device == "cpu":
        yield "`cluster.layout: colocated` shares GPUs, but `cluster.device` is cpu; use split."
    if cluster.engine.tensor_parallel_size != 1:
        yield (
            f"`cluster.engine.tensor_parallel_size` is {cluster.engine.tensor_parallel_size}; with `cluster.layout: colocated` it is 1 "
            "(learner rank i and engine i share one GPU)."
        )
    for key, count in (("max", actors.max), ("min", actors.min if actors.max is None and actors.min > ranks else None)):
        if count is not None and count != ranks:
            limit = "equal" if key == "max" else "be at most"
            yield (
                f"`cluster.rollout_actors.{key}` is {count}; with `cluster.layout: colocated` it must {limit} `learner.ranks`, {ranks} "
                "(learner rank i and engine i share one GPU)."
            )
