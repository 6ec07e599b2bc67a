"""Load of the machine as rows; a monitor that breaks is left out."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from async_grpo.observe.tracking import system_metrics
from async_grpo.observe.tracking.system_metrics import SystemMetrics


class Working:
    def collect_metrics(self) -> None: ...

    def aggregate_metrics(self) -> dict[str, Any]:
        return {"cpu": 50}

    def clear_metrics(self) -> None: ...


class Broken(Working):
    def collect_metrics(self) -> None:
        raise OSError("the device is gone")


def test_a_monitor_that_breaks_is_left_out_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(system_metrics, "_monitors", lambda: [Broken(), Working()])
    rows: list[dict[str, float]] = []
    enough = threading.Event()

    def log(row: dict[str, float]) -> None:
        rows.append(row)
        if len(rows) == 3:
            enough.set()

    metrics = SystemMetrics(log, every_s=0.01)
    with caplog.at_level(logging.WARNING):
        metrics.start()
        assert enough.wait(30)
        metrics.stop()
    assert rows[:3] == [{"system/cpu": 50.0}] * 3
    assert caplog.text.count("Broken is left out: the device is gone") == 1
