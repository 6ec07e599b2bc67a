"""The learner against a slow loop: gradients whatever the split, ZeRO stage and number of ranks;
checkpoints, exports, errors.
"""

from __future__ import annotations

import functools
import os
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch.distributed import TCPStore
from transformers import AutoModelForCausalLM

from async_grpo.algo.metrics import MetricSums
from async_grpo.cluster.learner_group import LearnerProcess
from async_grpo.config.deepspeed_keys import KEYS
from async_grpo.config.schema import Config
from async_grpo.errors import NonFinite, SetupError, StalenessError
from async_grpo.learner import head as head_module
from async_grpo.learner.backend.deepspeed.settings import deepspeed_config
from async_grpo.learner.backend.process_group import CONTEXT_BYTES, rendezvous
from async_grpo.learner.batching import RowValue
from async_grpo.learner.learner import Learner
from async_grpo.learner.packing import pack, response_row
from async_grpo.learner.rows import learning_rate
from async_grpo.learner.weights import ZERO_RMS
from async_grpo.rollout.engine.choice import ENGINE
from tests.support.learners import (
    SHARD_ALL,
    TEMPERATURE,
    Case,
    assert_close,
    assert_history,
    bitwise,
    copy_weights,
    loaded,
    make_case,
    make_config,
    open_learner,
    picked,
    plain_model,
    reference_losses,
    row_distribution,
    run_ranks,
    split,
    train,
    write_neighbour,
)
from tests.support.models import write_model
from tests.support.processes import free_port

DEADLINE_S = 150.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of a policy, a tied policy and a reference."""
    path = tmp_path_factory.mktemp("models")
    plain = write_model(path / "plain")
    return {
        "plain": plain,
        "tied": write_model(path / "tied", tied=True),
        "reference": write_neighbour(plain, str(path / "reference")),
    }


def config_of(models: dict[str, str], stage: int, *, ranks: int = 1, **learner: Any) -> Config:
    values = {
        "zero_stage": stage,
        "ranks": ranks,
        "deepspeed": SHARD_ALL,
        "lr": 3e-3,
        "grad_clip": 0.7,
        "weight_decay": 0.1,
        "tokens_per_micro_batch": 48,
    }
    return make_config(model={"reference": models["reference"]}, learner={**values, **learner})


def expected(
    models: dict[str, str], name: str, case: Case
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    model = plain_model(models[name])
    history = reference_losses(model, plain_model(models["reference"]), case)
    return history, {key: parameter.detach() for key, parameter in model.named_parameters()}


# -- model
# --------------------------------------------------------------------------------------------------


def test_a_packed_row_equals_the_row_alone(models: dict[str, str]) -> None:
    """Of another architecture: tests/models."""
    rng = np.random.default_rng(3)
    lengths = [
        (1, [1]),
        (5, [60, 3, 31]),
        (7, [30]),
        (2, [9, 9]),
        (30, [1, 1, 40]),
        (4, [30, 1]),
        (1, [2]),
        (9, [5, 6, 7, 8]),
    ]
    rows = [
        (prompt, rng.integers(3, 100, r))
        for prompt, each in [(rng.integers(3, 100, p), each) for p, each in lengths]
        for r in each
    ]
    rng.shuffle(rows)
    policy, alone = loaded(models["plain"]), plain_model(models["plain"])
    packed = pack([response_row(*row) for row in rows], torch.device("cpu"))
    assert packed.input_ids.shape == (1, sum(p + sum(each) - len(each) for p, each in lengths)), (
        "a prompt is there once, a last token never"
    )
    whole = sum(len(prompt) + len(response) - 1 for prompt, response in rows)
    assert packed.layout.tokens == whole <= packed.layout.positions < 2 * whole
    assert len(packed.layout.buckets) > 2 and {copies.times for copies in packed.layout.copies} == {
        1,
        2,
        3,
    }
    logprobs, entropy = policy(packed, TEMPERATURE, True)
    wanted = [row_distribution(alone, *rows[k]) for k in packed.order]
    wanted_logprobs = torch.cat(
        [picked(d, rows[k][1]) for d, k in zip(wanted, packed.order, strict=True)]
    )
    torch.testing.assert_close(logprobs, wanted_logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        entropy, torch.cat([-(d.exp() * d).sum(-1) for d in wanted]), rtol=0, atol=1e-5
    )
    logprobs.sin().sum().backward()
    wanted_logprobs.sin().sum().backward()
    gradients = {
        name.removeprefix("hf."): parameter.grad for name, parameter in policy.named_parameters()
    }
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-4)


def test_the_port_of_the_rendezvous_is_held_until_the_ranks_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between its choice and the first use lie seconds of imports, in which anybody's connection
    may take a port that is free.
    """
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    process = LearnerProcess.__new__(LearnerProcess)
    host, port = process.address()
    with pytest.raises(OSError, match="in use"):
        socket.create_server((host, port))
    for name, value in (
        ("MASTER_ADDR", host),
        ("MASTER_PORT", str(port)),
        ("MASTER_LISTEN_FD", str(process._listener.detach())),
    ):
        monkeypatch.setenv(name, value)
    store = rendezvous(0, 1, timedelta(seconds=20))
    store.set("rank 0", "is here")
    assert (store.port, "MASTER_LISTEN_FD" in os.environ) == (port, False)
    assert TCPStore(host, port, timeout=timedelta(seconds=20)).get("rank 0") == b"is here"


