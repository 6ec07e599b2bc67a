"""Routing replay: later passes take the experts that the first one took, or all passes those that
the engine took, in every family with experts, and nothing else of a pass changes.

A router near ties is `Ties`: which experts it picks depends on the call, their scores do not.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from async_grpo.config.schema import Config
from async_grpo.learner.adapters import UntrainableError
from async_grpo.learner.backend.base import WholeModel
from async_grpo.learner.experts import blocks
from async_grpo.learner.forward_choice import ALONE
from async_grpo.learner.learner import Learner
from async_grpo.learner.model import CHECKPOINTING, PolicyModel
from async_grpo.learner.packing import Packed, pack
from async_grpo.learner.routing import RoutingReplay
from async_grpo.learner.rows import LearnerRow
from tests.support.families import FAMILIES, policy_of, write_family
from tests.support.learners import (
    SHARD_ALL,
    Case,
    assert_history,
    make_case,
    make_config,
    open_learner,
    run_ranks,
    split,
    train,
)
from tests.support.processes import free_port

DEADLINE_S = 120.0
CPU = torch.device("cpu")
COUNTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
"""Keys of the number of experts."""
MIXTURES = [
    name
    for name, family in FAMILIES.items()
    if any((family.values | family.values.get("text_config", {})).get(key, 0) > 1 for key in COUNTS)
]
TRAINED = ["mixtral", "qwen2_moe", "deepseek_v3"]
NEAR = 0.3
"""Scores that are no farther apart may be told apart otherwise."""


class Ties(TorchFunctionMode):
    """Inside, every pick of the best of [tokens, n] scores sees noise of its own; the scores that
    it returns are without.
    """

    def __init__(self, size: float = NEAR) -> None:
        super().__init__()
        self._size = size
        self._random = torch.Generator().manual_seed(1)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in ("topk", "max") or not isinstance(result, tuple):
            return result
        scores = args[0]
        if scores.dim() != 2 or result[1].dim() != 2:
            return result
        noise = self._size * torch.randn(scores.shape, generator=self._random)
        taken = func(scores.detach() + noise, *args[1:], **(kwargs or {}))[1]
        return type(result)((scores.gather(-1, taken), taken))

    def __call__(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A forward pass that is inside, also where it is repeated in a backward pass."""

        def inside(*arguments: Any, **options: Any) -> Tensor:
            with self:
                return forward(*arguments, **options)

        return inside


def some_rows() -> list[LearnerRow]:
    """Three answers to each of two prompts."""
    random = np.random.default_rng(5)
    made = []
    for length, answers in ((4, (9, 6, 3)), (7, (8, 5, 2))):
        prompt = random.integers(3, 100, length)
        made += [row_of(prompt, random.integers(3, 100, answer)) for answer in answers]
    return made


def row_of(prompt: np.ndarray, response: np.ndarray) -> LearnerRow:
    nothing = np.zeros(len(response), np.float32)
    lag = np.zeros(len(response), np.int64)
    return LearnerRow(prompt, response, np.arange(len(response)), nothing, lag)


def in_order(packed: Packed, rows: Sequence[LearnerRow]) -> list[LearnerRow]:
    return [rows[place] for place in packed.order]


TOGETHER, OTHERWISE = [[0, 1, 3], [2, 4, 5]], [[3, 2, 0], [4, 1, 5]]
"""Rows of the packs, in two ways; prompts are in both packs, with other sequences."""


def logprobs_of(
    rows: Sequence[LearnerRow],
    places: Sequence[Sequence[int]],
    run: Callable[[Packed, list[LearnerRow]], Tensor],
) -> dict[int, Tensor]:
    """Log-probs of every row, by its number. run: those of a pack."""
    found = {}
    for numbers in places:
        chunk = [rows[place] for place in numbers]
        packed = pack([row.tokens for row in chunk], CPU)
        lengths = [len(chunk[place].response) for place in packed.order]
        parts = run(packed, in_order(packed, chunk)).split(lengths)
        found |= {numbers[k]: part for k, part in zip(packed.order, parts, strict=True)}
    return found


