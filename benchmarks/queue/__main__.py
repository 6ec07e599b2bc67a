"""What the replay queue carries: `python -m benchmarks.queue [--only small medium large single]
[--out FILE]`.

    small, medium, large   groups of about 1.5 KB, 590 KB and 4.3 MB through Ray actors, many per
                           call            against a plain actor
    single                 groups of 1.5 KB, one per call
                           against a plain actor

Two producers call like rollout actors, each with one `acquire` and one `put` under way; a consumer
calls like the loop and a learner rank. The rival is a Ray actor around a deque that answers the
same calls with the same arrays and looks at nothing. The queue runs without a journal, with one
that the kernel writes when it likes (fsync never), and with one that is on the disk before a put is
answered (fsync group). The contestants take turns within a round, and a ratio compares two figures
of one round: printed is the median over the rounds with the smallest and the largest. Everything
shares the machine's cores, producers and consumer included. A get is next_batch and payload,
without the time for which groups of the batch were still missing. CPU time is that of the
contestant's process, all threads.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import ray

from async_grpo.algo.filters import FilterRule
from async_grpo.algo.rewards import Shaping
from async_grpo.cluster.queue import MAX_CALLS, QueueProcess
from async_grpo.cluster.session import RaySession
from async_grpo.replay.resume import JournalSettings
from async_grpo.replay.rules import QueueSettings
from benchmarks.harness import Part, Report, aim, arguments_of, kilobytes, machine, spread
from benchmarks.queue.actors import Consumer, PlainQueue, Producer, Shape

PRODUCERS, MAX_STALENESS, WARM_UP_STEPS, MAX_STEPS = 2, 3, 4, 100_000
TIMEOUT_S = 120.0
SHAPES = {
    "small": Shape(rows=8, tokens=6, batch=256, call=64, steps=12),
    "medium": Shape(rows=16, tokens=4_096, batch=16, call=8, steps=12),
    "large": Shape(rows=16, tokens=30_000, batch=8, call=2, steps=8),
    "single": Shape(rows=8, tokens=6, batch=16, call=1, steps=8),
}


@dataclass(frozen=True)
class Measured:
    """One contestant in one round. Times in seconds; CPU microseconds and memory are those of its
    own process.
    """

    groups_per_s: float
    gb_per_s: float
    groups_per_call: float
    cpu_us_per_group: float
    memory_mb: float
    group_bytes: int
    puts: list[float]
    gets: list[float]


def settings_for(shape: Shape) -> QueueSettings:
    """A run of groups of this shape that does not end; the filter looks at groups of several
    responses.
    """
    return QueueSettings(
        rollout_batch_size=shape.batch,
        max_staleness=MAX_STALENESS,
        outstanding=(MAX_STALENESS + 1) * shape.batch,
        total_steps=MAX_STEPS,
        group_size=shape.rows,
        max_attempts=3,
        max_num_gen_batches=0,
        shaping=Shaping({"correct": 1.0}, shape.tokens),
        filter=FilterRule() if shape.rows > 1 else None,
    )


class Contest:
    """One shape: its contestants, each with the number of the next step, and the processes that
    drive them.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.shape, self._directory = name, SHAPES[name], directory
        self._producers = [
            ray.remote(Producer).options(num_cpus=0).remote(f"producer-{index}")
            for index in range(PRODUCERS)
        ]
        self._consumer = ray.remote(Consumer).options(num_cpus=0).remote()
        settings = settings_for(self.shape)
        queue = ray.remote(QueueProcess).options(max_concurrency=MAX_CALLS, num_cpus=0)
        actors = {
            "plain": ray.remote(PlainQueue)
            .options(max_concurrency=MAX_CALLS, num_cpus=0)
            .remote(self.shape.batch, settings.capacity),
            "queue": queue.remote(settings),
        }
        for fsync in ("never", "group"):
            journal = JournalSettings(
                str(directory / f"{name}-{fsync}"), start="benchmark", fsync=fsync
            )
            actors[f"queue, journal, fsync {fsync}"] = queue.remote(settings, journal)
        self._actors = actors
        self._steps = dict.fromkeys(actors, 1)
        self.rounds: list[dict[str, Measured]] = []
        self.memcpy: list[float] = []
        self.disk: list[float] = []

    async def round(self) -> None:
        """Every contestant once, and what memory and disk do at that time."""
        self.rounds.append({name: await self._measure(name) for name in self._actors})
        self.memcpy.append(memcpy_gb_per_s())
        self.disk.append(disk_gb_per_s(self._directory))

    def close(self) -> None:
        """End all processes of the contest."""
        for actor in (*self._producers, self._consumer, *self._actors.values()):
            ray.kill(actor)

    async def _measure(self, name: str) -> Measured:
        queue, step, shape = self._actors[name], self._steps[name], self.shape
        pid = await queue.pid.remote()
        cpu_before = cpu_seconds(pid)
        producing = [
            producer.produce.remote(queue, shape, step - 1) for producer in self._producers
        ]
        taking = self._consumer.take.remote(
            queue, self._producers, step, WARM_UP_STEPS, shape.steps
        )
        taken = await asyncio.wait_for(taking, TIMEOUT_S)
        self._steps[name] += WARM_UP_STEPS + shape.steps
        for producer in self._producers:
            producer.stop.remote()
        calls = [
            call
            for calls in await asyncio.wait_for(asyncio.gather(*producing), TIMEOUT_S)
            for call in calls
        ]
        cpu_after, memory_mb = cpu_seconds(pid), kilobytes(f"/proc/{pid}/status", "VmRSS") / 1024
        if (
            "journal" in name
            # a checkpoint lets go of what is trained; the disk comes to rest before the next one is
            # measured
        ):
            segment = (await queue.call.remote("snapshot"))["segment"]
            await queue.call.remote("forget", segment=segment, step=self._steps[name] - 1)
            os.sync()
        put = sum(count for count, _ in calls)
        return Measured(
            groups_per_s=shape.steps * shape.batch / taken["seconds"],
            gb_per_s=taken["bytes"] / taken["seconds"] / 1e9,
            groups_per_call=put / len(calls),
            cpu_us_per_group=(cpu_after - cpu_before) / put * 1e6,
            memory_mb=memory_mb,
            group_bytes=taken["bytes"] // (shape.steps * shape.batch),
            puts=[seconds for _, seconds in calls],
            gets=taken["gets"],
        )


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memcpy_gb_per_s(nbytes: int = 64 * 2**20) -> float:
    """What one core copies, between arrays that are there already."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    started = time.perf_counter()
    for _ in range(4):
        np.copyto(target, source)
    return 4 * nbytes / (time.perf_counter() - started) / 1e9


def disk_gb_per_s(directory: Path, nbytes: int = 64 * 2**20) -> float:
    """Written in pieces of 4 MB, then flushed."""
    piece, path = bytes(2**22), directory / "disk"
    started = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        file.writelines([piece] * (nbytes // len(piece)))
        os.fdatasync(file)
    rate = nbytes / (time.perf_counter() - started) / 1e9
    path.unlink()
    return rate


async def contest(name: str, *, rounds: int, directory: Path) -> Contest:
    """All rounds of one shape, after one that is thrown away: processes start, and memory is
    touched for the first time.
    """
    found = Contest(name, directory)
    try:
        for _ in range(rounds + 1):
            await found.round()
    finally:
        found.close()
    del found.rounds[0], found.memcpy[0], found.disk[0]
    return found


def percentiles(seconds: Sequence[float]) -> str:
    """p50 / p99 in milliseconds."""
    return f"{np.percentile(seconds, 50) * 1e3:.1f} / {np.percentile(seconds, 99) * 1e3:.1f}"


def of_plain(found: Contest, name: str) -> list[float]:
    """Groups per second against the plain actor, round by round."""
    return [results[name].groups_per_s / results["plain"].groups_per_s for results in found.rounds]


def contest_lines(found: Contest) -> list[str]:
    """The table of one shape."""
    shape, median = found.shape, statistics.median
    lines = [
        f"{found.name}: {shape.rows} responses of {shape.tokens:,} tokens, "
        f"{found.rounds[0]['plain'].group_bytes:,} bytes; batches of "
        + f"{shape.batch}, at most {shape.call} groups per call; memcpy "
        f"{spread(found.memcpy, '.1f')} GB/s, disk {spread(found.disk)} GB/s",
        "",
        f"| {found.name} | groups/s | GB/s | against plain | of memcpy | put ms, p50 / p99 "
        "| get ms, p50 / p99 | CPU us per group | MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in found.rounds[0]:
        ours = [results[name] for results in found.rounds]
        copies = [one.gb_per_s / rate for one, rate in zip(ours, found.memcpy, strict=True)]
        lines.append(
            f"| {name} | {spread([one.groups_per_s for one in ours], ',.0f')} | "
            f"{spread([one.gb_per_s for one in ours], '.3g')} "
            f"| {spread(of_plain(found, name))} | {median(copies):.1%} "
            f"| {percentiles([s for one in ours for s in one.puts])} | "
            f"{percentiles([s for one in ours for s in one.gets])} "
            f"| {median(one.cpu_us_per_group for one in ours):,.0f} | "
            f"{max(one.memory_mb for one in ours):,.0f} |"
        )
    return lines


def contest_aims(found: Contest) -> list[str]:
    """What was aimed at for this shape, and what came out. Without journal."""
    ours = [results["queue"] for results in found.rounds]
    ratio, rate = (
        statistics.median(of_plain(found, "queue")),
        statistics.median(one.groups_per_s for one in ours),
    )
    lines = [aim(f"{found.name}: 0.8 of the plain actor", f"{ratio:.2f}", met=ratio >= 0.8)]
    if found.name == "small":
        p99 = float(np.percentile([seconds for one in ours for seconds in one.puts], 99) * 1e3)
        met = rate >= 5_000 and p99 < 20
        lines.append(
            aim(
                "small: 5,000 groups/s, p99 of put below 20 ms",
                f"{rate:,.0f} groups/s, {p99:.0f} ms",
                met=met,
            )
        )
    if found.name == "large":
        speed = statistics.median(one.gb_per_s for one in ours)
        lines.append(aim("large: 1 GB/s", f"{speed:.2f} GB/s", met=speed >= 1))
    return lines


def contest_part(name: str, *, rounds: int, directory: Path) -> Part:
    """Table, aims and values of one shape."""
    found = asyncio.run(contest(name, rounds=rounds, directory=directory))
    values = [{who: asdict(one) for who, one in results.items()} for results in found.rounds]
    return (
        contest_lines(found),
        contest_aims(found),
        {"rounds": values, "memcpy_gb_per_s": found.memcpy, "disk_gb_per_s": found.disk},
    )


def main() -> None:
    parser = arguments_of("queue", "What the replay queue carries.")
    parser.add_argument("--only", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--directory",
        type=Path,
        help="where the journals go (default: the directory of temporary files)",
    )
    arguments = parser.parse_args()
    report = Report("queue", machine("ray"))
    session = RaySession.open(processes=PRODUCERS + 6)
    try:
        with tempfile.TemporaryDirectory(prefix="queue-", dir=arguments.directory) as directory:
            for name in (name for name in SHAPES if name in arguments.only):
                part = contest_part(name, rounds=arguments.rounds, directory=Path(directory))
                report.keep(name, part)
    finally:
        session.close()
    report.end(arguments)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
