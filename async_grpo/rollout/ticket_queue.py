"""The replay queue as a rollout actor sees it.

Runs in: rollout actors, which talk to the queue's process. Hides nothing.
"""

from __future__ import annotations

from typing import Protocol

from async_grpo.replay.actor_reports import ActorReport
from async_grpo.replay.rules import Verdict
from async_grpo.wire.codec import Buffer, GroupTicket


class TicketQueue(Protocol):
    """The queue as a rollout actor sees it."""

    async def acquire(
        self,
        actor_id: str,
        version: int,
        holding: list[tuple[int, int]],
        want: int,
        report: ActorReport | None,
    ) -> list[GroupTicket] | None:
        """At most `want` tickets; None when the run is over."""

    async def put(self, actor_id: str, frames: list[Buffer]) -> list[Verdict]:
        """Hand in finished groups."""

    async def fail(
        self, actor_id: str, tickets: list[GroupTicket], reason: str, tokens: list[int]
    ) -> None:
        """Give tickets back, with the tokens that were sampled for each."""
