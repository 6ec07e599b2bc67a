"""Ends a run whose metric does not improve any more.

Runs in: the driver.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from async_grpo import old_names
from async_grpo.run.callbacks.base import Callback

if TYPE_CHECKING:
    from async_grpo.run.trainer import Trainer


MOST_WITHOUT = 20
"""Learner steps, or evaluations, without the metric before its name is taken for a mistake."""


class EarlyStopping(Callback):
    """Finishes the run after `patience` values of `metric` in a row without an improvement by more
    than `min_delta`, or as soon as one reaches `target`.
    """

    def __init__(
        self,
        metric: str = "eval/accuracy_greedy",
        *,
        mode: Literal["max", "min"] = "max",
        patience: int = 3,
        min_delta: float = 0.0,
        target: float | None = None,
    ) -> None:
        """Take the rule. metric: of evaluations or of learner steps (docs/reference/metrics.md).
        Raises ValueError.
        """
        if mode not in ("max", "min"):
            raise ValueError(f"mode is {mode!r}; it is max or min")
        if not isinstance(metric, str):
            raise ValueError(f"metric is {metric!r}; it is a name (docs/reference/metrics.md)")
        if not isinstance(patience, int) or patience < 1:
            raise ValueError(f"patience is {patience!r}; it is a whole number, at least 1")
        if not _is_number(min_delta) or min_delta < 0:
            raise ValueError(f"min_delta is {min_delta!r}; it is a finite number, at least 0")
        if target is not None and not _is_number(target):
            raise ValueError(f"target is {target!r}; it is a finite number, or null")
        if (now := old_names.metric(metric)) != metric:
            raise ValueError(f"metric {metric} is called {now} now")
        self._metric, self._target = metric, target
        self._sign = 1.0 if mode == "max" else -1.0
        self._patience, self._min_delta = patience, min_delta
        self._best, self._worse = -math.inf, 0
        self._seen: set[str] = set()
        self._found, self._without = False, 0

    def on_start(self, trainer: Trainer) -> None:
        """Refuse to wait for evaluations that never come. Raises ValueError."""
        if self._metric.startswith("eval/") and not trainer.config.evaluation.every_steps:
            raise ValueError(
                f"{self._metric} comes from evaluations, and evaluation.every_steps is 0; set it"
            )

    def on_step(self, trainer: Trainer, result: dict[str, Any]) -> None:
        """Look at the metrics of a learner step. Raises ValueError for a metric that none has."""
        self._look(trainer, result["training_iteration"], result)

    def on_evaluation(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        """Look at the metrics of an evaluation."""
        self._look(trainer, step, metrics)

    def on_restore(self, trainer: Trainer, step: int) -> None:
        """Begin anew: what was seen after `step` is rolled back."""
        self._best, self._worse = -math.inf, 0

    def _look(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        if self._metric not in metrics:
            if not self._found:
                self._miss(metrics)
            return
        self._found = True
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

    def _miss(self, metrics: Mapping[str, float]) -> None:
        """Count metrics of the same kind without the one that is looked at."""
        kind = self._metric.partition("/")[0] + "/"
        self._seen |= set(metrics)
        if any(name.startswith("eval/") for name in metrics) == (kind == "eval/"):
            self._without += 1
        if self._without >= MOST_WITHOUT:
            near = difflib.get_close_matches(self._metric, self._seen, n=3)
            meant = f"; there are {', '.join(near)}" if near else ""
            raise ValueError(
                f"no metric is called {self._metric}{meant} (docs/reference/metrics.md)"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
