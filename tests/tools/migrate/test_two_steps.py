"""Every migrated file trains two learner steps on recorded groups: its mathematics, with a tiny
model and sizes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.config.load import load_config
from async_grpo.config.schema import Config
from tests.support.models import write_model
from tests.support.recorded_steps import two_steps
from tests.support.verbs import migrate

FILES = sorted((Path(__file__).parent / "files").iterdir())
GROUPS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("models") / "policy", hidden=32)


def small(file: Path, model: str, tmp_path: Path) -> Config:
    """The migrated file with another model, sizes and devices."""
    out = tmp_path / "ours.yaml"
    assert migrate([str(file), "-o", str(out)]) == 0
    config = load_config(out)
    changes = {
        "run.dir": tmp_path,
        "run.epochs": "null",
        "run.total_steps": 2,
        "model.path": model,
        "model.dtype": "float32",
        "rollout.rollout_batch_size": GROUPS,
        "rollout.group_size": 4,
        "rollout.prompt_length": 8,
        "rollout.response_length": 6,
        "learner.ppo_mini_batch_size": min(1, config.updates_per_step - 1) or "null",
        "learner.tokens_per_micro_batch": 64,
        "learner.ranks": 1,
        "learner.zero_stage": 1,
        "learner.deepspeed": "{}",
        "learner.lr": 1e-3,
        "learner.warmup_steps": 0,
        "cluster": "{}",
    }
    if config.algorithm.overlong_buffer.enable:
        changes["algorithm.overlong_buffer.len"] = 2
    if config.model.reference_refresh_steps:
        changes["model.reference_refresh_steps"] = 2
    return load_config(out, [f"{name}={value}" for name, value in changes.items()])


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_migrated_file_trains_two_steps(file: Path, model: str, tmp_path: Path) -> None:
    config = small(file, model, tmp_path)
    algorithm = config.algorithm
    with two_steps(config, model) as (_, [_, metrics]):
        assert ("train/kl" in metrics) == algorithm.use_kl_loss
        assert ("train/importance_weight" in metrics) == (algorithm.importance.level != "none")
        assert ("time/learner_proximal" in metrics) == (algorithm.anchor == "recomputed")
