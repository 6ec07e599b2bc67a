"""Row mathematics of a learner step against plain loops over rows: normalised rewards, baselines,
token KL, whitening, loss weights.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean as mean
from statistics import stdev as std
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.algo.aggregation import AGGREGATIONS
from async_grpo.config.schema import Config
from async_grpo.learner.batching import PlanRow, RankPlan, RowKey, RowValue
from async_grpo.run.planning import RowMath, durations, shaping
from async_grpo.wire.codec import Batch, GroupMeta, RowMeta

WEIGHTS = {"correct": 1.0, "format": 0.5}
GROUPS, LIMIT = 4, 16
TIMES = {"queued": 1.0, "first_token": 1.5, "done": 3.0, "scored": 3.5}


def config(
    *,
    size: int = 3,
    ranks: int = 1,
    epochs: int = 1,
    minibatch: int | None = None,
    **algorithm: Any,
) -> Config:
    return Config.model_validate(
        {
            "run": {"total_steps": 9},
            "model": {"path": "m"},
            "algorithm": algorithm,
            "replay": {"max_staleness": 2},
            "rollout": {
                "rollout_batch_size": GROUPS,
                "group_size": size,
                "prompt_length": 8,
                "response_length": LIMIT,
            },
            "learner": {
                "ranks": ranks,
                "ppo_epochs": epochs,
                "ppo_mini_batch_size": minibatch,
                "tokens_per_micro_batch": 24,
            },
        }
    )


def row(step: int, group: int, index: int, *, role: str = "train") -> RowMeta:
    """Group 2 is all equal; a row of group 1 was cut off, each has a token of
    context; a baseline has a high reward.
    """
    length = 2 + (5 * group + 4 * index + 3 * step) % 12
    rewards = {
        "correct": float((index + step) % 3 == group % 3),
        "format": 0.1 * index + 0.3 * group,
    }
    if group == 2:
        rewards = {"correct": 1.0, "format": 0.1}
    if role == "baseline":
        rewards = {"correct": 5.0 + group, "format": 0.0}
    return RowMeta(
        role=role,
        length=length - 1,
        context=1,
        rewards=rewards,
        verdict=None,
        finish_reason="length" if (group, index) == (1, 2) else "stop",
        versions=((0, length - 1),),
    )


def batch_of(step: int, *, size: int = 3, baseline: bool = False) -> Batch:
    groups = []
    for group in range(GROUPS):
        rows = [row(step, group, index) for index in range(size)]
        if baseline:
            rows.insert(
                group % 2, row(step, group, 9, role="baseline")
            )  # its place in the group says nothing
        groups.append(
            GroupMeta(10 * step + group, 0, 0, "a", (3 + group,), tuple(rows), TIMES, 100)
        )
    return Batch(step, tuple(groups))


def rows_of(batch: Batch, role: str = "train") -> dict[RowKey, RowMeta]:
    return {
        (group.group_id, index): meta
        for group in batch.groups
        for index, meta in enumerate(group.rows)
        if meta.role == role
    }


def score(meta: RowMeta) -> float:
    return meta.rewards["correct"] + 0.5 * meta.rewards["format"]


def numbers(values: Mapping[RowKey, RowValue]) -> dict[RowKey, float]:
    return {key: value.value for key, value in values.items()}


def grpo(rewards: Mapping[RowKey, float]) -> dict[RowKey, float]:
    """Z-scores of each group; 0 in a group without spread."""
    out = {}
    for key, reward in rewards.items():
        group = [value for (group_id, _), value in rewards.items() if group_id == key[0]]
        equal = max(group) - min(group) <= 1e-6
        out[key] = 0.0 if equal else (reward - mean(group)) / (std(group) + 1e-6)
    return out


# ---- rewards ----


@pytest.mark.parametrize(
    ("shift", "scale"), [(False, False), (True, True), (True, False), (False, True)]
)
@pytest.mark.parametrize("norm", ["group", "batch", "running", None])
def test_rewards_are_normalised_with_the_named_statistics(
    norm: str | None, shift: bool, scale: bool
) -> None:
    math_ = RowMath(
        config(adv_estimator="raw", reward_norm=norm, reward_shift=shift, reward_scale=scale),
        WEIGHTS,
    )
    seen: list[float] = []
    for step in (1, 2):
        batch = batch_of(step)
        scores = {key: score(meta) for key, meta in rows_of(batch).items()}
        seen += scores.values()
        wanted = {}
        for key, value in scores.items():
            group = [other for (group_id, _), other in scores.items() if group_id == key[0]]
            over = {
                "group": group,
                "batch": list(scores.values()),
                "running": seen,
                None: list(scores.values()),
            }[norm]
            if norm is not None or shift or scale:
                value = value - mean(over) if shift or not scale else value
                value = (
                    value / (std(over) + 1e-6)
                    if (scale or not shift) and max(over) > min(over)
                    else value
                )
            wanted[key] = value
        values, metrics = math_.values(batch, {})
        assert numbers(values) == pytest.approx(wanted, abs=1e-9)
        assert metrics["rollout/score"] == pytest.approx(mean(list(scores.values())), abs=1e-12), (
            "the score is reported as it was"
        )
    assert math_.state()["moments"]["count"] == (24 if norm == "running" else 0), (
        "once per learner step, before it is used"
    )


def without(batch: Batch, missing: Sequence[tuple[int, int, str]]) -> Batch:
    """The batch whose rows (place of the group, row) lack these components."""
    groups = []
    for place, group in enumerate(batch.groups):
        rows = []
        for index, meta in enumerate(group.rows):
            left = {
                name: value
                for name, value in meta.rewards.items()
                if (place, index, name) not in missing
            }
            rows.append(replace(meta, rewards=left))
        groups.append(replace(group, rows=tuple(rows)))
    return Batch(batch.step, tuple(groups))


MISSING = ((0, 1, "format"), (1, 0, "correct"), (1, 2, "correct"), (3, 2, "format"))


@pytest.mark.parametrize("missing", [(), MISSING])
@pytest.mark.parametrize("level", ["none", "group", "batch"])
def test_components_are_normalised_one_by_one_over_the_rows_that_have_them(
    level: str, missing: tuple[tuple[int, int, str], ...]
) -> None:
    """Against a loop over rows and components; GDPO's advantage is whitened afterwards."""
    settings = config(adv_estimator="raw").model_dump()
    settings["task"]["rewards_norm"] = level
    settings["algorithm"]["whiten_advantages"] = True
    batch = without(batch_of(1), missing)
    values, metrics = RowMath(Config.model_validate(settings), WEIGHTS).values(batch, {})
    rows, wanted = rows_of(batch), {}
    for key, meta in rows.items():
        wanted[key] = 0.0
        for name, value in meta.rewards.items():
            have = [
                other.rewards[name]
                for (group_id, _), other in rows.items()
                if name in other.rewards and (level == "batch" or group_id == key[0])
            ]
            if level != "none":
                value -= mean(have)
                varied = len(have) > 1 and max(have) - min(have) > 1e-6
                value = value / (std(have) + 1e-6) if varied else 0.0
            wanted[key] += WEIGHTS[name] * value
    sums = list(wanted.values())
    tokens = [wanted[key] for key, meta in rows.items() for _ in range(meta.length)]
    assert numbers(values) == pytest.approx(
        {key: (value - mean(tokens)) / (std(tokens) + 1e-6) for key, value in wanted.items()},
        abs=1e-9,
    )
    assert metrics["rollout/shaped_reward"] == pytest.approx(mean(sums), abs=1e-9)
    shares = {name: value for name, value in metrics.items() if "reward_missing" in name}
    assert shares == (
        {}
        if not missing
        else pytest.approx(
            {f"rollout/reward_missing/{name}": 2 / 12 for name in ("correct", "format")}
        )
    )
    given = [meta.rewards["format"] for meta in rows.values() if "format" in meta.rewards]
    assert metrics["rollout/reward/format"] == pytest.approx(mean(given))


