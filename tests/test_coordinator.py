"""The order of a publication, with a fake learner and fake engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from async_grpo.config.schema import Config
from async_grpo.weights.base import SELF_CHECK, Announcement
from async_grpo.weights.coordinator import Coordinator, SelfCheckFailed

PROMPT, RESPONSE = [1, 2, 3], [4, 5]


def config(*, self_check: bool = False, overlap: bool = True, receive_s: float = 5.0, every: int = 1, dtype: str = "auto") -> Config:
    return Config.model_validate({
        "run": {"total_steps": 9}, "model": {"path": "m", "dtype": dtype}, "replay": {"max_staleness": every - 1},
        "weight_sync": {"self_check": self_check, "overlap": overlap, "every_steps": every, "deadlines": {"receive_s": receive_s}},
    })


class FakeLearner:
    """Weights are one number; a response's log-probs are minus that number, times its place."""

    def __init__(self, events: list[str], *, moves: float = 1.0) -> None:
        self.events, self.moves, self.weight, self.kept = events, moves, 1.0, 1.0
        self.staged: dict[str, float] = {}
        self.groups: list[list[int]] = []
        self.send_error: BaseException | None = None
        self.at_stage: Callable[[], None] | None = None

    async def connect(self, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]:
        self.groups.append(tensor_parallel_sizes)
        return [{"group": len(self.groups)} for _ in tensor_parallel_sizes]

    async def rendezvous(self) -> None:
        self.events.append("rendezvous")

    async def stage(self, label: str) -> Announcement:
        await asyncio.sleep(0)
        if self.at_stage is not None:
            self.at_stage()
        self.events.append(f"stage {label}")
        return Announcement(label, "fake", {"weight": self.weight})

    async def send(self) -> None:
        if self.send_error is not None:
            raise self.send_error

    async def perturb(self, *, scale: float, seed: int) -> None:
        self.kept, self.weight = self.weight, self.weight + scale * self.moves

    async def restore_weights(self) -> None:
        self.weight = self.kept

    async def logprobs(self, sequences: list[tuple[list[int], list[int]]]) -> list[np.ndarray]:
        return [logprobs_of(self.weight, response) for _, response in sequences]


def logprobs_of(weight: float, response: list[int]) -> np.ndarray:
    return -weight * np.arange(1, len(response) + 1, dtype=np.float32)


@dataclass
class FakeEngine:
    actor_id: str
    events: list[str]
    tensor_parallel_size: int = 1
    group: int = 0
    label: str = "unpublished"
    weight: float = 1.0
    deaf: bool = False
    noise: float = 0.0
    error: BaseException | None = None
    gate: asyncio.Event | None = None
    busy: int = 0
    received: list[str] = field(default_factory=list)

    async def connect(self, payload: dict[str, Any]) -> None:
        self.group = payload["group"]

    async def receive(self, announcement: Announcement) -> dict[str, float]:
        assert self.group, "it is not connected"
        assert not self.busy, "two publications at once"
        self.busy += 1
        self.events.append(f"{self.actor_id} takes {announcement.label}")
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.error is not None:
                raise self.error
        finally:
            self.busy -= 1
        self.label = announcement.label
        self.received.append(announcement.label)
        if not self.deaf:
            self.weight = announcement.payload["weight"]
        return {"total": 0.25}

    async def probe_sequences(self) -> list[tuple[list[int], list[int], np.ndarray]]:
        assert self.label == SELF_CHECK
        return [(PROMPT, RESPONSE, logprobs_of(self.weight, RESPONSE) + np.float32(self.noise))]


