"""Where the parameters of a model live.

Runs in: learner ranks, and any process with a model of its own. Hides whether a process holds a
parameter or a part of it. Invariant: every rank makes the same collective calls in the same order,
whatever it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import TypeVar

import torch
from torch import Tensor, nn

GATHER_BYTES, GPU_GATHER_BYTES = 2**26, 2**29
"""Most bytes that `Division.each` makes whole at once, but for a larger item; and in a weight sync
from GPUs: a layer of a 7B model, of which 2**26 is less than a matrix. With as much that is still
being copied it is 1 GiB, half of what ZeRO-3 keeps whole while it trains, which is free then.
"""
Item = TypeVar("Item")


class Division:
    """Every process holds its model whole. A backend whose ranks share one overrides `sharded`,
    `full_shape` and `gathered`, which is collective then: all ranks make the same calls, and
    exhaust what they iterate over.
    """

    sharded = False
    """Whether no rank holds the whole model."""

    def full_shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole parameter, or buffer."""
        return tuple(parameter.shape)

    def gathered(
        self, parameters: Sequence[nn.Parameter], *, modify: bool = False
    ) -> AbstractContextManager[None]:
        """Make parameters whole inside. modify: keep changes; of a sharded model, rank 0's."""
        return nullcontext()

    def size(self, parameter: Tensor) -> int:
        """Return the number of elements of the whole parameter."""
        return prod(self.full_shape(parameter))

    def each(
        self,
        items: Sequence[Item],
        parameters: Callable[[Item], Sequence[nn.Parameter]],
        *,
        most: int | None = None,
    ) -> Iterator[Item]:
        """Yield items whose parameters are whole until the next one is asked for. most: bytes that
        are whole at once, if not GATHER_BYTES; the same on every rank.
        """
        for bucket in self._buckets(items, parameters, GATHER_BYTES if most is None else most):
            with self.gathered([one for item in bucket for one in parameters(item)]):
                yield from bucket

    def whole(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield named parameters, one at a time, each valid until the next."""
        for name, parameter in module.named_parameters():
            with self.gathered([parameter]):
                yield name, parameter.data

    def metadata(self, module: nn.Module) -> list[tuple[str, tuple[int, ...], str]]:
        """List name, full shape and dtype name of every parameter, in the order of `whole`."""
        return [
            (name, self.full_shape(parameter), str(parameter.dtype).removeprefix("torch."))
            for name, parameter in module.named_parameters()
        ]

    def copy(self, source: nn.Module, target: nn.Module) -> None:
        """Copy the weights of `source` to `target`, of equal architecture."""
        for ours, theirs in zip(source.parameters(), target.parameters(), strict=True):
            with torch.no_grad(), self.gathered([ours]), self.gathered([theirs], modify=True):
                theirs.data.copy_(ours.data)

    def _buckets(
        self, items: Sequence[Item], parameters: Callable[[Item], Sequence[nn.Parameter]], most: int
    ) -> Iterator[list[Item]]:
        """Cut items into units of a gather."""
        bucket: list[Item] = []
        held = 0
        for item in items:
            size = sum(self.size(one) * one.element_size() for one in parameters(item))
            if bucket and held + size > most:
                yield bucket
                bucket, held = [], 0
            bucket.append(item)
            held += size
        if bucket:
            yield bucket


WHOLE = Division()
"""Of a model that this process has for itself."""
