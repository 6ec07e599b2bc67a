"""Micro-batches that are chosen to fit the memory: the choice as a table, and what a run that
cannot fit is told.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from async_grpo.cluster.placement import Node, place
from async_grpo.config.schema import Config
from async_grpo.run.preflight.fit import fitted, needed_bytes, too_large, what_helps
from async_grpo.run.preflight.memory import Shape, learner_memory, shape_of
from async_grpo.tools.check.dry_run import assumed_nodes
from async_grpo.tools.check.known_models import known_config
from async_grpo.weights.transport import resolve_backend

GIB = 2**30
TINY = Shape(
    parameters=100_000,
    trained=100_000,
    frozen=0,
    layers=2,
    hidden=64,
    intermediate=128,
    vocabulary=100,
    kv_heads=1,
    head_dim=32,
)


def config_of(lengths: tuple[int, int] = (256, 128), **sections: Any) -> Config:
    """README's own example, but for these lengths and sections."""
    prompt, response = lengths
    rollout = {"rollout_batch_size": 16, "prompt_length": prompt, "response_length": response}
    values = {"run": {"total_steps": 1}, "model": {"path": "m"}, "rollout": rollout}
    return Config.model_validate(values | sections)


def chosen(
    config: Config, shape: Shape, nodes: str | list[Node], *, host_bytes: int | None = None
) -> tuple[Config, str, list[str]]:
    """The settings, the line, and the refusals on such nodes."""
    there = assumed_nodes(nodes) if isinstance(nodes, str) else nodes
    placement = place(config, there)
    backend = resolve_backend(config, device=placement.device, colocated=placement.colocated)
    known = {node.node_id: node.gpu_bytes for node in there}
    found, line = fitted(
        config, shape, placement, backend=backend, gpu_bytes=known, host_bytes=host_bytes
    )
    refused = list(too_large(found, shape, placement, backend=backend, gpu_bytes=known))
    if "needed" in line and "KV cache" not in line:
        need = needed_bytes(found, shape, placement, backend) / GIB
        assert f"about {need:.1f} GiB needed" in line or need >= 100, line
    return found, line, refused


@cache
def _shape(model: str) -> Shape:
    return shape_of(config_of(), known_config(model))


def known(model: str, config: Config) -> Shape:
    return _shape(model) if config.model.lora is None else shape_of(config, known_config(model))


@pytest.mark.parametrize(
    ("model", "lengths", "nodes", "tokens", "again"),
    [
        ("Qwen2.5-0.5B", (256, 128), "gpus=1,memory=80", 16384, False),
        ("Qwen2.5-0.5B", (256, 128), "gpus=1,memory=40", 8192, False),
        ("Qwen2.5-0.5B", (256, 128), "gpus=1,memory=28", 4096, False),
        ("Qwen2.5-0.5B", (256, 128), "gpus=1,memory=24", 16384, True),
        ("Qwen2.5-0.5B", (256, 128), "gpus=1,memory=22", 8192, True),
        ("Qwen2.5-0.5B", (256, 128), "gpus=8,memory=24", 4096, False),  # apart from the engines
        ("Qwen2.5-0.5B", (512, 5000), "gpus=1,memory=28", 16384, True),  # no shorter ones
        ("Qwen2.5-0.5B", (512, 20_000), "gpus=1,memory=80", 20_512, False),
        ("Qwen2.5-7B", (256, 128), "gpus=8,memory=80", 384, True),  # of one rank: nothing fits
        ("Qwen3-4B", (256, 128), "gpus=2,memory=80", 2048, True),
        ("Qwen2.5-0.5B", (256, 128), "gpus=1", 16384, False),  # not known
    ],
)
def test_the_first_that_fits_is_chosen(
    model: str, lengths: tuple[int, int], nodes: str, tokens: int, again: bool
) -> None:
    config = config_of(lengths)
    found, line, _ = chosen(config, known(model, config), nodes)
    learner = found.learner
    assert (learner.tokens_per_micro_batch, learner.gradient_checkpointing) == (tokens, again)
    said = f"learner: {tokens:,} tokens per micro-batch with{'' if again else 'out'} gradient check"
    assert line.startswith(said)
    rest = learner.unchecked_copy(update={"tokens_per_micro_batch": "auto"})
    rest = rest.unchecked_copy(update={"gradient_checkpointing": "auto"})
    engine = found.cluster.engine.unchecked_copy(update={"kv_cache_gb": "auto", "sleep": "auto"})
    cluster = found.cluster.unchecked_copy(update={"engine": engine})
    update = {"learner": rest, "cluster": cluster, "rollout": config.rollout}
    back = found.unchecked_copy(update=update)
    assert back == config, "nothing else changes"


