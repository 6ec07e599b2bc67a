"""The adapters that an engine's worker holds beside its model.

Runs in: vLLM EngineCore and worker processes. Hides vLLM's managers of adapters and their names.
The other half, `adapters`, says which one is loaded and which are kept.

Invariants: an adapter has every factor that was published, or is not there; the model's own weights
stay as they are; what is kept is never dropped, also not for room. Importing this module changes
vLLM twice. It wraps no embedding and no head, which never have adapters: it would compute log-probs
of prompts wrongly, and reserve memory of the vocabulary's size for each slot. On CPU it multiplies
all tokens of an adapter at once: it would copy the factors for every token, and take those of the
last slot for a token without.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from vllm.lora import model_manager
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.utils import get_supported_lora_modules, parse_fine_tuned_lora_name

from async_grpo.runtime.text import listed
from async_grpo.weights.names import NamesDiffer

_SHOWN = 8


def _layers_only(model: nn.Module) -> list[str]:
    """Return the names of layers that take adapters, without embeddings and head."""
    modules = list(model.modules())
    beside = {name for one in modules for name in getattr(one, "embedding_modules", None) or ()}
    return [name for name in get_supported_lora_modules(model) if name not in beside]


def _add_by_slot(slots: Tensor, y: Tensor, x: Tensor, weights: Tensor) -> None:
    """Add x W to y [tokens, out], with each token's own W [out, in]; -1: none. slots: of tokens."""
    for slot in set(slots.tolist()) - {-1}:
        own = (slots == slot).nonzero()[:, 0]
        y.index_add_(0, own, x[own].to(y.dtype) @ weights[slot, 0].T.to(y.dtype))


model_manager.get_supported_lora_modules = _layers_only
PunicaWrapperCPU._apply_shrink = lambda self, y, x, w, *_: _add_by_slot(
    self.token_lora_indices, y, x, w
)
PunicaWrapperCPU._apply_expand = lambda self, y, x, w, at, size, **_: _add_by_slot(
    self.token_lora_indices, y[:, at : at + size], x, w
)


class Factors:
    """Stands where a model takes weights, and keeps copies in host memory."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take tensors, whose memory will be used again."""
        self.tensors |= {name: tensor.to("cpu", copy=True) for name, tensor in weights}


def check_modules(model: Any, metadata: Sequence[Sequence[Any]]) -> None:
    """Raise NamesDiffer for published modules that take no adapter. metadata: [name, shape, dtype]
    of every factor.
    """
    packed = model.lora_manager.packed_modules
    known = {part for name in model.lora_manager.modules for part in packed.get(name, [name])}
    sent = dict.fromkeys(
        parse_fine_tuned_lora_name(name, _mapper(model))[0] for name, _, _ in metadata
    )
    if unknown := [name for name in sent if name not in known]:
        raise NamesDiffer(
            f"the engine takes no adapters of {listed(unknown, _SHOWN)}: set "
            "`weight_sync.lora` to merged, or name other layers in `model.lora.target_modules`"
        )


def load_adapter(
    model: Any, tensors: Mapping[str, Tensor], number: int, kept: Collection[int]
) -> None:
    """Drop the adapters that are not kept, and load one under `number`."""
    manager = model.lora_manager
    for other in manager.list_adapters().keys() - set(kept):
        manager.remove_adapter(other)
    if len(manager) >= manager.lora_slots:
        raise RuntimeError(f"adapter {number} has no slot beside {sorted(kept)}")
    rank = next(len(one) for name, one in tensors.items() if ".lora_A." in name)
    adapter = LoRAModel.from_lora_tensors(
        number,
        dict(tensors),
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # B comes scaled
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=_mapper(model),
    )
    manager.add_adapter(adapter)
    manager.activate_adapter(number)


def _mapper(model: Any) -> Any:
    """Return what turns names of the files into vLLM's for adapters; None: nothing does."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()
