"""DeepSpeed as the learner's backend.

Runs in: learner ranks. Hides DeepSpeed: its engine, its ZeRO stages, what ZeRO-3 makes of the
parameters that it divides, its mean over ranks, which the factor `world_size` undoes. DeepSpeed is
imported inside functions, because it chooses its accelerator when imported.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from async_grpo.config.schema import Config
from async_grpo.learner.backend.base import RunnableModel, WholeModel
from async_grpo.learner.backend.deepspeed import files
from async_grpo.learner.backend.deepspeed.settings import deepspeed_config, reference_config
from async_grpo.learner.backend.process_group import join, prepare_gpu
from async_grpo.learner.division import WHOLE, Division
from async_grpo.learner.experts import blocks
from async_grpo.learner.model import PolicyModel
from async_grpo.learner.packing import Packed


class ZeroDivision(Division):
    """The division of ZeRO-3. What it has not divided counts as whole."""

    sharded = True

    def full_shape(self, parameter: Tensor) -> tuple[int, ...]:
        """See `Division`."""
        return tuple(getattr(parameter, "ds_shape", parameter.shape))

    def gathered(
        self, parameters: Sequence[nn.Parameter], *, modify: bool = False
    ) -> AbstractContextManager[None]:
        """See `Division`."""
        import deepspeed

        return deepspeed.zero.GatheredParameters(
            list(parameters), modifier_rank=0 if modify else None
        )


@contextmanager
def divided(settings: dict[str, Any]) -> Iterator[None]:
    """Inside, a model that transformers loads is divided over the ranks layer by layer: no rank
    ever holds all of it. Collective. settings: DeepSpeed's, of stage 3.
    """
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    kept = HfDeepSpeedConfig(settings)  # transformers looks at it as long as it lives, anywhere
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del kept


def gather_experts_together(hf: nn.Module, division: Division) -> None:
    """Let a block's weights be gathered together: ranks route tokens to different experts, and
    would wait for each other where one needs an expert that another does not.
    """
    from deepspeed.utils import set_z3_leaf_module

    for block in blocks(hf, division):
        if isinstance(block.held, nn.ModuleList):
            set_z3_leaf_module(block.module, True)


@contextmanager
def without_mlflow() -> Iterator[None]:
    """Inside, MLflow is not imported: DeepSpeed does so for its tuner, which nothing here runs, at
    a quarter of the time that a rank takes to start.
    """
    if "mlflow" in sys.modules:
        yield
        return
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["mlflow"]


def start(device: str, *, timeout_s: float) -> None:
    """Join the process group, for DeepSpeed too. timeout_s: of collectives."""
    cpu = device == "cpu"
    if cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    else:
        prepare_gpu(device)
    with without_mlflow():
        import deepspeed

    if cpu:  # on a GPU the list of its operations would probe compilers for seconds
        from deepspeed.ops import __compatible_ops__

        # Otherwise DeepSpeed compiles a shared-memory collective at this point, which needs a
        # compiler and ninja; gloo does the same work.
        __compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed calls collectives by names that torch has deprecated; every call would print a
    # warning.
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    join(device, timeout_s=timeout_s)
    deepspeed.init_distributed(
        dist_backend=dist.get_backend(),
        auto_mpi_discovery=False,
        verbose=False,
        timeout=timedelta(seconds=timeout_s),
    )


class DeepspeedModel:
    """The policy in a DeepSpeed engine."""

    def __init__(self, engine: Any, *, division: Division, grad_clip: float, plain: bool) -> None:
        """plain: without ZeRO, where DeepSpeed neither clips nor measures gradients."""
        self.engine, self.module = engine, engine.module
        self._world_size, self._clip = dist.get_world_size(), grad_clip
        self._plain, self._norm = plain, math.nan
        self._division = division

    def __call__(
        self, packed: Packed, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `RunnableModel`."""
        return self.engine(packed, temperature, with_entropy)

    def backward(self, loss: Tensor) -> None:
        """See `TrainedModel`."""
        self.engine.backward(loss * self._world_size)

    def step(self, lr: float) -> float:
        """See `TrainedModel`."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self._norm = math.nan  # until `clip` has run
        self.engine.step()
        return self._norm if self._plain else float(self.engine.get_global_grad_norm())

    def save(self, directory: str, state: dict[str, Any], *, layout: dict[str, Any]) -> None:
        """See `TrainedModel`."""
        files.save(self.engine, directory, state, layout=layout)

    def load(self, directory: str, *, layout: dict[str, Any]) -> dict[str, Any]:
        """See `TrainedModel`."""
        return files.load(self.engine, directory, layout=layout)

    def bytes_to_save(self, *, only_trained: bool) -> int:
        """See `TrainedModel`."""
        ranks, first = self._world_size, dist.get_rank() == 0
        parameters = list(self.module.parameters())
        trained = sum(self._division.size(one) for one in parameters if one.requires_grad)
        written = sum(
            self._division.size(one) * one.element_size()
            for one in parameters
            if one.requires_grad or not only_trained
        )
        optimizer = first * 8 * trained if self._plain else 12 * trained // ranks
        return optimizer + (written // ranks if self._division.sharded else first * written)

    def clip(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Clip and measure gradients before a plain AdamW step."""
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self._norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._clip))


class DeepspeedBackend:
    """DeepSpeed in one learner rank."""

    def __init__(self, config: Config, *, dtype: torch.dtype, device: str) -> None:
        """Join the group of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and LOCAL_RANK."""
        start(device, timeout_s=config.watchdog.step_timeout_s)
        self._learner, self._device = config.learner, device
        self.division = ZeroDivision() if config.learner.zero_stage == 3 else WHOLE
        ranks = dist.get_world_size()
        self._settings = deepspeed_config(config, dtype=dtype, world_size=ranks, device=device)
        self._frozen = reference_config(dtype=dtype, world_size=ranks, device=device)
        self._engines: list[Any] = []

    def loading(self, *, frozen: bool) -> AbstractContextManager[None]:
        """See `Backend`."""
        if not self.division.sharded:
            return nullcontext()
        return divided(self._frozen if frozen else self._settings)

    def train(self, model: PolicyModel) -> DeepspeedModel:
        """See `Backend`."""
        import deepspeed

        learner = self._learner
        beta1, beta2 = learner.betas
        optimizer = torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=learner.lr,
            betas=(beta1, beta2),
            weight_decay=learner.weight_decay,
            fused=True,  # else temporary tensors of the optimizer's size
        )
        if self.division.sharded:
            gather_experts_together(model.hf, self.division)
        settings = self._settings
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
        engine.train()
        self._engines.append(engine)
        plain = learner.zero_stage == 0
        trained = DeepspeedModel(
            engine, division=self.division, grad_clip=learner.grad_clip, plain=plain
        )
        if plain:
            optimizer.register_step_pre_hook(trained.clip)
        return trained

    def freeze(self, model: PolicyModel) -> RunnableModel:
        """See `Backend`."""
        import deepspeed

        if not self.division.sharded:
            return WholeModel(model.to(torch.device(self._device)))
        engine = deepspeed.initialize(model=model, config=self._frozen)[0]
        engine.eval()
        self._engines.append(engine)
        return engine

    def holders(self) -> Sequence[object]:
        """See `Backend`."""
        return [one for engine in self._engines for one in (engine.module, engine.optimizer)]

    def close(self) -> None:
        """See `Backend`."""
        import deepspeed

        for engine in self._engines:
            engine.destroy()
        self._engines.clear()
        deepspeed.comm.destroy_process_group()
