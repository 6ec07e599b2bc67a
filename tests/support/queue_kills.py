"""Random schedules through the real Ray actor, whose process is killed, as are those of the
producers. Run by test_queue_kills.

    python -m tests.support.queue_kills SCHEDULES SEED        prints what it saw as JSON; every
                                                              broken rule is an AssertionError

One schedule is one run: a queue of its own, a handful of producers in a few shared processes, and
the learner's side here. A producer writes every acknowledgement to a file of its schedule; what was
acknowledged must be trained.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from async_grpo.algo.rewards import Shaping
from async_grpo.cluster.queue import ActorQueue, QueueProcess
from async_grpo.cluster.session import RaySession
from async_grpo.replay.resume import JournalSettings
from async_grpo.replay.rules import QueueSettings
from async_grpo.wire.codec import decode_group, unpack_frames
from tests.support.frames import frame_of

AT_ONCE, HOSTS = 6, 2
DEADLINE_S = 60.0


@ray.remote
class Host:
    """A process with several producers in it."""

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}

    async def pid(self) -> int:
        return os.getpid()

    async def serve(self, name: str, version: int) -> None:
        """The producer's engine has these weights now."""
        self._versions[name] = max(
            version, self._versions.get(name, 0)
        )  # calls to a new process may overtake each other

    async def produce(self, handle: Any, name: str, version: int, side: str, seed: int) -> None:
        """Take tickets, work a moment, put or fail, until the queue is closed."""
        rng, queue, holding = random.Random(seed), ActorQueue(handle), {}
        self._versions[name] = max(
            version, self._versions.get(name, 0)
        )  # calls to a new process may overtake each other
        with open(f"{side}-{name}", "a", buffering=1) as log:
            while True:
                tickets = await queue.acquire(
                    name, self._versions[name], list(holding), rng.randint(0, 3)
                )
                if tickets is None:
                    return
                for ticket in tickets:
                    holding[ticket.group_id, ticket.attempt] = (ticket, self._versions[name])
                await asyncio.sleep(0.03 * rng.random())
                done = [key for key in holding if rng.random() < 0.6]
                frames = []
                for key in done:
                    ticket, version = holding.pop(key)
                    if rng.random() < 0.05:
                        await queue.fail(name, [ticket], "a bad day")
                        continue
                    versions = tuple(sorted({ticket.policy_version, version, self._versions[name]}))
                    values = (1.0, 1.0) if rng.random() < 0.15 else (0.0, 1.0)
                    frames.append(frame_of(ticket, values=values, versions=versions, actor=name))
                for verdict in await queue.put(name, frames) if frames else ():
                    assert verdict.status in ("accepted", "rejected", "late", "duplicate"), verdict
                    if verdict.status == "accepted":
                        log.write(f"{verdict.group_id} {verdict.attempt}\n")


