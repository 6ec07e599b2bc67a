"""Threads that stand for learner ranks, with their collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

Collective = Callable[[Tensor], Tensor]


class Ranks:
    """`count` threads that stand for ranks; counts the calls of each and the largest tensor that
    one sent.
    """

    def __init__(self, count: int) -> None:
        self.count, self.calls, self.largest = count, [0] * count, 0
        self._barrier, self._sent = threading.Barrier(count, timeout=20), [torch.empty(0)] * count

    def run(self, work: Callable[[Collective, Collective, int], Tensor]) -> list[Tensor]:
        """What `work(reduce, gather, rank)` returns on each rank."""

        def rank(number: int) -> Tensor:
            def exchange(tensor: Tensor) -> list[Tensor]:
                self.calls[number] += 1
                self._sent[number] = tensor
                self._barrier.wait()
                received = list(self._sent)
                self._barrier.wait()
                return received

            def reduce(tensor: Tensor) -> Tensor:
                assert tensor.dtype == torch.float64 and tensor.numel() < 10
                return torch.stack(exchange(tensor)).sum(0)

            def gather(tensor: Tensor) -> Tensor:
                self.largest = max(self.largest, len(tensor))
                return torch.cat(exchange(tensor))

            return work(reduce, gather, number)

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(rank, range(self.count)))
