"""What the processes of a run are doing: asked, and looked at from outside, on every node.

Runs in: the driver, also in plain threads: nothing here needs its event loop. Invariant: every
question has a deadline, and one that is not answered is an answer too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import ray

from async_grpo.cluster.deaths import is_death
from async_grpo.cluster.session import RaySession
from async_grpo.observe import evidence
from async_grpo.runtime.text import one_line

ANSWER_S, EXAMINE_S = 3.0, 4.0


async def examine(
    run_dir: str, role: str, error: BaseException, *, node_id: str | None = None
) -> dict[str, Any]:
    """Examine processes of a role before they are killed; {} for a dead one. No node: here."""
    if is_death(error):
        return {}
    work: Awaitable[dict[str, Any]]
    if node_id is None or node_id == ray.get_runtime_context().get_node_id():
        work = asyncio.to_thread(evidence.gather, run_dir, role=role)
    else:
        work = asyncio.wrap_future(_there(node_id, run_dir, role).future())
    try:
        return await asyncio.wait_for(work, EXAMINE_S)
    except (TimeoutError, OSError, ray.exceptions.RayError) as failure:
        return {"host": node_id, "processes": [], "note": f"{type(failure).__name__}: {failure}"}


def findings_of(seen: dict[str, Any]) -> str:
    """Name the troubled processes, to be appended to a sentence; "" for none."""
    troubled = [
        f"{process['name']} {process['trouble']}"
        for process in seen.get("processes", [])
        if process["trouble"]
    ]
    return "".join(f"; {trouble}" for trouble in troubled)


def status_of(handle: Any) -> dict[str, Any]:
    """Ask a rollout actor for its status. Raises what Ray raises."""
    return ray.get(handle.status.remote(), timeout=ANSWER_S)


def queue_of(handle: Any) -> dict[str, Any]:
    """Ask the replay queue what it counts, measures and has in flight. Raises what Ray raises."""
    calls = [handle.call.remote("counts"), handle.call.remote("metrics"), handle.in_flight.remote()]
    return dict(
        zip(("counts", "metrics", "in_flight"), ray.get(calls, timeout=ANSWER_S), strict=True)
    )


def other_nodes(session: RaySession, run_dir: str, *, limit_s: float) -> list[dict[str, Any]]:
    """Collect the evidence of all nodes but the driver's, within `limit_s` seconds."""
    others = session.nodes()[1:]  # the first is the driver's
    calls = {_there(node.node_id, run_dir): node.address for node in others}
    if not calls:
        return []
    done, late = ray.wait(list(calls), num_returns=len(calls), timeout=limit_s)
    note = f"no answer within {limit_s:g} s"
    gone = [{"host": calls[call], "processes": [], "note": note} for call in late]
    return [ray.get(call) for call in done] + gone


def _there(node_id: str, run_dir: str, role: str = "") -> Any:
    """Collect the same evidence on another node."""
    task = ray.remote(evidence.gather).options(max_retries=0, **RaySession.on_node(node_id))
    return task.remote(run_dir, role=role)


def why(error: Exception) -> str:
    """Say why a question has no answer."""
    if isinstance(error, ray.exceptions.GetTimeoutError):
        return f"no answer within {ANSWER_S:g} s"
    return f"{type(error).__name__}: {one_line(error)}"