@pytest.mark.parametrize(
    ("backend", "shared", "sleeps"),
    [("ipc", True, "auto"), ("ipc", True, True), ("nccl", False, "auto")],
)
def test_a_learner_leaves_an_engine_on_its_gpu_room(
    monkeypatch: pytest.MonkeyPatch, models: dict[str, str], backend: str, shared: bool, sleeps: Any
) -> None:
    """What torch keeps for later counts as taken: an engine that is started again would not fit."""
    config = config_of(models, 1)
    settings = config.cluster.engine.unchecked_copy(update={"sleep": sleeps})
    cluster = config.cluster.unchecked_copy(update={"engine": settings})
    config = config.unchecked_copy(update={"cluster": cluster})
    process = LearnerProcess.__new__(LearnerProcess)
    process._config, process._rank, process._listener, process._queue = config, 0, None, None
    published = SimpleNamespace(weight_metadata=lambda: [("a", [2**20, 3], "bfloat16")])
    monkeypatch.setattr(
        "async_grpo.learner.learner.Learner",
        lambda *_, **__: SimpleNamespace(published=published, sent=published),
    )
    monkeypatch.setattr("async_grpo.weights.transport.make_sender", lambda *_, **__: None)
    monkeypatch.setattr("async_grpo.learner.checkpoint.Saving", lambda *_, **__: None)
    fractions: list[float] = []
    card = SimpleNamespace(total_memory=24 * 2**30)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, _: fractions.append(share)
    )
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")

    def setup() -> None:
        process.setup(
            master=("127.0.0.1", 1),
            model_dir="",
            device="cuda",
            backend=backend,
            key="",
            total_updates=1,
            checkpoint=None,
        )

    setup()
    cache = ENGINE.kv_cache_gb(config, device="cuda", backend=backend) or 0.0
    engine = ENGINE.gpu_bytes + CONTEXT_BYTES
    if sleeps is not True:  # its weights and caches are not there while the learner computes
        engine += 6 * 2**20 + cache * 2**30
    assert fractions == ([pytest.approx(1 - engine / card.total_memory)] if shared else [])
    card.total_memory = 2**30
    if shared:
        with pytest.raises(SetupError, match=r"needs .* GiB of its 1\.0 GiB: lower"):
            setup()


# -- one rank
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        (0, "plain"),
        pytest.param(1, "tied", marks=pytest.mark.slow),
        pytest.param(2, "plain", marks=pytest.mark.slow),
        (3, "tied"),
    ],
)
def test_the_gradient_does_not_depend_on_the_micro_batches(
    stage: int, name: str, models: dict[str, str]
) -> None:
    case = make_case(models[name], n_updates=4)
    history, weights = expected(models, name, case)
    for parts in (1, 3, 7):
        with open_learner(config_of(models, stage), models, case, name=name) as learner:
            assert_history(
                train(learner, case, [split(range(len(rows)), parts) for rows in case.updates]),
                history,
            )
            assert_close(copy_weights(learner), weights)


