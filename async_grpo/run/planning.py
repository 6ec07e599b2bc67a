"""Row mathematics of a learner step: from the metadata of a batch to a plan for every learner rank,
and one number per row.

Runs in: the driver. One number per row is computed here and nowhere else; everything per token
happens on the ranks.

    lengths, finish reasons -> rows in the loss -> global normalisers -> weight per row  (`plans`)
    raw rewards (each normalised) x weights -> clip -> + overlong penalty -> normalised -> clipped
        -> - token KL of the row -> group statistics -> advantage per row -> whitened over tokens
        -> clipped                                                                       (`values`)

Estimators with returns get the normalised reward instead, `turn_grpo` that of each turn; token KL,
returns, whitening and clip are done on the ranks.

An episode is one row of these numbers: rows of one that forked are joined before, and share its
value and weight afterwards.

Invariants: groups are filtered and normalised whole; what lasts from step to step (running reward
statistics, the adaptive KL coefficient) changes in `values`, and the factor of the learning rate in
`trained`, once per learner step in the order of consumption; both are part of the checkpoint.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from async_grpo.algo.advantages import finish_advantages, row_advantages, trajectory_baselines
from async_grpo.algo.aggregation import row_weights
from async_grpo.algo.catalog import ESTIMATORS, import_plugins
from async_grpo.algo.filters import zero_variance
from async_grpo.algo.kl import AdaptiveKL
from async_grpo.algo.metrics import lag_bucket
from async_grpo.algo.reward_norm import RunningMoments, component_scores, normalize_rewards
from async_grpo.algo.rewards import Shaping, score
from async_grpo.algo.settling import SettlingRate
from async_grpo.config.schema import Config
from async_grpo.learner.batching import (
    PlanRow,
    RankPlan,
    RowKey,
    RowValue,
    make_rank_plans,
    minibatches,
)
from async_grpo.wire.groups import SHORT, Batch, GroupMeta, RowMeta, joined


def shaping(config: Config, weights: Mapping[str, float]) -> Shaping:
    """Build the rule from rewards of a response to its shaped reward, which the filter uses too."""
    algorithm, buffer = config.algorithm, config.algorithm.overlong_buffer
    return Shaping(
        dict(weights),
        response_length=config.rollout.response_length,
        clip=algorithm.reward_clip,
        overlong_length=buffer.len if buffer.enable else 0,
        overlong_factor=buffer.penalty_factor,
        plugins=tuple((one.name, one.values) for one in algorithm.reward_shaping),
    )


class RowMath:
    """Computes plans and row values, step after step. `weights`: of the reward components."""

    def __init__(
        self, config: Config, weights: Mapping[str, float], state: dict[str, Any] | None = None
    ) -> None:
        import_plugins(config.algorithm.plugins)
        self._config, self._weights = config, dict(weights)
        self._shaping = shaping(config, weights)
        self._estimator = ESTIMATORS[config.algorithm.adv_estimator.name]
        control, state = config.algorithm.kl_ctrl, state or {}
        known = state.get("moments")
        self._moments = RunningMoments() if known is None else RunningMoments.from_dict(known)
        known = state.get("kl_coef") if control.type == "adaptive" else None
        coef = control.kl_coef if known is None else known
        self._adaptive = AdaptiveKL(coef=coef, target=control.target_kl, horizon=control.horizon)
        settles = config.learner.schedule == "settle"
        bound = config.replay.max_staleness
        self._rate = SettlingRate(bound, state.get("rate")) if settles else None

    @property
    def kl_coef(self) -> float:
        """Return the coefficient of the token KL in the reward."""
        return self._adaptive.coef

    def state(self) -> dict[str, Any]:
        """Return plain numbers from which another RowMath continues."""
        rate = {} if self._rate is None else {"rate": self._rate.to_dict()}
        return {"moments": self._moments.to_dict(), "kl_coef": self._adaptive.coef, **rate}

    @property
    def lr_factor(self) -> float:
        """Return what the learning rate of the next step is multiplied by."""
        return 1.0 if self._rate is None else self._rate.factor

    def trained(self, metrics: Mapping[str, float]) -> bool:
        """Take the metrics of a step that was trained; whether `learner.schedule: settle` halved
        the rate for what follows.
        """
        if self._rate is None or "train/ess" not in metrics:  # absent where no token is trained
            return False
        return self._rate.update(metrics["train/ess"])

    def plans(self, batch: Batch) -> list[RankPlan]:
        """Assign rows to ranks and updates, with the weight of each row's tokens in the loss."""
        config, episodes = self._config, _episodes(batch, "train")
        given = _episodes(batch, "demonstration") if config.algorithm.sft_loss_coef else {}
        if config.algorithm.sft_model is not None and len(given) < len(batch.groups):
            raise ValueError(
                f"step {batch.step}: {len(batch.groups) - len(given)} groups have no response of "
                f"{config.algorithm.sft_model}: they were sampled without `algorithm.sft_model`"
            )
        updates = []
        for epoch in range(config.learner.ppo_epochs):
            for ids in minibatches(
                [group.group_id for group in batch.groups],
                seed=config.seed,
                step=batch.step,
                epoch=epoch,
                groups_per_minibatch=config.mini_batch_groups,
            ):
                members = set(ids)
                chosen = {key: one for key, one in episodes.items() if key[0] in members}
                weights = row_weights(
                    config.algorithm.loss_agg_mode,
                    [self._loss_tokens(one.joined) for one in chosen.values()],
                    max_response_length=config.rollout.response_length,
                    group_index=[group_id for group_id, _ in chosen],
                )
                updates.append(
                    [
                        plan_row
                        for one, weight in zip(chosen.values(), weights, strict=True)
                        for plan_row in one.planned(weight)
                    ]
                    + self._imitated([one for key, one in given.items() if key[0] in members])
                )
        return make_rank_plans(
            batch.step,
            updates,
            ranks=config.learner.ranks,
            token_budget=config.micro_batch_tokens,
            epoch_updates=len(updates) // config.learner.ppo_epochs,
            team=config.learner.sequence_parallel,
        )

    def _imitated(self, demonstrations: Sequence[_Episode]) -> list[PlanRow]:
        """Return the rows of an update's demonstrations: their loss is a mean over their tokens."""
        tokens = sum(one.joined.length for one in demonstrations)
        weight = self._config.algorithm.sft_loss_coef / max(tokens, 1)
        return [row for one in demonstrations for row in one.planned(weight)]

    def values(
        self, batch: Batch, kl_sums: Mapping[RowKey, float]
    ) -> tuple[dict[RowKey, RowValue], dict[str, float]]:
        """Compute every row's value, and row metrics. `kl_sums`: token KL per row, if rewarded."""
        algorithm = self._config.algorithm
        episodes = _episodes(batch, "train")
        rows = {key: one.joined for key, one in episodes.items()}
        kl_sums = (
            {key: sum(kl_sums[row] for row in one.keys) for key, one in episodes.items()}
            if kl_sums
            else {}
        )
        greedy = {key: one.joined for key, one in _episodes(batch, "baseline").items()}
        everyone = rows | greedy
        totals = self._totals(everyone)
        shaped = {
            key: self._shaping.shape(row.rewards, row.length, total=totals.get(key))
            for key, row in everyone.items()
        }
        normalized = normalize_rewards(
            _tensor(shaped.values()),
            _groups(everyone),
            reward_norm=algorithm.reward_norm,
            reward_shift=algorithm.reward_shift,
            reward_scale=algorithm.reward_scale,
            counted=torch.tensor([key in rows for key in everyone]),
            running=self._moments,
        )
        if (clip := algorithm.reward_clip_after) is not None:
            normalized = normalized.clamp(-clip, clip)
        normed = dict(zip(everyone, normalized.tolist(), strict=True))
        metrics = self._metrics(batch, rows, greedy, shaped)
        if self._estimator.turns:
            return self._turn_values(episodes, normed), metrics
        if self._estimator.returns:
            baselines = {key[0]: normed[key] for key in greedy}
            values = {
                key: RowValue(normed[key], baselines[key[0]] if self._estimator.baseline else 0.0)
                for key in rows
            }
        else:
            final = [
                normed[key] - (self.kl_coef * kl_sums[key] if algorithm.add_token_level_kl else 0.0)
                for key in rows
            ]
            values = dict(zip(rows, map(RowValue, self._advantages(rows, final)), strict=True))
            metrics |= _spread("rollout/advantage", [value.value for value in values.values()])
        if algorithm.add_token_level_kl:
            metrics |= self._steer_kl(rows, kl_sums)
        return {row: values[key] for key, one in episodes.items() for row in one.keys}, metrics

    def _totals(self, rows: Mapping[RowKey, RowMeta]) -> dict[RowKey, float]:
        """Sum the components of every row, each normalised first; nothing without
        `task.rewards_norm`.
        """
        level = self._config.task.rewards_norm
        if level == "none":
            return {}
        rewards = [row.rewards for row in rows.values()]
        sums = component_scores(rewards, _groups(rows), self._weights, level=level)
        return dict(zip(rows, sums, strict=True))

    def _turn_values(
        self, episodes: Mapping[RowKey, _Episode], totals: Mapping[RowKey, float]
    ) -> dict[RowKey, RowValue]:
        """Give every row the rewards of its turns, so that returns within it are the episode's: the
        last turn of a row has what comes in later rows. What shaping adds belongs to the end.
        """
        gamma = self._config.algorithm.gamma
        baselines, scales = trajectory_baselines(
            _tensor(totals[key] for key in episodes),
            _groups({key: one.joined for key, one in episodes.items()}),
            norm_adv_by_std_in_grpo=self._config.algorithm.norm_adv_by_std_in_grpo,
        )
        values = {}
        numbers = zip(baselines.tolist(), scales.tolist(), strict=True)
        for (key, one), (baseline, scale) in zip(episodes.items(), numbers, strict=True):
            rewards = list(one.joined.turn_rewards or [0.0])
            rewards[-1] += totals[key] - sum(rewards)
            later = 0.0
            for row in reversed(one.keys):
                count = one.group.rows[row[1]].turns
                own, rewards = rewards[-count:], rewards[:-count]
                own[-1] += gamma * later
                values[row] = RowValue(
                    sum(own), scale * baseline, tuple(scale * reward for reward in own)
                )
                later = 0.0
                for reward in reversed(own):
                    later = reward + gamma * later
        return values

    def _advantages(self, rows: Mapping[RowKey, RowMeta], rewards: list[float]) -> list[float]:
        algorithm, estimator = self._config.algorithm, self._config.algorithm.adv_estimator
        advantages = row_advantages(
            estimator.name,
            _tensor(rewards),
            _groups(rows),
            lengths=_tensor(row.length for row in rows.values()),
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            adv_std_level=algorithm.adv_std_level,
            options=ESTIMATORS.options(estimator.name, estimator.values),
        )
        return finish_advantages(
            advantages,
            _tensor(self._loss_tokens(row) for row in rows.values()),
            whiten_advantages=algorithm.whiten_advantages or self._estimator.whitens,
            advantage_clip=algorithm.advantage_clip,
        ).tolist()

    def _steer_kl(
        self, rows: Mapping[RowKey, RowMeta], kl_sums: Mapping[RowKey, float]
    ) -> dict[str, float]:
        """Measure the token KL in the reward; its adaptive coefficient changes after its use."""
        means = [kl_sums[key] / row.length for key, row in rows.items()]
        kl, coef = sum(means) / len(means), self.kl_coef
        if self._config.algorithm.kl_ctrl.type == "adaptive":
            self._adaptive.update(kl, len(rows))
        return {"rollout/reward_kl": kl, "rollout/kl_coef": coef}

    def _loss_tokens(self, row: RowMeta) -> int:
        """Count a row's tokens in the loss."""
        return 0 if self._config.algorithm.mask_truncated and row.truncated else row.length

    def _metrics(
        self,
        batch: Batch,
        rows: Mapping[RowKey, RowMeta],
        greedy: Mapping[RowKey, RowMeta],
        shaped: Mapping[RowKey, float],
    ) -> dict[str, float]:
        metas, n = list(rows.values()), len(rows)
        spans = [(row.min_version, row.max_version) for row in metas]
        out = {
            "rollout/shaped_reward": sum(shaped[key] for key in rows) / n,
            "rollout/response_length": sum(row.length for row in metas) / n,
            "rollout/response_length_max": float(max(row.length for row in metas)),
            "rollout/response_tokens": float(sum(row.length for row in metas)),
            "rollout/truncated": sum(row.truncated for row in metas) / n,
            "rollout/masked_responses": sum(self._loss_tokens(row) == 0 for row in metas) / n,
            "rollout/mixed_version_responses": sum(newest > oldest for oldest, newest in spans) / n,
            "rollout/versions_per_response": sum(newest - oldest + 1 for oldest, newest in spans)
            / n,
            **durations(batch),
        }
        scores = [score(row.rewards, self._weights) for row in metas]
        out |= _spread("rollout/score", scores)
        lags = [batch.step - 1 - row.min_version for row in metas]
        for bucket, found in _by_lag(lags, scores).items():
            out[f"train/staleness_{bucket}/score"] = sum(found) / len(found)
        if any(row.turn_rewards is not None for row in metas):
            out |= _episodes_seen(metas)
        out |= _constant_groups(batch, {key: shaped[key] for key in rows}) | _by_correctness(metas)
        for name in sorted({name for row in metas for name in row.rewards}):
            values = [row.rewards[name] for row in metas if name in row.rewards]
            out[f"rollout/reward/{name}"] = sum(values) / len(values)
            own = n
            if self._config.tasks:
                own = sum(_task_of(row) == name.partition(".")[0] for row in metas)
            if len(values) < own:
                out[f"rollout/reward_missing/{name}"] = 1 - len(values) / own
        if self._config.tasks:
            out |= _by_task(rows, self._weights)
        if self._config.algorithm.sft_loss_coef:
            given = _episodes(batch, "demonstration")
            out["rollout/demonstrations"] = len(given) / len(batch.groups)
        if greedy:
            out["rollout/baseline_reward"] = sum(shaped[key] for key in greedy) / len(greedy)
            out["rollout/baseline_tokens"] = float(sum(row.length for row in greedy.values()))
        return out


