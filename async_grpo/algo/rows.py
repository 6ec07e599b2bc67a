"""Sums, means, extremes over the rows of [B, T] or packed [N] tensors; the check of their shapes.

Runs in: learner ranks and the driver. Hides the two layouts. Invariants: a row's value does not
depend on the rows beside it nor on its padding; sums are taken in float64, so that a long row gives
the same number in any layout; gradients pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from async_grpo.algo.late import torch

if TYPE_CHECKING:
    from torch import Tensor


def row_sums(values: Tensor, row_index: Tensor | None = None) -> Tensor:
    """Return the sum of its row on every entry, in the shape and type of `values`: [B, T], or
    packed [N] with `row_index` [N] int64, each below N. Masked entries must hold 0. Raises
    ValueError for packed values without it.
    """
    if values.dim() == 2 and row_index is None:
        return values.double().sum(-1, keepdim=True).to(values.dtype).expand_as(values)
    flat, index = values.reshape(-1), _index(values, row_index).reshape(-1)
    if values.numel() == 0:
        return values
    sums = torch.zeros_like(flat, dtype=torch.float64).index_add_(0, index, flat.double())
    return sums[index].to(values.dtype).reshape(values.shape)


def row_means(values: Tensor, valid: Tensor, row_index: Tensor | None = None) -> Tensor:
    """Return the mean over the valid entries of its row on every entry; 0 in a row without any.
    `valid` is bool, in the shape of `values`.
    """
    lengths = row_sums(valid.to(torch.float64), row_index)
    total = row_sums(torch.where(valid, values, 0), row_index)
    return total / lengths.clamp(min=1).to(values.dtype)


def row_extremes(
    values: Tensor, valid: Tensor, row_index: Tensor | None = None, *, largest: bool
) -> Tensor:
    """Return the largest (or smallest) valid entry of its row on every entry; minus infinity (or
    infinity) in a row without any. Shapes and errors as for `row_means`.
    """
    fill = -torch.inf if largest else torch.inf
    masked = torch.where(valid, values, fill)
    if values.dim() == 2 and row_index is None:
        return (masked.amax if largest else masked.amin)(-1, keepdim=True).expand_as(values)
    index = _index(values, row_index).reshape(-1)
    extremes = torch.full_like(masked.reshape(-1), fill).scatter_reduce(
        0, index, masked.reshape(-1), "amax" if largest else "amin"
    )
    return extremes[index].reshape(values.shape)


def _index(values: Tensor, row_index: Tensor | None) -> Tensor:
    """Return the rows of packed values. Raises ValueError without them."""
    if row_index is None or row_index.shape != values.shape:
        raise ValueError(
            f"values {tuple(values.shape)} need row_index, the sequence of each packed token, in "
            "the same shape"
        )
    return row_index


def check_shapes(logprobs: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError for a tensor that has not the shape of the log-probs; None is left out."""
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != logprobs.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, the log-probs {tuple(logprobs.shape)}; "
                "they must be equal"
            )
