"""What a user may ask of `Trainer.generate`, and what is refused before anything is sent."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from async_grpo.config.operation import Evaluation
from async_grpo.config.schema import Config, RolloutConfig
from async_grpo.errors import RunError
from async_grpo.observe.console.console import Console
from async_grpo.rollout.engine.base import Sampling
from async_grpo.rollout.generation import generate, prompts_of, sampling_of
from async_grpo.run.trainer import Trainer
from tests.wiring.run import doubles

ROLLOUT = RolloutConfig(prompt_length=4, response_length=8, temperature=0.9)
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]


def test_texts_and_chats_are_prompts() -> None:
    assert prompts_of(["1+1=", CHAT]) == ["1+1=", CHAT] and prompts_of([]) == []
    assert prompts_of(text for text in ("a", "b")) == ["a", "b"]
    column = np.empty(2, dtype=object)  # as pandas reads a list of messages in Parquet
    column[:] = [np.array(CHAT, dtype=object), "1+1="]
    assert prompts_of(column) == [CHAT, "1+1="]


def test_messages_may_be_calls_of_tools_and_parts() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    parts = {"role": "user", "content": [{"type": "text", "text": "q"}]}
    answered = {"role": "tool", "content": "1"}
    for silent in ({"role": "assistant"}, {"role": "assistant", "content": None}):
        chat = [parts, silent | {"tool_calls": [call]}, answered]
        assert prompts_of([chat]) == [chat]


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ("1+1=", r"takes a list of prompts, not '1\+1=': write \[\.\.\.\]"),
        (CHAT[0], r"takes a list of prompts, not \{'role'"),
        (None, r"takes a list of prompts, not None"),
        (CHAT, r"a list of messages is one prompt, .* write \[\[\.\.\.\]\]"),
        (["a", 5], "a prompt is 5; allowed is text, or a list of messages"),
        (["a", []], r"a prompt is \[\]; allowed is text"),
        ([["a"]], r"a prompt is \['a'\]; allowed is text"),
        ([[{"role": "user"}]], "each a mapping with `role` and `content`"),
        ([[{"role": 1, "content": "a"}]], "each a mapping with `role` and `content`"),
        ([[{"role": "user", "content": ["a"]}]], "each a mapping with `role` and `content`"),
    ],
)
def test_what_is_no_list_of_prompts_is_one_sentence(prompts: Any, says: str) -> None:
    with pytest.raises(RunError, match=says):
        prompts_of(prompts)


def test_options_take_the_place_of_the_runs() -> None:
    usual = Sampling(n=1, max_tokens=8, temperature=0.9, top_p=1.0, top_k=0)
    assert sampling_of(ROLLOUT, {}) == usual
    asked = {
        "n": np.int64(2),
        "max_tokens": 3,
        "temperature": 1,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": 0.1,
    }
    made = sampling_of(ROLLOUT, asked)
    assert made == Sampling(n=2, max_tokens=3, temperature=1.0, top_p=0.5, top_k=-1, min_p=0.1)
    assert type(made.n) is int and type(made.temperature) is float
    assert sampling_of(ROLLOUT, {"temperature": 0}).temperature == 0


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"stop": "x"}, "has no option stop; there are n, max_tokens"),
        ({"n": 0}, "n is 0; it is a whole number, at least 1"),
        ({"n": 1.5}, "n is 1.5; it is a whole number"),
        ({"n": True}, "n is True; it is a whole number"),
        ({"max_tokens": "5"}, "max_tokens is '5'; it is a whole number"),
        ({"max_tokens": None}, "max_tokens is None; it is a whole number"),
        ({"max_tokens": 9}, "max_tokens is 1 to rollout.response_length = 8"),
        ({"temperature": -1}, "temperature is -1; it is a number of 0 to 2"),
        ({"temperature": float("nan")}, "temperature is nan; it is a number of 0 to 2"),
        ({"temperature": "hot"}, "temperature is 'hot'; it is a number of 0 to 2"),
        ({"temperature": 2.5}, "temperature is 2.5; it is a number of 0 to 2"),
        ({"temperature": 0, "n": 2}, "n is 2; with temperature 0 all responses are the same"),
        ({"top_p": 0}, "top_p is 0; it is a number above 0, at most 1"),
        ({"min_p": 1.5}, "min_p is 1.5; it is a number of 0 to 1"),
        ({"top_k": -2}, "top_k is -2; it is a whole number; 0 is all tokens"),
    ],
)
def test_what_an_option_does_not_take_is_one_sentence(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(RunError, match=says):
        sampling_of(ROLLOUT, asked)


def test_vllm_takes_what_is_not_refused() -> None:
    sampling_params = pytest.importorskip("vllm").SamplingParams
    ends = {
        "n": (1, 16384),
        "temperature": (0, 2),
        "top_p": (0.01, 1),
        "top_k": (-1, 10**6),
        "min_p": (0, 1),
    }
    for name, values in ends.items():
        for value in values:
            made = sampling_of(ROLLOUT, {name: value})
            assert getattr(sampling_params(**{name: getattr(made, name)}), name) is not None


def test_a_temperature_that_vllm_does_not_take_is_refused_in_every_place() -> None:
    vllm = pytest.importorskip("vllm")
    with pytest.raises(vllm.exceptions.VLLMValidationError):
        vllm.SamplingParams(temperature=2.01)
    for section in (RolloutConfig, Evaluation):
        with pytest.raises(ValidationError, match="less than or equal to 2"):
            section(temperature=2.01)
        assert section(temperature=2.0).temperature == 2
    with pytest.raises(RunError, match="a number of 0 to 2"):
        sampling_of(ROLLOUT, {"temperature": 2.01})


@pytest.mark.parametrize(("prompts", "asked"), [("1+1=", {}), (["1+1="], {"temperature": -1})])
def test_nothing_starts_for_what_is_refused(prompts: Any, asked: Any, tmp_path: Path) -> None:
    config = Config.model_validate(
        {"run": {"dir": str(tmp_path / "run"), "total_steps": 1}, "model": {"path": "m"}}
    )
    seen: list[Any] = []
    with doubles(seen), Trainer(config, console=Console(io.StringIO())) as trainer:
        with pytest.raises(RunError, match=r"takes a list of prompts|temperature is -1"):
            trainer.generate(prompts, **asked)
        assert seen == [] and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "a prompt is '', which has no tokens"),
        ("12345", "a prompt has 5 tokens, and rollout.prompt_length is 4"),
        (CHAT, "the tokenizer has no chat template: give the prompt as text"),
    ],
)
async def test_a_prompt_that_cannot_be_generated_from_is_one_sentence(
    prompt: Any, says: str
) -> None:
    class Tokenizer:
        chat_template = None

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) for letter in text]}

    engine: Any = SimpleNamespace(generate=None)
    with pytest.raises(RunError, match=says):
        await generate(engine, Tokenizer(), ROLLOUT, prompt, sampling_of(ROLLOUT, {}))
