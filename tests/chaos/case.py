"""The run on which faults strike: two engines, a learner, short deadlines."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.chaos.agent_marks import AGENT, LEFT_S
from tests.chaos.harness import Run
from tests.support.models import write_model

R, K, ACTORS = 4, 3, 2
"""B = (K + 1) R = 16 groups may be out or waiting: those of the step in training, as many that are
ready, and some for every actor.
"""
DISK_MIB = 256


def settings(home: Path, *, ranks: int, uri: str | None = None) -> dict[str, Any]:
    """An engine generates one group at a time, so of two groups that an actor holds one is always
    being generated.
    """
    model = home / "model"
    return {
        "seed": 5,
        "run": {"name": "chaos", "total_steps": 100_000},
        "model": {"path": str(model) if model.exists() else write_model(model, positions=64)},
        "task": {"verifier": {"timeout_s": 3.0}},
        "rollout": {
            "rollout_batch_size": R,
            "group_size": 4,
            "prompt_length": 16,
            "response_length": 48,
            "group_timeout_s": 25.0,
        },
        "replay": {"max_staleness": K, "max_attempts": 20},
        "algorithm": {"use_kl_loss": False},
        "learner": {
            "lr": 1e-4,
            "ranks": ranks,
            "zero_stage": 2 if ranks > 1 else 1,
            "tokens_per_micro_batch": 4096,
        },
        "checkpoint": {"every_steps": 8, "keep": 1000, "max_failures": 50},
        "evaluation": {"before": False, "max_samples": 2},
        "tracking": {"mlflow": uri is not None, "uri": uri},
        "weight_sync": {"self_check": False, "deadlines": {"pause_s": 8.0, "resume_s": 8.0}},
        "watchdog": {"step_timeout_s": 30.0, "probe_timeout_s": 15.0},
        "cluster": {
            "rollout_actors": {"min": ACTORS, "max": ACTORS},
            "engine": {"max_num_seqs": 4},
            "restart_budget": 1000,
        },
    }


def episodes(home: Path, *, ranks: int, uri: str | None = None) -> dict[str, Any]:
    """The same with episodes of several turns, in environments; every third token ends a turn."""
    found = settings(home, ranks=ranks, uri=uri)
    (home / "model" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, *range(3, 100, 3)]})
    )
    return found | {
        "task": {"name": "tests.chaos.task:ChaoticEpisodes"},
        "environment": {"workers": 1, "step_timeout_s": 3.0},
        "rollout": found["rollout"]
        | {"response_length": 32, "turn_length": 10, "context_length": 48, "max_turns": 3},
    }


def taught(home: Path, *, ranks: int) -> dict[str, Any]:
    """The same with a teacher, which says what every sampled token is worth."""
    found = settings(home, ranks=ranks)
    path = write_model(home / "teacher", positions=128, seed=1)
    teacher = {"path": str(path), "engine": {"max_num_seqs": 8}, "timeout_s": 10.0}
    return found | {
        "frozen": {"teacher": teacher},
        # all groups wait for one process
        "watchdog": found["watchdog"] | {"step_timeout_s": 120.0},
        "algorithm": found["algorithm"] | {"distill": {"teacher": "teacher"}},
    }


def programs(home: Path, *, ranks: int, uri: str | None = None) -> dict[str, Any]:
    """The same with programs, all 64 of them at once: (K + 1) R groups of four."""
    found = episodes(home, ranks=ranks, uri=uri)
    options = {"command": ["python", str(AGENT), LEFT_S], "of": "tests.support.mixed_task:Mixed"}
    return found | {
        "task": {"name": "program", "options": options},
        "environment": {"workers": 1, "step_timeout_s": 60.0},
        "replay": found["replay"] | {"outstanding": (K + 1) * R},
        "rollout": found["rollout"] | {"group_timeout_s": 120.0},
        "cluster": found["cluster"] | {"engine": {"max_num_seqs": 32}},
    }


@contextmanager
def small_disk(run: Run) -> Iterator[bool]:
    """A disk of its own for the checkpoints; where none can be mounted, one that says that it is
    full when it is asked to.
    """
    folder = run.dir / "checkpoints"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    mounted = (
        os.geteuid() == 0
        and subprocess.run(mount, check=False, capture_output=True, timeout=10).returncode == 0
    )
    if not mounted:
        (run.side.folder / "pretend").touch()
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True, timeout=30)
