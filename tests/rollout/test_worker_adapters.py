"""The adapters of an engine's worker, on a double of vLLM's manager; with a real engine see
tests/weights/test_adapter_sync.py.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.weight_transfer import WeightTransferConfig

from async_grpo.rollout.engine.vllm.worker import SharedMemoryEngine, WorkerExtension
from async_grpo.rollout.engine.vllm.worker_adapters import Factors, check_modules, load_adapter
from async_grpo.weights.names import NamesDiffer
from async_grpo.weights.shared_memory import SharedMemorySender
from tests.support import nccl_over_gloo
from tests.support.nccl_sides import GPUS, Receiver, in_thread, make_sender

RANK, IN, OUT = 4, 8, 6
LATE_S = 30.0
LAYERS = ("model.layers.0.q_proj", "model.layers.0.o_proj")


class Manager:
    """What `LoRAModelManager` has of it: layers, packed ones among them, and slots."""

    def __init__(self, slots: int = 2) -> None:
        self.lora_slots, self.lora_config = slots, SimpleNamespace(lora_dtype=torch.float32)
        self.modules = dict.fromkeys(["model.layers.0.qkv_proj", "model.layers.0.o_proj"])
        parts = [f"model.layers.0.{part}_proj" for part in "qkv"]
        self.packed_modules = {"model.layers.0.qkv_proj": parts}
        self.adapters: dict[int, Any] = {}
        self.active: list[int] = []

    def __len__(self) -> int:
        return len(self.adapters)

    def list_adapters(self) -> dict[int, Any]:
        return dict(self.adapters)

    def remove_adapter(self, number: int) -> None:
        del self.adapters[number]

    def add_adapter(self, adapter: Any) -> None:
        self.adapters[adapter.id] = adapter

    def activate_adapter(self, number: int) -> None:
        self.active.append(number)


class Sent:
    """A learner with adapters, as its sender sees it."""

    rank, world_size, device, sharded = 0, 1, "cpu", False

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.tensors = {
            f"base_model.model.{layer}.lora_{part}.weight": torch.randn(shape)
            for layer in LAYERS
            for part, shape in (("A", (RANK, IN)), ("B", (OUT, RANK)))
        }

    def weight_metadata(self) -> list[tuple[str, tuple[int, ...], str]]:
        return [(name, tuple(one.shape), "float32") for name, one in self.tensors.items()]

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()


def metadata_of(*layers: str) -> list[list[Any]]:
    return [[f"base_model.model.{layer}.lora_A.weight", [RANK, IN], "float32"] for layer in layers]


def test_layers_by_themselves_and_packed_take_adapters() -> None:
    model = SimpleNamespace(lora_manager=Manager())
    check_modules(model, metadata_of(*LAYERS))


@pytest.mark.parametrize("name", ["model.layers.1.q_proj", "lm_head", "model.layers.0.qkv_proj"])
def test_modules_that_take_no_adapter_are_named(name: str) -> None:
    model = SimpleNamespace(lora_manager=Manager())
    with pytest.raises(NamesDiffer, match=f"takes no adapters of {name}: set `weight_sync.lora`"):
        check_modules(model, metadata_of(LAYERS[0], name))


def test_names_are_mapped_as_vllm_does_it() -> None:
    mapper = SimpleNamespace(_map_name=lambda name: name.replace("text.", "model."))
    model = SimpleNamespace(
        lora_manager=Manager(), hf_to_vllm_mapper=SimpleNamespace(get_rename_mapper=lambda: mapper)
    )
    check_modules(model, metadata_of("text.layers.0.o_proj"))
    sent = Sent().tensors.items()
    tensors = {name.replace("model.layers", "text.layers"): one for name, one in sent}
    load_adapter(model, tensors, 1, [])
    assert set(model.lora_manager.adapters[1].loras) == set(LAYERS)


def test_what_is_not_kept_goes_first_and_what_is_kept_never() -> None:
    manager = Manager()
    model = SimpleNamespace(lora_manager=manager)
    for number, kept in ((1, []), (2, [1]), (3, [2])):
        load_adapter(model, Sent().tensors, number, kept)
    assert list(manager.adapters) == [2, 3] and manager.active == [1, 2, 3]
    with pytest.raises(RuntimeError, match=r"adapter 4 has no slot beside \[2, 3\]"):
        load_adapter(model, Sent().tensors, 4, [2, 3])
    assert list(manager.adapters) == [2, 3]


class Worker(WorkerExtension):
    """A worker with the product's transfer engine."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(lora_manager=Manager())
        settings = SimpleNamespace(parallel_config=None, model_config=None)
        self.weight_transfer_engine = SharedMemoryEngine(
            WeightTransferConfig(backend="nccl"), settings, torch.device("cpu"), self.model
        )

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        engine = self.weight_transfer_engine
        engine.init_transfer_engine(engine.parse_init_info(info))


