"""The names that a model's weights have in its files: those that engines load and users publish.

Runs in: learner ranks, and the driver before a run. transformers holds some weights in other
tensors than the files do: experts joined into one tensor, attention cut into three, heads and
prefixes renamed. Hides its conversions: those that these files were read by are undone here, part
by part, so that a bucket of a model that no rank holds whole can be published:

    tensors of a part -> conversions in reverse -> its tensors in the files, by name

Invariants: names and shapes are known without weights, and come in the same order with them; a part
has as many numbers in the files as in the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

Shape = tuple[int, ...]
"""Of a whole tensor."""


@dataclass(frozen=True, slots=True)
class Part:
    """Weights of a model that hold the same tensors of its files: one, as a rule. weights: their
    names. shapes: name -> shape in the files.
    """

    weights: tuple[str, ...]
    shapes: dict[str, Shape]


class FileNames:
    """Names of the weights of one model. `files`: name -> shape in its files; without them, the
    names are those that transformers would save. `parts`: what can be published by itself.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        weights: Sequence[tuple[str, Shape, torch.dtype]],
        files: Mapping[str, Shape] | None,
    ) -> None:
        self._hf = hf
        self._conversions: list[Any] | None = None
        self._cut = ""
        self._empty = {
            name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in weights
        }
        tried = []
        for self._conversions, self._cut in [(None, "")] if files is None else _ways(hf, files):
            alone = {name: self._shapes([name]) for name in self._empty}
            named = {item for shapes in alone.values() for item in shapes.items()}
            apart = len(named.symmetric_difference((files or {}).items()))
            tried.append((apart, self._conversions, self._cut, alone))
        _, self._conversions, self._cut, found = min(tried, key=lambda way: way[0])
        self.parts = self._divide(found)

    def split(self, part: Part, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the files, in the order of `shapes`: views where that is enough.
        tensors: of the part's weights.
        """
        if len(tensors) == len(part.shapes) == 1 and tensors[0].shape in part.shapes.values():
            return dict.fromkeys(part.shapes, tensors[0])  # renamed at most
        found = self._reversed(dict(zip(part.weights, tensors, strict=True)))
        return {name: found[name].contiguous() for name in part.shapes}

    def _divide(self, alone: dict[str, dict[str, Shape]]) -> list[Part]:
        """Divide the weights into parts. Some cannot be named alone, since the files hold several
        in one tensor: these stay together with their neighbours. alone: what each is in the files.
        """
        whole = self._shapes(list(alone)).items()
        owners = Counter(name for shapes in alone.values() for name in shapes)
        parts = {name: Part((name,), shapes) for name, shapes in alone.items()}
        for name, shapes in alone.items():
            named = shapes.items() <= whole and all(owners[other] == 1 for other in shapes)
            if named or len(parts[name].weights) > 1:
                continue
            module = name.rpartition(".")[0].rpartition(".")[0]
            while module:
                inside = [other for other in alone if other.startswith(f"{module}.")]
                together = self._shapes(inside)
                numbers = sum(self._empty[other].numel() for other in inside)
                as_many = numbers == sum(map(math.prod, together.values()))
                if as_many and together.items() <= whole:
                    parts |= dict.fromkeys(inside, Part(tuple(inside), together))
                    break
                module = module.rpartition(".")[0]
        return list({part.weights: part for part in parts.values()}.values())

    def _shapes(self, names: Sequence[str]) -> dict[str, Shape]:
        found = self._reversed({name: self._empty[name] for name in names})
        return {name: tuple(tensor.shape) for name, tensor in found.items()}

    def _reversed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = getattr(self._hf, "_weight_conversions", None)
        self._hf._weight_conversions = self._conversions
        try:
            found: dict[str, Tensor] = revert_weight_conversion(self._hf, tensors)
        finally:
            self._hf._weight_conversions = kept
        return {new.removeprefix(self._cut): part for new, part in found.items()}


def _ways(hf: PreTrainedModel, files: Mapping[str, Shape]) -> Iterator[tuple[list[Any], str]]:
    """Yield conversions by which the files may have been read, and a prefix that their names lack.
    transformers tries to change prefixes also where names have the right one already, and adds that
    of the decoder to names without it.
    """
    used = _used(hf, files)
    plain = [one for one in used if not isinstance(one, PrefixChange)]
    for conversions in (used, plain) if len(plain) < len(used) else (used,):
        yield conversions, ""
        yield conversions, f"{hf.base_model_prefix}."


def _used(hf: PreTrainedModel, files: Mapping[str, Shape]) -> list[Any]:
    """List the conversions that reading these files uses, as transformers finds them."""
    mapping = get_model_conversion_mapping(hf)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    state = hf.state_dict()
    for name in files:
        rename_source_key(name, renamings, converters, hf.base_model_prefix, state)
    return [one for one in mapping if one.was_used()]
