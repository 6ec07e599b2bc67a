"""The journal: nothing that it recorded is lost or changed by a death, and whatever happens to its
files, no wrong group comes out.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import resource
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from async_grpo.algo.rewards import Shaping
from async_grpo.errors import JournalError
from async_grpo.replay import history
from async_grpo.replay.journal import Segment, segment_path, segments
from async_grpo.replay.ledger import State
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.resume import JournalSettings, open_queue
from async_grpo.replay.rules import QueueSettings
from async_grpo.wire.codec import GroupTicket, decode_meta, encode_group
from tests.support.frames import frame_of, make_group
from tests.support.journal_life import (
    RULES,
    Checkpoint,
    Life,
    journal_in,
    produce,
    queue_settings,
    ready_frames,
    saved,
    train,
)
from tests.support.queues import Clock

MUTATIONS = 600


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory in memory, where there is one."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="journal-", dir=memory if memory.is_dir() else None
    ) as path:
        yield Path(path)


# ---- random lives ----


@pytest.mark.parametrize(("order", "on_stale"), RULES)
async def test_a_queue_whose_process_dies_goes_on_as_if_it_had_not(
    folder: Path, order: str, on_stale: str
) -> None:
    seen_states = Counter()

    for seed in range(12):
        life = Life(folder / str(seed), seed, order=order, on_stale=on_stale)
        for _ in range(150):
            await life.call()
            if life.random.random() < 0.08:
                await life.die()
        seen_states.update(await life.queue.counts())
        await life.finish()
    ways = {"trained", "rejected", "late", "duplicate", "invalid", "forfeited", "overdue"}
    assert all(seen_states[name] for name in ways | {"restarts"}), seen_states


@pytest.mark.parametrize("runs", [6, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("order", "on_stale"), RULES)
async def test_a_run_resumes_with_every_group_that_its_weights_may_know(
    folder: Path, order: str, on_stale: str, runs: int
) -> None:
    resumed, ready = Counter(), 0

    for seed in range(runs):
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
        resumed["abandoned"] += (await life.queue.counts())["abandoned"]
        await life.finish()
    assert min(resumed["from a checkpoint"], ready) > 2 * runs - 2, (resumed, ready)
    assert resumed["abandoned"], resumed


# ---- damaged files ----


def record_ends(directory: Path, number: int) -> list[int]:
    """Where the records of a segment end, the snapshot's first."""
    segment = Segment(directory, number)
    return [segment.size, *[segment.size for _ in segment.records()]]


def facts(queue: ReplayQueue) -> str:
    """The ledger without what an unreadable frame may change: it makes a ready group wait."""
    ledger = queue._ledger.snapshot()
    groups = []
    for group_id, attempt, version, state, actor_id, step, *_ in ledger["groups"]:
        open_ = state in ("ready", "waiting")
        groups.append(
            [
                group_id,
                attempt,
                None if open_ else version,
                "ready or waiting" if open_ else state,
                actor_id,
                step,
            ]
        )
    for name in ("restarts", "unreadable"):
        ledger["totals"].pop(name, None)
    tokens = ledger[
        "tokens"
    ]  # those of a frame that cannot be read change their place, and are still there
    tokens |= {
        "totals": sum(tokens["totals"].values()) + sum(count for _, count in tokens["results"]),
        "results": None,
    }
    unknown = {
        "segment_steps": None,
        "run_epoch": None,
        "epoch_step": None,
    }  # damage raises the epoch
    return json.dumps({**ledger, "groups": sorted(groups), **unknown}, sort_keys=True)


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
        before = {*segments(self.directory)}
        try:
            return open_queue(
                self.settings, self.journal, snapshot=self.checkpoint and self.checkpoint.snapshot
            )
        finally:
            self.touched |= {
                *segments(self.directory)
            } - before  # one that it began may have the number of one of the story

    def write(self, files: dict[int, bytes]) -> None:
        """Make the directory hold these files, and no others."""
        for number in {*segments(self.directory), *files}:
            path = segment_path(self.directory, number)
            if number not in files:
                path.unlink()
            elif (
                files[number] is not self.files[number]
                or number in self.touched
                or not path.exists()
            ):
                path.write_bytes(files[number])
        self.touched = {number for number, data in files.items() if data is not self.files[number]}