class Fixture:
    """A coordinator with everything around it faked, and what happened, in order."""

    def __init__(self, settings: Config | None = None, *, engines: int = 2, backend: str = "shared_memory", moves: float = 1.0) -> None:
        self.events: list[str] = []
        self.learner = FakeLearner(self.events, moves=moves)
        self.members = [FakeEngine(f"a{index}", self.events) for index in range(engines)]
        self.dropped: dict[str, BaseException] = {}
        self.live_error: BaseException | None = None
        self.coordinator = Coordinator(settings or config(), learner=self.learner, engines=self, backend=backend, live=self.live)

    def alive(self) -> tuple[FakeEngine, ...]:
        return tuple(self.members)

    async def drop(self, actor_id: str, error: BaseException) -> None:
        self.members = [engine for engine in self.members if engine.actor_id != actor_id]
        self.dropped[actor_id] = error

    async def live(self, version: int, digest: str) -> None:
        if self.live_error is not None and version > 0:
            raise self.live_error
        served = {engine.actor_id: engine.label for engine in self.members if engine.group}
        assert set(served.values()) == {f"v{version}"}, f"v{version} is declared live, engines serve {served}"
        self.events.append(f"live {version}")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_publication_is_staged_received_and_then_live(overlap: bool) -> None:
    async def scenario() -> None:
        run = Fixture(config(overlap=overlap))
        await run.coordinator.start(3)
        run.learner.weight = 2.0
        await run.coordinator.publish(4)
        await run.coordinator.wait()
        assert run.events == [
            "rendezvous", "stage v3", "a0 takes v3", "a1 takes v3", "live 3", "stage v4", "a0 takes v4", "a1 takes v4", "live 4",
        ]
        assert [engine.weight for engine in run.members] == [2.0, 2.0]
        assert run.coordinator.times.count == 1
        assert run.coordinator.times.engines_paused == pytest.approx(0.25)  # of the run, without its start

    asyncio.run(scenario())


def test_with_overlap_the_learner_waits_for_the_one_before_only() -> None:
    async def scenario() -> None:
        run = Fixture()
        await run.coordinator.start(0)
        gate = run.members[0].gate = asyncio.Event()
        await run.coordinator.publish(1)
        assert run.events[-1] == "stage v1", "it returns as soon as the weights are staged"
        await until(lambda: "a0 takes v1" in run.events)
        second = asyncio.create_task(run.coordinator.publish(2))
        await asyncio.sleep(0.01)
        assert "stage v2" not in run.events, "at most one publication is under way: a segment may still be read"
        assert "live 1" not in run.events, "a0 does not serve it yet"
        gate.set()
        await second
        await run.coordinator.wait()
        assert [event for event in run.events if event.startswith(("live", "stage"))] == [
            "stage v0", "live 0", "stage v1", "live 1", "stage v2", "live 2",
        ]

    asyncio.run(scenario())


@pytest.mark.parametrize(("overlap", "backend"), [(False, "shared_memory"), (True, "nccl")])
def test_without_overlap_and_with_nccl_publish_is_complete(overlap: bool, backend: str) -> None:
    async def scenario() -> None:
        run = Fixture(config(overlap=overlap), backend=backend)
        await run.coordinator.start(0)
        await run.coordinator.publish(1)
        assert run.events[-1] == "live 1"

    asyncio.run(scenario())


def test_a_waiter_that_gives_up_leaves_the_publication_alone() -> None:
    async def scenario() -> None:
        run = Fixture()
        await run.coordinator.start(0)
        gate = run.members[0].gate = asyncio.Event()
        await run.coordinator.publish(1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run.coordinator.wait(), 0.01)
        gate.set()
        await run.coordinator.wait()
        assert run.events[-1] == "live 1"

    asyncio.run(scenario())


@pytest.mark.parametrize("late", [True, False])
def test_an_engine_that_fails_or_is_late_is_dropped_and_the_others_go_live(late: bool) -> None:
    async def scenario() -> None:
        run = Fixture(config(receive_s=0.1))
        await run.coordinator.start(0)
        if late:
            run.members[0].gate = asyncio.Event()
        else:
            run.members[0].error = RuntimeError("gone")
        await run.coordinator.publish(1)
        await run.coordinator.wait()
        assert list(run.dropped) == ["a0"]
        if late:
            assert "publishing to a0 took longer than weight_sync.deadlines.receive_s = 0.1 s" in str(run.dropped["a0"])
        assert run.members[0].label == "v1"
        assert run.events[-1] == "live 1"

    asyncio.run(scenario())


