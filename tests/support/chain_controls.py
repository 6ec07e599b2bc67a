"""The chain with something wrong, which must keep it from being learned."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from async_grpo.environments.base import Action, Observation
from async_grpo.environments.chain import Chain, ChainEnvironment
from async_grpo.rollout.session import SessionRow

SLOW_S = 0.2


class _Blank(ChainEnvironment):
    def step(self, action: Action) -> Observation:
        answer = super().step(action)
        return answer if answer.done or answer.invalid else Observation("?>", verdict=0.0)


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
        return Observation(f"{(digit + 1) % 10}>", verdict=0.0)


class ShiftedChain(Chain):
    """Every answer is the token beside the right one."""

    def environment(self) -> ChainEnvironment:
        return _Next()


class _Slow(ChainEnvironment):
    async def step(self, action: Action) -> Observation:  # type: ignore[override]
        await asyncio.sleep(SLOW_S)
        return super().step(action)


class SlowChain(Chain):
    """Its environments take about as long as a turn is generated on two cores."""

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
