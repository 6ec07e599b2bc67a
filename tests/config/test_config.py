"""The configuration: what is accepted, what is refused and in which words, and where a run may
write.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pages
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from async_grpo.config import yaml12
from async_grpo.config.docs import options, settings
from async_grpo.config.load import ConfigError, dump, load_config, preflight_files, resolve
from async_grpo.config.schema import REFUSED_DEEPSPEED_KEYS, Config, LearnerConfig
from async_grpo.tasks.registry import create_task
from async_grpo.tools.migrate.answers import PEERS, answer
from tests.support import typed

ROOT = Path(__file__).resolve().parents[2]
NOW = datetime(2031, 2, 3, 4, 5, 6)
BASE = """\
run: {total_steps: 2}
model:
  warm_start: {}
rollout:
  group_size: 4
"""
ALIASES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i + 1}: &a{i + 1} {{p: *a{i}, q: *a{i}}}\n" for i in range(60)
)
"""Two to the power of 60 values in 60 lines."""
PACKAGE = (
    "/tmp/ray/session_2031-02-03_04-05-06_1_2/runtime_resources/working_dir_files/"
    "_ray_pkg_0123456789abcdef"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "base.yaml"
    path.write_text(BASE)
    return path


@pytest.fixture
def load_text(tmp_path: Path):
    def load(text: str, *overrides: str) -> Config:
        (tmp_path / "c.yaml").write_text(text)
        return load_config(tmp_path / "c.yaml", overrides)

    return load


def refused(path: str | Path, *overrides: str) -> str:
    """The message of the refusal, which always has the agreed form."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert 1 <= len(message.splitlines()) <= 2, message  # the exit code has the third line
    assert message.isprintable() or "\n" in message
    for jargon in ("Traceback", "pydantic", "validation error", "[type=", "input_value"):
        assert jargon not in message
    return message


# ---- reading
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_shipped_configuration_loads_and_survives_a_dump(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    (tmp_path / "copy.yaml").write_text(dump(config))
    assert load_config(tmp_path / "copy.yaml") == config
    assert config.run.name == path.stem
    create_task(config.task, config.seed)  # checks the task's options; reads no data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("3", 3),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("+2", 2),
        ("on", "on"),
        ("yes", "yes"),
        ("True", True),
        ("~", None),
        ("", None),
        ("1:30", "1:30"),
        ("2031-01-01", "2031-01-01"),
        ("1_000", "1_000"),
        ("'1e-4'", "1e-4"),
        ("[1e3, off]", [1000.0, "off"]),
        ("{a: {b: 1e-6}}", {"a": {"b": 1e-6}}),
        (".inf", float("inf")),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    read, _ = yaml12.read(text)
    assert read == value and type(read) is type(value)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text()
        | st.from_regex(r"[-+0-9.eExo:_]{1,8}", fullmatch=True),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=6,
    )
)
def test_what_is_written_is_read_back(value: object) -> None:
    assert yaml12.read(yaml12.write(value))[0] == value


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("run: {total_steps: 2}\nrun: {total_steps: 3}\n", ["line 2", "`run` is given twice"]),
        ("run:\n  total_steps: 2\n  total_steps: 3\n", ["line 3", "`total_steps` is given twice"]),
        ("run: [\n", ["not valid YAML"]),
        ("run:\n\ttotal_steps: 2\n", ["line 2", "a tab; YAML is indented with spaces"]),
        ("run:\n  total_steps: 2\n   name: x\n", ["line 3", "indentation"]),
        ("run\n  total_steps: 2\n", ["line 2", "a colon too many or too few"]),
        ("run: {name: 'x}\n", ["a quotation mark or a bracket is not closed"]),
        ("run:\n  name\n  total_steps: 1\n", ["line 3", "colon"]),
        ("run: !!python/object/apply:os.getcwd []\n", ["not valid YAML", "tag"]),
        ("1: 2\n", ["the key 1 is not text"]),
        ("- run\n", ["mapping of sections", '["run"]']),
        ("run: &a\n  x: *a\n", ["not valid YAML", "recursive"]),
        ("a: \x01\n", ["characters"]),
        ("[" * 1200, ["nested too deeply"]),
        (ALIASES, ["more than 100,000 values"]),
        ("seed: !!float\n", ["not what its tag says"]),
        ("seed: !!bool x\n", ["not what its tag says"]),
        ("seed: !!timestamp x\n", ["not what its tag says"]),
        ("seed: " + "9" * 5000, ["a number in it cannot be read"]),
        ("seed: 0x" + "f" * 5000, ["a number in it cannot be read"]),
        ("---\nseed: 1\n---\nseed: 2\n", ["another document"]),
        (
            "rollout:\n  group_size: eight\n",
            ["line 2", "`rollout.group_size`", '"eight"', "an integer >= 1"],
        ),
    ],
)
def test_unusable_files_are_refused(text: str, fragments: list[str], tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    message = refused(tmp_path / "bad.yaml")
    assert "bad.yaml" in message
    for fragment in fragments:
        assert fragment in message


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "none.yaml")
    assert "cannot be read" in refused(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: \xff}")
    assert "not UTF-8" in refused(tmp_path / "latin.yaml")


def test_an_empty_file_and_an_empty_section_are_configurations_without_settings(load_text) -> None:
    config = load_text("# nothing\n", "run.total_steps=1", "model.warm_start={}")
    assert config.rollout.group_size == Config.model_fields["rollout"].default.group_size
    assert (
        load_text(
            "rollout:\ncluster:\n  engine:\nrun: {total_steps: 1}\nmodel: {warm_start: {}}\n"
        ).cluster
        == config.cluster
    )


# ---- overrides
# --------------------------------------------------------------------------------------------------


