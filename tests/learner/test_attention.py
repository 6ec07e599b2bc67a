"""Packs in which rows share prompts: every token once, every row whole, and gradients that are
those of plain indexing. Attention over them by segments against attention by buckets: results,
gradients, and what the kernel is told; on CPU a double stands for the kernel, which runs on GPUs
only.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from async_grpo.learner import attention
from async_grpo.learner.attention import of_rows, takes_segments, varlen_attention
from async_grpo.learner.backend import process_group
from async_grpo.learner.backend.process_group import prepare_gpu
from async_grpo.learner.head import _Float32Logits
from async_grpo.learner.packing import Packed, pack, response_row
from tests.support.learners import loaded
from tests.support.varlen import double
from tests.support.wiring import tiny_model

CPU = torch.device("cpu")
groups = st.lists(
    st.tuples(st.integers(1, 90), st.lists(st.integers(1, 90), min_size=1, max_size=5)),
    min_size=1,
    max_size=6,
)


def rows_of(
    shapes: list[tuple[int, list[int]]], *, seed: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows in any order; token ids say prompt and row, so that no two prompts are the same."""
    rows = []
    for number, (length, responses) in enumerate(shapes):
        prompt = np.arange(length) + 1000 * (number + 1)
        rows += [
            (prompt, np.arange(response) + 100_000 * (len(rows) + place + 1))
            for place, response in enumerate(responses)
        ]
    return [rows[index] for index in np.random.default_rng(seed).permutation(len(rows))]


def row_positions(packed: Packed) -> list[range]:
    """Attention's positions of each packed row, with padding."""
    starts, out = 0, []
    for bucket in packed.layout.buckets:
        out += [
            range(starts + row * bucket.width, starts + (row + 1) * bucket.width)
            for row in range(bucket.rows)
        ]
        starts += bucket.positions
    return out


@given(shapes=groups, seed=st.integers(0, 99))
@settings(max_examples=80)
def test_every_row_is_whole_and_every_token_is_there_once(
    shapes: list[tuple[int, list[int]]], seed: int
) -> None:
    rows = rows_of(shapes, seed=seed)
    packed = pack([response_row(*row) for row in rows], CPU)
    layout, ids, at = packed.layout, packed.input_ids[0], 0
    assert (
        len(ids)
        == sum(length + sum(response - 1 for response in responses) for length, responses in shapes)
        == len(layout.own)
    )
    assert layout.tokens == sum(len(prompt) + len(response) - 1 for prompt, response in rows)
    assert (
        layout.positions
        == len(layout.take)
        == len(layout.foreign)
        <= layout.tokens + 64 * len(layout.buckets)
    )
    for index, places in zip(packed.order, row_positions(packed), strict=True):
        prompt, response = rows[index]
        tokens = layout.take[list(places)][: len(prompt) + len(response) - 1]
        assert ids[tokens].tolist() == [*prompt, *response[:-1]]
        assert packed.position_ids[0][tokens].tolist() == list(range(len(tokens)))
        assert (
            packed.predictors[at : at + len(response)].tolist()
            == tokens[len(prompt) - 1 :].tolist()
        )
        assert packed.targets[at : at + len(response)].tolist() == response.tolist()
        at += len(response)
    assert at == len(packed.predictors) == len(packed.targets)
    assert layout.take[layout.own].tolist() == list(range(len(ids))), (
        "a token's own position holds the token"
    )
    assert (
        layout.foreign.sum() == layout.positions - len(ids) and not layout.foreign[layout.own].any()
    )


@given(shapes=groups, seed=st.integers(0, 99))
@settings(max_examples=60)
def test_gradients_are_those_of_indexing(shapes: list[tuple[int, list[int]]], seed: int) -> None:
    rows = rows_of(shapes, seed=seed)
    packed, generator = (
        pack([response_row(*row) for row in rows], CPU),
        torch.Generator().manual_seed(seed),
    )
    layout = packed.layout
    states = torch.randn(len(layout.own), 2, 3, generator=generator, dtype=torch.float64)
    weights = torch.zeros(layout.positions, 2, 3, dtype=torch.float64)
    for index, places in zip(
        packed.order, row_positions(packed), strict=True
    ):  # padding gets no gradient: causality hides it
        tokens = list(places)[: sum(map(len, rows[index])) - 1]
        weights[tokens] = torch.randn(len(tokens), 2, 3, generator=generator, dtype=torch.float64)
    gradients = []
    for ours in (True, False):
        leaf = states.clone().requires_grad_()
        results = ((torch.cat(layout.spread(leaf)) if ours else leaf[layout.take]) * weights).sin()
        tokens = layout.collect([results]) if ours else results[layout.own]
        assert tokens.shape == states.shape
        (tokens.cos().sum() + (results * weights).sum()).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


