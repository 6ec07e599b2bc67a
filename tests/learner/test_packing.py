"""Packs in which rows share prompts: every token once, every row whole, and gradients that are
those of plain indexing.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.learner.packing import Packed, pack, response_row

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
