"""Choice of the transport, in one place.

Runs in: learner ranks and the driver.
"""

from __future__ import annotations

from async_grpo.config.schema import Config
from async_grpo.weights.base import WeightOwner, WeightSender


def resolve_backend(config: Config, *, device: str, colocated: bool) -> str:
    """`shared_memory`, `ipc` or `nccl` for this configuration on `device` (`cpu` or `cuda`)."""
    if config.weight_sync.backend != "auto":
        return config.weight_sync.backend
    if device == "cpu":
        return "shared_memory"
    return "ipc" if colocated else "nccl"


def make_sender(backend: str, owner: WeightOwner, *, key: str) -> WeightSender:
    """The learner's half of `backend`. `key` names the run's shared-memory segments."""
    if backend == "shared_memory":
        from async_grpo.weights.shared_memory import SharedMemorySender

        return SharedMemorySender(owner, key=key)
    from async_grpo.weights.gpu import IpcSender, NcclSender  # needs vLLM, which a CPU learner does not load

    return IpcSender(owner) if backend == "ipc" else NcclSender(owner)
