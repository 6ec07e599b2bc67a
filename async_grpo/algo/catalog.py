"""The registers of policy losses, advantage estimators and the like, built-in or a user's.

Runs in: any process (plain Python: settings and replay queue read it). Hides how a function is
found by name. It is registered where it is written, with its traits and the class of its options:
a built-in with `@POLICY_LOSSES.register("name", ...)` in the home module of its kind, a user's with
`@register_policy_loss("name", ...)` and its four sisters. Invariants: a name means one thing,
whatever the order of imports; reading a register imports no torch, since settings are checked
before; constants cannot be made with values outside their ranges.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from inspect import signature
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args, get_type_hints

T = TypeVar("T", bound="Traits")
F = TypeVar("F", bound=Callable[..., Any])

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
    """Name -> traits of one kind of function, and the functions.

    home: the module of the built-in ones, imported when the register is first read.
    """

    def __init__(self, kind: str, traits: type[T], *, home: str = "") -> None:
        self.kind, self._home = kind, home
        self._class = traits
        self._traits: dict[str, T] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._own: set[str] = set()

    @property
    def built_in(self) -> frozenset[str]:
        """The names that no plugin has registered."""
        self._load()
        return frozenset(self._own)

    def __getitem__(self, name: str) -> T:
        self._load()
        return self._traits[name]

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(self._traits)

    def __len__(self) -> int:
        self._load()
        return len(self._traits)

    def _load(self) -> None:
        if self._home:
            importlib.import_module(self._home)

    def options(self, name: str, values: Mapping[str, Any]) -> Any:
        """Build the options of `name` from these values; None where it has none. Raises ValueError
        for an unknown name and a value out of range, TypeError for an option that it does not have.
        """
        options = self.require(name).options
        return None if options is None else options(**values)

    def plugins(self) -> dict[str, T]:
        """Return the traits of what is not built in."""
        return {name: one for name, one in self.items() if name not in self.built_in}

    def where(self, holds: Callable[[T], Any]) -> frozenset[str]:
        """Return the names whose traits hold."""
        return frozenset(name for name, traits in self.items() if holds(traits))

    def require(self, name: str) -> T:
        """Return the traits of `name`. Raises ValueError for an unknown name."""
        if name not in self:
            raise ValueError(f"unknown {self.kind} {name!r}; choose one of {sorted(self)}")
        return self._traits[name]

    def function(self, name: str) -> Callable[..., Any]:
        """Return the function of `name`. Raises ValueError for an unknown name."""
        self.require(name)
        return self._functions[name]

    def declare(self, name: str, **traits: Any) -> None:
        """Enter a built-in one that is no function here."""
        self._traits[name] = self._class(**traits)
        self._own.add(name)

    def register(self, name: str, **traits: Any) -> Callable[[F], F]:
        """Enter the decorated function with these traits; one of the home module is built in.
        Raises ValueError for a name that is taken.
        """
        options = traits.get("options")
        if options is not None and "name" in signature(options).parameters:
            raise ValueError(f"{name!r} cannot have an option `name`: it is what chooses it")

        def enter(function: F) -> F:
            if function.__module__ == self._home:
                self.declare(name, **traits)
            elif name in self.built_in:
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
            self._functions[name] = function
            return function

        return enter


def _origin(thing: Callable[..., Any] | type[Any]) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


ESTIMATORS = Registry("advantage estimator", EstimatorTraits, home="async_grpo.algo.estimators")
POLICY_LOSSES = Registry("policy loss", LossTraits, home="async_grpo.algo.losses")
CLIP_SCHEDULES = Registry("clip schedule", Traits, home="async_grpo.algo.losses")
IMPORTANCE = Registry("importance mode", Traits, home="async_grpo.algo.importance_modes")
REWARD_SHAPINGS = Registry("reward shaping", Traits)
GROUP_FILTERS = Registry("group filter", Traits)
KINDS: dict[str, Registry[Any]] = {
    "estimator": ESTIMATORS,
    "policy_loss": POLICY_LOSSES,
    "importance": IMPORTANCE,
    "reward_shaping": REWARD_SHAPINGS,
    "group_filter": GROUP_FILTERS,
}
"""What a plugin may register."""


def register_estimator(name: str, **traits: Any) -> Callable[[F], F]:
    """Register `(rewards [B] float64, Groups, Options) -> advantages [B]`; `traits` as in
    EstimatorTraits. Raises ValueError for traits that only a built-in can have.
    """
    _refuse(name, traits, "returns", "baseline", "shift", "scale")
    return ESTIMATORS.register(name, **traits)


def register_policy_loss(name: str, **traits: Any) -> Callable[[F], F]:
    """Register `(Terms) -> (loss per token, diagnostics)`; `traits` as in LossTraits. Raises
    ValueError for a trait that only a built-in can have.
    """
    _refuse(name, traits, "selects")
    return POLICY_LOSSES.register(name, **traits)


def register_importance(name: str, *, options: type[Any] | None = None) -> Callable[[F], F]:
    """Register `(Ratios) -> weights`, an `algorithm.importance.mode`."""
    return IMPORTANCE.register(name, options=options)


def register_reward_shaping(name: str, *, options: type[Any] | None = None) -> Callable[[F], F]:
    """Register `(reward, ShapedResponse, options) -> reward`, of plain numbers."""
    return REWARD_SHAPINGS.register(name, options=options)


def register_group_filter(name: str, *, options: type[Any] | None = None) -> Callable[[F], F]:
    """Register `(GroupFacts, options) -> why the group is rejected, or None`, of plain numbers."""
    return GROUP_FILTERS.register(name, options=options)


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
