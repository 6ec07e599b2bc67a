"""What both sides of `benchmarks.vs_trl` work on: model, prompts, settings.

Runs in: the process of the benchmark. Invariant: every number that both sides need is read from one
loaded configuration, ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from async_grpo.config.load import load_config
from async_grpo.config.schema import Config
from async_grpo.contrib.warm_start.cache import ensure_warm_start
from async_grpo.tasks.base import Problem
from async_grpo.tasks.registry import load_task, problem_index
from benchmarks.harness import ROOT, real_model
from benchmarks.tails import MODELS, TailModel

WARM_START_S = 600.0


@dataclass(frozen=True)
class Workload:
    """One comparison. Figures are of the learner steps after `skip`; `micro_batch` and
    `continuous`: how TRL's side trains and generates.
    """

    name: str
    config: str
    settings: tuple[str, ...]
    rule: str
    aim: float
    steps: int
    skip: int
    micro_batch: int
    target: float | None = None
    """Held-out accuracy of greedy answers that is to be reached; None: only rates are compared."""
    evaluate_every: int = 0
    problems: int = 0
    model: TailModel | None = None
    continuous: bool = False
    pretrained: bool = False
    """Whether the model is the one of `examples/real_model`."""

    def load(self, seed: int, directory: Path) -> Config:
        """The configuration of a seed, its model made."""
        return load_config(str(ROOT / self.config), self.overrides(seed, directory))

    def overrides(self, seed: int, directory: Path) -> list[str]:
        """Changes to the configuration file, as on the command line."""
        found = [*self.settings, f"seed={seed}", f"run.total_steps={self.steps}"]
        if self.model is not None:
            place = directory / self.model.name
            if not place.exists():
                place.mkdir(parents=True)
                self.model.write(place)
            found.append(f"model.path={place}")
        return found + (real_model() if self.pretrained else [])

    def work(self, seed: int, directory: Path) -> dict[str, Any]:
        """The same for TRL's side, in plain numbers."""
        config = self.load(seed, directory)
        task, rollout, learner = load_task(config.task, config.seed), config.rollout, config.learner
        order = (
            problem_index(seed, task.fingerprint, group_id, len(task))
            for group_id in range(self.steps * rollout.rollout_batch_size)
        )
        algorithm = config.algorithm
        return {
            "model": model_of(config),
            "output": str(directory / "trl"),
            "seed": seed,
            "steps": self.steps,
            "group_size": rollout.group_size,
            "samples": rollout.rollout_batch_size * rollout.group_size,
            "response_length": rollout.response_length,
            "temperature": rollout.temperature,
            "lr": learner.lr,
            "betas": learner.betas,
            "weight_decay": learner.weight_decay,
            "grad_clip": learner.grad_clip,
            "clip_low": algorithm.clip_low,
            "clip_high": algorithm.clip_high,
            "micro_batch": self.micro_batch,
            "continuous": self.continuous,
            "rule": self.rule,
            "evaluate_every": self.evaluate_every,
            "problems": [_row(task.train(index)) for index in order],
            "held_out": [_row(problem) for problem in task.evaluation(self.problems)],
        }


def model_of(config: Config) -> str:
    """Directory of the model; a warm start is made, or found in its cache."""
    if config.model.warm_start is None:
        return config.model.path
    return ensure_warm_start(config, progress=lambda text: None, timeout_s=WARM_START_S)


def _row(problem: Problem) -> dict[str, Any]:
    return {"prompt": problem.prompt, "reference": problem.reference}


LONG = Workload(
    "long",
    "benchmarks/tails.yaml",
    (),
    "checksum",
    aim=4.0,
    steps=12,
    skip=3,
    micro_batch=64,
    model=MODELS["14M"],
)
SHORT = Workload(
    "short",
    "configs/quickstart.yaml",
    (),
    "exact",
    aim=1.0,
    steps=200,
    skip=10,
    micro_batch=256,
    target=0.9,
    evaluate_every=10,
    problems=500,
)
REAL = Workload(
    "real",
    "examples/real_model/smollm2_sums.yaml",
    ("learner.lr=2e-5",),
    "contains",
    aim=1.0,
    steps=10,
    skip=2,
    micro_batch=64,
    target=0.5,
    evaluate_every=2,
    problems=64,
    pretrained=True,
)
WORKLOADS = {workload.name: workload for workload in (LONG, SHORT, REAL)}


def smoke(workload: Workload) -> Workload:
    """A few steps of it, with a tiny model or the quickstart's own."""
    settings = (
        *workload.settings,
        "rollout.rollout_batch_size=4",
        "cluster.engine.max_num_seqs=32",
    )
    small = replace(workload, settings=settings, steps=6, skip=2, micro_batch=32)
    if workload.pretrained:  # a step of it takes long enough
        return replace(small, steps=4, skip=1, target=None, evaluate_every=0, problems=0)
    if workload.model is None:
        return replace(small, evaluate_every=3, problems=64, target=0.3)
    return replace(
        small,
        settings=(*settings, "rollout.response_length=32"),
        model=TailModel("smoke", 64, 2, 100, mean=8.0),
    )
