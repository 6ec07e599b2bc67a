"""The learner with a teacher, against a slow loop: the gradient whatever the split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from async_grpo.config.algorithm import Distill
from async_grpo.config.schema import Config
from async_grpo.learner.batching import PlanRow, RankPlan
from async_grpo.rollout.frozen import demonstration
from tests.support.families import write_family
from tests.support.learners import (
    REWARD_COEF,
    STEP,
    TEACHER_COEF,
    Case,
    assert_close,
    assert_history,
    copy_weights,
    make_case,
    make_config,
    open_learner,
    picked,
    plain_model,
    reference_losses,
    row_distribution,
    split,
    train,
    write_neighbour,
)
from tests.support.models import write_model

VOCABULARY = 100
CLIPS = {"clip_ratio_low": 0.3, "clip_ratio_high": 0.5}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("models")
    plain = write_model(path / "plain")
    for name in ("qwen3_moe", "gemma2"):
        write_family(name, path / name)
    families = {name: str(path / name) for name in ("qwen3_moe", "gemma2")}
    reference = write_neighbour(plain, str(path / "reference"))
    return {"plain": plain, "reference": reference, **families}


def config_of(models: dict[str, str], top_k: int = 0, **model: Any) -> Config:
    """With a teacher, at the temperature of the slow loop, which a run would not take."""
    config = make_config(model={"reference": models["reference"], **model})
    distill = Distill(
        teacher="teacher", coef=TEACHER_COEF, reward_coef=REWARD_COEF, teacher_top_k=top_k
    )
    algorithm = config.algorithm.unchecked_copy(update={"distill": distill})
    return config.unchecked_copy(update={"algorithm": algorithm})


def taught(case: Case, top_k: int = 0) -> Case:
    """The case with random log-probs of a teacher, which differ from token to token."""
    rng = np.random.default_rng(5)
    for group in case.groups.values():
        tokens = sum(len(row.behavior_logprobs) for row in group.rows)
        said = -rng.gamma(2, 1.5, (tokens, 1))
        if top_k:
            shares = rng.dirichlet(np.ones(top_k + 1), tokens)[:, :top_k]
            said = np.concatenate([said, np.log(shares)], axis=1)
            ids = [rng.permutation(VOCABULARY)[:top_k] for _ in range(tokens)]
            group.planes["teacher_ids"] = np.array(ids, np.int32)
        group.planes["teacher_logprobs"] = said.astype(np.float32)
    return case


def imitated(case: Case) -> Case:
    """The case with a demonstration in each group, at the end of its first update."""
    rng = np.random.default_rng(6)
    for group_id, group in case.groups.items():
        ids = rng.integers(3, VOCABULARY, int(rng.integers(2, 7))).tolist()
        group.rows.append(demonstration(ids, limit=5, version=STEP - 1, ends=[]))
        update = next(one for one in case.updates if any(row.group_id == group_id for row in one))
        length = min(len(ids), 5)
        shape = len(group.prompts[0]), length, 0.03, length
        update.append(PlanRow(group_id, len(group.rows) - 1, *shape, given=True))
    return case


@pytest.mark.parametrize("parts", [1, pytest.param(5, marks=pytest.mark.slow), 20])
@pytest.mark.parametrize("teaches", [False, True])
def test_demonstrations_add_their_cross_entropy_alone(
    models: dict[str, str], parts: int, teaches: bool
) -> None:
    case = imitated(make_case(models["plain"], n_updates=2))
    config = make_config(model={"reference": models["reference"]})
    if teaches:
        case, config = taught(case, 4), config_of(models, 4)
    wanted = plain_model(models["plain"])
    history = reference_losses(wanted, plain_model(models["reference"]), case)
    with open_learner(config, models, case) as learner:
        found = train(learner, case, [split(range(len(rows)), parts) for rows in case.updates])
        sums = learner._metrics.to_wire()["sums"]
        assert_history(found, history)
        assert_close(copy_weights(learner), dict(wanted.named_parameters()))
    assert sums["train/sft_loss"][1] == sum(row.sampled for row, _ in demonstrations(case))


@pytest.mark.parametrize(
    "algorithm",
    [
        {"policy_loss": "kl_cov"},
        {"policy_loss": "m2po", "anchor": "behavior", "importance": {}, **CLIPS},
        {
            "policy_loss": "gspo",
            "loss_agg_mode": "seq-mean-token-mean",
            **CLIPS,
            "importance": {"level": "sequence", "normalize": True},
        },
        {"top_entropy_share": 0.3, "opsm_delta": 0.01},
        {"adv_estimator": "reinforce_plus_plus", "use_kl_loss": False, "add_token_level_kl": True},
    ],
)
def test_demonstrations_change_no_statistic_of_the_responses(
    models: dict[str, str], algorithm: dict[str, Any]
) -> None:
    """The loss with them is the one without, and their cross-entropy."""
    config = make_config(algorithm={"clip_schedule": "constant"} | algorithm)
    losses = []
    for case in (make_case(models["plain"]), imitated(make_case(models["plain"]))):
        with open_learner(config, models, case) as learner:
            sums = learner.prepare(case.plan([split(range(len(case.updates[0])), 3)]))
            learner.train(case.values, 0.1)
            assert bool(sums) == config.algorithm.add_token_level_kl
            losses.append(learner._metrics.to_wire()["sums"])
    model = plain_model(models["plain"])
    entropy = -sum(
        row.weight * picked(row_distribution(model, *tokens), tokens[1]).sum().item()
        for row, tokens in demonstrations(case)
    )
    plain, both = losses
    assert both["train/loss"][0] == pytest.approx(plain["train/loss"][0] + entropy, rel=1e-4)
    moved = ("train/loss", "train/grad_norm", "train/padding", "train/shared_", "train/micro_")
    for key in plain:
        if key.startswith(("train/", "weights/")) and not key.startswith(moved):
            assert both[key] == pytest.approx(plain[key], rel=1e-4, abs=1e-6), key


def demonstrations(case: Case) -> list[tuple[PlanRow, tuple[np.ndarray, np.ndarray]]]:
    """Planned rows that are given, with their prompts and tokens."""
    found = []
    for row in (row for update in case.updates for row in update if row.given):
        group = case.groups[row.group_id]
        found.append((row, (group.prompts[0], group.rows[row.row].response_ids)))
    return found


@pytest.mark.parametrize(("parts", "top_k"), [(1, 0), (5, 0), (1, 4), (5, 4)])
def test_the_update_is_that_of_the_slow_loop(
    models: dict[str, str], parts: int, top_k: int
) -> None:
    case = taught(make_case(models["plain"], n_updates=2), top_k)
    wanted = plain_model(models["plain"])
    history = reference_losses(wanted, plain_model(models["reference"]), case)
    with open_learner(config_of(models, top_k), models, case) as learner:
        found = train(learner, case, [split(range(len(rows)), parts) for rows in case.updates])
        assert_history(found, history)
        assert_close(copy_weights(learner), dict(wanted.named_parameters()))


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma2"])
def test_experts_and_heads_of_their_own_are_taught_alike(models: dict[str, str], name: str) -> None:
    """Logits of gemma2 are capped by the model's own code; it is so sure that what is left
    for all other tokens is near the rounding of float32.
    """
    case = taught(make_case(models[name], vocab=VOCABULARY), 4)
    wanted = plain_model(models[name])
    history = reference_losses(wanted, plain_model(models["reference"]), case)
    with open_learner(config_of(models, 4), models, case, name=name) as learner:
        [found] = train(learner, case, [split(range(len(case.updates[0])), 2)])
    assert found == pytest.approx(history[0], rel=1e-3)


@pytest.mark.parametrize("top_k", [0, 4])
def test_adapters_are_taught_alike_whatever_the_split(models: dict[str, str], top_k: int) -> None:
    """Their gradients are those of the whole weights by the chain rule, as without a teacher."""
    histories = []
    for parts in (1, 5):
        case = taught(make_case(models["plain"], n_updates=2), top_k)
        config = config_of(models, top_k, lora={"rank": 4, "alpha": 16.0})
        with open_learner(config, models, case) as learner:
            splits = [split(range(len(rows)), parts) for rows in case.updates]
            histories.append(train(learner, case, splits))
    assert_history(*histories)
    case = taught(make_case(models["plain"], n_updates=2), top_k)
    first = reference_losses(plain_model(models["plain"]), plain_model(models["reference"]), case)
    assert histories[0][0]["train/loss"] == pytest.approx(first[0]["train/loss"], rel=1e-4)


def test_tokens_that_only_the_teachers_matrices_have_count_among_the_rest(
    models: dict[str, str],
) -> None:
    case = taught(make_case(models["plain"]), 4)
    wanted = plain_model(models["plain"])
    history = reference_losses(wanted, plain_model(models["reference"]), case)
    for group in case.groups.values():
        ids, logprobs = group.planes["teacher_ids"], group.planes["teacher_logprobs"]
        foreign = np.full((len(ids), 1), VOCABULARY, np.int32)
        group.planes["teacher_ids"] = np.hstack([ids[:, :1], foreign, ids[:, 1:]])
        said = np.full((len(ids), 1), -9.0, np.float32)
        group.planes["teacher_logprobs"] = np.hstack([logprobs[:, :2], said, logprobs[:, 2:]])
    with open_learner(config_of(models, 5), models, case) as learner:
        found = train(learner, case, [split(range(len(case.updates[0])), 3)])
        assert_history(found, history)
        assert_close(copy_weights(learner), dict(wanted.named_parameters()))


def test_a_teacher_shifted_by_one_token_gives_another_update(models: dict[str, str]) -> None:
    case = taught(make_case(models["plain"]))
    wanted = plain_model(models["plain"])
    history = reference_losses(wanted, plain_model(models["reference"]), case)
    for group in case.groups.values():
        plane = group.planes["teacher_logprobs"]
        group.planes["teacher_logprobs"] = np.roll(plane, 1, axis=0)
    with open_learner(config_of(models), models, case) as learner:
        found = train(learner, case, [split(range(len(case.updates[0])), 1)])
    with pytest.raises(AssertionError):
        assert_history(found, history)


@pytest.mark.parametrize(("sampled", "trained"), [(None, 0), (0, 4), (4, 0), (4, 3)])
def test_a_group_that_the_teacher_has_not_seen_so_is_refused(
    models: dict[str, str], sampled: int | None, trained: int
) -> None:
    case = make_case(models["plain"])
    if sampled is not None:
        taught(case, sampled)
    with open_learner(config_of(models, trained), models, case) as learner:
        plan: RankPlan = case.plan([split(range(len(case.updates[0])), 1)])
        with pytest.raises(
            ValueError, match=r"group 10 has no log-probs of the frozen model teach"
        ):
            learner.prepare(plan)
