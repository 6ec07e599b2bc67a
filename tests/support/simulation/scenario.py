"""A schedule for the simulator of a run, the groups it makes, and what a simulated run came to.

Runs in: simulations. Hides how long responses are, and what a figure is the share of.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from async_grpo.algo.filters import FilterRule
from async_grpo.algo.rewards import Shaping
from async_grpo.replay.rules import OnStale, QueueSettings, TaskRule
from async_grpo.tasks.mixture import Quotas
from async_grpo.tools.predict.engine import Speed
from async_grpo.tools.predict.workload import Workload, crowding
from async_grpo.wire.codec import encode_group
from async_grpo.wire.groups import Group, GroupTicket, Row, VersionSpan

OPEN_STATES = ("waiting", "in_flight", "ready", "training")
LOST = ("rejected", "expired", "failed")
STATES = (*OPEN_STATES, "trained", *LOST, "skipped", "unused")
PROMPT_SHARE = 0.8
"""Of the spread of lengths (in log), what the prompt decides; the rest is each response's own. The
squares add up to 1.
"""
PATIENCE = 60.0
"""A run is stuck after this many times its longest delay without a learner step."""

UNSHARED = Speed.alone(4.0)


@dataclass(frozen=True)
class Scenario:
    """A schedule in plain numbers; times in invented seconds, hazards as chances of what they
    name.
    """

    seed: int = 0
    order: str = "oldest"
    on_stale: OnStale = "wait"
    max_staleness: int = 1
    outstanding: int | None = None
    """Groups that may hold a slot; None: as many as the learner needs."""
    any_limit: bool = False
    """The limit changes at random after every event, instead."""
    rollout_batch_size: int = 2
    total_steps: int = 6
    max_attempts: int = 3
    ticket_timeout_s: float | None = None
    baseline: bool = False
    problems: int = 0
    """0: no problem is retired. Otherwise those answered right at a rate of `retire_at`."""
    retire_at: float = 1.0
    weights: tuple[float, ...] = ()
    """Of several tasks, which keep their shares of what is not lost (`replay.quota`)."""

    group_size: int = 2
    mean_tokens: float = 4.0
    """Of a response, before it is cut at `longest` times this."""
    spread: float = 1.0
    longest: float = 8.0
    seen: tuple[tuple[int, ...], ...] = ()
    """Lengths of the responses of groups that were measured, instead: of one of them each."""
    speed: Speed = UNSHARED
    """Of an engine."""
    prompt_tokens: float = 0.0
    turns: tuple[int, int] = (1, 1)
    """Fewest and most turns of an episode, which divide its tokens evenly."""
    environment_s: float = 0.0
    """What an environment takes between two turns (+- 50 %)."""

    actors: int = 2
    places: int = 8
    """Responses that an engine generates at the same time."""
    verify_s: float = 0.0
    verifiers: int = 1
    """Of each actor; one response at a time takes `verify_s`."""
    poll_s: float = 1.0
    learner_s: float = 1.0
    """What a learner step takes (+- `noise`)."""
    noise: float = 0.5
    contention: float = 1.0
    """How much longer learner steps take while engines generate."""
    ranks: int = 1
    cores: int | None = None
    """That engines and learner ranks share; None where each has its own."""
    slower: tuple[int, float] = (0, 1.0)
    """From this step on, learner steps take this many times as long."""
    publish_every: int = 1
    publish_s: float = 0.5
    """Until the last engine has the weights."""
    pause_s: float = 0.0
    """How long an engine stands still for them, besides computing its contexts again."""
    again_s: float = 0.0
    """What each token that running responses have then costs, to be computed again."""
    call_s: float = 0.0
    """What a call of an actor takes in the queue's process."""
    late_live_s: float = 0.0
    """How much later than the last engine the queue hears of a publication, at most."""
    measured: bool = False
    """Whether the result has the metrics of every step, as a run logs them."""
    overlap: bool = False
    """The learner asks for the next batch while a publication is under way."""

    reject: float = 0.0
    fail: float = 0.0
    invalid: float = 0.0
    lost_reply: float = 0.0
    lost_ack: float = 0.0
    death: float = 0.0
    """Per poll of an actor; the queue learns of it up to a second later."""
    hang: float = 0.0
    """Per ticket: the actor keeps what it holds and is never heard of again. One actor always goes
    on.
    """
    queue_death: float = 0.0
    """Per event: the queue is opened again from its journal."""
    restarts: tuple[int, ...] = ()
    """Steps after which the whole run starts again, from the checkpoint of `lost_steps` before."""
    lost_steps: int = 0

    @property
    def slower_beside_engines(self) -> float:
        """How much longer a learner step takes while all engines generate."""
        return self.contention * crowding(self.actors, self.ranks, self.cores)

    def settings(self, trained_steps: int) -> QueueSettings:
        """Return the queue's settings for a start after `trained_steps`."""
        rule = TaskRule(self.group_size, FilterRule())
        return QueueSettings(
            rollout_batch_size=self.rollout_batch_size,
            max_staleness=self.max_staleness,
            total_steps=self.total_steps,
            group_size=self.group_size,
            max_attempts=self.max_attempts,
            max_num_gen_batches=0,
            shaping=Shaping({"correct": 1.0}, 64),
            filter=FilterRule(),
            baseline=self.baseline,
            retire_at=self.retire_at if self.problems else None,
            problem=self.problem if self.problems else None,
            problems=self.problems,
            task_of=self.quotas.__getitem__ if self.weights else None,
            tasks={str(number): rule for number in range(len(self.weights))},
            replaces_lost=bool(self.weights),
            trained_steps=trained_steps,
            order=self.order,
            on_stale=self.on_stale,
            outstanding=self.outstanding,
            publish_every=self.publish_every,
            ticket_timeout_s=self.ticket_timeout_s,
        )

    @cached_property
    def quotas(self) -> Quotas:
        """Return the order of the tasks."""
        return Quotas({str(number): [(0, one)] for number, one in enumerate(self.weights)})

    def problem(self, group_id: int) -> int:
        """Pose each problem once per epoch, in another order each time."""
        epoch, place = divmod(group_id, self.problems)
        return random.Random(hash((self.seed, epoch))).sample(range(self.problems), self.problems)[
            place
        ]

    def lengths(self, group_id: int, attempt: int) -> list[int]:
        """Tokens of the group's responses: of a measured one, or lognormal, with the prompt's part
        common to all responses and attempts.
        """
        own = random.Random(hash((self.seed, group_id, attempt)))
        if self.seen:
            return list(own.choice(self.seen))
        prompt = random.Random(hash((self.seed, group_id))).gauss(0.0, PROMPT_SHARE * self.spread)
        sigma, middle = (
            math.sqrt(1 - PROMPT_SHARE**2) * self.spread,
            math.log(self.mean_tokens) - self.spread**2 / 2,
        )
        most = self.longest * self.mean_tokens
        return [
            max(1, round(min(most, math.exp(middle + prompt + own.gauss(0.0, sigma)))))
            for _ in range(self.responses)
        ]

    def number_of_turns(self, group_id: int, attempt: int, index: int) -> int:
        """Return the number of turns of an episode."""
        if self.turns == (1, 1):
            return 1
        return random.Random(hash((self.seed, group_id, attempt, index))).randint(*self.turns)

    @property
    def responses(self) -> int:
        """Responses of a group, the baseline's too."""
        return self.group_size + self.baseline

    def length(self, group_id: int) -> int:
        """Tokens of the longest response of a group's first attempt."""
        return max(self.lengths(group_id, 1))

    @classmethod
    def of(cls, work: Workload, *, steps: int, seed: int = 0) -> Scenario:
        """Make a scenario of a workload that was measured."""
        return cls(
            seed=seed,
            on_stale=work.on_stale,
            max_staleness=work.max_staleness,
            outstanding=work.outstanding,
            rollout_batch_size=work.batch,
            group_size=work.responses,
            total_steps=steps,
            seen=work.lengths,
            speed=work.speed,
            actors=work.actors,
            places=work.places,
            verify_s=work.verify_s,
            verifiers=work.verifiers,
            learner_s=work.learner_s / work.rank_factor,
            ranks=work.ranks,
            cores=work.cores,
            noise=0.1,
            contention=work.contention,
            publish_every=work.every_steps,
            publish_s=max(work.publish_s, 1e-3),
            pause_s=work.pause_s,
            again_s=work.again_s,
            poll_s=work.learner_s / 20,
            overlap=work.exposed_s < work.publish_s,
        )

    def workload(self) -> Workload:
        """Return the scenario as the planner sees it, without hazards."""
        ids = range(128)
        return Workload(
            batch=self.rollout_batch_size,
            responses=self.responses,
            max_staleness=self.max_staleness,
            every_steps=self.publish_every,
            outstanding=self.outstanding,
            on_stale=self.on_stale,
            actors=self.actors,
            places=self.places,
            verifiers=self.verifiers,
            lengths=tuple(tuple(self.lengths(group_id, 1)) for group_id in ids),
            speed=self.speed,
            learner_s=self.learner_s,
            even=True,
            contention=self.contention,
            ranks=self.ranks,
            cores=self.cores,
            publish_s=self.publish_s,
            exposed_s=0.0 if self.overlap else self.publish_s,
            pause_s=self.pause_s,
            again_s=self.again_s,
            verify_s=self.verify_s,
        )

    def advised(self, advice: Mapping[str, int]) -> Scenario:
        """Return the same with these settings; more learner ranks divide the time of a step."""
        names = {
            "weight_sync.every_steps": "publish_every",
            "replay.max_staleness": "max_staleness",
            "cluster.rollout_actors.max": "actors",
            "task.verifier.workers": "verifiers",
            "replay.outstanding": "outstanding",
        }
        changes: dict[str, Any] = {
            names[name]: value for name, value in advice.items() if name != "learner.ranks"
        }
        return replace(self, learner_s=self.learner_s / advice.get("learner.ranks", 1), **changes)

    @property
    def longest_s(self) -> float:
        """What the longest response takes in a full engine, with its environments."""
        tokens = max(map(max, self.seen)) if self.seen else self.longest * self.mean_tokens
        between = 1.5 * self.environment_s * (self.turns[1] - 1)
        return tokens / self.speed.each(self.places) + between

    @property
    def patience_s(self) -> float:
        """Return after how many seconds without a learner step a run is stuck."""
        delays = (
            self.longest_s
            + self.learner_s * self.contention
            + self.publish_s
            + self.late_live_s
            + self.poll_s
        )
        return PATIENCE * (delays + self.max_attempts * (self.ticket_timeout_s or 0.0))


