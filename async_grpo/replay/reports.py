"""What rollout actors tell about their engines when they ask for tickets.

Runs in: the replay queue's process. Hides who told what last. Token counts go into the ledger (`tokens`); seconds are passed on as they are.
Invariant: a report replaces the one before, so one that is lost on the way does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from async_grpo.replay.tokens import Told

Spent = tuple[float, dict[str, float]]
"""When an engine's time began to count (Unix seconds), and its seconds by cause."""


@dataclass(frozen=True, slots=True)
class Report:
    """One actor's process so far: tokens; seconds by cause, and when they began to count (Unix seconds, 0.0: not yet)."""

    told: Told
    began: float = 0.0
    seconds: tuple[tuple[str, float], ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return Report, (Told(*self.told), self.began, self.seconds)


class Reports:
    """The latest report of every actor, also of those that are dead."""

    def __init__(self) -> None:
        self._latest: dict[str, Report] = {}

    def tell(self, actor_id: str, report: Report) -> None:
        """Take a report. Totals never fall, so an older one that comes late is left aside."""
        known = self._latest.get(actor_id)
        if known is None or report.told.sampled >= known.told.sampled:
            self._latest[actor_id] = report

    def news(self, known: Mapping[str, Told]) -> tuple[tuple[Any, ...], ...]:
        """Rows of a `Sampled` event: what differs from what is known."""
        return tuple((actor_id, *report.told) for actor_id, report in self._latest.items() if known.get(actor_id) != report.told)

    def seconds(self) -> dict[str, Spent]:
        """By actor, of those whose time counts."""
        return {actor_id: (report.began, dict(report.seconds)) for actor_id, report in self._latest.items() if report.began}
