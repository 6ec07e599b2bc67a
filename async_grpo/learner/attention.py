"""Causal attention over packed rows, each row alone.

Runs in: learner ranks. Hides which kernel computes it: on GPUs flash attention for rows of any
length, in half precision; elsewhere `scaled_dot_product_attention`, bucket by bucket, or its
definition written out where logits are capped or have sinks. The packs say which (`pack(...,
segmented=takes_segments(...))`). Where the rows lie comes from outside the model, because not every
model hands on arguments that it does not know: attention asks for the layout of the forward pass
that it is part of (`of_rows`), also where gradient checkpointing repeats that pass later.
Invariant: all kernels give the same results and gradients, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PretrainedConfig

from async_grpo.learner.packing import LengthBucket, Routes, RowLayout

ATTENTION = "async_grpo_varlen"
_LARGEST_HEAD, _AMPERE = 256, (8, 0)


@dataclass(frozen=True, slots=True)
class Variant:
    """How a layer attends beside causality. scaling: of logits (None: head size ** -0.5); window:
    tokens that are seen, one's own included; cap: logits are cap * tanh(logits / cap); sinks [H]:
    logits of a token that has no value.
    """

    scaling: float | None = None
    window: int | None = None
    cap: float | None = None
    sinks: Tensor | None = None

    @property
    def needs_logits(self) -> bool:
        """Whether no kernel computes it, so that logits must exist."""
        return self.cap is not None or self.sinks is not None


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of a model's attention. count: of queries; groups: of keys and values; size: of one.
    The largest numbers, where layers differ; 0 without attention.
    """

    count: int
    groups: int
    size: int


def heads_of(config: PretrainedConfig) -> Heads:
    """Read the heads of a model's text from its configuration."""
    text = config.get_text_config()
    layers = list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]

    def largest(key: str) -> int:
        values = [getattr(layer, key, None) for layer in layers]
        return max((value for value in values if isinstance(value, int)), default=0)

    count = largest("num_attention_heads")
    return Heads(
        count=count,
        groups=largest("num_key_value_heads") or count,
        size=largest("head_dim") or largest("hidden_size") // max(count, 1),
    )


class _Current:
    """The rows that a forward pass works on, their routes, and whether a layer needed logits."""

    layout: RowLayout | None = None
    routes: Routes | None = None
    needed_logits = False


current = _Current()


@contextmanager
def of_rows(layout: RowLayout | None, routes: Routes | None = None) -> Iterator[None]:
    """Inside the block attention works on these rows, and routers take these routes. Of a process,
    not a thread: on a GPU the backward pass repeats layers in another one, while training waits.
    """
    kept = current.layout, current.routes
    current.layout, current.routes = layout, routes
    try:
        yield
    finally:
        current.layout, current.routes = kept