def test_overrides(base: Path) -> None:
    config = load_config(
        base,
        [
            "learner.lr=3e-5",
            "run.total_steps=null",
            "run.epochs=2",
            "task.rewards.format=0.5",
            "task.options={digits: 3}",
            "rollout.seeded=on",
            "model.warm_start.layers=3",
            "learner.betas=[0.8, 0.9]",
            "seed=1",
            "seed=2",
            "learner.deepspeed.zero_optimization.overlap_comm=true",
        ],
    )
    assert (config.learner.lr, config.run.total_steps, config.run.epochs, config.seed) == (
        3e-5,
        None,
        2,
        2,
    )
    assert config.task.rewards == {"format": 0.5} and config.task.options == {"digits": 3}
    assert (
        config.rollout.seeded == "on"
        and config.rollout.group_size == 4
        and config.learner.betas == [0.8, 0.9]
    )
    assert config.model.warm_start is not None and config.model.warm_start.layers == 3
    assert config.learner.deepspeed == {"zero_optimization": {"overlap_comm": True}}


def test_an_override_changes_one_place_of_an_aliased_mapping(load_text) -> None:
    text = BASE + "weight_sync: {deadlines: &d {stage_s: 5}}\ntask: {options: *d}\n"
    config = load_text(text, "task.options.stage_s=9")
    assert config.weight_sync.deadlines.stage_s == 5 and config.task.options == {"stage_s": 9}


@pytest.mark.parametrize("text", ["rollout", "=3", "rollout..group_size=3", ".seed=1", "--seed"])
def test_malformed_overrides_are_refused(text: str, base: Path) -> None:
    assert "section.key=value" in refused(base, text)


def test_an_override_is_named_as_the_place_of_the_mistake(base: Path) -> None:
    assert 'override "rollout.group_size=two"' in refused(base, "rollout.group_size=two")
    assert "not valid YAML" in refused(base, "learner.betas=[0.9")
    assert '{"x": 3}; allowed is an integer' in refused(base, "rollout.group_size.x=3")


# ---- unknown keys
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "answers"),
    typed.refused(
        """\
rollout.group_siz=4
    Did you mean `rollout.group_size`?
rolout.group_size=4
    Did you mean `rollout`?
group_size=4
    `group_size` is `rollout.group_size` here.
learner.group_size=4
    `group_size` is `rollout.group_size` here.
learner.LR=1e-5
    Did you mean `learner.lr`?
replay.Max-Staleness=1
    Did you mean `replay.max_staleness`?
lr=1e-5
    `lr` is `learner.lr` here.
replay.metric=acc
    `metric` is `replay.filter_groups.metric` here.
enable=true
    `replay.filter_groups.enable` or `replay.journal.enable` or `algorithm.overlong_buffer.enable`
model.warm_start.layer=3
    Did you mean `model.warm_start.layers`?
rollout.num_return_sequences_in_group=8
    `num_return_sequences_in_group` is `rollout.group_size` here.
num_generations=8
    `num_generations` is `rollout.group_size` here.
actor_rollout_ref.rollout.n=8
    `actor_rollout_ref.rollout.n` is `rollout.group_size` here.
'data={train_batch_size: 4}'
    `data.train_batch_size` is `rollout.rollout_batch_size` here.
algorithm.epsilon_high=0.3
    `epsilon_high` is `algorithm.clip_ratio_high` here.
algorithm.loss_type=dr_grpo
    `loss_type` is `algorithm.loss_agg_mode` here.
async_generation_ratio=1
    `async_generation_ratio` is `replay.max_staleness` here.
evaluation.sampled=true
    `sampled` is `evaluation.n` here
learner.learning_rates=1
    Did you mean `learner.lr`?
learner.precision=bf16
    `precision` is `model.dtype` here
learner.precison=bf16
    Did you mean `model.dtype`?
replay.xyzzy=1
    The keys of `replay` are max_staleness, order,
xyzzy=1
    The sections are seed, run, model,
"""
    ),
)
def test_an_unknown_key_is_answered_with_ours(
    overrides: list[str], answers: list[str], base: Path
) -> None:
    message = refused(base, *overrides)
    assert "is not a setting" in message
    assert all(answer in message for answer in answers), message


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("learner.lr: 0.1\n", "In a file, it is `lr:` inside `learner:`"),
        ("learner:\n\u00a0\u00a0lr: 0.1\n", "There is a character U+00A0 in it"),
        ("learner:\n  l\u200br: 0.1\n", "There is a character U+200B in it"),
    ],
)
def test_a_key_of_a_file_that_looks_right_is_explained(
    text: str, answer: str, tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text("run:\n  total_steps: 2\n" + text)
    message = refused(tmp_path / "c.yaml")
    assert "is not a setting" in message and answer in message


def test_another_format_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[run]\ntotal_steps = 2\n")
    assert "c.toml: a configuration is YAML" in refused(tmp_path / "c.toml")


def test_mappings_are_merged_and_a_key_of_ones_own_counts_more(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "run: {total_steps: 2}\nmodel: {path: m}\nlearner: &usual\n  lr: 0.25\n"
        "task:\n  options:\n    <<: *usual\n    lr: 3\n    other: 4\n"
    )
    config = load_config(tmp_path / "c.yaml")
    assert config.task.options == {"lr": 3, "other": 4}
    (tmp_path / "c.yaml").write_text("learner: &usual\n  lr: 0.25\nrun:\n  <<: *usual\n")
    assert "line 2: `run.lr` is not a setting" in refused(tmp_path / "c.yaml")


def test_peers_keys_lead_to_settings_and_are_not_settings() -> None:
    assert set(PEERS.values()) <= {*settings(), *options()}
    assert not {
        name for name, setting in settings().items() if "." not in name or not setting.section
    } & set(PEERS)


@pytest.mark.parametrize(
    "peer",
    [
        "eps_clip",
        "max_completion_length",
        "n_samples_per_prompt",
        "beta",
        "total_epochs",
        "pg_clip",
        "metric_to_filter",
    ],
)
def test_peers_keys_are_answered_at_top_level(peer: str, base: Path) -> None:
    assert f"`{peer}` is `{PEERS[peer]}` here." in refused(base, f"{peer}=1")


def test_the_first_of_several_problems_is_told_and_the_others_are_counted(base: Path) -> None:
    message = refused(base, "rollout.group_size=x", "seed=-1", "run.nam=x")
    assert (
        "`run.nam` is not a setting" in message
        and "(2 more problems in this configuration.)" in message
    )
    message = refused(base, "replay.outstanding=3", "rollout.group_size=1")
    assert "`replay.outstanding` is 3" in message
    assert "(1 more problem in this configuration.)" in message


# ---- every key, mutated
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(settings()))
def test_every_key_refuses_a_wrong_type(name: str, base: Path) -> None:
    for wrong in ("[1, x]", "7" if "text" in settings()[name].allowed else '"\\e[31m many words"'):
        message = refused(base, f"{name}={wrong}")
        assert f"`{name}" in message and "allowed is" in message
        if "list" not in settings()[name].allowed:
            assert f"`{name}` is" in message, "and no name of a kind of value"


