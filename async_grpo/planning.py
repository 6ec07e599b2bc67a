"""Row mathematics of a learner step: from the metadata of a batch to a plan for every learner rank.

Runs in: the driver. One number per row is computed here and nowhere else; everything per token happens on the ranks.

    raw rewards x weights -> score -> + overlong penalty -> shaped reward -> group statistics -> advantage per row
    lengths, finish reasons -> rows in the loss -> global normalisers -> weight per row
"""

from __future__ import annotations

import torch

from async_grpo.algo.advantages import row_advantages
from async_grpo.algo.aggregation import row_weights
from async_grpo.algo.filters import zero_variance
from async_grpo.algo.rewards import overlong_penalty, score
from async_grpo.batching import PlanRow, RankPlan, make_rank_plans, minibatches
from async_grpo.config.schema import Config
from async_grpo.wire import Batch, RowMeta


def make_plans(config: Config, batch: Batch, weights: dict[str, float]) -> tuple[list[RankPlan], dict[str, float]]:
    """Plans of all ranks for this batch, and the metrics of its rows. `weights` are the reward components' weights."""
    algorithm = config.algorithm
    keys = [(group.group_id, index) for group in batch.groups for index, row in enumerate(group.rows) if row.role == "train"]
    rows = {(group.group_id, index): row for group in batch.groups for index, row in enumerate(group.rows)}
    scores = {key: score(rows[key].rewards, weights) for key in keys}
    shaped = {key: value + _penalty(config, rows[key]) for key, value in scores.items()}
    advantages = row_advantages(
        algorithm.adv_estimator, torch.tensor([shaped[key] for key in keys], dtype=torch.float64),
        torch.tensor([group_id for group_id, _ in keys]), norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
    ).tolist()
    advantage = dict(zip(keys, advantages, strict=True))
    in_loss = {key: not (algorithm.mask_truncated and rows[key].finish_reason == "length") for key in keys}
    prompts = {group.group_id: group.prompt_length for group in batch.groups}
    updates = []
    for epoch in range(config.learner.ppo_epochs):
        for ids in minibatches(
            list(prompts), seed=config.seed, step=batch.step, epoch=epoch, groups_per_minibatch=config.mini_batch_groups
        ):
            members = set(ids)
            chosen = [key for key in keys if key[0] in members]
            tokens = [rows[key].mask_tokens if in_loss[key] else 0 for key in chosen]
            per_row = row_weights(algorithm.loss_agg_mode, tokens, max_response_length=config.rollout.response_length)
            updates.append([
                PlanRow(key[0], key[1], prompts[key[0]], rows[key].length, advantage[key], weight)
                for key, weight in zip(chosen, per_row, strict=True)
            ])
    plans = make_rank_plans(batch.step, updates, ranks=config.learner.ranks, token_budget=config.learner.tokens_per_micro_batch)
    return plans, _metrics(batch, rows, scores, shaped, in_loss)


def _penalty(config: Config, row: RowMeta) -> float:
    buffer = config.algorithm.overlong_buffer
    if not buffer.enable:
        return 0.0
    return overlong_penalty(
        row.length, max_length=config.rollout.response_length, buffer_length=buffer.len, factor=buffer.penalty_factor
    )


def _metrics(
    batch: Batch, rows: dict[tuple[int, int], RowMeta], scores: dict[tuple[int, int], float], shaped: dict[tuple[int, int], float],
    in_loss: dict[tuple[int, int], bool],
) -> dict[str, float]:
    metas = [rows[key] for key in scores]
    n = len(metas)
    verdicts = [row.verdict for row in metas if row.verdict is not None]
    constant = [
        zero_variance([shaped[group.group_id, index] for index, row in enumerate(group.rows) if row.role == "train"])
        for group in batch.groups
    ]
    out = {
        "rollout/score": sum(scores.values()) / n,
        "rollout/shaped_reward": sum(shaped.values()) / n,
        "rollout/response_length": sum(row.length for row in metas) / n,
        "rollout/response_length_max": float(max(row.length for row in metas)),
        "rollout/response_tokens": float(sum(row.length for row in metas)),
        "rollout/truncated": sum(row.finish_reason == "length" for row in metas) / n,
        "rollout/masked_rows": 1 - sum(in_loss.values()) / n,
        "rollout/zero_std_groups": sum(constant) / len(constant),
        "rollout/mixed_version_rows": sum(row.min_version != row.max_version for row in metas) / n,
        "rollout/generate_s": sum(group.times["generated"] - group.times["started"] for group in batch.groups) / len(batch.groups),
        "rollout/verify_s": sum(group.times["scored"] - group.times["generated"] for group in batch.groups) / len(batch.groups),
    }
    if verdicts:
        out["rollout/accuracy"] = sum(verdicts) / len(verdicts)
    for name in sorted({name for row in metas for name in row.rewards}):
        values = [row.rewards[name] for row in metas if name in row.rewards]
        out[f"rollout/reward/{name}"] = sum(values) / len(values)
    return out