LEVELS = ("none", "group", "batch", "running")


@pytest.mark.parametrize(
    ("mean_of", "std_of"), [pair for pair in product(LEVELS, LEVELS) if pair != ("none", "none")]
)
def test_mean_and_deviation_have_statistics_of_their_own_and_a_clip_follows(
    mean_of: str, std_of: str
) -> None:
    norm = {"mean": mean_of, "std": std_of}
    math_ = RowMath(config(adv_estimator="raw", reward_norm=norm, reward_clip_after=0.3), WEIGHTS)
    seen: list[float] = []
    clipped = 0
    for step in (1, 2):
        batch = batch_of(step)
        scores = {key: score(meta) for key, meta in rows_of(batch).items()}
        seen += scores.values()
        wanted = {}
        for key, value in scores.items():
            group = [other for (group_id, _), other in scores.items() if group_id == key[0]]
            over = {"group": group, "batch": list(scores.values()), "running": seen}
            value -= 0.0 if mean_of == "none" else mean(over[mean_of])
            if std_of != "none" and max(over[std_of]) - min(over[std_of]) > 1e-6:
                value /= std(over[std_of]) + 1e-6
            clipped += abs(value) > 0.3
            wanted[key] = min(max(value, -0.3), 0.3)
        assert numbers(math_.values(batch, {})[0]) == pytest.approx(wanted, abs=1e-9)
    assert clipped
    assert math_.state()["moments"]["count"] == (24 if "running" in (mean_of, std_of) else 0)


