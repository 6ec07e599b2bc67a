"""Rules that span several settings of the algorithm.

Runs in: any process (imports what the settings import). Hides which traits of losses and estimators
decide what belongs together. Invariant: as of `checks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from async_grpo.algo.catalog import ESTIMATORS, POLICY_LOSSES, EstimatorTraits
from async_grpo.algo.invariance import norm_levels, unseen_levels
from async_grpo.config.algorithm import LIVE, Algorithm
from async_grpo.config.plugins import Known
from async_grpo.config.schema import Config


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _estimator(config: Config, known: Known) -> Iterator[str]:
    algorithm, name = config.algorithm, config.algorithm.adv_estimator.name
    traits = known.estimator(config)
    if traits.compares and config.rollout.group_size < 2:
        yield (
            f"`rollout.group_size` is {config.rollout.group_size}; `algorithm.adv_estimator: "
            f"{name}` compares responses, so it needs at least 2."
        )
    if name == "dr_grpo" and algorithm.loss_agg_mode != "seq-mean-token-sum-norm":
        yield (
            f"`algorithm.loss_agg_mode` is {algorithm.loss_agg_mode}; with "
            "`algorithm.adv_estimator: dr_grpo` it is seq-mean-token-sum-norm, the other half of "
            "Dr. GRPO (`grpo` with `norm_adv_by_std_in_grpo: false` is its advantage alone)."
        )
    if not algorithm.norm_adv_by_std_in_grpo and not traits.divides:
        yield (
            f"`algorithm.norm_adv_by_std_in_grpo` is false, but `adv_estimator: {name}` has no "
            "such division; remove it."
        )
    levels = traits.std_levels and algorithm.norm_adv_by_std_in_grpo
    if algorithm.adv_std_level != "group" and not levels:
        yield (
            f"`algorithm.adv_std_level: {algorithm.adv_std_level}` belongs to `adv_estimator: "
            "grpo` with `norm_adv_by_std_in_grpo: true`; remove it."
        )
    if algorithm.gamma != 1 and not traits.returns:
        returns = ESTIMATORS.where(lambda other: other.returns)
        yield (
            f"`algorithm.gamma` is {algorithm.gamma:g}, but `adv_estimator: {name}` has no "
            f"returns; allowed is 1, or {_listed(returns)}."
        )
    if traits.turns and (_normalises(algorithm) or algorithm.reward_clip_after is not None):
        yield (
            f"`algorithm.adv_estimator: {name}` has rewards per turn, which `reward_norm`, "
            "`reward_shift`, `reward_scale` and `reward_clip_after` do not know; unset them."
        )
    if traits.turns and algorithm.gamma_per == "token":
        yield (
            f"`algorithm.gamma_per` is token, but `adv_estimator: {name}` discounts by turn; "
            "remove it."
        )
    if name == "maxrl" and (algorithm.overlong_buffer.enable or algorithm.add_token_level_kl):
        yield (
            "`algorithm.adv_estimator: maxrl` needs rewards of at least 0, but `overlong_buffer` "
            "and `add_token_level_kl` make them negative; unset them."
        )


def _pairs(config: Config, known: Known) -> Iterator[str]:
    algorithm = config.algorithm
    name, loss = algorithm.adv_estimator.name, algorithm.policy_loss.name
    wanted, partners = known.loss(config), known.estimator(config)
    if wanted.estimators and name not in wanted.estimators:
        yield (
            f"`algorithm.policy_loss: {loss}` needs `adv_estimator` "
            f"{' or '.join(wanted.estimators)}, not {name}: {wanted.reason}."
        )
    if partners.losses and loss not in partners.losses:
        yield (
            f"`algorithm.adv_estimator: {name}` needs `policy_loss: "
            f"{' or '.join(partners.losses)}`, not {loss}: {partners.reason}."
        )
    if loss == "opmd":
        if partners.std_levels and algorithm.norm_adv_by_std_in_grpo:
            yield (
                "`algorithm.policy_loss: opmd` needs R - mean as advantage: set "
                "`norm_adv_by_std_in_grpo: false`, or `adv_estimator: rloo`."
            )
        if algorithm.whiten_advantages:
            yield (
                "`algorithm.policy_loss: opmd` needs R - mean as advantage: set "
                "`whiten_advantages: false`."
            )


def _clip(config: Config, known: Known) -> Iterator[str]:
    algorithm, traits = config.algorithm, known.loss(config)
    loss = algorithm.policy_loss.name
    schedule = algorithm.clip_schedule.name
    if schedule != "constant" and not traits.clipped:
        yield (
            f"`algorithm.clip_schedule` is {schedule}, but `policy_loss: {loss}` has no "
            "clip interval; losses with one: "
            f"{_listed(POLICY_LOSSES.where(lambda other: other.clipped))}."
        )
    if algorithm.dual_clip_loss and not traits.dual_clip:
        yield (
            f"`algorithm.dual_clip_loss` is true, but `policy_loss: {loss}` has no dual clip; "
            "only ppo_clip and m2po have."
        )
    sides = (algorithm.clip_ratio_low, algorithm.clip_ratio_high)
    if not traits.clipped and sides != (None, None):
        yield (
            f"`algorithm.clip_ratio_low` or `clip_ratio_high` is given, but `policy_loss: {loss}` "
            "has no clip interval; remove it."
        )
    if traits.widths and None in sides:
        yield (
            f"`algorithm.policy_loss: {loss}` clips on another scale than PPO: give "
            "`algorithm.clip_ratio_low` and `algorithm.clip_ratio_high` (usual are "
            f"{traits.widths})."
        )


def _anchor(config: Config, known: Known) -> Iterator[str]:
    algorithm, traits = config.algorithm, known.loss(config)
    loss = algorithm.policy_loss.name
    anchor = algorithm.anchor
    if traits.sampler_anchor and anchor != "behavior":
        yield (
            f"`algorithm.anchor` is {anchor}; `policy_loss: {loss}` measures and clips the ratio "
            "to the policy that sampled: use behavior."
        )
    for_reward = anchor == "recomputed" and algorithm.add_token_level_kl
    if traits.ratio_free and anchor != "behavior" and not for_reward:
        yield (
            f"`algorithm.anchor` is {anchor}, but `policy_loss: {loss}` has no trust region that "
            "would use it; use behavior."
        )


def _row_losses(config: Config, known: Known) -> Iterator[str]:
    algorithm, traits = config.algorithm, known.loss(config)
    loss = algorithm.policy_loss.name
    mode = algorithm.loss_agg_mode
    sums = ("seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum")
    if traits.response_ratio and mode not in ("seq-mean-token-mean", *sums * traits.by_length):
        more = f" ({', '.join(sums)} make a sum over tokens of it, as LUSPO)" * traits.by_length
        yield (
            f"`algorithm.loss_agg_mode` is {mode}; `policy_loss: {loss}` has one ratio per "
            "response and is a mean over responses: use seq-mean-token-mean, others would weigh "
            f"responses by length{more}."
        )
    by_response = loss == "opmd" and algorithm.policy_loss.values["level"] == "sequence"
    whole_rows = "`algorithm.policy_loss: {name: opmd, level: sequence}`"
    if by_response and mode not in ("seq-mean-token-sum", "seq-mean-token-sum-norm"):
        yield (
            f"`algorithm.loss_agg_mode` is {mode}; {whole_rows} is a sum over each response: use "
            "seq-mean-token-sum or seq-mean-token-sum-norm."
        )
    if by_response and algorithm.top_entropy_share < 1:
        yield (
            f"`algorithm.top_entropy_share` is {algorithm.top_entropy_share:g}, which takes parts "
            f"out of the sum over each response that {whole_rows} is; use 1, or level token."
        )
    if traits.response_ratio and traits.one_advantage:
        whole = f"but `policy_loss: {loss}` has one ratio, and one weight, per response; allowed"
        if algorithm.importance.level == "token":
            yield (
                f"`algorithm.importance.level` is token, {whole} are none, sequence, geometric, "
                "and any with gspo_token."
            )
        if algorithm.top_entropy_share < 1:
            yield (
                f"`algorithm.top_entropy_share` is {algorithm.top_entropy_share:g}, {whole} is 1, "
                "and any with gspo_token."
            )
        if any(rule.reduce == "token" for rule in algorithm.rejection):
            yield (
                f"`algorithm.rejection` has a rule with `reduce: token`, {whole} are sum, mean, "
                "min, max, and any with gspo_token."
            )
    varying = algorithm.gamma != 1 or algorithm.add_token_level_kl
    if traits.one_advantage and varying and known.estimator(config).returns:
        yield (
            f"`algorithm.policy_loss: {loss}` needs one advantage per response, but "
            f"`adv_estimator: {algorithm.adv_estimator.name}` with `gamma` below 1 or "
            "`add_token_level_kl` gives one per token; use gspo_token."
        )


def _weights(config: Config, known: Known) -> Iterator[str]:
    algorithm, traits = config.algorithm, known.loss(config)
    loss = algorithm.policy_loss.name
    anchor, importance = algorithm.anchor, algorithm.importance
    if importance.level != "none" and traits.ratio_free and not traits.weighed:
        yield (
            f"`algorithm.importance.level` is {importance.level}, but `policy_loss: {loss}` is "
            "defined without it; use none, or policy_loss: reinforce."
        )
    elif anchor == "behavior" and not traits.ratio_free:
        used = [f"importance.level: {importance.level}"] if importance.level != "none" else []
        for key in used + ["rejection"] * bool(algorithm.rejection):
            yield (
                f"`algorithm.{key}` weighs the proximal policy against the behaviour policy and "
                f"needs `algorithm.anchor: recomputed` or interpolated; with `{anchor}` both are "
                "the same policy."
            )
    if importance.lower >= importance.upper:
        yield (
            f"`algorithm.importance.lower` is {importance.lower:g}; it must be below "
            f"`algorithm.importance.upper`, {importance.upper:g}."
        )


def _towards_the_sampler(config: Config, _: Known) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.behavior_penalty and algorithm.policy_loss.name == "opmd":
        yield (
            "`algorithm.behavior_penalty` is above 0, but `policy_loss: opmd` has that penalty: "
            "set its `tau` to twice the weight instead."
        )
    against = algorithm.opsm_against if algorithm.opsm_delta is not None else "behavior"
    if against == "anchor" and algorithm.anchor == "behavior":
        yield (
            "`algorithm.opsm_against` is anchor, but with `algorithm.anchor: behavior` that is the "
            "policy that sampled: use behavior, or `anchor: recomputed` or interpolated."
        )


def _rejection(config: Config, _: Known) -> Iterator[str]:
    for rule in config.algorithm.rejection:
        name, lower, upper = f"`score: {rule.score}`", rule.lower, rule.upper
        if lower is None and upper is None:
            yield f"`algorithm.rejection` has a rule with {name} and no bound; give it `upper`."
        if lower is not None and upper is not None and lower >= upper:
            yield (
                f"`algorithm.rejection` has a rule with {name} whose `lower` is {lower:g}; it must "
                f"be below its `upper`, {upper:g}."
            )
        if lower is not None and rule.score in ("k2", "k3"):
            yield (
                f"`algorithm.rejection` has a rule with {name} and `lower`, but the score is a "
                "distance, 0 where proximal and behaviour policy agree: give `upper` alone."
            )
        bounds = [bound for bound in (lower, upper) if bound is not None]
        if rule.score in ("w", "k2", "k3") and any(bound < 0 for bound in bounds):
            yield (
                f"`algorithm.rejection` has a rule with {name} and the bound {min(bounds):g}, but "
                "the score is never below 0."
            )


def _kl(config: Config, _: Known) -> Iterator[str]:
    algorithm, model = config.algorithm, config.model
    if algorithm.use_kl_loss and algorithm.add_token_level_kl:
        yield (
            "`algorithm.use_kl_loss` and `algorithm.add_token_level_kl` are both true: the KL "
            "would be punished twice; keep one."
        )
    kind, unbiased = algorithm.kl_loss_type, algorithm.kl_loss_unbiased
    if algorithm.use_kl_loss and kind in ("kl", "k1") and not unbiased:
        yield (
            f"`algorithm.kl_loss_type: {kind}` has an expected gradient of 0 as a loss; use "
            f"{kind}+ (same value, the gradient of the divergence), low_var_kl, or "
            "`kl_loss_unbiased: anchor`."
        )
    if algorithm.kl_loss_unbiased and not algorithm.use_kl_loss:
        yield (
            f"`algorithm.kl_loss_unbiased` is {unbiased if isinstance(unbiased, str) else 'true'}, "
            "but `algorithm.use_kl_loss` is false; set `use_kl_loss` to true, or remove the "
            "correction."
        )
    if unbiased and kind == "abs":
        yield (
            "`algorithm.kl_loss_type` is abs, which has a bias that `kl_loss_unbiased` "
            "does not remove: use low_var_kl, mse, or abs+."
        )
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.add_token_level_kl:
        yield (
            "`algorithm.kl_ctrl.type: adaptive` steers the KL in the reward: set "
            "`algorithm.add_token_level_kl: true`, or use fixed."
        )
    if not algorithm.uses_reference:
        for key, given in (
            ("reference", model.reference is not None),
            ("reference_refresh_steps", model.reference_refresh_steps > 0),
        ):
            if given:
                yield (
                    f"`model.{key}` is given but nothing uses a reference: set "
                    "`algorithm.use_kl_loss: true` or `algorithm.add_token_level_kl: true`, or "
                    "remove it."
                )


def _normalises(algorithm: Algorithm) -> bool:
    """Whether shaped rewards are normalised."""
    return algorithm.reward_norm is not None or algorithm.reward_shift or algorithm.reward_scale


def _levels(algorithm: Algorithm, traits: EstimatorTraits) -> Iterator[str]:
    """Judge whose mean and deviation normalise the rewards."""
    name, whiten = algorithm.adv_estimator.name, algorithm.whiten_advantages
    norm, shift, scale = algorithm.reward_norm, algorithm.reward_shift, algorithm.reward_scale
    mean, std = norm_levels(norm, shift, scale)
    given = {"`reward_norm`": norm, "`reward_shift`": shift, "`reward_scale`": scale}
    keys = [key for key, value in given.items() if value]
    named, them = " and ".join(keys), "it" if len(keys) == 1 else "them"
    if name == "maxrl" and mean is not None:
        yield (
            "`algorithm.adv_estimator: maxrl` divides by the group's mean reward, which "
            f"{named} would remove; unset {them}."
        )
    unseen_means, unseen_stds = unseen_levels(
        traits,
        norm_by_std=algorithm.norm_adv_by_std_in_grpo,
        std_level=algorithm.adv_std_level,
        gamma=algorithm.gamma,
        whiten=whiten,
        masked=algorithm.mask_truncated,
        kl=algorithm.add_token_level_kl,
        clip=algorithm.reward_clip_after is not None,
    )
    if (mean, std) == (None, None) or mean not in unseen_means or std not in unseen_stds:
        return
    rewards = f"all rewards of {'a group' if 'group' in (mean, std) else 'the step'}"
    done = f"divide {rewards} by one number"
    if mean is not None:
        done = f"subtract one number from {rewards}" + " and divide them by another" * bool(std)
    others = ["`adv_estimator: raw`"] * (name != "raw")
    others += ["`whiten_advantages: false`"] * bool(whiten)
    yield (
        f"`algorithm.{named[1:]} change{'s' * (len(keys) == 1)} nothing: to {done} leaves the "
        f"advantages of `adv_estimator: {name}`{', whitened,' * bool(whiten)} as they are; unset "
        f"{them}, or choose {' with '.join(others)}."
    )


def _reward_norm(config: Config, known: Known) -> Iterator[str]:
    algorithm, traits = config.algorithm, known.estimator(config)
    name, norm = algorithm.adv_estimator.name, algorithm.reward_norm
    if isinstance(norm, dict) and not set(norm.values()) - {"none"}:
        yield (
            "`algorithm.reward_norm` names no statistics: give its `mean` or `std` one of group, "
            "batch, running, or leave it out."
        )
    if isinstance(norm, dict) and (algorithm.reward_shift or algorithm.reward_scale):
        yield (
            "`algorithm.reward_norm` is a mapping, which says itself what is subtracted and what "
            "divided by: unset `reward_shift` and `reward_scale`."
        )
    else:
        yield from _levels(algorithm, traits)
    clips = algorithm.reward_clip_after is not None
    if clips and algorithm.add_token_level_kl and not traits.returns:
        yield (
            "`algorithm.reward_clip_after` with `add_token_level_kl` clips the reward of each "
            f"token, but `adv_estimator: {name}` has one number per response: unset one of them, "
            "or choose an estimator with returns, such as reinforce."
        )


def _components(config: Config, known: Known) -> Iterator[str]:
    level, traits, name = (
        config.task.rewards_norm,
        known.estimator(config),
        config.algorithm.adv_estimator.name,
    )
    if level == "none":
        return
    if level == "group" and config.rollout.group_size < 2:
        yield (
            "`task.rewards_norm: group` makes every reward of a group of one 0: use batch, or a "
            "`rollout.group_size` of at least 2."
        )
    if traits.turns or traits.baseline or name == "maxrl":
        why = "needs rewards of at least 0" if name == "maxrl" else "takes rewards as they are"
        yield (
            f"`task.rewards_norm` is {level}, but `algorithm.adv_estimator: {name}` {why}: set it "
            "to none."
        )
    filters = config.replay.filter_groups
    if filters.enable and filters.metric == "seq_reward":
        yield (
            f"`replay.filter_groups.metric` is seq_reward, and with `task.rewards_norm: {level}` "
            "the shaped reward exists only once a step's groups are together: use score, acc, or "
            "the name of a component."
        )


def _rewards(config: Config, known: Known) -> Iterator[str]:
    norm = config.algorithm.reward_norm
    grouped = "group" in norm.values() if isinstance(norm, dict) else norm == "group"
    if grouped and config.rollout.group_size < 2:
        yield (
            "`algorithm.reward_norm: group` makes every reward of a group of one 0: use batch or "
            "running, or a `rollout.group_size` of at least 2."
        )
    yield from _components(config, known)
    overlong, limit = config.algorithm.overlong_buffer, config.rollout.response_length
    if overlong.enable and overlong.len > limit:
        yield (
            f"`algorithm.overlong_buffer.len` is {overlong.len}; allowed is at most "
            f"`rollout.response_length`, {limit}."
        )


def _filters(config: Config, known: Known) -> Iterator[str]:
    yield from _filter(config, known)
    for name, one in config.tasks.items():
        if one.filter_groups is not None:
            for sentence in _filter(config.of_task(name), known):
                yield sentence.replace("`replay.", f"`tasks.{name}.")


def _filter(config: Config, known: Known) -> Iterator[str]:
    groups, name = config.replay.filter_groups, config.algorithm.adv_estimator.name
    band = groups.accuracy_low is not None or groups.accuracy_high is not None
    if groups.metric == "seq_final_reward":
        yield (
            "`replay.filter_groups.metric: seq_final_reward` includes the token KL, which is "
            "not known when groups are filtered; use "
            "seq_reward (shaped), score, acc or the name of a reward component."
        )
    if not groups.metric:
        yield (
            "`replay.filter_groups.metric` is empty; allowed are score, acc, seq_reward, or the "
            "name of a reward component."
        )
    more = band or groups.all_truncated or groups.custom is not None
    if not groups.enable and (more or groups.retire_at is not None):
        yield (
            "`replay.filter_groups` has conditions, but `enable` is false; set it to true, or "
            "remove them."
        )
    if groups.enable and groups.zero_variance and not known.estimator(config).compares:
        yield (
            "`replay.filter_groups.zero_variance` is true, but with `algorithm.adv_estimator: "
            f"{name}` a group of equal rewards carries signal: its baseline is not the group's "
            "mean; set it to false."
        )
    if groups.enable and not (groups.zero_variance or more or groups.retire_at is not None):
        yield (
            "`replay.filter_groups.enable` is true, but no condition is set; set one, or enable: "
            "false."
        )
    low, high = groups.accuracy_low, groups.accuracy_high
    for key, bound, worst in (("accuracy_low", low, 1), ("accuracy_high", high, 0)):
        if bound == worst:
            yield (
                f"`replay.filter_groups.{key}` is {bound:g}, which rejects every group; allowed is "
                f"{'less than 1' if worst else 'more than 0'}, or null."
            )
    if low is not None and high is not None and low >= high:
        yield (
            f"`replay.filter_groups.accuracy_low` is {low:g}; it must be below `accuracy_high`, "
            f"{high:g}."
        )


def _distill(config: Config, known: Known) -> Iterator[str]:
    distill, temperature = config.algorithm.distill, config.rollout.temperature
    if len(set(distill.teachers)) < len(distill.teachers):
        yield "`algorithm.distill.teacher` has a name twice: remove one."
    if LIVE in distill.teachers and distill.teacher_prompt is None:
        yield (
            f"`algorithm.distill.teacher` is {LIVE}, the policy itself, which learns nothing from "
            "a teacher that sees what it sees: set `algorithm.distill.teacher_prompt`."
        )
    if distill.teacher_prompt is not None and "{prompt}" not in distill.teacher_prompt:
        yield "`algorithm.distill.teacher_prompt` does not contain {prompt}."
    if distill.teacher is not None and temperature != 1:
        yield (
            f"`rollout.temperature` is {temperature:g}, and with `algorithm.distill.teacher` it is "
            "1: the teacher judges the distribution that is sampled by its own at temperature 1."
        )


ALGORITHM_RULES = (
    _estimator,
    _pairs,
    _clip,
    _anchor,
    _row_losses,
    _rejection,
    _towards_the_sampler,
    _weights,
    _kl,
    _distill,
    _reward_norm,
    _rewards,
    _filters,
)
