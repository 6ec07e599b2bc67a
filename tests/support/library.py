"""A small configuration for runs that a script drives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
