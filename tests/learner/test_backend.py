"""A second backend behind the learner: plain torch in one process. It trains as the slow loop and
DeepSpeed do; and where it puts parameters away between calls, the learner reaches each of them
through the backend's division.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from async_grpo.config.schema import Config
from async_grpo.learner.backend.base import Backend
from async_grpo.learner.backend.deepspeed.backend import DeepspeedBackend, without_mlflow
from async_grpo.learner.backend.process_group import join
from async_grpo.learner.division import WHOLE, Division
from async_grpo.learner.model import PolicyModel
from async_grpo.learner.packing import Packed
from tests.support.learners import (
    STEP,
    Case,
    assert_close,
    assert_history,
    bitwise,
    copy_weights,
    make_case,
    make_config,
    open_learner,
    plain_model,
    reference_losses,
    run_ranks,
    split,
    train,
    write_neighbour,
)
from tests.support.models import write_model

SPLITS = [split(range(6), 2)] * 2
PROBE = [([5, 6, 7], [8, 9, 10, 11]), ([20, 21], [22, 23, 24])]
Made = Callable[..., Backend]


class PutAway(Division):
    """Parameters that were put away are empty until somebody gathers them."""

    sharded = True

    def __init__(self) -> None:
        self._kept: dict[Tensor, Tensor] = {}

    def put_away(self, parameters: Sequence[nn.Parameter]) -> None:
        for one in parameters:
            self._kept[one] = one.data
            one.data = one.data.new_empty(0)

    def full_shape(self, parameter: Tensor) -> tuple[int, ...]:
        return tuple(self._kept.get(parameter, parameter).shape)

    @contextmanager
    def gathered(
        self, parameters: Sequence[nn.Parameter], *, modify: bool = False
    ) -> Iterator[None]:
        kept = {one: self._kept.pop(one) for one in parameters if one in self._kept}
        for one, data in kept.items():
            one.data = data.clone()
        try:
            yield
        finally:
            for one, data in kept.items():
                one.data = one.data if modify else data
            self.put_away([one for one in parameters if one in kept])


class PlainModel:
    """A model in one process, whole while it computes."""

    def __init__(self, module: PolicyModel, division: Division) -> None:
        self.module, self.division = module, division
        self.parameters = list(module.parameters())
        if isinstance(division, PutAway):
            division.put_away(self.parameters)

    def __call__(
        self, packed: Packed, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        with self.division.gathered(self.parameters):
            return self.module(packed, temperature, with_entropy)


class PlainTrainedModel(PlainModel):
    """With AdamW."""

    def __init__(self, module: PolicyModel, division: Division, config: Config) -> None:
        self.trained = [one for one in module.parameters() if one.requires_grad]
        self.clip = config.learner.grad_clip
        self.optimizer = torch.optim.AdamW(
            self.trained,
            lr=config.learner.lr,
            betas=config.learner.betas,
            weight_decay=config.learner.weight_decay,
            fused=True,
        )
        super().__init__(module.train(), division)

    def backward(self, loss: Tensor) -> None:
        with self.division.gathered(self.parameters):
            loss.backward()

    def step(self, lr: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with self.division.gathered(self.trained, modify=True):
            norm = torch.nn.utils.clip_grad_norm_(self.trained, self.clip)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def save(self, directory: str, state: dict[str, Any], *, layout: dict[str, Any]) -> None:
        Path(directory).mkdir(parents=True)
        with self.division.gathered(self.trained):
            weights = [one.data.clone() for one in self.trained]
        torch.save([weights, self.optimizer.state_dict(), layout, state], f"{directory}/all.pt")

    def load(self, directory: str, *, layout: dict[str, Any]) -> dict[str, Any]:
        weights, optimizer, written, state = torch.load(f"{directory}/all.pt")
        if written != layout:
            raise ValueError(f"{directory} was written with {written}")
        with self.division.gathered(self.trained, modify=True):
            for one, weight in zip(self.trained, weights, strict=True):
                one.data.copy_(weight)
            self.optimizer.load_state_dict(optimizer)
        return state

    def bytes_to_save(self, *, only_trained: bool) -> int:
        return 12 * sum(map(self.division.size, self.trained))


class PlainBackend:
    """One process."""

    def __init__(
        self, config: Config, *, dtype: torch.dtype, device: str, division: Division
    ) -> None:
        join(device, timeout_s=20)
        self.division, self._config = division, config

    def loading(self, *, frozen: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def train(self, model: PolicyModel) -> PlainTrainedModel:
        return PlainTrainedModel(model, self.division, self._config)

    def freeze(self, model: PolicyModel) -> PlainModel:
        return PlainModel(model, self.division)

    def close(self) -> None:
        dist.destroy_process_group()


def say_whether_mlflow_is_there(rank: int, path: str) -> None:
    loaded = [name for name in ("deepspeed", "mlflow") if name in sys.modules]
    Path(path).write_text(" ".join(loaded))


def test_a_rank_imports_deepspeed_without_mlflow(tmp_path: Path) -> None:
    """It would take a quarter of the time that a rank takes to start."""
    run_ranks(say_whether_mlflow_is_there, str(tmp_path / "loaded"), seconds=300, ranks=1)
    assert (tmp_path / "loaded").read_text() == "deepspeed"


def test_mlflow_can_be_imported_after_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    with without_mlflow(), pytest.raises(ImportError):
        importlib.import_module("mlflow")
    assert "mlflow" not in sys.modules
    loaded = ModuleType("mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", loaded)
    with without_mlflow():
        assert importlib.import_module("mlflow") is loaded
    assert sys.modules["mlflow"] is loaded


def plain() -> Made:
    return partial(PlainBackend, division=WHOLE)


def putting_away() -> Made:
    return partial(PlainBackend, division=PutAway())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("models")
    directory = write_model(path / "plain", tied=True)
    return {"plain": directory, "reference": write_neighbour(directory, str(path / "reference"))}


def config_of(models: dict[str, str], **model: Any) -> Config:
    if "lora" not in model:
        model |= {"reference": models["reference"], "reference_refresh_steps": STEP}
    return make_config(model=model, learner={"zero_stage": 0})


def files_of(directory: Path) -> dict[str, Tensor]:
    return {
        f"{path.relative_to(directory)}/{name}": tensor
        for path in directory.rglob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def learn(
    config: Config, models: dict[str, str], case: Case, backend: Callable[[], Made], path: Path
) -> tuple[list[dict[str, float]], dict[str, Tensor], dict[str, Tensor]]:
    """Train a step, look at everything that the learner gives away, save, train another; then load
    and train alike. Returns loss and gradient norm of each update of the first step, the weights
    after it, and whatever else was found.
    """
    found: dict[str, Tensor] = {}
    with open_learner(config, models, case, backend=backend()) as learner:
        history, weights = train(learner, case, SPLITS), copy_weights(learner)
        shapes = [(name, tuple(one.shape)) for name, one in weights.items()]
        assert shapes == [(name, shape) for name, shape, _ in learner.published.weight_metadata()]
        with learner.published.perturbed(scale=0.1, seed=1):
            found |= {f"perturbed/{name}": one for name, one in copy_weights(learner).items()}
        assert bitwise(copy_weights(learner), weights)
        found |= {
            f"probe/{k}": torch.from_numpy(one) for k, one in enumerate(learner.logprobs(PROBE))
        }
        learner.save(str(path / "saved"), {"a": 1})
        learner.export(str(path / "exported"))
        needed = learner.bytes_to_save()
        again, later = train(learner, case, SPLITS), copy_weights(learner)
    assert sum(one.stat().st_size for one in path.rglob("*") if one.is_file()) <= needed
    with open_learner(config, models, case, backend=backend()) as learner:
        assert learner.load(str(path / "saved")) == {"a": 1}
        assert bitwise(copy_weights(learner), weights)
        assert train(learner, case, SPLITS) == again
        assert bitwise(copy_weights(learner), later)
    found |= {f"later/{name}": one for name, one in later.items()} | files_of(path)
    return history, weights, found


def test_another_backend_trains_as_the_slow_loop_and_as_deepspeed(
    models: dict[str, str], tmp_path: Path
) -> None:
    case, slow = make_case(models["plain"], n_updates=2), plain_model(models["plain"])
    expected = reference_losses(slow, plain_model(models["reference"]), case)
    ours, theirs = (
        learn(config_of(models), models, case, made, tmp_path / name)
        for name, made in (("plain", plain), ("deepspeed", lambda: DeepspeedBackend))
    )
    assert_history(ours[0], expected)
    assert_close(ours[1], {name: one.detach() for name, one in slow.named_parameters()})
    assert ours[0] == theirs[0]
    assert bitwise(ours[1], theirs[1]) and bitwise(ours[2], theirs[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [{}, {"lora": {"rank": 4, "alpha": 16.0}}], ids=["weights", "lora"]
)
def test_parameters_are_reached_only_through_the_division(
    model: dict[str, Any], models: dict[str, str], tmp_path: Path
) -> None:
    case = make_case(models["plain"], n_updates=2)
    ours, theirs = (
        learn(config_of(models, **model), models, case, made, tmp_path / name)
        for name, made in (("put_away", putting_away), ("plain", plain))
    )
    assert ours[0] == theirs[0]
    assert bitwise(ours[1], theirs[1]) and bitwise(ours[2], theirs[2])
    layouts = [
        torch.load(tmp_path / name / "saved" / "all.pt")[2] for name in ("put_away", "plain")
    ]
    assert layouts[0] == layouts[1], "what stands under adapters has one fingerprint"
