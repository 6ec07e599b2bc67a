"""The queue's benchmark sends frames that the queue takes; its figures are its own business."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from async_grpo.cluster.queue import QueueProcess
from async_grpo.replay.queue import ReplayQueue
from async_grpo.wire.codec import GroupTicket, decode_group, decode_meta
from benchmarks.queue import actors as queue_actors
from benchmarks.queue.actors import Frames, PlainQueue, Shape


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
                decode_group(frame).rows
            ) == 3


def test_both_rivals_answer_what_producers_and_consumers_call() -> None:
    source = inspect.getsource(queue_actors)
    own = set(re.findall(r"queue\.(\w+)\.remote", source))
    named = set(re.findall(r"queue\.call\.remote\(\"(\w+)\"", source))
    assert "call" in own and named
    for rival, inner in ((PlainQueue, PlainQueue), (QueueProcess, ReplayQueue)):
        assert all(hasattr(rival, name) for name in own)
        assert all(hasattr(inner, name) for name in named)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", ["small", "single"])
def test_every_part_measures_something(part: str) -> None:
    command = ["-m", "benchmarks.queue", "--only", part, "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"^\| .*\d", done.stdout, re.MULTILINE), done.stdout
