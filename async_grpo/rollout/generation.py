"""Responses to prompts of a user, outside of training.

Runs in: rollout actors, whose engine may generate training groups at the same time. Hides how a
prompt becomes tokens and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from async_grpo.config.schema import RolloutConfig
from async_grpo.errors import RunError
from async_grpo.rollout.engine import Engine, Sampling
from async_grpo.tasks.base import Prompt
from async_grpo.tasks.chat import prompt_ids

OPTIONS = ("n", "max_tokens", "temperature", "top_p", "top_k")


@dataclass(frozen=True)
class Generated:
    """One response: text, token ids, their log-probs under the distribution that they were sampled
    from, the label of the weights of each (`v<epoch>.<version>`), and why it ended.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    weights: list[str]
    finish_reason: str


async def generate(
    engine: Engine, tokenizer: Any, rollout: RolloutConfig, prompt: Prompt, asked: Mapping[str, Any]
) -> list[Generated]:
    """Generate `n` responses to a prompt. asked: some of OPTIONS. Raises RunError for another
    option, and for a prompt without room in `rollout.prompt_length`.
    """
    if unknown := [name for name in asked if name not in OPTIONS]:
        raise RunError(f"generate() has no option {unknown[0]}; there are {', '.join(OPTIONS)}")
    if not isinstance(prompt, str) and tokenizer.chat_template is None:
        raise RunError("the tokenizer has no chat template: give the prompt as text")
    ids = prompt_ids(tokenizer, prompt)
    if len(ids) > rollout.prompt_length:
        raise RunError(
            f"a prompt has {len(ids)} tokens, and rollout.prompt_length is {rollout.prompt_length}"
        )
    longest = rollout.response_length
    if not 1 <= asked.get("max_tokens", longest) <= longest:
        raise RunError(f"max_tokens is 1 to rollout.response_length = {longest}")
    sampling = Sampling(
        **{
            "n": 1,
            "max_tokens": longest,
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            **asked,
        }
    )
    return [
        Generated(
            tokenizer.decode(one.token_ids, skip_special_tokens=True),
            [int(token) for token in one.token_ids],
            [float(value) for value in one.logprobs],
            [label for label, start, end in one.labels for _ in range(start, end)],
            one.finish_reason,
        )
        for one in await engine.generate(ids, sampling, purpose="evaluated")
    ]
