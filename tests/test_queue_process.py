"""The queue as a Ray actor: the driver never maps a token array, and a crowd of calls does not lock out `put`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def measured() -> dict:
    """Measured by a driver process of its own, whose peak memory is not that of the test process."""
    done = subprocess.run([sys.executable, "-m", "tests.queue_driver"], check=False, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_the_drivers_peak_memory_is_flat_in_the_size_of_groups(measured):
    small, large = measured["small"], measured["large"]
    assert small["passed_mb"] < 0.3 and large["passed_mb"] > 90, "groups of about 1 KB, then of about 1 MB"
    assert large["fetched_mb"] > 90
    assert large["peak_mb"] - small["peak_mb"] < 10, measured


def test_more_than_a_thousand_waiting_calls_do_not_lock_out_put(measured):
    assert measured["crowd"]["answered"] == 1_200 and measured["crowd"]["put_bytes"] > 0