@pytest.mark.parametrize(
    "name", [name for name, setting in settings().items() if "mapping" not in setting.allowed]
)
def test_every_key_has_neighbours_that_do_not_exist(name: str, base: Path) -> None:
    message = refused(base, f"{name}_=1")
    assert f"`{name}_` is not a setting" in message and f"Did you mean `{name}" in message


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, setting in settings().items()
        if not setting.section and " >" in setting.allowed
    ],
)
def test_every_number_refuses_what_is_out_of_its_range(name: str, base: Path) -> None:
    wrong = "[-1.0, -1.0]" if "list" in settings()[name].allowed else "-1"
    message = refused(base, f"{name}={wrong}")
    assert f"`{name}" in message and "allowed is" in message


# ---- rules
# --------------------------------------------------------------------------------------------------

RULES: list[Any] = [
    *typed.refused("""\
run.total_steps=null
    `run.total_steps` | `run.epochs` | neither
watchdog.step_timeout_s=1e300
    `watchdog.step_timeout_s` is 1e+300 | > 0 and <= 1e+08
run.epochs=1
    `run.total_steps` | `run.epochs` | both
run.name=..
    `run.name` is ..
model.warm_start=null
    `model.path` | `model.warm_start` | neither
model.path=a/b
    `model.path` | `model.warm_start` | both
'model.warm_start={hidden_size: 100, heads: 8}'
    hidden_size` is 100 | 32, 64
learner.ppo_mini_batch_size=7
    rollout_batch_size` is 32 | ppo_mini_batch_size` 7
learner.ppo_mini_batch_size=64
    not a multiple
weight_sync.every_steps=3
    every_steps` is 3 | 2 x 32 = 64 | 3 x 32 = 96 | frees slots
weight_sync.every_steps=2 replay.max_staleness=0
    `weight_sync.every_steps` is 2 | + 1 = 1
rollout.top_k=513
    `rollout.top_k` is 513 | <= 512
rollout.top_p=0.9 "frozen={m: {path: a/b}}" algorithm.distill.teacher=m
    `rollout.top_p` is 0.9, but a teacher | leave one out
rollout.top_k=20 "cluster.engine.vllm={speculative_config: {}}"
    `rollout.top_k` is 20, and | with `cluster.engine.vllm.speculative_config` engines do not say
rollout.min_p=0.1 rollout.top_p=0.9 "cluster.engine.vllm={max_logprobs: 99}"
    `rollout.top_p` is 0.9 and `rollout.min_p` is 0.1, which | decides about `clu | remove it
rollout.group_size=1
    `rollout.group_size` is 1 | at least 2
rollout.response_length=8 algorithm.overlong_buffer.enable=true
    len` is 16 | `rollout.response_length`, 8
'algorithm.clip_schedule={name: exponential, rate: 1.5}'
    clip_schedule.rate` is 1.5 | <= 1
algorithm.importance.level=token
    importance.level: token | `algorithm.anchor: recomputed`
algorithm.importance.lower=2
    importance.lower` is 2 | below
model.reference=a/b
    `model.reference` | use_kl_loss
rollout.response_length=100000 learner.tokens_per_micro_batch=16384
    make it shorter | the model's context
algorithm.policy_loss=vanilla
    of other systems it is `ppo_clip` here
'cluster.rollout_actors={min: 3, max: 2}'
    rollout_actors.min` is 3 | 2
cluster.layout=colocated cluster.device=cpu
    colocated | cpu
cluster.layout=colocated cluster.engine.tensor_parallel_size=2
    tensor_parallel_size` is 2
cluster.layout=colocated cluster.rollout_actors.max=2
    rollout_actors.max` is 2 | equal `learner.ranks`, 1
cluster.layout=colocated cluster.rollout_actors.min=2
    rollout_actors.min` is 2 | at most `learner.ranks`, 1
cluster.engine.sleep=true replay.max_staleness=2
    cluster.engine.sleep: true` | `replay.max_staleness` to 1
cluster.engine.sleep=true cluster.layout=split replay.max_staleness=1
    cluster.engine.sleep: true` | `cluster.layout` to colocated
cluster.engine.sleep=true cluster.device=cpu replay.max_staleness=1
    cluster.engine.sleep: true`
'cluster.engine.vllm={enable_sleep_mode: true}'
    use `cluster.engine.sleep`
cluster.device=cpu weight_sync.backend=nccl
    backend: nccl` needs GPUs
'cluster.engine.vllm={max_num_seqs: 8}'
    `cluster.engine.vllm.max_num_seqs` must not | use `cluster.engine.max_num_seqs`
'cluster.engine.vllm={pipeline_parallel_size: 2}'
    vllm.pipeline_parallel_size` must not | on one node; more engines are more rollout
'cluster.engine.vllm={kv_cache_dtyp: fp8}'
    no argument | `kv_cache_dtype` may be meant.
'cluster.engine.vllm={model_len: 8}'
    `rollout.prompt_length` and `rollout.response_length` may be meant
'cluster.engine.vllm={zzz: 8}'
    vllm.zzz` is no argument of vLLM's engine: remove it
'cluster.engine.vllm={speculative_config: {}}' cluster.device=cpu
    vllm.speculative_config` is given, and engines are on CPU
cluster.device=cpu weight_sync.backend=ipc cluster.layout=colocated
    backend: ipc` needs GPUs
model.lora={} weight_sync.lora=adapter replay.on_stale=mask
    `weight_sync.lora` is adapter and `replay.on_stale` is mask
weight_sync.files=copies
    `weight_sync.files` is copies | an absolute path and an address
weight_sync.backend=nccl weight_sync.files=/mnt/weights
    `weight_sync.files` is "/mnt/weights" | no effect while `weight_sync.backend` is
weight_sync.backend=nccl weight_sync.delta=off
    `weight_sync.delta` is "off" | no effect while `weight_sync.backend` is
weight_sync.backend=ipc
    backend: ipc` | colocated
weight_sync.backend=nccl cluster.layout=colocated
    backend: nccl` | one GPU
weight_sync.delta=always weight_sync.overlap=false
    `weight_sync.delta` is always | set `weight_sync.overlap` to true
weight_sync.delta=always cluster.layout=colocated
    with ipc engines read the learner's memory
'weight_sync={delta: always, backend: {name: nccl, senders: every_rank}}'
    one rank sends
"replay.filter_groups={enable: true, metric: ''}"
    metric` is empty | score, acc
evaluation.every_steps=5 watchdog.step_timeout_s=500
    `evaluation.timeout_s` is 600 and `watchdog.step_timeout_s` is 500
learner.deepspeed.gradient_cliping=1
    deepspeed.gradient_cliping` is no setting of DeepSpeed: use learner.grad_clip.
learner.deepspeed.wall_clock_brekdown=true
    is `wall_clock_breakdown` meant?
learner.deepspeed.xyzzy=1
    `learner.deepspeed.xyzzy` is no setting of DeepSpeed: remove it.
learner.deepspeed.zero_optimization.overlap_com=true
    zero_optimization.overlap_com` is no setting of DeepSpeed: is `overlap_comm` meant?
learner.deepspeed.zero_optimization=3
    zero_optimization` is 3 | a mapping
'learner.deepspeed.zero_optimization={offload_param: {device: cpu}}'
    zero_optimization.offload_param` is given | set the stage to 3, or leave it out
"model.freeze=['embed[']"
    `model.freeze` has 'embed[' | no regular expression
weight_sync.lora=adapter
    `weight_sync.lora` is adapter, but `model.lora` is not set
model.lora={} "model.freeze=['embed']"
    `model.freeze` and `model.lora` are both set | `model.lora.target_modules`
model.lora={} model.reference_refresh_steps=5 algorithm.use_kl_loss=true
    `model.reference_refresh_steps` is 5, but with `model.lora`
replay.order=ready replay.on_stale=wait
    `replay.order: ready` | use `replay.on_stale: mask` or `expire`
tracking.register_model=adder tracking.mlflow=false
    register_model` is adder | `tracking.mlflow` is false
tracking.register_model=adder tracking.log_model_max_gb=0
    register_model` is adder | log_model_max_gb` is 0
algorithm.clip_ratio_low=1.5
    clip_ratio_low` is 1.5 | <= 1
algorithm.distill.teacher=big
    `algorithm.distill.teacher` is big | no model of that name; there are: none
'frozen={big: {path: a/b}}' 'algorithm.distill.teacher=[big, small]'
    `algorithm.distill.teacher` is small | no model of that name; there are: big
'frozen={big: {path: a/b}}' 'algorithm.distill.teacher=[big, big]'
    `algorithm.distill.teacher` has a name twice
algorithm.distill.teacher=[]
    algorithm.distill.teacher
algorithm.distill.teacher=policy
    `algorithm.distill.teacher` is policy | set `algorithm.distill.teacher_prompt`
algorithm.distill.teacher=policy algorithm.distill.teacher_prompt=hint
    `algorithm.distill.teacher_prompt` does not contain {prompt}
'frozen={policy: {path: a/b}}' 'algorithm.distill={teacher: policy, teacher_prompt: "{prompt}"}'
    `frozen.policy` has the name of the policy
'algorithm.distill.teacher_prompt="{prompt}"'
    `algorithm.distill.teacher_prompt` is "{prompt}" | while `algorithm.distill.teacher` is null
'frozen={big: {path: a/b}}' algorithm.sft_model=big
    `algorithm.sft_model` is "big" | no effect while `algorithm.sft_loss_coef` is 0
algorithm.sft_loss_coef=0.1 algorithm.sft_model=big
    `algorithm.sft_model` is big | no model of that name; there are: none
'frozen={big: {url: "http://h/v1", served_name: m}}' algorithm.sft_loss_coef=1 \
algorithm.sft_model=big
    `algorithm.sft_model` is big, which is behind an address
'frozen={big: {path: a/b}, small: {path: a/b}}' algorithm.distill.teacher=big
    `frozen.small` is used by no setting
'frozen={big: {path: a/b, engine: {sleep: true}}}' algorithm.distill.teacher=big
    `frozen.big.engine.sleep` is true
'frozen={big: {path: a/b, engine: {vllm: {seed: 3}}}}' algorithm.distill.teacher=big
    `frozen.big.engine.vllm.seed`
'frozen={Big: {path: a/b}}'
    frozen
'frozen={big: {}}'
    `frozen.big` needs a `path`, or a `url`
'frozen={big: {path: a/b}}' algorithm.distill.teacher=big rollout.temperature=0.7
    `rollout.temperature` is 0.7 | it is 1
'frozen={big: {path: a/b}}' 'task.judges={nice: {model: small}}'
    `task.judges.nice.model` is small | no model of that name; there are: big
'frozen={big: {path: a/b}}' 'task.judges={a: {model: big}, b: {model: big, kind: reward_model}}'
    `frozen.big` is a reward model for `task.judges.b.model`
'frozen={big: {path: a/b, url: "http://h/v1"}}' 'task.judges={a: {model: big}}'
    `frozen.big` needs a `path`, or a `url` | not both
'frozen={big: {url: "http://h/v1"}}' 'task.judges={a: {model: big}}'
    `frozen.big.served_name` is missing
'frozen={big: {url: "http://u:p@h/v1", served_name: m}}' 'task.judges={a: {model: big}}'
    `frozen.big.url` must be http:// or https:// | without a password
'frozen={m: {url: "http://h", served_name: m, dtype: float32}}' 'task.judges={a: {model: m}}'
    `frozen.m.dtype` has no effect on a model at an address
'frozen={m: {url: "https://:p@h/v1", served_name: m}}' 'task.judges={a: {model: m}}'
    `frozen.m.url` must be http:// or https://
'frozen={m: {url: "https://h/v1?key=p", served_name: m}}' 'task.judges={a: {model: m}}'
    `frozen.m.url` must be http:// or https:// | or a query
'frozen={m: {url: "http://[bad/v1", served_name: m}}' 'task.judges={a: {model: m}}'
    `frozen.m.url` must be http:// or https://
'frozen={m: {path: a/b}}' 'task.judges={a: {model: m, criteria: [x, x]}}'
    `task.judges.a.criteria` must be different words
'frozen={m: {path: a/b}}' 'task.judges={a: {model: m, criteria: [reasoning]}}'
    `task.judges.a.criteria` must be different words
'frozen={m: {path: a/b, context_length: 512}}' 'task.judges={a: {model: m}}'
    `task.judges.a.max_tokens` is 512 | `frozen.m.context_length` is 512
'frozen={m: {pth: a/b}}'
    `frozen.m.pth` is not a setting | Did you mean `frozen.m.path`?
'frozen={m: {path: a/b, engine: {zzz: 1}}}'
    `frozen.m.engine.zzz` is not a setting | The keys of `frozen.m.engine` are tensor_parallel_size
'frozen={m: {path: a/b, retries: 1}}' 'task.judges={a: {model: m}}'
    `frozen.m.retries` has no effect without `url`
'frozen={big: {url: "h/v1", served_name: m}}' 'task.judges={a: {model: big}}'
    `frozen.big.url` must be http:// or https://
'frozen={big: {url: "http://h/v1", served_name: m}}' algorithm.distill.teacher=big
    `algorithm.distill.teacher` is big, which is behind an address
'frozen={m: {url: "http://h", served_name: m}}' 'task.judges={a: {model: m, kind: reward_model}}'
    `task.judges.a.model` is m, which is behind an address
'frozen={m: {path: a/b}}' 'task.judges={a: {model: m, kind: reward_model, prompt: "{response}"}}'
    `task.judges.a.prompt` has no effect on a judge of kind reward_model
'frozen={big: {path: a/b}}' 'task.judges={a: {model: big, clip: 3.0}}'
    `task.judges.a.clip` has no effect on a judge of kind pointwise
'frozen={big: {path: a/b}}' 'task.judges={a: {model: big, kind: pairwise, scale: [1, 3]}}'
    `task.judges.a.scale` has no effect on a judge of kind pairwise
'frozen={big: {path: a/b}}' 'task.judges={a: {model: big, scale: [3, 3]}}'
    `task.judges.a.scale` is [3, 3]
'frozen={big: {path: a/b}}' 'task.judges={a: {model: big, prompt: "Grade."}}'
    `task.judges.a.prompt` does not contain {response}
'frozen={big: {path: a/b}}' 'task.judges={a: {model: big, kind: pairwise, prompt: "{first}"}}'
    `task.judges.a.prompt` does not contain {second}
algorithm.distill.coef=0.5
    `algorithm.distill.coef` is 0.5 | no effect while `algorithm.distill.teacher` is null
"""),
    ([f"learner.ppo_epochs={10**40}"], ["`learner.ppo_epochs` is an integer of 41 digits", "2^53"]),
    (
        [f"cluster.engine.max_num_seqs={10**4000}"],
        ["`cluster.engine.max_num_seqs` is an integer of 4001 digits"],
    ),
    ([f"seed={2**32}"], ["`seed` is 4294967296", "< 4294967296"]),
    (["learner.tokens_per_micro_batch=1023"], ["is 1023", "512 + ", "= 1024"]),
    (
        ["learner.activation_offload=true", "learner.gradient_checkpointing=false"],
        ["`learner.activation_offload` is true and", "set it to true too"],
    ),
    (
        ["learner.routing_replay=r2", "learner.compile=true", "learner.ppo_epochs=2"],
        ["`learner.routing_replay` is r2 and `learner.compile` is true: leave one of them out"],
    ),
    (
        ["learner.ranks=3", "learner.sequence_parallel=2"],
        ["`learner.ranks` is 3, which is no multiple of `learner.sequence_parallel` 2: so many"],
    ),
    (
        ["learner.ranks=8", "learner.sequence_parallel=8"],
        ["`learner.sequence_parallel` is 8, more than `model.warm_start.heads` 4"],
    ),
    (
        ["learner.ranks=4", "learner.sequence_parallel=4", "learner.tokens_per_micro_batch=255"],
        ["is 255, but one", "= 1024 tokens: make it shorter, or give at least 256"],
    ),
    (
        ["learner.deepspeed={sequence_parallel_size: 2}"],
        ["`learner.deepspeed.sequence_parallel_size` must not", "; use learner.sequence_parallel."],
    ),
    (
        ["learner.routing_replay=r3", "cluster.device=cpu"],
        ["`learner.routing_replay` is r3, and on CPU vLLM does not say", "use r2"],
    ),
    (
        ["learner.routing_replay=r2", "algorithm.anchor=behavior"],
        ["`algorithm.anchor: behavior` no earlier pass has experts to take: use recomputed"],
    ),
    (
        [
            "learner.zero_stage=0",
            "learner.deepspeed.zero_optimization={offload_optimizer: {device: cpu}}",
        ],
        ["zero_optimization.offload_optimizer` is given", "set the stage to 1 or more"],
    ),
    *(
        ([f"learner.deepspeed.{key}=1"], [f"`learner.deepspeed.{key}`", "must not be given"])
        for key in sorted(REFUSED_DEEPSPEED_KEYS)
    ),
]


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    RULES,
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_every_rule(overrides: list[str], fragments: list[str], base: Path) -> None:
    message = refused(base, *overrides)
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize(
    "overrides",
    [
        *typed.admitted("""\
watchdog.step_timeout_s=500
evaluation.every_steps=5 evaluation.timeout_s=500 watchdog.step_timeout_s=500
learner.ppo_mini_batch_size=8
weight_sync.every_steps=2
replay.max_staleness=0
rollout.response_length=16 algorithm.overlong_buffer.enable=true
rollout.response_length=8 algorithm.overlong_buffer.enable=false
'algorithm.clip_schedule={name: exponential, rate: 1}'
'algorithm.clip_schedule={name: harmonic, rate: 5}'
algorithm.importance.level=token algorithm.anchor=recomputed
algorithm.use_kl_loss=true algorithm.kl_loss_coef=0.1
algorithm.use_kl_loss=true model.reference=a/b
'frozen={big: {path: a/b}}' algorithm.distill.teacher=big algorithm.distill.reward_coef=0
'algorithm.distill={teacher: policy, teacher_prompt: "{prompt} {solution}"}'
algorithm.sft_loss_coef=0.1
'frozen={big: {path: a/b}}' algorithm.sft_loss_coef=0.1 algorithm.sft_model=big
model.warm_start=null model.path=a/b
learner.tokens_per_micro_batch=1024
learner.ranks=4 learner.sequence_parallel=2 learner.tokens_per_micro_batch=512
cluster.device=cpu model.dtype=bfloat16 weight_sync.backend=shared_memory
weight_sync.delta=always
weight_sync.delta=always weight_sync.overlap=false cluster.device=cpu
cluster.layout=colocated learner.ranks=2 'cluster.rollout_actors={min: 1, max: 2}' \
weight_sync.backend=ipc
'replay.filter_groups={enable: true, metric: format}'
'learner.deepspeed={zero_optimization: {overlap_comm: true}}'
""")
    ],
    ids=" ".join,
)
def test_what_the_rules_admit(overrides: list[str], base: Path) -> None:
    load_config(base, overrides)


