"""What all of `async_grpo.algo` has in common: it imports with torch alone, and one way to sum over
rows.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.algo.rows import row_means, row_sums
from tests.support.algo_case import F64, close, fast, gradient, seeds

BLOCKER = """
import sys
{first}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {allowed!r} or top in sys.stdlib_module_names:
            return None
        raise ImportError("third-party import of " + name)
sys.meta_path.insert(0, Refuse())
import {modules}
loaded = {{name.partition(".")[0] for name in sys.modules}}
others = {{"ray", "vllm", "deepspeed", "mlflow", "transformers", "pydantic", "msgpack"}}
assert not loaded & others, loaded
"""
MATH = (
    "advantages reward_norm losses selection importance kl aggregation logprobs rows metrics "
    "rewards filters step_size"
)


@pytest.mark.parametrize(
    ("first", "allowed", "modules"),
    [
        (
            "import torch",
            ("async_grpo", "torch", "numpy"),
            ", ".join(f"async_grpo.algo.{name}" for name in MATH.split()),
        ),
        (
            "",
            ("async_grpo",),
            "async_grpo.algo.catalog, async_grpo.algo.filters, async_grpo.algo.rewards, "
            "async_grpo.learner.batching",
        ),
    ],
    ids=["torch_alone", "nothing"],
)
def test_imports_need_no_other_package(first: str, allowed: tuple[str, ...], modules: str) -> None:
    code = BLOCKER.format(first=first, allowed=allowed, modules=modules)
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@given(seed=seeds, rows=st.integers(0, 5), width=st.integers(0, 6))
@fast
def test_sums_and_means_of_rows_in_both_layouts(seed: int, rows: int, width: int) -> None:
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, width, generator=random, dtype=F64, requires_grad=True)
    valid = torch.randint(0, 2, (rows, width), generator=random).bool()
    clean = torch.where(valid, values, 0)
    order = torch.randperm(rows * width, generator=random)
    numbers = rows * width - 1 - torch.arange(rows)  # any below their count, in any order
    index = numbers.repeat_interleave(width)[order]
    means, sums = row_means(values, valid), row_sums(clean)
    close(row_sums(clean.reshape(-1)[order], index), sums.reshape(-1)[order])
    close(
        row_means(values.reshape(-1)[order], valid.reshape(-1)[order], index),
        means.reshape(-1)[order],
    )
    for i in range(rows):
        kept = [float(values[i, t].detach()) for t in range(width) if valid[i, t]]
        for t in range(width):
            assert float(sums[i, t].detach()) == pytest.approx(sum(kept), abs=1e-12)
            assert float(means[i, t].detach()) == pytest.approx(
                sum(kept) / len(kept) if kept else 0.0, abs=1e-12
            )
    if rows * width:
        slopes = gradient(means.sum(), values)
        wanted = torch.where(valid, width / valid.sum(-1, keepdim=True).clamp(min=1), 0.0).to(F64)
        close(slopes, wanted)


def test_packed_rows_need_their_index() -> None:
    with pytest.raises(ValueError, match="row_index"):
        row_sums(torch.ones(3))
    with pytest.raises(ValueError, match="row_index"):
        row_means(torch.ones(3), torch.ones(3, dtype=torch.bool), torch.zeros(2, dtype=torch.int64))
