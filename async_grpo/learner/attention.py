"""Causal attention over packed rows, each row alone.

Runs in: learner ranks. Hides which kernel computes it: on GPUs flash attention for rows of any
length, in half precision; elsewhere `scaled_dot_product_attention`, bucket by bucket. The packs say
which (`pack(..., segmented=takes_segments(...))`). Invariant: both give the same results and
gradients, up to rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from async_grpo.learner.packing import LengthBucket, RowLayout

ATTENTION = "async_grpo_varlen"
_LARGEST_HEAD, _AMPERE = 256, (8, 0)


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
    if sliding_window is not None and row_layout.longest > sliding_window:
        raise ValueError(
            f"a row of {row_layout.longest} tokens is longer than the model's sliding window of "
            f"{sliding_window}; shorten the rows"
        )
    states = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    attend = _by_buckets if row_layout.segments is None else _by_segments
    return attend(*states, row_layout, scaling)[None], None


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
    query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, scaling: float | None
) -> Tensor:
    """Attention of [N, heads, D] in one call. A row's queries are its last keys: the kernel aligns
    causality at the end of both.
    """
    segments = layout.segments
    assert segments is not None
    out = varlen_attn(
        segments.ask(query),
        layout.keys(key),
        layout.keys(value),
        segments.queries,
        segments.keys,
        segments.most_queries,
        segments.most_keys,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)  # and no pair, which is for those who ask for more
    return segments.answer(out)


def _by_buckets(
    query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, scaling: float | None
) -> Tensor:
    """Attention of [N, heads, D], bucket by bucket."""
    queries, keys, values = (layout.spread(states) for states in (query, key, value))
    parts = zip(queries, keys, values, layout.buckets, strict=True)
    return layout.collect([_attend(*part, scaling) for part in parts])


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


def leave_out_of_compilation() -> None:
    """Keep attention as it is in models that are compiled: its shapes follow the rows, so that
    every pack would be compiled anew.
    """
    AttentionInterface.register(ATTENTION, torch.compiler.disable(varlen_attention))


AttentionInterface.register(ATTENTION, varlen_attention)
