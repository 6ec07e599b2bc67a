"""Episodes of chats with tools: what the engine is asked, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

from async_grpo.config import schema
from async_grpo.config.schema import Config
from async_grpo.environments.pool import EnvironmentPool
from async_grpo.environments.tools import with_tools
from async_grpo.errors import SetupError
from async_grpo.rollout.chat_format import chat_format_of
from async_grpo.rollout.engine.base import Completion, Sampling
from async_grpo.rollout.episodes import Episode, EpisodePlayer, PlayerParts
from async_grpo.run.preflight.model import look
from async_grpo.tasks.base import Problem
from tests.support.chat_templates import tokenizer_of
from tests.support.tools import Asks, AsksInText

SUPPORT = "tests.support.tools"
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "one"}}\n</tool_call>'


class Engine:
    """Says these turns."""

    def __init__(self, tokenizer: Any, turns: list[str]) -> None:
        self._tokenizer, self._turns = tokenizer, list(turns)
        self.stop_token_ids = (tokenizer.eos_token_id,)
        self.asked: list[str] = []

    async def generate(self, tokens: list[int], sampling: Sampling, **_: Any) -> list[Completion]:
        self.asked.append(self._tokenizer.decode(tokens))
        ids = self._tokenizer(self._turns.pop(0), add_special_tokens=False)["input_ids"]
        ids = np.array([*ids, *self.stop_token_ids], np.int32)
        return [Completion(ids, np.zeros(len(ids), np.float32), [("v0.0", 0, len(ids))], "stop", 1)]


def config_of(task: str = "Asks", **more: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"total_steps": 2},
            "model": {"path": "m"},
            "task": {"name": f"{SUPPORT}:{task}"},
            "rollout": {"prompt_length": 900, "response_length": 400, "context_length": 900},
            "environment": {"workers": 1, "tools": [f"{SUPPORT}.search"]},
        }
        | more
    )


def played(turns: list[str]) -> tuple[Episode, list[str]]:
    async def main() -> tuple[Episode, list[str]]:
        config, tokenizer = config_of(), tokenizer_of("hermes")
        task = with_tools(Asks(None, 0), config.environment.tools)
        pool = EnvironmentPool(config.task, config.environment, weights=task.weights, seed=0)
        await pool.start()
        try:
            engine: Any = Engine(tokenizer, turns)
            parts = PlayerParts(config, engine, tokenizer, Counter())
            chat = chat_format_of(config, tokenizer, task)
            player = EpisodePlayer(parts, pool, weights=task.weights, chat=chat)
            sampling = Sampling(n=1, max_tokens=0, temperature=1.0)
            return await player.play(task.train(0), sampling, seed=0), engine.asked
        finally:
            await pool.close()

    return asyncio.run(main())


def test_a_call_is_answered_behind_the_turn_and_the_last_turn_is_scored() -> None:
    episode, asked = played(["look: " + CALL, "two"])
    assert '"description": "Look something up."' in asked[0]
    assert asked[0].endswith("what follows one?<|im_end|>\n<|im_start|>assistant\n")
    assert asked[1] == (
        asked[0] + f"look: {CALL}<|im_end|>\n<|im_start|>tool\ntwo<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert (episode.finish_reason, episode.verdict, episode.rewards) == (
        "env_done",
        1.0,
        {"right": 1.0},
    )
    [row] = episode.session.rows
    assert [context > 0 for context, _ in row.segments] == [False, True]
    assert episode.said == ["look: " + CALL, "[tool] two", "two"]


def test_a_call_that_makes_no_sense_is_told_and_enough_of_them_end_the_episode() -> None:
    episode, asked = played(["<tool_call>{no</tool_call>"] * 3)
    assert "[user] Error: a tool call cannot be read" in episode.said[1]
    assert episode.finish_reason == "invalid_action" and len(asked) == 3
    assert episode.rewards == {"right": 0.0} and episode.verdict == 0.0


def test_a_text_cannot_have_tools() -> None:
    with pytest.raises(
        SetupError, match=r"there are tools \(search\), but task .*has plain-text prompts"
    ):
        look(config_of("AsksInText"), AsksInText(None, 0))


def test_prompts_are_measured_with_their_tools() -> None:
    config, tokenizer = config_of(), tokenizer_of("hermes")
    from async_grpo.run.preflight.model import _chat, _encoded

    task, problem = Asks(None, 0), Asks(None, 0).train(0)
    alone = _encoded(config, "m", tokenizer, problem, None)
    chat = _chat(config, tokenizer, task)
    assert len(_encoded(config, "m", tokenizer, problem, chat)) > len(alone) + 100
    assert _chat(config_of(environment={}), tokenizer, task) is None
    assert isinstance(problem, Problem) and isinstance(config.task, schema.TaskConfig)
