"""Checkpoints of real DeepSpeed ranks: another number of ranks on resume, a rank that cannot write,
and how much memory a draft may take.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from async_grpo.learner import drafts
from async_grpo.learner.backend.deepspeed import files
from async_grpo.learner.checkpoint import Saving
from async_grpo.learner.learner import Learner
from async_grpo.runtime.storage import StorageFailure
from tests.support.learners import (
    SHARD_ALL,
    Case,
    assert_close,
    bitwise,
    copy_weights,
    make_case,
    make_config,
    open_learner,
    run_ranks,
    split,
    train,
)
from tests.support.models import write_model
from tests.support.processes import free_port

DEADLINE_S = 150.0
CASES = {
    "unsharded": (0, {}),
    "plain": (1, {}),
    "plain bfloat16": (1, {"dtype": "bfloat16"}),  # an optimizer class of its own
    "gradients": (2, {}),
    "lora": (2, {"lora": {"rank": 4}}),
    "bfloat16": (2, {"dtype": "bfloat16"}),
    "sharded": (3, {}),
    "sharded bfloat16": (3, {"dtype": "bfloat16"}),
}
"""Every ZeRO stage in both dtypes; bfloat16 without ZeRO is refused."""
ALONE = [split(range(12), 3)]
# Rank 0 has most rows; together they are those of ALONE.
SHARES = {0: [[[0, 3, 6], [1, 2, 7, 8], [4]]], 1: [[[5, 9], [10, 11], []]]}
KEY = "testranks"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"plain": write_model(tmp_path_factory.mktemp("models") / "plain")}


def config_of(stage: int, ranks: int, **model: Any):
    return make_config(
        algorithm={"use_kl_loss": False},
        model=model,
        learner={
            "zero_stage": stage,
            "ranks": ranks,
            "deepspeed": SHARD_ALL,
            "lr": 3e-3,
            "weight_decay": 0.1,
            "tokens_per_micro_batch": 48,
        },
    )


def whole_state(directory: Path, ranks: int) -> dict[str, torch.Tensor]:
    """Float32 weights, moments and step of every parameter, put together from the files of all
    ranks; ZeRO 1 and 2.
    """
    parts: dict[str, list[torch.Tensor]] = {}
    for rank in range(ranks):
        [path] = (directory / "learner").glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        saved = torch.load(path, weights_only=False)["optimizer_state_dict"]
        for group, fragments in enumerate(saved["param_slice_mappings"]):
            state = saved["base_optimizer_state"]["state"][group]
            vectors = {
                "fp32": saved["single_partition_of_fp32_groups"][group],
                "exp_avg": state["exp_avg"],
                "exp_avg_sq": state["exp_avg_sq"],
            }
            for name, place in fragments.items():
                for key, vector in vectors.items():
                    parts.setdefault(f"{name}/{key}", []).append(
                        vector.detach()[place.start : place.start + place.numel].clone()
                    )
            parts[f"group {group}/step"] = [state["step"].reshape(1)]
    return {name: torch.cat(pieces) for name, pieces in parts.items()}


def assert_follows(
    continued: dict[str, torch.Tensor],
    wanted: dict[str, torch.Tensor],
    begun: dict[str, torch.Tensor],
) -> None:
    """From the state `begun`, one update went the same way twice, but for rounding. Weights and
    moments as a whole: some gradients are nothing but rounding (of biases of keys).
    """
    assert continued.keys() == wanted.keys() == begun.keys()
    for kind in ("fp32", "exp_avg", "exp_avg_sq", "step"):
        one, other, before = (
            torch.cat([part for name, part in state.items() if name.endswith(f"/{kind}")])
            for state in (continued, wanted, begun)
        )
        assert (other - one).norm() <= 0.1 * (other - before).norm(), kind


def check_devices(learner: Learner, directory: Path) -> None:
    """A kernel that updates all of a group's state at once takes it from one device. Meta stands in
    for a GPU: what is filled from the files lies where the weights do.
    """
    real = learner.policy.engine.optimizer
    flats = [
        torch.empty_like(flat, device="meta")
        for group in real.optimizer.param_groups
        for flat in group["params"]
    ]
    state: dict[Any, dict[str, Any]] = defaultdict(dict)
    base = SimpleNamespace(param_groups=[{"params": [flat]} for flat in flats], state=state)
    optimizer = SimpleNamespace(
        optimizer=base,
        param_names=real.param_names,
        _param_slice_mappings=real._param_slice_mappings,
    )
    files._load_optimizer(
        SimpleNamespace(optimizer=optimizer), directory / "learner", saved_ranks=1
    )
    held = {key: value.device.type for flat in flats for key, value in state[flat].items()}
    assert held == dict.fromkeys(("step", "exp_avg", "exp_avg_sq"), "meta")


def two_ranks(
    rank: int, cases: tuple[str, ...], ports: list[int], home: Path, models: dict[str, str]
) -> None:
    """Continue with two ranks what one rank saved, save it again, train on, and save that."""
    torch.set_num_threads(1)
    case = make_case(models["plain"])
    for name, port in zip(cases, ports, strict=False):
        stage, model = CASES[name]
        with open_learner(
            config_of(stage, 2, **model), models, case, rank=rank, world=2, port=port
        ) as learner:
            if stage < 3:
                assert learner.load(str(home / f"one-{name}")) == {"step": 7}
                assert learner.updates == 2
                learner.save(str(home / f"two-{name}"), {"step": 8})
            else:
                with pytest.raises(
                    ValueError,
                    match=r"written by 1 learner ranks with ZeRO stage 3.*set learner\.ranks=1",
                ):
                    learner.load(str(home / f"one-{name}"))
            train(learner, case, SHARES[rank])
            learner.save(str(home / f"later-{name}"), {"step": 9})
            after = copy_weights(learner)
            if stage in (1, 2):
                train(learner, case, SHARES[rank])
                learner.save(str(home / f"last-{name}"), {})
            if rank == 0:
                torch.save(after, home / f"later-{name}.pt")
    with open_learner(config_of(2, 2), models, case, rank=rank, world=2, port=ports[-1]) as learner:
        check_a_rank_that_cannot_write(learner, case, rank, home)


def check_a_rank_that_cannot_write(learner: Learner, case: Case, rank: int, home: Path) -> None:
    """Both ranks learn of it and train on; the next checkpoint is good."""
    before = copy_weights(learner)
    kind = "bf16_" if learner._dtype is torch.bfloat16 else ""
    full = home / "full" / "learner" / f"{kind}zero_pp_rank_1_mp_rank_00_optim_states.pt"
    full.parent.mkdir(parents=True, exist_ok=True)
    if rank == 1:
        full.symlink_to("/dev/full")
    torch.distributed.barrier()
    with pytest.raises(StorageFailure, match=r"^learner rank 1: No space left on device"):
        learner.save(str(home / "full"), {})
    saving = Saving(learner, key=KEY)
    (home / "nowhere").touch()
    if rank == 0:  # its draft cannot even be created
        drafts.draft_in_memory = lambda key, number: home / "nowhere" / "draft"
    with pytest.raises(StorageFailure, match=r"^learner rank 0: Not a directory"):
        saving.write(str(home / "begun"), {})
    torch.distributed.barrier()
    assert not list(drafts.SEGMENT_DIR.glob(f"async_grpo-{KEY}-*"))
    assert bitwise(copy_weights(learner), before)
    train(learner, case, SHARES[rank])
    learner.save(str(home / "good"), {"step": 1})
    learner.load(str(home / "good"))


@pytest.mark.parametrize(
    "cases",
    [
        ("plain bfloat16", "lora", "sharded"),
        pytest.param(
            ("unsharded", "plain", "gradients", "bfloat16", "sharded bfloat16"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_checkpoint_continues_with_another_number_of_ranks(
    cases: tuple[str, ...], models: dict[str, str], tmp_path: Path
) -> None:
    case = make_case(models["plain"])
    on_its_own: dict[str, dict[str, torch.Tensor]] = {}
    for name in cases:
        stage, model = CASES[name]
        with open_learner(config_of(stage, 1, **model), models, case) as learner:
            for _ in range(2):
                train(learner, case, ALONE)
            learner.save(str(tmp_path / f"one-{name}"), {"step": 7})
            if stage in (1, 2):
                check_devices(learner, tmp_path / f"one-{name}")
            train(learner, case, ALONE)
            learner.save(str(tmp_path / f"alone-{name}"), {})
            on_its_own[name] = copy_weights(learner)
    run_ranks(
        two_ranks,
        cases,
        [free_port() for _ in range(len(cases) + 1)],
        tmp_path,
        models,
        seconds=DEADLINE_S,
    )
    for name in cases:
        stage, model = CASES[name]
        if stage in (1, 2):
            one, two, later, alone = (
                whole_state(tmp_path / f"{point}-{name}", ranks)
                for point, ranks in (("one", 1), ("two", 2), ("later", 2), ("alone", 1))
            )
            assert len(one) > 20 and bitwise(one, two) and not bitwise(two, later)
            assert_follows(later, alone, one)
        if stage == 3:
            with (
                open_learner(config_of(stage, 1, **model), models, case) as learner,
                pytest.raises(ValueError, match="written by 2 learner ranks with ZeRO stage 3"),
            ):
                learner.load(str(tmp_path / f"later-{name}"))
            continue
        continued = torch.load(tmp_path / f"later-{name}.pt")
        if "bfloat16" not in name:  # which rounds more than the order of sums changes
            assert_close(continued, on_its_own[name])
        with open_learner(config_of(stage, 1, **model), models, case) as learner:
            assert learner.load(str(tmp_path / f"later-{name}")) == {"step": 9}
            assert bitwise(copy_weights(learner), continued)
            if stage:
                learner.save(str(tmp_path / f"back-{name}"), {})
                assert bitwise(whole_state(tmp_path / f"back-{name}", 1), later)
            train(learner, case, ALONE)
            if stage:
                learner.save(str(tmp_path / f"again-{name}"), {})
                again = whole_state(tmp_path / f"again-{name}", 1)
                assert_follows(again, whole_state(tmp_path / f"last-{name}", 2), later)


@pytest.mark.parametrize(
    ("stage", "model"),
    [
        (0, {}),
        (1, {"dtype": "bfloat16"}),
        (2, {"lora": {"rank": 4}}),
        (3, {}),
        (2, {"freeze": ["layers.1"]}),
    ],
)
def test_a_draft_is_no_larger_than_was_reckoned_with(
    stage: int, model: dict[str, Any], tmp_path: Path, models: dict[str, str], monkeypatch
) -> None:
    monkeypatch.setattr(drafts, "SEGMENT_DIR", tmp_path)
    case = make_case(models["plain"])
    with open_learner(config_of(stage, 1, **model), models, case) as learner:
        train(learner, case, ALONE)
        saving = Saving(learner, key=KEY)
        (tmp_path / "begun").mkdir()
        written = saving.write(str(tmp_path / "begun"), {})
        reckoned = learner.bytes_to_save() - 2**24
        assert 0.4 * reckoned < written.nbytes - 40 * 2000 < reckoned, "file headers apart"
        sums = saving.finish(str(tmp_path / "begun"))
        assert sum(entry["size"] for entry in sums.values()) == written.nbytes
        weights = copy_weights(learner)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "begun" / "hf", dtype="auto")
    assert bitwise(dict(exported.named_parameters()), weights)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("async_grpo-")]
