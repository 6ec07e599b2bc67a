"""The size of a model, from its `config.json` alone: no weight is read, no memory taken.

Runs in: anywhere. Hides transformers' and peft's classes, which count the parameters on torch's `meta` device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from async_grpo.config.schema import Config
from async_grpo.learner import adapters
from async_grpo.learner.model import PolicyModel


@dataclass(frozen=True, slots=True)
class Shape:
    """`parameters` of the model as engines get it, tied ones once; `trained` ones, adapters included; `frozen` ones; its main dimensions."""

    parameters: int
    trained: int
    frozen: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    kv_heads: int
    head_dim: int


def shape_of(config: Config, model_dir: str | None) -> Shape:
    """Shape of the model in `model_dir` (directory or hub name) or, if None, of the one that will be warm-started.

    Raises SetupError where `model.lora` or `model.freeze` do not fit it, OSError or ValueError for a configuration that cannot be read.
    """
    with torch.device("meta"):
        hf = _warm_started(config) if model_dir is None else AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model_dir, trust_remote_code=config.model.trust_remote_code), trust_remote_code=config.model.trust_remote_code
        )
    parameters = sum(parameter.numel() for parameter in hf.parameters())
    PolicyModel(hf, float32_head=False)  # its head is no layer for adapters
    adapters.restrict(hf, config.model, seed=config.seed, base=str(model_dir))
    trained = sum(parameter.numel() for parameter in hf.parameters() if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in hf.parameters() if not parameter.requires_grad)
    return _with_dimensions(hf.config.get_text_config(), parameters=parameters, trained=trained, frozen=frozen)


def _warm_started(config: Config) -> PreTrainedModel:
    from async_grpo.warm_start_model import build_model, build_tokenizer

    return build_model(config.model.warm_start, build_tokenizer())


def _with_dimensions(text: PretrainedConfig, *, parameters: int, trained: int, frozen: int) -> Shape:
    heads = text.num_attention_heads
    return Shape(
        parameters=parameters, trained=trained, frozen=frozen, layers=text.num_hidden_layers, hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size, vocabulary=text.vocab_size,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
    )
