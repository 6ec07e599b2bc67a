"""The table of transports: the only place that knows a transport by its name."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.utils.import_utils import resolve_obj_by_qualname

from async_grpo.config.schema import Config
from async_grpo.config.transports import TRANSPORTS, automatic
from async_grpo.rollout.engine.choice import ENGINE
from async_grpo.rollout.engine.vllm import worker
from async_grpo.rollout.engine.vllm.arguments import engine_arguments, transfer_name
from async_grpo.weights.transport import WeightSender
from tests.support.models import ModuleOwner
from tests.support.nccl_sides import make_sender

PACKAGE = Path(__file__).resolve().parents[2] / "async_grpo"


def compared(tree: ast.AST) -> list[int]:
    """Lines that compare with, look up or match a transport's name."""
    lines = []
    for node in ast.walk(tree):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Compare | ast.MatchValue | ast.Subscript):
            parts = [node]
        elif isinstance(node, ast.Dict):
            parts = [key for key in node.keys if key is not None]
        leaves = [leaf for part in parts for leaf in ast.walk(part)]
        if any(isinstance(leaf, ast.Constant) and leaf.value in TRANSPORTS for leaf in leaves):
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    "source",
    [
        'if backend == "nccl": pass',
        'x = config.weight_sync.backend in ("auto", "ipc")',
        'x = {"shared_memory": 1}[backend]',
        'x = TRANSPORTS["nccl"].pushes',
        'match backend:\n    case "ipc":\n        pass',
    ],
)
def test_a_comparison_with_a_transports_name_is_found(source: str) -> None:
    assert compared(ast.parse(source))


def test_nobody_compares_a_transports_name() -> None:
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := compared(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert found == {}, "ask a trait of config.transports instead"


def test_every_transport_has_its_two_halves() -> None:
    for name, transport in TRANSPORTS.items():
        module, _, half = transport.sender.partition(":")
        sender = getattr(import_module(module), half) if module else ENGINE.pushing_sender()
        assert WeightSender in sender.__mro__ and bool(module) != transport.pushes
        registered = WeightTransferEngineFactory._registry[transfer_name(name)]
        assert registered().__module__ == worker.__name__


def test_vllm_finds_the_extension_of_its_workers() -> None:
    config = Config.model_validate({"run": {"total_steps": 1}, "model": {"path": "m"}})
    arguments = engine_arguments(
        config, model_dir="m", device="cpu", backend="shared_memory", seed=1
    )
    found = resolve_obj_by_qualname(arguments["worker_extension_cls"])
    assert found is worker.WorkerExtension


@pytest.mark.parametrize(
    ("device", "colocated", "name"),
    [("cpu", False, "shared_memory"), ("cuda", True, "ipc"), ("cuda", False, "nccl")],
)
def test_auto_means(device: str, colocated: bool, name: str) -> None:
    assert automatic(device=device, colocated=colocated) == name


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_the_copy_apart_is_allocated_once_until_it_is_released(
    monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """The self-check reserves it for each of its perturbations."""
    from async_grpo.weights.ipc import IpcSender

    owner = ModuleOwner(torch.nn.Linear(3, 2))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 2**30))
    sender = IpcSender(owner) if transport == "ipc" else make_sender(owner)
    sender.reserve()
    first = sender._apart
    assert first is not None
    sender.reserve()
    assert sender._apart is first
    sender.release()
    assert sender._apart is None


def test_the_copy_that_another_process_maps_lies_in_no_expandable_segment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch reads the whole setting anew each time, so the rest of it is said again."""
    from async_grpo.weights.ipc import IpcSender

    given, wanted = (f"max_split_size_mb:512,expandable_segments:{x}" for x in ("True", "False"))
    said: list[Any] = []
    empty = torch.empty
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", given)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 2**30))
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    sender = IpcSender(ModuleOwner(torch.nn.Linear(3, 2)))
    monkeypatch.setattr(torch, "empty", lambda *n, **kinds: said.append(n) or empty(*n, **kinds))
    nbytes = sender._allocate().nbytes
    assert said == [wanted, (nbytes,), given]
