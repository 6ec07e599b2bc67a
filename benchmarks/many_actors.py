"""1,024 rollout actors: `python -m benchmarks.many_actors [--only simulated load] [--out FILE]
[--docs FILE]`.

    simulated   1,024 actors with 64 places each, heavy tails, deaths, 200 learner steps of 1,024
                groups, simulated with the real queue (`async_grpo.tools.predict.simulation`): how
                long the learner waits
    load        the queue's process with 1,024 clients in eight processes, at 200 and at 2,000 small
                groups per second, and at 200 groups of 590 KB: CPU of queue, driver and clients

A client is a rollout actor without an engine (`many_actors_clients`); the driver here does what the
loop does per batch: metadata, row mathematics, metrics, publication. All share the machine's cores,
so a rate that is not reached is what this machine carries. CPU is in cores: seconds per second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from async_grpo.algo.filters import FilterRule
from async_grpo.algo.rewards import Shaping
from async_grpo.cluster.processes import MAX_CALLS
from async_grpo.cluster.queue import QueueProcess
from async_grpo.cluster.session import RaySession
from async_grpo.config.load import load_config
from async_grpo.replay.rules import QueueSettings
from async_grpo.run.planning import RowMath
from async_grpo.tools.predict.engine import Speed
from async_grpo.tools.predict.simulation.scenario import Scenario
from async_grpo.tools.predict.simulation.simulator import simulate
from benchmarks.machine import machine
from benchmarks.many_actors_clients import Clients, Rank
from benchmarks.queue import MAX_STEPS, cpu_seconds
from benchmarks.queue_actors import Shape
from benchmarks.tables import aim, write_docs

ACTORS, PROCESSES, MAX_STALENESS = 1_024, 8, 4
WARM_S, MEASURED_S, TIMEOUT_S = 15.0, 30.0, 120.0
PLACES, STEPS, SKIPPED = 64, 200, 20
SMALL, LARGE = (Shape(8, 6, 0, 1, 0), Shape(16, 4_096, 0, 1, 0))


@dataclass(frozen=True)
class Load:
    """Groups per second that the clients would produce; `batch` of them are a learner step."""

    words: str
    rate: int
    batch: int
    shape: Shape


LOADS = (
    Load("200 small groups/s", 200, 1_024, SMALL),
    Load("2,000 small groups/s", 2_000, 2_048, SMALL),
    Load("200 groups/s of 590 KB", 200, 512, LARGE),
)


@dataclass(frozen=True)
class Carried:
    """What came of a load. CPU in cores; of the clients per thousand."""

    words: str
    wanted: float
    groups_per_s: float
    asks_per_s: float
    queue_cpu: float
    driver_cpu: float
    clients_cpu: float
    put_p50_ms: float
    put_p99_ms: float
    busy: float
    """Share of the machine's cores."""


def scenario(actors: int, steps: int) -> Scenario:
    """Responses of 512 tokens on average, the longest 8 times that; a full engine samples 1,600
    tokens per second, one response alone 60. The learner needs 1.25 times as long for a batch as
    full engines do; one of the actors dies every few seconds.
    """
    full, alone, mean_tokens, group = 1_600.0, 60.0, 512.0, 8
    return Scenario(
        max_staleness=16,
        on_stale="mask",
        rollout_batch_size=actors,
        group_size=group,
        total_steps=steps,
        mean_tokens=mean_tokens,
        spread=1.0,
        longest=8.0,
        speed=Speed(((1, alone), (PLACES, full))),
        actors=actors,
        places=PLACES,
        learner_s=1.25 * group * mean_tokens / full,
        noise=0.1,
        publish_s=1.0,
        pause_s=0.25,
        poll_s=0.5,
        call_s=0.0002,
        death=2e-5,
        overlap=True,
    )


