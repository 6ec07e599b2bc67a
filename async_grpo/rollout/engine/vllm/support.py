"""Whether vLLM can run a model here, asked before anything starts; and what it has to be told of an
architecture.

Runs in: a process of its own (`preflight.engine_trial`), so that the driver need not import vLLM,
and in rollout actors (`adapt`). Hides what vLLM says of a model that it cannot run: an assertion,
or the death of its process at the first forward pass.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from async_grpo.runtime.text import ERROR_CHARS, raised, shortened

if TYPE_CHECKING:
    from torch import Tensor, nn
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

_SMALL = {
    "max_model_len": 64,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 26,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "enable_lora": False,
}
"""Arguments of an engine for a few short rows, to which whole weights are published."""


_SEES = re.compile("failed to be inspected|Can't load image processor")
"""What vLLM says where a package is missing that models need which also see."""


def adapt(args: AsyncEngineArgs, *, device: str, given: Collection[str]) -> AsyncEngineArgs:
    """Set what an architecture needs, but for arguments that were given. Returns `args`."""
    free = device == "cpu" and "enable_prefix_caching" not in given
    if free and args.create_model_config().is_hybrid:
        # Caches of a recurrence's states want prompts in parts, which CPU engines do not do.
        args.enable_prefix_caching = False
    return args


def gpu_bytes() -> int:
    """Return the memory of the GPU that an engine will use, without touching it."""
    from vllm.platforms import current_platform

    return current_platform.get_device_total_memory()


def refusal(arguments: dict[str, Any], *, device: str) -> str:
    """Return why vLLM does not take a model with these arguments of AsyncEngineArgs, or ""."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    try:
        args = adapt(AsyncEngineArgs(**arguments), device=device, given=arguments)
        config: VllmConfig = args.create_engine_config()
    except (AssertionError, ImportError, OSError, RuntimeError, ValueError) as error:
        return in_words(error) or raised(error)
    if config.lora_config is not None and not _takes_adapters(config.model_config):
        return "it takes no adapters, which `weight_sync.lora: adapter` needs and `merged` does not"
    return _head_size(config.model_config) if device == "cpu" else ""


class TrialEngine:
    """An engine on CPU, in this process, that scores short rows. Raises whatever vLLM raises for a
    model that it cannot run.
    """

    def __init__(self, arguments: dict[str, Any], *, directory: str, dtype: str) -> None:
        from vllm import LLM

        self._llm = LLM(**arguments | {"model": directory, "dtype": dtype} | _SMALL)

    def logprobs(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        """Log-probs of all tokens but the first of every row, one after the other."""
        from vllm import SamplingParams, TokensPrompt

        asked = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
        prompts = [TokensPrompt(prompt_token_ids=list(row)) for row in rows]
        outputs = self._llm.generate(prompts, asked, use_tqdm=False)
        return np.array(
            [
                found[token].logprob
                for output, row in zip(outputs, rows, strict=True)
                for found, token in zip(output.prompt_logprobs[1:], row[1:], strict=True)
            ]
        )

    @property
    def model(self) -> nn.Module:
        """The engine's own model, as vLLM made it."""
        found: nn.Module = self._llm.apply_model(lambda model: model)[0]
        return found

    def publish(self, tensors: Mapping[str, Tensor]) -> None:
        """Load tensors as a worker of a run loads a publication."""
        from async_grpo.rollout.engine.vllm.worker import load_publication

        load_publication(self.model, self._llm.llm_engine.model_config, tensors)


def in_words(error: Exception) -> str:
    """Say in a line what vLLM raised, often pydantic's wrapping of it; "" where it has no words."""
    text = " ".join(str(error).split())
    for begin in ("Value error, ", "Assertion failed, "):
        if begin in text:
            text = text.partition(begin)[2].partition(" [type=")[0]
    text = text.partition(" Supported architectures:")[0]
    text = re.sub(r"(Can't load image processor).*", r"\1", text)
    if _SEES.search(text) and importlib.util.find_spec("torchvision") is None:
        text += " (vLLM's code for it imports torchvision, which is not installed)"
    return shortened(text.rstrip("."), ERROR_CHARS)


def _takes_adapters(model: ModelConfig) -> bool:
    """Return whether vLLM serves adapters of a model, and computes the rest as without."""
    from vllm.model_executor.model_loader.utils import get_model_cls
    from vllm.model_executor.models import supports_lora

    return supports_lora(get_model_cls(model)) and not model.is_moe


def _head_size(model: ModelConfig) -> str:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size, sizes = model.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
    latent = getattr(model.hf_text_config, "kv_lora_rank", None)  # its size is not that of a head
    if model.is_attention_free or latent or size in sizes:
        return ""
    known = ", ".join(map(str, sizes))
    return f"its attention heads have size {size}, and vLLM on CPU computes {known}"
