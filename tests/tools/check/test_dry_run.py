"""`--dry-run`: what it computes, what it refuses and warns of, and that it starts and leaves
nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from async_grpo.cluster.placement import place
from async_grpo.config.load import load_config
from async_grpo.config.schema import Config
from async_grpo.learner.batching import deal
from async_grpo.learner.division import GPU_GATHER_BYTES
from async_grpo.learner.model import load_model
from async_grpo.learner.packing import pack, response_row
from async_grpo.run.preflight.memory import (
    BUCKET_ELEMENTS,
    Shape,
    activation_bytes,
    engine_memory,
    learner_memory,
    shape_of,
)
from async_grpo.tasks.registry import create_task
from async_grpo.tools.check.dry_run import (
    _budget,
    _episode_warnings,
    _number_format,
    _warnings,
    assumed_nodes,
)
from async_grpo.tools.check.known_models import known_config, names
from async_grpo.weights.layout import AHEAD_BYTES
from tests.support.dry_run_states import config_of, settings
from tests.support.models import write_model
from tests.support.verbs import check, train

ROOT = Path(__file__).resolve().parents[3]
PLAIN = {"dtype": torch.float32, "trust_remote_code": False, "float32_head": False}
SEVEN = Shape(
    parameters=7_000_000_000,
    trained=7_000_000_000,
    frozen=0,
    layers=32,
    hidden=4096,
    intermediate=11008,
    vocabulary=152_000,
    kv_heads=8,
    head_dim=128,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return write_model(tmp_path_factory.mktemp("model") / "model")


def test_states_are_those_of_the_zero_paper() -> None:
    """16 bytes per parameter and master weights apart (arXiv 1910.02054, section 3), of which each
    stage shards more; gradients are float32 here.
    """
    config = config_of(model={"dtype": "bfloat16"}, learner={"ranks": 8})
    totals = []
    for stage in (1, 2, 3):
        need = learner_memory(config, SEVEN, device="cuda", stage=stage)
        totals.append((need.weights, need.gradients, need.optimizer))
    psi = SEVEN.parameters
    assert totals == [
        (2 * psi, 4 * psi, 12 * psi // 8),
        (2 * psi, 4 * psi // 8, 12 * psi // 8),
        (2 * psi // 8, 4 * psi // 8, 12 * psi // 8),
    ]
    buckets = [learner_memory(config, SEVEN, device="cuda", stage=one).buckets for one in (1, 2)]
    assert buckets == [2 * 152_000 * 4096, 2 * BUCKET_ELEMENTS + 2 * psi // 8]


def test_the_cache_of_an_engine() -> None:
    config = config_of(
        rollout={"prompt_length": 1024, "response_length": 7168},
        learner={"tokens_per_micro_batch": 8192},
        cluster={"engine": {"tensor_parallel_size": 2}},
    )
    need = engine_memory(config, SEVEN, device="cuda", kv_cache_gb=20)
    assert need.weights == SEVEN.parameters  # half of two bytes each
    # keys and values, layers, heads of one GPU, size of a head, bytes
    assert need.kv_token == 2 * 32 * 4 * 128 * 2
    assert need.rows(need.kv_cache) == 20 * 2**30 // (need.kv_token * 8192)


@pytest.mark.parametrize(("rank", "slots"), [(16, 4), (4, 8)])
def test_slots_for_adapters_are_memory_of_an_engine(rank: int, slots: int) -> None:
    """Of a version each, in the next rank that the engine has: 8 in the place of 4."""
    lora = {"model": {"path": "m", "dtype": "bfloat16", "lora": {"rank": rank}}}
    shape = dataclasses.replace(SEVEN, trained=10**6)
    held = {"weight_sync": {"lora": "adapter"}, "replay": {"max_staleness": 2}}
    merged, need = (
        engine_memory(config_of(**lora, **more), shape, device="cuda", kv_cache_gb=1)
        for more in ({}, held)
    )
    assert (merged.adapters, need.adapters) == (0, slots * 10**6 * 2)
    assert need.weights - merged.weights == need.adapters


@pytest.mark.parametrize(
    "settings",
    [{}, {"lora": {"rank": 4}}, {"freeze": ["embed_tokens"]}],
    ids=["all", "lora", "frozen"],
)
def test_parameters_are_counted_without_weights(model, settings) -> None:
    from async_grpo.learner import adapters

    config = config_of(model={"path": model, **settings})
    shape = shape_of(config, model)
    real = load_model(model, gradient_checkpointing=False, **PLAIN)
    assert shape.parameters == sum(parameter.numel() for parameter in real.parameters())
    adapters.restrict(real.hf, config.model, seed=0, base=model)
    counts = [
        sum(parameter.numel() for parameter in real.parameters() if parameter.requires_grad is kind)
        for kind in (True, False)
    ]
    assert [shape.trained, shape.frozen] == counts
    sizes = (shape.layers, shape.hidden, shape.kv_heads, shape.head_dim, shape.vocabulary)
    assert sizes == (2, 64, 1, 32, 100)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_about_what_autograd_keeps(model, checkpointing) -> None:
    """Measured on saved tensors; the estimate may be too high by half, since it stands for models
    with wider heads too, and hardly too low.
    """
    policy = load_model(model, gradient_checkpointing=checkpointing, **PLAIN)
    policy.train()
    packed = pack(
        [response_row(torch.arange(8).numpy(), torch.arange(248).numpy() % 100)] * 16,
        torch.device("cpu"),
    )
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            # the tensor, so that its address is not used again
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy(packed, 1.0, False)
    config = config_of(
        model={"path": model},
        learner={
            "gradient_checkpointing": checkpointing,
            "tokens_per_micro_batch": packed.input_ids.numel(),
        },
        rollout={
            "prompt_length": 8,
            "response_length": 248,
            "group_size": 8,
            "rollout_batch_size": 4,
        },
    )
    shape = shape_of(config, model)
    measured = sum(size for size, _ in kept.values())
    if checkpointing:  # the layer that is computed again is not among the saved tensors
        measured += int(
            packed.input_ids.numel() * 4 * (12.5 * shape.hidden + 4 * shape.intermediate)
        )
    assert 0.9 < activation_bytes(config, shape, size=4) / measured < 1.6


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("budget", [256, 700, 5000])
def test_as_many_tokens_are_counted_as_a_micro_batch_can_hold(ranks: int, budget: int) -> None:
    """Responses of one prompt share it; none longer than the settings allow."""

    def counted(tokens: int, *, groups: int, **learner: int) -> int:
        rollout = {"prompt_length": 100, "response_length": 28, "group_size": 8}
        config = config_of(
            learner={"tokens_per_micro_batch": tokens, **learner},
            rollout=rollout | {"rollout_batch_size": groups},
        )
        return activation_bytes(config, SEVEN, size=4)

    rows = [(group, 100, 28) for group in range(4) for _ in range(8)]
    most = 0
    for batches in deal(rows, ranks=ranks, token_budget=budget):
        for batch in batches:
            prompts = {rows[at][0] for at in batch}
            most = max(most, 100 * len(prompts) + 28 * len(batch))
    low, high = (counted(tokens, groups=999) for tokens in (most, 2 * most))
    assert 0.8 * low < counted(budget, groups=4, ranks=ranks) < high


STATES = """
import sys
from tests.support.dry_run_states import held, learner_and_case, most
learner, case, parameters = learner_and_case(sys.argv[1], int(sys.argv[2]), sys.argv[3])
def step():
    learner.prepare(case.plan([[[index] for index in range(len(case.updates[0]))]]))
    learner.train(case.values, 0.0)
