"""Losses and advantages that need statistics of all ranks: two DeepSpeed ranks give the weights of
one, for uneven rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from async_grpo.config.schema import Config
from tests.support.learners import (
    SHARD_ALL,
    Case,
    copy_weights,
    make_case,
    make_config,
    open_learner,
    run_ranks,
    split,
    write_neighbour,
)
from tests.support.models import write_model
from tests.support.processes import free_port

DEADLINE_S = 120.0
# Rank 0 has eight rows in three micro-batches, rank 1 four in two; the third is empty.
RANK_SPLITS = {0: [[0, 3, 7], [1, 2, 8, 11], [4]], 1: [[5, 9], [6, 10], []]}

FAMILY: dict[str, dict[str, Any]] = {
    "clip_cov": {"policy_loss": {"name": "clip_cov", "ratio": 0.1, "lower": -9.0, "upper": 9.0}},
    "kl_cov": {
        "policy_loss": {"name": "kl_cov", "ratio": 0.1},
        "clip_schedule": "constant",
        "anchor": "behavior",  # |log ratio| has no gradient at 0, where a recomputed one begins
        "importance": {"level": "none"},
    },
    "m2po": {
        "policy_loss": {"name": "m2po", "budget": 1e-4},
        "clip_ratio_low": 0.01,
        "clip_ratio_high": 0.01,
        "anchor": "behavior",
        "importance": {"level": "none"},
    },
    "reinforce_plus_plus": {
        "adv_estimator": "reinforce_plus_plus",
        "gamma": 0.9,
        "use_kl_loss": False,
        "add_token_level_kl": True,
        "advantage_clip": 1.5,
    },
    "shares of the step": {
        "top_entropy_share": 0.3,
        "importance": {"level": "token", "mode": "mask", "upper": 1.05, "normalize": True},
        "rejection": [{"score": "k3", "reduce": "max", "upper": 0.5}],
        "behavior_penalty": 0.1,
    },
    "gspo": {
        "policy_loss": "gspo",
        "clip_ratio_low": 0.01,
        "clip_ratio_high": 0.01,
        "loss_agg_mode": "seq-mean-token-mean",
    },
}


def config_of(name: str, models: dict[str, str], *, ranks: int, stage: int) -> Config:
    base = make_config().algorithm.model_dump()
    return make_config(
        model={"path": models["policy"], "reference": models["reference"]},
        algorithm=base | FAMILY[name],
        learner={
            "zero_stage": stage,
            "ranks": ranks,
            "deepspeed": SHARD_ALL,
            "tokens_per_micro_batch": 48,
        },
    )


def trained(
    config: Config,
    models: dict[str, str],
    case: Case,
    splits: list[list[int]],
    *,
    rank: int = 0,
    port: int = 0,
) -> tuple[dict, dict]:
    """Weights after one update, and the token KL of the rows that this rank owns."""
    place = {"rank": rank, "world": config.learner.ranks, "port": port}
    with open_learner(config, models, case, name="policy", **place) as learner:
        kl_sums = learner.prepare(case.plan([splits]))
        learner.train(case.values, 0.05)
        return copy_weights(learner), kl_sums


def rank_main(rank: int, ports: dict[str, int], models: dict[str, str], path: str) -> None:
    """One of two ranks: every member of the family, then the results of rank 0 and its own KL sums
    into files.
    """
    torch.set_num_threads(1)
    case = make_case(models["policy"])
    for name, port in ports.items():
        stage = 3 if name == "clip_cov" else 2
        weights, kl_sums = trained(
            config_of(name, models, ranks=2, stage=stage),
            models,
            case,
            RANK_SPLITS[rank],
            rank=rank,
            port=port,
        )
        torch.save((weights if rank == 0 else {}, kl_sums), Path(path) / f"{name}-{rank}.pt")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("models")
    policy = write_model(path / "policy")
    return {"policy": policy, "reference": write_neighbour(policy, str(path / "reference"))}


@pytest.mark.slow
def test_two_ranks_equal_one(models: dict[str, str], tmp_path: Path) -> None:
    ports = {name: free_port() for name in FAMILY}
    run_ranks(rank_main, ports, models, str(tmp_path), seconds=DEADLINE_S)
    case = make_case(models["policy"])
    for name in FAMILY:
        config = config_of(name, models, ranks=1, stage=1)
        wanted, kl_sums = trained(config, models, case, split(range(12), 2))
        (weights, first), (_, second) = (
            torch.load(tmp_path / f"{name}-{rank}.pt") for rank in (0, 1)
        )
        assert weights.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert (weights[key] - tensor).norm() <= 1e-4 * tensor.norm() + 1e-4, (name, key)
        assert not first.keys() & second.keys(), "a row is owned by one rank"
        assert (first | second) == pytest.approx(kl_sums, rel=1e-4, abs=1e-5)
        assert (len(kl_sums) == 12) == (name == "reinforce_plus_plus")
