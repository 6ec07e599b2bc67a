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


def groups_to_ask_for(places: int, *, unfinished: int, groups: int, responses: int) -> int:
    """Count the tickets to ask for, so that the engine always has a group waiting and verified
    groups do not pile up. A long response keeps its group with the actor, but not the places of
    responses that have ended.

    places: responses that the engine generates at the same time; unfinished: responses that it has;
    groups: that the actor has, scored or not; responses: of a group.
    """
    free = -(-(places - unfinished) // responses)
    return max(0, min(free, places - groups) + 1)
