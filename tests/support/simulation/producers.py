"""Rollout actors of a simulated run: they ask for tickets, generate in engines that responses
share, wait for environments and verifiers, and die, hang and lose calls as the scenario says.

Runs in: simulations. Hides what becomes of a group between its ticket and its result:

    ticket -> responses in the engine -> environment -> ... -> verifiers -> put
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from async_grpo.replay.actor_reports import ActorReport, TokenTotals
from async_grpo.rollout.ticket_queue import groups_to_ask_for
from async_grpo.rollout.time_accounting import EngineTime
from async_grpo.tools.predict.engine import Response, SharedEngine
from async_grpo.tools.predict.workload import crowding
from async_grpo.wire.groups import GroupTicket
from tests.support.simulation.scenario import Job, Rollout

if TYPE_CHECKING:
    from tests.support.simulation.simulator import Simulation

HEARTBEAT_S = 0.5
"""Between two reports of an actor, where nothing is `checked`."""


@dataclass(slots=True, eq=False)
class Actor:
    """A rollout actor and its engine."""

    name: str
    version: int
    time: EngineTime
    engine: SharedEngine
    alive: bool = True
    hung: bool = False
    poll_at: float = math.inf
    end_at: float = math.inf
    """When its engine is looked at next."""
    jobs: dict[tuple[int, int], Job] = field(default_factory=dict)
    ended: int = 0
    """Tokens of groups that it is done with."""
    refused: bool = False
    """It got no ticket, and asks again only when there may be one (where nothing is `checked`)."""
    reported_at: float = -math.inf
    free_at: list[float] = field(default_factory=list)
    """When each of its verifiers is free again."""

    def has(self, key: tuple[int, int], index: int) -> float:
        """Return the tokens of a response by now."""
        return self.jobs[key].rollouts[index].had + self.engine.done((key, index))


class Producers:
    """The rollout actors of a simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._run, self.scenario = simulation, simulation.scenario
        self.actors: dict[str, Actor] = {}
        self.told: Counter[str] = Counter()
        self.arrived: Counter[str] = Counter()
        self._accounted: set[tuple[int, int]] = set()
        self._serial = 0
        self._queue_free_at = 0.0

    def busy(self) -> tuple[float, float]:
        """Return how many seconds engines have generated, on average, and which share of them
        generates now.
        """
        engines = [actor.engine for actor in self.actors.values()]
        for engine in engines:
            engine.advance(self._run.now)
        count = max(len(engines), 1)
        generating = sum(bool(engine.running) for engine in engines)
        return sum(engine.busy_s for engine in engines) / count, generating / count

    def share_cores(self, *, learning: bool) -> None:
        """Let engines be as fast as they are while so many others use their cores."""
        scenario = self.scenario
        if scenario.cores is None:
            return
        engines = sum(bool(actor.engine.running) for actor in self.actors.values())
        slow = crowding(engines, scenario.ranks if learning else 0, scenario.cores)
        for actor in self.actors.values():
            if actor.engine.slow != slow:
                actor.engine.advance(self._run.now)
                actor.engine.slow = slow
                self._expect_end(actor)

    # ---- actors ----

    def start_all(self) -> None:
        """Start the actors of a start of the run."""
        self.actors = {}
        for _ in range(self.scenario.actors):
            self.start(self._run.between(0.0, 0.1))

    def start(self, delay: float) -> None:
        """Start an actor. It may have started from old weights, and takes the live ones later."""
        self._serial += 1
        run = self._run
        clock = EngineTime(clock=lambda: run.now, wall=lambda: 1.0 + run.now)
        engine = SharedEngine(self.scenario.speed, self.scenario.places, now=run.now)
        actor = Actor(
            f"actor-{self._serial}",
            run.witness.live if run.chance(0.7) else 0,
            clock,
            engine,
            free_at=[0.0] * self.scenario.verifiers,
        )
        actor.time.producing(True)
        self.actors[actor.name] = actor
        run.later(delay + run.between(0.0, 0.5), self._join, actor)
        self.poll_soon(actor, delay)

    async def _join(self, actor: Actor) -> None:
        self.serve(actor, self._run.witness.live)
        self.poll_soon(actor, 0.0)

    async def take(self, actor: Actor, version: int) -> None:
        """Take a publication."""
        self.serve(actor, version)

    def serve(self, actor: Actor, version: int) -> None:
        """Continue with other weights, in the middle of what is generated."""
        if version <= actor.version:
            return
        actor.version = version
        actor.engine.advance(self._run.now)
        for key, job in actor.jobs.items():
            for index, one in enumerate(job.rollouts):
                if one.turn < len(one.turns):
                    one.served(version, actor.has(key, index))
        again_s = self.scenario.again_s * actor.engine.held
        actor.engine.stop(self.scenario.pause_s + again_s)
        actor.engine.recompute(self.scenario.prompt_tokens)
        self._expect_end(actor)

    async def declare_dead(self, actor: Actor) -> None:
        """Let the run know that an actor is dead, and start another."""
        run = self._run
        run.witness.taken_away.update(actor.jobs)
        held = (await run.queue.held()).get(actor.name, [])
        run.witness.taken_away.update(held)
        run.seen["forfeited"] += len(held)
        await run.queue.forfeit(actor.name)
        run.news = True
        del self.actors[actor.name]
        self.start(run.between(0.0, 1.0))

    # ---- tickets ----

    def poll_soon(self, actor: Actor, delay: float) -> None:
        """Ask for tickets after `delay` at the latest."""
        if actor.refused and not delay:
            return
        if self._run.now + delay < actor.poll_at:
            actor.poll_at = self._run.now + delay
            self._run.later(delay, self._poll, actor, actor.poll_at)

    def _called(self) -> float:
        """Seconds until a call of now is answered: the queue's process takes one at a time."""
        now = self._run.now
        self._queue_free_at = max(self._queue_free_at, now) + self.scenario.call_s
        return self._queue_free_at - now

    def _room(self, actor: Actor) -> int:
        """Count the groups to ask for."""
        return groups_to_ask_for(
            actor.engine.places,
            unfinished=len(actor.engine.running) + len(actor.engine.waiting),
            groups=len(actor.jobs),
            responses=self.scenario.responses,
        )

    async def _poll(self, actor: Actor, at: float) -> None:
        run = self._run
        if at != actor.poll_at or not actor.alive or actor.hung:
            return
        actor.poll_at = math.inf
        if run.chance(self.scenario.death):
            actor.alive = False
            run.seen["death"] += 1
            run.later(run.between(0.0, 1.0), self.declare_dead, actor)
            return
        if self.scenario.call_s:
            run.later(self._called(), self._ask, actor)
        else:
            await self._ask(actor)

    async def _ask(self, actor: Actor) -> None:
        run = self._run
        if run.ended or actor.name not in self.actors or not actor.alive or actor.hung:
            return
        actor.engine.advance(run.now)
        room = self._room(actor)
        report = self._report(actor) if run.reports and self._is_due(actor) else None
        tickets = await run.queue.acquire(actor.name, actor.version, list(actor.jobs), room, report)
        assert tickets is not None, f"{actor.name} is told to stop at step {run.step}"
        run.witness.issued(actor.name, tickets, now=run.now)
        if tickets and run.chance(self.scenario.lost_reply):
            run.seen["lost_reply"] += 1
        else:
            self._begin(actor, tickets)
        actor.refused = room > 0 and not tickets and not run.checked
        if room or tickets:
            self.poll_soon(actor, self.scenario.poll_s * run.between(0.5, 1.5))

    def may_ask(self) -> None:
        """Let those ask again who got no ticket: some may have become free."""
        for actor in [one for one in self.actors.values() if one.refused]:
            actor.refused = False
            self.poll_soon(actor, self._run.between(0.0, 0.01))

    def _begin(self, actor: Actor, tickets: list[GroupTicket]) -> None:
        run, scenario = self._run, self.scenario
        for ticket in tickets:
            assert ticket.policy_version <= actor.version
            ids = ticket.group_id, ticket.attempt
            rollouts = []
            for index, length in enumerate(scenario.lengths(*ids)):
                turns = scenario.number_of_turns(*ids, index)
                one = Rollout([length / turns] * turns)
                one.served(actor.version, 0)
                rollouts.append(one)
            job = Job(ticket, run.now, rollouts, len(rollouts))
            assert job.key not in actor.jobs, (
                f"{job.key} was given again to {actor.name}, which holds it"
            )
            actor.jobs[job.key] = job
            actor.time.stage(job.key, "generating")
            actor.engine.begin(
                [
                    Response((job.key, index), one.turns[0], scenario.prompt_tokens * (index == 0))
                    for index, one in enumerate(rollouts)
                ]
            )
        self._expect_end(actor)
        if tickets and run.chance(scenario.hang):
            others = sum(other.alive and not other.hung for other in self.actors.values())
            actor.hung = others > 1
            run.seen["hang"] += actor.hung

    # ---- generation ----

    def _expect_end(self, actor: Actor) -> None:
        actor.end_at = actor.engine.next_end()
        if actor.end_at < math.inf:
            self._run.later(actor.end_at - self._run.now, self._end, actor, actor.end_at)

    async def _end(self, actor: Actor, at: float) -> None:
        """Go on with what has ended in an engine, unless that has changed meanwhile."""
        if at != actor.end_at:
            return
        actor.engine.advance(self._run.now)
        for part in actor.engine.ended():
            await self._turn(actor, part)
        self._expect_end(actor)
        self.poll_soon(actor, 0.0)

    async def _turn(self, actor: Actor, part: Response) -> None:
        run, (group, index) = self._run, cast("tuple[tuple[int, int], int]", part.key)
        job = actor.jobs.get(group)
        if job is None:
            return
        job.begun = min(job.begun, part.begun_at)
        one = job.rollouts[index]
        one.had += one.turns[one.turn]
        one.turn += 1
        if one.turn < len(one.turns):
            delay = self.scenario.environment_s * run.between(0.5, 1.5)
            run.later(delay, self._next_turn, actor, job, index)
            return
        job.left -= 1
        if job.left:
            return
        job.done = job.scored = run.now
        await (self._verify if self.scenario.verify_s else self._finish)(actor, job)

    async def _next_turn(self, actor: Actor, job: Job, index: int) -> None:
        if actor.jobs.get(job.key) is not job:
            return
        one = job.rollouts[index]
        actor.engine.advance(self._run.now)
        part = Response((job.key, index), one.turns[one.turn], self.scenario.prompt_tokens)
        actor.engine.begin([part])
        self._expect_end(actor)

    async def _verify(self, actor: Actor, job: Job) -> None:
        """Let the responses wait for verifiers, one after the other."""
        actor.time.stage(job.key, "verifying")
        for _ in job.rollouts:
            free = heapq.heappop(actor.free_at)
            job.scored = max(free, self._run.now) + self.scenario.verify_s
            heapq.heappush(actor.free_at, job.scored)
        self._run.later(job.scored - self._run.now, self._finish, actor, job)

    # ---- results ----

    async def _finish(self, actor: Actor, job: Job) -> None:
        """Send a complete group. A dead actor's last frame may still arrive."""
        if actor.hung or (not actor.alive and self._run.chance(0.5)):
            return
        if self.scenario.call_s:
            self._run.later(self._called(), self._send, actor, job)
        else:
            await self._send(actor, job)

    async def _send(self, actor: Actor, job: Job) -> None:
        run, scenario, witness = self._run, self.scenario, self._run.witness
        if run.ended or job.key not in actor.jobs:
            return
        run.seen["last_frame"] += not actor.alive
        rejected = run.chance(scenario.reject)
        if run.chance(scenario.fail):
            run.seen["fail"] += 1
            await run.queue.fail(actor.name, [job.ticket], "timeout", [job.tokens])
            run.news = True
            self.brings(actor, job)
            witness.taken_away.add(job.key)
            if run.chance(0.75):
                self._drop(actor, job)
                return
        elif run.chance(scenario.invalid):
            await self._put_invalid(actor, job)
            self._drop(actor, job)
            return
        frame = job.frame(scenario, actor.name, rejected=rejected)
        (verdict,) = await run.queue.put(actor.name, [frame])
        run.news = True
        self.brings(actor, job)
        witness.answered(job, verdict.status, frame=frame, rejected=rejected, now=run.now)
        if run.chance(scenario.lost_ack):
            again = actor, job, frame, verdict.status, run.opened
            run.later(run.between(0.0, 2.0), self._put_again, *again)
        else:
            self._drop(actor, job)

    async def _put_again(
        self, actor: Actor, job: Job, frame: bytes, first: str, opened: int
    ) -> None:
        """Repeat a call whose answer was lost: until there is one, the actor holds the group."""
        run = self._run
        (verdict,) = await run.queue.put(actor.name, [frame])
        # a new process of the queue forgets what is done with
        forgotten = job.key in run.witness.expired or run.opened > opened
        expected = (
            ("late",) if first == "late" else ("duplicate", "late") if forgotten else ("duplicate",)
        )
        assert verdict.status in expected, f"{job.key} was {first} and is {verdict.status}"
        run.seen["lost_ack"] += 1
        self._drop(actor, job)

    async def _put_invalid(self, actor: Actor, job: Job) -> None:
        """Send what cannot be trained. A frame that cannot be read tells no ticket: it is issued
        again when the actor does not hold it any more.
        """
        run = self._run
        kind = run.random.choice(["short", "unreadable", "future"])
        frame = job.frame(
            self.scenario, actor.name, short=kind == "short", future=1_000_000 * (kind == "future")
        )
        sent = frame[:-3] if kind == "unreadable" else frame
        (verdict,) = await run.queue.put(actor.name, [sent])
        assert verdict.status in ("invalid", "late" if kind != "unreadable" else ""), (
            f"{job.key}, {kind}: {verdict}"
        )
        if kind != "unreadable":
            self.brings(actor, job, missing=kind == "short")
            run.witness.taken_away.add(job.key)
        run.seen["invalid"] += verdict.status == "invalid"

    async def put_too_late(self, actor: Actor, job: Job) -> None:
        """Send a group of a start of the run that is gone."""
        (verdict,) = await self._run.queue.put(actor.name, [job.frame(self.scenario, actor.name)])
        assert verdict.status in ("late", "duplicate", "abandoned"), (
            f"{job.key} of a run that is gone is {verdict.status}"
        )
        if verdict.status != "duplicate":
            self.brings(actor, job)
        self._run.seen["late"] += 1

    def _drop(self, actor: Actor, job: Job) -> None:
        if actor.jobs.pop(job.key, None) is None:
            return
        actor.time.stage(job.key, None)
        actor.ended += job.tokens
        self.poll_soon(actor, 0.0)

    # ---- tokens ----

    def _is_due(self, actor: Actor) -> bool:
        """Tell whether an actor reports with this call: with each, where everything is checked."""
        due = self._run.checked or self._run.now - actor.reported_at >= HEARTBEAT_S
        actor.reported_at = self._run.now if due else actor.reported_at
        return due

    def _report(self, actor: Actor) -> ActorReport:
        """Tell what the engine sampled by now."""
        if not self._run.checked:
            return ActorReport(TokenTotals(sampled=int(actor.engine.sampled)))
        under_way = sum(
            min(one.length, int(actor.has(key, index)))
            for key, job in actor.jobs.items()
            for index, one in enumerate(job.rollouts)
        )
        self.told[actor.name] = actor.ended + under_way
        return ActorReport(TokenTotals(sampled=self.told[actor.name]))

    def brings(self, actor: Actor, job: Job, *, missing: int = 0) -> None:
        """Note that the queue hears of the tokens of this attempt: they count once. missing:
        responses that are not among them.
        """
        if job.key not in self._accounted:
            self._accounted.add(job.key)
            self.arrived[actor.name] += sum(one.length for one in job.rollouts[missing:])
