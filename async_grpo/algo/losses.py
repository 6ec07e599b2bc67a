"""Policy losses by name: one call for every loss, per token.

Runs in: learner ranks. Hides which loss needs what (rows, a selection, a clip interval) and the
cleaning of the inputs; the formulas and their numerics.

Invariants: where the mask is 0 the loss and its gradient are exactly 0, whatever the inputs hold
there; only `logprobs` receives gradient; every loss returns the same diagnostics. Losses are
minimised; aggregation over tokens is another module's.

What policy losses are made of: the clip interval of a token by its lag, cleaned inputs, and one
function per loss. Hides the numerics of importance ratios: masked entries may hold anything (NaN
and infinity included) and still give loss 0 and gradient 0, and no log ratio overflows.

Invariants: inputs are sanitised before any arithmetic, because masking a result does not stop 0 *
inf in the backward pass; what goes into `exp` is clamped to [-20, 20], never what comes out; the
clip interval never widens with the lag, and at lag 0 it is the constant one; only `logprobs`
receives gradient. A ratio exactly on a bound keeps its whole gradient.

Names below: x = current - anchor log-prob, r = exp(x), A advantage, sg = without gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from async_grpo.algo.rows import row_means, row_sums

MAX_LOG_RATIO = 20.0
M2PO_OPEN = 1e5
"""Upper bound of the ratio where M2PO does not clip."""

LossAndDiagnostics = tuple[Tensor, dict[str, Tensor]]
"""Loss per token, and the diagnostics in which this loss differs from r and from "nothing clipped".
"""


@dataclass(frozen=True)
class Clip:
    """The clip interval [1 - low f(k), 1 + high f(k)] of a token with lag k.

    `kind` of f: "constant" 1, "harmonic" 1 / (1 + rate k), "exponential" rate^k; never below
    `floor`. `dual`: bound c > 1 of the loss for negative advantages (dual clip, arXiv 1912.09729),
    None for off. Raises ValueError for values that would widen the interval.
    """

    low: float
    high: float
    kind: str = "constant"
    rate: float = 0.0
    floor: float = 0.0
    dual: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in CLIP_SCHEDULES:
            raise ValueError(
                f"unknown clip schedule {self.kind!r}; choose one of {sorted(CLIP_SCHEDULES)}"
            )
        if (
            self.rate < 0
            or (self.kind == "exponential" and self.rate > 1)
            or not 0 <= self.floor <= 1
        ):
            raise ValueError(
                f"clip schedule {self.kind} with rate {self.rate} and floor {self.floor}; "
                "the rate must be at least 0 "
                "(exponential: at most 1) and the floor between 0 and 1, so that the "
                "interval never widens with lag"
            )
        if self.low < 0 or self.high < 0 or (self.dual is not None and self.dual <= 1):
            raise ValueError(
                f"clip widths {self.low} and {self.high} must not be negative and the dual "
                f"clip {self.dual} must exceed 1"
            )


CLIP_SCHEDULES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "constant": lambda lag, rate: torch.ones_like(lag),
    "harmonic": lambda lag, rate: 1 / (1 + rate * lag),
    "exponential": lambda lag, rate: torch.pow(rate, lag),
}
"""Kind -> (lag, rate) -> factor in (0, 1], 1 at lag 0, not increasing."""


@dataclass(frozen=True)
class LossOptions:
    """Constants of single losses; the defaults are those of the papers. Raises ValueError for
    values that make no loss.

    sapo: temperatures for positive and other advantages. dppo: divergence "tv" or "kl", its bounds
    for negative and positive advantages, and the cap of the ratio (None: the ratio carries the
    gradient, uncapped). opmd: weight of the squared log ratio, of each "token" or of the
    "sequence". clip_cov, kl_cov: share of the step's tokens to select, the band of covariances, the
    weight of the penalty. m2po: bound of the mean squared log ratio of harmful tokens.
    """

    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    dppo_divergence: str = "tv"
    dppo_low: float = 0.2
    dppo_high: float = 0.2
    dppo_ratio_cap: float | None = None
    opmd_tau: float = 0.1
    opmd_level: str = "token"
    clip_cov_ratio: float = 2e-4
    clip_cov_lower: float = 1.0
    clip_cov_upper: float = 5.0
    kl_cov_ratio: float = 2e-4
    kl_cov_coef: float = 0.1
    m2po_budget: float = 0.04

    def __post_init__(self) -> None:
        values = asdict(self)
        for name, valid in (
            ("dppo_divergence", ("tv", "kl")),
            ("opmd_level", ("token", "sequence")),
        ):
            if values[name] not in valid:
                raise ValueError(f"{name} is {values[name]!r}; choose {' or '.join(valid)}")
        for name in ("sapo_tau_pos", "sapo_tau_neg", "m2po_budget", "dppo_ratio_cap"):
            if values[name] is not None and not 0 < values[name] < math.inf:
                raise ValueError(f"{name} is {values[name]}; it must be a finite number above 0")
        for name in ("dppo_low", "dppo_high", "opmd_tau", "kl_cov_coef"):
            if not 0 <= values[name] < math.inf:
                raise ValueError(
                    f"{name} is {values[name]}; it must be a finite number of at least 0"
                )
        for name in ("clip_cov_ratio", "kl_cov_ratio"):
            if not 0 < values[name] <= 1:
                raise ValueError(f"{name} is {values[name]}; it must be above 0 and at most 1")
        if not self.clip_cov_lower < self.clip_cov_upper:
            raise ValueError(
                f"clip_cov_lower is {self.clip_cov_lower}; it must be below "
                f"clip_cov_upper, {self.clip_cov_upper}"
            )


@dataclass(frozen=True, slots=True)
class Terms:
    """What every loss is made of, all [B, T] or [N]; masked entries are neutral: difference 0,
    advantage 0, lag 0.
    """

    current: Tensor
    """Log-probs of the current policy; with `difference` and `log_ratio` what carries the gradient.
    """
    anchor: Tensor
    behavior: Tensor
    difference: Tensor
    """current - anchor, not clamped."""
    log_ratio: Tensor
    """`difference`, clamped."""
    advantages: Tensor
    low: Tensor
    """Widths of the clip interval by the token's lag."""
    high: Tensor
    valid: Tensor
    row_index: Tensor | None
    selection: Tensor | None
    clip: Clip
    options: LossOptions

    def row_mean(self, values: Tensor) -> Tensor:
        return row_means(values, self.valid, self.row_index)

    def row_sum(self, values: Tensor) -> Tensor:
        return row_sums(values, self.row_index)


