"""Runs of the recipe `chain`, as it is or played over HTTP, and what they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_grpo.config.load import load_config
from async_grpo.observe.console.console import Console
from async_grpo.replay.history import read_history
from async_grpo.replay.ledger import State
from async_grpo.run.trainer import Trainer
from tests.support.recipes import CONFIGS

PROGRAM = CONFIGS.parent / "examples" / "openai_loop" / "chain.yaml"


def run_chain(home: Path, *overrides: str, recipe: Path = CONFIGS / "chain.yaml") -> dict[str, Any]:
    """A run of the recipe: its evaluations and steps, and the groups that it trained."""
    config = load_config(
        recipe,
        [
            f"run={{name: chain, dir: {home}/run}}",
            "weight_sync.kv_cache=recompute",
            "evaluation.max_samples=200",
            "checkpoint={every_steps: 1, keep: 1000}",
            "tracking={mlflow: false, report: false}",
            "cluster.rollout_actors.max=1",
            *overrides,
        ],
    )
    with open(home / "log.txt", "w") as log, Trainer(config, console=Console(log)) as trainer:
        before = trainer.evaluate()
        trainer.save()  # the journal keeps all groups that come after its oldest checkpoint
        trainer.train()
        after = trainer.evaluate()
    lines = [json.loads(line) for line in (home / "run" / "metrics.jsonl").read_text().splitlines()]
    history = read_history(home / "run" / "journal")
    trained = [
        history.group(group_id)
        for group_id, record in history.groups.items()
        if record.state is State.TRAINED
    ]
    return {
        "home": home,
        "config": config,
        "steps": [line for line in lines if "train/loss" in line],
        "accuracy": [found["eval/accuracy_greedy"] for found in (before, after)],
        "groups": [group for group in trained if group is not None],
    }