def when_repeated() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return what surrounds a checkpointed layer, and its repetition in the backward pass: there
    rows and routes are those of now. The `context_fn` of `torch.utils.checkpoint`.
    """
    return nullcontext(), of_rows(current.layout, current.routes)


def needs_logits() -> bool:
    """Tell whether a layer since the last call computed attention that no kernel does."""
    needed, current.needed_logits = current.needed_logits, False
    return needed


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
    **_: object,
) -> tuple[Tensor, None]:
    """Compute causal attention inside each packed row, with Hugging Face's attention interface.

    query [1, H, N, D], key and value [1, H_kv, N, D] -> [1, N, H, D]; of the tokens that this rank
    has, where a team shares them. Raises ValueError where the model brings a mask of its own, or is
    not called with packed rows.
    """
    layout = current.layout
    if layout is None or attention_mask is not None:
        raise ValueError(
            f"{ATTENTION} needs packed sequences and no attention mask; this model "
            f"{'brings its own mask' if layout is not None else 'was called without them'}"
        )
    variant = Variant(scaling, sliding_window, softcap, s_aux)
    current.needed_logits |= variant.needs_logits
    states = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    attend = _by_buckets if layout.segments is None else _by_segments
    if (team := layout.team) is None:
        return attend(*states, layout, variant)[None], None
    if s_aux is not None:
        variant = replace(variant, sinks=team.own_heads(s_aux))
    queries, keys, values = (one[: len(layout.own)] for one in team.to_heads(*states))
    shared = team.to_tokens(attend(queries, keys, values, layout, variant))
    return shared[None, :, : query.shape[1]], None


def takes_segments(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Tell whether the device has a kernel for rows of any length: flash attention's."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim <= _LARGEST_HEAD
        and head_dim % 8 == 0
        and torch.cuda.get_device_capability(device) >= _AMPERE
    )


def _by_segments(
    query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, variant: Variant
) -> Tensor:
    """Attention of [N, heads, D] in one call. A row's queries are its last keys: the kernel aligns
    causality at the end of both.
    """
    segments = layout.segments
    assert segments is not None
    if variant.needs_logits:
        raise ValueError("attention with capped logits or sinks takes sequences in buckets")
    out = varlen_attn(
        segments.ask(query),
        layout.keys(key),
        layout.keys(value),
        segments.queries,
        segments.keys,
        segments.most_queries,
        segments.most_keys,
        scale=variant.scaling,
        window_size=(-1 if variant.window is None else variant.window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)  # and no pair, which is for those who ask for more
    return segments.answer(out)


def _by_buckets(
    query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, variant: Variant
) -> Tensor:
    """Attention of [N, heads, D], bucket by bucket."""
    queries, keys, values = (layout.spread(states) for states in (query, key, value))
    parts = zip(queries, keys, values, layout.buckets, strict=True)
    return layout.collect([_attend(*part, variant) for part in parts])


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bucket: LengthBucket, variant: Variant
) -> Tensor:
    """Attention of one bucket [rows * width, heads, D] -> [rows * width, H, D]. Padding lies behind
    each row, where causality hides it.
    """
    query, key, value = (
        states.unflatten(0, (bucket.rows, bucket.width)).transpose(1, 2)
        for states in (query, key, value)
    )
    groups = query.shape[1] // key.shape[1]
    narrow = variant.window is not None and variant.window < bucket.width
    # Only the half-precision kernels group heads without falling back to an implementation that
    # stores width x width scores.
    grouped = groups > 1 and query.dtype != torch.float32 and not variant.needs_logits
    if groups > 1 and not grouped:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if variant.needs_logits:
        out = _by_definition(query, key, value, variant)
    else:
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=_seen(bucket.width, variant.window, query.device) if narrow else None,
            is_causal=not narrow,
            scale=variant.scaling,
            enable_gqa=grouped,
        )
    return out.transpose(1, 2).flatten(0, 1)


def _seen(width: int, window: int | None, device: torch.device) -> Tensor:
    """Tell which tokens [width, width] each token of a row sees."""
    place = torch.arange(width, device=device)
    back = place[:, None] - place
    seen = back >= 0
    return seen if window is None else seen & (back < window)


def _by_definition(query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
    """Attention of [rows, H, width, D] with all logits; they and the softmax in float32."""
    scaling = query.shape[-1] ** -0.5 if variant.scaling is None else variant.scaling
    logits = (query @ key.transpose(-1, -2)).float() * scaling
    if variant.cap is not None:
        logits = variant.cap * torch.tanh(logits / variant.cap)
    seen = _seen(query.shape[-2], variant.window, query.device)
    logits = logits.masked_fill(~seen, float("-inf"))
    if variant.sinks is not None:
        sinks = variant.sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sinks], dim=-1)
    shares = logits.softmax(dim=-1)[..., : key.shape[-2]]
    return shares.to(value.dtype) @ value


def leave_out_of_compilation() -> None:
    """Keep attention as it is in models that are compiled: its shapes follow the rows, so that
    every pack would be compiled anew.
    """
    AttentionInterface.register(ATTENTION, torch.compiler.disable(varlen_attention))


AttentionInterface.register(ATTENTION, varlen_attention)
