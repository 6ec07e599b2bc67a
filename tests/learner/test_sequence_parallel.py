"""Ranks that share each sequence: log-probs, gradients, routes, metrics and weights are those of a
rank that has all of it, and a rank needs its part of the memory; a model that cannot is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from async_grpo.algo.metrics import MetricSums
from async_grpo.config.schema import Config
from async_grpo.learner import attention, team
from async_grpo.learner import head as head_module
from async_grpo.learner import model as model_module
from async_grpo.learner.backend.base import WholeModel
from async_grpo.learner.backend.process_group import join
from async_grpo.learner.batching import PlanRow, make_rank_plans
from async_grpo.learner.collectives import gather
from async_grpo.learner.forward_choice import PASSES, Choice, check_shared
from async_grpo.learner.learner import Learner
from async_grpo.learner.model import CHECKPOINTING, PolicyModel
from async_grpo.learner.packing import Packed, PackedRow, pack
from async_grpo.learner.routing import RoutingReplay
from async_grpo.learner.rows import LearnerRow, known
from async_grpo.learner.team import IndivisibleError, Team
from tests.support.families import FAMILIES, config_of, policy_of, write_family
from tests.support.learners import (
    SHARD_ALL,
    TEMPERATURE,
    Case,
    assert_close,
    copy_weights,
    make_case,
    make_config,
    open_learner,
    run_ranks,
    set_rank,
    write_neighbour,
)
from tests.support.models import write_model
from tests.support.processes import free_port
from tests.support.varlen import double

DEADLINE_S = 150.0
CPU = torch.device("cpu")
RANKS, SIZES = 4, (2, 4)
NEAR = 1e-6
PACKED = [name for name, family in FAMILIES.items() if family.rows == "packed"]
Shapes = list[tuple[int, list[int]]]
"""Lengths of prompts, and of the responses to each."""
SHAPES: Shapes = [(5, [40, 7]), (9, [3, 12, 1]), (1, [1]), (3, [30])]
FEW: list[Shapes] = [[(1, [1])], [(1, [2])], [(4, [1, 1])], [(30, [1])], [(2, [3])]]
"""Fewer tokens than ranks, and ranks of which no token predicts one."""


# -- a model
# --------------------------------------------------------------------------------------------------


@contextmanager
def teams_of(rank: int, port: int) -> Iterator[list[Team]]:
    """The ranks in teams of two, and of four."""
    torch.set_num_threads(1)
    set_rank(rank, RANKS, port)
    join("cpu", timeout_s=DEADLINE_S)
    yield [Team(size, CPU, timeout_s=DEADLINE_S) for size in SIZES]
    dist.destroy_process_group()


def rows_of(shapes: Shapes, *, seed: int) -> list[PackedRow]:
    """Rows in which some tokens are context."""
    random = np.random.default_rng(seed)
    rows = []
    for length, responses in shapes:
        prompt = random.integers(3, 100, length)
        for response in responses:
            sampled = np.flatnonzero(random.random(response) < 0.7)
            places = np.union1d(sampled, [response - 1])
            rows.append((prompt, random.integers(3, 100, response), places))
    return rows


def outcome(policy: PolicyModel, packed: Packed, of: Team | None) -> list[Tensor]:
    """Log-probs, entropies, and the gradient of a function of both, added up over a team."""
    policy.team = of
    policy.zero_grad()
    logprobs, entropy = policy(packed, TEMPERATURE, True)
    assert entropy is not None
    wave = torch.arange(logprobs.numel()).view_as(logprobs).cos()
    ((wave * logprobs.sin()).sum() + entropy.square().sum()).backward()
    parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in policy.parameters()]
    gradient = torch.cat([part.flatten().double() for part in parts])
    if of is not None:
        dist.all_reduce(gradient)
        gradient /= RANKS // of.size  # the other teams have computed the same
    return [logprobs.detach(), entropy.detach(), gradient]


def apart(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference, in parts of the largest value."""
    pairs = zip(found, wanted, strict=True)
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def families_rank(rank: int, port: int, names: list[str], sizes: Sequence[int]) -> None:
    differ = {}
    with teams_of(rank, port) as teams:
        packed = pack(rows_of(SHAPES, seed=1), CPU)
        assert packed.input_ids.numel() % 2 == 1, "there is padding"
        for name in names:
            policy = policy_of(name, dtype=torch.float64)
            wanted = outcome(policy, packed, None)
            for of in teams:
                if of.size in sizes:
                    found = apart(outcome(policy, packed, of), wanted)
                    if not found < NEAR:
                        differ[name, of.size] = found
    assert not differ, differ