def test_every_name_in_the_table_of_migration_is_answered_with_ours() -> None:
    page = (ROOT / "docs" / "how-to" / "migrate.md").read_text(encoding="utf-8")
    lines = page[page.index("| here | verl |") :].split("\n\n")[0].splitlines()[2:]
    ours = {name.rpartition(".")[2] for name in settings()}
    names = {
        name.partition(":")[0].rpartition(".")[2]
        for line in lines
        for cell in line.split("|")[2:]
        for name in re.findall("`([^`]+)`", cell)
    }
    assert len(lines) > 20 and len(names) > 50
    functions, suffixes = {"get_soft_overlong_punishment", "reinforce"}, {"_high"}
    with_more_to_say = {name for name in names if answer([name], None)}
    assert names - ours - set(PEERS) - with_more_to_say - functions - suffixes == set()


def test_the_largest_lag_in_optimizer_updates(base: Path) -> None:
    """Weights before step s; the token is trained by the last update of step s + K."""
    for staleness, epochs, size, updates in (
        (0, 1, 32, 0),
        (1, 1, 32, 1),
        (1, 1, 8, 7),
        (2, 3, 16, 17),
    ):
        config = load_config(
            base,
            [
                f"replay.max_staleness={staleness}",
                f"learner.ppo_epochs={epochs}",
                f"learner.ppo_mini_batch_size={size}",
            ],
        )
        assert config.max_lag_updates == updates