@pytest.mark.parametrize("level", ["batch", "batch_centered", "batch_raw"])
def test_the_step_s_deviation_is_about_the_centre_that_is_named(level: str) -> None:
    batch = batch_of(1)
    scores = {key: score(meta) for key, meta in rows_of(batch).items()}
    means = {
        group: mean([value for (other, _), value in scores.items() if other == group])
        for group, _ in scores
    }
    squares = {
        "batch": [(value - mean(list(scores.values()))) ** 2 for value in scores.values()],
        "batch_centered": [(value - means[group]) ** 2 for (group, _), value in scores.items()],
        "batch_raw": [value**2 for value in scores.values()],
    }[level]
    deviation = math.sqrt(sum(squares) / (len(squares) - 1)) + 1e-6
    values, _ = RowMath(config(adv_std_level=level), WEIGHTS).values(batch, {})
    wanted = {key: (value - means[key[0]]) / deviation for key, value in scores.items()}
    assert numbers(values) == pytest.approx(wanted, abs=1e-9)


def test_the_score_by_lag_goes_by_the_oldest_token() -> None:
    """Version 0 sampled all: in step 5 the lag is 4. Where later versions finished a response, its
    first tokens decide.
    """
    batch = batch_of(5)
    first, rest = batch.groups[0], batch.groups[1:]
    newer = [replace(meta, versions=((3, 1), (4, meta.length - 1))) for meta in first.rows]
    batch = Batch(5, (replace(first, rows=tuple(newer)), *rest))
    _, metrics = RowMath(config(), WEIGHTS).values(batch, {})
    fresh = [score(meta) for meta in newer]
    stale = [score(meta) for group in rest for meta in group.rows]
    assert {
        name: value for name, value in metrics.items() if name.startswith("train/staleness_")
    } == {
        "train/staleness_1/score": pytest.approx(mean(fresh)),
        "train/staleness_3-4/score": pytest.approx(mean(stale)),
    }


