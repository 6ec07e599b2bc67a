"""What a plugin's loss may see and say beyond the built-in ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from async_grpo.algo.catalog import POLICY_LOSSES
from async_grpo.algo.losses import Clip, Terms, policy_loss
from async_grpo.algo.metrics import MetricSums, loss_metrics
from tests.support.registers import registers_put_back


def test_a_loss_sees_staleness_and_its_own_diagnostics_become_metrics() -> None:
    ones, mask = torch.ones(4), torch.tensor([1.0, 1.0, 1.0, 0.0])
    known = {
        "anchor_logprobs": -ones,
        "behavior_logprobs": -ones,
        "advantages": ones,
        "staleness": torch.tensor([0.0, 2.0, 4.0, 9.0]),
    }
    seen: list[list[float]] = []
    with registers_put_back():

        @POLICY_LOSSES.register("wide_by_age")
        def wide_by_age(terms: Terms) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            seen.append(terms.staleness.tolist())
            return -terms.log_ratio, {"age": terms.staleness, "clipped_high": terms.staleness > 3}

        logprobs = torch.full((4,), -1.0, requires_grad=True)
        loss, diagnostics = policy_loss(
            "wide_by_age", logprobs, **known, loss_mask=mask, clip=Clip(0.2, 0.2)
        )

        @POLICY_LOSSES.register("wrong")
        def wrong(terms: Terms) -> tuple[torch.Tensor, dict[str, Any]]:
            return -terms.log_ratio, {"age": wrongs[-1]}

        wrongs: list[Any] = []
        for value, what in ((ones[:2], r"a tensor \[2\]"), (1.5, "1.5"), (None, "None")):
            wrongs.append(value)
            with pytest.raises(ValueError, match=f"wrong returns {what} as diagnostic age"):
                policy_loss("wrong", logprobs, **known, loss_mask=mask, clip=Clip(0.2, 0.2))
    assert seen == [[0.0, 2.0, 4.0, 0.0]], "masked tokens have none"
    sums = MetricSums()
    loss_metrics(
        sums,
        token_loss=loss,
        diagnostics=diagnostics,
        logprobs=logprobs,
        recomputed=False,
        mask=mask,
        **known,
    )
    means = sums.means()
    assert means["train/loss/age"] == pytest.approx(2.0)  # of 0, 2 and 4: the masked one is out
    assert means["train/staleness_2/loss/age"] == pytest.approx(2.0)
    assert means["train/pg_clipfrac"] == pytest.approx(1 / 3)
