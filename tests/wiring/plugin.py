"""A user's plugin: a loss with an option, a reward shaping and a group filter, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from async_grpo.algo.catalog import (
    register_group_filter,
    register_policy_loss,
    register_reward_shaping,
)


@dataclass(frozen=True)
class Scaled:
    """How large the loss is."""

    size: float = 1.0


@register_policy_loss("scaled", options=Scaled)
def scaled(terms: Any) -> Any:
    """The plain loss, times the option."""
    return -terms.options.size * terms.advantages * terms.log_ratio, {}


@register_reward_shaping("halved")
def halved(reward: float, response: Any, options: Any) -> float:
    """Half of the reward of long responses."""
    return reward / 2 if response.length > 8 else reward


@register_group_filter("wordless")
def wordless(group: Any, options: Any) -> str | None:
    """Reject the groups whose last response is right."""
    return "wordless" if group.correct[-1] else None
