"""The queue's benchmark sends frames that the queue takes; its figures are its own business."""

from __future__ import annotations

from async_grpo.wire import GroupTicket, decode_group, decode_meta
from benchmarks.queue_actors import Frames, Shape


def test_the_frames_of_the_benchmark_are_those_of_their_tickets() -> None:
    frames = Frames(Shape(rows=3, tokens=5, batch=2, call=2, steps=1), "producer-1", 2)
    for first in (0, 2**31 - 2):
        tickets = [GroupTicket(first + index, 1, 7) for index in range(2)]
        for ticket, frame in zip(tickets, frames.make(tickets), strict=True):
            meta = decode_meta(frame)
            assert (meta.group_id, meta.attempt, meta.policy_version, meta.actor_id) == (
                ticket.group_id,
                1,
                7,
                "producer-1",
            )
            assert [row.versions for row in meta.rows] == [((7, 5),)] * 3 and len(
                decode_group(frame).rollouts
            ) == 3
