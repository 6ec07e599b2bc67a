"""Which estimator, loss, anchor, weights, KL and filter belong together: every rule refuses what it
should, and admits the rest.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_args

import pytest
import yaml
from pydantic.fields import FieldInfo

from async_grpo.algo import advantages, importance, losses  # noqa: F401 - registers the estimators
from async_grpo.algo.aggregation import AGGREGATIONS
from async_grpo.algo.catalog import CLIP_SCHEDULES, ESTIMATORS, POLICY_LOSSES
from async_grpo.algo.kl import KL_PENALTIES
from async_grpo.config.algorithm import Algorithm, RejectionRule
from async_grpo.config.docs import settings
from async_grpo.config.load import ConfigError, dump, load_config
from async_grpo.config.resume import compare
from tests.support import typed
from tests.support.recipes import CONFIGS

SHORT = {
    "M2PO": "algorithm.policy_loss=m2po algorithm.clip_ratio_low=0.3 algorithm.clip_ratio_high=0.5",
    "SEQ": "algorithm.loss_agg_mode=seq-mean-token-mean",
    "GSPO": "algorithm.policy_loss=gspo algorithm.clip_ratio_low=3e-4 "
    "algorithm.clip_ratio_high=4e-4 algorithm.loss_agg_mode=seq-mean-token-mean",
    "FILTER": "replay.filter_groups.enable=true",
    "KL_REWARD": "algorithm.add_token_level_kl=true",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "base.yaml"
    path.write_text("run: {total_steps: 3}\nmodel: {warm_start: {}}\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        *typed.refused(
            """\
algorithm.adv_estimator=rloo rollout.group_size=1
    group_size` is 1 | rloo | at least 2
algorithm.adv_estimator=dr_grpo
    loss_agg_mode` is token-mean | seq-mean-token-sum-norm
algorithm.adv_estimator=rloo algorithm.norm_adv_by_std_in_grpo=false
    norm_adv_by_std_in_grpo` is false | rloo
algorithm.adv_estimator=opo algorithm.adv_std_level=batch
    adv_std_level: batch | adv_estimator: grpo
algorithm.adv_estimator=rloo algorithm.adv_std_level=batch_raw
    adv_std_level: batch_raw | adv_estimator: grpo
algorithm.adv_std_level=batch algorithm.norm_adv_by_std_in_grpo=false
    adv_std_level: batch
algorithm.gamma=0.9
    gamma` is 0.9 | reinforce_plus_plus, remax, turn_grpo
task.rewards_norm=group rollout.group_size=1 algorithm.adv_estimator=raw
    rewards_norm: group | group_size
task.rewards_norm=group FILTER replay.filter_groups.metric=seq_reward
    seq_reward | rewards_norm: group | score
algorithm.reward_norm=group
    reward_norm | changes nothing | adv_estimator: grpo | adv_estimator: raw
'algorithm.reward_norm={mean: group, std: batch}' algorithm.adv_std_level=group
    reward_norm | changes nothing
'algorithm.reward_norm={mean: running}' algorithm.adv_estimator=rloo KL_REWARD
    `algorithm.reward_norm` changes nothing: to subtract one number from | rloo
algorithm.reward_scale=true algorithm.adv_std_level=batch
    `algorithm.reward_scale` changes nothing: to divide all rewards of the step | it,
algorithm.reward_norm=batch algorithm.reward_shift=true
    `algorithm.reward_norm` and `reward_shift` change nothing | unset them
algorithm.reward_norm=batch algorithm.adv_estimator=raw algorithm.whiten_advantages=true
    reward_norm | whitened | choose `whiten_advantages: false`.
