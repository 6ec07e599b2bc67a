"""The queue and responses that a checkpoint keeps in part: which groups continue, under which
version, and that the bound holds for them.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_grpo.replay.partial import PartialStart
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.resume import JournalSettings, open_queue
from async_grpo.wire.codec import GroupTicket
from tests.support.frames import frame_of
from tests.support.journal_life import RULES, journal_in, queue_settings, saved


def beginning_of(ticket: GroupTicket, *, newest: int | None = None) -> PartialStart:
    version = ticket.policy_version
    return PartialStart(
        ticket.group_id,
        ticket.attempt,
        version,
        version if newest is None else newest,
        responses=2,
        tokens=7,
    )


async def train(queue: ReplayQueue, first: int, last: int, actor: str = "a") -> None:
    """Steps from `first` on, each live before the next one, by an actor that finishes at once what
    it gets.
    """
    for step in range(first, last + 1):
        tickets = await queue.acquire(actor, step - 1, [], 2)
        assert len(tickets) == 2
        await queue.put(actor, [frame_of(ticket) for ticket in tickets])
        assert await queue.get_batch(step) is not None
        await queue.live(step)


async def story(
    directory: Path, *, max_staleness: int = 2
) -> tuple[ReplayQueue, JournalSettings, GroupTicket, GroupTicket]:
    """A run at step 2, with a group of version 0 and one of version 1 that are in flight."""
    journal = journal_in(directory, lost_steps="replay")
    queue = open_queue(queue_settings(max_staleness=max_staleness), journal)
    [old] = await queue.acquire("slow", 0, [], 1)
    await train(queue, 1, 1)
    [new] = await queue.acquire("slower", 1, [], 1)
    await train(queue, 2, 2)
    return queue, journal, old, new


def again(
    journal: JournalSettings,
    snapshot: dict,
    *,
    start: str = "second",
    step: int = 2,
    max_staleness: int = 2,
    **changes: object,
) -> ReplayQueue:
    settings = queue_settings(max_staleness=max_staleness, trained_steps=step)
    return open_queue(settings, replace(journal, start=start, **changes), snapshot=snapshot)


async def test_a_group_goes_on_as_it_was_and_the_learner_waits_for_it(tmp_path: Path) -> None:
    queue, journal, old, new = await story(tmp_path)
    snapshot = await saved(queue, beginning_of(old), beginning_of(new, newest=2))
    queue = again(journal, snapshot)
    assert str(queue.report) == (
        "0 completed groups restored, 2 to be issued again (2 in flight); 4 responses of "
        "2 groups continue from 14 tokens"
    )
    rest = await queue.acquire("a", 2, [], 9)
    assert (
        rest[:2] == [old, new]
        and {ticket.policy_version for ticket in rest[2:]} == {2}
        and len(rest) == 6
    )
    await queue.put("a", [frame_of(ticket) for ticket in rest[2:]])
    assert await queue.get_batch(3) is None, "version 0 is due in step 3 at K = 2"
    [verdict] = await queue.put("a", [frame_of(old, versions=(0, 2))])
    assert verdict.status == "accepted"
    assert [group.min_version for group in (await queue.get_batch(3)).groups] == [0, 2]


async def test_what_waits_to_go_on_is_waited_for_and_goes_first(tmp_path: Path) -> None:
    queue, journal, old, new = await story(tmp_path)
    await queue.put("a", [frame_of(ticket) for ticket in await queue.acquire("a", 2, [], 2)])
    resumed = again(journal, await saved(queue, beginning_of(old)))
    assert await resumed.get_batch(3) is None, (
        "two groups are ready, but one that nobody has taken yet is due"
    )
    await resumed.put("b", [frame_of(ticket) for ticket in await resumed.acquire("b", 2, [], 1)])
    assert old.group_id in [group.group_id for group in (await resumed.get_batch(3)).groups]
    resumed = again(journal, await saved(queue, beginning_of(new)), start="third")
    assert old.group_id < new.group_id and await resumed.acquire("c", 2, [], 1) == [new]


async def test_what_continues_survives_more_deaths_before_and_after_it_was_issued(
    tmp_path: Path,
) -> None:
    queue, journal, old, new = await story(tmp_path)
    snapshot = await saved(queue, beginning_of(old), beginning_of(new))
    second = again(journal, snapshot)
    assert await second.acquire("b", 2, [], 1) == [old]
    died = again(journal, snapshot)  # the queue's process only
    assert died._ledger.totals["restarts"] == 1 and await died.acquire("c", 2, [], 1) == [new]
    await died.put("c", [frame_of(new, versions=(1, 2))])
    third = again(journal, snapshot, start="third")
    assert "2 responses of 1 groups continue" in str(third.report), (
        "one is complete, one was under way"
    )
    fourth = again(journal, snapshot, start="fourth")
    assert await fourth.acquire("d", 2, [], 1) == [old]
    await fourth.fail("d", [old], "timeout")
    assert await fourth.acquire("d", 2, [], 1) == [replace(old, attempt=2, policy_version=2)], (
        "a beginning is used once"
    )
    fifth = again(journal, snapshot, start="fifth")
    assert str(fifth.report).endswith("0 responses of 0 groups continue from 0 tokens")
    assert await fifth.acquire("e", 2, [], 1) == [replace(old, attempt=3, policy_version=2)]


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("too old", "0 responses of 0 groups continue from 0 tokens, 1 groups are too old to"),
        ("newer than the history", "1 groups are too old to"),
        ("another attempt", "0 responses of 0 groups"),
        ("completed", "0 responses of 0 groups"),
        ("other data", ""),
        ("no room", "0 groups"),
    ],
)
async def test_a_beginning_that_does_not_fit_is_not_used(
    tmp_path: Path, case: str, told: str
) -> None:
    queue, journal, old, _ = await story(tmp_path)
    kept = beginning_of(old, newest=3 if case == "newer than the history" else None)
    snapshot = await saved(queue, replace_attempt(kept) if case == "another attempt" else kept)
    if case == "completed":
        await queue.put("slow", [frame_of(old)])
    changes = {
        "other data": {"identity": "other"},
        "too old": {"max_staleness": 1},
        "newer than the history": {"lost_steps": "discard"},
    }
    queue = again(journal, snapshot, **changes.get(case, {}))
    if case == "no room":
        settings = queue_settings(max_staleness=2, trained_steps=2, total_steps=2)
        queue = open_queue(settings, replace(journal, start="third"), snapshot=snapshot)
    assert told in str(queue.report) and ("continue" in str(queue.report)) == bool(told), str(
        queue.report
    )
    tickets = await queue.acquire("a", 2, [], 9)
    assert tickets is None or all(ticket.policy_version == 2 for ticket in tickets)


def replace_attempt(one: PartialStart) -> PartialStart:
    return one._replace(attempt=one.attempt + 1)


async def test_of_a_discarded_branch_only_what_the_restored_step_knows_goes_on(
    tmp_path: Path,
) -> None:
    queue, journal, old, new = await story(tmp_path, max_staleness=3)
    snapshot = await saved(queue, beginning_of(old), beginning_of(new, newest=3))
    await train(queue, 3, 3)
    queue = again(journal, snapshot, lost_steps="discard", max_staleness=3)
    assert (
        queue._ledger.run_epoch == 1
        and "2 responses of 1 groups continue from 7 tokens, 1 groups are too old to"
        in str(queue.report)
    )
    tickets = await queue.acquire("a", 2, [], 9)
    assert tickets[0] == replace(old, run_epoch=1) and {
        ticket.policy_version for ticket in tickets[1:]
    } == {2}
    assert [
        one.status for one in await queue.put("a", [frame_of(tickets[0], versions=(0, 2))])
    ] == ["accepted"]


async def test_what_was_in_flight_when_a_run_was_stopped_in_order_goes_on_too(
    tmp_path: Path,
) -> None:
    queue, journal, old, new = await story(tmp_path)
    snapshot = await saved(queue, beginning_of(old), beginning_of(new))
    await queue.close()
    queue = again(journal, snapshot)
    assert (await queue.acquire("a", 2, [], 9))[:2] == [old, new]


async def test_with_smaller_settings_only_as_many_continue_as_can_be_trained_in_time(
    tmp_path: Path,
) -> None:
    journal = journal_in(tmp_path)
    queue = open_queue(queue_settings(max_staleness=2), journal)
    slow = await queue.acquire("slow", 0, [], 4)
    await train(queue, 1, 1)
    snapshot = await saved(queue, *map(beginning_of, slow))
    settings = queue_settings(max_staleness=1, trained_steps=1)
    queue = open_queue(settings, replace(journal, start="second"), snapshot=snapshot)
    assert "4 responses of 2 groups continue" in str(
        queue.report
    ) and "2 groups are too old" in str(queue.report), "two per step, due in step 2"
    tickets = await queue.acquire("a", 1, [], 4)
    assert Counter(ticket.policy_version for ticket in tickets) == {0: 2, 1: 2}
    await queue.put("a", [frame_of(ticket) for ticket in tickets])
    assert [group.policy_version for group in (await queue.get_batch(2)).groups] == [0, 0]


class Life:
    """Actors, learner and checkpoints at random; the run dies and continues. The queue itself
    checks the bound of every batch.
    """

    def __init__(self, directory: Path, seed: int, order: str, on_stale: str) -> None:
        self.random = rng = random.Random(seed)
        self.settings = queue_settings(
            rollout_batch_size=rng.randint(1, 3),
            max_staleness=rng.randint(1, 3),
            total_steps=14,
            order=order,
            on_stale=on_stale,
        )
        self.journal = journal_in(directory, "start-0", lost_steps="replay")
        self.queue, self.serial, self.starts, self.continued = (
            open_queue(self.settings, self.journal),
            0,
            0,
            0,
        )
        self.holding: dict[str, list[GroupTicket]] = {"a": [], "b": []}
        self.checkpoint: tuple[int, dict[str, Any]] | None = None
        self.allowed: set[tuple[int, int, int]] = set()

    async def act(self) -> None:
        ledger, rng = self.queue._ledger, self.random
        kind = rng.choice(["acquire"] * 4 + ["put"] * 3 + ["train"] * 3 + ["live"] * 2 + ["save"])
        actor = rng.choice(sorted(self.holding))
        if kind == "acquire":
            await self.acquire(actor, rng.randint(1, 4))
        elif kind == "put" and self.holding[actor]:
            await self.put(actor, self.holding[actor].pop(rng.randrange(len(self.holding[actor]))))
        elif kind == "train" and ledger.newest_version < self.settings.total_steps:
            await self.queue.get_batch(ledger.newest_version + 1)
        elif kind == "live":
            await self.queue.live(rng.randint(ledger.live, ledger.newest_version))
        elif kind == "save" and ledger.training_step is None:
            await self.queue.live(ledger.steps)
            held = [
                ticket
                for tickets in self.holding.values()
                for ticket in tickets
                if rng.random() < 0.8
            ]
            kept = [
                beginning_of(ticket, newest=rng.randint(ticket.policy_version, ledger.live))
                for ticket in held
            ]
            self.checkpoint = (ledger.steps, await saved(self.queue, *kept))

    async def acquire(self, actor: str, want: int) -> bool:
        live = self.queue._ledger.live
        tickets = await self.queue.acquire(
            actor, live, [(one.group_id, one.attempt) for one in self.holding[actor]], want
        )
        for ticket in tickets or []:
            assert (
                ticket.policy_version == live
                or (ticket.group_id, ticket.attempt, ticket.policy_version) in self.allowed
            ), ticket
            self.continued += ticket.policy_version < live
        self.holding[actor] += tickets or []
        return tickets is not None

    async def put(self, actor: str, ticket: GroupTicket) -> None:
        newest = self.queue._ledger.live
        [verdict] = await self.queue.put(
            actor, [frame_of(ticket, versions=tuple(sorted({ticket.policy_version, newest})))]
        )
        assert verdict.status == "accepted", verdict

    async def crash(self) -> None:
        self.starts += 1
        self.holding = {f"actor-{self.starts}-{index}": [] for index in range(2)}
        step, snapshot = self.checkpoint or (0, None)
        self.allowed = {(one[0], one[1], one[2]) for one in (snapshot or {}).get("beginnings", ())}
        lost = self.random.choice(["replay", "discard"])
        self.journal = replace(self.journal, start=f"start-{self.starts}", lost_steps=lost)
        self.settings = replace(self.settings, trained_steps=step)
        self.queue = open_queue(self.settings, self.journal, snapshot=snapshot)
        await self.queue.live(self.queue._ledger.steps)

    async def finish(self) -> None:
        actor = next(iter(self.holding))
        for other in list(self.holding)[1:]:
            await self.queue.forfeit(other)
        for _ in range(60 * self.settings.total_steps):
            if not await self.acquire(actor, 2):
                break
            while self.holding[actor] and self.random.random() < 0.7:
                await self.put(
                    actor, self.holding[actor].pop(self.random.randrange(len(self.holding[actor])))
                )
            ledger = self.queue._ledger
            if ledger.newest_version < self.settings.total_steps:
                await self.queue.get_batch(ledger.newest_version + 1)
            await self.queue.live(ledger.newest_version)
        assert self.queue._ledger.steps == self.settings.total_steps, (
            f"stuck: {await self.queue.counts()}"
        )


@pytest.mark.parametrize(("order", "on_stale"), RULES)
async def test_lives_with_continued_groups_keep_the_bound_and_come_to_an_end(
    tmp_path: Path, order: str, on_stale: str
) -> None:
    continued = 0
    for seed in range(12):
        life = Life(tmp_path / str(seed), seed, order, on_stale)
        for _ in range(150):
            await life.act()
            if life.random.random() < 0.04:
                await life.crash()
        await life.finish()
        continued += life.continued
    assert continued >= 5, continued