@pytest.fixture
def sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[SharedMemorySender, Worker]]:
    """The two halves of shared memory, connected."""
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)  # as vLLM does on CPU
    sender = SharedMemorySender(Sent(), key=f"test-{uuid.uuid4().hex[:8]}", fallback=tmp_path)
    try:
        [payload] = sender.connect("127.0.0.1", [1])
        worker = Worker()
        assert worker.connect_weights(payload) == {}
        yield sender, worker
    finally:
        sender.close()


def test_an_adapter_outlives_the_segment_that_it_came_in(sides: Any) -> None:
    sender, worker = sides
    sent = {name: one.clone() for name, one in sender._owner.tensors.items()}
    assert worker.take_publication(sender.stage("v0.0", verify=True).payload, [1, []]) == {}
    for one in sender._owner.tensors.values():
        one.fill_(7.0)
    for label in ("v0.1", "v0.2"):
        sender.stage(label, verify=False)
    loaded = worker.model.lora_manager.adapters[1]
    for layer in LAYERS:
        for part, held in (("A", loaded.loras[layer].lora_a), ("B", loaded.loras[layer].lora_b)):
            assert torch.equal(held, sent[f"base_model.model.{layer}.lora_{part}.weight"])
        assert loaded.loras[layer].scaling == 1


def test_of_a_torn_or_wrong_publication_nothing_is_loaded(sides: Any) -> None:
    sender, worker = sides
    model = worker.weight_transfer_engine.model
    first = sender.stage("v0.0", verify=True).payload
    assert worker.take_publication(first, [1, []]) == {}
    stale = first | {"sequence": first["sequence"] + 2}
    assert worker.take_publication(stale, [2, []])["failure"] == "torn"
    wrong = first | {"checksums": [one ^ 1 for one in first["checksums"]]}
    assert worker.take_publication(wrong, [3, []])["failure"] == "mismatch"
    assert list(worker.model.lora_manager.adapters) == [1]
    assert worker.weight_transfer_engine.model is model, "it is the target again"


def test_a_segment_that_is_written_meanwhile_is_not_loaded(
    sides: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, worker = sides
    announced, take = sender.stage("v0.0", verify=False).payload, Factors.load_weights

    def overtaken(factors: Factors, weights: Any) -> None:
        take(factors, weights)
        for label in ("v0.1", "v0.2"):
            sender.stage(label, verify=False)

    monkeypatch.setattr(Factors, "load_weights", overtaken)
    assert worker.take_publication(announced, [1, []])["failure"] == "torn"
    assert not worker.model.lora_manager.adapters


@pytest.mark.skipif(GPUS > 0, reason="about the doubles of NCCL")
def test_an_adapter_that_is_pushed_is_loaded_alike(tmp_path: Path) -> None:
    with nccl_over_gloo.installed(tmp_path):
        owner, model = Sent(), SimpleNamespace(lora_manager=Manager())
        sender = make_sender(owner, overlap=True)
        try:
            [payload] = sender.connect("127.0.0.1", [1])
            receiver = Receiver(payload, tmp_path)
            receiver.engine.model = model
            for future in (receiver.join(), in_thread(sender.rendezvous)):
                assert not future.result(LATE_S)
            info = sender.stage("v0.0", verify=True).payload
            taking = in_thread(
                lambda: receiver.engine.take_adapter(info, 1, []), device=receiver.device
            )
            assert sender.send() == ""
            taking.result(LATE_S)
        finally:
            sender.close()
    held = model.lora_manager.adapters[1].loras[LAYERS[1]]
    for part, factor in (("A", held.lora_a), ("B", held.lora_b)):
        name = f"base_model.model.{LAYERS[1]}.lora_{part}.weight"
        assert torch.equal(factor, owner.tensors[name])
    assert receiver.engine.model is model and not receiver.received


def test_a_connection_with_other_layers_is_a_failure_of_names(sides: Any) -> None:
    _, worker = sides
    outcome = worker.connect_weights({"metadata": metadata_of("model.layers.7.q_proj")})
    assert outcome["failure"] == "names" and "model.layers.7.q_proj" in outcome["reason"]
