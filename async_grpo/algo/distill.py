"""On-policy distillation: what a token is worth to a frozen teacher.

Runs in: learner ranks. Hides nothing.
"""

from __future__ import annotations

from torch import Tensor

from async_grpo.algo.rows import check_shapes


def distilled_advantages(
    advantages: Tensor,
    logprobs: Tensor,
    teacher_logprobs: Tensor,
    *,
    coef: float,
    reward_coef: float,
) -> Tensor:
    """Return reward_coef A + coef (log q - log pi) per token, in the (equal) shape of the inputs,
    without gradient: log pi of the policy that is trained, log q of the teacher.

    The second part is the policy gradient of the reverse KL, token by token
    (https://thinkingmachines.ai/blog/on-policy-distillation): with d = log pi - log q, the gradient
    of E_pi[d] is E_pi[d grad log pi]. Tokens that an older policy sampled get the importance
    weights and clipping of their policy loss. Raises ValueError for a shape mismatch.
    """
    check_shapes(logprobs, advantages=advantages, teacher_logprobs=teacher_logprobs)
    return reward_coef * advantages + coef * (teacher_logprobs - logprobs.detach())
