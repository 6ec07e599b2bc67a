"""The rows of a learner step on one rank, from the wire to tensors.

Runs in: learner ranks. Hides the decoding of the payload. Invariant: every trained token has a lag
between 0 and the configured bound, checked here for every planned row: an older token gets weight 0
with `on_stale: mask`, and ends the run otherwise.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from async_grpo.algo.logprobs import MIN_LOGP
from async_grpo.errors import StalenessError
from async_grpo.learner.batching import PlanRow, RankPlan, RowKey
from async_grpo.learner.packing import PackedRow
from async_grpo.learner.prefetch import on_device
from async_grpo.wire import codec
from async_grpo.wire.kept import KeptSets

NGRAM = 4
"""Tokens of a window that is looked for in what its response said before."""
HASH = np.uint64(0x9E3779B97F4A7C15)


@dataclass(slots=True)
class LearnerRow:
    """One row with its prompt, and values of its L sampled tokens; arrays are views into the
    payload.

    response: context and sampled tokens; sampled [L] int64: places of the latter in it; behavior
    [L] float32; lag [L] int64; where a frozen model teaches, teacher [L, 1 + k] float32, its
    log-probs of the token and of k others, and those teacher_ids [L, k]; kept: the tokens that each
    was sampled from, if not all; routes of all its tokens but the last (`routing`), which the
    engine may have sent; once computed: anchor, reference, advantages [L] float32, kl [L] float64.
    max_lag: older tokens are not trained; they stay in the divisors, and out of the statistics of
    their row. given: a demonstration, which is imitated and has a part in nothing else.
    """

    prompt: np.ndarray
    response: np.ndarray
    sampled: np.ndarray
    behavior: np.ndarray
    lag: np.ndarray
    turns: np.ndarray | None = None
    """Number of the turn [L] of each; None for a plain response."""
    max_lag: int | None = None
    given: bool = False
    teacher: np.ndarray | None = None
    teacher_ids: np.ndarray | None = None
    kept: KeptSets | None = None
    anchor: np.ndarray | None = None
    reference: np.ndarray | None = None
    kl: np.ndarray | None = None
    advantages: np.ndarray | None = None
    routes: np.ndarray | None = None

    @property
    def tokens(self) -> PackedRow:
        """Prompt, what follows it, and places of the sampled tokens in the latter."""
        return self.prompt, self.response, self.sampled

    @property
    def trained(self) -> np.ndarray:
        """[L] uint8: 0 at tokens that are too old, and at given ones."""
        if self.given:
            return np.zeros(len(self.lag), np.uint8)
        if self.max_lag is None:
            return np.ones(len(self.lag), np.uint8)
        return (self.lag <= self.max_lag).astype(np.uint8)

    @property
    def chosen(self) -> np.ndarray:
        """[L] uint8: `trained`, but 0 where no other token could be sampled: the log-prob is 0."""
        return self.trained if self.kept is None else self.trained * (self.kept.counts != 1)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Everything the loss needs of the M sampled tokens of a micro-batch, each [M].

    `teacher` [M, 1 + k] and `teacher_ids` [M, k], or None: see `LearnerRow`. `mask`: 0 at the token
    of a dummy, and of a demonstration. `trained`: also at tokens that are too old; `chosen`:
    also at those beside which none could be sampled, for statistics of ratios. `weights`: loss
    weight, 0 where not trained. `given`: of demonstrations' tokens, 0 at others; None without any.
    `row_index`: row of the micro-batch. `identity` [M, 3]: group_id, row, number among the row's
    sampled tokens.
    """

    behavior: Tensor
    anchor: Tensor
    reference: Tensor | None
    teacher: Tensor | None
    teacher_ids: Tensor | None
    advantages: Tensor
    mask: Tensor
    trained: Tensor
    chosen: Tensor
    lag: Tensor
    weights: Tensor
    given: Tensor | None
    row_index: Tensor
    identity: Tensor

    def within(self, vocabulary: int) -> TokenBatch:
        """Name no tokens that the policy does not have: a teacher's matrices may have more rows."""
        if self.teacher is None or self.teacher_ids is None:
            return self
        foreign = self.teacher_ids >= vocabulary
        of_named = self.teacher[:, 1:].masked_fill(foreign, MIN_LOGP)
        return replace(
            self,
            teacher=torch.cat([self.teacher[:, :1], of_named], -1),
            teacher_ids=self.teacher_ids.masked_fill(foreign, 0),
        )

    @classmethod
    def joined(cls, batches: Sequence[TokenBatch]) -> TokenBatch:
        """Join several micro-batches in order, without `reference`, `given` and what a teacher says
        of other tokens; `row_index` stays as it is.
        """
        optional = "reference", "teacher", "teacher_ids", "given"
        names = [name for name in cls.__dataclass_fields__ if name not in optional]
        # a dummy has no teacher
        asked = any(batch.teacher is not None for batch in batches)
        teachers = [
            one.behavior[:, None] if one.teacher is None else one.teacher[:, :1] for one in batches
        ]
        return cls(
            reference=None,
            teacher=torch.cat(teachers) if asked else None,
            teacher_ids=None,
            given=None,
            **{name: torch.cat([getattr(batch, name) for batch in batches]) for name in names},
        )


