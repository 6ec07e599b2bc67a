"""On-policy distillation: what a token is worth to a frozen teacher.

Runs in: learner ranks. Hides nothing.
"""

from __future__ import annotations

from torch import Tensor

from async_grpo.algo.logprobs import MIN_LOGP
from async_grpo.algo.rows import check_shapes

REST = 1e-6
"""Added to the probability of all other tokens, so that its gradient stays finite."""


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


def top_k_kl(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Return the forward KL(q || pi) [...] in nats, from log-probs [..., k] of the teacher's k most
    probable tokens; all other tokens count as one. Differentiable in `logprobs`, log pi.

    That one makes it a lower bound of the KL over the vocabulary, equal where pi shares its
    probability among them in proportion to q. It takes no importance weight of its token, since it
    sums over all; that an older policy sampled the tokens before it is left uncorrected. A log-prob
    of MIN_LOGP names no token. The probability of the rest is at least REST, so a policy that gives
    it less is pulled to it less. Raises ValueError for a shape mismatch.
    """
    check_shapes(logprobs, teacher_logprobs=teacher_logprobs)
    q, named = teacher_logprobs.exp(), teacher_logprobs > MIN_LOGP
    rests = [(1 - one.sum(-1)).clamp(min=0) + REST for one in (q, logprobs.exp() * named)]
    others = rests[0] * (rests[0].log() - rests[1].log())
    return (q * (teacher_logprobs - logprobs)).sum(-1) + others
