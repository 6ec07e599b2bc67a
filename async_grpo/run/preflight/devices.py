"""Whether a run finds the devices that it needs, before its processes start and once it has places.

Runs in: the driver. Hides how GPUs are found: Ray and torch are imported when they are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from async_grpo.config.schema import Config
from async_grpo.config.transports import automatic
from async_grpo.errors import SetupError
from async_grpo.run.connection import uses_cluster

if TYPE_CHECKING:  # Ray takes seconds to import
    from async_grpo.run.system import Places


def look_at_memory(
    config: Config, model_dir: str, places: Places, gpu_bytes: Mapping[str, int]
) -> tuple[Config, list[str]]:
    """Choose what fits the memory at the places of a run, and refuse a run whose parts cannot fit
    their GPUs; the settings without `auto`, and lines: the choice, and each deadline that may be
    too short for the model. Raises SetupError.
    """
    from async_grpo.learner.drafts import host_bytes
    from async_grpo.run.preflight.deadlines import too_short
    from async_grpo.run.preflight.fit import fitted, too_large
    from async_grpo.run.preflight.memory import shape_of

    shape, placement, backend = shape_of(config, model_dir), places.placement, places.backend
    config, chosen = fitted(
        config, shape, placement, backend=backend, gpu_bytes=gpu_bytes, host_bytes=host_bytes()
    )
    lines = [chosen] if chosen else []
    if placement.device == "cpu":
        return config, lines
    sentences = too_large(config, shape, placement, backend=backend, gpu_bytes=gpu_bytes)
    if sentence := next(sentences, None):
        raise SetupError(sentence)
    return config, [*lines, *(f"warning: {line}" for line in too_short(config, shape))]


def check_device(config: Config) -> None:
    """Refuse settings that need GPUs on a machine without one, or that a CPU cannot run with,
    unless a cluster is joined, which may have GPUs. Raises SetupError.
    """
    if uses_cluster():
        return
    from async_grpo.cluster.placement import PlacementError, needing_gpus, place, refuse, room_for

    asks = config.cluster.device == "cuda" or any(asked for _, asked in needing_gpus(config))
    refusal: SetupError | None = None
    if not asks:
        try:
            refuse(config, device="cpu", backend=automatic(device="cpu", colocated=False))
        except SetupError as error:
            refusal = error
        else:
            return
    from async_grpo.cluster.session import survey

    try:
        placement = place(config, survey(processes=room_for(config)).nodes)
    except PlacementError as error:
        raise SetupError(str(error)) from error
    if refusal is not None and placement.device == "cpu":
        raise refusal
