"""Policy losses by name: one call for every loss, per token.

Runs in: learner ranks. Hides which loss needs what (rows, a selection, a clip interval) and the cleaning of the inputs; the formulas and
their numerics are in `loss_terms`.

Invariants: where the mask is 0 the loss and its gradient are exactly 0, whatever the inputs hold there; only `logprobs` receives
gradient; every loss returns the same diagnostics. Losses are minimised; aggregation over tokens is another module's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from async_grpo.algo import loss_terms
from async_grpo.algo.loss_terms import CLIP_SCHEDULES, MAX_LOG_RATIO, Clip, LossOptions, Outcome, Terms, clip_bounds, clip_widths

__all__ = [
    "CLIPPED", "CLIP_SCHEDULES", "DEFAULT_OPTIONS", "MAX_LOG_RATIO", "POLICY_LOSSES", "RATIO_FREE", "SELECTING", "SEQUENCE", "Clip",
    "LossOptions", "clean_terms", "clip_bounds", "policy_loss",
]  # fmt: skip

DEFAULT_OPTIONS = LossOptions()

POLICY_LOSSES: dict[str, Callable[[Terms], Outcome]] = {
    "ppo_clip": loss_terms.ppo_clip,
    "gspo": loss_terms.gspo,
    "gspo_token": loss_terms.gspo_token,
    "cispo": loss_terms.cispo,
    "sapo": loss_terms.sapo,
    "gmpo": loss_terms.gmpo,
    "gpg": loss_terms.policy_gradient,
    "reinforce": loss_terms.policy_gradient,
    "clip_cov": loss_terms.clip_cov,
    "kl_cov": loss_terms.kl_cov,
    "m2po": loss_terms.m2po,
    "dppo": loss_terms.dppo,
    "opmd": loss_terms.opmd,
    "topr": loss_terms.topr,
    "asymre": loss_terms.policy_gradient,
}
"""Name -> terms -> (loss per token, diagnostics)."""
CLIPPED = frozenset({"ppo_clip", "gspo", "gspo_token", "cispo", "gmpo", "clip_cov", "m2po"})
"""Losses that use the clip interval."""
SEQUENCE = frozenset({"gspo", "gspo_token", "gmpo", "topr"})
"""Losses with one ratio per response, which need to know the rows; `opmd` does too at level "sequence"."""
SELECTING = frozenset({"clip_cov", "kl_cov", "m2po"})
"""Losses that need a selection over the whole optimizer step (`selection.select_tokens`)."""
RATIO_FREE = frozenset({"gpg", "reinforce", "asymre", "topr", "opmd"})
"""Losses without a trust region around the anchor."""


def policy_loss(
    name: str,
    logprobs: Tensor,
    *,
    anchor_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    staleness: Tensor,
    clip: Clip,
    weights: Tensor | None = None,
    row_index: Tensor | None = None,
    selection: Tensor | None = None,
    options: LossOptions = DEFAULT_OPTIONS,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss per token, to be minimised, and detached diagnostics; every tensor is [B, T], or every one is packed [N].

    `logprobs` are the current policy's, with gradient; `anchor_logprobs` the trust region's centre; `behavior_logprobs` the sampler's
    (equal to the anchor when that is the behaviour policy); `advantages` one per token; `staleness` the lag per token in learner
    steps; `weights` multiply the whole loss of a token, without gradient. `row_index` int64, the row of each packed token, is needed by
    `SEQUENCE` losses and by `opmd` at level "sequence". `selection` comes from `select_tokens` and is needed by `SELECTING` losses: bool
    for clip_cov and kl_cov, float for m2po. Where `loss_mask` is 0 the loss and its gradient are exactly 0.
    Diagnostics: `log_ratio` (current - anchor, not clamped), `ratio` (the response's, on each of its tokens, where the loss has one), and
    the bool tensors `clipped_low`, `clipped_high` (the loss took the bound, by negative and positive advantage) and `dual_clipped`.
    Raises ValueError for an unknown name, a shape mismatch, a missing row index or a missing or mistyped selection.
    """
    if name not in POLICY_LOSSES:
        raise ValueError(f"unknown policy loss {name!r}; choose one of {sorted(POLICY_LOSSES)}")
    terms = clean_terms(
        logprobs, anchor_logprobs=anchor_logprobs, behavior_logprobs=behavior_logprobs, advantages=advantages, loss_mask=loss_mask,
        staleness=staleness, clip=clip, row_index=row_index, selection=selection, options=options,
    )  # fmt: skip
    _check_needs(name, terms)
    loss, found = POLICY_LOSSES[name](terms)
    if weights is not None:
        _check_shapes(logprobs, {"weights": weights})
        loss = loss * torch.where(terms.valid, weights.detach().to(loss.dtype), 0)
    nothing = torch.zeros_like(terms.valid)
    diagnostics = {
        "log_ratio": terms.difference,
        "ratio": torch.where(terms.valid, found.get("ratio", terms.log_ratio.detach().exp()), 1),
        **{key: found.get(key, nothing) for key in ("clipped_low", "clipped_high", "dual_clipped")},
    }
    return torch.where(terms.valid, loss, 0), {key: tensor.detach() for key, tensor in diagnostics.items()}


