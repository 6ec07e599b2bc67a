"""Sums over the learner ranks.

Runs in: learner ranks. Hides the device from which the process group communicates. Invariant: all
ranks make the same calls in the same order, and get the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Collectives:
    """Sums, maxima and concatenations over the ranks. device: where their tensors must lie
    ("cpu" for gloo, a CUDA device for NCCL). group: of the ranks that take part, if not all do.
    """

    def __init__(self, device: torch.device, *, group: dist.ProcessGroup | None = None) -> None:
        self._device, self._group = device, group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in its shape and on its device."""
        total = tensor.to(self._device, copy=True)
        dist.all_reduce(total, group=self._group)
        return total.to(tensor.device)

    def largest(self, value: float) -> float:
        """Return the largest value of any rank; nan if one has nan."""
        tensor = torch.tensor(value, dtype=torch.float64, device=self._device)
        values = [torch.empty_like(tensor) for _ in range(self._size)]
        dist.all_gather(values, tensor, group=self._group)
        return float(torch.stack(values).max())

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenate over the ranks along the first dimension, whose length may differ."""
        lengths = torch.zeros(self._size, dtype=torch.int64, device=self._device)
        lengths[self._rank] = len(tensor)
        dist.all_reduce(lengths, group=self._group)
        longest = int(lengths.max())
        padded = torch.zeros(longest, *tensor.shape[1:], dtype=tensor.dtype, device=self._device)
        padded[: len(tensor)] = tensor.to(self._device)
        parts = [torch.empty_like(padded) for _ in range(self._size)]
        dist.all_gather(parts, padded, group=self._group)
        pairs = zip(parts, lengths.tolist(), strict=True)
        return torch.cat([part[:length] for part, length in pairs]).to(tensor.device)

    def union(self, values: Sequence[int]) -> list[int]:
        """Merge the values of all ranks, sorted, each once."""
        return sorted(set().union(*gather(list(values))))


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks. Collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
