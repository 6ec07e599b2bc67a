"""Rows packed as one sequence of tokens, in which rows that answer the same prompt share it.

Runs in: learner ranks. Hides where the tokens of a row lie. A pack of three answers to prompt p and
one to prompt q:

    tokens       p p p q q | a a a a | b b | c c | d d d     N: linear layers compute each once
    attention    p p p a a a a                               positions: every row with its prompt
                 p p p b b . .                               in front, padded to the longest row of
                 p p p c c . .                               its bucket
                 q q d d d

On a GPU one kernel takes rows of any length (`RowSegments`), and there is no padding: every row's
keys are its prompt and its answer, and its queries those of them whose result no other row gives:

    keys         p p p a a a a | q q d d d | p p p b b | p p p c c
    queries      p p p a a a a | q q d d d |       b b |       c c      the last ones of the keys

Invariants: a token looks at the tokens of its row before it and at no others; attention's result
for a prompt is taken from the prompt's first row, all of whose copies agree; the gradient of a
shared token is the sum over its copies. Every index is used once in each direction, so that sums
have a fixed order on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from async_grpo.learner.prefetch import on_device
from async_grpo.learner.team import Team

PackedRow = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Prompt, the tokens that follow it, and the places in the latter whose log-probs are wanted; the
last place is the last token."""
SPARE_POSITIONS = 64
"""Padding that costs attention about as much as the kernel calls of another bucket would."""


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Rows of similar length, `width` positions each."""

    rows: int
    width: int

    @property
    def positions(self) -> int:
        """Attention positions, with padding."""
        return self.rows * self.width


@dataclass(frozen=True, slots=True)
class Copies:
    """Tokens [start, stop) of a pack, of prompts with `times` + 1 rows each. others
    [(stop - start) * times]: positions of their copies in all rows but the first, token by token.
    """

    start: int
    stop: int
    times: int
    others: Tensor


@dataclass(frozen=True, slots=True)
class RowSegments:
    """R rows for a kernel that takes rows of any length. keys, queries [R + 1] int32: where each
    row's begin, and the end of the last; most_keys, most_queries: of any row. token [N]: whose
    query each is; query [N]: which one is a token's.
    """

    keys: Tensor
    queries: Tensor
    most_keys: int
    most_queries: int
    token: Tensor
    query: Tensor

    def ask(self, states: Tensor) -> Tensor:
        """Bring states of the tokens [N, ...] into the order of the queries."""
        return _Permuted.apply(states, self.token, self.query)

    def answer(self, results: Tensor) -> Tensor:
        """Bring results of the queries [N, ...] into the order of the tokens."""
        return _Permuted.apply(results, self.query, self.token)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where attention finds the rows, among A positions.

    take [A]: the token at each position, 0 for padding. own [N]: the position whose result a token
    gets. foreign [A]: positions that are no token's own. buckets, or segments: the rows, one behind
    the other. tokens: the rows' lengths together, each with its prompt. longest: of a row. team: of
    ranks that share the tokens, and have all of them in attention; None: this rank alone.
    """

    take: Tensor
    own: Tensor
    foreign: Tensor
    copies: tuple[Copies, ...]
    buckets: tuple[LengthBucket, ...]
    segments: RowSegments | None
    tokens: int
    longest: int
    team: Team | None = None

    @property
    def positions(self) -> int:
        """A."""
        return len(self.take)

    def keys(self, states: Tensor) -> Tensor:
        """Spread states of the tokens [N, ...] to the positions [A, ...]."""
        return _Spread.apply(states, self)

    def spread(self, states: Tensor) -> tuple[Tensor, ...]:
        """Spread states of the tokens [N, ...] to each bucket's positions [rows * width, ...]."""
        return self.keys(states).split([bucket.positions for bucket in self.buckets])

    def collect(self, results: Sequence[Tensor]) -> Tensor:
        """Collect the tokens' results [N, ...] from those of each bucket's positions."""
        return _Collect.apply(torch.cat(list(results)), self)


class _Spread(torch.autograd.Function):
    """Rows of a tensor to all their positions; back, the sum over a token's positions."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, layout: RowLayout) -> Tensor:
        ctx.layout = layout
        return states.index_select(0, layout.take)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        out = gradient.index_select(0, ctx.layout.own)
        for copies in ctx.layout.copies:
            others = gradient.index_select(0, copies.others).view(
                copies.stop - copies.start, copies.times, *gradient.shape[1:]
            )
            out[copies.start : copies.stop] += others.sum(1)
        return out, None


class _Permuted(torch.autograd.Function):
    """Rows of a tensor in another order; back, in the order of before."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return states.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.inverse), None, None