def recorded(replay: RoutingReplay, rows: list[LearnerRow]) -> dict[int, Tensor]:
    """Log-probs of the pass that records the rows' routes."""
    numbers = [place for part in TOGETHER for place in part]
    run = replay.recording([rows[place] for place in numbers])
    with torch.no_grad():
        return logprobs_of(rows, TOGETHER, lambda packed, _: run(packed, 1.0, False)[0])


def replayed(
    replay: RoutingReplay, rows: list[LearnerRow], places: Sequence[Sequence[int]]
) -> dict[int, Tensor]:
    def run(packed: Packed, ordered: list[LearnerRow]) -> Tensor:
        return replay.policy(laid(replay, packed, ordered), 1.0, False)[0]

    return logprobs_of(rows, places, run)


def laid(replay: RoutingReplay, packed: Packed, ordered: Sequence[LearnerRow]) -> Packed:
    return replay.lay(packed, [row.routes for row in ordered])


def watched(policy: PolicyModel) -> RoutingReplay:
    """What replays routes of the model, tried as a learner does."""
    replay = RoutingReplay(WholeModel(policy))
    with torch.no_grad():
        replay.recording([])(pack([], CPU), 1.0, False)
    return replay


def farthest(one: dict[int, Tensor], other: dict[int, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[key] - other[key]).detach().abs().max()) for key in one)


@pytest.mark.parametrize("name", MIXTURES)
def test_every_family_takes_the_experts_of_the_first_pass(name: str) -> None:
    """Also of rows that are packed otherwise; without, log-probs differ."""
    policy, rows = policy_of(name), some_rows()
    replay = watched(policy)
    with torch.no_grad(), Ties():
        first = recorded(replay, rows)
        same = replayed(replay, rows, TOGETHER)
        moved = replayed(replay, rows, OTHERWISE)
        policy.in_step = True  # as ranks do that divide a model
        padded = replayed(replay, rows, OTHERWISE)
        live = logprobs_of(rows, TOGETHER, lambda packed, _: policy(packed, 1.0, False)[0])
    assert all(torch.equal(same[key], first[key]) for key in first)
    assert farthest(moved, first) < 2e-5
    assert farthest(padded, first) < 2e-5
    assert farthest(live, first) > 1e-3


@pytest.mark.parametrize("name", ["mixtral", "glm4_moe_groups", "llama4"])
def test_what_would_have_been_picked_otherwise_is_counted(name: str) -> None:
    policy, rows = policy_of(name), some_rows()
    replay = watched(policy)

    def share(size: float) -> float:
        counts: list[tuple[int, int]] = []

        def run(packed: Packed, ordered: list[LearnerRow]) -> Tensor:
            packed = laid(replay, packed, ordered)
            values = policy(packed, 1.0, False)[0]
            assert packed.routes is not None
            for changed, known in packed.routes.changed:
                counts.append((int((changed & known).sum()), int(known.sum())))
            return values

        with torch.no_grad(), Ties(size):
            logprobs_of(rows, OTHERWISE, run)
        return sum(one for one, _ in counts) / sum(of for _, of in counts)

    recorded(replay, rows)
    assert share(0.0) == 0
    assert 0.02 < share(NEAR) < 1


@pytest.mark.parametrize("name", [*TRAINED, "llama4"])
def test_own_routes_change_no_gradient(name: str) -> None:
    """Also not of the router, whose scores are those of the same experts."""
    rows, policy = some_rows(), policy_of(name)
    live = logprobs_of(rows, OTHERWISE, lambda packed, _: policy(packed, 1.0, False)[0])
    torch.cat(list(live.values())).sum().backward()
    without = gradients_of(policy)
    policy.zero_grad()
    replay = watched(policy)
    recorded(replay, rows)
    torch.cat(list(replayed(replay, rows, OTHERWISE).values())).sum().backward()
    given = gradients_of(policy)
    assert without.keys() == given.keys()
    routers = {key for block in blocks(policy.hf) for key, _ in block.routers()}
    assert routers and all(without[key].abs().max() > 0 for key in routers & without.keys())
    for key, gradient in without.items():
        torch.testing.assert_close(given[key], gradient, rtol=1e-6, atol=1e-6)


def gradients_of(policy: PolicyModel) -> dict[str, Tensor]:
    named = policy.hf.named_parameters()
    return {key: one.grad.clone() for key, one in named if one.grad is not None}