UNEVEN = [
    ("qwen3_tied", {"num_attention_heads": 9, "num_key_value_heads": 3}),
    ("qwen3_tied", {"num_attention_heads": 5, "num_key_value_heads": 5}),
    ("gpt_oss", {"num_attention_heads": 6, "num_key_value_heads": 2}),
]
"""Heads that no two, or no four ranks have equally many of."""


def uneven_rank(rank: int, port: int) -> None:
    with teams_of(rank, port) as teams:
        packed = pack(rows_of(SHAPES, seed=1), CPU)
        for name, heads in UNEVEN:
            policy = policy_of(name, dtype=torch.float64, **heads)
            wanted = outcome(policy, packed, None)
            for of in teams:
                assert apart(outcome(policy, packed, of), wanted) < NEAR, (name, heads, of.size)


def test_ranks_share_heads_unevenly() -> None:
    run_ranks(uneven_rank, free_port(), seconds=DEADLINE_S, ranks=RANKS)


KINDS = [
    "gpt_bigcode",  # one head of keys
    "gemma4_heads",  # layers with heads of their own
    "diffllama",  # two attentions in a layer
    "deepseek_v3",  # values of another size than keys; experts
]
"""Beside those of random packs, which have grouped heads, capped logits, windows and sinks."""


def test_families_compute_a_shared_sequence_as_one_rank_does() -> None:
    """One of each kind; log-probs, entropies and gradients."""
    run_ranks(families_rank, free_port(), KINDS, SIZES, seconds=DEADLINE_S, ranks=RANKS)


@pytest.mark.slow
def test_every_family_computes_a_shared_sequence_as_one_rank_does() -> None:
    run_ranks(families_rank, free_port(), PACKED, SIZES, seconds=DEADLINE_S, ranks=RANKS)


def random_shapes(random: np.random.Generator) -> Shapes:
    return [
        (int(random.integers(1, 30)), random.integers(1, 30, random.integers(1, 5)).tolist())
        for _ in range(random.integers(1, 4))
    ]


def some_sets(random: np.random.Generator, targets: Tensor) -> tuple[Tensor, ...]:
    """Each token from two to four others, from itself alone, or from the whole vocabulary."""
    kinds = random.integers(0, 3, len(targets))
    several, whole = np.flatnonzero(kinds == 0), np.flatnonzero(kinds == 1)
    sets = np.tile(np.arange(100, 104), (len(several), 1))
    sets[:, 0] = targets.numpy()[several]
    sets[:, 2:][random.random((len(several), 2)) < 0.5] = -1
    return tuple(map(torch.from_numpy, (several, sets, whole)))


