"""How busy this machine is: MLflow's own system metrics, as rows like any other.

Runs in: the driver, in a thread of its own. Hides MLflow's monitors, which are imported in that
thread. Only the driver's machine is measured: Ray's endpoint has the others.

Invariant: a monitor that cannot measure (no GPU, no library) is left out; one that breaks is
dropped, and the run goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

EVERY_S = 10.0
STOP_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


class SystemMetrics:
    """Calls `log` with means over EVERY_S seconds, until `stop`."""

    def __init__(
        self, log: Callable[[dict[str, float]], None], *, every_s: float = EVERY_S
    ) -> None:
        self._log, self._every_s = log, every_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="async_grpo-system-metrics", daemon=True
        )

    def start(self) -> None:
        """Start the thread; the first values come after an interval."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; no row comes after this."""
        self._stopping.set()
        if self._thread.ident is not None:
            # A device that does not answer must not hold up the end of the run.
            self._thread.join(timeout=STOP_TIMEOUT_S)

    def _run(self) -> None:
        if self._stopping.wait(self._every_s / 2):  # the start has the machine for itself
            return
        monitors = _monitors()
        while not self._stopping.wait(self._every_s):
            row: dict[str, float] = {}
            for monitor in list(monitors):
                try:
                    monitor.collect_metrics()
                    values = monitor.aggregate_metrics()
                    monitor.clear_metrics()
                except Exception as error:  # noqa: BLE001 - said, and left out
                    # a driver that is gone, a device that was taken away
                    _log.warning("%s is left out: %s", type(monitor).__name__, error)
                    monitors.remove(monitor)
                    continue
                row |= {f"system/{name}": float(value) for name, value in values.items()}
            self._log(row)


def _monitors() -> list[Any]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    found = []
    for kind in (CPUMonitor, DiskMonitor, NetworkMonitor, GPUMonitor):
        try:
            found.append(kind())
        except Exception as error:  # noqa: BLE001 - as above; without a GPU there is always one
            _log.debug("%s is left out: %s", kind.__name__, error)
    return found
