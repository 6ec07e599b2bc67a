"""A run rehearsed in numbers: what learner and engines will do, step by step, from its workload.

Runs in: the driver, and the planner's command. Hides how the parts wait for each other:

    slots ---------> engines ------------> verifiers --> ready --> learner --> publication
      ^  L of them     share their speed    v at a time    R groups  T_s         p   |
      +------------------------------------------------------------------------------+

An actor asks for groups as in a run (`groups_to_ask_for`), and gets them as soon as there are
slots; the responses of a group share the engine with all others, and it is ready when the last one
is scored. The learner takes the R oldest groups as soon as that many are ready and all that stay
behind can still be trained in time. Its slots are free again when the weights are live.

This is the loop without queue, journal, faults and chance, so that it takes milliseconds; the rules
of departure and of the limit are the queue's own (`order.can_leave`, `OutstandingLimit`).

Invariants: the same workload gives the same rehearsal. Sources: processor sharing (`engine`);
Little's law for what it comes to.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

from async_grpo.algo.filters import FilterRule
from async_grpo.algo.rewards import Shaping
from async_grpo.replay.order import can_leave
from async_grpo.replay.outstanding import OutstandingLimit
from async_grpo.replay.rules import QueueSettings
from async_grpo.rollout.ticket_queue import groups_to_ask_for
from async_grpo.tools.predict.engine import Response, SharedEngine
from async_grpo.tools.predict.workload import Workload

STEPS, LEAST_TOKENS = 48, 1e-9
MOST_RESPONSES = 60_000
"""Of a rehearsal, so that large steps do not take long: there are fewer steps then."""
STUCK = 1_000_000
LEAST_S = 1e-6


@dataclass(frozen=True)
class Prediction:
    """What a run comes to, its first steps left out. Shares between 0 and 1; lags in learner steps,
    of a response's oldest token.
    """

    groups_per_s: float
    tokens_per_s: float
    step_s: float
    idle: float
    """Share of the time in which the learner waits for groups."""
    staleness_mean: float
    staleness_max: float
    masked: float
    """Share of the tokens that are older than the bound: weight 0, or generated again."""
    taken: float
    """Share of the engines' places that are taken."""
    outstanding: float
    """Groups that may hold a slot, in the end."""


@dataclass(slots=True, eq=False)
class _Group:
    serial: int
    version: int
    lengths: tuple[int, ...]
    waits_s: float
    """For environments."""
    left: int
    begun: list[float] = field(default_factory=list)
    ended: list[tuple[float, float]] = field(default_factory=list)
    """When each response ended, and its tokens."""


