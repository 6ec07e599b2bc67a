"""LoRA, frozen parameters and offload against a slow loop: gradients, published weights, resume and
export under every ZeRO stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from async_grpo.config.schema import Config, Model
from async_grpo.learner import adapters, division
from async_grpo.learner.backend.deepspeed.backend import ZeroDivision
from async_grpo.learner.learner import Learner
from async_grpo.learner.packing import response_row
from async_grpo.learner.weights import Published
from tests.support.learners import (
    SHARD_ALL,
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

DEADLINE_S = 240.0
SCALING = 16.0 / 4
PROBE = [([5, 6, 7], [8, 9, 10, 11]), ([20, 21], [22, 23, 24])]
CPU = {"device": "cpu"}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"model": {}},
    "lora": {"model": {"lora": {"rank": 4, "alpha": 16.0}}},
    "frozen": {"model": {"freeze": ["embed_tokens", r"layers\.0\..*norm"]}},
    "offload": {"model": {}, "offload": True},
    "lora-offload": {
        "model": {"lora": {"rank": 4, "alpha": 16.0, "target_modules": ["q_proj", "down_proj"]}},
        "offload": True,
    },
}
"""Settings by name; the model of `frozen` has a tied head."""


Wanted = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories: `frozen` is tied, all others are the same untied model."""
    path = tmp_path_factory.mktemp("models")
    plain = write_model(path / "plain")
    return dict.fromkeys(VARIANTS, plain) | {"frozen": write_model(path / "tied", tied=True)}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The model is so small that a second thread costs more than it does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def case_of(models: dict[str, str], variant: str) -> Case:
    return make_case(models[variant], n_updates=2)


def config_of(
    variant: str,
    stage: int,
    *,
    ranks: int = 1,
    dtype: str = "float32",
    reference: str | None = None,
    gradient_checkpointing: bool = False,
) -> Config:
    settings = VARIANTS[variant]
    offload = (
        {"offload_optimizer": CPU} | ({"offload_param": CPU} if stage == 3 else {})
        if settings.get("offload")
        else {}
    )
    return make_config(
        model={"path": "unused", "dtype": dtype, "reference": reference, **settings["model"]},
        learner={
            "zero_stage": stage,
            "ranks": ranks,
            "lr": 3e-3,
            "grad_clip": 0.7,
            "weight_decay": 0.1,
            "tokens_per_micro_batch": 48,
            "gradient_checkpointing": gradient_checkpointing,
            "deepspeed": {"zero_optimization": SHARD_ALL["zero_optimization"] | offload},
        },
        weight_sync={"lora": "adapter" if "lora" in variant else "merged"},
    )


def restricted(directory: str, config: Config) -> torch.nn.Module:
    """A plain Hugging Face model of which the same parameters are trained, with the same
    adapters.
    """
    model = plain_model(directory)
    adapters.restrict(model, config.model, seed=config.seed, base=directory)
    return model


def merged_by_hand(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of a model's parameters with adapters among them, row by row of the formula."""
    weights = {}
    for name, parameter in named.items():
        if ".lora_" in name:
            continue
        weight = parameter.float().clone()
        stem = name.removesuffix(".base_layer.weight")
        if stem != name and f"{stem}.lora_A.default.weight" in named:
            down, up = (named[f"{stem}.lora_{part}.default.weight"].float() for part in "AB")
            for row in range(len(weight)):
                weight[row] += SCALING * (up[row][:, None] * down).sum(0)
        weights[name.replace(".base_layer", "")] = weight.to(parameter.dtype)
    return weights


def slow(
    models: dict[str, str], variant: str, *, dtype: str = "float32", reference: str | None = None
) -> Wanted:
    """Losses, gradient norms and weights of the slow loop, which computes in `dtype`; the reference
    policy is the model as it was unless another is given.
    """
    precision = getattr(torch, dtype)
    model = restricted(models[variant], config_of(variant, 1)).to(precision)
    history = reference_losses(
        model, plain_model(reference or models[variant]).to(precision), case_of(models, variant)
    )
    return history, merged_by_hand(
        {name: parameter.detach() for name, parameter in model.named_parameters()}
    )


def whole_parameters(learner: Learner) -> dict[str, torch.Tensor]:
    """All parameters as the learner holds them, adapters apart."""
    return {name: tensor.clone() for name, tensor in ZeroDivision().whole(learner.policy.module.hf)}


def check_untrained(
    before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], variant: str
) -> None:
    """What must not move did not, bit for bit, and everything else did."""
    patterns = VARIANTS[variant]["model"].get("freeze", [])
    for name, tensor in after.items():
        still = (
            ".lora_" not in name
            if "lora" in variant
            else any(re.search(pattern, name) for pattern in patterns)
        )
        assert torch.equal(tensor, before[name]) == still, name


