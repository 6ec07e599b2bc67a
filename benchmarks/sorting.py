"""The digits of a number, sorted: a task of another kind than addition, for
`benchmarks.staleness`.

Runs in: every process of a run, as `task.name: benchmarks.sorting:Sorting`. Every digit of the
answer depends on all digits of the problem, and nothing is carried from one to the next. A number
is training or held out by a hash of itself.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, ClassVar

from async_grpo.tasks.base import Problem, Score
from benchmarks.generated import HELD_OUT_ONE_IN, Generated

DIGITS = 5


class Sorting(Generated):
    """Five digits; 2^20 indices over the 87,500 training numbers."""

    weights: ClassVar[dict[str, float]] = {"correct": 1.0, "format": 0.0}
    fingerprint = f"sorting-1-{DIGITS}"

    def problem(self, domain: str, index: int, *, held_out: bool) -> Problem:
        """See `Generated.problem`."""
        number = _number(domain, index, held_out=held_out)
        answer = "".join(sorted(number))
        return Problem(prompt=f"{number}>", reference=answer, solution=answer)

    def score(self, response: str, reference: Any) -> Score:
        """Compare the stripped response with the sorted digits; `format` is 1 for digits alone."""
        correct = float(response.strip() == reference)
        return Score({"correct": correct, "format": float(response.strip().isdecimal())}, correct)


def _number(domain: str, index: int, *, held_out: bool) -> str:
    """The first number of a sequence that is on this side of the split."""
    attempt = 0
    while True:
        digest = blake2b(f"{domain} {index} {attempt}".encode(), digest_size=8).digest()
        number = f"{int.from_bytes(digest, 'little') % 10**DIGITS:0{DIGITS}}"
        split = blake2b(f"split {number}".encode(), digest_size=8).digest()[0]
        if (split % HELD_OUT_ONE_IN == 0) == held_out:
            return number
        attempt += 1