@dataclass(frozen=True, slots=True)
class _Episode:
    """An episode: its rows by key, and what they are together."""

    group: GroupMeta
    keys: list[RowKey]
    joined: RowMeta

    def planned(self, weight: float) -> list[PlanRow]:
        """Its rows, whose tokens have this weight."""
        rows = [self.group.rows[place] for _, place in self.keys]
        return [
            PlanRow(
                *key,
                self.group.prompt_lengths[row.prompt],
                row.context + row.length,
                weight,
                prompt=row.prompt,
                sampled=row.length,
                given=row.role == "demonstration",
            )
            for key, row in zip(self.keys, rows, strict=True)
        ]


def _episodes(batch: Batch, role: str) -> dict[RowKey, _Episode]:
    """Collect the episodes of a role under the keys of their first rows."""
    return {
        (group.group_id, places[0]): _Episode(
            group,
            [(group.group_id, place) for place in places],
            joined([group.rows[place] for place in places]),
        )
        for group in batch.groups
        for places in group.places
        if group.rows[places[0]].role == role
    }


def _tensor(numbers: Any) -> torch.Tensor:
    return torch.tensor([float(number) for number in numbers], dtype=torch.float64)


def _groups(rows: Mapping[RowKey, RowMeta]) -> torch.Tensor:
    return torch.tensor([group_id for group_id, _ in rows], dtype=torch.int64)