def test_prompts_that_differ_in_high_bits_only_are_two() -> None:
    prompts = [np.array([1, 2 + more]) for more in (0, 2**16, 2**31)]
    packed = pack([response_row(prompt, np.arange(3)) for prompt in prompts], CPU)
    assert packed.input_ids[0, :6].tolist() == [id for prompt in prompts for id in prompt.tolist()]


def test_without_rows_there_is_one_token() -> None:
    packed = pack([], CPU)
    assert (
        packed.input_ids.tolist() == [[0]]
        and packed.predictors.tolist() == [0]
        and packed.layout.tokens == packed.layout.positions == 1
    )


# ---- attention ----


def attended(packed: Packed, states: list[Tensor], *, scaling: float | None) -> list[Tensor]:
    """Result [N, H, D], and gradients of a fixed function of it."""
    leaves = [one.clone().requires_grad_() for one in states]
    ready = [one.transpose(0, 1)[None] for one in leaves]
    with of_rows(packed.layout):
        out, _ = varlen_attention(nn.Module(), *ready, None, scaling=scaling)
    (out * torch.arange(out.numel(), dtype=out.dtype).view_as(out).cos()).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.slow
@given(
    shapes=groups,
    seed=st.integers(0, 99),
    heads=st.sampled_from([(2, 2), (4, 2), (4, 1)]),
    scaling=st.sampled_from([None, 0.3]),
)
@settings(max_examples=60)
def test_segments_give_what_buckets_give(
    shapes: list[tuple[int, list[int]]], seed: int, heads: tuple[int, int], scaling: float | None
) -> None:
    rows = rows_of(shapes, seed=seed)
    segments, buckets = (
        pack([response_row(*row) for row in rows], CPU, segmented=True),
        pack([response_row(*row) for row in rows], CPU),
    )
    assert torch.equal(segments.input_ids, buckets.input_ids)
    assert torch.equal(segments.predictors, buckets.predictors)
    count, generator = segments.input_ids.numel(), torch.Generator().manual_seed(seed)
    states = [
        torch.randn(count, number, 8, generator=generator, dtype=torch.float64)
        for number in (heads[0], heads[1], heads[1])
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "varlen_attn", double)
        found = attended(segments, states, scaling=scaling)
    for one, other in zip(found, attended(buckets, states, scaling=scaling), strict=True):
        torch.testing.assert_close(one, other)