def clip_widths(staleness: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """Widths of the clip interval below and above ratio 1, for tokens with lag `staleness`; shapes
    and types as in `clip_bounds`.
    """
    lag = staleness if staleness.is_floating_point() else staleness.to(torch.get_default_dtype())
    factor = CLIP_SCHEDULES[clip.kind](lag.clamp(min=0), clip.rate).clamp(min=clip.floor)
    return clip.low * factor, clip.high * factor


def clip_bounds(staleness: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """Lower and upper bound of the ratio for tokens with lag `staleness` (any shape, in learner
    steps; below 0 counts as 0).

    Both sides shrink by the same factor. The result has the type of `staleness` if that is a float,
    else the default float type.
    """
    low, high = clip_widths(staleness, clip)
    return 1 - low, 1 + high


def clipped_sides(
    ratio: Tensor, advantages: Tensor, lower: Tensor, upper: Tensor
) -> tuple[Tensor, Tensor]:
    """Where PPO's minimum chooses the clipped side: (negative advantage below `lower`, positive
    advantage above `upper`), bool.
    """
    return (advantages < 0) & (ratio < lower), (advantages > 0) & (ratio > upper)


def _clipped(
    ratio: Tensor, advantages: Tensor, lower: Tensor, upper: Tensor, dual: float | None = None
) -> LossAndDiagnostics:
    """-min(ratio A, clip(ratio) A), written as a choice of the ratio: `minimum` would halve the
    gradient of a ratio on a bound, which matters for an interval that has shrunk to the point 1.
    `dual` c: the loss is at most -c A where A < 0.
    """
    clipped_low, clipped_high = clipped_sides(ratio, advantages, lower, upper)
    loss = -advantages * torch.where(clipped_low, lower, torch.where(clipped_high, upper, ratio))
    diagnostics = {"ratio": ratio, "clipped_low": clipped_low, "clipped_high": clipped_high}
    if dual is not None:
        bound = -dual * advantages
        diagnostics["dual_clipped"] = (advantages < 0) & (loss > bound)
        loss = torch.where(diagnostics["dual_clipped"], bound, loss)
    return loss, diagnostics


def ppo_clip(terms: Terms) -> LossAndDiagnostics:
    """l = -min(r A, clip(r) A) (arXiv 1707.06347); with dual clip l <= -c A where A < 0 (arXiv
    1912.09729).
    """
    return _clipped(
        terms.log_ratio.exp(), terms.advantages, 1 - terms.low, 1 + terms.high, terms.clip.dual
    )


def gspo(terms: Terms) -> LossAndDiagnostics:
    """l = -min(s A, clip(s) A) on every token, s = exp(mean of x over the response) (arXiv
    2507.18071).
    """
    ratio = terms.row_mean(terms.difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return _clipped(ratio, terms.advantages, 1 - terms.low, 1 + terms.high)


def gspo_token(terms: Terms) -> LossAndDiagnostics:
    """GSPO with an advantage per token: the value of s, each token's gradient on itself: sg(s)
    exp(current - sg(current)).
    """
    log_ratio = terms.row_mean(terms.difference.detach()) + (terms.current - terms.current.detach())
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return _clipped(ratio, terms.advantages, 1 - terms.low, 1 + terms.high)


def cispo(terms: Terms) -> LossAndDiagnostics:
    """l = -sg(clip(r)) A current: the clip bounds the weight, every token keeps gradient (arXiv
    2506.13585).

    `clipped_low` and `clipped_high` say where the weight was bounded, whatever the sign of A.
    """
    ratio, lower, upper = terms.log_ratio.detach().exp(), 1 - terms.low, 1 + terms.high
    loss = -ratio.clamp(lower, upper) * terms.advantages * terms.current
    return loss, {"clipped_low": ratio < lower, "clipped_high": ratio > upper}


def sapo(terms: Terms) -> LossAndDiagnostics:
    """l = -f(r) A with the soft gate f(r) = 4 / tau sigmoid(tau (r - 1)), tau by the sign of A
    (arXiv 2511.20347).
    """
    pos, neg = terms.options.sapo_tau_pos, terms.options.sapo_tau_neg
    tau = torch.full_like(terms.advantages, neg).masked_fill(terms.advantages > 0, pos)
    return -4 / tau * torch.sigmoid(tau * (terms.log_ratio.exp() - 1)) * terms.advantages, {}


def gmpo(terms: Terms) -> LossAndDiagnostics:
    """l = -A exp(mean of clipped x over the response) on every token (arXiv 2507.20673).

    x is clipped on one side and in log space: min(x, high) where A > 0, max(x, -low) where A < 0.
    """
    x, advantages = terms.difference, terms.advantages
    clipped_low, clipped_high = (
        (advantages < 0) & (x < -terms.low),
        (advantages > 0) & (x > terms.high),
    )
    mean = terms.row_mean(
        torch.where(clipped_low, -terms.low, torch.where(clipped_high, terms.high, x))
    )
    ratio = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return -advantages * ratio, {
        "ratio": ratio,
        "clipped_low": clipped_low,
        "clipped_high": clipped_high,
    }


def policy_gradient(terms: Terms) -> LossAndDiagnostics:
    """l = -A current: GPG (arXiv 2504.02546), REINFORCE (a correction comes as weights), asymmetric
    REINFORCE (arXiv 2506.20520).
    """
    return -terms.advantages * terms.current, {}


def clip_cov(terms: Terms) -> LossAndDiagnostics:
    """PPO's loss, 0 on the selected tokens (arXiv 2505.22617)."""
    loss, diagnostics = _clipped(
        terms.log_ratio.exp(), terms.advantages, 1 - terms.low, 1 + terms.high
    )
    return torch.where(terms.selection, 0, loss), diagnostics


def kl_cov(terms: Terms) -> LossAndDiagnostics:
    """l = -r A, plus coef |x| on the selected tokens (arXiv 2505.22617). No clamp on |x|: a penalty
    must not let go of far tokens.
    """
    penalty = terms.options.kl_cov_coef * terms.difference.abs()
    return -terms.log_ratio.exp() * terms.advantages + torch.where(terms.selection, penalty, 0), {}


def m2po(terms: Terms) -> LossAndDiagnostics:
    """PPO's loss with the interval widened to at least [exp(-T), exp(T)], T from the selection
    (arXiv 2510.01161).

    An infinite T gives [0, 1e5], as the authors have it.
    """
    widest = torch.where(terms.selection.isinf(), M2PO_OPEN, terms.selection.exp())
    lower, upper = (
        torch.minimum(1 - terms.low, (-terms.selection).exp()),
        torch.maximum(1 + terms.high, widest),
    )
    return _clipped(terms.log_ratio.exp(), terms.advantages, lower, upper, terms.clip.dual)


def dppo(terms: Terms) -> LossAndDiagnostics:
    """l = -r A, or -sg(min(r, cap)) A current; 0 for tokens whose probability has moved too far
    (arXiv 2602.04879).

    Too far: in the direction of A, by more than high (A > 0) or low (A < 0), measured as p - p'
    ("tv") or as the divergence of the two-outcome distributions KL(p' || p) ("kl"); p current, p'
    anchor. The dropped tokens count as `clipped_high` and `clipped_low`.
    """
    options, advantages, ratio = terms.options, terms.advantages, terms.log_ratio.exp()
    now, then = terms.current.detach().clamp(max=0), terms.anchor.clamp(max=0)
    moved = now.exp() - then.exp()
    distance = moved.abs() if options.dppo_divergence == "tv" else _binary_kl(then, now)
    clipped_high = (advantages > 0) & (moved > 0) & (distance > options.dppo_high)
    clipped_low = (advantages < 0) & (moved < 0) & (distance > options.dppo_low)
    if options.dppo_ratio_cap is None:
        loss = -ratio * advantages
    else:
        loss = -ratio.detach().clamp(max=options.dppo_ratio_cap) * advantages * terms.current
    return torch.where(clipped_low | clipped_high, 0, loss), {
        "clipped_low": clipped_low,
        "clipped_high": clipped_high,
    }


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """p log(p / q) + (1 - p) log((1 - p) / (1 - q)) from log-probs <= 0; finite where a probability
    is 1.
    """
    tiny = torch.finfo(log_p.dtype).tiny
    log_not_p, log_not_q = (
        torch.log(-torch.expm1(value.clamp(max=-tiny))) for value in (log_p, log_q)
    )
    return log_p.exp() * (log_p - log_q) - torch.expm1(log_p) * (log_not_p - log_not_q)


def opmd(terms: Terms) -> LossAndDiagnostics:
    """l = -A current + tau / 2 d^2, d = current - behavior (arXiv 2501.12599 eq. 3, without its
    division by tau).

    Level "sequence": d is the response's sum, and each of its L tokens holds d^2 / L, so that the
    sum over tokens is the paper's term. No clamp on d, which is not exponentiated: a penalty must
    not let go of far tokens.
    """
    squared = (terms.current - terms.behavior).square()
    if terms.options.opmd_level == "sequence":
        total = terms.row_sum(terms.current - terms.behavior)
        squared = total.square() / terms.row_sum(terms.valid.to(total.dtype)).clamp(min=1)
    return -terms.advantages * terms.current + terms.options.opmd_tau / 2 * squared, {}


def topr(terms: Terms) -> LossAndDiagnostics:
    """l = -A current where A >= 0, else -sg(min(S, 1)) A current, S = exp(sum of current - behavior
    over the response).

    Source: arXiv 2503.14286. `ratio` is S.
    """
    ratio = (
        terms.row_sum((terms.current - terms.behavior).detach())
        .clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        .exp()
    )
    weight = torch.where(terms.advantages < 0, ratio.clamp(max=1), 1)
    return -weight * terms.advantages * terms.current, {"ratio": ratio}


__all__ = [
    "CLIPPED",
    "CLIP_SCHEDULES",
    "DEFAULT_OPTIONS",
    "MAX_LOG_RATIO",
    "POLICY_LOSSES",
    "RATIO_FREE",
    "SELECTING",
    "SEQUENCE",
    "Clip",
    "LossOptions",
    "clean_terms",
    "clip_bounds",
    "policy_loss",
]

DEFAULT_OPTIONS = LossOptions()

POLICY_LOSSES: dict[str, Callable[[Terms], LossAndDiagnostics]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "gpg": policy_gradient,
    "reinforce": policy_gradient,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "m2po": m2po,
    "dppo": dppo,
    "opmd": opmd,
    "topr": topr,
    "asymre": policy_gradient,
}
"""Name -> terms -> (loss per token, diagnostics)."""
CLIPPED = frozenset({"ppo_clip", "gspo", "gspo_token", "cispo", "gmpo", "clip_cov", "m2po"})
"""Losses that use the clip interval."""
SEQUENCE = frozenset({"gspo", "gspo_token", "gmpo", "topr"})
"""Losses with one ratio per response, which need to know the rows; `opmd` does too at level
"sequence".
"""
SELECTING = frozenset({"clip_cov", "kl_cov", "m2po"})
"""Losses that need a selection over the whole optimizer step (`selection.select_tokens`)."""
RATIO_FREE = frozenset({"gpg", "reinforce", "asymre", "topr", "opmd"})
"""Losses without a trust region around the anchor."""


def policy_loss(
    name: str,
    logprobs: Tensor,
    *,
    anchor_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    staleness: Tensor,
    clip: Clip,
    weights: Tensor | None = None,
    row_index: Tensor | None = None,
    selection: Tensor | None = None,
    options: LossOptions = DEFAULT_OPTIONS,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss per token, to be minimised, and detached diagnostics; every tensor is [B, T], or every
    one is packed [N].

    `logprobs` are the current policy's, with gradient; `anchor_logprobs` the trust region's centre;
    `behavior_logprobs` the sampler's (equal to the anchor when that is the behaviour policy);
    `advantages` one per token; `staleness` the lag per token in learner steps; `weights` multiply
    the whole loss of a token, without gradient. `row_index` int64, the row of each packed token, is
    needed by `SEQUENCE` losses and by `opmd` at level "sequence". `selection` comes from
    `select_tokens` and is needed by `SELECTING` losses: bool for clip_cov and kl_cov, float for
    m2po. Where `loss_mask` is 0 the loss and its gradient are exactly 0. Diagnostics: `log_ratio`
    (current - anchor, not clamped), `ratio` (the response's, on each of its tokens, where the loss
    has one), and the bool tensors `clipped_low`, `clipped_high` (the loss took the bound, by
    negative and positive advantage) and `dual_clipped`. Raises ValueError for an unknown name, a
    shape mismatch, a missing row index or a missing or mistyped selection.
    """
    if name not in POLICY_LOSSES:
        raise ValueError(f"unknown policy loss {name!r}; choose one of {sorted(POLICY_LOSSES)}")
    terms = clean_terms(
        logprobs,
        anchor_logprobs=anchor_logprobs,
        behavior_logprobs=behavior_logprobs,
        advantages=advantages,
        loss_mask=loss_mask,
        staleness=staleness,
        clip=clip,
        row_index=row_index,
        selection=selection,
        options=options,
    )
    _check_needs(name, terms)
    loss, found = POLICY_LOSSES[name](terms)
    if weights is not None:
        _check_shapes(logprobs, {"weights": weights})
        loss = loss * torch.where(terms.valid, weights.detach().to(loss.dtype), 0)
    nothing = torch.zeros_like(terms.valid)
    diagnostics = {
        "log_ratio": terms.difference,
        "ratio": torch.where(terms.valid, found.get("ratio", terms.log_ratio.detach().exp()), 1),
        **{key: found.get(key, nothing) for key in ("clipped_low", "clipped_high", "dual_clipped")},
    }
    return torch.where(terms.valid, loss, 0), {
        key: tensor.detach() for key, tensor in diagnostics.items()
    }


def clean_terms(
    logprobs: Tensor,
    *,
    anchor_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    staleness: Tensor,
    clip: Clip,
    row_index: Tensor | None = None,
    selection: Tensor | None = None,
    options: LossOptions = DEFAULT_OPTIONS,
) -> Terms:
    """Check the shapes and replace what masked entries hold; arguments as for `policy_loss`. At
    least float32.

    Raises ValueError for tensors whose shape is not that of `logprobs`.
    """
    optional = {"row_index": row_index, "selection": selection}
    _check_shapes(
        logprobs,
        {
            "anchor_logprobs": anchor_logprobs,
            "behavior_logprobs": behavior_logprobs,
            "advantages": advantages,
            "loss_mask": loss_mask,
            "staleness": staleness,
            **{key: tensor for key, tensor in optional.items() if tensor is not None},
        },
    )
    valid = loss_mask != 0
    dtype = torch.promote_types(logprobs.dtype, torch.float32)

    def clean(tensor: Tensor) -> Tensor:
        return torch.where(valid, tensor.to(dtype), 0)

    if selection is not None and selection.dtype != torch.bool:
        selection = clean(selection.detach())
    current, anchor = clean(logprobs), clean(anchor_logprobs.detach())
    difference = current - anchor
    low, high = clip_widths(clean(staleness.detach()), clip)
    return Terms(
        current=current,
        anchor=anchor,
        behavior=clean(behavior_logprobs.detach()),
        difference=difference,
        log_ratio=difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
        advantages=clean(advantages.detach()),
        low=low,
        high=high,
        valid=valid,
        row_index=row_index,
        selection=selection,
        clip=clip,
        options=options,
    )


def _check_shapes(logprobs: Tensor, others: dict[str, Tensor]) -> None:
    for key, tensor in others.items():
        if tensor.shape != logprobs.shape:
            raise ValueError(
                f"{key} has shape {tuple(tensor.shape)}, logprobs {tuple(logprobs.shape)}; "
                "they must be equal"
            )


def _check_needs(name: str, terms: Terms) -> None:
    """Raise ValueError where the loss lacks its rows or its selection."""
    rows = name in SEQUENCE or (name == "opmd" and terms.options.opmd_level == "sequence")
    if rows and terms.row_index is None and terms.current.dim() != 2:
        raise ValueError(
            f"policy loss {name} needs the rows of tokens of shape "
            f"{tuple(terms.current.shape)}: give row_index, the row of each packed "
            "token (int64), or tensors [B, T]"
        )
    if name in SELECTING:
        kind = "float (the bound T)" if name == "m2po" else "bool (the selected tokens)"
        if terms.selection is None or (terms.selection.dtype == torch.bool) != (name != "m2po"):
            got = "none" if terms.selection is None else "another type"
            raise ValueError(
                f"policy loss {name} needs selection, the {kind} tensor of "
                f"select_tokens({name!r}, ...); got {got}"
            )
