"""Micro-batches prepared ahead, and an update that never waits for its device between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from async_grpo.learner.prefetch import ahead, on_device
from tests.support.learners import make_case, make_config, open_learner, split
from tests.support.models import write_model

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
READS = (
    *("item", "tolist", "numpy", "cpu", "__int__"),
    *("__float__", "__bool__", "__index__", "__array__"),
)
"""Methods of a tensor that give a value of it to Python."""
LOOKS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")
"""Operations whose result, or its shape, depends on values: on a GPU somebody waits for them."""


def test_items_come_in_order_and_one_is_prepared_meanwhile() -> None:
    begun: list[int] = []
    prepared = [threading.Event() for _ in range(4)]

    def prepare(number: int) -> int:
        begun.append(number)
        prepared[number].set()
        return 10 * number

    seen = []
    for value in ahead(prepare, range(4), device=GPU):
        seen.append(value)
        following = len(seen)
        if following < 4:
            assert prepared[following].wait(5), "the next one waits for this one"
        assert begun == list(range(min(following + 1, 4))), "no more than one ahead"
    assert seen == [0, 10, 20, 30]
    assert list(ahead(prepare, [], device=GPU)) == []


def test_on_a_cpu_each_comes_in_turn() -> None:
    begun: list[int] = []
    items = ahead(lambda number: begun.append(number) or number, range(3), device=CPU)
    assert next(items) == 0 and begun == [0]
    assert list(items) == [1, 2]


def test_an_error_comes_at_its_item() -> None:
    def prepare(number: int) -> int:
        if number == 1:
            raise ValueError("row 1")
        return number

    items = ahead(prepare, range(3), device=GPU)
    assert next(items) == 0
    with pytest.raises(ValueError, match="row 1"):
        next(items)


def test_a_caller_that_leaves_leaves_no_thread() -> None:
    items = ahead(lambda number: number, range(100), device=GPU)
    assert next(items) == 0
    items.close()
    deadline = time.monotonic() + 5
    while any("async_grpo-packing" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_on_the_cpu_nothing_is_copied() -> None:
    array = np.arange(5)
    tensor = on_device(array, torch.device("cpu"))
    array[0] = 7
    assert tensor[0] == 7


@pytest.mark.gpu
def test_on_a_gpu_the_copy_is_asynchronous_and_right() -> None:
    array = np.random.default_rng(0).integers(0, 100, 10_000_000)
    tensor = on_device(array, torch.device("cuda:0"))
    assert torch.equal(tensor.cpu(), torch.from_numpy(array))


class Counted(TorchDispatchMode):
    """Counts operations that a GPU's caller would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def note(self, name: str) -> None:
        self.found[name] = self.found.get(name, 0) + 1

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name in LOOKS:
            self.note(name)
        if name.startswith("index") and any(
            isinstance(one, torch.Tensor) and one.dtype == torch.bool
            for arg in args
            if isinstance(arg, list | tuple)
            for one in arg
        ):
            self.note("index by a mask")
        return function(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """Count reads of values, while the block runs, by what made them."""
    mode = Counted()

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            mode.note(name)
            return method(self, *args, **kwargs)

        return call

    with monkeypatch.context() as patch, mode:
        for name in READS:
            patch.setattr(torch.Tensor, name, counting(name, getattr(torch.Tensor, name)))
        yield mode


def test_the_counting_sees_what_a_gpu_would_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(4.0)
    with counted(monkeypatch) as mode:
        int(values.max())
        values.tolist()
        values[values > 1]
        values.nonzero()
        bool(values.sum() > 0)
    assert mode.found.keys() >= {"tolist", "nonzero", "__bool__", "index by a mask"}
    assert mode.found.keys() & {"__int__", "_local_scalar_dense"}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"importance": {"level": "none"}, "anchor": "behavior", "use_kl_loss": False},
    "every term": {},
    "rejection": {
        "importance": {"level": "sequence", "normalize": True},
        "rejection": [
            {"score": "w", "reduce": "mean", "lower": 0.5},
            {"score": "k3", "reduce": "max", "upper": 2.0},
        ],
        "opsm_delta": 0.1,
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_an_update_reads_no_value_per_micro_batch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2 and of 6 micro-batches: as many reads, for loss and gradient norm at the end."""
    models = {"plain": write_model(tmp_path / "model")}
    config = make_config(
        model={"path": models["plain"]},
        learner={"zero_stage": 1, "tokens_per_micro_batch": 512, "lr": 1e-4},
        algorithm=VARIANTS[name],
    )
    found = []
    case = make_case(models["plain"])
    with open_learner(config, models, case) as learner:
        for parts in (2, 6):
            learner.prepare(case.plan([split(range(len(case.updates[0])), parts)]))
            with counted(monkeypatch) as mode:
                learner.train(case.values, 0.0)
            found.append(mode.found)
    assert found[0] == found[1]
    assert sum(found[0].values()) < 40, "loss, gradient norm, optimizer"
