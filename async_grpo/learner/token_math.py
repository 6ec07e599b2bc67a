"""Token mathematics of a learner step: from what a row is worth to the loss of its tokens.

Runs in: learner ranks. Hides which parts of the loss a configuration uses. The order, per step and
per micro-batch:

    reward_kl   token KL of every row, its sum goes to the driver                      (only with
                add_token_level_kl)
    assign      row values -> advantage per token: the row's own, or returns -> whitened -> clipped
    select      what statistics of the whole update say, after a pass without gradient where they
                depend on the current policy (only clip_cov, kl_cov, m2po, importance.normalize,
                top_entropy_share)
    loss        advantages and what a teacher adds -> policy loss x off-policy weights + KL penalty
                + penalty towards the sampler + KL to a teacher's top k - entropy bonus, summed with
                the tokens' loss weights; + the cross-entropy of demonstrations with its own

Invariants: off-policy weights, selections and tokens that are too old never change a divisor, and a
token beside which none could be sampled counts in divisors alone; every rank calls the collective
parts equally often.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from async_grpo.algo.advantages import place_rewards, token_advantages
from async_grpo.algo.aggregation import aggregate_loss
from async_grpo.algo.catalog import ESTIMATORS, IMPORTANCE, POLICY_LOSSES, import_plugins
from async_grpo.algo.distill import distilled_advantages, top_k_kl
from async_grpo.algo.importance import (
    importance_weights,
    interpolated_anchor,
    normalized_weights,
    opsm_mask,
    rejection_mask,
    weight_sums,
)
from async_grpo.algo.kl import kl_penalty
from async_grpo.algo.losses import Clip, policy_loss
from async_grpo.algo.metrics import MetricSums, loss_metrics
from async_grpo.algo.selection import select_tokens, select_top_share, token_hashes
from async_grpo.config.schema import Config
from async_grpo.learner.batching import RowKey, RowValue
from async_grpo.learner.collectives import Collectives
from async_grpo.learner.rows import LearnerRow, TokenBatch, known


@dataclass(frozen=True, slots=True)
class UpdateFacts:
    """What statistics of the whole update say about the tokens of a micro-batch, where they are
    used: `by_loss` is what the policy loss selects (`select_tokens`), `by_entropy` where the policy
    loss counts, and `weight_sums` the sum and number of all importance weights.
    """

    by_loss: Tensor | None = None
    by_entropy: Tensor | None = None
    weight_sums: Tensor | None = None


class TokenMath:
    """The formulas of one configuration."""

    def __init__(self, config: Config, collectives: Collectives) -> None:
        algorithm = config.algorithm
        import_plugins(algorithm.plugins)
        self._algorithm, self._seed = algorithm, config.seed
        self._collectives = collectives
        self._estimator = ESTIMATORS.require(algorithm.adv_estimator.name)
        self._loss = POLICY_LOSSES.require(algorithm.policy_loss.name)
        loss, mode = algorithm.policy_loss, algorithm.importance.mode
        self._clip, self._options = _clip(config), POLICY_LOSSES.options(loss.name, loss.values)
        self._importance_options = IMPORTANCE.options(mode.name, mode.values)
        self._normalizes = algorithm.importance.level != "none" and algorithm.importance.normalize
        self.takes_entropy = algorithm.calculate_entropy or algorithm.entropy_coef != 0
        """Whether `loss` is given entropies."""
        self.selects_by_entropy = algorithm.top_entropy_share < 1
        """Whether `select` needs entropies."""
        moving = self._loss.ratio_free or algorithm.anchor == "interpolated"
        self.selects_by_policy = (
            bool(self._loss.selects) or self.selects_by_entropy or (self._normalizes and moving)
        )
        """Whether `select` needs the current policy's log-probs."""
        self.selects = self.selects_by_policy or self._normalizes
        """Whether `loss` needs the result of `select`."""

    def reward_kl(self, row: LearnerRow) -> float:
        """Compute and keep the row's token KL, of the recomputed policy if any; its sum."""
        policy = row.behavior if row.anchor is None else row.anchor
        row.kl = kl_penalty(
            _double(policy), _double(known(row.reference)), self._algorithm.kl_ctrl.kl_type
        ).numpy()
        return float(row.kl.sum())

    def assign(
        self,
        rows: Mapping[RowKey, LearnerRow],
        *,
        owned: Collection[RowKey],
        values: Mapping[RowKey, RowValue],
        kl_coef: float,
    ) -> None:
        """Give every row in the loss its advantages, `owned` ones in the moments. Collective."""
        if not self._estimator.returns:
            for key, row in rows.items():
                row.advantages = np.full(len(row.lag), values[key].value, np.float32)
            return
        algorithm, width = self._algorithm, max([len(row.lag) for row in rows.values()], default=1)

        def padded(arrays: Sequence[np.ndarray]) -> Tensor:
            out = np.zeros((len(arrays), width))
            for index, array in enumerate(arrays):
                out[index, : len(array)] = array
            return torch.from_numpy(out)

        mask = padded([np.ones(len(row.lag)) for row in rows.values()])
        kl = None
        if algorithm.add_token_level_kl:
            kl = padded([known(row.kl) for row in rows.values()])
        turns = self._estimator.turns
        rewards = place_rewards(
            _double([0.0 if turns else values[key].value for key in rows]),
            mask,
            kl=kl,
            kl_coef=kl_coef,
        )
        if turns:
            rewards += padded([_at_turns(row, values[key].turns) for key, row in rows.items()])
        if (clip := algorithm.reward_clip_after) is not None:
            rewards = rewards.clamp(-clip, clip)
        baselines = None
        if self._estimator.baseline or turns:
            baselines = _double([values[key].baseline for key in rows])
        mine = _double([float(key in owned) for key in rows]).unsqueeze(-1).expand_as(mask)
        advantages, _ = token_advantages(
            algorithm.adv_estimator.name,
            rewards,
            mask,
            gamma=algorithm.gamma,
            times=padded([_times(row, algorithm.gamma_per) for row in rows.values()]),
            reward_baselines=baselines,
            whiten_advantages=algorithm.whiten_advantages,
            advantage_clip=algorithm.advantage_clip,
            counted=mine,
            reduce=self._collectives.sum,
        )
        for row, advantage in zip(rows.values(), advantages.numpy(), strict=True):
            row.advantages = advantage[: len(row.lag)].astype(np.float32)

    def select(
        self,
        step: int,
        batches: Sequence[TokenBatch],
        logprobs: Sequence[Tensor] | None,
        entropies: Sequence[Tensor] | None = None,
    ) -> list[UpdateFacts]:
        """Find what the whole update says about each micro-batch, from log-probs and entropies
        without gradient (None where `selects_by_policy` and `selects_by_entropy` are false).
        Collective.
        """
        sums = self._weight_sums(batches, logprobs) if self._normalizes else None
        nothing: list[Tensor | None] = [None] * len(batches)
        by_loss = by_entropy = nothing
        if self.selects_by_policy:
            assert logprobs is not None
            whole, lengths = TokenBatch.joined(batches), [len(part) for part in logprobs]
            hashes = token_hashes(self._seed, step, *whole.identity.unbind(-1))
            if self._loss.selects:
                found = self._select_by_loss(whole, torch.cat(list(logprobs)), hashes)
                by_loss = list(found.split(lengths))
            if self.selects_by_entropy:
                assert entropies is not None
                found = select_top_share(
                    torch.cat(list(entropies)),
                    whole.trained,
                    share=self._algorithm.top_entropy_share,
                    hashes=hashes,
                    reduce=self._collectives.sum,
                    gather=self._collectives.gather,
                )
                by_entropy = list(found.split(lengths))
        return [
            UpdateFacts(by_loss=one, by_entropy=other, weight_sums=sums)
            for one, other in zip(by_loss, by_entropy, strict=True)
        ]

    def _weight_sums(
        self, batches: Sequence[TokenBatch], logprobs: Sequence[Tensor] | None
    ) -> Tensor:
        """Add up the importance weights of the update, over all ranks."""
        currents = [batch.anchor for batch in batches] if logprobs is None else logprobs
        parts = [
            weight_sums(
                self._importance(batch, self._policy(batch, current)),
                batch.chosen,
                level=self._algorithm.importance.level,
                row_index=batch.row_index,
            )
            for batch, current in zip(batches, currents, strict=True)
        ]
        return self._collectives.sum(torch.stack(parts).sum(0))

    def _select_by_loss(self, whole: TokenBatch, logprobs: Tensor, hashes: Tensor) -> Tensor:
        """Select what the policy loss wants, of all tokens of this rank."""
        return select_tokens(
            self._algorithm.policy_loss.name,
            logprobs=logprobs,
            anchor_logprobs=self._anchor(whole, logprobs),
            advantages=self._advantages(whole, logprobs),
            loss_mask=whole.chosen,
            staleness=whole.lag,
            clip=self._clip,
            options=self._options,
            hashes=hashes,
            reduce=self._collectives.sum,
            gather=self._collectives.gather,
        )

    def loss(
        self,
        batch: TokenBatch,
        logprobs: Tensor,
        entropy: Tensor | None,
        *,
        named: Tensor | None = None,
        selection: UpdateFacts | None,
        metrics: MetricSums | None,
    ) -> Tensor:
        """Return the micro-batch's share of the loss, a scalar to sum; add metrics to `metrics`.
        named: log-probs [M, k] of the tokens that a teacher names.
        """
        algorithm, anchor = self._algorithm, self._anchor(batch, logprobs.detach())
        advantages = self._advantages(batch, logprobs)
        weights, kept = self._weights(batch, logprobs.detach())
        selection = selection or UpdateFacts()
        token_loss, diagnostics = policy_loss(
            algorithm.policy_loss.name,
            logprobs,
            anchor_logprobs=anchor,
            behavior_logprobs=batch.behavior,
            advantages=advantages,
            loss_mask=batch.trained,
            staleness=batch.lag,
            clip=self._clip,
            row_index=batch.row_index,
            selection=selection.by_loss,
            options=self._options,
            weights=self._applied(batch, weights, kept, selection),
        )
        kl = self._kl(batch, logprobs, anchor)
        if metrics is not None:
            metrics.add("train/stale_share", batch.trained == 0, batch.mask)
            loss_metrics(
                metrics,
                token_loss=token_loss,
                diagnostics=diagnostics,
                logprobs=logprobs.detach(),
                anchor_logprobs=anchor,
                behavior_logprobs=batch.behavior,
                recomputed=algorithm.anchor == "recomputed",
                advantages=advantages,
                staleness=batch.lag,
                mask=batch.trained,
                chosen=batch.chosen,
                row_index=batch.row_index,
                weights=weights,
                kept=kept,
                kl=kl,
                entropy=entropy,
            )
            if batch.teacher is not None:
                metrics.add("train/teacher_kl", logprobs - batch.teacher[:, 0], batch.trained)
        if named is not None and batch.teacher is not None:
            distance = top_k_kl(named, batch.teacher[:, 1:])
            token_loss = token_loss + algorithm.distill.coef * distance
            if metrics is not None:
                metrics.add("train/teacher_top_k_kl", distance, batch.trained)
        if algorithm.behavior_penalty:
            distance = (logprobs - batch.behavior).square()  # not clamped: it must not let go
            token_loss = token_loss + algorithm.behavior_penalty * distance
            if metrics is not None:
                metrics.add("train/behavior_distance", distance, batch.trained)
        if kl is not None:
            token_loss = token_loss + algorithm.kl_loss_coef * kl
        if algorithm.entropy_coef and entropy is not None:
            token_loss = token_loss - algorithm.entropy_coef * entropy
        loss = aggregate_loss(token_loss, batch.weights)
        if batch.given is None:
            return loss
        if metrics is not None:
            metrics.add("train/sft_loss", -logprobs, batch.given != 0)
        return loss + aggregate_loss(-logprobs, batch.given)

    def _kl(self, batch: TokenBatch, logprobs: Tensor, anchor: Tensor) -> Tensor | None:
        """Return the KL penalty of each token before its coefficient, None without one."""
        algorithm = self._algorithm
        if batch.reference is None or not algorithm.use_kl_loss:
            return None
        unbiased = algorithm.kl_loss_unbiased
        sampled = batch.behavior if unbiased == "behavior" else anchor if unbiased else None
        return kl_penalty(
            logprobs, batch.reference, algorithm.kl_loss_type, anchor_logprobs=sampled
        )

    def _advantages(self, batch: TokenBatch, logprobs: Tensor) -> Tensor:
        """Return the advantages of the rewards, with what a teacher adds."""
        distill = self._algorithm.distill
        if distill.teacher is None or batch.teacher is None:  # None: of a dummy
            return batch.advantages
        return distilled_advantages(
            batch.advantages,
            logprobs,
            batch.teacher[:, 0],
            coef=0.0 if distill.teacher_top_k else distill.coef,
            reward_coef=distill.reward_coef,
        )

    def _anchor(self, batch: TokenBatch, logprobs: Tensor) -> Tensor:
        """Centre of the trust region."""
        if self._algorithm.anchor == "interpolated":
            return interpolated_anchor(logprobs, batch.behavior, batch.lag)
        return batch.anchor

    def _policy(self, batch: TokenBatch, logprobs: Tensor) -> Tensor:
        """Return the policy that is compared with the one that sampled: the anchor's, or the
        current one for a loss without ratio.
        """
        return logprobs if self._loss.ratio_free else self._anchor(batch, logprobs)

    def _importance(self, batch: TokenBatch, policy: Tensor) -> Tensor:
        """Return the importance weights, as their mode leaves them."""
        importance = self._algorithm.importance
        return importance_weights(
            policy,
            batch.behavior,
            batch.trained,
            level=importance.level,
            mode=importance.mode.name,
            lower=importance.lower,
            upper=importance.upper,
            row_index=batch.row_index,
            staleness=batch.lag,
            options=self._importance_options,
        )

    def _applied(
        self, batch: TokenBatch, weights: Tensor | None, kept: Tensor | None, selection: UpdateFacts
    ) -> Tensor | None:
        """Return what the policy loss of each token is multiplied by, None for nothing."""
        if weights is not None and selection.weight_sums is not None:
            weights = normalized_weights(weights, batch.trained, selection.weight_sums)
        applied = None
        for one in (weights, kept, selection.by_entropy):
            if one is not None:
                applied = one if applied is None else applied * one
        return applied

    def _weights(self, batch: TokenBatch, logprobs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return importance weights before they are normalised, and which tokens are kept (0 or
        1).
        """
        algorithm, policy = self._algorithm, self._policy(batch, logprobs)
        weights = kept = None
        if algorithm.importance.level != "none":
            weights = self._importance(batch, policy)
        for rule in algorithm.rejection:
            inside = rejection_mask(
                policy,
                batch.behavior,
                batch.trained,
                score=rule.score,
                reduce=rule.reduce,
                lower=rule.lower,
                upper=rule.upper,
                row_index=batch.row_index,
            )
            kept = inside if kept is None else kept * inside
        if algorithm.opsm_delta is not None:
            behavior = algorithm.opsm_against == "behavior"
            opsm = opsm_mask(
                logprobs,
                batch.behavior if behavior else self._anchor(batch, logprobs),
                self._advantages(batch, logprobs),
                batch.trained,
                delta=algorithm.opsm_delta,
                row_index=batch.row_index,
            )
            kept = opsm if kept is None else kept * opsm
        return weights, kept


def compare_sampler(metrics: MetricSums, batch: TokenBatch, logprobs: Tensor) -> None:
    """Learner against sampler where the step's first weights computed `logprobs` [M], by cause:
    mean and largest absolute difference, and the cause's share of the tokens.

    weights/sampler_error: tokens of lag 0, whose very weights these are, in responses of one
    version; weights/kv_cache_error: in responses that ran when the weights came, larger where their
    caches were kept, so that their tokens looked at an older version's; weights/version_error:
    tokens of older weights.
    """
    oldest = torch.zeros_like(batch.lag)  # there are no more rows than tokens
    oldest = oldest.scatter_reduce(0, batch.row_index, batch.lag, "amax")[batch.row_index]
    sampled, error = batch.chosen != 0, (logprobs - batch.behavior).abs()
    for name, chosen in (
        ("weights/sampler_error", sampled & (oldest == 0)),
        ("weights/kv_cache_error", sampled & (batch.lag == 0) & (oldest > 0)),
        ("weights/version_error", sampled & (batch.lag > 0)),
    ):
        metrics.add(name, error, chosen)
        metrics.maximum(f"{name}_max", torch.where(chosen, error, -torch.inf).amax())
        metrics.add(f"{name}_share", chosen.double(), sampled)


def _at_turns(row: LearnerRow, rewards: tuple[float, ...]) -> np.ndarray:
    """Put the rewards of a row's turns on the last sampled token of each."""
    out, ends = np.zeros(len(row.lag)), [len(row.lag) - 1]
    if row.turns is not None:
        ends = [*np.flatnonzero(np.diff(row.turns)), *ends]
    if len(ends) != len(rewards):
        raise ValueError(f"a sequence of {len(ends)} turns has rewards of {len(rewards)}")
    out[ends] = rewards
    return out


def _times(row: LearnerRow, per: str | None) -> np.ndarray:
    """When each sampled token comes, in what `gamma` counts."""
    if row.turns is not None and per != "token":
        return row.turns
    return np.zeros(len(row.lag)) if per == "turn" else np.arange(len(row.lag))


def _double(values: Sequence[float] | np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(values, np.float64))


def _clip(config: Config) -> Clip:
    algorithm = config.algorithm
    return Clip(
        low=algorithm.clip_low,
        high=algorithm.clip_high,
        kind=algorithm.clip_schedule.name,
        **algorithm.clip_schedule.values,
        dual=algorithm.clip_ratio_c if algorithm.dual_clip_loss else None,
    )
