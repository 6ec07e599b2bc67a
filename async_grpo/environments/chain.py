"""A chain of pointers that only the environment knows: the smallest task that needs a tool.

Runs in: the driver and rollout actors (problems), and environment children (`ChainEnvironment`).
`2:7>` asks for the digit to which one comes from 7 in two steps. `g7` gets the next digit (`4>`),
`a3` answers and ends the episode. The table of pointers belongs to the problem: without the tool
nobody is right more often than one time in ten. Hides how an index becomes a table.
Invariant: a problem is training or held-out by its index alone, and no table is in both.
"""

from __future__ import annotations

from functools import cached_property
from hashlib import blake2b
from typing import Annotated, Any, ClassVar

from pydantic import Field

from async_grpo.config import schema
from async_grpo.config.section import Section
from async_grpo.environments.base import Action, Observation
from async_grpo.tasks.base import Problem, parse_options, refuse_rows

TRAIN_PROBLEMS = 2**20


class ChainOptions(Section):
    """Options of the task `chain`."""

    max_steps: Annotated[int, Field(ge=1, le=9)] = 3
    """Longest chain; the length is uniform from 1 to this."""


class Chain:
    """Virtual training set of 2^20 chains; needs no data."""

    weights: ClassVar[dict[str, float]] = {"correct": 1.0}

    def __init__(self, settings: schema.TaskConfig, seed: int) -> None:
        """`seed` changes only the order of the problems, which is not decided here."""
        refuse_rows(settings)
        self._max_steps = parse_options(ChainOptions, settings).max_steps

    @cached_property
    def fingerprint(self) -> str:
        """Names the only option; see `Task.fingerprint`."""
        return f"chain-1-{self._max_steps}"

    def __len__(self) -> int:
        return TRAIN_PROBLEMS

    def train(self, index: int) -> Problem:
        """Training problem `index`; see `Task.train`."""
        if not 0 <= index < TRAIN_PROBLEMS:
            raise IndexError(f"problem {index} of {TRAIN_PROBLEMS}")
        return self._problem(f"train {index}")

    def evaluation(self, n: int) -> list[Problem]:
        """`n` held-out chains."""
        return [self._problem(f"held out {index}") for index in range(n)]

    def environment(self) -> ChainEnvironment:
        """Return a new environment."""
        return ChainEnvironment()

    def _problem(self, name: str) -> Problem:
        digest = blake2b(name.encode(), digest_size=16).digest()
        table, steps = [byte % 10 for byte in digest[:10]], digest[10] % self._max_steps + 1
        key = digest[11] % 10
        said, at = [], key
        for _ in range(steps):
            said += [f"g{at}", f"{table[at]}>"]
            at = table[at]
        return Problem(
            prompt=f"{steps}:{key}>",
            reference={"table": table, "answer": at},
            solution=(*said, f"a{at}"),
        )


class ChainEnvironment:
    """Looks up pointers, and judges the answer; who gives none is wrong."""

    replayable = True

    def __init__(self) -> None:
        self._table: list[int] = []
        self._answer = -1

    def reset(self, reference: Any, seed: int) -> Observation:
        """Take the problem's table; there is nothing to see yet."""
        self._table, self._answer = reference["table"], reference["answer"]
        return Observation()

    def step(self, action: Action) -> Observation:
        """Answer `g<digit>` with the digit it points to, and end the episode at `a<digit>`."""
        verb, digit = action.text[:1], action.text[1:]
        if len(digit) != 1 or not "0" <= digit <= "9" or verb not in ("g", "a"):
            return Observation("?>", correct=0.0, invalid=True)
        if verb == "g":
            return Observation(f"{self._table[int(digit)]}>", correct=0.0)
        right = float(int(digit) == self._answer)
        return Observation(rewards={"correct": right}, done=True, correct=right)

    def close(self) -> None:
        """Nothing is held."""
