"""Environments in child processes, against ones that hang, crash, lie, eat memory and print."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config import schema
from async_grpo.config.environment import EnvironmentConfig
from async_grpo.environments import pool as pool_module
from async_grpo.environments.base import Action, Observation
from async_grpo.environments.pool import EnvironmentFailed, EnvironmentPool
from tests.support.waiting import alive, wait_until_gone

pytestmark = pytest.mark.timeout(90)  # they wait for each other

STEP_S = 1.0


@asynccontextmanager
async def pool_of(
    *, workers: int = 1, options: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[EnvironmentPool]:
    task = schema.TaskConfig(name="tests.support.environments:TaskOfTold", options=options or {})
    values = {"step_timeout_s": STEP_S, "reset_timeout_s": 2 * STEP_S} | settings
    pool = EnvironmentPool(
        task, EnvironmentConfig(workers=workers, **values), weights={"value": 1.0}, seed=0
    )
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def told(text: str) -> Action:
    return Action(text)


async def test_an_episode_goes_through_reset_steps_and_close(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async with pool_of(options={"log": str(log)}) as pool:
        episode, first = await pool.open(None, 7)
        assert first == Observation("seed 7") and pool.open_episodes == 1
        other, _ = await pool.open(None, 7)
        assert (await episode.step(told("say a"))).content == "a 1"
        assert (await other.step(told("say b"))).content == "b 1", "an instance per episode"
        assert await episode.step(told("say c")) == Observation("c 2", {"value": 0.5})
        last = await episode.step(told("end 0.25"))
        assert (last.rewards, last.done, last.correct) == ({"value": 0.25}, True, 1.0)
        await episode.close()
        await episode.close()
        assert pool.open_episodes == 1
        await other.close()
        assert log.read_text().split() == ["made", "made", "closed", "closed"]
        assert pool.errors == {} and pool.seconds["step"] > 0


@pytest.mark.parametrize("later", [False, True])
async def test_an_episode_that_hangs_harms_itself_alone(later: bool, tmp_path: Path) -> None:
    log = tmp_path / "log"

    async with pool_of(options={"later": later, "log": str(log)}) as pool:
        one, two = [(await pool.open(None, 0))[0] for _ in range(2)]
        first = int((await one.step(told("where"))).content)
        began = time.monotonic()
        hangs = asyncio.create_task(one.step(told("sleep 600")))
        await asyncio.sleep(0.05)
        assert (await two.step(told("say here"))).content.startswith("here")
        with pytest.raises(EnvironmentFailed, match=r"step\(\) took longer than 1 s") as caught:
            await hangs
        assert caught.value.reason == "timeout" and time.monotonic() - began < 20
        assert (await two.step(told("where"))).content == str(first), "it lives on"
        new, _ = await pool.open(None, 0)
        beside = int((await new.step(told("where"))).content) == first
        assert beside is later, "new episodes are not put beside a call that does not return"
        await one.close()
        assert log.read_text().split().count("closed") == later, "a coroutine has been ended"
        assert alive(first)
        await two.close()
        if later:
            assert alive(first)
        else:
            await asyncio.to_thread(wait_until_gone, [first])
        assert (await new.step(told("say on"))).content.startswith("on")
        assert pool.errors == {"timeout": 1}


async def test_a_coroutine_that_leaves_a_thread_in_a_call_hangs_as_plain_methods_do(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"

    async with pool_of(options={"later": True, "log": str(log)}) as pool:
        episodes = [(await pool.open(None, 0))[0] for _ in range(8)]
        *hanging, last = episodes
        first = int((await last.step(told("where"))).content)
        calls = [one.step(told("thread 600")) for one in hanging]
        for found in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(found, EnvironmentFailed) and found.reason == "timeout"
        assert (await last.step(told("where"))).content == str(first), "it is heard"
        new, _ = await pool.open(None, 0)
        assert int((await new.step(told("where"))).content) != first
        for one in hanging:
            await one.close()
        assert "closing" not in log.read_text(), "a thread is in it"
        await last.close()
        await asyncio.to_thread(wait_until_gone, [first])


async def test_an_environment_that_is_being_closed_at_the_end_is_closed_once(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"

    async with pool_of(options={"later": True, "log": str(log)}) as pool:
        episode, _ = await pool.open(None, 0)
        await episode.step(told("linger 0.5"))
        closing = asyncio.create_task(episode.close())
        await asyncio.sleep(0.2)
    await closing
    assert log.read_text().split() == ["made", "closing", "closed"]


async def test_a_coroutine_that_closes_for_too_long_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "CLOSE_S", 0.3)

    async with pool_of(options={"later": True}) as pool:
        one, two = [(await pool.open(None, 0))[0] for _ in range(2)]
        await one.step(told("linger 600"))
        first = (await two.step(told("where"))).content
        await one.close()
        assert pool.errors == {"timeout": 1} and pool.open_episodes == 1
        new, _ = await pool.open(None, 0)
        assert (await new.step(told("where"))).content == first


async def test_a_call_that_nobody_waits_for_any_more_hangs_no_less() -> None:
    async with pool_of() as pool:
        one, two = [(await pool.open(None, 0))[0] for _ in range(2)]
        pid = int((await two.step(told("where"))).content)
        call = asyncio.create_task(one.step(told("spin")))
        await asyncio.sleep(0.1)
        call.cancel()
        await one.close()
        assert (await two.step(told("say here"))).content.startswith("here")
        await two.close()
        await asyncio.to_thread(wait_until_gone, [pid])


async def test_an_endless_loop_is_a_hang_too() -> None:
    async with pool_of() as pool:
        one, two = [(await pool.open(None, 0))[0] for _ in range(2)]
        with pytest.raises(EnvironmentFailed, match="took longer"):
            await one.step(told("spin"))
        assert (await two.step(told("say here"))).content == "here 1"


async def test_a_deadline_does_not_count_the_wait_for_a_turn() -> None:
    async with pool_of(step_timeout_s=1.5 * STEP_S) as pool:
        episodes = [(await pool.open(None, 0))[0] for _ in range(4)]
        calls = [one.step(told(f"sleep {STEP_S / 2}")) for one in episodes]
        assert {one.content for one in await asyncio.gather(*calls)} == {"woke"}


@pytest.mark.parametrize(
    ("action", "reason", "said"),
    [
        ("raise no", "exception", "ValueError: no"),
        ("late", "exception", "TimeoutError: the environment's own"),
        ("stop", "exception", "StopIteration"),
        ("exit", "exception", "SystemExit: 3"),
        ("unknown", "exception", "AttributeError"),
        ("give none", "wrong_type", "must return an Observation, got NoneType"),
        ("give text", "wrong_type", "must return an Observation, got str"),
        ("give component", "wrong_type", "rewards name other"),
        ("give nan", "wrong_type", "finite"),
        ("give content", "wrong_type", "content must be"),
        ("give done", "wrong_type", "done must be True or False"),
        ("give bytes", "not_sendable", "serialize"),
        ("give large", "not_sendable", "message of"),
    ],
)
async def test_an_error_is_an_answer_and_the_process_goes_on(
    action: str, reason: str, said: str
) -> None:
    async with pool_of() as pool:
        one, two = [(await pool.open(None, 0))[0] for _ in range(2)]
        pid = (await two.step(told("where"))).content
        with pytest.raises(EnvironmentFailed, match=said) as caught:
            await one.step(told(action))
        assert caught.value.reason == reason and pool.errors == {reason: 1}
        assert (await two.step(told("where"))).content == pid


@pytest.mark.parametrize(
    ("action", "content"),
    [
        ("give tokens", [3, 4]),
        ("give messages", [{"role": "tool", "content": "x"}]),
        ("print [1, 2]", "printed"),
    ],
)
async def test_content_comes_as_it_is(action: str, content: object) -> None:
    async with pool_of() as pool:
        one, _ = await pool.open(None, 0)
        assert (await one.step(told(action))).content == content


@pytest.mark.parametrize("action", ["crash", "crash 0", "eat 9000"])
async def test_a_process_that_dies_or_is_out_of_memory_is_replaced(action: str) -> None:
    async with pool_of(memory_mb=3000) as pool:
        one, two = [(await pool.open(None, 0))[0] for _ in range(2)]
        pid = int((await one.step(told("where"))).content)
        with pytest.raises(EnvironmentFailed) as caught:
            await one.step(told(action))
        assert caught.value.reason == ("memory" if action == "eat 9000" else "crash")
        if action != "eat 9000":
            with pytest.raises(EnvironmentFailed, match="has ended"):
                await two.step(told("say x"))
        await one.close()
        await two.close()
        await asyncio.to_thread(wait_until_gone, [pid])
        new, _ = await pool.open(None, 0)
        assert int((await new.step(told("where"))).content) != pid


async def test_a_process_that_says_nothing_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "SILENCE_S", 1.0)
    monkeypatch.setattr(pool_module, "CLOSE_S", 1.0)

    async with pool_of(reset_timeout_s=STEP_S) as pool:
        one, two = [(await pool.open(None, 0))[0] for _ in range(2)]
        calls = [one.step(told("hold 600")), two.step(told("say x"))]
        failed = await asyncio.gather(*calls, return_exceptions=True)
        assert [getattr(one, "reason", one) for one in failed] == ["crash", "crash"]
        assert pool.open_episodes == 0


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ({"verb": "raise", "argument": "no"}, "exception"),
        ({"verb": "sleep", "argument": "600"}, "timeout"),
        ({"verb": "crash"}, "crash"),
        (object(), "not_sendable"),
    ],
)
async def test_a_reset_that_fails_leaves_no_episode(
    reference: Any, reason: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"

    async with pool_of(options={"log": str(log)}, reset_timeout_s=STEP_S) as pool:
        with pytest.raises(EnvironmentFailed) as caught:
            await pool.open(reference, 0)
        assert caught.value.reason == reason and pool.open_episodes == 0
        assert (await pool.open(None, 3))[1].content == "seed 3"
        if reason == "exception":
            assert log.read_text().split() == ["made", "closed", "made"]


async def test_episodes_go_to_the_process_with_the_fewest() -> None:
    async with pool_of(workers=2) as pool:
        episodes = [(await pool.open(None, 0))[0] for _ in range(4)]
        where = [(await one.step(told("where"))).content for one in episodes]
        assert sorted(where.count(pid) for pid in set(where)) == [2, 2]


async def test_closing_ends_calls_and_processes() -> None:
    async with pool_of() as pool:
        one, _ = await pool.open(None, 0)
        pid = int((await one.step(told("where"))).content)
        call = asyncio.create_task(one.step(told("sleep 30")))
        await asyncio.sleep(0.1)
        await pool.close()
        with pytest.raises(EnvironmentFailed, match="closed"):
            await call
        with pytest.raises(EnvironmentFailed, match="closed"):
            await pool.open(None, 0)
        await one.close()
        await asyncio.to_thread(wait_until_gone, [pid])
        assert pid != os.getpid()


async def test_a_task_that_cannot_be_made_is_said_at_the_start() -> None:
    task = schema.TaskConfig(name="tests.support.environments:Missing")
    pool = EnvironmentPool(task, EnvironmentConfig(), weights={}, seed=0)
    with pytest.raises(EnvironmentFailed, match=r"start: .*has no class 'Missing'"):
        await pool.start()
    await pool.close()
