"""A run that is killed in mid-response, and what it leaves."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from async_grpo.config.schema import Config
from async_grpo.observe.console.console import Console
from async_grpo.run.trainer import Trainer

STEPS, TOKENS = 4, 600


def settings(home: Path) -> Config:
    return Config.model_validate(
        {
            "seed": 5,
            "run": {"name": "partial", "dir": str(home / "run"), "total_steps": STEPS},
            "model": {"path": str(home / "model")},
            "task": {"name": "tests.support.mixed_task:Mixed"},
            "rollout": {
                "rollout_batch_size": 2,
                "group_size": 8,
                "prompt_length": 32,
                "response_length": TOKENS,
            },
            "replay": {"max_staleness": 1, "filter_groups": {"enable": False}},
            "algorithm": {"use_kl_loss": False},
            "learner": {"lr": 1e-9, "tokens_per_micro_batch": 4096},
            "weight_sync": {"self_check": False},
            "evaluation": {"before": False, "max_samples": 4},
            "tracking": {"mlflow": False, "report": False},
            "checkpoint": {"partial_rollouts": True},
            "cluster": {"rollout_actors": {"min": 1, "max": 1}, "engine": {"max_num_seqs": 32}},
        }
    )


def first_start(home: Path) -> None:
    """One step, then a checkpoint in the middle of long responses, and the end of the process."""

    async def under_way(trainer: Trainer) -> None:
        async with asyncio.timeout(60):
            while not [
                one
                for one, _ in await trainer.system.actors.alive()[0].partials()
                if one.responses == 8 and one.tokens > 40
            ]:
                await asyncio.sleep(0.02)

    with open(home / "first.txt", "w") as log:
        trainer = Trainer(settings(home), console=Console(log))
        trainer.train(steps=1)
        asyncio.run_coroutine_threadsafe(under_way(trainer), trainer.system.event_loop).result(
            timeout=90
        )
        trainer.save(keep_groups=True)
        os.kill(os.getpid(), signal.SIGKILL)