def clean_terms(
    logprobs: Tensor,
    *,
    anchor_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    staleness: Tensor,
    clip: Clip,
    row_index: Tensor | None = None,
    selection: Tensor | None = None,
    options: LossOptions = DEFAULT_OPTIONS,
) -> Terms:
    """Check the shapes and replace what masked entries hold; arguments as for `policy_loss`. At least float32.

    Raises ValueError for tensors whose shape is not that of `logprobs`.
    """
    optional = {"row_index": row_index, "selection": selection}
    _check_shapes(logprobs, {
        "anchor_logprobs": anchor_logprobs, "behavior_logprobs": behavior_logprobs, "advantages": advantages, "loss_mask": loss_mask,
        "staleness": staleness, **{key: tensor for key, tensor in optional.items() if tensor is not None},
    })  # fmt: skip
    valid = loss_mask != 0
    dtype = torch.promote_types(logprobs.dtype, torch.float32)

    def clean(tensor: Tensor) -> Tensor:
        return torch.where(valid, tensor.to(dtype), 0)

    if selection is not None and selection.dtype != torch.bool:
        selection = clean(selection.detach())
    current, anchor = clean(logprobs), clean(anchor_logprobs.detach())
    difference = current - anchor
    low, high = clip_widths(clean(staleness.detach()), clip)
    return Terms(
        current=current, anchor=anchor, behavior=clean(behavior_logprobs.detach()), difference=difference,
        log_ratio=difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), advantages=clean(advantages.detach()), low=low, high=high, valid=valid,
        row_index=row_index, selection=selection, clip=clip, options=options,
    )  # fmt: skip


def _check_shapes(logprobs: Tensor, others: dict[str, Tensor]) -> None:
    for key, tensor in others.items():
        if tensor.shape != logprobs.shape:
            raise ValueError(f"{key} has shape {tuple(tensor.shape)}, logprobs {tuple(logprobs.shape)}; they must be equal")


def _check_needs(name: str, terms: Terms) -> None:
    """Raise ValueError where the loss lacks its rows or its selection."""
    rows = name in SEQUENCE or (name == "opmd" and terms.options.opmd_level == "sequence")
    if rows and terms.row_index is None and terms.current.dim() != 2:
        raise ValueError(
            f"policy loss {name} needs the rows of tokens of shape {tuple(terms.current.shape)}: give row_index, the row of each packed "
            "token (int64), or tensors [B, T]"
        )
    if name in SELECTING:
        kind = "float (the bound T)" if name == "m2po" else "bool (the selected tokens)"
        if terms.selection is None or (terms.selection.dtype == torch.bool) != (name != "m2po"):
            got = "none" if terms.selection is None else "another type"
            raise ValueError(f"policy loss {name} needs selection, the {kind} tensor of select_tokens({name!r}, ...); got {got}")
