"""Policy losses by name: one call for every loss, per token.

Runs in: learner ranks. Hides the numerics of importance ratios, the clip interval of a token by its
lag, and which loss needs what (rows, a selection): its traits stand with its formula.

Invariants: inputs are cleaned before any arithmetic, because masking a result does not stop 0 * inf
in the backward pass: masked entries may hold anything (NaN and infinity included) and give loss and
gradient exactly 0. What goes into `exp` is clamped to [-20, 20], never what comes out. The clip
interval never widens with the lag, and a ratio exactly on a bound keeps its whole gradient. Only
`logprobs` receives gradient; every loss returns the same diagnostics. Losses are minimised;
aggregation over tokens is another module's.

Names below: x = current - anchor log-prob, r = exp(x), A advantage, sg = without gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from async_grpo.algo.catalog import CLIP_SCHEDULES, POLICY_LOSSES, Constants, choice, number
from async_grpo.algo.late import torch
from async_grpo.algo.rows import check_shapes, row_means, row_sums

if TYPE_CHECKING:
    from torch import Tensor

    LossAndDiagnostics = tuple[Tensor, dict[str, Tensor]]
    """Loss per token, and the diagnostics in which this loss differs from r and from "nothing
    clipped".
    """

MAX_LOG_RATIO = 20.0
M2PO_OPEN = 1e5
"""Upper bound of the ratio where M2PO does not clip."""


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
        highest = 1 if self.kind == "exponential" else math.inf
        if not 0 <= self.rate <= highest or not 0 <= self.floor <= 1:
            raise ValueError(
                f"clip schedule {self.kind} with rate {self.rate} and floor {self.floor}; the "
                "rate must be at least 0 (exponential: at most 1) and the floor between 0 and 1, "
                "so that the interval never widens with staleness"
            )
        dual = 2.0 if self.dual is None else self.dual
        if not (0 <= self.low <= 1 and 0 <= self.high < math.inf and 1 < dual < math.inf):
            raise ValueError(
                f"clip widths {self.low} and {self.high} with a dual clip {self.dual}; the lower "
                "width must be between 0 and 1, the upper one finite and at least 0, and the dual "
                "clip finite and above 1"
            )


# A schedule is (lag, rate) -> factor in (0, 1], 1 at lag 0, not increasing.


@CLIP_SCHEDULES.register("constant")
def _constant(lag: Tensor, rate: float) -> Tensor:
    """1."""
    return torch.ones_like(lag)


@dataclass(frozen=True)
class Narrowing(Constants):
    """Constants of the clip schedule `harmonic`."""

    rate: float = number(1.0, "Rate by which the clip interval narrows with staleness.", ge=0)
    floor: float = number(0.0, "Smallest factor that the schedule may reach.", ge=0, le=1)


@CLIP_SCHEDULES.register("harmonic", options=Narrowing)
def _harmonic(lag: Tensor, rate: float) -> Tensor:
    """1 / (1 + rate k)."""
    return 1 / (1 + rate * lag)


@dataclass(frozen=True)
class Decay(Constants):
    """Constants of the clip schedule `exponential`."""

    rate: float = number(1.0, "Factor of the clip interval per step of staleness.", ge=0, le=1)
    floor: float = number(0.0, "Smallest factor that the schedule may reach.", ge=0, le=1)


@CLIP_SCHEDULES.register("exponential", options=Decay)
def _exponential(lag: Tensor, rate: float) -> Tensor:
    """rate^k."""
    return torch.pow(rate, lag)


DIAGNOSTICS = ("ratio", "clipped_low", "clipped_high", "dual_clipped")
"""What metrics of their own are made of; other names of a loss become `train/loss/NAME`."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Inputs of every loss, all [B, T] or [N]. Masked: difference, advantage, staleness are 0."""

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
    """Widths of the clip interval by the token's staleness."""
    high: Tensor
    staleness: Tensor
    """In learner steps."""
    valid: Tensor
    row_index: Tensor | None
    selection: Tensor | None
    clip: Clip
    options: Any
    """The constants of the loss (`Sapo` and so on, or a plugin's), None without."""

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Lower and upper bound of the ratio, by the token's staleness."""
        return 1 - self.low, 1 + self.high

    def row_mean(self, values: Tensor) -> Tensor:
        """Return the mean over the valid tokens of its response, on every token."""
        return row_means(values, self.valid, self.row_index)

    def row_sum(self, values: Tensor) -> Tensor:
        """Return the sum over its response on every token; masked entries must hold 0."""
        return row_sums(values, self.row_index)

    def selected(self) -> Tensor:
        """Return `selection`, for a loss with the trait `selects`. Raises ValueError without
        one.
        """
        if self.selection is None:
            raise ValueError("this loss needs selection, the tensor of select_tokens")
        return self.selection


