"""Weights through CUDA IPC, to engines on the learner's own GPUs: the learner's half.

Runs in: learner ranks, each of which shares its GPU with one engine. The engines' half is
`worker.IpcEngine`. Every rank keeps one copy of the weights on its GPU, which its engine maps and
reads without a way through the host; a publication is complete before the next is staged.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from async_grpo.errors import SetupError
from async_grpo.weights.layout import DIGEST_BYTES, Layout, digest, to_wire
from async_grpo.weights.transport import Announcement, WeightOwner


class IpcSender:
    """A staging copy per rank on that rank's GPU; rank 0 announces the handles of all."""

    def __init__(self, owner: WeightOwner) -> None:
        self._owner = owner
        self._layout = Layout(owner.weight_metadata())
        self.note = ""
        self._copy: Tensor | None = None
        self._apart: Tensor | None = None
        self._handles = b""

    def connect(self, address: str, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]:
        if self._copy is None:
            self._copy = self._allocate()
            self._handles = self._handles_of(
                self._copy
            )  # once: every export of memory is counted by both sides
        return [{"metadata": to_wire(self._layout)} for _ in tensor_parallel_sizes]

    def rendezvous(self) -> str:
        return ""

    def reserve(self) -> None:
        self._apart = self._allocate()

    def stage(self, label: str, *, verify: bool, apart: bool = False) -> Announcement:
        copy = self._apart if apart else self._copy
        self._layout.fill(copy, self._owner.named_weights(), once=apart)
        checksums = (
            self._layout.checksums(copy) if verify or self._layout.nbytes <= DIGEST_BYTES else []
        )
        torch.cuda.synchronize(self._owner.device)
        handles = self._handles_of(copy) if apart else self._handles
        payload = {"handles": handles, "keep": not apart, "checksums": checksums if verify else []}
        return Announcement(
            label, "ipc", payload, digest(checksums) if checksums else "", self._layout.nbytes
        )

    def send(self) -> str:
        return ""

    def release(self) -> None:
        self._apart = None

    def close(self) -> None:
        self._copy = self._apart = None

    def _allocate(self) -> Tensor:
        free, _ = torch.cuda.mem_get_info(self._owner.device)
        if self._layout.nbytes > free:
            raise SetupError(
                "a copy of the weights for the engine takes "
                f"{self._layout.nbytes / 2**20:,.0f} MiB and the GPU has "
                f"{free / 2**20:,.0f} MiB "
                "free; lower cluster.engine.kv_cache_gb, or give learner and engines GPUs "
                "of their own"
            )
        return torch.empty(self._layout.nbytes, dtype=torch.uint8, device=self._owner.device)

    def _handles_of(self, copy: Tensor) -> bytes:
        """How every rank's engine maps that rank's copy. Collective over the ranks."""
        gpu = str(torch.cuda.get_device_properties(self._owner.device).uuid)
        return pickle.dumps(_merge({gpu: reduce_tensor(copy)[1]}))


def _merge(handles: dict[str, tuple]) -> dict[str, tuple]:
    """GPU -> handle over all learner ranks."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return handles
    gathered: list[dict[str, tuple]] = [{} for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(gathered, handles)
    return {gpu: handle for rank in gathered for gpu, handle in rank.items()}
