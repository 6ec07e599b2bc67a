"""The machines as they are, before anything is started.

Runs in: the driver. Hides where they are listed: the cluster of RAY_ADDRESS tells, and is left as it was; without one the run would
start Ray here, and this machine is all there is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

from async_grpo.cluster.placement import Node
from async_grpo.cluster.session import Session

LOCAL = "this machine"


@dataclass(frozen=True, slots=True)
class Survey:
    """nodes; cluster: the address that was asked, None for this machine alone."""

    nodes: list[Node]
    cluster: str | None


def survey(*, processes: int) -> Survey:
    """The nodes that a run with so many processes would be placed on. Raises SetupError when RAY_ADDRESS names no living cluster."""
    if address := os.environ.get("RAY_ADDRESS"):
        session = Session.open(processes=processes)
        try:
            return Survey(session.nodes(), address)
        finally:
            session.close()
    cpus = max(os.cpu_count() or 1, processes)
    return Survey([Node(LOCAL, LOCAL, cpus=cpus, gpus=_gpus(), cores=tuple(sorted(os.sched_getaffinity(0))))], None)


def _gpus() -> int:
    """As Ray counts them when it is started here."""
    visible = NvidiaGPUAcceleratorManager.get_current_process_visible_accelerator_ids()
    found = NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
    return found if visible is None else min(found, len(visible))