def clip_widths(staleness: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """Widths of the clip interval below and above ratio 1, for tokens with lag `staleness`; shapes
    and types as in `clip_bounds`.
    """
    lag = staleness if staleness.is_floating_point() else staleness.to(torch.get_default_dtype())
    factor = CLIP_SCHEDULES.function(clip.kind)(lag.clamp(min=0), clip.rate).clamp(min=clip.floor)
    return clip.low * factor, clip.high * factor


def clip_bounds(staleness: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """Lower and upper bound of the ratio for tokens with lag `staleness` (any shape, in learner
    steps; below 0 counts as 0), in its type if that is a float, else the default float type.
    """
    low, high = clip_widths(staleness, clip)
    return 1 - low, 1 + high


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), with what goes into `exp` clamped to [-20, 20]."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_sides(
    ratio: Tensor, advantages: Tensor, lower: Tensor, upper: Tensor
) -> tuple[Tensor, Tensor]:
    """Where PPO takes a bound: (negative advantage below `lower`, positive above `upper`), bool."""
    return (advantages < 0) & (ratio < lower), (advantages > 0) & (ratio > upper)


def _clipped(
    ratio: Tensor, advantages: Tensor, bounds: tuple[Tensor, Tensor], dual: float | None = None
) -> LossAndDiagnostics:
    """-min(ratio A, clip(ratio) A), written as a choice of the ratio: `minimum` would halve the
    gradient of a ratio on a bound, which matters for an interval that has shrunk to the point 1.
    `dual` c: the loss is at most -c A where A < 0.
    """
    lower, upper = bounds
    clipped_low, clipped_high = clipped_sides(ratio, advantages, lower, upper)
    loss = -advantages * torch.where(clipped_low, lower, torch.where(clipped_high, upper, ratio))
    diagnostics = {"ratio": ratio, "clipped_low": clipped_low, "clipped_high": clipped_high}
    if dual is not None:
        bound = -dual * advantages
        diagnostics["dual_clipped"] = (advantages < 0) & (loss > bound)
        loss = torch.where(diagnostics["dual_clipped"], bound, loss)
    return loss, diagnostics


@POLICY_LOSSES.register("ppo_clip", clipped=True, dual_clip=True)
def ppo_clip(terms: Terms) -> LossAndDiagnostics:
    """l = -min(r A, clip(r) A) (arXiv 1707.06347); dual: l <= -c A if A < 0 (arXiv 1912.09729)."""
    return _clipped(terms.log_ratio.exp(), terms.advantages, terms.bounds(), terms.clip.dual)


@POLICY_LOSSES.register(
    "gspo",
    clipped=True,
    rows=True,
    response_ratio=True,
    by_length=True,
    one_advantage=True,
    widths="3e-4 and 4e-4",
)
def gspo(terms: Terms) -> LossAndDiagnostics:
    """l = -min(s A, clip(s) A), s = exp(mean of x over the response) (arXiv 2507.18071)."""
    ratio = bounded_exp(terms.row_mean(terms.difference))
    return _clipped(ratio, terms.advantages, terms.bounds())


