"""The settings of weight publication in the driver: a coordinator with a fake learner and fake
engines.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from async_grpo.config.schema import Config
from async_grpo.weights import deliveries
from async_grpo.weights.coordinator import Coordinator
from async_grpo.weights.transport import (
    Announcement,
    Receipt,
    Staged,
    TokenSequence,
    fallback_directory,
    resolve_backend,
)
from tests.support.listener import RecordingListener
from tests.support.relay_nodes import RelayNodes
from tests.support.wiring import Wire, recorded_waits, workplace

PROMPT, RESPONSE = [1, 2], [3, 4]


class Parts:
    """Learner, engine and engine set in one, and what they were asked."""

    actor_id, tensor_parallel_size = "a", 1

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.label, self.weight = "", 1.0
        self.learner_runs = asyncio.Event()

    def alive(self) -> list[Parts]:
        return [self]

    async def connect(self, payload: Any) -> Any:
        return [{}] if isinstance(payload, list) else Receipt("")

    async def rendezvous(self) -> str:
        return ""

    async def stage(self, label: str, *, verify: bool, sequences: list[TokenSequence]) -> Staged:
        self.seen.append(("stage", verify, len(sequences)))
        return Staged(self._announced(label, 1.0), [_logprobs(1.0) for _ in sequences])

    async def stage_perturbed(
        self, label: str, *, scale: float, sequences: list[TokenSequence]
    ) -> Staged:
        self.seen.append("perturbed")
        moved = 1.0 + 100 * scale
        one = [_logprobs(moved) for _ in sequences]
        return Staged(self._announced(label, moved), one, [_logprobs(1.0) for _ in sequences])

    def _announced(self, label: str, weight: float) -> Announcement:
        return Announcement(label, "nccl", {"weight": weight})

    async def send(self, announcement: Announcement) -> str:
        return ""

    async def release(self) -> None: ...

    async def logprobs(self, sequences: list[TokenSequence]) -> list[np.ndarray]:
        return [_logprobs(1.0) for _ in sequences]

    async def receive(self, announcement: Announcement) -> Receipt:
        await asyncio.sleep(0.01)
        self.label, self.weight = announcement.label, announcement.payload["weight"]
        return Receipt(self.label, seconds={"total": 0.0})

    async def probe_sequences(self) -> list[tuple[list[int], list[int], np.ndarray]]:
        return [(PROMPT, RESPONSE, _logprobs(self.weight))]

    async def score(self, sequences: list[TokenSequence]) -> list[tuple[list[str], np.ndarray]]:
        return [([self.label], _logprobs(self.weight)) for _ in sequences]


def _logprobs(weight: float) -> np.ndarray:
    return -weight * np.arange(1, 3, dtype=np.float32)


def published(config: Config) -> list[Any]:
    """What a start and three weight syncs ask of learner and engine, whether the learner waits for
    them, and their deadlines.
    """
    return asyncio.run(_published(config))


async def _published(config: Config) -> list[Any]:
    parts, live, graces = Parts(), [], []
    call_all = deliveries.call_all

    async def call(*arguments: Any, grace_s: float | None, **options: Any) -> Any:
        graces.append(grace_s)
        return await call_all(*arguments, grace_s=grace_s, **options)

    async def note_live(version: int, digest: str) -> None:
        live.append(version)

    with recorded_waits() as waits, mock.patch.object(deliveries, "call_all", call):
        coordinator = Coordinator(
            config,
            learner=parts,
            engines=parts,
            backend="nccl",
            live=note_live,
            exact=True,
            listener=RecordingListener(parts.seen),
        )
        await coordinator.start(0)
        for version in (1, 2, 3):
            await coordinator.publish(version)
            parts.seen.append(("live when the learner goes on", list(live)))
        await coordinator.settle()
        await coordinator.close()
    return [parts.seen, live, graces, sorted(waits)]


def relayed(config: Config) -> list[Any]:
    """How two versions reach another node: parts, whether they are files, and what they begin
    from.
    """
    return asyncio.run(_relayed(config))


async def _relayed(config: Config) -> list[Any]:
    seen: list[Any] = []

    def before(node: str, method: str, given: list[Any]) -> None:
        if method == "write":
            seen.append([(bool(part.name), part.base is None) for part in given[0]])

    world = RelayNodes(workplace(), nbytes=128, config=config)
    world.before = before
    with world.patched():
        for value in range(2):
            data = np.zeros(128, np.uint8)
            data[0] = value
            await world.fetch(world.stage(data), "other")
        await world.relays.close()
    return seen


def chosen(config: Config) -> list[str]:
    """How weights are sent on each device."""
    return [
        resolve_backend(config, device=device, colocated=colocated)
        for device, colocated in (("cpu", False), ("cuda", True), ("cuda", False))
    ]


def kept(config: Config) -> str:
    """Where weights lie when memory has no room."""
    return str(fallback_directory(config))


def sent(config: Config) -> list[int]:
    """Bytes that each of two learner ranks copies and sends."""
    from async_grpo.rollout.engine.vllm.nccl import NcclSender

    shares = []
    for rank in range(2):
        owner = SimpleNamespace(
            rank=rank,
            world_size=2,
            device="cpu",
            sharded=False,
            weight_metadata=lambda: [(f"w{i}", (8, 8), "float32") for i in range(4)],
        )
        shares.append(NcclSender.of(owner, config=config, key="wiring")._share.nbytes)
    return shares


def announced(config: Config) -> dict[str, Any]:
    """What engines are told of a version that is pushed to them."""
    import torch

    from async_grpo.rollout.engine.vllm.nccl import NcclSender

    owner = SimpleNamespace(
        rank=0,
        world_size=1,
        device="cpu",
        sharded=False,
        weight_metadata=lambda: [("w", (8, 8), "float32")],
        named_weights=lambda: iter([("w", torch.zeros(8, 8))]),
    )
    sender = NcclSender.of(owner, config=config, key="wiring")
    try:
        sender.connect("127.0.0.1", [1])
        return sender.stage("v0.1", verify=False).payload
    finally:
        sender.close()


DEADLINES = "weight_sync.deadlines"
WIRES = [
    Wire("weight_sync.backend", "nccl", chosen),
    Wire("run.dir", "/tmp/wiring/here", kept, against="/tmp/wiring/there"),
    Wire("weight_sync.delta", "off", relayed),
    Wire("weight_sync.files", f"{workplace()}/weights", relayed),
    Wire("weight_sync.overlap", False, published),
    Wire("weight_sync.delta", "always", announced),
    Wire("weight_sync.backend.nccl.senders", "every_rank", sent),
    Wire("weight_sync.self_check", False, published),
    Wire("weight_sync.verify_every", 2, published),
    Wire(f"{DEADLINES}.rendezvous_s", 71.0, published),
    Wire(f"{DEADLINES}.acknowledge_s", 172.0, published),
    Wire(f"{DEADLINES}.pause_s", 73.0, published),
    Wire(f"{DEADLINES}.bucket_s", 24.0, published),
]
