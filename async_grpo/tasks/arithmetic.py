"""Addition of short numbers: `a+b=`, answered with the digits of the sum in reverse.

Runs in: the driver, the rollout actors and verifier children. Hides how an index becomes a pair.
Invariants: a pair (a, b) is training or held-out by a hash of the pair itself, so no index and no
seed can mix them; reversed digits let a left-to-right model carry.
"""

from __future__ import annotations

from functools import cached_property
from hashlib import blake2b
from typing import Annotated, Any, ClassVar

from pydantic import Field

from async_grpo.config import schema
from async_grpo.config.section import Section
from async_grpo.tasks.base import Problem, Score, parse_options, refuse_rows

TRAIN_PROBLEMS = 2**20
_HELD_OUT_ONE_IN = 8
_MAX_TRIES = 20_000


class ArithmeticOptions(Section):
    """Options of the task `arithmetic`."""

    max_digits: Annotated[int, Field(ge=1, le=9)] = 3
    """Longest operand; the length of each operand is uniform from 1 to this."""


class Arithmetic:
    """Virtual training set of 2^20 indices (short pairs repeat); needs no data."""

    weights: ClassVar[dict[str, float]] = {"correct": 1.0, "format": 0.0}

    def __init__(self, settings: schema.TaskConfig, seed: int) -> None:
        """`seed` changes only the order of the problems, which is not decided here."""
        refuse_rows(settings)
        self._max_digits = parse_options(ArithmeticOptions, settings).max_digits

    @cached_property
    def fingerprint(self) -> str:
        """Names the only option; see `Task.fingerprint`."""
        return f"arithmetic-1-{self._max_digits}"

    def __len__(self) -> int:
        return TRAIN_PROBLEMS

    def train(self, index: int) -> Problem:
        """Training problem `index`; see `Task.train`."""
        if not 0 <= index < TRAIN_PROBLEMS:
            raise IndexError(f"problem {index} of {TRAIN_PROBLEMS}")
        # Seven of eight pairs are for training: a thousand misses in a row do not happen.
        for attempt in range(1000):
            pair = self._pair("train", index, attempt)
            if not is_held_out(*pair):
                return _problem(*pair)
        raise RuntimeError(f"no training pair for index {index}")

    def evaluation(self, n: int) -> list[Problem]:
        """`n` distinct held-out pairs; with 1 or 2 digits there are about 12 or 1,250 in all."""
        pairs: dict[tuple[int, int], None] = {}
        for attempt in range(_MAX_TRIES + 64 * n):
            if len(pairs) >= n:
                break
            pair = self._pair("held out", 0, attempt)
            if is_held_out(*pair):
                pairs[pair] = None
        return [_problem(*pair) for pair in pairs]

    def score(self, response: str, reference: Any) -> Score:
        """Compare the stripped response with the reversed sum; `format` is 1 for digits alone."""
        correct = float(response.strip() == reference)
        return Score({"correct": correct, "format": float(response.strip().isdecimal())}, correct)

    def _pair(self, domain: str, index: int, attempt: int) -> tuple[int, int]:
        digest = blake2b(f"{domain} {index} {attempt}".encode(), digest_size=32).digest()
        words = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 32, 8)]
        return _operand(words[0] % self._max_digits + 1, words[1]), _operand(
            words[2] % self._max_digits + 1, words[3]
        )


def is_held_out(a: int, b: int) -> bool:
    """Whether the pair belongs to the held-out problems (one in eight)."""
    return blake2b(f"split {a}+{b}".encode(), digest_size=8).digest()[0] % _HELD_OUT_ONE_IN == 0


def _operand(digits: int, word: int) -> int:
    low = 0 if digits == 1 else 10 ** (digits - 1)
    return low + word % (10**digits - low)


def _problem(a: int, b: int) -> Problem:
    answer = str(a + b)[::-1]
    return Problem(prompt=f"{a}+{b}=", reference=answer, solution=answer)