algorithm.adv_estimator=maxrl 'algorithm.reward_norm={std: batch}'
    reward_norm` changes nothing: to divide all rewards of the step | maxrl
'algorithm.reward_norm={mean: none}' algorithm.adv_estimator=raw
    reward_norm | names no statistics
'algorithm.reward_norm={std: batch}' algorithm.adv_estimator=raw algorithm.reward_shift=true
    reward_norm | mapping | reward_shift
algorithm.reward_clip_after=1 algorithm.adv_estimator=raw KL_REWARD
    reward_clip_after | adv_estimator: raw | reinforce
algorithm.adv_estimator=turn_grpo algorithm.reward_clip_after=1
    turn_grpo | reward_clip_after | per turn
algorithm.adv_estimator=turn_grpo algorithm.reward_norm=group
    turn_grpo | reward_norm | per turn
algorithm.adv_estimator=turn_grpo algorithm.gamma_per=token
    gamma_per | by turn
algorithm.adv_estimator=maxrl algorithm.reward_norm=group
    maxrl | reward_norm
algorithm.adv_estimator=maxrl algorithm.overlong_buffer.enable=true
    maxrl | overlong_buffer | negative
algorithm.policy_loss=sapo algorithm.clip_ratio_high=0.3
    clip_ratio_high | sapo | no clip interval
algorithm.policy_loss=m2po
    m2po | 0.3 and 0.5
algorithm.reward_norm=group algorithm.adv_estimator=raw rollout.group_size=1
    reward_norm: group | group_size
algorithm.policy_loss=asymre
    policy_loss: asymre | adv_estimator` asymre, not grpo
algorithm.adv_estimator=asymre
    adv_estimator: asymre | policy_loss: asymre | ppo_clip
algorithm.adv_estimator=gpg
    adv_estimator: gpg | gpg or reinforce
algorithm.policy_loss=topr algorithm.adv_estimator=remax
    policy_loss: topr | raw or grpo
algorithm.policy_loss=opmd
    opmd | norm_adv_by_std_in_grpo: false
algorithm.policy_loss=opmd algorithm.adv_estimator=rloo algorithm.whiten_advantages=true
    opmd | whiten_advantages
algorithm.policy_loss=sapo algorithm.clip_schedule=harmonic
    clip_schedule` is harmonic | sapo | ppo_clip
algorithm.policy_loss=cispo algorithm.clip_ratio_low=1 algorithm.clip_ratio_high=4 \
algorithm.dual_clip_loss=true
    dual_clip_loss | cispo
algorithm.policy_loss=gspo SEQ
    gspo | clip_ratio_low | clip_ratio_high | 3e-4 and 4e-4
algorithm.policy_loss=cispo
    cispo | 1.0 (open at staleness 0) and 4.0
algorithm.policy_loss=gmpo SEQ algorithm.clip_ratio_low=0.4
    gmpo | 0.4 and 0.4
GSPO algorithm.loss_agg_mode=token-mean
    loss_agg_mode` is token-mean | gspo | seq-mean-token-mean | as LUSPO
GSPO algorithm.policy_loss=gmpo algorithm.loss_agg_mode=token-sum
    loss_agg_mode` is token-sum | gmpo | by length.
GSPO algorithm.anchor=recomputed algorithm.importance.level=token
    importance.level` is token | gspo | geometric
GSPO algorithm.anchor=recomputed 'algorithm.rejection=[{score: k1, reduce: token, upper: 1}]'
    rejection` has a rule with `reduce: token` | gspo | sum, mean, min, max
GSPO algorithm.adv_estimator=reinforce_plus_plus algorithm.gamma=0.9
    gspo | one per token | gspo_token
algorithm.policy_loss=opmd algorithm.policy_loss.level=sequence algorithm.adv_estimator=rloo
    name: opmd, level: sequence | seq-mean-token-sum
M2PO algorithm.anchor=recomputed
    anchor` is recomputed | m2po | behavior
algorithm.policy_loss=reinforce algorithm.anchor=recomputed
    anchor` is recomputed | reinforce
algorithm.policy_loss=gpg algorithm.anchor=interpolated
    anchor` is interpolated | gpg
algorithm.policy_loss=gpg algorithm.importance.level=token
    importance.level` is token | policy_loss: reinforce
'algorithm.rejection=[{score: w, reduce: mean, upper: 2}]'
    `algorithm.rejection` | `algorithm.anchor: recomputed` | the same policy
'algorithm.rejection=[{score: w, reduce: mean, lower: 3, upper: 2}]'
    `lower` is 3 | below its `upper`, 2
algorithm.opsm_delta=0.5 algorithm.opsm_against=anchor
    opsm_against` is anchor | `algorithm.anchor: behavior` | recomputed
algorithm.policy_loss=opmd algorithm.adv_estimator=rloo algorithm.behavior_penalty=0.1
    behavior_penalty | opmd | `tau` | twice
