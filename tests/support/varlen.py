"""What stands on CPU for the attention kernel that takes rows of any length, which is of GPUs."""

from __future__ import annotations

import torch
from torch import Tensor


def double(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Tensor,
    keys: Tensor,
    most_queries: int,
    most_keys: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What the kernel computes, row by row: causality is aligned at the end of queries and keys."""
    assert window_size == (-1, 0) and queries.dtype == keys.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[1])
    asked, found = queries.diff(), keys.diff()
    assert queries[0] == keys[0] == 0
    assert queries[-1] == len(query) and keys[-1] == len(key) == len(value)
    assert (asked >= 1).all() and (asked <= found).all()
    assert (most_queries, most_keys) == (asked.max(), found.max())
    times, out = query.shape[1] // key.shape[1], []
    for row in range(len(asked)):
        q = query[queries[row] : queries[row + 1]]
        k, v = (
            states[keys[row] : keys[row + 1]].repeat_interleave(times, 1) for states in (key, value)
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
        hidden = torch.ones(len(q), len(k)).triu(len(k) - len(q) + 1).bool()
        out.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        )
    return torch.cat(out)
