"""How many groups may be outstanding: so many that the learner need not wait, and no more.

Runs in: the replay queue's process. Hides when that number changes. A group waits for its turn as
long as there are others before it, so the fewer are outstanding, the younger is what is trained.
With R = rollout_batch_size, s = publish_every and B = (K + 1) R, once per learner step:

    starved     fewer than R groups were ready while the learner asked, and an actor was refused a
                ticket that B allows: R / 4 more; from the third time in a row on, twice as many
                every time
    standing    more than R / 2 groups were left over at each of the last WINDOW departures: fewer,
                by half of what was always too many

Invariants: s R < limit <= B, so that a batch can always be completed; a ticket is refused earlier
and nothing else changes, so the bound on the lag is that of K. Nothing is recorded: a run that
starts again begins anew. Sources: a standing queue as CoDel (RFC 8289) defines it; Little's law.
"""

from __future__ import annotations

from collections import deque

from async_grpo.replay.rules import QueueSettings

WINDOW = 4
"""Departures at each of which groups must have been left over."""


class OutstandingLimit:
    """The limit, and what it is set by. `groups`: how many may hold a slot."""

    def __init__(self, settings: QueueSettings) -> None:
        self._size, self._most = settings.rollout_batch_size, settings.capacity
        self._least = min(settings.publish_every * self._size + 1, self._most)
        self._fixed = settings.outstanding is not None or settings.max_staleness == 0
        self._starved = self._refused = False
        self._in_a_row = 0
        """Steps for which it has risen without a break."""
        self._left: deque[int] = deque(maxlen=WINDOW)
        self.asks_refused = 0
        """Calls that got fewer tickets than B allows."""
        begin = settings.outstanding or (settings.publish_every + 1) * self._size
        self.groups = min(begin, self._most)

    @property
    def standing(self) -> int:
        """Groups that were left over at each of the last departures."""
        return min(self._left) if len(self._left) == WINDOW else 0

    def refuses(self) -> None:
        """Note that an actor got fewer tickets than B allows."""
        self._refused = True
        self.asks_refused += 1

    def starves(self) -> None:
        """Note that the learner asked while there was no batch of ready groups."""
        self._starved = True

    def departs(self, left: int) -> None:
        """Set the limit anew when a batch leaves. left: ready groups that stay behind."""
        self._left.append(left)
        spare = self.standing - self._size // 2
        if self._starved:
            self._left.clear()
            if self._refused and not self._fixed:
                more = max(self._size // 4, 1) << max(self._in_a_row - 1, 0)
                self.groups = min(self.groups + more, self._most)
                self._in_a_row += 1
        else:
            self._in_a_row = 0
            if spare > 0 and not self._fixed:
                self.groups = max(self.groups - (spare + 1) // 2, self._least)
                self._left.clear()
        self._starved = self._refused = False
