"""Which groups carry no learning signal, or not the signal that was asked for.

Runs in: the replay queue and the driver (plain numbers, no tensor library). Hides the numerics of
"all equal" and of the accuracy of a group. Invariant: a group that is all equal here has advantage
0 in every estimator that compares the responses of a group.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from async_grpo.algo.catalog import GROUP_FILTERS

TOLERANCE = 1e-6
_REASON = re.compile(r"[a-z0-9_]{1,40}")


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What a plugin's filter knows of a group: one entry per response to be trained.

    `values`: the values of the rule's metric, None of a component that a response lacks.
    `correct`: 0, 1 or None. `truncated`: the response hit the response budget. `rewards`: its
    components by name. `lengths`: in tokens.
    """

    values: Sequence[float | None]
    correct: Sequence[float | None]
    truncated: Sequence[bool]
    rewards: Sequence[Mapping[str, float]]
    lengths: Sequence[int]

    @property
    def verdicts(self) -> None:
        """Raise AttributeError with the name of now."""
        raise AttributeError("`verdicts` of a group filter's facts is called `correct` now")


@dataclass(frozen=True)
class FilterRule:
    """Which groups are rejected. A group stays if no condition that is set holds.

    `zero_variance`: the values of `metric` spread by at most `tolerance` (DAPO's dynamic sampling,
    arXiv 2503.14476). `accuracy_low`, `accuracy_high`: the accuracy is not strictly between
    them; None leaves the side open. `all_truncated`: every response hit the response budget.
    `metric` is `score` (weighted reward sum), `seq_reward` (the shaped reward), `acc` (correct or
    not) or the name of a reward component. `custom`: a registered filter, with the values of its
    `options`. Raises ValueError for bounds that no group or no number can meet.
    """

    metric: str = "score"
    tolerance: float = TOLERANCE
    zero_variance: bool = True
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    all_truncated: bool = False
    custom: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.metric:
            raise ValueError(
                "the filter's metric is empty; it is score, seq_reward, acc or the name of a "
                "reward component"
            )
        if not 0 <= self.tolerance < math.inf:
            raise ValueError(
                f"the filter's tolerance is {self.tolerance}; it must be finite and at least 0"
            )
        low, high = self.accuracy_low, self.accuracy_high
        for name, bound in (("accuracy_low", low), ("accuracy_high", high)):
            if bound is not None and not 0 <= bound <= 1:
                raise ValueError(
                    f"the filter's {name} is {bound}; it must be between 0 and 1, or null for none"
                )
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"the filter's accuracy_low is {low}; it must be below accuracy_high, {high}"
            )

    @property
    def bounds_accuracy(self) -> bool:
        """Whether the rule needs the verdicts of a group."""
        return self.accuracy_low is not None or self.accuracy_high is not None

    @property
    def reads_metric(self) -> bool:
        """Whether the rule looks at the values of its metric."""
        return self.zero_variance or self.custom is not None


def filter_reason(
    rule: FilterRule,
    *,
    values: Sequence[float | None],
    verdicts: Sequence[float | None],
    truncated: Sequence[bool],
    rewards: Sequence[Mapping[str, float]] = (),
    lengths: Sequence[int] = (),
) -> str | None:
    """Why a group is rejected, or None if it stays: `all_wrong`, `all_right`, `all_equal`,
    `too_hard`, `too_easy`, `all_truncated`, or the word of the rule's custom filter.

    One entry per response to be trained: `values` of the rule's metric (where it `reads_metric`;
    None, of a component that a response lacks, is no value), `verdicts` 0 or 1 or None, whether the
    response was `truncated`; `rewards` and `lengths` are for the custom filter. The first reason in
    the order above is given. Raises ValueError for a group without responses, a value that is not
    finite, a verdict that is missing where the rule bounds the accuracy, and a custom filter that
    fails.
    """
    if (
        not verdicts
        or len(verdicts) != len(truncated)
        or (rule.reads_metric and len(values) != len(verdicts))
    ):
        raise ValueError(
            f"a group has {len(values)} values, {len(verdicts)} correctness values and "
            f"{len(truncated)} lengths; they must be equal and not 0"
        )
    known = [value for value in values if value is not None]
    if rule.zero_variance and zero_variance(known, tolerance=rule.tolerance):
        if set(verdicts) in ({0.0}, {1.0}):
            return "all_right" if verdicts[0] else "all_wrong"
        return "all_equal"
    if rule.bounds_accuracy:
        rate = accuracy(verdicts)
        if rate is None:
            raise ValueError("a response is not judged, and the filter bounds the accuracy")
        if rule.accuracy_low is not None and rate <= rule.accuracy_low:
            return "too_hard"
        if rule.accuracy_high is not None and rate >= rule.accuracy_high:
            return "too_easy"
    if rule.all_truncated and all(truncated):
        return "all_truncated"
    if rule.custom is None:
        return None
    return _custom_reason(
        rule.custom, GroupFacts(values, verdicts, truncated, rewards, lengths), rule.options
    )


def _custom_reason(name: str, facts: GroupFacts, options: Mapping[str, Any]) -> str | None:
    try:
        reason = GROUP_FILTERS.function(name)(facts, GROUP_FILTERS.options(name, options))
    except Exception as error:
        raise ValueError(f"group filter {name!r} failed: {error!r}") from error
    if reason is not None and not (isinstance(reason, str) and _REASON.fullmatch(reason)):
        raise ValueError(
            f"group filter {name!r} returned {reason!r}; a reason is None or one word of at most "
            "40 letters a-z, digits and _"
        )
    return reason


def zero_variance(values: Sequence[float], *, tolerance: float = TOLERANCE) -> bool:
    """Whether the values of one group are all equal: spread (max - min, in float64) at most
    `tolerance`, since three rewards of 0.1 have a computed deviation of 1.4e-17, which is not 0. A
    group of one is all equal. Raises ValueError for a value that is not finite.
    """
    numbers = [float(value) for value in values]
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"a group has values {numbers}; all must be finite")
    return len(numbers) < 2 or max(numbers) - min(numbers) <= tolerance


def accuracy(verdicts: Sequence[float | None]) -> float | None:
    """Mean verdict of a group, or None where one is missing or there are none. Correctly rounded: 9
    of 10 is exactly 0.9.
    """
    known = [verdict for verdict in verdicts if verdict is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(verdicts) else None
