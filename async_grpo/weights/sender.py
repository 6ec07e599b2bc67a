"""Choice of the transport, in one place.

Runs in: learner ranks and the driver.
"""

from __future__ import annotations

from pathlib import Path

from async_grpo.config.schema import Config
from async_grpo.weights.base import WeightOwner, WeightSender


def resolve_backend(config: Config, *, device: str, colocated: bool) -> str:
    """`shared_memory`, `ipc` or `nccl` for this configuration on `device` (`cpu` or `cuda`)."""
    if config.weight_sync.backend != "auto":
        return config.weight_sync.backend
    if device == "cpu":
        return "shared_memory"
    return "ipc" if colocated else "nccl"


def make_sender(backend: str, owner: WeightOwner, *, config: Config, key: str) -> WeightSender:
    """The learner's half of `backend`. `key` names the run's shared-memory segments."""
    if backend == "shared_memory":
        from async_grpo.weights.shared_memory import SharedMemorySender

        return SharedMemorySender(owner, key=key, fallback=fallback_directory(config))
    if backend == "ipc":
        from async_grpo.weights.ipc import IpcSender

        return IpcSender(owner)
    from async_grpo.weights.nccl import NcclSender  # needs vLLM, which a CPU learner does not load

    return NcclSender(owner, overlap=config.weight_sync.overlap, deadlines=config.weight_sync.deadlines)


def fallback_directory(config: Config) -> Path:
    """Where segments lie when /dev/shm has no room for them."""
    return Path(config.run.dir) / "weights"
