"""Architectures on the whole system: three steps of learner and engine, weight syncs compared with
the engine's log-probs, and the files that are left.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from async_grpo.config.load import load_config
from async_grpo.errors import SetupError, TransferMismatch
from async_grpo.observe.console.console import Console
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.trainer import Trainer
from tests.support import unrepaired
from tests.support.families import write_family
from tests.support.recipes import CONFIGS

STEPS = 3
IN_CI = "qwen3_moe"
"""A mixture of experts in packed rows; the others are slow."""
pytestmark = pytest.mark.timeout(400)


def trainer_of(home: Path, name: str, log: Any, *overrides: str) -> Trainer:
    write_family(name, home / "model")
    config = load_config(
        CONFIGS / "quickstart.yaml",
        [
            f"run={{name: {name}, dir: {home}/run, total_steps: {STEPS}}}",
            f"model={{warm_start: null, path: {home}/model}}",
            "task.name=tests.support.mixed_task:Mixed",
            "rollout.rollout_batch_size=4",
            "evaluation={before: false, max_samples: 8}",
            "weight_sync={self_check: true, verify_every: 1}",
            "tracking={mlflow: false, report: false}",
            "cluster.rollout_actors.max=1",
            "cluster.engine.max_num_seqs=32",
            "checkpoint.every_steps=1",
            *overrides,
        ],
    )
    return Trainer(config, console=Console(log))


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize(
    "name",
    [
        IN_CI,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gemma2", "falcon_h1", "mamba2", "gptj", "olmoe", "mixtral", "granitemoe")
        ),
    ],
)
def test_three_steps_of(name: str, tmp_path: Path) -> None:
    with open(tmp_path / "log.txt", "w") as log, trainer_of(tmp_path, name, log) as trainer:
        trainer.train()
        assert trainer.steps_done == STEPS
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "train/loss" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert all(line["train/grad_norm"] > 0 for line in steps)
    assert steps[-1]["weights/probes"] > 0 and steps[-1]["weights/drift"] <= 1e-4
    before = tensors(tmp_path / "model")
    last = checkpoint.path_for(tmp_path / "run", STEPS - 1)  # that of the end comes with a result
    after = tensors(last / checkpoint.MODEL)
    assert {name: one.shape for name, one in before.items()} == {
        name: one.shape for name, one in after.items()
    }
    moved = [name for name, one in before.items() if not torch.equal(one, after[name])]
    assert len(moved) > len(before) // 2


@pytest.mark.slow
def test_three_steps_with_adapters_by_version(tmp_path: Path) -> None:
    """The self-check and every weight sync compare the engine, which has the adapter, with the
    learner; no cache is computed again.
    """
    more = ["model.lora={rank: 4}", "weight_sync.lora=adapter", "learner.lr=0.01"]
    with (
        open(tmp_path / "log.txt", "w") as log,
        trainer_of(tmp_path, "qwen2", log, *more) as trainer,
    ):
        trainer.train()
        assert trainer.steps_done == STEPS
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "train/loss" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["weights/probes"] > 0 and steps[-1]["weights/drift"] <= 1e-4
    assert steps[-1]["weights/recomputed_tokens"] == steps[-1]["weights/kept_tokens"] == 0
    last = checkpoint.path_for(tmp_path / "run", STEPS - 1) / checkpoint.MODEL
    before, after = tensors(tmp_path / "model"), tensors(last)
    assert any(not torch.equal(one, after[name]) for name, one in before.items())
    assert (last / "adapter").exists(), "what is exported is both"


@pytest.mark.slow
def test_the_self_check_stops_a_run_whose_experts_are_not_packed_again(tmp_path: Path) -> None:
    """As vLLM alone does it; the trial before the run had an engine with the repair."""
    with open(tmp_path / "log.txt", "w") as log, trainer_of(tmp_path, "qwen3_moe", log) as trainer:
        trainer.check()
        with unrepaired.in_engines(), pytest.raises(TransferMismatch, match="log-probs differ by"):
            trainer.train()
        assert trainer.steps_done == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["doge", "lfm2"])
def test_what_no_engine_computes_is_refused_before_anything_starts(
    name: str, tmp_path: Path
) -> None:
    with (
        open(tmp_path / "log.txt", "w") as log,
        pytest.raises(SetupError, match="which the engine cannot run"),
        trainer_of(tmp_path, name, log) as trainer,
    ):
        trainer.train()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_small_mixture_of_experts_learns_the_quickstarts_task(tmp_path: Path) -> None:
    config = load_config(
        CONFIGS / "quickstart.yaml",
        [
            f"run={{name: experts, dir: {tmp_path}/run, total_steps: 120}}",
            "model.warm_start.experts=8",
            "tracking={mlflow: false, report: false}",
        ],
    )
    with open(tmp_path / "log.txt", "w") as log, Trainer(config, console=Console(log)) as trainer:
        before = trainer.evaluate()
        trainer.train()
        after = trainer.evaluate()
    gain = after["eval/accuracy_greedy"] - before["eval/accuracy_greedy"]
    assert gain >= 0.3, (before, after)