def test_rewards_are_clipped_before_any_statistic() -> None:
    values, _ = RowMath(
        config(adv_estimator="raw", reward_clip=0.5, reward_norm="batch"), WEIGHTS
    ).values(batch_of(1), {})
    clipped = {key: min(max(score(meta), -0.5), 0.5) for key, meta in rows_of(batch_of(1)).items()}
    over = list(clipped.values())
    assert numbers(values) == pytest.approx(
        {key: (value - mean(over)) / (std(over) + 1e-6) for key, value in clipped.items()}, abs=1e-9
    )


# ---- ReMax ----


@pytest.mark.parametrize("norm", [None, "batch", "running"])
@pytest.mark.parametrize("size", [1, 3])
def test_the_greedy_response_is_the_baseline_and_counts_nowhere_else(
    size: int, norm: str | None
) -> None:
    batch = batch_of(1, size=size, baseline=True)
    math_ = RowMath(config(size=size, adv_estimator="remax", reward_norm=norm), WEIGHTS)
    planned = set(rows_of_plans(math_.plans(batch)))
    train = {key: score(meta) for key, meta in rows_of(batch).items()}
    assert planned == set(train) and len(train) == GROUPS * size
    over = list(train.values())

    def normed(value: float) -> float:
        return value if norm is None else (value - mean(over)) / (std(over) + 1e-6)

    greedy = {key[0]: normed(score(meta)) for key, meta in rows_of(batch, "baseline").items()}
    values, metrics = math_.values(batch, {})
    assert numbers(values) == pytest.approx(
        {key: normed(value) for key, value in train.items()}, abs=1e-9
    )
    assert {key: value.baseline for key, value in values.items()} == pytest.approx(
        {key: greedy[key[0]] for key in train}, abs=1e-9
    )
    assert metrics["rollout/baseline_reward"] == pytest.approx(mean([5.0, 6.0, 7.0, 8.0]))
    assert metrics["rollout/baseline_tokens"] == sum(
        meta.length for meta in rows_of(batch, "baseline").values()
    )
    assert metrics["rollout/response_tokens"] == sum(
        meta.length for meta in rows_of(batch).values()
    )


# ---- token KL ----


def kl_of(batch: Batch) -> dict[RowKey, float]:
    return {key: 0.3 * key[1] - 0.05 * key[0] for key in rows_of(batch)}


def test_one_number_per_row_takes_the_sum_of_its_token_kl() -> None:
    batch, kl = batch_of(1), kl_of(batch_of(1))
    for norm in (None, "batch"):
        settings = config(
            add_token_level_kl=True, kl_ctrl={"kl_coef": 0.7}, reward_norm=norm, mask_truncated=True
        )
        values, _ = RowMath(settings, WEIGHTS).values(batch, kl)
        scores = {key: score(meta) for key, meta in rows_of(batch).items()}
        over = list(scores.values())
        if norm:
            scores = {
                key: (value - mean(over)) / (std(over) + 1e-6) for key, value in scores.items()
            }
        assert numbers(values) == pytest.approx(
            grpo({key: value - 0.7 * kl[key] for key, value in scores.items()}), abs=1e-8
        )


def test_returns_get_the_reward_without_kl() -> None:
    """The ranks subtract it token by token."""
    batch = batch_of(1)
    values, _ = RowMath(
        config(adv_estimator="reinforce_plus_plus", add_token_level_kl=True), WEIGHTS
    ).values(batch, kl_of(batch))
    assert numbers(values) == pytest.approx(
        {key: score(meta) for key, meta in rows_of(batch).items()}
    )


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus"])
def test_the_coefficient_is_steered_after_its_use(estimator: str, kind: str) -> None:
    control = {"type": kind, "kl_coef": 0.4, "target_kl": 0.02, "horizon": 50.0}
    math_ = RowMath(
        config(adv_estimator=estimator, add_token_level_kl=True, kl_ctrl=control), WEIGHTS
    )
    coef = 0.4
    for step in (1, 2, 3):
        batch = batch_of(step)
        kl = {
            key: (0.2 if step == 2 else 0.001) * meta.length * key[1]
            for key, meta in rows_of(batch).items()
        }
        per_row = [kl[key] / meta.length for key, meta in rows_of(batch).items()]
        _, metrics = math_.values(batch, kl)
        assert metrics["rollout/kl_coef"] == pytest.approx(coef)
        assert metrics["rollout/reward_kl"] == pytest.approx(mean(per_row))
        if kind == "adaptive":
            coef *= 1 + min(max(mean(per_row) / 0.02 - 1, -0.2), 0.2) * 12 / 50
        assert math_.kl_coef == pytest.approx(coef)
    assert kind == "fixed" or coef != 0.4


