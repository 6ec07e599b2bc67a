"""What vLLM is started with: arithmetic on settings and the memory of a GPU.

Runs in: rollout actors, and the driver for estimates; without vLLM and torch. Invariants: arguments
of `cluster.engine.vllm` come last and are none of ours (`config.vllm_keys`); an engine that shares
its GPU with a learner rank asks for no more memory than it needs, for vLLM starts only where what
it asks for is free at that moment.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from async_grpo.config.operation import EngineConfig
from async_grpo.config.schema import Config
from async_grpo.config.transports import TRANSPORTS
from async_grpo.errors import SetupError

CPU_KV_CACHE_GB, SHARED_GPU_KV_CACHE_GB = 0.25, 4.0
CPU_MAX_NUM_SEQS = 256
TIES = 32
"""Tokens that are looked for beyond `rollout.top_k`: vLLM keeps those that are as probable as the
last, and in half precision several are.
"""
BATCHED_TOKENS = 8192
"""Tokens of one forward pass of an engine on a GPU; vLLM's own 2048 is made for short delays."""
ENGINE_BYTES = 3 * 2**30
"""What an engine on a GPU takes beside weights and KV cache: CUDA's context, kernels, activations
of a forward pass, CUDA graphs. An estimate.
"""

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM allocates for adapters."""

_OF_THE_MACHINE = (
    "worker_extension_cls",
    "max_model_len",
    "max_num_seqs",
    "kv_cache_memory_bytes",
    "tensor_parallel_size",
    "distributed_executor_backend",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "max_loras",
)
"""Arguments that have nothing to do with what an engine computes."""


def kv_cache_gb(config: Config, *, device: str, backend: str) -> float | None:
    """KV cache per engine GPU or process in GiB; None where vLLM chooses. Of `auto` the least."""
    given = config.cluster.engine.kv_cache_gb
    if given != "auto":
        return given
    if device == "cpu":
        return CPU_KV_CACHE_GB
    return SHARED_GPU_KV_CACHE_GB if TRANSPORTS[backend].colocated else None


def max_num_seqs(config: Config, *, device: str) -> int | None:
    """Responses that one engine generates at the same time; None where vLLM chooses, by its GPU."""
    chosen = config.cluster.engine.max_num_seqs
    return CPU_MAX_NUM_SEQS if chosen is None and device == "cpu" else chosen


def adapter_rank(rank: int) -> int:
    """Return the rank that an engine allocates for adapters of a rank. Raises SetupError."""
    if rank > ADAPTER_RANKS[-1]:
        raise SetupError(
            f"`model.lora.rank` is {rank}, and vLLM takes adapters up to {ADAPTER_RANKS[-1]}: "
            "lower it, or set `weight_sync.lora` to merged"
        )
    return next(one for one in ADAPTER_RANKS if one >= rank)


def engine_arguments(
    config: Config,
    *,
    model_dir: str,
    device: str,
    backend: str,
    seed: int,
    gpu_bytes: int | None = None,
) -> dict[str, Any]:
    """Build the keywords of vLLM's AsyncEngineArgs, but for the weight transfer. gpu_bytes: memory
    of a GPU that the engine shares with a learner rank. Raises SetupError where the engine's part
    of it is too small.
    """
    settings, cpu = config.cluster.engine, device == "cpu"
    dtype = config.model.dtype if config.model.dtype != "auto" else "float32" if cpu else "bfloat16"
    memory = kv_cache_gb(config, device=device, backend=backend)
    arguments: dict[str, Any] = {
        "model": model_dir,
        "dtype": dtype,
        "seed": seed,
        "max_model_len": config.rollout.longest_row,
        "max_num_seqs": max_num_seqs(config, device=device),
        "skip_tokenizer_init": True,
        "trust_remote_code": config.model.trust_remote_code,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "tensor_parallel_size": settings.tensor_parallel_size,
        # Left to itself, vLLM takes Ray's executor inside a placement group, which wants a bundle
        # for each GPU; an actor has one bundle with all of them.
        "distributed_executor_backend": "mp" if settings.tensor_parallel_size > 1 else "uni",
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": cpu if settings.enforce_eager is None else settings.enforce_eager,
        "worker_extension_cls": "async_grpo.rollout.engine.vllm.worker.WorkerExtension",
        "kv_cache_memory_bytes": None if memory is None else int(memory * 2**30),
    }
    if config.learner.routing_replay == "r3":
        arguments["enable_return_routed_experts"] = True
    if config.model.lm_head_fp32:
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if config.adapter_slots and config.model.lora is not None:
        arguments |= {"enable_lora": True, "max_loras": config.adapter_slots}
        arguments["max_lora_rank"] = adapter_rank(config.model.lora.rank)
        targets = config.model.lora.target_modules
        if not isinstance(targets, str):  # vLLM goes by the last parts of names
            arguments["lora_target_modules"] = [one.rpartition(".")[2] for one in targets]
    if config.rollout.most_kept:
        arguments["max_logprobs"] = config.rollout.most_kept + TIES
    if cpu:
        arguments["block_size"] = 32
        # vLLM dies of a seeded request whose prompt it computes in several parts.
        arguments["enable_chunked_prefill"] = False
    else:
        most = (settings.max_num_seqs or BATCHED_TOKENS) * config.rollout.longest_row
        # beyond what its sequences can hold vLLM warms up past the end of their block tables
        arguments["max_num_batched_tokens"] = min(BATCHED_TOKENS, most)
    if gpu_bytes is not None:
        arguments["enable_sleep_mode"] = settings.sleep is True
        arguments["gpu_memory_utilization"] = shared_gpu_share(
            config, weights=weight_bytes(model_dir), kv_cache_gb=memory or 0.0, gpu_bytes=gpu_bytes
        )
    return arguments | settings.vllm


def serving(settings: EngineConfig, *, scores: bool) -> EngineConfig:
    """See `EngineKind.serving`."""
    own: dict[str, Any] = {"skip_tokenizer_init": False}  # vLLM wants the words for both
    if scores:
        own["runner"] = "pooling"
    else:  # blanks between the parts of JSON would have no end at times
        own["structured_outputs_config"] = {"backend": "xgrammar", "disable_any_whitespace": True}
    return settings.unchecked_copy(update={"vllm": own | settings.vllm})


def trial_arguments(config: Config, *, model: str, device: str) -> dict[str, Any]:
    """Build the keywords of AsyncEngineArgs that do not depend on the machine."""
    backend = "shared_memory" if device == "cpu" else "nccl"
    found = engine_arguments(config, model_dir=model, device=device, backend=backend, seed=0)
    free = {name: value for name, value in found.items() if name not in _OF_THE_MACHINE}
    return free | config.cluster.engine.vllm


def shared_gpu_share(config: Config, *, weights: int, kv_cache_gb: float, gpu_bytes: int) -> float:
    """Return the share of a GPU's memory that an engine needs beside a learner rank. Raises
    SetupError where it is more than `cluster.engine.gpu_memory_utilization`.
    """
    need, most = weights + kv_cache_gb * 2**30 + ENGINE_BYTES, gpu_bytes
    limit = config.cluster.engine.gpu_memory_utilization
    if need > limit * most:
        gib = [f"{count / 2**30:.1f}" for count in (need, weights, ENGINE_BYTES, limit * most)]
        raise SetupError(
            f"an engine that shares its GPU needs {gib[0]} GiB (weights {gib[1]}, "
            f"cluster.engine.kv_cache_gb {kv_cache_gb:g}, the rest {gib[2]}) and may use {gib[3]} "
            f"(cluster.engine.gpu_memory_utilization {limit:g} of the GPU): lower kv_cache_gb, or "
            "raise gpu_memory_utilization"
        )
    return need / most


def transfer_name(transport: str) -> str:
    """Name of a transport's receiving half in vLLM's registry, where the plain ones are vLLM's."""
    return f"async_grpo_{transport}"


def weight_bytes(model_dir: str) -> int:
    """Size of a model's weight files, of safetensors if there are any; 0 if it is not here."""
    directory = Path(model_dir)
    files = list(directory.glob("*.safetensors")) or list(directory.glob("*.bin"))
    return sum(file.stat().st_size for file in files)


def set_environment(device: str) -> None:
    """Set vLLM's switches, before it is imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # importing joblib would make a semaphore, which stays when the process is killed
    os.environ.setdefault("JOBLIB_MULTIPROCESSING", "0")
    # asking torch for a GPU, as the preflight does, makes CUDA unusable in processes forked later
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if device == "cpu":
        # keeps the `uni` executor: one EngineCore child, no second worker process
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # compiling small sampler functions would take 18 s at the first request
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # latent attention is computed wrongly there (docs/reference/models.md)
        os.environ.setdefault("VLLM_MLA_DISABLE", "1")