def test_gradient_checkpointing_and_a_chunked_head_change_nothing(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        head_module,
        "token_logprobs",
        functools.partial(head_module.token_logprobs, chunk_bytes=7 * 4 * 100),
    )
    case = make_case(models["plain"])
    history, weights = expected(models, "plain", case)
    with open_learner(config_of(models, 3, gradient_checkpointing=True), models, case) as learner:
        assert_history(train(learner, case, [split(range(12), 2)]), history)
        assert_close(copy_weights(learner), weights)
        # without temporary tensors, and on a GPU in one kernel
        assert all(group["fused"] for group in learner.policy.engine.optimizer.param_groups)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_trains_near_float32(stage: int, models: dict[str, str]) -> None:
    case = make_case(models["plain"])
    history, weights = expected(models, "plain", case)
    config = config_of(models, stage)
    config = config.unchecked_copy(
        update={"model": config.model.unchecked_copy(update={"dtype": "bfloat16"})}
    )
    with open_learner(config, models, case) as learner:
        (got,) = train(learner, case, [split(range(12), 3)])
        assert got["train/grad_norm"] == pytest.approx(history[0]["train/grad_norm"], rel=0.1)
        assert {dtype for _, _, dtype in learner.published.weight_metadata()} == {"bfloat16"}
        trained = copy_weights(learner)
    start = dict(plain_model(models["plain"]).named_parameters())
    moves = [
        torch.cat([(tree[key].float() - start[key]).flatten() for key in start])
        for tree in (trained, weights)
    ]
    assert torch.cosine_similarity(*moves, dim=0) > 0.7


def test_metrics_are_sums_of_the_step(models: dict[str, str]) -> None:
    case = make_case(models["plain"])
    with open_learner(config_of(models, 1), models, case) as learner:
        learner.prepare(case.plan([split(range(12), 3)]))
        means = MetricSums.from_wire(learner.train(case.values, 0.0)).means()
    rows = [case.groups[row.group_id].rows[row.row] for row in case.updates[0] if row.weight]
    lags = [
        2 - span.policy_version
        for row in rows
        for span in row.versions
        for _ in range(span.start, span.end)
    ]
    assert means["train/staleness_mean"] == pytest.approx(np.mean(lags))
    shares = [means[f"weights/{one}_error_share"] for one in ("sampler", "kv_cache", "version")]
    assert sum(shares) == pytest.approx(1)
    assert shares[-1] == pytest.approx(np.mean(np.array(lags) > 0)) and 0 < shares[-1] < 1
    assert means["train/lr"] == 3e-3
    assert 0 < means["train/padding"] < 0.5
    assert {
        "train/loss",
        "train/grad_norm",
        "train/entropy",
        "train/kl",
        "train/staleness_1/ratio",
        "time/learner_update",
    } <= means.keys()


def test_a_step_is_as_large_as_its_responses_are_effective(models: dict[str, str]) -> None:
    """By the weights of the whole update, whatever its micro-batches, and of that update alone."""
    case, factors = make_case(models["plain"]), []
    for parts in (1, 3):
        with open_learner(config_of(models, 1, ess_step_size=True), models, case) as learner:
            for _ in range(2):
                learner.prepare(case.plan([split(range(12), parts)]))
                means = MetricSums.from_wire(learner.train(case.values, 0.0)).means()
                factor = means["train/ess_step_factor"]
                assert factor == pytest.approx(means["train/ess_seq"] ** 0.5, rel=1e-9)
                assert means["train/lr"] == pytest.approx(3e-3 * factor, rel=1e-12)
                factors.append(factor)
    assert factors[:2] == pytest.approx(factors[2:], rel=1e-5) and factors[0] != factors[1] < 1