# ---- advantages ----


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("estimator", "whitens"),
    [
        ("grpo", False),
        ("grpo", True),
        ("reinforce_plus_plus_baseline", False),
        ("raw", "shift"),
        ("raw", "keep_mean"),
    ],
)
def test_whitening_is_over_the_tokens_in_the_loss(
    estimator: str, whitens: bool | str, masked: bool
) -> None:
    batch = batch_of(1)
    settings = config(
        adv_estimator=estimator,
        whiten_advantages=whitens,
        mask_truncated=masked,
        advantage_clip=1.1,
    )
    values, _ = RowMath(settings, WEIGHTS).values(batch, {})
    rows = rows_of(batch)
    scores = {key: score(meta) for key, meta in rows.items()}
    if estimator == "grpo":
        advantages = grpo(scores)
    elif estimator == "raw":
        advantages = scores
    else:
        means = {
            group: mean([value for (other, _), value in scores.items() if other == group])
            for group, _ in scores
        }
        advantages = {key: value - means[key[0]] for key, value in scores.items()}
    counts = {
        key: 0 if masked and meta.finish_reason == "length" else meta.length
        for key, meta in rows.items()
    }
    if whitens or estimator != "grpo":
        tokens = [advantages[key] for key, count in counts.items() for _ in range(count)]
        advantages = {
            key: (value - mean(tokens)) / (std(tokens) + 1e-6)
            + (mean(tokens) if whitens == "keep_mean" else 0.0)
            if counts[key]
            else 0.0
            for key, value in advantages.items()
        }
    assert max(abs(value) for value in advantages.values()) > 1.1, "the clip has something to do"
    assert numbers(values) == pytest.approx(
        {key: min(max(value, -1.1), 1.1) for key, value in advantages.items()}, abs=1e-9
    )


# ---- weights in the loss ----


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "mode",
    [
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
        "prompt-mean",
    ],
)
def test_loss_weights_of_every_minibatch(mode: str, masked: bool) -> None:
    batch = batch_of(1)
    plans = RowMath(
        config(ranks=2, minibatch=2, loss_agg_mode=mode, mask_truncated=masked), WEIGHTS
    ).plans(batch)
    metas = rows_of(batch)
    tokens = {
        key: 0 if masked and meta.finish_reason == "length" else meta.length
        for key, meta in metas.items()
    }
    for index in range(2):
        entries = {
            entry.key: entry for plan in plans for part in plan.updates[index] for entry in part
        }
        counts = {key: tokens[key] for key in entries}
        by_group = {
            group: sum(count for (other, _), count in counts.items() if other == group)
            for group, _ in counts
        }
        all_tokens, all_rows, prompts = (
            sum(counts.values()),
            sum(count > 0 for count in counts.values()),
            sum(count > 0 for count in by_group.values()),
        )
        for key, count in counts.items():
            wanted = 0.0
            if count:
                wanted = {
                    "token-mean": 1 / all_tokens,
                    "token-sum": 1.0,
                    "seq-mean-token-sum": 1 / all_rows,
                    "seq-mean-token-mean": 1 / (all_rows * count),
                    "seq-mean-token-sum-norm": 1 / (all_rows * LIMIT),
                    "prompt-mean": 1 / (prompts * by_group[key[0]]),
                }[mode]
            assert entries[key].weight == pytest.approx(wanted, abs=1e-12)
            entry = entries[key]
            assert (entry.length, entry.sampled, entry.prompt_length) == (
                metas[key].length + 1,
                metas[key].length,
                3 + key[0] % 10,
            )


