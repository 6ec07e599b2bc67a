"""Rows of a learner step and the loss of their tokens, for tests of the token mathematics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_grpo.algo.aggregation import row_weights
from async_grpo.algo.metrics import MetricSums
from async_grpo.config.algorithm import Algorithm
from async_grpo.config.schema import Config
from async_grpo.learner.batching import PlanRow, RowKey, RowValue
from async_grpo.learner.rows import LearnerRow, TokenBatch, token_batch
from async_grpo.learner.token_math import TokenMath, UpdateFacts
from tests.support.thread_ranks import Collective, Ranks

CPU = torch.device("cpu")
LENGTHS = [5, 1, 9, 3, 7, 4, 6, 2]
"""Two groups of four rows."""
ADVANTAGES = [1.0, -0.5, 0.7, -1.2, 2.0, -2.0, 0.4, -0.4]


class Alone:
    """The collectives of a single rank."""

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor


def config_of(**algorithm: Any) -> Config:
    """A configuration with these settings of the algorithm; pairs that a user may not combine are
    admitted here.
    """
    config = Config.model_validate({"run": {"total_steps": 3}, "model": {"path": "m"}})
    return config.unchecked_copy(update={"algorithm": Algorithm.model_validate(algorithm)})


def make_rows(seed: int = 0) -> dict[RowKey, LearnerRow]:
    rng = np.random.default_rng(seed)
    rows = {}
    for index, length in enumerate(LENGTHS):
        behavior = -rng.gamma(2, 0.5, length)
        rows[10 + index // 4, index % 4] = LearnerRow(
            prompt=np.zeros(2, np.int32),
            response=np.zeros(length, np.int32),
            sampled=np.arange(length),
            behavior=behavior.astype(np.float32),
            lag=np.sort(rng.integers(0, 4, length))[::-1].copy(),
            anchor=(behavior + rng.normal(0, 0.1, length)).astype(np.float32),
            reference=(behavior + rng.normal(0, 0.1, length)).astype(np.float32),
        )
    return rows


def parameters() -> Tensor:
    """What `logprobs_of` depends on."""
    return torch.tensor([0.3, -0.8, 0.5], dtype=torch.float64, requires_grad=True)


def logprobs_of(batch: TokenBatch, rows: dict[RowKey, LearnerRow], theta: Tensor) -> Tensor:
    """Log-probs that depend on shared parameters and on which token it is, not on its place in the
    pack or its row.
    """
    group, row, _ = batch.identity.double().unbind(-1)
    token = 50 * batch.behavior.double()
    features = torch.stack(
        [torch.sin(group + 2 * row), torch.cos(1 + row * token), torch.sin(token)], -1
    )
    return batch.behavior.double() + 0.5 * torch.tanh(features @ theta)


def entropies_of(logprobs: Tensor) -> Tensor:
    """Return something in place of the entropies."""
    return -logprobs.exp()


def gradient(
    config: Config,
    rows: dict[RowKey, LearnerRow],
    split: Sequence[Sequence[RowKey]],
    *,
    counted: dict[RowKey, LearnerRow] | None = None,
    metrics: MetricSums | None = None,
    collectives: Any = None,
) -> tuple[float, Tensor]:
    """Loss and gradient of one update, its rows cut into these micro-batches. The divisors are
    those of `counted`.
    """
    math = TokenMath(config, collectives or Alone())
    keys = sorted(counted or rows)
    values = {key: RowValue(advantage) for key, advantage in zip(keys, ADVANTAGES, strict=True)}
    math.assign(rows, owned=rows, values=values, kl_coef=0.0)
    weights = row_weights(
        config.algorithm.loss_agg_mode,
        [len((counted or rows)[key].lag) for key in keys],
        max_response_length=16,
        group_index=[key[0] for key in keys],
    )
    planned = {
        key: PlanRow(*key, 2, len(rows[key].lag), weight, len(rows[key].lag))
        for key, weight in zip(keys, weights, strict=True)
        if key in rows
    }
    theta = parameters()
    batches = [
        token_batch([planned[key] for key in part], [rows[key] for key in part], CPU)
        for part in split
    ]
    selections: list[UpdateFacts | None] = [None] * len(batches)
    if math.selects:
        now = [logprobs_of(batch, rows, theta).detach() for batch in batches]
        asked = math.selects_by_policy
        seen = [entropies_of(one) for one in now]
        selections = math.select(3, batches, now if asked else None, seen if asked else None)
    total = torch.zeros((), dtype=torch.float64)
    for batch, selection in zip(batches, selections, strict=True):
        logprobs = logprobs_of(batch, rows, theta)
        total = total + math.loss(
            batch,
            logprobs,
            entropies_of(logprobs),
            selection=selection,
            metrics=metrics or MetricSums(),
        )
    return float(total.detach()), torch.autograd.grad(total, theta)[0]


def splits(keys: list[RowKey]) -> list[list[list[RowKey]]]:
    """Row by row, uneven parts, an empty part, and shuffled rows."""
    shuffled = [keys[k] for k in np.random.default_rng(1).permutation(len(keys))]
    return [
        [[key] for key in keys],
        [keys[:1], keys[1:6], [], keys[6:]],
        [shuffled[5:], shuffled[:5]],
        [keys[::-1]],
    ]


def over_ranks(
    config: Config, rows: dict[RowKey, LearnerRow], parts: Sequence[Sequence[Sequence[RowKey]]]
) -> tuple[float, Tensor]:
    """Loss and gradient of one update as ranks add them up, each with its micro-batches."""
    found: list[tuple[float, Tensor]] = [(0.0, torch.empty(0))] * len(parts)

    def work(reduce: Collective, gather: Collective, rank: int) -> Tensor:
        mine = {key: rows[key] for part in parts[rank] for key in part}
        exchange = SimpleNamespace(sum=reduce, gather=gather)
        found[rank] = gradient(config, mine, parts[rank], counted=rows, collectives=exchange)
        return found[rank][1]

    gradients = Ranks(len(parts)).run(work)
    return sum(value for value, _ in found), torch.stack(gradients).sum(0)


@dataclass(frozen=True)
class Token:
    """One token of a slow loop; `current` carries the gradient, and so does its `entropy`."""

    current: Tensor
    entropy: Tensor
    anchor: float
    behavior: float
    advantage: float

    @property
    def pair(self) -> tuple[float, float]:
        return self.anchor, self.behavior

    @property
    def log_w(self) -> float:
        return self.anchor - self.behavior

    @property
    def ratio(self) -> Tensor:
        return (self.current - self.anchor).exp()

    def clipped(self, ratio: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
        """PPO's loss with this ratio."""
        bounded = ratio.clamp(1 - low, 1 + high)
        return -torch.minimum(ratio * self.advantage, bounded * self.advantage)


def slow_tokens(rows: dict[RowKey, LearnerRow], theta: Tensor) -> dict[RowKey, list[Token]]:
    """The tokens of every row."""
    keys, out = sorted(rows), {}
    for key, advantage in zip(keys, ADVANTAGES, strict=True):
        row, planned = rows[key], PlanRow(*key, 2, len(rows[key].lag), 1.0, len(rows[key].lag))
        row.advantages = np.full(len(row.lag), advantage, np.float32)
        current = logprobs_of(token_batch([planned], [row], CPU), rows, theta)
        out[key] = [
            Token(one, entropy, float(anchor), float(behavior), float(np.float32(advantage)))
            for one, entropy, anchor, behavior in zip(
                current, entropies_of(current), row.anchor, row.behavior, strict=True
            )
        ]
    return out
