"""Bring models from the hub to the nodes that load them, before any deadline of a start runs.

Runs in: the driver, and for a moment on every node with learner ranks or engines. A model that is a
directory is left alone; one that the node has in its cache costs a question to the hub, or none
with HF_HUB_OFFLINE.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import ray

from async_grpo.errors import SetupError
from async_grpo.runtime.text import one_line

LONGEST_S = 12 * 3600.0
NOTE_S = 60.0
FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken")
"""What transformers and vLLM read; without safetensors also `*.bin`."""

Fetch = Callable[[str, str], Awaitable[int]]


def download(model: str) -> int:
    """Download a model into the hub's cache of this machine; bytes of it that lie there then."""
    from huggingface_hub import snapshot_download

    directory = Path(snapshot_download(model, allow_patterns=list(FILES)))
    if not any(directory.rglob("*.safetensors")):
        directory = Path(snapshot_download(model, allow_patterns=[*FILES, "*.bin"]))
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def from_hub(models: Iterable[str | None]) -> list[str]:
    """Choose the models that are no directories of this machine, each once."""
    return list(dict.fromkeys(one for one in models if one and not Path(one).is_dir()))


async def download_everywhere(
    models: Iterable[str | None],
    nodes: Iterable[str],
    *,
    note: Callable[[str], None],
    fetch: Fetch | None = None,
) -> None:
    """Download models on all of the nodes at once, with a line a minute. Raises SetupError.

    fetch(model, node_id): bytes of the model on that node.
    """
    tasks = {
        asyncio.ensure_future((fetch or _on_node)(model, node)): (model, node)
        for model in from_hub(models)
        for node in sorted(set(nodes))
    }
    waited = 0.0
    try:
        while (waiting := [task for task in tasks if not task.done()]) and waited < LONGEST_S:
            await asyncio.wait(waiting, timeout=NOTE_S)
            waited += NOTE_S
            if names := sorted({tasks[task][0] for task in waiting if not task.done()}):
                note(f"still downloading {', '.join(names)} from the hub")
        for task, (model, node) in tasks.items():
            if not task.done():
                raise SetupError(f"downloading {model} on node {node} took over 12 hours")
            if error := task.exception():
                cause = getattr(error, "cause", None) or error
                raise SetupError(
                    f"{model} could not be downloaded on node {node} ({one_line(cause)}); give "
                    "model.path a directory that every node has, or check HF_TOKEN and the network"
                ) from error
    finally:
        for task in tasks:
            task.cancel()


async def _on_node(model: str, node_id: str) -> int:
    from async_grpo.cluster.session import RaySession  # which `download` on a node does without

    task = ray.remote(download).options(max_retries=1, **RaySession.on_node(node_id))
    return await task.remote(model)
