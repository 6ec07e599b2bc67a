"""The policy network: a Hugging Face causal language model that computes log-probs of packed rows.

Runs in: learner ranks. Hides how a model gets through packed rows (`packing`), which is one of
these forward passes:

    packed   all tokens as one sequence: every linear layer sees N tokens and no padding, attention
             sees each row alone, and a prompt is computed once for all its rows
    rows     the rows, padded on the right, through the model's own decoder: for recurrences and
             attention of a model's own; causality hides the padding
    alone    one row after the other through all of the model: what the others must equal

Invariants:

- A row's log-probs do not depend on the rows packed beside it.
- Nothing of size N x N exists. Rows lie in buckets of little padding, whatever the mix of lengths.
- The language-model head sees only the hidden states that predict a response token, in one module
  call: every rank gathers a sharded weight once for the forward and once for the backward pass,
  however many chunks the rows need.
"""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from async_grpo.errors import SetupError
from async_grpo.learner.attention import ATTENTION, leave_out_of_compilation, of_rows, when_repeated
from async_grpo.learner.head import LogprobHead, OwnLogits
from async_grpo.learner.packing import Packed, Routes
from async_grpo.learner.team import Team

CHECKPOINTING = {  # there is no dropout
    "use_reentrant": False,
    "preserve_rng_state": False,
    "context_fn": when_repeated,
}
BACKEND = "inductor"
"""What compiles layers."""


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """How rows get through a model. attention: transformers' name of its implementation. head:
    whether logits are the plain product with the head's weights, or what the model makes of it.
    """

    rows: Literal["packed", "rows", "alone"]
    attention: str
    head: Literal["plain", "own"]

    def __str__(self) -> str:
        return f"{self.rows}, attention {self.attention}, head {self.head}"


PACKED = ForwardPass("packed", ATTENTION, "plain")
"""The cheapest one."""


class NoLanguageModel(SetupError, ValueError):
    """A model that predicts no tokens."""