@pytest.mark.parametrize("name", ["qwen3_moe", "llama4"])
def test_layers_that_are_repeated_in_the_backward_pass_take_the_same_routes(name: str) -> None:
    """Rows in several buckets, so that layers are repeated in another order than they were run."""
    random = np.random.default_rng(0)
    lengths = (70, 60, 9, 4)
    rows = [row_of(random.integers(3, 100, 3), random.integers(3, 100, n)) for n in lengths]
    gradients = []
    for repeats in (False, True):
        policy = policy_of(name)
        if repeats:
            policy.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING)
        policy.train()
        replay, packed = watched(policy), pack([row.tokens for row in rows], CPU)
        ordered = in_order(packed, rows)
        for block in blocks(policy.hf):
            vars(block.module)["forward"] = Ties()(block.module.forward)
        if not repeats:
            with torch.no_grad():
                replay.recording(rows)(packed, 1.0, False)
        kept = [row.routes for row in rows]
        replay.policy(laid(replay, packed, ordered), 1.0, False)[0].sum().backward()
        assert all(row.routes is one for row, one in zip(rows, kept, strict=True))
        gradients.append(gradients_of(policy))
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "chosen"), [("mixtral", 2), ("llama4", 1)])
def test_a_prompt_in_several_packs_has_one_route(name: str, chosen: int) -> None:
    """Also where each sequence has its prompt computed for itself."""
    rows, policy = some_rows(), policy_of(name)
    with Ties():
        recorded(watched(policy), rows)
    for first in (0, 3):
        prompts = [known(row)[: len(row.prompt)] for row in rows[first : first + 3]]
        assert all(np.array_equal(one, prompts[0]) for one in prompts)
    assert [len(known(row)) for row in rows] == [
        len(row.prompt) + len(row.response) - 1 for row in rows
    ]
    assert known(rows[0]).dtype == np.uint8
    assert known(rows[0]).shape[1] == 2 * chosen, "layers, experts of a token"


def known(row: LearnerRow) -> np.ndarray:
    assert row.routes is not None
    return row.routes


def test_many_experts_have_wider_numbers() -> None:
    rows = some_rows()
    replay = watched(policy_of("qwen3_moe", num_experts=300, moe_intermediate_size=8))
    recorded(replay, rows)
    assert max(int(known(row).max()) for row in rows) > 255
    with torch.no_grad():
        assert farthest(replayed(replay, rows, OTHERWISE), recorded(replay, some_rows())) < 2e-5


def test_any_routes_give_the_log_probs_of_a_loop_by_hand() -> None:
    """Of one row after the other, one token after the other, one expert after the other."""
    random, rows = np.random.default_rng(2), some_rows()
    prompts: dict[bytes, np.ndarray] = {}
    for row in rows:
        length = len(row.prompt) + len(row.response) - 1
        picks = [random.permutation(4)[:2] for _ in range(2 * length)]
        row.routes = np.array(picks, np.uint8).reshape(length, 4)
        shared = prompts.setdefault(row.prompt.tobytes(), row.routes[: len(row.prompt)].copy())
        row.routes[: len(row.prompt)] = shared
    replay, alone = watched(policy_of("mixtral")), policy_of("mixtral")
    alone.use(ALONE[0])
    with torch.no_grad():
        packed = replayed(replay, rows, OTHERWISE)
        for number, row in enumerate(rows):
            for layer, block in enumerate(blocks(alone.hf)):
                routes = known(row)[:, 2 * layer : 2 * layer + 2]
                vars(block.module)["forward"] = functools.partial(by_hand, block.module, routes)
            [one] = logprobs_of(
                [row], [[0]], lambda packed, _: alone(packed, 1.0, False)[0]
            ).values()
            torch.testing.assert_close(packed[number], one, rtol=0, atol=2e-5)


def by_hand(block: Any, routes: np.ndarray, hidden: Tensor) -> Tensor:
    """What a block of Mixtral's makes of [1, L, H] with given experts [L, 2]."""
    out = torch.zeros_like(hidden)
    for place, experts in enumerate(routes.tolist()):
        state = hidden[0, place]
        chances = torch.softmax(block.gate.weight @ state, -1)
        for expert in experts:
            gate, up = (block.experts.gate_up_proj[expert] @ state).chunk(2)
            made = block.experts.down_proj[expert] @ (block.experts.act_fn(gate) * up)
            out[0, place] += chances[expert] / chances[experts].sum() * made
    return out