class Rehearsal:
    """Follows a workload through learner steps."""

    def __init__(self, workload: Workload, *, steps: int = STEPS, seed: int = 0) -> None:
        self._work = workload
        responses = workload.batch * workload.responses
        self._skip = min(3 * (workload.max_staleness + 1), 24)
        self._steps = self._skip + max(8, min(steps, MOST_RESPONSES // responses))
        self._random = random.Random(seed)
        self._now, self._ended = 0.0, False
        self._serial = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._engines = [
            SharedEngine(workload.speed, workload.places) for _ in range(workload.actors)
        ]
        self._look_at = [math.inf] * workload.actors
        self._free_at = [[0.0] * workload.scored_at_once for _ in range(workload.actors)]
        self._limit = OutstandingLimit(_queue_settings(workload))
        self._groups = [0] * workload.actors
        """Groups that each actor has."""
        self._open: dict[int, _Group] = {}
        """Groups that engines or verifiers have."""
        self._ready: list[_Group] = []
        self._slots = 0
        """Groups that hold one."""
        self._issued = self._first = 0
        self._live = self._trained = 0
        self._lives = [0.0]
        """When each version that was published was live."""
        self._versions = [0]
        self._waiting, self._publishing = True, False
        self._asked = 0.0
        self._learning = self._since = 0.0
        """Seconds that the learner would need alone for the rest of its step, at `_since`."""
        self._slower = 1.0
        """How much longer they take now."""
        self._busy, self._learned = 0, False
        """Engines that generate, and whether the learner works, when that was set."""
        self._lags: list[float] = []
        self._stale = self._tokens = 0.0
        self._idle_s = self._from = 0.0
        self._sampled_at = self._taken_s = 0.0

    def run(self) -> Prediction:
        """Follow it to its end."""
        self._issue()
        self._take()
        events = 0
        while not self._ended:
            self._now, _, call, arguments = heapq.heappop(self._events)
            call(*arguments)
            self._share()
            events += 1
            if events > STUCK:
                raise RuntimeError(f"the simulation of {self._work} does not end")
        work, seconds = self._work, self._now - self._from
        steps = self._steps - self._skip
        per_s = steps * work.batch / seconds
        places = work.actors * work.places * seconds
        return Prediction(
            groups_per_s=per_s,
            tokens_per_s=self._tokens / seconds,
            step_s=seconds / steps,
            idle=self._idle_s / seconds,
            staleness_mean=fmean(self._lags),
            staleness_max=max(self._lags),
            masked=self._stale / max(self._tokens, LEAST_TOKENS),
            taken=self._taken_s / places,
            outstanding=self._limit.groups,
        )

    def _later(self, delay: float, call: Callable[..., None], *arguments: object) -> None:
        self._serial += 1
        heapq.heappush(self._events, (self._now + delay, self._serial, call, arguments))

    # ---- engines ----

    def _issue(self) -> None:
        """Let all actors ask for groups, another one first each time."""
        self._first = (self._first + 1) % len(self._engines)
        order = range(self._first, self._first + len(self._engines))
        for index in order:
            self._ask_for(index % len(self._engines))

    def _ask_for(self, index: int) -> None:
        """Let an actor ask for groups; it gets them as long as there are slots."""
        engine = self._engines[index]
        wanted = groups_to_ask_for(
            engine.places,
            unfinished=len(engine.running) + len(engine.waiting),
            groups=self._groups[index],
            responses=self._work.responses,
        )
        granted = max(min(wanted, self._limit.groups - self._slots), 0)
        if granted < min(wanted, self._work.capacity - self._slots):
            self._limit.refuses()
        if granted:
            self._begin(index, granted)

    def _begin(self, index: int, count: int) -> None:
        work, engine = self._work, self._engines[index]
        engine.advance(self._now)
        for _ in range(count):
            drawn = self._random.randrange(len(work.lengths))
            lengths, waits_s = work.lengths[drawn], work.waits[drawn] if work.waits else 0.0
            group = _Group(self._issued, self._live, lengths, waits_s, len(lengths))
            self._issued += 1
            self._slots += 1
            self._groups[index] += 1
            self._open[group.serial] = group
            engine.begin(
                [Response((group.serial, at), length) for at, length in enumerate(lengths)]
            )
        self._expect(index)

    def _expect(self, index: int) -> None:
        at = self._engines[index].next_end()
        self._look_at[index] = at
        if at < math.inf:
            self._later(at - self._now, self._end, index, at)

    def _end(self, index: int, at: float) -> None:
        if at != self._look_at[index]:
            return
        engine = self._engines[index]
        engine.advance(self._now)
        for part in engine.ended():
            serial = part.key[0]  # type: ignore[index]
            group = self._open[serial]
            group.begun.append(part.begun_at)
            group.ended.append((self._now, part.tokens))
            if self._now > self._from:
                self._taken_s += self._now - max(part.begun_at, self._from)
            group.left -= 1
            if not group.left:
                scored_s = group.waits_s + self._scored(index)
                self._later(scored_s, self._complete, index, serial)
        self._expect(index)
        self._ask_for(index)

    def _scored(self, index: int) -> float:
        """Return the seconds until an actor's verifiers have scored a group that has ended now."""
        work, at = self._work, self._now
        if work.verify_s:
            for _ in range(work.responses):
                free = heapq.heappop(self._free_at[index])
                at = max(free, self._now) + work.verify_s
                heapq.heappush(self._free_at[index], at)
        return at - self._now + work.delay_s

    def _complete(self, index: int, serial: int) -> None:
        self._groups[index] -= 1
        self._ready.append(self._open.pop(serial))
        self._take()
        self._ask_for(index)

    # ---- learner ----

    def _take(self) -> None:
        """Train the oldest groups, if there are enough and the others can wait."""
        work = self._work
        if not self._waiting:
            return
        step = self._trained + 1
        if work.on_stale == "expire":
            oldest = step - 1 - work.max_staleness
            young = [group for group in self._ready if self._version(group) >= oldest]
            for group in set(self._ready) - set(young):
                self._stale += sum(group.lengths)
                self._slots -= 1
            self._ready = young
        self._ready.sort(key=lambda group: (group.version, group.serial))
        chosen, left = self._ready[: work.batch], self._ready[work.batch :]
        if len(chosen) < work.batch:
            self._limit.starves()
            return
        if work.on_stale == "wait":
            behind = [group.version for group in (*left, *self._open.values())]
            if not can_leave(
                behind, step=step, max_staleness=work.max_staleness, batch_size=work.batch
            ):
                return
        self._ready, self._waiting = left, False
        self._limit.departs(len(left))
        self._issue()
        if step > self._skip:
            self._idle_s += self._now - max(self._asked, self._from)
            self._measure(chosen, step)
        tokens = sum(sum(group.lengths) for group in chosen)
        share = 1.0 if work.even else tokens / (work.batch * work.group_tokens)
        self._learning = work.learner_s / work.rank_factor * share
        self._since, self._busy = self._now, -1  # its end is not yet expected

    def _share(self) -> None:
        """Let engines and learner go on as fast as they are now: who works slows others down."""
        work, busy = self._work, sum(bool(engine.running) for engine in self._engines)
        learning = self._learning > 0
        if learning:
            self._learning -= (self._now - self._since) / self._slower
        self._since = self._now
        if learning and self._learning <= LEAST_S:
            self._learning = 0.0
            self._later(0.0, self._end_step)
            learning = False
        if (busy, learning) == (self._busy, self._learned):
            return
        self._busy, self._learned = busy, learning
        slow = work.slow(busy, learning=learning)
        self._slower = slow * (1 + (work.contention - 1) * busy / work.actors)
        if learning:
            self._later(self._learning * self._slower, self._go_on)
        for index, engine in enumerate(self._engines):
            if engine.slow != slow:
                engine.advance(self._now)
                engine.slow = slow
                self._expect(index)

    def _go_on(self) -> None:
        """Look at the learner again (`_share` does), when it may have ended its step."""

    def _end_step(self) -> None:
        work = self._work
        if self._publishing and (self._trained + 1) % work.every_steps == 0:
            self._later(max(work.publish_s, 1e-3) / 10, self._end_step)
            return
        self._trained += 1
        if self._trained == self._skip:
            self._from = self._now
            self._taken_s = 0.0
        if self._trained == self._steps:
            self._ended = True
            return
        if self._trained % work.every_steps == 0:
            self._publishing = True
            self._later(work.exposed_s, self._ask)
            self._later(max(work.publish_s, work.exposed_s), self._go_live, self._trained)
        else:
            self._ask()

    def _ask(self) -> None:
        self._waiting, self._asked = True, self._now
        self._take()

    def _go_live(self, version: int) -> None:
        """Let all engines have a version: the slots of what it was trained on are free."""
        self._publishing = False
        self._slots -= (version - self._live) * self._work.batch
        self._live = version
        self._lives.append(self._now)
        self._versions.append(version)
        for index, engine in enumerate(self._engines):
            engine.advance(self._now)
            engine.stop(self._work.pause_s + self._work.again_s * engine.held)
            self._expect(index)
        self._issue()
        self._take()

    # ---- what it comes to ----

    def _version_at(self, time_s: float) -> int:
        return self._versions[max(bisect_right(self._lives, time_s) - 1, 0)]

    def _version(self, group: _Group) -> int:
        return min(map(self._version_at, group.begun))

    def _measure(self, chosen: list[_Group], step: int) -> None:
        """Note lags, and tokens older than the bound."""
        bound = self._work.max_staleness
        first = bisect_right(self._versions, step - 2 - bound)
        young_at = self._lives[first] if first < len(self._lives) else self._now
        for group in chosen:
            self._tokens += sum(group.lengths)
            for begun, (ended, length) in zip(group.begun, group.ended, strict=True):
                lag = step - 1 - self._version_at(begun)
                self._lags.append(min(lag, bound) if self._work.on_stale == "mask" else lag)
                if lag > bound:
                    share = (min(young_at, ended) - begun) / max(ended - begun, 1e-9)
                    self._stale += length * max(share, 0.0)


def predict(work: Workload) -> Prediction:
    """Predict a run."""
    return Rehearsal(work).run()


def _queue_settings(workload: Workload) -> QueueSettings:
    return QueueSettings(
        rollout_batch_size=workload.batch,
        max_staleness=workload.max_staleness,
        total_steps=1,
        group_size=workload.responses,
        max_attempts=1,
        max_num_gen_batches=0,
        shaping=Shaping({}, 0),
        filter=FilterRule(),
        outstanding=workload.outstanding,
        publish_every=workload.every_steps,
    )
