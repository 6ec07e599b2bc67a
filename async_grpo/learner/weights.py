"""The published weights of the policy: whole, as they are in the model's files, adapters merged; or
adapters alone.

Runs in: learner ranks. Hides that some parameters are sharded and some have adapters, and that
transformers holds some in other tensors than the files (`file_names`):

    parameter, or buffer of the files -> whole -> merged -> tensors of the files -> engines, export
    factor of an adapter -> whole -> engines that hold adapters

Invariants:

- Names, shapes and dtypes are those of the base model's files, a tied head left out, frozen weights
  included.
- Reading changes nothing: a weight with an adapter is computed into a fresh tensor, W + scaling B A
  in float32, rounded to W's dtype.
- Never more than a bucket of a sharded model is whole on a rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from async_grpo.learner import adapters
from async_grpo.learner.division import GPU_GATHER_BYTES, WHOLE, Division
from async_grpo.learner.file_names import FileNames, Part, Shape

ZERO_RMS = 0.02
"""What a tensor of zeros is perturbed like: the size of freshly initialised weights."""


@dataclass(frozen=True, slots=True)
class _Weight:
    """A parameter `base` [out, in], with its adapter: down [rank, in], up [out, rank]. Or a buffer,
    which every rank holds whole.
    """

    name: str
    base: Tensor
    down: nn.Parameter | None = None
    up: nn.Parameter | None = None
    scaling: float = 0.0

    def parameters(self) -> list[nn.Parameter]:
        own = (self.base, self.down, self.up)
        return [one for one in own if isinstance(one, nn.Parameter)]

    def merged(self) -> Tensor:
        """Merge the adapter into the weight; parameters must be whole."""
        if self.down is None or self.up is None:
            return self.base.data
        product = self.up.data.float() @ self.down.data.float()  # [out, in]
        return product.mul_(self.scaling).add_(self.base.data).to(self.base.dtype)


class Published:
    """The weights of one model, as their senders see it. `rank` and `world_size` are the place of
    this process among those that share it, `device` is where it is, `sharded` whether no rank holds
    all of it.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        *,
        division: Division = WHOLE,
        files: Mapping[str, Shape] | None = None,
        device: str = "cpu",
    ) -> None:
        """files: name -> shape in the model's files, None for a model without any."""
        self._division, self.device = division, device
        grouped = dist.is_initialized()
        self.rank = dist.get_rank() if grouped else 0
        self.world_size = dist.get_world_size() if grouped else 1
        self.sharded = division.sharded
        adapted = {
            f"{name}.base_layer.weight": adapters.factors(layer)
            for name, layer in adapters.layers(hf).items()
        }
        ours = {id(factor) for factors in adapted.values() for factor in factors[:2]}
        weights = [
            _Weight(name.replace(".base_layer.", "."), parameter, *adapted.get(name, ()))
            for name, parameter in hf.named_parameters()
            if id(parameter) not in ours
        ]
        kept = hf.state_dict().keys()
        weights += [_Weight(name, one) for name, one in hf.named_buffers() if name in kept]
        self._names = FileNames(
            hf,
            [(one.name, division.full_shape(one.base), one.base.dtype) for one in weights],
            files,
        )
        by_name = {one.name: one for one in weights}
        parts = [(part, [by_name[name] for name in part.weights]) for part in self._names.parts]
        # some buffers are kept by the model and not by its files
        self._parts = [
            (part, own)
            for part, own in parts
            if files is None
            or any(isinstance(one.base, nn.Parameter) for one in own)
            or part.shapes.keys() <= files.keys()
        ]

    def weight_metadata(self) -> list[tuple[str, Shape, str]]:
        """List name, full shape and dtype name of every weight, in the order of
        `named_weights`.
        """
        return [
            (name, shape, str(own[0].base.dtype).removeprefix("torch."))
            for part, own in self._parts
            for name, shape in part.shapes.items()
        ]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full weights under Hugging Face names, adapters merged, a tied head left out; each
        is valid until the next, its memory while it is held. Collective if sharded: every rank must
        exhaust the iterator.
        """
        most = None if self.device == "cpu" else GPU_GATHER_BYTES
        for part, own in self._division.each(self._parts, _parameters, most=most):
            yield from self._names.split(part, [one.merged() for one in own]).items()

    @contextmanager
    def perturbed(self, *, scale: float, seed: int) -> Iterator[None]:
        """Inside the block every weight w is w + scale * rms(w) * noise, the same on every rank;
        leaving restores the weights bit for bit.

        With adapters w is the base's weight. No update may happen inside. Every rank (if sharded:
        rank 0) keeps a copy of the weights in host memory meanwhile.
        """
        changes = not self.sharded or self.rank == 0
        kept: dict[str, Tensor] = {}
        floating = [one for _, own in self._parts for one in own if one.base.is_floating_point()]
        try:
            for one in floating:
                with torch.no_grad(), self._division.gathered(one.parameters(), modify=True):
                    for name, tensor, size in self._moved(one) if changes else ():
                        kept[name] = tensor.to("cpu", copy=True)
                        tensor.add_(_noise(tensor, scale * size, seed=seed, name=name))
            yield
        finally:
            for one in floating:
                with torch.no_grad(), self._division.gathered(one.parameters(), modify=True):
                    for name, tensor, _ in self._moved(one) if changes else ():
                        if name in kept:
                            tensor.copy_(kept[name])

    def _moved(self, one: _Weight) -> list[tuple[str, Tensor, Tensor]]:
        """List what a perturbation moves: name, tensor, and size of the noise at scale 1."""
        return [(one.name, one.base.data, _rms(one.base.data))]


class PublishedFactors(Published):
    """The factors A and B of every adapter, under peft's names, in the dtype of the weight beside
    them; B times the scaling, as vLLM holds it.

    Perturbed, their product moves as far as that weight would, however small B is: it begins as
    zeros.
    """

    def weight_metadata(self) -> list[tuple[str, Shape, str]]:
        """See `Published.weight_metadata`."""
        return [
            (name, self._division.full_shape(factor), str(dtype).removeprefix("torch."))
            for name, factor, _, dtype in self._factors
        ]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Published.named_weights`."""
        each = self._division.each(self._factors, lambda item: (item[1],))
        for name, factor, scaling, dtype in each:
            yield name, (factor.data.float() * scaling).to(dtype)

    @cached_property
    def _factors(self) -> list[tuple[str, nn.Parameter, float, torch.dtype]]:
        return [
            (adapters.FACTOR.format(one.name[: -len(".weight")], part), factor, by, one.base.dtype)
            for _, own in self._parts
            for one in own
            for part, factor, by in (("A", one.down, 1.0), ("B", one.up, one.scaling))
            if factor is not None
        ]

    def _moved(self, one: _Weight) -> list[tuple[str, Tensor, Tensor]]:
        if one.down is None or one.up is None:
            return []
        down, weight = _rms(one.down.data), _rms(one.base.data)
        up = weight / (down * abs(one.scaling) * len(one.down.data) ** 0.5)
        return [(f"{one.name} A", one.down.data, down), (f"{one.name} B", one.up.data, up)]


def _parameters(part: tuple[Part, list[_Weight]]) -> list[nn.Parameter]:
    return [parameter for one in part[1] for parameter in one.parameters()]


def _noise(weight: Tensor, size: Tensor, *, seed: int, name: str) -> Tensor:
    """Return size * standard normal noise, a function of the seed and the name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    device, number = weight.device, int.from_bytes(digest[:7], "little")
    generator = torch.Generator(device=device).manual_seed(number)
    noise = torch.randn(weight.shape, generator=generator, device=device, dtype=torch.float32)
    return (noise * size).to(weight.dtype)


def _rms(weight: Tensor) -> Tensor:
    """Return the size of the weights in a tensor; zeros move as weights of ZERO_RMS would."""
    rms = weight.float().square().mean().sqrt()
    return torch.where(rms > 0, rms, ZERO_RMS)
