"""Responses that compare engine and learner: enough of them, and none too long to be scored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from async_grpo.config.schema import RolloutConfig
from async_grpo.errors import SetupError
from async_grpo.rollout.engine.base import Completion, Sampling
from async_grpo.rollout.evaluator import (
    PROMPT_TOKENS,
    PROMPTS,
    TOKENS,
    PromptTooLong,
    probe_sequences,
)


class Engine:
    """Every response has as many tokens as it may have."""

    async def generate(
        self, prompt: list[int], sampling: Sampling, *, purpose: str
    ) -> list[Completion]:
        ids = np.arange(sampling.max_tokens, dtype=np.int32)
        return [Completion(ids, np.zeros(len(ids), np.float32), [], "length", 0.0)]


class Problems(list):
    """Training problems that are the lengths of their prompts."""

    def train(self, index: int) -> int:
        return self[index]


async def probed(lengths: list[int], *, prompt: int, response: int) -> list[Any]:
    def encode(length: Any) -> list[int]:
        if length > prompt:
            raise PromptTooLong(f"a prompt has {length} tokens")
        return [7] * length

    rollout = RolloutConfig(prompt_length=prompt, response_length=response)
    return await probe_sequences(Engine(), Problems(lengths), encode, rollout)


@pytest.mark.parametrize("response", [1, 2, 6, 500])
async def test_an_engine_has_room_to_score_every_one(response: int) -> None:
    """It generates one more token, and has room for prompt_length + response_length."""
    found = await probed([8, 3, 8, 7, 1, 9], prompt=8, response=response)
    assert found, "short prompts are there"
    for prompt, ids, logprobs in found:
        assert len(prompt) + len(ids) < 8 + response and 1 <= len(ids) <= min(response, TOKENS)
        assert len(ids) == len(logprobs)
    assert max(len(prompt) for prompt, _, _ in found) == (7 if response == 1 else 8)


async def test_there_are_256_tokens_where_responses_are_long() -> None:
    found = await probed([5] * 99, prompt=8, response=100)
    assert len(found) == PROMPTS and sum(len(ids) for _, ids, _ in found) >= 256


@pytest.mark.parametrize(("length", "count"), [(5_000, 4), (4_096, 4), (1_024, 16), (40_000, 1)])
async def test_long_prompts_are_few(length: int, count: int) -> None:
    found = await probed([length] * 99, prompt=length, response=100)
    assert len(found) == count
    assert sum(len(prompt) for prompt, _, _ in found) < PROMPT_TOKENS + length


@pytest.mark.parametrize(
    ("lengths", "response", "says"),
    [([9, 9], 4, "a prompt has 9 tokens"), ([8], 1, "no room for an answer")],
)
async def test_where_none_fits_a_sentence_says_so(
    lengths: list[int], response: int, says: str
) -> None:
    with pytest.raises(SetupError, match=says):
        await probed(lengths, prompt=8, response=response)
