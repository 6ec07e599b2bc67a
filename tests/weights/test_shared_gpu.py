"""A GPU that learner and engine share in turns: random lives of a run, in which nothing reads what
sleep has dropped, and no memory is needed twice; and that such a life finds what is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from async_grpo.cluster import learner_group, restart_budget, rollout_actors
from async_grpo.errors import Stalled
from async_grpo.rollout.engine.base import EngineError
from async_grpo.rollout.engine.vllm.engine import VllmEngine
from async_grpo.weights.coordinator import Coordinator
from async_grpo.weights.shared_gpu import Apart, SharedGpu
from tests.support.sleepers import Core, Handle, Life, Rank, Wrong

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses, and doubles that die when Ray kills them."""

    def kill(handle: Handle) -> None:
        handle.target.dead = True
        handle.target._life.card.free("learner.", "rest")

    async def nothing(*_: Any, **__: Any) -> dict[str, Any]:
        return {}

    monkeypatch.setattr(ray, "kill", kill)
    monkeypatch.setattr(rollout_actors, "examine", nothing)
    monkeypatch.setattr(learner_group, "FREED_S", 0.0)
    monkeypatch.setattr(restart_budget, "BACK_OFF_S", (0.0,))
    monkeypatch.setattr(rollout_actors, "PROBE_INTERVAL_S", 0.005)


def lives(first: int, count: int) -> Iterator[Life]:
    for seed in range(first, first + count):
        staleness = seed % 2
        every = 1 + (staleness and seed % 3 == 0)
        yield Life(seed, staleness=staleness, every=every, deaths=0.15, tears=0.1)


async def test_whatever_happens_nothing_is_read_that_sleep_has_dropped() -> None:
    sampled, deaths = set(), 0
    for life in lives(0, 40):
        await life.go()
        sampled |= set(life.tokens)
        deaths += len(life.manager.deaths)
    assert {"v0.1", "v0.5"} <= sampled and deaths > 10


async def test_an_engine_sleeps_in_the_learners_turn_and_goes_on_in_its_own() -> None:
    life = Life(0, staleness=0)
    life._happenings = list
    seen = []
    computes = Rank._computes

    def look(rank: Rank) -> None:
        seen.append(dict(life.card.used))
        computes(rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rank, "_computes", look)
        await life.go()
    assert seen and all(set(one) == {"a0.process", "learner.states", "rest"} for one in seen)
    assert life.lived == [0, 1, 2, 3, 4, 5]


async def _load_before_waking(self: VllmEngine, tags: Any) -> None:
    if tags == ["kv_cache"]:
        tags = None
    elif tags is not None:
        return
    await self._llm.engine_core.wake_up_async(tags)
    self._asleep = False


async def _label_after_waking(self: VllmEngine, label: str) -> None:
    await self._llm.resume_generation() if not self._asleep else await self._wake_up(["kv_cache"])
    self._mixed = False
    for _ in range(20):
        await self._llm._alive()
    await self._set_label(label)
    self._steady.set()


async def _without_dropping_caches(self: VllmEngine) -> int:
    self._steady.clear()
    await self._llm.pause_scheduler_async(mode="keep", clear_cache=False)
    self._llm.unmap()
    self._asleep = True
    return 0


async def _pause_alone(self: VllmEngine) -> int:
    self._steady.clear()
    await self._llm.sleep_async(0, "keep")
    self._asleep = True
    return 0


async def _wake_in_the_middle(self: VllmEngine) -> None:
    if self._asleep:
        await self._wake_up(None)
        self._steady.set()


async def _never_woken(self: Coordinator[Any], version: int) -> None:
    self._probe.raise_findings()


async def _no_sleep(self: Any) -> None: ...


@pytest.mark.parametrize(
    ("where", "name", "instead", "first"),
    [
        (VllmEngine, "_wake_up", _load_before_waking, 0),
        (VllmEngine, "_go_on", _label_after_waking, 0),
        (VllmEngine, "sleep", _without_dropping_caches, 0),
        (VllmEngine, "sleep", _pause_alone, 0),
        (VllmEngine, "wake", _wake_in_the_middle, 18),
        (SharedGpu, "turn", Apart.turn, 0),
        (rollout_actors.ActorManager, "sleep", _no_sleep, 0),
        (rollout_actors.ActorManager, "wake", _no_sleep, 3),
        (learner_group.LearnerGroup, "give_back", _no_sleep, 0),
        (learner_group.LearnerGroup, "take_back", _no_sleep, 0),
        (Coordinator, "refresh", _never_woken, 16),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
async def test_a_life_finds_what_is_left_out(
    monkeypatch: pytest.MonkeyPatch, where: type, name: str, instead: Any, first: int
) -> None:
    """first: a life that finds it soon. What happens when differs with the machine, and the rarest
    is found by one life of fifteen.
    """
    monkeypatch.setattr(where, name, instead)
    with pytest.raises((Wrong, AssertionError, EngineError, Stalled, TimeoutError)):
        for life in lives(first, 300):
            await life.go()


async def test_what_vllm_does_and_the_double_too() -> None:
    """Waking weights brings back those of before, and a partial wake resumes nothing."""
    life = Life(0, staleness=0)
    core = Core("a", life)
    core.held = 7.0
    core.ask("r", "s")
    await core.sleep_async(1, "keep")
    assert core.held is None and core.paused and core.requests == {"r": None}
    assert not await core.wake_up_async(["weights"]) and core.held == 7.0 and core.paused
    assert not await core.wake_up_async(["weights"]), "a second time does nothing"
    assert await core.wake_up_async(["kv_cache"]) and not core.paused