def test_the_rules_hold_for_a_configuration_built_in_python() -> None:
    with pytest.raises(ValidationError, match=r"exactly one of `run\.total_steps`"):
        Config()


# ---- run.dir
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("directory", "cwd", "environ", "expected"),
    [
        ("runs/{name}", "/data/here", {}, "/data/here/runs/n"),
        ("runs/{name}-{time}", "/data/here", {}, "/data/here/runs/n-20310203-040506"),
        ("../runs/./x", "/data/here", {}, "/data/runs/x"),
        ("/abs/{time}", "/data/here", {}, "/abs/20310203-040506"),
        ("~/runs", "/data/here", {"HOME": "/home/u"}, "/home/u/runs"),
        ("runs/x", "/data/here", {"ASYNC_GRPO_HOME": "/keep"}, "/data/here/runs/x"),
        ("runs/x", PACKAGE, {"HOME": "/home/u"}, "/home/u/async_grpo/runs/x"),
        ("runs/x", PACKAGE, {"HOME": "/home/u", "ASYNC_GRPO_HOME": "/keep"}, "/keep/runs/x"),
        (
            "runs/x",
            PACKAGE + "/below",
            {"HOME": "/home/u", "ASYNC_GRPO_HOME": "~/k"},
            "/home/u/k/runs/x",
        ),
        ("runs/x", "/other/_ray_pkg_0123", {"HOME": "/home/u"}, "/home/u/async_grpo/runs/x"),
        ("/abs/x", PACKAGE, {"HOME": "/home/u"}, "/abs/x"),
    ],
)
def test_where_a_run_is_kept(
    directory: str, cwd: str, environ: dict[str, str], expected: str, base: Path
) -> None:
    config = load_config(
        base, [f"run.dir={directory}", "run.name=n"], now=NOW, cwd=cwd, environ=environ
    )
    assert config.run.dir == expected
    assert resolve(config, now=datetime(2040, 1, 1), cwd="/elsewhere", environ={}) == config


