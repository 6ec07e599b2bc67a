"""How long a place waits before a process is started in it again.

Runs in: the driver. A process that dies once is replaced at once; one that dies again and again must not burn its budget in a second.
"""

from __future__ import annotations

SECONDS = (0.0, 2.0, 10.0, 30.0)


def back_off_s(deaths: int) -> float:
    """Seconds to wait after the `deaths`-th death in a place (from 1)."""
    return SECONDS[min(max(deaths, 1), len(SECONDS)) - 1]
