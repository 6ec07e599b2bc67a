"""Journals and checkpoints that were written before the package was laid out anew: they read, and
resume, as they did then. tests/data/before holds them with what that program said.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from async_grpo.replay.history import History, read_history
from async_grpo.replay.ledger import State
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.resume import open_queue
from async_grpo.rollout.engine.base import Sampling
from async_grpo.rollout.partial import PartialFile
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.wire.groups import GroupTicket
from tests.support.journal_life import journal_in, problem_of_id, queue_settings
from tests.support.queues import Clock

BEFORE = Path(__file__).resolve().parents[1] / "data" / "before"


def plain(value: Any) -> Any:
    """As JSON keeps it."""
    return json.loads(json.dumps(value))


def read(name: str) -> dict[str, Any]:
    return json.loads((BEFORE / name / "expected.json").read_text(encoding="utf-8"))


def facts(history: History) -> dict[str, Any]:
    return plain(
        {
            "groups": {group_id: asdict(record) for group_id, record in history.groups.items()},
            "steps": history.steps,
            "live": history.live,
            "starts": [asdict(start) for start in history.starts],
            "unlisted": history.unlisted,
            "notes": history.notes,
        }
    )


async def taken_over(queue: ReplayQueue, step: int) -> dict[str, Any]:
    ledger = queue.ledger
    found = {
        "report": None if queue.report is None else str(queue.report),
        "rolls_to": queue.rolls_to,
        "ledger": ledger.snapshot(),
        "ready": list(ledger.slots[State.READY]),
        "again": queue._admission.again(),
        "frames": {
            entry.group_id: hashlib.sha1(entry.frame).hexdigest()
            for entry in ledger.entries.values()
            if entry.frame
        },
    }
    batch = await queue.get_batch(step + 1)
    groups = None if batch is None else [meta.group_id for meta in batch.groups]
    return plain({**found, "batch": groups})


@pytest.mark.parametrize("name", ["fifo-wait", "oldest-mask"])
def test_a_journal_of_before_tells_the_same_history(name: str) -> None:
    assert facts(read_history(BEFORE / name / "journal")) == read(name)["history"]


@pytest.mark.parametrize("name", ["fifo-wait", "oldest-mask"])
async def test_a_run_of_before_goes_on_from_every_checkpoint(name: str, tmp_path: Path) -> None:
    """With lost steps rolled forward or discarded, half-generated groups, the same or a smaller
    bound; and the process of the queue that died goes on.
    """
    recorded = read(name)
    resumed = 0
    for index, start in enumerate(recorded["starts"]):
        directory = tmp_path / str(index)
        shutil.copytree(BEFORE / name / "journal", directory)
        problem = None if start["settings"]["retire_at"] is None else problem_of_id
        settings = queue_settings(**start["settings"], problem=problem, trained_steps=start["step"])
        snapshot = recorded["snapshots"][start["snapshot"]]
        if snapshot is not None:
            snapshot = {**snapshot, "beginnings": start["beginnings"]}
        journal = journal_in(directory, start["start"], lost_steps=start["lost_steps"])
        queue = open_queue(settings, journal, snapshot=snapshot, clock=Clock())
        expected = start["expected"]
        # of tasks and difficulty, which are newer
        expected["ledger"] |= {"owed": {}, "rates": [], "mixed": [], "accuracies": {}}
        assert await taken_over(queue, start["step"]) == expected, index
        resumed += queue.rolls_to is not None or queue.ledger.run_epoch > 0
    assert resumed > 3


def test_a_checkpoint_of_before_is_whole_and_its_beginnings_are_read() -> None:
    path = checkpoint.path_for(BEFORE / "run", 1)
    assert checkpoint.latest(BEFORE / "run") == path
    manifest = checkpoint.verify(path)
    assert manifest["format_version"] == 2 and manifest["step"] == 1
    assert set(manifest["files"]) == {"learner/driver.json", "partial.msgpack", "queue.json"}
    snapshot = checkpoint.Origin(path, 1).snapshot()
    assert snapshot is not None and snapshot in read("oldest-mask")["snapshots"]
    partial = PartialFile.at(path / "partial.msgpack")
    assert partial is not None
    assert [tuple(one) for one in partial.starts] == [(7, 2, 1, 1, 1, 3), (0, 1, 0, 1, 2, 9)]
    counts: Counter[str] = Counter()
    wanted = [Sampling(n=1, max_tokens=8, temperature=1.0)]
    [response] = partial.take(GroupTicket(7, 2, 1), [9], wanted, counts)
    assert response.token_ids.tolist() == [3, 4, 5]
    assert response.logprobs.tolist() == pytest.approx([-0.03, -0.04, -0.05])
    assert response.labels == [("v0.1", 0, 3)] and counts["continued_tokens"] == 3
    partial.close()
