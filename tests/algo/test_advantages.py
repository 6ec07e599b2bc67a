"""Advantage estimators against slow loops written from their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from async_grpo.algo.advantages import (
    compute_advantages,
    discounted_returns,
    finish_advantages,
    place_rewards,
    row_advantages,
    token_advantages,
    trajectory_baselines,
    whiten,
)
from async_grpo.algo.catalog import ESTIMATORS
from async_grpo.algo.estimators import Asymre
from tests.support.algo_case import F64, close, fast, seeds

ROWS = sorted(name for name, estimator in ESTIMATORS.items() if not estimator.returns)
RETURNS = sorted(name for name, estimator in ESTIMATORS.items() if estimator.returns)


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: list[float]) -> float:
    return (
        math.sqrt(math.fsum((x - mean(values)) ** 2 for x in values) / (len(values) - 1))
        if len(values) > 1
        else 0.0
    )


def slow_row(
    name: str,
    i: int,
    rewards: list[float],
    groups: list[int],
    lengths: list[int],
    norm: bool,
    level: str,
) -> float:
    """The advantage of row i, from the table of formulas."""
    reward, members = rewards[i], [j for j in range(len(rewards)) if groups[j] == groups[i]]
    mine = [rewards[j] for j in members]

    def flat(group: int) -> bool:
        of_group = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        return max(of_group) - min(of_group) <= 1e-6

    if name == "raw":
        return reward
    if name == "asymre":
        return reward - (mean(mine) - 0.3)
    if flat(groups[i]):
        return 0.0
    if name in ("grpo", "grpo_vectorized"):
        divisor = std(mine)
        if level != "group":
            about = [0.0 if level == "batch_raw" else mean(rewards)] * len(rewards)
            if level == "batch_centered":
                pairs = list(zip(rewards, groups, strict=True))
                means = {h: mean([r for r, g in pairs if g == h]) for h in groups}
                about = [means[h] for h in groups]
            squares = [(r - centre) ** 2 for r, centre in zip(rewards, about, strict=True)]
            divisor = math.sqrt(math.fsum(squares) / (len(rewards) - 1))
        return (reward - mean(mine)) / (divisor + 1e-6 if norm else 1.0)
    if name in ("dr_grpo", "reinforce_plus_plus_baseline"):
        return reward - mean(mine)
    if name == "grpo_passk":
        first, second = sorted(mine, reverse=True)[:2]
        return (first - second) / (std(mine) + 1e-6 if norm else 1.0) if reward == first else 0.0
    if name == "rloo":
        return reward - mean([rewards[j] for j in members if j != i])
    if name == "opo":
        # In fractions: where one row alone has tokens the difference is 0, and whitening would
        # magnify what a product and a quotient in floating point lose.
        total = sum(lengths[j] for j in members)
        weighted = sum(lengths[j] * Fraction(rewards[j]) for j in members)
        return float(Fraction(reward) - weighted / total) if total else reward - mean(mine)
    if name == "gpg":
        return len(rewards) / sum(not flat(group) for group in groups) * (reward - mean(mine)) / 2.0
    assert name == "maxrl"
    return (reward - mean(mine)) / mean(mine) if mean(mine) > 0 else 0.0


def slow_rows(
    name: str,
    rewards: list[float],
    groups: list[int],
    lengths: list[int],
    norm: bool = True,
    level: str = "group",
) -> Tensor:
    rows = [slow_row(name, i, rewards, groups, lengths, norm, level) for i in range(len(rewards))]
    return torch.tensor(rows, dtype=F64)


def slow_returns(rewards: list[float], mask: list[int], gamma: float) -> list[float]:
    return [
        sum(gamma ** sum(mask[t:s]) * rewards[s] for s in range(t, len(mask)) if mask[s])
        if mask[t]
        else 0.0
        for t in range(len(mask))
    ]


def slow_whiten(values: Tensor, mask: Tensor, how: bool | str = True) -> Tensor:
    """In fractions: what a mean in floating point loses would be magnified where all are equal."""
    valid = [Fraction(value) for value in values[mask != 0].tolist()]
    out = torch.zeros(values.shape, dtype=F64)
    if len(valid) > 1:
        centre = sum(valid) / len(valid)
        squares = sum((value - centre) ** 2 for value in valid) / (len(valid) - 1)
        kept = float(centre) if how == "keep_mean" else 0.0
        whitened = [float(value - centre) / (math.sqrt(squares) + 1e-6) + kept for value in valid]
        out[mask != 0] = torch.tensor(whitened, dtype=F64)
    elif how == "keep_mean":
        out = torch.where(mask != 0, values.double(), 0)
    return out.to(values.dtype)


rows_with_groups = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 1.0, 2.0, -2.0, 4096.25]), st.integers(-2, 3), st.integers(0, 4)
    ),
    min_size=1,
    max_size=20,
)


@pytest.mark.parametrize(
    ("name", "level", "norm"),
    [
        *((name, "group", True) for name in ROWS),
        ("grpo", "batch", True),
        ("grpo", "batch_centered", True),
        ("grpo", "batch_raw", True),
        ("grpo_vectorized", "batch", True),
        *((name, "group", False) for name in ("grpo", "grpo_vectorized", "grpo_passk")),
    ],
)
@given(rows=rows_with_groups, seed=seeds)
@fast
def test_every_row_estimator_is_its_formula_in_any_row_order(
    name: str, level: Any, norm: bool, rows: list[tuple[float, int, int]], seed: int
) -> None:
    rewards, groups, lengths = (list(column) for column in zip(*rows, strict=True))
    r, g, n = torch.tensor(rewards, dtype=F64), torch.tensor(groups), torch.tensor(lengths)

    def advantages(order: Tensor, dtype: torch.dtype = F64) -> Tensor:
        return row_advantages(
            name,
            r[order].to(dtype),
            g[order],
            lengths=n[order],
            norm_adv_by_std_in_grpo=norm,
            adv_std_level=level,
            options=Asymre(-0.3) if name == "asymre" else None,
            f_norm=2.0,
        )

    value, same = advantages(torch.arange(len(rows))), torch.arange(len(rows))
    close(value, slow_rows(name, rewards, groups, lengths, norm, level), rtol=1e-9, atol=1e-9)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    close(advantages(order), value[order], rtol=1e-9, atol=1e-9)
    close(advantages(same, torch.float32), value.float())


def test_worked_examples() -> None:
    """Numbers computed by hand: groups 1 0 0 0 and 1 1 1 and one row."""
    rewards, groups = (
        torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 5], dtype=F64),
        torch.tensor([7, 7, 7, 7, 2, 2, 2, 9]),
    )
    lengths, zeros = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), [0.0] * 4
    for name, wanted in {
        "grpo": [1.5, -0.5, -0.5, -0.5],
        "dr_grpo": [0.75, -0.25, -0.25, -0.25],
        "grpo_passk": [2.0, 0, 0, 0],
        "rloo": [1, -1 / 3, -1 / 3, -1 / 3],
        "opo": [0.9, -0.1, -0.1, -0.1],
        "gpg": [1.5, -0.5, -0.5, -0.5],
        "maxrl": [3.0, -1, -1, -1],
    }.items():
        close(
            row_advantages(name, rewards, groups, lengths=lengths),
            torch.tensor(wanted + zeros, dtype=F64),
            atol=1e-5,
        )
    asymre = row_advantages("asymre", rewards, groups)
    close(asymre, torch.tensor([0.85, -0.15, -0.15, -0.15, 0.1, 0.1, 0.1, 0.1], dtype=F64))
    assert torch.equal(row_advantages("raw", rewards, groups), rewards)
    value = row_advantages(
        "grpo", torch.tensor([2.8, 2.8, 2.0, 0.8]), torch.zeros(4, dtype=torch.int64)
    )
    assert [round(x, 2) for x in value.tolist()] == [0.74, 0.74, -0.11, -1.38]


@pytest.mark.parametrize("name", ROWS)
def test_large_means_and_equal_groups(name: str) -> None:
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 2, 3, 3])
    rewards = torch.tensor(
        [4096.0, 4096.5, 4097.0, 0.1, 0.1, 0.1, 4096.0, 1.0, 1.0 + 9e-7], dtype=F64
    )
    lengths = torch.tensor([2, 2, 2, 1, 2, 3, 4, 5, 0])
    value = row_advantages(name, rewards, groups, lengths=lengths)
    assert value.isfinite().all() and value.dtype == F64
    if ESTIMATORS[name].compares:
        assert value[3:].tolist() == [0.0] * 6, (
            "equal rewards have advantage 0, not a rounding error over epsilon"
        )
        assert abs(float(value[1])) < 1e-9 and float(value[2]) > 0
    if name == "grpo":
        close(value[:3], torch.tensor([-1.0, 0.0, 1.0], dtype=F64), rtol=0, atol=1e-5)
        just_apart = row_advantages(
            name, torch.tensor([0.0, 2e-6], dtype=F64), torch.tensor([0, 0])
        )
        assert just_apart[0] == -just_apart[1] < -0.4
    if ESTIMATORS[name].compares:
        assert not row_advantages(
            name, torch.ones(3), torch.tensor([0, 1, 1]), lengths=torch.ones(3)
        ).any()


@pytest.mark.parametrize("norm", [True, False])
def test_turns_have_their_return_less_the_mean_of_the_groups_trajectories(norm: bool) -> None:
    """Two episodes of one group (rewards 1 then 0, and 0 then 3), two of equal rewards, one alone;
    a place without reward belongs to the turn that ends behind it.
    """
    rewards = torch.tensor([[0.0, 1, 0], [0, 0, 3], [1, 0, 0], [0, 1, 0], [5, 5, 5]], dtype=F64)
    groups, scale = torch.tensor([0, 0, 1, 1, 2]), 1 / (math.sqrt(2) + 1e-6) if norm else 1.0

    def of(rewards: Tensor) -> tuple[Tensor, Tensor]:
        baselines, scales = trajectory_baselines(
            rewards.sum(-1), groups, norm_adv_by_std_in_grpo=norm
        )
        return compute_advantages(
            "turn_grpo",
            rewards * scales.unsqueeze(-1),
            torch.ones(rewards.shape),
            groups,
            reward_baselines=baselines * scales,
        )

    value, returns = of(rewards)
    wanted = torch.tensor([[-1.0, -1, -2], [1, 1, 1], [0] * 3, [0] * 3, [0] * 3], dtype=F64)
    close(value, scale * wanted)
    close(returns[:2], scale * torch.tensor([[1.0, 1, 0], [3, 3, 3]], dtype=F64))
    plain = row_advantages("grpo", rewards[:, -1], groups, norm_adv_by_std_in_grpo=norm)
    close(of(rewards[:, -1:])[0][:, 0], plain)


def test_passk_has_one_winner_or_none() -> None:
    rewards, groups = (
        torch.tensor([3.0, 1.0, 3.0, 2.0, 5.0, -1.0, 4.0], dtype=F64),
        torch.tensor([0, 0, 0, 1, 1, 1, 1]),
    )
    value = row_advantages("grpo_passk", rewards, groups, norm_adv_by_std_in_grpo=False)
    assert value.tolist() == [0, 0, 0, 0, 1, 0, 0]


def test_maxrl_where_its_mean_is_nothing() -> None:
    for rewards in ([0.1, 0.2, -0.3], [-1.0, 0.0, -2.0], [1.0, -1.0, 0.0]):
        assert not row_advantages(
            "maxrl", torch.tensor(rewards, dtype=F64), torch.zeros(3, dtype=torch.int64)
        ).any()
    small = row_advantages(
        "maxrl", torch.tensor([0.0, 0.0, 3e-6], dtype=F64), torch.zeros(3, dtype=torch.int64)
    )
    close(small, torch.tensor([-1.0, -1.0, 2.0], dtype=F64))


def test_rows_refuse_what_they_cannot_define() -> None:
    one, two = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for message, call in {
        "gropo.*grpo": lambda: row_advantages("gropo", torch.ones(1), one),
        "finite": lambda: row_advantages("grpo", torch.tensor([math.nan]), one),
        r"\[B\]": lambda: row_advantages("grpo", torch.ones(2), one),
        "returns per token.*compute_advantages": lambda: row_advantages(
            "remax", torch.ones(1), one
        ),
        "'opo'.*lengths": lambda: row_advantages("opo", torch.ones(2), two),
        r"lengths \(1,\)": lambda: row_advantages("opo", torch.ones(2), two, lengths=torch.ones(1)),
        "adv_std_level is 'token'; choose group or batch or batch_centered": lambda: row_advantages(
            "grpo", torch.ones(2), two, adv_std_level="token"
        ),  # type: ignore[arg-type]
        "adv_std_level batch.*grpo": lambda: row_advantages(
            "rloo", torch.ones(2), two, adv_std_level="batch"
        ),
        "adv_std_level batch.*norm_adv": lambda: row_advantages(
            "grpo", torch.ones(2), two, adv_std_level="batch", norm_adv_by_std_in_grpo=False
        ),
        "f_norm is 0": lambda: row_advantages("gpg", torch.ones(2), two, f_norm=0.0),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_tokens_refuse_what_they_cannot_define() -> None:
    ones, one = torch.ones(1, 2), torch.zeros(1, dtype=torch.int64)
    baseline = torch.ones(1)
    calls: dict[str, Callable[[], object]] = {
        "gamma is 0.5.*'grpo'": lambda: compute_advantages("grpo", ones, ones, one, gamma=0.5),
        "'grpo' has no use for reward_baselines": lambda: compute_advantages(
            "grpo", ones, ones, one, reward_baselines=baseline
        ),
        "'remax' needs reward_baselines": lambda: compute_advantages("remax", ones, ones, one),
        "'reinforce_plus_plus' has no use": lambda: token_advantages(
            "reinforce_plus_plus", ones, ones, reward_baselines=baseline
        ),
        r"reward_baselines \(2,\)": lambda: token_advantages(
            "remax", ones, ones, reward_baselines=torch.ones(2)
        ),
        "baseline's reward is not finite": lambda: token_advantages(
            "remax", ones, ones, reward_baselines=baseline * math.nan
        ),
        "token reward is not finite": lambda: token_advantages(
            "reinforce_plus_plus", ones * math.inf, ones
        ),
        "'rloo'.*row_advantages": lambda: token_advantages("rloo", ones, ones),
        "gamma is 1.5": lambda: token_advantages("reinforce_plus_plus", ones, ones, gamma=1.5),
        r"must both be \[B, T\]": lambda: compute_advantages("grpo", ones, torch.ones(1, 3), one),
        "advantage_clip is 0": lambda: compute_advantages(
            "grpo", ones, ones, one, advantage_clip=0.0
        ),
        r"weights \(3,\)": lambda: whiten(torch.ones(2), torch.ones(3)),
        r"counted \(1,\)": lambda: whiten(torch.ones(2), torch.ones(2), counted=torch.ones(1)),
        r"kl \(1, 3\)": lambda: place_rewards(baseline, ones, kl=torch.ones(1, 3), kl_coef=0.1),
        r"rewards \(2,\)": lambda: place_rewards(torch.ones(2), ones),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()


def sample(seed: int, rows: int = 6, width: int = 7) -> dict[str, Tensor]:
    """Rewards per token, masks with holes and empty rows, groups and baselines."""
    random = torch.Generator().manual_seed(seed)
    return {
        "rewards": torch.randn(rows, width, generator=random, dtype=F64)
        + (4096 if seed % 3 == 0 else 0),
        "mask": torch.randint(0, 4, (rows, width), generator=random).clamp(max=1)
        * torch.randint(0, 5, (rows, 1), generator=random).clamp(max=1),
        "groups": torch.randint(0, 3, (rows,), generator=random),
        "baselines": torch.randn(rows, generator=random, dtype=F64),
    }


@pytest.mark.parametrize("name", [*ROWS, *RETURNS])
@given(
    seed=seeds,
    white=st.sampled_from([False, True, "shift", "keep_mean"]),
    clip=st.sampled_from([None, 0.7]),
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
)
@fast
def test_compute_advantages_is_the_formula_whatever_the_padding(
    name: str, seed: int, white: bool | str, clip: float | None, gamma: float
) -> None:
    case, spec = sample(seed), ESTIMATORS[name]
    rewards, mask, gamma = case["rewards"], case["mask"], gamma if spec.returns else 1.0
    if spec.returns:
        before = torch.tensor(
            [
                slow_returns(r, m, gamma)
                for r, m in zip(rewards.tolist(), mask.tolist(), strict=True)
            ],
            dtype=F64,
        )
        based = spec.baseline or spec.turns
        baselines = case["baselines"] if based else torch.zeros(len(rewards), dtype=F64)
        values = torch.where(mask != 0, before - baselines.unsqueeze(-1), 0)
    else:
        totals = torch.where(mask != 0, rewards, 0).sum(-1).tolist()
        rows = slow_rows(name, totals, case["groups"].tolist(), mask.sum(-1).tolist())
        if name == "asymre":
            rows = rows - 0.2  # the loop's shift is -0.3, the default -0.1
        elif name == "gpg":
            rows = rows * 2  # the loop's f_norm
        before = values = torch.where(mask != 0, rows.unsqueeze(-1), 0)
    values = slow_whiten(values, mask, white) if white or spec.whitens else values
    values = values if clip is None else values.clamp(-clip, clip)
    options: dict[str, Any] = {
        "gamma": gamma,
        "reward_baselines": case["baselines"] if spec.baseline or spec.turns else None,
        "whiten_advantages": white,
        "advantage_clip": clip,
    }
    advantages, returns = compute_advantages(name, rewards, mask, case["groups"], **options)
    close(returns, before, rtol=1e-7, atol=1e-8)
    close(advantages, values, rtol=1e-6, atol=1e-6)
    junk = torch.full((6, 2), math.nan, dtype=F64)
    dirty = torch.cat([torch.where(mask != 0, rewards, math.inf), junk], -1)
    padded = compute_advantages(
        name, dirty, torch.cat([mask, torch.zeros_like(mask[:, :2])], -1), case["groups"], **options
    )
    for wide, narrow in zip(padded, (advantages, returns), strict=True):
        close(
            wide, torch.cat([narrow, torch.zeros(6, 2, dtype=F64)], -1), rtol=1e-9, atol=1e-9
        )  # sums of other widths round differently


@pytest.mark.parametrize("name", [*ROWS, *RETURNS])
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0), (2, 3)])
def test_nothing_valid_gives_zeros(name: str, shape: tuple[int, int]) -> None:
    groups = torch.zeros(shape[0], dtype=torch.int64)
    based = ESTIMATORS[name].baseline or ESTIMATORS[name].turns
    baselines = torch.ones(shape[0]) if based else None
    for pair in (True, False):
        out = compute_advantages(
            name,
            torch.full(shape, math.nan),
            torch.zeros(shape),
            groups,
            reward_baselines=baselines,
            whiten_advantages=pair,
            advantage_clip=1.0,
        )
        assert all(
            tensor.shape == shape and tensor.dtype == torch.float32 and not tensor.any()
            for tensor in out
        )


def test_returns_carry_across_holes_and_count_valid_tokens() -> None:
    mask = torch.tensor([[1, 0, 0, 1, 1, 0]])
    rewards = torch.tensor([[0.5, 9.0, math.nan, 0.0, 2.0, 7.0]], dtype=F64)
    close(
        discounted_returns(rewards, mask, 0.5),
        torch.tensor([[0.5 + 2 / 4, 0, 0, 1.0, 2.0, 0]], dtype=F64),
    )
    close(
        discounted_returns(rewards, mask, 1.0), torch.tensor([[2.5, 0, 0, 2.0, 2.0, 0]], dtype=F64)
    )


def test_rewards_stand_on_the_last_valid_token() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0], [1, 0, 0]])
    rewards, kl = (
        torch.tensor([1.0, 2.0, 3.0, 4.0]),
        torch.full((4, 3), 0.5).masked_fill(mask == 0, math.nan),
    )
    assert place_rewards(rewards, mask).tolist() == [[0, 1, 0], [0, 0, 2], [0, 0, 0], [4, 0, 0]]
    with_kl = place_rewards(rewards, mask, kl=kl, kl_coef=0.5)
    assert (
        with_kl.tolist() == [[-0.25, 0.75, 0], [-0.25, 0, 1.75], [0, 0, 0], [3.75, 0, 0]]
        and with_kl.dtype == torch.float32
    )
    assert place_rewards(torch.ones(0), torch.ones(0, 3)).shape == (0, 3) and place_rewards(
        torch.ones(2), torch.ones(2, 0)
    ).shape == (2, 0)


@given(seed=seeds)
@fast
def test_whitening_rows_by_token_counts_is_whitening_their_tokens(seed: int) -> None:
    case = sample(seed)
    rows, mask = case["baselines"] + 4096, case["mask"]
    expanded = whiten(torch.where(mask != 0, rows.unsqueeze(-1), math.nan), mask)
    close(expanded, slow_whiten(rows.unsqueeze(-1).expand_as(mask), mask), rtol=1e-7, atol=1e-7)
    close(
        torch.where(mask != 0, whiten(rows, mask.sum(-1)).unsqueeze(-1), 0),
        expanded,
        rtol=1e-9,
        atol=1e-9,
    )


def test_whitening_is_centred_and_survives_little() -> None:
    values = torch.tensor([1e8, 1e8 + 1, 1e8 + 2], dtype=F64)
    close(whiten(values, torch.ones(3)), torch.tensor([-1.0, 0.0, 1.0], dtype=F64), atol=2e-6)
    assert whiten(values, torch.tensor([0, 1, 0])).tolist() == [0, 0, 0]
    assert whiten(values, torch.ones(3), counted=torch.tensor([0, 1, 0])).tolist() == [0, 0, 0], (
        "one value has no deviation to divide by"
    )
    assert whiten(torch.full((4,), 4096.0), torch.tensor([1, 1, 0, 1])).tolist() == [0, 0, 0, 0]
    equal = whiten(torch.full((3,), 4096.7, dtype=F64), torch.full((3,), 11))
    assert equal.abs().max() < 1e-12, "their mean is not quite 4096.7"
    assert whiten(torch.ones(0, 5), torch.ones(0, 5)).shape == (0, 5)
    close(
        finish_advantages(values, torch.ones(3), whiten_advantages=True, advantage_clip=0.5),
        torch.tensor([-0.5, 0, 0.5], dtype=F64),
    )
    assert (
        finish_advantages(values, torch.ones(3), whiten_advantages=False, advantage_clip=None)
        is values
    )
    kept = whiten(values, torch.ones(3), keep_mean=True)
    close(kept - 1e8, torch.tensor([0.0, 1.0, 2.0], dtype=F64), atol=2e-6)
    assert whiten(values, torch.tensor([0, 1, 0]), keep_mean=True).tolist() == [0, 1e8 + 1, 0]
    with pytest.raises(ValueError, match="'mean'; choose true, false, shift or keep_mean"):
        finish_advantages(values, torch.ones(3), whiten_advantages="mean", advantage_clip=None)


class Ranks:
    """Collectives of several ranks in one process: records each rank's tensors, replays the sums in
    a second pass.
    """

    def __init__(self, ranks: int) -> None:
        self.calls: list[list[Tensor]] = [[] for _ in range(ranks)]

    def run(self, work: Callable[[int, Callable[[Tensor], Tensor]], Tensor]) -> list[Tensor]:
        totals: list[Tensor] = []
        while True:  # the k-th round knows the sums of the first k calls
            seen: list[list[Tensor]] = [[] for _ in self.calls]

            def reduce(tensor: Tensor, mine: list[Tensor]) -> Tensor:
                assert tensor.dtype == F64 and tensor.numel() <= 8
                mine.append(tensor.clone())
                return (
                    totals[len(mine) - 1].clone()
                    if len(mine) <= len(totals)
                    else torch.zeros_like(tensor)
                )

            out = [
                work(rank, lambda tensor, mine=mine: reduce(tensor, mine))
                for rank, mine in enumerate(seen)
            ]
            assert len({len(mine) for mine in seen}) == 1, "a rank made another number of calls"
            if len(totals) == len(seen[0]):
                return out
            totals.append(torch.stack([mine[len(totals)] for mine in seen]).sum(0))


@pytest.mark.parametrize("name", RETURNS)
@given(seed=seeds, white=st.sampled_from([True, "keep_mean"]))
@fast
def test_whitening_over_ranks_is_whitening_in_one(name: str, seed: int, white: bool | str) -> None:
    """Three ranks: one holds rows 0 to 3, one rows 2 to 5 (2 and 3 count on the first only), one
    nothing.
    """
    case = sample(seed)
    parts, owned = [slice(0, 4), slice(2, 6), slice(0, 0)], [[1, 1, 1, 1], [0, 0, 1, 1], []]
    based = ESTIMATORS[name].baseline or ESTIMATORS[name].turns
    baselines = case["baselines"] if based else None

    def work(rank: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        part, mask = parts[rank], case["mask"][parts[rank]]
        return token_advantages(
            name,
            case["rewards"][part],
            mask,
            gamma=0.9,
            reward_baselines=None if baselines is None else baselines[part],
            whiten_advantages=white,
            advantage_clip=1.5,
            counted=torch.tensor(owned[rank]).unsqueeze(-1).expand_as(mask),
            reduce=reduce,
        )[0]

    whole, _ = token_advantages(
        name,
        case["rewards"],
        case["mask"],
        gamma=0.9,
        reward_baselines=baselines,
        whiten_advantages=white,
        advantage_clip=1.5,
    )
    for part, got in zip(parts, Ranks(3).run(work), strict=True):
        close(got, whole[part], rtol=1e-8, atol=1e-8)


@given(seed=st.integers(0, 99), gamma=st.sampled_from([1.0, 0.9, 0.0]))
def test_returns_discount_by_the_time_that_is_given(seed: int, gamma: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    rewards, mask = torch.randn(3, 6, generator=draw, dtype=F64), torch.ones(3, 6)
    turns = torch.randint(0, 2, (3, 6), generator=draw).cumsum(1)
    got = discounted_returns(rewards, mask, gamma, turns)
    for row in range(3):
        for t in range(6):
            wanted = sum(
                gamma ** int(turns[row, s] - turns[row, t]) * float(rewards[row, s])
                for s in range(t, 6)
            )
            assert float(got[row, t]) == pytest.approx(wanted)
    positions = torch.arange(6).expand(3, 6)
    close(
        discounted_returns(rewards, mask, gamma, positions),
        discounted_returns(rewards, mask, gamma),
    )


def test_results_carry_no_gradient_and_change_no_input() -> None:
    rewards = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    before = rewards.detach().clone()
    for name in [*ROWS, *RETURNS]:
        baselines = torch.ones(4) if ESTIMATORS[name].baseline or ESTIMATORS[name].turns else None
        advantages, returns = compute_advantages(
            name, rewards, torch.ones(4, 3), torch.tensor([0, 0, 1, 1]), reward_baselines=baselines
        )
        assert not advantages.requires_grad and not returns.requires_grad
        returns.add_(1)
        assert torch.equal(rewards.detach(), before)


class Operations(TorchDispatchMode):
    """Counts what torch is asked to compute."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ROWS)
def test_a_hundred_thousand_rollouts_take_as_many_operations_as_a_hundred(name: str) -> None:
    """A loop over rows or groups would take minutes."""
    counts = []
    for rows in (100, 100_000):
        random = torch.Generator().manual_seed(0)
        rewards = torch.rand(rows, generator=random)
        groups = torch.randint(0, rows // 8, (rows,), generator=random)
        with Operations() as operations:
            row_advantages(name, rewards, groups, lengths=torch.ones(rows))
        counts.append(operations.count)
    assert counts[0] == counts[1] > 0