@POLICY_LOSSES.register(
    "gspo_token",
    clipped=True,
    rows=True,
    response_ratio=True,
    by_length=True,
    widths="3e-4 and 4e-4",
)
def gspo_token(terms: Terms) -> LossAndDiagnostics:
    """GSPO with an advantage per token: the ratio is sg(s) exp(current - sg(current))."""
    log_ratio = terms.row_mean(terms.difference.detach()) + (terms.current - terms.current.detach())
    return _clipped(bounded_exp(log_ratio), terms.advantages, terms.bounds())


@POLICY_LOSSES.register("cispo", clipped=True, widths="1.0 (open at staleness 0) and 4.0")
def cispo(terms: Terms) -> LossAndDiagnostics:
    """l = -sg(clip(r)) A current: the clip bounds the weight, whatever the sign of A (`clipped_low`
    and `clipped_high` say where), and every token keeps gradient (arXiv 2506.13585).
    """
    ratio, (lower, upper) = terms.log_ratio.detach().exp(), terms.bounds()
    loss = -ratio.clamp(lower, upper) * terms.advantages * terms.current
    return loss, {"clipped_low": ratio < lower, "clipped_high": ratio > upper}


@dataclass(frozen=True)
class Sapo(Constants):
    """Constants of the loss `sapo`."""

    tau_pos: float = number(1.0, "Temperature of the soft gate for positive advantages.", gt=0)
    tau_neg: float = number(1.05, "Temperature of the soft gate for negative advantages.", gt=0)


@POLICY_LOSSES.register("sapo", options=Sapo)
def sapo(terms: Terms) -> LossAndDiagnostics:
    """l = -f(r) A, f(r) = 4 / tau sigmoid(tau (r - 1)), tau by the sign of A (arXiv 2511.20347)."""
    pos, neg = terms.options.tau_pos, terms.options.tau_neg
    tau = torch.full_like(terms.advantages, neg).masked_fill(terms.advantages > 0, pos)
    return -4 / tau * torch.sigmoid(tau * (terms.log_ratio.exp() - 1)) * terms.advantages, {}


@POLICY_LOSSES.register(
    "gmpo",
    clipped=True,
    rows=True,
    response_ratio=True,
    one_advantage=True,
    widths="0.4 and 0.4, of the log ratio",
)
def gmpo(terms: Terms) -> LossAndDiagnostics:
    """l = -A exp(mean of clipped x over the response) on every token (arXiv 2507.20673).

    x is clipped on one side and in log space: min(x, high) where A > 0, max(x, -low) where A < 0.
    """
    x, advantages = terms.difference, terms.advantages
    low, high = clipped_sides(x, advantages, -terms.low, terms.high)
    clipped = torch.where(low, -terms.low, torch.where(high, terms.high, x))
    ratio = bounded_exp(terms.row_mean(clipped))
    return -advantages * ratio, {"ratio": ratio, "clipped_low": low, "clipped_high": high}


@POLICY_LOSSES.register(
    "asymre",
    ratio_free=True,
    estimators=("asymre",),
    reason="the loss has no ratio and needs the shifted baseline",
)
@POLICY_LOSSES.register("reinforce", ratio_free=True, weighed=True)
@POLICY_LOSSES.register("gpg", ratio_free=True)
def policy_gradient(terms: Terms) -> LossAndDiagnostics:
    """l = -A current: GPG (arXiv 2504.02546), REINFORCE (a correction comes as weights), asymmetric
    REINFORCE (arXiv 2506.20520).
    """
    return -terms.advantages * terms.current, {}