def durations(batch: Batch) -> dict[str, float]:
    """Average a group's seconds by stage, and tokens per second of its longest response, of groups
    where that is not too short to tell; seconds of the slowest group.
    """
    groups = batch.groups
    spent = {
        "first_token": ("queued", "first_token"),
        "generate": ("queued", "done"),
        "verify": ("done", "scored"),
    }
    slowest = max(group.times["scored"] - group.times["queued"] for group in groups)
    out = {"rollout/longest_group_s": slowest} | {
        f"rollout/{name}_s": sum(group.times[end] - group.times[start] for group in groups)
        / len(groups)
        for name, (start, end) in spent.items()
    }
    longest = [max(row.length for row in group.episodes_sampled) for group in groups]
    timed = [
        (tokens - 1, group.times["done"] - group.times["first_token"])
        for group, tokens in zip(groups, longest, strict=True)
        if tokens > SHORT
    ]
    tokens, decoding = map(sum, zip(*timed, strict=True)) if timed else (0, 0.0)
    if decoding > 0:
        out["rollout/tokens_per_s_per_response"] = tokens / decoding
    return out


def _by_lag(lags: list[int], values: list[float]) -> dict[str, list[float]]:
    """Sort the rows' values into buckets of the rows' lags."""
    found: dict[str, list[float]] = {}
    for lag, value in zip(lags, values, strict=True):
        found.setdefault(lag_bucket(lag), []).append(value)
    return found


