"""Where time goes: a clock that is always set to one cause, and what is computed from its seconds.

Runs in: the driver (the learner's time), rollout actors (their engines') and the report. Hides the
arithmetic. Invariants: from the first `switch` on, the seconds of all causes add up to the time
that has passed, whatever is switched when; `LearnerTime` is the one definition of "the learner is
idle" and of "tokens per second".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

LEARNER_CAUSES = (
    "working",
    "idle",
    "weight_sync",
    "checkpointing",
    "evaluating",
    "restarting",
    "other",
)
"""idle: the queue has no batch. restarting: the ranks are restarted."""
ENGINE_CAUSES = (
    "working",
    "blocked",
    "verifying",
    "environment",
    "paused",
    "evaluating",
    "restarting",
    "other",
)
"""working: a group is generated. verifying: all wait for the verifier or a teacher. blocked: no
ticket.
"""
LEARNER_PREFIX, ENGINE_PREFIX = "time/learner/", "time/engine/"
"""Begin the names of logged metrics: seconds by cause since the start of the run."""


def spent(first: Mapping[str, float], last: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Seconds by cause between two logged lines; first: {} for the time since the start."""
    return {
        name.removeprefix(prefix): max(0.0, seconds - first.get(name, 0.0))
        for name, seconds in last.items()
        if name.startswith(prefix)
    }


@dataclass(frozen=True, slots=True)
class LearnerTime:
    """The learner's seconds by cause over some learner steps, and the response tokens they trained.

        learner idle      = seconds["idle"] / seconds of all causes
        tokens per second = tokens / seconds of all causes

    All causes: publications, checkpoints, evaluations that the learner waits for and what the
    caller does between steps are in the divisor. Both are ratios of sums over steps, never means of
    ratios.
    """

    seconds: Mapping[str, float]
    tokens: float = 0.0

    @classmethod
    def between(
        cls, first: Mapping[str, float], last: Mapping[str, float], *, tokens: float = 0.0
    ) -> LearnerTime:
        """Return the time between two logged lines; first: {} for the time since the start of the
        run.
        """
        return cls(spent(first, last, LEARNER_PREFIX), tokens)

    @property
    def total(self) -> float:
        """Seconds of all causes; 0.0 where no line told any."""
        return sum(self.seconds.values())

    def share(self, cause: str) -> float:
        """Share of one cause in the total."""
        return self.seconds.get(cause, 0.0) / max(self.total, 1e-9)

    @property
    def idle(self) -> float:
        """Share of the time in which the queue had no batch for the learner."""
        return self.share("idle")

    @property
    def tokens_per_s(self) -> float:
        """Response tokens trained per second."""
        return self.tokens / max(self.total, 1e-9)


class TimeByCause:
    """Seconds by cause. `began`: Unix seconds of the first `switch`; 0.0 before."""

    def __init__(
        self,
        causes: Sequence[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._seconds = dict.fromkeys(causes, 0.0)
        self._clock, self._wall = clock, wall
        self._since = 0.0
        self.cause = ""
        self.began = 0.0

    def switch(self, cause: str) -> str:
        """Count time under this cause from now on; the cause before. Raises KeyError."""
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
        """Count time under this cause inside the block, then under the one before."""
        before = self.switch(cause)
        try:
            yield
        finally:
            self.switch(before or "other")

    def seconds(self) -> dict[str, float]:
        """Seconds by cause up to now; all 0.0 before the first `switch`."""
        out = dict(self._seconds)
        if self.cause:
            out[self.cause] += self._clock() - self._since
        return out
