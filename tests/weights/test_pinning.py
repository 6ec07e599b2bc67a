"""An engine leaves the set for an evaluation and comes back; fakes as in `test_coordinator`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from async_grpo.errors import SetupError
from async_grpo.replay.queue import ReplayQueue
from async_grpo.weights.transport import Receipt
from tests.support.frames import frame_of
from tests.support.pinned import Run, publish
from tests.support.publishing import FakeEngine, config, torn, until
from tests.support.queues import ids, queue_settings, take


async def test_an_engine_that_is_away_keeps_its_version_while_publications_go_on() -> None:
    run = Run(engines=3)
    await run.coordinator.start(0)
    await publish(run, 1)
    async with run.coordinator.pinned() as pin:
        away = pin.engine
        assert (
            pin.label == "v0.1" and away is run.members[2] and away not in run.coordinator.serving()
        )
        assert away in run.members, "it is alive, and watched"
        away.gate = asyncio.Event()  # were it asked, it would not answer
        await publish(run, 2)
        await publish(run, 3)
        assert run.events[-1] == "live 3" and not run.dropped
        assert [engine.label for engine in run.members] == ["v0.3", "v0.3", "v0.1"]
        assert pin.learner_waited_s == 0
        away.gate = None
    assert away.received == ["v0.0", "v0.1", "v0.3"], (
        "it comes back like a newcomer, to what is newest then"
    )
    assert away.weight == 4.0 and away in run.coordinator.serving()
    await publish(run, 4)
    assert [engine.label for engine in run.members] == ["v0.4"] * 3


async def test_it_takes_the_publication_under_way_and_none_after_it() -> None:
    run = Run()
    await run.coordinator.start(0)
    gate = run.members[0].gate = asyncio.Event()
    await run.coordinator.publish(1)
    pinned = run.coordinator.pinned()
    entering = asyncio.create_task(pinned.__aenter__())
    await asyncio.sleep(0)
    second = asyncio.create_task(run.coordinator.publish(2))  # asks later
    await until(lambda: "a1 takes v0.1" in run.events)
    assert not entering.done()
    gate.set()
    pin = await entering
    await second
    await run.coordinator.wait()
    assert pin.label == "v0.1" and pin.engine.label == "v0.1" and run.members[0].label == "v0.2"
    await pinned.__aexit__(None, None, None)
    assert pin.engine.label == "v0.2"


async def test_with_one_engine_the_next_publication_waits_and_the_wait_is_the_evaluations() -> None:
    run = Run(engines=1)
    await run.coordinator.start(0)
    async with run.coordinator.pinned() as pin:
        assert pin.engine is None and run.coordinator.serving() == run.members
        assert pin.learner_waited_s == 0, "nobody waits yet"
        publishing = asyncio.create_task(publish(run, 1))
        await until(lambda: pin.learner_waited_s > 1.0)
        assert run.events[-1] == "live 0" and run.members[0].label == "v0.0"
    assert await publishing < 0.5 and run.events[-1] == "live 1"
    assert run.coordinator.weight_metrics()["weights/learner_waited_s"] < 0.5
    async with run.coordinator.pinned() as pin:
        assert pin.label == "v0.1"


async def test_an_evaluation_that_asked_during_a_publication_is_waited_for_at_its_own_cost() -> (
    None
):
    run, held, moments = Run(engines=1), [], []
    await run.coordinator.start(0)

    @contextmanager
    def holds() -> Iterator[None]:
        held.append("waits")
        yield
        held.append("goes on")

    run.coordinator.held = holds
    gate = run.members[0].gate = asyncio.Event()
    await run.coordinator.publish(1)  # overlaps with the next step
    again, stop = asyncio.Event(), asyncio.Event()

    async def evaluation() -> None:
        for event in (again, stop):  # it begins again at once, as when the learner went back
            async with run.coordinator.pinned() as pin:
                assert pin.label == "v0.1"
                await event.wait()
                moments.append(pin.learner_waited_s)

    evaluating = asyncio.create_task(evaluation())
    publishing = asyncio.create_task(publish(run, 2))
    await asyncio.sleep(0.02)
    assert held == [], "so far it waits for the publication before"
    gate.set()
    await until(lambda: held == ["waits"])
    await asyncio.sleep(0.3)
    again.set()
    await until(lambda: held == ["waits", "goes on", "waits"])
    await asyncio.sleep(0.3)
    stop.set()
    waited = await publishing
    await evaluating
    assert held == 2 * ["waits", "goes on"] and run.events[-1] == "live 2" and min(moments) > 0.25
    assert waited < 0.3, "what the publication cost is without them"


async def test_no_publication_slips_between_its_weights_and_its_return() -> None:
    run = Run()
    await run.coordinator.start(0)
    pinned = run.coordinator.pinned()
    away = (await pinned.__aenter__()).engine
    await publish(run, 1)
    away.gate = asyncio.Event()
    returning = asyncio.create_task(pinned.__aexit__(None, None, None))
    await until(lambda: "a1 takes v0.1" in run.events)
    publishing = asyncio.create_task(run.coordinator.publish(2))
    await asyncio.sleep(0.01)
    assert "stage v0.2" not in run.events and away not in run.coordinator.serving()
    away.gate.set()
    await asyncio.gather(returning, publishing)
    await run.coordinator.wait()
    assert away.received[1:] == ["v0.1", "v0.2"] and run.events[-1] == "live 2"


async def test_it_is_checked_once_only() -> None:
    run = Run(config(self_check=True))
    await run.coordinator.start(0)
    async with run.coordinator.pinned() as pin:
        checked = list(pin.engine.received)
        await publish(run, 1)
    assert pin.engine.received == [*checked, "v0.1"]


@pytest.mark.parametrize("dies", ["away", "on its way back", "torn on its way back"])
async def test_one_that_dies_is_not_waited_for(dies: str) -> None:
    hangs = dies == "on its way back"
    run = Run(config(acknowledge_s=0.3 if hangs else 30.0))
    await run.coordinator.start(0)
    with suppress(RuntimeError):
        async with run.coordinator.pinned() as pin:
            if dies == "away":
                await run.drop(pin.engine.actor_id, RuntimeError("killed"))  # the manager noticed
                raise RuntimeError("its call failed")
            if hangs:
                pin.engine.gate = asyncio.Event()
            else:
                pin.engine.failures = [torn()]
            await publish(run, 1)
    assert list(run.dropped) == ["a1"] and [engine.actor_id for engine in run.members] == ["a0"]
    await publish(run, 2)
    assert run.events[-1] == "live 2"
    replacement = FakeEngine("a1", run.events)  # even under the same name
    await run.coordinator.join(replacement, lambda: run.members.append(replacement))
    assert replacement in run.coordinator.serving()


async def test_one_that_comes_back_wrong_ends_the_run() -> None:
    run = Run()
    await run.coordinator.start(0)
    with pytest.raises(SetupError, match="engine a1: no such tensor"):
        async with run.coordinator.pinned() as pin:
            pin.engine.failures = [Receipt("v0.0", "names", "no such tensor")]


async def test_an_error_inside_brings_it_back_and_the_end_of_the_run_does_not() -> None:
    run = Run()
    await run.coordinator.start(0)
    with pytest.raises(ValueError, match="inside"):
        async with run.coordinator.pinned():
            raise ValueError("inside")
    assert len(run.coordinator.serving()) == 2
    received = list(run.members[1].received)

    async def evaluation() -> None:
        async with run.coordinator.pinned():
            await asyncio.Event().wait()

    task = asyncio.create_task(evaluation())
    await until(lambda: len(run.coordinator.serving()) == 1)
    task.cancel()
    await asyncio.wait({task})
    assert run.members[1].received == received and task.cancelled()
    await publish(run, 1)
    assert run.events[-1] == "live 1", "and the lock is free"


@pytest.mark.parametrize("every", [1, 2])
async def test_with_nccl_it_stays_in_the_group_and_serves_the_next_publication(every: int) -> None:
    """A group is never formed for an evaluation. Where the next publication is steps away, the
    newest weights are sent again at the boundary.
    """

    run = Run(config(every=every, self_check=True), engines=3, backend="nccl")
    await run.coordinator.start(0)
    groups = len(run.learner.groups)
    async with run.coordinator.pinned() as pin:
        away = pin.engine
    assert away in run.coordinator.serving(), "there was no publication"
    async with run.coordinator.pinned() as pin:
        assert pin.engine is away
        await publish(run, 1)
        assert f"{away.actor_id} attends v0.1" in run.events and away.label == "v0.0"
        assert away not in run.coordinator.serving()
    assert away not in run.coordinator.serving(), "it serves an old version"
    await run.coordinator.refresh(1)
    assert [engine.label for engine in run.members] == ["v0.1", "v0.1", f"v0.{int(every > 1)}"]
    await publish(run, 2)
    assert [engine.label for engine in run.members] == ["v0.2"] * 3
    assert away in run.coordinator.serving()
    assert len(run.learner.groups) == groups


async def test_with_nccl_a_publication_that_is_torn_forms_the_group_with_it_again() -> None:
    run = Run(config(self_check=True), engines=3, backend="nccl")
    await run.coordinator.start(0)
    groups = len(run.learner.groups)
    async with run.coordinator.pinned() as pin:
        pin.engine.failures = [Receipt("v0.0", "torn", "cut off")]
        await publish(run, 1)
        assert run.learner.groups[groups:] == [[1, 1, 1]] and pin.engine.label == "v0.0"
        assert run.events.count(f"{pin.engine.actor_id} attends v0.1") == 2
    await publish(run, 2)
    assert [engine.label for engine in run.members] == ["v0.2"] * 3


async def test_a_learner_that_comes_back_connects_those_that_are_there() -> None:
    run = Run()
    await run.coordinator.start(0)
    async with run.coordinator.pinned() as pin:
        async with run.coordinator.without_learner():
            await run.coordinator.relink(0, run_epoch=1)
        assert pin.engine.label == "v0.0" and run.members[0].label == "v1.0"
    assert pin.engine.label == "v1.0" and pin.engine.group == run.members[0].group + 1


async def test_what_an_engine_that_is_away_holds_is_trained_in_time_and_it_gets_nothing() -> None:
    """The real queue: `b` keeps version 0 while 1 and 2 go live."""
    queue = ReplayQueue(queue_settings())
    mine, others = await take(queue, 2, actor="a"), await take(queue, 2, actor="b")
    await queue.put("a", [frame_of(ticket) for ticket in mine])
    assert await queue.get_batch(1) is not None
    await queue.live(1)
    assert await take(queue, 4, actor="b", holding=ids(others)) == []
    mine = await take(queue, 4, actor="a", version=1)
    await queue.put("a", [frame_of(ticket, versions=(1,)) for ticket in mine])
    assert len(mine) == 2 and await queue.get_batch(2) is None, (
        "its groups are due: they must not wait behind an evaluation"
    )
    await queue.put("b", [frame_of(ticket) for ticket in others])
    assert [group.group_id for group in (await queue.get_batch(2)).groups] == [
        ticket.group_id for ticket in others
    ]
    await queue.live(2)
    assert (await queue.metrics())["replay/staleness_max"] == 1 and await take(
        queue, 4, actor="b"
    ) == []
    assert len(await take(queue, 1, actor="a", version=2)) == 1
    assert len(await take(queue, 1, actor="b", version=2)) == 1, "it is back"
