"""The journal: nothing that it recorded is lost or changed by a death, and whatever happens to its files, no wrong group comes out."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from async_grpo.replay.journal import JournalError, Segment, segment_path, segments
from async_grpo.replay.ledger import State
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.recovery import JournalSettings, open_queue
from async_grpo.replay.rules import QueueSettings
from tests.journal_case import RULES, Checkpoint, Life, ready_frames

MUTATIONS = 20_000


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory in memory, where there is one."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="journal-", dir=memory if memory.is_dir() else None) as path:
        yield Path(path)


# ---- random lives ----


@pytest.mark.parametrize(("order", "on_stale"), RULES)
def test_a_queue_whose_process_dies_goes_on_as_if_it_had_not(folder: Path, order: str, on_stale: str) -> None:
    seen_states = Counter()

    async def lives() -> None:
        for seed in range(12):
            life = Life(folder / str(seed), seed, order=order, on_stale=on_stale)
            for _ in range(150):
                await life.call()
                if life.random.random() < 0.08:
                    await life.die()
            seen_states.update(await life.queue.counts())
            await life.finish()

    asyncio.run(lives())
    assert all(seen_states[name] for name in ("trained", "rejected", "late", "duplicate", "invalid", "forfeited", "overdue", "restarts")), seen_states


@pytest.mark.parametrize(("order", "on_stale"), RULES)
def test_a_run_resumes_with_every_group_that_its_weights_may_know(folder: Path, order: str, on_stale: str) -> None:
    resumed, ready = Counter(), 0

    async def lives() -> None:
        nonlocal ready
        for seed in range(16):
            life = Life(folder / str(seed), 1000 + seed, order=order, on_stale=on_stale)
            for _ in range(200):
                await life.call()
                chance = life.random.random()
                if chance < 0.02:
                    await life.die()
                elif chance < 0.05 and (life.checkpoints or not life.batches):
                    checkpoint = life.random.choice(life.checkpoints) if life.checkpoints else None
                    resumed["from a checkpoint" if checkpoint else "from the beginning"] += 1
                    await life.resume(checkpoint)
                    ready += life.queue.report.ready
            await life.finish()

    asyncio.run(lives())
    assert resumed["from a checkpoint"] > 30 and ready > 30, (resumed, ready)


# ---- damaged files ----


def record_ends(directory: Path, number: int) -> list[int]:
    """Where the records of a segment end, the snapshot's first."""
    segment = Segment(directory, number)
    return [segment.size, *[segment.size for _ in segment.records()]]


def facts(queue: ReplayQueue) -> str:
    """The ledger without what an unreadable frame may change: it makes a ready group wait."""
    ledger = queue._ledger.snapshot()
    groups = []
    for group_id, attempt, version, state, actor_id, step, _ in ledger["groups"]:
        open_ = state in ("ready", "waiting")
        groups.append([group_id, attempt, None if open_ else version, "ready or waiting" if open_ else state, actor_id, step])
    for name in ("restarts", "unreadable"):
        ledger["totals"].pop(name, None)
    return json.dumps({**ledger, "groups": sorted(groups), "segment_steps": None}, sort_keys=True)


@dataclass
class Story:
    """A journal on disk, what was put into it, and every queue that a prefix of it gives."""

    directory: Path
    settings: QueueSettings
    journal: JournalSettings
    checkpoint: Checkpoint | None
    files: dict[int, bytes]
    ends: dict[int, list[int]]
    frames: dict[tuple[int, int], bytes]
    first: int
    """The segment from which on events count."""
    prefixes: dict[str, set[int]]
    """Facts -> ids of the ready groups."""
    touched: set[int] = field(default_factory=set)

    def open(self) -> ReplayQueue:
        return open_queue(self.settings, self.journal, snapshot=self.checkpoint and self.checkpoint.snapshot)

    def write(self, files: dict[int, bytes]) -> None:
        """Make the directory hold these files, and no others."""
        for number in {*segments(self.directory), *files}:
            path = segment_path(self.directory, number)
            if number not in files:
                path.unlink()
            elif files[number] is not self.files[number] or number in self.touched or not path.exists():
                path.write_bytes(files[number])
        self.touched = {number for number, data in files.items() if data is not self.files[number]}


async def busy_life(directory: Path, seed: int) -> Life:
    """A short life that is left with a batch in training, groups ready, and a checkpoint some segments ago."""
    for attempt in range(100):
        life = Life(directory / str(attempt), 100 * seed + attempt, rollout_batch_size=2, max_staleness=2)
        life.forgets, life.journal = False, replace(life.journal, segment_bytes=2500)
        await life.die()
        for _ in range(70):
            await life.call()
            slots, numbers = life.queue._ledger.slots, life.queue._journal.segments()
            early = [one for one in life.checkpoints if one.snapshot["segment"] < numbers[-1] - 1]
            if life.taken > 1 and slots[State.TRAINING] and len(slots[State.READY]) > 1 and early:
                return life
    raise AssertionError("no such life")


