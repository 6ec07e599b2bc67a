"""Reward normalisation against slow loops written from its formula."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from async_grpo.algo.reward_norm import RunningMoments, normalize_rewards
from tests.support.algo_case import F64, close, fast, seeds

NORMS = [None, "group", "batch", "running"]
rows = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 1.0, -2.0, 4096.25]), st.integers(-1, 2), st.booleans()),
    min_size=1,
    max_size=14,
)


def slow(
    rewards: list[float],
    groups: list[int],
    counted: list[bool],
    norm: str | None,
    shift: bool,
    scale: bool,
    past: list[float],
) -> Tensor:
    if norm is None and not shift and not scale:
        return torch.tensor(rewards, dtype=F64)
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [
            r
            for r, g, c in zip(rewards, groups, counted, strict=True)
            if c and (norm != "group" or g == group)
        ]
        members = members + past if norm == "running" else members
        value = reward
        if members and (shift or not scale):
            value -= math.fsum(members) / len(members)
        if len(members) > 1 and max(members) - min(members) > 1e-6 and (scale or not shift):
            value /= statistics.stdev(members) + 1e-6
        out.append(value)
    return torch.tensor(out, dtype=F64)


@pytest.mark.parametrize("norm", NORMS)
@given(
    rows=rows,
    shift=st.booleans(),
    scale=st.booleans(),
    past=st.lists(st.sampled_from([0.1, 3.0, 4096.0])),
    seed=seeds,
)
@fast
def test_every_mode_is_its_formula_in_any_row_order(
    norm: Any,
    rows: list[tuple[float, int, bool]],
    shift: bool,
    scale: bool,
    past: list[float],
    seed: int,
) -> None:
    rewards, groups, counted = (list(column) for column in zip(*rows, strict=True))
    r, g, c = torch.tensor(rewards, dtype=F64), torch.tensor(groups), torch.tensor(counted)

    def normalized(order: Tensor, dtype: torch.dtype = F64) -> Tensor:
        running = RunningMoments()
        running.update(torch.tensor(past, dtype=F64))
        out = normalize_rewards(
            r[order].to(dtype),
            g[order],
            reward_norm=norm,
            reward_shift=shift,
            reward_scale=scale,
            counted=c[order],
            running=running,
        )
        assert running.count == len(past) + (sum(counted) if norm == "running" else 0)
        return out

    value = normalized(torch.arange(len(rows)))
    close(value, slow(rewards, groups, counted, norm, shift, scale, past), rtol=1e-8, atol=1e-8)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    close(normalized(order), value[order], rtol=1e-8, atol=1e-8)
    assert normalized(order, torch.float32).dtype == torch.float32


@given(
    rows=rows,
    mean=st.sampled_from(["none", "group", "batch", "running"]),
    std=st.sampled_from(["none", "group", "batch", "running"]),
    past=st.lists(st.sampled_from([0.1, 3.0, 4096.0])),
)
@fast
def test_mean_and_deviation_are_those_that_are_named(
    rows: list[tuple[float, int, bool]], mean: str, std: str, past: list[float]
) -> None:
    """Against a loop over rows."""
    rewards, groups, counted = (list(column) for column in zip(*rows, strict=True))
    wanted = []
    for reward, group in zip(rewards, groups, strict=True):
        members: dict[str, list[float]] = {"none": []}
        for level in ("group", "batch", "running"):
            members[level] = past * (level == "running") + [
                r
                for r, g, c in zip(rewards, groups, counted, strict=True)
                if c and (level != "group" or g == group)
            ]
        value = reward - (math.fsum(members[mean]) / len(members[mean]) if members[mean] else 0.0)
        of = members[std]
        spread = len(of) > 1 and max(of) - min(of) > 1e-6
        wanted.append(value / (statistics.stdev(of) + 1e-6) if spread else value)
    running = RunningMoments()
    running.update(torch.tensor(past, dtype=F64))
    got = normalize_rewards(
        torch.tensor(rewards, dtype=F64),
        torch.tensor(groups),
        reward_norm={"mean": mean, "std": std},
        counted=torch.tensor(counted),
        running=running,
    )
    close(got, torch.tensor(wanted, dtype=F64), rtol=1e-8, atol=1e-8)
    assert running.count == len(past) + sum(counted) * ("running" in (mean, std)), "once"


@given(batches=st.lists(st.lists(st.floats(-1e4, 1e4), max_size=6), max_size=6))
@fast
def test_running_moments_are_those_of_all_values_in_any_split(batches: list[list[float]]) -> None:
    moments, everything = RunningMoments(), [value for batch in batches for value in batch]
    for batch in batches:
        moments.update(torch.tensor(batch, dtype=F64))
        moments = RunningMoments.from_dict(json.loads(json.dumps(moments.to_dict())))
    assert moments.count == len(everything)
    if everything:
        assert math.isclose(
            moments.mean, math.fsum(everything) / len(everything), rel_tol=1e-9, abs_tol=1e-9
        )
    want = statistics.stdev(everything) if len(everything) > 1 else 0.0
    assert math.isclose(moments.std, want, rel_tol=1e-8, abs_tol=1e-8)


def test_moments_near_a_large_mean_keep_their_digits() -> None:
    moments, values = RunningMoments(), torch.tensor([0.0, 1.0, 2.0], dtype=F64)
    for _ in range(1000):
        moments.update(1e9 + values)
    assert (
        abs(moments.mean - 1e9 - 1) < 1e-5
        and abs(moments.std - math.sqrt(2 / 3 * 3000 / 2999)) < 1e-6
    )
    rewards = torch.tensor([4096.0, 4096.25, 4096.5])
    value = normalize_rewards(
        rewards,
        torch.zeros(3, dtype=torch.int64),
        reward_norm="batch",
        reward_shift=False,
        reward_scale=False,
    )
    close(value, torch.tensor([-1.0, 0.0, 1.0]), atol=1e-5)


@pytest.mark.parametrize("norm", ["group", "batch", "running"])
@pytest.mark.parametrize(
    "rewards", [[0.1, 0.1, 0.1], [4096.0, 4096.0, 4096.0], [0.3, 0.3 + 4e-7, 0.3 - 4e-7], [7.0]]
)
def test_equal_rewards_become_exactly_zero_and_are_never_divided(
    norm: Any, rewards: list[float]
) -> None:
    r, g = torch.tensor(rewards, dtype=F64), torch.zeros(len(rewards), dtype=torch.int64)
    for shift in (True, False):
        value = normalize_rewards(
            r, g, reward_norm=norm, reward_shift=shift, reward_scale=shift, running=RunningMoments()
        )
        assert value.tolist() == [0.0] * len(rewards)
    assert torch.equal(
        normalize_rewards(
            r, g, reward_norm=norm, reward_shift=False, reward_scale=True, running=RunningMoments()
        ),
        r,
    )


def test_a_baseline_uses_the_statistics_of_its_group_and_enters_none() -> None:
    rewards = torch.tensor([0.0, 1.0, 2.0, 50.0, 3.0, 4.0, 3.0], dtype=F64)
    groups, counted = (
        torch.tensor([0, 0, 0, 0, 1, 1, 2]),
        torch.tensor([True, True, True, False, True, False, False]),
    )
    value = normalize_rewards(
        rewards,
        groups,
        reward_norm="group",
        reward_shift=False,
        reward_scale=False,
        counted=counted,
    )
    close(value, torch.tensor([-1.0, 0.0, 1.0, 49.0, 0.0, 1.0, 3.0], dtype=F64), atol=1e-4)
    moments = RunningMoments()
    normalize_rewards(
        rewards,
        groups,
        reward_norm="running",
        reward_shift=True,
        reward_scale=False,
        counted=counted,
        running=moments,
    )
    assert moments.to_dict() == {"count": 4, "mean": 1.5, "m2": 5.0}


def test_running_statistics_include_the_batch_that_they_normalise() -> None:
    moments, group = RunningMoments(), torch.zeros(2, dtype=torch.int64)
    options: dict[str, Any] = {
        "reward_norm": "running",
        "reward_shift": True,
        "reward_scale": False,
        "running": moments,
    }
    assert normalize_rewards(torch.tensor([0.0, 2.0]), group, **options).tolist() == [-1, 1]
    assert normalize_rewards(torch.tensor([4.0, 6.0]), group, **options).tolist() == [1, 3]
    assert moments.count == 4 and moments.mean == 3.0


def test_refusals_and_empty_batches() -> None:
    one = torch.zeros(1, dtype=torch.int64)
    for rewards, groups, options, message in (
        (
            torch.ones(1),
            one,
            {"reward_norm": "groups"},
            "reward_norm is 'groups'; choose group, batch, running or null",
        ),
        (torch.ones(1), one, {"reward_norm": "running"}, "running moments"),
        (torch.ones(1), one, {"reward_norm": {"std": "rows"}}, "reward_norm is 'rows'; choose"),
        (torch.ones(1), one, {"reward_norm": {"mode": "batch"}}, "mean and std alone"),
        (torch.ones(2), one, {"reward_norm": "batch"}, r"must all be \[B\]"),
        (
            torch.ones(1),
            one,
            {"reward_norm": "batch", "counted": torch.ones(2)},
            r"must all be \[B\]",
        ),
        (torch.tensor([math.inf]), one, {"reward_norm": None}, "not finite"),
    ):
        given: dict[str, Any] = {"reward_shift": False, "reward_scale": False, **options}
        with pytest.raises(ValueError, match=message):
            normalize_rewards(rewards, groups, **given)
    moments = RunningMoments()
    with pytest.raises(ValueError, match="not finite"):
        moments.update(torch.tensor([1.0, math.nan]))
    for norm in NORMS:
        empty = normalize_rewards(
            torch.ones(0),
            one[:0],
            reward_norm=norm,
            reward_shift=True,
            reward_scale=True,
            running=moments,
        )  # type: ignore[arg-type]
        assert empty.shape == (0,)
    assert moments == RunningMoments()