def known(values: np.ndarray | None) -> np.ndarray:
    """Return values of a row that an earlier part of the step has computed."""
    assert values is not None, "the step computes this before"
    return values


def decode_rows(
    plan: RankPlan, payload: codec.Buffer, *, max_staleness: int, mask_stale: bool = False
) -> dict[RowKey, LearnerRow]:
    """Decode the planned rows by (group_id, row). mask_stale: do not train tokens older than
    `max_staleness`, instead of refusing them. Raises StalenessError, and ValueError for a payload
    that does not fit the plan.
    """
    decoded = map(codec.decode_group, codec.unpack_frames(payload))
    groups = {group.group_id: group for group in decoded}
    taught = {
        number: (by_row(group, "teacher_logprobs"), by_row(group, "teacher_ids"), routes_of(group))
        for number, group in groups.items()
    }
    sets = {number: _kept(group) for number, group in groups.items()}
    if set(groups) != set(plan.group_ids):
        raise ValueError(
            f"step {plan.step}: the payload holds groups {sorted(groups)}, the plan needs "
            f"{sorted(plan.group_ids)}"
        )
    rows: dict[RowKey, LearnerRow] = {}
    for key, planned in plan.rows.items():
        group = groups[planned.group_id]
        row = group.rows[planned.row]
        prompt = group.prompts[row.prompt]
        lengths = len(prompt), len(row.response_ids), len(row.behavior_logprobs)
        if lengths != (planned.prompt_length, planned.length, planned.sampled):
            raise ValueError(
                f"step {plan.step}: group {key[0]} sequence {key[1]} does not have the planned "
                f"lengths {planned}"
            )
        lag = np.concatenate(
            [
                np.full(span.end - span.start, plan.step - 1 - span.policy_version, np.int64)
                for span in row.versions
            ]
        )
        if lag.min() < 0 or (lag.max() > max_staleness and not mask_stale):
            raise StalenessError(
                f"step {plan.step}: group {key[0]} sequence {key[1]} has tokens with staleness "
                f"{lag.min()} to {lag.max()}, outside 0 to replay.max_staleness {max_staleness}; "
                "this is a bug in admission or labelling, please open an issue"
            )
        teacher, teacher_ids, routes = (one[planned.row] for one in taught[planned.group_id])
        rows[key] = LearnerRow(
            prompt,
            row.response_ids,
            row.sampled,
            row.behavior_logprobs,
            lag,
            turns=row.turns,
            max_lag=max_staleness,
            given=planned.given,
            advantages=np.zeros(len(lag), np.float32) if planned.given else None,
            teacher=teacher,
            teacher_ids=teacher_ids,
            routes=routes,
            kept=sets[planned.group_id][planned.row],
        )
    return rows


def repeats(rows: Mapping[RowKey, LearnerRow]) -> dict[str, tuple[int, int]]:
    """Count what sampled responses repeat, by metric: windows of NGRAM tokens that came before in
    their response, of all windows; groups that have the commonest response, of all groups.
    """
    again, windows, groups = 0, 0, defaultdict[bytes, set[int]](set)
    for (group_id, _), row in rows.items():
        if row.given:
            continue
        tokens = row.response[row.sampled].astype(np.uint64)
        groups[tokens.tobytes()].add(group_id)
        count = len(tokens) - NGRAM + 1
        if count > 0:
            keys = np.zeros(count, np.uint64)
            for place in range(NGRAM):  # a hash, which wraps; collisions are rare
                keys = keys * HASH + tokens[place : place + count]
            again, windows = again + count - len(np.unique(keys)), windows + count
    most, every = max(map(len, groups.values()), default=0), set[int]().union(*groups.values())
    return {"train/repeated_tokens": (again, windows), "train/same_response": (most, len(every))}


