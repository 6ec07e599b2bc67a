"""Senders for engines on GPUs: CUDA IPC on the same GPU, NCCL to other GPUs.

Runs in: learner ranks. The engines' halves are vLLM's own `ipc` and `nccl` weight-transfer engines.

`IpcSender` keeps two staging copies on the learner's GPU and swaps them: engines map the copy (no host round trip) and pull.
`NcclSender` drives vLLM's trainer-side engine over a group of its own (rank 0 plus every engine worker), which never touches
DeepSpeed's groups. vLLM's engine would command the inference side itself through a client; here the driver does that, with
deadlines and one rank offset per engine, so the client given to it does nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from async_grpo.weights.base import Announcement, WeightOwner


class IpcSender:
    """Two staging copies per rank on that rank's GPU; rank 0 merges the handles by GPU."""

    def __init__(self, owner: WeightOwner) -> None:
        self._owner = owner
        self._copies: list[list[torch.Tensor]] = []
        self._count = 0

    def connect(self, address: str, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]:
        if not self._copies:
            self._copies = [
                [torch.empty(shape, dtype=getattr(torch, dtype), device=self._owner.device) for _, shape, dtype in self._owner.weight_metadata()]
                for _ in (0, 1)
            ]
        return [{"packed": False} for _ in tensor_parallel_sizes]

    def rendezvous(self) -> None:
        pass

    def stage(self, label: str) -> Announcement:
        self._count += 1
        copies = self._copies[self._count % 2]
        for copy, (_, weight) in zip(copies, self._owner.named_weights(), strict=True):
            copy.copy_(weight)
        torch.cuda.synchronize(self._owner.device)
        gpu = str(torch.cuda.get_device_properties(self._owner.device).uuid)
        handles = [{gpu: reduce_tensor(copy)[1]} for copy in copies]
        metadata = self._owner.weight_metadata()
        payload = {
            "names": [name for name, _, _ in metadata], "dtype_names": [dtype for _, _, dtype in metadata],
            "shapes": [list(shape) for _, shape, _ in metadata], "ipc_handles": _merge(handles),
        }
        return Announcement(label, "ipc", payload)

    def send(self) -> None:
        pass

    def close(self) -> None:
        self._copies = []


class NcclSender:
    """vLLM's NCCL trainer engine on rank 0; the other ranks take part in the gather."""

    def __init__(self, owner: WeightOwner) -> None:
        self._owner, self._source = owner, _Source(owner)
        self._info: NCCLTrainerInitInfo | None = None
        self._engine: NCCLTrainerWeightTransferEngine | None = None

    def connect(self, address: str, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]:
        self.close()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        world_size = 1 + sum(tensor_parallel_sizes)
        self._info = NCCLTrainerInitInfo(address, port, world_size, rank=self._owner.rank)
        info, payloads, offset = self._info, [], 1
        for size in tensor_parallel_sizes:
            payloads.append({
                "master_address": address, "master_port": port, "rank_offset": offset, "world_size": world_size, "packed": info.packed,
                "packed_buffer_size_bytes": info.packed_buffer_size_bytes, "packed_num_buffers": info.packed_num_buffers,
            })
            offset += size
        return payloads

    def rendezvous(self) -> None:
        assert self._info is not None, "connect() comes first"
        self._engine = NCCLTrainerWeightTransferEngine.trainer_init(self._info, client=_DriverCommands(), source=self._source)

    def stage(self, label: str) -> Announcement:
        metadata = self._owner.weight_metadata()
        payload = {
            "names": [name for name, _, _ in metadata], "dtype_names": [dtype for _, _, dtype in metadata],
            "shapes": [list(shape) for _, shape, _ in metadata],
        }
        return Announcement(label, "nccl", payload)

    def send(self) -> None:
        assert self._engine is not None, "rendezvous() comes first"
        self._engine.send_weights()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None


class _Source(WeightSource):
    def __init__(self, owner: WeightOwner) -> None:
        self._owner = owner

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, getattr(torch, dtype), shape) for name, shape, dtype in self._owner.weight_metadata()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._owner.named_weights()


class _DriverCommands:
    """The driver sends these commands to the engines itself, at the same time."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        pass

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass


def _merge(handles: list[dict[str, tuple]]) -> list[dict[str, tuple]]:
    """One dict of GPU -> handle per tensor, over all learner ranks."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return handles
    gathered: list[list[dict[str, tuple]]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(gathered, handles)
    return [{gpu: args for rank in gathered for gpu, args in rank[index].items()} for index in range(len(handles))]
