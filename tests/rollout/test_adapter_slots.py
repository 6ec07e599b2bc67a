"""An engine's adapters by version: a request keeps the one that it began with, and none that is in
use is dropped. The engine is a real front end, around a vLLM that only notes what it is told.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.config.schema import Deadlines
from async_grpo.rollout.engine.base import Completion, Sampling
from async_grpo.rollout.engine.vllm.adapters import Adapters
from async_grpo.rollout.engine.vllm.engine import VllmEngine
from async_grpo.weights.transport import UNPUBLISHED, Announcement, Receipt

PROMPT, TOKENS, LATE_S = [5, 6, 7], 4, 10.0
SCHEDULES = 300


class Llm:
    """vLLM's front end and its one worker. Requests run until they are told to end; `failure` is
    what the next load comes to. It has no way to pause.
    """

    def __init__(self, slots: int) -> None:
        self.slots, self.failure = slots, ""
        self.loaded: dict[int, str] = {}  # label of each adapter
        self.numbers: list[int] = []  # of all loads
        self.running: dict[str, asyncio.Event] = {}
        self.used: dict[str, int] = {}
        self.most = 0
        self.engine_core = SimpleNamespace(sleep_async=self._sleep, wake_up_async=self._wake)
        self.output_processor = SimpleNamespace(external_req_ids={}, request_states={})

    async def generate(
        self, prompt: Any, params: Any, name: str, *, lora_request: Any
    ) -> AsyncIterator[Any]:
        number = 0 if lora_request is None else lora_request.lora_int_id
        assert lora_request is None or self.loaded[number] == lora_request.lora_name
        ends = self.running[name] = asyncio.Event()
        self.used[name] = number
        try:
            await ends.wait()
            assert not number or number in self.loaded, "its adapter was dropped"
            yield _final(params.n, len(prompt["prompt_token_ids"]))
        finally:
            del self.running[name], self.used[name]

    async def collective_rpc(self, method: str, args: Any) -> list[dict[str, str]]:
        assert method == "take_publication"
        payload, (number, kept) = args
        await asyncio.sleep(0)
        assert number not in self.numbers, "every load has a number of its own"
        self.numbers.append(number)
        for other in set(self.loaded) - set(kept):
            del self.loaded[other]
        assert set(self.used.values()) - {0} <= set(self.loaded)
        assert len(self.loaded) < self.slots
        if self.failure:
            failure, self.failure = self.failure, ""
            return [{"failure": failure, "reason": "so"}]
        self.loaded[number] = payload["label"]
        self.most = max(self.most, len(self.loaded))
        return [{}]

    async def update_weight_version(self, label: str) -> None: ...

    async def _sleep(self, level: int, mode: str) -> None: ...

    async def _wake(self, tags: Any) -> bool:
        assert tags is None
        return True


def _final(n: int, length: int) -> Any:
    """What vLLM returns in the end; its own label of the tokens is that of the engine's start."""
    tokens, logprobs = [9] * TOKENS, [-1.0] * TOKENS
    one = {
        "token_ids": tokens,
        "logprobs": SimpleNamespace(logprobs=logprobs, token_ids=tokens),
        "finish_reason": "length",
        "weight_versions": [SimpleNamespace(version=UNPUBLISHED, start=0, end=TOKENS)],
        "routed_experts": None,
    }
    of_prompt = {"start_indices": list(range(length)), "logprobs": [-1.0] * length}
    return SimpleNamespace(
        outputs=[SimpleNamespace(index=index, **one) for index in range(n)],
        metrics=SimpleNamespace(arrival_time=1.0, first_token_latency=1.0),
        num_cached_tokens=0,
        prompt_logprobs=SimpleNamespace(**of_prompt, token_ids=[9] * length),
    )


class Life:
    """An engine with the requests and the weight syncs of one test."""

    def __init__(self, slots: int, *, acknowledge_s: float = LATE_S) -> None:
        self.llm, self._number = Llm(slots), 0
        self.engine = VllmEngine(
            self.llm,  # type: ignore[arg-type]
            stop_token_ids=[1],
            kv_cache="recompute",
            deadlines=Deadlines(acknowledge_s=acknowledge_s),
            adapters=Adapters(slots),
        )
        self.engine.serving = UNPUBLISHED

    async def begin(self, *, n: int = 1) -> tuple[str, asyncio.Task[list[Completion]]]:
        """A request that runs; its name."""
        self._number += 1
        name = f"q{self._number}"
        sampling = Sampling(n=n, max_tokens=TOKENS, temperature=1.0)
        task = asyncio.create_task(self.engine.generate(PROMPT, sampling, name=name))
        await until(lambda: name in self.llm.running)
        return name, task

    def end(self, name: str) -> None:
        self.llm.running[name].set()

    async def receive(self, label: str) -> Receipt:
        return await self.engine.receive(Announcement(label, "shared_memory", {"label": label}))

    @property
    def adapters(self) -> list[str]:
        return list(self.llm.loaded.values())