step()  # from now on there are the optimizer's states
before = held()
print("bytes per parameter", (before + most(step)) / parameters)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        (0, "float32"),
        (1, "float32"),
        (2, "float32"),
        (1, "bfloat16"),
        (2, "bfloat16"),
        (3, "bfloat16"),
    ],
)
def test_the_states_of_a_real_rank(tmp_path, stage, dtype) -> None:
    model = write_model(tmp_path / "model", hidden=512)
    out = subprocess.run(
        [sys.executable, "-c", STATES, model, str(stage), dtype],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert out.returncode == 0, out.stderr[-3000:]
    measured = float(re.search(r"bytes per parameter ([\d.]+)", out.stdout)[1])
    config = settings(model, stage, dtype)
    need = learner_memory(config, shape_of(config, model), device="cpu", stage=stage)
    states = need.weights + need.gradients + need.optimizer + need.buckets
    estimate = states / shape_of(config, model).parameters
    assert 0.9 * estimate <= measured <= 1.1 * estimate, (measured, estimate)


@pytest.mark.later
def test_a_dry_run_starts_and_leaves_nothing(model, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))
    monkeypatch.chdir(tmp_path)
    settings = [
        f"model.path={model}",
        "model.warm_start=null",
        "run.dir=runs/new/{time}",
        "cluster.rollout_actors.min=2",
    ]
    assert check([str(ROOT / "configs" / "quickstart.yaml"), *settings]) == 0
    out = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    for line in (
        "(max_staleness + 1) x rollout_batch_size = (1 + 1) x 32 = 64 groups, 512 responses",
        "learner rank, ZeRO-3",
        "<- learner.zero_stage",
        "rollout_batch_size: 32",
        "engine 1",
        "room for",
        "weights by shared_memory",
        "exit code 0",
    ):
        assert line in out, line
    written = out.partition("# resolved configuration")[2].partition("\n\n")[0]
    path = tmp_path / "again.yaml"
    path.write_text(written)
    assert load_config(path).rollout.rollout_batch_size == 32  # it can be used as it is