async def busy_life(directory: Path, seed: int) -> Life:
    """A short life that is left with a batch in training, groups ready, and a checkpoint some
    segments ago.
    """
    for attempt in range(100):
        life = Life(
            directory / str(attempt), 100 * seed + attempt, rollout_batch_size=2, max_staleness=2
        )
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
    checkpoint = next(
        (one for one in reversed(life.checkpoints) if one.snapshot["segment"] < numbers[-1] - 1),
        None,
    )
    if resume == "checkpoint":
        assert checkpoint is not None
    out = Story(
        directory,
        life.settings,
        life.journal,
        checkpoint if resume == "checkpoint" else None,
        {number: segment_path(directory, number).read_bytes() for number in numbers},
        {number: record_ends(directory, number) for number in numbers},
        life.frames,
        numbers[-1],
        {},
    )
    if resume is not None:
        out.first = out.checkpoint.snapshot["segment"] if out.checkpoint else numbers[0]
        out.journal = replace(out.journal, start="another")
        out.settings = replace(
            out.settings, trained_steps=out.checkpoint.step if out.checkpoint else 0
        )
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
        return [data[: ends[0]], *[data[start:stop] for start, stop in pairwise(ends)]]

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
            parts[i] = story.files[other][([0] + story.ends[other])[k] : story.ends[other][k]]
        return b"".join(parts)

    ways: list[Callable[[], bytes]] = [
        lambda: flipped(1),
        lambda: flipped(rng.randint(2, 9)),
        lambda: data[:a],
        lambda: data[:a] + data[b:],
        lambda: data[:b] + data[a:],
        lambda: data[:a] + rng.randbytes(b - a) + data[a:],
        lambda: data[:a] + rng.randbytes(b - a) + data[b:],
        lambda: data[:a] + bytes(b - a) + data[b:],
        lambda: data[:a] + bytes(len(data) - a),
        lambda: data + rng.randbytes(b - a),
        lambda: data + bytes(b - a),
        rearranged,
        rearranged,
    ]
    return rng.choice(ways)()


def try_damage(story: Story, rng: random.Random, times: int, numbers: list[int]) -> Counter[str]:
    """Damage one of the segments again and again: a clear error, or what a prefix of the story
    gives, and no group but the one that was put.
    """
    seen: Counter[str] = Counter()
    for _ in range(times):
        number = rng.choice(numbers)
        data = mutate(rng, story, number)
        story.write(story.files | {number: data})
        context = (number, data.hex())
        try:
            queue = story.open()
        except JournalError as error:
            assert str(story.directory) in str(error) or "cannot be read from the journal" in str(
                error
            ), error
            seen["refused"] += 1
            continue
        ready, slots = story.prefixes.get(facts(queue)), queue._ledger.slots
        assert ready is not None, context
        assert set(slots[State.READY]) <= ready, context
        for entries in (slots[State.READY], slots[State.TRAINING]):
            for entry in entries.values():
                assert entry.frame == story.frames[entry.group_id, entry.attempt], context
                assert (entry.meta.group_id, entry.meta.attempt) == (
                    entry.group_id,
                    entry.attempt,
                ), context
        seen["some groups lost" if set(slots[State.READY]) < ready else "opened"] += 1
    return seen


