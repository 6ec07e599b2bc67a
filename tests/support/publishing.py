"""A coordinator whose learner and engines are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from async_grpo.config.schema import Config
from async_grpo.runtime.listener import RunListener
from async_grpo.weights.coordinator import Coordinator
from async_grpo.weights.transport import Announcement, Receipt, Staged, TokenSequence
from tests.support.listener import RecordingListener

PROMPT, RESPONSE = [1, 2, 3], [4, 5]


def config(
    *,
    self_check: bool = False,
    overlap: bool = True,
    acknowledge_s: float = 5.0,
    every: int = 1,
    verify_every: int = 0,
    group_timeout_s: float | None = None,
) -> Config:
    return Config.model_validate(
        {
            "run": {"total_steps": 9},
            "model": {"path": "m"},
            "rollout": {"group_timeout_s": group_timeout_s},
            "replay": {"max_staleness": every - 1},
            "weight_sync": {
                "self_check": self_check,
                "overlap": overlap,
                "every_steps": every,
                "verify_every": verify_every,
                "deadlines": {
                    "acknowledge_s": acknowledge_s,
                    "rendezvous_s": 0.1,
                    "bucket_s": 0.05,
                },
            },
        }
    )


def logprobs_of(weight: float, response: list[int]) -> np.ndarray:
    return -weight * np.arange(1, len(response) + 1, dtype=np.float32)


class FakeLearner:
    """Weights are one number; a response's log-probs are minus that number, times its place."""

    def __init__(self, events: list[str], *, moves: float, backend: str) -> None:
        self.events, self.moves, self.backend, self.weight = events, moves, backend, 1.0
        self.groups: list[list[int]] = []
        self.send_error: BaseException | None = None
        self.torn: list[str] = []
        self.at_stage: Callable[[], None] | None = None
        self.streamed = False
        self.verified: list[str] = []

    async def connect(self, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]:
        self.groups.append(tensor_parallel_sizes)
        return [{"group": len(self.groups)} for _ in tensor_parallel_sizes]

    async def rendezvous(self) -> str:
        self.events.append("rendezvous")
        return ""

    async def stage(self, label: str, *, verify: bool, sequences: list[TokenSequence]) -> Staged:
        await asyncio.sleep(0)
        if self.at_stage is not None:
            self.at_stage()
        self.events.append(f"stage {label}")
        if verify:
            self.verified.append(label)
        return Staged(
            self._announcement(label, self.weight),
            [logprobs_of(self.weight, response) for _, response in sequences],
        )

    async def stage_perturbed(
        self, label: str, *, scale: float, sequences: list[TokenSequence]
    ) -> Staged:
        perturbed = self.weight + scale * self.moves
        return Staged(
            self._announcement(label, perturbed),
            [logprobs_of(perturbed, response) for _, response in sequences],
            [logprobs_of(self.weight, response) for _, response in sequences],
        )

    def _announcement(self, label: str, weight: float) -> Announcement:
        return Announcement(label, self.backend, {"weight": weight}, streamed=self.streamed)

    async def send(self, announcement: Announcement) -> str:
        if self.send_error is not None:
            raise self.send_error
        return self.torn.pop(0) if self.torn else ""

    async def release(self) -> None:
        self.events.append("release")

    async def logprobs(self, sequences: list[TokenSequence]) -> list[np.ndarray]:
        return [logprobs_of(self.weight, response) for _, response in sequences]