@dataclass(frozen=True)
class ClipCov(Constants):
    """Constants of the loss `clip_cov`."""

    ratio: float = number(
        2e-4,
        "Share of the tokens of an update whose loss is set to 0, drawn by hash from those with a "
        "covariance between the bounds.",
        gt=0,
        le=1,
    )
    lower: float = number(1.0, "Lower bound of the covariance.")
    upper: float = number(5.0, "Upper bound of the covariance.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lower >= self.upper:
            raise ValueError(f"`lower` is {self.lower:g}; it must be below `upper`, {self.upper:g}")


@POLICY_LOSSES.register("clip_cov", clipped=True, selects="tokens", options=ClipCov)
def clip_cov(terms: Terms) -> LossAndDiagnostics:
    """PPO's loss, 0 on the selected tokens (arXiv 2505.22617)."""
    loss, diagnostics = _clipped(terms.log_ratio.exp(), terms.advantages, terms.bounds())
    return torch.where(terms.selected(), 0, loss), diagnostics


@dataclass(frozen=True)
class KlCov(Constants):
    """Constants of the loss `kl_cov`."""

    ratio: float = number(
        2e-4,
        "Share of the tokens of an update with the largest covariance, which get the penalty.",
        gt=0,
        le=1,
    )
    coef: float = number(0.1, "Weight of |log ratio| on those tokens.", ge=0)


@POLICY_LOSSES.register("kl_cov", selects="tokens", options=KlCov)
def kl_cov(terms: Terms) -> LossAndDiagnostics:
    """l = -r A, plus coef |x| on the selected tokens (arXiv 2505.22617). No clamp on |x|: a penalty
    must not let go of far tokens.
    """
    penalty = torch.where(terms.selected(), terms.options.coef * terms.difference.abs(), 0)
    return -terms.log_ratio.exp() * terms.advantages + penalty, {}


@dataclass(frozen=True)
class M2po(Constants):
    """Constants of the loss `m2po`."""

    budget: float = number(
        0.04,
        "Largest mean squared log ratio of the tokens that move away from the proximal policy; "
        "above it the clip interval narrows.",
        gt=0,
    )


@POLICY_LOSSES.register(
    "m2po",
    clipped=True,
    dual_clip=True,
    selects="bound",
    sampler_anchor=True,
    widths="0.3 and 0.5, at least",
    options=M2po,
)
def m2po(terms: Terms) -> LossAndDiagnostics:
    """PPO's loss with the interval widened to at least [exp(-T), exp(T)], T from the selection
    (arXiv 2510.01161). An infinite T gives [0, 1e5], as the authors have it.
    """
    bound = terms.selected()
    lower, upper = terms.bounds()
    lower = torch.minimum(lower, (-bound).exp())
    upper = torch.maximum(upper, torch.where(bound.isinf(), M2PO_OPEN, bound.exp()))
    return _clipped(terms.log_ratio.exp(), terms.advantages, (lower, upper), terms.clip.dual)


@dataclass(frozen=True)
class Dppo(Constants):
    """Constants of the loss `dppo`."""

    divergence: Literal["tv", "kl"] = choice(
        "tv",
        "Divergence between the probabilities of a token: total variation, or KL, of the two-way "
        "choice 'this token or another'.",
    )
    low: float = number(
        0.2,
        "Tokens with a negative advantage are dropped when their probability has fallen by more "
        "than this divergence.",
        ge=0,
    )
    high: float = number(
        0.2,
        "Tokens with a positive advantage are dropped when their probability has risen by more "
        "than this divergence.",
        ge=0,
    )
    ratio_cap: float | None = number(
        None,
        "Null: the kept tokens' loss is -ratio x advantage; a number: -min(ratio, cap) x "
        "advantage x log-prob with a detached ratio.",
        gt=0,
    )


@POLICY_LOSSES.register("dppo", options=Dppo)
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
    distance = moved.abs() if options.divergence == "tv" else _binary_kl(then, now)
    high = (advantages > 0) & (moved > 0) & (distance > options.high)
    low = (advantages < 0) & (moved < 0) & (distance > options.low)
    if options.ratio_cap is None:
        loss = -ratio * advantages
    else:
        loss = -ratio.detach().clamp(max=options.ratio_cap) * advantages * terms.current
    return torch.where(low | high, 0, loss), {"clipped_low": low, "clipped_high": high}


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """p log(p / q) + (1 - p) log((1 - p) / (1 - q)) from log-probs <= 0; finite at p or q = 1."""
    tiny = torch.finfo(log_p.dtype).tiny
    log_not_p, log_not_q = (
        torch.log(-torch.expm1(value.clamp(max=-tiny))) for value in (log_p, log_q)
    )
    return log_p.exp() * (log_p - log_q) - torch.expm1(log_p) * (log_not_p - log_not_q)


@dataclass(frozen=True)
class Opmd(Constants):
    """Constants of the loss `opmd`."""

    tau: float = number(0.1, "Weight of the squared log ratio to the sampling policy.", gt=0)
    level: Literal["token", "sequence"] = choice(
        "token",
        "Square the log ratio of each token, or of the whole response (the paper; use it with a "
        "`seq-mean-token-sum` aggregation).",
    )


@POLICY_LOSSES.register(
    "opmd",
    ratio_free=True,
    estimators=("rloo", "grpo", "grpo_vectorized", "dr_grpo"),
    reason="it needs R - mean, not whitened",
    options=Opmd,
)
def opmd(terms: Terms) -> LossAndDiagnostics:
    """l = -A current + tau / 2 d^2, d = current - behavior (arXiv 2501.12599 eq. 3, without its
    division by tau). Level "sequence": d is the response's sum, and each of its L tokens holds d^2
    / L, which add up to the paper's term. No clamp on d: a penalty must not let go of far tokens.
    """
    squared = (terms.current - terms.behavior).square()
    if terms.options.level == "sequence":
        total = terms.row_sum(terms.current - terms.behavior)
        squared = total.square() / terms.row_sum(terms.valid.to(total.dtype)).clamp(min=1)
    return -terms.advantages * terms.current + terms.options.tau / 2 * squared, {}


@POLICY_LOSSES.register(
    "topr",
    ratio_free=True,
    rows=True,
    estimators=("raw", "grpo", "grpo_vectorized", "dr_grpo", "rloo"),
    reason="it splits responses by the sign of the advantage",
)
def topr(terms: Terms) -> LossAndDiagnostics:
    """l = -A current where A >= 0, else -sg(min(S, 1)) A current, S = exp(sum of current - behavior
    over the response), the diagnostic `ratio` (arXiv 2503.14286).
    """
    ratio = bounded_exp(terms.row_sum((terms.current - terms.behavior).detach()))
    weight = torch.where(terms.advantages < 0, ratio.clamp(max=1), 1)
    return -weight * terms.advantages * terms.current, {"ratio": ratio}


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
    options: Any = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss per token, to be minimised, and detached diagnostics; every tensor is [B, T], or every
    one is packed [N].

    `logprobs` are the current policy's, with gradient; `anchor_logprobs` the trust region's centre;
    `behavior_logprobs` the sampler's (equal to the anchor when that is the behaviour policy);
    `advantages` one per token; `staleness` per token in learner steps; `weights` multiply the
    whole loss of a token, without gradient. `row_index` int64, the row of each packed token, is
    needed by losses with the trait `rows` and by `opmd` at level "sequence". `selection` comes from
    `select_tokens` and is needed by losses with the trait `selects`: bool tokens, or a float bound.
    `options` are the constants of the loss; None is their defaults. Where `loss_mask` is 0 the loss
    and its gradient are exactly 0; elsewhere a log-prob that is not finite makes the loss NaN.
    Diagnostics: what a loss returns under other names, as `loss/NAME`; `log_ratio` (current -
    anchor, not clamped),
    `ratio` (the response's, on each of its tokens, where the loss has one), and the bool tensors
    `clipped_low`, `clipped_high` (the loss took the bound, by negative and positive advantage) and
    `dual_clipped`. Raises ValueError for an unknown name, a shape mismatch, a missing row index or
    a missing or mistyped selection.
    """
    function = POLICY_LOSSES.function(name)
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
        options=loss_options(name, options),
    )
    _check_needs(name, terms)
    loss, found = function(terms)
    if weights is not None:
        check_shapes(logprobs, weights=weights)
        loss = loss * torch.where(terms.valid, weights.detach().to(loss.dtype), 0)
    loss = loss + 0 * terms.difference.detach()  # what clips an infinite ratio must not hide it
    nothing = torch.zeros_like(terms.valid)
    custom = {f"loss/{key}": value for key, value in found.items() if key not in DIAGNOSTICS}
    for key, value in custom.items():
        a_tensor = isinstance(value, torch.Tensor)
        if not a_tensor or value.shape != logprobs.shape:
            what = f"a tensor {list(value.shape)}" if a_tensor else repr(value)
            raise ValueError(
                f"policy loss {name} returns {what} as diagnostic {key.removeprefix('loss/')}: it "
                f"needs a value per token, a tensor {list(logprobs.shape)}"
            )
    diagnostics = {
        "log_ratio": terms.difference,
        "ratio": torch.where(terms.valid, found.get("ratio", terms.log_ratio.detach().exp()), 1),
        **{key: found.get(key, nothing) for key in DIAGNOSTICS[1:]},
        **custom,
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
    options: Any = None,
) -> Terms:
    """Check shapes and replace what masked entries hold, in float32 or better; arguments as for
    `policy_loss`. Raises ValueError for tensors whose shape is not that of `logprobs`.
    """
    check_shapes(
        logprobs,
        anchor_logprobs=anchor_logprobs,
        behavior_logprobs=behavior_logprobs,
        advantages=advantages,
        loss_mask=loss_mask,
        staleness=staleness,
        row_index=row_index,
        selection=selection,
    )
    valid = loss_mask != 0
    dtype = torch.promote_types(logprobs.dtype, torch.float32)

    def clean(tensor: Tensor) -> Tensor:
        return torch.where(valid, tensor.to(dtype), 0)

    if selection is not None and selection.dtype != torch.bool:
        selection = clean(selection.detach())
    current, anchor = clean(logprobs), clean(anchor_logprobs.detach())
    difference = current - anchor
    staleness = clean(staleness.detach())
    low, high = clip_widths(staleness, clip)
    return Terms(
        current=current,
        anchor=anchor,
        behavior=clean(behavior_logprobs.detach()),
        difference=difference,
        log_ratio=difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
        advantages=clean(advantages.detach()),
        low=low,
        high=high,
        staleness=staleness,
        valid=valid,
        row_index=row_index,
        selection=selection,
        clip=clip,
        options=options,
    )


def loss_options(name: str, options: Any) -> Any:
    """Return the given constants of a loss, or its defaults. Raises ValueError for another
    loss's.
    """
    wanted = POLICY_LOSSES.require(name).options
    if options is None:
        return None if wanted is None else wanted()
    if wanted is None or not isinstance(options, wanted):
        raise ValueError(
            f"policy loss {name} takes {'no options' if wanted is None else wanted.__name__}, not "
            f"{type(options).__name__}"
        )
    return options


def _check_needs(name: str, terms: Terms) -> None:
    """Raise ValueError where the loss lacks its rows or its selection."""
    traits = POLICY_LOSSES[name]
    rows = traits.rows or (name == "opmd" and terms.options.level == "sequence")
    if rows and terms.row_index is None and terms.current.dim() != 2:
        raise ValueError(
            f"policy loss {name} needs the sequence index of tokens of shape "
            f"{tuple(terms.current.shape)}: give row_index, the sequence of each packed token "
            "(int64), or tensors [B, T]"
        )
    bound, given = traits.selects == "bound", terms.selection
    if traits.selects and (given is None or (given.dtype == torch.bool) == bound):
        kind = "float (the bound T)" if bound else "bool (the selected tokens)"
        raise ValueError(
            f"policy loss {name} needs selection, the {kind} tensor of select_tokens({name!r}, "
            f"...); got {'none' if given is None else 'another type'}"
        )