async def story(directory: Path, seed: int, *, resume: str | None) -> Story:
    """resume: None for the same start, otherwise `checkpoint` or `beginning`."""
    life = await busy_life(directory, seed)
    directory = Path(life.journal.directory)
    numbers = segments(directory)
    checkpoint = next((one for one in reversed(life.checkpoints) if one.snapshot["segment"] < numbers[-1] - 1), None)
    if resume == "checkpoint":
        assert checkpoint is not None
    out = Story(
        directory, life.settings, life.journal, checkpoint if resume == "checkpoint" else None,
        {number: segment_path(directory, number).read_bytes() for number in numbers},
        {number: record_ends(directory, number) for number in numbers}, life.frames, numbers[-1], {},
    )
    if resume is not None:
        out.first = out.checkpoint.snapshot["segment"] if out.checkpoint else numbers[0]
        out.journal = replace(out.journal, start="another")
        out.settings = replace(out.settings, trained_steps=out.checkpoint.step if out.checkpoint else 0)
    for number in range(out.first, numbers[-1] + 1):
        for end in out.ends[number]:
            files = {name: data for name, data in out.files.items() if name < number}
            out.write(files | {number: out.files[number][:end]})
            queue = out.open()
            out.prefixes[facts(queue)] = set(queue._ledger.slots[State.READY])
    return out


def mutate(rng: random.Random, story: Story, number: int) -> bytes:
    """One segment's bytes after something happened to them."""
    data, ends = story.files[number], story.ends[number]
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    if rng.random() < 0.7:
        b = min(b, a + rng.choice([1, 4, 40, 400]))

    def flipped(times: int) -> bytes:
        out = bytearray(data)
        for _ in range(times):
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
        return bytes(out)

    def records() -> list[bytes]:
        return [data[:ends[0]], *[data[start:stop] for start, stop in zip(ends, ends[1:], strict=False)]]

    def rearranged() -> bytes:
        parts = records()
        i, j = rng.randrange(len(parts)), rng.randrange(len(parts))
        how = rng.choice(["swap", "repeat", "remove", "foreign"])
        if how == "swap":
            parts[i], parts[j] = parts[j], parts[i]
        elif how == "repeat":
            parts.insert(j, parts[i])
        elif how == "remove":
            del parts[i]
        else:
            other = rng.choice(list(story.files))
            k = rng.randrange(len(story.ends[other]))
            parts[i] = story.files[other][([0] + story.ends[other])[k]:story.ends[other][k]]
        return b"".join(parts)

    ways: list[Callable[[], bytes]] = [
        lambda: flipped(1), lambda: flipped(rng.randint(2, 9)), lambda: data[:a], lambda: data[:a] + data[b:], lambda: data[:b] + data[a:],
        lambda: data[:a] + rng.randbytes(b - a) + data[a:], lambda: data[:a] + rng.randbytes(b - a) + data[b:],
        lambda: data[:a] + bytes(b - a) + data[b:], lambda: data[:a] + bytes(len(data) - a), lambda: data + rng.randbytes(b - a),
        lambda: data + bytes(b - a), rearranged, rearranged,
    ]
    return rng.choice(ways)()


def try_damage(story: Story, rng: random.Random, times: int, numbers: list[int]) -> Counter[str]:
    """Damage one of the segments again and again: a clear error, or what a prefix of the story gives, and no group but the one that was put."""
    seen: Counter[str] = Counter()
    for _ in range(times):
        number = rng.choice(numbers)
        data = mutate(rng, story, number)
        story.write(story.files | {number: data})
        context = (number, data.hex())
        try:
            queue = story.open()
        except JournalError as error:
            assert str(story.directory) in str(error) or "cannot be read from the journal" in str(error), error
            seen["refused"] += 1
            continue
        ready, slots = story.prefixes.get(facts(queue)), queue._ledger.slots
        assert ready is not None, context
        assert set(slots[State.READY]) <= ready, context
        for entries in (slots[State.READY], slots[State.TRAINING]):
            for entry in entries.values():
                assert entry.frame == story.frames[entry.group_id, entry.attempt], context
                assert (entry.meta.group_id, entry.meta.attempt) == (entry.group_id, entry.attempt), context
        seen["some groups lost" if set(slots[State.READY]) < ready else "opened"] += 1
    return seen


@pytest.mark.parametrize("resume", [None, "checkpoint", "beginning"])
def test_damaged_files_never_give_a_wrong_group(folder: Path, resume: str | None) -> None:
    total: Counter[str] = Counter()
    seeds = 5
    for seed in range(seeds):
        told = asyncio.run(story(folder / str(seed), 50 + seed, resume=resume))
        numbers = list(told.files)
        if resume is not None:
            numbers = [number for number in numbers if number < told.first or number == numbers[-1]]
        total += try_damage(told, random.Random(seed), MUTATIONS // (3 * seeds) + 1, numbers)
    assert total.total() >= MUTATIONS // 3 and min(total["refused"], total["opened"]) > 100, total
    assert total["some groups lost"] > 50 or resume == "beginning", total
