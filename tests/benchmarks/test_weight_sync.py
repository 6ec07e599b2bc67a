"""The weight benchmark's models have the sizes that they are called by, and its sums are right; its
figures are its own business.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.weight_sync.engine import Pair
from benchmarks.weight_sync.learner import RankResult, Round
from benchmarks.weight_sync.models import SIZES, PlainWeights
from benchmarks.weight_sync.run import run_result


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


def test_a_run_is_summed_up_without_its_first_step() -> None:
    def line(publish: float) -> dict[str, float]:
        return {
            "time/step": 0.4,
            "time/publish": publish,
            "time/train": 0.2,
            "weights/engine_paused_s": 0.1,
            "weights/until_live_s": 0.2,
        }

    found = run_result([line(9.0), {"eval/accuracy_greedy": 0.5}, line(0.01), line(0.03)])
    assert (found.steps, found.publish_s) == (2, pytest.approx(0.02))
    assert found.lost == pytest.approx(0.05) and found.lost_at_rate == pytest.approx(0.04)
    with pytest.raises(RuntimeError, match="at least two"):
        run_result([line(9.0)])
