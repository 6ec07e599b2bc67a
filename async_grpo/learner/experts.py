"""Mixtures of experts: which parameters are experts, and which route tokens to them.

Runs in: learner ranks, and the driver for estimates. Hides that families name experts and routers
otherwise. Experts are found by their module's name, `experts`, joined into one tensor a layer or
one module each; a router is what stands beside them in the same block and has a row for each.

    block
      experts       [E, ...] tensors, or E modules in a list
      gate, router  weight [E, H], and what goes with it     <- a router
      shared_expert, ...                                     <- every token passes through it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from async_grpo.learner.division import WHOLE, Division

_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
"""Names that configurations give the number of experts of a token."""


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """What of a model a token does not meet, in parameters; the intermediate size of the experts
    that it is routed to; and how many a layer has of those.
    """

    idle: int
    intermediate: int
    chosen: int


@dataclass(frozen=True, slots=True)
class Block:
    """A layer's module with experts, and its name; the module that holds them; their number; where
    the parameters live.
    """

    name: str
    module: nn.Module
    held: nn.Module
    experts: int
    division: Division

    def routers(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters, with their names, of what stands beside the experts and has a row
        for each of them.
        """
        for child, module in self.module.named_children():
            own = dict(module.named_parameters(recurse=False))
            weight = own.get("weight")
            if child == "experts" or weight is None:
                continue
            if self.division.full_shape(weight)[0] == self.experts:
                yield from ((f"{self.name}.{child}.{key}", one) for key, one in own.items())


def blocks(hf: nn.Module, division: Division = WHOLE) -> Iterator[Block]:
    """Yield the layers' blocks that hold several experts."""
    for name, module in hf.named_modules():
        experts = getattr(module, "experts", None)
        if isinstance(experts, nn.ModuleList):
            count = len(experts)
        elif isinstance(experts, nn.Module):
            shapes = [division.full_shape(one) for one in experts.parameters(recurse=False)]
            count = max((shape[0] for shape in shapes if len(shape) == 3), default=0)
        else:
            continue
        if count > 1:
            yield Block(name, module, experts, count, division)


def expert_share(hf: PreTrainedModel) -> ExpertShare | None:
    """Tell what a token meets of a mixture of experts; None for a dense model."""
    found = list(blocks(hf))
    if not found:
        return None
    text = hf.config.get_text_config()
    chosen = next((value for key in _CHOSEN if (value := getattr(text, key, None))), 1)
    idle = 0
    for block in found:
        count = sum(one.numel() for one in block.held.parameters())
        idle += count - count * min(chosen, block.experts) // block.experts
    inner = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    return ExpertShare(idle, chosen * inner + shared, chosen)
