"""A reference that follows the policy, on disk and in memory; the float32 head; what row
mathematics keeps over a checkpoint.
"""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from async_grpo.learner.attention import of_rows
from async_grpo.learner.learner import Learner
from async_grpo.learner.packing import pack, response_row
from async_grpo.learner.weight_files import INDEX
from async_grpo.run.planning import RowMath
from tests.support.learners import (
    SHARD_ALL,
    STEP,
    loaded,
    make_case,
    make_config,
    open_learner,
    split,
    write_neighbour,
)
from tests.support.loops import WEIGHTS, batch_of, config
from tests.support.models import write_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("models")
    policy = write_model(path / "policy")
    other = write_model(path / "other", hidden=32 * 4)
    return {
        "policy": policy,
        "reference": write_neighbour(policy, str(path / "reference")),
        "other": other,
    }


def opened(
    models: dict[str, str], case, *, stage: int, refresh: int, reference: str = "reference"
) -> AbstractContextManager[Learner]:
    settings = make_config(
        model={"reference": models[reference], "reference_refresh_steps": refresh},
        learner={"zero_stage": stage, "deepspeed": SHARD_ALL},
    )
    return open_learner(settings, models, case, name="policy")


def step(learner: Learner, case) -> float:
    """One learner step (number 3); its mean KL to the reference."""
    learner.prepare(case.plan([split(range(12), 2)]))
    total, count = learner.train(case.values, 0.0)["sums"]["train/kl"]
    return total / count


@pytest.mark.parametrize("stage", [1, 3])
def test_a_refreshed_reference_is_the_policy_and_survives_a_checkpoint(
    stage: int, models: dict[str, str], tmp_path: Path
) -> None:
    case = make_case(models["policy"])
    with opened(models, case, stage=stage, refresh=STEP) as learner:
        assert step(learner, case) > 1e-4, (
            "the first step is measured against the reference that was given"
        )
        assert step(learner, case) < 1e-12, (
            "step 3 refreshed it: now it is the policy of the step before"
        )
        learner.save(str(tmp_path), {})
        after = step(learner, case)
    with opened(models, case, stage=stage, refresh=STEP) as learner:
        learner.load(str(tmp_path))
        assert step(learner, case) == after


def test_a_refreshed_reference_stays_when_a_resumed_run_does_not_refresh(
    models: dict[str, str], tmp_path: Path
) -> None:
    case = make_case(models["policy"])
    with opened(models, case, stage=1, refresh=STEP + 1) as learner:
        assert min(step(learner, case), step(learner, case)) > 1e-4, "no refresh is due at step 3"
        learner.save(str(tmp_path / "unmoved"), {})
    with opened(models, case, stage=1, refresh=STEP) as learner:
        learner.load(str(tmp_path / "unmoved"))
        step(learner, case)
        learner.save(str(tmp_path / "moved"), {})
    with opened(models, case, stage=1, refresh=0) as learner:
        learner.load(str(tmp_path / "moved"))
        assert step(learner, case) < 1e-12
        learner.save(str(tmp_path / "again"), {})
        again = tmp_path / "again" / "reference"
        assert (again / INDEX).is_file(), "it is kept for the next resume too"
        shutil.rmtree(tmp_path / "moved" / "reference")
        with pytest.raises(ValueError, match=r"reference is missing"):
            learner.load(str(tmp_path / "moved"))
        # as versions before wrote it
        kept = load_file(next(again.glob("*.safetensors")))
        torch.save(kept, tmp_path / "moved" / "reference.pt")
        learner.load(str(tmp_path / "moved"))
        assert step(learner, case) < 1e-12


def test_a_reference_of_another_shape_cannot_be_refreshed(models: dict[str, str]) -> None:
    with (
        pytest.raises(ValueError, match=r"reference_refresh_steps.*another architecture"),
        opened(models, make_case(models["policy"]), stage=1, refresh=2, reference="other"),
    ):
        pass


def test_the_float32_head_computes_logits_in_float32(models: dict[str, str]) -> None:
    rng = np.random.default_rng(0)
    rows = [(rng.integers(3, 100, 4), rng.integers(3, 100, 20)) for _ in range(3)]
    packed, got = pack([response_row(*row) for row in rows], torch.device("cpu")), {}
    for float32 in (False, True):
        model = loaded(models["policy"], dtype=torch.bfloat16, float32_head=float32)
        got[float32] = model(packed, 1.0, False)[0]
    with of_rows(packed.layout):
        states = model.hf.base_model(
            input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False
        ).last_hidden_state[0][packed.predictors]
    logits = states.float() @ model.hf.get_output_embeddings().weight.float().T
    wanted = torch.log_softmax(logits, -1).gather(-1, packed.targets[:, None])[:, 0]
    assert torch.allclose(got[True], wanted, atol=1e-5)
    assert (got[False] - wanted).abs().max() > 1e-4
    got[True].sum().backward()
    assert model.hf.get_output_embeddings().weight.grad.dtype == torch.bfloat16


def test_row_mathematics_continues_from_its_state() -> None:
    settings = config(
        reward_norm="running",
        adv_estimator="raw",
        add_token_level_kl=True,
        kl_ctrl={"type": "adaptive", "target_kl": 0.01, "horizon": 100.0, "kl_coef": 0.2},
    )
    through, first = RowMath(settings, WEIGHTS), RowMath(settings, WEIGHTS)
    through.values(batch_of(4), dict.fromkeys(_keys(4), 0.0))
    first.values(batch_of(4), dict.fromkeys(_keys(4), 0.0))
    second = RowMath(settings, WEIGHTS, first.state())
    assert second.kl_coef == through.kl_coef < 0.2
    kl_sums = {key: 0.1 * key[1] for key in _keys(5)}
    assert second.values(batch_of(5), kl_sums) == through.values(batch_of(5), kl_sums)
    assert second.state() == through.state() != first.state()


def _keys(step: int) -> list[tuple[int, int]]:
    return [
        (group.group_id, index)
        for group in batch_of(step).groups
        for index in range(len(group.rows))
    ]
