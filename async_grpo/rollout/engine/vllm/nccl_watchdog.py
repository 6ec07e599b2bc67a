"""NCCL collectives that end: a communicator with a watchdog and checksums, and `within`.

Runs in: learner rank 0 and engine workers, around vLLM's NCCL communicator. Nobody can reach a
process that waits in a collective, so a thread of its own aborts the communicator when none of the
buckets in flight moved in time. Invariants: after an abort every further call raises TornTransfer
(vLLM's communicator would return without having done anything); no thread of this module keeps a
process alive.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from async_grpo.errors import TransferMismatch
from async_grpo.weights.layout import Layout, checksum, mismatch
from async_grpo.weights.transport import BUCKETS_IN_FLIGHT, TornTransfer

T = TypeVar("T")
_SIGN = 2**63


def within(seconds: float, what: str, work: Callable[[], T]) -> T:
    """Run `work`, which may hang for ever, in a thread. Raises TimeoutError after `seconds`."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised in the caller's thread
            result.set_exception(error)

    threading.Thread(target=run, name=f"async_grpo-{what}", daemon=True).start()
    try:
        return result.result(timeout=seconds)
    except TimeoutError:
        if result.done():
            raise
        raise TimeoutError(f"{what} took longer than {seconds:g} s") from None


class WatchedGroup:
    """vLLM's communicators for one publication at a time, whose buckets come over them in turn;
    `aborted`: why they were aborted, or "".
    """

    def __init__(self, groups: Sequence[Any], *, quiet_s: float, first_s: float) -> None:
        """quiet_s: longest time for a bucket. first_s: more for the first, while engines pause."""
        self.rank = groups[0].rank
        self.aborted = ""
        self._groups = groups
        self._first_s, self._quiet_s = first_s, quiet_s * BUCKETS_IN_FLIGHT
        self._layout = Layout([])
        self._verify = False
        self._buckets = self._bytes = 0
        self._moved_at = 0.0
        self._before: tuple[Tensor, Any] | None = None
        self._done = threading.Event()

    def begin(self, layout: Layout, *, verify: bool) -> None:
        """Arm the watchdog. verify: a checksum follows every bucket, and receivers compare it."""
        self._layout, self._verify = layout, verify
        self._buckets = self._bytes = 0
        self._moved_at, self._done = time.monotonic() + self._first_s, threading.Event()
        threading.Thread(
            target=self._watch, args=(self._done,), name="async_grpo-transfer-watchdog", daemon=True
        ).start()

    def end(self) -> None:
        """Disarm the watchdog; raises TornTransfer if it fired."""
        self._done.set()
        self._before = None
        self._raise_if_aborted()

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Broadcast one bucket. Raises TornTransfer, or TransferMismatch for a checksum."""
        self._raise_if_aborted()
        try:
            self._turn().broadcast(tensor, src=src, stream=stream)
            if self._verify:
                self._compare(tensor, src=src, stream=stream)
            if self.rank != src:
                self._follow(tensor, stream or torch.cuda.current_stream())
        except TransferMismatch:
            raise
        except Exception as error:
            self._raise_if_aborted()
            raise TornTransfer(f"bucket {self._buckets + 1} did not go through: {error}") from error
        self._raise_if_aborted()
        self._buckets += 1
        self._bytes += tensor.nbytes
        self._moved_at = max(self._moved_at, time.monotonic())

    def abort(self, reason: str) -> None:
        """Abort the communicators, which frees every thread that waits in them."""
        self.aborted = self.aborted or reason
        for group in self._groups:
            group.destroy()

    def destroy(self) -> None:
        """Leave the group (the name is vLLM's)."""
        self._done.set()
        self.abort("the group was left")

    def _follow(self, tensor: Tensor, stream: Any) -> None:
        """Let what an engine does with a bucket come after what it does with the one before. vLLM
        loads a layer on the stream of its last bucket: those before may still be on their way over
        another communicator, and their memory is of another stream, which would use it again.

        A broadcast waits for no more than it did: vLLM calls it when the one before the one before
        has ended.
        """
        if self._before is not None:
            before, stream_before = self._before
            stream.wait_stream(stream_before)
            before.record_stream(stream)
        self._before = tensor, stream

    def _compare(self, tensor: Tensor, *, src: int, stream: Any) -> None:
        data = tensor.reshape(-1).view(torch.uint8)
        own = torch.tensor([checksum(data) - _SIGN], dtype=torch.int64, device=tensor.device)
        sent = own.clone()
        self._turn().broadcast(sent, src=src, stream=stream)
        if self.rank != src and sent.tolist() != own.tolist():
            raise TransferMismatch(
                mismatch(self._buckets, None, self._names(self._bytes, self._bytes + tensor.nbytes))
            )

    def _turn(self) -> Any:
        """Return the communicator of this bucket."""
        return self._groups[self._buckets % len(self._groups)]

    def _names(self, start: int, end: int) -> Sequence[str]:
        """Names of the tensors in these bytes of the stream, which has no gaps."""
        names, at = [], 0
        for entry in self._layout.entries:
            if start <= at < end:
                names.append(entry.name)
            at += entry.nbytes
        return names

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(max(0.01, self._moved_at + self._quiet_s - time.monotonic())):
            if time.monotonic() - self._moved_at >= self._quiet_s:
                self.abort(
                    f"no bucket moved for {self._quiet_s:g} s ({BUCKETS_IN_FLIGHT} x "
                    f"weight_sync.deadlines.bucket_s), after {self._buckets} buckets"
                )
                return

    def _raise_if_aborted(self) -> None:
        if self.aborted:
            raise TornTransfer(self.aborted)
