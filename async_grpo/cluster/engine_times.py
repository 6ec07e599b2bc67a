"""The time of engines, place by place, from what their actors told.

Runs in: the driver. Hides that a place may have had several processes: what lies between the last word of one and the first work of its
successor is `restarting`, as soon as the successor tells of itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import ray

from async_grpo.replay.reports import Report, Spent
from async_grpo.time_by_cause import ENGINE_CAUSES

FINAL_REPORT_S = 5.0


class Engine(Protocol):
    """`handle` is its Ray actor."""

    actor_id: str
    handle: Any


def engine_times(spent: Mapping[str, Spent]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """`time/engine/...`: means over all places that there were; and the seconds by cause of each place, under the name of its actors."""
    places: dict[str, list[Spent]] = {}
    for actor_id, one in spent.items():
        places.setdefault(actor_id.partition(".")[0], []).append(one)  # `actor-<place>.<process>`
    seconds = {name: _of_place(sorted(processes, key=lambda one: one[0])) for name, processes in sorted(places.items())}
    if not seconds:
        return {}, {}
    return {f"time/engine/{cause}": sum(one[cause] for one in seconds.values()) / len(seconds) for cause in ENGINE_CAUSES}, seconds


def _of_place(processes: Sequence[Spent]) -> dict[str, float]:
    out, until = dict.fromkeys(ENGINE_CAUSES, 0.0), processes[0][0]
    for began, seconds in processes:
        out["restarting"] += max(began - until, 0.0)
        for cause, value in seconds.items():
            out[cause] += value
        until = began + sum(seconds.values())
    return out


async def final_reports(engines: Sequence[Engine]) -> dict[str, Report]:
    """What they did in all, of those that answer: the queue is closed, so they produce nothing more."""
    async def ask(engine: Engine) -> Report | None:
        try:
            return await asyncio.wait_for(engine.handle.final_report.remote(), FINAL_REPORT_S)
        except (TimeoutError, ray.exceptions.RayError):
            return None  # it is about to be ended; what it told last counts

    answers = await asyncio.gather(*[ask(engine) for engine in engines])
    return {engine.actor_id: answer for engine, answer in zip(engines, answers, strict=True) if answer is not None}