GSPO algorithm.top_entropy_share=0.2
    top_entropy_share` is 0.2 | gspo | gspo_token
algorithm.policy_loss=opmd algorithm.policy_loss.level=sequence algorithm.adv_estimator=rloo \
algorithm.loss_agg_mode=seq-mean-token-sum algorithm.top_entropy_share=0.2
    top_entropy_share` is 0.2 | {name: opmd, level: sequence}
'algorithm.rejection=[{score: k3, reduce: max}]'
    score: k3 | no bound
'algorithm.rejection=[{score: k2, reduce: max, lower: 0.1}]'
    score: k2 | `lower` | `upper` alone
'algorithm.rejection=[{score: w, reduce: min, lower: -1}]'
    score: w | bound -1 | never below 0
'algorithm.rejection=[{score: k1, reduce: row}]'
    rejection.0.reduce` is | min, max
'algorithm.rejection=[{score: k1}]'
    rejection.0.reduce` is missing | min, max
'algorithm.rejection=[{score: k1, reduce: max, level: 1}]'
    rejection.0.level` is not a setting | score (one of w, k1
algorithm.rejection.lower=3
    rejection` is | a list, each a mapping with score
'algorithm.policy_loss={name: clip_cov, lower: 2, upper: 1}'
    `algorithm.policy_loss`: `lower` is 2 | below
algorithm.use_kl_loss=true KL_REWARD
    use_kl_loss | add_token_level_kl | twice
algorithm.use_kl_loss=true algorithm.kl_loss_type=kl
    kl_loss_type: kl | gradient of 0 | kl+
algorithm.use_kl_loss=true algorithm.kl_loss_type=k1
    kl_loss_type: k1 | gradient of 0 | k1+
algorithm.use_kl_loss=true algorithm.kl_loss_unbiased=true algorithm.kl_loss_type=abs
    kl_loss_type` is abs | kl_loss_unbiased | low_var_kl
algorithm.kl_loss_unbiased=true
    kl_loss_unbiased` is true | `use_kl_loss
algorithm.kl_loss_unbiased=behavior
    kl_loss_unbiased` is behavior | is false
algorithm.kl_ctrl.type=adaptive
    adaptive | add_token_level_kl
model.reference_refresh_steps=5
    reference_refresh_steps | use_kl_loss
replay.filter_groups.metric=seq_final_reward
    seq_final_reward | not known when groups are filtered | seq_reward
replay.filter_groups.retire_at=0.9
    filter_groups | enable
replay.filter_groups.accuracy_low=0.1
    filter_groups | enable
FILTER algorithm.adv_estimator=asymre algorithm.policy_loss=asymre
    zero_variance | asymre | carries signal
FILTER replay.filter_groups.zero_variance=false
    no condition
FILTER replay.filter_groups.accuracy_low=0.5 replay.filter_groups.accuracy_high=0.5
    accuracy_low` is 0.5 | below
FILTER replay.filter_groups.accuracy_low=1
    accuracy_low` is 1 | every group