def test_ranks_that_share_a_sequence_keep_their_parts_of_it() -> None:
    """A fourth of the activations, and smaller micro-batches than one whole sequence."""

    def asked(size: int, tokens: int | str) -> Config:
        learner = {"ranks": 4, "sequence_parallel": size, "tokens_per_micro_batch": tokens}
        return config_of((512, 20_000), learner=learner)

    alone, shared = (
        learner_memory(asked(size, 20_512 // size), TINY, device="cuda", stage=1).activations
        for size in (1, 4)
    )
    assert shared == pytest.approx(alone / 4, rel=1e-3)
    shape = _shape("Qwen2.5-7B")
    found = {size: chosen(asked(size, "auto"), shape, "gpus=8,memory=80") for size in (1, 4)}
    tokens = {size: one[0].learner.tokens_per_micro_batch for size, one in found.items()}
    assert tokens[1] == 20_512 and 5_128 <= tokens[4] < 20_512


@pytest.mark.parametrize(
    ("given", "parameters", "nodes", "cores"),
    [
        ("auto", 29_000_000, "cpus=2", "apart"),
        ("auto", 135_000_000, "cpus=2", "shared"),
        ("apart", 135_000_000, "cpus=2", "apart"),
        ("shared", 100_000, "cpus=2", "shared"),
        ("auto", 135_000_000, "gpus=1,memory=80", "auto"),
    ],
)
def test_cores_are_shared_for_models_that_compute_long(
    given: str, parameters: int, nodes: str, cores: str
) -> None:
    shape = replace(TINY, parameters=parameters)
    assert chosen(config_of(cluster={"cores": given}), shape, nodes)[0].cluster.cores == cores


def test_the_line_says_what_was_chosen_and_why() -> None:
    config = config_of()
    shape = known("Qwen2.5-0.5B", config)
    assert chosen(config, shape, "gpus=1,memory=24")[1] == (
        "learner: 16,384 tokens per micro-batch with gradient checkpointing, chosen to fit 24 GiB "
        "(about 21.2 GiB needed)"
    )
    assert "needed, 12 GiB available)" in chosen(config, shape, "gpus=1,memory=12")[1]
    assert chosen(config, shape, "gpus=1")[1].endswith("since the memory of the GPUs is not known")
    assert chosen(config, shape, "cpus=8")[1].endswith("the memory of the machine is not known")


@pytest.mark.parametrize(
    ("learner", "tokens", "again"),
    [
        ({"tokens_per_micro_batch": 16384}, 16384, True),
        ({"tokens_per_micro_batch": 1024}, 1024, False),
        ({"gradient_checkpointing": True}, 16384, True),
        ({"gradient_checkpointing": False}, 2048, False),
        ({"activation_offload": True}, 16384, True),
    ],
)
def test_what_is_given_stays_and_the_rest_fits_around_it(
    learner: dict[str, Any], tokens: int, again: bool
) -> None:
    config = config_of(learner=learner)
    found = chosen(config, known("Qwen2.5-0.5B", config), "gpus=1,memory=24")[0].learner
    assert (found.tokens_per_micro_batch, found.gradient_checkpointing) == (tokens, again)


def test_where_both_are_given_nothing_is_chosen_or_said() -> None:
    config = config_of(
        learner={"tokens_per_micro_batch": 16384, "gradient_checkpointing": False},
        replay={"max_staleness": 2},
    )
    found, line, refused = chosen(config, known("Qwen2.5-0.5B", config), "gpus=1,memory=24")
    assert (found, line) == (config, "") and len(refused) == 1


def test_a_model_that_cannot_be_checkpointed_gets_small_micro_batches() -> None:
    config = config_of()
    shape = known("Qwen2.5-0.5B", config)
    assert shape.can_recompute
    shape = replace(shape, can_recompute=False)
    found, _, refused = chosen(config, shape, "gpus=1,memory=24")
    assert found.learner.tokens_per_micro_batch == 2048 and not refused
    assert found.learner.gradient_checkpointing is False


@pytest.mark.parametrize(
    ("host", "tokens", "again"),
    [
        (64, 16384, False),
        (None, 16384, False),
        (12, 512, False),
        (10.5, 384, False),
        (5, 384, True),
    ],
)
def test_a_cpu_takes_small_micro_batches_first(host: float, tokens: int, again: bool) -> None:
    config = config_of(cluster={"device": "cpu", "rollout_actors": {"max": 1}})
    shape, size = known("SmolLM2-135M", config), host and int(host * GIB)
    found = chosen(config, shape, "cpus=4", host_bytes=size)[0].learner
    assert (found.tokens_per_micro_batch, found.gradient_checkpointing) == (tokens, again)


def test_a_cpu_holds_every_rank_and_the_engines_beside_them() -> None:
    cluster = {"device": "cpu", "rollout_actors": {"max": 4}}  # one here, three on another node
    config = config_of(cluster=cluster, learner={"ranks": 2})
    shape = known("SmolLM2-135M", config)
    found = chosen(config, shape, "nodes=2,cpus=4", host_bytes=15 * GIB)[0].learner
    assert (found.tokens_per_micro_batch, found.gradient_checkpointing) == (512, False)


def test_what_ran_out_of_memory_is_estimated_as_too_large() -> None:
    """Two ranks shared 4,624 tokens of SmolLM2-135M in float32; Ray's monitor ended one of them,
    when 22.4 of 23.5 GiB were taken.
    """
    learner = {"ranks": 2, "sequence_parallel": 2}
    config = config_of((4608, 16), cluster={"device": "cpu"}, learner=learner)
    config = config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"rollout_batch_size": 2, "group_size": 4})
        }
    )
    shape = known("SmolLM2-135M", config)
    line = chosen(config, shape, "cpus=2", host_bytes=int(23.5 * GIB))[1]
    assert "with gradient checkpointing, chosen to fit" in line, line


