"""Random schedules through the real Ray actor, with real kills of its process and of the producers'
processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

FEW = 6
SCHEDULES = [
    FEW,
    pytest.param(50, marks=pytest.mark.slow),
    pytest.param(300, marks=pytest.mark.slow),
]
"""How many; the suite has three minutes for all tests of the queue."""


def tell(count: int) -> dict[str, int]:
    """What so many schedules saw."""
    seed = time.time_ns() % 10**9
    command = [sys.executable, "-m", "tests.support.queue_kills", str(count), str(seed)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=20 * count + 100
    )
    assert done.returncode == 0, f"{' '.join(command[1:])}\n{done.stderr[-4000:]}"
    return json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith('{"'))
    )  # Ray prints there too


def story(home: Path) -> dict[str, int]:
    """The run that the tests of this module share."""
    return tell(FEW)


@pytest.mark.parametrize("count", SCHEDULES)
@pytest.mark.timeout(1200)
def test_kills_of_queue_and_producers_lose_nothing(count: int, shared_run: dict[str, int]) -> None:
    seen = shared_run if count == FEW else tell(count)
    assert (
        seen["schedules"] == count
        and seen["queue_kills"] >= count
        and seen["producer_kills"] >= max(count // 20, 1)
    ), seen
