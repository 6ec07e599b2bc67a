"""Log-probabilities of given tokens from hidden states, without holding logits of all tokens at
once.

Runs in: learner ranks. Hides the chunks, their recomputation and the backward formula. Invariants:
softmax in float32 (or better) over logits / temperature; at most one [chunk, vocabulary] tensor is
kept for the backward pass, and none when there are several chunks; the result does not depend on
the chunk size; the projection is called at least once, so that every rank touches its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 256 * 2**20
MIN_LOGP = -1000.0
"""exp(MIN_LOGP) is 0: a token of logit -inf adds 0, not 0 * inf, to the entropy and its gradient.
"""


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    project: Callable[[Tensor], Tensor],
    *,
    vocab_size: int,
    temperature: float,
    with_entropy: bool,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs [N] of `targets` [N] int64 and, if asked for, entropies [N] in nats, from
    `hidden` [N, H]; both differentiable. N may be 0.

    `project` maps [n, H] to logits [n, vocab_size]. It is called on chunks of n tokens with n x
    vocab_size float32 under `chunk_bytes`, and once more per chunk in the backward pass if there
    are several; the number of chunks depends on N, so a projection that communicates (sharded
    weights) must gather its weights before. Raises ValueError for mismatched shapes.
    """
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} must be [N, H] and targets {tuple(targets.shape)} [N]"
        )
    if not temperature > 0 or vocab_size < 1 or chunk_bytes < 1:
        raise ValueError(
            f"temperature {temperature}, vocab_size {vocab_size} and chunk_bytes {chunk_bytes} "
            "must be positive"
        )

    def chunk_logprobs(part: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return _picked_and_entropy(project(part), ids, temperature, with_entropy)

    size = max(1, chunk_bytes // (4 * vocab_size))
    if hidden.shape[0] <= size:
        logprobs, entropy = chunk_logprobs(hidden, targets)
        return logprobs, entropy if with_entropy else None
    compute: Callable[..., tuple[Tensor, Tensor]] = chunk_logprobs
    if torch.is_grad_enabled():
        compute = partial(checkpoint, chunk_logprobs, use_reentrant=False, preserve_rng_state=False)
    chunks = zip(hidden.split(size), targets.split(size), strict=True)
    values, entropies = zip(*(compute(part, ids) for part, ids in chunks), strict=True)
    return torch.cat(values), torch.cat(entropies) if with_entropy else None


class _LogProbs(torch.autograd.Function):
    """Compute log-softmax, the picked entry and the entropy in one step, which keeps only the
    logits. With p = softmax(z), z = logits / T, H = -sum p log p: d log p_y / dz = onehot(y) - p,
    dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        # an entropy that is only looked at costs nothing in the backward pass
        ctx.set_materialize_grads(False)
        logp = _log_softmax(logits, temperature)
        picked = logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        entropy = (
            torch.linalg.vecdot(logp.exp(), logp.clamp_(min=MIN_LOGP)).neg_()
            if with_entropy
            else torch.zeros_like(picked)
        )
        ctx.save_for_backward(logits, targets, entropy)
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        return picked, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_picked: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        logits, targets, entropy = ctx.saved_tensors
        if grad_picked is None:
            grad_picked = torch.zeros_like(entropy)
        logp = _log_softmax(logits, ctx.temperature)
        if ctx.with_entropy and grad_entropy is not None:
            probs = logp.exp()
            logp.clamp_(min=MIN_LOGP).add_(entropy.unsqueeze(-1)).mul_(-grad_entropy.unsqueeze(-1))
            grad = logp.sub_(grad_picked.unsqueeze(-1)).mul_(probs)
        else:
            grad = logp.exp_().mul_(-grad_picked.unsqueeze(-1))
        grad.scatter_add_(-1, targets.unsqueeze(-1), grad_picked.unsqueeze(-1).to(grad.dtype))
        return grad.div_(ctx.temperature).to(logits.dtype), None, None, None


_picked_and_entropy: Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor]] = (
    _LogProbs.apply
)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Return log-softmax in a new tensor, float32 at least."""
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(scaled if temperature == 1 else scaled / temperature, -1)