def by_row(group: codec.Group, plane: str) -> list[np.ndarray | None]:
    """Return what a plane of width w has for the sampled tokens [L, w] of each row; None for each
    where the group has no such plane.
    """
    values = group.planes.get(plane)
    if values is None:
        return [None] * len(group.rows)
    lengths = [len(row.behavior_logprobs) for row in group.rows]
    return list(np.split(values, np.cumsum(lengths)[:-1]))


def routes_of(group: codec.Group) -> list[np.ndarray | None]:
    """Return what the engine routed of each row's T tokens but the last [T - 1, width]; None for
    each where it did not say.
    """
    plane = group.planes.get("routes")
    if plane is None:
        return [None] * len(group.rows)
    lengths = [*map(len, group.prompts), *(len(row.response_ids) for row in group.rows)]
    parts = np.split(plane, np.cumsum(lengths)[:-1])
    responses = zip(group.rows, parts[len(group.prompts) :], strict=True)
    return [np.concatenate([parts[row.prompt], part])[:-1] for row, part in responses]


def _kept(group: codec.Group) -> list[KeptSets | None]:
    """Return of each row which tokens its sampled ones are from; None for each if all are."""
    found = KeptSets.in_planes(group.planes)
    if found is None:
        return [None] * len(group.rows)
    return [*found.split([len(row.behavior_logprobs) for row in group.rows])]


def token_batch(
    planned: Sequence[PlanRow], rows: Sequence[LearnerRow], device: torch.device
) -> TokenBatch:
    """Build token tensors in packed order; without rows, of the one dummy token, untrained."""
    lengths = np.array([row.sampled for row in planned] or [1])

    def column(arrays: list[np.ndarray], dtype: type[np.generic]) -> Tensor:
        return on_device(np.concatenate(arrays or [np.zeros(1)]).astype(dtype), device)

    def spread(values: Sequence[float], dtype: type[np.generic]) -> Tensor:
        return on_device(np.repeat(np.array(values or [0], dtype), lengths), device)

    def computed(
        arrays: list[np.ndarray | None], dtype: type[np.generic] = np.float32
    ) -> Tensor | None:
        """Return the column, or None where a row has no values."""
        there = [array for array in arrays if array is not None]
        return column(there, dtype) if there and len(there) == len(arrays) else None

    behavior = column([row.behavior for row in rows], np.float32)
    anchor = computed([row.anchor for row in rows])
    trained = column([row.trained for row in rows], np.uint8)
    row_index = spread(range(len(planned)), np.int64)
    starts = on_device(np.cumsum(lengths) - lengths, device)
    position = torch.arange(len(row_index), device=device) - starts[row_index]
    group_ids = spread([row.group_id for row in planned], np.int64)
    numbers = spread([row.row for row in planned], np.int64)
    return TokenBatch(
        behavior=behavior,
        anchor=behavior if anchor is None else anchor,
        reference=computed([row.reference for row in rows]),
        teacher=computed([row.teacher for row in rows]),
        teacher_ids=computed([row.teacher_ids for row in rows], np.int64),
        advantages=column([known(row.advantages) for row in rows], np.float32),
        mask=column([np.full(len(row.lag), not row.given) for row in rows], np.uint8),
        trained=trained,
        chosen=column([row.chosen for row in rows], np.uint8),
        lag=column([row.lag for row in rows], np.int64),
        weights=spread([row.weight for row in planned], np.float32) * trained,
        given=spread([row.weight * row.given for row in planned], np.float32)
        if any(row.given for row in planned)
        else None,
        row_index=row_index,
        identity=torch.stack([group_ids, numbers, position], -1),
    )


def learning_rate(update: int, *, lr: float, warmup: int, schedule: str, total: int) -> float:
    """Learning rate of optimizer update `update` (from 0): linear warm-up to `lr`, then the
    schedule; `linear` and `cosine` end at 0 after `total` updates. The factor of `settle` is the
    driver's.
    """
    if update < warmup:
        return lr * (update + 1) / warmup
    progress = min((update - warmup) / max(total - warmup, 1), 1.0)
    shapes = {
        "constant": 1.0,
        "settle": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }
    return lr * shapes[schedule]


class Stopwatch:
    """Measures the seconds of a `with` block."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._started
