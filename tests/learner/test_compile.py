"""`learner.compile` and `learner.activation_offload`: the same training, in a few graphs, with less
kept on the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from async_grpo.config.schema import Config
from async_grpo.learner import model as model_module
from async_grpo.learner.packing import Packed, pack, response_row
from tests.support.learners import (
    Case,
    assert_close,
    assert_history,
    copy_weights,
    loaded,
    make_case,
    make_config,
    open_learner,
    plain_model,
    reference_losses,
    split,
    train,
)
from tests.support.models import write_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model") / "plain")


def config_of(directory: str, **learner: Any) -> Config:
    settings = {
        "lr": 3e-3,
        "grad_clip": 0.7,
        "weight_decay": 0.1,
        "tokens_per_micro_batch": 64,
        **learner,
    }
    return make_config(model={"path": directory, "reference": directory}, learner=settings)


def packs(seed: int) -> list[Packed]:
    """Packs of all sizes and shapes."""
    draw = np.random.default_rng(seed)
    return [
        pack(
            [
                response_row(
                    draw.integers(3, 99, 4), draw.integers(3, 99, int(draw.integers(2, 20)))
                )
                for _ in range(count)
            ],
            torch.device("cpu"),
        )
        for count in range(1, 9)
    ]


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers_train_as_plain_ones_do_in_a_few_graphs(
    directory: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first traces, differentiates and guards as the other does, without a C++ compiler."""
    monkeypatch.setattr(model_module, "BACKEND", backend)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    case: Case = make_case(directory, n_updates=2)
    history = reference_losses(plain_model(directory), plain_model(directory), case)
    model = plain_model(directory)
    reference_losses(model, plain_model(directory), case)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    config = config_of(directory, compile=True)
    with open_learner(config, {"plain": directory}, case) as learner:
        splits = [
            split(range(len(rows)), parts) for rows, parts in zip(case.updates, (1, 4), strict=True)
        ]
        assert_history(train(learner, case, splits), history)
        assert_close(copy_weights(learner), weights)
        compiled = graphs()
        for packed in packs(0):
            learner.policy(packed, 1.0, False)
        assert graphs() == compiled, "every number of tokens has a graph of its own"
    assert 0 < compiled <= 12, (
        "four parts of a layer, with and without gradients, and for a pack of one token"
    )


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_without_a_compiler_the_start_is_refused(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler.* set learner.compile: false"):
        loaded(directory, gradient_checkpointing=True).compile_layers()


def test_a_model_without_known_layers_is_refused(directory: str) -> None:
    model = loaded(directory, gradient_checkpointing=True)
    model.hf.model.layers = torch.nn.ModuleList()
    with pytest.raises(ValueError, match="qwen2 has no decoder layers that transformers knows"):
        model.compile_layers()


def test_inputs_of_layers_are_kept_in_host_memory_and_nothing_changes(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[Tensor] = []
    real = model_module.save_on_cpu

    class Watched(real):  # type: ignore[misc, valid-type]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            keep = self.pack_hook

            def pack_hook(tensor: Tensor) -> Any:
                moved.append(tensor)
                return keep(tensor)

            self.pack_hook = pack_hook

    monkeypatch.setattr(model_module, "save_on_cpu", Watched)
    packed = packs(1)[5]
    results = []
    for offloads in (False, True):
        model = loaded(directory, gradient_checkpointing=True).train()
        model.offloads = offloads
        logprobs, _ = model(packed, 1.0, False)
        logprobs.sum().backward()
        results.append({name: one.grad for name, one in model.named_parameters()})
        if not offloads:
            assert moved == []
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    names = {one.data_ptr(): name for name, one in model.named_parameters()}
    weights = {names[one.data_ptr()] for one in moved if one.data_ptr() in names}
    assert weights <= {"hf.model.norm.weight"}, "weights of layers are moved"
    layers, hidden = model.hf.config.num_hidden_layers, model.hf.config.hidden_size
    inputs = [one for one in moved if one.shape[-1] == hidden and one.is_floating_point()]
    assert len(inputs) >= layers
    with torch.no_grad():
        moved.clear()
        model(packed, 1.0, False)
    assert moved == []
