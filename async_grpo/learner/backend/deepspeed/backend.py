"""DeepSpeed as the learner's backend.

Runs in: learner ranks. Hides DeepSpeed: its engine, its ZeRO stages, its mean over ranks, which the
factor `world_size` undoes.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from async_grpo.config.schema import Config
from async_grpo.learner.backend.deepspeed import files
from async_grpo.learner.backend.deepspeed.division import divided
from async_grpo.learner.backend.deepspeed.process import start
from async_grpo.learner.backend.deepspeed.settings import deepspeed_config, reference_config
from async_grpo.learner.experts import gather_whole
from async_grpo.learner.model import PolicyModel
from async_grpo.learner.packing import Packed


class DeepspeedModel:
    """The policy in a DeepSpeed engine."""

    def __init__(self, engine: Any, *, grad_clip: float, plain: bool) -> None:
        """plain: without ZeRO, where DeepSpeed neither clips nor measures gradients."""
        self.engine, self.module = engine, engine.module
        self._world_size, self._clip = dist.get_world_size(), grad_clip
        self._plain, self._norm = plain, math.nan

    def __call__(
        self, packed: Packed, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `TrainedModel`."""
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

    def save(
        self, directory: str, state: dict[str, Any], *, rank: int, layout: dict[str, Any]
    ) -> None:
        """See `TrainedModel`."""
        files.save(self.engine, directory, state, rank=rank, layout=layout)

    def load(self, directory: str, *, rank: int, layout: dict[str, Any]) -> dict[str, Any]:
        """See `TrainedModel`."""
        return files.load(self.engine, directory, rank=rank, layout=layout)

    def close(self) -> None:
        """See `TrainedModel`."""
        self.engine.destroy()

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
        self.sharded = config.learner.zero_stage == 3
        ranks = dist.get_world_size()
        self._settings = deepspeed_config(config, dtype=dtype, world_size=ranks, device=device)
        self._frozen = reference_config(dtype=dtype, world_size=ranks, device=device)
        self._models: list[Any] = []
        """Engines of frozen models."""

    def loading(self, *, frozen: bool) -> AbstractContextManager[None] | None:
        """See `Backend`."""
        return divided(self._frozen if frozen else self._settings) if self.sharded else None

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
        if self.sharded:
            gather_whole(model.hf)
        settings = self._settings
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
        engine.train()
        plain = learner.zero_stage == 0
        trained = DeepspeedModel(engine, grad_clip=learner.grad_clip, plain=plain)
        if plain:
            optimizer.register_step_pre_hook(trained.clip)
        return trained

    def freeze(self, model: PolicyModel) -> nn.Module:
        """See `Backend`."""
        import deepspeed

        if not self.sharded:
            return model.to(torch.device(self._device))
        engine = deepspeed.initialize(model=model, config=self._frozen)[0]
        engine.eval()
        self._models.append(engine)
        return engine

    def close(self) -> None:
        """See `Backend`."""
        import deepspeed

        for engine in self._models:
            engine.destroy()
        self._models.clear()
        deepspeed.comm.destroy_process_group()
