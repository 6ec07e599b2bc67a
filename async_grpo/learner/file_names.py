"""The names that a model's weights have in its files: those that engines load and users publish.

Runs in: learner ranks, and the driver before a run. transformers holds some weights in other
tensors than the files do: experts joined into one tensor, heads and prefixes renamed. Hides its
conversions: those that these files were read by are undone here, tensor by tensor, so that a bucket
of a model that no rank holds whole can be published:

    tensor of the model -> conversions in reverse -> its tensors in the files, by name

Invariant: names and shapes are known without weights, and come in the same order with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


class FileNames:
    """Names of the weights of one model. `files`: name -> shape in its files; without them, the
    names are those that transformers would save.
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
        self._found: dict[str, dict[str, Shape]] = {}
        ways = [(None, "")] if files is None else list(_ways(hf, files))
        best: tuple[int, int] | None = None
        for number, (conversions, cut) in enumerate(ways):
            self._conversions, self._cut = conversions, cut
            found = {
                name: {
                    new: tuple(tensor.shape)
                    for new, tensor in self._reversed(
                        name, torch.empty(shape, dtype=dtype, device="meta")
                    ).items()
                }
                for name, shape, dtype in weights
            }
            named = {item for parts in found.values() for item in parts.items()}
            apart = 0 if files is None else len(named ^ set(files.items()))
            if best is None or apart < best[0]:
                best, self._found = (apart, number), found
        assert best is not None
        self._conversions, self._cut = ways[best[1]]

    def shapes(self, name: str) -> dict[str, Shape]:
        """Return name -> shape in the files, of the weight of this name in the model."""
        return self._found[name]

    def split(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensors of the files, in the order of `shapes`: views where that is enough."""
        shapes = self._found[name]
        if len(shapes) == 1 and next(iter(shapes.values())) == tuple(tensor.shape):
            return dict.fromkeys(shapes, tensor)  # renamed at most
        return {new: part.contiguous() for new, part in self._reversed(name, tensor).items()}

    def _reversed(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        kept = getattr(self._hf, "_weight_conversions", None)
        self._hf._weight_conversions = self._conversions
        try:
            found: dict[str, Tensor] = revert_weight_conversion(self._hf, {name: tensor})
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
