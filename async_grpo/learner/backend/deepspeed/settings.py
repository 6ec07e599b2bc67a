"""DeepSpeed's settings, from the learner's.

Runs in: learner ranks. Hides DeepSpeed's names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from async_grpo.config.schema import REFUSED_DEEPSPEED_KEYS, Config


def deepspeed_config(
    config: Config, *, dtype: torch.dtype, world_size: int, device: str
) -> dict[str, Any]:
    """Build the policy's DeepSpeed configuration. Raises ValueError for keys the learner sets."""
    learner = config.learner
    refused = sorted(path for path in _paths(learner.deepspeed) if path in REFUSED_DEEPSPEED_KEYS)
    if refused:
        raise ValueError(
            f"learner.deepspeed may not set {', '.join(refused)}: the learner sets it from "
            "the other settings; remove it"
        )
    if dtype == torch.bfloat16 and learner.zero_stage == 0:
        raise ValueError(
            "learner.zero_stage 0 would add up gradients in bfloat16; set "
            "learner.zero_stage to 1, or model.dtype to float32"
        )
    ours = _common(learner.zero_stage, dtype=dtype, world_size=world_size, device=device) | {
        # backward() only accumulates and step() is the boundary, so every update may have another
        # number of micro-batches.
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # Plain float32 without ZeRO reports no gradient norm: there the learner clips, in a hook of
        # the optimizer.
        "gradient_clipping": learner.grad_clip if learner.zero_stage > 0 else 0.0,
    }
    if dtype == torch.bfloat16:
        ours["data_types"] = {"grad_accum_dtype": "fp32"}
        if learner.zero_stage == 1:
            # Each gradient is added to the float32 sum and freed at once, instead of after the
            # backward pass; and the sum crosses ranks as it is, instead of as a rounded copy.
            ours["bf16"] |= {"immediate_grad_update": True}
            ours["communication_data_type"] = "fp32"
    return _merged(ours, learner.deepspeed)


def reference_config(*, dtype: torch.dtype, world_size: int, device: str) -> dict[str, Any]:
    """Build the DeepSpeed configuration of a frozen model, sharded by stage 3."""
    return _common(3, dtype=dtype, world_size=world_size, device=device)


def _common(stage: int, *, dtype: torch.dtype, world_size: int, device: str) -> dict[str, Any]:
    # whether a GPU communicates beside computing is left to DeepSpeed; gloo cannot
    overlap = {"overlap_comm": False} if device == "cpu" else {}
    return {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": stage, **overlap},
        "steps_per_print": 10**9,
    }


def _paths(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")


def _merged(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in extra.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
