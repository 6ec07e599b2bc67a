"""Log-probabilities of given tokens from hidden states, without holding logits of all tokens at
once.

Runs in: learner ranks. Hides the chunks, their recomputation and the backward formula. Invariants:
softmax in float32 (or better) over logits / temperature; at most one [chunk, vocabulary] tensor is
kept for the backward pass, and none when there are several chunks; the result does not depend on
the chunk size; the projection is called at least once, so that every rank touches its weights.

    one chunk                  logits are kept
    several, a plain product   logits are computed again, and every chunk adds to one gradient of
                               the weights
    several, another           torch's checkpoints: every chunk has a gradient of the weights
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

Project = Callable[[Tensor], Tensor]
"""[n, H] -> [n, V]."""
CHUNK_BYTES = 256 * 2**20
MIN_LOGP = -1000.0
"""exp(MIN_LOGP) is 0: a token of logit -inf adds 0, not 0 * inf, to the entropy and its gradient.
"""


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    project: Project,
    *,
    vocab_size: int,
    temperature: float,
    with_entropy: bool,
    linear: tuple[Tensor, Tensor | None] | None = None,
    kept: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs of `targets` [N] or [N, K] int64 and, if asked for, entropies [N] in nats,
    from `hidden` [N, H]; both differentiable. N may be 0.

    `project` maps [n, H] to logits [n, vocab_size]. It is called on chunks of n tokens with n x
    vocab_size float32 under `chunk_bytes`, and once more per chunk in the backward pass if there
    are several; the number of chunks depends on N, so a projection that communicates (sharded
    weights) must gather its weights before.
    linear: weights [vocab_size, H] and bias [vocab_size] or None, where `project` is their plain
    product. kept: sets of tokens over which the distribution of each of `targets` [N] is, its own
    among them, filled up with -1 [N, K] int64. Raises ValueError for mismatched shapes.
    """
    if hidden.dim() != 2 or targets.shape[:1] != hidden.shape[:1] or targets.dim() > 2:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} must be [N, H] and targets {tuple(targets.shape)} [N], "
            "or [N, K]"
        )
    if not temperature > 0 or vocab_size < 1 or chunk_bytes < 1:
        raise ValueError(
            f"temperature {temperature}, vocab_size {vocab_size} and chunk_bytes {chunk_bytes} "
            "must be positive"
        )
    sets = kept is not None
    if kept is not None:
        targets = torch.cat([targets.unsqueeze(-1), kept], -1)

    def chunk_logprobs(part: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return _picked_and_entropy(*_among(project(part), ids, sets), temperature, with_entropy)

    size = max(1, chunk_bytes // (4 * vocab_size))
    if hidden.shape[0] <= size:
        logprobs, entropy = chunk_logprobs(hidden, targets)
        return logprobs, entropy if with_entropy else None
    if linear is not None:
        how = (sets, project, size, temperature, with_entropy)
        logprobs, entropy = _of_product(hidden, targets, *linear, *how)
        return logprobs, entropy if with_entropy else None
    compute: Callable[..., tuple[Tensor, Tensor]] = chunk_logprobs
    if torch.is_grad_enabled():
        compute = partial(checkpoint, chunk_logprobs, use_reentrant=False, preserve_rng_state=False)
    chunks = zip(hidden.split(size), targets.split(size), strict=True)
    values, entropies = zip(*(compute(part, ids) for part, ids in chunks), strict=True)
    return torch.cat(values), torch.cat(entropies) if with_entropy else None


class _LogProbs(torch.autograd.Function):
    """Compute log-softmax, the picked entry and the entropy in one step, which keeps only the
    logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        # an entropy that is only looked at costs nothing in the backward pass
        ctx.set_materialize_grads(False)
        picked, entropy = _picked(logits, targets, temperature, with_entropy)
        ctx.save_for_backward(logits, targets, entropy)
        ctx.temperature = temperature
        return picked, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_picked: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        logits, targets, entropy = ctx.saved_tensors
        found = _of_logits(logits, targets, entropy, grad_picked, grad_entropy, ctx.temperature)
        return found, None, None, None


class _LinearLogProbs(torch.autograd.Function):
    """`_LogProbs` of a plain product, chunk by chunk, which keeps no logits. With G = d / d logits:
    d / d hidden = G W, d / d W = sum over chunks of G^T hidden, d / d bias = sum of G, with G
    rounded to the weights' type.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sets: bool,
        project: Project,
        size: int,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        found = [
            _picked(*_among(project(part), ids, sets), temperature, with_entropy)
            for part, ids in zip(hidden.split(size), targets.split(size), strict=True)
        ]
        picked, entropy = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(hidden, targets, weight, bias, entropy)
        ctx.project, ctx.size = project, size
        ctx.temperature, ctx.sets = temperature, sets
        return picked, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_picked: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, targets, weight, bias, entropy = ctx.saved_tensors
        of_hidden, _, of_weight, of_bias = (
            torch.zeros_like(tensor) if needed else None
            for tensor, needed in zip(
                (hidden, None, weight, bias), ctx.needs_input_grad[:4], strict=True
            )
        )
        for start in range(0, len(hidden), ctx.size):
            rows = slice(start, start + ctx.size)
            part = hidden[rows]
            up, of_entropy = (
                None if one is None else one[rows] for one in (grad_picked, grad_entropy)
            )
            logits, ids = ctx.project(part), targets[rows]
            among = _among(logits, ids, ctx.sets)
            gradient = _of_logits(*among, entropy[rows], up, of_entropy, ctx.temperature)
            if ctx.sets:
                columns = ids[:, 1:].clamp(min=0)
                gradient = torch.zeros_like(logits).scatter_add_(-1, columns, gradient)
            if of_bias is not None:
                of_bias += gradient.sum(0)
            gradient = gradient.to(weight.dtype)
            if of_hidden is not None:
                of_hidden[rows] = gradient @ weight
            if of_weight is not None:
                of_weight.addmm_(gradient.t(), part.to(weight.dtype))
        return of_hidden, None, of_weight, of_bias, None, None, None, None, None


def _among(logits: Tensor, ids: Tensor, sets: bool) -> tuple[Tensor, Tensor]:
    """Return logits and targets; of ids [n, 1 + K] with sets behind the targets the logits of the
    sets, -inf behind each, and the places of the targets there.
    """
    if not sets:
        return logits, ids
    kept = ids[:, 1:]
    found = logits.gather(-1, kept.clamp(min=0)).masked_fill(kept < 0, -torch.inf)
    return found, (kept == ids[:, :1]).int().argmax(-1)


def _picked(
    logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Return log p_y and H = -sum p log p of p = softmax(logits / T), or 0 for H."""
    logp = _log_softmax(logits, temperature)
    picked = logp.gather(-1, _columns(targets)).view(targets.shape)
    if not with_entropy:
        return picked, logp.new_zeros(len(logp))
    return picked, torch.linalg.vecdot(logp.exp(), logp.clamp_(min=MIN_LOGP)).neg_()


def _of_logits(
    logits: Tensor,
    targets: Tensor,
    entropy: Tensor,
    grad_picked: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Return the gradient of the logits. With z = logits / T: d log p_y / dz = onehot(y) - p,
    dH / dz = -p (log p + H).
    """
    logp = _log_softmax(logits, temperature)
    if grad_picked is None:
        grad_picked = logp.new_zeros(targets.shape)
    grad_picked = _columns(grad_picked)
    pulled = grad_picked.sum(-1, keepdim=True)
    if grad_entropy is not None:
        probs = logp.exp()
        logp.clamp_(min=MIN_LOGP).add_(entropy.unsqueeze(-1)).mul_(-grad_entropy.unsqueeze(-1))
        grad = logp.sub_(pulled).mul_(probs)
    else:
        grad = logp.exp_().mul_(-pulled)
    grad.scatter_add_(-1, _columns(targets), grad_picked.to(grad.dtype))
    return grad.div_(temperature).to(logits.dtype)


_picked_and_entropy: Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor]] = (
    _LogProbs.apply
)
_of_product: Callable[..., tuple[Tensor, Tensor]] = _LinearLogProbs.apply


def _columns(of_targets: Tensor) -> Tensor:
    """Return [N, K], also of one target each."""
    return of_targets if of_targets.dim() == 2 else of_targets.unsqueeze(-1)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Return log-softmax in a new tensor, float32 at least."""
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(scaled if temperature == 1 else scaled / temperature, -1)
