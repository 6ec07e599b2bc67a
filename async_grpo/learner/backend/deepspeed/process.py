"""Joining the learner ranks into a group, before DeepSpeed does anything.

Runs in: learner ranks. DeepSpeed is imported inside functions, because it chooses its accelerator
when imported.
"""

from __future__ import annotations

import os
import warnings
from datetime import timedelta

import torch.distributed as dist

from async_grpo.learner.backend.process_group import join, prepare_gpu


def start(device: str, *, timeout_s: float) -> None:
    """Join the process group, for DeepSpeed too. timeout_s: of collectives."""
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
    join(device, timeout_s=timeout_s)
    deepspeed.init_distributed(
        dist_backend=dist.get_backend(),
        auto_mpi_discovery=False,
        verbose=False,
        timeout=timedelta(seconds=timeout_s),
    )
