"""A workload, and the lines of metrics of a run, as the tests of the planner use them."""

from __future__ import annotations

from collections.abc import Iterator

from async_grpo.tools.predict.engine import Speed
from async_grpo.tools.predict.workload import Workload

BASE = Workload(
    batch=8,
    responses=4,
    max_staleness=2,
    every_steps=1,
    outstanding=None,
    on_stale="wait",
    actors=2,
    places=16,
    verifiers=1,
    lengths=((10, 20, 30, 40), (5, 5, 5, 80), (25, 25, 25, 25)),
    speed=Speed(((1.0, 40.0), (16.0, 320.0))),
    learner_s=4.0,
    even=True,
)


def lines(count: int, *, every_s: float = 4.0) -> Iterator[dict[str, float]]:
    """Steps of `every_s` seconds: 3 of training, 0.5 of waiting, 0.5 of publishing; the engine
    generates half of the time.
    """
    for step in range(1, count + 1):
        yield {
            "time/learner/working": 3.0 * step,
            "time/learner/idle": 0.5 * step,
            "time/learner/weight_sync": (every_s - 3.5) * step,
            "time/engine/working": 2.0 * step,
            "time/engine/blocked": 2.0 * step,
            "engine/1/s": 0.001 * step,
            "engine/1/tokens": 1.0 * step,
            "engine/1/steps": 1.0 * step,
            "engine/8/s": 0.5 * step,
            "engine/8/tokens": 120.0 * step,
            "engine/8/steps": 20.0 * step,
            "engine/32/s": 1.5 * step,
            "engine/32/tokens": 600.0 * step,
            "engine/32/steps": 25.0 * step,
            "rollout/response_tokens": 700.0,
            "rollout/verifier_s": 0.25,
            "rollout/environment_s": 1.5,
            "weights/until_live_s": 0.75,
            "weights/engine_paused_s": 0.125,
            "replay/staleness_mean": 1.0 + step % 2,
        }
