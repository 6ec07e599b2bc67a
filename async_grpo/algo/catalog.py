"""The catalogue of policy losses and advantage estimators with their constants, and the registers
of functions, built-in or a user's.

Runs in: any process (plain Python: settings and replay queue read it). Hides how a plugin's
function is found by name. A function is registered where it is written, with
`@register_policy_loss("name", ...)` and its four sisters; the traits of a built-in stand here,
since settings are checked before torch is imported. Invariants: a name means one thing, whatever
the order of imports; constants cannot be made with values outside their ranges.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args, get_type_hints

T = TypeVar("T", bound="Traits")
F = TypeVar("F", bound=Callable[..., Any])

ASYMRE_SHIFT = -0.1
"""Added to the group mean in the baseline of the estimator `asymre`."""

_BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "gt": ("above", lambda value, bound: value > bound),
    "ge": ("at least", lambda value, bound: value >= bound),
    "le": ("at most", lambda value, bound: value <= bound),
}


def number(default: float | None, meaning: str, **bounds: float) -> Any:
    """Return a constant with its meaning and its range: `gt`, `ge`, `le`."""
    return field(default=default, metadata={"description": meaning, "strict": True, **bounds})


def choice(default: str, meaning: str) -> Any:
    """Return a constant that is one of the words of its `Literal` annotation."""
    return field(default=default, metadata={"description": meaning})


class Constants:
    """Base of the frozen constants of a loss or estimator. Raises ValueError out of range."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the constants."""
        return [one.name for one in fields(cls)]  # type: ignore[arg-type]  # a dataclass

    def __post_init__(self) -> None:
        hints, name = get_type_hints(type(self)), type(self).__name__
        for one in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value, words = vars(self)[one.name], get_args(hints[one.name])
            if isinstance(value, str) and value not in words:
                raise ValueError(f"{name}: {one.name} is {value!r}; choose {' or '.join(words)}")
            if not isinstance(value, float | int):
                continue
            limits = [(_BOUNDS[key], one.metadata[key]) for key in _BOUNDS if key in one.metadata]
            if not math.isfinite(value) or any(not holds(value, at) for (_, holds), at in limits):
                allowed = " and ".join(f"{said} {at}" for (said, _), at in limits)
                raise ValueError(
                    f"{name}: {one.name} is {value}; it must be a finite number {allowed}".rstrip()
                )


@dataclass(frozen=True)
class Sapo(Constants):
    """Constants of the loss `sapo`."""

    tau_pos: float = number(1.0, "Temperature of the soft gate for positive advantages.", gt=0)
    tau_neg: float = number(1.05, "Temperature of the soft gate for negative advantages.", gt=0)


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


@dataclass(frozen=True)
class Opmd(Constants):
    """Constants of the loss `opmd`."""

    tau: float = number(0.1, "Weight of the squared log ratio to the sampling policy.", gt=0)
    level: Literal["token", "sequence"] = choice(
        "token",
        "Square the log ratio of each token, or of the whole response (the paper; use it with a "
        "`seq-mean-token-sum` aggregation).",
    )


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
            raise ValueError(
                f"`algorithm.clip_cov.lower` is {self.lower:g}; it must be below "
                f"`algorithm.clip_cov.upper`, {self.upper:g}."
            )


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


