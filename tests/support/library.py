"""A small configuration for runs that a script drives, and what is left of them in Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray._private import state
from ray.util.placement_group import placement_group_table

from async_grpo.config.schema import Config

STEPS = 6


def settings(directory: Path, model: str, **run: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "library", "dir": str(directory), "total_steps": STEPS, **run},
            "model": {"path": model},
            "task": {"name": "arithmetic"},
            "rollout": {
                "rollout_batch_size": 4,
                "group_size": 4,
                "prompt_length": 16,
                "response_length": 6,
            },
            "learner": {"lr": 1e-3},
            "evaluation": {"max_samples": 8, "n": 0, "before": False},
            "checkpoint": {"every_steps": 2, "keep": 4},
            "tracking": {"mlflow": False, "report": False},
            "cluster": {"rollout_actors": {"max": 1}, "engine": {"kv_cache_gb": 0.01}},
        }
    )


def residents() -> list[str]:
    """Living actors, and reservations, of the cluster."""
    actors = state.actors().values()
    living = [one["ActorClassName"] for one in actors if one["State"] != "DEAD"]
    groups = placement_group_table().values()
    return living + [one["state"] for one in groups if one["state"] != "REMOVED"]