def test_demonstrations_have_a_normaliser_of_their_own_and_no_value() -> None:
    batch = batch_of(1)
    given = {0: 5, 2: 3, 3: 8}
    groups = [
        replace(group, rows=(*group.rows, demonstrated(given[place]))) if place in given else group
        for place, group in enumerate(batch.groups)
    ]
    settings = config(ranks=2, epochs=2, minibatch=2, sft_loss_coef=0.5)
    mathematics = RowMath(settings, WEIGHTS)
    plain = RowMath(config(ranks=2, epochs=2, minibatch=2), WEIGHTS)
    plans, seen = mathematics.plans(Batch(1, tuple(groups))), []
    for index in range(4):
        entries = [entry for plan in plans for part in plan.updates[index] for entry in part]
        imitated = [entry for entry in entries if entry.given]
        total = sum(entry.sampled for entry in imitated)
        assert all(entry.weight == 0.5 / total and entry.row == 3 for entry in imitated)
        seen += [entry.sampled for entry in imitated]
        without = [
            row for plan in plain.plans(batch) for part in plan.updates[index] for row in part
        ]
        assert {(row.key, row.weight) for row in entries if not row.given} == {
            (row.key, row.weight) for row in without
        }
    assert sorted(seen) == sorted([*given.values()] * 2)
    values, metrics = mathematics.values(Batch(1, tuple(groups)), {})
    assert (values, metrics.pop("rollout/demonstrations")) == (plain.values(batch, {})[0], 3 / 4)
    assert metrics == plain.values(batch, {})[1]
    ignored = plain.plans(Batch(1, tuple(groups)))
    assert not any(row.given for plan in ignored for row in plan.rows.values())
    by_model = {"frozen": {"big": {"path": "b"}}, "algorithm": {"sft_model": "big"}}
    by_model["algorithm"] |= {"sft_loss_coef": 0.5}
    values = settings.model_dump(mode="json") | {"frozen": by_model["frozen"]}
    values["algorithm"] |= by_model["algorithm"]
    with pytest.raises(ValueError, match=r"step 1: 1 groups have no response of big: they were"):
        RowMath(Config.model_validate(values), WEIGHTS).plans(Batch(1, tuple(groups)))


def demonstrated(length: int) -> RowMeta:
    return RowMeta("demonstration", length, {}, None, "stop", ((0, length),))


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_row_is_owned_by_one_rank_over_epochs_of_minibatches(ranks: int) -> None:
    """Minibatches of another epoch have other normalisers, so a row has another weight there."""
    plans = RowMath(config(ranks=ranks, epochs=3, minibatch=2), WEIGHTS).plans(batch_of(1))
    everything = set(rows_of(batch_of(1)))
    owned = [key for plan in plans for key in plan.owned]
    assert sorted(owned) == sorted(everything)
    for plan in plans:
        weights: dict[RowKey, set[float]] = {}
        for update in plan.updates:
            for part in update:
                for entry in part:
                    weights.setdefault(entry.key, set()).add(entry.weight)
        assert list(plan.rows) == sorted(weights)
        assert all(entry.weight in weights[key] for key, entry in plan.rows.items())
    assert ranks > 1 or any(len(found) > 1 for found in weights.values())


# ---- episodes of several rows ----


def forked(batch: Batch) -> Batch:
    """The batch, in which every second episode with enough tokens has gone on from an earlier place
    once more: its tokens lie in two rows, the second behind a prompt of its own.
    """
    groups = []
    for group in batch.groups:
        rows, forks = [], []
        for number, meta in enumerate(group.rows):
            part = meta.length // 2 if number % 2 == 0 else 0
            sizes = [meta.length - part, part] if part else [meta.length]
            rows += [
                replace(meta, length=size, versions=((0, size),), context=3 * again, prompt=again)
                for again, size in enumerate(sizes)
            ]
            forks += [number] * len(sizes)
        lengths = (*group.prompt_lengths, 2)
        groups.append(replace(group, rows=tuple(rows), forks=tuple(forks), prompt_lengths=lengths))
    return Batch(batch.step, tuple(groups))


