"""The settings that the learner's ranks read: two updates of a tiny model on CPU."""

from __future__ import annotations

import gc
from functools import cache
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM

from async_grpo.config.schema import Config
from async_grpo.learner import learner as learner_module
from async_grpo.learner.adapters import restrict
from async_grpo.learner.backend.deepspeed import backend
from async_grpo.learner.learner import Learner
from async_grpo.learner.model import PolicyModel
from async_grpo.learner.rows import StalenessError
from async_grpo.run.planning import RowMath
from tests.support.families import config_of, write_family
from tests.support.learners import (
    Case,
    after_each_update,
    copy_weights,
    make_case,
    open_learner,
    set_rank,
    split,
    write_neighbour,
)
from tests.support.processes import free_port
from tests.support.wiring import Wire, tiny_model, workplace

SWINGS = {"rate": {"factor": 0.5}}
"""State of a run whose learning rate was halved, if it is of those that settle."""
GIVEN = {"learner.lr": 1e-2, "rollout.response_length": 24}
LORA = {"model.lora": {}}
KL_LOSS = {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": 1.0}
HALF = {"model.dtype": "bfloat16"}


@cache
def _case() -> Case:
    return make_case(tiny_model(), n_updates=2)


@cache
def _neighbour() -> str:
    return write_neighbour(tiny_model(), str(workplace()))


def trained(config: Config) -> Any:
    """Metrics and weights after a learner step of two updates, and what DeepSpeed and the model's
    loader were given; or why a row was refused.
    """
    set_rank(0, 1, free_port())
    case, load, real = _case(), AutoModelForCausalLM.from_pretrained, backend.deepspeed_config
    asked: list[Any] = []

    def loading(directory: str, **options: Any) -> Any:
        asked.append(options["trust_remote_code"])
        return load(directory, **options)

    def settings(*arguments: Any, **options: Any) -> dict[str, Any]:
        asked.append(real(*arguments, **options))
        return asked[-1]

    with (
        mock.patch.object(AutoModelForCausalLM, "from_pretrained", loading),
        mock.patch.object(backend, "deepspeed_config", settings),
        mock.patch.object(gc, "collect", lambda: 0),  # DeepSpeed's, a second each with bfloat16
        mock.patch.object(PolicyModel, "compile_layers", lambda model: asked.append("compiled")),
        mock.patch.object(learner_module, "fuse", lambda models, _: asked.append(len(models))),
    ):
        learner = Learner(
            config, model_dir=tiny_model(), fetch=case.fetch, device="cpu", total_updates=10
        )
    try:
        plan = case.plan([split(range(len(rows)), 2) for rows in case.updates])
        sums, rate = learner.prepare(plan), RowMath(config, {}, SWINGS).lr_factor
        with after_each_update(learner) as sums_of:
            learner.train(case.values, 0.1, rate)
        names = ("loss", "grad_norm", "lr")
        updates = [[one[f"train/{name}"] for name in names] for one in sums_of]
        moved = [float(tensor.double().abs().sum()) for tensor in copy_weights(learner).values()]
        model = learner.policy.module
        recomputes = [model.hf.is_gradient_checkpointing, model.offloads]
        again = learner.prepare(plan)
        return [sums, updates, moved, recomputes, again, asked]
    except StalenessError as error:
        return str(error)
    finally:
        learner.close()


def frozen(config: Config) -> list[str]:
    """Parameters of a mixture of experts that are not trained."""
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config_of("qwen3_moe"))
    restrict(hf, config.model, seed=0, base="")
    return [name for name, one in hf.named_parameters() if not one.requires_grad]


@cache
def _mixture() -> tuple[str, Case]:
    path = workplace()
    write_family("qwen3_moe", path)
    return str(path), make_case(str(path), n_updates=2)


def routed(config: Config) -> bool:
    """Whether later passes of a mixture of experts were given routes."""
    directory, case = _mixture()
    with open_learner(config, {"mixture": directory}, case, name="mixture") as learner:
        learner.prepare(case.plan([split(range(len(rows)), 2) for rows in case.updates]))
        return "train/routes_changed" in learner.train(case.values, 0.1)["sums"]


def _trained(key: str, value: Any, given: dict[str, Any] | None = None) -> Wire:
    return Wire(key, value, trained, {**GIVEN, **(given or {})})


def wires() -> list[Wire]:
    """Made when they are asked for, since they name a model."""
    return [
        _trained("model.dtype", "bfloat16"),
        _trained("model.reference", _neighbour(), KL_LOSS),
        _trained(
            "model.reference_refresh_steps",
            3,
            {
                "algorithm.add_token_level_kl": True,
                "algorithm.adv_estimator": "reinforce_plus_plus",
                "algorithm.anchor": "recomputed",
            },
        ),
        _trained("model.lora", {}),
        _trained("model.lora.rank", 2, LORA),
        _trained("model.lora.alpha", 8.0, LORA),
        _trained("model.lora.target_modules", ["q_proj"], LORA),
        _trained("model.freeze", ["embed_tokens"]),
        Wire("model.router", "frozen", frozen),
        _trained("model.lm_head_fp32", True, HALF),
        _trained("model.trust_remote_code", True),
        _trained("rollout.temperature", 0.7),
        _trained("replay.max_staleness", 0),
        _trained("replay.on_stale", "mask", {"replay.max_staleness": 0}),
        _trained("learner.zero_stage", 2),
        Wire("learner.lr", 3e-3, trained),
        _trained("learner.betas", [0.5, 0.9]),
        _trained("learner.weight_decay", 0.5),
        _trained("learner.warmup_steps", 4),
        _trained("learner.schedule", "linear"),
        _trained("learner.schedule", "settle"),
        _trained("learner.ess_step_size", True),
        _trained("learner.grad_clip", 0.01),
        _trained("learner.gradient_checkpointing", True),
        _trained("learner.activation_offload", True, {"learner.gradient_checkpointing": True}),
        _trained("learner.compile", True),
        Wire("learner.routing_replay", "r2", routed, {**GIVEN, "learner.ppo_epochs": 2}),
        _trained("learner.kernels", "none"),
        _trained("learner.deepspeed", {"wall_clock_breakdown": True}),
    ]