@pytest.mark.parametrize("mutations", [80, pytest.param(2_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("resume", ["checkpoint", "beginning"])
def test_a_damaged_segment_before_the_last_one_does_not_hide_what_it_lost(
    folder: Path, resume: str, mutations: int
) -> None:
    total: Counter[str] = Counter()
    for seed in range(3):
        told = asyncio.run(story(folder / str(seed), 80 + seed, resume=resume))
        total += try_damage(
            told,
            random.Random(seed),
            mutations,
            [number for number in told.files if told.first <= number],
        )
    assert total["opened"] > mutations / 4, total


@pytest.mark.parametrize("mutations", [MUTATIONS, pytest.param(40_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("resume", "share"), [(None, 0.6), ("checkpoint", 0.25), ("beginning", 0.15)]
)
def test_damaged_files_never_give_a_wrong_group(
    folder: Path, monkeypatch: pytest.MonkeyPatch, resume: str | None, share: float, mutations: int
) -> None:
    monkeypatch.setattr(
        history, "decode_meta", lru_cache(decode_meta)
    )  # most frames are whole, and the same every time
    total: Counter[str] = Counter()
    seeds, times = 5, int(share * mutations)
    for seed in range(seeds):
        told = asyncio.run(story(folder / str(seed), 50 + seed, resume=resume))
        numbers = list(told.files)
        if resume is not None:
            numbers = [number for number in numbers if number < told.first or number == numbers[-1]]
        total += try_damage(told, random.Random(seed), times // seeds, numbers)
    assert total.total() == times and total["opened"] > times / 24, total
    assert total["refused"] > times / 24 or resume is not None, (
        total
    )  # a queue that goes on needs all of it; a run that resumes takes what is good
    assert total["some groups lost"] > times / 48 or resume == "beginning", total


# ---- other ways to start again ----


async def states(queue: ReplayQueue) -> dict[str, int]:
    counts = await queue.counts()
    return {state.value: counts[state.value] for state in State if counts[state.value]}


@pytest.mark.parametrize("start", ["other identity", "no directory", "fresh", "no journal", "same"])
async def test_results_that_cannot_be_taken_over_are_produced_again(
    folder: Path, start: str
) -> None:
    settings = queue_settings()
    queue = open_queue(settings, journal_in(folder))
    await train(queue, 1, 2)
    snapshot = await saved(queue)
    await queue.live(2)
    (ticket,) = await produce(queue, 1, version=2)
    before = ready_frames(queue)
    journal = {
        "other identity": journal_in(folder, "second", identity="other"),
        "no directory": journal_in(folder / "empty", "second"),
        "fresh": journal_in(folder, "second", fresh=True),
        "no journal": None,
        "same": journal_in(folder, "second"),
    }[start]
    again = open_queue(replace(settings, trained_steps=2), journal, snapshot=snapshot)
    known = (
        ticket.group_id + 1
        if journal is not None and journal.directory == str(folder) and not journal.fresh
        else ticket.group_id
    )
    kept = before if start == "same" else {}
    expected = {"trained": 4, "ready": len(kept), "waiting": known - 4 - len(kept)}
    assert (
        await states(again) == {name: count for name, count in expected.items() if count}
        and ready_frames(again) == kept
    )
    assert str(again.report).startswith(
        f"{len(kept)} completed groups restored, {expected['waiting']} to be issued again"
    )
    trained = await train(again, 3, 5)
    assert set().union(*trained.values()) == set(range(4, 10))
    if journal is not None:  # and the new journal is a journal of this run
        await again.live(5)
        resumed = open_queue(
            replace(settings, trained_steps=5),
            replace(journal, start="third", fresh=False),
            snapshot=await saved(again),
        )
        assert await states(resumed) == await states(again)


@pytest.mark.parametrize(
    ("change", "order", "on_stale"),
    [
        (change, *rules)
        for change in ("larger bound", "larger batch", "smaller batch", "smaller bound")
        for rules in RULES
    ],
)
async def test_a_run_resumes_under_other_settings_and_comes_to_its_end(
    folder: Path, change: str, order: str, on_stale: str
) -> None:
    for seed in range(8):
        life = Life(
            folder / str(seed),
            2000 + seed,
            order=order,
            on_stale=on_stale,
            rollout_batch_size=2,
            max_staleness=2,
        )
        while not life.checkpoints or life.taken < 4:
            await life.call()
        changes = {
            "larger bound": {"max_staleness": 4},
            "larger batch": {"rollout_batch_size": 3},
            "smaller batch": {"rollout_batch_size": 1},
            "smaller bound": {"max_staleness": life.random.randint(0, 1)},
        }[change]
        await life.resume(life.checkpoints[-1], **changes)
        await life.finish()


async def test_an_old_checkpoint_of_another_branch_does_not_train_its_groups_again(
    folder: Path,
) -> None:
    """Checkpoints of steps 1 and 3; the run resumes from 1, dies early, and resumes from 3."""
    settings = queue_settings()
    queue, checkpoints, trained = open_queue(settings, journal_in(folder)), {}, {}
    for step in range(1, 5):
        trained |= await train(queue, step, step)
        checkpoints[step] = await saved(queue)
        await queue.live(step)
    other = open_queue(
        replace(settings, trained_steps=1), journal_in(folder, "second"), snapshot=checkpoints[1]
    )
    await train(other, 2, 2)
    queue = open_queue(
        replace(settings, trained_steps=3), journal_in(folder, "third"), snapshot=checkpoints[3]
    )
    known = set().union(*(trained[step] for step in (1, 2, 3)))
    assert not known & set().union(*(await train(queue, 4, 6)).values())
    assert (await queue.counts())["trained"] == 10


@pytest.mark.parametrize("what", ["cut", "missing"])
async def test_groups_of_a_segment_that_is_gone_are_not_taken_for_trained(
    folder: Path, what: str
) -> None:
    settings = queue_settings()
    queue = open_queue(settings, journal_in(folder))
    await train(queue, 1, 1)
    snapshot = await saved(queue)
    for first, last in ((2, 2), (3, 5), (6, 6)):
        await queue.live(first - 1)
        await train(queue, first, last)
        queue.begin_segment()
    path = segment_path(folder, snapshot["segment"] + 1)
    path.write_bytes(path.read_bytes()[: record_ends(folder, snapshot["segment"] + 1)[0]])
    if what == "missing":
        path.unlink()
    try:
        again = open_queue(
            replace(settings, trained_steps=1), journal_in(folder, "second"), snapshot=snapshot
        )
    except JournalError:
        return
    assert (await again.counts())["trained"] == 2, again.report


async def test_a_damaged_journal_can_be_begun_afresh(folder: Path) -> None:
    await produce(open_queue(queue_settings(), journal_in(folder)), 2)
    segment_path(folder, 1).write_bytes(b"")
    queue = open_queue(queue_settings(), journal_in(folder, "second", fresh=True))
    assert (await queue.counts())["ready"] == 0


async def test_a_closed_run_that_goes_on_has_no_unused_groups(folder: Path) -> None:
    queue = open_queue(queue_settings(), journal_in(folder))
    await queue.put(
        "a", [frame_of(ticket) for ticket in reversed(await queue.acquire("a", 0, [], 3))]
    )
    assert await queue.get_batch(1) is not None
    await queue.close()
    queue.begin_segment()  # as when the segment is full
    again = open_queue(queue_settings(), journal_in(folder, "second"))
    assert await states(again) == {"ready": 3} and list(ready_frames(again)) == [2, 1, 0]


async def test_a_smaller_number_of_attempts_does_not_end_the_history(folder: Path) -> None:
    queue = open_queue(queue_settings(max_attempts=3), journal_in(folder))
    for _ in range(2):
        await queue.fail("a", await queue.acquire("a", 0, [], 1), "timeout")
    await produce(queue, 4)
    again = open_queue(queue_settings(max_attempts=2), journal_in(folder, "second"))
    assert await states(again) == {"ready": 4}, again.report


async def test_a_smaller_bound_leaves_no_group_that_keeps_the_others_waiting(folder: Path) -> None:
    """A ticket of version 0 whose tokens are all of version 1: its place in the order is the
    ticket's, its age the tokens'.
    """
    settings = queue_settings(rollout_batch_size=1, max_staleness=3)
    queue = open_queue(settings, journal_in(folder))
    old = await queue.acquire("a", 0, [], 4)
    for step in (1, 2):
        await queue.put("a", [frame_of(old[step - 1])])
        assert await queue.get_batch(step) is not None
        await queue.live(step)
        if step == 1:
            (new,) = await queue.acquire("a", 1, [(ticket.group_id, 1) for ticket in old[1:]], 9)
    await queue.put(
        "a",
        [*[frame_of(ticket, versions=(1,)) for ticket in old[2:]], frame_of(new, versions=(2,))],
    )
    again = open_queue(
        replace(settings, trained_steps=2, max_staleness=1),
        journal_in(folder, "second"),
        snapshot=await saved(queue),
    )
    assert await again.acquire("b", 2, [], 9) is not None
    for _ in range(3):
        await again.put("b", [frame_of(ticket) for ticket in await again.acquire("b", 2, [], 9)])
    assert await again.get_batch(3) is not None, again.report


@pytest.mark.parametrize("body", [{"no": "event"}, 5, ["unknown kind", 1], []])
@pytest.mark.parametrize("start", ["first", "second"])
async def test_a_whole_record_that_is_no_event_is_damage(
    folder: Path, body: object, start: str
) -> None:
    queue = open_queue(queue_settings(), journal_in(folder))
    queue._journal.append(body)
    try:
        again = open_queue(queue_settings(), journal_in(folder, start))
    except JournalError:
        return
    assert "later records are not used" in str(again.report)


@pytest.mark.parametrize("what", ["issues", "tokens"])
async def test_a_page_of_zeros_is_not_taken_for_the_end(folder: Path, what: str) -> None:
    """A journal whose process died is whole; one in which 4 KiB are gone with good records behind
    them is damaged.
    """
    queue = open_queue(queue_settings(max_staleness=60, total_steps=100), journal_in(folder))
    tickets = await queue.acquire("a", 0, [], 122)
    numbers = (
        np.ravel([[number, 0] for number in range(1, 300)]) if what == "tokens" else np.arange(3)
    )
    await queue.put("a", [frame_of(ticket, prompts=[numbers]) for ticket in tickets[:4]])
    ends = record_ends(folder, 1)
    start, length = (
        (ends[-4], 40) if what == "tokens" else (ends[4], 4096)
    )  # the head of the second result; some seventy tickets
    assert start + length < ends[-4] or what == "tokens"
    path = segment_path(folder, 1)
    data = bytearray(path.read_bytes())
    data[start : start + length] = bytes(length)
    path.write_bytes(data)
    with pytest.raises(JournalError, match="damaged at byte"):
        open_queue(queue_settings(max_staleness=60, total_steps=100), journal_in(folder))


async def test_any_reason_can_be_recorded(folder: Path) -> None:
    queue = open_queue(queue_settings(), journal_in(folder))
    await queue.fail("a", await queue.acquire("a", 0, [], 1), "no such file: data-\udcff")
    assert await states(queue) == {"waiting": 1}


async def test_a_queue_that_goes_on_knows_which_group_was_ready_first(folder: Path) -> None:
    settings, clock = queue_settings(order="ready", on_stale="mask"), Clock()
    queue = open_queue(settings, journal_in(folder), clock=clock)
    for ticket in reversed(await queue.acquire("a", 0, [], 4)):
        clock.now += 1.0
        await queue.put("a", [frame_of(ticket)])
    queue = open_queue(settings, journal_in(folder), clock=clock)
    assert [meta.group_id for meta in (await queue.get_batch(1)).groups] == [2, 3]


async def test_a_resumed_run_knows_which_components_a_response_lacks(folder: Path) -> None:
    """They are nil on the wire, which needed no new version of it."""

    def frame(ticket: GroupTicket) -> bytes:
        group = make_group(ticket)
        del group.rows[ticket.group_id % 2].rewards["format" if ticket.group_id else "correct"]
        return encode_group(group)

    settings = queue_settings(shaping=Shaping({"correct": 1.0, "format": 0.5}, 64))
    queue = open_queue(settings, journal_in(folder))
    tickets = await queue.acquire("a", 0, [], 2)
    saved_ = await saved(queue)
    assert [await queue.put("a", [frame(one)]) for one in tickets]
    batches = [await queue.get_batch(1)]
    queue = open_queue(settings, journal_in(folder, "second"), snapshot=saved_)
    batches.append(await queue.get_batch(1))
    assert batches[0] == batches[1]
    for batch in batches:
        assert [[sorted(row.rewards) for row in group.rows] for group in batch.groups] == [
            [["format"], ["correct", "format"]],
            [["correct", "format"], ["correct"]],
        ]


# ---- the disk ----


@pytest.fixture
def full_disk() -> Iterator[Callable[[int], None]]:
    """A limit of file sizes in bytes: the kernel writes up to it and then says no. None lifts
    it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(nbytes: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft if nbytes is None else nbytes, hard))

    yield limit
    limit(None)


async def every_change_is_refused(queue: ReplayQueue, tickets: list[GroupTicket]) -> None:
    before = queue._ledger.snapshot()
    for call in (
        lambda: queue.put("a", [frame_of(tickets[-1])]),
        lambda: queue.acquire("b", 0, [], 9),
        lambda: queue.fail("a", tickets[-1:], "timeout"),
        lambda: queue.forfeit("a"),
        lambda: queue.live(0),
        queue.close,
        queue.snapshot,
    ):
        with pytest.raises(JournalError, match="cannot be written") as caught:
            await call()
        assert caught.value.exit_code == 7 and queue._ledger.snapshot() == before


@pytest.mark.parametrize("room", [3, 30, 60, 200, 500, 1500])
@pytest.mark.parametrize("truncates", [True, False])
async def test_a_full_disk_ends_the_run_and_keeps_what_was_accepted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, full_disk: Callable, room: int, truncates: bool
) -> None:
    settings = queue_settings(rollout_batch_size=4)
    queue = open_queue(settings, journal_in(folder, fsync="group"))
    tickets, accepted = await queue.acquire("a", 0, [], 7), {}
    if not truncates:
        monkeypatch.setattr(os, "ftruncate", failing(errno.EIO))
    full_disk(queue._journal.nbytes + room)
    with pytest.raises(
        JournalError,
        match=r"cannot be written.*Free space or repair the disk and start the same command again",
    ) as caught:
        for ticket in tickets:
            frame = frame_of(ticket)
            assert (await queue.put("a", [frame]))[0].status == "accepted"
            accepted[ticket.group_id] = frame
    full_disk(None)
    assert caught.value.exit_code == 7 and len(accepted) == room // 450
    await every_change_is_refused(queue, tickets)
    again = open_queue(settings, journal_in(folder, fsync="group"))
    assert ready_frames(again) == accepted
    assert await again.held() == {
        "a": [(ticket.group_id, 1) for ticket in tickets[len(accepted) :]]
    }
    resumed = open_queue(settings, journal_in(folder, "second"))
    assert ready_frames(resumed) == accepted and (await resumed.counts())["waiting"] == 7 - len(
        accepted
    )


def failing(number: int) -> Callable:
    def call(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("call", ["fdatasync", "dup"])
async def test_a_disk_that_cannot_flush_ends_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    queue = open_queue(queue_settings(rollout_batch_size=4), journal_in(folder, fsync="group"))
    tickets = await queue.acquire("a", 0, [], 5)
    assert (await queue.put("a", [frame_of(tickets[0])]))[0].status == "accepted"
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(errno.EIO))
        puts = [queue.put("a", [frame_of(ticket)]) for ticket in tickets[1:4]]
        results = await asyncio.wait_for(asyncio.gather(*puts, return_exceptions=True), 30)
    assert [type(result) for result in results] == [JournalError] * 3
    await every_change_is_refused(queue, tickets)
    again = open_queue(queue_settings(rollout_batch_size=4), journal_in(folder))
    assert (
        0 in ready_frames(again)
        and (await again.counts())["ready"] + (await again.counts())["in_flight"] == 5
    )


@pytest.mark.parametrize("call", ["open", "writev", "fdatasync", "rename", "fsync"])
async def test_a_segment_that_cannot_begin_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    settings = queue_settings()
    queue = open_queue(settings, journal_in(folder, fsync="group"))
    tickets = await queue.acquire("a", 0, [], 3)
    await queue.put("a", [frame_of(ticket) for ticket in tickets[:2]])
    before = queue._ledger.snapshot()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(errno.ENOSPC))
        with pytest.raises(JournalError, match="No space left") as caught:
            await queue.snapshot()
    assert caught.value.exit_code == 7
    await every_change_is_refused(queue, tickets)
    again = open_queue(settings, journal_in(folder))
    assert again._ledger.snapshot() | {"totals": {}} == before | {"totals": {}} and ready_frames(
        again
    ) == ready_frames(queue)


async def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory, message in (
        (tmp_path / "file", "cannot be"),
        (tmp_path / "file" / "below", "cannot be made"),
        ("/proc/self", "cannot be written"),
    ):
        with pytest.raises(JournalError, match=message) as caught:
            open_queue(queue_settings(), journal_in(directory))
        assert str(directory) in str(caught.value) and caught.value.exit_code == 7


# ---- group commit ----


@dataclass
class Flushes:
    """A log of what is written, flushed and answered, in the order in which it happens."""

    log: list[tuple[str, int]] = field(default_factory=list)
    caller: int = -1

    def slow(self, patch: pytest.MonkeyPatch) -> None:
        write, sync = os.writev, os.fdatasync

        def logged_write(fd: int, parts: list) -> int:
            written = write(fd, parts)
            self.log.append(("written", self.caller))
            return written

        def logged_sync(fd: int) -> None:
            self.log.append(("flush starts", 0))
            time.sleep(0.01)
            sync(fd)
            self.log.append(("flush ends", 0))

        patch.setattr(os, "writev", logged_write)
        patch.setattr(os, "fdatasync", logged_sync)

    def count(self) -> int:
        return self.log.count(("flush ends", 0))

    def safe(self, caller: int) -> bool:
        """Whether a flush began after the caller's bytes were written and ended before it was
        answered.
        """
        between = self.log[
            self.log.index(("written", caller)) : self.log.index(("answered", caller))
        ]
        starts = [index for index, (name, _) in enumerate(between) if name == "flush starts"]
        return bool(starts) and ("flush ends", 0) in between[starts[0] :]


@pytest.mark.parametrize("segment_bytes", [2**28, 4000])
async def test_calls_share_flushes_and_none_is_answered_before_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, segment_bytes: int
) -> None:
    calls = 120
    queue = open_queue(
        queue_settings(rollout_batch_size=calls),
        journal_in(folder, fsync="group", segment_bytes=segment_bytes),
    )
    tickets, flushes = await queue.acquire("a", 0, [], calls), Flushes()
    rng = random.Random(1)
    flushes.slow(monkeypatch)

    async def put(number: int) -> None:
        await asyncio.sleep(0.12 * rng.random())
        frame, flushes.caller = frame_of(tickets[number]), number
        verdicts = await queue.put("a", [frame])
        flushes.log.append(("answered", number))
        assert verdicts[0].status == "accepted"

    await asyncio.wait_for(asyncio.gather(*map(put, range(calls))), 60)
    assert all(flushes.safe(number) for number in range(calls))
    assert 1 <= queue._journal.syncs < calls / 2
    assert segment_bytes < 2**28 or flushes.count() == queue._journal.syncs


async def test_answers_of_the_learner_s_calls_are_safe_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, flushes = open_queue(queue_settings(), journal_in(folder, fsync="group")), Flushes()
    await produce(queue, 4)
    flushes.slow(monkeypatch)
    for number, call in enumerate([lambda: queue.get_batch(1), lambda: queue.live(1), queue.close]):
        flushes.caller = number
        await call()
        flushes.log.append(("answered", number))
        assert flushes.safe(number), flushes.log


async def test_fsync_says_how_often_is_flushed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, clock = {}, Clock()
    for fsync in ("never", "interval", "group"):
        queue, flushes = (
            open_queue(queue_settings(), journal_in(folder / fsync, fsync=fsync), clock=clock),
            Flushes(),
        )
        with monkeypatch.context() as patch:
            flushes.slow(patch)
            for ticket in await queue.acquire("a", 0, [], 4):
                clock.now += 0.6  # the interval is a second
                await queue.put("a", [frame_of(ticket)])
                while queue._journal._syncing is not None:
                    await asyncio.sleep(0.001)
            counts[fsync] = flushes.count()
            queue.begin_segment()
        flushed = flushes.count() - counts[fsync]
        assert (flushed > 0) is (fsync != "never"), "a segment that ends is on the disk"
    assert counts == {"never": 0, "interval": 2, "group": 4}


# ---- segments that nobody needs ----


async def test_segments_go_when_no_checkpoint_needs_them(folder: Path) -> None:
    settings = queue_settings(max_staleness=3, total_steps=20, order="ready", on_stale="mask")
    clock = Clock()
    queue = open_queue(settings, journal_in(folder), clock=clock)
    first = await queue.acquire("a", 0, [], 8)
    await queue.put("a", [frame_of(ticket) for ticket in first[:3]])  # the third waits for a fourth
    checkpoints = {}

    async def step(number: int) -> None:
        clock.now += 1.0
        assert await queue.get_batch(number) is not None
        await queue.live(number)
        checkpoints[number] = await saved(queue)

    async def forget(number: int) -> list[int]:
        await queue.forget(segment=checkpoints[number]["segment"], step=number)
        return segments(folder)

    await step(1)
    assert await forget(1) == [1, 2]  # a group of segment 1 is ready
    await queue.put("a", [frame_of(first[3])])
    await step(2)
    checkpoint = open_queue(
        replace(settings, trained_steps=1),
        journal_in(copied(folder), "second"),
        snapshot=checkpoints[1],
    )
    assert set(ready_frames(checkpoint)) == {2, 3}
    assert await forget(1) == [
        1,
        2,
        3,
    ]  # a checkpoint that is kept is older than the step that trained it
    assert await forget(2) == [3]
    await queue.put("a", [frame_of(ticket) for ticket in first[4:6]])
    assert await queue.get_batch(3) is not None
    checkpoints[3] = await saved(queue)
    assert await forget(3) == [3, 4]  # in training: the learner may ask again
    again = open_queue(settings, journal_in(folder), clock=clock)
    assert set(ready_frames(again)) == {4, 5}
    await again.live(3)
    await again.forget(segment=checkpoints[3]["segment"], step=3)
    assert segments(folder) == [4, 5]
    await again.forget(segment=99, step=99)
    assert segments(folder) == [5]  # the one that is written stays


def copied(folder: Path) -> Path:
    return Path(shutil.copytree(folder, folder / "copy"))


async def test_a_segment_too_large_to_be_read_at_once_is_read_in_place(folder: Path) -> None:
    settings = queue_settings()
    queue = open_queue(settings, journal_in(folder))
    tickets = await queue.acquire("a", 0, [], 3)
    large = [frame_of(ticket, prompts=[np.arange(200_000)]) for ticket in tickets]
    await queue.put("a", large)
    for start in ("first", "second"):
        again = open_queue(
            settings, journal_in(copied(folder) if start == "second" else folder, start)
        )
        assert list(ready_frames(again).values()) == large
