"""A run's processes without the processes, for the tests of checkpoints: one rank in this process,
whose learner writes files of bytes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from async_grpo.config.operation import Checkpoint
from async_grpo.learner.checkpoint import Saving, Writes
from async_grpo.run.checkpoint.saver import Saver
from async_grpo.runtime.listener import RunListener
from async_grpo.runtime.storage import FileSum, StorageFailure, Written, reason

KEY = "testsaving"


class BytesLearner:
    """What a rank's saving needs of a learner: `files` files of `size` random bytes."""

    rank, updates = 0, 12

    def __init__(self, *, files: int = 2, size: int = 1000) -> None:
        self.files, self.size = files, size

    def bytes_to_save(self) -> int:
        return (self.files + 1) * self.size

    def save(self, directory: str, state: dict[str, Any]) -> None:
        writes = Writes()
        for index in range(self.files):
            writes.do(lambda index=index: _write(Path(directory) / f"state_{index}.pt", self.size))
        writes.agree()

    def export(self, directory: str) -> None:
        writes = Writes()
        writes.do(lambda: _write(Path(directory) / "model.safetensors", self.size))
        writes.agree()


class OneRank:
    """The real half of a rank as `SavedParts`. `before_finish` is awaited before the files are
    brought to the disk.
    """

    def __init__(self, learner: BytesLearner, *, key: str = KEY) -> None:
        self.saving = Saving(learner, key=key)
        self.segment = 0
        self.forgotten: list[tuple[int, int]] = []
        self.before_finish: Callable[[], Any] | None = None

    async def save(self, directory: Path) -> tuple[dict[str, Any], Written]:
        self.segment += 1
        return {"segment": self.segment}, self.saving.write(str(directory), {})

    async def finish_save(self, directory: Path) -> dict[str, FileSum]:
        if self.before_finish is not None:
            await self.before_finish()
        try:
            return await asyncio.to_thread(self.saving.finish, str(directory))
        except OSError as error:
            raise StorageFailure(reason(error)) from error

    async def forget(self, *, segment: int, step: int) -> None:
        self.forgotten.append((segment, step))


def make_saver(
    run_dir: Path, listener: RunListener, *, keep: int = 2, max_failures: int = 3
) -> Saver:
    return Saver(
        Checkpoint(keep=keep, max_failures=max_failures),
        run_dir,
        facts={"code": {}},
        timeout_s=30.0,
        listener=listener,
        add_files=lambda directory: _write(directory / "hf" / "tokenizer.json", 10),
    )


def join_alone(directory: Path) -> None:
    """A process group of this process, which a rank's half communicates in."""
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous-{os.getpid()}", rank=0, world_size=1
    )


def _write(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))
