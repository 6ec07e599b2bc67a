"""The run's metrics on Ray's own metrics endpoint, for Prometheus.

Runs in: the driver. Hides Ray's gauges and the names that Prometheus allows:
`replay/staleness_mean` becomes `ray_async_grpo_replay_staleness_mean` with the label `run`. Each
node's endpoint is in `ray.nodes()` as MetricsExportPort; the driver's has these.

Invariants: a gauge has the value of the last line of `metrics.jsonl`, and one that has no value yet
is not there; nothing here waits for anybody.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from ray.util.metrics import Gauge

PREFIX = "async_grpo_"
GROUPS = (
    "rollout/",
    "train/",
    "replay/",
    "weights/",
    "eval/",
    "time/",
    "cluster/",
    "goodput/",
    "checkpoint/",
)
_BY_STALENESS = re.compile(r"/staleness_[\d-]+/")


class Exported:
    """The gauges of one run."""

    def __init__(self, run: str) -> None:
        self._tags = {"run": run}
        self._gauges: dict[str, Gauge] = {}

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Set the gauges to what was logged of learner step `step`, without buckets."""
        # evaluations and checkpoints are logged late, under the step that they belong to
        if "time/step" in metrics:
            self._set("step", step)
        for name, value in metrics.items():
            if name.startswith(GROUPS) and not _BY_STALENESS.search(name) and math.isfinite(value):
                self._set(name, value)

    def _set(self, name: str, value: float) -> None:
        if name not in self._gauges:
            self._gauges[name] = Gauge(
                gauge_name(name),
                description=f"{name} of async_grpo, see docs/reference/metrics.md",
                tag_keys=("run",),
            )
        self._gauges[name].set(float(value), tags=self._tags)


def gauge_name(metric: str) -> str:
    """Return the name that Ray is given; its endpoint puts `ray_` before it."""
    return PREFIX + re.sub(r"[^a-zA-Z0-9]+", "_", metric).strip("_")
