"""From reward components to the one number of a response, before any group statistic.

Runs in: the driver and rollout actors (plain numbers, no tensor library). Hides the formulas of
reward shaping. Invariant: the same components give the same float on every process, in whatever
order the components come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from async_grpo.algo.catalog import REWARD_SHAPINGS


@dataclass(frozen=True, slots=True)
class ShapedResponse:
    """What a plugin's shaping knows of a response; length and response budget in tokens."""

    rewards: Mapping[str, float]
    length: int
    limit: int


@dataclass(frozen=True)
class Shaping:
    """Shape one row's reward: weighted sum -> clamp to [-clip, clip] -> + overlong penalty ->
    plugins.

    `clip` None and `overlong_length` 0 leave the step out. `response_length`: the response budget
    in tokens. `plugins`: registered names and values of their options, in order; their modules are
    imported before `shape`. Raises ValueError for a negative clip or an impossible penalty buffer.
    """

    weights: Mapping[str, float]
    response_length: int
    clip: float | None = None
    overlong_length: int = 0
    overlong_factor: float = 1.0
    plugins: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"reward clip {self.clip}; it must be above 0, or null for none")
        if self.overlong_length:
            self._penalty(0)

    def shape(
        self, rewards: Mapping[str, float], length: int, *, total: float | None = None
    ) -> float:
        """Return the shaped reward of a response of `length` tokens with these components. total:
        their sum, where it is not that of the components as they are. Raises ValueError for a
        plugin that returns no finite number.
        """
        value = score(rewards, self.weights) if total is None else total
        if self.clip is not None:
            value = min(max(value, -self.clip), self.clip)
        if self.overlong_length:
            value += self._penalty(length)
        for name, values in self.plugins:
            response = ShapedResponse(rewards, length, self.response_length)
            found = REWARD_SHAPINGS.function(name)(
                value, response, REWARD_SHAPINGS.options(name, values)
            )
            value = float(found)
            if not math.isfinite(value):
                raise ValueError(f"reward shaping {name!r} returned {found}, no finite number")
        return value

    def _penalty(self, length: int) -> float:
        return overlong_penalty(
            length,
            max_length=self.response_length,
            buffer_length=self.overlong_length,
            factor=self.overlong_factor,
        )


def score(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Sum the components that have a weight, weighted; one that the response lacks is left out.
    Raises ValueError where it lacks them all.
    """
    counted = {name for name, weight in weights.items() if weight} or weights.keys()
    if counted and not rewards.keys() & counted:
        raise ValueError(
            f"the reward has components {sorted(rewards)} but weights name {sorted(weights)}; "
            "correct task.rewards"
        )
    return math.fsum(
        [weight * rewards[name] for name, weight in weights.items() if name in rewards]
    )


def overlong_penalty(length: int, *, max_length: int, buffer_length: int, factor: float) -> float:
    """Soft overlong punishment of a response of `length` tokens, in [-factor, 0], to be added
    (DAPO, arXiv 2503.14476 eq. 13).

    0 up to max_length - buffer_length, then linear down to -factor at max_length, and -factor
    beyond. `max_length` is the whole response budget, the punished tail included. Raises ValueError
    unless 1 <= buffer_length <= max_length and factor >= 0.
    """
    if not 1 <= buffer_length <= max_length or factor < 0:
        raise ValueError(
            f"overlong penalty over the last {buffer_length} of {max_length} tokens with factor "
            f"{factor}; the buffer must be between 1 and the response length, the factor at least 0"
        )
    excess = length - (max_length - buffer_length)
    return -factor * min(excess / buffer_length, 1.0) if excess > 0 else 0.0
