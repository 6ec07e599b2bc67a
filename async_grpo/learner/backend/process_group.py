"""Joining the learner ranks into a process group.

Runs in: learner ranks. Hides the rendezvous, and what a GPU needs before anything uses it.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.attention import activate_flash_attention_impl

from async_grpo.errors import SetupError

_HOPPER = 9
CONTEXT_BYTES = 2**30
"""What CUDA takes of a GPU for the learner's process, and some for what torch cannot give back."""


def join(device: str, *, timeout_s: float) -> None:
    """Join the group of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, once. timeout_s: of
    collectives.
    """
    if dist.is_initialized():
        return
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        store=rendezvous(rank, ranks, timeout),
        rank=rank,
        world_size=ranks,
        timeout=timeout,
    )


def prepare_gpu(device: str) -> None:
    """Choose the GPU, and attention kernels that take rows of any shape as they come: cuDNN's build
    a plan for every new shape, tens of milliseconds each, and packs hardly ever repeat one. On
    Hopper torch takes FlashAttention 3, where the package `flash_attn_interface` is installed.
    """
    # Streams that share one of CUDA's eight queues wait for each other: ranks that send weights
    # beside training, each over a group of its own, could do so in a circle.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    torch.cuda.set_device(device)
    torch.backends.cuda.enable_cudnn_sdp(False)
    hopper = torch.cuda.get_device_capability(device)[0] == _HOPPER
    if hopper and importlib.util.find_spec("flash_attn_interface") is not None:
        activate_flash_attention_impl("FA3")


def leave_room(nbytes: int) -> None:
    """Bound what torch takes of this rank's GPU, which an engine shares: what torch keeps for later
    would else fill the room that a new engine needs. What CUDA itself takes of each process is none
    of torch's. nbytes: of the engine. Raises SetupError where there is none.
    """
    nbytes += CONTEXT_BYTES
    device = torch.cuda.current_device()
    total = torch.cuda.get_device_properties(device).total_memory
    if nbytes >= total:
        raise SetupError(
            f"the engine that shares the learner's GPU needs {nbytes / 2**30:.1f} GiB of its "
            f"{total / 2**30:.1f} GiB: lower cluster.engine.kv_cache_gb, or set cluster.layout to "
            "split"
        )
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1 - nbytes / total, device)


def rendezvous(rank: int, ranks: int, timeout: timedelta) -> dist.TCPStore:
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
