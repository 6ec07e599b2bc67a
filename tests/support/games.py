"""Packages of games as their users see them: the parts of `gymnasium`, `textarena` and `skyrl_gym`
that the adapters touch.
"""

from __future__ import annotations

import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock


class Corridor:
    """`gymnasium`: walk to the end; actions are 0 and 1, or texts."""

    def __init__(self, *, length: int = 3, texts: bool = False, render_mode: str = "") -> None:
        self.length, self.texts = length, texts
        self.action_space = SimpleNamespace() if texts else SimpleNamespace(n=2, start=0)
        self.closed = False

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        self.at, self.seed = random.Random(seed).randint(0, 1), seed
        return (f"at {self.at}" if self.texts else self.at), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert isinstance(action, str if self.texts else int)
        self.at += 1 if action in (1, "on") else -1
        ended = self.at >= self.length
        return (f"at {self.at}" if self.texts else self.at), float(ended), ended, self.at < -1, {}

    def render(self) -> str:
        return "." * max(0, self.at) + "\x1b[41m@\x1b[0m"

    def close(self) -> None:
        self.closed = True


class Guess:
    """`textarena`: guess a number; the reward comes with the end."""

    def reset(self, *, num_players: int, seed: int) -> None:
        assert num_players == 1
        self.number, self.said = random.Random(seed).randint(0, 9), ["guess"]

    def get_observation(self) -> tuple[int, list[tuple[int, str, int]]]:
        seen, self.said = self.said, []
        return 0, [(-1, text, 1) for text in seen]

    def step(self, *, action: str) -> tuple[bool, dict[str, Any]]:
        self.right = action == str(self.number)
        self.said.append("no")
        return self.right, {}

    def close(self) -> tuple[dict[int, float], dict[int, Any]]:
        return {0: 1.0 if self.right else 0.0}, {}


class Echo:
    """`skyrl_gym`: wants the truth, says what it wants."""

    def __init__(self, *, env_config: dict[str, Any], extras: dict[str, Any]) -> None:
        self.truth, self.hint = extras["reward_spec"]["ground_truth"], env_config.get("hint")
        self.changes = extras.get("changes", False)

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        hint = [{"role": "user", "content": self.hint}] if self.hint else []
        return ([*hint, *prompt] if self.changes else [*prompt, *hint]), {}

    def step(self, action: str) -> dict[str, Any]:
        right = action == self.truth
        said = [] if right else [{"role": "user", "content": "again"}]
        return {"observations": said, "reward": float(right), "done": right, "metadata": {}}

    def close(self) -> None: ...


def installed() -> Any:
    """The three packages, as if they were installed."""

    def package(name: str, **games: Any) -> ModuleType:
        found = ModuleType(name)
        found.make = lambda game, **arguments: games[game](**arguments)  # type: ignore[attr-defined]
        return found

    return mock.patch.dict(
        sys.modules,
        {
            "gymnasium": package("gymnasium", Corridor=Corridor),
            "textarena": package("textarena", Guess=Guess),
            "skyrl_gym": package("skyrl_gym", echo=Echo),
        },
    )
