"""A normalisation of rewards is refused exactly where no advantage shows it: settings of every
estimator, judged by the advantages that driver and ranks compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from async_grpo.algo.catalog import ESTIMATORS
from async_grpo.config.schema import Config
from async_grpo.learner.rows import LearnerRow
from async_grpo.learner.token_math import TokenMath
from async_grpo.run.planning import RowMath
from async_grpo.wire.codec import Batch, GroupMeta, RowMeta
from tests.support.token_case import Alone, config_of

LEVELS = ("none", "group", "batch", "running")
NORMS: list[dict[str, Any]] = [
    *(
        {"reward_norm": norm, "reward_shift": shift, "reward_scale": scale}
        for norm, shift, scale in product(
            (None, "group", "batch", "running"), (False, True), (False, True)
        )
        if norm or shift or scale
    ),
    *(
        {"reward_norm": {"mean": mean, "std": std}}
        for mean, std in product(LEVELS, LEVELS)
        if (mean, std) != ("none", "none")
    ),
]
PARTNERS: dict[str, dict[str, Any]] = {
    "gpg": {"policy_loss": "gpg"},
    "asymre": {"policy_loss": "asymre"},
    "dr_grpo": {"loss_agg_mode": "seq-mean-token-sum-norm"},
}
BEHIND: list[dict[str, Any]] = [
    {},
    {"add_token_level_kl": True, "kl_ctrl": {"kl_coef": 0.3}},
    {"reward_clip_after": 2.0},
]
TIMES = dict.fromkeys(("queued", "first_token", "done", "scored"), 1.0)
PAST = {"count": 40, "mean": 0.2, "m2": 70.0}


def surroundings(estimator: str) -> Iterator[dict[str, Any]]:
    """The switches that could hide a normalisation, or bring it out."""
    traits = ESTIMATORS[estimator]
    divisors: list[dict[str, Any]] = [{}]
    if traits.divides:
        divisors.append({"norm_adv_by_std_in_grpo": False})
    if traits.std_levels:
        divisors += [{"adv_std_level": f"batch{level}"} for level in ("", "_centered", "_raw")]
    whitenings: list[dict[str, Any]] = [
        {},
        {"whiten_advantages": True},
        {"whiten_advantages": "keep_mean"},
        {"whiten_advantages": "keep_mean", "mask_truncated": True},
    ]
    discounts: list[dict[str, Any]] = [{}, {"gamma": 0.9}] if traits.returns else [{}]
    for parts in product(divisors, whitenings, discounts, BEHIND):
        settings = {"adv_estimator": estimator, **PARTNERS.get(estimator, {})}
        for part in parts:
            settings |= part
        if not refusals(settings):
            yield settings


def refusals(algorithm: dict[str, Any]) -> tuple[str, ...]:
    """What the rules say about these settings of `algorithm`."""
    try:
        Config.model_validate(
            {"run": {"total_steps": 3}, "model": {"path": "m"}, "algorithm": algorithm}
        )
    except ValidationError as error:
        return error.errors()[0]["ctx"]["error"].sentences  # type: ignore[no-any-return]
    return ()


def batch_of(*, baseline: bool) -> Batch:
    """Six groups of random rewards and lengths, one row cut off; a greedy response in each."""
    rng, groups = np.random.default_rng(0), []
    for group_id in range(6):
        rows = [
            RowMeta(
                role=role,
                length=length,
                context=0,
                rewards={"score": 0.5 * group_id + float(rng.uniform(0.2, 6.0))},
                verdict=None,
                finish_reason="length" if (group_id, length) == (1, 7) else "stop",
                versions=((0, length),),
            )
            for role, length in (("train", 7), ("train", 2), ("train", 4), ("baseline", 5))
            if role == "train" or baseline
        ]
        groups.append(GroupMeta(group_id, 0, 0, "a", (3,), tuple(rows), TIMES, 100))
    return Batch(1, tuple(groups))


def advantages(config: Config, batch: Batch) -> np.ndarray:
    """The advantages of all tokens, as driver and ranks compute them, with random token KLs."""
    rng, rows = np.random.default_rng(1), {}
    for group in batch.groups:
        for index, meta in enumerate(group.rows):
            if meta.role == "train":
                places, kl = np.arange(meta.length), rng.normal(0.2, 1.0, meta.length)
                rows[group.group_id, index] = LearnerRow(
                    places[:1], places, places, np.zeros(meta.length), 0 * places, kl=kl
                )
    math = RowMath(config, {"score": 1.0}, {"moments": PAST})
    sums = {key: float(row.kl.sum()) for key, row in rows.items() if row.kl is not None}
    coef = math.kl_coef
    values, _ = math.values(batch, sums if config.algorithm.add_token_level_kl else {})
    TokenMath(config, Alone()).assign(rows, owned=rows, values=values, kl_coef=coef)
    return np.concatenate([row.advantages for row in rows.values() if row.advantages is not None])


@pytest.mark.slow
@pytest.mark.parametrize("part", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("estimator", sorted(ESTIMATORS.built_in - {"turn_grpo"}))
def test_a_normalisation_is_refused_exactly_where_no_advantage_shows_it(
    estimator: str, part: int
) -> None:
    """part: in each surrounding one in so many normalisations is tried, in the next one others."""
    batch, counts = batch_of(baseline=ESTIMATORS[estimator].baseline), [0, 0]
    for number, settings in enumerate(surroundings(estimator)):
        plain = advantages(config_of(**settings), batch)
        for norm in NORMS[number % part :: part]:
            found = advantages(config_of(**settings, **norm), batch)
            shows = bool(np.abs(found - plain).max() > 1e-5)
            said = " ".join(refusals(settings | norm))
            wanted = "" if shows else "nothing: "
            if estimator == "maxrl" and shows and said:
                wanted = "divides by the group's mean reward"
            assert wanted in said and bool(wanted) == bool(said), (settings, norm, said)
            counts[shows] += 1
    assert min(counts) > (20 if part == 1 else 0)