@pytest.mark.later
def test_a_dry_run_warns_and_refuses(model, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    base = [
        str(ROOT / "configs" / "quickstart.yaml"),
        f"model.path={model}",
        "model.warm_start=null",
        f"run.dir={tmp_path / 'run'}",
    ]
    small = ["rollout.rollout_batch_size=2", "cluster.engine.kv_cache_gb=0.00001"]
    assert check([*base, *small, "cluster.engine.max_num_seqs=null"]) == 0
    out = capsys.readouterr().out
    assert "can generate" not in out, "a number that nobody chose is none to lower"
    need = re.search(r"cluster\.engine\.(kv_cache_gb=[\d.e-]+) holds them all", out)[1]
    assert check([*base, small[0], f"cluster.engine.{need}"]) == 0
    assert "the KV cache holds" not in capsys.readouterr().out
    monkeypatch.setattr("torch.cpu.get_capabilities", dict)
    coarse = ["model.dtype=bfloat16", "learner.zero_stage=1"]
    assert check([*base, *small, *coarse, "cluster.engine.max_num_seqs=200"]) == 0
    out = capsys.readouterr().out
    assert "warning: this processor does not multiply bfloat16" in out
    assert (
        "can generate" in out
        and "lower cluster.engine.max_num_seqs to" in out
        and "the KV cache holds" in out
    )
    assert check([*base, "weight_sync.backend=nccl"]) == 2
    assert "needs GPUs" in capsys.readouterr().out
    assert check([*base, "model.lora.target_modules=[nowhere]"]) == 2
    assert "nowhere" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("features", "dtype", "parameters", "says", "warns"),
    [
        ({"avx512_bf16": True}, "auto", 10**8, "avx512_bf16", False),
        ({"amx_bf16": True, "avx512_bf16": False}, "float32", 10**8, "amx_bf16", False),
        ({"avx512_bf16": True}, "auto", 10**6, "", False),
        ({"avx512_bf16": True}, "bfloat16", 10**8, "", False),
        ({}, "auto", 10**8, "", False),
        ({"avx512_bf16": False}, "bfloat16", 10**6, "", True),
    ],
)
def test_bfloat16_is_recommended_where_the_processor_has_it(
    monkeypatch, features, dtype, parameters, says, warns
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: features)
    config = load_config(ROOT / "configs" / "quickstart.yaml", [f"model.dtype={dtype}"])
    warnings: list[str] = []
    lines = list(_number_format(config, SimpleNamespace(trained=parameters), warnings))
    assert [f"({says})" in line for _, line in lines] == [True] * bool(says)
    assert bool(warnings) == warns


