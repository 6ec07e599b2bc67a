"""On-policy distillation: its gradient is that of the reverse KL, whoever sampled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from async_grpo.algo.distill import distilled_advantages
from async_grpo.algo.losses import Clip, policy_loss

WIDE = Clip(low=1.0, high=1e6, kind="constant", dual=None)


def kl_gradient(logits: Tensor, teacher: Tensor) -> Tensor:
    """Of KL(policy || teacher), by autograd over the whole distribution."""
    logits = logits.detach().requires_grad_()
    policy = logits.log_softmax(-1)
    (policy.exp() * (policy - teacher)).sum().backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("staleness", [0, 4, 16])
def test_the_expected_gradient_is_that_of_the_reverse_kl_for_every_sampling_policy(
    staleness: int,
) -> None:
    generator = torch.Generator().manual_seed(staleness)
    draw = [torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(3)]
    logits, teacher = draw[0].requires_grad_(), draw[1].log_softmax(-1)
    behavior = (draw[0].detach() + 0.1 * staleness * draw[2]).log_softmax(-1)
    policy = logits.log_softmax(-1)
    advantages = distilled_advantages(
        torch.full((7,), 5.0, dtype=torch.float64), policy, teacher, coef=1.0, reward_coef=0.0
    )
    loss, _ = policy_loss(
        "ppo_clip",
        policy,
        anchor_logprobs=behavior,
        behavior_logprobs=behavior,
        advantages=advantages,
        loss_mask=torch.ones(7),
        staleness=torch.full((7,), staleness),
        clip=WIDE,
        row_index=torch.arange(7),
    )
    (behavior.exp() * loss).sum().backward()  # every token as often as it is sampled
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, kl_gradient(logits, teacher))


def test_rewards_and_teacher_are_weighted_apart_and_nothing_flows_back() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    found = distilled_advantages(
        torch.tensor([1.0, -1.0]), logprobs, torch.tensor([-0.5, -4.0]), coef=0.5, reward_coef=2.0
    )
    assert found.tolist() == [2.25, -3.0] and not found.requires_grad
    with pytest.raises(ValueError, match="teacher_logprobs"):
        distilled_advantages(logprobs, logprobs, torch.zeros(3), coef=1.0, reward_coef=1.0)
