"""Episodes on the whole system: the chain is learned with a tool whose answers nobody can guess,
and not without reading them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config.load import load_config
from async_grpo.groups import Group
from async_grpo.observe.console.console import Console
from async_grpo.replay.history import read_history
from async_grpo.replay.ledger import State
from async_grpo.trainer import Trainer
from tests.support.recipes import CONFIGS

STEPS = 20
pytestmark = pytest.mark.timeout(280)


def run(home: Path, *overrides: str) -> dict[str, Any]:
    """A run of the recipe: its evaluations and steps, and the groups that it trained."""
    config = load_config(
        CONFIGS / "chain.yaml",
        [
            f"run={{name: chain, dir: {home}/run, total_steps: {STEPS}}}",
            "weight_sync.kv_cache=recompute",
            "evaluation.max_samples=200",
            "tracking={mlflow: false, report: false}",
            "cluster.rollout_actors.max=1",
            *overrides,
        ],
    )
    with open(home / "log.txt", "w") as log, Trainer(config, console=Console(log)) as trainer:
        before = trainer.evaluate()
        trainer.train()
        after = trainer.evaluate()
    lines = [json.loads(line) for line in (home / "run" / "metrics.jsonl").read_text().splitlines()]
    history = read_history(home / "run" / "journal")
    trained = [
        history.group(group_id)
        for group_id, record in history.groups.items()
        if record.state is State.TRAINED
    ]
    return {
        "home": home,
        "config": config,
        "steps": [line for line in lines if "train/loss" in line],
        "accuracy": [found["eval/accuracy_greedy"] for found in (before, after)],
        "groups": [group for group in trained if group is not None],
    }


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("chain"))


def test_the_chain_is_learned(chain: dict[str, Any]) -> None:
    assert chain["accuracy"][0] <= 0.5 and chain["accuracy"][-1] >= 0.85, chain["accuracy"]
    assert [line["step"] for line in chain["steps"]] == list(range(1, STEPS + 1))
    bound = chain["config"].replay.max_staleness
    assert all(0 <= line["train/lag_max"] <= bound for line in chain["steps"])


def test_log_probs_of_all_turns_are_the_learners(chain: dict[str, Any]) -> None:
    """Whatever stands between two turns, and whenever new weights come."""
    for name in ("weights/sampler_error", "weights/kv_cache_error"):
        seen = [line[name] for line in chain["steps"] if name in line]
        assert seen and max(seen) <= 1e-4, name


def test_groups_hold_episodes_of_several_turns(chain: dict[str, Any]) -> None:
    groups: list[Group] = chain["groups"]
    rollout = chain["config"].rollout
    assert len(groups) == STEPS * rollout.rollout_batch_size
    turns = [len(row.segments) for group in groups for row in group.rows]
    assert max(turns) > 2 and max(turns) <= rollout.max_turns
    for group in groups:
        assert len(group.prompts) == 1 and len(group.rows) == rollout.group_size
        for row in group.rows:
            assert len(row.behavior_logprobs) <= rollout.response_length
            assert len(row.response_ids) <= rollout.context_length
            # the environment says two characters a turn, the policy the others
            assert {context for context, _ in row.segments[1:]} <= {2}
            assert (row.verdict == 1.0) == (sum(row.turn_rewards) == 1.0)
            assert row.verdict is not None
            assert row.verdict == 0.0 or row.finish_reason == "env_done"
    mixed = [row for group in groups for row in group.rows if len(row.versions) > 1]
    assert mixed, "a publication came inside an episode"


def test_no_process_is_left(chain: dict[str, Any]) -> None:
    own = str(chain["home"]).encode()
    left = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if own in (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                left.append((entry / "cmdline").read_bytes())
        except OSError:
            continue  # it ended while we looked, or is not ours
    assert not [line for line in left if b"environments.child" in line]
