"""One rank's part of a checkpoint: written between two learner steps, brought to the disk beside them.

Runs in: learner ranks. `write` is called on all ranks by the thread that trains, `finish` by another thread while training goes on:

    model, optimizer --write--> draft, in memory where all ranks have room --finish--> copied, hashed, fsynced --> DIRECTORY
                               or in DIRECTORY, and then `finish` only hashes, fsyncs and renames

Invariants: one checkpoint at a time; a draft does not outlive a failure, `close`, or the start of the next run on this machine.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from async_grpo import durable
from async_grpo.durable import FileSum, StorageFailure, Written
from async_grpo.learner import drafts
from async_grpo.learner.learner import Learner
from async_grpo.learner.store import Writes


class Saving:
    """What a rank has written and not finished."""

    def __init__(self, learner: Learner, *, key: str) -> None:
        """key: of this start of the run."""
        self._learner, self._key = learner, key
        self._draft: Path | None = None
        self._count = 0
        drafts.remove_abandoned_drafts()

    def write(self, directory: str, state: dict[str, Any]) -> Written:
        """Write learner (with `state`) and exported model. Collective. Raises StorageFailure on every rank, and nothing is left then."""
        self.discard()
        in_memory, note = self._choose()
        self._count += 1
        own = drafts.draft_in_memory(self._key, self._count) if in_memory else Path(directory) / f"draft_{self._learner.rank:02d}"
        draft = self._draft = own
        _remove(draft)  # of a learner that died while it wrote this checkpoint
        try:
            writes = Writes()
            writes.do(lambda: (draft / "learner").mkdir(mode=0o700, parents=True))
            writes.agree()
            self._learner.save(str(draft / "learner"), state)
            self._learner.export(str(draft / "hf"))
        except StorageFailure:
            self.discard()
            raise
        mine = sum(path.stat().st_size for path in draft.rglob("*") if path.is_file())
        return Written(sum(_gather(mine)), in_memory, note, self._learner.updates)

    def finish(self, directory: str) -> dict[str, FileSum]:
        """Bring what was written into `directory`; size and checksum of every file by its name there. Raises OSError, and nothing is left in memory."""
        draft, target = self._draft, Path(directory)
        if draft is None:
            raise RuntimeError("finish without write")
        self._draft = None  # one that hangs on its storage must not take the next draft with it
        try:
            sums = {}
            for path in sorted(path for path in draft.rglob("*") if path.is_file()):
                name = path.relative_to(draft)
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                sums[str(name)] = durable.move(path, target / name)
            return sums
        finally:
            _remove(draft)

    def discard(self) -> None:
        """Remove what has been written and is not being finished."""
        draft, self._draft = self._draft, None
        if draft is not None:
            _remove(draft)

    def _choose(self) -> tuple[bool, str]:
        """Whether all ranks write into memory; and why not."""
        wanted = self._learner.bytes_to_save()
        ranks = _gather((*drafts.room(), wanted))
        if drafts.fits(ranks):
            return True, ""
        needed, free = (sum(rank[2] for rank in ranks), min(rank[1] for rank in ranks))
        return False, f"{drafts.SEGMENT_DIR} and memory have room for {max(free, 0) / 2**20:,.0f} MiB, and it may take {needed / 2**20:,.0f} MiB"


def _remove(draft: Path) -> None:
    shutil.rmtree(draft, ignore_errors=True)  # the directory around it may be gone, or the disk broken


def _gather(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
