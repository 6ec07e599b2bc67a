"""Signs that a policy earns its reward by something else than what the reward stands for.

    metrics of the last WINDOW learner steps -> the first ones: the score rose, and a second opinion
                                                fell, or accuracy did not rise and responses have
                                                other lengths, or repeat themselves or each other
                                             -> those before the best evaluation: the score rose,
                                                and held-out accuracy fell

Runs in: the driver. Hides which difference is more than noise. Invariants: pure functions of
metrics that are logged anyway; no alarm while the score does not rise, or while training accuracy
rises with it; each sign is told once. A second opinion is a reward component of weight 0, such as a
judge that nobody optimises (`task.judges`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, pvariance

WINDOW = 10
"""Learner steps whose means are compared."""
SURE = 4.0
"""Standard errors that a difference of means must have."""
LONGER, SHORTER = 2.0, 0.5
"""Mean length of responses as a share of the first ones."""
MORE = 0.3
"""How much larger the share of what is repeated is than at first."""
REPEATS = {
    "train/repeated_tokens": "of the tokens repeat what their response said before",
    "train/same_response": "of the groups share a response",
}
EARNED = "the reward may be earned without the task"
"""What every sign says."""
SCORE, ACCURACY, LENGTH = "rollout/score", "rollout/accuracy", "rollout/response_length"
HELD_OUT, PROBLEMS = "eval/accuracy_greedy", "eval/problems"


Steps = Sequence[Mapping[str, float]]


class RewardWatch:
    """Looks at every line of metrics of a run."""

    def __init__(self, opinions: Iterable[str] = ()) -> None:
        """opinions: reward components of weight 0."""
        self.opinions = list(opinions)
        self._first: list[Mapping[str, float]] = []
        self._last: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self._steps = 0
        self._best: tuple[float, int, Steps] | None = None
        """Best held-out accuracy, and the steps before it: how many, and the last ones."""
        self._told: set[str] = set()

    def again(self) -> RewardWatch:
        """Return one that has seen nothing, for steps that are trained anew."""
        return RewardWatch(self.opinions)

    def observe(self, metrics: Mapping[str, float]) -> list[str]:
        """Return what is to be told now, a part of a sentence each."""
        found: list[tuple[str, str]] = []
        if SCORE in metrics:
            self._steps += 1
            self._last.append(metrics)
            if self._steps <= WINDOW:
                self._first.append(metrics)
            found += self._since_the_start()
        if HELD_OUT in metrics and PROBLEMS in metrics:
            found += self._since_the_best(metrics[HELD_OUT], metrics[PROBLEMS])
        new = [text for sign, text in found if sign not in self._told]
        self._told |= {sign for sign, _ in found}
        return new

    def _since_the_start(self) -> Iterator[tuple[str, str]]:
        first, last = self._first, self._last
        if self._steps < 2 * WINDOW or _change(first, last, SCORE) < SURE:
            return
        score = f"the score rose from {_mean(first, SCORE):.2f} to {_mean(last, SCORE):.2f}"
        for name in (f"rollout/reward/{one}" for one in self.opinions):
            if _change(first, last, name) < -SURE:
                fell = f"{_mean(first, name):.2f} to {_mean(last, name):.2f}"
                yield name, f"{score}, and {name}, which has weight 0, fell from {fell}"
        if _change(first, last, ACCURACY) >= SURE / 2:
            return
        for name, what in REPEATS.items():
            before, now = _mean(first, name), _mean(last, name)
            if now - before > MORE and _change(first, last, name) > SURE:
                yield name, f"{score}, and {now:.0%} {what}, {before:.0%} at first"
        before, now = _mean(first, LENGTH), _mean(last, LENGTH)
        drifts = now > LONGER * before or now < SHORTER * before
        if drifts and len(_values(first, ACCURACY)) == len(_values(last, ACCURACY)) == WINDOW:
            yield (
                LENGTH,
                f"{score} and accuracy did not, and responses have {now:.0f} tokens instead of "
                f"{before:.0f}",
            )

    def _since_the_best(self, accuracy: float, problems: float) -> Iterator[tuple[str, str]]:
        if self._best is None or accuracy >= self._best[0]:
            self._best = accuracy, self._steps, tuple(self._last)
            return
        best, steps, before = self._best
        error = math.sqrt((best * (1 - best) + accuracy * (1 - accuracy)) / max(problems, 1))
        falls = best - accuracy > SURE * error and self._steps - steps >= WINDOW
        if falls and _change(before, self._last, SCORE) > SURE:
            yield (
                HELD_OUT,
                f"the score rose from {_mean(before, SCORE):.2f} to {_mean(self._last, SCORE):.2f} "
                f"while held-out accuracy fell from {best:.1%} to {accuracy:.1%}",
            )


def _mean(steps: Steps, name: str) -> float:
    return fmean(values) if (values := _values(steps, name)) else math.nan


def _values(steps: Steps, name: str) -> list[float]:
    return [step[name] for step in steps if name in step]


def _change(before: Steps, after: Steps, name: str) -> float:
    """Return the difference of the means in standard errors; 0 where a window is not full."""
    one, other = _values(before, name), _values(after, name)
    if min(len(one), len(other)) < WINDOW:
        return 0.0
    error = math.sqrt(pvariance(one) / len(one) + pvariance(other) / len(other))
    return (fmean(other) - fmean(one)) / max(error, 1e-6)
