"""Weights through CUDA IPC, to engines on the learner's own GPUs: the learner's half.

Runs in: learner ranks, each of which shares its GPU with one engine. The engines' half is the
engine's own (`rollout/engine/vllm/worker.py`). Every rank keeps one copy of the weights on its GPU,
which its engine maps and reads without a way through the host; a publication is complete before the
next is staged.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from async_grpo.config.schema import Config
from async_grpo.errors import SetupError
from async_grpo.weights.layout import Layout, to_wire
from async_grpo.weights.transport import Announcement, WeightOwner, WeightSender

_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*True", re.IGNORECASE)


class IpcSender(WeightSender):
    """A staging copy per rank on that rank's GPU; rank 0 announces the handles of all copies."""

    def __init__(self, owner: WeightOwner) -> None:
        self._owner = owner
        self._layout = Layout(owner.weight_metadata())
        self.note = ""
        self._copy: Tensor | None = None
        self._apart: Tensor | None = None
        self._handles = b""

    @classmethod
    def of(cls, owner: WeightOwner, *, config: Config, key: str) -> Self:
        """Build the sender; it has no settings."""
        return cls(owner)

    def connect(self, address: str, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]:
        """Allocate the copy, and export it once: both sides count every export of memory."""
        if self._copy is None:
            self._copy = self._allocate()
            self._handles = self._handles_of(self._copy)
        return [{"metadata": to_wire(self._layout)} for _ in tensor_parallel_sizes]

    def reserve(self) -> None:
        """Allocate the second copy, where there is none."""
        if self._apart is None:
            self._apart = self._allocate()

    def stage(self, label: str, *, verify: bool, apart: bool = False) -> Announcement:
        """Fill a copy and announce its handles."""
        copy = self._apart if apart else self._copy
        assert copy is not None, "connect() or reserve() comes first"
        self._layout.fill(copy, self._owner.named_weights(), once=apart)
        checksums, name = self._layout.sums(copy, verify=verify)
        torch.cuda.synchronize(self._owner.device)
        handles = self._handles_of(copy) if apart else self._handles
        payload = {"handles": handles, "keep": not apart, "checksums": checksums}
        return Announcement(label, "ipc", payload, name, self._layout.nbytes)

    def release(self) -> None:
        """Free the second copy."""
        self._apart = None

    def close(self) -> None:
        """Free both copies."""
        self._copy = self._apart = None

    def _allocate(self) -> Tensor:
        torch.cuda.empty_cache()  # what torch keeps for later counts as taken
        free, _ = torch.cuda.mem_get_info(self._owner.device)
        if self._layout.nbytes > free:
            raise SetupError(
                f"a copy of the weights for the engine takes {self._layout.nbytes / 2**20:,.0f} "
                f"MiB and the GPU has {free / 2**20:,.0f} MiB free; lower "
                "cluster.engine.kv_cache_gb, or give learner and engines separate GPUs"
            )
        with _mappable():
            return torch.empty(self._layout.nbytes, dtype=torch.uint8, device=self._owner.device)

    def _handles_of(self, copy: Tensor) -> bytes:
        """Pickled GPU -> handle of the copy there. Collective over the ranks."""
        gpu = str(torch.cuda.get_device_properties(self._owner.device).uuid)
        return pickle.dumps(_merge({gpu: reduce_tensor(copy)[1]}))


@contextmanager
def _mappable() -> Iterator[None]:
    """Allocate what another process maps, whatever the user's PYTORCH_ALLOC_CONF: an expandable
    segment is handed over by a system call for which many machines want the right to trace.
    """
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    without, changed = _EXPANDABLE.subn("expandable_segments:False", given)
    if changed:
        torch._C._accelerator_setAllocatorSettings(without)
    try:
        yield
    finally:
        if changed:
            torch._C._accelerator_setAllocatorSettings(given)


def _merge(handles: dict[str, tuple]) -> dict[str, tuple]:
    """GPU -> handle over all learner ranks."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return handles
    gathered: list[dict[str, tuple]] = [{} for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(gathered, handles)
    return {gpu: handle for rank in gathered for gpu, handle in rank.items()}
