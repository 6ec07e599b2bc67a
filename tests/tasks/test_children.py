"""The pool of child processes, against children that hang, exit, lie and close their pipe; what
verifiers and environments make of it, their own tests say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config import schema
from async_grpo.tasks import children, pipe
from async_grpo.tasks.children import Child, ChildError, ChildPool
from tests.support.waiting import alive, wait_until, wait_until_gone

pytestmark = pytest.mark.asyncio
ANSWER_S = 60.0


class Told(Child):
    name, module = "told", "tests.support.told_child"
    setting, error = "its.setting", ChildError


class ToldWithChildren(Told):
    has_children = True


class Pool(ChildPool[Any]):
    """A pool with the log of its children."""

    def __init__(
        self, log: Path, *, workers: int, start: str = "ready", kind: type[Child] = Told
    ) -> None:
        task, limits = schema.TaskConfig(), schema.Verifier(workers=workers)
        more = {"log": str(log), "start": start}
        super().__init__(kind, task, limits, seed=0, cpu=None, more=more)
        self.log = log

    def begun(self) -> list[int]:
        """Process ids of all that ever began."""
        return [int(line) for line in self.log.read_text().split()] if self.log.exists() else []


@asynccontextmanager
async def pool_of(directory: Path, *, workers: int = 1, **options: Any) -> AsyncIterator[Pool]:
    pool = Pool(directory / "log", workers=workers, **options)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()
        await asyncio.to_thread(wait_until_gone, pool.begun())


async def tell(child: Child, verb: str, argument: str = "") -> None:
    await child.send(pipe.pack([verb, argument]), ANSWER_S)


async def answer(child: Child, verb: str, argument: str = "") -> str:
    await tell(child, verb, argument)
    said, text = await child.receive(ANSWER_S)
    assert said == "said"
    return str(text)


async def test_a_place_keeps_its_child(tmp_path: Path) -> None:
    async with pool_of(tmp_path, workers=2) as pool:
        one, two = await pool.present()
        assert one.greeting == two.greeting == ["value"] and one.pid != two.pid
        assert [await pool.child(place) for place in (0, 1, 0)] == [one, two, one]
        assert await answer(one, "say", "a") == "a" and await pool.present() == [one, two]
        assert sorted(pool.begun()) == sorted([one.pid, two.pid])


@pytest.mark.parametrize("how", ["exit 0", "signal 9", "killed", "leaving"])
async def test_one_that_is_lost_is_replaced_at_its_place_alone(how: str, tmp_path: Path) -> None:
    async with pool_of(tmp_path, workers=2) as pool:
        one, two = await pool.present()
        if how == "killed":
            await one.kill()
        elif how == "leaving":
            one.leaving = True
        else:
            await tell(one, *how.split())
            with pytest.raises(ChildError):
                await one.receive(ANSWER_S)
        asked = await asyncio.gather(*[pool.child(0) for _ in range(4)])
        new = asked[0]
        assert asked == [new] * 4 and new.pid not in (one.pid, two.pid)
        assert await pool.present() == [new, two] and len(pool.begun()) == 3
        assert await answer(new, "say", "here") == "here"
        assert (one in pool.children) is alive(one.pid) is (how == "leaving")


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("failed no such thing", "could not construct the task: no such thing"),
        ("exit 5", r"did not get ready \(crash: the told child ended with exit code 5\)"),
        ("sleep 600", r"did not get ready \(timeout: .*its own output is on stderr"),
        ("write 0300000092a161", r"did not get ready \(crash: .*wrote something else"),
        ("write ffffffff", r"did not get ready \(crash: .*a message of 4294967295 bytes"),
    ],
)
async def test_a_start_that_fails_says_why_and_leaves_none(
    start: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "START_TIMEOUT_S", 3.0)
    pool = Pool(tmp_path / "log", workers=1, start=start)
    with pytest.raises(ChildError, match=said) as caught:
        await pool.start()
    assert caught.value.reason == "start" and len(pool.begun()) == 1
    await asyncio.to_thread(wait_until_gone, pool.begun())


async def test_where_one_cannot_start_the_others_end(tmp_path: Path) -> None:
    pool = Pool(tmp_path / "log", workers=3, start="first no")
    with pytest.raises(ChildError, match=r"start: .* no$"):
        await pool.start()
    assert len(pool.begun()) == 3 and pool.children == []
    await asyncio.to_thread(wait_until_gone, pool.begun())


async def test_a_pool_that_is_closed_stays_closed(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        await pool.close()
        for asked in (pool.child(0), pool.present(), pool.start()):
            with pytest.raises(ChildError, match="the told pool has been closed") as caught:
                await asked
            assert caught.value.reason == "closed"
        await pool.close()
        assert len(pool.begun()) == 1 and pool.children == []


async def test_one_that_is_only_being_started_ends_with_its_pool(tmp_path: Path) -> None:
    pool = Pool(tmp_path / "log", workers=1, start="ready 1")
    starting = asyncio.create_task(pool.child(0))
    await asyncio.to_thread(wait_until, pool.begun, ANSWER_S, "a start")
    await pool.close()
    with pytest.raises(ChildError, match="closed"):
        await starting
    await asyncio.to_thread(wait_until_gone, pool.begun())


async def test_a_start_that_is_cancelled_leaves_none(tmp_path: Path) -> None:
    pool = Pool(tmp_path / "log", workers=2, start="sleep 600")
    starting = asyncio.create_task(pool.start())
    await asyncio.to_thread(wait_until, lambda: len(pool.begun()) == 2, ANSWER_S, "two starts")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await asyncio.to_thread(wait_until_gone, pool.begun())


@pytest.mark.parametrize(
    ("verb", "argument", "reason", "said"),
    [
        ("sleep", "600", "timeout", r"no answer within 1 s \(its.setting\)"),
        ("exit", "3", "crash", "the told child ended with exit code 3"),
        ("signal", "11", "crash", "the told child was killed by signal 11"),
        ("signal", "24", "timeout", "more CPU time than its.setting allows"),
        ("hang up", "", "crash", "the told child closed its pipe"),
        ("write", "0300000001a161", "crash", "wrote something else than an answer"),
        ("write", "0100000001", "crash", "wrote something else than an answer"),
        ("write", "ffffffff", "crash", "a message of 4294967295 bytes"),
        ("write", "0300000091", "timeout", "no answer"),
    ],
)
async def test_what_a_child_does_is_an_error_of_its_kind(
    verb: str, argument: str, reason: str, said: str, tmp_path: Path
) -> None:
    async with pool_of(tmp_path) as pool:
        child = await pool.child(0)
        await tell(child, verb, argument)
        with pytest.raises(ChildError, match=said) as caught:
            await child.receive(1.0 if reason == "timeout" else ANSWER_S)
        assert caught.value.reason == reason
        await child.kill()
        assert not alive(child.pid)


async def test_one_that_takes_no_message_is_not_waited_for(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        child = await pool.child(0)
        await tell(child, "sleep", "600")
        with pytest.raises(ChildError, match="the told child took no message within 1 s"):
            await child.send(pipe.pack("x" * (16 * 2**20)), 1.0)
        with pytest.raises(pipe.MessageTooLarge):
            await child.send(b"x" * (pipe.MAX_MESSAGE + 1), 1.0)


async def test_what_a_child_has_started_ends_with_it(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        child = await pool.child(0)
        started = int(await answer(child, "fork"))
        assert alive(started)
        await child.kill()
        await asyncio.to_thread(wait_until_gone, [started])


async def test_one_that_does_not_end_when_asked_is_killed_first_and_what_is_below_may_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_STOP_TIMEOUT_S", 1.0)
    monkeypatch.setattr(children, "_GRACE_S", 1.5)
    async with pool_of(tmp_path, kind=ToldWithChildren) as pool:
        child = await pool.child(0)
        await answer(child, "deaf")
        below = int(await answer(child, "watched", str(tmp_path / "saw it")))
        await child.kill()
        await asyncio.to_thread(wait_until_gone, [below])
    assert (tmp_path / "saw it").exists()


async def test_one_may_be_given_time_to_end_by_itself(tmp_path: Path) -> None:
    async with pool_of(tmp_path, workers=3) as pool:
        ready, killed, late = await pool.present()
        await tell(late, "sleep", "600")
        for child, within_s in ((ready, ANSWER_S), (killed, 0.0), (late, 0.5)):
            await child.kill(within_s)
        ended = [Path(f"{pool.log}.{child.pid}").exists() for child in (ready, killed, late)]
        assert ended == [True, False, False]