class Pool:
    """The producers' processes; one is killed now and then, and everybody who has producers in it
    is told.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng, self.kills = rng, 0
        self.hosts = [Host.options(num_cpus=0, max_concurrency=1000).remote() for _ in range(HOSTS)]
        self._told: list[Callable[[Any], Awaitable[None]]] = []

    def subscribe(self, told: Callable[[Any], Awaitable[None]]) -> None:
        self._told.append(told)

    def leave(self, told: Callable[[Any], Awaitable[None]]) -> None:
        self._told.remove(told)

    async def kill_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(2.0 + 2.0 * self._rng.random())
            victim = self.hosts[index := self._rng.randrange(HOSTS)]
            os.kill(await asyncio.wait_for(victim.pid.remote(), DEADLINE_S), signal.SIGKILL)
            self.kills += 1
            self.hosts[index] = Host.options(num_cpus=0, max_concurrency=1000).remote()
            await asyncio.gather(*[told(victim) for told in list(self._told)])


class Schedule:
    """One run with its queue, its producers and its learner."""

    def __init__(self, seed: int, pool: Pool, folder: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.pool, self.seed, self.side = pool, seed, str(folder / f"side-{seed}")
        order, on_stale = rng.choice(
            [
                ("oldest", "wait"),
                ("oldest", "mask"),
                ("fifo", "wait"),
                ("ready", "mask"),
                ("ready", "expire"),
            ]
        )
        self.settings = QueueSettings(
            rollout_batch_size=rng.randint(1, 4),
            max_staleness=rng.randint(0, 2),
            total_steps=rng.randint(4, 7),
            group_size=2,
            max_attempts=30,
            max_num_gen_batches=0,
            shaping=Shaping({"correct": 1.0}, 64),
            order=order,
            on_stale=on_stale,
            filter=None,
        )
        journal = JournalSettings(
            str(folder / f"journal-{seed}"),
            "start",
            fsync=rng.choice(["group", "interval", "never"]),
            segment_bytes=4000,
        )
        actor = ray.remote(QueueProcess).options(
            max_concurrency=1000, num_cpus=0, max_restarts=-1, max_task_retries=-1
        )
        self.queue = actor.remote(self.settings, journal)
        self.producers: dict[str, Any] = {}
        self.started = self.kills = self.version = 0
        self.trained: dict[int, int] = {}
        self.tasks: list[Any] = []

    async def run(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            await self.start_producer()
        self.pool.subscribe(self.host_died)
        killer = asyncio.ensure_future(self.kill_queue())
        try:
            for step in range(1, self.settings.total_steps + 1):
                await self.learn(step)
            await killer
            await self.check()
        finally:
            killer.cancel()
            self.pool.leave(self.host_died)
            await self.call("call", "close")
            ends = await asyncio.wait_for(
                asyncio.gather(*self.tasks, return_exceptions=True), DEADLINE_S
            )
            ray.kill(self.queue)
        for end in ends:  # a producer ends with the run or with its process
            assert end is None or isinstance(end, ray.exceptions.RayActorError), end

    async def call(self, name: str, *args: Any) -> Any:
        return await asyncio.wait_for(getattr(self.queue, name).remote(*args), DEADLINE_S)

    async def start_producer(self) -> None:
        self.started += 1
        name, host = f"s{self.seed}.p{self.started}", self.rng.choice(self.pool.hosts)
        self.producers[name] = host
        self.tasks.append(
            host.produce.remote(
                self.queue, name, self.version, self.side, self.rng.randrange(10**9)
            )
        )

    async def host_died(self, host: Any) -> None:
        for name in [name for name, where in self.producers.items() if where is host]:
            del self.producers[name]
            await self.call("call", "forfeit", name)
            await self.start_producer()

    async def kill_queue(self) -> None:
        for _ in range(self.rng.choice([1, 1, 1, 2])):
            await asyncio.sleep(0.5 * self.rng.random())
            os.kill(await self.call("pid"), signal.SIGKILL)
            self.kills += 1

    async def learn(self, step: int) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                while (batch := await self.call("next_batch", step)) is None:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            ended, _ = await asyncio.wait(
                [asyncio.ensure_future(_settled(task)) for task in self.tasks], timeout=1.0
            )
            ends = [str(task.result())[-300:] for task in ended]
            raise AssertionError(
                f"no batch for step {step}: {await self.call('call', 'metrics')}, held "
                f"{await self.call('call', 'held')}, version {self.version}, producers "
                f"{list(self.producers)}, ends of producers {ends}"
            ) from None
        group_ids = [group.group_id for group in batch.groups]
        assert (
            batch.step == step
            and len(group_ids) == self.settings.rollout_batch_size
            and group_ids == sorted(group_ids)
        )
        frames = [
            decode_group(frame)
            for frame in unpack_frames(await self.call("payload", step, group_ids))
        ]
        assert [(group.group_id, group.attempt) for group in frames] == [
            (group.group_id, group.attempt) for group in batch.groups
        ]
        for group in batch.groups:
            newest, oldest = step - 1 - group.max_version, step - 1 - group.min_version
            bound = self.settings.max_staleness
            assert 0 <= newest <= bound and (oldest <= bound or self.settings.on_stale == "mask"), (
                step,
                group,
            )
            assert group.group_id not in self.trained, (
                f"group {group.group_id} is trained by {self.trained[group.group_id]} and {step}"
            )
            self.trained[group.group_id] = step
        await asyncio.sleep(0.03 * self.rng.random())
        self.version = step
        for name, host in list(self.producers.items()):
            # one that died is being replaced, at the newest version
            with suppress(ray.exceptions.RayActorError):
                await asyncio.wait_for(host.serve.remote(name, step), DEADLINE_S)
        await self.call("call", "live", step)

    async def check(self) -> None:
        counts = await self.call("call", "counts")
        states = (
            "waiting",
            "in_flight",
            "ready",
            "training",
            "trained",
            "rejected",
            "expired",
            "failed",
            "skipped",
            "unused",
        )
        expected = self.settings.total_steps * self.settings.rollout_batch_size
        assert counts["trained"] == len(self.trained) == expected, counts
        assert sum(counts[state] for state in states) >= expected and not any(
            counts[state] for state in ("ready", "training", "failed")
        )
        acknowledged = Counter(
            line.split()[0]
            for file in Path(self.side).parent.glob(Path(self.side).name + "-*")
            for line in file.read_text().splitlines()
        )
        if self.settings.on_stale == "wait":
            assert {int(group_id) for group_id in acknowledged} <= set(self.trained), (
                "an acknowledged group was lost"
            )
            assert set(acknowledged.values()) <= {1}, "two attempts of one group were taken"


async def _settled(task: Any) -> Any:
    try:
        return await task
    except ray.exceptions.RayError as error:
        return error


async def all_schedules(count: int, seed: int, folder: Path) -> dict[str, int]:
    pool, slots, seen = Pool(random.Random(seed)), asyncio.Semaphore(AT_ONCE), Counter()
    killer = asyncio.ensure_future(pool.kill_now_and_then())

    async def one(number: int) -> None:
        async with slots:
            schedule = Schedule(number, pool, folder)
            try:
                await schedule.run()
            except Exception as error:
                raise AssertionError(
                    f"schedule {number} ({schedule.settings}): {type(error).__name__} {error}"
                ) from error
            seen.update(schedules=1, queue_kills=schedule.kills, trained=len(schedule.trained))

    await asyncio.gather(*[one(seed + number) for number in range(count)])
    killer.cancel()
    return {**seen, "producer_kills": pool.kills}


def main() -> None:
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    session = RaySession.open(processes=2)
    try:
        with tempfile.TemporaryDirectory() as folder:
            print(
                "\n" + json.dumps(asyncio.run(all_schedules(count, seed, Path(folder)))), flush=True
            )
    finally:
        session.close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