NORM = {"grpo": None, "reinforce_plus_plus_baseline": "group"}  # batch would change nothing


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus_baseline", "rloo", "remax"])
@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_an_episode_of_several_rows_counts_once(mode: str, estimator: str) -> None:
    settings = config(
        loss_agg_mode=mode,
        adv_estimator=estimator,
        reward_norm=NORM.get(estimator, "batch"),
        mask_truncated=True,
        overlong_buffer={"enable": True, "len": 4},
    )
    plain = batch_of(1, baseline=estimator == "remax")
    split, whole, forks = forked(plain), RowMath(settings, WEIGHTS), RowMath(settings, WEIGHTS)
    values, metrics = whole.values(plain, {})
    found, same = forks.values(split, {})
    assert same == pytest.approx(metrics, nan_ok=True)
    entries = rows_of_plans(whole.plans(plain))
    parts = rows_of_plans(forks.plans(split))
    seen = 0
    for group, old in zip(split.groups, plain.groups, strict=True):
        for places, place in zip(group.places, range(len(old.rows)), strict=True):
            if old.rows[place].role == "baseline":
                continue
            seen += len(places) > 1
            for part in places:
                key = group.group_id, part
                assert found[key] == values[group.group_id, place]
                entry, meta = parts[key], group.rows[part]
                assert entry.weight == entries[group.group_id, place].weight
                assert (entry.sampled, entry.length) == (meta.length, meta.length + meta.context)
                assert entry.prompt_length == group.prompt_lengths[meta.prompt]
            assert sum(parts[group.group_id, part].sampled for part in places) == (
                old.rows[place].length
            )
    assert seen >= 4


def rows_of_plans(plans: Sequence[RankPlan]) -> dict[RowKey, PlanRow]:
    return {
        row.key: row for plan in plans for update in plan.updates for part in update for row in part
    }


def test_the_token_kl_of_an_episode_is_that_of_its_rows() -> None:
    settings = config(add_token_level_kl=True, kl_ctrl={"kl_coef": 0.7})
    batch, split = batch_of(1), forked(batch_of(1))
    kl = kl_of(batch)
    shares = {}
    for group, old in zip(split.groups, batch.groups, strict=True):
        for places, place in zip(group.places, range(len(old.rows)), strict=True):
            for part in places:
                shares[group.group_id, part] = kl[group.group_id, place] / len(places)
    values, metrics = RowMath(settings, WEIGHTS).values(batch, kl)
    found, same = RowMath(settings, WEIGHTS).values(split, shares)
    assert same == pytest.approx(metrics)
    for group in split.groups:
        for number, places in enumerate(group.places):
            for part in places:
                wanted = values[group.group_id, number].value
                assert found[group.group_id, part].value == pytest.approx(wanted)


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_turn_grpo_is_the_return_of_a_turn_minus_the_mean_of_the_trajectories(
    divide: bool, gamma: float
) -> None:
    """Against a loop over episodes of 1 to 4 turns; rows that forked pass on what comes later."""
    settings = config(
        adv_estimator="turn_grpo",
        norm_adv_by_std_in_grpo=divide,
        gamma=gamma,
        overlong_buffer={"enable": True, "len": 4},
    )
    batch = forked(batch_of(1))
    dice = random.Random(gamma)
    groups = [
        replace(
            group,
            rows=tuple(
                replace(
                    row,
                    turns=(turns := dice.randint(1, 4)),
                    turn_rewards=tuple(dice.choice([0.0, 0.5, -1.0]) for _ in range(turns)),
                )
                for row in group.rows
            ),
        )
        for group in batch.groups
    ]
    batch, math_ = Batch(batch.step, tuple(groups)), RowMath(settings, WEIGHTS)
    values, _ = math_.values(batch, {})
    shaping_ = shaping(settings, WEIGHTS)
    for group in groups:
        episodes = [[group.rows[place] for place in places] for places in group.places]
        totals = [
            shaping_.shape(rows[0].rewards, sum(row.length for row in rows)) for rows in episodes
        ]
        base, scale = mean(totals), 1 / (std(totals) + 1e-6) if divide else 1.0
        for rows, total, places in zip(episodes, totals, group.places, strict=True):
            rewards = [reward for row in rows for reward in row.turn_rewards]
            rewards[-1] += total - sum(rewards)
            wanted = [
                scale * (sum(gamma ** (s - t) * rewards[s] for s in range(t, len(rewards))) - base)
                for t in range(len(rewards))
            ]
            found = []
            for place in places:
                value = values[group.group_id, place]
                own = value.turns
                found += [
                    sum(gamma ** (s - t) * own[s] for s in range(t, len(own))) - value.baseline
                    for t in range(len(own))
                ]
            assert found == pytest.approx(
                wanted if max(totals) > min(totals) else [0.0] * len(wanted)
            )