def check_perturbed(learner: Learner) -> None:
    """Published weights and log-probs move visibly and come back bit for bit."""
    before, at_start = copy_weights(learner), learner.logprobs(PROBE)
    with learner.published.perturbed(scale=0.2, seed=4):
        moved = copy_weights(learner)
        assert (
            max(abs(a - b).max() for a, b in zip(learner.logprobs(PROBE), at_start, strict=True))
            > 1e-3
        )
    for key, tensor in before.items():
        assert (moved[key] - tensor).norm() > 0.05 * tensor.norm() or not tensor.any(), key
    assert bitwise(copy_weights(learner), before)
    assert all(np.array_equal(a, b) for a, b in zip(learner.logprobs(PROBE), at_start, strict=True))


def copy_sent(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.sent.named_weights()}


def check_factors(learner: Learner) -> None:
    """What engines with adapters get are the factors that the learner holds, B scaled. Perturbed,
    every product moves about as far as the weight beside it would, and all is back bit for bit.
    """
    sent, held = copy_sent(learner), whole_parameters(learner)
    factors = [name for name in held if ".lora_" in name]
    names = [f"base_model.model.{name.replace('.default', '')}" for name in factors]
    assert sorted(sent) == sorted(names)
    for name, factor in zip(names, factors, strict=True):
        scaled = held[factor].float() * (SCALING if ".lora_B." in name else 1.0)
        assert torch.equal(sent[name], scaled.to(held[factor].dtype)), name
    metadata = [
        (name, tuple(one.shape), str(one.dtype).removeprefix("torch."))
        for name, one in sent.items()
    ]
    assert metadata == learner.sent.weight_metadata()
    whole, logprobs = copy_weights(learner), learner.logprobs(PROBE)
    with learner.sent.perturbed(scale=0.2, seed=4):
        moved, moved_whole = copy_sent(learner), copy_weights(learner)
        apart = zip(learner.logprobs(PROBE), logprobs, strict=True)
        assert max(abs(a - b).max() for a, b in apart) > 1e-3
    assert all(not torch.equal(moved[name], one) for name, one in sent.items())
    for name, weight in whole.items():
        adapted = f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight" in sent
        share = float((moved_whole[name] - weight).norm() / weight.norm().clamp_min(1e-9))
        assert 0.1 < share < 0.5 if adapted else share == 0.0, (name, share)
    assert bitwise(copy_sent(learner), sent) and bitwise(copy_weights(learner), whole)
    assert all(np.array_equal(a, b) for a, b in zip(learner.logprobs(PROBE), logprobs, strict=True))


