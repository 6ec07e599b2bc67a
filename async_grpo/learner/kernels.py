"""Fused kernels for RMSNorm, rotary embeddings and SwiGLU: Liger's, which are Triton's.

Runs in: learner ranks on GPUs. Hides which families have them, and that they replace classes and
functions of transformers' own module beside those of the model: a model that is built afterwards
has them too, so they come last. Invariant: the same numbers as the layers that they replace, up to
rounding; the families are those for which the tests say so.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

FAMILIES = frozenset(
    ("glm4", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
)
_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
"""Kernels that would replace a model's own forward pass."""


def fuse(models: Iterable[PreTrainedModel], device: torch.device) -> None:
    """Give the models of known families the kernels, in place; on a CPU none."""
    for hf in models:
        if device.type == "cuda" and hf.config.model_type in FAMILIES:
            replace_layers(hf)


def replace_layers(hf: PreTrainedModel) -> None:
    """Replace what Liger has kernels for in a model of FAMILIES."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[hf.config.model_type]
    known = inspect.signature(apply).parameters
    apply(model=hf, **dict.fromkeys((name for name in _LOSSES if name in known), False))
