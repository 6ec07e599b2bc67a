"""All wires, and the settings that cannot have one."""

from __future__ import annotations

from tests.support.wiring import Wire
from tests.wiring import (
    algorithm,
    cluster,
    endpoint,
    environment,
    learner,
    replay,
    rollout,
    run,
    tasks,
    weights,
)

WIRES: list[Wire] = [
    *algorithm.WIRES,
    *learner.wires(),
    *replay.WIRES,
    *rollout.WIRES,
    *tasks.WIRES,
    *environment.WIRES,
    *endpoint.WIRES,
    *weights.WIRES,
    *cluster.WIRES,
    *run.wires(),
]
EQUIVALENT: dict[str, str] = {}
"""Key -> why no test can tell whether it has an effect."""