def test_the_smallest_of_different_gpus_counts() -> None:
    config = config_of(learner={"ranks": 2})
    there = [Node(f"{size}", "a", 64, 1, gpu_bytes=size * GIB) for size in (80, 24)]
    line = chosen(config, known("Qwen2.5-0.5B", config), there)[1]
    assert "chosen to fit 24 GiB" in line


def test_a_tiny_model_on_a_small_machine_computes_as_before() -> None:
    config = config_of(cluster={"device": "cpu"})
    found = chosen(config, TINY, "cpus=2", host_bytes=7 * GIB)[0].learner
    assert (found.tokens_per_micro_batch, found.gradient_checkpointing) == (16384, False)


@pytest.mark.parametrize(
    ("nodes", "sections", "named", "not_named"),
    [
        (
            "gpus=1,memory=24",
            {
                "learner": {"tokens_per_micro_batch": 16384, "gradient_checkpointing": False},
                "replay": {"max_staleness": 2},
            },
            [
                "learner.gradient_checkpointing=true (24.1 GiB less)",
                "learner.tokens_per_micro_batch=384 (25.3 GiB less)",
                "model.lora={}",
                "offload_optimizer.device=cpu",
                "cluster.engine.kv_cache_gb=1 (3.0 GiB less)",
            ],
            ["learner.ranks", "zero_stage", "smaller model", "response_length"],
        ),
        (
            "gpus=1,memory=12",
            {"replay": {"max_staleness": 2}},
            ["use model.lora={} (7.7 GiB less), or "],
            ["gradient_checkpointing", "tokens_per_micro_batch", "learner.ranks", "zero_stage"],
        ),
        (
            "gpus=1,memory=12",
            {
                "rollout": {"prompt_length": 512, "response_length": 30_000},
                "replay": {"max_staleness": 2},
            },
            [
                "rollout.response_length=15000 with learner.tokens_per_micro_batch=15512 (1.6 GiB "
                "less)"
            ],
            [],
        ),
        (
            "gpus=8,memory=12",
            {
                "rollout": {"prompt_length": 512, "response_length": 130_000},
                "learner": {"ranks": 4, "sequence_parallel": 2},
            },
            ["learner.sequence_parallel=4 with learner.tokens_per_micro_batch=32628 ("],
            ["learner.sequence_parallel=8"],
        ),
        (
            "gpus=8,memory=12",
            {
                "rollout": {"prompt_length": 512, "response_length": 130_000},
                "learner": {"ranks": 3},
            },
            [],
            ["sequence_parallel"],  # three ranks make no teams of two
        ),
        (
            "gpus=8,memory=8",
            {"learner": {"ranks": 4, "compile": True, "zero_stage": 0}},
            ["learner.zero_stage=2 (3.6 GiB less)"],
            ["offload_optimizer"],
        ),
        (
            "gpus=8,memory=10",
            {"cluster": {"rollout_actors": {"min": 3}}},
            ["learner.ranks=5 (3.5 GiB less)"],
            [],
        ),
        (
            "gpus=8,memory=8",
            {
                "cluster": {"rollout_actors": {"min": 3}},
                "learner": {"ranks": 2, "sequence_parallel": 2},
            },
            ["learner.ranks=4 ("],  # the third GPU that is free makes no team
            ["learner.ranks=5"],
        ),
    ],
)
def test_what_helps_is_named_and_only_that(
    nodes: str, sections: dict[str, Any], named: list[str], not_named: list[str]
) -> None:
    config = config_of(**sections)
    _, _, refused = chosen(config, known("Qwen2.5-0.5B", config), nodes)
    [sentence] = refused
    assert [one for one in named if one not in sentence] == []
    assert [one for one in not_named if one in sentence] == []


