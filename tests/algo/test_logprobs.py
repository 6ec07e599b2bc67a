"""Chunked log-probabilities and entropies against the naive ones, in value and gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from async_grpo.algo.logprobs import token_logprobs
from tests.support.algo_case import F64, close, gradient


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("size", [1, 3, 10, 100])
@pytest.mark.parametrize("way", ["any", "linear", "linear with bias"])
@pytest.mark.parametrize("named", [(), (4,)])
def test_chunked_logprobs_are_the_naive_ones(
    temperature: float, with_entropy: bool, size: int, way: str, named: tuple[int, ...]
) -> None:
    """named: several targets of each position, the same one twice among them."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 4, generator=random, dtype=F64, requires_grad=True)
    head = torch.randn(13, 4, generator=random, dtype=F64, requires_grad=True)
    bias = torch.randn(13, generator=random, dtype=F64, requires_grad=True)
    inputs = [hidden, head, bias] if way == "linear with bias" else [hidden, head]
    targets = torch.randint(0, 13, (10, *named), generator=random)
    if named:
        targets[:, 1] = targets[:, 0]
    up = torch.randn(10, *named, generator=random, dtype=F64)
    of_entropy = torch.randn(10, generator=random, dtype=F64)
    calls = []

    def project(x: Tensor) -> Tensor:
        calls.append(len(x))
        return F.linear(x, *inputs[1:])

    logprobs, entropy = token_logprobs(
        hidden,
        targets,
        project,
        vocab_size=13,
        temperature=temperature,
        with_entropy=with_entropy,
        linear=None if way == "any" else (head, *inputs[2:], None)[:2],
        chunk_bytes=size * 13 * 4,
    )
    assert max(calls) <= size and sum(calls) == 10
    naive = torch.log_softmax(F.linear(*inputs) / temperature, -1)
    picked = naive.gather(-1, targets.view(10, -1)).view(targets.shape)
    naive_entropy = -(naive.exp() * naive).sum(-1)
    close(logprobs, picked)
    value, expected = (logprobs * up).sum(), (picked * up).sum()
    if with_entropy:
        close(entropy, naive_entropy)
        value = value + (entropy * of_entropy).sum()
        expected = expected + (naive_entropy * of_entropy).sum()
    else:
        assert entropy is None
    for got, want in zip(
        torch.autograd.grad(value, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        close(got, want)
    assert sum(calls) == (10 if size >= 10 else 20)


@pytest.mark.parametrize("size", [2, 100])
@pytest.mark.parametrize("linear", [False, True])
def test_gradients_of_hidden_states_and_head_are_the_differences_of_the_value(
    size: int, linear: bool
) -> None:
    random = torch.Generator().manual_seed(1)
    hidden, head = (
        torch.randn(5, 3, generator=random, dtype=F64),
        torch.randn(7, 3, generator=random, dtype=F64),
    )
    targets = torch.randint(0, 7, (5,), generator=random)

    def outputs(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            hidden,
            targets,
            lambda x: x @ head.t(),
            vocab_size=7,
            temperature=0.7,
            with_entropy=True,
            linear=(head, None) if linear else None,
            chunk_bytes=size * 7 * 4,
        )

    assert torch.autograd.gradcheck(outputs, (hidden.requires_grad_(), head.requires_grad_()))


@pytest.mark.parametrize("linear", [False, True])
def test_low_precision_hidden_states_with_and_without_a_float32_head(linear: bool) -> None:
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 4, generator=random).bfloat16().requires_grad_()
    targets, rows = torch.arange(5), torch.arange(5)
    low = torch.randn(13, 4, generator=random).bfloat16().requires_grad_()
    logprobs, entropy = token_logprobs(
        hidden,
        targets,
        lambda x: x @ low.t(),
        vocab_size=13,
        temperature=1.0,
        with_entropy=True,
        linear=(low, None) if linear else None,
        chunk_bytes=2 * 13 * 4,
    )
    assert logprobs.dtype == entropy.dtype == torch.float32
    close(logprobs, torch.log_softmax((hidden @ low.t()).float(), -1)[rows, targets])
    of_low = gradient(logprobs.sum(), low)
    naive = torch.log_softmax(hidden.double() @ low.double().t(), -1)[rows, targets]
    assert of_low.dtype == torch.bfloat16
    close(of_low, gradient(naive.sum(), low), rtol=2**-6, atol=2e-2)

    head = low.detach().float().requires_grad_()
    for size in (2, 100):
        logprobs, _ = token_logprobs(
            hidden,
            targets,
            lambda x: x.float() @ head.t(),
            vocab_size=13,
            temperature=1.0,
            with_entropy=False,
            linear=(head, None) if linear else None,
            chunk_bytes=size * 13 * 4,
        )
        naive = torch.log_softmax(hidden.double() @ head.double().t(), -1)[rows, targets]
        close(logprobs.double(), naive, rtol=0, atol=1e-6)
        of_hidden, of_head = torch.autograd.grad(logprobs.sum(), [hidden, head])
        want_hidden, want_head = torch.autograd.grad(naive.sum(), [hidden, head])
        assert of_hidden.dtype == torch.bfloat16 and of_head.dtype == torch.float32
        close(of_head, want_head, rtol=0, atol=1e-5)
        close(of_hidden, want_hidden, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("size", [2, 100])
def test_forbidden_tokens_add_nothing_to_entropy_and_gradients(size: int) -> None:
    targets = torch.arange(5)
    forbidden = torch.zeros(13, dtype=F64).index_fill(0, torch.tensor([7, 12]), -math.inf)
    logits = torch.randn(
        5, 13, generator=torch.Generator().manual_seed(2), dtype=F64
    ).requires_grad_()
    logprobs, entropy = token_logprobs(
        logits,
        targets,
        lambda x: x + forbidden,
        vocab_size=13,
        temperature=0.7,
        with_entropy=True,
        chunk_bytes=size * 13 * 4,
    )
    allowed = torch.isfinite(forbidden)
    naive = torch.log_softmax(logits[:, allowed] / 0.7, -1)
    naive_entropy = -(naive.exp() * naive).sum(-1)
    close(logprobs, naive[targets, targets])
    close(entropy, naive_entropy)
    got, want = (
        gradient((logprobs + 3e6 * entropy).sum(), logits),
        gradient((naive[targets, targets] + 3e6 * naive_entropy).sum(), logits),
    )
    assert (got[:, ~allowed] == 0).all()
    close(got, want, atol=1e-6)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_tokens_still_touch_the_head_and_shapes_must_fit(with_entropy: bool) -> None:
    hidden, head = torch.ones(5, 4, requires_grad=True), torch.ones(4, 13, requires_grad=True)
    targets = torch.arange(5)
    logprobs, entropy = token_logprobs(
        hidden[:0],
        targets[:0],
        lambda x: x @ head,
        vocab_size=13,
        temperature=1.0,
        with_entropy=with_entropy,
    )
    assert logprobs.shape == (0,) and (entropy.shape == (0,) if with_entropy else entropy is None)
    value = logprobs.sum() + entropy.sum() if with_entropy else logprobs.sum()
    assert all((grad == 0).all() for grad in torch.autograd.grad(value, [hidden, head]))
    for wrong in ((hidden, targets[:3]), (hidden[0], targets)):
        with pytest.raises(ValueError, match="targets"):
            token_logprobs(
                *wrong,
                lambda x: x @ head,
                vocab_size=13,
                temperature=1.0,
                with_entropy=with_entropy,
            )
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(
            hidden,
            targets,
            lambda x: x @ head,
            vocab_size=13,
            temperature=0.0,
            with_entropy=with_entropy,
        )


@pytest.mark.parametrize("size", [3, 100])
@pytest.mark.parametrize("used", ["log-probs", "entropy"])
@pytest.mark.parametrize("linear", [False, True])
def test_what_is_only_looked_at_adds_nothing_to_the_gradient(
    used: str, size: int, linear: bool
) -> None:
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(10, 4, generator=random, dtype=F64, requires_grad=True)
    head, up = (
        torch.randn(13, 4, generator=random, dtype=F64),
        torch.randn(10, generator=random, dtype=F64),
    )
    targets = torch.randint(0, 13, (10,), generator=random)
    found = token_logprobs(
        hidden,
        targets,
        lambda x: x @ head.t(),
        vocab_size=13,
        temperature=0.7,
        with_entropy=True,
        linear=(head, None) if linear else None,
        chunk_bytes=size * 13 * 4,
    )
    naive = torch.log_softmax(hidden @ head.t() / 0.7, -1)
    wanted = (
        naive[torch.arange(10), targets] if used == "log-probs" else -(naive.exp() * naive).sum(-1)
    )
    close(
        gradient((found[used == "entropy"] * up).sum(), hidden),
        gradient((wanted * up).sum(), hidden),
    )


@pytest.mark.parametrize("trained", ["hidden", "head"])
def test_chunks_of_a_plain_product_share_one_gradient_of_the_weights(trained: str) -> None:
    """No product of the whole weights' size is made for each chunk, and none for frozen weights."""
    hidden = torch.ones(12, 4, requires_grad=trained == "hidden")
    head = torch.ones(50, 4, requires_grad=trained == "head")
    made = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.shape == head.shape:
                made.append(str(func))
            return out

    logprobs, _ = token_logprobs(
        hidden,
        torch.zeros(12, dtype=torch.int64),
        lambda x: x @ head.t(),
        vocab_size=50,
        temperature=1.0,
        with_entropy=False,
        linear=(head, None),
        chunk_bytes=3 * 50 * 4,
    )
    with Seen():
        logprobs.sum().backward()
    products = [name for name in made if "mm" in name]
    assert products == (["aten.addmm_.default"] * 4 if trained == "head" else [])


SETS = [[2, 5, 9], [0, 12], [4], [*range(13)], [7, 8, 11, 12], [1, 3]]
"""One of a token alone, and one of all 13."""
SET_TARGETS = [5, 0, 4, 6, 12, 3]


def padded_sets(width: int = 13) -> Tensor:
    rows = [one + [-1] * (width - len(one)) for one in SETS]
    return torch.tensor(rows)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize("way", ["any", "linear", "linear with bias"])
def test_logprobs_over_sets_are_those_of_a_dense_mask(
    temperature: float, with_entropy: bool, size: int, way: str
) -> None:
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn(6, 4, generator=random, dtype=F64, requires_grad=True)]
    inputs += [torch.randn(13, 4, generator=random, dtype=F64, requires_grad=True)]
    if way == "linear with bias":
        inputs += [torch.randn(13, generator=random, dtype=F64, requires_grad=True)]
    hidden, head, *bias = inputs
    targets, kept = torch.tensor(SET_TARGETS), padded_sets()
    up, of_entropy = torch.randn(2, 6, generator=random, dtype=F64)
    logprobs, entropy = token_logprobs(
        hidden,
        targets,
        lambda x: F.linear(x, head, *bias),
        vocab_size=13,
        temperature=temperature,
        with_entropy=with_entropy,
        linear=None if way == "any" else (head, *bias, None)[:2],
        kept=kept,
        chunk_bytes=size * 13 * 4,
    )
    outside = torch.ones(6, 13, dtype=torch.bool)
    for row, one in zip(outside, SETS, strict=True):
        row[one] = False
    masked = F.linear(hidden, head, *bias).masked_fill(outside, -math.inf)
    naive = torch.log_softmax(masked / temperature, -1)
    picked = naive.gather(-1, targets[:, None])[:, 0]
    close(logprobs, picked, rtol=0, atol=1e-12)
    assert logprobs[2].item() == 0.0, "there was nothing else to sample"
    value, expected = (logprobs * up).sum(), (picked * up).sum()
    if with_entropy:
        finite = naive.masked_fill(outside, 0)
        naive_entropy = -(finite.exp().masked_fill(outside, 0) * finite).sum(-1)
        close(entropy, naive_entropy, rtol=0, atol=1e-12)
        value = value + (entropy * of_entropy).sum()
        expected = expected + (naive_entropy * of_entropy).sum()
    for got, want in zip(
        torch.autograd.grad(value, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [2, 100])
@pytest.mark.parametrize("linear", [False, True])
def test_gradients_over_sets_are_the_differences_of_the_value_and_nothing_outside(
    size: int, linear: bool
) -> None:
    random = torch.Generator().manual_seed(1)
    hidden, head = (torch.randn(n, 3, generator=random, dtype=F64) for n in (6, 13))

    def outputs(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            hidden,
            torch.tensor(SET_TARGETS),
            lambda x: x @ head.t(),
            vocab_size=13,
            temperature=0.7,
            with_entropy=True,
            linear=(head, None) if linear else None,
            kept=padded_sets(),
            chunk_bytes=size * 13 * 4,
        )

    inputs = hidden.requires_grad_(), head.requires_grad_()
    assert torch.autograd.gradcheck(outputs, inputs)
    first, _ = outputs(*inputs)
    of_head = gradient(first[0] + first[1], head)
    touched = {*SETS[0], *SETS[1]}
    assert {row for row in range(13) if of_head[row].abs().sum() > 0} == touched
