"""What a run that has begun to train can tell about its own settings.

Runs in: the driver. Hides what is remembered of the first learner steps. Invariant: each advice is given once.
"""

from __future__ import annotations

from collections.abc import Mapping

from async_grpo.config.schema import Config

FIRST_STEPS = 10
"""Learner steps that are measured before anything is said."""


class StalenessAdvice:
    """Compares the longest possible response with what `on_stale: wait` can wait for."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._speeds: list[float] = []
        self._steps: list[float] = []

    def observe(self, metrics: Mapping[str, float]) -> str | None:
        """Take the metrics of a learner step; a sentence if `wait` will idle the learner, after FIRST_STEPS of them."""
        if self._config.replay.on_stale != "wait" or "rollout/tokens_per_s_per_response" not in metrics:
            return None
        self._speeds.append(metrics["rollout/tokens_per_s_per_response"])
        self._steps.append(metrics["time/train"] + metrics["time/publish"])
        if len(self._steps) != FIRST_STEPS:
            return None
        length, bound = self._config.rollout.response_length, self._config.replay.max_staleness
        speed, step = _median(self._speeds), _median(self._steps)
        longest, patience = length / speed, (bound + 1) * step
        if longest <= patience:
            return None
        return (
            f"a response of rollout.response_length = {length} tokens takes {longest:.3g} s at the {speed:.3g} tokens per second measured, "
            f"longer than replay.max_staleness + 1 = {bound + 1} learner steps of {step:.3g} s. Whenever one comes, the learner waits for "
            f"it; replay.on_stale=mask does not, or raise replay.max_staleness to {int(-(-longest // step)) - 1}"
        )


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
