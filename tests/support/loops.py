"""Batches and configurations for row mathematics."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from async_grpo.config.schema import Config
from async_grpo.weights.deliveries import PublicationTimes
from async_grpo.wire.codec import Batch, GroupMeta, RowMeta

GROUPS, ROWS, LIMIT = 4, 3, 16


WEIGHTS = {"correct": 1.0, "format": 0.5}


def config(
    *,
    run: dict[str, Any] | None = None,
    ranks: int = 1,
    every: int = 1,
    timeout_s: float = 5.0,
    epochs: int = 1,
    minibatch: int | None = None,
    schedule: str = "constant",
    **algorithm: Any,
) -> Config:
    return Config.model_validate(
        {
            "run": run or {"total_steps": 9},
            "model": {"path": "m"},
            "algorithm": algorithm,
            "watchdog": {"step_timeout_s": timeout_s},
            "rollout": {
                "rollout_batch_size": GROUPS,
                "group_size": ROWS,
                "prompt_length": 8,
                "response_length": LIMIT,
            },
            "learner": {
                "ranks": ranks,
                "ppo_epochs": epochs,
                "ppo_mini_batch_size": minibatch,
                "tokens_per_micro_batch": 24,
                "schedule": schedule,
            },
            "replay": {"max_staleness": 2},
            "weight_sync": {"every_steps": every},
        }
    )


def finished_trainer(loop: Any, settings: Config, **facts: Any) -> SimpleNamespace:
    """A trainer that a closing table can be made of. facts: replace what it says by itself."""
    coordinator = SimpleNamespace(
        times=PublicationTimes(
            count=4, learner_waited=0.4, repeated=1, caches_kept=1, caches_recomputed=206
        ),
        weight_metrics=lambda: {"weights/probes": 3.0, "weights/drift": 2e-6},
    )
    system = SimpleNamespace(
        loop=loop,
        coordinator=coordinator,
        actors=SimpleNamespace(budget=SimpleNamespace(restarts=0)),
        supervisor=SimpleNamespace(restarts=0),
        queue_restarts=0,
        verifier_errors=SimpleNamespace(told={"crash": "crash: killed by signal 9"}),
    )
    told = {
        "system": system,
        "config": settings,
        "resumed_at": 0,
        "tracker": None,
        "run_dir": Path("/runs/r"),
        "bottleneck": None,
        "evaluations": [],
    }
    return SimpleNamespace(**told | facts)


def row(group: int, index: int) -> RowMeta:
    """2 to 13 tokens, one of them not sampled by the policy; row 2 of odd groups is cut off;
    row 0 mixes two versions.
    """
    length = 2 + (5 * group + 4 * index) % 12
    return RowMeta(
        role="train",
        length=length - 1,
        context=1,
        rewards={"correct": float(index == group % 3), "format": 0.1 * index, "note": 7.0},
        verdict=float(index == group % 3),
        finish_reason="length" if index == 2 and group % 2 else "stop",
        versions=((0, 1), (int(index == 0), length - 2)) if length > 2 else ((0, 1),),
    )


def batch_of(step: int) -> Batch:
    times = {"queued": 1.0, "first_token": 1.5, "done": 3.0, "scored": 3.5}
    ids = range(10 * step, 10 * step + GROUPS)
    return Batch(
        step,
        tuple(
            GroupMeta(
                group,
                0,
                0,
                "a",
                (3 + group % 3,),
                tuple(row(group, index) for index in range(ROWS)),
                times,
                100,
            )
            for group in ids
        ),
    )
