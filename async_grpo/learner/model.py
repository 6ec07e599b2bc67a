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

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from async_grpo.algo.logprobs import token_logprobs
from async_grpo.learner.packing import LengthBucket, Packed, RowLayout

ATTENTION = "async_grpo_varlen"
# Logits are scaled inside these models' own forward, which the head below replaces.
_LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    row_layout: RowLayout | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute causal attention inside each packed row, with Hugging Face's attention interface.

    query [1, H, N, D], key and value [1, H_kv, N, D] -> [1, N, H, D]. Raises ValueError for other
    kinds of attention.
    """
    if row_layout is None or attention_mask is not None:
        raise ValueError(
            f"{ATTENTION} needs the row boundaries of a packed sequence and no attention mask"
        )
    if softcap is not None or s_aux is not None:
        raise ValueError(
            "attention with logit soft-capping or attention sinks is not supported; train "
            "another model"
        )
    longest = row_layout.buckets[0].width
    if sliding_window is not None and longest > sliding_window:
        raise ValueError(
            f"a row of {longest} tokens is longer than the model's sliding window of "
            f"{sliding_window}; shorten the rows"
        )
    # of [N, heads, D], one for each bucket
    queries, keys, values = (
        row_layout.spread(states[0].transpose(0, 1)) for states in (query, key, value)
    )
    parts = zip(queries, keys, values, row_layout.buckets, strict=True)
    return row_layout.collect([_attend(*part, scaling) for part in parts])[None], None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bucket: LengthBucket, scaling: float | None
) -> Tensor:
    """Attention of one bucket [rows * width, heads, D] -> [rows * width, H, D]. Padding lies behind
    each row, where causality hides it.
    """
    query, key, value = (
        states.unflatten(0, (bucket.rows, bucket.width)).transpose(1, 2)
        for states in (query, key, value)
    )
    groups = query.shape[1] // key.shape[1]
    # Only the half-precision kernels group heads without falling back to an implementation that
    # stores width x width scores.
    grouped = groups > 1 and query.dtype != torch.float32
    if groups > 1 and not grouped:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).flatten(0, 1)


AttentionInterface.register(ATTENTION, varlen_attention)


class LogprobHead(nn.Module):
    """The language-model head, from hidden states straight to log-probs, with the replaced layer's
    parameter names. float32: of logits, whatever the weights; a float32 copy lives during the call.
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
        if self._float32:
            hidden, weight = hidden.float(), weight.float()
            bias = None if bias is None else bias.float()

        def project(part: Tensor) -> Tensor:
            return F.linear(part, weight, bias)

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
        self.vocab_size = hf.get_output_embeddings().weight.shape[0]
        hf.set_output_embeddings(LogprobHead(hf.get_output_embeddings(), float32=float32_head))

    def forward(
        self, packed: Packed, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs [M] float32 of response tokens at `temperature`, and entropies [M] or None."""
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


def load_model(
    directory: str,
    *,
    dtype: torch.dtype,
    longest_row: int,
    gradient_checkpointing: bool,
    trust_remote_code: bool,
    float32_head: bool,
) -> PolicyModel:
    """Load a causal language model for packed training, dropout off. longest_row: tokens of prompt
    and response. Raises ValueError for architectures whose log-probs would be wrong.
    """
    hf = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation=ATTENTION,
        trust_remote_code=trust_remote_code,
        low_cpu_mem_usage=True,
    )
    _check_supported(hf, longest_row)
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if gradient_checkpointing:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
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
            "rollout.response_length) are longer than the model's sliding window "
            f"of {window}; shorten them or train another model"
        )
    for name in _LOGIT_SETTINGS:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"{config.model_type} sets {name}, which changes its logits outside the "
                "head and is not supported; train another model"
            )
    if hf.get_output_embeddings() is None:
        raise ValueError(f"{config.model_type} has no language-model head")
