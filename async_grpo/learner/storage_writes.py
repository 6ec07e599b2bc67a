"""Writes of several ranks that fail together.

Runs in: learner ranks. Invariant: a rank whose disk is full goes on through the collective calls of
the others, and all of them learn of it at the same place.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from async_grpo.learner.collectives import gather
from async_grpo.runtime.storage import StorageFailure, reason, storage_error


class Writes:
    """The writes of one rank between two `agree`; after a failed write the others are skipped."""

    def __init__(self) -> None:
        self._error = ""

    def do(self, write: Callable[[], object]) -> None:
        """Call `write`, which may not communicate with other ranks."""
        if self._error:
            return
        try:
            write()
        except Exception as error:
            if (cause := storage_error(error)) is None:
                raise
            self._error = reason(cause)

    def torch(self, value: Any, path: Path) -> None:
        """Write `value` with `torch.save`."""

        def write() -> None:
            with open(path, "wb") as file:  # Python's errors say what is wrong, torch's do not
                torch.save(value, file)

        self.do(write)

    def agree(self) -> None:
        """Raise StorageFailure on every rank if one could not write. Collective."""
        errors = enumerate(gather(self._error))
        if failed := [f"learner rank {rank}: {error}" for rank, error in errors if error]:
            raise StorageFailure("; ".join(failed))
