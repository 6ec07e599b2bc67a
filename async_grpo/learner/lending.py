"""The memory of a rank's GPU, lent to an engine while the learner has nothing to compute.

Runs in: learner ranks. Contents go to page-locked host memory, and storages become empty, not
tensors: whatever views a storage, in any ZeRO stage, still does when its bytes are back. (DeepSpeed
itself can move states for ZeRO-2, for ZeRO-1 in float32, and for ZeRO-3 with its own Adam only.)
Invariant: all bits are back before anything is computed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, UntypedStorage, nn

PIECE_BYTES = 2**28
"""Host memory is taken in such pieces, and kept: torch rounds page-locked blocks up to powers of
two, and locking pages takes longer than copying.
"""


class LentMemory:
    """Takes storages off a device, and brings them back."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._gpu = device, device.type == "cuda"
        self._pieces: list[Tensor] = []
        self._empty: list[tuple[UntypedStorage, int]] = []

    def give(self, *owners: object) -> None:
        """Take all tensors of models and optimizers off the device, if they are there."""
        if self._empty:
            return
        if self._gpu:
            torch.cuda.synchronize(self._device)
        found = {one._cdata: one for one in _storages(list(owners), self._device)}
        self._empty = [(one, one.nbytes()) for one in found.values()]
        for part, kept in self._parts():
            kept.copy_(part)
        for storage, _ in self._empty:
            storage.resize_(0)
        if self._gpu:
            torch.cuda.empty_cache()

    def back(self) -> None:
        """Bring them back."""
        for storage, nbytes in self._empty:
            storage.resize_(nbytes)
        for part, kept in self._parts():
            part.copy_(kept)
        self._empty = []

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of the storages, and where on the host each lies."""
        at = 0
        for storage, nbytes in self._empty:
            whole = torch.empty(0, dtype=torch.uint8, device=self._device)
            whole.set_(storage, 0, (nbytes,))  # type: ignore[call-overload]
            end = at + nbytes
            while at < end:
                piece, offset = divmod(at, PIECE_BYTES)
                if piece == len(self._pieces):
                    new = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._gpu)
                    self._pieces.append(new)
                size = min(end - at, PIECE_BYTES - offset)
                begin = nbytes - (end - at)
                yield whole[begin : begin + size], self._pieces[piece][offset : offset + size]
                at += size


def _storages(left: list[object], device: torch.device) -> Iterator[UntypedStorage]:
    """Storages on the device of all tensors that are reached from models, optimizers, and what
    DeepSpeed makes of them.
    """
    seen: dict[int, object] = {}  # all are kept, so that no other gets the id of one
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, Tensor):
            if one.device.type == device.type and one.untyped_storage().resizable():
                yield one.untyped_storage()
            left += [one.grad if one.is_leaf else None, *vars(one).values()]
        elif isinstance(one, nn.Module):
            left += [*one.parameters(), *one.buffers()]
        elif isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set):
            left += one
        elif type(one).__module__.startswith(("deepspeed.", "torch.optim.")):
            left += vars(one).values()
