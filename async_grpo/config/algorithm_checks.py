"""Rules that span several settings of `algorithm`: which estimator, loss, anchor, weights and filter belong together.

Runs in: any process (no third-party import). Hides nothing. The sets below repeat facts of `async_grpo.algo` (which needs torch); a test
compares them. Invariant: each rule yields one sentence that names the keys, their values and what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_grpo.config.schema import Config

GRPO = frozenset({"grpo", "grpo_vectorized"})
COMPARING = GRPO | {"dr_grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "maxrl"}
"""Estimators that compare the responses of a group: groups of one, or whose rewards are all equal, have advantage 0."""
RETURNS = frozenset({"reinforce_plus_plus", "remax"})
"""Estimators with a return per token."""
CLIPPED = frozenset({"ppo_clip", "gspo", "gspo_token", "cispo", "gmpo", "clip_cov", "m2po"})
"""Losses with a clip interval."""
ROW_LOSSES = frozenset({"gspo", "gspo_token", "gmpo"})
"""Losses whose ratio is that of the whole response, averaged over responses."""
RATIO_FREE = frozenset({"gpg", "reinforce", "asymre", "topr", "opmd"})
"""Losses without a trust region around the anchor."""
PARTNERS = {
    ("asymre", "asymre"): "the loss has no ratio and needs the shifted baseline",
    ("topr", "raw grpo grpo_vectorized dr_grpo rloo"): "it splits responses by the sign of the advantage",
    ("opmd", "rloo grpo grpo_vectorized dr_grpo"): "it needs R - mean, not whitened",
}
"""(loss, the estimators it goes with) -> why."""


def check_algorithm(config: Config) -> Iterator[str]:
    """A sentence for every rule that `config.algorithm` breaks, the filter and the reference included."""
    for rules in (_estimator, _pairs, _clip, _anchor, _row_losses, _weights, _kl, _rewards, _filter):
        yield from rules(config)


def _listed(names: frozenset[str] | set[str] | list[str]) -> str:
    return ", ".join(sorted(names))


def _estimator(config: Config) -> Iterator[str]:
    algorithm, name = config.algorithm, config.algorithm.adv_estimator
    if name in COMPARING and config.rollout.group_size < 2:
        yield (
            f"`rollout.group_size` is {config.rollout.group_size}; `algorithm.adv_estimator: {name}` compares responses, so it needs at "
            "least 2."
        )
    if name == "dr_grpo" and algorithm.loss_agg_mode != "seq-mean-token-sum-norm":
        yield (
            f"`algorithm.loss_agg_mode` is {algorithm.loss_agg_mode}; with `algorithm.adv_estimator: dr_grpo` it is "
            "seq-mean-token-sum-norm, the "
            "other half of Dr. GRPO (`grpo` with `norm_adv_by_std_in_grpo: false` is its advantage alone)."
        )
    if not algorithm.norm_adv_by_std_in_grpo and name not in GRPO | {"dr_grpo", "grpo_passk"}:
        yield f"`algorithm.norm_adv_by_std_in_grpo` is false, but `adv_estimator: {name}` has no such division; remove it."
    if algorithm.adv_std_level != "group" and (name not in GRPO or not algorithm.norm_adv_by_std_in_grpo):
        yield "`algorithm.adv_std_level: batch` belongs to `adv_estimator: grpo` with `norm_adv_by_std_in_grpo: true`; remove it."
    if algorithm.gamma != 1 and name not in RETURNS:
        yield f"`algorithm.gamma` is {algorithm.gamma:g}, but `adv_estimator: {name}` has no returns; allowed is 1, or {_listed(RETURNS)}."
    if name == "maxrl" and (algorithm.overlong_buffer.enable or algorithm.add_token_level_kl):
        yield (
            "`algorithm.adv_estimator: maxrl` needs rewards of at least 0, but `overlong_buffer` and `add_token_level_kl` make them negative; "
            "unset them."
        )
    if name == "maxrl" and (algorithm.reward_norm is not None or algorithm.reward_shift):
        yield (
            "`algorithm.adv_estimator: maxrl` divides by the group's mean reward, which `reward_norm` and `reward_shift` remove; unset "
            "them."
        )


def _pairs(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    name, loss = algorithm.adv_estimator, algorithm.policy_loss
    for (partner, estimators), reason in PARTNERS.items():
        if loss == partner and name not in estimators.split():
            yield f"`algorithm.policy_loss: {loss}` goes with `adv_estimator` {' or '.join(estimators.split())}, not {name}: {reason}."
    if name == "asymre" and loss != "asymre":
        yield (
            f"`algorithm.adv_estimator: asymre` goes with `policy_loss: asymre`, not {loss}: its shifted baseline is meant for a loss "
            "without ratio."
        )
    if name == "gpg" and loss not in ("gpg", "reinforce"):
        yield (
            f"`algorithm.adv_estimator: gpg` goes with `policy_loss` gpg or reinforce, not {loss}: its factor belongs to a loss without "
            "ratio."
        )
    if loss == "opmd":
        if name in GRPO and algorithm.norm_adv_by_std_in_grpo:
            yield (
                "`algorithm.policy_loss: opmd` needs R - mean as advantage: set `norm_adv_by_std_in_grpo: false`, or `adv_estimator: "
                "rloo`."
            )
        if algorithm.whiten_advantages:
            yield "`algorithm.policy_loss: opmd` needs R - mean as advantage: set `whiten_advantages: false`."


def _clip(config: Config) -> Iterator[str]:
    algorithm, loss, schedule = config.algorithm, config.algorithm.policy_loss, config.algorithm.clip_schedule
    if schedule.kind == "exponential" and schedule.rate > 1:
        yield (
            f"`algorithm.clip_schedule.rate` is {schedule.rate:g}; with `kind: exponential` it is at most 1, "
            "since the clip interval must not widen with lag."
        )
    if schedule.kind != "constant" and loss not in CLIPPED:
        yield (
            f"`algorithm.clip_schedule.kind` is {schedule.kind}, but `policy_loss: {loss}` has no clip interval; losses with one: "
            f"{_listed(CLIPPED)}."
        )
    if algorithm.dual_clip_loss and loss not in ("ppo_clip", "m2po"):
        yield f"`algorithm.dual_clip_loss` is true, but `policy_loss: {loss}` has no dual clip; only ppo_clip and m2po have."
    widths = {"cispo": "1.0 (open at lag 0) and 4.0", "m2po": "0.3 and 0.5, at least", "gmpo": "0.4 and 0.4, of the log ratio"}.get(loss, "3e-4 and 4e-4")
    if loss not in CLIPPED and (algorithm.clip_ratio_low is not None or algorithm.clip_ratio_high is not None):
        yield f"`algorithm.clip_ratio_low` or `clip_ratio_high` is given, but `policy_loss: {loss}` has no clip interval; remove it."
    if loss in ROW_LOSSES | {"cispo", "m2po"} and (algorithm.clip_ratio_low is None or algorithm.clip_ratio_high is None):
        yield (
            f"`algorithm.policy_loss: {loss}` clips on another scale than PPO: give `algorithm.clip_ratio_low` and "
            f"`algorithm.clip_ratio_high` (usual are {widths})."
        )
    if algorithm.clip_cov.lower >= algorithm.clip_cov.upper:
        yield (
            f"`algorithm.clip_cov.lower` is {algorithm.clip_cov.lower:g}; it must be below `algorithm.clip_cov.upper`, "
            f"{algorithm.clip_cov.upper:g}."
        )


def _anchor(config: Config) -> Iterator[str]:
    algorithm, loss, anchor = config.algorithm, config.algorithm.policy_loss, config.algorithm.anchor
    if loss == "m2po" and anchor != "behavior":
        yield f"`algorithm.anchor` is {anchor}; `policy_loss: m2po` measures and clips the ratio to the policy that sampled: use behavior."
    if loss in RATIO_FREE and (anchor == "interpolated" or (anchor == "recomputed" and not algorithm.add_token_level_kl)):
        yield f"`algorithm.anchor` is {anchor}, but `policy_loss: {loss}` has no trust region that would use it; use behavior."


def _row_losses(config: Config) -> Iterator[str]:
    algorithm, loss = config.algorithm, config.algorithm.policy_loss
    mode = algorithm.loss_agg_mode
    if loss in ROW_LOSSES and mode != "seq-mean-token-mean":
        yield (
            f"`algorithm.loss_agg_mode` is {mode}; `policy_loss: {loss}` has one ratio per response and is a mean over responses: "
            "use seq-mean-token-mean, others would weigh responses by length."
        )
    if loss == "opmd" and algorithm.opmd.level == "sequence" and mode not in ("seq-mean-token-sum", "seq-mean-token-sum-norm"):
        yield (
            f"`algorithm.loss_agg_mode` is {mode}; `algorithm.opmd.level: sequence` is a sum over each response: use seq-mean-token-sum or "
            "seq-mean-token-sum-norm."
        )
    for key, level in (("importance", algorithm.importance.level), ("rejection", algorithm.rejection.level)):
        if loss in ROW_LOSSES and level == "token":
            yield (
                f"`algorithm.{key}.level` is token, but `policy_loss: {loss}` has one ratio per response; allowed are none, sequence, "
                "geometric."
            )
    varying = algorithm.adv_estimator in RETURNS and (algorithm.gamma != 1 or algorithm.add_token_level_kl)
    if loss in ("gspo", "gmpo") and varying:
        yield (
            f"`algorithm.policy_loss: {loss}` needs one advantage per response, but `adv_estimator: {algorithm.adv_estimator}` with "
            "`gamma` below 1 or `add_token_level_kl` gives one per token; use gspo_token."
        )


def _weights(config: Config) -> Iterator[str]:
    algorithm, loss, anchor = config.algorithm, config.algorithm.policy_loss, config.algorithm.anchor
    importance, rejection = algorithm.importance, algorithm.rejection
    if importance.level != "none" and loss in RATIO_FREE - {"reinforce"}:
        yield (
            f"`algorithm.importance.level` is {importance.level}, but `policy_loss: {loss}` is defined without it; use none, or "
            "policy_loss: reinforce."
        )
    elif anchor == "behavior" and loss not in RATIO_FREE:
        for key, level in (("importance", importance.level), ("rejection", rejection.level)):
            if level != "none":
                yield (
                    f"`algorithm.{key}.level: {level}` weighs the anchor against the behaviour policy and needs `algorithm.anchor: "
                    "recomputed` or "
                    f"interpolated; with `{anchor}` both are the same policy."
                )
    for key, section in (("importance", importance), ("rejection", rejection)):
        if section.lower >= section.upper:
            yield f"`algorithm.{key}.lower` is {section.lower:g}; it must be below `algorithm.{key}.upper`, {section.upper:g}."


def _kl(config: Config) -> Iterator[str]:
    algorithm, model = config.algorithm, config.model
    if algorithm.use_kl_loss and algorithm.add_token_level_kl:
        yield "`algorithm.use_kl_loss` and `algorithm.add_token_level_kl` are both true: the KL would be punished twice; keep one."
    if algorithm.use_kl_loss and algorithm.kl_loss_type == "kl" and not algorithm.kl_loss_unbiased:
        yield (
            "`algorithm.kl_loss_type: kl` has an expected gradient of 0 as a loss; use kl+ (same value, the gradient of the divergence), "
            "low_var_kl, or `kl_loss_unbiased: true`."
        )
    if algorithm.kl_loss_unbiased and not algorithm.use_kl_loss:
        yield "`algorithm.kl_loss_unbiased` is true, but `algorithm.use_kl_loss` is false; set it to true, or remove the correction."
    if algorithm.kl_loss_unbiased and algorithm.kl_loss_type not in ("kl", "low_var_kl"):
        yield (
            f"`algorithm.kl_loss_type` is {algorithm.kl_loss_type}; with `kl_loss_unbiased` it is kl or low_var_kl: the others have a bias of "
            "their own, or already hold the gradient of the divergence."
        )
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.add_token_level_kl:
        yield "`algorithm.kl_ctrl.type: adaptive` steers the KL in the reward: set `algorithm.add_token_level_kl: true`, or use fixed."
    if not algorithm.uses_reference:
        for key, given in (("reference", model.reference is not None), ("reference_refresh_steps", model.reference_refresh_steps > 0)):
            if given:
                yield (
                    f"`model.{key}` is given but nothing uses a reference: set `algorithm.use_kl_loss: true` or "
                    "`algorithm.add_token_level_kl: true`, or remove it."
                )


def _rewards(config: Config) -> Iterator[str]:
    if config.algorithm.reward_norm == "group" and config.rollout.group_size < 2:
        yield "`algorithm.reward_norm: group` makes every reward of a group of one 0: use batch or running, or a `rollout.group_size` of at least 2."
    overlong, limit = config.algorithm.overlong_buffer, config.rollout.response_length
    if overlong.enable and overlong.len > limit:
        yield f"`algorithm.overlong_buffer.len` is {overlong.len}; allowed is at most `rollout.response_length`, {limit}."


def _filter(config: Config) -> Iterator[str]:
    groups, name = config.replay.filter_groups, config.algorithm.adv_estimator
    band = groups.accuracy_low is not None or groups.accuracy_high is not None
    if groups.metric == "seq_final_reward":
        yield (
            "`replay.filter_groups.metric: seq_final_reward` holds the token KL, which exists only after the learner's forward pass, and "
            "groups "
            "are filtered before; use seq_reward (shaped), score, acc or the name of a reward component."
        )
    if not groups.metric:
        yield "`replay.filter_groups.metric` is empty; allowed are score, acc, seq_reward, or the name of a reward component."
    if not groups.enable and (band or groups.all_truncated or groups.retire_at is not None):
        yield "`replay.filter_groups` has conditions, but `enable` is false; set it to true, or remove them."
    if groups.enable and groups.zero_variance and name not in COMPARING:
        yield (
            f"`replay.filter_groups.zero_variance` is true, but with `algorithm.adv_estimator: {name}` a group of equal rewards carries "
            "signal: "
            "its baseline is not the group's mean; set it to false."
        )
    if groups.enable and not (groups.zero_variance or band or groups.all_truncated or groups.retire_at is not None):
        yield "`replay.filter_groups.enable` is true, but no condition is set; set one, or enable: false."
    low, high = groups.accuracy_low, groups.accuracy_high
    if low is not None and high is not None and low >= high:
        yield f"`replay.filter_groups.accuracy_low` is {low:g}; it must be below `accuracy_high`, {high:g}."
