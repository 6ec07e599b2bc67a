"""Calls to a rollout actor whose host does not answer, with a double of its Ray handle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from async_grpo.cluster import remote_engine
from async_grpo.cluster.remote_engine import GivenUp, RemoteEngine
from async_grpo.weights.transport import Announcement, Receipt

NEWS = Announcement("v0.1", "shared_memory")


class Handle:
    """A handle whose calls get the next of `answers`: an error is raised, None never comes."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), list[str]()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._answer(name))

    async def _answer(self, name: str) -> Any:
        self.asked.append(name)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return await asyncio.Event().wait() if answer is None else answer


async def same(announcement: Announcement) -> Announcement:
    return announcement


def engine(handle: Handle, localize: Callable[..., Any] = same) -> RemoteEngine:
    return RemoteEngine("a0", 0, "h", 1, handle, localize)


def unavailable() -> ray.exceptions.ActorUnavailableError:
    return ray.exceptions.ActorUnavailableError("its connection broke", None)


@pytest.mark.parametrize(
    "call", ["run", "answer", "connect", "receive", "attend", "score", "sleep", "wake"]
)
async def test_no_call_outlives_an_engine_that_is_given_up(call: str) -> None:
    one = engine(Handle(None))
    arguments = [NEWS] if call in ("connect", "receive", "attend", "score") else []
    asked = asyncio.ensure_future(getattr(one, call)(*arguments))
    await asyncio.sleep(0)
    one.give_up(TimeoutError("no answer to a probe"))
    with pytest.raises(GivenUp, match="no answer to a probe"):
        await asyncio.wait_for(asked, 5)


async def test_bytes_on_their_way_to_a_host_do_not_outlive_its_engine() -> None:
    async def hangs(announcement: Announcement) -> Announcement:
        return await asyncio.Event().wait()

    one = engine(Handle(), hangs)
    asked = asyncio.ensure_future(one.receive(NEWS))
    await asyncio.sleep(0)
    one.give_up(TimeoutError("no answer to a probe"))
    with pytest.raises(GivenUp):
        await asyncio.wait_for(asked, 5)


@pytest.mark.parametrize("error", [TimeoutError("60 s"), ray.exceptions.RayError("dead")])
async def test_a_relay_that_fails_tears_the_publication_and_spares_the_engine(error) -> None:
    async def fails(announcement: Announcement) -> Announcement:
        raise error

    receipt = await engine(Handle(), fails).receive(NEWS)
    assert receipt.failure == "torn" and str(error) in receipt.reason


async def test_a_connection_that_broke_is_no_death(monkeypatch) -> None:
    monkeypatch.setattr(remote_engine, "RETRY_S", 0.0)
    handle = Handle(unavailable(), unavailable(), Receipt("v0.1"), unavailable(), "over")
    one = engine(handle)
    assert (await one.receive(NEWS)).serving == one.acknowledged == "v0.1"
    await one.run()
    assert handle.asked == ["receive"] * 3 + ["run"] * 2