@pytest.mark.parametrize(
    ("size", "over", "warns"), [(1, "4 ranks", True), (2, "4 ranks, 2 for", False)]
)
def test_responses_are_divided_over_ranks_that_share_them(size, over, warns) -> None:
    """Six responses of an update: over two teams evenly, over four ranks not."""
    config = config_of(
        rollout={"rollout_batch_size": 1, "group_size": 6},
        learner={"ranks": 4, "sequence_parallel": size},
        cluster={"device": "cpu"},
    )
    assert f"of 6 responses over {over}" in dict(_budget(config, 1))["updates per step"]
    told = list(_warnings(config, place(config, assumed_nodes("cpus=16"))))
    assert any("6 responses of an update do not divide" in line for line in told) == warns


@pytest.fixture()
def seven_billion(tmp_path, monkeypatch) -> list[str]:
    """A run of a model that is not here, on GPUs that are not here."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))
    data = ROOT / "tests" / "data"
    return [
        str(ROOT / "configs" / "gsm8k_8gpu.yaml"),
        f"task.train={data / 'gsm8k_train.jsonl'}",
        f"task.eval={data / 'gsm8k_test.jsonl'}",
        "model.path=Qwen/Qwen2.5-7B-Instruct",
        f"run.dir={tmp_path / 'run'}",
    ]


@pytest.fixture()
def no_hub(monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to the hub. Check your internet connection.")

    monkeypatch.setattr("transformers.utils.cached_file", refuse)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", refuse)


@pytest.mark.usefixtures("no_hub")
def test_estimates_come_first_and_the_refusals_last(seven_billion, capsys) -> None:
    assert check(seven_billion) == 2
    out = capsys.readouterr().out
    assert "# resolved configuration" in out and "7,615,616,512 parameters" in out
    memory, refused = out.index("learner rank, ZeRO-3"), out.index("refused: `model.path`")
    asked = "error: the run asks for 4 learner ranks with a GPU each: this machine: "
    assert memory < refused < out.index(asked)
    assert f"{asked}{os.cpu_count()} CPU" in out  # those of the machine, not one per process


@pytest.mark.usefixtures("no_hub")
def test_a_cluster_that_is_not_here_is_assumed(seven_billion, capsys) -> None:
    assert check([*seven_billion, "--assume", "nodes=2,gpus=8,memory=80"]) == 0
    out = capsys.readouterr().out
    assert "node 2: 64 CPUs, 8 GPUs of 80 GiB (assumed)" in out
    assert "warning: on this machine the run would be refused: `model.path`" in out
    assert "well-known models" in out and "engine 3" in out and "exit code 0" in out
    assert check([*seven_billion, "--assume", "gpus=8,memory=24,cpus=8"]) == 2
    out = capsys.readouterr().out
    need = re.search(r"a learner rank needs about ([\d.]+) GiB and a GPU has 24.0 GiB: use", out)
    total = re.search(r"learner rank, ZeRO-2 +([\d.]+) GiB", out)
    assert need is not None and total is not None and need[1] == total[1]
    assert check([*seven_billion, "--assume", "gpus=8,memory=15"]) == 2
    out = capsys.readouterr().out
    assert "refused: a learner rank needs" in out
    assert "error: an engine needs at least 17.3 GiB a GPU (weights 14.2 GiB, CUDA 3.0 GiB" in out
    assert "has 13.5 GiB" in out
    assert check([*seven_billion, "--assume", "gpus=2,memory=80"]) == 2
    assert "4 learner ranks with a GPU each: node 1: 64 CPUs, 2 GPUs" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["gsm8k_1gpu", "gsm8k_calculator_1gpu", "reasoning_gym_1gpu"])
def test_what_promises_24_gigabytes_fits_them(recipe: str) -> None:
    path = ROOT / "configs" / f"{recipe}.yaml"
    assert "24 GB or more" in path.read_text().splitlines()[0]
    config = load_config(path, [])
    shape = shape_of(config, known_config(config.model.path))
    stage = config.learner.zero_stage
    rank = learner_memory(config, shape, device="cuda", stage=stage, backend="ipc")
    engine = engine_memory(
        config, shape, device="cuda", kv_cache_gb=config.cluster.engine.kv_cache_gb
    )
    cards = 24e9  # of which the driver keeps some
    assert rank.total + engine.weights + engine.kv_cache + engine.rest < 0.95 * cards


def test_a_gpu_needs_more_than_the_states() -> None:
    """Layers that are whole for their turn, what is published, and what the libraries take."""
    config = config_of(model={"dtype": "bfloat16"}, learner={"ranks": 8, "zero_stage": 3})
    gib = 2**30
    cpu, gpu = (
        learner_memory(config, SEVEN, device=device, stage=3, backend=backend)
        for device, backend in (("cpu", "shared_memory"), ("cuda", "nccl"))
    )
    one = 7_000_000_000 // 8
    assert gpu.buckets == 2 * BUCKET_ELEMENTS + 2 * 10**9 + 4 * one
    few = {"zero_optimization": {"stage3_max_live_parameters": 10**6}}
    config.learner.deepspeed.update(few)  # less than a weight sync gathers, and still copies
    gathers, live = (
        learner_memory(config, SEVEN, device=device, stage=3).buckets for device in ("cuda", "cpu")
    )
    config.learner.deepspeed.clear()
    assert gpu.buckets - gathers == 2 * 10**9 - (GPU_GATHER_BYTES + AHEAD_BYTES)
    assert live == 2 * BUCKET_ELEMENTS + 2 * 10**6 + 4 * one
    assert (cpu.publication, cpu.context) == (0, 0)
    assert gpu.publication == 4 * 152_000 * 4096 * 2  # packs of the largest tensor
    assert 2 * gib < gpu.context < 2 * gib + 0.03 * gpu.total
    shared = learner_memory(config, SEVEN, device="cuda", stage=3, backend="ipc")
    assert shared.publication == 2 * SEVEN.parameters


@pytest.mark.usefixtures("no_hub")
def test_an_unknown_model_leaves_the_rest(seven_billion, capsys) -> None:
    other = [*seven_billion, "model.path=someone/unheard-of", "--assume", "gpus=8"]
    assert check(other) == 0
    out = capsys.readouterr().out
    assert "there is no estimate" in out and "Qwen2.5-7B" in out and "engine 3" in out


@pytest.mark.usefixtures("no_hub")
def test_rows_are_read_whatever_the_machine_lacks(tmp_path, capsys) -> None:
    """Without a hub, for a machine that is assumed: what was read, and bad rows are refused."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": 3}\n{"prompt"\n'
    )
    settings = {
        "run": {"total_steps": 1, "dir": str(tmp_path / "run")},
        "model": {"path": "Qwen/Qwen2.5-7B-Instruct", "lora": {}},
        "task": {"name": "jsonl", "train": str(rows)},
    }
    (tmp_path / "own.yaml").write_text(json.dumps(settings))
    command = [str(tmp_path / "own.yaml"), "--assume", "gpus=1,memory=80"]
    assert check(command) == 2
    out = capsys.readouterr().out
    assert "1 of 3 rows are malformed: line 3: not JSON" in out and "\ndata\n" not in out
    assert "on this machine the run would be refused" not in out, "the rows came first"
    assert check([*command, "task.max_bad_fraction=0.5"]) == 0
    out = capsys.readouterr().out
    for line in (
        r"training problems +2\n",
        r"held-out problems +none: no evaluation\n",
        r"note +\S+: 1 of 3 rows are malformed and left out",
        r"warning: on this machine the run would be refused: `model.path`",
    ):
        assert re.search(line, out), line
    assert "ZeRO-0" not in out and "ZeRO-1" in out, "in bfloat16 the first is refused"


