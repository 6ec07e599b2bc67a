"""What vLLM is started with: compared with vLLM's own choices where it has some."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, get_args

import pytest
import ray
import torch
from vllm import envs
from vllm.config import ParallelConfig
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils import system_utils
from vllm.v1.executor import ray_utils

from async_grpo.config.frozen import FrozenModel
from async_grpo.config.schema import Config
from async_grpo.config.vllm_keys import _BY_OURS, _OWN, SPECULATION, names
from async_grpo.errors import SetupError
from async_grpo.rollout.engine.vllm.arguments import (
    ADAPTER_RANKS,
    adapter_rank,
    engine_arguments,
    set_environment,
    shared_gpu_share,
)
from async_grpo.rollout.engine.vllm.support import refusal
from async_grpo.rollout.frozen import engine_config
from tests.support.families import write_family

GIB = 2**30


def arguments(
    *, device: str = "cuda", backend: str = "nccl", gpu_bytes: int | None = None, **engine: Any
) -> dict[str, Any]:
    config = Config.model_validate(
        {
            "run": {"total_steps": 1},
            "model": {"path": "m"},
            "rollout": {"prompt_length": 8, "response_length": 8},
            "cluster": {"engine": engine},
        }
    )
    return engine_arguments(
        config, model_dir="m", device=device, backend=backend, seed=1, gpu_bytes=gpu_bytes
    )


@pytest.fixture
def in_placement_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As inside a rollout actor: Ray runs, and the actor has a bundle of a placement group."""
    monkeypatch.setattr(ray_utils, "ray_is_available", lambda: True)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util, "get_current_placement_group", lambda: object())


@pytest.mark.parametrize(("size", "backend"), [(1, "uni"), (2, "mp"), (8, "mp")])
def test_an_engine_in_a_placement_group_spawns_its_workers_itself(
    in_placement_group: None, size: int, backend: str
) -> None:
    chosen = arguments(tensor_parallel_size=size)["distributed_executor_backend"]
    config = ParallelConfig(tensor_parallel_size=size, distributed_executor_backend=chosen)
    assert config.distributed_executor_backend == backend


def test_left_to_itself_vllm_would_take_rays_executor(in_placement_group: None) -> None:
    assert ParallelConfig(tensor_parallel_size=2).distributed_executor_backend == "ray"


def test_every_argument_is_one_of_vllms_and_the_table_of_names_is_vllms() -> None:
    assert names() == {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert set(arguments()) | set(arguments(device="cpu", backend="shared_memory")) <= names()
    assert SPECULATION | _BY_OURS.keys() | _OWN.keys() <= names()
    assert not _BY_OURS.keys() & _OWN.keys()


def test_no_argument_that_is_given_can_be_given_by_the_user_but_for_sizes() -> None:
    free = set(arguments()) - _BY_OURS.keys() - _OWN.keys()
    assert free == {"max_num_batched_tokens"}


def test_a_gpu_has_vllms_own_number_of_responses_and_larger_batches() -> None:
    gpu, cpu = arguments(), arguments(device="cpu", backend="shared_memory")
    assert (gpu["max_num_seqs"], gpu["max_num_batched_tokens"]) == (None, 8192)
    assert (cpu["max_num_seqs"], "max_num_batched_tokens" in cpu) == (256, False)
    assert arguments(max_num_seqs=5)["max_num_seqs"] == 5


def test_no_batch_is_larger_than_what_its_sequences_hold() -> None:
    """Block tables are as wide as the longest sequence, and vLLM warms up with whole batches."""
    few, longest = arguments(max_num_seqs=3), arguments()["max_model_len"]
    assert 3 * longest < 8192 and few["max_num_batched_tokens"] == 3 * longest


def with_adapters(**lora: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"total_steps": 1},
            "model": {"path": "m", "lora": lora},
            "replay": {"max_staleness": 3},
            "weight_sync": {"lora": "adapter"},
        }
    )


def of_adapters(config: Config) -> dict[str, Any]:
    found = engine_arguments(config, model_dir="m", device="cpu", backend="shared_memory", seed=1)
    return {name: value for name, value in found.items() if "lora" in name}


def test_an_engine_of_adapters_has_slots_for_every_version_in_use() -> None:
    assert of_adapters(with_adapters(rank=16)) == {
        "enable_lora": True,
        "max_loras": 5,
        "max_lora_rank": 16,
    }
    few = of_adapters(with_adapters(target_modules=["self_attn.q_proj", "down_proj"]))
    assert few["lora_target_modules"] == ["q_proj", "down_proj"]
    assert not any("lora" in name for name in arguments())
    own = engine_config(with_frozen(with_adapters()), "big")
    assert own.adapter_slots == 0 and of_adapters(own) == {}, "a frozen model has none"