async def until(condition: Any) -> None:
    async with asyncio.timeout(LATE_S):
        while not condition():
            await asyncio.sleep(0)


def labels_of(completions: list[Completion]) -> list[Any]:
    return [one.labels for one in completions]


async def test_a_request_keeps_the_adapter_that_it_began_with() -> None:
    life = Life(3)
    assert (await life.receive("v0.0")).serving == "v0.0" == life.engine.serving
    old, first = await life.begin(n=2)
    receipt = await life.receive("v0.1")
    assert (receipt.failure, receipt.recomputed_tokens, receipt.kept_tokens) == ("", 0, 0)
    assert receipt.seconds["pause"] == receipt.seconds["resume"] == 0.0 < receipt.seconds["load"]
    assert not life.engine.paused
    new, second = await life.begin()
    life.end(new)
    life.end(old)
    assert labels_of(await first) == [[("v0.0", 0, TOKENS)]] * 2
    assert labels_of(await second) == [[("v0.1", 0, TOKENS)]]
    assert [one.salt for one in first.result()] == ["v0.0"] * 2


async def test_partial_responses_have_their_requests_label() -> None:
    life = Life(3)
    await life.receive("v0.0")
    name, task = await life.begin()
    await life.receive("v0.1")
    state = SimpleNamespace(
        parent_req=None,
        detokenizer=SimpleNamespace(output_token_ids=[8, 9]),
        logprobs_processor=SimpleNamespace(
            logprobs=SimpleNamespace(logprobs=[-1.0, -2.0]), num_logprobs=0
        ),
        sampling_mask_chunks=[],
        weight_version_starts=[(UNPUBLISHED, 0)],
        request_index=0,
    )
    life.llm.output_processor.external_req_ids[name] = ["one"]
    life.llm.output_processor.request_states["one"] = state
    assert labels_of([*life.engine.so_far(name).values()]) == [[("v0.0", 0, 2)]]
    life.end(name)
    await task


async def test_a_score_has_the_adapter_that_is_served() -> None:
    life = Life(2)
    await life.receive("self-check")
    scoring = asyncio.create_task(life.engine.score([(PROMPT, [8, 9])]))
    await until(lambda: life.llm.running)
    await life.receive("v0.0")
    assert [*life.llm.used.values()] == life.llm.numbers[:1]
    life.end(next(iter(life.llm.running)))
    [(labels, _)] = await scoring
    assert set(labels) == {"self-check"}


async def test_before_the_first_weight_sync_there_is_no_adapter() -> None:
    """A request without one goes on so, and takes no slot."""
    life = Life(2)
    name, task = await life.begin()
    assert life.llm.used == {name: 0}
    for version in range(4):
        assert (await life.receive(f"v0.{version}")).serving == f"v0.{version}"
    life.end(name)
    assert labels_of(await task) == [[(UNPUBLISHED, 0, TOKENS)]]


async def test_full_of_adapters_in_use_it_waits_for_a_request_to_end() -> None:
    life = Life(2)
    await life.receive("v0.0")
    name, task = await life.begin()
    await life.receive("v0.1")
    receiving = asyncio.create_task(life.receive("v0.2"))
    await asyncio.sleep(0.01)
    assert not receiving.done() and life.engine.serving == "v0.1"
    meanwhile, later = await life.begin()
    life.end(name)
    receipt = await asyncio.wait_for(receiving, LATE_S)
    assert receipt.serving == "v0.2" and receipt.seconds["total"] == 0 < receipt.seconds["load"]
    assert life.adapters == ["v0.1", "v0.2"]
    life.end(meanwhile)
    assert labels_of(await later) == [[("v0.1", 0, TOKENS)]] and await task


async def test_a_cancelled_request_gives_its_adapter_back() -> None:
    life = Life(2)
    await life.receive("v0.0")
    _, task = await life.begin()
    await life.receive("v0.1")
    receiving = asyncio.create_task(life.receive("v0.2"))
    await asyncio.sleep(0.01)
    assert not receiving.done()
    task.cancel()
    assert (await asyncio.wait_for(receiving, LATE_S)).serving == "v0.2"
    assert task.cancelled()