def test_turn_grpo_of_plain_responses_is_grpo() -> None:
    batch = batch_of(1)
    found, _ = RowMath(config(adv_estimator="turn_grpo"), WEIGHTS).values(batch, {})
    wanted, _ = RowMath(config(), WEIGHTS).values(batch, {})
    assert {key: sum(value.turns) - value.baseline for key, value in found.items()} == (
        pytest.approx({key: value.value for key, value in wanted.items()})
    )


def test_what_is_seen_of_episodes() -> None:
    """Nothing of a batch of plain responses."""
    batch = batch_of(1)
    _, metrics = RowMath(config(), WEIGHTS).values(batch, {})
    names = ("rollout/turns", "rollout/sampled_share", "rollout/ended")
    assert not [name for name in metrics if name.startswith(names)]
    groups = [
        replace(
            group,
            rows=tuple(
                replace(
                    row,
                    context=3 * place,
                    turns=1 + place,
                    turn_rewards=(0.0,) * (1 + place),
                    finish_reason="env_done" if place else "max_turns",
                )
                for place, row in enumerate(group.rows)
            ),
        )
        for group in batch.groups
    ]
    _, metrics = RowMath(config(), WEIGHTS).values(Batch(1, tuple(groups)), {})
    rows = [row for group in groups for row in group.rows]
    sampled = sum(row.length for row in rows)
    assert metrics["rollout/turns"] == 2.0 and metrics["rollout/turns_max"] == 3.0
    assert metrics["rollout/sampled_share"] == sampled / (sampled + 9 * GROUPS)
    assert metrics["rollout/ended/env_done"] == pytest.approx(2 / 3)
    assert metrics["rollout/ended/max_turns"] == metrics["rollout/truncated"]


@pytest.mark.parametrize(("lengths", "speed"), [((4, 41), 20.0), ((4, 16), None)])
def test_the_speed_of_a_response_is_that_of_groups_long_enough_to_tell(
    lengths: tuple[int, int], speed: float | None
) -> None:
    """The first token of a short response may be known only with its last one."""
    groups = [
        SimpleNamespace(
            times={"queued": 0.0, "first_token": 1.0, "done": done, "scored": done + 0.5},
            episodes_sampled=[SimpleNamespace(length=length), SimpleNamespace(length=1)],
        )
        for length, done in zip(lengths, (1.001, 3.0), strict=True)
    ]
    found = durations(SimpleNamespace(groups=groups))
    assert found.get("rollout/tokens_per_s_per_response") == speed
    assert found["rollout/longest_group_s"] == 3.5
    assert found["rollout/first_token_s"] == 1.0
    assert found["rollout/verify_s"] == pytest.approx(0.5)
