"""Learner ranks train models that take other forward passes than packed rows: losses and weights
are those of a plain loop, under every ZeRO stage, with one rank and two, and after a resume.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from async_grpo.config.schema import Config
from async_grpo.learner.adapters import UntrainableError, restrict
from async_grpo.learner.experts import blocks
from async_grpo.learner.model import model_class
from tests.support.families import config_of, write_family
from tests.support.learners import (
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
)
from tests.support.processes import free_port

DEADLINE_S = 200.0
SHARD_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
RANK_SPLITS = {0: [[0, 3], [1, 2], [4]], 1: [[5], [], []]}
PASSES = {"gemma2": "packed", "qwen3_moe": "packed", "falcon_h1": "rows"}
"""A head of the model's own with capped attention, experts, a recurrence beside attention."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("families")
    for name in PASSES:
        write_family(name, path / name)
    return {name: str(path / name) for name in PASSES}


def config(stage: int, *, model: dict[str, Any] | None = None, **learner: Any) -> Config:
    values = {"zero_stage": stage, "deepspeed": SHARD_ALL, "tokens_per_micro_batch": 48}
    return make_config(model=model or {}, learner=values | learner)


def expected(directory: str, case: Any) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    plain = partial(plain_model, directory, attention="eager")  # `sdpa` leaves caps out
    model = plain().eval()
    history = reference_losses(model, plain().eval(), case)
    return history, {key: parameter.detach() for key, parameter in model.named_parameters()}


def rank_main(
    rank: int, names: list[str], ports: list[int], path: str, models: dict[str, str]
) -> None:
    torch.set_num_threads(1)
    for number, name in enumerate(names):
        case = make_case(models[name], n_updates=2)
        history, _ = expected(models[name], case)
        place = {"name": name, "rank": rank, "world": 2}
        splits = [RANK_SPLITS[rank]] * 2
        settings = config(3, ranks=2, gradient_checkpointing=True)
        with open_learner(settings, models, case, port=ports[2 * number], **place) as learner:
            assert learner.policy.module.forward_pass.rows == PASSES[name]
            assert_history(train(learner, case, splits), history)
            learner.save(f"{path}/{name}", {"step": 7})
            train(learner, case, splits)
            continued = copy_weights(learner)
        with open_learner(settings, models, case, port=ports[2 * number + 1], **place) as learner:
            assert learner.load(f"{path}/{name}") == {"step": 7}
            train(learner, case, splits)
            assert bitwise(copy_weights(learner), continued)


@pytest.mark.parametrize(
    "names", [["qwen3_moe", "falcon_h1"], pytest.param(["gemma2"], marks=pytest.mark.slow)]
)
def test_two_ranks_of_a_divided_model_equal_a_plain_loop(
    models: dict[str, str], tmp_path: Path, names: list[str]
) -> None:
    """Ranks have other numbers of rows, route tokens otherwise, and one has packs without rows."""
    ports = [free_port() for _ in range(2 * len(names))]
    run_ranks(rank_main, names, ports, str(tmp_path), models, seconds=DEADLINE_S)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", list(PASSES))
def test_one_rank_equals_a_plain_loop(models: dict[str, str], name: str, stage: int) -> None:
    case = make_case(models[name], n_updates=2)
    history, weights = expected(models[name], case)
    with open_learner(config(stage), models, case, name=name) as learner:
        assert_history(train(learner, case, [split(range(len(rows)), 2) for rows in case.updates]),
                       history)  # fmt: skip
        if name != "qwen3_moe":  # its files have other tensors than transformers
            assert_close(copy_weights(learner), weights)


@pytest.mark.parametrize("name", list(PASSES))
def test_adapters_train_and_are_merged(models: dict[str, str], name: str) -> None:
    case = make_case(models[name], n_updates=2)
    before = {}
    lora = {"rank": 2, "target_modules": ["q_proj", "v_proj"] if name == "falcon_h1" else None}
    settings = config(1, model={"lora": {key: one for key, one in lora.items() if one}}, lr=1e-2)
    with open_learner(settings, models, case, name=name) as learner:
        before = copy_weights(learner)
        train(learner, case, [split(range(len(rows)), 2) for rows in case.updates])
        moved = {
            key for key, one in copy_weights(learner).items() if not torch.equal(one, before[key])
        }
    assert moved and all("proj" in key for key in moved)
    assert not any(".experts." in key or ".gate." in key for key in moved), "experts have none"


@pytest.mark.parametrize("name", ["gemma3_vision", "qwen2_5_vl"])
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_what_sees_stays_as_it_is_while_text_is_trained(
    name: str, lora: dict[str, Any] | None, tmp_path: Path
) -> None:
    write_family(name, tmp_path)
    case = make_case(str(tmp_path), n_updates=2)
    settings = config(1, model={"lora": lora}, weight_decay=0.5, lr=1e-2)
    with open_learner(settings, {name: str(tmp_path)}, case, name=name) as learner:
        before = copy_weights(learner)
        train(learner, case, [split(range(len(rows)), 2) for rows in case.updates])
        after = copy_weights(learner)
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    seeing = {key for key in before if "vision" in key or "visual" in key or "projector" in key}
    assert moved and seeing and not moved & seeing
    assert lora or moved == set(before) - seeing


def test_a_frozen_router_stays_and_experts_move(models: dict[str, str]) -> None:
    case = make_case(models["qwen3_moe"], n_updates=2)
    for router in ("train", "frozen"):
        settings = config(1, model={"router": router})
        with open_learner(settings, models, case, name="qwen3_moe") as learner:
            before = copy_weights(learner)
            train(learner, case, [split(range(len(rows)), 2) for rows in case.updates])
            after = copy_weights(learner)
        moved = {key for key in before if not torch.equal(before[key], after[key])}
        assert any(".mlp.gate." in key for key in moved) == (router == "train")
        assert any(".experts." in key for key in moved)


ROUTERS = ["qwen2_moe", "mixtral", "phimoe", "granitemoe", "gpt_oss", "deepseek_v3", "llama4"]


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_are_found_whatever_their_name(name: str) -> None:
    config = config_of(name)
    with torch.device("meta"):
        hf = model_class(config).from_config(config)
    found = {key for block in blocks(hf) for key, _ in block.routers()}
    assert {key.rpartition(".")[0].rpartition(".")[2] for key in found} <= {"gate", "router"}
    assert len({block.name for block in blocks(hf)}) == len(
        {key for key in found if key.endswith(".weight")}
    )


def test_what_experts_cannot_have_is_refused_in_a_sentence() -> None:
    def restricted(name: str, **model: Any) -> None:
        config = config_of(name)
        with torch.device("meta"):
            hf = model_class(config).from_config(config)
        restrict(hf, make_config(model=model).model, seed=0, base="m")

    with pytest.raises(UntrainableError, match="has 'gate_up_proj', one tensor with all experts"):
        restricted("qwen3_moe", lora={"target_modules": ["q_proj", "gate_up_proj"]})
    with pytest.raises(UntrainableError, match="llama has no router of experts"):
        restricted("llama", router="frozen")
