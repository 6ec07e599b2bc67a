"""Who is the bottleneck of a run, and what to change: one sentence per interval, from rates that
were measured.

Runs in: the driver. Hides how one part is told from another. The limits are those of `throughput`,
with times such that the part that holds up the others lets through what was measured:

    learner       a step takes what was measured; a starved one's less its waits for groups
    engines       their places are taken for rate of completions x time that a group takes a place:
                  each response takes its own until it ends    (Little)
    environments  in a share of the time an engine generates nothing, because all of its episodes
                  wait for their environments
    verifiers     more responses wait for a verdict than there are workers    (Little)
    slots         every group holds one for a time that the slowest decide. Only where all of them
                  may be taken: while `replay.outstanding` allows fewer, the bound limits nothing

A starved learner is waiting for environments, verifiers, engines or slots, in this order; a busy
one is itself the limit, or its publications are. The predicted gain is up to the next limit. Two
things make it too high: engines that generate more groups at a time generate each more slowly, and
learner ranks do not divide a small step evenly.

Invariants: pure functions of metrics that are logged anyway; no advice without a gain of at least
`WORTH` of the throughput, and none that the machine cannot follow; a watch names a limit that
several intervals agree on, and says so when none does. Sentences promise no figures: those of a
short interval are not worth it (`predicted_gain` has them).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from async_grpo.observe.throughput import ThroughputSettings, Times, limits
from async_grpo.runtime.time_ledger import ENGINE_PREFIX, LEARNER_PREFIX, LearnerTime, spent

Kind = Literal[
    "balanced",
    "unclear",
    "learner",
    "publications",
    "engines",
    "environments",
    "verifier",
    "slots",
    "tail",
]
Gain = Callable[[Mapping[str, float]], float | None]
"""Settings by their dotted names (`learner.ranks`: how many times as many) -> the factor by which
throughput changes, None where it is not known: `tools.predict.forecast`.
"""
LITTLE, WORTH, FULL = 0.10, 0.15, 0.80
"""Shares: less starving is busy, a smaller gain is no advice, engines with more taken are full."""
IDLE = 0.20
"""A learner that starves for a larger share is not balanced, whatever else is known."""
AGREE, PATIENCE = 3, 6
"""Intervals in a row that name a limit before it is told, and that may disagree before that is."""
MUCH = 0.15
"""Share of the time of learner or engines that publications may take."""
AT_MOST = 4
"""Advice never changes a number by more than this factor: what lies beyond was not measured."""
RATES = (
    "rollout/generate_s",
    "rollout/verify_s",
    "rollout/response_length",
    "rollout/tokens_per_s_per_response",
    "replay/ready_wait_s",
    "rollout/longest_group_s",
)
DONE = (
    "replay/trained",
    "replay/training",
    "replay/ready",
    "replay/rejected",
    "replay/expired",
    "replay/expirations",
)
"""States and counters of groups that came out of the engines."""
FAULTS = ("cluster/rollout_actors", "cluster/late_probes", "cluster/learner_restarts")
"""An interval in which one of these changes says nothing of settings."""
MIN_STEPS, MIN_S = 5, 5.0


@dataclass(frozen=True)
class Bottleneck:
    """States who limits a run. advice: setting -> value; rates in groups per second."""

    kind: Kind
    text: str
    rate: float
    advice: dict[str, int] = field(default_factory=dict)
    predicted_gain: float = 0.0


@dataclass(frozen=True)
class Interval:
    """Hold the rates (groups per second) and shares of time between two lines of metrics."""

    rate: float
    """Trained groups."""
    completed: float
    """Groups that came out of the engines."""
    learner: dict[str, float]
    engine: dict[str, float]
    actors: float
    generate_s: float
    verify_s: float
    response_s: float
    """What a response takes on average."""
    ready_wait_s: float
    longest_s: float = 0.0
    """What the slowest group of a step took."""
    limit: float = 0.0
    """Groups that may hold a slot; `capacity`: B of them."""
    capacity: float = 0.0

    @classmethod
    def between(
        cls,
        first: Mapping[str, float],
        last: Mapping[str, float],
        means: Mapping[str, float],
        *,
        steps: int,
        batch: int,
    ) -> Interval:
        """Compute the rates from two lines, `steps` apart; means: of `RATES` over those steps."""
        speed, generate_s = means["rollout/tokens_per_s_per_response"], means["rollout/generate_s"]
        learner = LearnerTime.between(first, last)
        engine, seconds = spent(first, last, ENGINE_PREFIX), learner.total
        completed = sum(last.get(name, 0.0) - first.get(name, 0.0) for name in DONE)
        return cls(
            rate=steps * batch / seconds,
            completed=max(completed, steps * batch) / seconds,
            learner={cause: learner.share(cause) for cause in learner.seconds},
            engine={
                cause: took / max(sum(engine.values()), 1e-9) for cause, took in engine.items()
            },
            actors=max(last["cluster/rollout_actors"], 1.0),
            generate_s=generate_s,
            verify_s=means["rollout/verify_s"],
            response_s=means["rollout/response_length"] / speed if speed else generate_s,
            ready_wait_s=means["replay/ready_wait_s"],
            longest_s=means["rollout/longest_group_s"],
            limit=last.get("replay/limit", 0.0),
            capacity=last.get("replay/capacity", 0.0),
        )

    def taken(self, setup: ThroughputSettings) -> float:
        """Compute the share of the engines' places that is taken (Little's law)."""
        return self.completed * setup.responses * self.response_s / (self.actors * setup.places)

    def times(self, setup: ThroughputSettings) -> Times:
        """Compute what learner and engines take; nothing else is a limit yet."""
        step_s, working = setup.batch / self.rate, self.learner["working"]
        published, starved = self.learner["publishing"], self.learner["starved"]
        waits = starved if starved >= LITTLE else 0.0  # a busy learner is the limit as it is
        return Times(
            learner_s=working * step_s,
            other_s=(_rest(waits) - working - published) * step_s,
            exposed_s=published * step_s * setup.every_steps,
            response_s=min(max(self.taken(setup), 1e-3), 1.0) * self.full_s(setup),
        )

    def full_s(self, setup: ThroughputSettings) -> float:
        """Compute the seconds of a place for a response if all places were taken."""
        return self.actors * setup.places / (setup.responses * self.rate)


def _rest(share: float) -> float:
    """Subtract a share from 1; never 0."""
    return max(1.0 - share, 1e-3)


def diagnose(setup: ThroughputSettings, seen: Interval, gain: Gain | None = None) -> Bottleneck:
    """Find the bottleneck of an interval. gain: what settings would bring; without it, or where it
    knows nothing, the limits of the interval tell.
    """
    setup = replace(setup, actors=int(seen.actors))
    times = seen.times(setup)
    judge = _busy if seen.learner["starved"] < LITTLE else _starved
    found, at_limit = judge(setup, seen, times, limits(setup, times))
    if found.advice:
        advice: dict[str, float] = dict(found.advice)
        if "learner.ranks" in advice:
            advice["learner.ranks"] /= setup.ranks
        factor = None if gain is None else gain(advice)
        if factor is None:
            factor = min(limits(setup.with_settings(advice), at_limit).values()) / seen.rate
        found = replace(found, predicted_gain=seen.rate * (factor - 1))
        if found.predicted_gain >= WORTH * seen.rate:
            return found
    elif found.kind == "unclear":
        return found
    idle, blocked = seen.learner["starved"], seen.engine.get("blocked", 0.0)
    shares = f"learner idle {idle:.0%}, engines without tickets {blocked:.0%}"
    if idle < IDLE:
        return Bottleneck("balanced", f"balanced: {shares}", seen.rate)
    text = f"no clear limit: {shares}; no single setting would change much"
    return Bottleneck("unclear", text, seen.rate)


Judged = tuple[Bottleneck, Times]
"""A verdict, and the times with which the part that limits lets through what was measured."""
Rates = Mapping[str, float]
"""`limits` of learner and engines."""


def _busy(setup: ThroughputSettings, seen: Interval, times: Times, most: Rates) -> Judged:
    """Judge a learner that has batches: the learner or its publications are the limit."""
    published = seen.learner["publishing"]
    if published >= MUCH:
        why = f"publications take {published:.0%} of the learner's time"
        return _publications(setup, seen, published, why), times
    busy = (
        f"learner busy {seen.learner['working']:.0%}, engines without tickets "
        f"{seen.engine['blocked']:.0%}"
    )
    factor = min(most["engines"] / seen.rate, AT_MOST)
    ranks = max(setup.ranks, _within(setup, math.ceil(setup.ranks * factor), beside=seen.actors))
    if factor >= 1 + WORTH and ranks <= setup.ranks:
        return _no_room(setup, seen, f"{busy}: another learner rank"), times
    what = (
        f"{ranks} learner ranks instead of {setup.ranks}, or fewer ppo_epochs; fewer "
        "engines would do as well"
    )
    return Bottleneck("learner", f"{busy}: {what}", seen.rate, {"learner.ranks": ranks}), times


def _starved(setup: ThroughputSettings, seen: Interval, times: Times, most: Rates) -> Judged:
    """Judge a learner that waits for groups."""
    idle = f"learner idle {seen.learner['starved']:.0%}"
    if (paused := seen.engine["paused"]) >= MUCH:
        why = f"{idle}: engines stand still for weights {paused:.0%} of their time"
        still = paused if seen.taken(setup) < FULL else 0.0  # places are taken all the same
        pause_s = still * setup.batch / seen.rate * setup.every_steps
        times = replace(times, pause_s=pause_s, response_s=_rest(still) * seen.full_s(setup))
        return _publications(setup, seen, paused, why), times
    if (waits := seen.engine.get("environment", 0.0)) >= MUCH and setup.open_episodes:
        opened = math.ceil(setup.open_episodes * min(1 / _rest(waits), AT_MOST))
        text = (
            f"{idle}: engines stand still for environments {waits:.0%} of their time: "
            f"rollout.max_open_episodes {opened} instead of {setup.open_episodes}, or more "
            "environment.workers where environments compute"
        )
        episode_s = seen.actors * setup.open_episodes / (setup.responses * seen.rate)
        advice = {"rollout.max_open_episodes": opened}
        verdict = Bottleneck("environments", text, seen.rate, advice)
        generating_s = _rest(waits) * seen.full_s(setup)
        return verdict, replace(times, episode_s=episode_s, response_s=generating_s)
    waiting = seen.completed * seen.verify_s * setup.responses  # responses, by Little's law
    if waiting > setup.verifiers * seen.actors and seen.verify_s > seen.generate_s / 3:
        workers = math.ceil(setup.verifiers * min(min(most.values()) / seen.rate, AT_MOST))
        text = (
            f"{idle}: a group waits {seen.verify_s:.2g} s for its verdict and is generated "
            f"in {seen.generate_s:.2g} s: {workers} verifier workers instead of {setup.verifiers}"
        )
        each_s = seen.actors * setup.verifiers / (setup.responses * seen.rate)
        verdict = Bottleneck("verifier", text, seen.rate, {"task.verifier.workers": workers})
        return verdict, replace(times, verify_s=each_s)
    if seen.taken(setup) >= FULL:
        times = replace(times, response_s=seen.full_s(setup))
        return _more_engines(setup, seen, idle, most["learner"]), times
    if seen.limit < seen.capacity:
        times = replace(times, slot_s=seen.limit / seen.rate)
        return _deeper(setup, seen, idle, most["engines"]), times
    times = replace(times, slot_s=setup.capacity / seen.rate)
    return _more_slots(setup, seen, idle, min(most.values())), times


def _more_engines(setup: ThroughputSettings, seen: Interval, idle: str, limit: float) -> Bottleneck:
    wanted = math.ceil(seen.actors * min(limit / seen.rate, AT_MOST))
    actors = _within(setup, wanted, beside=setup.ranks)
    full = (
        f"{idle}, the queue is empty and the engines are full ({seen.taken(setup):.0%} of their "
        "places taken)"
    )
    if actors <= seen.actors < wanted:
        return _no_room(setup, seen, f"{full}: another rollout actor")
    advice = {"cluster.rollout_actors.max": actors}
    # Batches at the engines, by Little's law; one in training, and half a one being collected.
    completed = min(limit, seen.rate * actors / seen.actors) * seen.completed / seen.rate
    needed = math.ceil(completed * (seen.generate_s + seen.verify_s) / setup.batch + 1.5) - 1
    more = ""
    if needed > setup.max_staleness:
        advice["replay.max_staleness"] = needed
        more = f", with replay.max_staleness {needed} so that all of them have tickets"
    what = (
        f"{actors - seen.actors:.0f} more rollout actors{more}; or lower group_size or "
        "response_length"
    )
    return Bottleneck("engines", f"{full}: {what}", seen.rate, advice)


def _more_slots(setup: ThroughputSettings, seen: Interval, idle: str, limit: float) -> Bottleneck:
    slots = setup.max_staleness + 1
    bound = math.ceil(slots * min(limit / seen.rate, AT_MOST)) - 1
    tail = seen.ready_wait_s > (seen.generate_s + seen.verify_s) / 2
    masks = setup.on_stale == "mask"
    why, shorter = "all slots are taken", ""
    if tail:
        wait = f"{seen.ready_wait_s:.2g} s"
        why = f"finished groups wait {wait} for the slowest, which take their slots"
        shorter = f"; or {'' if masks else 'replay.on_stale=mask, or '}a lower response_length"
        if not masks and seen.longest_s > slots * setup.batch / seen.rate:
            why += (
                f"; the slowest takes {seen.longest_s:.2g} s, longer than the {slots} learner "
                "steps that it may"
            )
    text = (
        f"{idle}, engines without tickets {seen.engine['blocked']:.0%}: {why}: "
        f"replay.max_staleness {bound} instead of {setup.max_staleness}{shorter}"
    )
    kind: Kind = "tail" if tail else "slots"
    return Bottleneck(kind, text, seen.rate, {"replay.max_staleness": bound})


def _deeper(setup: ThroughputSettings, seen: Interval, idle: str, engines: float) -> Bottleneck:
    """Judge a queue that may hold more groups under the same bound."""
    why = f"{idle}: {seen.limit:.0f} of {seen.capacity:.0f} groups may be outstanding"
    if setup.outstanding is None:
        return Bottleneck("unclear", f"{why}, more as long as that goes on", seen.rate)
    groups = math.ceil(min(seen.capacity, seen.limit * engines / seen.rate))
    text = f"{why}: replay.outstanding auto"
    return Bottleneck("slots", text, seen.rate, {"replay.outstanding": groups})


def _publications(setup: ThroughputSettings, seen: Interval, share: float, why: str) -> Bottleneck:
    every = min(
        math.ceil(setup.every_steps * share / _rest(share) / LITTLE), AT_MOST * setup.every_steps
    )
    bound = setup.max_staleness + every - setup.every_steps
    what = (
        f"publish every {every} steps instead of {setup.every_steps}, with "
        f"replay.max_staleness {bound}"
    )
    advice = {"weight_sync.every_steps": every, "replay.max_staleness": bound}
    return Bottleneck("publications", f"{why}: {what}", seen.rate, advice)


def _within(setup: ThroughputSettings, processes: int, *, beside: float) -> int:
    """Cut a number of processes to the cores that the processes beside them leave."""
    return processes if setup.cores is None else min(processes, int(setup.cores - beside))


def _no_room(setup: ThroughputSettings, seen: Interval, what: str) -> Bottleneck:
    text = f"{what} would help, but has no core of its own on this machine ({setup.cores} cores)"
    return Bottleneck("unclear", text, seen.rate)


@dataclass(frozen=True)
class _Seen:
    """An interval: the line before it, sums of `RATES` over its steps, and what limited it."""

    first: Mapping[str, float]
    sums: Counter[str]
    steps: int
    kind: Kind


class BottleneckWatch:
    """Judges intervals of learner steps; `latest` is the newest verdict."""

    def __init__(
        self,
        setup: ThroughputSettings,
        *,
        agree: int = 1,
        min_steps: int = MIN_STEPS,
        min_s: float = MIN_S,
        gain: Gain | None = None,
    ) -> None:
        """agree: intervals in a row that must name the same limit. min_steps, min_s: of each.
        gain: see `diagnose`.
        """
        self._setup, self._agree = setup, agree
        self._gain = gain
        self._min_steps, self._min_s = min_steps, min_s
        self._first: Mapping[str, float] | None = None
        self._sums: Counter[str] = Counter()
        self._steps = 0
        self._seen: deque[_Seen] = deque(maxlen=agree)
        self._unheard = 0
        self.latest: Bottleneck | None = None

    def observe(self, metrics: Mapping[str, float]) -> Bottleneck | None:
        """Take the metrics of a learner step; return a verdict when there is a new one."""
        if "time/engine/working" not in metrics or "time/learner/working" not in metrics:
            return None  # no engine has told anything yet, or the step was repeated
        if self._first is None or any(
            metrics[name] < self._first.get(name, 0.0)
            if name.startswith((LEARNER_PREFIX, ENGINE_PREFIX))
            else name in FAULTS and metrics[name] != self._first.get(name)
            for name in metrics
        ):
            self._seen.clear()
            self._begin(metrics)  # also when the queue's process died, with times of dead actors
            return None
        self._steps += 1
        self._sums.update({name: metrics.get(name, 0.0) for name in RATES})
        passed_s = LearnerTime.between(self._first, metrics).total
        if self._steps < self._min_steps or passed_s < self._min_s:
            return None
        alone = self._judge(self._first, metrics, self._sums, self._steps)
        self._seen.append(_Seen(self._first, self._sums, self._steps, alone.kind))
        self._begin(metrics)
        return self._agreed(metrics)

    def _agreed(self, metrics: Mapping[str, float]) -> Bottleneck | None:
        """Judge the last intervals together if they name the same limit; say it if none did."""
        self._unheard += 1
        kinds = [one.kind for one in self._seen]
        if len(kinds) == self._agree and len(set(kinds)) == 1:
            sums = sum((one.sums for one in self._seen), Counter[str]())
            steps = sum(one.steps for one in self._seen)
            together = self._judge(self._seen[0].first, metrics, sums, steps)
            if together.kind == kinds[0]:
                self._unheard, self.latest = 0, together
                return together
        if self._unheard < PATIENCE:
            return None
        text = f"no clear limit: the last intervals disagree ({', '.join(dict.fromkeys(kinds))})"
        self._unheard, self.latest = 0, Bottleneck("unclear", text, 0.0)
        return self.latest

    def _judge(
        self,
        first: Mapping[str, float],
        last: Mapping[str, float],
        sums: Mapping[str, float],
        steps: int,
    ) -> Bottleneck:
        means = {name: sums[name] / steps for name in RATES}
        batch = self._setup.batch
        seen = Interval.between(first, last, means, steps=steps, batch=batch)
        return diagnose(self._setup, seen, self._gain)

    def _begin(self, metrics: Mapping[str, float]) -> None:
        self._first, self._sums = dict(metrics), Counter()
        self._steps = 0
