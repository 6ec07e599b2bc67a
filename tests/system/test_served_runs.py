"""Episodes over HTTP on the whole system: programs, and workers that ask for episodes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.chain_runs import PROGRAM, run_chain
from tests.support.processes import marked
from tests.support.waiting import wait_until

STEPS, GROUPS, SIZE = 2, 4, 4
EXAMPLES = PROGRAM.parents[1]
AGENT = EXAMPLES / "openai_loop" / "agent.py"
PLAIN = EXAMPLES.parent / "tests" / "agents" / "endpoint" / "agents" / "plain_chain.py"
pytestmark = pytest.mark.timeout(200)


@contextmanager
def worker_of(run_dir: Path) -> Iterator[None]:
    """The worker of the examples."""
    worker = EXAMPLES / "workers" / "worker.py"
    command = [sys.executable, str(worker), str(run_dir), "--slots", "3", "--"]
    with subprocess.Popen([*command, sys.executable, str(PLAIN)]) as process:
        try:
            yield
        finally:
            process.kill()


def run(home: Path, *more: str) -> dict[str, Any]:
    return run_chain(
        home,
        f"run.total_steps={STEPS}",
        f"rollout.rollout_batch_size={GROUPS}",
        f"rollout.group_size={SIZE}",
        "evaluation={max_samples: 4, n: 0}",
        "checkpoint.every_steps=0",
        *more,
        recipe=PROGRAM,
    )


def check(found: dict[str, Any]) -> None:
    assert [line["step"] for line in found["steps"]] == [1, 2]
    assert len(found["groups"]) == STEPS * GROUPS
    # of tokens of the weights that are trained: a step may have none
    name = "weights/sampler_error"
    errors = [line[name] for line in found["steps"] if name in line]
    assert errors and max(errors) <= 1e-4, "engine and learner read other tokens"
    for group in found["groups"]:
        assert len(group.rows) == SIZE and len(group.prompts) == 1
        assert sum(name.startswith("episode_") for name in group.times) == SIZE
        for row in group.rows:
            assert {context for context, _ in row.segments[1:]} <= {2}
    turns = {len(row.segments) for group in found["groups"] for row in group.rows}
    assert max(turns) > 1
    last = found["steps"][-1]
    assert last["rollout/requests/answered"] >= STEPS * GROUPS * SIZE


@pytest.mark.slow  # its fast parts: tests/agents/endpoint/test_served.py, test_player.py
def test_programs_play_a_run(tmp_path: Path) -> None:
    mark = {"PROGRAM_OF": str(tmp_path)}
    options = {"command": ["python", str(AGENT)], "of": "chain", "preload": ["warm"]}
    check(run(tmp_path, f"task.options={json.dumps(options | {'variables': mark})}"))
    wait_until(lambda: not marked("PROGRAM_OF", str(tmp_path)), 20, "the programs' end")


@pytest.mark.slow  # its fast part: tests/agents/endpoint/test_work.py
def test_workers_play_a_run(tmp_path: Path) -> None:
    task = {"name": "external", "options": {"of": "chain", "lease_s": 30.0}}
    with worker_of(tmp_path / "run"):
        check(run(tmp_path, f"task={json.dumps(task)}"))
    assert list((tmp_path / "run" / "workers").iterdir()) == [], "an actor has left its address"
    assert "workers" in (tmp_path / "log.txt").read_text()
