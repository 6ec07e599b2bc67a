"""Learner steps on tokens that were sampled from sets: equal to a slow loop with a dense mask, the
ratio of what could be sampled, and what is refused.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from async_grpo.algo.metrics import MetricSums
from async_grpo.config.schema import Config
from async_grpo.learner.batching import PlanRow
from async_grpo.learner.head import LogprobHead
from async_grpo.rollout.frozen import demonstration
from async_grpo.wire.kept import KeptSets
from tests.support import learners
from tests.support.families import write_family
from tests.support.learners import (
    STEP,
    TEMPERATURE,
    Case,
    assert_close,
    assert_history,
    copy_weights,
    make_case,
    make_config,
    open_learner,
    plain_model,
    reference_losses,
    split,
    train,
    write_neighbour,
)
from tests.support.models import write_model
from tests.support.token_case import config_of as math_config
from tests.support.token_case import gradient as loss_and_gradient
from tests.support.token_case import make_rows

VOCABULARY = 100


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("models")
    plain = write_model(path / "plain")
    write_family("gemma2", path / "gemma2")
    reference = write_neighbour(plain, str(path / "reference"))
    return {"plain": plain, "reference": reference, "gemma2": str(path / "gemma2")}


def config_of(models: dict[str, str], **rollout: Any) -> Config:
    return make_config(model={"reference": models["reference"]}, rollout={"top_k": 9, **rollout})


def cut(case: Case, *, seed: int = 7) -> Case:
    """The case as if each token had been sampled from a set of 1, 2, 3 or 9 tokens."""
    rng = np.random.default_rng(seed)
    for group in case.groups.values():
        sets = []
        for row in group.rows:
            row.behavior_logprobs = row.behavior_logprobs.copy()
            for number, token in enumerate(row.response_ids[row.sampled].tolist()):
                others = rng.permutation(VOCABULARY)[: int(rng.choice([0, 1, 2, 8]))].tolist()
                one = {token, *others} if row.role == "train" else set()
                sets.append([*one])
                if len(one) == 1:
                    row.behavior_logprobs[number] = 0.0
        group.planes = KeptSets.of(sets).planes
    return case


def masked_distributions(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the slow loop see the tokens of each set alone: it masks the logits of all others."""
    outside: dict[bytes, Tensor] = {}
    for group in case.groups.values():
        kept = KeptSets.in_planes(group.planes)
        assert kept is not None
        parts = kept.split([len(row.behavior_logprobs) for row in group.rows])
        for row, part in zip(group.rows, parts, strict=True):
            mask = torch.zeros(len(row.response_ids), 2 * VOCABULARY, dtype=torch.bool)
            for place, own in zip(row.sampled, part.split([1] * len(part.counts)), strict=True):
                mask[place] = len(own.ids) > 0
                mask[place, own.ids.astype(np.int64)] = False
            outside[row.response_ids.tobytes()] = mask
    whole = learners.row_distribution

    def masked(model: nn.Module, prompt: np.ndarray, response: np.ndarray) -> Tensor:
        logits = whole(model, prompt, response)  # up to a constant
        mask = outside[response.tobytes()][:, : logits.shape[-1]]
        return torch.log_softmax(logits.masked_fill(mask, -1e4), -1)

    monkeypatch.setattr(learners, "row_distribution", masked)


def slow(case: Case, models: dict[str, str], name: str = "plain") -> tuple[nn.Module, list[Any]]:
    wanted = plain_model(models[name])
    return wanted, reference_losses(wanted, plain_model(models["reference"]), case)