def test_a_model_gives_the_same_by_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(tiny_model(), gradient_checkpointing=True).train()
    rng, found = np.random.default_rng(0), []
    prompts = [rng.integers(3, 60, length) for length in (9, 4)]
    rows = [(prompts[n % 2], rng.integers(3, 60, length)) for n, length in enumerate([1, 30, 7, 2])]
    monkeypatch.setattr(attention, "varlen_attn", double)
    for segmented in (True, False):
        model.zero_grad()
        logprobs, _ = model(
            pack([response_row(*row) for row in rows], CPU, segmented=segmented), 1.0, False
        )
        (logprobs * torch.arange(len(logprobs)).cos()).sum().backward()
        found.append([logprobs, *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@given(shapes=groups, seed=st.integers(0, 99))
@settings(max_examples=60)
def test_segments_have_no_padding_and_ask_once_for_every_token(
    shapes: list[tuple[int, list[int]]], seed: int
) -> None:
    rows = rows_of(shapes, seed=seed)
    packed = pack([response_row(*row) for row in rows], CPU, segmented=True)
    layout, segments = packed.layout, packed.layout.segments
    assert layout.buckets == () and layout.positions == layout.tokens == segments.keys[-1]
    assert layout.longest == max(len(prompt) + len(response) - 1 for prompt, response in rows)
    assert sorted(segments.token.tolist()) == list(range(packed.input_ids.numel()))
    assert segments.token[segments.query].tolist() == list(range(packed.input_ids.numel()))


def test_an_answer_of_one_token_to_a_shared_prompt_asks_nothing() -> None:
    prompt = np.arange(5)
    rows = [(prompt, np.arange(n)) for n in (1, 3, 1)] + [(prompt + 9, np.arange(1))]
    segments = pack([response_row(*row) for row in rows], CPU, segmented=True).layout.segments
    assert segments.keys.diff().tolist() == [7, 5]  # the second prompt's only row asks for itself
    assert segments.queries.diff().tolist() == [7, 5]
    assert pack([], CPU, segmented=True).layout.segments.keys.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "taken"),
    [
        ("cuda", torch.bfloat16, 64, True),
        ("cuda", torch.float16, 256, True),
        ("cuda", torch.float32, 64, False),
        ("cuda", torch.bfloat16, 320, False),
        ("cuda", torch.bfloat16, 100, False),
        ("cpu", torch.bfloat16, 64, False),
    ],
)
def test_segments_are_for_gpus_in_half_precision(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, head_dim: int, taken: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert takes_segments(torch.device(device), dtype, head_dim) is taken
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not takes_segments(torch.device(device), dtype, head_dim)


def test_a_gpu_has_many_queues_and_does_without_cudnns_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: chosen.append((device, os.environ["CUDA_DEVICE_MAX_CONNECTIONS"])),
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    before = torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    try:
        prepare_gpu("cuda:0")
        assert chosen == [("cuda:0", "32")], "CUDA reads it when it starts"
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize(
    ("capability", "installed", "taken"),
    [((9, 0), True, ["FA3"]), ((9, 0), False, []), ((8, 0), True, []), ((10, 0), True, [])],
)
def test_hopper_takes_flash_attention_3_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], installed: bool, taken: list[str]
) -> None:
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(
        process_group.importlib.util, "find_spec", lambda name: name if installed else None
    )
    monkeypatch.setattr(process_group, "activate_flash_attention_impl", found.append)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        prepare_gpu("cuda:0")
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    assert found == taken


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_float32_logits_are_those_of_float32_copies(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(n, 64, generator=generator).to(device, torch.bfloat16).requires_grad_()
        for n in (7, 50)
    )
    copies = [one.detach().float().requires_grad_() for one in (hidden, weight)]
    logits, wanted = _Float32Logits.apply(hidden, weight), copies[0] @ copies[1].t()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-5)
    for one in (logits, wanted):
        one.log_softmax(-1)[:, 3].sum().backward()
    for one, other in zip((hidden, weight), copies, strict=True):
        torch.testing.assert_close(one.grad.float(), other.grad, atol=1e-2, rtol=2e-2)


@pytest.mark.gpu
def test_the_kernel_aligns_causality_at_the_end() -> None:
    query = torch.randn(2, 1, 64, device="cuda", dtype=torch.bfloat16)
    key, value = (torch.randn(5, 1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bounds = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (2, 5)]
    given = {"scale": None, "window_size": (-1, 0), "enable_gqa": False}
    found = attention.varlen_attn(query, key, value, *bounds, 2, 5, **given)
    cpu = [one.float().cpu() for one in (query, key, value)]
    wanted = double(*cpu, *(bound.cpu() for bound in bounds), 2, 5, **given)
    torch.testing.assert_close(found.float().cpu(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4), (14, 2)])
def test_on_a_gpu_segments_give_what_buckets_give(heads: tuple[int, int]) -> None:
    device = torch.device("cuda")
    rows = rows_of([(300, [700, 1, 2, 90]), (17, [1, 400, 400]), (1, [1])], seed=3)
    generator, packs = torch.Generator().manual_seed(1), []
    for segmented in (True, False):
        packs.append(pack([response_row(*row) for row in rows], device, segmented=segmented))
    states = [
        torch.randn(packs[0].input_ids.numel(), number, 64, generator=generator).to(
            device, torch.bfloat16
        )
        for number in (heads[0], heads[1], heads[1])
    ]

    def on_gpu(packed: Packed) -> list[Tensor]:
        leaves = [one.clone().requires_grad_() for one in states]
        ready = [one.transpose(0, 1)[None] for one in leaves]
        with of_rows(packed.layout):
            out, _ = varlen_attention(nn.Module(), *ready, None)
        out.float().sin().sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    for one, other in zip(*map(on_gpu, packs), strict=True):
        torch.testing.assert_close(one, other, atol=3e-2, rtol=3e-2)
