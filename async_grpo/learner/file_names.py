"""The names that a model's weights have in its files: those that engines load and users publish.

Runs in: learner ranks. transformers holds some weights in other tensors than the files do: experts
joined into one tensor, heads and prefixes renamed. Hides its conversions, which are undone here
tensor by tensor, so that a bucket of a model that no rank holds whole can be published:

    tensor of the model -> conversions in reverse -> its tensors in the files, by name

Invariant: names and shapes are known without weights, and come in the same order with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

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
        self._conversions: Any = getattr(hf, "_weight_conversions", None)
        best: tuple[int, Any, dict[str, dict[str, Shape]]] | None = None
        for conversions in self._possible():
            self._conversions = conversions
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
            apart = len(named ^ set(files.items())) if files is not None else 0
            if best is None or apart < best[0]:
                best = apart, conversions, found
        assert best is not None
        _, self._conversions, self._found = best

    def shapes(self, name: str) -> dict[str, Shape]:
        """Return name -> shape in the files, of the weight of this name in the model."""
        return self._found[name]

    def split(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensors of the files, in the order of `shapes`: views where that is enough."""
        shapes = self._found[name]
        if len(shapes) == 1 and next(iter(shapes.values())) == tuple(tensor.shape):
            return dict.fromkeys(shapes, tensor)  # renamed at most
        return {new: part.contiguous() for new, part in self._reversed(name, tensor).items()}

    def _possible(self) -> list[Any]:
        """List sets of conversions to try. Under ZeRO-3 transformers remembers those that could
        have been used, and not those that were: a prefix may be among them that no file has.
        """
        mine = self._conversions
        if not mine or not any(isinstance(one, PrefixChange) for one in mine):
            return [mine]
        return [mine, [one for one in mine if not isinstance(one, PrefixChange)]]

    def _reversed(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        kept = getattr(self._hf, "_weight_conversions", None)
        self._hf._weight_conversions = self._conversions
        try:
            found: dict[str, Tensor] = revert_weight_conversion(self._hf, {name: tensor})
        finally:
            self._hf._weight_conversions = kept
        return found
