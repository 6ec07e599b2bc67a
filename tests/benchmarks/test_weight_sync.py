"""The weight benchmark's models have the sizes that they are called by, and its sums are right; its
figures are its own business.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.weight_sync.engine import Pair
from benchmarks.weight_sync.learner import RankResult, Round
from benchmarks.weight_sync.models import SIZES, PlainWeights
from benchmarks.weight_sync.versions import between


@pytest.mark.parametrize("name", SIZES)
def test_a_model_has_the_size_in_its_name(name: str) -> None:
    with torch.device("meta"):
        model = SIZES[name].build()
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert millions == pytest.approx(float(name.removesuffix("M")), rel=0.2)
    assert {str(parameter.dtype) for parameter in model.parameters()} == {
        f"torch.{SIZES[name].dtype}"
    }


def test_plain_weights_are_those_of_the_files(tmp_path) -> None:
    weights = PlainWeights(SIZES["1M"].write(tmp_path))
    torch.manual_seed(0)
    model = dict(SIZES["1M"].build().named_parameters())
    assert {name for name, _, _ in weights.weight_metadata()} == set(model)
    assert all(torch.equal(weight, model[name]) for name, weight in weights.named_weights())


def test_what_is_lost_is_counted_per_publication() -> None:
    pair = Pair(without=4.0, published=5.0, publications=5)
    assert pair.lost == pytest.approx(0.2) and pair.share == pytest.approx(0.02)


def test_a_copy_that_takes_twice_the_time_has_half_the_speed() -> None:
    found = RankResult(
        10**9, [Round(copy=0.5, memcpy=0.25, checksums=0.0, stage=0.0, verified=0.0)], 0.0, 0.0
    )
    assert (found.of_memcpy, found.copies_gb_per_s, found.memcpy_gb_per_s) == ([0.5], [2.0], [4.0])


def test_between_two_versions_the_elements_that_changed_are_counted_and_the_receiver_follows() -> (
    None
):
    before = np.arange(4096, dtype=np.uint32)
    now = before.copy()
    now[[5, 70, 4000]] += 2**16 + 1  # both words of an element
    received = before.copy().view(np.uint8)
    step = between(
        before.view(np.uint8), now.view(np.uint8), received, elements=4000, word=np.dtype("u4")
    )
    assert step.changed == 3 / 4000 and np.array_equal(received, now.view(np.uint8))
    assert 6 * 4 < step.nbytes < 100 and step.encode.wall > 0
