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


def look_at_gpus(
    config: Config, model_dir: str, places: Places, gpu_bytes: Mapping[str, int]
) -> list[str]:
    """Refuse a run whose parts cannot fit the GPUs of their places; a sentence for each deadline
    that may be too short for the model. Raises SetupError.
    """
    from async_grpo.run.preflight.deadlines import too_short
    from async_grpo.run.preflight.memory import shape_of, too_large

    shape = shape_of(config, model_dir)
    sentences = too_large(
        config, shape, places.placement, backend=places.backend, gpu_bytes=gpu_bytes
    )
    if sentence := next(sentences, None):
        raise SetupError(sentence)
    return list(too_short(config, shape))


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