def test_log_probs_come_in_the_order_asked_for(models: dict[str, str]) -> None:
    case = make_case(models["plain"])
    rng = np.random.default_rng(0)
    sequences = [
        (rng.integers(3, 100, p).tolist(), rng.integers(3, 100, r).tolist())
        for p, r in [(3, 4), (20, 25), (1, 1), (9, 30)]
    ]
    with open_learner(config_of(models, 1), models, case) as learner:
        got = learner.logprobs(sequences)
    for values, (prompt, response) in zip(got, sequences, strict=True):
        assert values.dtype == np.float32
        wanted = picked(
            row_distribution(plain_model(models["plain"]), np.array(prompt), np.array(response)),
            np.array(response),
        )
        np.testing.assert_allclose(values, wanted.detach().numpy(), atol=1e-5)


def test_a_token_outside_the_staleness_bound_ends_the_step(models: dict[str, str]) -> None:
    case = make_case(models["plain"])
    with open_learner(config_of(models, 0), models, case) as learner:
        for version in (0, 3):  # lags 2 and -1 at step 3 with max_staleness 1
            span = case.groups[11].rows[0].versions[-1]
            case.groups[11].rows[0].versions[-1] = type(span)(version, span.start, span.end)
            with pytest.raises(StalenessError, match="group 11 sequence 0"):
                learner.prepare(case.plan([split(range(12), 1)]))


def test_deepspeed_keys_are_merged_with_those_of_the_learner(models: dict[str, str]) -> None:
    merged = deepspeed_config(config_of(models, 2), dtype=torch.float32, world_size=2, device="cpu")
    assert merged["zero_optimization"] == {
        "stage": 2,
        "overlap_comm": False,
        "stage3_param_persistence_threshold": 0,
    }
    gpu = deepspeed_config(config_of(models, 2), dtype=torch.bfloat16, world_size=2, device="cuda")
    assert "overlap_comm" not in gpu["zero_optimization"]  # DeepSpeed knows when it pays