def test_a_model_whose_routing_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(UntrainableError, match=r"is set; llama has no router .* leave it out"):
        RoutingReplay(WholeModel(policy_of("llama")))
    policy = policy_of("qwen3_moe")
    gate = next(iter(blocks(policy.hf))).module.gate

    def sorts(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.nn.functional.linear(hidden, gate.weight)
        taken = logits.argsort(-1, descending=True)[:, :2]
        return logits, logits.softmax(-1).gather(-1, taken), taken

    vars(gate)["forward"] = sorts
    with pytest.raises(UntrainableError, match="is set; qwen3_moe has no router whose experts"):
        watched(policy)


def sent_by_engine(replay: RoutingReplay, routes: np.ndarray, policy: PolicyModel) -> np.ndarray:
    """Routes as an engine says them: of every layer the experts, which are picked last."""
    layers, columns = policy.hf.config.get_text_config().num_hidden_layers, replay._columns
    count = policy.hf.config.get_text_config().num_experts_per_tok
    plane = np.full((len(routes), layers, count), 7, np.uint8)  # dense layers: anything
    for number, block in enumerate(blocks(policy.hf)):
        picks = sorted(pick for pick in columns if pick[0] == number)
        taken = np.concatenate([routes[:, columns[pick]] for pick in picks], -1)[:, -count:]
        plane[:, int(re.findall(r"\.(\d+)\.", block.name)[-1])] = taken
    return plane.reshape(len(routes), -1)


@pytest.mark.parametrize("name", MIXTURES)
def test_every_family_takes_the_experts_of_the_engine(name: str) -> None:
    """Which does not say between which groups of experts it chose."""
    policy, rows = policy_of(name), some_rows()
    replay = watched(policy)
    with torch.no_grad(), Ties():
        first = recorded(replay, rows)
        for row in rows:
            row.routes = replay.of_engine(sent_by_engine(replay, known(row), policy))
        assert farthest(replayed(replay, rows, OTHERWISE), first) < 2e-5


def test_tokens_without_experts_of_the_engine_are_routed_by_the_model() -> None:
    policy, rows = policy_of("mixtral"), some_rows()
    replay = watched(policy)
    live = logprobs_of(rows, TOGETHER, lambda packed, _: policy(packed, 1.0, False)[0])
    for row in rows:
        length = len(row.prompt) + len(row.response) - 1
        row.routes = replay.of_engine(np.full((length, 4), 65_535, np.uint16))
        assert row.routes.dtype == np.uint8
    with torch.no_grad():
        assert farthest(replayed(replay, rows, OTHERWISE), live) < 2e-5
        recorded(replay, rows)
    assert max(int(known(row).max()) for row in rows) < 4, "the first pass tells the others"


@pytest.mark.parametrize(
    "sent",
    [np.zeros((3, 2), np.uint8), np.full((3, 4), 4, np.uint8), np.full((3, 4), 300, np.uint16)],
)
def test_experts_that_the_model_has_not_are_refused(sent: np.ndarray) -> None:
    with pytest.raises(ValueError, match="which are no routes of this model"):
        watched(policy_of("mixtral")).of_engine(sent)


def test_an_expert_255_is_no_missing_one() -> None:
    replay = watched(policy_of("qwen3_moe", num_experts=256, moe_intermediate_size=8))
    sent = np.array([[255, 0, 1, 2], [65_535, 65_535, 3, 4]], np.uint16)
    assert replay.of_engine(sent).tolist() == [[255, 0, 1, 2], [-1, -1, 3, 4]]
    narrow = np.array([[255, 255, 1, 2]], np.uint8)
    assert replay.of_engine(narrow).tolist() == [[-1, -1, 1, 2]]


def test_the_model_is_left_alone_without_routes() -> None:
    """As the reference is that the policy is without its adapters."""
    rows, policy = some_rows(), policy_of("mixtral")
    before = logprobs_of(rows, TOGETHER, lambda packed, _: policy(packed, 1.0, False)[0])
    replay = watched(policy)
    recorded(replay, rows)
    after = logprobs_of(rows, TOGETHER, lambda packed, _: policy(packed, 1.0, False)[0])
    assert farthest(after, before) == 0


# learner ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("mixtures")
    names = {*TRAINED, "qwen3_moe"}
    for name in sorted(names):
        write_family(name, path / name)
    return {name: str(path / name) for name in names}


def config(replay: str = "r2", algorithm: dict[str, Any] | None = None, **learner: Any) -> Config:
    values = {"ppo_epochs": 2, "routing_replay": replay, "tokens_per_micro_batch": 48}
    return make_config(algorithm=algorithm or {}, learner=values | learner)


def two_epochs(directory: str) -> tuple[Case, list[list[list[int]]]]:
    """Four updates, and the rows of their micro-batches: the second epoch packs them otherwise."""
    case = make_case(directory, n_updates=4)
    counts = [range(len(rows)) for rows in case.updates]
    splits = [split(rows, 2) for rows in counts[:2]] + [split(rows, 3)[::-1] for rows in counts[2:]]
    return case, splits


@contextmanager
def unmoved(learner: Learner) -> Iterator[None]:
    """Inside, updates change no weight."""
    step = learner.policy.step
    learner.policy.step = lambda lr: step(0.0)  # type: ignore[method-assign]
    yield
    learner.policy.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "name", [TRAINED[0], *(pytest.param(name, marks=pytest.mark.slow) for name in TRAINED[1:])]
)
def test_ratios_of_weights_that_do_not_move_are_one(models: dict[str, str], name: str) -> None:
    farthest = {}
    for replay in ("off", "r2"):
        case, splits = two_epochs(models[name])
        opened = open_learner(config(replay), models, case, name=name)
        with opened as learner, unmoved(learner), Ties():
            learner.prepare(case.plan(splits))
            found = learner.train(case.values, 0.0)
        farthest[replay] = found["highs"]["train/log_ratio_abs_max"]
        assert ("train/routes_changed" in found["sums"]) == (replay == "r2")
    assert farthest["r2"] < 2e-5
    assert farthest["off"] > 1e-3
    changed, count = found["sums"]["train/routes_changed"]
    assert 0.02 < changed / count < 1