def packs_rank(rank: int, port: int, count: int) -> None:
    """Packs of random shapes, also by the kernel of GPUs, with layers that are repeated in the
    backward pass, and with tokens that a teacher names.
    """
    attention.varlen_attn = double
    names, silent = ("qwen3_tied", "gpt_oss", "gemma2"), 0
    with teams_of(rank, port) as teams:
        plain = [policy_of(name, dtype=torch.float64) for name in names]
        again = [policy_of(name, dtype=torch.float64) for name in names]
        for policy in again:
            policy.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING)
            policy.train()
        for seed in range(count):
            random, of = np.random.default_rng(seed), teams[seed % 2]
            shapes = FEW[seed] if seed < len(FEW) else random_shapes(random)
            kind = int(random.integers(len(names)))
            packed = pack(rows_of(shapes, seed=seed), CPU, segmented=kind == 0 and seed % 3 > 0)
            if seed % 4 == 0:
                others = torch.from_numpy(random.integers(0, 100, (len(packed.targets), 2)))
                packed = replace(packed, targets=torch.column_stack([packed.targets, others]))
            elif seed % 4 == 1:
                packed = replace(packed, kept=some_sets(random, packed.targets))
            silent += len((packed.predictors % of.size).unique()) < of.size
            found = outcome((again if random.random() < 0.5 else plain)[kind], packed, of)
            if rank == seed % RANKS:
                wanted = outcome(plain[kind], packed, None)
                assert apart(found, wanted) < NEAR, (seed, shapes, names[kind], of.size)
    assert silent >= 3, "a rank whose tokens predict nothing"


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_random_packs(count: int) -> None:
    seconds = DEADLINE_S + count  # 500 take 94 s with nothing beside them
    run_ranks(packs_rank, free_port(), count, seconds=seconds, ranks=RANKS)


