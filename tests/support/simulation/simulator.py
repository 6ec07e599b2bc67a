"""One run in invented time: the real `ReplayQueue`, rollout actors and a learner that only take
time (`producers`, `engine`), and every hazard.

Runs in: tests (thousands of short random schedules, and long ones for figures). Hides the order of
events: the same scenario gives the same run. After every event the queue is compared with the
witness; what does not agree raises AssertionError with the scenario.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack

from async_grpo.errors import NoSignal
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.resume import JournalSettings, open_queue
from async_grpo.replay.token_ledger import PLACES
from async_grpo.run.planning import durations
from async_grpo.runtime.time_ledger import ENGINE_CAUSES, LEARNER_CAUSES, TimeByCause
from async_grpo.wire.codec import unpack_frames
from async_grpo.wire.groups import Batch
from tests.support.simulation.producers import Producers
from tests.support.simulation.scenario import OPEN_STATES, STATES, Result, Scenario, Step
from tests.support.simulation.witness import Witness

MAX_EVENTS = 300_000
A_GROUP = 1_000
"""A run is stuck after so many events, and so many for each group of a batch, without a learner
step.
"""

MEMORY = Path("/dev/shm")
"""Where journals are kept if it exists: a thousand schedules should not wait for a disk."""


class Simulation:
    """Runs a scenario."""

    def __init__(self, scenario: Scenario, directory: Path, *, checked: bool = True) -> None:
        self.scenario, self.directory = scenario, directory
        self.checked = checked
        self.random = random.Random(scenario.seed)
        self.witness = Witness(scenario)
        self.seen = self.witness.seen
        self.journaled = bool(scenario.queue_death or scenario.restarts)
        self.now = self.progress_at = 0.0
        self.events: list[tuple[float, int, int, Callable[..., Awaitable[None]], tuple]] = []
        self.serial = self.generation = self.opened = 0
        self.producers = Producers(self)
        self.step = self.newest = 0
        self.steps: list[Step] = []
        self.checkpoints: dict[int, dict[str, Any]] = {}
        self.waiting, self.publishing = True, False
        self.news = True
        """Whether the queue may have a batch that it had not when it was asked last."""
        self.asked = 0.0
        self.restart_at = scenario.restarts
        self.ended = ""
        self.time = TimeByCause(LEARNER_CAUSES, clock=lambda: self.now)
        self.lines: list[dict[str, float]] = []
        self.taken: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.metrics: dict[str, float] = {}
        self.queue = self._opened()

    def later(self, delay: float, call: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Let something happen after `delay`, unless the whole run has started again by then."""
        self.serial += 1
        heapq.heappush(
            self.events, (self.now + delay, self.serial, self.generation, call, arguments)
        )

    def chance(self, probability: float) -> bool:
        """Decide by chance."""
        return probability > 0 and self.random.random() < probability

    def between(self, low: float, high: float) -> float:
        """Draw a number evenly."""
        return self.random.uniform(low, high)

    async def run(self) -> Result:
        """Simulate the whole run. Raises AssertionError where the queue breaks a rule or stops."""
        self.producers.start_all()
        self.time.switch("idle")
        events, patience_s = 0, self.scenario.patience_s
        while not self.ended:
            self.now, _, generation, call, arguments = heapq.heappop(self.events)
            if generation != self.generation:
                continue
            await call(*arguments)
            if self.scenario.any_limit:
                self.change_limit()
            if self.waiting and not self.ended and (self.news or self.checked):
                self.news = False
                await self.ask()
            self.producers.share_cores(learning=self.newest > self.step)
            if self.checked and self.scenario.weights:
                states = {one: record["state"] for one, record in (await self.history()).items()}
                self.witness.shares(states, self.queue.ledger.owed)
            if self.chance(self.scenario.queue_death) and not self.ended:
                await self.die()
            if self.checked:
                self.witness.ledger(await self.queue.counts())
            events = 0 if self.progress_at == self.now else events + 1
            most = MAX_EVENTS + A_GROUP * self.scenario.rollout_batch_size
            if self.now - self.progress_at > patience_s or events > most:
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

    def _opened(self) -> ReplayQueue:
        """Open the queue of this start of the run, from the journal if there is one."""
        base, directory = self.witness.base, str(self.directory / str(self.opened))
        journal = (
            JournalSettings(
                directory, start=f"start {self.generation}", fsync="never", lost_steps="discard"
            )
            if self.journaled
            else None
        )
        snapshot = self.checkpoints.get(base)
        return open_queue(
            self.scenario.settings(base), journal, snapshot=snapshot, clock=lambda: self.now
        )

    def reopen(self) -> None:
        """Let the process die: what is not in the files by now is lost."""
        shutil.copytree(self.directory / str(self.opened), self.directory / str(self.opened + 1))
        self.close()
        self.opened += 1
        self.queue = self._opened()

    def close(self) -> None:
        """Give the file back, as the death of a process does."""
        if self.queue._journal is not None:
            self.queue._journal.close()

    async def die(self) -> None:
        """Let the queue's process die: another one knows what it knew."""
        self.seen["queue_death"] += 1
        before = await self.account()
        self.reopen()
        after = await self.account()
        assert before == after, (
            f"a new process of the queue knows {after}, the old one knew {before}"
        )

    async def account(self) -> tuple[object, ...]:
        """Return what must survive the queue's process."""
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
        """Return the ids that are not done with, and their states."""
        return {
            group_id: record["state"]
            for group_id, record in (await self.history()).items()
            if record["state"] in OPEN_STATES
        }

    async def history(self) -> dict[int, dict[str, Any]]:
        """Return what has become of the ids that were given out."""
        return await self.queue.history(list(self.witness.tickets))

    async def payload(self, batch: Batch) -> list[bytes]:
        """Return the frames of a batch."""
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
        """Start the whole run again from a checkpoint, with other actors. Some of the old ones may
        still send what they had.
        """
        witness, old = self.witness, list(self.producers.actors.values())
        step = max(self.step - self.scenario.lost_steps, witness.base)
        self.restart_at = self.restart_at[1:]
        self.seen["restart"] += 1
        self.seen["lost_steps"] += self.step - step
        self.checkpoints = {at: kept for at, kept in self.checkpoints.items() if at <= step}
        self.generation += 1
        self.step = self.newest = witness.base = step
        self.steps = self.steps[:step]
        self.reopen()
        witness.restart(step, await self.open_ids())
        self.waiting, self.publishing = True, False
        self.asked = self.progress_at = self.now
        self.producers.start_all()
        for actor in old:
            for job in list(actor.jobs.values())[:1]:
                self.later(self.between(0.0, 2.0), self.producers.put_too_late, actor, job)

    @property
    def reports(self) -> bool:
        """Whether actors tell what they sampled; a queue that dies may forget the last word of one
        that is dead.
        """
        return not self.journaled

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
            max(self.producers.told[name], self.producers.arrived[name])
            for name in {*self.producers.told, *self.producers.arrived}
        )
        assert found["generated"] == sum(found[place] for place in PLACES) == expected, (
            f"{expected} tokens were sampled: {found}"
        )
        assert (found["trained"], found["masked"]) == (lags.total() - stale, stale), (
            f"{lags.total() - stale} and {stale}: {found}"
        )

    # ---- learner ----

    async def ask(self) -> None:
        """Ask for the next batch, and begin to train it."""
        try:
            batch = await self.queue.get_batch(self.step + 1)
        except NoSignal as error:
            self.witness.no_batch(self.step + 1)
            await self.finish_run("retired" if "retired" in str(error) else "failed")
            return
        if batch is None:
            if self.checked:
                self.witness.no_batch(self.step + 1)
            return
        assert not self.checked or await self.queue.get_batch(self.step + 1) == batch
        ids = [group.group_id for group in batch.groups]
        if self.checked and (self.scenario.order, self.scenario.on_stale) == ("fifo", "wait"):
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
        assert metrics["replay/staleness_max"] == max(
            lag for lag in lags if lag <= self.scenario.max_staleness
        ), f"{lags}: {metrics}"
        self.waiting, self.progress_at = False, self.now
        self.producers.may_ask()
        self.time.switch("working")
        lengths = [row.length for group in batch.groups for row in group.episodes_to_train]
        self.taken = durations(batch) | {"rollout/response_length": sum(lengths) / len(lengths)}
        limit = int(metrics["replay/limit"])
        self.steps.append(Step(batch.step, tuple(ids), lags, self.asked, self.now, self.now, limit))
        self.newest = batch.step
        first, factor = self.scenario.slower
        takes = self.scenario.learner_s * (factor if batch.step >= first else 1.0)
        noise = self.scenario.noise
        takes *= self.between(1 - noise, 1 + noise)
        if self.scenario.slower_beside_engines == 1:
            self.later(takes, self.end_step)
        else:
            self.later(takes, self._work_on, takes, self.now, self.producers.busy()[0])
        if self.restart_at and self.restart_at[0] == batch.step - 1:
            self.later(self.between(0.0, self.scenario.learner_s), self.restart)

    async def _work_on(self, left: float, since: float, busy_since: float) -> None:
        """Go on with a step that was slower while engines generated. left: seconds of it, alone."""
        busy, share = self.producers.busy()
        lost = 1 - 1 / self.scenario.slower_beside_engines
        left -= self.now - since - max(busy - busy_since, 0.0) * lost
        if left <= 1e-3 * self.scenario.learner_s:
            await self.end_step()
        else:
            self.later(left / (1 - share * lost), self._work_on, left, self.now, busy)

    async def end_step(self) -> None:
        """End a learner step, and publish."""
        if (
            self.publishing and (self.step + 1) % self.scenario.publish_every == 0
        ):  # the last weight sync is still on its way
            self.time.switch("weight_sync")
            self.later(0.1, self.end_step)
            return
        self.step += 1
        self.news = True
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
        self.time.switch("idle" if self.waiting else "weight_sync")

    async def line(self) -> dict[str, float]:
        """Return the metrics of a step as far as a verdict looks at them."""
        spent = [
            dict(actor.time.report(Counter(), Counter(), errors={}).seconds)
            for actor in self.producers.actors.values()
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
            | {"cluster/rollout_actors": float(len(self.producers.actors))}
        )

    def publish(self) -> None:
        """Send the weights to every engine."""
        self.publishing = True
        scenario = self.scenario
        for actor in self.producers.actors.values():
            self.later(self.between(0.0, scenario.publish_s), self.producers.take, actor, self.step)
        self.later(
            scenario.publish_s + self.between(0.0, scenario.late_live_s),
            self.acknowledge,
            self.step,
        )

    async def acknowledge(self, version: int) -> None:
        """Every engine serves the version: those that came meanwhile too."""
        self.publishing, self.news = False, True
        await self.queue.live(version)
        if self.chance(self.scenario.lost_ack):
            await self.queue.live(version)
        self.witness.live = version
        for actor in self.producers.actors.values():
            self.producers.serve(actor, version)
            actor.refused = False
            self.producers.poll_soon(actor, self.between(0.0, 0.05))
        if not self.waiting and not self.scenario.overlap and self.newest == self.step:
            self.waiting, self.asked = True, self.now
            self.time.switch("idle")

    async def finish_run(self, ended: str) -> None:
        """Nothing is left open, and nothing was issued that the run could not train."""
        scenario, witness = self.scenario, self.witness
        self.ended, self.metrics = ended, await self.queue.metrics()
        if self.checked:
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


def simulate(scenario: Scenario, *, checked: bool = True) -> Result:
    """Run a scenario. checked: compare the queue with the witness after every event, and not only
    what it hands out. Raises AssertionError, with the scenario, where the queue breaks a rule or
    stops.
    """
    with tempfile.TemporaryDirectory(
        prefix="simulation-", dir=MEMORY if MEMORY.is_dir() else None
    ) as directory:
        simulation = Simulation(scenario, Path(directory), checked=checked)
        try:
            return asyncio.run(simulation.run())
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\nin {scenario}") from error
        finally:
            simulation.close()
