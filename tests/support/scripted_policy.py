"""A policy that says what it is told to, and its tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from async_grpo.rollout.engine.base import Completion, Sampling

STOP = 1


class Letters:
    """A tokenizer of single characters."""

    eos_token_id = STOP
    chat_template = None

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [*text.encode()]}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(ids).decode()


class Saying:
    """An engine that says these turns, in order; one episode's after the other's where several are
    played. A turn that has no room is cut off. Every turn is of the next version.
    """

    stop_token_ids = (STOP,)
    max_num_seqs, serving_version = 64, 0

    def __init__(
        self, *turns: str | Exception, slow_s: float = 0.0, version: int | None = None
    ) -> None:
        """version: of all turns."""
        self.turns, self.slow_s = list(turns), slow_s
        self.version = version
        self.asked: list[tuple[str, Sampling]] = []
        self.running = self.unfinished = 0

    async def generate(
        self, tokens: list[int], sampling: Sampling, *, name: str = "", purpose: str = "rollouts"
    ) -> list[Completion]:
        self.asked.append((bytes(tokens).decode(), sampling))
        said = self.turns.pop(0)
        if isinstance(said, Exception):
            raise said
        await asyncio.sleep(self.slow_s)
        ids = [*said.encode(), STOP][: sampling.max_tokens]
        ended = "stop" if len(ids) == len(said) + 1 else "length"
        version = len(self.asked) - 1 if self.version is None else self.version
        return [
            Completion(
                np.array(ids, np.int32),
                -np.arange(len(ids), dtype=np.float32) - version,
                [(f"v0.{version}", 0, len(ids))],
                ended,
                float(len(self.asked)),
            )
        ]

    def cut_off(self, name: str) -> int:
        return 3

    async def check(self) -> None: ...
