"""Who waits for whom: producers without a ticket, the learner without a batch, and whether slow
groups are trained too.

Runs in: the replay queue's process. Hides the clocks of the waits. Times in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from async_grpo.replay.ledger import GroupEntry
from async_grpo.replay.rules import QueueSettings

WINDOW, WARM, EVERY = 1000, 100, 25
"""The last WINDOW groups tell slow from fast, from WARM on; the border is renewed after EVERY."""


class QueueWaits:
    """Waits, summed up since the queue began."""

    def __init__(self) -> None:
        self._blocked: dict[str, float] = {}
        self._blocked_s = self._starved_s = 0.0
        self._asked_at: float | None = None
        self._durations: deque[float] = deque(maxlen=WINDOW)
        self._border: float | None = None
        self._completed = 0
        self._completed_slow: deque[bool] = deque(maxlen=WINDOW)
        self._trained_slow: deque[bool] = deque(maxlen=WINDOW)

    def answered(self, actor_id: str, *, idle: bool, now: float) -> None:
        """Note that an actor asked for tickets. `idle`: it holds none and got none."""
        if idle:
            self._blocked.setdefault(actor_id, now)
        else:
            self.gone(actor_id, now=now)

    def gone(self, actor_id: str, *, now: float) -> None:
        """Note that the actor does not wait any more."""
        self._blocked_s += now - self._blocked.pop(actor_id, now)

    def learner_asks(self, now: float) -> None:
        """Note that the learner asked for a batch."""
        if self._asked_at is None:
            self._asked_at = now

    def learner_served(self, slow: Iterable[bool | None], *, now: float) -> float:
        """Record a batch and which groups were slow; seconds that the learner waited for it."""
        waited = 0.0 if self._asked_at is None else now - self._asked_at
        self._asked_at = None
        self._starved_s += waited
        self._trained_slow.extend(one for one in slow if one is not None)
        return waited

    def completed(self, duration: float) -> bool | None:
        """Whether a group with these seconds is in the slowest tenth; None while unknown."""
        self._completed += 1
        self._durations.append(duration)
        if len(self._durations) >= WARM and self._completed % EVERY == 0:
            self._border = sorted(self._durations)[int(0.9 * len(self._durations))]
        if self._border is None:
            return None
        self._completed_slow.append(duration >= self._border)
        return self._completed_slow[-1]

    def metrics(self, now: float) -> dict[str, float]:
        """Return waits as `replay/...`. `slowest_tenth`: share of slow groups among those trained,
        per ten times their share of those completed; 0.1 means that slow groups are trained like
        all others, even while all become slower or faster.
        """
        waiting = 0.0 if self._asked_at is None else now - self._asked_at
        blocked = self._blocked_s + sum(now - since for since in self._blocked.values())
        out = {"replay/blocked_s": blocked, "replay/learner_idle_s": self._starved_s + waiting}
        if len(self._trained_slow) >= WARM and any(self._completed_slow):
            completed = sum(self._completed_slow) / len(self._completed_slow)
            trained = sum(self._trained_slow) / len(self._trained_slow)
            out["replay/slowest_tenth"] = 0.1 * trained / completed
        return out


def batch_metrics(
    chosen: Sequence[GroupEntry], settings: QueueSettings, *, step: int, now: float
) -> dict[str, float]:
    """Lags of the batch of `step` over what is trained with weight, tokens too old, and waits."""
    rows = [row for entry in chosen for row in entry.result.episodes_to_train]
    oldest = [step - 1 - row.min_version for row in rows]
    lags = [step - 1 - version for row in rows for version, _ in row.versions]
    masked = 0.0
    if settings.on_stale == "mask":  # otherwise a lag above the bound must show
        masked = float(sum(row.tokens_before(step - 1 - settings.max_staleness) for row in rows))
        oldest = [min(lag, settings.max_staleness) for lag in oldest]
        lags = [lag for lag in lags if lag <= settings.max_staleness]
    return {
        "replay/staleness_mean": sum(oldest) / len(rows),
        "replay/staleness_max": float(max(lags)),
        "replay/stale_tokens": masked,
        "replay/ready_wait_s": sum(now - entry.ready_at for entry in chosen) / len(chosen),
    }
