"""Models that ZeRO-3 divides: a rank holds a slice of every parameter.

Runs in: learner ranks. Hides what DeepSpeed makes of such a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from async_grpo.learner.division import Division
from async_grpo.learner.experts import blocks


class ZeroDivision(Division):
    """The division of ZeRO-3. What it has not divided counts as whole."""

    sharded = True

    def full_shape(self, parameter: Tensor) -> tuple[int, ...]:
        """See `Division`."""
        return tuple(getattr(parameter, "ds_shape", parameter.shape))

    def gathered(
        self, parameters: Sequence[nn.Parameter], *, modify: bool = False
    ) -> AbstractContextManager[None]:
        """See `Division`."""
        import deepspeed

        return deepspeed.zero.GatheredParameters(
            list(parameters), modifier_rank=0 if modify else None
        )


@contextmanager
def divided(settings: dict[str, Any]) -> Iterator[None]:
    """Inside, a model that transformers loads is divided over the ranks layer by layer: no rank
    ever holds all of it. Collective. settings: DeepSpeed's, of stage 3.
    """
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    kept = HfDeepSpeedConfig(settings)  # transformers looks at it as long as it lives, anywhere
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del kept


def gather_experts_together(hf: nn.Module, division: Division) -> None:
    """Let a block's weights be gathered together: ranks route tokens to different experts, and
    would wait for each other where one needs an expert that another does not.
    """
    from deepspeed.utils import set_z3_leaf_module

    for block in blocks(hf, division):
        if isinstance(block.held, nn.ModuleList):
            set_z3_leaf_module(block.module, True)
