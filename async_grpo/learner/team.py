"""Sequence parallel (Ulysses): the ranks of a team compute a pack together.

Runs in: learner ranks. Hides which tokens of a pack a rank has, and how tokens meet in attention:

    tokens            0 1 2 3 4 5 6 .    N, padded to a multiple of the team's size
    rank 0            0   2   4   6      every other one: embedding, norms, MLP, experts, head
    rank 1              1   3   5   .
    attention         all tokens, on each rank for its share of the heads
    log-probs         of all tokens, on each rank

Neighbours have neighbouring tokens, so that prompts and responses are spread evenly. Keys and
values are repeated where they have fewer heads than there are ranks. Source: Ulysses (arXiv
2309.14509).

Invariants:

- All ranks of a team make the same exchanges in the same order, in the forward pass, in layers that
  are repeated, and in the backward pass; also a rank whose tokens predict nothing.
- A rank's gradients are those of what it computed itself: the loss, which every rank of a team has
  whole, hands each the gradient of its own results. So gradients are added up over all ranks, and
  nothing is divided by the size of a team.
- Padding is seen by no token, and has no part in a loss, a statistic or a route.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from async_grpo.errors import SetupError
from async_grpo.learner.collectives import Collectives


class IndivisibleError(SetupError, ValueError):
    """Ranks cannot share the sequences of a model."""


def check_heads(count: int, size: int) -> None:
    """Check that a team of this size can share the query heads. Raises IndivisibleError."""
    if count < size:
        raise IndivisibleError(
            f"learner.sequence_parallel is {size}, but the model's attention has {count} heads, "
            f"which so many ranks cannot share: set it to at most {count}"
        )


class Team:
    """Neighbouring ranks, `size` of them, of which this one has number `place`. peers: the ranks
    with its number in all teams, in which each team counts once.
    """

    def __init__(self, size: int, device: torch.device, *, timeout_s: float) -> None:
        """Divide the ranks. Collective over all of them. timeout_s: of collectives."""
        ranks, timeout = range(dist.get_world_size()), timedelta(seconds=timeout_s)
        self.size, self.place = size, dist.get_rank() % size
        teams = [list(ranks[start : start + size]) for start in ranks[::size]]
        self._group, _ = dist.new_subgroups_by_enumeration(teams, timeout=timeout)
        across, _ = dist.new_subgroups_by_enumeration(
            [list(ranks[place::size]) for place in range(size)], timeout=timeout
        )
        self.peers = Collectives(device, group=across)
        self._together = Collectives(device, group=self._group)

    def share(self, of_tokens: Tensor, *, padding: int = 0) -> Tensor:
        """Return this rank's part [n, ...] of what all tokens [N, ...] have, and padding."""
        more = [0, 0] * (of_tokens.dim() - 1) + [0, -len(of_tokens) % self.size]
        return F.pad(of_tokens, more, value=padding)[self.place :: self.size].contiguous()

    def whole(self, of_share: Tensor, count: int) -> Tensor:
        """Collect what the ranks' tokens [n, ...] have, of N = `count` tokens, without gradient."""
        padding = -count % self.size
        found = self.gather(of_share).unflatten(0, (self.size, -1)).transpose(0, 1).flatten(0, 1)
        return found[: len(found) - padding]

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenate over the team's ranks, without gradient; lengths may differ."""
        return self._together.gather(tensor)

    def own(self, places: Tensor) -> Tensor:
        """Find which of some places [M] among all tokens are this rank's: indices [m]."""
        return (places % self.size == self.place).nonzero()[:, 0]

    def collect(self, results: Tensor, places: Tensor) -> Tensor:
        """Collect the ranks' results [m, ...] for their tokens, of all tokens at `places` [M]."""
        collected: Tensor = _Collected.apply(results, places, self)
        return collected

    def to_heads(self, *states: Tensor) -> list[Tensor]:
        """Bring own tokens with all heads [n, H, D] to all tokens, and padding, with own heads
        [n * size, ceil(H / size), D]. The first are queries; others are repeated where they have
        too few heads, and the last rank has empty ones too where H is no multiple. Raises
        IndivisibleError.
        """
        check_heads(count := states[0].shape[1], self.size)
        parts = [_even(one, count, self.size).unflatten(1, (self.size, -1)) for one in states]
        sent = torch.cat([part.flatten(2) for part in parts], -1).transpose(0, 1)
        found = self._exchanged(sent).transpose(0, 1).flatten(0, 1)
        shapes = [part.shape[2:] for part in parts]
        pieces = found.split([math.prod(shape) for shape in shapes], -1)
        return [one.unflatten(-1, shape) for one, shape in zip(pieces, shapes, strict=True)]

    def to_tokens(self, results: Tensor) -> Tensor:
        """Bring all tokens with own heads [N, ceil(H / size), D] to own tokens, padding included,
        with all heads and empty ones behind them.
        """
        padded = F.pad(results, [0, 0, 0, 0, 0, -len(results) % self.size]).flatten(1)
        sent = padded.unflatten(0, (-1, self.size)).transpose(0, 1)
        found = self._exchanged(sent).transpose(0, 1)
        return found.unflatten(-1, results.shape[1:]).flatten(1, 2)

    def own_heads(self, of_heads: Tensor) -> Tensor:
        """Return this rank's part of what all query heads [H] have."""
        return F.pad(of_heads, [0, -len(of_heads) % self.size]).chunk(self.size)[self.place]

    def _exchanged(self, parts: Tensor) -> Tensor:
        exchanged: Tensor = _Exchanged.apply(parts.contiguous(), self._group)
        return exchanged


def _even(states: Tensor, count: int, size: int) -> Tensor:
    """Repeat heads [n, H, D] until ranks can share them evenly; where they cannot share the `count`
    heads of queries, until each of those has one, and add empty ones.
    """
    heads = states.shape[1]
    times = count // heads if count % size else size // math.gcd(heads, size)
    repeated = states if times == 1 else states.repeat_interleave(times, dim=1)
    return F.pad(repeated, [0, 0, 0, -repeated.shape[1] % size])


class _Exchanged(torch.autograd.Function):
    """Part k of [size, ...] goes to rank k, and from each rank comes one; gradients go back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient.contiguous(), ctx.group), None


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    found = torch.empty_like(parts)
    dist.all_to_all_single(found, parts, group=group)
    return found


class _Collected(torch.autograd.Function):
    """Results of all ranks in the order of their places; back, to each rank those of its own, since
    every rank has the same loss.
    """

    @staticmethod
    def forward(ctx: Any, results: Tensor, places: Tensor, team: Team) -> Tensor:
        ctx.set_materialize_grads(False)  # an entropy that is only looked at has none
        ctx.own = team.own(places)
        found, order = team.gather(results), (places % team.size).argsort(stable=True)
        return torch.empty_like(found).index_copy_(0, order, found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None]:
        return None if gradient is None else gradient.index_select(0, ctx.own), None, None
