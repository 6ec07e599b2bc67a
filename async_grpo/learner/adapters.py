"""The trained part of a model: all of it, what `model.freeze` leaves, or LoRA adapters (by peft).

Runs in: learner ranks. Hides peft. Invariants:

- What text does not go through (a model's tower for images) stays as it is: it has no gradient, and
  an optimizer would decay it.

- Adapters stand beside the weights, W x + scaling B A x; base weights never change, and checkpoints
  have their fingerprint alone.
- Adapters start as no change at all (B is zero) and equal on every rank; the language-model head
  and the embeddings get none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from async_grpo.config.schema import Lora, Model
from async_grpo.errors import SetupError
from async_grpo.learner.division import WHOLE, Division
from async_grpo.learner.experts import Block, blocks
from async_grpo.learner.storage_writes import Writes

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

_ADAPTER = "default"
FACTOR = "base_model.model.{}.lora_{}.weight"
"""Peft's name of a layer's factor, A or B."""


class UntrainableError(SetupError, ValueError):
    """A setting names layers that the model does not have, or leaves nothing to train."""


def restrict(
    hf: PreTrainedModel, settings: Model, *, seed: int, base: str, division: Division = WHOLE
) -> None:
    """Freeze, or attach adapters. base: the model's directory. Raises UntrainableError."""
    mixtures = list(blocks(hf, division))
    if settings.lora is not None:
        _attach(hf, settings.lora, mixtures, seed=seed, base=base)
        return
    for parameter in _beside_text(hf):
        parameter.requires_grad_(False)
    if settings.freeze:
        _freeze(hf, settings.freeze)
    if settings.router == "frozen":
        _freeze_routers(hf, mixtures)


def _beside_text(hf: PreTrainedModel) -> list[nn.Parameter]:
    """Find the parameters that text does not go through: of a model that has its language model
    inside, all others.
    """
    if hf.config.get_text_config() is hf.config:
        return []
    parts = (hf.get_decoder(), hf.get_input_embeddings(), hf.get_output_embeddings())
    inside = {id(parameter) for part in parts for parameter in part.parameters()}
    return [parameter for parameter in hf.parameters() if id(parameter) not in inside]


def _freeze(hf: PreTrainedModel, patterns: Sequence[str]) -> None:
    named = dict(hf.named_parameters())  # a tied head is not among them
    for pattern in patterns:
        matching = [name for name in named if re.search(pattern, name)]
        if not matching:
            tied = (
                "; a tied head follows the embedding"
                if hf.get_output_embeddings().weight is hf.get_input_embeddings().weight
                else ""
            )
            raise UntrainableError(
                f"model.freeze has {pattern!r}, which matches no parameter name of the "
                f"model (one is {next(iter(named))}{tied})"
            )
        for name in matching:
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise UntrainableError(
            f"model.freeze {list(patterns)} leaves nothing to train; take patterns out"
        )


def _freeze_routers(hf: PreTrainedModel, mixtures: Sequence[Block]) -> None:
    routers = [parameter for block in mixtures for _, parameter in block.routers()]
    if not routers:
        raise UntrainableError(
            f"model.router is frozen, but {hf.config.model_type} has no router of experts: leave "
            "it out"
        )
    for parameter in routers:
        parameter.requires_grad_(False)


def _attach(
    hf: PreTrainedModel, lora: Lora, mixtures: Sequence[Block], *, seed: int, base: str
) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        # whole names, since peft also looks for shorter ones in tensors that hold all experts
        target_modules=_targets(hf, lora, mixtures),
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, hf, adapter_name=_ADAPTER)
        except ValueError as error:
            raise UntrainableError(
                f"model.lora cannot be put on this {hf.config.model_type}: {error}; name layers in "
                "model.lora.target_modules"
            ) from error


def _targets(hf: PreTrainedModel, lora: Lora, mixtures: Sequence[Block]) -> list[str]:
    """Find the layers that get adapters: linear ones, no head and no router. Raises
    UntrainableError.
    """
    beside = {id(parameter) for parameter in _beside_text(hf)}
    head = hf.get_output_embeddings()
    linear = [
        name
        for name, module in hf.named_modules()
        if isinstance(module, nn.Linear) and module is not head and id(module.weight) not in beside
    ]
    if isinstance(lora.target_modules, str):
        routers = {name.rpartition(".")[0] for block in mixtures for name, _ in block.routers()}
        if not (found := [name for name in linear if name not in routers]):
            raise UntrainableError(
                f"model.lora found no linear layer in {hf.config.model_type}; train it without "
                "adapters"
            )
        return found
    chosen: set[str] = set()
    for target in lora.target_modules:
        if any(target in dict(block.held.named_parameters()) for block in mixtures):
            raise UntrainableError(
                f"model.lora.target_modules has {target!r}, one tensor with all experts of a "
                "layer. Adapters need linear layers: leave it out; experts then stay frozen"
            )
        matching = {
            name
            for name, module in hf.named_modules()
            if (name == target or name.endswith(f".{target}"))
            and not any(id(parameter) in beside for parameter in module.parameters())
        }
        if not matching or not matching <= set(linear):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise UntrainableError(
                f"model.lora.target_modules has {target!r}, which is no linear layer that "
                f"adapters can be put on; there are: {known}"
            )
        chosen |= matching
    return sorted(chosen)


def layers(hf: nn.Module) -> dict[str, LoraLayer]:
    """Find the layers with an adapter, by module name."""
    return {
        name: module
        for name, module in hf.named_modules()
        if isinstance(getattr(module, "lora_A", None), nn.ModuleDict)
    }


def factors(layer: LoraLayer) -> tuple[nn.Parameter, nn.Parameter, float]:
    """Return A [rank, in], B [out, rank] and the scaling of their product."""
    return layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight, layer.scaling[_ADAPTER]


@contextmanager
def switched_off(hf: nn.Module) -> Iterator[None]:
    """Inside the block the model is its base. Adapters are still computed, with weight 0: all
    passes of a sharded model must call the same modules in the same order.
    """
    scalings = [(layer, layer.scaling[_ADAPTER]) for layer in layers(hf).values()]
    try:
        for layer, _ in scalings:
            layer.scaling[_ADAPTER] = 0.0
        yield
    finally:
        for layer, scaling in scalings:
            layer.scaling[_ADAPTER] = scaling


def base(hf: PreTrainedModel, division: Division) -> dict[str, str]:
    """Return the directory of the weights under the adapters, and their fingerprint. Collective."""
    total = hashlib.sha256()
    for name, tensor in division.whole(hf):
        if ".lora_" not in name:
            total.update(name.encode())
            total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    path = hf.peft_config[_ADAPTER].base_model_name_or_path
    return {"path": str(path), "sha256": total.hexdigest()}


def export(hf: PreTrainedModel, directory: Path, *, division: Division, writes: bool) -> None:
    """Write adapters for `PeftModel.from_pretrained`. Collective. Raises StorageFailure."""
    named = [
        (FACTOR.format(name, part), factor)
        for name, layer in layers(hf).items()
        for part, factor in zip("AB", factors(layer)[:2], strict=True)
    ]
    tensors: dict[str, Tensor] = {}
    for name, factor in division.each(named, lambda item: (item[1],)):
        if writes:
            tensors[name] = factor.detach().to("cpu", copy=True).contiguous()

    def write() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        hf.peft_config[_ADAPTER].save_pretrained(str(directory))
        save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})

    out = Writes()
    if writes:
        out.do(write)
    out.agree()
