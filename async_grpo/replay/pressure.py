"""Who waits for whom: producers without a ticket, the learner without a batch, and whether slow groups are trained too.

Runs in: the replay queue's process. Hides the clocks of the waits. Times in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from async_grpo.replay.ledger import Entry
from async_grpo.replay.rules import QueueSettings, rows_to_train

WINDOW = 1000
"""Groups over which slow and fast are told apart."""


class Pressure:
    """Waits, summed up since the queue began."""

    def __init__(self) -> None:
        self._blocked: dict[str, float] = {}
        self._blocked_s = self._starved_s = 0.0
        self._asked_at: float | None = None
        self._durations: deque[float] = deque(maxlen=WINDOW)
        self._trained_slow: deque[bool] = deque(maxlen=WINDOW)

    def answered(self, actor_id: str, *, idle: bool, now: float) -> None:
        """An actor asked for tickets. `idle`: it holds none and got none."""
        if idle:
            self._blocked.setdefault(actor_id, now)
        else:
            self.gone(actor_id, now=now)

    def gone(self, actor_id: str, *, now: float) -> None:
        """The actor does not wait any more."""
        self._blocked_s += now - self._blocked.pop(actor_id, now)

    def learner_asks(self, now: float) -> None:
        """The learner asked for a batch."""
        if self._asked_at is None:
            self._asked_at = now

    def learner_served(self, durations: Iterable[float], *, now: float) -> float:
        """A batch leaves whose groups took this long to produce; seconds that the learner waited for it."""
        waited = 0.0 if self._asked_at is None else now - self._asked_at
        self._asked_at = None
        self._starved_s += waited
        if self._durations:
            slow = sorted(self._durations)[int(0.9 * len(self._durations))]
            self._trained_slow.extend(duration >= slow for duration in durations)
        return waited

    def completed(self, duration: float) -> None:
        """A group became ready this long after its ticket was issued."""
        self._durations.append(duration)

    def metrics(self, now: float) -> dict[str, float]:
        """`replay/...` paths. The share is of recently trained groups; 0.1 means that slow ones are trained like all others."""
        waiting = 0.0 if self._asked_at is None else now - self._asked_at
        out = {
            "replay/blocked_s": self._blocked_s + sum(now - since for since in self._blocked.values()),
            "replay/starved_s": self._starved_s + waiting,
        }
        if self._trained_slow:
            out["replay/slowest_tenth"] = sum(self._trained_slow) / len(self._trained_slow)
        return out


def batch_metrics(chosen: Sequence[Entry], settings: QueueSettings, *, step: int, now: float) -> dict[str, float]:
    """How old the batch of `step` is: lags in learner steps over what is trained with weight, tokens that are too old, seconds ready."""
    rows = [row for entry in chosen for row in rows_to_train(entry.meta)]
    oldest = [step - 1 - row.min_version for row in rows]
    lags = [step - 1 - version for row in rows for version, _ in row.versions]
    masked = 0.0
    if settings.on_stale == "mask":  # otherwise a lag above the bound must show
        masked = float(sum(row.tokens_before(step - 1 - settings.max_staleness) for row in rows))
        oldest = [min(lag, settings.max_staleness) for lag in oldest]
        lags = [lag for lag in lags if lag <= settings.max_staleness]
    return {
        "replay/lag_mean": sum(oldest) / len(rows), "replay/lag_max": float(max(lags)), "replay/stale_tokens": masked,
        "replay/ready_wait_s": sum(now - entry.ready_at for entry in chosen) / len(chosen),
    }