@pytest.mark.parametrize(
    "text", ["", "8", "gpus", "gpus=eight", "gpus=1.5", "cards=8", "nodes=0", "nodes=100000"]
)
def test_an_assumption_that_makes_no_sense(seven_billion, capsys, text) -> None:
    assert check([*seven_billion, "--assume", text]) == 2
    assert f"error: --assume {text}" in capsys.readouterr().out


def test_an_assumption_is_not_for_training(seven_billion, capsys) -> None:
    with pytest.raises(SystemExit):
        train([*seven_billion, "--assume", "gpus=8"])
    assert "--assume is no option" in capsys.readouterr().err


def test_the_published_sizes_of_known_models() -> None:
    """Parameters as their model cards' files count them."""
    published = {
        "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
        "Qwen/Qwen2.5-Math-7B": 7_615_616_512,
        "/data/Qwen3-4B-Instruct-2507/": 4_022_468_096,
        "meta-llama/Meta-Llama-3.1-8B-Instruct": 8_030_261_248,
        "mistralai/Mistral-7B-v0.3": 7_248_023_552,
        "HuggingFaceTB/SmolLM2-135M": 134_515_008,
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    }
    config = config_of()
    for name, count in published.items():
        assert shape_of(config, known_config(name)).parameters == count, name
    assert known_config("Qwen/Qwen2.5-8B") is None
    assert all(known_config(name) is not None for name in names())


