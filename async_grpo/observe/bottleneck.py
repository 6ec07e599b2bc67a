"""Who is the bottleneck of a run, and what to change: one sentence per interval, from rates that
were measured.

Runs in: the driver. Hides how one part is told from another. The limits are those of `throughput`,
with times such that the part that holds up the others lets through what was measured:

    learner       a step takes what was measured; a starved one's less its waits for groups
    engines       their places are taken for rate of completions x time that a group takes a place:
                  each response takes its own until it ends    (Little)
    environments  in a share of the time an engine generates nothing, because all of its episodes
                  wait for their environments. Only where fewer may be open than the slots allow
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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from async_grpo.observe.throughput import ThroughputSettings, Times, limits
from async_grpo.runtime.time_ledger import ENGINE_PREFIX, LEARNER_PREFIX, LearnerTime, spent

Kind = Literal[
    "balanced",
    "unclear",
    "learner",
    "weight_sync",
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
Lines = Sequence[Mapping[str, float]]
"""Of a run: a line of metrics before some learner steps, and one for each of them."""
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
    """Hold the rates (groups per second) and shares of time of some learner steps; `setup` has the
    actors that there were.
    """

    setup: ThroughputSettings
    rate: float
    """Trained groups."""
    completed: float
    """Groups that came out of the engines."""
    learner: dict[str, float]
    engine: dict[str, float]
    generate_s: float
    verify_s: float
    teacher_s: float
    judge_s: float
    """What a group waits for frozen models; 0 without them."""
    response_s: float
    """What a response takes on average."""
    ready_wait_s: float
    longest_s: float
    """What the slowest group of a step took."""
    limit: float
    """Groups that may hold a slot; `capacity`: B of them."""
    capacity: float

    @classmethod
    def of(cls, setup: ThroughputSettings, lines: Lines) -> Interval:
        """Compute the rates from the lines of steps, after the line before them."""
        first, last, steps = lines[0], lines[-1], len(lines) - 1
        said = {name: [line[name] for line in lines[1:] if name in line] for name in RATES}
        means = {name: sum(values) / max(1, len(values)) for name, values in said.items()}
        speed, generate_s = means["rollout/tokens_per_s_per_response"], means["rollout/generate_s"]
        learner, engine = LearnerTime.between(first, last), spent(first, last, ENGINE_PREFIX)
        whole = max(sum(engine.values()), 1e-9)
        response_s = means["rollout/response_length"] / speed if speed else generate_s
        waits_s = last.get("rollout/environment_s", 0.0)  # an episode that waits takes no place
        completed = sum(last.get(name, 0.0) - first.get(name, 0.0) for name in DONE)
        return cls(
            setup=replace(setup, actors=int(max(last["cluster/rollout_actors"], 1.0))),
            rate=steps * setup.batch / learner.total,
            completed=max(completed, steps * setup.batch) / learner.total,
            learner={cause: learner.share(cause) for cause in learner.seconds},
            engine={cause: took / whole for cause, took in engine.items()},
            generate_s=generate_s,
            verify_s=means["rollout/verify_s"],
            teacher_s=last.get("rollout/teacher_s", 0.0),
            judge_s=last.get("rollout/judge_s", 0.0),
            response_s=max(response_s - waits_s, 0.0),
            ready_wait_s=means["replay/ready_wait_s"],
            longest_s=means["rollout/longest_group_s"],
            limit=last.get("replay/limit", 0.0),
            capacity=last.get("replay/capacity", 0.0),
        )

    @property
    def responses(self) -> float:
        """Responses of trained groups per second."""
        return self.setup.responses * self.rate

    @property
    def taken(self) -> float:
        """Share of the engines' places that is taken (Little's law)."""
        of = self.setup
        return self.completed * of.responses * self.response_s / (of.actors * of.places)

    @property
    def full_s(self) -> float:
        """Seconds of a place for a response if all places were taken."""
        return self.setup.actors * self.setup.places / self.responses

    @property
    def times(self) -> Times:
        """What learner and engines take; nothing else is a limit yet."""
        step_s, working = self.setup.batch / self.rate, self.learner["working"]
        synced, idle = self.learner["weight_sync"], self.learner["idle"]
        waits = idle if idle >= LITTLE else 0.0  # a busy learner is the limit as it is
        return Times(
            learner_s=working * step_s,
            other_s=(_rest(waits) - working - synced) * step_s,
            exposed_s=synced * step_s * self.setup.every_steps,
            response_s=min(max(self.taken, 1e-3), 1.0) * self.full_s,
        )

    def found(self, kind: Kind, text: str, advice: dict[str, int] | None = None) -> Bottleneck:
        """Return a verdict on these steps."""
        return Bottleneck(kind, text, self.rate, advice or {})

    def no_room(self, what: str) -> Bottleneck:
        """Return the verdict that the machine is too small for what would help."""
        cores = f"({self.setup.cores} cores)"
        return self.found(
            "unclear", f"{what} would help, but this machine has no core left for it {cores}"
        )

    def within(self, processes: int, *, beside: int) -> int:
        """Cut a number of processes to the cores that the processes beside them leave."""
        cores = self.setup.cores
        return processes if cores is None else min(processes, cores - beside)


def _rest(share: float) -> float:
    """Subtract a share from 1; never 0."""
    return max(1.0 - share, 1e-3)


def diagnose(seen: Interval, gain: Gain | None = None) -> Bottleneck:
    """Find the bottleneck of an interval. gain: what settings would bring; without it, or where it
    knows nothing, the limits of the interval tell.
    """
    setup, judge = seen.setup, _busy if seen.learner["idle"] < LITTLE else _starved
    found, at_limit = judge(seen, seen.times, limits(setup, seen.times))
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
    idle, blocked = seen.learner["idle"], seen.engine.get("blocked", 0.0)
    shares = f"learner idle {idle:.0%}, engines without tickets {blocked:.0%}"
    if idle < IDLE:
        return seen.found("balanced", f"balanced: {shares}")
    return seen.found("unclear", f"no clear limit: {shares}; no single setting would change much")


def _busy(seen: Interval, times: Times, most: Mapping[str, float]) -> tuple[Bottleneck, Times]:
    """Judge a learner that has batches: the learner or its publications are the limit. Returns the
    verdict, and the times with which the part that limits lets through what was measured; most:
    `limits` of learner and engines.
    """
    setup, published = seen.setup, seen.learner["weight_sync"]
    if published >= MUCH:
        why = f"weight sync takes {published:.0%} of the learner's time"
        return _publications(seen, published, why), times
    busy = (
        f"learner busy {seen.learner['working']:.0%}, engines without tickets "
        f"{seen.engine['blocked']:.0%}"
    )
    factor = min(most["engines"] / seen.rate, AT_MOST)
    teams = math.ceil(setup.ranks * factor / setup.team)
    wanted = seen.within(teams * setup.team, beside=setup.actors) // setup.team * setup.team
    ranks = max(setup.ranks, wanted)
    if factor >= 1 + WORTH and ranks <= setup.ranks:
        return seen.no_room(f"{busy}: another learner rank"), times
    what = (
        f"learner.ranks {ranks} instead of {setup.ranks}, or fewer ppo_epochs; fewer "
        "engines would do as well"
    )
    return seen.found("learner", f"{busy}: {what}", {"learner.ranks": ranks}), times


def _starved(seen: Interval, times: Times, most: Mapping[str, float]) -> tuple[Bottleneck, Times]:
    """Judge a learner that waits for groups; see `_busy`."""
    setup, idle = seen.setup, f"learner idle {seen.learner['idle']:.0%}"
    if (paused := seen.engine["paused"]) >= MUCH:
        why = f"{idle}: engines are paused for weight sync {paused:.0%} of their time"
        still = paused if seen.taken < FULL else 0.0  # places are taken all the same
        pause_s = still * setup.batch / seen.rate * setup.every_steps
        times = replace(times, pause_s=pause_s, response_s=_rest(still) * seen.full_s)
        return _publications(seen, paused, why), times
    waits = seen.engine.get("environment", 0.0)
    open_at_most = setup.actors * setup.open_episodes
    if waits >= MUCH and 0 < open_at_most < setup.capacity * setup.responses:
        opened = math.ceil(setup.open_episodes * min(1 / _rest(waits), AT_MOST))
        text = (
            f"{idle}: engines wait for environments {waits:.0%} of their time: "
            f"rollout.max_open_episodes {opened} instead of {setup.open_episodes}, or more "
            "environment.workers where environments compute"
        )
        verdict = seen.found("environments", text, {"rollout.max_open_episodes": opened})
        episode_s = setup.actors * setup.open_episodes / seen.responses
        return verdict, replace(times, episode_s=episode_s, response_s=_rest(waits) * seen.full_s)
    waits, whom = max((seen.teacher_s, "teacher"), (seen.judge_s, "judge"))
    if waits > seen.generate_s:
        text = (
            f"{idle}: a group waits {waits:.2g} s for its {whom} and is generated in "
            f"{seen.generate_s:.2g} s: a smaller {whom} would help, or more GPUs for one "
            "that is frozen (frozen.NAME.engine.tensor_parallel_size)"
        )
        return seen.found("unclear", text), times
    waiting = seen.completed * seen.verify_s * setup.responses  # responses, by Little's law
    if waiting > setup.scored_at_once * setup.actors and seen.verify_s > seen.generate_s / 3:
        name, now = setup.verifier_setting
        more = math.ceil(now * min(min(most.values()) / seen.rate, AT_MOST))
        text = (
            f"{idle}: a group waits {seen.verify_s:.2g} s to be scored and is generated "
            f"in {seen.generate_s:.2g} s: {name} {more} instead of {now}"
        )
        verdict = seen.found("verifier", text, {name: more})
        scored_at_once = setup.actors * setup.scored_at_once
        return verdict, replace(times, verify_s=scored_at_once / seen.responses)
    if seen.taken >= FULL:
        times = replace(times, response_s=seen.full_s)
        return _more_engines(seen, idle, most["learner"]), times
    if seen.limit < seen.capacity:
        times = replace(times, slot_s=seen.limit / seen.rate)
        return _deeper(seen, idle, most["engines"]), times
    times = replace(times, slot_s=setup.capacity / seen.rate)
    return _more_slots(seen, idle, min(most.values())), times


def _more_engines(seen: Interval, idle: str, limit: float) -> Bottleneck:
    setup = seen.setup
    wanted = math.ceil(setup.actors * min(limit / seen.rate, AT_MOST))
    actors = seen.within(wanted, beside=setup.ranks)
    full = (
        f"{idle}, the queue is empty and the engines are full ({seen.taken:.0%} of their "
        "slots taken)"
    )
    if actors <= setup.actors < wanted:
        return seen.no_room(f"{full}: another rollout actor")
    advice = {"cluster.rollout_actors.max": actors}
    # Batches at the engines, by Little's law; one in training, and half a one being collected.
    completed = min(limit, seen.rate * actors / setup.actors) * seen.completed / seen.rate
    needed = math.ceil(completed * (seen.generate_s + seen.verify_s) / setup.batch + 1.5) - 1
    more = ""
    if needed > setup.max_staleness:
        advice["replay.max_staleness"] = needed
        more = f", with replay.max_staleness {needed} so that all of them have tickets"
    what = (
        f"{actors - setup.actors} more rollout actors{more}; or lower group_size or response_length"
    )
    return seen.found("engines", f"{full}: {what}", advice)


def _more_slots(seen: Interval, idle: str, limit: float) -> Bottleneck:
    setup = seen.setup
    slots = setup.max_staleness + 1
    bound = math.ceil(slots * min(limit / seen.rate, AT_MOST)) - 1
    tail = seen.ready_wait_s > (seen.generate_s + seen.verify_s) / 2
    masks = setup.on_stale == "mask"
    waits = seen.engine.get("environment", 0.0)
    late = waits >= MUCH
    sooner = "faster environments" if late else "a lower response_length"
    why, shorter = "all slots are taken", ""
    if tail:
        wait = f"{seen.ready_wait_s:.2g} s"
        why = f"finished groups wait {wait} for the slowest, which hold their slots"
        shorter = f"; or {'' if masks else 'replay.on_stale=mask, or '}{sooner}"
        if not masks and seen.longest_s > slots * setup.batch / seen.rate:
            why += (
                f"; the slowest takes {seen.longest_s:.2g} s, longer than the {slots} learner "
                "steps that it may"
            )
    if late:
        why = f"engines wait for environments {waits:.0%} of their time, and {why}"
    text = (
        f"{idle}, engines without tickets {seen.engine['blocked']:.0%}: {why}: "
        f"replay.max_staleness {bound} instead of {setup.max_staleness}{shorter}"
    )
    return seen.found("tail" if tail else "slots", text, {"replay.max_staleness": bound})


def _deeper(seen: Interval, idle: str, engines: float) -> Bottleneck:
    """Judge a queue that may hold more groups under the same bound."""
    why = f"{idle}: {seen.limit:.0f} of {seen.capacity:.0f} groups may be outstanding"
    if seen.setup.outstanding is None:
        return seen.found("unclear", f"{why}; the limit grows while the learner stays idle")
    groups = math.ceil(min(seen.capacity, seen.limit * engines / seen.rate))
    return seen.found("slots", f"{why}: replay.outstanding auto", {"replay.outstanding": groups})


def _publications(seen: Interval, share: float, why: str) -> Bottleneck:
    setup, most = seen.setup, AT_MOST * seen.setup.every_steps
    every = min(math.ceil(setup.every_steps * share / _rest(share) / LITTLE), most)
    bound = setup.max_staleness + every - setup.every_steps
    what = (
        f"weight_sync.every_steps {every} instead of {setup.every_steps}, with "
        f"replay.max_staleness {bound}"
    )
    advice = {"weight_sync.every_steps": every, "replay.max_staleness": bound}
    return seen.found("weight_sync", f"{why}: {what}", advice)


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
        self._lines: list[Mapping[str, float]] = []
        self._seen: deque[tuple[Lines, Kind]] = deque(maxlen=agree)
        self._unheard = 0
        self.latest: Bottleneck | None = None

    def observe(self, metrics: Mapping[str, float]) -> Bottleneck | None:
        """Take the metrics of a learner step; return a verdict when there is a new one."""
        if "time/engine/working" not in metrics or "time/learner/working" not in metrics:
            return None  # no engine has told anything yet, or the step was repeated
        line = dict(metrics)
        first = self._lines[0] if self._lines else None
        if first is None or any(
            value < first.get(name, 0.0)
            if name.startswith((LEARNER_PREFIX, ENGINE_PREFIX))
            else name in FAULTS and value != first.get(name)
            for name, value in line.items()
        ):
            self._seen.clear()
            self._lines = [line]  # also when the queue's process died, with times of dead actors
            return None
        self._lines.append(line)
        passed_s = LearnerTime.between(first, line).total
        if len(self._lines) <= self._min_steps or passed_s < self._min_s:
            return None
        self._seen.append((self._lines, self._judge(self._lines).kind))
        self._lines = [line]
        return self._agreed()

    def _agreed(self) -> Bottleneck | None:
        """Judge the last intervals together if they name the same limit; say it if none did."""
        self._unheard += 1
        kinds = [kind for _, kind in self._seen]
        if len(kinds) == self._agree and len(set(kinds)) == 1:
            first = self._seen[0][0][0]
            together = self._judge(
                [first, *(line for lines, _ in self._seen for line in lines[1:])]
            )
            if together.kind == kinds[0]:
                self._unheard, self.latest = 0, together
                return together
        if self._unheard < PATIENCE:
            return None
        text = f"no clear limit: the last intervals disagree ({', '.join(dict.fromkeys(kinds))})"
        self._unheard, self.latest = 0, Bottleneck("unclear", text, 0.0)
        return self.latest

    def _judge(self, lines: Lines) -> Bottleneck:
        return diagnose(Interval.of(self._setup, lines), self._gain)
