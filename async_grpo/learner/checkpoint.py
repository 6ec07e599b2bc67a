"""The learner on disk: checkpoints that resume bit for bit, and models for `from_pretrained`.

Runs in: learner ranks. Hides the layout of the files (the learner's state is the backend's), and
how a rank's part of a checkpoint reaches the disk beside the training steps:

    Saving.write    called on all ranks by the thread that trains: model and optimizer into a draft,
                    in memory where all ranks have room, else in DIRECTORY
    Saving.finish   called by another thread while training goes on: the draft is copied, hashed and
                    fsynced into DIRECTORY (a draft that lies there is hashed, fsynced and renamed)

Invariants:

- A storage failure on one rank is an error on every rank, after all of them have gone through the
  same collective calls, so that they can go on with the next step.
- One checkpoint at a time; a draft does not outlive a failure, `close`, or the start of the next
  run on this machine. No rank holds a second copy of the model, or of its part of it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from async_grpo.learner import drafts, weight_files
from async_grpo.learner.collectives import gather
from async_grpo.learner.division import Division
from async_grpo.learner.storage_writes import Writes
from async_grpo.learner.weight_files import Metadata
from async_grpo.runtime import storage
from async_grpo.runtime.storage import FileSum, StorageFailure, Written

if TYPE_CHECKING:
    from async_grpo.learner.learner import Learner

_REFERENCE = "reference"


class Saving:
    """One rank's part of a checkpoint, written and not finished."""

    def __init__(self, learner: Learner, *, key: str) -> None:
        """key: of this start of the run; drafts carry it."""
        self._learner, self._key = learner, key
        self._draft: Path | None = None
        self._count = 0
        drafts.remove_abandoned_drafts()

    def write(self, directory: str, state: dict[str, Any]) -> Written:
        """Write learner (with `state`) and exported model. Collective. Raises StorageFailure on
        every rank, after removing the draft.
        """
        self.discard()
        in_memory, note = self._choose()
        self._count += 1
        draft = Path(directory) / f"draft_{self._learner.rank:02d}"
        if in_memory:
            draft = drafts.draft_in_memory(self._key, self._count)
        self._draft = draft
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
        return Written(sum(gather(mine)), in_memory, note, self._learner.updates)

    def finish(self, directory: str) -> dict[str, FileSum]:
        """Bring the draft into `directory`. Returns size and checksum of every file by its name
        there. Raises OSError, after removing the draft.
        """
        draft, target = self._draft, Path(directory)
        if draft is None:
            raise RuntimeError("finish without write")
        self._draft = None  # a call that hangs on its storage must leave the next draft alone
        try:
            sums = {}
            for path in sorted(path for path in draft.rglob("*") if path.is_file()):
                name = path.relative_to(draft)
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                sums[str(name)] = storage.move(path, target / name)
            return sums
        finally:
            _remove(draft)

    def discard(self) -> None:
        """Remove the draft, unless it is being finished."""
        draft, self._draft = self._draft, None
        if draft is not None:
            _remove(draft)

    def _choose(self) -> tuple[bool, str]:
        """Whether all ranks write into memory, and the reason if they do not."""
        ranks = gather((*drafts.room(), self._learner.bytes_to_save()))
        if drafts.fits(ranks):
            return True, ""
        free, needed = min(rank[1] for rank in ranks), sum(rank[2] for rank in ranks)
        return False, (
            f"{drafts.SEGMENT_DIR} and memory have room for {max(free, 0) / 2**20:,.0f} "
            f"MiB, and it may take {needed / 2**20:,.0f} MiB"
        )


def save_reference(module: torch.nn.Module, directory: str, *, division: Division) -> None:
    """Write a refreshed reference. Collective. Raises StorageFailure."""
    out = Writes()
    target, weights = Path(directory) / _REFERENCE, division.whole(module)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    out.do(lambda: target.mkdir(parents=True, exist_ok=True))
    weight_files.write(division.metadata(module), weights, target, rank=rank, ranks=ranks, out=out)
    out.agree()


def load_reference(module: torch.nn.Module, directory: str, *, division: Division) -> None:
    """Restore what `save_reference` wrote, or earlier versions of it, in one file. Collective.
    Raises ValueError.
    """
    files, old = Path(directory) / _REFERENCE, Path(directory) / f"{_REFERENCE}.pt"
    if (files / weight_files.INDEX).is_file():
        weight_files.read(module, files, division=division)
        return
    if not old.is_file():
        raise ValueError(
            f"{files} is missing: the checkpoint says that the reference had been "
            "refreshed; resume from another checkpoint"
        )
    kept = torch.load(old, weights_only=True, mmap=True)
    for name, parameter in module.named_parameters():
        with torch.no_grad(), division.gathered([parameter], modify=True):
            parameter.data.copy_(kept[name])


def export(
    model: PreTrainedModel,
    metadata: Metadata,
    weights: Iterator[tuple[str, Tensor]],
    directory: str,
    *,
    rank: int,
) -> None:
    """Write config and weight files, each rank its part. Collective: every rank exhausts `weights`.
    Raises StorageFailure.
    """
    target, out = Path(directory), Writes()
    if rank == 0:
        out.do(lambda: _write_config(model, target))
    weight_files.write(metadata, weights, target, rank=rank, ranks=dist.get_world_size(), out=out)
    out.agree()


def _write_config(model: PreTrainedModel, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(target)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(target)


def _remove(draft: Path) -> None:
    # the directory around it may be gone, or the disk broken
    shutil.rmtree(draft, ignore_errors=True)
