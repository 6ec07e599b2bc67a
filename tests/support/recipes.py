"""The recipes of configs/."""

from __future__ import annotations

from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


RECIPES = [
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo_scalerl",
    "rloo",
    "reinforce_plus_plus",
    "remax",
    "decoupled_ppo",
    "distill",
    "bounded_clip",
    "roll_grpo",
    "verl_grpo",
    "lmbook_grpo",
    "large_staleness",
    "quickstart",
]
