"""Shapes of well-known models, for an estimate where neither the disk nor the hub has the model.

Runs in: anywhere. Source: the models' published `config.json`. Variants for instructions, code and
mathematics have their base model's shape.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class _Shape(NamedTuple):
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = False


_KNOWN = {
    "Qwen2.5-0.5B": _Shape("qwen2", 896, 4864, 24, 14, 2, 64, 151936, True),
    "Qwen2.5-1.5B": _Shape("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True),
    "Qwen2.5-3B": _Shape("qwen2", 2048, 11008, 36, 16, 2, 128, 151936, True),
    "Qwen2.5-7B": _Shape("qwen2", 3584, 18944, 28, 28, 4, 128, 152064),
    "Qwen2.5-14B": _Shape("qwen2", 5120, 13824, 48, 40, 8, 128, 152064),
    "Qwen2.5-32B": _Shape("qwen2", 5120, 27648, 64, 40, 8, 128, 152064),
    "Qwen2.5-72B": _Shape("qwen2", 8192, 29568, 80, 64, 8, 128, 152064),
    "Qwen3-0.6B": _Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True),
    "Qwen3-1.7B": _Shape("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, True),
    "Qwen3-4B": _Shape("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True),
    "Qwen3-8B": _Shape("qwen3", 4096, 12288, 36, 32, 8, 128, 151936),
    "Qwen3-14B": _Shape("qwen3", 5120, 17408, 40, 40, 8, 128, 151936),
    "Qwen3-32B": _Shape("qwen3", 5120, 25600, 64, 64, 8, 128, 151936),
    "Llama-3.2-1B": _Shape("llama", 2048, 8192, 16, 32, 8, 64, 128256, True),
    "Llama-3.2-3B": _Shape("llama", 3072, 8192, 28, 24, 8, 128, 128256, True),
    "Llama-3.1-8B": _Shape("llama", 4096, 14336, 32, 32, 8, 128, 128256),
    "Llama-3.1-70B": _Shape("llama", 8192, 28672, 80, 64, 8, 128, 128256),
    "Llama-3.3-70B": _Shape("llama", 8192, 28672, 80, 64, 8, 128, 128256),
    "Mistral-7B-v0.3": _Shape("mistral", 4096, 14336, 32, 32, 8, 128, 32768),
    "SmolLM2-135M": _Shape("llama", 576, 1536, 30, 9, 3, 64, 49152, True),
    "SmolLM2-360M": _Shape("llama", 960, 2560, 32, 15, 5, 64, 49152, True),
    "SmolLM2-1.7B": _Shape("llama", 2048, 8192, 24, 32, 32, 64, 49152, True),
    "DeepSeek-R1-Distill-Qwen-1.5B": _Shape("qwen2", 1536, 8960, 28, 12, 2, 128, 151936),
    "DeepSeek-R1-Distill-Qwen-7B": _Shape("qwen2", 3584, 18944, 28, 28, 4, 128, 152064),
    "DeepSeek-R1-Distill-Llama-8B": _Shape("llama", 4096, 14336, 32, 32, 8, 128, 128256),
}
_VARIANT = re.compile(r"-(instruct|base|math|coder|chat|thinking|2507)(?=-|$)", re.IGNORECASE)


def names() -> list[str]:
    """List the models whose shapes are known."""
    return list(_KNOWN)


def known_config(model: str) -> PretrainedConfig | None:
    """Build the configuration of the model that a hub name, or the end of a path, names; None for
    an unknown one.
    """
    from transformers import AutoConfig

    name = _VARIANT.sub("", model.rstrip("/").rpartition("/")[2]).lower().removeprefix("meta-")
    shape = next((shape for known, shape in _KNOWN.items() if known.lower() == name), None)
    return None if shape is None else AutoConfig.for_model(**shape._asdict())