def check_reference(learner: Learner, base: list[np.ndarray]) -> None:
    """The reference of a LoRA run is its base, although the policy has moved on; asking it changes
    nothing. base: its log-probs.
    """
    policy = learner.logprobs(PROBE)
    assert max(abs(a - b).max() for a, b in zip(policy, base, strict=True)) > 1e-3
    answers = learner._reference_logprobs(
        [response_row(np.array(prompt), np.array(response)) for prompt, response in PROBE]
    )
    assert all(np.array_equal(a, b) for a, b in zip(answers, base, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(learner.logprobs(PROBE), policy, strict=True))


def check_trained(
    learner: Learner,
    start: dict[str, torch.Tensor],
    wanted: Wanted,
    history: list[dict[str, float]],
    *,
    exact: bool,
) -> None:
    """Losses and weights against the slow loop, and published weights against the parameters that
    the learner holds.
    """
    published, held = copy_weights(learner), whole_parameters(learner)
    if exact:
        assert_history(history, wanted[0])
        assert_close(published, wanted[1])
    else:
        assert history[0]["train/grad_norm"] == pytest.approx(
            wanted[0][0]["train/grad_norm"], rel=0.1
        )
    by_hand = merged_by_hand(held)
    assert list(published) == list(by_hand) == [name for name in wanted[1]]
    for name, tensor in by_hand.items():
        torch.testing.assert_close(
            published[name], tensor, rtol=1e-5 if exact else 2**-7, atol=1e-6
        )
    metadata = [
        (key, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for key, tensor in published.items()
    ]
    assert metadata == learner.published.weight_metadata()


def sweep(
    variant: str,
    stage: int,
    dtype: str,
    models: dict[str, str],
    wanted: Wanted,
    splits: list[list[list[int]]],
    path: Path,
    *,
    ports: list[int],
    **place: int,
) -> None:
    """Train against the slow loop, read, perturb, export, save, go on; then load and go on
    alike.
    """
    case, directory, lora = case_of(models, variant), models[variant], "lora" in variant
    config = config_of(variant, stage, ranks=place.get("world", 1), dtype=dtype)
    base = {
        key: parameter.detach().to(getattr(torch, dtype))
        for key, parameter in plain_model(directory).named_parameters()
    }
    with open_learner(config, models, case, name=variant, port=ports[0], **place) as learner:
        check_offload(learner, variant, stage)
        start, at_start = whole_parameters(learner), learner.logprobs(PROBE)
        assert bitwise(copy_weights(learner), base), "adapters begin as no change"
        history = train(learner, case, splits)
        check_trained(learner, start, wanted, history, exact=dtype == "float32")
        check_untrained(start, whole_parameters(learner), variant)
        if lora:
            check_reference(learner, at_start)
            check_factors(learner)
        check_perturbed(learner)
        published = copy_weights(learner)
        learner.export(str(path / "export"))
        check_export(path / "export", published, directory, lora=lora)
        if lora:
            exported = load_file(path / "export" / "adapter" / "adapter_model.safetensors")
            assert set(exported) == {name for name, _, _ in learner.sent.weight_metadata()}
        learner.save(str(path / "checkpoint"), {})
        if lora and place.get("rank", 0) == 0:
            check_only_adapters(path / "checkpoint")
        train(learner, case, splits)
        continued = copy_weights(learner)
        assert not bitwise(continued, published)
    with open_learner(config, models, case, name=variant, port=ports[1], **place) as learner:
        learner.load(str(path / "checkpoint"))
        assert bitwise(copy_weights(learner), published)
        train(learner, case, splits)
        assert bitwise(copy_weights(learner), continued)


def check_only_adapters(path: Path) -> None:
    """The base is in no file, not even a head that is tied to its embedding."""
    files = list(path.rglob("*model_states.pt"))
    assert files
    for file in files:
        saved = torch.load(file, weights_only=False)
        assert saved["module"] and all(".lora_" in name for name in saved["module"])
        assert saved["frozen_param_fragments"] is None


def check_offload(learner: Learner, variant: str, stage: int) -> None:
    """DeepSpeed took the setting."""
    wanted = "offload" in variant
    if stage == 3:
        assert (
            learner.policy.engine.optimizer.offload_optimizer,
            learner.policy.engine.optimizer.offload_param,
        ) == (wanted, wanted)
    elif stage:
        assert getattr(learner.policy.engine.optimizer, "cpu_offload", False) == wanted


def check_export(
    path: Path, published: dict[str, torch.Tensor], directory: str, *, lora: bool
) -> None:
    """The merged model loads, and so do the adapters on their base, with the same log-probs."""
    model = AutoModelForCausalLM.from_pretrained(path)
    assert bitwise(dict(model.named_parameters()), published)
    assert (path / "adapter").exists() == lora
    if lora and model.dtype == torch.float32:
        adapted = PeftModel.from_pretrained(plain_model(directory), path / "adapter")
        rows = [(np.array(prompt), np.array(response)) for prompt, response in PROBE]
        with torch.no_grad():
            apart, merged, base = (
                torch.cat([picked(row_distribution(one, *row), row[1]) for row in rows])
                for one in (adapted, model, plain_model(directory))
            )
        torch.testing.assert_close(apart, merged, rtol=0, atol=1e-5)
        assert (apart - base).abs().max() > 1e-3


# -- one rank
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "variant"), [(0, "frozen"), (1, "lora"), (2, "lora-offload"), (3, "lora")]
)
def test_one_rank_equals_the_slow_loop(
    stage: int, variant: str, models: dict[str, str], tmp_path: Path
) -> None:
    sweep(
        variant,
        stage,
        "float32",
        models,
        slow(models, variant),
        [split(range(6), 3)] * 2,
        tmp_path,
        ports=[0, 0],
    )


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_base_that_has_changed_is_refused_and_older_checkpoints_hold_theirs(
    stage: int, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the model with a tied head, whose tensor is in two places."""
    config, case = config_of("lora", stage), make_case(models["frozen"], n_updates=2)
    tied = {"lora": models["frozen"]}
    with open_learner(config, tied, case, name="lora") as learner:
        train(learner, case, [split(range(6), 2)] * 2)
        trained = copy_weights(learner)
        learner.save(str(tmp_path / "now"), {})
        check_only_adapters(tmp_path / "now")
        with monkeypatch.context() as patch:
            patch.setitem(vars(learner), "_base", None)
            learner.save(str(tmp_path / "older"), {})
        assert size(tmp_path / "older") > size(tmp_path / "now") + 4 * sum(
            tensor.numel() for tensor in trained.values()
        )
    for name in ("now", "older"):
        with open_learner(config, tied, case, name="lora") as learner:
            learner.load(str(tmp_path / name))
            assert bitwise(copy_weights(learner), trained)
    other = {"lora": write_neighbour(models["frozen"], str(tmp_path / "neighbour"))}
    with open_learner(config, other, case, name="lora") as learner:
        with pytest.raises(ValueError, match=r"than .*neighbour has now: bring"):
            learner.load(str(tmp_path / "now"))
        learner.load(str(tmp_path / "older"))


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_adapters_with_a_reference_of_their_own_and_gradient_checkpointing(
    models: dict[str, str], tmp_path: Path
) -> None:
    reference = write_neighbour(models["lora"], str(tmp_path / "reference"))
    history, weights = slow(models, "lora", reference=reference)
    config = config_of("lora", 3, reference=reference, gradient_checkpointing=True)
    with open_learner(config, models, case_of(models, "lora"), name="lora") as learner:
        assert_history(train(learner, case_of(models, "lora"), [split(range(6), 2)] * 2), history)
        assert_close(copy_weights(learner), weights)


def test_only_a_bucket_of_the_model_is_whole(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_learner(
        config_of("lora", 3), models, case_of(models, "lora"), name="lora"
    ) as learner:
        parameters = list(learner.policy.module.parameters())
        total = sum(ZeroDivision().size(parameter) for parameter in parameters)
        expected, most = copy_weights(learner), []
        for gpu, limit in ((False, 2**28), (False, 2**14), (True, 2**28), (True, 2**14)):
            monkeypatch.setattr(division, "GATHER_BYTES", 1 if gpu else limit)
            monkeypatch.setattr(f"{Published.__module__}.GPU_GATHER_BYTES", limit if gpu else 1)
            monkeypatch.setattr(learner.published, "device", "cuda:0" if gpu else "cpu")
            at_once = []
            for name, weight in learner.published.named_weights():
                assert torch.equal(weight, expected[name])
                at_once.append(sum(parameter.numel() for parameter in parameters))
            most.append(max(at_once))
        assert most[0] == most[2] == total
        assert most[1] == most[3] < total / 4


def test_the_optimizer_gets_what_is_trained(models: dict[str, str]) -> None:
    for variant, wanted in (("lora", ".lora_"), ("frozen", "layers.1")):
        with open_learner(
            config_of(variant, 0), models, case_of(models, variant), name=variant
        ) as learner:
            taken = {
                id(parameter)
                for group in learner.policy.engine.optimizer.param_groups
                for parameter in group["params"]
            }
            named = dict(learner.policy.module.hf.named_parameters())
            assert {name for name in named if wanted in name} <= {
                name for name, parameter in named.items() if id(parameter) in taken
            }
            assert not any(
                id(parameter) in taken
                for name, parameter in named.items()
                if (".lora_" not in name) == (variant == "lora") or "embed" in name
            )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"freeze": ["embed_tokens", "no_such"]}, "'no_such', which matches no parameter name"),
        ({"freeze": ["."]}, "leaves nothing to train"),
        ({"freeze": ["lm_head"]}, "a tied head follows the embedding"),
        (
            {"lora": {"target_modules": ["q_proj", "lm_head"]}},
            "'lm_head', which is no linear layer.*down_proj",
        ),
        (
            {"lora": {"target_modules": ["embed_tokens"]}},
            "'embed_tokens', which is no linear layer",
        ),
        ({"lora": {"target_modules": ["proj"]}}, "'proj', which is no linear layer"),
    ],
)
def test_names_that_fit_nothing_are_refused(
    settings: dict[str, Any], message: str, models: dict[str, str]
) -> None:
    policy = loaded(models["frozen"])
    with pytest.raises(adapters.UntrainableError, match=message):
        adapters.restrict(
            policy.hf, Model.model_validate({"path": "unused", **settings}), seed=0, base="base"
        )


def test_a_checkpoint_continues_only_with_its_adapters(
    models: dict[str, str], tmp_path: Path
) -> None:
    case = case_of(models, "lora")
    with open_learner(config_of("lora", 1), models, case, name="lora") as learner:
        learner.save(str(tmp_path), {})
    with (
        open_learner(config_of("plain", 1), models, case, name="plain") as learner,
        pytest.raises(ValueError, match=r"model\.lora"),
    ):
        learner.load(str(tmp_path))


# -- two ranks
# --------------------------------------------------------------------------------------------------

# Rank 0 has four rows in two micro-batches, rank 1 two rows in one; rank 1's other is empty.
RANK_SPLITS = {0: [[0, 3], [1, 2]], 1: [[5, 4], []]}
Job = tuple[str, int, str]
"""Variant, ZeRO stage, dtype."""


def rank_main(
    rank: int,
    ports: list[int],
    path: str,
    models: dict[str, str],
    jobs: list[Job],
    wanted: dict[tuple[str, str], Wanted],
) -> None:
    """One of two ranks: all jobs. The first failure of either rank is raised in the test."""
    torch.set_num_threads(1)
    for index, job in enumerate(jobs):
        place = {"ports": ports[2 * index : 2 * index + 2], "rank": rank, "world": 2}
        sweep(
            *job,
            models,
            wanted[job[0], job[2]],
            [RANK_SPLITS[rank]] * 2,
            Path(path) / "-".join(map(str, job)),
            **place,
        )


def run_jobs(jobs: list[Job], models: dict[str, str], path: Path) -> None:
    wanted = {
        (variant, dtype): slow(models, variant, dtype=dtype)
        for variant, dtype in dict.fromkeys((job[0], job[2]) for job in jobs)
    }
    run_ranks(
        rank_main,
        [free_port() for _ in range(2 * len(jobs))],
        str(path),
        models,
        jobs,
        wanted,
        seconds=DEADLINE_S,
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_equal_the_slow_loop_in_every_combination(
    dtype: str, models: dict[str, str], tmp_path: Path
) -> None:
    run_jobs(
        [(variant, stage, dtype) for variant in VARIANTS for stage in (1, 2, 3)], models, tmp_path
    )
