"""Chunked log-probabilities and entropies against the naive ones, in value and gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from async_grpo.algo.logprobs import token_logprobs
from tests.algo_case import F64, close, gradient


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("size", [1, 3, 10, 100])
def test_chunked_logprobs_are_the_naive_ones(temperature: float, with_entropy: bool, size: int) -> None:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 4, generator=random, dtype=F64, requires_grad=True)
    head = torch.randn(4, 13, generator=random, dtype=F64, requires_grad=True)
    targets = torch.randint(0, 13, (10,), generator=random)
    up = torch.randn(2, 10, generator=random, dtype=F64)
    calls = []

    def project(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x @ head

    logprobs, entropy = token_logprobs(
        hidden, targets, project, vocab_size=13, temperature=temperature, with_entropy=with_entropy, chunk_bytes=size * 13 * 4
    )
    assert max(calls) <= size and sum(calls) == 10
    naive = torch.log_softmax(hidden @ head / temperature, -1)
    picked, naive_entropy = naive[torch.arange(10), targets], -(naive.exp() * naive).sum(-1)
    close(logprobs, picked)
    value, expected = (logprobs * up[0]).sum(), (picked * up[0]).sum()
    if with_entropy:
        close(entropy, naive_entropy)
        value, expected = value + (entropy * up[1]).sum(), expected + (naive_entropy * up[1]).sum()
    else:
        assert entropy is None
    for got, want in zip(torch.autograd.grad(value, [hidden, head]), torch.autograd.grad(expected, [hidden, head]), strict=True):
        close(got, want)
    assert sum(calls) == (10 if size >= 10 else 20)


def test_logprobs_of_low_precision_forbidden_and_no_tokens() -> None:
    head = torch.randn(4, 13, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    hidden, targets = torch.ones(5, 4, dtype=torch.bfloat16), torch.arange(5)
    logprobs, entropy = token_logprobs(hidden, targets, lambda x: x @ head, vocab_size=13, temperature=1.0, with_entropy=True)
    assert logprobs.dtype == entropy.dtype == torch.float32
    close(logprobs, torch.log_softmax((hidden @ head).float(), -1)[torch.arange(5), targets])

    forbidden = torch.zeros(13).index_fill(0, torch.tensor([12]), -math.inf)
    logits = torch.zeros(5, 13, requires_grad=True)
    logprobs, entropy = token_logprobs(
        torch.zeros(5, 1), targets, lambda x: logits + forbidden, vocab_size=13, temperature=1.0, with_entropy=True
    )
    close(entropy, torch.full((5,), math.log(12)))
    assert torch.isfinite(gradient((logprobs + 3e6 * entropy).sum(), logits)).all()

    logprobs, _ = token_logprobs(hidden[:0], targets[:0], lambda x: x @ head, vocab_size=13, temperature=1.0, with_entropy=False)
    assert logprobs.shape == (0,) and gradient(logprobs.sum(), head).shape == head.shape
    with pytest.raises(ValueError, match="targets"):
        token_logprobs(hidden, targets[:3], lambda x: x @ head, vocab_size=13, temperature=1.0, with_entropy=False)
