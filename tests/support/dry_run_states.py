"""What a real DeepSpeed rank holds, beside the estimate of the dry run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile

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


def most(action: Callable[[], object]) -> int:
    """Most bytes that torch's allocator gave out at a time during this, beyond those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        action()
    events = watched.profiler.kineto_results.events()
    changes = [(one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"]
    return max(accumulate(nbytes for _, nbytes in sorted(changes)))


def learner_and_case(directory: str, stage: int, dtype: str) -> tuple:
    from async_grpo.learner.learner import Learner

    config = settings(directory, stage, dtype)
    case = make_case(directory)
    set_rank(0, 1, free_port())
    learner = Learner(config, model_dir=directory, fetch=case.fetch, device="cpu", total_updates=10)
    return learner, case, shape_of(config, directory).parameters


def settings(directory: str, stage: int, dtype: str) -> Config:
    buckets = {
        "reduce_bucket_size": 1000,
        "allgather_bucket_size": 1000,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
    }
    return config_of(
        model={"path": directory, "dtype": dtype},
        learner={"zero_stage": stage, "deepspeed": {"zero_optimization": buckets}},
    )
