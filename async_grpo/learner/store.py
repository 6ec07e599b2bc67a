"""The learner on disk: DeepSpeed checkpoints that resume bit for bit, and models for `from_pretrained`.

Runs in: learner ranks. Hides the file layout. Invariants: a checkpoint continues only under the ZeRO stage and dtype that wrote it, and
with stage 3 under as many ranks; a model file never has more than 4 GiB, so no rank holds a second copy of the model; what one rank
cannot write is an error on every rank, after all of them have gone through the same collective calls, so that they can go on with the
next step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from async_grpo.durable import StorageFailure, reason, storage_error
from async_grpo.learner import reshard

_TAG = "learner"
_RANKS = "learner.ranks"
_REFERENCE = "reference.pt"
_SHARD_BYTES = 2**32


class Writes:
    """What one rank writes between two `agree`: after the first write that the storage refuses the others are left out."""

    def __init__(self) -> None:
        self._error = ""

    def do(self, write: Callable[[], None]) -> None:
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
        """Write a file of `torch.save`."""
        def write() -> None:
            with open(path, "wb") as file:  # of Python's, whose errors say what is wrong
                torch.save(value, file)

        self.do(write)

    def agree(self) -> None:
        """Raise StorageFailure on every rank if one could not write. Collective."""
        errors: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(errors, self._error)
        if any(errors):
            raise StorageFailure("; ".join(f"learner rank {rank}: {error}" for rank, error in enumerate(errors) if error))


class _CheckpointWriter:
    """DeepSpeed's way to files, through `Writes`."""

    def __init__(self, writes: Writes) -> None:
        self._writes = writes

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._writes.do(lambda: Path(path).mkdir(parents=True, exist_ok=exist_ok))

    def save(self, state_dict: Any, path: str) -> None:
        self._writes.torch(state_dict, Path(path))

    def create(self, info: Any) -> None: ...
    def commit(self, info: Any) -> bool:
        return True

    def is_decoupled(self) -> bool:
        return False


def save(engine: Any, directory: str, client_state: dict[str, Any], *, rank: int, layout: dict[str, Any]) -> None:
    """Write the engine's state (`client_state`: plain values) and, per rank, its random state and layout. Called on every rank.

    The directory may be another one on each rank. Raises StorageFailure.
    """
    writes = Writes()
    writes.do(lambda: Path(directory).mkdir(parents=True, exist_ok=True))
    kept = engine.checkpoint_engine
    engine.checkpoint_engine = _CheckpointWriter(writes)
    engine._copy_recovery_script = lambda *_: None  # scripts beside the files; what they raise would leave the other ranks waiting
    try:
        engine.save_checkpoint(directory, tag=_TAG, client_state={"async_grpo": client_state}, save_latest=False)
    finally:
        engine.checkpoint_engine = kept
        del engine._copy_recovery_script
    random = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        random["cuda"] = torch.cuda.get_rng_state()
    writes.torch({"random": random, "layout": layout}, _rank_file(directory, rank))
    writes.agree()


def load(engine: Any, directory: str, *, rank: int, layout: dict[str, Any]) -> dict[str, Any]:
    """Restore what `save` wrote and return its client state. With another number of ranks the optimizer's state is divided anew.

    Raises ValueError for a missing file, or a layout that cannot be continued.
    """
    written = _read_rank(directory, 0)
    saved_ranks, other_ranks = written["layout"][_RANKS], written["layout"][_RANKS] != layout[_RANKS]
    if written["layout"] | {_RANKS: layout[_RANKS]} != layout:
        raise ValueError(f"{directory} holds a learner with {written['layout']}, this one has {layout}; resume with the settings of the checkpoint")
    stage = layout["learner.zero_stage"]
    if other_ranks and stage not in reshard.STAGES:
        raise ValueError(
            f"{directory} was written by {saved_ranks} learner ranks with ZeRO stage {stage}, whose files only {saved_ranks} ranks can read; set "
            f"learner.ranks={saved_ranks}"
        )
    divided = other_ranks and stage > 0
    loaded, client_state = engine.load_checkpoint(directory, tag=_TAG, load_module_only=divided)
    if loaded is None:
        raise ValueError(f"{directory} holds no DeepSpeed checkpoint")
    if divided:
        reshard.load_optimizer(engine, Path(directory) / _TAG, saved_ranks=saved_ranks)
    random = _read_rank(directory, min(rank, saved_ranks - 1))["random"]
    torch.set_rng_state(random["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"])
    return client_state["async_grpo"]


def _read_rank(directory: str, rank: int) -> dict[str, Any]:
    path = _rank_file(directory, rank)
    if not path.is_file():
        raise ValueError(f"{directory} holds no state of learner rank {rank}; resume from another checkpoint")
    return torch.load(path, weights_only=True)


def save_weights(weights: Iterator[tuple[str, Tensor]], directory: str, *, writes: bool) -> None:
    """Write a refreshed reference, whose weights are in no model directory; `weights` is exhausted on every rank. Raises StorageFailure."""
    kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights if writes}
    out = Writes()
    if writes:
        out.torch(kept, Path(directory) / _REFERENCE)
    out.agree()


def load_weights(module: torch.nn.Module, directory: str, *, writable: Callable[..., AbstractContextManager[None]]) -> None:
    """Restore what `save_weights` wrote. `writable(parameters, modify=True)` makes sharded parameters whole. Raises ValueError."""
    path = Path(directory) / _REFERENCE
    if not path.is_file():
        raise ValueError(f"{path} is missing: the checkpoint says that the reference had been refreshed; resume from another checkpoint")
    kept = torch.load(path, weights_only=True, mmap=True)
    for name, parameter in module.named_parameters():
        with torch.no_grad(), writable([parameter], modify=True):
            parameter.data.copy_(kept[name])


def export(model: PreTrainedModel, weights: Iterator[tuple[str, Tensor]], directory: str, *, writes: bool) -> None:
    """Write config and safetensors shards from `weights`, which is exhausted on every rank; only where `writes` files appear.

    Raises StorageFailure.
    """
    target, out = Path(directory), Writes()
    shard: dict[str, Tensor] = {}
    where: dict[str, str] = {}
    held, total = 0, 0
    if writes:
        out.do(lambda: _write_config(model, target))

    def flush() -> None:
        name = f"model-{len(set(where.values())) + 1:05d}.safetensors"
        out.do(lambda: save_file(shard, target / name, metadata={"format": "pt"}))
        where.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in weights:
        if not writes:
            continue
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > _SHARD_BYTES:
            flush()
            held = 0
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held, total = held + size, total + size
    if writes:
        flush()
        index = {"metadata": {"total_size": total}, "weight_map": where}
        out.do(lambda: _write_text(target / "model.safetensors.index.json", json.dumps(index, indent=1)))
    out.agree()


def _write_config(model: PreTrainedModel, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(target)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(target)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _rank_file(directory: str, rank: int) -> Path:
    return Path(directory) / f"rank_{rank}.pt"
