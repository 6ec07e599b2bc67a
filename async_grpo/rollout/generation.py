"""Responses to prompts of a user, outside of training.

Runs in: the driver, which checks what is asked for, and the rollout actors, whose engine may
generate training groups at the same time. Hides how a prompt becomes tokens and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from async_grpo.config.schema import RolloutConfig
from async_grpo.errors import RunError
from async_grpo.rollout.engine.base import Engine, Sampling
from async_grpo.runtime.text import shortened
from async_grpo.tasks.base import Prompt
from async_grpo.tasks.chat import prompt_ids

_OPTIONS: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "n": (Integral, lambda value: value >= 1, "a whole number, at least 1"),
    "max_tokens": (Integral, lambda value: value >= 1, "a whole number, at least 1"),
    "temperature": (Real, lambda value: 0 <= value <= 2, "a number of 0 to 2"),
    "top_p": (Real, lambda value: 0 < value <= 1, "a number above 0, at most 1"),
    "top_k": (Integral, lambda value: value >= -1, "a whole number; 0 is all tokens"),
    "min_p": (Real, lambda value: 0 <= value <= 1, "a number of 0 to 1"),
}
"""Kind and range of each option of `generate`: what vLLM takes."""


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


def prompts_of(given: Any) -> list[Prompt]:
    """Take the prompts that somebody asks for. Raises RunError for what is no list of prompts."""
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise RunError(f"generate() takes a list of prompts, not {_shown(given)}: write [...]")
    # a column of a table has arrays of messages
    prompts = [one.tolist() if isinstance(one, np.ndarray) else one for one in given]
    if any(isinstance(prompt, Mapping) for prompt in prompts):
        raise RunError(
            "a list of messages is one prompt, and generate() takes several: write [[...]]"
        )
    for prompt in prompts:
        if not isinstance(prompt, str) and not _is_chat(prompt):
            raise RunError(
                f"a prompt is {_shown(prompt)}; allowed is text, or a list of messages, each a "
                "mapping with `role` and `content` (text, or a list of parts)"
            )
    return prompts


def sampling_of(rollout: RolloutConfig, asked: Mapping[str, Any]) -> Sampling:
    """Make the sampling parameters of these options, the others from `rollout`. Raises RunError for
    another option, and for a value that an option does not take.
    """
    if unknown := [name for name in asked if name not in _OPTIONS]:
        raise RunError(f"generate() has no option {unknown[0]}; there are {', '.join(_OPTIONS)}")
    for name, value in asked.items():
        kind, fits, allowed = _OPTIONS[name]
        if isinstance(value, bool) or not isinstance(value, kind) or not fits(value):
            raise RunError(f"{name} is {_shown(value)}; it is {allowed}")
    longest = rollout.response_length
    sampling = Sampling(
        n=int(asked.get("n", 1)),
        max_tokens=int(asked.get("max_tokens", longest)),
        temperature=float(asked.get("temperature", rollout.temperature)),
        top_p=float(asked.get("top_p", rollout.top_p)),
        top_k=int(asked.get("top_k", rollout.top_k)),
        min_p=float(asked.get("min_p", rollout.min_p)),
    )
    if sampling.max_tokens > longest:
        raise RunError(f"max_tokens is 1 to rollout.response_length = {longest}")
    if sampling.temperature == 0 and sampling.n > 1:
        raise RunError(f"n is {sampling.n}; with temperature 0 all responses are the same: n is 1")
    return sampling


async def generate(
    engine: Engine, tokenizer: Any, rollout: RolloutConfig, prompt: Prompt, sampling: Sampling
) -> list[Generated]:
    """Generate `n` responses to a prompt. Raises RunError for one without tokens, and for one
    without room in `rollout.prompt_length`.
    """
    if not isinstance(prompt, str) and tokenizer.chat_template is None:
        raise RunError("the tokenizer has no chat template: give the prompt as text")
    ids = prompt_ids(tokenizer, prompt)
    if not ids:
        raise RunError(f"a prompt is {_shown(prompt)}, which has no tokens")
    if len(ids) > rollout.prompt_length:
        raise RunError(
            f"a prompt has {len(ids)} tokens, and rollout.prompt_length is {rollout.prompt_length}"
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


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and len(prompt) > 0
        and all(isinstance(message, Mapping) and _is_message(message) for message in prompt)
    )


def _is_message(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if content is None:  # an assistant that only calls tools says nothing
        return message.get("role") == "assistant"
    if isinstance(content, list | tuple):
        return isinstance(message.get("role"), str) and all(
            isinstance(part, Mapping) for part in content
        )
    return isinstance(message.get("role"), str) and isinstance(content, str)


def _shown(value: object) -> str:
    return shortened(repr(value), 100)
