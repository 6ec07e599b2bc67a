"""What the nodes of a cluster have: a task on each looks at it, and at the way back.

Runs in: the process of `async-grpo doctor`, which is on a node; tasks on all. Hides Ray. Invariant:
a cluster is joined and never started, and a node that is silent for LOOK_S is a row.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray

from async_grpo.cluster.placement import Node, describe, place
from async_grpo.cluster.session import RaySession, answers
from async_grpo.config.schema import Config
from async_grpo.run.command import read_config
from async_grpo.runtime.text import counted, one_line
from async_grpo.tools.doctor.machine import Finding, each, findings, row

LOOK_S, CONNECT_S, MOST_SKEW_S, TRIPS = 60.0, 3.0, 1.0, 3
Ask = Callable[..., dict[str, Any]]
"""Call a function with its arguments on all nodes: what it returns or raises, by node."""


def nodes(file: str | None, settings: list[str]) -> Iterator[Finding]:
    """Look at the cluster of RAY_ADDRESS. Raises SetupError where it cannot be joined."""
    session = RaySession.open(processes=1)
    try:
        living = session.nodes()

        def ask(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
            task = ray.remote(max_retries=0)(function)
            where = [task.options(**session.on_node(node.node_id)) for node in living]
            told = answers([one.remote(*arguments) for one in where], timeout_s=LOOK_S)
            found = dict(zip((node.address for node in living), told, strict=True))
            living[:] = [n for n in living if not isinstance(found[n.address], Exception)]
            return found  # a node that does not answer is not asked again

        yield row("ray cluster", describe(living))
        if file is not None:
            yield from each({"places": lambda: _places(read_config(file, settings), living)})
        with socket.create_server(("", 0)) as listener:  # on the first of the nodes
            yield from examine(ask, living[0].address, listener.getsockname()[1])
    finally:
        session.close()


def examine(ask: Ask, host: str, port: int) -> Iterator[Finding]:
    """Look at each node, at its clock, and whether it reaches a port of this one."""
    told, reached = ask(findings), ask(connects, host, port)
    trips = [_trip(ask) for _ in range(TRIPS)]
    for node, found in told.items():
        half, ahead = min((trip[node] for trip in trips if node in trip), default=(0.0, 0.0))
        shown, off = f"{ahead:+.3f} s, give or take {half:.3f} s", abs(ahead) - half > MOST_SKEW_S
        closed, way = reached.get(node) is not True, f"it cannot connect to {host}"
        rows = [
            row("clock", shown, off, f"its clock is {ahead:+.1f} s off: let NTP set it"),
            row("ports", f"to {host}", closed, f"{way}: open all TCP ports of nodes", warns=False),
        ]
        if isinstance(found, Exception):
            fault = f"it cannot do a run's work: {one_line(found)}"
            found, rows = [], [row("node", "not known", True, fault, warns=False)]
        yield from ((node, *one[1:]) for one in [*found, *rows])


def _places(config: Config, living: list[Node]) -> Iterator[Finding]:
    placement = place(config, living)
    ranks, engines = len(placement.learners), len(placement.engines)
    yield row("places", f"{counted(ranks, 'learner rank')}, {counted(engines, 'engine')}")


def _trip(ask: Ask) -> dict[str, tuple[float, float]]:
    """Ask all clocks: half of the time that took, the error, and how far each is off."""
    begun, told = time.time(), ask(clock)
    half = (time.time() - begun) / 2
    clocks = {node: there for node, there in told.items() if isinstance(there, float)}
    return {node: (half, there - begun - half) for node, there in clocks.items()}


def clock() -> float:
    """Return a node's time."""
    return time.time()


def connects(host: str, port: int) -> bool:
    """Tell whether this machine reaches a port."""
    with socket.socket() as end:
        end.settimeout(CONNECT_S)
        return end.connect_ex((host, port)) == 0