FILTER replay.filter_groups.accuracy_high=0
    accuracy_high` is 0 | every group
""",
            **SHORT,
        ),
        *(
            (["task.rewards_norm=batch", f"algorithm.adv_estimator={name}"], ["rewards_norm", name])
            for name in ("turn_grpo", "remax", "maxrl")
        ),
        *(
            (
                [SHORT["FILTER"], f"algorithm.adv_estimator={name}"],
                ["zero_variance", name, "carries signal"],
            )
            for name in ("reinforce", "reinforce_plus_plus", "remax", "raw")
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_every_rule(overrides: list[str], fragments: list[str], base: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(base, overrides)
    message = str(caught.value)
    assert len(message.splitlines()) <= 3 and all(fragment in message for fragment in fragments), (
        message
    )


@pytest.mark.parametrize(
    "overrides",
    [
        *typed.admitted(
            """\
algorithm.adv_estimator=dr_grpo algorithm.loss_agg_mode=seq-mean-token-sum-norm
algorithm.adv_estimator=grpo_vectorized algorithm.adv_std_level=batch
algorithm.adv_estimator=grpo_passk algorithm.norm_adv_by_std_in_grpo=false
algorithm.adv_estimator=reinforce_plus_plus algorithm.gamma=0.99 rollout.group_size=1
algorithm.adv_estimator=remax rollout.group_size=1 KL_REWARD algorithm.kl_ctrl.type=adaptive
algorithm.adv_estimator=raw FILTER 'replay.filter_groups={enable: true, zero_variance: false, \
accuracy_high: 0.9}'
algorithm.adv_estimator=gpg algorithm.policy_loss=gpg
algorithm.adv_estimator=asymre algorithm.policy_loss=asymre algorithm.opsm_delta=0.5
algorithm.policy_loss=opmd algorithm.norm_adv_by_std_in_grpo=false
algorithm.policy_loss=opmd algorithm.adv_estimator=rloo algorithm.policy_loss.level=sequence \
algorithm.loss_agg_mode=seq-mean-token-sum
algorithm.policy_loss=topr algorithm.adv_estimator=raw
algorithm.policy_loss=opmd algorithm.adv_estimator=dr_grpo \
algorithm.loss_agg_mode=seq-mean-token-sum-norm
algorithm.policy_loss=reinforce algorithm.importance.level=token
GSPO algorithm.anchor=recomputed algorithm.importance.level=sequence \
'algorithm.rejection=[{score: k2, reduce: mean, upper: 1}, {score: w, reduce: min, lower: 1e-4}, \
{score: difference, reduce: max, lower: -0.2, upper: 0.2}]'
GSPO algorithm.policy_loss=gspo_token algorithm.anchor=recomputed \
algorithm.importance.level=token 'algorithm.rejection=[{score: k1, reduce: token, upper: 1}]'
GSPO algorithm.loss_agg_mode=seq-mean-token-sum
GSPO algorithm.policy_loss=gspo_token algorithm.top_entropy_share=0.2
algorithm.policy_loss=clip_cov algorithm.top_entropy_share=0.2
GSPO algorithm.loss_agg_mode=token-sum algorithm.policy_loss=gspo_token
GSPO algorithm.loss_agg_mode=seq-mean-token-sum-norm
GSPO algorithm.clip_schedule=harmonic algorithm.adv_estimator=reinforce_plus_plus
algorithm.anchor=interpolated 'algorithm.importance={level: token, mode: mask, lower: 0.5, \
upper: 5}'
M2PO algorithm.dual_clip_loss=true
algorithm.use_kl_loss=true algorithm.kl_loss_type=kl algorithm.kl_loss_unbiased=true \
model.reference_refresh_steps=5
algorithm.use_kl_loss=true algorithm.kl_loss_type=k2 algorithm.kl_loss_unbiased=behavior
algorithm.reward_shift=true algorithm.reward_scale=true algorithm.reward_clip=10 \
algorithm.adv_estimator=raw
'algorithm.reward_norm={std: batch}' algorithm.adv_estimator=maxrl algorithm.reward_clip_after=3
'algorithm.reward_norm={mean: group, std: batch}' algorithm.adv_estimator=raw \
algorithm.reward_clip_after=3 algorithm.whiten_advantages=keep_mean
algorithm.reward_norm=running KL_REWARD
'algorithm.reward_norm={std: running}' algorithm.adv_estimator=reinforce \
algorithm.reward_clip_after=3 algorithm.whiten_advantages=false KL_REWARD
algorithm.adv_std_level=batch_centered
task.rewards_norm=group FILTER algorithm.whiten_advantages=true
FILTER 'replay.filter_groups={enable: true, retire_at: 0.9, all_truncated: true, accuracy_low: \
0.0, accuracy_high: 1.0, metric: seq_reward}'
""",
            **SHORT,
        )
    ],
    ids=" ".join,
)
def test_what_the_rules_admit(overrides: list[str], base: Path) -> None:
    load_config(base, overrides)


@pytest.mark.parametrize(
    ("older", "rules"),
    [
        ("{}", []),
        ("{level: none, lower: 0.5, upper: 2.0}", []),
        ("{level: token, lower: 0.9}", [("w", "token", 0.9, 2.0)]),
        ("{level: sequence, upper: 3}", [("w", "sum", 0.5, 3.0)]),
        ("{level: geometric}", [("w", "mean", 0.5, 2.0)]),
    ],
)
def test_the_one_rejection_of_older_files_is_a_rule(
    older: str, rules: list[tuple[object, ...]], base: Path
) -> None:
    file = base.parent / "older.yaml"
    file.write_text(base.read_text() + f"algorithm: {{anchor: recomputed, rejection: {older}}}\n")
    config = load_config(file)
    assert [tuple(rule.model_dump().values()) for rule in config.algorithm.rejection] == rules
    saved = config.model_dump(mode="json")
    saved["algorithm"]["rejection"] = yaml.safe_load(older)
    assert not compare(saved, config).all
    file.write_text(dump(config))
    assert load_config(file) == config


def test_names_and_facts_are_those_of_the_mathematics() -> None:
    known = {name: setting.allowed for name, setting in settings().items()}

    def listed(key: str) -> set[str]:
        names, _, _ = known[f"algorithm.{key}"].partition(", or a mapping")
        return set(names.removeprefix("one of ").split(", "))

    assert listed("adv_estimator") == set(ESTIMATORS)
    grpo = {"grpo", "grpo_vectorized"}
    assert ESTIMATORS.where(lambda traits: traits.compares) == grpo | {
        "dr_grpo",
        "grpo_passk",
        "rloo",
        "reinforce_plus_plus_baseline",
        "opo",
        "gpg",
        "maxrl",
        "turn_grpo",
    }
    returns = ESTIMATORS.where(lambda traits: traits.returns)
    assert returns == {"reinforce", "reinforce_plus_plus", "remax", "turn_grpo"}
    assert ESTIMATORS.where(lambda traits: traits.baseline) == {"remax"}
    assert ESTIMATORS.where(lambda traits: traits.std_levels) == grpo
    assert all(callable(ESTIMATORS.function(name)) for name in ESTIMATORS if name not in returns)
    assert listed("policy_loss") == set(POLICY_LOSSES)
    assert all(callable(POLICY_LOSSES.function(name)) for name in POLICY_LOSSES)
    assert POLICY_LOSSES.where(lambda traits: traits.clipped) == {
        "ppo_clip",
        "gspo",
        "gspo_token",
        "cispo",
        "gmpo",
        "clip_cov",
        "m2po",
    }
    assert POLICY_LOSSES.where(lambda traits: traits.ratio_free) == {
        "gpg",
        "reinforce",
        "asymre",
        "topr",
        "opmd",
    }
    assert POLICY_LOSSES.where(lambda traits: traits.selects) == {"clip_cov", "kl_cov", "m2po"}
    responses = POLICY_LOSSES.where(lambda traits: traits.response_ratio)
    assert responses == {"gspo", "gspo_token", "gmpo"}
    assert responses <= POLICY_LOSSES.where(lambda traits: traits.rows)
    assert POLICY_LOSSES.where(lambda traits: traits.by_length) == {"gspo", "gspo_token"}
    scores, reductions = (set(get_args(one.annotation)) for one in _rule_fields("score", "reduce"))
    assert scores == set(importance.SCORES) and reductions == set(importance.REDUCTIONS)
    assert listed("importance.mode") == set(importance.IMPORTANCE)
    assert listed("loss_agg_mode") == set(AGGREGATIONS)
    assert listed("kl_loss_type") == set(KL_PENALTIES)
    assert listed("kl_ctrl.kl_type") == {name for name in KL_PENALTIES if "+" not in name}
    assert listed("clip_schedule") == set(CLIP_SCHEDULES)
    assert all(CLIP_SCHEDULES.function(name) for name in CLIP_SCHEDULES)


def _rule_fields(*names: str) -> list[FieldInfo]:
    return [RejectionRule.model_fields[name] for name in names]


def test_the_options_of_single_losses_have_one_value() -> None:
    for name in POLICY_LOSSES.where(lambda traits: traits.options):
        chosen = Algorithm(policy_loss=name).policy_loss
        made = losses.loss_options(name, None)
        assert chosen.values == dataclasses.asdict(made)
        assert POLICY_LOSSES.options(name, chosen.values) == made
        assert Algorithm(policy_loss={"name": name, **chosen.values}).policy_loss == chosen


def test_one_value_of_a_setting_with_two_forms_is_one_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIGS / "grpo.yaml", ["model.lora={target_modules: null}"])
    assert str(caught.value).endswith(
        "`model.lora.target_modules` is null; allowed is only all-linear, or a list, not empty, "
        "each text."
    )


def test_recipes_of_published_methods_have_the_clip_interval_of_their_papers() -> None:
    kinds = {
        path.stem: load_config(path).algorithm.clip_schedule.name
        for path in sorted(CONFIGS.glob("*.yaml"))
    }
    assert {name for name, kind in kinds.items() if kind != "constant"} == {
        "quickstart",
        "bounded_clip",
    }