@dataclass(slots=True, eq=False)
class Rollout:
    """A response of a group: tokens of each of its turns, how many it has of those that ended, and
    the versions that sampled it: (version, first token).
    """

    turns: list[float]
    had: float = 0.0
    turn: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of all turns."""
        return round(sum(self.turns))

    def served(self, version: int, tokens: float) -> None:
        """Note that the engine goes on with this version, after so many tokens."""
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, int(tokens)))

    def spans(self) -> list[VersionSpan]:
        """Return the version spans of the whole response."""
        ends = [start for _, start in self.versions[1:]] + [self.length]
        cut = [
            VersionSpan(version, start, min(end, self.length))
            for (version, start), end in zip(self.versions, ends, strict=True)
        ]
        return [span for span in cut if span.start < span.end]


@dataclass(slots=True, eq=False)
class Job:
    """A group under way. `left`: responses that have not ended."""

    ticket: GroupTicket
    started: float
    rollouts: list[Rollout]
    left: int
    begun: float = math.inf
    """When its first response began."""
    done: float = 0.0
    scored: float = 0.0

    @property
    def key(self) -> tuple[int, int]:
        """Return (group id, attempt)."""
        return self.ticket.group_id, self.ticket.attempt

    @property
    def tokens(self) -> int:
        """Tokens of all responses."""
        return sum(one.length for one in self.rollouts)

    def frame(
        self,
        scenario: Scenario,
        actor: str,
        *,
        rejected: bool = False,
        short: bool = False,
        future: int = 0,
    ) -> bytes:
        """Return the group as it is sent. `rejected`: all are right. `short`: one response is
        missing. `future`: versions are newer by this.
        """
        rows = []
        for index, one in enumerate(self.rollouts[short:]):
            value, length = 1.0 if rejected else float(index % 2), one.length
            spans = [
                replace(span, policy_version=span.policy_version + future) for span in one.spans()
            ]
            role: Literal["train", "baseline"] = (
                "baseline"
                if scenario.baseline and index == scenario.group_size - short
                else "train"
            )
            tokens, logprobs = np.zeros(length, np.int32), np.full(length, -0.5, np.float32)
            turns = [(0, length)]
            rows.append(
                Row(tokens, logprobs, turns, spans, {"correct": value}, value, "stop", role)
            )
        times = {
            "queued": self.started,
            "first_token": min(self.begun, self.done),
            "done": self.done,
            "scored": self.scored,
        }
        prompts = [np.zeros(1, np.int32)]
        return encode_group(
            Group(
                *self.key,
                self.ticket.policy_version,
                actor,
                prompts,
                rows,
                times,
                self.ticket.run_epoch,
            )
        )


@dataclass(frozen=True)
class Step:
    """One learner step. Tokens by lag; times when the batch was first asked for, was there, and was
    trained; groups that might be outstanding then.
    """

    step: int
    group_ids: tuple[int, ...]
    lags: Counter[int]
    asked: float
    taken: float
    ended: float
    limit: int = 0


@dataclass(frozen=True)
class Result:
    """What a run came to. `steps` and `trained` (ids in order) are the history that leads to the
    last weights.
    """

    scenario: Scenario
    ended: str
    steps: list[Step]
    counts: dict[str, int]
    metrics: dict[str, float]
    seen: Counter[str]
    lines: list[dict[str, float]] = field(default_factory=list)
    """Metrics of every step, where they are `measured`."""

    @property
    def trained(self) -> list[int]:
        """Ids of the trained groups, step by step."""
        return [group_id for step in self.steps for group_id in step.group_ids]

    def figures(self, *, skip: int = 0) -> dict[str, float]:
        """Compute shares and lags over all steps but the first and the last `skip`. groups_per_s:
        trained ones.
        """
        steps, bound = self.steps[skip : len(self.steps) - skip], self.scenario.max_staleness
        lags: Counter[int] = sum((step.lags for step in steps), Counter())
        weighted = {lag: count for lag, count in lags.items() if lag <= bound}
        ids = sorted(self.seen_ids, key=lambda group_id: (self.scenario.length(group_id), group_id))
        slowest = set(ids[-math.ceil(len(ids) / 10) :])
        trained = [group_id for step in steps for group_id in step.group_ids]
        return {
            "idle": sum(step.taken - step.asked for step in steps)
            / (steps[-1].ended - steps[0].asked),
            "groups_per_s": self.scenario.rollout_batch_size
            * (len(steps) - 1)
            / (steps[-1].taken - steps[0].taken),
            "lag_mean": sum(lag * count for lag, count in weighted.items())
            / sum(weighted.values()),
            "lag_max": float(max(weighted)),
            "masked": 1 - sum(weighted.values()) / lags.total(),
            "expired": self.seen["expired"] / max(self.seen["accepted"], 1),
            "slowest_tenth": sum(group_id in slowest for group_id in trained) / len(trained),
        }

    @property
    def seen_ids(self) -> range:
        """Return the ids issued, the skipped ones included."""
        return range(sum(self.counts[state] for state in STATES))
