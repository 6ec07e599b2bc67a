"""Was anything lost? The journal of the run against what its processes wrote down outside the
queue.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from typing import Any

import torch
from safetensors.torch import load_file

from async_grpo.replay.history import read_history
from async_grpo.replay.ledger import State
from async_grpo.run.checkpoint import directory as checkpoint
from tests.chaos.harness import Run, alive
from tests.support.teachers import agrees

SAME_BITS = re.compile(r"the weights are the same bits at (\d+) of (\d+)")
NOT_LOST = ("ready", "training", "trained", "unused")
"""Where a completed group may be: `unused` are those that were ready when the run was ended."""


def continued_in_recorded_steps(run: Run) -> None:
    """What a killed driver had trained after its last checkpoint is trained again, and gives the
    same weights. Raises AssertionError.
    """
    text = run.log.read_text()
    found = [tuple(map(int, match)) for match in SAME_BITS.findall(text)]
    assert "resumed " in text and found, text[-4000:]
    assert all(same == compared for same, compared in found), found
    assert any(same > 0 for same, _ in found), found


def environments_closed(run: Run) -> dict[str, int]:
    """No process of environments is left, and those that were not killed have closed all but the
    ones in which they were hanging. Raises AssertionError; counts of what was compared.
    """
    opened = closed = whole = 0
    for path in run.side.folder.glob("environments-*"):
        notes = path.read_text()
        opened, closed = opened + notes.count("o"), closed + notes.count("c")
        whole += notes.count("o") == notes.count("c")
        assert notes.count("c") <= notes.count("o"), f"{path.name}: closed twice"
        assert not alive(int(path.name.partition("-")[2])), f"{path.name} still runs"
    assert opened and whole, "no process has closed all of its environments"
    return {"environments": opened, "environments_closed": closed}


def turns_trained(run: Run) -> set[int]:
    """How many turns the rows of the trained groups have that the journal still holds."""
    history = read_history(run.dir / "journal")
    trained = [
        history.group(group_id)
        for group_id, record in history.groups.items()
        if record.state is State.TRAINED
    ]
    return {len(row.segments) for group in trained if group is not None for row in group.rows}


def taught(run: Run, teacher: Any) -> int:
    """Every trained group that the journal still holds has the teacher's word for each of its
    tokens, as transformers computes it. Raises AssertionError; how many groups were compared.
    """
    history = read_history(run.dir / "journal")
    groups = [
        history.group(group_id)
        for group_id, record in history.groups.items()
        if record.state is State.TRAINED
    ]
    held = [group for group in groups if group is not None]
    for group in held:
        agrees(teacher, group)
    return len(held)


def check(run: Run, *, batch: int) -> dict[str, int]:
    """Everything that must hold when a run has ended. Raises AssertionError; counts of what was
    compared.
    """
    run.side.poll()
    history, text = read_history(run.dir / "journal"), run.log.read_text()
    assert "discarded and trained anew" not in text, "no step died twice, so none may be discarded"
    steps, acknowledged, offered, trained = _steps(run), set(), set(), {}
    for entry in run.side.entries:
        if entry.what == "offer":
            offered.add(entry.values[0])
        elif entry.what == "ack":
            acknowledged.add(entry.values[0])
        elif entry.what == "trained":
            trained.update(dict.fromkeys(entry.values[1], entry.values[0]))
    assert not [note for note in history.notes if "cut off" not in note], history.notes

    # Steps: complete, and the same groups whenever a step was trained. Of those before the first
    # checkpoint the journal keeps the sums only.
    first, last = min(history.steps), max(history.steps)
    in_steps = [group_id for ids in history.steps.values() for group_id in ids]
    assert sorted(history.steps) == list(range(first, last + 1)), (
        "a learner step is missing in the journal"
    )
    for step in range(1, last + 1):
        [*known] = steps.get(step, set())
        ids = frozenset(history.steps.get(step, known[0] if known else ()))
        assert len(ids) == batch, f"step {step} has {len(ids)} groups"
        assert known == [ids] or (step == last and not known), (
            f"step {step} was trained with {known}, the journal says {ids}"
        )
        if step < first:
            in_steps += ids
    unlisted = set(in_steps) - set(history.groups)
    assert sum(history.unlisted.values()) == len(unlisted), (history.unlisted, unlisted)

    # No group twice, and none that nobody produced.
    assert len(in_steps) == len(set(in_steps)), "a group is in two steps"
    assert set(trained) <= set(in_steps) <= offered, "a group was trained that nobody produced"

    # No completed group lost.
    listed = acknowledged - unlisted
    lost = {
        group_id: history.groups[group_id].state
        for group_id in listed
        if history.groups[group_id].state not in NOT_LOST
    }
    assert not lost, f"completed groups were lost: {lost}"
    assert all(history.groups[group_id].state != "failed" for group_id in history.groups), (
        "a group failed for good"
    )

    assert _weights_are_finite(run), "weights or losses are not finite"
    return {"acknowledged": len(acknowledged), "trained": len(in_steps), "steps": last}


def _steps(run: Run) -> dict[int, set[frozenset[int]]]:
    """Learner step -> the sets of groups with which it was trained, all ranks of one gang
    together.
    """
    gangs: dict[tuple[int, str], set[int]] = defaultdict(set)
    finished: dict[tuple[int, str], int] = defaultdict(int)
    gang_of: dict[int, str] = {}
    births: dict[str, int] = defaultdict(int)
    ranks = 1 + max(entry.values[0] for entry in run.side.having("rank"))
    for entry in run.side.having("rank"):
        number, key = entry.values
        births[f"{key}/{number}"] += 1
        gang_of[entry.pid] = f"{key}/{births[f'{key}/{number}']}"
    for entry in run.side.having("trained"):
        step, ids = entry.values
        gangs[step, gang_of[entry.pid]].update(ids)
        finished[step, gang_of[entry.pid]] += 1
    steps: dict[int, set[frozenset[int]]] = defaultdict(set)
    for (step, gang), ids in gangs.items():
        if (
            finished[step, gang] == ranks
        ):  # a rank that was killed at the end of a step has not written it down
            steps[step].add(frozenset(ids))
    return steps


def _weights_are_finite(run: Run) -> bool:
    newest = checkpoint.latest(run.dir)
    checkpoint.verify(newest)
    weights = {
        name: tensor
        for path in (newest / "hf").glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    rows = map(json.loads, (run.dir / "metrics.jsonl").read_text().splitlines())
    return (
        len(weights) > 10
        and all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
        and all(math.isfinite(row["train/loss"]) for row in rows if "train/loss" in row)
    )


def mlflow_has_all(uri: str, run: Run, steps: int) -> None:
    """Every learner step is in MLflow, whatever happened to it meanwhile. Raises AssertionError."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("async_grpo")
    [tracked] = client.search_runs([experiment.experiment_id])
    found = {point.step for point in client.get_metric_history(tracked.info.run_id, "train/loss")}
    assert found == set(range(1, steps + 1)), (
        f"MLflow lacks {sorted(set(range(1, steps + 1)) - found)} or has more: {run.text()[-1000:]}"
    )
