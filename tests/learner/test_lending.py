"""A learner lends its memory to an engine between steps, in every ZeRO stage: what it has is gone
meanwhile, and all of its bits are there again.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from async_grpo.learner import lending
from async_grpo.learner.lending import LentMemory
from tests.support.learners import (
    SHARD_ALL,
    bitwise,
    copy_weights,
    make_case,
    make_config,
    open_learner,
    split,
    train,
    write_neighbour,
)
from tests.support.models import write_model

SPLITS = [split(range(12), 3)]
SMALL = {"reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("models")
    plain = write_model(path / "plain")
    return {"plain": plain, "reference": write_neighbour(plain, str(path / "reference"))}


def resident(apart_from: set[int]) -> dict[int, int]:
    """Bytes of the storages of all tensors in this process but these, and files that are mapped,
    which on a GPU there are none of.
    """
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, Tensor)]
    storages = [one.untyped_storage() for one in tensors if one.layout is torch.strided]
    here = [one for one in storages if one.device.type == "cpu" and one.resizable()]
    owned = [one for one in here if one._cdata not in apart_from]
    return {one._cdata: one.nbytes() for one in owned}


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        (0, "float32"),
        (1, "bfloat16"),
        (2, "float32"),
        (3, "bfloat16"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, "float32"), (2, "bfloat16"), (3, "float32"))
        ),
    ],
)
@pytest.mark.timeout(150)
def test_what_is_lent_is_gone_and_comes_back_as_it_was(
    models: dict[str, str], stage: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "PIECE_BYTES", 10_007)  # parts end in the middle of tensors
    case = make_case(models["plain"])
    deepspeed = {"zero_optimization": SHARD_ALL["zero_optimization"] | SMALL}
    config = make_config(
        model={"reference": models["reference"], "dtype": dtype},
        learner={"zero_stage": stage, "deepspeed": deepspeed, "tokens_per_micro_batch": 48},
    )
    found = []
    for lends in (False, True):
        before = set(resident(set()))
        with open_learner(config, models, case) as learner:
            train(learner, case, SPLITS)
            if lends:
                had = sum(resident(before).values())
                learner.give_back()
                learner.give_back()
                pieces = list(learner._lent._pieces)
                kept = before | {piece.untyped_storage()._cdata for piece in pieces}
                assert sum(resident(kept).values()) < 0.02 * had
                learner.take_back()
                learner.take_back()
                assert sum(resident(kept).values()) >= 0.98 * had
            train(learner, case, SPLITS)
            if lends:
                learner.give_back()
                assert list(map(id, learner._lent._pieces)) == list(map(id, pieces))
                learner.take_back()
            found.append(copy_weights(learner))
    assert bitwise(found[0], found[1])


def test_views_and_shared_storages_are_whole_again() -> None:
    flat = torch.arange(100.0)
    model = nn.Linear(10, 10, bias=False)
    model.weight.data = flat.view(10, 10)
    model.weight.grad = torch.ones(10, 10)
    memory = LentMemory(torch.device("cpu"))
    memory.give(model)
    assert flat.untyped_storage().nbytes() == model.weight.grad.untyped_storage().nbytes() == 0
    memory.back()
    assert flat.tolist() == list(range(100)) and model.weight.grad.eq(1).all()
    flat[7] = -1
    assert model.weight[0, 7] == -1, "they still share"
