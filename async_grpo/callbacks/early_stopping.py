"""Ends a run whose metric does not improve any more.

Runs in: the driver.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from async_grpo.callbacks.base import Callback

if TYPE_CHECKING:
    from async_grpo.trainer import Trainer


class EarlyStopping(Callback):
    """Finishes the run after `patience` values of `metric` in a row without an improvement by more
    than `min_delta`, or as soon as one reaches `target`.
    """

    def __init__(
        self,
        metric: str = "eval/accuracy",
        *,
        mode: Literal["max", "min"] = "max",
        patience: int = 3,
        min_delta: float = 0.0,
        target: float | None = None,
    ) -> None:
        """Take the rule. metric: of evaluations or of learner steps (docs/metrics.md). Raises
        ValueError.
        """
        if mode not in ("max", "min"):
            raise ValueError(f"mode is {mode!r}; it is max or min")
        if patience < 1 or min_delta < 0:
            raise ValueError("patience is at least 1, and min_delta at least 0")
        self._metric, self._target = metric, target
        self._sign = 1.0 if mode == "max" else -1.0
        self._patience, self._min_delta = patience, min_delta
        self._best, self._worse = -math.inf, 0

    def on_step(self, trainer: Trainer, result: dict[str, Any]) -> None:
        """Look at the metrics of a learner step."""
        self._look(trainer, result["training_iteration"], result)

    def on_evaluation(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        """Look at the metrics of an evaluation."""
        self._look(trainer, step, metrics)

    def _look(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        if self._metric not in metrics:
            return
        value = metrics[self._metric]
        if self._target is not None and self._sign * value >= self._sign * self._target:
            trainer.finish(f"{self._metric} is {value:g} at step {step}, target {self._target:g}")
            return
        if self._sign * value > self._best + self._min_delta:
            self._best, self._worse = self._sign * value, 0
            return
        self._worse += 1
        if self._worse >= self._patience:
            trainer.finish(
                f"{self._metric} has not improved on {self._sign * self._best:g} in "
                f"{self._worse} values, the last {value:g} at step {step}"
            )