def _task_of(row: RowMeta) -> str:
    """Return the task of several whose rewards these are (`Config.component`)."""
    return next(iter(row.rewards)).partition(".")[0]


def _by_task(rows: Mapping[RowKey, RowMeta], weights: Mapping[str, float]) -> dict[str, float]:
    """Measure groups, score and correct responses of each of several tasks."""
    found: dict[str, dict[RowKey, RowMeta]] = {}
    for key, row in rows.items():
        found.setdefault(_task_of(row), {})[key] = row
    out = {}
    for task, own in found.items():
        judged = [row.verdict for row in own.values() if row.verdict is not None]
        scores = [score(row.rewards, weights) for row in own.values()]
        out[f"rollout/task/{task}/groups"] = float(len({group_id for group_id, _ in own}))
        out[f"rollout/task/{task}/score"] = sum(scores) / len(scores)
        if judged:
            out[f"rollout/task/{task}/correct"] = sum(judged) / len(judged)
    return out


def _spread(name: str, values: list[float]) -> dict[str, float]:
    """Measure mean (under `name`), the population's standard deviation and largest magnitude."""
    mean = sum(values) / len(values)
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    return {name: mean, f"{name}_std": std, f"{name}_abs_max": max(abs(value) for value in values)}


def _episodes_seen(metas: list[RowMeta]) -> dict[str, float]:
    """Measure turns, the share of sampled tokens behind the prompts, and why episodes ended."""
    turns, sampled = [row.turns for row in metas], sum(row.length for row in metas)
    ended = Counter(row.finish_reason for row in metas)
    return {
        "rollout/turns": sum(turns) / len(metas),
        "rollout/turns_max": float(max(turns)),
        "rollout/sampled_share": sampled / (sampled + sum(row.context for row in metas)),
        **{f"rollout/ended/{reason}": count / len(metas) for reason, count in ended.items()},
    }


