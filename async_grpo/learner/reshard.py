"""A checkpoint of another number of ranks: the optimizer's state, divided anew.

Runs in: learner ranks, when a run resumes. Hides how DeepSpeed's ZeRO stages 1 and 2 divide it: the parameters of a group lie one behind
the other in a vector, float32 weights and each moment alike, and each rank has an interval of it, in which a parameter has at most one
fragment. Every rank reads all files, mapped into memory, and copies what belongs into its own interval.

Invariant: afterwards every float32 weight and moment has the value that it had, bit for bit.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STAGES = (0, 1, 2)
"""With stage 0 every rank holds everything. Stage 3 divides each parameter for itself, weights included."""


def load_optimizer(engine: Any, directory: Path, *, saved_ranks: int) -> None:
    """Fill the optimizer of a ZeRO 1 or 2 engine, whose weights are loaded, from the files of `saved_ranks` ranks.

    Raises ValueError for a missing file.
    """
    optimizer = engine.optimizer
    flats, mine = optimizer.single_partition_of_fp32_groups, optimizer._param_slice_mappings
    begins = {name: parameter._hp_mapping.lp_fragment_address.start for parameter, name in optimizer.param_names.items() if _has_part(parameter)}
    seen: list[dict[str, int]] = [{} for _ in mine]
    for rank in range(saved_ranks):
        saved = torch.load(_file(directory, rank), weights_only=False, mmap=True, map_location="cpu")["optimizer_state_dict"]
        for group, flat in enumerate(flats):
            state = saved["base_optimizer_state"]["state"].get(group, {})
            vectors = {key: value for key, value in state.items() if torch.is_tensor(value) and value.dim() == 1}
            own = optimizer.optimizer.state[flat] if state else {}
            for key, value in state.items():
                if key not in own:
                    own[key] = torch.zeros_like(flat) if key in vectors else copy.deepcopy(value)  # nothing keeps the file open
            pairs = [(flat.data, saved["single_partition_of_fp32_groups"][group]), *((own[key], vectors[key]) for key in vectors)]
            for name, theirs in saved["param_slice_mappings"][group].items():
                begin = seen[group].get(name, 0)
                seen[group][name] = begin + theirs.numel
                if name in mine[group]:
                    _copy(pairs, mine[group][name], begins[name], theirs, begin)


def _copy(pairs: list[tuple[Tensor, Tensor]], mine: Any, my_begin: int, theirs: Any, their_begin: int) -> None:
    """Copy what two fragments of a parameter share, each with its place in a rank's interval (`start`, `numel`) and in the parameter (begin)."""
    first = max(my_begin, their_begin)
    count = min(my_begin + mine.numel, their_begin + theirs.numel) - first
    if count > 0:
        for target, source in pairs:
            target.narrow(0, mine.start + first - my_begin, count).copy_(source.narrow(0, theirs.start + first - their_begin, count))


def _has_part(parameter: Tensor) -> bool:
    """Whether a fragment of this parameter belongs to this rank."""
    return getattr(parameter, "_hp_mapping", None) is not None


def _file(directory: Path, rank: int) -> Path:
    found = list(directory.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
    if len(found) != 1:
        raise ValueError(f"{directory} has no optimizer state of rank {rank}")
    return found[0]
