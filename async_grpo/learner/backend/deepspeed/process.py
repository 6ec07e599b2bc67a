"""Joining the learner ranks into a group, before DeepSpeed does anything.

Runs in: learner ranks. DeepSpeed is imported inside functions, because it chooses its accelerator
when imported.
"""

from __future__ import annotations

import os
import socket
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist


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