@contextmanager
def experts_of(learner: Learner) -> Iterator[list[Tensor]]:
    """What experts are asked for inside, call by call."""
    asked: list[Tensor] = []

    def ask(_: Any, arguments: tuple[Any, ...]) -> None:
        asked.append(arguments[1].clone())

    found = list(blocks(learner.policy.module.hf))
    hooks = [block.held.register_forward_pre_hook(ask) for block in found]
    try:
        yield asked
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("anchor", ["recomputed", "behavior"])
@pytest.mark.parametrize("replay", ["off", "r2"])
def test_epochs_after_an_update_ask_the_experts_of_the_first_one(
    models: dict[str, str], replay: str, anchor: str
) -> None:
    """Whatever the ratio is to; although the router, which has moved, would ask others."""
    case = make_case(models["qwen3_moe"])
    case.updates *= 2
    splits = [split(range(len(case.updates[0])), 2)] * 2
    algorithm = {"anchor": anchor, "importance": {"level": "none"}}
    settings = config(replay, algorithm, lr=0.05)
    with (
        open_learner(settings, models, case, name="qwen3_moe") as learner,
        experts_of(learner) as asked,
    ):
        plan = case.plan(splits)
        learner.prepare(plan)
        recording = len(asked)
        found = learner.train(case.values, 0.0)
    assert recording or (replay, anchor) == ("off", "behavior")
    trained = asked[recording:]
    first, second = trained[: len(trained) // 2], trained[len(trained) // 2 :]
    same = all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert same == (replay == "r2")
    if replay == "r2":
        changed, count = found["sums"]["train/routes_changed"]
        assert changed / count > 0.01, "the live picks are others"


def routed_by_hand(case: Case) -> dict[tuple[int, int], np.ndarray]:
    """Give every token of the groups two of four experts in two layers; of each row those of its
    prompt and of its response, whose last token has none.
    """
    random, told = np.random.default_rng(3), {}
    for number, group in case.groups.items():
        lengths = [len(group.prompts[0]), *(len(row.response_ids) for row in group.rows)]
        count = sum(lengths)
        picks = [random.permutation(4)[:2] for _ in range(2 * count)]
        plane = np.array(picks, np.uint8).reshape(count, 4)
        ends = np.cumsum(lengths)
        plane[ends[1:] - 1] = 255
        group.planes["routes"] = plane
        for row, (start, end) in enumerate(pairwise(ends)):
            told[number, row] = np.concatenate([plane[: ends[0]], plane[start : end - 1]])
    return told


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_learner_asks_the_experts_of_the_engine(models: dict[str, str], epochs: int) -> None:
    """In every update, of every token, the prompt's once."""
    case = make_case(models["qwen3_moe"])
    told = routed_by_hand(case)
    case.updates *= epochs
    algorithm = {"anchor": "behavior", "importance": {"level": "none"}}
    settings = config("r3", algorithm, ppo_epochs=epochs, lr=0.05)
    with (
        open_learner(settings, models, case, name="qwen3_moe") as learner,
        experts_of(learner) as asked,
    ):
        learner.prepare(case.plan([split(range(len(case.updates[0])), 1)] * epochs))
        recording = len(asked)
        learner.train(case.values, 0.0)
    assert bool(recording) == (epochs > 1), "tokens that lack experts would be routed anew"
    expected: list[list[tuple[int, ...]]] = [[], []]
    for number, group in case.groups.items():
        rows = [one.row for one in case.updates[0] if one.group_id == number and one.weight]
        prompt = len(group.prompts[0])
        parts = [told[number, rows[0]][:prompt], *(told[number, row][prompt:] for row in rows)]
        for layer in range(2):
            columns = slice(2 * layer, 2 * layer + 2)
            expected[layer] += [tuple(one) for part in parts for one in part[:, columns].tolist()]
    for update in range(epochs):
        for layer in range(2):
            found = asked[recording + 2 * update + layer]
            assert sorted(map(tuple, found.tolist())) == sorted(expected[layer])


def test_a_group_without_experts_of_its_engine_is_not_trained(models: dict[str, str]) -> None:
    case = make_case(models["qwen3_moe"])
    opened = open_learner(config("r3", ppo_epochs=1), models, case, name="qwen3_moe")
    refused = pytest.raises(ValueError, match=r"group 10 has no experts of its engine")
    with opened as learner, refused:
        learner.prepare(case.plan([split(range(len(case.updates[0])), 1)]))


MOVES = {"lr": 0.02, "deepspeed": SHARD_ALL}
"""Updates after which the router would pick others."""
RANK_SPLITS = [[[0, 3], [1, 2], [4]], [[5], [], []]]


def rank_main(rank: int, port: int, models: dict[str, str], wanted: list[Any]) -> None:
    torch.set_num_threads(1)
    case = make_case(models["qwen3_moe"], n_updates=4)
    settings = config(zero_stage=3, ranks=2, gradient_checkpointing=True, **MOVES)
    place = {"name": "qwen3_moe", "rank": rank, "world": 2, "port": port}
    splits = [RANK_SPLITS[rank]] * 2 + [RANK_SPLITS[1 - rank]] * 2
    with open_learner(settings, models, case, **place) as learner:
        assert_history(train(learner, case, splits), wanted)


@pytest.mark.slow
def test_ranks_and_stages_make_no_difference(models: dict[str, str]) -> None:
    """Two ranks that divide the model equal one; in the second epoch sequences change the rank."""
    found: list[Any] = []
    case, splits = two_epochs(models["qwen3_moe"])
    for replay, stage in (("r2", 0), ("r2", 2), ("off", 2)):
        settings = config(replay, zero_stage=stage, **MOVES)
        with open_learner(settings, models, case, name="qwen3_moe") as learner:
            found.append(train(learner, case, splits))
    wanted, again, live = found
    assert_history(again, wanted)
    assert live[-1]["train/loss"] != pytest.approx(wanted[-1]["train/loss"], rel=1e-3)
    run_ranks(rank_main, free_port(), models, wanted, seconds=DEADLINE_S)


def test_a_dense_model_is_refused_when_a_learner_is_built(tmp_path: Path) -> None:
    write_family("llama", tmp_path)
    case = make_case(str(tmp_path))
    refused = pytest.raises(UntrainableError, match="llama has no router whose experts")
    with refused, open_learner(config(), {"llama": str(tmp_path)}, case, name="llama"):
        pass
