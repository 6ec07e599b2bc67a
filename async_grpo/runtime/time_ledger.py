"""Where time goes: a clock that is always set to one cause.

Runs in: the driver (the learner's time) and rollout actors (their engines'). Hides the arithmetic.
Invariant: from its first `switch` on, the seconds of all causes add up to the time that has passed,
whatever is switched when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

LEARNER_CAUSES = (
    "working",
    "starved",
    "publishing",
    "checkpointing",
    "evaluating",
    "restarting",
    "other",
)
"""starved: the queue has no batch. restarting: the ranks are brought back."""
ENGINE_CAUSES = ("working", "blocked", "verifying", "paused", "evaluating", "restarting", "other")
"""working: a group is being generated. verifying: none is, because all that are here wait for the
verifier. blocked: no ticket. paused: takes weights.
"""


class TimeByCause:
    """Seconds by cause. `began`: when it was set for the first time, in Unix seconds; 0.0
    before.
    """

    def __init__(
        self,
        causes: Sequence[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._seconds, self._clock, self._wall = dict.fromkeys(causes, 0.0), clock, wall
        self._since = 0.0
        self.cause = ""
        self.began = 0.0

    def switch(self, cause: str) -> str:
        """From now on time has this cause; the one before ("" at the beginning). Raises KeyError
        for one that does not exist.
        """
        now, before = self._clock(), self.cause
        self._seconds[cause] += 0.0
        if before:
            self._seconds[before] += now - self._since
        else:
            self.began = self._wall()
        self.cause, self._since = cause, now
        return before

    @contextmanager
    def during(self, cause: str) -> Iterator[None]:
        """Inside the block time has this cause, unless something in it says otherwise; afterwards
        the one before, or `other`.
        """
        before = self.switch(cause)
        try:
            yield
        finally:
            self.switch(before or "other")

    def seconds(self) -> dict[str, float]:
        """By cause, up to now; all 0.0 before the first `switch`."""
        out = dict(self._seconds)
        if self.cause:
            out[self.cause] += self._clock() - self._since
        return out