def test_several_gpus_are_offered_as_ranks_and_shards() -> None:
    config = config_of()
    [alone] = chosen(config, known("Qwen2.5-7B", config), "gpus=8,memory=80")[2]
    assert "use learner.ranks=7 (74.1 GiB less), or " in alone
    config = config_of(learner={"ranks": 4})
    [sharded] = chosen(config, known("Qwen2.5-14B", config), "gpus=8,memory=80")[2]
    assert "learner.zero_stage=3" in sharded and "tokens_per_micro_batch" not in sharded
    config = config_of(learner={"ranks": 4, "zero_stage": 3, "compile": False})
    assert chosen(config, known("Qwen2.5-14B", config), "gpus=8,memory=80")[2] == []


def test_what_is_not_enough_comes_last() -> None:
    config = config_of(
        learner={"tokens_per_micro_batch": 16384, "gradient_checkpointing": False},
        model={"path": "m", "lora": {}},
    )
    [sentence] = chosen(config, known("Qwen2.5-7B", config), "gpus=1,memory=24")[2]
    assert sentence.endswith("or a smaller model; `async-grpo check` shows the parts")


def test_what_helps_a_learner_whose_estimate_was_too_low() -> None:
    config = config_of(learner={"tokens_per_micro_batch": 16384, "gradient_checkpointing": False})
    placement = place(config, assumed_nodes("gpus=1,memory=80"))
    said = what_helps(config, known("Qwen2.5-0.5B", config), placement, "ipc", most=0)
    assert "use learner.gradient_checkpointing=true (" in said
    assert "model.lora={}" in said and "zero_stage" not in said
    assert said.endswith(", or a smaller model; `async-grpo check` shows the parts")


def test_an_engine_gets_the_cache_that_the_learner_leaves() -> None:
    learner = {"tokens_per_micro_batch": 16384, "gradient_checkpointing": True}
    config = config_of((512, 4096), model={"path": "m", "lora": {}}, learner=learner)
    shape = known("Qwen2.5-7B", config)
    sizes = {}
    for memory in (80, 96, 400):
        found, line, refused = chosen(config, shape, f"gpus=1,memory={memory}")
        cache = sizes[memory] = found.cluster.engine.kv_cache_gb
        assert not refused and line == f"engine: KV cache of {cache:g} GiB"
        placement = place(config, assumed_nodes(f"gpus=1,memory={memory}"))
        need = needed_bytes(found, shape, placement, "ipc")
        assert need <= 0.95 * memory * GIB
        if memory < 400:  # the self-check has a second copy, while nothing is trained
            parts = learner_memory(found, shape, device="cuda", stage=1, backend="ipc")
            need += max(0, parts.publication - parts.activations)
            assert need > (0.95 * memory - 0.2) * GIB, "nothing is left over"
    under_way = config.max_outstanding * config.rollout.group_size
    useful = under_way * 4608 * 2 * 28 * 4 * 128 * 2 / GIB
    assert useful <= sizes[400] < useful + 0.1, "no more than responses can fill"
    assert 4 < sizes[80] < sizes[96] < sizes[400]
    limited = config_of(
        (512, 4096),
        model={"path": "m", "lora": {}},
        learner=learner,
        cluster={"engine": {"gpu_memory_utilization": 0.25}},
    )
    found = chosen(limited, shape, "gpus=1,memory=96")[0].cluster.engine
    weights = 2 * shape.parameters / GIB
    assert weights + 3 + found.kv_cache_gb == pytest.approx(24, abs=0.1)


