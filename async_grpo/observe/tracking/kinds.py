"""The trackers that a run can have.

Runs in: wherever metrics are sent. Hides nothing. A tracker's package is imported with its first
call.
"""

from __future__ import annotations

from importlib.util import find_spec

from async_grpo.config.schema import Config
from async_grpo.observe.tracking.mlflow_sink import MlflowSink, check_server
from async_grpo.observe.tracking.sink import TrackerSink, TrackingError
from async_grpo.observe.tracking.tensorboard_sink import TensorboardSink
from async_grpo.observe.tracking.wandb_sink import WandbSink

ALSO: dict[str, type[TrackerSink]] = {"tensorboard": TensorboardSink, "wandb": WandbSink}
"""Trackers beside MLflow, by their names in `tracking.also`, which are those of their packages."""
KINDS: tuple[type[TrackerSink], ...] = (MlflowSink, *ALSO.values())


def check_trackers(config: Config) -> None:
    """Look whether the trackers can be used, as far as that is known before they are called. Raises
    TrackingError.
    """
    check_server(config)
    for name in config.tracking.also:
        if find_spec(name) is None:
            raise TrackingError(
                f"`tracking.also` names {name}, which is not installed: "
                "pip install 'async_grpo[trackers]'"
            )
