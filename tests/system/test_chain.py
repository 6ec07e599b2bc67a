"""Episodes on the whole system: the chain is learned with a tool whose answers nobody can guess,
and not without reading them.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.wire.groups import Group, Row
from tests.support.chain_runs import run_chain
from tests.support.engine_weights import learner_logprobs

STEPS = 20
pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_chain(tmp_path_factory.mktemp("chain"), f"run.total_steps={STEPS}")


def test_the_chain_is_learned(chain: dict[str, Any]) -> None:
    assert chain["accuracy"][0] <= 0.5 and chain["accuracy"][-1] >= 0.85, chain["accuracy"]
    assert [line["step"] for line in chain["steps"]] == list(range(1, STEPS + 1))
    bound = chain["config"].replay.max_staleness
    assert all(0 <= line["train/staleness_max"] <= bound for line in chain["steps"])


def test_log_probs_of_all_turns_are_the_learners(chain: dict[str, Any]) -> None:
    """Whatever stands between two turns, and whenever new weights come."""
    for name in ("weights/sampler_error", "weights/kv_cache_error"):
        seen = [line[name] for line in chain["steps"] if name in line]
        assert seen and max(seen) <= 1e-4, name


def test_every_sampled_token_has_the_log_prob_of_its_version(chain: dict[str, Any]) -> None:
    """Against plain forward passes of the model of each version, in rows during which weights came
    between two turns, and within one; the version before gives others.
    """
    between = within = 0
    rows = [(group, row) for group in chain["groups"] for row in group.rows]
    mixed = [
        (group, row)
        for group, row in rows
        if len(row.versions) > 1 and row.versions[0].policy_version >= 2
    ]
    inside = [one for one in mixed if changes_inside_a_turn(one[1])]
    outside = [one for one in mixed if not changes_inside_a_turn(one[1])]
    picked = [one for kind in (inside, outside) for one in kind[:: max(1, len(kind) // 30)][:30]]
    errors: list[float] = []
    others: list[float] = []
    for group, row in picked:
        within += changes_inside_a_turn(row)
        between += not changes_inside_a_turn(row)
        sampled = np.concatenate(
            [
                np.arange(end - count, end)
                for end, (_, count) in zip(
                    np.cumsum([sum(pair) for pair in row.segments]), row.segments, strict=True
                )
            ]
        )
        prompt = group.prompts[row.prompt].tolist()
        for span in row.versions:
            part = slice(span.start, span.end)
            for back, found in ((0, errors), (1, others)):
                model = model_of(chain["home"] / "run", span.policy_version - back)
                whole = learner_logprobs(model, prompt, row.response_ids, 1.0)[sampled]
                found.extend(np.abs(whole[part] - row.behavior_logprobs[part]).tolist())
    assert between >= 3 and within >= 3, (between, within)
    assert max(errors) <= 1e-4 and sum(others) / len(others) > 1e-3


def changes_inside_a_turn(row: Row) -> bool:
    turns = np.cumsum([sampled for _, sampled in row.segments])
    return any(span.start not in turns for span in row.versions[1:])


@cache
def model_of(run_dir: Path, version: int) -> torch.nn.Module:
    directory = checkpoint.path_for(run_dir, version) / checkpoint.MODEL
    return AutoModelForCausalLM.from_pretrained(directory).float().eval()


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