def test_an_engine_that_fails_at_the_start_ends_the_run() -> None:
    async def scenario() -> None:
        run = Fixture()
        run.members[1].error = RuntimeError("no such tensor")
        with pytest.raises(RuntimeError, match="no such tensor"):
            await run.coordinator.start(0)
        assert "live 0" not in run.events

    asyncio.run(scenario())


def test_a_failed_send_raises_at_the_next_call() -> None:
    async def scenario() -> None:
        run = Fixture()
        await run.coordinator.start(0)
        run.learner.send_error = RuntimeError("the learner died")
        await run.coordinator.publish(1)
        with pytest.raises(RuntimeError, match="the learner died"):
            await run.coordinator.wait()
        with pytest.raises(RuntimeError, match="the learner died"):
            await run.coordinator.publish(2)
        assert run.events[-1] != "live 1"

    asyncio.run(scenario())


def test_refresh_raises_what_a_publication_under_way_raised() -> None:
    async def scenario() -> None:
        run = Fixture()
        await run.coordinator.start(0)
        run.live_error = RuntimeError("the queue is gone")
        await run.coordinator.publish(1)
        await until(run.coordinator._running.done)
        with pytest.raises(RuntimeError, match="the queue is gone"):
            await run.coordinator.refresh(1)

    asyncio.run(scenario())


def test_no_publication_slips_between_a_newcomers_weights_and_its_admission() -> None:
    async def scenario() -> None:
        run = Fixture()
        await run.coordinator.start(0)
        newcomer = FakeEngine("b0", run.events, gate=asyncio.Event())
        joining = asyncio.create_task(run.coordinator.join(newcomer, lambda: run.members.append(newcomer)))
        await until(lambda: "b0 takes v0" in run.events)
        run.learner.weight = 2.0
        publishing = asyncio.create_task(run.coordinator.publish(1))
        await asyncio.sleep(0.01)
        assert "stage v1" not in run.events, "a publication began while a newcomer was reading the one before"
        newcomer.gate.set()
        await asyncio.gather(joining, publishing)
        await run.coordinator.wait()
        assert newcomer.received == ["v0", "v1"]
        assert newcomer.weight == 2.0

    asyncio.run(scenario())


def test_a_newcomer_that_cannot_take_the_weights_is_not_admitted() -> None:
    async def scenario() -> None:
        run = Fixture(config(receive_s=0.05))
        await run.coordinator.start(0)
        newcomer = FakeEngine("b0", run.events, gate=asyncio.Event())
        with pytest.raises(TimeoutError, match="publishing to b0"):
            await run.coordinator.join(newcomer, lambda: run.members.append(newcomer))
        assert newcomer not in run.members
        await run.coordinator.publish(1)
        await run.coordinator.wait()
        assert run.events[-1] == "live 1", "the lock is free again"

    asyncio.run(scenario())


def test_nccl_forms_a_new_group_when_a_member_is_gone() -> None:
    async def scenario() -> None:
        run = Fixture(engines=3, backend="nccl")
        await run.coordinator.start(0)
        assert run.learner.groups == [[1, 1, 1]]
        await run.coordinator.publish(1)
        assert len(run.learner.groups) == 1, "the same members keep their group"
        run.members.pop(1)
        await run.coordinator.refresh(1)
        assert len(run.learner.groups) == 1, "a member less needs nothing before the next publication"
        await run.coordinator.publish(2)
        assert run.learner.groups[1:] == [[1, 1]]
        assert [engine.group for engine in run.members] == [2, 2]

    asyncio.run(scenario())


