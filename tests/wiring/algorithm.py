"""The settings of `algorithm`, and those that cut a learner step into updates: two learner steps
from the wire to the gradient of every token, with log-probs in place of a model.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_grpo.algo.metrics import MetricSums
from async_grpo.config.schema import Config
from async_grpo.learner.batching import RankPlan, RowKey
from async_grpo.learner.rows import LearnerRow, decode_rows, token_batch
from async_grpo.learner.token_math import TokenMath, UpdateFacts
from async_grpo.rollout.frozen import demonstration
from async_grpo.run.planning import RowMath
from async_grpo.wire.codec import (
    Batch,
    Group,
    Row,
    VersionSpan,
    decode_meta,
    encode_group,
    pack_frames,
)
from tests.support.wiring import Wire

LAG = 4
WEIGHTS = {"correct": 1.0, "format": 0.5}
CPU = torch.device("cpu")


class Alone:
    """The collectives of a single rank."""

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor


def steps(config: Config) -> list[Any]:
    """What two learner steps do with the tokens: their split, loss and gradient, and the
    coefficient of the KL in the reward.
    """
    math, rows, seen = TokenMath(config, Alone()), RowMath(config, WEIGHTS), []
    for step in (LAG + 1, LAG + 2):
        frames = [encode_group(_group(config, step, group_id)) for group_id in range(4)]
        batch = Batch(step, tuple(map(decode_meta, frames)))
        plans = rows.plans(batch)
        mine = [_rows(config, plan, frames) for plan in plans]
        sums = {}
        if config.algorithm.add_token_level_kl:
            everything = {key: row for part in mine for key, row in part.items()}
            sums = {key: math.reward_kl(row) for key, row in everything.items()}
        coef = rows.kl_coef
        values, _ = rows.values(batch, sums)
        seen.append(coef if config.algorithm.add_token_level_kl else None)
        for plan, part in zip(plans, mine, strict=True):
            trained = {
                key: part[key] for key, row in plan.rows.items() if row.weight and not row.given
            }
            math.assign(trained, owned=plan.owned, values=values, kl_coef=coef)
            seen += [_update(math, step, update, part) for update in plan.updates]
    return seen


def _group(config: Config, step: int, group_id: int) -> Group:
    """Four responses of which one is cut off, the last group all right, and a greedy one where the
    estimator wants it.
    """
    rng = np.random.default_rng([step, group_id])
    rows = []
    for index in range(4 + (config.algorithm.adv_estimator.name == "remax")):
        length = 16 if index == 2 else int(rng.integers(5, 13))
        cut = int(rng.integers(1, length))
        right = float(group_id == 3 or (index + group_id) % 3 == 0)
        rows.append(
            Row(
                response_ids=np.zeros(length, np.int32),
                behavior_logprobs=-rng.gamma(2, 0.5, length).astype(np.float32),
                segments=[(0, length)],
                versions=[VersionSpan(step - 1 - LAG, 0, cut), VersionSpan(step - 2, cut, length)],
                rewards={"correct": 2 * right, "format": 0.1 * index + 0.05 * group_id},
                verdict=right,
                finish_reason="length" if index == 2 else "stop",
                role="train" if index < 4 else "baseline",
            )
        )
    if config.algorithm.sft_loss_coef:
        rows.append(demonstration(range(4), limit=8, version=step - 2, ends=[]))
    times = {"queued": 0.0, "first_token": 1.0, "done": 2.0, "scored": 3.0}
    group = Group(group_id, 0, step - 1 - LAG, "a", [np.arange(3)], rows, times)
    if config.algorithm.distill.teacher is not None:
        tokens = sum(len(row.behavior_logprobs) for row in rows)
        top_k = config.algorithm.distill.teacher_top_k
        said = -rng.gamma(2, 1, (tokens, 1 + top_k))
        said[:, 1:] -= np.log(np.exp(said[:, 1:]).sum(-1, keepdims=True) + 1)
        group.planes["teacher_logprobs"] = said.astype(np.float32)
        if top_k:
            group.planes["teacher_ids"] = np.tile(np.arange(top_k, dtype=np.int32), (tokens, 1))
    return group


def _rows(config: Config, plan: RankPlan, frames: list[bytes]) -> dict[RowKey, LearnerRow]:
    payload = pack_frames([frames[group_id] for group_id in plan.group_ids])
    rows = decode_rows(plan, payload, max_staleness=LAG)
    for (group_id, index), row in rows.items():
        rng = np.random.default_rng([plan.step, group_id, index])
        noise = rng.normal(0, 0.3, (2, len(row.lag))).astype(np.float32)
        row.reference = row.behavior - 0.1 + noise[0]
        if config.algorithm.anchor == "recomputed":
            row.anchor = row.behavior + noise[1]
    return rows


def _update(math: TokenMath, step: int, update: Any, rows: dict[Any, LearnerRow]) -> list[Any]:
    """The loss of one optimizer update and the gradient of every token, by micro-batch."""
    parts = [[row for row in part if row.weight] for part in update]
    batches = [token_batch(part, [rows[row.key] for row in part], CPU) for part in parts]
    currents = []
    for batch in batches:
        wave = torch.sin(batch.identity.double() @ torch.tensor([1.0, 5.0, 2.3]).double() + step)
        currents.append((batch.behavior.double() + wave).clamp(max=0).requires_grad_())
    selections: list[UpdateFacts | None] = [None] * len(batches)
    if math.selects:
        now = [current.detach() for current in currents]
        asked = math.selects_by_policy
        entropies = [-one.exp() for one in now]
        selections = math.select(
            step, batches, now if asked else None, entropies if asked else None
        )
    seen = []
    for part, batch, current, selection in zip(parts, batches, currents, selections, strict=True):
        ids, named = batch.teacher_ids, None
        if ids is not None:
            named = current[:, None] - torch.arange(1, 1 + ids.shape[1])
        loss = math.loss(
            batch, current, -current.exp(), named=named, selection=selection, metrics=MetricSums()
        )
        gradient = torch.autograd.grad(loss, current)[0] if part else torch.zeros(0)
        seen.append([[row.key for row in part], float(loss.detach()), gradient.tolist()])
    return seen


def _algorithm(table: list[tuple[Any, ...]]) -> list[Wire]:
    """(key, value, what else is given), all of `algorithm`."""
    return [
        Wire(
            f"algorithm.{key}",
            value,
            steps,
            {f"algorithm.{name}": one for name, one in (given[0] if given else {}).items()},
        )
        for key, value, *given in table
    ]


def imported(config: Config) -> bool:
    """Whether a rank's mathematics imports the user's module."""
    sys.modules.pop(EMPTY, None)
    TokenMath(config, Alone())
    return EMPTY in sys.modules


def with_entropy(config: Config) -> bool:
    """Whether a training pass computes entropies."""
    return TokenMath(config, Alone()).takes_entropy


PLUGIN, EMPTY = "tests.wiring.plugin", "tests.wiring.empty_plugin"
MINE = {"plugins": [PLUGIN]}
RETURNS = {"adv_estimator": "reinforce_plus_plus"}
KL = {"add_token_level_kl": True, "kl_ctrl.kl_coef": 0.1}
STEERED = {**KL, "kl_ctrl.type": "adaptive", "kl_ctrl.horizon": 10.0}
KL_LOSS = {"use_kl_loss": True, "kl_loss_coef": 0.1}
OVERLONG = {"overlong_buffer.enable": True}
OPMD = {"norm_adv_by_std_in_grpo": False}
CLIP_COV = {"policy_loss.clip_cov.ratio": 0.9, "policy_loss.clip_cov.lower": -5.0}
KL_COV = {"policy_loss.kl_cov.ratio": 0.5}
M2PO = {"clip_ratio_low": 0.3, "clip_ratio_high": 0.5}
WEIGHED = {"anchor": "recomputed", "importance.level": "token"}
RECOMPUTED = {"anchor": "recomputed"}
TAUGHT = {"frozen": {"teacher": {"path": "t/t"}}, "algorithm.distill.teacher": "teacher"}

TABLE: list[tuple[Any, ...]] = [
    ("adv_estimator", "rloo"),
    ("norm_adv_by_std_in_grpo", False),
    ("adv_std_level", "batch_centered"),
    ("gamma", 0.9, RETURNS),
    ("gamma_per", "turn", {**RETURNS, "gamma": 0.9}),
    ("adv_estimator.asymre.shift", -0.3, {"policy_loss": "asymre"}),
    ("whiten_advantages", "keep_mean"),
    ("advantage_clip", 0.5),
    ("reward_clip", 1.0),
    ("reward_norm", {"mean": "group", "std": "running"}, {"adv_estimator": "raw"}),
    ("reward_clip_after", 0.5),
    ("reward_shift", True, {"adv_estimator": "raw"}),
    ("reward_scale", True, {"adv_estimator": "raw"}),
    ("add_token_level_kl", True, {"kl_ctrl.kl_coef": 0.1}),
    ("kl_ctrl.type", "adaptive", {**KL, "kl_ctrl.horizon": 10.0}),
    ("kl_ctrl.kl_type", "mse", KL),
    ("kl_ctrl.kl_coef", 0.3, KL),
    ("kl_ctrl.target_kl", 0.5, STEERED),
    ("kl_ctrl.horizon", 50.0, STEERED),
    ("overlong_buffer.enable", True),
    ("overlong_buffer.len", 6, OVERLONG),
    ("overlong_buffer.penalty_factor", 0.5, OVERLONG),
    ("mask_truncated", True),
    ("policy_loss", "reinforce"),
    ("clip_ratio", 0.1),
    ("clip_ratio_low", 0.1),
    ("clip_ratio_high", 0.4),
    ("top_entropy_share", 0.3),
    ("dual_clip_loss", True, {"clip_ratio_c": 1.5}),
    ("clip_ratio_c", 1.5, {"dual_clip_loss": True}),
    ("clip_schedule", "harmonic"),
    ("clip_schedule.harmonic.rate", 0.5),
    ("clip_schedule.harmonic.floor", 0.7),
    ("clip_schedule.exponential.rate", 0.5),
    ("clip_schedule.exponential.floor", 0.7, {"clip_schedule.exponential.rate": 0.5}),
    ("policy_loss.sapo.tau_pos", 2.0),
    ("policy_loss.sapo.tau_neg", 2.0),
    ("policy_loss.dppo.divergence", "kl"),
    ("policy_loss.dppo.low", 0.05),
    ("policy_loss.dppo.high", 0.05),
    ("policy_loss.dppo.ratio_cap", 1.2),
    ("policy_loss.opmd.tau", 0.3, OPMD),
    ("policy_loss.opmd.level", "sequence", {**OPMD, "loss_agg_mode": "seq-mean-token-sum"}),
    ("policy_loss.clip_cov.ratio", 0.3, CLIP_COV),
    ("policy_loss.clip_cov.lower", 0.0, CLIP_COV),
    ("policy_loss.clip_cov.upper", 0.5, CLIP_COV),
    ("policy_loss.kl_cov.ratio", 0.2, KL_COV),
    ("policy_loss.kl_cov.coef", 0.3, KL_COV),
    ("policy_loss.m2po.budget", 0.5, M2PO),
    ("anchor", "interpolated"),
    ("importance.level", "token", {"anchor": "recomputed"}),
    ("importance.mode", "mask", {**WEIGHED, "importance.upper": 1.2}),
    ("importance.lower", 0.9, WEIGHED),
    ("importance.upper", 1.2, WEIGHED),
    ("importance.normalize", True, WEIGHED),
    ("rejection", [{"score": "w", "reduce": "token", "lower": 0.9}], RECOMPUTED),
    ("rejection", [{"score": "k3", "reduce": "max", "upper": 0.2}], RECOMPUTED),
    ("rejection", [{"score": "difference", "reduce": "token", "upper": 0.01}], RECOMPUTED),
    ("rejection", [{"score": "k1", "reduce": "mean", "lower": -0.1}], RECOMPUTED),
    ("opsm_delta", 0.1),
    ("opsm_against", "anchor", {**RECOMPUTED, "opsm_delta": 0.1}),
    ("loss_agg_mode", "seq-mean-token-sum"),
    ("use_kl_loss", True, {"kl_loss_coef": 0.1}),
    ("kl_loss_coef", 0.3, KL_LOSS),
    ("kl_loss_type", "mse", KL_LOSS),
    ("kl_loss_unbiased", True, KL_LOSS),
    ("behavior_penalty", 0.1),
    ("entropy_coef", 0.1),
    ("reward_shaping", ["halved"], MINE),
]
WIRES = [
    *_algorithm(TABLE),
    Wire(
        "algorithm.policy_loss",
        {"name": "scaled", "size": 2.0},
        steps,
        {"algorithm.plugins": [PLUGIN]},
        against="scaled",
    ),
    Wire("algorithm.plugins", [EMPTY], imported),
    Wire("algorithm.distill.teacher", "teacher", steps, unchecked=True),
    Wire("algorithm.distill.coef", 0.3, steps, TAUGHT),
    Wire("algorithm.distill.reward_coef", 0.0, steps, TAUGHT),
    Wire("algorithm.distill.teacher_top_k", 2, steps, TAUGHT),
    Wire("algorithm.sft_loss_coef", 0.3, steps),
    Wire("algorithm.calculate_entropy", False, with_entropy),
    Wire("task.rewards_norm", "group", steps),
    Wire("seed", 7, steps, {"learner.ppo_mini_batch_size": 2}),
    Wire("learner.ranks", 2, steps),
    Wire("learner.sequence_parallel", 2, steps, {"learner.ranks": 2}),
    Wire("learner.ppo_epochs", 2, steps),
    Wire("learner.ppo_mini_batch_size", 2, steps),
    Wire("learner.tokens_per_micro_batch", 30, steps),
]
