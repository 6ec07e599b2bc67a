"""DeepSpeed's settings, the differences between its ZeRO stages, and sums over the learner ranks.

Runs in: learner ranks. Hides where a parameter lives (with stages 0 to 2 every rank holds it whole,
with stage 3 a rank holds a slice, and reading it is collective), and the device from which the
process group communicates. DeepSpeed is imported inside functions, because it chooses its
accelerator when imported. Invariant: every rank makes the same collective calls in the same order,
whatever it holds, and all get the same result.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from async_grpo.config.schema import REFUSED_DEEPSPEED_KEYS, Config

_GATHER_BYTES = 2**26
Item = TypeVar("Item")


def start(device: str, *, timeout_s: float) -> None:
    """Join the group of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, once. timeout_s: of
    collectives.
    """
    cpu = device == "cpu"
    if cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    else:
        prepare_gpu(device)
    import deepspeed

    if cpu:  # on a GPU the list of its operations would probe compilers for seconds
        from deepspeed.ops import __compatible_ops__

        # Otherwise DeepSpeed compiles a shared-memory collective at this point, which needs a
        # compiler and ninja; gloo does the same work.
        __compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed calls collectives by names that torch has deprecated; every call would print a
    # warning.
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    backend, timeout = "gloo" if cpu else "nccl", timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            backend,
            store=_store(rank, ranks, timeout),
            rank=rank,
            world_size=ranks,
            timeout=timeout,
        )
    deepspeed.init_distributed(
        dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout
    )


def prepare_gpu(device: str) -> None:
    """Choose the GPU, and attention kernels that take rows of any shape as they come: cuDNN's build
    a plan for every new shape, tens of milliseconds each, and packs hardly ever repeat one.
    """
    # Streams that share one of CUDA's eight queues wait for each other: ranks that send weights
    # beside training, each over a group of its own, could do so in a circle.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    torch.cuda.set_device(device)
    torch.backends.cuda.enable_cudnn_sdp(False)


def _store(rank: int, ranks: int, timeout: timedelta) -> dist.TCPStore:
    """Open the rendezvous of the ranks. Rank 0 listens on MASTER_ADDR alone, where torch would take
    every interface; where MASTER_LISTEN_FD is set, that socket listens already.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if host.startswith("127."):  # else connections between ranks go by the machine's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if rank > 0:
        return dist.TCPStore(host, port, ranks, timeout=timeout)
    if "MASTER_LISTEN_FD" in os.environ:
        listener = socket.socket(fileno=int(os.environ.pop("MASTER_LISTEN_FD")))
    else:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=1024)
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        ranks,
        is_master=True,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def deepspeed_config(
    config: Config, *, dtype: torch.dtype, world_size: int, device: str
) -> dict[str, Any]:
    """Build the policy's DeepSpeed configuration. Raises ValueError for keys the learner sets."""
    learner = config.learner
    refused = sorted(path for path in _paths(learner.deepspeed) if path in REFUSED_DEEPSPEED_KEYS)
    if refused:
        raise ValueError(
            f"learner.deepspeed may not set {', '.join(refused)}: the learner sets it from "
            "the other settings; remove it"
        )
    bf16 = dtype == torch.bfloat16
    if bf16 and learner.zero_stage == 0:
        raise ValueError(
            "learner.zero_stage 0 would add up gradients in bfloat16; set "
            "learner.zero_stage to 1, or model.dtype to float32"
        )
    ours: dict[str, Any] = {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # backward() only accumulates and step() is the boundary, so every update may have another
        # number of micro-batches.
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # Plain float32 without ZeRO reports no gradient norm: there the learner clips, in a hook of
        # the optimizer.
        "gradient_clipping": learner.grad_clip if learner.zero_stage > 0 else 0.0,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": learner.zero_stage, **_overlap(device)},
        "steps_per_print": 10**9,
    }
    if bf16:
        ours["data_types"] = {"grad_accum_dtype": "fp32"}
    return _merged(ours, learner.deepspeed)


def reference_config(*, dtype: torch.dtype, world_size: int, device: str) -> dict[str, Any]:
    """Build the DeepSpeed configuration of a frozen model, sharded by stage 3."""
    return {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": 3, **_overlap(device)},
        "steps_per_print": 10**9,
    }


@contextmanager
def divided(settings: dict[str, Any] | None) -> Iterator[None]:
    """Inside, a model that transformers loads is divided over the ranks layer by layer, where
    `settings` are DeepSpeed's of stage 3: no rank ever holds all of it. Collective. None: no
    division.
    """
    if settings is None:
        yield
        return
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    kept = HfDeepSpeedConfig(settings)  # transformers looks at it as long as it lives, anywhere
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del kept


def _overlap(device: str) -> dict[str, bool]:
    """Leave it to DeepSpeed whether a GPU communicates beside computing; gloo cannot."""
    return {"overlap_comm": False} if device == "cpu" else {}


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


def _paths(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")


def _merged(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in extra.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


class Collectives:
    """Sums, maxima and concatenations over the ranks. device: where the group's tensors must lie
    ("cpu" for gloo, a CUDA device for NCCL).
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._world_size = device, dist.get_world_size()

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in its shape and on its device."""
        total = tensor.to(self._device, copy=True)
        dist.all_reduce(total)
        return total.to(tensor.device)

    def maximum(self, value: int) -> int:
        """Return the largest value of any rank."""
        tensor = torch.tensor(value, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def largest(self, value: float) -> float:
        """Return the largest value of any rank; nan if one has nan."""
        tensor = torch.tensor(value, dtype=torch.float64, device=self._device)
        values = [torch.empty_like(tensor) for _ in range(self._world_size)]
        dist.all_gather(values, tensor)
        return float(torch.stack(values).max())

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenate over the ranks along the first dimension, whose length may differ."""
        lengths = torch.zeros(self._world_size, dtype=torch.int64, device=self._device)
        lengths[dist.get_rank()] = len(tensor)
        dist.all_reduce(lengths)
        longest = int(lengths.max())
        padded = torch.zeros(longest, *tensor.shape[1:], dtype=tensor.dtype, device=self._device)
        padded[: len(tensor)] = tensor.to(self._device)
        parts = [torch.empty_like(padded) for _ in range(self._world_size)]
        dist.all_gather(parts, padded)
        pairs = zip(parts, lengths.tolist(), strict=True)
        return torch.cat([part[:length] for part, length in pairs]).to(tensor.device)

    def union(self, values: Sequence[int]) -> list[int]:
        """Merge the values of all ranks, sorted, each once."""
        gathered: list[Any] = [None] * self._world_size
        dist.all_gather_object(gathered, list(values))
        return sorted({value for part in gathered for value in part})