@pytest.mark.parametrize(
    ("nodes", "engine"),
    [("gpus=1,memory=80", {"kv_cache_gb": 5.0}), ("gpus=1", {}), ("gpus=2,memory=80", {})],
)
def test_a_cache_that_is_given_or_of_a_gpu_of_its_own_stays(
    nodes: str, engine: dict[str, Any]
) -> None:
    config = config_of((512, 4096), model={"path": "m", "lora": {}}, cluster={"engine": engine})
    found = chosen(config, known("Qwen2.5-7B", config), nodes)[0]
    assert found.cluster == config.cluster


@pytest.mark.parametrize(
    ("memory", "staleness", "given", "sleeps", "fits"),
    [
        (112, 1, "auto", "auto", True),
        (102, 1, "auto", True, True),  # 99 % together, by an estimate
        (90, 0, "auto", True, True),
        (88, 1, "auto", True, True),
        (88, 1, False, False, False),
        (88, 2, "auto", "auto", False),
        (192, 1, "auto", "auto", True),
        (192, 1, True, True, True),
        (60, 1, "auto", True, False),
    ],
)
def test_learner_and_engine_take_turns_where_they_do_not_fit_together(
    memory: int, staleness: int, given: Any, sleeps: Any, fits: bool
) -> None:
    config = config_of(replay={"max_staleness": staleness}, cluster={"engine": {"sleep": given}})
    found, line, refused = chosen(config, known("Qwen3-4B", config), f"gpus=1,memory={memory}")
    assert (found.cluster.engine.sleep, not refused) == (sleeps, fits)
    assert ("take turns" in line) == (sleeps is True and given == "auto")
    longer = 1800.0 * (sleeps is True)
    assert found.rollout.longest_group_s == config.rollout.longest_group_s + longer


def test_turns_need_the_larger_of_both() -> None:
    apart = config_of(cluster={"engine": {"sleep": False, "kv_cache_gb": 4.0}})
    turns = config_of(cluster={"engine": {"sleep": True, "kv_cache_gb": 4.0}})
    wide = config_of(cluster={"engine": {"sleep": True, "kv_cache_gb": 190.0}})
    shape = known("Qwen3-4B", apart)
    placement = place(apart, assumed_nodes("gpus=1,memory=96"))
    both = needed_bytes(apart, shape, placement, "ipc")
    rank = learner_memory(apart, shape, device="cuda", stage=1, backend="ipc")
    engine = 2 * shape.parameters + 7 * GIB
    assert both == rank.total + engine
    assert needed_bytes(turns, shape, placement, "ipc") == rank.total + 3 * GIB
    lent = rank.publication + rank.context + rank.publication  # and the self-check's copy
    assert needed_bytes(wide, shape, placement, "ipc") == lent + engine + 186 * GIB


def test_without_a_shared_gpu_there_are_no_turns() -> None:
    config = config_of(cluster={"engine": {"sleep": True}})
    found = chosen(config, known("Qwen2.5-0.5B", config), "gpus=2,memory=80")[0]
    assert found.cluster.engine.sleep is False


def test_turns_are_offered_to_a_run_of_a_larger_staleness() -> None:
    config = config_of(replay={"max_staleness": 2})
    [sentence] = chosen(config, known("Qwen3-4B", config), "gpus=1,memory=88")[2]
    assert "replay.max_staleness=1 (" in sentence


def test_a_running_learner_out_of_memory_is_offered_turns_by_their_own_setting() -> None:
    learner = {"gradient_checkpointing": True, "tokens_per_micro_batch": 4096}
    config = config_of(replay={"max_staleness": 1}, learner=learner)
    placement = place(config, assumed_nodes("gpus=1,memory=96"))
    said = what_helps(config, known("Qwen3-4B", config), placement, "ipc", most=0)
    assert "cluster.engine.sleep=true (" in said and "max_staleness" not in said