@dataclass(frozen=True)
class M2po(Constants):
    """Constants of the loss `m2po`."""

    budget: float = number(
        0.04,
        "Mean squared log ratio that the tokens which move away from the anchor may have; above "
        "it the clip interval narrows.",
        gt=0,
    )


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What every registered function has: the class of its options, if any."""

    options: type[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class LossTraits(Traits):
    """What a policy loss uses.

    `clipped`: the clip interval. `dual_clip`: also the bound for negative advantages. `widths`: the
    usual widths of an interval on another scale than PPO's, which a configuration must then give.
    `rows`: the row of each token. `response_ratio`: its ratio is that of the whole response, and it
    is a mean over responses; with `by_length` it may also be a sum over their tokens.
    `one_advantage`: all tokens of a response need the same advantage, and the same weight where the
    ratio is the response's. `selects`: a selection over
    the whole update, of tokens or as one bound of the log ratio. `ratio_free`: no trust region
    around the anchor; `weighed`: with importance weights all the same. `sampler_anchor`: the anchor
    must be the policy that sampled. `estimators`: the estimators it goes with (all if empty), and
    `reason` why.
    """

    clipped: bool = False
    dual_clip: bool = False
    widths: str = ""
    rows: bool = False
    response_ratio: bool = False
    by_length: bool = False
    one_advantage: bool = False
    selects: Literal["", "tokens", "bound"] = ""
    ratio_free: bool = False
    weighed: bool = False
    sampler_anchor: bool = False
    estimators: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class EstimatorTraits(Traits):
    """What an advantage estimator computes and needs.

    `compares`: it compares the responses of a group, so that groups of one and groups of equal
    rewards have advantage 0. `whitens`: whitening over all valid tokens is part of the formula.
    `returns`: the advantage comes from the return of each token. `baseline`: it needs the reward of
    the prompt's greedy response. `turns`: rewards stand at the ends of turns, and the baseline is
    that of the group's trajectories. `lengths`: it needs response lengths. `divides`:
    `norm_adv_by_std_in_grpo` means something; `std_levels`: so does `adv_std_level`. `shift`,
    `scale`: what becomes of a number added to all rewards of a group, and of a factor of theirs, at
    gamma 1 and before whitening: it `vanishes` (a factor with `divides` only where the switch is
    on), or the advantages follow, up to a constant (`follows`); empty: neither, or not known.
    `losses`: the losses it goes with (all if empty), and `reason` why.
    """

    compares: bool = True
    whitens: bool = False
    returns: bool = False
    baseline: bool = False
    turns: bool = False
    lengths: bool = False
    divides: bool = False
    std_levels: bool = False
    shift: Literal["", "follows", "vanishes"] = ""
    scale: Literal["", "follows", "vanishes"] = ""
    losses: tuple[str, ...] = ()
    reason: str = ""


class Registry(Mapping[str, T], Generic[T]):
    """Name -> traits of one kind of function, and the functions of the modules imported so far."""

    options: ClassVar[dict[str, type[Any]]] = {}
    """Name -> class of its options, of all kinds."""

    def __init__(self, kind: str, traits: type[T], built_in: Mapping[str, T]) -> None:
        self.kind, self._class = kind, traits
        self.built_in, self._traits = frozenset(built_in), dict(built_in)
        self._functions: dict[str, Callable[..., Any]] = {}

    def __getitem__(self, name: str) -> T:
        return self._traits[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._traits)

    def __len__(self) -> int:
        return len(self._traits)

    def plugins(self) -> dict[str, T]:
        """Return the traits of what is not built in."""
        return {name: one for name, one in self.items() if name not in self.built_in}

    def where(self, holds: Callable[[T], Any]) -> frozenset[str]:
        """Return the names whose traits hold."""
        return frozenset(name for name, traits in self.items() if holds(traits))

    def require(self, name: str) -> T:
        """Return the traits of `name`. Raises ValueError for an unknown name."""
        if name not in self._traits:
            raise ValueError(f"unknown {self.kind} {name!r}; choose one of {sorted(self)}")
        return self._traits[name]

    def function(self, name: str) -> Callable[..., Any]:
        """Return the function of `name`. Raises ValueError for an unknown name."""
        self.require(name)
        return self._functions[name]

    def register(self, name: str, traits: Mapping[str, Any]) -> Callable[[F], F]:
        """Enter the decorated function. Raises ValueError for a name that is taken."""

        def enter(function: F) -> F:
            if name in self.built_in:
                if not function.__module__.startswith("async_grpo.algo."):
                    raise ValueError(
                        f"{self.kind} {name!r} is built in; register yours under another name"
                    )
            else:
                known = self._functions.get(name)
                if known is not None and _origin(known) != _origin(function):
                    raise ValueError(
                        f"{self.kind} {name!r} is registered twice, by {_origin(known)} and "
                        f"{_origin(function)}"
                    )
                self._traits[name] = self._class(**traits)
                _enter_options(name, self._traits[name].options)
            self._functions[name] = function
            return function

        return enter


def _origin(thing: Callable[..., Any] | type[Any]) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def _enter_options(name: str, options: type[Any] | None) -> None:
    known = Registry.options.get(name)
    if options is None:
        return
    if known is not None and _origin(known) != _origin(options):
        raise ValueError(f"{name!r} has the options of {_origin(known)} and of {_origin(options)}")
    Registry.options[name] = options


def make_options(name: str, values: Mapping[str, Any]) -> Any:
    """Return the options of a registered function with these values; None where it has none."""
    return Registry.options[name](**values) if name in Registry.options else None


_COMPARED: dict[str, Any] = {"shift": "vanishes", "scale": "follows"}
"""Differences of rewards."""
_SCORED: dict[str, Any] = {"shift": "vanishes", "scale": "vanishes", "divides": True}
"""Differences of rewards, divided by a deviation."""
_FOLLOWING: dict[str, Any] = {"shift": "follows", "scale": "follows", "compares": False}
"""The rewards themselves."""
_GRPO = EstimatorTraits(std_levels=True, **_SCORED)

ESTIMATORS = Registry(
    "advantage estimator",
    EstimatorTraits,
    {
        "grpo": _GRPO,
        "grpo_vectorized": _GRPO,
        "dr_grpo": EstimatorTraits(divides=True, **_COMPARED),
        "grpo_passk": EstimatorTraits(**_SCORED),
        "rloo": EstimatorTraits(**_COMPARED),
        "reinforce": EstimatorTraits(returns=True, **_FOLLOWING),
        "reinforce_plus_plus": EstimatorTraits(whitens=True, returns=True, **_FOLLOWING),
        "reinforce_plus_plus_baseline": EstimatorTraits(whitens=True, **_COMPARED),
        "remax": EstimatorTraits(compares=False, returns=True, baseline=True, **_COMPARED),
        "turn_grpo": EstimatorTraits(divides=True, returns=True, turns=True),
        "opo": EstimatorTraits(lengths=True, **_COMPARED),
        "gpg": EstimatorTraits(
            losses=("gpg", "reinforce"),
            reason="its factor belongs to a loss without ratio",
            **_COMPARED,
        ),
        "maxrl": EstimatorTraits(scale="vanishes"),
        "raw": EstimatorTraits(**_FOLLOWING),
        "asymre": EstimatorTraits(
            compares=False,
            losses=("asymre",),
            reason="its shifted baseline is meant for a loss without ratio",
            **_COMPARED,
        ),
    },
)
POLICY_LOSSES = Registry(
    "policy loss",
    LossTraits,
    {
        "ppo_clip": LossTraits(clipped=True, dual_clip=True),
        "gspo": LossTraits(
            clipped=True,
            rows=True,
            response_ratio=True,
            by_length=True,
            one_advantage=True,
            widths="3e-4 and 4e-4",
        ),
        "gspo_token": LossTraits(
            clipped=True, rows=True, response_ratio=True, by_length=True, widths="3e-4 and 4e-4"
        ),
        "cispo": LossTraits(clipped=True, widths="1.0 (open at lag 0) and 4.0"),
        "sapo": LossTraits(options=Sapo),
        "gmpo": LossTraits(
            clipped=True,
            rows=True,
            response_ratio=True,
            one_advantage=True,
            widths="0.4 and 0.4, of the log ratio",
        ),
        "gpg": LossTraits(ratio_free=True),
        "reinforce": LossTraits(ratio_free=True, weighed=True),
        "clip_cov": LossTraits(clipped=True, selects="tokens", options=ClipCov),
        "kl_cov": LossTraits(selects="tokens", options=KlCov),
        "m2po": LossTraits(
            clipped=True,
            dual_clip=True,
            selects="bound",
            sampler_anchor=True,
            widths="0.3 and 0.5, at least",
            options=M2po,
        ),
        "dppo": LossTraits(options=Dppo),
        "opmd": LossTraits(
            ratio_free=True,
            estimators=("rloo", "grpo", "grpo_vectorized", "dr_grpo"),
            reason="it needs R - mean, not whitened",
            options=Opmd,
        ),
        "topr": LossTraits(
            ratio_free=True,
            rows=True,
            estimators=("raw", "grpo", "grpo_vectorized", "dr_grpo", "rloo"),
            reason="it splits responses by the sign of the advantage",
        ),
        "asymre": LossTraits(
            ratio_free=True,
            estimators=("asymre",),
            reason="the loss has no ratio and needs the shifted baseline",
        ),
    },
)
IMPORTANCE = Registry("importance mode", Traits, {"truncate": Traits(), "mask": Traits()})
REWARD_SHAPINGS = Registry("reward shaping", Traits, {})
GROUP_FILTERS = Registry("group filter", Traits, {})
KINDS: dict[str, Registry[Any]] = {
    "estimator": ESTIMATORS,
    "policy_loss": POLICY_LOSSES,
    "importance": IMPORTANCE,
    "reward_shaping": REWARD_SHAPINGS,
    "group_filter": GROUP_FILTERS,
}


def register_estimator(name: str, **traits: Any) -> Callable[[F], F]:
    """Register `(rewards [B] float64, Groups, Options) -> advantages [B]`; `traits` as in
    EstimatorTraits. Raises ValueError for traits that only a built-in can have.
    """
    _refuse(name, traits, "returns", "baseline", "shift", "scale")
    return ESTIMATORS.register(name, traits)


def register_policy_loss(name: str, **traits: Any) -> Callable[[F], F]:
    """Register `(Terms) -> (loss per token, diagnostics)`; `traits` as in LossTraits. Raises
    ValueError for a trait that only a built-in can have.
    """
    _refuse(name, traits, "selects")
    return POLICY_LOSSES.register(name, traits)


def register_importance(name: str, *, options: type[Any] | None = None) -> Callable[[F], F]:
    """Register `(Ratios) -> weights`, an `algorithm.importance.mode`."""
    return IMPORTANCE.register(name, {"options": options})


def register_reward_shaping(name: str, *, options: type[Any] | None = None) -> Callable[[F], F]:
    """Register `(reward, ShapedResponse, options) -> reward`, of plain numbers."""
    return REWARD_SHAPINGS.register(name, {"options": options})


def register_group_filter(name: str, *, options: type[Any] | None = None) -> Callable[[F], F]:
    """Register `(GroupFacts, options) -> why the group is rejected, or None`, of plain numbers."""
    return GROUP_FILTERS.register(name, {"options": options})


def _refuse(name: str, traits: Mapping[str, Any], *names: str) -> None:
    for trait in names:
        if traits.get(trait):
            raise ValueError(f"{name!r} cannot have the trait {trait}: only built-in ones have it")


def import_plugins(modules: Iterable[str]) -> None:
    """Import a user's modules, which register what they define. Raises ValueError."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ValueError(f"the plugin module {name} cannot be imported: {error}") from error
