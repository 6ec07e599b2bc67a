"""The chain with something wrong, which must keep it from being learned."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from async_grpo.environments.base import Action, Observation
from async_grpo.environments.chain import Chain, ChainEnvironment
from async_grpo.rollout.session import SessionRow


class _Blank(ChainEnvironment):
    def step(self, action: Action) -> Observation:
        answer = super().step(action)
        return answer if answer.done or answer.invalid else Observation("?>", correct=0.0)


class BlankChain(Chain):
    """Nothing can be read in what the environment answers."""

    def environment(self) -> ChainEnvironment:
        return _Blank()


class _Next(ChainEnvironment):
    def step(self, action: Action) -> Observation:
        answer = super().step(action)
        if answer.done or answer.invalid:
            return answer
        digit = int(str(answer.content)[0])
        return Observation(f"{(digit + 1) % 10}>", correct=0.0)


class ShiftedChain(Chain):
    """Every answer is the token beside the right one."""

    def environment(self) -> ChainEnvironment:
        return _Next()


class _Slow(ChainEnvironment):
    """Takes as long for an answer as the turn before it took."""

    def reset(self, problem: Any, seed: int) -> Observation:
        first = super().reset(problem, seed)
        self._since = time.monotonic()
        return first

    async def step(self, action: Action) -> Observation:  # type: ignore[override]
        await asyncio.sleep(time.monotonic() - self._since)
        answer = super().step(action)
        self._since = time.monotonic()
        return answer


class SlowChain(Chain):
    """Its environments take as long as generation, whatever the machine."""

    def environment(self) -> ChainEnvironment:
        return _Slow()


class TurnedChain(Chain):
    """The learner gets other tokens of the environment than the engine read: turned by one."""

    def __init__(self, settings: Any, seed: int) -> None:
        super().__init__(settings, seed)
        _turn()


def _turn() -> None:
    true_ids = SessionRow.response_ids.fget  # type: ignore[attr-defined]
    if true_ids.__module__ == __name__:
        return

    def response_ids(self: SessionRow) -> Any:
        ids, at = true_ids(self).copy(), 0
        for context, sampled in self.segments:
            ids[at : at + context] = np.roll(ids[at : at + context], 1)
            at += context + sampled
        return ids

    SessionRow.response_ids = property(response_ids)  # type: ignore[method-assign, assignment]
