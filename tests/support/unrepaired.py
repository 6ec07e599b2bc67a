"""vLLM's layerwise reload on CPU as it is by itself: experts are packed when they are loaded first,
and raw weights are copied into packed storage later.

Runs in: test processes and, through a vLLM plugin, the engines that they start.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from async_grpo.rollout.engine.vllm import worker

_PLUGIN = Path(__file__).parent / "unrepaired_plugin"


def install() -> None:
    """Take the repair out of this process."""
    worker.pack_reloaded_experts = lambda model: None


@contextmanager
def in_engines() -> Iterator[None]:
    """Take the repair out of all processes of vLLM that are started meanwhile."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(_PLUGIN), str(_PLUGIN.parents[2]), before])
    )
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@contextmanager
def in_process(model: nn.Module) -> Iterator[None]:
    """Take it out for a model of this process that was repaired."""
    for layer in model.modules():
        if (method := getattr(layer, "quant_method", None)) is not None:
            vars(method).pop("process_weights_after_loading", None)
    kept = worker.pack_reloaded_experts
    install()
    try:
        yield
    finally:
        worker.pack_reloaded_experts = kept