def test_an_engine_says_which_experts_it_took_where_they_are_replayed() -> None:
    values = {"run": {"total_steps": 1}, "model": {"path": "m"}}
    config = with_frozen(Config.model_validate(values | {"learner": {"routing_replay": "r3"}}))
    places = {"model_dir": "m", "device": "cuda", "backend": "nccl", "seed": 1}
    assert engine_arguments(config, **places)["enable_return_routed_experts"] is True
    for other in (Config.model_validate(values), engine_config(config, "big")):
        assert "enable_return_routed_experts" not in engine_arguments(other, **places)


def with_frozen(config: Config) -> Config:
    return config.unchecked_copy(update={"frozen": {"big": FrozenModel(path="big")}})


@pytest.mark.parametrize(("rank", "allocated"), [(1, 1), (2, 8), (17, 32), (300, 320), (512, 512)])
def test_a_rank_is_one_of_vllms(rank: int, allocated: int) -> None:
    assert adapter_rank(rank) == allocated
    assert set(ADAPTER_RANKS) == set(get_args(MaxLoRARanks))


def test_a_rank_that_vllm_has_not_is_refused() -> None:
    with pytest.raises(SetupError, match=r"`model.lora.rank` is 513, and vLLM .* up to 512: lower"):
        of_adapters(with_adapters(rank=513))


@pytest.mark.parametrize(
    ("family", "refused"),
    [
        ("qwen3_moe", True),
        pytest.param("llama", False, marks=pytest.mark.slow),
        pytest.param("gpt2", True, marks=pytest.mark.slow),
    ],
)
def test_models_without_adapters_are_refused_in_words(
    tmp_path: Path, family: str, refused: bool
) -> None:
    set_environment("cpu")
    write_family(family, tmp_path)
    plain = {"model": str(tmp_path), "dtype": "float32", "max_model_len": 64}
    assert refusal(plain, device="cpu") == ""
    said = refusal(plain | {"enable_lora": True}, device="cpu")
    assert ("`weight_sync.lora: adapter` needs" in said) if refused else said == ""


def test_a_cpu_computes_no_prompt_in_parts() -> None:
    gpu, cpu = arguments(), arguments(device="cpu", backend="shared_memory")
    assert cpu["enable_chunked_prefill"] is False and "enable_chunked_prefill" not in gpu


def test_arguments_of_the_user_come_last() -> None:
    given = {"max_num_batched_tokens": 16384, "quantization": "fp8"}
    assert given.items() <= arguments(vllm=given).items()


@pytest.mark.parametrize(("gpu_gb", "share"), [(80, 8 / 80), (24, 8 / 24)])
def test_on_a_shared_gpu_an_engine_asks_for_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_gb: int, share: float
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    with open(tmp_path / "m" / "a.safetensors", "wb") as file:
        file.truncate(GIB)
    found = arguments(backend="ipc", gpu_bytes=gpu_gb * GIB)  # 1 + 4 + 3 GiB
    assert found["gpu_memory_utilization"] == pytest.approx(share)
    assert found["kv_cache_memory_bytes"] == 4 * GIB
    assert arguments(backend="nccl")["gpu_memory_utilization"] == 0.9


def test_a_part_of_a_shared_gpu_that_is_too_small_is_refused() -> None:
    config = Config.model_validate(
        {
            "run": {"total_steps": 1},
            "model": {"path": "m"},
            "cluster": {"engine": {"gpu_memory_utilization": 0.25}},
        }
    )
    with pytest.raises(SetupError, match=r"needs 7.0 GiB \(weights 1.0, .*3.*may use 6.0 "):
        shared_gpu_share(config, weights=GIB, kv_cache_gb=3.0, gpu_bytes=24 * GIB)


def test_an_engines_processes_are_spawned_since_torch_was_asked_for_a_gpu_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outside Ray (`evaluate`, `serve`, the preflight), where vLLM forks by default. On CPU its
    platform says spawn by itself, but later than here.
    """
    name = "VLLM_WORKER_MULTIPROC_METHOD"
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != name})
    envs.disable_envs_cache()
    if not torch.cuda.is_initialized():
        assert system_utils.get_mp_context().get_start_method() == "fork"
    set_environment("cuda")
    assert system_utils.get_mp_context().get_start_method() == "spawn"
