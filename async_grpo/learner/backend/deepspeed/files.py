"""The learner's state in DeepSpeed's files.

Runs in: learner ranks. Hides the layout of the files, and how another number of ranks divides them.

Invariant: a checkpoint continues only under the ZeRO stage and dtype that wrote it, and with stage
3 under as many ranks. With stages 1 and 2 another number of ranks divides the optimizer's state
anew; every float32 weight and moment keeps its value bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from async_grpo.learner.storage_writes import Writes

_TAG = "learner"
_RANKS, _STAGE, _BASE = "learner.ranks", "learner.zero_stage", "base"
_DIVISIBLE_STAGES = (0, 1, 2)
"""With stage 0 every rank holds everything; stage 3 divides each parameter, weights included."""


class _CheckpointWriter:
    """The checkpoint engine of DeepSpeed, which writes its files through `Writes`."""

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


def save(
    engine: Any, directory: str, client_state: dict[str, Any], *, layout: dict[str, Any]
) -> None:
    """Write the engine's state (`client_state`: plain values) and each rank's random state and
    layout; of a layout with a base only what is trained. Collective, in one directory or one per
    rank. Raises StorageFailure.
    """
    writes, lean = Writes(), layout[_BASE] is not None
    writes.do(lambda: Path(directory).mkdir(parents=True, exist_ok=True))
    kept = engine.checkpoint_engine
    engine.checkpoint_engine = _CheckpointWriter(writes)
    # scripts beside the files, whose errors would leave the other ranks waiting
    engine._copy_recovery_script = lambda *_: None
    whole = engine.module_state_dict
    if lean:  # DeepSpeed's own leaves out frozen parameters, but no second name of a tied one
        trained = {name for name, one in engine.module.named_parameters() if one.requires_grad}
        engine.module_state_dict = lambda **_: {
            name: tensor for name, tensor in whole().items() if name in trained
        }
    try:
        engine.save_checkpoint(
            directory,
            tag=_TAG,
            client_state={"async_grpo": client_state},
            save_latest=False,
            exclude_frozen_parameters=lean,
        )
    finally:
        engine.checkpoint_engine = kept
        del engine._copy_recovery_script
        vars(engine).pop("module_state_dict", None)
    random = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        random["cuda"] = torch.cuda.get_rng_state()
    kept = {"random": random, "layout": _with_ranks(engine, layout)}
    writes.torch(kept, _rank_file(directory, dist.get_rank()))
    writes.agree()


def load(engine: Any, directory: str, *, layout: dict[str, Any]) -> dict[str, Any]:
    """Restore what `save` wrote, dividing the optimizer anew for another number of ranks; its
    client state. Raises ValueError for a missing file, a layout that cannot be continued, or
    another base than the one of the checkpoint.
    """
    layout, base = _with_ranks(engine, layout), layout[_BASE]
    written = _read_rank(directory, 0)["layout"]
    theirs = written.get(_BASE)  # older checkpoints hold the whole model
    if theirs and base and theirs["sha256"] != base["sha256"]:
        raise ValueError(
            f"the adapters in {directory} were trained on other weights ({theirs['path']}) than "
            f"{base['path']} has now: bring those back, for the checkpoint does not hold them"
        )
    saved_ranks = written[_RANKS]
    other_ranks = saved_ranks != layout[_RANKS]
    if written | {_RANKS: layout[_RANKS], _BASE: base} != layout:
        raise ValueError(
            f"{directory} holds a learner with {written}, this one has {layout}; "
            "resume with the settings of the checkpoint"
        )
    stage = layout[_STAGE]
    if other_ranks and stage not in _DIVISIBLE_STAGES:
        raise ValueError(
            f"{directory} was written by {saved_ranks} learner ranks with ZeRO stage {stage}. "
            f"Only as many ranks can read its files; set learner.ranks={saved_ranks}"
        )
    divided = other_ranks and stage > 0
    loaded, client_state = engine.load_checkpoint(
        directory, tag=_TAG, load_module_only=divided, load_module_strict=theirs is None
    )
    if loaded is None:
        raise ValueError(f"{directory} holds no DeepSpeed checkpoint")
    if divided:
        _load_optimizer(engine, Path(directory) / _TAG, saved_ranks=saved_ranks)
    random = _read_rank(directory, min(dist.get_rank(), saved_ranks - 1))["random"]
    torch.set_rng_state(random["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"])
    return client_state["async_grpo"]


def _with_ranks(engine: Any, layout: dict[str, Any]) -> dict[str, Any]:
    """Add to a layout what the files depend on, too."""
    stage = int(engine.zero_optimization_stage())
    return {_RANKS: dist.get_world_size(), _STAGE: stage, **layout}


def _read_rank(directory: str, rank: int) -> dict[str, Any]:
    path = _rank_file(directory, rank)
    if not path.is_file():
        raise ValueError(
            f"{directory} holds no state of learner rank {rank}; resume from another checkpoint"
        )
    return torch.load(path, weights_only=True)


def _rank_file(directory: str, rank: int) -> Path:
    return Path(directory) / f"rank_{rank}.pt"


def _load_optimizer(engine: Any, directory: Path, *, saved_ranks: int) -> None:
    """Fill the optimizer of a ZeRO 1 or 2 engine, whose weights are loaded, from the files of
    `saved_ranks` ranks. Raises ValueError for a missing file.

    The parameters of a group lie one behind the other in a vector, float32 weights and each moment
    alike. A rank has an interval of the vector, with at most one fragment of a parameter. Every
    rank maps all files into memory and copies what belongs into its own interval.
    """
    optimizer, mine = engine.optimizer, engine.optimizer._param_slice_mappings
    flats = [flat for group in optimizer.optimizer.param_groups for flat in group["params"]]
    begins = {
        name: parameter._hp_mapping.lp_fragment_address.start
        for parameter, name in optimizer.param_names.items()
        if _has_part(parameter)
    }
    seen: list[dict[str, int]] = [{} for _ in mine]
    for rank in range(saved_ranks):
        saved = torch.load(
            _optimizer_file(directory, rank), weights_only=False, mmap=True, map_location="cpu"
        )["optimizer_state_dict"]
        for group, flat in enumerate(flats):
            state = saved["base_optimizer_state"]["state"].get(group, {})
            tensors = {key: value for key, value in state.items() if torch.is_tensor(value)}
            vectors = {key: value for key, value in tensors.items() if value.dim() == 1}
            own = optimizer.optimizer.state[flat] if state else {}
            for key, value in state.items():
                if key in vectors:
                    own.setdefault(key, torch.zeros_like(flat))
                elif key in tensors:  # copied, so that nothing keeps the file open
                    own[key] = value.to(flat.device, copy=True)
                else:
                    own[key] = value
            pairs = [
                (flat.data, saved["single_partition_of_fp32_groups"][group]),
                *((own[key], vectors[key]) for key in vectors),
            ]
            for name, theirs in saved["param_slice_mappings"][group].items():
                begin = seen[group].get(name, 0)
                seen[group][name] = begin + theirs.numel
                if name in mine[group]:
                    _copy(pairs, mine[group][name], begins[name], theirs, begin)


def _copy(
    pairs: list[tuple[Tensor, Tensor]], mine: Any, my_begin: int, theirs: Any, their_begin: int
) -> None:
    """Copy what two fragments of a parameter share. Each has a place in a rank's interval (`start`,
    `numel`) and in the parameter (begin).
    """
    first = max(my_begin, their_begin)
    count = min(my_begin + mine.numel, their_begin + theirs.numel) - first
    if count > 0:
        for target, source in pairs:
            target.narrow(0, mine.start + first - my_begin, count).copy_(
                source.narrow(0, theirs.start + first - their_begin, count)
            )


def _has_part(parameter: Tensor) -> bool:
    """Whether this rank has a fragment of the parameter."""
    return getattr(parameter, "_hp_mapping", None) is not None


def _optimizer_file(directory: Path, rank: int) -> Path:
    found = list(directory.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
    if len(found) != 1:
        raise ValueError(f"{directory} has no optimizer state of rank {rank}")
    return found[0]
