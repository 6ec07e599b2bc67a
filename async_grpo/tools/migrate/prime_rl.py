"""prime-rl's keys: one TOML for all its processes, or that of the trainer or the orchestrator.

Runs in: a terminal. Hides prime-rl's names, and what it does where a file says nothing. Invariant:
as of `verl`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from async_grpo.tools.migrate import rule
from async_grpo.tools.migrate.rule import Outcome, Settings, groups_of, number, whole
from async_grpo.tools.migrate.source import Source

_SIZE = "rollouts_per_example"
_UNSCALED = {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False}
_DPPO = "DPPO-TV with the ratio to the sampler"
_GRPO = (_UNSCALED, "reward - mean, without a deviation")


def _batch(value: Any, source: Source) -> Outcome:
    size = source.number(_SIZE, 1)
    groups = {"rollout.rollout_batch_size": groups_of(whole(value), size)}
    return groups, f"rollouts there, groups here: over {size:g} {_SIZE}"


def _row(value: Any, source: Source) -> Outcome:
    """Split `seq_len`, prompt and response together, by what is sampled at most."""
    longest, sampled = whole(value), source.number("sampling.max_tokens")
    found = {"learner.tokens_per_micro_batch": longest}
    if sampled and longest > sampled:
        found["rollout.prompt_length"] = int(longest - sampled)
        return found, "of prompt and response together: what max_tokens leaves is the prompt"
    half = max(1, longest // 2)
    found |= {"rollout.prompt_length": half, "rollout.response_length": half}
    return found, "of prompt and response together, halved here"


def _devices(value: Any, source: Source) -> Outcome:
    ids = value if isinstance(value, list) else [value]
    return {"learner.ranks": max(1, len(ids)), "cluster.layout": "split"}


def _share(value: Any, source: Source) -> Outcome:
    bound = max(1, math.ceil(number(value)))
    return (
        "what is under way there, as a factor of the batch: `replay.outstanding` adapts by "
        f"itself, near {bound} batches"
    )


_RULES = (
    *rule.alike("""
^seed trainer.seed orchestrator.seed wandb.name=run.name ^output_dir max_steps
^model.name=model.path trainer.model.name=model.path orchestrator.model.name=model.path
rollouts_per_example sampling.max_tokens sampling.temperature=rollout.temperature sampling.top_p
sampling.top_k optim.lr=learner.lr optim.weight_decay scheduler.warmup_steps
scheduler.type=learner.schedule optim.max_norm model.ac=learner.gradient_checkpointing
eval.interval=evaluation.every_steps ckpt.interval=checkpoint.every_steps
ckpt.keep_last=checkpoint.keep ckpt.keep wandb.project
parallel.tp=cluster.engine.tensor_parallel_size inference.gpu_memory_utilization enforce_eager
loss.dppo_mask_low=algorithm.policy_loss.dppo.low
loss.dppo_mask_high=algorithm.policy_loss.dppo.high
    """),
    rule.by("seq_len", _row),
    rule.none("inference.model.*", "the engine has the learner's model"),
    # ---- orchestrator
    rule.by("orchestrator.batch_size ^batch_size", _batch),
    rule.same("max_off_policy_steps", note="(step - 1) - version, as staleness is here"),
    rule.same("max_async_level async_level", note="a strict bound per token here").unless(
        rule.given("max_off_policy_steps"), "max_off_policy_steps is the bound that is kept"),
    rule.by("oversampling_factor", _share),
    rule.words("advantage.type algorithm.type algo.type", "algorithm.adv_estimator",
               {"max_rl": "maxrl", "grpo": _GRPO, "default": _GRPO}),
    # ---- trainer
    rule.betas("optim.betas1", "optim.betas2"),
    rule.words("loss.type", "", {"default": {"algorithm.policy_loss": "dppo"}}, _DPPO),
    rule.same("loss.kl_tau", note="the square of the log ratio to the sampler, on every token"),
    *rule.adapters("model.lora.rank", "model.lora.alpha", "model.lora.target_modules"),
    rule.by("trainer_gpu_ids", _devices),
    rule.same("parallel.dp", "cluster.rollout_actors.max", "engines"),
    *rule.left(f"""
^orchestrator.output_dir ^trainer.output_dir -- one directory: `run.dir`
token_batch_size -- batches are counted in groups
micro_batch_size -- `learner.tokens_per_micro_batch`: seq_len
sampling.* -- not while training here: the learner could not repeat it
env.* -- an environment of the package verifiers: a custom task
    (docs/how-to/tools-and-environments.md)
filter_zero_advantages -- such groups have no gradient here, and stay in the divisor;
    `replay.filter_groups` replaces them
advantage.* buffer.* curriculum.* concurrency.* -- `replay` holds what is under way
eval.* -- `evaluation` poses the task's held-out problems
optim.* -- AdamW is the optimizer here
scheduler.* -- schedules fall to 0 over all updates
loss.adv_tau -- advantages are not scaled
loss.* -- the loss is `algorithm.policy_loss: dppo`
trainer.model.* -- how the learner computes; see `learner.deepspeed`
inference_gpu_ids -- all other GPUs generate; `cluster.rollout_actors.max` bounds them
ckpt.* -- checkpoints are in `run.dir`
wandb.* log.* heartbeat.* metrics_server.* -- trackers are `tracking.mlflow` and `tracking.also`
weight_broadcast.* rollout_transport.* *client.* tenant* ^deployment.* ^slurm.* ^inference.*
    ^launcher.* -- {rule.PROCESSES}
    """),
)  # fmt: skip


def _implied(source: Source) -> Iterator[tuple[Settings, str]]:
    own, size = "prime-rl's default", source.number(_SIZE, 1)
    yield {"rollout.group_size": int(size), "learner.betas": [0.9, 0.999],
           "learner.weight_decay": 0.01, "replay.max_staleness": 8}, own  # fmt: skip
    yield {"rollout.rollout_batch_size": groups_of(128, size)}, f"{own}: 128 rollouts"
    yield {"algorithm.policy_loss": "dppo"}, f"{own}: {_DPPO}"
    if str(source.find("advantage.type", "grpo")) != "max_rl":
        yield {"algorithm.norm_adv_by_std_in_grpo": False}, _GRPO[1]
    penalty = {"algorithm.behavior_penalty": 1e-3}
    yield penalty, f"{own}: a squared penalty towards the sampler"
    why = "prime-rl drops what is too old; here it is sampled again"
    yield {"replay.on_stale": "expire"}, why


PRIME_RL = rule.Peer("prime-rl", "prime-rl", ("prime_rl",), _RULES, _implied, signs=(
    "orchestrator.* trainer.* rollouts_per_example max_off_policy_steps inference.* "
    "inference_gpu_ids trainer_gpu_ids max_async_level ^batch_size optim.lr env.0.id"))  # fmt: skip
