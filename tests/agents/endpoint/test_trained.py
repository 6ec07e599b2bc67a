"""What is trained of episodes that came over the endpoint: through the frame of their group to the
weights of their tokens in the loss.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from async_grpo.agents.endpoint.messages import parse
from async_grpo.algo.aggregation import AGGREGATIONS
from async_grpo.config.schema import Config
from async_grpo.rollout.chat_format import Message
from async_grpo.rollout.episodes import Episode, as_rows
from async_grpo.run.planning import RowMath
from async_grpo.wire.codec import Group, decode_meta, encode_group
from async_grpo.wire.groups import Batch
from tests.support.served_episodes import Policy, served

WEIGHTS = {"correct": 1.0}
TIMES = {"queued": 1.0, "first_token": 1.5, "done": 3.0, "scored": 3.5}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


async def talked(*, compacts: bool, correct: float) -> Episode:
    """Three turns of four tokens; the last one behind all of it, or behind a summary."""
    served_episode = served(Policy("one", "two", "six"))

    async def say(*messages: Message) -> Message:
        body = json.dumps({"model": "m", "messages": messages}).encode()
        reply = await served_episode.answer(parse(body, sampling="ignore"))
        reply.turn.read = True
        return reply.message

    first = await say(user("a?"))
    second = await say(user("a?"), first, user("b?"))
    if compacts:
        await say(user("a?"), user("in short: one, two"), user("c?"))
    else:
        await say(user("a?"), first, user("b?"), second, user("c?"))
    await served_episode.close()
    episode = served_episode.episode
    episode.rewards, episode.finish_reason = {"correct": correct}, "env_done"
    return episode


def config_of(mode: str) -> Config:
    limits: dict[str, Any] = {"prompt_length": 40, "response_length": 60, "context_length": 200}
    return Config.model_validate(
        {
            "run": {"total_steps": 1},
            "model": {"path": "m"},
            "task": {"name": "program", "options": {"command": "-", "of": "chain"}},
            "algorithm": {"loss_agg_mode": mode},
            "rollout": limits | {"rollout_batch_size": 1, "group_size": 2, "max_turns": 20},
        }
    )


@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_a_compaction_gives_two_rows_whose_tokens_weigh_as_those_of_one(mode: str) -> None:
    async def group() -> list[Episode]:
        return [await talked(compacts=False, correct=0.0), await talked(compacts=True, correct=1.0)]

    prompts, rows = as_rows(asyncio.run(group()), trained=2, weights=WEIGHTS)
    assert [(row.episode, row.segments) for row in rows] == [
        (0, [(0, 4), (2, 4), (2, 4)]),
        (1, [(0, 4), (2, 4)]),
        (1, [(0, 4)]),
    ]
    frame = encode_group(Group(0, 1, 0, "a", prompts, rows, times=TIMES))
    batch, math = Batch(1, (decode_meta(frame),)), RowMath(config_of(mode), WEIGHTS)
    values, _ = math.values(batch, {})
    assert values[0, 1] == values[0, 2] and values[0, 0] != values[0, 1]
    planned = {
        row.row: row
        for plan in math.plans(batch)
        for update in plan.updates
        for part in update
        for row in part
    }
    assert [planned[at].sampled for at in range(3)] == [12, 8, 4], "each token once"
    weights = {planned[at].weight for at in range(3)}
    assert len(weights) == 1 and weights.pop() > 0, "of equal episodes all tokens weigh the same"
