"""Configurations of other systems: what each key becomes, that none is lost, that what is written
loads, and that nothing else ends in a traceback.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_grpo.config.docs import options
from async_grpo.config.docs import settings as schema
from async_grpo.config.load import load_config
from async_grpo.tools.migrate.answers import PEERS
from async_grpo.tools.migrate.command import migrate
from async_grpo.tools.migrate.draft import walk
from async_grpo.tools.migrate.page import page
from async_grpo.tools.migrate.peers import PEER_TABLES
from async_grpo.tools.migrate.settle import settle
from async_grpo.tools.migrate.source import Source, read_source, resolve_all
from tests.support import verbs
from tests.support.chosen import chosen_value
from tests.support.migrated import unnamed

FILES = Path(__file__).parent / "files"
NAMES = sorted(path.name for path in FILES.iterdir())
EXPECTED: dict[str, dict[str, Any]] = {
    "verl_grpo.yaml": {
        "rollout.rollout_batch_size": 1024,
        "rollout.group_size": 5,
        "rollout.response_length": 1024,
        "rollout.top_k": 0,
        "run.epochs": 15,
        "run.name": "qwen3_8b_function_rm",
        "learner.ppo_mini_batch_size": 256,
        "learner.tokens_per_micro_batch": 32 * 1536,
        "learner.warmup_steps": 40,
        "learner.betas": [0.9, 0.999],
        "learner.weight_decay": 0.01,
        "learner.ranks": 16,
        "learner.zero_stage": 3,
        "algorithm.clip_low": 0.2,
        "algorithm.dual_clip_loss": True,
        "algorithm.clip_ratio_c": 3.0,
        "algorithm.anchor": "recomputed",
        "algorithm.use_kl_loss": True,
        "algorithm.kl_loss_type": "low_var_kl",
        "algorithm.loss_agg_mode": "token-mean",
        "replay.max_staleness": 0,
        "evaluation.n": 0,
        "cluster.layout": "colocated",
        "task.name": "gsm8k",
    },
    "verl_dapo.sh": {
        "rollout.prompt_length": 2048,
        "rollout.response_length": 20480,
        "rollout.group_size": 16,
        "learner.ppo_mini_batch_size": 32,
        "learner.tokens_per_micro_batch": 22528,
        "learner.warmup_steps": 160,
        "algorithm.clip_high": 0.28,
        "algorithm.clip_ratio_c": 10.0,
        "algorithm.overlong_buffer.len": 4096,
        "algorithm.importance.mode": "mask",
        "algorithm.importance.lower": 0.5,
        "algorithm.importance.upper": 5.0,
        "replay.filter_groups.enable": True,
        "replay.filter_groups.metric": "acc",
        "run.total_steps": 400,
        "evaluation.every_steps": 5,
        "task.train": "data/dapo-math-17k.jsonl",
    },
    "verl_fully_async.yaml": {
        "rollout.rollout_batch_size": 128,
        "learner.ppo_mini_batch_size": 32,
        "replay.max_staleness": 5,
        "weight_sync.every_steps": 4,
        "algorithm.anchor": "behavior",
        "algorithm.adv_estimator": "rloo",
        "algorithm.policy_loss": "gspo_token",
        "algorithm.loss_agg_mode": "seq-mean-token-mean",
        "cluster.rollout_actors.max": 4,
        "cluster.layout": "split",
    },
    "roll_grpo.yaml": {
        "rollout.rollout_batch_size": 64,
        "rollout.group_size": 8,
        "rollout.top_p": 0.99,
        "rollout.top_k": 100,
        "rollout.temperature": 0.99,
        "learner.ppo_mini_batch_size": 16,
        "learner.ranks": 16,
        "learner.gradient_checkpointing": True,
        "algorithm.clip_ratio_c": 1.4,
        "algorithm.dual_clip_loss": True,
        "algorithm.whiten_advantages": True,
        "algorithm.advantage_clip": 2.0,
        "algorithm.loss_agg_mode": "seq-mean-token-mean",
        "algorithm.anchor": "recomputed",
        "checkpoint.resume": "never",
        "run.total_steps": 500,
    },
    "roll_async.yaml": {
        "replay.max_staleness": 2,
        "replay.filter_groups.accuracy_low": 0.1,
        "replay.filter_groups.zero_variance": False,
        "algorithm.adv_estimator": "reinforce",
        "algorithm.whiten_advantages": True,
        "algorithm.add_token_level_kl": True,
        "algorithm.kl_ctrl.kl_coef": 0.01,
        "algorithm.clip_high": 0.28,
        "algorithm.mask_truncated": True,
        "algorithm.reward_norm": None,  # whitening does what it would
        "algorithm.reward_shift": False,
        "learner.ppo_mini_batch_size": 64,
        "cluster.layout": "split",
    },
    "areal_grpo.yaml": {
        "rollout.rollout_batch_size": 256,
        "rollout.group_size": 4,
        "learner.ppo_mini_batch_size": 64,
        "learner.ranks": 4,
        "replay.max_staleness": 2,
        "algorithm.adv_estimator": "grpo",
        "algorithm.whiten_advantages": True,
        "algorithm.anchor": "recomputed",
        "algorithm.importance.level": "token",
        "algorithm.importance.mode": "mask",
        "algorithm.importance.upper": 5.0,
        "algorithm.clip_low": 0.4,
        "algorithm.clip_high": 0.4,
        "algorithm.reward_clip": None,
        "cluster.rollout_actors.max": 4,
        "cluster.engine.max_num_seqs": 256,
        "run.dir": "/tmp/areal/experiments/trial0",
        "task.train": "openai/gsm8k:main",
    },
    "areal_leave_one_out.yaml": {
        "algorithm.adv_estimator": "rloo",
        "algorithm.anchor": "interpolated",
        "algorithm.importance.level": "geometric",
        "algorithm.importance.mode": "truncate",
        "algorithm.importance.lower": 0.2,
        "algorithm.add_token_level_kl": True,
        "algorithm.reward_clip": 20.0,
        "algorithm.overlong_buffer.len": 4096,
        "algorithm.dual_clip_loss": True,
        "learner.tokens_per_micro_batch": "auto",
        "run.total_steps": 80,
    },
    "trl_grpo.yaml": {
        "rollout.rollout_batch_size": 32,
        "learner.ppo_mini_batch_size": 8,
        "learner.ppo_epochs": 2,
        "learner.tokens_per_micro_batch": 16 * 1536,
        "learner.warmup_steps": 80,
        "learner.schedule": "cosine",
        "model.reference_refresh_steps": 8,
        "model.dtype": "bfloat16",
        "run.total_steps": 100,
        "checkpoint.every_steps": 10,
        "evaluation.every_steps": 0,
        "algorithm.norm_adv_by_std_in_grpo": False,
        "algorithm.loss_agg_mode": "seq-mean-token-sum-norm",
        "algorithm.importance.level": "sequence",
        "algorithm.importance.upper": 3.0,
        "algorithm.kl_loss_coef": 0.04,
        "task.train": "openai/gsm8k:main",
        "cluster.layout": "colocated",
    },
    "trl_cispo.yaml": {
        "rollout.rollout_batch_size": 16,
        "learner.ppo_mini_batch_size": 4,
        "algorithm.policy_loss": "cispo",
        "algorithm.clip_ratio_high": 4.0,
        "algorithm.clip_ratio_low": 1.0,
        "algorithm.adv_std_level": "batch",
        "algorithm.importance.upper": 2.0,
        "algorithm.use_kl_loss": False,
        "model.lora.rank": 32,
        "run.epochs": 1,
        "run.name": "cispo_qwen3_4b",
    },
    "openrlhf_ppo.sh": {
        "rollout.rollout_batch_size": 128,
        "learner.ppo_mini_batch_size": 16,
        "learner.tokens_per_micro_batch": 8 * 2048,
        "learner.ranks": 8,
        "learner.lr": 5e-7,
        "algorithm.adv_estimator": "reinforce_plus_plus_baseline",
        "algorithm.clip_ratio_high": 0.27,
        "algorithm.advantage_clip": 10.0,
        "algorithm.use_kl_loss": True,
        "algorithm.kl_loss_coef": 1e-3,
        "replay.max_staleness": 0,
        "checkpoint.every_steps": 0,
        "cluster.layout": "colocated",
        "cluster.engine.tensor_parallel_size": 1,
        "task.train": "OpenRLHF/prompt-collection-v0.1",
    },
    "openrlhf_async.txt": {
        "replay.max_staleness": 2,
        "replay.filter_groups.enable": True,
        "learner.ppo_mini_batch_size": 128,
        "learner.schedule": "cosine",
        "algorithm.adv_estimator": "grpo",
        "algorithm.add_token_level_kl": False,
        "algorithm.importance.mode": "mask",
        "algorithm.dual_clip_loss": True,
        "algorithm.clip_ratio_c": 10.0,
        "algorithm.overlong_buffer.len": 1024,
        "cluster.rollout_actors.max": 4,
        "seed": 7,
    },
    "prime_rl.toml": {
        "rollout.rollout_batch_size": 32,
        "rollout.group_size": 16,
        "rollout.prompt_length": 1024,
        "rollout.response_length": 3072,
        "replay.max_staleness": 4,
        "replay.on_stale": "expire",
        "learner.betas": [0.9, 0.999],
        "learner.weight_decay": 0.01,
        "algorithm.policy_loss": "dppo",
        "algorithm.policy_loss.dppo.low": 0.15,
        "algorithm.behavior_penalty": 1e-3,
        "algorithm.norm_adv_by_std_in_grpo": False,
        "algorithm.anchor": "behavior",
        "learner.ranks": 2,
        "cluster.engine.tensor_parallel_size": 2,
        "run.total_steps": 500,
    },
    "prime_rl_orchestrator.toml": {
        "rollout.rollout_batch_size": 16,
        "algorithm.adv_estimator": "maxrl",
        "replay.max_staleness": 2,
        "rollout.temperature": 0.7,
        "model.path": "PrimeIntellect/Qwen3-4B",
    },
}
OTHER_HOMES = {
    ("areal", "experiment_name"): "trial_name is the run's",
    ("areal", "kl_estimator"): "of the KL in the reward",
    ("areal", "kl_ctl"): "0 is off",
    ("openrlhf", "train_batch_size"): "the minibatch, as `answers` says",
    ("openrlhf", "batch_size"): "train.batch_size is the minibatch",
    ("openrlhf", "init_kl_coef"): "in the loss with use_kl_loss",
    ("openrlhf", "n_samples_per_prompt"): "eval.n_samples_per_prompt is of evaluations",
    ("openrlhf", "dataset"): "eval.dataset is of evaluations",
    ("trl", "beta"): "0 is off",
    ("trl", "scale_rewards"): "batch is a level",
    ("verl", "n_gpus_per_node"): "rollout.n_gpus_per_node is of the engines",
}
"""Keys that are something else in this system than `answers.PEERS` has for their name."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the command writes of every file."""
    home = tmp_path_factory.mktemp("migrated")
    for name in NAMES:
        assert verbs.migrate([str(FILES / name), "-o", str(home / f"{name}.yaml")]) == 0
    return {name: home / f"{name}.yaml" for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_keys_become_what_they_mean(name: str, written: dict[str, Path]) -> None:
    config = load_config(written[name])
    assert {key: chosen_value(config, key) for key in EXPECTED[name]} == EXPECTED[name]


def test_the_command_prints_what_it_would_write(written: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "async_grpo", "migrate", str(FILES / "prime_rl.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, written["prime_rl.toml"].read_text())
    assert done.stderr.startswith("prime-rl: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", NAMES)
def test_no_key_is_lost(name: str, written: dict[str, Path]) -> None:
    source, text = read_source(FILES / name), written[name].read_text()
    assert len(source.given) > 10 and unnamed(source, text) == []
    reasons = re.sub(r"\s*\n# +", " ", text.partition("# Not taken over")[2])
    sections = {key for key in schema() if "." not in key and schema()[key].section}
    for named in re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:[: ][^`]*)?`", reasons):
        assert named.split(".")[0] not in sections or named in schema(), named
    assert "no counterpart is known" not in reasons.replace("no_such_key_of_roll: 3 -- no", "")


def test_a_key_and_its_reason_are_on_their_line(written: dict[str, Path]) -> None:
    text = written["verl_grpo.yaml"].read_text()
    assert "\n  group_size: 5  # actor_rollout_ref.rollout.n\n" in text
    assert "\n  top_k: 0  # actor_rollout_ref.rollout.top_k: -1\n" in text
    assert "\n  weight_decay: 0.01  # verl's default\n" in text
    assert "\n#   trainer.critic_warmup: 0 -- there is no critic here\n" in text
    assert '${oc.env:HDFS_DIR}" -- it refers to something that the file does not hold' in text
    given_twice = written["verl_dapo.sh"].read_text()
    assert "\n#   trainer.test_freq: 10 -- given again further on, which counts\n" in given_twice


def test_tables_name_settings_and_agree_with_the_answers() -> None:
    found = [(one.option, key, rule.ours) for one in PEER_TABLES.values() for rule in one.rules
             for key in rule.keys.split() if rule.ours]  # fmt: skip
    assert len(found) > 150 and {ours for _, _, ours in found} <= schema().keys() | options().keys()
    for name in NAMES:
        draft = migrate(FILES / name)
        homes: dict[str, list[str]] = {}
        for ours, kept in draft.kept.items():
            for key in kept.keys:
                homes.setdefault(key, []).append(ours)
        told = ((key, PEERS.get(key.rpartition(".")[2], "")) for key in homes)
        sides = ("algorithm.clip_ratio", "algorithm.clip_ratio_low")
        found += [
            (draft.peer.option, key, homes[key][0])
            for key, home in told
            if home and home not in homes[key] and (home, homes[key][0]) != sides
        ]
    others = set()
    for option, key, ours in found:
        leaf = key.lstrip("^*.").rpartition(".")[2]
        others |= {(option, leaf)} if PEERS.get(leaf, ours) != ours else set()
    assert others == set(OTHER_HOMES)


@pytest.mark.parametrize(
    ("name", "recipe", "apart"),
    [
        ("verl_grpo.yaml", "verl_grpo", {"anchor"}),
        ("roll_grpo.yaml", "roll_grpo", {"anchor", "reward_clip"}),  # which changes nothing
        ("areal_grpo.yaml", "decoupled_ppo", set()),
    ],
)
def test_an_example_has_the_mathematics_of_our_recipe_of_it(
    name: str, recipe: str, apart: set[str], written: dict[str, Path]
) -> None:
    theirs, ours = (load_config(one).algorithm.model_dump() for one in (written[name], recipe))
    sides = {"clip_ratio", "clip_ratio_low", "clip_ratio_high"}  # of the table above
    assert {key for key in ours if theirs[key] != ours[key]} - sides == apart


def test_every_pattern_reaches_its_rule() -> None:
    for peer in PEER_TABLES.values():
        for rule in peer.rules:
            for pattern in rule.keys.split():
                key = pattern.lstrip("^").replace("*", "any")
                assert rule in (peer.rule(key), peer.rule(f"algorithm.{key}")), pattern


# ---- anything at all

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(0, 300),
    st.floats(),
    st.sampled_from(
        [
            "",
            "x",
            "none",
            "1e-6",
            "0.5_2.0",
            "#",
            "a\nb",
            "${a.b}",
            "{time}{x}",
            "/" + "y" * 300,
            "é🙂",
        ]
    ),
    st.lists(st.one_of(st.integers(), st.text(max_size=3)), max_size=3),
    st.just({}),
)


@given(data=st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_values_are_the_result_loads_and_names_every_key(
    data: st.DataObject, tmp_path: Path
) -> None:
    source = SOURCES[data.draw(st.sampled_from(NAMES))]
    given = dict(source.given)
    for key in data.draw(st.lists(st.sampled_from(sorted(given)), max_size=8, unique=True)):
        if data.draw(st.booleans()):
            given[key] = data.draw(ODD)
        else:
            del given[key]
    given["a_key.that_nobody_has"] = data.draw(ODD)
    resolved, unresolved = resolve_all(given)
    odd = Source(source.name, resolved, source.program, (), frozenset(unresolved))
    option = data.draw(st.sampled_from([source.name.split("_")[0], *PEER_TABLES]))
    draft = walk(odd, PEER_TABLES["prime-rl" if option == "prime" else option])
    config = settle(draft)
    out = tmp_path / "out.yaml"
    out.write_text(page(draft), encoding="utf-8")
    loaded = load_config(out)
    assert loaded.model_dump(exclude={"run"}) == config.model_dump(exclude={"run"})
    assert unnamed(odd, out.read_text(encoding="utf-8")) == []


SOURCES = {name: read_source(FILES / name) for name in NAMES}