@pytest.mark.parametrize("parts", [1, 5])
def test_the_update_is_that_of_a_slow_loop_with_a_dense_mask(
    models: dict[str, str], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policy, recomputed anchor, reference, entropy and importance weights, over two epochs."""
    case = cut(make_case(models["plain"], n_updates=4))
    _, without = slow(case, models)
    masked_distributions(case, monkeypatch)
    wanted, history = slow(case, models)
    with open_learner(config_of(models), models, case) as learner:
        found = train(learner, case, [split(range(len(rows)), parts) for rows in case.updates])
        assert_history(found, history)
        assert_close(copy_weights(learner), dict(wanted.named_parameters()))
    with pytest.raises(AssertionError):
        assert_history(found, without)


def test_a_head_of_its_own_has_sets_too(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of gemma2 are capped by the model's own code; where it is far from the reference,
    the penalty is large, and so is its rounding.
    """
    case = cut(make_case(models["gemma2"], vocab=VOCABULARY))
    _, without = slow(case, models, "gemma2")
    masked_distributions(case, monkeypatch)
    _, history = slow(case, models, "gemma2")
    with open_learner(config_of(models), models, case, name="gemma2") as learner:
        [found] = train(learner, case, [split(range(len(case.updates[0])), 2)])
    assert found == pytest.approx(history[0], rel=5e-3)
    assert found != pytest.approx(without[0], rel=0.1)


def test_what_is_imitated_has_no_sets_and_is_trained_over_all_tokens(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(models["plain"], n_updates=2)
    rng = np.random.default_rng(6)
    for group_id, group in case.groups.items():
        ids = rng.integers(3, VOCABULARY, int(rng.integers(2, 6))).tolist()
        group.rows.append(demonstration(ids, limit=5, version=STEP - 1, ends=[]))
        update = next(one for one in case.updates if any(row.group_id == group_id for row in one))
        shape = len(group.prompts[0]), len(ids), 0.03, len(ids)
        update.append(PlanRow(group_id, len(group.rows) - 1, *shape, given=True))
    masked_distributions(cut(case), monkeypatch)
    wanted, history = slow(case, models)
    with open_learner(config_of(models), models, case) as learner:
        found = train(learner, case, [split(range(len(rows)), 3) for rows in case.updates])
        assert_history(found, history)
        assert_close(copy_weights(learner), dict(wanted.named_parameters()))


def test_sets_of_other_tokens_give_another_update(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the slow loop masks are sets that differ in one token of one place."""
    case = cut(make_case(models["plain"]))
    masked_distributions(case, monkeypatch)
    _, history = slow(case, models)
    group = case.groups[10]
    kept = KeptSets.in_planes(group.planes)
    assert kept is not None
    sets = [one.ids.tolist() for one in kept.split([1] * len(kept.counts))]
    trained = len(group.rows[0].behavior_logprobs)
    large = max(range(trained), key=lambda at: len(sets[at]))
    token = int(group.rows[0].response_ids[large])
    sets[large] = [token, *[one for one in sets[large] if one != token][:-1]]
    group.planes = KeptSets.of(sets).planes
    with open_learner(config_of(models), models, case) as learner:
        found = train(learner, case, [split(range(len(case.updates[0])), 1)])
    with pytest.raises(AssertionError):
        assert_history(found, history)


def test_the_self_check_compares_log_probs_over_all_tokens(models: dict[str, str]) -> None:
    case = cut(make_case(models["plain"]))
    prompt, response = [5, 6, 7], [8, 9, 10]
    with open_learner(config_of(models), models, case) as learner:
        [found] = learner.logprobs([(prompt, response)])
    distribution = learners.row_distribution(
        plain_model(models["plain"]), np.array(prompt), np.array(response)
    )
    wanted = learners.picked(distribution, np.array(response))
    np.testing.assert_allclose(found, wanted.detach().numpy(), atol=1e-5)


def lacks(case: Case) -> None:
    case.groups[11].planes = {}


def lacks_one(case: Case) -> None:
    kept = KeptSets.in_planes(case.groups[11].planes)
    assert kept is not None
    sets = [one.ids.tolist() for one in kept.split([1] * len(kept.counts))]
    case.groups[11].planes = KeptSets.of([[], *sets[1:]]).planes


def foreign(case: Case) -> None:
    kept = KeptSets.in_planes(case.groups[11].planes)
    assert kept is not None
    sets = [one.ids.tolist() for one in kept.split([1] * len(kept.counts))]
    case.groups[11].planes = KeptSets.of([[*sets[0], VOCABULARY], *sets[1:]]).planes


@pytest.mark.parametrize("change", [lacks, lacks_one, foreign])
def test_a_group_whose_sets_are_not_known_or_not_the_policys_is_refused(
    models: dict[str, str], change: Any
) -> None:
    case = cut(make_case(models["plain"]))
    change(case)
    with (
        open_learner(config_of(models), models, case) as learner,
        pytest.raises(ValueError, match=r"group 11 does not say from which of the policy's tokens"),
    ):
        learner.prepare(case.plan([split(range(len(case.updates[0])), 1)]))


def test_sets_are_used_where_nothing_is_cut_any_more(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal may hold groups from before another setting."""
    case = cut(make_case(models["plain"]))
    masked_distributions(case, monkeypatch)
    _, history = slow(case, models)
    with open_learner(config_of(models, top_k=0), models, case) as learner:
        found = train(learner, case, [split(range(len(case.updates[0])), 2)])
    assert_history(found, history)


# ---- the bandit ----

ARMS, KEEPS = 8, 0.8


def head_of(logits: Tensor) -> LogprobHead:
    """A head that gives these logits [8] to the hidden state 1."""
    linear = nn.Linear(1, ARMS, bias=False)
    linear.weight = nn.Parameter(logits[:, None].clone())
    return LogprobHead(linear, float32=False)


def laid_out(kept: KeptSets) -> tuple[Tensor, ...]:
    return tuple(map(torch.from_numpy, kept.by_size()))


def bandit(head: LogprobHead, kept: KeptSets | None) -> Tensor:
    """Log-prob of every arm, at the temperature of training."""
    arms = torch.arange(ARMS)
    sets = None if kept is None else laid_out(kept)
    logprobs, _ = head(torch.ones(ARMS, 1), arms, temperature=TEMPERATURE, kept=sets)
    return logprobs.detach()


def test_the_ratio_is_one_on_average_over_sets_and_below_it_over_all_arms() -> None:
    """E[pi / mu] under mu, which draws from the most probable arms with 0.8 together."""
    random = torch.Generator().manual_seed(3)
    before = 1.5 * torch.randn(ARMS, generator=random)
    now = before + 0.7 * torch.randn(ARMS, generator=random)
    order = torch.softmax(before / TEMPERATURE, 0).argsort(descending=True)
    reached = torch.softmax(before / TEMPERATURE, 0)[order].cumsum(0)
    arms = order[: int((reached < KEEPS).sum()) + 1].sort().values
    assert 1 < len(arms) < ARMS
    drawn = arms.tolist()  # the others never are
    sets = KeptSets.of([drawn if arm in drawn else [] for arm in range(ARMS)])
    behavior = bandit(head_of(before), sets)[arms]
    assert float(behavior.exp().sum()) == pytest.approx(1, abs=1e-6)
    ratio = (bandit(head_of(now), sets)[arms] - behavior).exp()
    naive = (bandit(head_of(now), None)[arms] - behavior).exp()
    assert float((behavior.exp() * ratio).sum()) == pytest.approx(1, abs=1e-6)
    expected = torch.softmax(now / TEMPERATURE, 0)[arms].sum()
    assert float((behavior.exp() * naive).sum()) == pytest.approx(float(expected), abs=1e-6)
    assert float(expected) < 0.95


def test_the_head_projects_only_what_had_another_token() -> None:
    """Of singletons nothing is computed, and a micro-batch of them touches the weights."""
    head, sizes = head_of(torch.zeros(ARMS)), []
    plain = head._projection

    def counted(hidden: Tensor) -> Any:
        project, linear = plain(hidden)
        return lambda part: sizes.append(len(part)) or project(part), linear

    head._projection = counted
    sets = laid_out(KeptSets.of([[0], [1, 2], [2], []]))
    hidden, targets = torch.ones(4, 1), torch.arange(4)
    logprobs, entropy = head(hidden, targets, kept=sets, with_entropy=True)
    wanted = [0, -math.log(2), 0, -math.log(ARMS)]
    torch.testing.assert_close(logprobs, torch.tensor(wanted))
    torch.testing.assert_close(entropy, -torch.tensor(wanted))
    assert sizes == [1, 1]
    alone, none = head(hidden, targets, kept=laid_out(KeptSets.of([[0], [1], [2], [3]])))
    assert alone.tolist() == [0, 0, 0, 0] and none is None
    alone.sum().backward()
    assert head.weight.grad is not None and not head.weight.grad.any()


# ---- statistics ----


def test_what_could_not_be_another_token_counts_in_no_statistic_of_ratios() -> None:
    """And in every divisor: the loss is what it was."""
    rows = make_rows()
    for row in rows.values():
        alone = np.arange(len(row.lag)) % 3 == 1
        for name in ("behavior", "anchor"):
            getattr(row, name)[alone] = 0.0
        row.kept = KeptSets.of([[0] if one else [0, 1] for one in alone])
    config = math_config(anchor="recomputed", importance={"level": "token"})
    split_, found = [sorted(rows)], {}
    for name in ("with", "without"):
        metrics = MetricSums()
        value = loss_and_gradient(config, rows, split_, metrics=metrics)[0]
        found[name] = value, metrics.to_wire()["sums"]
        for row in rows.values():
            row.kept = None
    (value, sums), (other, all_) = found["with"], found["without"]
    assert value == other
    tokens = sum(len(row.lag) for row in rows.values())
    alone = sum((np.arange(len(row.lag)) % 3 == 1).sum() for row in rows.values())
    ratios = ("ratio", "rho", "rho_sq", "mismatch", "importance_weight_sq", "ppo_kl")
    for name in ratios:
        assert sums[f"train/{name}"][1] == tokens - alone < all_[f"train/{name}"][1] == tokens
    for name in ("pg_loss", "advantage", "staleness_mean"):
        assert sums[f"train/{name}"] == all_[f"train/{name}"] and sums[f"train/{name}"][1] == tokens
    chosen = np.concatenate(
        [
            (row.anchor.astype(float) - row.behavior)[np.arange(len(row.lag)) % 3 != 1]
            for row in rows.values()
        ]
    )
    weights = np.minimum(np.exp(chosen), config.algorithm.importance.upper)
    total = sums["train/importance_weight"][0]
    assert total == pytest.approx(weights.sum(), rel=1e-6)


def test_weights_are_normalised_by_those_of_tokens_that_could_be_others() -> None:
    rows = make_rows()
    importance = {"level": "token", "normalize": True}
    config = math_config(anchor="recomputed", importance=importance)
    plain = loss_and_gradient(config, rows, [sorted(rows)])[0]
    for row in rows.values():
        row.kept = KeptSets.of([[0, 1]] * len(row.lag))
    assert loss_and_gradient(config, rows, [sorted(rows)])[0] == plain
    first = rows[min(rows)]
    first.kept = KeptSets.of([[0], *[[0, 1]] * (len(first.lag) - 1)])
    assert loss_and_gradient(config, rows, [sorted(rows)])[0] != pytest.approx(plain, rel=1e-6)


def test_a_learner_without_cut_sampling_packs_no_sets(models: dict[str, str]) -> None:
    case = make_case(models["plain"])
    with open_learner(make_config(model={"reference": models["reference"]}), models, case) as one:
        one.prepare(case.plan([split(range(len(case.updates[0])), 1)]))
        rows = list(one._rows.values())
        packed = one._pack(one.policy, [row.tokens for row in rows], [row.kept for row in rows])
        assert packed.kept is None
