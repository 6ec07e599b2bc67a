"""The published weights of the policy: whole, under Hugging Face names, adapters merged.

Runs in: learner ranks. Hides where parameters live (ZeRO, offload) and that some have adapters.
Invariants:

- Names, order, shapes and dtypes are those of the base model, a tied head left out, frozen weights
  included.
- Reading changes nothing: a weight with an adapter is computed into a fresh tensor, W + scaling B A
  in float32, rounded to W's dtype.
- Never more than a bucket is whole on a rank with ZeRO-3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from async_grpo.learner import adapters, zero


@dataclass(frozen=True, slots=True)
class _Weight:
    """A parameter `base` [out, in], with its adapter: down [rank, in], up [out, rank]."""

    name: str
    base: nn.Parameter
    down: nn.Parameter | None = None
    up: nn.Parameter | None = None
    scaling: float = 0.0

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in (self.base, self.down, self.up) if parameter is not None]

    def merged(self) -> Tensor:
        """Merge the adapter into the weight; parameters must be whole."""
        if self.down is None:
            return self.base.data
        product = self.up.data.float() @ self.down.data.float()  # [out, in]
        return product.mul_(self.scaling).add_(self.base.data).to(self.base.dtype)


class Published:
    """The weights of one model. keeps: whether `perturbed` restores from this rank's copy."""

    def __init__(self, hf: PreTrainedModel, *, keeps: bool) -> None:
        adapted = {
            f"{name}.base_layer.weight": adapters.factors(layer)
            for name, layer in adapters.layers(hf).items()
        }
        ours = {id(factor) for factors in adapted.values() for factor in factors[:2]}
        self._weights = [
            _Weight(name.replace(".base_layer.", "."), parameter, *adapted.get(name, ()))
            for name, parameter in hf.named_parameters()
            if id(parameter) not in ours
        ]
        self._keeps = keeps

    def metadata(self) -> list[tuple[str, tuple[int, ...], str]]:
        """List name, full shape and dtype name of every weight, in the order of `named`."""
        return [
            (one.name, zero.full_shape(one.base), str(one.base.dtype).removeprefix("torch."))
            for one in self._weights
        ]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield weights, each valid until the next. Collective with ZeRO-3: all ranks exhaust."""
        for bucket in zero.buckets(self._weights, _Weight.parameters):
            with zero.gathered([parameter for one in bucket for parameter in one.parameters()]):
                for one in bucket:
                    yield one.name, one.merged()

    @contextmanager
    def perturbed(self, *, scale: float, seed: int) -> Iterator[None]:
        """Inside, every base weight w is w + scale * rms(w) * noise; leaving restores every bit."""
        kept: dict[str, Tensor] = {}
        try:
            for one in self._weights:
                with torch.no_grad(), zero.gathered([one.base], modify=True):
                    if self._keeps:
                        weight = one.base.data
                        kept[one.name] = weight.to("cpu", copy=True)
                        weight.add_(_noise(weight, scale=scale, seed=seed, name=one.name))
            yield
        finally:
            for one in self._weights:
                with torch.no_grad(), zero.gathered([one.base], modify=True):
                    if one.name in kept:
                        one.base.data.copy_(kept[one.name])


def _noise(weight: Tensor, *, scale: float, seed: int, name: str) -> Tensor:
    """scale * rms(weight) * standard normal noise, a function of the seed and the name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    device, number = weight.device, int.from_bytes(digest[:7], "little")
    generator = torch.Generator(device=device).manual_seed(number)
    noise = torch.randn(weight.shape, generator=generator, device=device, dtype=torch.float32)
    return (noise * (scale * weight.float().square().mean().sqrt())).to(weight.dtype)
