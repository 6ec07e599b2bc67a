"""On-policy distillation: its gradient is that of the reverse KL, whoever sampled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from async_grpo.algo.distill import distilled_advantages, top_k_kl
from async_grpo.algo.logprobs import MIN_LOGP
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


def random_logprobs(seed: int, *, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits [5, 9] with gradient, and a teacher's log-probs [5, 9], falling."""
    generator = torch.Generator().manual_seed(seed)
    draw = [scale * torch.randn(5, 9, generator=generator, dtype=torch.float64) for _ in range(2)]
    teacher = draw[1].log_softmax(-1).sort(-1, descending=True).values
    return draw[0].requires_grad_(), teacher


@pytest.mark.parametrize("k", [1, 3, 9])
def test_all_tokens_but_the_teachers_k_best_count_as_one(k: int) -> None:
    logits, teacher = random_logprobs(k)
    policy = logits.log_softmax(-1)

    def buckets(logprobs: Tensor) -> Tensor:  # by a slow loop
        rows = [[float(one) for one in row.exp()] for row in logprobs]
        return torch.tensor([[*row[:k], sum(row[k:])] for row in rows], dtype=torch.float64)

    q, p = buckets(teacher), buckets(policy.detach())
    wanted = torch.where(q > 0, q * (q / p).log(), 0).nansum(-1)
    found = top_k_kl(policy[:, :k], teacher[:, :k])
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    whole = (teacher.exp() * (teacher - policy)).sum(-1)
    assert (found <= whole + 2e-5).all()
    [gradient] = torch.autograd.grad(found.sum(), logits)
    within = policy.exp() * torch.cat([torch.ones(k), torch.zeros(9 - k)])
    share = policy.exp() - within  # of the others, in proportion
    target = torch.cat([teacher[:, :k].exp(), torch.zeros(5, 9 - k)], -1)
    target = target + q[:, k:] * share / share.sum(-1, keepdim=True).clamp(min=1e-12)
    torch.testing.assert_close(gradient, policy.exp().detach() - target.detach(), rtol=0, atol=2e-4)


@pytest.mark.parametrize("margin", [0.0, 5.0, 20.0, 80.0, 1000.0])
def test_a_policy_that_is_sure_of_itself_has_a_finite_gradient(margin: float) -> None:
    """Also where it knows nothing of what the teacher says, and it is small for one that agrees."""
    for dtype, right in ((torch.float32, True), (torch.float32, False), (torch.float64, False)):
        logits = torch.zeros(1, 9, dtype=dtype)
        logits[0, 0 if right else 8] = margin
        logits.requires_grad_()
        teacher = torch.tensor([[20.0] + [0.0] * 8], dtype=dtype).log_softmax(-1)
        top_k_kl(logits.log_softmax(-1)[:, :3], teacher[:, :3]).sum().backward()
        gradient = logits.grad
        assert gradient is not None and gradient.isfinite().all()
        assert gradient.abs().max() <= 1.1 and gradient[0, 0] < 1e-3
        if margin >= 20 and right:
            assert gradient.abs().max() < 1e-3


def test_a_column_that_names_no_token_counts_for_nothing() -> None:
    logits, teacher = random_logprobs(3)
    policy = logits.log_softmax(-1)
    nothing = torch.full((5, 1), MIN_LOGP, dtype=torch.float64)
    with_it = top_k_kl(policy[:, [0, 1, 0]], torch.cat([teacher[:, :2], nothing], -1))
    torch.testing.assert_close(with_it, top_k_kl(policy[:, :2], teacher[:, :2]))
    assert torch.autograd.grad(with_it.sum(), logits)[0].isfinite().all()


def test_shapes_of_both_must_agree() -> None:
    with pytest.raises(ValueError, match="teacher_logprobs"):
        top_k_kl(torch.zeros(2, 3), torch.zeros(2, 4))
