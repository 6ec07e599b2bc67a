"""Fixed responses with which engines and learner are compared.

Runs in: rollout actors. Hides which prompts are asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from async_grpo.answering import PromptTooLong
from async_grpo.config.schema import Rollout
from async_grpo.engine import Completion, Sampling
from async_grpo.engine_requests import Purpose
from async_grpo.errors import SetupError
from async_grpo.tasks.base import Problem, Task

PROMPTS, CANDIDATES, TOKENS = 4, 64, 16


class Generator(Protocol):
    """The engine as far as probes need it."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, purpose: Purpose) -> list[Completion]: ...


async def probe_sequences(
    engine: Generator, task: Task, encode: Callable[[Problem], list[int]], rollout: Rollout
) -> list[tuple[list[int], list[int], np.ndarray]]:
    """A few short responses to the first problems, as (prompt, response, log-probs [L] at the training temperature)."""
    sampling = Sampling(n=1, max_tokens=min(rollout.response_length, TOKENS), temperature=rollout.temperature, seed=1)
    prompts = []
    for problem in map(task.train, range(min(CANDIDATES, len(task)))):
        try:
            prompts.append(encode(problem))
        except PromptTooLong as error:
            refused = error
        if len(prompts) == PROMPTS:
            break
    if not prompts:
        raise SetupError(f"none of the first problems fits: {refused}; raise rollout.prompt_length, or use shorter prompts")
    answers = await asyncio.gather(*[engine.generate(prompt, sampling, purpose="probes") for prompt in prompts])
    return [(prompt, answer.token_ids.tolist(), answer.logprobs) for prompt, [answer] in zip(prompts, answers, strict=True)]