def faults_rank(rank: int, port: int) -> None:
    """Gradients of the wrong size, or of the wrong tokens, are seen; half precision travels too."""
    collected, exchanged = team._Collected.backward, team._Exchanged.backward

    def scaled(factor: float) -> Any:
        return lambda ctx, gradient: (collected(ctx, gradient)[0] * factor, None, None)

    def unsent(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None

    with teams_of(rank, port) as teams:
        policy = policy_of("qwen3_tied", dtype=torch.float64)
        packed = pack(rows_of(SHAPES, seed=1), CPU)
        wanted = outcome(policy, packed, None)
        for of in teams:
            for fault in (scaled(of.size), scaled(1 / of.size)):
                with mock.patch.object(team._Collected, "backward", staticmethod(fault)):
                    *values, gradient = outcome(policy, packed, of)
                assert apart(values, wanted[:2]) < NEAR
                assert apart([gradient], wanted[2:]) > 0.4
            with mock.patch.object(team._Exchanged, "backward", staticmethod(unsent)):
                assert apart(outcome(policy, packed, of), wanted) > 0.1
            assert team._Exchanged.backward is exchanged
            assert apart(outcome(policy, packed, of), wanted) < NEAR
        half = policy_of("qwen3_tied", dtype=torch.bfloat16)
        found, whole = (outcome(half, packed, of)[0] for of in (teams[1], None))
        torch.testing.assert_close(found, whole, atol=0.05, rtol=0.05)


def test_a_wrong_scale_of_gradients_is_seen() -> None:
    run_ranks(faults_rank, free_port(), seconds=DEADLINE_S, ranks=RANKS)


def routes_rank(rank: int, port: int) -> None:
    """Routes that a team records are those of one rank, and it takes those that it is given."""
    with teams_of(rank, port) as teams:
        made = rows_of(SHAPES, seed=1)
        nothing = [np.zeros(len(places)) for _, _, places in made]
        packed, found = pack(made, CPU), []
        for of in (None, *teams):
            policy = policy_of("qwen3_moe", dtype=torch.float64)
            policy.team = of
            replay = RoutingReplay(WholeModel(policy))
            rows = [LearnerRow(*row, none, none) for row, none in zip(made, nothing, strict=True)]
            with torch.no_grad():
                replay.recording([])(pack([], CPU), 1.0, False)
                live, _ = replay.recording(rows)(packed, 1.0, False)
            recorded = [rows[place].routes for place in packed.order]
            others = [3 - known(routes) for routes in recorded]  # of the experts 0 to 3
            laid = replay.lay(packed, others)
            moved = outcome(policy, laid, of)
            assert laid.routes is not None
            counts = [policy.whole(torch.stack(one, -1), packed) for one in laid.routes.changed]
            changed = [int(one.all(-1).sum()) for one in counts]
            found.append((np.concatenate(recorded), [live, *moved], changed))
            assert apart([live], [moved[0]]) > 0.01 and sum(changed) > 50
    for routes, values, changed in found[1:]:
        assert np.array_equal(routes, found[0][0]) and changed == found[0][2]
        assert apart(values, found[0][1]) < NEAR


def test_routes_of_a_shared_sequence_are_recorded_and_replayed() -> None:
    run_ranks(routes_rank, free_port(), seconds=DEADLINE_S, ranks=RANKS)


# -- memory
# --------------------------------------------------------------------------------------------------

WORDS, CHUNK, LONG = 100, 150, [(20, [900])]


class LogitRows(TorchDispatchMode):
    """Inside, the most rows of a tensor with a column for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and one.dim() > 1 and one.shape[-1] == WORDS:
                self.most = max(self.most, one.numel() // WORDS)
        return result


def kept_bytes(policy: PolicyModel, packed: Packed, of: Team | None) -> int:
    """What autograd keeps for the backward pass, without weights."""
    policy.team, kept = of, dict[int, tuple[int, Tensor]]()
    weights = {one.untyped_storage().data_ptr() for one in policy.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:  # with the tensor, whose address stays its own
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy(packed, TEMPERATURE, True)
    return sum(size for size, _ in kept.values())


def memory_rank(rank: int, port: int) -> None:
    chunked = partial(head_module.token_logprobs, chunk_bytes=4 * WORDS * CHUNK)
    head_module.token_logprobs = chunked
    packed = pack(rows_of(LONG, seed=1), CPU)
    assert len(packed.predictors) > 3 * CHUNK
    with teams_of(rank, port) as teams:
        for name in ("qwen3_tied", "gemma2"):  # a plain head, and one of the model's own
            policy = policy_of(name, vocab_size=WORDS)
            for of in (None, *teams):
                with LogitRows() as rows:
                    outcome(policy, packed, of)
                assert CHUNK / 2 < rows.most <= CHUNK, (name, rows.most)
        policy = policy_of("qwen3_tied", vocab_size=WORDS)
        whole = kept_bytes(policy, packed, None)
        for of in teams:
            assert whole / of.size < kept_bytes(policy, packed, of) * 1.05 < 1.2 * whole / of.size


def test_a_rank_keeps_its_part_and_no_logits_of_all_tokens() -> None:
    """Activations of a long sequence shrink with the ranks that share it; there is never a tensor
    of its tokens by the vocabulary, in either pass.
    """
    run_ranks(memory_rank, free_port(), seconds=DEADLINE_S, ranks=RANKS)


# -- a learner
# --------------------------------------------------------------------------------------------------

MOVES = {"lr": 0.006, "deepspeed": SHARD_ALL}
"""Updates after which a router would pick other experts."""
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "shares of the step": {
        "algorithm": {
            "top_entropy_share": 0.3,
            "importance": {"level": "token", "mode": "mask", "upper": 1.05, "normalize": True},
            "rejection": [{"score": "k3", "reduce": "max", "upper": 0.5}],
            "behavior_penalty": 0.1,
        },
        "learner": {"zero_stage": 2, "ess_step_size": True},
    },
    "routes": {
        "learner": {"routing_replay": "r2", "zero_stage": 3, "gradient_checkpointing": True}
    },
    "returns": {
        "algorithm": {
            "adv_estimator": "reinforce_plus_plus",
            "gamma": 0.9,
            "use_kl_loss": False,
            "add_token_level_kl": True,
            "advantage_clip": 1.5,
        },
        "learner": {"zero_stage": 1},
    },
    "unsharded": {"learner": {"zero_stage": 0}},
    "offloaded": {
        "learner": {"zero_stage": 1, "gradient_checkpointing": True, "activation_offload": True}
    },
    "sharded": {"learner": {"zero_stage": 3, "gradient_checkpointing": True}},
    "adapters": {"model": {"lora": {"rank": 4}}, "learner": {"zero_stage": 2}},
    "adapters, sharded": {"model": {"lora": {"rank": 4}}, "learner": {"zero_stage": 3}},
    "compiled": {"learner": {"zero_stage": 1, "compile": True}},
}
TEAM_SPLITS = [[[0, 3], [1, 2], [4]], [[5], [], []]]
"""Rows of an update by team and micro-batch; together they are those of ALONE."""
ALONE_SPLIT = [[0, 3], [1, 2], [4], [5]]
OF_A_RANK = ("time/", "train/same_response")
"""Metrics that say something of a rank."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("models")
    plain = write_model(path / "plain")
    write_family("qwen3_moe", path / "mixture")
    return {
        "plain": plain,
        "mixture": str(path / "mixture"),
        "reference": write_neighbour(plain, str(path / "reference")),
    }


def settings_of(name: str, models: dict[str, str], **learner: Any) -> tuple[Config, str]:
    """The configuration of a case, and the name of its model."""
    given, mixture = CASES[name], name == "routes"
    model = {"path": "unused", **given.get("model", {})}
    if not mixture and "lora" not in model:
        model["reference"] = models["reference"]
    base = make_config().algorithm.model_dump()
    values = {"ppo_epochs": 2, "deepspeed": SHARD_ALL, **(MOVES if mixture else {})}
    config = make_config(
        model=model,
        algorithm=base | given.get("algorithm", {}),
        learner=values | given["learner"] | learner,
    )
    return config, "mixture" if mixture else "plain"


def step(learner: Learner, case: Case, split: list[list[int]]) -> dict[str, float]:
    """A learner step of four updates; its metrics, those of all ranks together."""
    learner.prepare(case.plan([split] * len(case.updates)))
    sums = MetricSums()
    for wire in gather(learner.train(case.values, 0.05)):
        sums.merge(MetricSums.from_wire(wire))
    means = sums.means()
    return {key: value for key, value in means.items() if not key.startswith(OF_A_RANK)}


def learner_rank(
    rank: int, port: int, name: str, size: int, models: dict[str, str], path: str
) -> None:
    """Two steps, the second with gradients of the wrong size: metrics of both, and the weights
    between them.
    """
    torch.set_num_threads(1)
    model_module.BACKEND = "aot_eager"
    config, model = settings_of(name, models, ranks=RANKS, sequence_parallel=size)
    case, wanted = make_case(models[model], n_updates=4), torch.load(path)
    split = TEAM_SPLITS[rank // size] if size < RANKS else ALONE_SPLIT
    place = {"name": model, "rank": rank, "world": RANKS, "port": port}
    with open_learner(config, models, case, **place) as learner:
        found = step(learner, case, split)
        assert found == pytest.approx(wanted["first"], rel=1e-4, abs=1e-5)
        assert_close(copy_weights(learner), wanted["weights"])
        learner.policy._world_size //= size
        found = step(learner, case, split)
        assert found["train/grad_norm"] < 0.8 * wanted["second"]["train/grad_norm"]


def check_learner(name: str, size: int, models: dict[str, str], path: Path) -> None:
    """Compare ranks that share sequences with a learner of one rank."""
    config, model = settings_of(name, models, compile=False)
    case = make_case(models[model], n_updates=4)
    with open_learner(config, models, case, name=model) as learner:
        first, weights = step(learner, case, ALONE_SPLIT), copy_weights(learner)
        second = step(learner, case, ALONE_SPLIT)
    torch.save({"first": first, "weights": weights, "second": second}, path / "wanted.pt")
    arguments = (free_port(), name, size, models, str(path / "wanted.pt"))
    run_ranks(learner_rank, *arguments, seconds=DEADLINE_S, ranks=RANKS)


@pytest.mark.parametrize(
    "name", [name if number < 1 else pytest.param(name, marks=pytest.mark.slow)
             for number, name in enumerate(CASES)]
)  # fmt: skip
def test_two_teams_of_two_ranks_train_as_one_rank_does(
    name: str, models: dict[str, str], tmp_path: Path
) -> None:
    """Metrics, selections, routes and weights; and gradients that are divided once too often
    would be seen.
    """
    check_learner(name, 2, models, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shares of the step", "routes", "adapters"])
def test_four_ranks_that_share_everything_train_as_one_does(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("wide")
    write_family("qwen3_moe", place / "mixture")
    write_family("qwen3", place / "plain")
    models = {name: str(place / name) for name in ("mixture", "plain")}
    models["reference"] = write_neighbour(models["plain"], str(place / "reference"))
    check_learner(name, 4, models, tmp_path)


def resumed_rank(rank: int, ports: list[int], models: dict[str, str], path: str) -> None:
    """A step of ranks that share sequences, and one of ranks that do not."""
    torch.set_num_threads(1)
    case, wanted = make_case(models["plain"], n_updates=4), torch.load(f"{path}/wanted.pt")
    splits = {2: ALONE_SPLIT, 1: [[[0, 3], [1, 2]], [[4], [5]]][rank]}
    for number, size in enumerate((2, 1)):
        config, _ = settings_of("shares of the step", models, ranks=2, sequence_parallel=size)
        place = {"rank": rank, "world": 2, "port": ports[number]}
        with open_learner(config, models, case, **place) as learner:
            if number:
                assert learner.load(f"{path}/checkpoint") == {"step": 1}
            found = step(learner, case, splits[size])
            assert found["train/loss"] == pytest.approx(wanted[number]["train/loss"], rel=1e-4)
            norm = pytest.approx(wanted[number]["train/grad_norm"], rel=1e-4)
            assert found["train/grad_norm"] == norm
            if not number:
                learner.save(f"{path}/checkpoint", {"step": 1})


@pytest.mark.slow
def test_a_checkpoint_continues_with_another_number_of_ranks_for_each_sequence(
    models: dict[str, str], tmp_path: Path
) -> None:
    config, _ = settings_of("shares of the step", models)
    case = make_case(models["plain"], n_updates=4)
    with open_learner(config, models, case) as learner:
        wanted = [step(learner, case, ALONE_SPLIT) for _ in range(2)]
    torch.save(wanted, tmp_path / "wanted.pt")
    ports = [free_port(), free_port()]
    run_ranks(resumed_rank, ports, models, str(tmp_path), seconds=DEADLINE_S)


# -- plans, and who is refused
# --------------------------------------------------------------------------------------------------


def test_the_ranks_of_a_team_have_the_same_plan() -> None:
    rows = [PlanRow(n // 4, n % 4, 3, 5 + n, 0.1, 5 + n) for n in range(16)]
    budgets = {"token_budget": 60, "epoch_updates": 1}
    plans = make_rank_plans(3, [rows], ranks=6, team=3, **budgets)
    assert plans[:3] == [plans[0]] * 3 and plans[3:] == [plans[3]] * 3
    assert [plans[0], plans[3]] == make_rank_plans(3, [rows], ranks=2, **budgets)


@pytest.mark.parametrize(
    ("name", "size", "says"),
    [
        ("mamba2", 2, r"is 2, but mamba2 has layers that need a whole sequence on one rank \(a "),
        ("qwen3_next", 2, "is 2, but qwen3_next has layers that need a whole sequence on one"),
        ("llama4", 4, "is 4, but llama4_text has layers that need a whole sequence on one rank"),
        ("qwen3", 8, "is 8, but the model's attention has 4 heads, .* set it to at most 4"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused(name: str, size: int, says: str) -> None:
    rows = FAMILIES[name].rows
    choice = Choice(next(one for one in PASSES if one.rows == rows))
    with pytest.raises(IndivisibleError, match=f"learner.sequence_parallel {says}"):
        check_shared(choice, config_of(name), size=size)
    if rows == "rows":
        check_shared(choice, config_of(name), size=1)


def refused_rank(rank: int, port: int, directory: str) -> None:
    torch.set_num_threads(1)
    config = make_config(learner={"ranks": 2, "sequence_parallel": 2})
    case = Case({}, [], {})
    refused = pytest.raises(IndivisibleError, match="but mamba2 has layers that need a whole")
    place = {"name": "mamba2", "rank": rank, "world": 2, "port": port}
    with refused, open_learner(config, {"mamba2": directory}, case, **place):
        pass


@pytest.mark.slow
def test_a_recurrent_model_is_refused_when_a_learner_is_built(tmp_path: Path) -> None:
    write_family("mamba2", tmp_path)
    run_ranks(refused_rank, free_port(), str(tmp_path), seconds=DEADLINE_S)