@dataclass
class FakeEngine:
    """deaf: acknowledges weights and keeps its own. failures: receipts that it gives in turn,
    before it obeys. error: raised instead, for ever.
    """

    actor_id: str
    events: list[str]
    host: str = "h"
    tensor_parallel_size: int = 1
    group: int = 0
    label: str = "unpublished"
    weight: float = 1.0
    deaf: bool = False
    recomputed_tokens: int = 7
    kept_tokens: int = 0
    kv_cache: str = ""
    noise: float = 0.0
    error: BaseException | None = None
    connecting: Receipt | BaseException | None = None
    gate: asyncio.Event | None = None
    failures: list[Receipt] = field(default_factory=list)
    busy: int = 0
    received: list[str] = field(default_factory=list)
    scored: list[str] = field(default_factory=list)
    spans: list[list[str]] = field(default_factory=list)

    async def connect(self, payload: dict[str, Any]) -> Receipt:
        if isinstance(self.connecting, BaseException):
            raise self.connecting
        if isinstance(self.connecting, Receipt):
            return self.connecting
        self.group = payload["group"]
        return Receipt(self.label)

    async def receive(self, announcement: Announcement) -> Receipt:
        assert self.group, "it is not connected"
        assert not self.busy, "two weight syncs at once"
        self.busy += 1
        self.events.append(f"{self.actor_id} takes {announcement.label}")
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.error is not None:
                raise self.error
        finally:
            self.busy -= 1
        if self.failures:
            return self.failures.pop(0)
        self.label = announcement.label
        self.received.append(announcement.label)
        if not self.deaf:
            self.weight = announcement.payload["weight"]
        return Receipt(
            self.label,
            seconds={"total": 0.25},
            recomputed_tokens=self.recomputed_tokens,
            kept_tokens=self.kept_tokens,
            kv_cache=self.kv_cache,
        )

    async def attend(self, announcement: Announcement) -> Receipt:
        assert self.group, "it is not in the group"
        self.events.append(f"{self.actor_id} attends {announcement.label}")
        return self.failures.pop(0) if self.failures else Receipt(self.label)

    async def probe_sequences(self) -> list[tuple[list[int], list[int], np.ndarray]]:
        return [(PROMPT, RESPONSE, self._logprobs(RESPONSE))]

    async def score(self, sequences: list[TokenSequence]) -> list[tuple[list[str], np.ndarray]]:
        self.scored.append(self.label)
        labels = self.spans.pop(0) if self.spans else [self.label]
        return [(labels, self._logprobs(response)) for _, response in sequences]

    def _logprobs(self, response: list[int]) -> np.ndarray:
        return logprobs_of(self.weight, response) + np.float32(self.noise) * np.array(
            [1.0, -1.0], np.float32
        )


class Fixture:
    """A coordinator with everything around it faked, and what happened, in order."""

    def __init__(
        self,
        settings: Config | None = None,
        *,
        engines: int = 2,
        backend: str = "shared_memory",
        moves: float = 1.0,
        exact: bool = True,
        listener: RunListener | None = None,
    ) -> None:
        self.events: list[str] = []
        self.learner = FakeLearner(self.events, moves=moves, backend=backend)
        self.members = [FakeEngine(f"a{index}", self.events) for index in range(engines)]
        self.dropped: dict[str, BaseException] = {}
        self.listener = RecordingListener()
        self.notes = self.listener.notes
        self.live_error: BaseException | None = None
        self.coordinator = Coordinator(
            settings or config(),
            learner=self.learner,
            engines=self,
            backend=backend,
            live=self.live,
            exact=exact,
            listener=listener or self.listener,
        )

    def alive(self) -> tuple[FakeEngine, ...]:
        return tuple(self.members)

    async def drop(self, actor_id: str, error: BaseException) -> None:
        self.members = [engine for engine in self.members if engine.actor_id != actor_id]
        self.dropped[actor_id] = error

    async def live(self, version: int, digest: str) -> None:
        if self.live_error is not None and version > 0:
            raise self.live_error
        served = {engine.actor_id: engine.label for engine in self.members if engine.group}
        assert set(served.values()) <= {f"v0.{version}"}, (
            f"v{version} is declared live, engines serve {served}"
        )
        self.events.append(f"live {version}")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


def torn(reason: str = "cut off") -> Receipt:
    return Receipt("v0.0", "torn", reason)
