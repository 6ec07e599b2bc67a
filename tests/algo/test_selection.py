"""Selection of tokens over a whole optimizer step: slow loops, fake ranks, and the hash that
draws.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from async_grpo.algo.losses import Clip, ClipCov, KlCov, M2po, policy_loss
from async_grpo.algo.selection import counted_share, select_tokens, select_top_share, token_hashes
from tests.support.algo_case import F64, clips, fast, seeds, slow_factor, tokens
from tests.support.thread_ranks import Collective, Ranks

OPTIONS = {
    "clip_cov": ClipCov(ratio=0.2, lower=-0.3, upper=1.5),
    "kl_cov": KlCov(ratio=0.15),
    "m2po": M2po(budget=0.1),
}
by_name = pytest.mark.parametrize("name", sorted(OPTIONS))


def step(seed: int, size: int) -> dict[str, Tensor]:
    """Random tokens [size] of one optimizer step with their hashes."""
    case = tokens(seed, size, scale=0.5)
    del case["behavior_logprobs"]
    index = torch.arange(size)
    return case | {"hashes": token_hashes(seed, 3, index // 8, index // 4 % 2, index % 4)}


def fraction_of(share: float, total: int) -> int:
    """A share as it is written, rounded down: 0.29 of 100 is 29."""
    return max(1, int(Fraction(share).limit_denominator(10**6) * total))


def slow_selection(
    name: str, case: dict[str, Tensor], clip: Clip, options: Any
) -> list[bool] | float:
    """The definition as loops over Python numbers."""
    values = {key: tensor.tolist() for key, tensor in case.items()}
    valid = [t for t, kept in enumerate(values["loss_mask"]) if kept]
    cur, a, hashes = values["logprobs"], values["advantages"], values["hashes"]
    x = {t: cur[t] - values["anchor_logprobs"][t] for t in valid}
    if name == "m2po":
        harmful = [abs(x[t]) for t in valid if (a[t] > 0 and x[t] > 0) or (a[t] < 0 and x[t] < 0)]
        if not harmful or math.fsum(size**2 for size in harmful) / len(harmful) <= options.budget:
            return math.inf
        kept = [
            size
            for size in harmful
            if math.fsum(min(h, size) ** 2 for h in harmful) / len(harmful) < options.budget
        ]
        return max(kept, default=0.0)
    mean_a, mean_cur = (math.fsum(of[t] for t in valid) / max(len(valid), 1) for of in (a, cur))
    cov = {t: (a[t] - mean_a) * (cur[t] - mean_cur) for t in valid}
    if name == "kl_cov":
        count = fraction_of(options.ratio, len(valid))
        chosen = sorted(valid, key=lambda t: (-cov[t], hashes[t]))[:count]
    else:
        candidates = []
        for t in valid:
            factor, ratio = slow_factor(int(values["staleness"][t]), clip), math.exp(x[t])
            bounded = (a[t] > 0 and ratio > 1 + clip.high * factor) or (
                a[t] < 0 and ratio < 1 - clip.low * factor
            )
            if options.lower < cov[t] < options.upper and not bounded:
                candidates.append(t)
        chosen = sorted(candidates, key=lambda t: hashes[t])[
            : fraction_of(options.ratio, len(valid))
        ]
    return [t in chosen for t in range(len(cur))]


@by_name
@given(seed=seeds, clip=clips, size=st.integers(0, 60))
@fast
def test_selection_is_the_slow_loop(name: str, seed: int, clip: Clip, size: int) -> None:
    case = step(seed, size)
    got = select_tokens(name, **case, clip=clip, options=OPTIONS[name])
    want = slow_selection(name, case, clip, OPTIONS[name])
    assert got.shape == (size,) and not got.requires_grad
    if name == "m2po":
        assert got.dtype == F64 and got.tolist() == pytest.approx([want] * size, rel=1e-12)
    else:
        assert got.dtype == torch.bool and got.tolist() == want


@by_name
@given(seed=seeds, clip=clips, size=st.integers(0, 60), count=st.integers(1, 4))
@fast
def test_selection_does_not_depend_on_ranks_order_or_padding(
    name: str, seed: int, clip: Clip, size: int, count: int
) -> None:
    case = step(seed, size)
    whole = select_tokens(name, **case, clip=clip, options=OPTIONS[name])
    random = torch.Generator().manual_seed(seed)
    order, owner = (
        torch.randperm(size, generator=random),
        torch.randint(0, count, (size,), generator=random),
    )
    mine = [order[owner[order] == rank] for rank in range(count)]

    def work(reduce: Collective, gather: Collective, rank: int) -> Tensor:
        part = {
            key: torch.cat([tensor.detach()[mine[rank]], tensor.new_full((3,), 0)])
            for key, tensor in case.items()
        }
        for key in ("logprobs", "anchor_logprobs", "advantages"):
            part[key][-3:] = torch.tensor([math.nan, math.inf, 1e30], dtype=F64)
        return select_tokens(
            name, **part, clip=clip, options=OPTIONS[name], reduce=reduce, gather=gather
        )

    ranks = Ranks(count)
    for part, tokens_of_rank in zip(ranks.run(work), mine, strict=True):
        if name != "m2po":
            assert torch.equal(part[:-3], whole[tokens_of_rank]) and not part[-3:].any()
        elif size:
            assert (part == whole[0]).all()
    assert len(set(ranks.calls)) == 1
    if name != "m2po":
        assert ranks.largest <= max(1, int(0.2 * size))


@by_name
def test_a_rank_without_tokens_and_a_step_without_tokens(name: str) -> None:
    for size in (0, 20):
        case = step(1, size)
        ranks = Ranks(2)

        def work(
            reduce: Collective, gather: Collective, rank: int, case: dict[str, Tensor] = case
        ) -> Tensor:
            part = case if rank == 0 else {key: tensor[:0] for key, tensor in case.items()}
            return select_tokens(
                name,
                **part,
                clip=Clip(0.2, 0.2),
                options=OPTIONS[name],
                reduce=reduce,
                gather=gather,
            )

        first, second = ranks.run(work)
        assert torch.equal(
            first, select_tokens(name, **case, clip=Clip(0.2, 0.2), options=OPTIONS[name])
        )
        assert second.numel() == 0 and ranks.calls[0] == ranks.calls[1] > 0


@by_name
def test_rows_give_the_same_selection_as_packed_tokens(name: str) -> None:
    case = step(5, 24)
    packed = select_tokens(name, **case, clip=Clip(0.2, 0.2), options=OPTIONS[name])
    padded = select_tokens(
        name,
        **{key: tensor.reshape(4, 6) for key, tensor in case.items()},
        clip=Clip(0.2, 0.2),
        options=OPTIONS[name],
    )
    assert torch.equal(padded, packed.reshape(4, 6))


@pytest.mark.parametrize("share", [0.29, 0.57, 0.58, 0.07, 0.14, 0.9999])
def test_a_share_of_tokens_is_not_rounded_down_for_float_error(share: float) -> None:
    for total in (1, 99, 100, 10_000, 10_000_000):
        assert counted_share(share, total) == fraction_of(share, total)
    case = step(1, 100) | {"loss_mask": torch.ones(100)}
    top = select_top_share(
        case["advantages"], case["loss_mask"], share=share, hashes=case["hashes"]
    )
    bare, clip = KlCov(ratio=share), Clip(0.2, 0.2)
    chosen = select_tokens("kl_cov", **case, clip=clip, options=bare)
    assert top.sum() == chosen.sum() == fraction_of(share, 100)


@given(seed=seeds, size=st.integers(0, 60), count=st.integers(1, 3), share=st.floats(0.01, 1))
@fast
def test_the_top_share_is_the_slow_loop_on_any_ranks(
    seed: int, size: int, count: int, share: float
) -> None:
    """With many equal values, and anything off the mask."""
    case = step(seed, size)
    valid = [t for t in range(size) if case["loss_mask"][t]]
    values = (case["advantages"] * 2).round().to(F64)
    order = sorted(valid, key=lambda t: (-float(values[t]), int(case["hashes"][t])))
    wanted = set(order[: fraction_of(share, len(valid))])
    values = torch.where(case["loss_mask"] != 0, values, math.nan)
    owner = torch.randint(0, count, (size,), generator=torch.Generator().manual_seed(seed))
    mine = [(owner == rank).nonzero().flatten() for rank in range(count)]

    def work(reduce: Collective, gather: Collective, rank: int) -> Tensor:
        return select_top_share(
            values[mine[rank]],
            case["loss_mask"][mine[rank]],
            share=share,
            hashes=case["hashes"][mine[rank]],
            reduce=reduce,
            gather=gather,
        )

    ranks = Ranks(count)
    for part, own in zip(ranks.run(work), mine, strict=True):
        assert part.tolist() == [t in wanted for t in own.tolist()]
    assert len(set(ranks.calls)) == 1
    rows = torch.stack([values, values]), torch.stack([case["loss_mask"]] * 2)
    hashes = torch.stack([case["hashes"], case["hashes"] + 2**62])
    padded = select_top_share(*rows, share=share / 2, hashes=hashes)
    assert padded.sum() == min(fraction_of(share, len(valid)), 2 * len(valid))
    with pytest.raises(ValueError, match="share 0"):
        select_top_share(values, case["loss_mask"], share=0, hashes=case["hashes"])


def test_equal_covariances_are_taken_by_hash() -> None:
    case = step(0, 8) | {
        "loss_mask": torch.ones(8),
        "advantages": torch.tensor([1.0, -1] * 4),
        "anchor_logprobs": torch.full((8,), -1.0),
    }
    case["logprobs"] = torch.tensor([-0.5, -1.5] * 4)
    got = select_tokens("kl_cov", **case, clip=Clip(0.2, 0.2), options=KlCov(ratio=0.4))
    assert sorted(case["hashes"][got].tolist()) == sorted(case["hashes"].tolist())[:3]


@given(seed=seeds, scale=st.sampled_from([0.05, 0.3, 1.0, 50.0]))
@fast
def test_m2po_bound_keeps_the_second_moment_in_the_budget(seed: int, scale: float) -> None:
    case = {
        key: tensor.detach().float() if tensor.is_floating_point() else tensor
        for key, tensor in step(seed, 40).items()
    }
    case["logprobs"] = case["anchor_logprobs"] + scale * (
        case["logprobs"] - case["anchor_logprobs"]
    )
    clip = Clip(0.0, 0.0)
    bound = select_tokens("m2po", **case, clip=clip, options=OPTIONS["m2po"])
    assert bound.dtype == torch.float32
    x = (case["logprobs"] - case["anchor_logprobs"]).clamp(-20, 20)
    harmful = (x * case["advantages"] > 0) & (case["loss_mask"] != 0)
    capped = torch.minimum(x.abs(), bound)[harmful].double()
    assert not harmful.any() or capped.square().mean() <= OPTIONS["m2po"].budget
    del case["hashes"]
    _, diagnostics = policy_loss(
        "m2po", **case, behavior_logprobs=case["anchor_logprobs"], clip=clip, selection=bound
    )
    clipped = diagnostics["clipped_low"] | diagnostics["clipped_high"]
    assert torch.equal(
        clipped, harmful & (x.abs() > bound)
    )  # a token exactly on the bound keeps its gradient, also in float32


def slow_hash(*parts: int) -> int:
    """SplitMix64 over (state xor part) with Python integers."""
    state, low = 0, 2**64 - 1
    for part in parts:
        state = ((state ^ (part & low)) + 0x9E3779B97F4A7C15) & low
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & low
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & low
        state ^= state >> 31
    return state & (2**63 - 1)


@given(
    seed=st.integers(-(2**63), 2**64),
    at=st.integers(0, 2**40),
    parts=st.lists(
        st.tuples(st.integers(0, 2**62), st.integers(0, 2**20), st.integers(0, 2**20)),
        min_size=1,
        max_size=5,
    ),
)
@fast
def test_hash_is_splitmix64(seed: int, at: int, parts: list[tuple[int, int, int]]) -> None:
    hashes = token_hashes(seed, at, *torch.tensor(parts).T)
    assert hashes.tolist() == [slow_hash(seed, at, *part) for part in parts]


def test_first_output_of_splitmix64() -> None:
    assert slow_hash(0) == 0xE220A8397B1DCDAF & (
        2**63 - 1
    )  # the generator's published first output for seed 0


def test_hashes_are_uniform_and_tell_tokens_apart() -> None:
    index = torch.arange(2**16)
    group, row, position = index >> 12, (index >> 8) & 15, index & 255
    several = [
        token_hashes(seed, at, group, row, position) for seed, at in ((0, 0), (0, 1), (1, 0))
    ]
    everything = torch.cat(several)
    assert (
        everything.dtype == torch.int64
        and (everything >= 0).all()
        and len(everything.unique()) == len(everything)
    )
    for hashes in several:
        for bucket in (
            hashes >> 57,
            hashes & 63,
            (hashes >> 30) & 63,
        ):  # 64 buckets, 63 degrees of freedom: sd 11.2
            counts = torch.bincount(bucket, minlength=64).double()
            assert ((counts - 1024) ** 2 / 1024).sum() < 63 + 5 * 11.3
    shuffled = torch.randperm(2**16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        token_hashes(0, 0, group[shuffled], row[shuffled], position[shuffled]), several[0][shuffled]
    )
    assert torch.equal(
        token_hashes(0, 0, *(part.reshape(256, 256).int() for part in (group, row, position))),
        several[0].reshape(256, 256),
    )


def test_selection_refuses_what_it_cannot_use() -> None:
    case = step(0, 4)
    with pytest.raises(ValueError, match=r"ppo_clip.*clip_cov"):
        select_tokens("ppo_clip", **case, clip=Clip(0.2, 0.2))
    for key in ("hashes", "advantages"):
        with pytest.raises(ValueError, match=key):
            select_tokens(
                "kl_cov",
                **{**case, key: case[key][:3]},
                clip=Clip(0.2, 0.2),
                options=OPTIONS["kl_cov"],
            )
    with pytest.raises(ValueError, match="rows"):
        token_hashes(0, 0, torch.arange(3), torch.arange(2), torch.arange(3))
    with pytest.raises(ValueError, match="positions"):
        token_hashes(0, 0, torch.arange(3), torch.arange(3), torch.ones(3))