class PolicyModel(nn.Module):
    """A causal language model with `LogprobHead`; parameters are those of `hf`, prefixed `hf.`.
    Raises NoLanguageModel for another.
    """

    def __init__(
        self, hf: PreTrainedModel, *, float32_head: bool, forward_pass: ForwardPass = PACKED
    ) -> None:
        super().__init__()
        self.hf = hf
        self.offloads = False
        """Whether what autograd keeps of the decoder layers lies in host memory."""
        self.in_step = False
        """Whether every pass must call the decoder as often as on other ranks: once."""
        self.segmented = False
        """Whether packs are to be for a kernel that takes rows of any length."""
        self.team: Team | None = None
        """The ranks that share every pack, of this one; None where it has them whole."""
        try:
            head, embedding = hf.get_output_embeddings(), hf.get_input_embeddings()
        except RuntimeError:  # transformers does not know where they are
            head = None
        if head is None:
            raise NoLanguageModel(
                f"{hf.config.model_type} cannot be trained: transformers names no embedding, or no "
                "head, of its tokens. Train another model"
            )
        self.tied = head.weight is embedding.weight
        """Whether the head's weight is that of the embedding."""
        hf.set_output_embeddings(LogprobHead(head, float32=float32_head))
        self.forward_pass = forward_pass
        self._own: OwnLogits | None = None
        self.use(forward_pass)

    def use(self, forward_pass: ForwardPass) -> None:
        """Compute log-probs by this pass from now on. Raises ValueError where the model cannot."""
        self.forward_pass = forward_pass
        if self.hf.config._attn_implementation != forward_pass.attention:
            self.hf.set_attn_implementation(forward_pass.attention)
        self._own = None
        if forward_pass.head == "own" and forward_pass.rows != "alone":
            self._own = OwnLogits(self.hf, self._decoder, self.hf.get_output_embeddings())

    def train(self, mode: bool = True) -> PolicyModel:
        """Let checkpointed layers know that they are trained, and no other module: the policy is
        the distribution that engines sample, without noise on routers or inputs.
        """
        super().train(False)
        known = [one for one in self.hf.modules() if getattr(one, "gradient_checkpointing", False)]
        for module in (self, *known):
            module.training = mode
        return self

    def places(self, packed: Packed) -> tuple[list[np.ndarray], int]:
        """Tell where the decoder computes the tokens of packed rows, and how many it computes."""
        if self.forward_pass.rows == "packed":
            return list(packed.tokens), packed.input_ids.numel()
        widths = [bucket.width for bucket in packed.layout.buckets for _ in range(bucket.rows)]
        if self.in_step:
            widths = [max(widths)] * len(widths)
        rows = zip(accumulate(widths), widths, packed.tokens, strict=True)
        return [end - width + np.arange(len(one)) for end, width, one in rows], sum(widths)

    @property
    def _decoder(self) -> nn.Module:
        """What gives hidden states of tokens."""
        base: nn.Module = self.hf.base_model
        if base is self.hf:  # a model that keeps its decoder under another name
            base = next(one for one in self.hf.children() if isinstance(one, PreTrainedModel))
        return base

    def whole(self, values: Tensor, packed: Packed) -> Tensor:
        """Return values [n, ...] of this rank's places, of all places in a pack of a team."""
        count = packed.input_ids.numel()
        return values if self.team is None else self.team.whole(values, count)

    def forward(
        self, packed: Packed, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs float32 of `packed.targets` at `temperature`, and entropies [M] or None.
        The pass `alone` takes a pack of one row.
        """
        if (team := self.team) is None or self.forward_pass.rows != "packed":
            return self._logprobs(packed, temperature, with_entropy)
        logprobs, entropy = self._logprobs(packed.shared(team), temperature, with_entropy)
        logprobs = team.collect(logprobs, packed.predictors)
        return logprobs, None if entropy is None else team.collect(entropy, packed.predictors)

    def _logprobs(
        self, packed: Packed, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return what `forward` does, of the tokens that this rank has."""
        passes = {"packed": self._packed, "rows": self._rows, "alone": self._alone}
        offload = self.offloads and torch.is_grad_enabled()
        pinned = packed.input_ids.is_cuda
        with save_on_cpu(pin_memory=pinned) if offload else nullcontext():
            states = passes[self.forward_pass.rows](packed)
        if self.forward_pass.rows == "alone":
            return _of_logits(states, packed, temperature)
        found: tuple[Tensor, Tensor | None] = self.hf.get_output_embeddings()(
            states.index_select(0, packed.predictors),
            packed.targets,
            temperature=temperature,
            with_entropy=with_entropy,
            kept=packed.kept,
            own=self._own,
        )
        return found

    def _packed(self, packed: Packed) -> Tensor:
        """Hidden states [N, H], all tokens in one sequence."""
        with of_rows(packed.layout, packed.routes):
            states: Tensor = self._decoder(
                input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False
            ).last_hidden_state
        return states[0]

    def _rows(self, packed: Packed) -> Tensor:
        """Hidden states [N, H], the rows of a bucket in one call, or all rows."""
        buckets, ids = packed.layout.buckets, packed.input_ids[0][packed.layout.take]
        places = ids.split([bucket.positions for bucket in buckets])
        padded = [
            part.view(bucket.rows, bucket.width)
            for part, bucket in zip(places, buckets, strict=True)
        ]
        if self.in_step:
            widest = max(bucket.width for bucket in buckets)
            whole = torch.cat([F.pad(part, (0, widest - part.shape[1])) for part in padded])
            states = self._states(whole, packed.routes).split([bucket.rows for bucket in buckets])
        else:
            starts = accumulate((bucket.positions for bucket in buckets[:-1]), initial=0)
            parts = zip(padded, starts, strict=True)
            states = [self._states(part, packed.routes, start) for part, start in parts]
        cut = [
            part[:, : bucket.width].flatten(0, 1)
            for part, bucket in zip(states, buckets, strict=True)
        ]
        return packed.layout.collect(cut)

    def _states(self, ids: Tensor, routes: Routes | None, start: int = 0) -> Tensor:
        """Hidden states [rows, width, H] of token ids [rows, width] at the places from `start`."""
        with of_rows(None, None if routes is None else replace(routes, start=start)):
            states: Tensor = self._decoder(input_ids=ids, use_cache=False).last_hidden_state
        return states

    def _alone(self, packed: Packed) -> Tensor:
        """Logits [N, V] of one row, by the model as it is."""
        [bucket] = packed.layout.buckets
        if bucket.rows != 1:
            raise ValueError(f"{bucket.rows} sequences; the pass `alone` takes one at a time")
        with of_rows(None, packed.routes):
            logits: Tensor = self.hf(input_ids=packed.input_ids, use_cache=False).logits
        return logits[0]

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


def _of_logits(logits: Tensor, packed: Packed, temperature: float) -> tuple[Tensor, None]:
    """Log-probs of the targets, by the definition."""
    scaled = logits.index_select(0, packed.predictors).float() / temperature
    targets = packed.targets.view(len(scaled), -1)
    return scaled.log_softmax(dim=-1).gather(-1, targets).view(packed.targets.shape), None


def model_class(config: PretrainedConfig) -> Any:
    """Return the automatic class that makes the model of a configuration: the one that its files
    name, if one does; else a language model before one that also sees pictures. Raises
    NoLanguageModel.
    """
    named = set(config.architectures or ())
    known = [
        (auto, mapping[type(config)])
        for auto, mapping in (
            (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
            (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
        )
        if type(config) in mapping
    ]
    if not known:
        if "AutoModelForCausalLM" in getattr(config, "auto_map", {}):
            return AutoModelForCausalLM
        raise NoLanguageModel(
            f"{config.model_type} cannot be trained: it is no language model that transformers "
            "knows. Train another model"
        )
    return next((auto for auto, kind in known if kind.__name__ in named), known[0][0])


def load_model(
    directory: str,
    *,
    dtype: torch.dtype,
    gradient_checkpointing: bool,
    trust_remote_code: bool,
    float32_head: bool,
    forward_pass: ForwardPass = PACKED,
) -> PolicyModel:
    """Load a causal language model, dropout off. Raises ValueError for a model that is none."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    hf = model_class(config).from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation=forward_pass.attention,
        trust_remote_code=trust_remote_code,
    )
    without_dropout(hf)
    without_auxiliary_losses(hf)
    if gradient_checkpointing:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING)
    return PolicyModel(hf, float32_head=float32_head, forward_pass=forward_pass)


def without_dropout(hf: PreTrainedModel) -> None:
    """Switch dropout off: of layers, and what attention and experts look up in their attributes."""
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def without_auxiliary_losses(hf: PreTrainedModel) -> None:
    """Let no layer keep what a loss of transformers' own would need: the policy's loss is ours."""
    for config in (hf.config, hf.config.get_text_config()):
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False