def simulated(actors: int, steps: int) -> tuple[list[str], dict[str, Any]]:
    """Follow the run in invented time; lines of a table, and figures."""
    one, began = scenario(actors, steps), time.monotonic()
    result = simulate(one, checked=False)
    took = time.monotonic() - began
    found = result.figures(skip=SKIPPED) | {"deaths": float(result.seen["death"]), "took_s": took}
    lines = [
        f"{actors:,} actors with {PLACES} places, {steps} learner steps of {actors:,} groups of "
        f"{one.group_size}, the first and last {SKIPPED} left out; simulated in {took:,.0f} s",
        "",
        "| learner starved | groups/s | lag, mean | too old | deaths |",
        "|---|---|---|---|---|",
        f"| {found['idle']:.1%} | {found['groups_per_s']:,.0f} | {found['lag_mean']:.1f} | "
        f"{found['masked']:.1%} | {found['deaths']:.0f} |",
    ]
    met = found["idle"] <= 0.05
    reached = aim("learner starved at most 5 %", f"{found['idle']:.1%}", met=met)
    return [*lines, "", *aims([reached])], found


def aims(lines: Sequence[str]) -> list[str]:
    """A table of aims."""
    return ["| aim | figure | |", "|---|---|---|", *lines]


class LoadTest:
    """The queue's process, its clients, a rank, and the driver's part."""

    def __init__(self) -> None:
        self._clients = [
            ray.remote(Clients).options(num_cpus=0, max_concurrency=64).remote(number)
            for number in range(PROCESSES)
        ]
        self._rank = ray.remote(Rank).options(num_cpus=0).remote()

    async def carry(self, load: Load) -> Carried:
        """Put a load on a new queue and measure, once it has settled."""
        shape, batch = load.shape, load.batch
        settings = QueueSettings(
            rollout_batch_size=batch,
            max_staleness=MAX_STALENESS,
            outstanding=(MAX_STALENESS + 1) * batch,
            total_steps=MAX_STEPS,
            group_size=shape.rows,
            max_attempts=3,
            max_num_gen_batches=0,
            shaping=Shaping({"correct": 1.0}, shape.tokens),
            filter=FilterRule(),
        )
        queue = ray.remote(QueueProcess).options(max_concurrency=MAX_CALLS, num_cpus=0)
        queue = queue.remote(settings)
        # the longest group, 1.5 times the mean, must be over before the bound stops the learner
        hold = max(1, settings.capacity * 2 // 5 // ACTORS)
        running = [
            clients.run.remote(
                queue,
                shape,
                count=ACTORS // PROCESSES,
                actors=ACTORS,
                hold=hold,
                group_s=hold * ACTORS / load.rate,
            )
            for clients in self._clients
        ]
        try:
            return await asyncio.wait_for(
                self._measure(load, queue), WARM_S + MEASURED_S + TIMEOUT_S
            )
        finally:
            for one in running:
                ray.cancel(one)
            ray.kill(queue)

    async def _measure(self, load: Load, queue: Any) -> Carried:
        config = load_config(
            "configs/quickstart.yaml",
            [
                f"rollout.rollout_batch_size={load.batch}",
                f"rollout.group_size={load.shape.rows}",
                f"rollout.response_length={load.shape.tokens}",
                f"replay.max_staleness={MAX_STALENESS}",
            ],
        )
        row_math = RowMath(config, {"correct": 1.0})
        pids = [await clients.pid.remote() for clients in self._clients]
        queue_pid, step = await queue.pid.remote(), 0
        began, before = time.monotonic(), None
        while True:
            now = time.monotonic()
            if before is None and now - began > WARM_S:
                await self._drain_counts()
                before = self._times(queue_pid, pids)
                measured_from = now
            if before is not None and now - measured_from > MEASURED_S:
                break
            if not await self._train(queue, row_math, step + 1):
                continue
            step += 1
        seconds, after = time.monotonic() - measured_from, self._times(queue_pid, pids)
        groups, calls, waits = await self._drain_counts()
        queue_cpu, driver_cpu, clients_cpu, all_cpu = (
            (later - earlier) / seconds for earlier, later in zip(before, after, strict=True)
        )
        return Carried(
            load.words,
            float(load.rate),
            groups / seconds,
            calls / seconds,
            queue_cpu,
            driver_cpu,
            clients_cpu * 1000 / ACTORS,
            float(np.percentile(waits, 50) * 1e3),
            float(np.percentile(waits, 99) * 1e3),
            all_cpu / (os.cpu_count() or 1),
        )

    async def _train(self, queue: Any, row_math: RowMath, step: int) -> bool:
        """Do the driver's part of a learner step; False while there is no batch."""
        batch = await queue.next_batch.remote(step)
        if batch is None:
            return False
        ids = [group.group_id for group in batch.groups]
        fetched = self._rank.fetch.remote(queue, step, ids)
        row_math.plans(batch)
        row_math.values(batch, {})
        if await fetched != len(ids):
            raise RuntimeError("the payload has another number of frames than the batch")
        await queue.call.remote("metrics")
        await queue.call.remote("live", step)
        await asyncio.gather(*(clients.serve.remote(step) for clients in self._clients))
        return True

    async def _drain_counts(self) -> tuple[int, int, list[float]]:
        found = await asyncio.gather(*(clients.done.remote() for clients in self._clients))
        waits = [wait for _, _, part in found for wait in part]
        return sum(one[0] for one in found), sum(one[1] for one in found), waits

    def _times(self, queue_pid: int, pids: Sequence[int]) -> tuple[float, ...]:
        """CPU seconds of the queue, of this process, of the clients, and of the machine."""
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        busy = (sum(map(int, fields[:3])) + sum(map(int, fields[5:8]))) / os.sysconf("SC_CLK_TCK")
        return cpu_seconds(queue_pid), time.process_time(), sum(map(cpu_seconds, pids)), busy


async def load_test() -> tuple[list[str], list[dict[str, Any]]]:
    """All loads, one after the other; lines of a table, and figures."""
    test = LoadTest()
    found = [await test.carry(load) for load in LOADS]
    lines = [
        f"{ACTORS:,} clients in {PROCESSES} processes; K = {MAX_STALENESS}; learner steps "
        f"of {', '.join(f'{one.batch:,}' for one in LOADS)} groups",
        "",
        "| load | groups/s | calls for tickets/s | queue, cores | driver, cores | 1,000 clients, "
        "cores | put ms, p50 / p99 | machine busy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.words} | {one.groups_per_s:,.0f} | {one.asks_per_s:,.0f} | {one.queue_cpu:.2f} | "
        f"{one.driver_cpu:.2f} | {one.clients_cpu:.2f} | {one.put_p50_ms:.0f} / "
        f"{one.put_p99_ms:.0f} | {one.busy:.0%} |"
        for one in found
    ]
    control = found[0].queue_cpu + found[0].driver_cpu
    reached = aim(
        "queue and driver at most one core at 200 groups/s",
        f"{control:.2f} cores at {found[0].groups_per_s:,.0f} groups/s",
        met=control <= 1 and found[0].groups_per_s >= 0.9 * found[0].wanted,
    )
    return [*lines, "", *aims([reached])], [asdict(one) for one in found]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.many_actors", description="1,024 rollout actors."
    )
    parts = ["simulated", "load"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--actors", type=int, default=ACTORS, help="of the simulation")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the simulation")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="put the tables into this page")
    arguments = parser.parse_args()
    record: dict[str, Any] = {"machine": machine()}
    for part in arguments.only:
        if part == "simulated":
            lines, record[part] = simulated(arguments.actors, arguments.steps)
        else:
            session = RaySession.open(processes=PROCESSES + 6)
            try:
                lines, record[part] = asyncio.run(load_test())
            finally:
                session.close()
        print("\n".join([*lines, ""]), flush=True)
        if arguments.docs is not None:
            write_docs(arguments.docs, lines, benchmark=f"many_actors.{part}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