async def test_no_request_that_ends_is_a_deadline() -> None:
    life = Life(2, acknowledge_s=0.05)
    await life.receive("v0.0")
    name, task = await life.begin()
    await life.receive("v0.1")
    receipt = await life.receive("v0.2")
    assert receipt.failure == "torn" and "responses used all 2 adapters" in receipt.reason
    assert life.engine.serving == "v0.1" and life.adapters == ["v0.0", "v0.1"]
    life.end(name)
    await task


async def test_what_is_dropped_goes_by_use_and_not_by_age() -> None:
    life = Life(3)
    await life.receive("v0.0")
    name, task = await life.begin()
    for version in (1, 2, 3):
        await life.receive(f"v0.{version}")
    assert life.adapters == ["v0.0", "v0.2", "v0.3"]
    life.end(name)
    assert labels_of(await task) == [[("v0.0", 0, TOKENS)]]
    await life.receive("v0.4")
    assert life.adapters == ["v0.3", "v0.4"]


@pytest.mark.parametrize("failure", ["torn", "mismatch", "names"])
async def test_a_load_that_fails_changes_nothing(failure: str) -> None:
    life = Life(3)
    await life.receive("v0.0")
    life.llm.failure = failure
    receipt = await life.receive("v0.1")
    assert (receipt.failure, receipt.reason, receipt.serving) == (failure, "so", "v0.0")
    assert not life.engine.paused
    name, task = await life.begin()
    life.end(name)
    assert labels_of(await task) == [[("v0.0", 0, TOKENS)]]
    assert (await life.receive("v0.1")).serving == "v0.1"


async def test_an_adapter_that_comes_while_the_engine_sleeps_is_served_when_it_wakes() -> None:
    life = Life(3)
    await life.receive("v0.0")
    await life.engine.sleep()
    begins = asyncio.create_task(life.begin())
    await asyncio.sleep(0.01)
    assert life.engine.paused and not life.llm.running
    await life.receive("v0.1")
    name, task = await begins
    life.end(name)
    assert labels_of(await task) == [[("v0.1", 0, TOKENS)]] and not life.engine.paused


async def test_a_newcomer_serves_what_came_last() -> None:
    """After the test weight syncs of its check, which have one label and two adapters."""
    life = Life(2)
    for label in ("self-check", "self-check", "v0.7"):
        await life.receive(label)
    assert len(set(life.llm.numbers)) == 3
    name, task = await life.begin()
    life.end(name)
    assert labels_of(await task) == [[("v0.7", 0, TOKENS)]]


async def test_an_older_version_is_refused() -> None:
    life = Life(2)
    await life.receive("v0.3")
    with pytest.raises(ValueError, match=r"version v0.2 was announced to an engine that serves"):
        await life.receive("v0.2")


async def random_schedule(seed: int) -> int:
    """Requests that begin, end and are cancelled around weight syncs, some of which fail. The
    double asserts that no adapter in use is dropped and no slot is missing. Returns the most
    adapters that were held.
    """
    draw = random.Random(seed)
    life, version = Life(draw.randint(2, 4)), 0
    running: dict[str, tuple[str, asyncio.Task[list[Completion]]]] = {}
    receiving: asyncio.Task[Receipt] | None = None

    async def ended(name: str) -> None:
        label, task = running.pop(name)
        life.end(name)
        assert labels_of(await task) == [[(label, 0, TOKENS)]]

    await life.receive("v0.0")
    for _ in range(draw.randint(5, 40)):
        what = draw.choice(["begin", "begin", "end", "cancel", "receive", "receive", "fail"])
        if what == "begin":
            before = life.engine.serving
            name, task = await life.begin()
            label = life.llm.loaded[life.llm.used[name]]
            assert label in (before, life.engine.serving)
            running[name] = label, task
        elif running and what == "end":
            await ended(draw.choice([*running]))
        elif running and what == "cancel":
            _, task = running.pop(draw.choice([*running]))
            task.cancel()
            await asyncio.wait({task})
        elif what in ("receive", "fail") and (receiving is None or receiving.done()):
            if receiving is not None:
                receiving.result()
            life.llm.failure = "torn" if what == "fail" else ""
            version += 1
            receiving = asyncio.create_task(life.receive(f"v0.{version}"))
        for _ in range(draw.randint(0, 3)):
            await asyncio.sleep(0)
    for name in [*running]:
        await ended(name)
    if receiving is not None:
        await asyncio.wait_for(receiving, LATE_S)
    assert life.engine.serving in life.adapters
    return life.llm.most


@pytest.mark.timeout(60)
async def test_random_schedules() -> None:
    most = [await random_schedule(seed) for seed in range(SCHEDULES)]
    assert max(most) == 4 and min(most) <= 2
