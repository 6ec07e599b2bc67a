"""One run of the replay queue in invented time: the real `ReplayQueue`, fake rollout actors and a
fake learner, and every hazard.

Runs in: tests (thousands of short random schedules) and `benchmarks.simulation` (long ones, for
figures). Hides the order of events: the same scenario gives the same run. After every event the
queue is compared with the witness; what does not agree raises AssertionError with the scenario.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgpack

from async_grpo.errors import NoSignal
from async_grpo.groups import Batch, GroupTicket
from async_grpo.planning import durations
from async_grpo.replay.actor_reports import ActorReport, TokenTotals
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.resume import JournalSettings, open_queue
from async_grpo.replay.token_ledger import PLACES
from async_grpo.rollout.time_accounting import EngineTime
from async_grpo.runtime.time_ledger import ENGINE_CAUSES, LEARNER_CAUSES, TimeByCause
from async_grpo.wire.codec import unpack_frames
from benchmarks.scenario import OPEN_STATES, STATES, Job, Result, Scenario, Step
from benchmarks.witness import Witness

MAX_EVENTS = 300_000
"""A run is stuck after this many events without a learner step."""

MEMORY = Path("/dev/shm")
"""Where journals are kept if it exists: a thousand schedules should not wait for a disk."""


@dataclass(slots=True, eq=False)
class Actor:
    name: str
    version: int
    time: EngineTime
    alive: bool = True
    hung: bool = False
    poll_at: float = math.inf
    jobs: dict[tuple[int, int], Job] = field(default_factory=dict)
    ended: int = 0
    """Tokens of groups that it is done with."""
    free_at: list[float] = field(default_factory=list)
    """When each of its verifiers is free again."""


class Simulation:
    """Runs a scenario."""

    def __init__(self, scenario: Scenario, directory: Path) -> None:
        self.scenario, self.directory = scenario, directory
        self.random = random.Random(scenario.seed)
        self.witness = Witness(scenario)
        self.seen = self.witness.seen
        self.journaled = bool(scenario.queue_death or scenario.restarts)
        self.now = self.progress_at = 0.0
        self.events: list[tuple[float, int, int, Callable[..., Awaitable[None]], tuple]] = []
        self.serial = self.generation = self.opened = 0
        self.actors: dict[str, Actor] = {}
        self.step = self.newest = 0
        self.steps: list[Step] = []
        self.checkpoints: dict[int, dict[str, Any]] = {}
        self.waiting, self.publishing, self.asked = True, False, 0.0
        self.restart_at = scenario.restarts
        self.ended = ""
        self.time = TimeByCause(LEARNER_CAUSES, clock=lambda: self.now)
        self.lines: list[dict[str, float]] = []
        self.told: Counter[str] = Counter()
        self.arrived: Counter[str] = Counter()
        self.accounted: set[tuple[int, int]] = set()
        self.open()

    def later(self, delay: float, call: Callable[..., Awaitable[None]], *arguments: object) -> None:
        self.serial += 1
        heapq.heappush(
            self.events, (self.now + delay, self.serial, self.generation, call, arguments)
        )

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def between(self, low: float, high: float) -> float:
        return self.random.uniform(low, high)

    async def run(self) -> Result:
        """The whole run. Raises AssertionError where the queue breaks a rule or stops."""
        self.start_actors()
        self.time.switch("starved")
        events = 0
        while not self.ended:
            self.now, _, generation, call, arguments = heapq.heappop(self.events)
            if generation != self.generation:
                continue
            await call(*arguments)
            if self.scenario.any_limit:
                self.change_limit()
            if self.waiting and not self.ended:
                await self.ask()
            if self.chance(self.scenario.queue_death) and not self.ended:
                await self.die()
            self.witness.ledger(await self.queue.counts())
            events = 0 if self.progress_at == self.now else events + 1
            if self.now - self.progress_at > self.scenario.patience_s or events > MAX_EVENTS:
                raise AssertionError(
                    f"stuck at step {self.step + 1} since {self.progress_at:.1f} s, now "
                    f"{self.now:.1f} s"
                )
        return Result(
            self.scenario, self.ended, self.steps, self.counts, self.metrics, self.seen, self.lines
        )

    def change_limit(self) -> None:
        """Set any limit that there may be."""
        settings, limit = self.queue.settings, self.queue._outstanding
        least = min(settings.publish_every * settings.rollout_batch_size + 1, settings.capacity)
        limit.groups = self.random.randint(least, settings.capacity)

    # ---- the queue's process, and the whole run ----

    def open(self) -> None:
        """A queue for this start of the run, from the journal if there is one."""
        base, directory = self.witness.base, str(self.directory / str(self.opened))
        journal = (
            JournalSettings(
                directory, start=f"start {self.generation}", fsync="never", lost_steps="discard"
            )
            if self.journaled
            else None
        )
        snapshot = self.checkpoints.get(base)
        self.queue: ReplayQueue = open_queue(
            self.scenario.settings(base), journal, snapshot=snapshot, clock=lambda: self.now
        )

    def reopen(self) -> None:
        """The process dies: what is not in the files by now is lost."""
        shutil.copytree(self.directory / str(self.opened), self.directory / str(self.opened + 1))
        self.close()
        self.opened += 1
        self.open()

    def close(self) -> None:
        """Give the file back, as the death of a process does."""
        if self.queue._journal is not None:
            self.queue._journal.close()

    async def die(self) -> None:
        self.seen["queue_death"] += 1
        before = await self.account()
        self.reopen()
        after = await self.account()
        assert before == after, (
            f"a new process of the queue knows {after}, the old one knew {before}"
        )

    async def account(self) -> tuple[object, ...]:
        """What must survive the queue's process."""
        counts = await self.queue.counts()
        batch = await self.queue.get_batch(self.newest) if counts["training"] else None
        frames = await self.payload(batch) if batch else None
        held = {actor_id: sorted(pairs) for actor_id, pairs in (await self.queue.held()).items()}
        live = (await self.queue.metrics())["replay/live_version"]
        return (
            {state: counts[state] for state in STATES},
            await self.open_ids(),
            held,
            live,
            batch,
            frames,
        )

    async def open_ids(self) -> dict[int, str]:
        history = await self.queue.history(list(self.witness.tickets))
        return {
            group_id: record["state"]
            for group_id, record in history.items()
            if record["state"] in OPEN_STATES
        }

    async def payload(self, batch: Batch) -> list[bytes]:
        return [
            bytes(frame)
            for frame in unpack_frames(
                await self.queue.payload(batch.step, [group.group_id for group in batch.groups])
            )
        ]

    async def checkpoint(self) -> None:
        """After a learner step, in front of its publication. Checkpoints that no restart goes back
        to are deleted.
        """
        self.checkpoints[self.step] = msgpack.unpackb(msgpack.packb(await self.queue.snapshot()))
        while len(self.checkpoints) > self.scenario.lost_steps + 1:
            del self.checkpoints[min(self.checkpoints)]
            oldest = min(self.checkpoints)
            await self.queue.forget(segment=self.checkpoints[oldest]["segment"], step=oldest)

    async def restart(self) -> None:
        """The whole run starts again from a checkpoint, with other actors. Some of the old ones may
        still send what they had.
        """
        witness, old = self.witness, list(self.actors.values())
        step = max(self.step - self.scenario.lost_steps, witness.base)
        self.restart_at = self.restart_at[1:]
        self.seen["restart"] += 1
        self.seen["lost_steps"] += self.step - step
        self.checkpoints = {at: kept for at, kept in self.checkpoints.items() if at <= step}
        self.generation += 1
        self.actors = {}
        self.step = self.newest = witness.base = step
        self.steps = self.steps[:step]
        self.reopen()
        witness.restart(step, await self.open_ids())
        self.waiting, self.publishing, self.asked, self.progress_at = (
            True,
            False,
            self.now,
            self.now,
        )
        self.start_actors()
        for actor in old:
            for job in list(actor.jobs.values())[:1]:
                self.later(self.between(0.0, 2.0), self.put_too_late, actor, job)

    async def put_too_late(self, actor: Actor, job: Job) -> None:
        (verdict,) = await self.queue.put(actor.name, [job.frame(self.scenario, actor.name)])
        assert verdict.status in ("late", "duplicate", "abandoned"), (
            f"{job.key} of a run that is gone is {verdict.status}"
        )
        if verdict.status != "duplicate":
            self.brings(actor, job)
        self.seen["late"] += 1

    # ---- producers ----

    def start_actors(self) -> None:
        for _ in range(self.scenario.actors):
            self.start_actor(self.between(0.0, 0.1))

    def start_actor(self, delay: float) -> None:
        """It may have started from old weights, and takes the live ones later."""
        self.serial += 1
        clock = EngineTime(clock=lambda: self.now, wall=lambda: 1.0 + self.now)
        actor = Actor(
            f"actor-{self.serial}",
            self.witness.live if self.chance(0.7) else 0,
            clock,
            free_at=[0.0] * self.scenario.verifiers,
        )
        actor.time.producing(True)
        self.actors[actor.name] = actor
        self.later(delay + self.between(0.0, 0.5), self.join, actor)
        self.poll_soon(actor, delay)

    async def join(self, actor: Actor) -> None:
        await self.serve(actor, self.witness.live)
        self.poll_soon(actor, 0.0)

    async def serve(self, actor: Actor, version: int) -> None:
        """The engine continues with other weights, in the middle of what it generates."""
        if version <= actor.version:
            return
        actor.version = version
        for job in actor.jobs.values():
            job.switches.append(
                (version, int((self.now - job.started) * self.scenario.tokens_per_s))
            )

    def poll_soon(self, actor: Actor, delay: float) -> None:
        if self.now + delay < actor.poll_at:
            actor.poll_at = self.now + delay
            self.later(delay, self.poll, actor, actor.poll_at)

    async def poll(self, actor: Actor, at: float) -> None:
        scenario = self.scenario
        if at != actor.poll_at or not actor.alive or actor.hung:
            return
        actor.poll_at = math.inf
        if self.chance(scenario.death):
            actor.alive = False
            self.seen["death"] += 1
            self.later(self.between(0.0, 1.0), self.declare_dead, actor)
            return
        holding = list(actor.jobs)
        tickets = await self.queue.acquire(
            actor.name,
            actor.version,
            holding,
            max(scenario.slots - len(holding), 0),
            self.report(actor) if self.reports else None,
        )
        assert tickets is not None, f"{actor.name} is told to stop at step {self.step}"
        self.witness.issued(actor.name, tickets, now=self.now)
        if tickets and self.chance(scenario.lost_reply):
            self.seen["lost_reply"] += 1
        else:
            self.begin(actor, tickets)
        if scenario.slots > len(actor.jobs) or tickets:
            self.poll_soon(actor, scenario.poll_s * self.between(0.5, 1.5))

    def begin(self, actor: Actor, tickets: list[GroupTicket]) -> None:
        scenario = self.scenario
        for ticket in tickets:
            assert ticket.policy_version <= actor.version
            lengths = scenario.lengths(ticket.group_id, ticket.attempt)
            job = Job(ticket, self.now, lengths, [(actor.version, 0)])
            assert job.key not in actor.jobs, (
                f"{job.key} was given again to {actor.name}, which holds it"
            )
            actor.jobs[job.key] = job
            actor.time.stage(job.key, "generating")
            job.done = job.scored = self.now + max(lengths) / scenario.tokens_per_s
            self.later(
                job.done - self.now, self.verify if scenario.verify_s else self.finish, actor, job
            )
        if (
            tickets
            and self.chance(scenario.hang)
            and sum(other.alive and not other.hung for other in self.actors.values()) > 1
        ):
            actor.hung = True
            self.seen["hang"] += 1

    @property
    def reports(self) -> bool:
        """Whether actors tell what they sampled; a queue that dies may forget the last word of one
        that is dead.
        """
        return not self.journaled

    def report(self, actor: Actor) -> ActorReport:
        """What its engine sampled by now."""
        under_way = [
            min(length, int((self.now - job.started) * self.scenario.tokens_per_s))
            for job in actor.jobs.values()
            for length in job.lengths
        ]
        self.told[actor.name] = actor.ended + sum(under_way)
        return ActorReport(TokenTotals(sampled=self.told[actor.name]))

    def brings(self, actor: Actor, job: Job, *, missing: int = 0) -> None:
        """The queue hears of the tokens of this attempt: they count once. missing: responses that
        are not among them.
        """
        if job.key not in self.accounted:
            self.accounted.add(job.key)
            self.arrived[actor.name] += sum(job.lengths[missing:])

    def check_tokens(self) -> None:
        """Every token is in one place, and their sum is what engines sampled, as far as anybody
        knows.
        """
        bound, lags = (
            self.scenario.max_staleness,
            sum((step.lags for step in self.steps), Counter()),
        )
        stale = sum(count for lag, count in lags.items() if lag > bound)
        found = {place: self.metrics[f"goodput/{place}"] for place in (*PLACES, "generated")}
        expected = sum(
            max(self.told[name], self.arrived[name]) for name in {*self.told, *self.arrived}
        )
        assert found["generated"] == sum(found[place] for place in PLACES) == expected, (
            f"{expected} tokens were sampled: {found}"
        )
        assert (found["trained"], found["masked"]) == (lags.total() - stale, stale), (
            f"{lags.total() - stale} and {stale}: {found}"
        )

    async def declare_dead(self, actor: Actor) -> None:
        self.witness.taken_away.update(actor.jobs)
        held = (await self.queue.held()).get(actor.name, [])
        self.witness.taken_away.update(held)
        self.seen["forfeited"] += len(held)
        await self.queue.forfeit(actor.name)
        del self.actors[actor.name]
        self.start_actor(self.between(0.0, 1.0))

    async def verify(self, actor: Actor, job: Job) -> None:
        """Its responses wait for verifiers, one after the other."""
        actor.time.stage(job.key, "verifying")
        for _ in job.lengths:
            job.scored = max(heapq.heappop(actor.free_at), self.now) + self.scenario.verify_s
            heapq.heappush(actor.free_at, job.scored)
        self.later(job.scored - self.now, self.finish, actor, job)

    async def finish(self, actor: Actor, job: Job) -> None:
        """The group is complete. A dead actor's last frame may still arrive."""
        scenario, witness = self.scenario, self.witness
        if actor.hung or (not actor.alive and self.chance(0.5)):
            return
        self.seen["last_frame"] += not actor.alive
        rejected = self.chance(scenario.reject)
        if self.chance(scenario.fail):
            self.seen["fail"] += 1
            await self.queue.fail(actor.name, [job.ticket], "timeout", [sum(job.lengths)])
            self.brings(actor, job)
            witness.taken_away.add(job.key)
            if self.chance(0.75):
                self.drop(actor, job)
                return
        elif self.chance(scenario.invalid):
            await self.put_invalid(actor, job)
            self.drop(actor, job)
            return
        frame = job.frame(scenario, actor.name, rejected=rejected)
        (verdict,) = await self.queue.put(actor.name, [frame])
        self.brings(actor, job)
        witness.answered(job, verdict.status, frame=frame, rejected=rejected, now=self.now)
        if self.chance(scenario.lost_ack):
            self.later(
                self.between(0.0, 2.0),
                self.put_again,
                actor,
                job,
                frame,
                verdict.status,
                self.opened,
            )
        else:
            self.drop(actor, job)

    async def put_again(
        self, actor: Actor, job: Job, frame: bytes, first: str, opened: int
    ) -> None:
        """The answer was lost: until there is one, the actor holds the group and repeats the
        call.
        """
        (verdict,) = await self.queue.put(actor.name, [frame])
        forgotten = (
            job.key in self.witness.expired or self.opened > opened
        )  # a new process of the queue forgets what is done with
        expected = (
            ("late",) if first == "late" else ("duplicate", "late") if forgotten else ("duplicate",)
        )
        assert verdict.status in expected, f"{job.key} was {first} and is {verdict.status}"
        self.seen["lost_ack"] += 1
        self.drop(actor, job)

    async def put_invalid(self, actor: Actor, job: Job) -> None:
        """A frame that cannot be read tells no ticket: it is issued again when the actor does not
        hold it any more.
        """
        kind = self.random.choice(["short", "unreadable", "future"])
        frame = job.frame(
            self.scenario, actor.name, short=kind == "short", future=1_000_000 * (kind == "future")
        )
        (verdict,) = await self.queue.put(
            actor.name, [frame[:-3] if kind == "unreadable" else frame]
        )
        assert verdict.status in ("invalid", "late" if kind != "unreadable" else ""), (
            f"{job.key}, {kind}: {verdict}"
        )
        if kind != "unreadable":
            self.brings(actor, job, missing=kind == "short")
        self.seen["invalid"] += verdict.status == "invalid"
        if kind != "unreadable":
            self.witness.taken_away.add(job.key)

    def drop(self, actor: Actor, job: Job) -> None:
        del actor.jobs[job.key]
        actor.time.stage(job.key, None)
        actor.ended += sum(job.lengths)
        self.poll_soon(actor, 0.0)

    # ---- learner ----

    async def ask(self) -> None:
        try:
            batch = await self.queue.get_batch(self.step + 1)
        except NoSignal as error:
            self.witness.no_batch(self.step + 1)
            await self.finish_run("retired" if "retired" in str(error) else "failed")
            return
        if batch is None:
            self.witness.no_batch(self.step + 1)
            return
        assert await self.queue.get_batch(self.step + 1) == batch
        ids = [group.group_id for group in batch.groups]
        if (self.scenario.order, self.scenario.on_stale) == ("fifo", "wait"):
            earlier = await self.queue.history(
                [group_id for group_id in self.witness.tickets if group_id < ids[-1]]
            )
            assert not [
                i
                for i, record in earlier.items()
                if record["state"] in OPEN_STATES and i not in ids
            ], f"{ids} is not in order"
        lags = self.witness.batch(batch, await self.payload(batch))
        masked = sum(count for lag, count in lags.items() if lag > self.scenario.max_staleness)
        self.seen["masked"] += masked
        metrics = await self.queue.metrics()
        assert metrics["replay/stale_tokens"] == masked, f"{masked} tokens are masked: {metrics}"
        assert metrics["replay/lag_max"] == max(
            lag for lag in lags if lag <= self.scenario.max_staleness
        ), f"{lags}: {metrics}"
        self.waiting, self.progress_at = False, self.now
        self.time.switch("working")
        self.taken = durations(batch)
        limit = int(metrics["replay/limit"])
        self.steps.append(Step(batch.step, tuple(ids), lags, self.asked, self.now, self.now, limit))
        self.newest = batch.step
        first, factor = self.scenario.slower
        slower = factor if batch.step >= first else 1.0
        self.later(self.scenario.learner_s * slower * self.between(0.5, 1.5), self.end_step)
        if self.restart_at and self.restart_at[0] == batch.step - 1:
            self.later(self.between(0.0, self.scenario.learner_s), self.restart)

    async def end_step(self) -> None:
        if (
            self.publishing and (self.step + 1) % self.scenario.publish_every == 0
        ):  # the last publication is still on its way
            self.time.switch("publishing")
            self.later(0.1, self.end_step)
            return
        self.step += 1
        self.steps[-1] = replace(self.steps[-1], ended=self.now)
        self.asked = self.now
        if self.scenario.measured:
            self.lines.append(await self.line())
        if self.scenario.restarts:
            await self.checkpoint()
        if self.restart_at and self.restart_at[0] == self.step and self.chance(0.5):
            await self.restart()
        elif self.step == self.scenario.total_steps:
            await self.acknowledge(self.step)
            await self.finish_run("trained")
        elif self.step % self.scenario.publish_every == 0:
            self.publish()
            self.waiting = self.scenario.overlap
        else:
            self.waiting = True
        self.time.switch("starved" if self.waiting else "publishing")

    async def line(self) -> dict[str, float]:
        """The metrics of a step as far as a verdict looks at them."""
        spent = [
            dict(actor.time.report(Counter(), Counter(), errors={}).seconds)
            for actor in self.actors.values()
        ]
        engine = {
            f"time/engine/{cause}": sum(one[cause] for one in spent) / len(spent)
            for cause in ENGINE_CAUSES
        }
        learner = {
            f"time/learner/{cause}": seconds for cause, seconds in self.time.seconds().items()
        }
        return (
            await self.queue.metrics()
            | engine
            | learner
            | self.taken
            | {"cluster/rollout_actors": float(len(self.actors))}
        )

    def publish(self) -> None:
        self.publishing = True
        scenario = self.scenario
        for actor in self.actors.values():
            self.later(self.between(0.0, scenario.publish_s), self.serve, actor, self.step)
        self.later(
            scenario.publish_s + self.between(0.0, scenario.late_live_s),
            self.acknowledge,
            self.step,
        )

    async def acknowledge(self, version: int) -> None:
        """Every engine serves the version: those that came meanwhile too."""
        self.publishing = False
        await self.queue.live(version)
        if self.chance(self.scenario.lost_ack):
            await self.queue.live(version)
        self.witness.live = version
        for actor in self.actors.values():
            await self.serve(actor, version)
            self.poll_soon(actor, self.between(0.0, 0.05))
        if not self.waiting and not self.scenario.overlap and self.newest == self.step:
            self.waiting, self.asked = True, self.now
            self.time.switch("starved")

    async def finish_run(self, ended: str) -> None:
        """Nothing is left open, and nothing was issued that the run could not train."""
        scenario, witness = self.scenario, self.witness
        self.ended, self.metrics = ended, await self.queue.metrics()
        self.check_tokens()
        if ended == "trained":
            assert await self.queue.acquire("late", self.step, [], 3) is None
            await self.queue.close()
            self.counts = await self.queue.counts()
            witness.ready.clear()
            left = {state: self.counts[state] for state in (*OPEN_STATES, "unused")}
            # Groups of lost steps come back beside those that were issued after them: the run ends
            # before it has trained all.
            assert sum(left.values()) == left["unused"] <= self.seen["put_back"], (
                f"left at the end: {left}"
            )
            assert (
                self.counts["trained"]
                == len(witness.trained)
                == scenario.total_steps * scenario.rollout_batch_size
            )
            return
        self.counts = await self.queue.counts()
        if ended == "retired":
            assert len(witness.retired) == scenario.problems
            assert sum(self.counts[state] for state in OPEN_STATES) < scenario.rollout_batch_size


def simulate(scenario: Scenario) -> Result:
    """Run a scenario. Raises AssertionError, with the scenario, where the queue breaks a rule or
    stops.
    """
    with tempfile.TemporaryDirectory(
        prefix="simulation-", dir=MEMORY if MEMORY.is_dir() else None
    ) as directory:
        simulation = Simulation(scenario, Path(directory))
        try:
            return asyncio.run(simulation.run())
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\nin {scenario}") from error
        finally:
            simulation.close()
