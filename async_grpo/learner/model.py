"""The policy network: a Hugging Face causal language model that computes log-probs of packed rows.

Runs in: learner ranks. Hides that rows are packed (`packing`): every linear layer sees N tokens and
no padding, and attention sees each row alone. Invariants:

- A row's log-probs do not depend on the rows packed beside it.
- Nothing of size N x N exists. Attention takes rows in buckets of little padding, whatever the mix
  of lengths.
- The language-model head sees only the hidden states that predict a response token, in one module
  call: under ZeRO-3 every rank gathers its weight once for the forward and once for the backward
  pass, however many chunks the rows need.
"""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import save_on_cpu
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from async_grpo.algo.logprobs import token_logprobs
from async_grpo.learner import zero
from async_grpo.learner.attention import ATTENTION, leave_out_of_compilation
from async_grpo.learner.packing import Packed

CHECKPOINTING = {"use_reentrant": False, "preserve_rng_state": False}  # there is no dropout
BACKEND = "inductor"
"""What compiles layers."""
# Logits are scaled inside these models' own forward, which the head below replaces.
_LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


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
    """The language-model head, from hidden states straight to log-probs, with the replaced layer's
    parameter names. float32: of logits, whatever the weights; on CPU a float32 copy of the weights
    lives during the call.
    """

    def __init__(self, linear: nn.Linear, *, float32: bool) -> None:
        super().__init__()
        self.weight = linear.weight  # [V, H]; the embedding's own parameter when tied
        self.bias = linear.bias
        self._float32 = float32

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        vocab_size: int,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs [M] of `targets` [M] from `hidden` [M, H], and their entropies [M] or None."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        mixed = self._float32 and hidden.is_cuda and hidden.dtype != torch.float32
        if self._float32 and not mixed:
            hidden, weight = hidden.float(), weight.float()
        if self._float32 and bias is not None:
            bias = bias.float()

        def project(part: Tensor) -> Tensor:
            if not mixed:
                return F.linear(part, weight, bias)
            logits: Tensor = _Float32Logits.apply(part, weight)
            return logits if bias is None else logits + bias

        return token_logprobs(
            hidden,
            targets,
            project,
            vocab_size=vocab_size,
            temperature=temperature,
            with_entropy=with_entropy,
        )


class PolicyModel(nn.Module):
    """A causal language model with `LogprobHead`; parameters are those of `hf`, prefixed `hf.`."""

    def __init__(self, hf: PreTrainedModel, *, float32_head: bool) -> None:
        super().__init__()
        self.hf = hf
        self.offloads = False
        """Whether what autograd keeps of the decoder layers lies in host memory."""
        self.vocab_size = zero.full_shape(hf.get_output_embeddings().weight)[0]
        hf.set_output_embeddings(LogprobHead(hf.get_output_embeddings(), float32=float32_head))

    def forward(
        self, packed: Packed, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs [M] float32 of response tokens at `temperature`, and entropies [M] or None."""
        offload = self.offloads and torch.is_grad_enabled()
        pinned = packed.input_ids.is_cuda
        with save_on_cpu(pin_memory=pinned) if offload else nullcontext():
            states = self.hf.base_model(
                input_ids=packed.input_ids,
                position_ids=packed.position_ids,
                use_cache=False,
                row_layout=packed.layout,
            ).last_hidden_state
        hidden = states[0].index_select(0, packed.predictors)
        return self.hf.get_output_embeddings()(
            hidden, packed.targets, self.vocab_size, temperature, with_entropy
        )

    def compile_layers(self) -> None:
        """Compile the decoder layers at their first call, all of them to the same few graphs, of
        any number of tokens; attention stays as it is. Raises ValueError where that cannot be.
        """
        compilers = (os.environ.get("CXX"), "g++", "clang++")
        if not any(name and shutil.which(name) for name in compilers):
            raise ValueError(
                "learner.compile needs a C++ compiler, and there is no g++ on this machine: "
                "install one, or set learner.compile: false"
            )
        layers = [one for one in self.hf.modules() if isinstance(one, GradientCheckpointingLayer)]
        if not layers:
            raise ValueError(
                f"{self.hf.config.model_type} has no decoder layers that transformers knows as "
                "such: set learner.compile: false"
            )
        leave_out_of_compilation()
        for layer in layers:
            layer.compile(dynamic=True, backend=BACKEND)


def load_model(
    directory: str,
    *,
    dtype: torch.dtype,
    longest_row: int,
    gradient_checkpointing: bool,
    trust_remote_code: bool,
    float32_head: bool,
    sharded: dict[str, Any] | None = None,
) -> PolicyModel:
    """Load a causal language model for packed training, dropout off. longest_row: tokens of prompt
    and response. sharded: DeepSpeed's settings, of stage 3, by which all ranks together hold the
    model from the beginning. Raises ValueError for architectures whose log-probs would be wrong.
    """
    with zero.divided(sharded):
        hf = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation=ATTENTION,
            trust_remote_code=trust_remote_code,
        )
    _check_supported(hf, longest_row)
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if gradient_checkpointing:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING)
    return PolicyModel(hf, float32_head=float32_head)


def _check_supported(hf: PreTrainedModel, longest_row: int) -> None:
    config = hf.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not layers <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{config.model_type} has layers of type {sorted(layers)}; only full attention "
            "can be packed, train another model"
        )
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in layers and window is not None and window < longest_row:
        raise ValueError(
            f"rows of up to {longest_row} tokens (rollout.prompt_length + "
            "rollout.response_length, or context_length) are longer than the model's sliding "
            f"window of {window}; shorten them or train another model"
        )
    for name in _LOGIT_SETTINGS:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"{config.model_type} sets {name}, which changes its logits outside the "
                "head and is not supported; train another model"
            )
    if hf.get_output_embeddings() is None:
        raise ValueError(f"{config.model_type} has no language-model head")
