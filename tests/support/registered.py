"""A user's module that registers a reward shaping and a group filter, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from async_grpo.algo.catalog import register_group_filter, register_reward_shaping
from async_grpo.algo.filters import GroupFacts
from async_grpo.algo.rewards import ShapedResponse


@dataclass(frozen=True)
class Lengthy:
    """Options of the shaping."""

    per_token: float = 0.5


@register_reward_shaping("lengthy", options=Lengthy)
def lengthy(reward: float, response: ShapedResponse, options: Lengthy) -> float:
    return reward + options.per_token * response.length


@register_group_filter("first_right")
def first_right(group: GroupFacts, options: None) -> str | None:
    return "first_right" if group.verdicts[0] == 1.0 else None
