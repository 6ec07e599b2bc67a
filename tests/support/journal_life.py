"""A random life of a queue with a journal, and a model of what must be left of it after its process
or the whole run died.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from async_grpo.replay.ledger import State
from async_grpo.replay.partial import PartialStart
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.resume import JournalSettings, open_queue
from async_grpo.replay.rules import DifficultyRule, QueueSettings
from async_grpo.wire.codec import GroupTicket, decode_meta, unpack_frames
from tests.support import queues
from tests.support.frames import frame_of
from tests.support.queues import Clock

RULES = [
    ("oldest", "wait"),
    ("fifo", "wait"),
    ("oldest", "mask"),
    ("fifo", "expire"),
    ("ready", "mask"),
    ("ready", "expire"),
]
PROBLEMS = 40


def problem_of_id(group_id: int) -> int:
    return group_id % PROBLEMS


def queue_settings(**changes: object) -> QueueSettings:
    """A run of a few more steps and attempts than those of `tests.support.queues`."""
    return queues.queue_settings(**{"total_steps": 12, "max_attempts": 3} | changes)


def journal_in(directory: Path | str, start: str = "first", **changes: object) -> JournalSettings:
    """Lost steps are discarded here; tests/replay/test_roll_forward.py rolls them forward."""
    return replace(
        JournalSettings(
            str(directory), start, identity="same", fsync="never", lost_steps="discard"
        ),
        **changes,
    )


def ready_frames(queue: ReplayQueue) -> dict[int, bytes]:
    """Frames of the groups that are ready or in training."""
    slots = queue._ledger.slots
    return {
        entry.group_id: entry.frame
        for state in (State.READY, State.TRAINING)
        for entry in slots[state].values()
    }


async def seen(queue: ReplayQueue) -> dict[str, Any]:
    """Everything that a queue with the same journal must show again after its process died."""
    ledger = queue._ledger
    groups = ledger.snapshot()
    groups["totals"].pop("restarts", None)
    there = queue._journal.segments()  # of a segment that is deleted nothing has to be known
    groups["segment_steps"] = [pair for pair in groups["segment_steps"] if pair[0] in there]
    counts = await queue.counts()
    del counts["restarts"]
    out: dict[str, Any] = {
        "ledger": groups,
        "counts": counts,
        "held": await queue.held(),
        "history": await queue.history(sorted(ledger.entries)),
        "frames": ready_frames(queue),
        "metas": {entry.group_id: entry.meta for entry in ledger.entries.values()},
    }
    if ledger.training_step is not None:
        batch = await queue.get_batch(ledger.training_step)
        out["batch"] = batch
        out["payload"] = bytes(
            await queue.payload(batch.step, [meta.group_id for meta in batch.groups])
        )
    return out


async def produce(
    queue: ReplayQueue, want: int, *, version: int = 0, actor: str = "a"
) -> list[GroupTicket]:
    """Tickets for an actor, and their results at once."""
    tickets = await queue.acquire(actor, version, [], want)
    verdicts = await queue.put(actor, [frame_of(ticket) for ticket in tickets])
    assert {verdict.status for verdict in verdicts} <= {"accepted"}
    return tickets


async def train(queue: ReplayQueue, first: int, last: int) -> dict[int, set[int]]:
    """Learner steps with results of the newest weights; the groups of each. All of them are live,
    and the last is not done.
    """
    trained = {}
    for step in range(first, last + 1):
        if step > first:
            await queue.live(step - 1, f"digest-{step - 1}")
        await produce(queue, 99, version=step - 1)
        trained[step] = {meta.group_id for meta in (await queue.get_batch(step)).groups}
    return trained


async def saved(queue: ReplayQueue, *beginnings: PartialStart) -> dict[str, Any]:
    """What a checkpoint keeps of it."""
    return json.loads(json.dumps(await queue.snapshot() | {"beginnings": beginnings}))


@dataclass
class Actor:
    name: str
    holding: dict[int, GroupTicket] = field(default_factory=dict)


@dataclass
class Checkpoint:
    step: int
    snapshot: dict[str, Any]


class Life:
    """Random calls of actors, a learner and a checkpointer; `die` and `resume` check what is
    left.
    """

    def __init__(self, directory: Path, seed: int, **changes: object) -> None:
        self.random = rng = random.Random(seed)
        self.clock = Clock()
        drawn = {
            "rollout_batch_size": rng.randint(1, 3),
            "max_staleness": rng.randint(0, 3),
            "max_attempts": rng.randint(2, 4),
            "ticket_timeout_s": rng.choice([None, 20.0]),
        }
        self.settings = queue_settings(**drawn | changes)
        if rng.random() < 0.4:
            self.settings = replace(
                self.settings, retire_at=1.0, problem=problem_of_id, problems=PROBLEMS
            )
        elif rng.random() < 0.5:
            choose = "bandit" if seed % 2 else "window"
            rule = DifficultyRule(choose, target=0.0, width=0.4, explore=0.5, seed=seed)
            self.settings = replace(
                self.settings, difficulty=rule, problem=problem_of_id, problems=PROBLEMS
            )
        self.journal = journal_in(
            directory, "start-0", segment_bytes=rng.choice([700, 4000, 2**28])
        )
        self.queue = open_queue(self.settings, self.journal, clock=self.clock)
        self.starts = self.serial = 0
        self.forgets = True
        self.taken = self.live = 0
        self.batches: dict[int, dict[int, int]] = {}
        """Of the history of the current weights: step -> group id -> attempt."""
        self.frames: dict[tuple[int, int], bytes] = {}
        self.attempts: dict[int, int] = {}
        self.checkpoints: list[Checkpoint] = []
        self.gone: list[Actor] = []
        self.actors = [self.new_actor() for _ in range(rng.randint(1, 3))]

    def new_actor(self) -> Actor:
        self.serial += 1
        return Actor(f"actor-{self.serial}")

    # ---- calls ----

    async def call(self) -> None:
        calls: list[tuple[int, Callable]] = [
            (5, self.acquire),
            (8, self.put),
            (1, self.put_late),
            (1, self.put_invalid),
            (1, self.fail),
            (1, self.lose_actor),
            (4, self.train),
            (3, self.publish),
            (1, self.wait),
            (1, self.checkpoint),
        ]
        await self.random.choices([call for _, call in calls], [weight for weight, _ in calls])[0]()

    async def acquire(self) -> None:
        actor = self.random.choice(self.actors)
        first_new = self.queue._ledger.next_group_id
        version = self.live if self.random.random() < 0.9 else self.live + 1
        holding = [(ticket.group_id, ticket.attempt) for ticket in actor.holding.values()]
        known = {
            pair
            for name, pairs in (await self.queue.held()).items()
            if name == actor.name
            for pair in pairs
        }
        tickets = await self.queue.acquire(actor.name, version, holding, self.random.randint(0, 4))
        for ticket in tickets:
            if (
                ticket.group_id,
                ticket.attempt,
            ) not in known:  # not one whose answer got lost before
                assert ticket.attempt == self.attempts.get(ticket.group_id, 0) + 1, ticket
                assert ticket.attempt > 1 or ticket.group_id >= first_new, ticket
                self.attempts[ticket.group_id] = ticket.attempt
        if self.random.random() < 0.9:  # otherwise the answer is lost
            actor.holding |= {ticket.group_id: ticket for ticket in tickets}

    def frame(
        self,
        ticket: GroupTicket,
        *,
        values: tuple[float, ...] = (0.0, 1.0),
        newest: int | None = None,
    ) -> bytes:
        """A frame that no other is equal to, of one or two versions."""
        self.serial += 1
        newest = max(self.live if newest is None else newest, ticket.policy_version)
        versions = sorted(
            {
                self.random.randint(ticket.policy_version, newest),
                self.random.randint(ticket.policy_version, newest),
            }
        )
        return frame_of(
            ticket, values=values, versions=tuple(versions), times={"serial": float(self.serial)}
        )

    async def put(self) -> None:
        actor = self.random.choice(self.actors)
        if not actor.holding:
            return
        tickets = self.random.sample(
            list(actor.holding.values()), self.random.randint(1, len(actor.holding))
        )
        frames = []
        for ticket in tickets:
            values = self.random.choice([(0.0, 1.0)] * 4 + [(1.0, 1.0)])
            frames.append(
                self.frame(
                    ticket, values=values, newest=self.random.choice([self.live, self.taken])
                )
            )
        held = set((await self.queue.held()).get(actor.name, ()))
        verdicts = await self.queue.put(actor.name, frames)
        for ticket, frame, verdict in zip(tickets, frames, verdicts, strict=True):
            pair = (ticket.group_id, ticket.attempt)
            assert (verdict.status in ("accepted", "rejected")) == (pair in held), verdict
            if pair in held:  # of rejected groups too
                self.frames[pair] = frame
            if self.random.random() < 0.9:  # otherwise the answer is lost: the result is put again
                del actor.holding[ticket.group_id]

    async def put_late(self) -> None:
        """A result of an actor that is gone, and of one that never had the ticket."""
        tickets = [ticket for actor in self.gone[-2:] for ticket in actor.holding.values()]
        for name, ticket in [(self.gone[-1].name, ticket) for ticket in tickets[:2]] + [
            ("nobody", ticket) for ticket in tickets[-1:]
        ]:
            verdicts = await self.queue.put(name, [self.frame(ticket)])
            lost = ticket.run_epoch < self.queue._ledger.run_epoch
            assert verdicts[0].status in (
                ("late", "duplicate", "abandoned") if lost else ("late", "duplicate")
            ), verdicts

    async def put_invalid(self) -> None:
        actor = self.random.choice(self.actors)
        if actor.holding:
            ticket = self.random.choice(list(actor.holding.values()))
            frame = (
                self.frame(ticket, values=(0.0, 0.5, 1.0))
                if self.random.random() < 0.5
                else self.frame(ticket)[:-3]
            )
            assert (await self.queue.put(actor.name, [frame]))[0].status in (
                "invalid",
                "late",
                "duplicate",
                "abandoned",
            )

    async def fail(self) -> None:
        actor = self.random.choice(self.actors)
        if actor.holding:
            ticket = actor.holding.pop(self.random.choice(list(actor.holding)))
            await self.queue.fail(actor.name, [ticket], self.random.choice(["timeout", "verifier"]))

    async def lose_actor(self) -> None:
        actor = self.actors.pop(self.random.randrange(len(self.actors)))
        await self.queue.forfeit(actor.name)
        assert await self.queue.acquire(actor.name, self.live, [], 1) is None
        self.gone.append(actor)
        self.actors.append(self.new_actor())

    async def train(self) -> None:
        if self.taken == self.settings.total_steps - 1:  # the end belongs to `finish`
            return
        batch = await self.queue.get_batch(self.taken + 1)
        if batch is not None:
            await self.take(batch)

    async def take(self, batch: Any) -> None:
        self.taken += 1
        assert batch.step == self.taken
        trained = {group_id for ids in self.batches.values() for group_id in ids}
        self.batches[self.taken] = {meta.group_id: meta.attempt for meta in batch.groups}
        assert len(batch.groups) == self.settings.rollout_batch_size and not trained & set(
            self.batches[self.taken]
        ), "trained twice"
        payload = unpack_frames(
            await self.queue.payload(self.taken, list(self.batches[self.taken]))
        )
        assert [bytes(frame) for frame in payload] == [
            self.frames[pair] for pair in self.batches[self.taken].items()
        ]

    async def publish(self) -> None:
        self.live = (
            self.taken if self.random.random() < 0.8 else self.random.randint(self.live, self.taken)
        )
        await self.queue.live(self.live)

    async def wait(self) -> None:
        self.clock.now += self.random.choice([1.0, 30.0])

    async def checkpoint(self) -> None:
        """The learner has done the step in training, or not yet."""
        snapshot = json.loads(json.dumps(await self.queue.snapshot()))
        steps = {snapshot["ledger"]["steps"], self.taken}
        self.checkpoints.append(Checkpoint(self.random.choice(sorted(steps)), snapshot))
        if self.forgets:
            if len(self.checkpoints) > 2 and self.random.random() < 0.5:
                del self.checkpoints[0]
            oldest = self.checkpoints[0]
            await self.queue.forget(segment=oldest.snapshot["segment"], step=oldest.step)

    # ---- deaths ----

    async def die(self) -> None:
        """The queue's process dies between two calls; a new one goes on from its journal."""
        before = await seen(self.queue)
        self.queue = open_queue(self.settings, self.journal, clock=self.clock)
        after = await seen(self.queue)
        differ = {
            name: (before.get(name), after.get(name))
            for name in before | after
            if before.get(name) != after.get(name)
        }
        assert not differ, differ

    async def resume(self, checkpoint: Checkpoint | None, **changes: object) -> None:
        """The whole run dies and starts again from a checkpoint, or from its beginning; perhaps
        under other settings.
        """
        end, step = self.queue._ledger, 0 if checkpoint is None else checkpoint.step
        kept, again = self.left_at(step)
        finished = {
            state: end.closed[state]
            for state in (State.REJECTED, State.FAILED, State.EXPIRED, State.SKIPPED)
        }
        self.starts += 1
        self.journal = replace(self.journal, start=f"start-{self.starts}")
        trained = sum(len(ids) for number, ids in self.batches.items() if number <= step)
        self.settings = replace(self.settings, trained_steps=step, **changes)
        self.queue = open_queue(
            self.settings,
            self.journal,
            snapshot=checkpoint and checkpoint.snapshot,
            clock=self.clock,
        )
        ledger = self.queue._ledger
        assert ledger.next_group_id == end.next_group_id and ledger.held == {}
        ready = {
            entry.group_id: (entry.attempt, entry.frame)
            for entry in ledger.slots[State.READY].values()
        }
        assert ready.items() <= kept.items() and (changes or ready == kept), (
            f"{ready} are ready, not {kept}"
        )
        completed = [
            group_id
            for group_id, attempt in self.frames
            if (group_id, attempt) in {(i, a) for i, (a, _) in ready.items()}
        ]
        assert list(ready) == completed, f"{list(ready)} are ready, completed were {completed}"
        again |= {
            group_id: attempt for group_id, (attempt, _) in kept.items() if group_id not in ready
        }
        assert {
            group_id: entry.attempt for group_id, entry in ledger.slots[State.WAITING].items()
        } == again
        assert {state: ledger.closed[state] for state in finished} == finished
        assert (ledger.closed[State.TRAINED], ledger.closed[State.UNUSED]) == (trained, 0)
        self.batches = {number: ids for number, ids in self.batches.items() if number <= step}
        self.taken = self.live = step
        self.gone += self.actors
        self.actors = [self.new_actor() for _ in range(self.random.randint(1, 3))]
        self.checkpoints = [one for one in self.checkpoints if checkpoint and one.step <= step]

    async def roll_forward(self, checkpoint: Checkpoint | None) -> int:
        """The whole run dies, and its learner trains the recorded batches after the checkpoint
        again; how many those were.
        """
        end, step, before = (
            self.queue._ledger,
            0 if checkpoint is None else checkpoint.step,
            await seen(self.queue),
        )
        waiting = {
            entry.group_id: entry.attempt
            for state in (State.WAITING, State.IN_FLIGHT)
            for entry in end.slots[state].values()
        }
        self.starts += 1
        self.journal = replace(self.journal, start=f"start-{self.starts}", lost_steps="replay")
        self.settings = replace(self.settings, trained_steps=step)
        self.queue = open_queue(
            self.settings,
            self.journal,
            snapshot=checkpoint and checkpoint.snapshot,
            clock=self.clock,
        )
        ledger = self.queue._ledger
        assert (ledger.steps, ledger.training_step, ledger.live, ledger.run_epoch, ledger.held) == (
            end.steps,
            end.training_step,
            end.live,
            end.run_epoch,
            {},
        ), str(self.queue.report)
        assert ledger.next_group_id == end.next_group_id and ledger.retired == end.retired
        assert {
            group_id: entry.attempt for group_id, entry in ledger.slots[State.WAITING].items()
        } == waiting
        assert ready_frames(self.queue) == before["frames"] and list(
            ledger.slots[State.READY]
        ) == list(end.slots[State.READY])
        assert (
            set(ledger.slots[State.TRAINED]) == set(end.slots[State.TRAINED])
            and ledger.closed[State.TRAINED] == end.closed[State.TRAINED]
        )
        await self.repeat(step)
        self.gone += self.actors
        self.actors = [self.new_actor() for _ in range(self.random.randint(1, 3))]
        return self.taken - step

    async def repeat(self, step: int) -> None:
        """A learner that went back to `step` asks for every batch after it, and gets what was
        trained.
        """
        for number in range(step + 1, self.taken + 1):
            batch = await self.queue.get_batch(number)
            assert {meta.group_id: meta.attempt for meta in batch.groups} == self.batches[number], (
                number
            )
            payload = unpack_frames(await self.queue.payload(number, list(self.batches[number])))
            assert [bytes(frame) for frame in payload] == [
                self.frames[pair] for pair in self.batches[number].items()
            ]

    def left_at(self, step: int) -> tuple[dict[int, tuple[int, bytes]], dict[int, int]]:
        """What a learner at this step must find: groups ready with attempt and frame, and attempts
        of those that wait.
        """
        lost = {
            group_id: attempt
            for after, ids in self.batches.items()
            if after > step
            for group_id, attempt in ids.items()
        }
        trained = {
            group_id for number, ids in self.batches.items() if number <= step for group_id in ids
        }
        results, waiting = dict(lost), {}
        for entry in self.queue._ledger.entries.values():
            if entry.group_id in trained or entry.group_id in lost:
                continue
            (results if entry.state == State.READY else waiting)[entry.group_id] = entry.attempt
        kept = {}
        for group_id, attempt in results.items():
            frame = self.frames[group_id, attempt]
            if decode_meta(frame).max_version <= step:
                kept[group_id] = (attempt, frame)
            else:
                waiting[group_id] = attempt
        return kept, waiting

    async def finish(self) -> None:
        """From here on nothing goes wrong: the run must come to its end."""
        for actor in self.actors:
            await self.queue.forfeit(actor.name)
        self.actors = [self.new_actor()]
        actor = self.actors[0]
        for _ in range(40 * self.settings.total_steps):
            tickets = await self.queue.acquire(actor.name, self.live, [], 8)
            if tickets is None:
                break
            for ticket in tickets:
                frame = self.frame(ticket)
                [verdict] = await self.queue.put(actor.name, [frame])
                if verdict.status in ("accepted", "rejected"):
                    self.frames[ticket.group_id, ticket.attempt] = frame
            batch = (
                None
                if self.taken == self.settings.total_steps
                else await self.queue.get_batch(self.taken + 1)
            )
            if batch is not None:
                await self.take(batch)
            self.live = self.taken
            await self.queue.live(self.live)
        assert self.taken == self.settings.total_steps, (
            f"stuck at step {self.taken}: {await self.queue.counts()}"
        )
        assert (await self.queue.counts())["trained"] == sum(map(len, self.batches.values()))
