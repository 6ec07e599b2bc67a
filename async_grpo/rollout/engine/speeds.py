"""How fast an engine samples, by how many responses run.

Runs in: rollout actors. Reads the tokens of every step of the engine, each response's next one:

    step with n tokens, dt seconds after the one before it -> sums of n and dt, by size of n
    (or after the request that an idle engine got)
    steps behind a publication that threw caches away, until every response has a token again
        -> what they took more than others, `again`

The planner makes the engine's curve of them (`plan.measure`). What an engine samples in a step for
nobody is left out; on GPUs with speculation a response may have several tokens of a step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

KINDS = ("s", "tokens", "steps")
AGAIN = "again"
"""In the place of a size: seconds, sampled tokens and publications of what was computed again."""


def size(tokens: int) -> int:
    """Return the largest number that is counted together with this one: 1, 2, 4, 8, ..."""
    return 1 << (tokens - 1).bit_length()


class Speeds:
    """Adds up steps of an engine."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._since = clock, 0.0
        self._sums: Counter[str] = Counter()
        self._paused = False
        self._again: _Again | None = None

    def asked(self) -> None:
        """Note that a request is sent: an idle engine begins with it."""
        if not self._since and not self._paused:
            self._since = self._clock()

    def resumed(self, lengths: Sequence[int]) -> None:
        """Note that an engine that stood still goes on. lengths: sampled tokens of each response
        that has to be computed again.
        """
        self._paused, self._since = False, self._clock()
        self._again = _Again(len(lengths), sum(lengths)) if lengths else None

    def stepped(self, tokens: int, *, goes_on: bool) -> None:
        """Note a step. goes_on: responses are left, so that the next one follows at once."""
        now, since = self._clock(), self._since
        self._since = now if goes_on else 0.0
        if not since:
            return
        if self._again is not None:
            self._recomputed(self._again, tokens, now - since, goes_on=goes_on)
        elif tokens > 0:
            self._add(size(tokens), now - since, tokens)

    def interrupted(self) -> None:
        """Note that the engine stands still."""
        self._paused, self._since = True, 0.0
        self._again = None

    def _recomputed(self, again: _Again, tokens: int, seconds: float, *, goes_on: bool) -> None:
        """Add a step to those behind a publication; count them when the last one is known."""
        again.seconds += seconds
        again.tokens += tokens
        if again.tokens < again.responses and goes_on:
            return
        self._again = None
        usual = f"engine_{size(again.responses)}"
        if known := self._sums[f"{usual}_tokens"]:
            more = again.seconds - again.tokens * self._sums[f"{usual}_s"] / known
            self._add(AGAIN, max(more, 0.0), again.held)

    def _add(self, what: int | str, seconds: float, tokens: int) -> None:
        for kind, more in zip(KINDS, (seconds, tokens, 1), strict=True):
            self._sums[f"engine_{what}_{kind}"] += more  # type: ignore[assignment]

    def totals(self) -> dict[str, float]:
        """Return sums since the process began: `engine_<size>_s`, `_tokens`, `_steps`, with
        `AGAIN` for a size, too.
        """
        return dict(self._sums)


@dataclass
class _Again:
    """Steps behind a publication, until as many tokens came as there were responses."""

    responses: int
    held: int
    """Tokens that these have by then."""
    seconds: float = 0.0
    tokens: int = 0
