"""The arguments of vLLM's engine: which exist, and which are set by other settings or not at all.

Runs in: any process, without importing vLLM, which would refuse an unknown argument once all
processes have started. Hides where the names stand.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_LENGTHS = "rollout.prompt_length` and `rollout.response_length"
_BY_OURS = {
    "dtype": "model.dtype",
    "enable_return_routed_experts": "learner.routing_replay",
    "enforce_eager": "cluster.engine.enforce_eager",
    "gpu_memory_utilization": "cluster.engine.gpu_memory_utilization",
    "hf_overrides": "model.lm_head_fp32",
    "kv_cache_memory_bytes": "cluster.engine.kv_cache_gb",
    "enable_sleep_mode": "cluster.engine.sleep",
    "max_model_len": _LENGTHS,
    "max_num_seqs": "cluster.engine.max_num_seqs",
    "model": "model.path",
    "model_weights": "model.path",
    "seed": "seed",
    "tensor_parallel_size": "cluster.engine.tensor_parallel_size",
    "tokenizer": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "weight_transfer_config": "weight_sync.backend",
}
"""Arguments that another setting decides."""
_REASONS = {
    "the engine gives tokens with the log-probs that the learner needs": """
        convert disable_log_stats generation_config logits_processors logprobs_mode
        override_generation_config pooler_config runner scheduler_cls skip_tokenizer_init
        tokens_only worker_cls worker_extension_cls
    """,
    "learner and engines must load the same weights": """
        code_revision config_format hf_config_path revision served_model_name tokenizer_mode
        tokenizer_revision
    """,
    "model.lora and weight_sync.lora say which adapters engines have": """
        enable_lora enable_mixed_moe_lora_format enable_moe_shared_loras fully_sharded_loras
        lora_dtype lora_target_modules max_cpu_loras max_lora_rank max_loras specialize_active_lora
    """,
    "an engine is one process group on one node; more engines are more rollout actors "
    "(cluster.rollout_actors)": """
        _api_process_count _api_process_rank data_parallel_address data_parallel_backend
        data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb
        data_parallel_rank data_parallel_rpc_port data_parallel_size data_parallel_size_local
        data_parallel_start_rank device_ids distributed_executor_backend master_addr master_port
        nnodes node_rank pipeline_parallel_size ray_workers_use_nsight
    """,
}
_OWN = {name: why for why, names in _REASONS.items() for name in names.split()}
"""Arguments that no setting changes, and why."""
SPECULATION = frozenset({"spec_method", "spec_model", "spec_tokens", "speculative_config"})
"""Arguments of speculative decoding."""


@cache
def names() -> frozenset[str]:
    """Read the fields of `AsyncEngineArgs` from vLLM's source; none where it is not installed."""
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return frozenset()
    source = (Path(vllm.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    fields = [
        line.target.id
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]
    return frozenset(fields)


def refused_arguments(given: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Find arguments that `cluster.engine.vllm` may not have: each, and why with what to do."""
    for name in given:
        if name in _BY_OURS:
            yield (
                name,
                f"must not be given, because another setting decides; use `{_BY_OURS[name]}`",
            )
        elif name in _OWN:
            yield name, f"must not be given: {_OWN[name]}; remove it"
        elif names() and name not in names():
            close = difflib.get_close_matches(str(name), names() - _OWN.keys(), n=1)
            meant = _BY_OURS.get(close[0], close[0]) if close else ""
            hint = f"`{meant}` may be meant" if meant else "remove it"
            yield name, f"is no argument of vLLM's engine: {hint}"