@pytest.mark.parametrize(
    ("directory", "environ", "fragment"),
    [
        (PACKAGE + "/runs/x", {}, "deletes after the job"),
        ("runs/x", {"ASYNC_GRPO_HOME": PACKAGE}, "deletes after the job"),
        ("runs/x", {"ASYNC_GRPO_HOME": "here"}, "must be an absolute directory"),
        ("runs/{nmae}", {}, "placeholders"),
        ("''", {}, "placeholders"),
        ('"a\\0b"', {}, "placeholders"),
    ],
)
def test_where_a_run_cannot_be_kept(
    directory: str, environ: dict[str, str], fragment: str, base: Path
) -> None:
    with pytest.raises(ConfigError, match=fragment) as caught:
        load_config(
            base,
            [f"run.dir={directory}"],
            now=NOW,
            cwd=PACKAGE,
            environ={"HOME": "/home/u", **environ},
        )
    assert len(str(caught.value).splitlines()) <= 2


def test_a_package_behind_a_link_is_recognised(base: Path, tmp_path: Path) -> None:
    package = tmp_path / "_ray_pkg_01"
    package.mkdir()
    (tmp_path / "link").symlink_to(package)
    config = load_config(base, ["run.dir=runs"], cwd=tmp_path / "link", environ={"HOME": "/home/u"})
    assert config.run.dir == "/home/u/async_grpo/runs"


