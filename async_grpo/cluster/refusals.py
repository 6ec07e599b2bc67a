"""What a configuration cannot be run with on the machines that it has.

Runs in: the driver, once the places are known. Hides nothing. Invariant: a refusal is one sentence that names the settings and what to do.
"""

from __future__ import annotations

from async_grpo.config.schema import Config
from async_grpo.errors import SetupError
from async_grpo.weights.delivery import UNDER_WAY


def refuse(config: Config, *, device: str, backend: str) -> None:
    """Raise SetupError for what is wrong on this device (`cpu` or `cuda`), or with this way to send weights."""
    _refuse_bfloat16_without_zero(config, device)
    _refuse_seeds_that_cannot_pause(config, device)
    _refuse_short_acknowledgement(config, backend)


def _refuse_bfloat16_without_zero(config: Config, device: str) -> None:
    dtype = config.model.dtype
    if config.learner.zero_stage == 0 and (dtype == "bfloat16" or (dtype == "auto" and device == "cuda")):
        raise SetupError(
            "`learner.zero_stage` is 0 and the model is bfloat16: gradients would be added up in bfloat16; use stage 1, 2 or 3, or "
            "model.dtype=float32."
        )


def _refuse_short_acknowledgement(config: Config, backend: str) -> None:
    deadlines = config.weight_sync.deadlines
    least = deadlines.pause_s + UNDER_WAY * deadlines.bucket_s + deadlines.resume_s
    if backend == "nccl" and deadlines.acknowledge_s <= least:
        raise SetupError(
            f"`weight_sync.deadlines.acknowledge_s` is {deadlines.acknowledge_s:g}, and engines that are cut off notice it only after up to "
            f"{least:g} s (pause_s + {UNDER_WAY} x bucket_s + resume_s): they would be taken for the culprit; raise it, or lower those."
        )


def _refuse_seeds_that_cannot_pause(config: Config, device: str) -> None:
    if device == "cpu" and config.seeded and config.replay.max_staleness > 0 and config.weight_sync.kv_cache == "recompute":
        raise SetupError(
            "`rollout.seeded` is on: on CPU, vLLM dies when a seeded response is preempted by a publication; use rollout.seeded=off, "
            "weight_sync.kv_cache=keep, or replay.max_staleness=0."
        )