def _constant_groups(batch: Batch, shaped: Mapping[RowKey, float]) -> dict[str, float]:
    """Measure shares of groups without spread in the shaped reward, all wrong, and all right."""
    members: dict[int, list[float]] = {}
    for (group_id, _), value in shaped.items():
        members.setdefault(group_id, []).append(value)
    verdicts = [{row.verdict for row in group.episodes_to_train} for group in batch.groups]
    count = len(batch.groups)
    constant = sum(zero_variance(values) for values in members.values())
    return {
        "rollout/zero_std_groups": constant / count,
        "rollout/all_wrong_groups": sum(seen == {0.0} for seen in verdicts) / count,
        "rollout/all_right_groups": sum(seen == {1.0} for seen in verdicts) / count,
    }


def _by_correctness(metas: list[RowMeta]) -> dict[str, float]:
    """Measure accuracy, and lengths of right and wrong responses; empty without verdicts."""
    judged = [(row.verdict, row.length) for row in metas if row.verdict is not None]
    if not judged:
        return {}
    out = {"rollout/accuracy": sum(verdict for verdict, _ in judged) / len(judged)}
    for name, lengths in (
        ("right", [length for verdict, length in judged if verdict >= 1]),
        ("wrong", [length for verdict, length in judged if verdict < 1]),
    ):
        if lengths:
            out[f"rollout/response_length_{name}"] = sum(lengths) / len(lengths)
    return out
