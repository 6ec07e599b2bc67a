"""prime-rl's keys: one TOML for all its processes, or that of the trainer or the orchestrator.

Runs in: a terminal. Hides prime-rl's names, and what it does where a file says nothing. Invariant:
as of `verl`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from async_grpo.config.docs import show
from async_grpo.tools.migrate.common import PROCESSES, adapters, directory, experiment, file_name
from async_grpo.tools.migrate.rules import (
    Meant,
    Peer,
    Untranslatable,
    by,
    every,
    groups_of,
    none,
    number,
    same,
    switch,
    to,
    whole,
    words,
)
from async_grpo.tools.migrate.source import Source

_SIZE = "rollouts_per_example"


def _batch(value: Any, source: Source) -> Meant:
    size = source.number(_SIZE, 1)
    note = f"rollouts there, groups here: over {size:g} {_SIZE}"
    return Meant({"rollout.rollout_batch_size": groups_of(whole(value), size)}, note)


def _row(value: Any, source: Source) -> Meant:
    """Split `seq_len`, prompt and response together, by what is sampled at most."""
    longest, sampled = whole(value), source.number("sampling.max_tokens")
    found = {"learner.tokens_per_micro_batch": longest}
    if sampled and longest > sampled:
        found["rollout.prompt_length"] = int(longest - sampled)
        return Meant(found, "of prompt and response together: what max_tokens leaves is the prompt")
    half = max(1, longest // 2)
    found |= {"rollout.prompt_length": half, "rollout.response_length": half}
    return Meant(found, "of prompt and response together, halved here")


def _loss(value: Any, source: Source) -> Meant:
    if str(value) == "default":
        return Meant({"algorithm.policy_loss": "dppo"}, "DPPO-TV with the ratio to the sampler")
    raise Untranslatable(f"there is no loss {show(value)} here; dppo is in its place")


def _estimator(value: Any, source: Source) -> Meant:
    if str(value) == "max_rl":
        return Meant({"algorithm.adv_estimator": "maxrl"})
    if str(value) in ("grpo", "default"):
        found = {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False}
        return Meant(found, "reward - mean, without a deviation")
    raise Untranslatable(f"{show(value)} is not here; grpo without a deviation is in its place")


def _environment(value: Any, source: Source) -> Meant:
    raise Untranslatable(
        "an environment of the package verifiers: a task of yours (docs/tasks.md, docs/agents.md)"
    )


def _level(value: Any, source: Source) -> Meant:
    if source.has("max_off_policy_steps"):
        raise Untranslatable("max_off_policy_steps is the bound that is kept")
    return Meant({"replay.max_staleness": whole(value)}, "a strict bound per token here")


def _devices(value: Any, source: Source) -> Meant:
    ids = value if isinstance(value, list) else [value]
    return Meant({"learner.ranks": max(1, len(ids)), "cluster.layout": "split"})


def _share(value: Any, source: Source) -> Meant:
    factor = number(value)
    note = "what is under way there, as a factor of the batch"
    bound = math.ceil(factor) if factor > 1 else 1
    raise Untranslatable(f"{note}: `replay.outstanding` settles by itself, near {bound} batches")


_RULES = (
    directory("^output_dir"),
    none("^orchestrator.output_dir ^trainer.output_dir", "one directory: `run.dir`"),
    same("max_steps", "run.total_steps"),
    by("seq_len", _row),
    same("^model.name trainer.model.name orchestrator.model.name", "model.path"),
    none("inference.model.name inference.model.*", "the engine has the learner's model"),
    same("^seed trainer.seed orchestrator.seed", "seed"),
    # ---- orchestrator
    by("orchestrator.batch_size ^batch_size", _batch),
    same("rollouts_per_example"),
    none("token_batch_size", "batches are counted in groups"),
    none("micro_batch_size", "`learner.tokens_per_micro_batch`: seq_len"),
    same("max_off_policy_steps", "", "(step - 1) - version, as the lag is here"),
    by("max_async_level async_level", _level),
    by("oversampling_factor", _share),
    same("sampling.max_tokens", "rollout.response_length"),
    same("sampling.temperature", "rollout.temperature"),
    same("sampling.top_p", "rollout.top_p"),
    to("sampling.top_k", "rollout.top_k", lambda value: max(0, whole(value))),
    none("sampling.*", "not while training here: the learner could not repeat it"),
    by("env.*", _environment),
    none("filter_zero_advantages", "such groups have no gradient here, and stay in the divisor; "
         "`replay.filter_groups` replaces them"),
    by("advantage.type algorithm.type algo.type", _estimator),
    none("advantage.* buffer.* curriculum.* concurrency.*", "`replay` holds what is under way"),
    every("eval.interval", "evaluation.every_steps"),
    none("eval.*", "`evaluation` poses the task's held-out problems"),
    # ---- trainer
    same("optim.lr", "learner.lr"),
    same("optim.weight_decay", "learner.weight_decay"),
    by("optim.betas1 optim.betas2", lambda value, source: Meant({"learner.betas": [
        source.number("optim.betas1", 0.9), source.number("optim.betas2", 0.999)]})),
    same("optim.max_norm"),
    none("optim.*", "AdamW is the optimizer here"),
    words("scheduler.type", "learner.schedule", {
        "constant": "constant", "linear": "linear", "cosine": "cosine",
    }),
    same("scheduler.warmup_steps", "learner.warmup_steps"),
    none("scheduler.*", "schedules fall to 0 over all updates"),
    by("loss.type", _loss),
    same("loss.dppo_mask_low", "algorithm.policy_loss.dppo.low"),
    same("loss.dppo_mask_high", "algorithm.policy_loss.dppo.high"),
    same("loss.kl_tau", "", "the square of the log ratio to the sampler, on every token"),
    none("loss.adv_tau", "advantages are not scaled"),
    none("loss.*", "the loss is `algorithm.policy_loss: dppo`"),
    switch("model.ac", "learner.gradient_checkpointing"),
    *adapters("model.lora.rank", "model.lora.alpha", "model.lora.target_modules"),
    none("trainer.model.*", "how the learner computes; see `learner.deepspeed`"),
    by("trainer_gpu_ids", _devices),
    none("inference_gpu_ids", "all other GPUs generate; `cluster.rollout_actors.max` bounds them"),
    same("parallel.tp", "cluster.engine.tensor_parallel_size"),
    same("parallel.dp", "cluster.rollout_actors.max", "engines"),
    same("inference.gpu_memory_utilization", "cluster.engine.gpu_memory_utilization"),
    switch("enforce_eager", "cluster.engine.enforce_eager"),
    every("ckpt.interval", "checkpoint.every_steps"),
    same("ckpt.keep_last ckpt.keep", "checkpoint.keep"),
    none("ckpt.*", "checkpoints are in `run.dir`"),
    experiment("wandb.project"),
    file_name("wandb.name"),
    none("wandb.* log.* heartbeat.* metrics_server.*", "the tracker is MLflow here"),
    none("weight_broadcast.* rollout_transport.* *client.* tenant* ^deployment.* ^slurm.* "
         "^inference.* ^launcher.*", PROCESSES),
)  # fmt: skip


def _implied(source: Source) -> Iterable[tuple[str, Any, str]]:
    """Say what prime-rl does where a file says nothing, and we do not."""
    own = "prime-rl's default"
    size = source.number(_SIZE, 1)
    yield "rollout.group_size", int(size), own
    yield "rollout.rollout_batch_size", groups_of(128, size), f"{own}: 128 rollouts"
    yield "algorithm.policy_loss", "dppo", f"{own}: DPPO-TV with the ratio to the sampler"
    if str(source.find("advantage.type", "grpo")) != "max_rl":
        yield "algorithm.norm_adv_by_std_in_grpo", False, "reward - mean, without a deviation"
    yield "algorithm.behavior_penalty", 1e-3, f"{own}: a squared penalty towards the sampler"
    yield "learner.betas", [0.9, 0.999], own
    yield "learner.weight_decay", 0.01, own
    yield "replay.max_staleness", 8, own
    yield "replay.on_stale", "expire", "prime-rl drops what is too old; here it is sampled again"


PRIME_RL = Peer(
    name="prime-rl",
    option="prime-rl",
    signs="orchestrator.* trainer.* rollouts_per_example max_off_policy_steps inference.* "
    "inference_gpu_ids trainer_gpu_ids max_async_level ^batch_size optim.lr env.0.id",
    programs=("prime_rl",),
    rules=_RULES,
    implied=_implied,
)
