"""An engine in invented time, whose responses share its speed.

Runs in: the driver, and the planner's command. Hides when responses end. An engine has a speed that
depends on how many responses run, and each of them gets an equal share: what few long ones left
over have the engine to themselves, and go faster. So an engine has a progress v, the tokens that a
response has that runs since the beginning, and

    begins at v_0 with L tokens  ->  ends when v = v_0 + L
    v grows by `Speed.each(n)` tokens per second while n responses run, and not at all while prompts
    or contexts are computed, or weights are taken

which is one heap of ends per engine: O(log n) per response, whatever the others do meanwhile.

Source: processor sharing (Kleinrock, Queueing Systems II, 1976, section 4.4).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

ROUNDING_S = 1e-9
"""A response that ends so soon has ended."""


@dataclass(frozen=True)
class Speed:
    """Tokens per second of an engine by how many responses run. curve: (responses, tokens per
    second of all of them), by number, from 1 on; between two of them it is a line, behind the last
    it is flat. prompt: tokens of prompts and contexts per second, which stop all responses.
    """

    curve: tuple[tuple[float, float], ...]
    prompt: float = math.inf

    @classmethod
    def alone(cls, tokens_per_s: float) -> Speed:
        """Make an engine in which no response slows down another one."""
        return cls(((1.0, tokens_per_s), (1e9, 1e9 * tokens_per_s)))

    def times(self, factor: float) -> Speed:
        """Return the speed of an engine that is so much faster."""
        return Speed(tuple((count, factor * total) for count, total in self.curve), self.prompt)

    def total(self, running: float) -> float:
        """Tokens per second of all."""
        first, last = self.curve[0], self.curve[-1]
        if running <= first[0]:
            return first[1] * running / first[0]
        if running >= last[0]:
            return last[1]
        place = bisect_right(self.curve, running, key=lambda point: point[0])
        (low, slow), (high, fast) = self.curve[place - 1 : place + 1]
        return slow + (fast - slow) * (running - low) / (high - low)

    def each(self, running: float) -> float:
        """Tokens per second of each."""
        return self.total(running) / running


@dataclass(slots=True, eq=False)
class Response:
    """A part of a response that is sampled in one go. key: whose it is; tokens: its length;
    context: what is computed before it.
    """

    key: Hashable
    tokens: float
    context: float = 0.0
    begun: float = math.nan
    """Progress of the engine when it began; NaN while it waits for a place."""
    begun_at: float = math.nan


@dataclass
class SharedEngine:
    """An engine with `places` for responses; others wait in their order."""

    speed: Speed
    places: int
    now: float = 0.0
    progress: float = 0.0
    slow: float = 1.0
    """How much longer everything takes now, since others use its cores; `advance` before a change.
    """
    stopped_s: float = 0.0
    """Seconds from `now` on in which nothing is sampled."""
    running: dict[Hashable, Response] = field(default_factory=dict)
    waiting: deque[Response] = field(default_factory=deque)
    sampled: float = 0.0
    """Tokens, so far."""
    busy_s: float = 0.0
    """Seconds with a response, so far."""
    _ends: list[tuple[float, int, Response]] = field(default_factory=list)
    _serial: int = 0

    def advance(self, now: float) -> None:
        """Go on to a later time. No response ends in between (`next_end`)."""
        passed = max(now - self.now, 0.0)
        stopped = min(passed, self.stopped_s)
        self.now, self.stopped_s = now, self.stopped_s - stopped
        self.busy_s += passed if self.running else 0.0
        if self.running and passed > stopped:
            more = (passed - stopped) * self.speed.each(len(self.running)) / self.slow
            self.progress += more
            self.sampled += more * len(self.running)

    def begin(self, responses: Sequence[Response]) -> None:
        """Take responses, all at the present time."""
        self.waiting.extend(responses)
        self._fill()

    def stop(self, seconds: float) -> None:
        """Sample nothing for so long, besides what it is stopped for already."""
        self.stopped_s += seconds

    def recompute(self, context: float) -> None:
        """Compute the contexts of all that runs again; context: tokens of each before its own."""
        self.stop((self.held + context * len(self.running)) / self.speed.prompt)

    @property
    def held(self) -> float:
        """Tokens that the running responses have."""
        return sum(self.progress - one.begun for one in self.running.values())

    def done(self, key: Hashable) -> float:
        """Tokens that a response has, or 0 while it waits."""
        one = self.running.get(key)
        return 0.0 if one is None else self.progress - one.begun

    def next_end(self) -> float:
        """When the next response ends if nothing changes; infinite if none runs."""
        while self._ends and self.running.get(self._ends[0][2].key) is not self._ends[0][2]:
            heapq.heappop(self._ends)
        if not self._ends:
            return math.inf
        left = max(self._ends[0][0] - self.progress, 0.0)
        return self.now + self.stopped_s + self.slow * left / self.speed.each(len(self.running))

    def ended(self) -> list[Response]:
        """Take out what has ended by now; places are taken by those that wait."""
        found: list[Response] = []
        while self.next_end() - self.now <= ROUNDING_S:
            one = heapq.heappop(self._ends)[2]
            del self.running[one.key]
            found.append(one)
        self._fill()
        return found

    def _fill(self) -> None:
        while self.waiting and len(self.running) < self.places:
            one = self.waiting.popleft()
            one.begun, one.begun_at = self.progress, self.now + self.stopped_s
            self._serial += 1
            self.running[one.key] = one
            heapq.heappush(self._ends, (one.begun + one.tokens, self._serial, one))
            self.stop(one.context / self.speed.prompt)
