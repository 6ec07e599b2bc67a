"""Tools that take time: two tasks whose environment answers late, for `benchmarks.async_vs_sync`.

Runs in: every process of a run, by the names in slow_chain.yaml and slow_calculator.yaml. A call
takes a time drawn from a log-normal distribution of mean `mean_s` and shape 1, cut off at ten times
the mean: of a hundred calls half take less than 0.6 of the mean, one takes more than 6 times as
long. Held-out problems are answered at once, so that an evaluation costs both sides the same.
"""

from __future__ import annotations

import asyncio
import random
import re
import zlib
from typing import Annotated, Any, ClassVar

from pydantic import Field

from async_grpo.config import schema
from async_grpo.config.section import Section
from async_grpo.environments.base import Action, Observation
from async_grpo.environments.calculator import calculator
from async_grpo.environments.chain import Chain, ChainEnvironment
from async_grpo.tasks.base import Problem, parse_options, refuse_rows

SHAPE, LONGEST = 1.0, 10.0
"""Of the logarithm's normal distribution; the longest time, in means."""
TRAIN_PROBLEMS, HELD_OUT_ONE_IN = 2**20, 8


class Latency(Section):
    """Options of both tasks."""

    mean_s: Annotated[float, Field(ge=0)] = 0.5
    """Mean time of a call of the tool."""


def seconds(mean_s: float, draw: random.Random) -> float:
    """The time of one call."""
    return mean_s * min(LONGEST, draw.lognormvariate(-(SHAPE**2) / 2, SHAPE))


class Slow:
    """An environment whose answers to a training problem come late."""

    replayable = True

    def __init__(self, inner: Any, mean_s: float) -> None:
        self._inner, self._mean_s = inner, mean_s
        self._draw = random.Random()

    def reset(self, reference: Any, seed: int) -> Observation:
        """Begin; a held-out problem is answered at once."""
        if reference["held_out"]:
            self._mean_s = 0.0
        return self._inner.reset(reference, seed)

    async def step(self, action: Action) -> Observation:
        """Answer, as late as the tool is slow. Whoever ends the episode has called no tool."""
        found = self._inner.step(action)
        if not found.done:
            await asyncio.sleep(seconds(self._mean_s, self._draw))
        return found

    def close(self) -> None:
        """Nothing is held."""


class SlowChain(Chain):
    """The task `chain` with slow pointers, one to six of them."""

    def __init__(self, settings: schema.TaskConfig, seed: int) -> None:
        self._mean_s = parse_options(Latency, settings).mean_s
        super().__init__(settings.model_copy(update={"options": {"max_steps": 6}}), seed)

    def environment(self) -> Any:
        """Return a new environment."""
        return Slow(ChainEnvironment(), self._mean_s)

    def _problem(self, name: str) -> Problem:
        found = super()._problem(name)
        held_out = {"held_out": name.startswith("held out")}
        return Problem(found.prompt, found.reference | held_out, solution=found.solution)


class SlowCalculator:
    """Expressions of two to four numbers, worked out from left to right with a calculator that
    takes two at a time: `12*7+5>` wants `12*7` (`84>`), `84+5` (`89>`), and `=89`.
    """

    weights: ClassVar[dict[str, float]] = {"correct": 1.0}
    fingerprint = "slow-calculator-1"

    def __init__(self, settings: schema.TaskConfig, seed: int) -> None:
        refuse_rows(settings)
        self._mean_s = parse_options(Latency, settings).mean_s

    def __len__(self) -> int:
        return TRAIN_PROBLEMS

    def train(self, index: int) -> Problem:
        """Training problem `index`; see `Task.train`."""
        if not 0 <= index < TRAIN_PROBLEMS:
            raise IndexError(f"problem {index} of {TRAIN_PROBLEMS}")
        return _expression(f"train {index}", held_out=False)

    def evaluation(self, n: int) -> list[Problem]:
        """`n` held-out problems."""
        return [_expression(f"held out {index}", held_out=True) for index in range(n)]

    def environment(self) -> Slow:
        """Return a new environment."""
        return Slow(Calculation(), self._mean_s)


class Calculation:
    """Answers two numbers at a time, and judges what follows `=`."""

    def reset(self, reference: Any, seed: int) -> Observation:
        """Take the result; there is nothing to see yet."""
        self._result = reference["result"]
        return Observation()

    def step(self, action: Action) -> Observation:
        """Answer `<number><+ or *><number>`, and end the episode at `=<number>`."""
        said = action.text.strip()
        if said.startswith("="):
            right = float(said[1:] == self._result)
            return Observation(rewards={"correct": right}, done=True, correct=right)
        if not re.fullmatch(r"\d{1,6}[+*]\d{1,6}", said):
            return Observation("?>", correct=0.0, invalid=True)
        try:
            return Observation(f"{calculator(said)}>", correct=0.0)
        except ValueError:  # 007 is no number
            return Observation("?>", correct=0.0, invalid=True)

    def close(self) -> None:
        """Nothing is held."""


def _expression(name: str, *, held_out: bool) -> Problem:
    """Draw the first expression of a sequence that is on this side of the split."""
    draw = random.Random(name)
    while True:
        at = str(draw.randint(10, 99))
        prompt, said = at, list[str]()
        for _ in range(draw.randint(1, 3)):
            more = draw.choice("+*") + str(draw.randint(2, 9))
            prompt += more
            said.append(at + more)
            at = calculator(said[-1])
            said.append(f"{at}>")
        if (zlib.crc32(prompt.encode()) % HELD_OUT_ONE_IN == 0) == held_out:
            reference = {"result": at, "held_out": held_out}
            return Problem(f"{prompt}>", reference, solution=(*said, f"={at}"))
