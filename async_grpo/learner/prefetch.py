"""Micro-batches prepared one ahead: while a GPU computes one, a thread packs the next.

Runs in: learner ranks. Copies go from pinned memory and nothing waits for them: the caching
allocators of torch keep both ends until the copy is done. On a CPU, where packing takes a
thousandth of the time and a thread would take turns with the computing one, each comes in turn.

    caller      | compute 0      | compute 1      | compute 2
    thread      | pack 0 | pack 1 |       | pack 2 |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Item = TypeVar("Item")
Ready = TypeVar("Ready")


def ahead(
    prepare: Callable[[Item], Ready], items: Iterable[Item], *, device: torch.device
) -> Iterator[Ready]:
    """Yield `prepare(item)` of each item in order; where `device` is a GPU, the next one is made
    ready meanwhile in a thread. What `prepare` raises is raised here.
    """
    if device.type == "cpu":
        yield from map(prepare, items)
        return
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="async_grpo-packing") as thread:
        waiting = None
        for item in items:
            following = thread.submit(prepare, item)
            if waiting is not None:
                yield waiting.result()
            waiting = following
        if waiting is not None:
            yield waiting.result()


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device; on a GPU without waiting for it. On the CPU both share memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
