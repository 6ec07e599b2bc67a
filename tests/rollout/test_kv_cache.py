"""Whether a publication clears the caches of running responses: the rule, and its measurement."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from async_grpo.config.schema import Config
from async_grpo.rollout.engine.vllm import kv_cache
from async_grpo.rollout.engine.vllm.kv_cache import FORGET, SHARE, CacheChoice, cache_mode


class Clock:
    """Time that moves when it is told to, or when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(kv_cache, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def measured(clock: Clock, *, tokens: int, seconds: float) -> CacheChoice:
    """An engine that needed `seconds` to compute `tokens` again."""
    choice = CacheChoice("auto")
    lengths = {"r0": 10, "r1": 3, "waiting": 0}

    async def scenario() -> None:
        choice.resumed(tokens, lambda: dict(lengths))
        await asyncio.sleep(2 * kv_cache.LOOK_S)
        lengths["r0"] += 1
        await asyncio.sleep(2 * kv_cache.LOOK_S)
        clock.now += seconds
        lengths["r1"] += 1  # the last one; what waits has no cache
        await until_measured(choice)

    asyncio.run(scenario())
    return choice


async def until_measured(choice: CacheChoice) -> None:
    async with asyncio.timeout(5):
        while choice._watching is not None:
            await asyncio.sleep(kv_cache.LOOK_S)


@pytest.mark.parametrize(("mode", "clears"), [("recompute", True), ("keep", False)])
def test_a_mode_that_is_set_holds(mode: str, clears: bool) -> None:
    assert CacheChoice(mode).clears(10**9)[0] is clears


def test_what_was_not_measured_is_computed_again() -> None:
    assert CacheChoice("auto").clears(10**9) == (True, "to measure what that costs")


def test_nothing_in_flight_costs_nothing(clock: Clock) -> None:
    choice = measured(clock, tokens=1, seconds=1e9)
    why = "computing 0 tokens again takes 0.0 s, at most 5% of the 1000000000.0 s since the last "
    assert choice.clears(0) == (True, f"{why}weight sync")


def test_the_bound_is_a_share_of_the_time_between_publications(clock: Clock) -> None:
    choice = measured(clock, tokens=1000, seconds=2.0)  # 2 ms a token
    clock.now = 102.0 + 98.0  # 100 s since it went on
    assert choice.clears(int(100 * SHARE / 0.002))[0]
    clears, why = choice.clears(int(100 * SHARE / 0.002) + 1)
    assert not clears
    assert why == (
        "computing 2,501 tokens again takes 5.0 s, more than 5% of the 100.0 s since the last "
        "weight sync"
    )


def test_caches_are_computed_again_after_a_while(clock: Clock) -> None:
    """Where the cost is twice the bound, after as many weight syncs as halve the measurement."""
    choice = measured(clock, tokens=1000, seconds=2.0)
    clock.now = 200.0
    kept = 0
    while not choice.clears(5000)[0]:
        kept += 1
    assert FORGET**kept * 2 <= 1 < FORGET ** (kept - 1) * 2


async def test_a_publication_during_the_measurement_ends_it(clock: Clock) -> None:
    """Computing again that takes longer than the time between publications: at least so long."""
    choice = CacheChoice("auto")

    choice.resumed(1000, lambda: {"r0": 10})
    await asyncio.sleep(kv_cache.LOOK_S)
    clock.now += 30.0
    choice.paused()
    assert not choice.clears(1000)[0], "known at once"


async def test_a_response_that_ends_is_not_waited_for(clock: Clock) -> None:
    choice, lengths = CacheChoice("auto"), {"r0": 10, "r1": 5}

    choice.resumed(100, lambda: dict(lengths))
    await asyncio.sleep(kv_cache.LOOK_S)
    del lengths["r0"], lengths["r1"]
    await until_measured(choice)
    why = "computing 100 tokens again takes 0.0 s, at most 5% of the 0.0 s since the last "
    assert choice.clears(100) == (True, f"{why}weight sync")


def test_seeded_responses_on_cpu_keep_their_caches() -> None:
    plain = Config.model_validate({"run": {"total_steps": 1}, "model": {"path": "a"}})
    seeded = plain.unchecked_copy(
        update={"rollout": plain.rollout.unchecked_copy(update={"seeded": "on"})}
    )
    assert cache_mode(seeded, device="cpu") == "keep"
    assert cache_mode(seeded, device="cuda") == "auto"
    assert cache_mode(plain, device="cpu") == "auto"
