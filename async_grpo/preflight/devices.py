"""Whether a run finds the devices that it needs, before its processes start and once it has places.

Runs in: the driver. Hides how GPUs are found: Ray and torch are imported when they are needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from async_grpo.config.schema import Config
from async_grpo.errors import SetupError

if TYPE_CHECKING:  # Ray takes seconds to import
    from async_grpo.cluster.system import Places


def refuse_too_large(
    config: Config, model_dir: str, places: Places, gpu_bytes: Mapping[str, int]
) -> None:
    """Refuse a run whose parts cannot fit the GPUs of their places. Raises SetupError."""
    from async_grpo.preflight.memory import shape_of, too_large

    shape = shape_of(config, model_dir)
    sentences = too_large(
        config, shape, places.placement, backend=places.backend, gpu_bytes=gpu_bytes
    )
    if sentence := next(sentences, None):
        raise SetupError(sentence)


def check_device(config: Config) -> None:
    """Refuse settings that need GPUs on a machine without one, unless a cluster is joined, which
    may have some. Raises SetupError.
    """
    if os.environ.get("RAY_ADDRESS"):
        return
    from async_grpo.cluster.placement import PlacementError, needing_gpus, place, room_for

    if config.cluster.device != "cuda" and not any(asked for _, asked in needing_gpus(config)):
        return
    from async_grpo.cluster.session import survey

    try:
        place(config, survey(processes=room_for(config)).nodes)
    except PlacementError as error:
        raise SetupError(str(error)) from error
