"""An actor's report: tokens and counters, and what its engine spends its time on.

Runs in: rollout actors. Derives the cause from the stages of the actor's groups. Hides which cause
wins where several hold: weights, generation, evaluation, environments, verifiers, no ticket.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from async_grpo.replay.actor_reports import ActorReport, TokenTotals
from async_grpo.runtime.time_ledger import ENGINE_CAUSES, TimeByCause


class EngineTime:
    """Seconds by cause of one engine, from when it first produces or evaluates."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._time = clock, TimeByCause(ENGINE_CAUSES, clock=clock, wall=wall)
        self._stages: dict[tuple[int, int], str] = {}
        self._count: Counter[str] = Counter()
        self._inside: Counter[str] = Counter()
        self._reported_at = 0.0
        self.is_producing = False

    def producing(self, on: bool) -> None:
        """Note that the actor takes tickets from now on, or no more."""
        self.is_producing = on
        if not on:
            self._stages.clear()
            self._count.clear()
        self._look()

    def stage(self, key: tuple[int, int], stage: str | None) -> None:
        """Note the stage of a group (id, attempt); None: it is gone."""
        before = self._stages.pop(key, None)
        if before is not None:
            self._count[before] -= 1
        if stage is not None:
            self._stages[key] = stage
            self._count[stage] += 1
        self._look()

    @contextmanager
    def during(self, cause: Literal["paused", "evaluating"]) -> Iterator[None]:
        """Inside the block the engine takes weights, or evaluates."""
        self._inside[cause] += 1
        self._look()
        try:
            yield
        finally:
            self._inside[cause] -= 1
            self._look()

    def report(
        self,
        sampled: Mapping[str, int],
        counts: Mapping[str, float],
        speeds: Mapping[str, float] | None = None,
        *,
        errors: Mapping[str, str],
    ) -> ActorReport:
        """Report tokens, seconds, `counts`, an engine's `speeds` and the first `errors` of
        verifiers.
        """
        self._reported_at = self._clock()
        tokens = TokenTotals(
            sampled=sampled["total"],
            probes=sampled["probes"],
            evaluated=sampled["evaluated"],
            continued=int(counts["continued_tokens"]),
            reprefilled=int(counts["reprefilled"]),
        )
        purposes = [(f"sampled_{purpose}", float(count)) for purpose, count in sampled.items()]
        return ActorReport(
            tokens,
            self._time.began,
            tuple(self._time.seconds().items()),
            (
                *purposes,
                *((name, float(count)) for name, count in counts.items()),
                *(speeds or {}).items(),
            ),
            tuple(errors.items()),
        )

    def is_due(self, every_s: float) -> bool:
        """Tell whether the last report is so old."""
        return self._clock() - self._reported_at >= every_s

    def _look(self) -> None:
        cause = self._cause()
        counts = self._time.began or self.is_producing or cause == "evaluating"
        if counts and cause != self._time.cause:
            self._time.switch(cause)

    def _cause(self) -> str:
        if self._inside["paused"]:
            return "paused"
        if self._count["generating"]:
            return "working"
        if self._inside["evaluating"]:
            return "evaluating"
        if not self.is_producing:
            return "other"
        waits = (stage for stage in ("environment", "verifying") if self._count[stage])
        return next(waits, "blocked")