def test_a_task_that_is_not_there_is_one_sentence(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    given = ["task.name=nosuch", f"run.dir={tmp_path / 'run'}"]
    assert check([str(ROOT / "configs" / "quickstart.yaml"), *given]) == 2
    out = capsys.readouterr().out
    assert "error: there is no task 'nosuch'" in out and "groups x 8 responses" in out
    assert "engine 0" in out and "Traceback" not in out


@pytest.mark.parametrize(
    ("on_stale", "says"),
    [
        ("wait", "longer than 3 learner steps makes the learner wait"),
        ("expire", "longer than 3 learner steps is thrown away"),
        ("mask", ""),
    ],
)
def test_long_episodes_are_warned_of(on_stale: str, says: str) -> None:
    def warnings(task: str, **environment: object) -> list[str]:
        config = Config.model_validate(
            {
                "run": {"total_steps": 2},
                "model": {"path": "m"},
                "task": {"name": task},
                "replay": {"max_staleness": 2, "on_stale": on_stale},
                "environment": environment,
            }
        )
        return [*_episode_warnings(config, create_task(config.task, 0))]

    for found in (warnings("chain"), warnings("arithmetic", tools=["calculator"])):
        assert [says in line and "replay.on_stale: mask" in line for line in found] == (
            [True] if says else []
        )
    assert warnings("arithmetic") == []


def test_the_page_says_how_large_sampled_tokens_are_where_sampling_is_cut() -> None:
    def line(**rollout: float) -> str | None:
        values = {"run": {"total_steps": 1}, "model": {"path": "m"}, "rollout": rollout}
        found: str | None = dict(_budget(Config.model_validate(values), 1)).get("a sampled token")
        return found

    assert line() is None
    assert line(top_k=20) == "8 bytes, 2 more, and 4 for each that it is sampled from: at most 90"
    largest = line(top_p=0.9)
    assert largest is not None and largest.endswith("at most 2058")
