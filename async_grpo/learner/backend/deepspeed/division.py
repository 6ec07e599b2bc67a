"""Where a parameter lives: the differences between DeepSpeed's ZeRO stages.

Runs in: learner ranks. With stages 0 to 2 every rank holds a parameter whole; with stage 3 a rank
holds a slice, and reading it is collective. Invariant: every rank makes the same collective calls
in the same order, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_GATHER_BYTES = 2**26
Item = TypeVar("Item")


@contextmanager
def divided(settings: dict[str, Any]) -> Iterator[None]:
    """Inside, a model that transformers loads is divided over the ranks layer by layer: no rank
    ever holds all of it. Collective. settings: DeepSpeed's, of stage 3.
    """
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    kept = HfDeepSpeedConfig(settings)  # transformers looks at it as long as it lives, anywhere
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del kept


def gathered(
    parameters: Sequence[nn.Parameter], *, modify: bool = False
) -> AbstractContextManager[None]:
    """Make parameters whole inside (stage 3: collective). modify: keep rank 0's changes."""
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0 if modify else None)


def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Copy the weights of `source` to `target`, of equal architecture. Collective with stage 3."""
    for ours, theirs in zip(source.parameters(), target.parameters(), strict=True):
        with torch.no_grad(), gathered([ours]), gathered([theirs], modify=True):
            theirs.data.copy_(ours.data)


def whole(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield named parameters, each valid until the next. Stage 3: all ranks must exhaust them."""
    for name, parameter in module.named_parameters():
        with gathered([parameter]):
            yield name, parameter.data


def metadata(module: nn.Module) -> list[tuple[str, tuple[int, ...], str]]:
    """List name, full shape and dtype name of every parameter, in the order of `whole`."""
    return [
        (name, full_shape(parameter), str(parameter.dtype).removeprefix("torch."))
        for name, parameter in module.named_parameters()
    ]


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole parameter, or buffer."""
    return tuple(parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape)


def buckets(
    items: Sequence[Item], parameters: Callable[[Item], Sequence[nn.Parameter]]
) -> Iterator[list[Item]]:
    """Cut items into units of a gather: up to 64 MiB of parameters, or one larger item."""
    bucket: list[Item] = []
    held = 0
    for item in items:
        size = sum(
            torch.Size(full_shape(parameter)).numel() * parameter.element_size()
            for parameter in parameters(item)
        )
        if bucket and held + size > _GATHER_BYTES:
            yield bucket
            bucket, held = [], 0
        bucket.append(item)
        held += size
    if bucket:
        yield bucket


def gather_together(module: nn.Module) -> None:
    """Let stage 3 gather a module's weights together, whichever of them a rank needs."""
    from deepspeed.utils import set_z3_leaf_module

    set_z3_leaf_module(module, True)
