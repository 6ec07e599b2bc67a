"""The language-model head: from hidden states straight to log-probs, chunk by chunk.

Runs in: learner ranks. Hides what a model does to its logits beside the projection: some scale or
cap them in their own forward pass. There a chunk goes through that very code (`own`), with a
decoder that answers the given hidden states and a head that is a plain product:

    hidden [n, H] -> type(hf).forward -> decoder (answers hidden) -> head (hidden W^T + b)
                                      -> whatever the model does  -> logits [n, V]

Invariants: one module call computes all chunks, so that a sharded weight is gathered once for the
forward and once for the backward pass; a chunk at a time has logits, in both passes, and a rank
has only those of its own tokens, so that no tensor of all tokens by the vocabulary exists.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from async_grpo.algo.logprobs import Project, token_logprobs


def _mm_float32(left: Tensor, right: Tensor) -> Tensor:
    """Multiply half-precision matrices into float32; only GPUs do it without copies."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


class _Float32Logits(torch.autograd.Function):
    """Logits [n, V] in float32 of half-precision hidden states [n, H] and weights [V, H]. Products
    of half-precision numbers are exact in float32, so this rounds as float32 copies would; the
    gradients are computed in half precision, as those of any other layer.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return _mm_float32(hidden, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        rounded = gradient.to(weight.dtype)
        return (
            rounded @ weight if ctx.needs_input_grad[0] else None,
            rounded.t() @ hidden if ctx.needs_input_grad[1] else None,
        )


class LogprobHead(nn.Module):
    """The language-model head, with the replaced layer's parameter names. float32: of logits,
    whatever the weights; on CPU a float32 copy of the weights lives during the call.
    """

    def __init__(self, linear: nn.Linear, *, float32: bool) -> None:
        super().__init__()
        self.weight = linear.weight  # [V, H]; the embedding's own parameter when tied
        self.bias = linear.bias
        self._float32 = float32

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        kept: tuple[Tensor, ...] | None = None,
        own: OwnLogits | None = None,
    ) -> Any:
        """Log-probs of `targets` [M] or [M, K] from `hidden` [M, H], and entropies [M] or None.
        kept: of which tokens each was sampled (`KeptSets.by_size`); where there was one alone, its
        log-prob is 0 and costs nothing. own: what makes logits of a projection. Without targets, as
        the layer that this one replaces: logits [..., V] of `hidden` [..., H].
        """
        project, linear = self._projection(hidden)
        if targets is None:
            return project(hidden)
        compute = partial(
            token_logprobs,
            project=project if own is None else own.through(project),
            vocab_size=len(self.weight),
            temperature=temperature,
            with_entropy=with_entropy,
            linear=linear if own is None else None,
        )
        if kept is None:
            return compute(hidden, targets)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = entropy = hidden.new_zeros(len(hidden), dtype=dtype)
        several, sets, whole = kept
        for at, own_sets in [(several, sets), (whole, None)][: 2 if len(whole) else 1]:
            found, spread = compute(hidden.index_select(0, at), targets[at], kept=own_sets)
            logprobs = logprobs.index_copy(0, at, found)
            if spread is not None:
                entropy = entropy.index_copy(0, at, spread)
        return logprobs, entropy if with_entropy else None

    def _projection(self, hidden: Tensor) -> tuple[Project, tuple[Tensor, Tensor | None]]:
        """Return the product with the weights, which are whole during the call; weights and bias
        as it takes them.
        """
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        mixed = self._float32 and hidden.is_cuda and hidden.dtype != torch.float32
        if self._float32 and not mixed:
            weight = weight.float()
        if self._float32 and bias is not None:
            bias = bias.float()

        def project(part: Tensor) -> Tensor:
            if not mixed:
                return F.linear(part.to(weight.dtype), weight, bias)
            flat = part.reshape(-1, part.shape[-1])
            logits: Tensor = _Float32Logits.apply(flat, weight)
            return (logits if bias is None else logits + bias).view(*part.shape[:-1], -1)

        return project, (weight, bias)


class _Output(BaseModelOutputWithPast):
    """What a decoder answers: hidden states, and None for whatever else a model asks it for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _Instead:
    """A part of a model that answers a call otherwise, and else is the model's own."""

    def __init__(self, part: nn.Module, answer: Callable[..., Any]) -> None:
        self.__dict__.update(_part=part, _answer=answer)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._answer(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class _With:
    """A model in which some parts are others."""

    def __init__(self, model: PreTrainedModel, parts: dict[str, Any]) -> None:
        self.__dict__.update(_model=model, **parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class OwnLogits:
    """The logits of a model's own forward pass. Raises ValueError where decoder or head are no
    attribute of the model.
    """

    def __init__(self, hf: PreTrainedModel, decoder: nn.Module, head: nn.Module) -> None:
        names = {id(module): name for name, module in hf.named_children()}
        if id(decoder) not in names or id(head) not in names:
            raise ValueError(f"{hf.config.model_type} has its decoder or its head in another part")
        self._hf = hf
        self._decoder, self._head = decoder, head
        self._names = names[id(decoder)], names[id(head)]

    def through(self, project: Project) -> Project:
        """Return what makes the model's logits [n, V] of hidden states [n, H]."""
        forward = type(self._hf).forward
        decoder, head = self._names

        def logits(part: Tensor) -> Tensor:
            hidden = part[None]
            answered = _Instead(self._decoder, lambda *_, **__: _Output(last_hidden_state=hidden))
            model = _With(self._hf, {decoder: answered, head: _Instead(self._head, project)})
            answer: Tensor = forward(model, inputs_embeds=hidden, use_cache=False).logits
            return answer[0]

        return logits
