"""Tools, and a task of rows that may be solved with them."""

from __future__ import annotations

import asyncio
import time
from typing import Any, ClassVar

from async_grpo.environments.base import Action, Observation
from async_grpo.tasks.base import Problem, Score

TABLE = {"one": "two", "two": "three"}


def search(query: str, limit: int = 1) -> str:
    """
    Look something up.

    Args:
        query: What to look for.
        limit: How often.
    """
    for _ in range(limit):
        query = TABLE[query]
    return query


async def later(query: str) -> dict[str, str]:
    """
    Look something up, and give way.

    Args:
        query: What to look for.
    """
    await asyncio.sleep(0.1)
    return {"found": TABLE[query]}


def broken() -> str:
    """Break."""
    raise ConnectionError("no network")


def hangs() -> str:
    """Hang."""
    time.sleep(60)
    return ""


def undescribed(query: str) -> str:
    return query


class Asks:
    """Problems in chat messages whose answer is a word."""

    weights: ClassVar[dict[str, float]] = {"right": 1.0}
    fingerprint = "asks"

    def __init__(self, settings: Any, seed: int) -> None: ...

    def __len__(self) -> int:
        return 2

    def train(self, index: int) -> Problem:
        return Problem([{"role": "user", "content": "what follows one?"}], "two")

    def evaluation(self, n: int) -> list[Problem]:
        return [self.train(0)][:n]

    def score(self, response: str, reference: Any) -> Score:
        right = float(response.strip() == reference)
        return Score({"right": right}, right)


class AsksInText(Asks):
    """The same in text."""

    def train(self, index: int) -> Problem:
        return Problem("what follows one?", "two")


class AsksInTurns(Asks):
    """The same with an environment that has a tool of its own, `answer`."""

    tools: ClassVar[list[Any]] = [
        search,
        {
            "type": "function",
            "function": {
                "name": "answer",
                "description": "Answer.",
                "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
            },
        },
    ]

    def environment(self) -> Waits:
        return Waits()


class Waits:
    """Waits for the answer."""

    def reset(self, reference: Any, seed: int) -> Observation:
        self._word = reference
        return Observation()

    def step(self, action: Action) -> Observation:
        for call in action.tool_calls:
            if call["name"] == "answer":
                right = float(call["arguments"].get("word") == self._word)
                return Observation(rewards={"right": right}, correct=right, done=True)
        return Observation("call a tool", invalid=True)

    def close(self) -> None: ...
