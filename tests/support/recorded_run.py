"""One real run that evaluates beside training and is stopped half way, for every module that only
reads what it left.

It is told once per test run: starting a system costs more than everything that is asserted about
it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_grpo.config.schema import Config
from async_grpo.observe.console.console import Console
from async_grpo.replay.history import read_history
from async_grpo.replay.queue import ReplayQueue
from async_grpo.run.callbacks.base import Callback
from async_grpo.run.trainer import Trainer
from tests.support.models import write_model

STEPS, BATCH = 8, 4
REJECTING = {"enable": True, "zero_variance": False, "accuracy_high": 0.75}
"""Of groups of four on a task of chance, 5 of 16 are rejected."""
PROBLEMS, SAMPLES, SAMPLE_ROWS = 40, 4, 36
"""Held-out problems, responses to each, and rows of the sample table, which shows the first and
every second step of so long a run.
"""


def settings(home: Path, model: str) -> Config:
    """Baselines, truncated responses, checks of the weights, checkpoints and evaluations: every
    kind of token and of time.
    """
    return Config.model_validate(
        {
            "seed": 11,
            "run": {"name": "counted", "dir": str(home / "run"), "total_steps": 2 * STEPS},
            "model": {"path": model},
            "task": {"name": "tests.support.mixed_task:Mixed"},
            "rollout": {
                "rollout_batch_size": BATCH,
                "group_size": 4,
                "prompt_length": 32,
                "response_length": 24,
            },
            "algorithm": {"adv_estimator": "remax", "use_kl_loss": False, "mask_truncated": True},
            "replay": {"filter_groups": REJECTING},
            "learner": {"lr": 1e-3, "tokens_per_micro_batch": 4096},
            "evaluation": {"every_steps": 3, "max_samples": PROBLEMS, "n": SAMPLES},
            "weight_sync": {"verify_every": 2},
            "tracking": {"mlflow": False, "report": False, "sample_rows": SAMPLE_ROWS},
            "checkpoint": {"every_steps": 4, "keep": 3},
            "cluster": {"rollout_actors": {"min": 1, "max": 1}, "engine": {"max_num_seqs": 16}},
        }
    )


class SamplesShown(Callback):
    """Waits for a step's samples: while they are fetched, a step that is due gives none."""

    def on_step(self, trainer: Trainer, result: dict[str, Any]) -> None:
        trainer.call(trainer.system._samples.finish())


def tell(home: Path) -> dict[str, Any]:
    """The run, while groups are ready or under way at its end: what driver, engine and queue said
    of it, and its files.
    """
    config, told = settings(home, write_model(home / "model", positions=64)), {}
    with (
        open(home / "log.txt", "w") as log,
        Trainer(config, console=Console(log), callbacks=[SamplesShown()]) as trainer,
    ):
        trainer.start()
        began = time.monotonic()
        trainer.evaluate()
        trainer.save()  # the journal keeps all groups that come after its oldest checkpoint
        trainer.train(steps=STEPS)
        trainer.evaluate()
        told["wall"] = time.monotonic() - began
        told["learner"] = asyncio.run_coroutine_threadsafe(
            _seconds(trainer), trainer.system.event_loop
        ).result(timeout=60)
        system = trainer.system
        call = system.queue.call

        async def overhear(method: Callable[..., Any], *given: Any, **named: Any) -> Any:
            if method is ReplayQueue.tell:
                _, report = given
                told["report"], told["engine_wall"] = report, time.time() - report.began
            return await call(method, *given, **named)

        system.queue.call = overhear
        told["evaluations"], told["publications"] = (
            list(trainer.evaluations),
            system.coordinator.times.count,
        )
        trainer.stop()
        told["engine_times"] = system.queue.reports.engine_times()[1]
    told["metrics"], told["samples"] = (
        lines(home / "run", "metrics.jsonl"),
        lines(home / "run", "samples.jsonl"),
    )
    return told | {
        "history": read_history(home / "run" / "journal"),
        "log": (home / "log.txt").read_text(),
    }


async def _seconds(trainer: Trainer) -> dict[str, float]:
    return trainer.system.loop.time.seconds()


def lines(directory: Path, name: str) -> list[dict[str, Any]]:
    """A file of JSON lines of a run."""
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]