def test_nccl_refresh_serves_a_newcomer_and_makes_the_version_live() -> None:
    async def scenario() -> None:
        run = Fixture(config(every=2), backend="nccl")
        await run.coordinator.start(0)
        newcomer = FakeEngine("b0", run.events)
        await run.coordinator.join(newcomer, lambda: run.members.append(newcomer))
        assert newcomer.label == "unpublished"
        assert newcomer not in run.coordinator.serving(), "an evaluation must not ask an engine that holds the first weights"
        # The learner is one step past the last publication: what is sent now is version 1 and has to be live, or nobody gets tickets.
        await run.coordinator.refresh(1)
        assert run.learner.groups[-1] == [1, 1, 1]
        assert [engine.label for engine in run.members] == ["v1"] * 3
        assert newcomer in run.coordinator.serving()
        assert run.events[-1] == "live 1"
        sent = len(run.events)
        await run.coordinator.refresh(1)
        assert len(run.events) == sent, "nothing changed, nothing is sent"

    asyncio.run(scenario())


def test_nccl_newcomer_that_arrives_while_weights_are_staged_waits_for_its_group() -> None:
    async def scenario() -> None:
        run = Fixture(backend="nccl")
        await run.coordinator.start(0)
        newcomer = FakeEngine("b0", run.events)
        run.learner.at_stage = lambda: None if newcomer in run.members else run.members.append(newcomer)
        await run.coordinator.publish(1)
        assert not run.dropped
        assert newcomer.received == [], "it is in no group yet"
        await run.coordinator.publish(2)
        assert newcomer.received == ["v2"]

    asyncio.run(scenario())


def test_self_check_passes_for_honest_engines_and_leaves_the_true_weights() -> None:
    async def scenario() -> None:
        run = Fixture(config(self_check=True))
        measured = await run.coordinator.start(0)
        assert measured["weights/self_check_error"] < 1e-6
        assert measured["weights/self_check_moved"] == pytest.approx(0.1, rel=1e-3)
        assert [engine.received for engine in run.members] == [[SELF_CHECK, "v0"]] * 2
        assert [engine.weight for engine in run.members] == [1.0, 1.0]
        assert SELF_CHECK not in [event.removeprefix("live ") for event in run.events]

    asyncio.run(scenario())


@pytest.mark.parametrize(("dtype", "moves"), [("float32", 1.0), ("bfloat16", 1.0), ("bfloat16", 40.0)])
def test_self_check_finds_an_engine_that_ignores_updates(dtype: str, moves: float) -> None:
    async def scenario() -> None:
        run = Fixture(config(self_check=True, dtype=dtype), moves=moves)
        run.members[1].deaf = True
        with pytest.raises(SelfCheckFailed, match="engine a1 computes"):
            await run.coordinator.start(0)
        assert "live 0" not in run.events

    asyncio.run(scenario())


def test_self_check_allows_rounding_and_looks_harder_when_it_hides_the_test() -> None:
    async def scenario() -> None:
        run = Fixture(config(self_check=True, dtype="bfloat16"), moves=4.0)
        run.members[0].noise = 0.1
        measured = await run.coordinator.start(0)  # the first perturbation moves 0.4, less than twice the tolerance of 0.25
        assert run.members[0].received == [SELF_CHECK, SELF_CHECK, "v0"]
        assert measured["weights/self_check_moved"] == pytest.approx(0.8, rel=1e-3)
        assert run.learner.weight == 1.0

    asyncio.run(scenario())


@pytest.mark.parametrize("noise", [1e-3, float("nan")])
def test_self_check_refuses_wrong_logprobs(noise: float) -> None:
    async def scenario() -> None:
        run = Fixture(config(self_check=True))
        run.members[0].noise = noise
        with pytest.raises(SelfCheckFailed, match="engine a0 computes"):
            await run.coordinator.start(0)

    asyncio.run(scenario())


@pytest.mark.parametrize(("moves", "message"), [(0.0, "too little to tell"), (1e-4, "too little to tell"), (float("nan"), "differ")])
def test_self_check_refuses_a_perturbation_that_shows_nothing(moves: float, message: str) -> None:
    async def scenario() -> None:
        run = Fixture(config(self_check=True), moves=moves)
        with pytest.raises(SelfCheckFailed, match=message):
            await run.coordinator.start(0)

    asyncio.run(scenario())
