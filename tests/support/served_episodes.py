"""An episode that is served to whoever asks, of a policy that says what it is told to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import numpy as np

from async_grpo.agents.endpoint.served import ServedEpisode
from async_grpo.config.schema import RolloutConfig
from async_grpo.rollout.chat_format import ChatFormat, PlainFormat, Said
from async_grpo.rollout.engine.base import Completion, Sampling
from async_grpo.rollout.episodes import Episode
from async_grpo.rollout.session import Session
from tests.support.scripted_policy import STOP, Letters


class Policy:
    """Says the next of its turns; `hold` keeps answers back until it is set."""

    def __init__(self, *turns: str) -> None:
        self.turns, self.asked = list(turns), list[str]()
        self.caps, self.hold = list[int](), asyncio.Event()
        self.hold.set()

    async def sample(self, tokens: list[int], sampling: Sampling) -> Completion:
        number = len(self.asked)
        self.asked.append(bytes(tokens).decode(errors="replace"))
        self.caps.append(sampling.max_tokens)
        said = self.turns.pop(0) if self.turns else f"t{number}"
        await self.hold.wait()
        ids = [*said.encode(), STOP][: sampling.max_tokens]
        labels = [(f"v0.{number}", 0, len(ids))]
        reason = "stop" if ids[-1] == STOP else "length"
        logprobs = -np.arange(len(ids), dtype=np.float32) - number
        return Completion(np.array(ids, np.int32), logprobs, labels, reason, 1.0)


class Reasoning(PlainFormat):
    """Of turns that think first: `<plan>answer`; a turn that calls says `!name`."""

    def read(self, prompt: Sequence[int], ids: Sequence[int], text: str) -> Said:
        if text.startswith("!"):
            return Said("", [{"name": text[1:], "arguments": {"b": 1, "a": 2}}])
        thought, _, answer = text.rpartition(">")
        return Said(answer, reasoning=thought[1:] or None)


def served(
    policy: Policy, *, reasons: bool = False, chat: ChatFormat | None = None, **limits: int
) -> ServedEpisode:
    rollout = RolloutConfig.model_validate(
        {"prompt_length": 40, "response_length": 60, "context_length": 200, "max_turns": 20}
        | limits
    )
    kind = Reasoning if reasons else PlainFormat
    form = chat or kind(Letters())
    return ServedEpisode(
        rollout,
        Episode(Session(), {"correct": 0.0}),
        sample=policy.sample,
        formats=lambda tools: form,
        text=lambda ids: bytes(one for one in ids if one != STOP).decode(errors="replace"),
        sampling=Sampling(n=1, max_tokens=60, temperature=1.0),
        counts=Counter(),
    )
