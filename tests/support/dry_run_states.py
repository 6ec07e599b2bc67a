"""What a real DeepSpeed rank holds, beside the estimate of the dry run."""

from __future__ import annotations

import gc

import torch

from async_grpo.config.schema import Config
from async_grpo.run.preflight.memory import shape_of
from tests.support.learners import make_case, make_config, set_rank
from tests.support.processes import free_port


def config_of(**changes) -> Config:
    return make_config(
        algorithm={"anchor": "behavior", "importance": {"level": "none"}, "use_kl_loss": False},
        **changes,
    )


def held() -> int:
    """Bytes of all tensors that Python can reach, each storage once."""
    gc.collect()
    tensors = [
        one
        for one in gc.get_objects()
        if isinstance(one, torch.Tensor) and one.device.type == "cpu"
    ]
    return sum(
        {
            one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors
        }.values()
    )


def learner_and_case(directory: str, stage: int, dtype: str) -> tuple:
    from async_grpo.learner.learner import Learner

    buckets = {
        "reduce_bucket_size": 1000,
        "allgather_bucket_size": 1000,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
    }
    config = config_of(
        model={"path": directory, "dtype": dtype},
        learner={"zero_stage": stage, "deepspeed": {"zero_optimization": buckets}},
    )
    case = make_case(directory)
    set_rank(0, 1, free_port())
    learner = Learner(config, model_dir=directory, fetch=case.fetch, device="cpu", total_updates=10)
    return learner, case, shape_of(config, directory).parameters