# ---- files
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def preflight(base: Path, tmp_path: Path):
    def check(*overrides: str) -> None:
        preflight_files(load_config(base, [f"run.dir={tmp_path}/run", *overrides]))

    return check


def test_good_files_pass_and_nothing_is_made_of_the_run_directory(
    preflight, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text("")
    preflight(
        "model.warm_start=null",
        f"model.path={tmp_path}/model",
        f"task.train={tmp_path}/data.jsonl",
        "task.eval=openai/gsm8k:main:test",
    )
    assert not (tmp_path / "run").exists()
    preflight(
        "model.warm_start=null",
        "model.path=Qwen/Qwen2.5-0.5B-Instruct",
        f"checkpoint.resume={tmp_path}/model",
    )


@pytest.mark.parametrize(
    ("overrides", "fragment"),
    [
        (
            ["model.warm_start=null", "model.path={tmp}/none"],
            "`model.path` is .* is not a directory",
        ),
        (["model.warm_start=null", "model.path={tmp}"], "has no config.json"),
        (["model.warm_start=null", "model.path=./no/model.Q4_1.gguf"], "is GGUF, with quantised"),
        (["model.warm_start=null", "model.path={tmp}/gguf"], "is GGUF, with quantised"),
        (["model.warm_start=null", "model.path=gpt2"], "organisation/name"),
        (["model.warm_start=null", "model.path=a/b/c"], "organisation/name"),
        (["algorithm.use_kl_loss=true", "model.reference=./none"], "`model.reference`"),
        (["task.train={tmp}/none"], "`task.train` is .* no such file"),
        (["task.eval=none.jsonl"], "`task.eval` is .* no such file"),
        (["task.eval=none.json"], "`task.eval` is .* no such file"),
        (["task.train=./none-*"], "`task.train` is .* no such file"),
        (["task.train=./none:default:train"], "`task.train` is .* no such file"),
        (["checkpoint.resume={tmp}/none"], "`checkpoint.resume` is .* allowed is auto, never"),
        (["checkpoint.resume=''"], "allowed is auto, never"),
        (["run.dir={tmp}/file/run"], "`run.dir` is .* cannot be created or written"),
        (["run.dir={tmp}/file"], "`run.dir` is .* cannot be created or written"),
        (["run.dir=/proc/async_grpo_run"], "`run.dir` is .* cannot be created or written"),
    ],
)
def test_missing_files_are_refused(
    overrides: list[str], fragment: str, preflight, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "m.gguf").write_text("")
    with pytest.raises(ConfigError, match=fragment) as caught:
        preflight(*(text.replace("{tmp}", str(tmp_path)) for text in overrides))
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize("name", ["config.yaml", "checkpoints"])
def test_a_new_run_does_not_start_in_the_directory_of_another(
    name: str, preflight, tmp_path: Path
) -> None:
    preflight("checkpoint.resume=never")
    (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run" / "status.json").write_text("{}")
    preflight("checkpoint.resume=auto")
    with pytest.raises(ConfigError, match=r"already holds a run(.|\n)*checkpoint\.resume=auto"):
        preflight("checkpoint.resume=never")


# ---- reference page, layers
# --------------------------------------------------------------------------------------------------


def test_the_reference_page_is_up_to_date_and_describes_every_setting() -> None:
    assert pages.main(["--check"]) == 0, "run make docs"
    described = []
    for part in re.split(r"^#+ ", "".join(pages.configuration().values()), flags=re.MULTILINE):
        section = re.match(r"`(.*)`", part)
        keys = re.findall(r"^\| `(\w+)` \|", part.partition("\nOptions of")[0], re.MULTILINE)
        described += [f"{section[1]}.{key}" if section else key for key in keys]
    assert sorted(described) == sorted(name for name, one in settings().items() if not one.section)
    assert [
        name
        for name, setting in settings().items()
        if not setting.section and not setting.description
    ] == []


def test_the_configuration_needs_pydantic_and_yaml_only() -> None:
    code = (
        "import sys; import async_grpo.config.load, async_grpo.config.docs; "
        "print([name for name in ('torch', 'ray', 'vllm', 'deepspeed', 'mlflow', 'numpy', "
        "'transformers') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment,
    )
    assert result.stdout.strip() == "[]"


def test_local_models_and_data_become_absolute_unless_inside_a_package(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}\n")
    values = {
        "run": {"total_steps": 1},
        "model": {"path": "model"},
        "task": {"name": "jsonl", "train": "rows.jsonl", "eval": "org/data:main"},
    }
    config = resolve(Config.model_validate(values), now=NOW, cwd=tmp_path, environ={})
    assert (config.model.path, config.task.train) == (
        str(tmp_path / "model"),
        str(tmp_path / "rows.jsonl"),
    )
    assert config.task.eval == "org/data:main", "a hub name stays what it is"
    package = tmp_path / "_ray_pkg_0123456789abcdef"
    package.mkdir()
    (package / "model").mkdir()
    inside = resolve(
        Config.model_validate(values),
        now=NOW,
        cwd=package,
        environ={"ASYNC_GRPO_HOME": str(tmp_path / "home")},
    )
    assert inside.model.path == "model"


def test_patterns_and_addresses_of_rows_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "rows-1.jsonl").write_text("{}\n")
    here = Config.model_validate(
        {
            "run": {"total_steps": 1, "dir": str(tmp_path / "run")},
            "model": {"path": "org/model"},
            "task": {"name": "jsonl", "train": "rows-*.jsonl", "eval": "s3://bucket/rows.jsonl"},
            "evaluation": {"task": {"name": "jsonl", "eval": "rows-?.jsonl"}},
        }
    )
    config = resolve(here, now=NOW, cwd=tmp_path, environ={})
    preflight_files(config)
    assert config.task.train == f"{tmp_path}/rows-*.jsonl"
    assert config.task.eval == "s3://bucket/rows.jsonl"
    assert config.evaluation.task is not None
    assert config.evaluation.task.eval == f"{tmp_path}/rows-?.jsonl"


def test_a_name_that_no_file_can_have_is_refused_in_a_sentence(base: Path) -> None:
    assert "File name too long" in refused(base, f"task.train={'a' * 300}", "task.name=gsm8k")


def test_a_run_directory_is_in_a_file_system(base: Path) -> None:
    assert '`run.dir` is "s3://bucket/x"; allowed is a directory of this machine' in (
        refused(base, "run.dir=s3://bucket/x")
    )
    assert "variables of the environment are not replaced" in refused(base, "run.dir=$HOME/x")


@pytest.mark.parametrize(
    ("length", "given", "seconds"), [(512, None, 600), (20_000, None, 1200), (20_000, 700.0, 700)]
)
def test_a_group_of_long_responses_has_longer(
    length: int, given: float | None, seconds: float
) -> None:
    rollout = {"response_length": length, "group_timeout_s": given}
    learner = {"tokens_per_micro_batch": 32768}
    config = Config.model_validate(
        {"run": {"total_steps": 1}, "model": {"path": "m"}, "rollout": rollout, "learner": learner}
    )
    assert config.rollout.longest_group_s == seconds


@pytest.mark.parametrize(
    ("update", "says"),
    [
        (lambda one: {"learner": one.learner.model_copy(update={"lr": -1.0})}, "greater than 0"),
        (lambda one: {"learner": {"lr": -1.0}}, "greater than 0"),
        (lambda one: {"learner": LearnerConfig.model_construct(lr=-1.0)}, "greater than 0"),
        (lambda one: {"learner": one.learner.unchecked_copy(update={"lr": -1.0})}, "greater than"),
        (lambda one: {"learner": one.learner.copy(update={"lr": -1.0})}, "greater than 0"),
        (lambda one: {"learner": {"lrr": 1.0}}, "Extra inputs"),
        (lambda one: {"run": one.run.model_copy(update={"epochs": 3})}, "total_steps"),
    ],
    ids=["of a section", "mapping", "made", "unchecked", "of old", "unknown", "together"],
)
@pytest.mark.parametrize("copy", ["model_copy", "copy"])
def test_a_copy_is_checked_like_a_file(copy: str, update: Any, says: str) -> None:
    config = Config.model_validate({"run": {"total_steps": 2}, "model": {"path": "m"}})
    with pytest.raises(ValidationError, match=says):
        getattr(config, copy)(update=update(config))
    other = config.model_copy(update={"seed": 3, "learner": {"lr": 0.5}})
    assert (other.seed, other.learner.lr) == (3, 0.5)
    assert other.model_fields_set == config.model_fields_set | {"seed", "learner"}
    assert config.model_copy() == config.copy() == config


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ([], 0),
        (["rollout.top_p=0.9"], 512),
        (["rollout.top_k=20"], 20),
        (["rollout.min_p=0.05"], 512),
        (["rollout.top_p=0.9", "rollout.top_k=20", "rollout.temperature=0.7"], 20),
    ],
)
def test_sampling_may_be_cut_while_training(base: Path, settings: list[str], most: int) -> None:
    """By top-p alone, from the 512 most probable tokens."""
    assert load_config(base, settings).rollout.most_kept == most
