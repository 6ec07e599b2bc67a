"""A double of the order of a GPU: what a thread does to tensors runs later, on its current stream,
and freed memory is handed out again as torch's caching allocator does.

Runs in: test processes, beside tests/support/nccl_over_gloo.py, whose streams it uses. Inside `Gpu`
the thread only enqueues, as on a GPU: `copy_` and `cat` run on the current stream's own thread,
views and metadata at once, and an operation that is not known raises. Nothing orders two streams
but what the code under test says (`wait_stream`, `synchronize`), and what is enqueued keeps no
memory from being freed.

Several communicators have no order among them: `Order` draws one in which their buckets arrive.

Memory belongs to the stream on which it was allocated. Freed, it may be handed out on that stream
at once although another stream still reads it, unless that was said (`record_stream`).
"""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import nccl_over_gloo
from tests.support.nccl_over_gloo import Stream, _current_stream

WAIT_S, BEHIND_S = 20.0, 0.001
"""Longest wait of a bucket for the one that comes first, and its distance behind it."""
_aten = torch.ops.aten
_ALLOCATE = (_aten.empty.memory_format, _aten.empty_strided.default)
_AT_ONCE = (
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.detach.default,
    _aten.narrow.default,
    _aten.slice.Tensor,
    _aten.split_with_sizes.default,
    _aten.view.default,
    _aten.view.dtype,
)


class Gpu(TorchDispatchMode):
    """The thread inside works on a GPU, with memory of its own; `reused`: how often it was handed
    out again.
    """

    def __init__(self, copy_s: float = 0.0) -> None:
        """copy_s: how long a copy takes, before it reads; joining tensors as long, or three times
        as long, in turn.
        """
        super().__init__()
        self.reused = 0
        self._copy_s, self._longer = copy_s, itertools.cycle((1, 3))
        self._blocks: list[np.ndarray] = []  # never given back: enqueued work holds addresses
        self._free: dict[Stream, list[tuple[np.ndarray, list[Callable[[], bool]]]]] = {}
        self._returned: deque[tuple[Stream, np.ndarray]] = deque()
        self._readers: dict[int, set[Stream]] = {}

    def __enter__(self) -> Self:
        nccl_over_gloo._thread.gpu = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        nccl_over_gloo._thread.gpu = None
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _AT_ONCE or any(isinstance(one, torch.Tensor) and one.is_meta for one in args):
            return func(*args, **(kwargs or {}))
        if func in _ALLOCATE:
            return self._empty(func(*args, **{**(kwargs or {}), "device": "meta"}))
        if func is _aten.copy_.default:
            target, source = self.address(args[0]), self.address(args[1])
            _current_stream().enqueue(lambda: self._copy(target, source))
            return args[0]
        if func is _aten.cat.default:
            out = self._empty(torch.cat([part.to("meta") for part in args[0]]))
            target, sources = self.address(out), [self.address(part) for part in args[0]]
            seconds = self._copy_s * next(self._longer)
            _current_stream().enqueue(lambda: self._cat(target, sources, seconds))
            return out
        raise NotImplementedError(f"the double of a GPU does not know {func}")

    def address(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, as enqueued work knows it: it does not keep the memory from being
        freed.
        """
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._readers:
            return tensor  # not allocated here
        memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """The tensor's memory is used on `stream` too."""
        address = tensor.untyped_storage().data_ptr()
        if address in self._readers:  # allocated here
            self._readers[address].add(stream)

    def allocated(self) -> int:
        """Bytes that were ever in use at once, at least."""
        return sum(map(len, self._blocks))

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        time.sleep(self._copy_s)
        target.copy_(source)

    def _cat(self, target: torch.Tensor, sources: list[torch.Tensor], seconds: float) -> None:
        time.sleep(seconds)
        torch.cat(sources, out=target)

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        stream, nbytes = _current_stream(), max(like.untyped_storage().nbytes(), 1)
        block = self._take(stream, nbytes)
        memory = block[:]
        weakref.finalize(memory, self._returned.append, (stream, block))
        flat = torch.from_numpy(memory).view(like.dtype)
        return flat.as_strided(like.shape, like.stride())

    def _take(self, stream: Stream, nbytes: int) -> np.ndarray:
        while self._returned:
            owner, block = self._returned.popleft()
            readers = self._readers.pop(block.ctypes.data) - {owner}
            read = [reader.reached() for reader in readers]
            self._free.setdefault(owner, []).append((block, read))
        free = self._free.setdefault(stream, [])
        found = [
            index
            for index, (block, read) in enumerate(free)
            if len(block) >= nbytes and all(done() for done in read)
        ]
        if found:
            self.reused += 1
            block = free.pop(found[-1])[0]
        else:
            block = np.zeros(nbytes, np.uint8)
            self._blocks.append(block)
        self._readers[block.ctypes.data] = set()
        return block


class Order:
    """An order, drawn by a seed, in which the buckets of one publication arrive, which
    communicators send in turn: of two that are under way together the later one may come first.
    Set as `nccl_over_gloo.order`. swapped: buckets that arrived after the next one.
    """

    def __init__(
        self, seed: int, communicators: Sequence[str], buckets: int, *, longest_s: float = 0.002
    ) -> None:
        """longest_s: how long a bucket is on its way, at most."""
        draw = random.Random(seed)
        self._communicators, self._counts = list(communicators), Counter[str]()
        self._delays = [draw.choice((0.0, draw.uniform(0.0, longest_s))) for _ in range(buckets)]
        self.swapped: set[int] = set()
        for bucket in range(buckets - 1 if len(communicators) > 1 else 0):
            if bucket - 1 not in self.swapped and draw.random() < 0.5:
                self.swapped.add(bucket)
        self._arrived: set[int] = set()
        self._changed = threading.Condition()

    @contextmanager
    def __call__(self, communicator: str) -> Iterator[None]:
        with self._changed:
            turn = self._counts[communicator]
            self._counts[communicator] += 1
            bucket = turn * len(self._communicators) + self._communicators.index(communicator)
            early = bucket not in self.swapped
            if not (early or self._changed.wait_for(lambda: bucket + 1 in self._arrived, WAIT_S)):
                raise TimeoutError(f"bucket {bucket + 1} did not come before bucket {bucket}")
        time.sleep(self._delays[bucket] + (0.0 if early else BEHIND_S))
        yield
        with self._changed:
            self._arrived.add(bucket)
            self._changed.notify_all()