class _Collect(torch.autograd.Function):
    """Each token's own position; back, nothing for the other positions."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, layout: RowLayout) -> Tensor:
        ctx.layout = layout
        return results.index_select(0, layout.own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        out = gradient.index_select(0, ctx.layout.take)
        return out.masked_fill_(ctx.layout.foreign.view(-1, *[1] * (out.dim() - 1)), 0), None


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Experts of tokens at the P places where a pass computes them (`routing`). columns: of each
    pick, numbered by block and by call in it; given [P, width]: experts to take, `missing` where
    they are not known; first [P]: where a token is first, of its copies; start: first place of a
    call of the decoder;
    picked: experts that were taken, if recorded; changed: in each pick, where the model would have
    taken others [n], and where known [n].
    """

    columns: dict[tuple[int, int], slice]
    given: Tensor
    missing: int
    first: Tensor
    start: int = 0
    picked: dict[tuple[int, int], list[Tensor]] | None = None
    changed: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def take(self, pick: tuple[int, int], live: Tensor) -> Tensor:
        """Return the experts [n, k] to take where the model picks `live`."""
        taken = live
        if pick in self.columns:
            here = slice(self.start, self.start + len(live))
            given = self.given[here, self.columns[pick]].long()
            known = (given != self.missing).all(-1)
            taken = torch.where(known[:, None], given, live)
            self.changed.append(((taken.sort(-1)[0] != live.sort(-1)[0]).any(-1), known))
            if self.picked is not None:
                taken = torch.cat([*self.picked.get(pick, []), taken])[self.first[here]]
        if self.picked is not None:
            self.picked.setdefault(pick, []).append(taken)
        return taken


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows as one sequence of N input tokens, M of which have log-probs.

    input_ids [1, N], position_ids [1, N]; predictors [M]: index of the hidden state that predicts
    each of these tokens; targets [M], or [M, K] with others in its place; order: packed row k is
    row `order[k]` of the caller; the M tokens lie in that order. tokens: which of the N each packed
    row has; routes: of them, if they are not left to the model; kept: see `LogprobHead`.
    """

    input_ids: Tensor
    position_ids: Tensor
    predictors: Tensor
    targets: Tensor
    layout: RowLayout
    order: tuple[int, ...]
    tokens: tuple[np.ndarray, ...]
    routes: Routes | None = None
    kept: tuple[Tensor, ...] | None = None

    def shared(self, team: Team) -> Packed:
        """Return what this rank of a team computes of the pack: its part of the tokens, and the
        log-probs that they predict.
        """
        mine, routes, kept = team.own(self.predictors), self.routes, self.kept
        if kept is not None:
            number = torch.full_like(self.predictors, -1)
            number[mine] = torch.arange(len(mine), device=mine.device)
            several, whole = number[kept[0]], number[kept[2]]
            kept = several[several >= 0], kept[1][several >= 0], whole[whole >= 0]
        if routes is not None:
            given = team.share(routes.given, padding=routes.missing)
            first = torch.arange(len(given), device=given.device)  # each token is there once
            routes = replace(routes, given=given, first=first)
        return replace(
            self,
            input_ids=team.share(self.input_ids[0])[None],
            position_ids=team.share(self.position_ids[0])[None],
            predictors=self.predictors[mine] // team.size,
            targets=self.targets[mine],
            layout=replace(self.layout, team=team),
            routes=routes,
            kept=kept,
        )


def response_row(prompt: np.ndarray, response: np.ndarray) -> PackedRow:
    """Make the row of a response whose tokens all have a log-prob."""
    return prompt, response, np.arange(len(response))


def pack(rows: Sequence[PackedRow], device: torch.device, *, segmented: bool = False) -> Packed:
    """Pack rows; the last token of each is a target only. Without rows the pack
    is one dummy token, so that a rank without work runs the same collectives. segmented: for a
    kernel that takes rows of any length.
    """
    if not rows:
        rows = [(np.zeros(1, np.int64),) * 3]
    lengths = [len(prompt) + len(response) - 1 for prompt, response, _ in rows]
    order = sorted(range(len(rows)), key=lambda index: -lengths[index])
    answered: dict[bytes, list[int]] = {}
    for place, index in enumerate(order):
        answered.setdefault(rows[index][0].tobytes(), []).append(place)
    prompts = sorted(answered.values(), key=len)  # those with equally many rows lie together
    inputs, positions, targets, starts, at = [], [], [], [0] * len(rows), 0
    for places in prompts:
        prompt = rows[order[places[0]]][0]
        inputs.append(prompt)
        positions.append(np.arange(len(prompt)))
        for place in places:
            starts[place] = at
        at += len(prompt)
    tokens = []
    for start, index in zip(starts, order, strict=True):
        prompt, response, wanted = rows[index]
        inputs.append(response[:-1])
        positions.append(np.arange(len(prompt), lengths[index]))
        targets.append(response[wanted])
        shared, own = np.arange(start, start + len(prompt)), np.arange(at, at + len(response) - 1)
        tokens.append(np.concatenate([shared, own]))
        at += len(response) - 1
    predictors = [
        part[len(rows[index][0]) - 1 + rows[index][2]]
        for part, index in zip(tokens, order, strict=True)
    ]
    return Packed(
        input_ids=_tensor(inputs, device)[None],
        position_ids=_tensor(positions, device)[None],
        predictors=_tensor(predictors, device),
        targets=_tensor(targets, device),
        layout=_layout(
            tokens,
            [(places, len(rows[order[places[0]]][0])) for places in prompts],
            at,
            device,
            segmented=segmented,
        ),
        order=tuple(order),
        tokens=tuple(tokens),
    )


def _tensor(parts: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return on_device(np.concatenate(parts).astype(np.int64), device)


def _layout(
    tokens: Sequence[np.ndarray],
    prompts: Sequence[tuple[list[int], int]],
    count: int,
    device: torch.device,
    *,
    segmented: bool,
) -> RowLayout:
    """tokens: of each row, longest first. prompts: the rows of each and its length, in the order in
    which they begin the pack.
    """
    if segmented:
        tokens, prompts = _asking(tokens, prompts)
        buckets = [LengthBucket(1, len(part)) for part in tokens]
    else:
        buckets = _buckets([len(part) for part in tokens])
    starts: list[int] = []
    positions = 0
    for bucket in buckets:
        starts += range(positions, positions + bucket.positions, bucket.width)
        positions += bucket.positions
    take, own = np.zeros(positions, np.int64), np.zeros(count, np.int64)
    foreign = np.ones(positions, bool)
    # in reverse: a prompt's first row comes last and stays
    for start, part in zip(reversed(starts), reversed(tokens), strict=True):
        take[start : start + len(part)] = part
        own[part] = np.arange(start, start + len(part))
    foreign[own] = False
    copies: list[Copies] = []
    at = 0
    for times, neighbours in groupby(prompts, lambda prompt: len(prompt[0]) - 1):
        others = [
            np.arange(length)[:, None] + [[starts[place] for place in places[1:]]]
            for places, length in neighbours
        ]
        stop = at + sum(map(len, others))
        if times:
            copies.append(
                Copies(at, stop, times, _tensor([part.ravel() for part in others], device))
            )
        at = stop
    return RowLayout(
        take=on_device(take, device),
        own=on_device(own, device),
        foreign=on_device(foreign, device),
        copies=tuple(copies),
        buckets=() if segmented else tuple(buckets),
        segments=_segments(starts, take, foreign, device) if segmented else None,
        tokens=sum(map(len, tokens)),
        longest=len(tokens[0]),
    )


def _asking(
    tokens: Sequence[np.ndarray], prompts: Sequence[tuple[list[int], int]]
) -> tuple[list[np.ndarray], list[tuple[list[int], int]]]:
    """Leave out rows of which another row gives all results: answers of one token, which is a
    target only, to a prompt that has another row.
    """
    asking = {
        place
        for places, length in prompts
        for place in places
        if place == places[0] or len(tokens[place]) > length
    }
    number = {place: index for index, place in enumerate(sorted(asking))}
    kept = [([number[place] for place in places if place in number], n) for places, n in prompts]
    return [tokens[place] for place in number], kept


def _segments(
    starts: Sequence[int], take: np.ndarray, foreign: np.ndarray, device: torch.device
) -> RowSegments:
    token = take[~foreign]
    query = np.empty_like(token)
    query[token] = np.arange(len(token))
    keys = np.array([*starts, len(take)], np.int32)
    queries = np.concatenate([[0], np.cumsum(~foreign)])[keys].astype(np.int32)
    return RowSegments(
        keys=on_device(keys, device),
        queries=on_device(queries, device),
        most_keys=int(np.diff(keys).max()),
        most_queries=int(np.diff(queries).max()),
        token=on_device(token, device),
        query=on_device(query, device),
    )


def _buckets(lengths: list[int]) -> list[LengthBucket]:
    """Cut descending lengths where a row is at most half as long as the bucket's first, or would
    bring its padding above SPARE_POSITIONS.
    """
    buckets, first, spare = [], 0, 0
    for last in range(1, len(lengths) + 1):
        if last < len(lengths):
            spare += lengths[first] - lengths[last]
            if spare <= SPARE_POSITIONS and 2 * lengths[last] > lengths[first]:
                continue
        buckets.append(LengthBucket(rows=last - first, width=lengths[first]))
        first, spare = last, 0
    return buckets