class Asked(dict[str, Any]):
    """Remembers the keys that somebody looked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.keys_asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.keys_asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.keys_asked.add(str(key))
        return super().__contains__(key)


def test_every_key_that_deepspeed_has_is_known() -> None:
    fields = DeepSpeedZeroConfig.model_fields
    names = {*fields, *(field.alias for field in fields.values() if field.alias)}
    assert names == KEYS["zero_optimization"]
    asked = Asked({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1})
    DeepSpeedConfig(asked)
    assert asked.keys_asked and asked.keys_asked <= KEYS[""], asked.keys_asked - KEYS[""]


def test_learning_rate_schedules() -> None:
    def rates(schedule: str) -> list[float]:
        return [learning_rate(k, lr=1.0, warmup=2, schedule=schedule, total=6) for k in range(7)]

    assert rates("constant") == [0.5, 1, 1, 1, 1, 1, 1]
    assert rates("settle") == rates("constant"), "its factor comes from the driver"
    assert rates("linear") == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0])
    assert rates("cosine") == pytest.approx([0.5, 1, 1, 0.853553, 0.5, 0.146447, 0], abs=1e-6)


# -- two ranks
# --------------------------------------------------------------------------------------------------

# Rank 0 has five rows in three micro-batches, rank 1 one row in one; rank 1's others are empty.
RANK_SPLITS = {0: [[0, 3], [1, 2], [4]], 1: [[5], [], []]}


def rank_main(rank: int, ports: list[int], path: str, models: dict[str, str]) -> None:
    """One of two ranks: the whole sweep over ZeRO stages, with several chunks in the head. The
    first failure of either rank is raised in the test.
    """
    torch.set_num_threads(1)
    whole = head_module.token_logprobs
    head_module.token_logprobs = functools.partial(whole, chunk_bytes=7 * 4 * 100)
    for stage in range(4):
        sweep_stage(rank, stage, ports[2 * stage : 2 * stage + 2], Path(path) / str(stage), models)


def sweep_stage(
    rank: int, stage: int, ports: list[int], path: Path, models: dict[str, str]
) -> None:
    name = "plain" if stage % 2 else "tied"
    case = make_case(models[name], n_updates=2)
    history, weights = expected(models, name, case)
    config, splits = config_of(models, stage, ranks=2), [RANK_SPLITS[rank]] * 2
    place = {"name": name, "rank": rank, "world": 2}
    with open_learner(config, models, case, port=ports[0], **place) as learner:
        check_weights_out(learner, path, rank)
        assert_history(train(learner, case, splits), history)
        assert_close(copy_weights(learner), weights)
        learner.save(str(path / "checkpoint"), {"step": 7})
        train(learner, case, splits)
        continued = copy_weights(learner)
    with open_learner(config, models, case, port=ports[1], **place) as learner:
        assert learner.load(str(path / "checkpoint")) == {"step": 7}
        train(learner, case, splits)
        assert bitwise(copy_weights(learner), continued)
        check_non_finite(learner, case, splits)


def check_non_finite(learner: Learner, case: Case, splits: list[list[list[int]]]) -> None:
    """A row of rank 0 without a finite loss stops both ranks, before any weight changes."""
    before = copy_weights(learner)
    culprit = case.updates[0][0]
    learner.prepare(case.plan(splits))
    with pytest.raises(NonFinite) as error:
        learner.train(case.values | {culprit.key: RowValue(float("nan"))}, 0.0)
    with pytest.raises(RuntimeError, match="not trained yet"):
        learner.prepare(case.plan(splits))
    assert culprit.group_id in error.value.group_ids
    assert bitwise(copy_weights(learner), before)


def check_weights_out(learner: Learner, path: Path, rank: int) -> None:
    """Names, shapes, export and perturbation, on untrained weights."""
    before = copy_weights(learner)
    assert [
        (key, tuple(tensor.shape), "float32") for key, tensor in before.items()
    ] == learner.published.weight_metadata()
    probe = [([5, 6, 7], [8, 9, 10, 11])] * (
        1 + 3 * rank
    )  # ranks may ask for different amounts of work
    at_start = learner.logprobs(probe)[0]
    with learner.published.perturbed(scale=0.2, seed=4):
        moved = copy_weights(learner)
        assert abs(learner.logprobs(probe)[0] - at_start).max() > 1e-3
        both: list[Any] = [None, None]
        torch.distributed.all_gather_object(both, moved)
        assert bitwise(*both)
        for key, tensor in before.items():
            assert (moved[key] - tensor).norm().item() == pytest.approx(
                0.2 * (tensor.norm().item() or ZERO_RMS * tensor.numel() ** 0.5), rel=0.3, abs=1e-6
            )
    assert bitwise(copy_weights(learner), before)
    assert np.array_equal(learner.logprobs(probe)[0], at_start)
    learner.export(str(path / "export"))
    assert bitwise(
        dict(AutoModelForCausalLM.from_pretrained(path / "export").named_parameters()), before
    )


def test_two_ranks_equal_one_for_every_zero_stage(models: dict[str, str], tmp_path: Path) -> None:
    ports = [free_port() for _ in range(8)]
    run_ranks(rank_main, ports, str(tmp_path), models, seconds=DEADLINE_S)


def test_deepspeed_keys_of_the_learner_are_refused(models: dict[str, str]) -> None:
    for keys, name in (
        ({"gradient_clipping": 1.0}, "gradient_clipping"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage"),
    ):
        config = config_of(models, 1)
        config = config.unchecked_copy(
            update={"learner": config.learner.unchecked_copy(update={"deepspeed": keys})}
        )
        with pytest.raises(ValueError, match=name):
            deepspeed_config(config, dtype=torch.float32, world_size=1, device="cpu")
    merged = deepspeed_config(config_of(models, 2), dtype=torch.float32, world_size=2, device="cpu")
    assert merged["zero_optimization"] == {
        "stage": 2,
        "overlap_comm": False,
        "stage3_param_persistence_threshold": 0,
    }
    gpu = deepspeed_config(config_of(models, 2), dtype=torch.bfloat16, world_size=2, device="cuda")
    assert "overlap_comm" not in gpu["zero_optimization"]  # DeepSpeed knows when it pays
