"""Queues under an invented clock, and what tests ask of them."""

from __future__ import annotations

from dataclasses import replace

from async_grpo.algo.filters import FilterRule
from async_grpo.algo.rewards import Shaping
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.rules import QueueSettings
from async_grpo.wire.codec import GroupTicket


def queue_settings(**changes: object) -> QueueSettings:
    base = QueueSettings(
        rollout_batch_size=2,
        max_staleness=1,
        total_steps=4,
        group_size=2,
        max_attempts=2,
        max_num_gen_batches=0,
        shaping=Shaping({"correct": 1.0}, 64),
        filter=FilterRule(),
    )
    settings = replace(base, **changes)
    if "outstanding" in changes:
        return settings
    return replace(settings, outstanding=settings.capacity)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def take(
    queue: ReplayQueue, want: int, *, actor: str = "a", version: int = 0, holding: tuple = ()
) -> list[GroupTicket]:
    tickets = await queue.acquire(actor, version, list(holding), want)
    assert tickets is not None
    return tickets


def ids(tickets: list[GroupTicket]) -> list[tuple[int, int]]:
    return [(ticket.group_id, ticket.attempt) for ticket in tickets]
