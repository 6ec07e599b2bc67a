"""Which settings a resumed run may change, and what another value means.

Runs in: the driver (imports pydantic only, through the schema). Hides where marks come from: a key
has its own, or that of the nearest section around it. Invariants: every key has a mark; `run.dir`
is never compared, since a run may be moved; a key that one side does not know counts as unchanged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from async_grpo.config.choice import Chosen, OneOf
from async_grpo.config.docs import settings, show
from async_grpo.config.frozen import FrozenModel
from async_grpo.config.schema import Config
from async_grpo.config.section import Mark, Section, fixed
from async_grpo.config.stored import digested, renewed

_SINCE = (
    "rollout.min_p",
    "replay.order",
    "algorithm.calculate_entropy",
    "algorithm.distill.teacher",
    "algorithm.distill.coef",
    "algorithm.distill.reward_coef",
    "algorithm.distill.teacher_top_k",
    "algorithm.distill.teacher_prompt",
    "algorithm.sft_loss_coef",
    "algorithm.sft_model",
    "learner.kernels",
    "learner.routing_replay",
    "learner.sequence_parallel",
    "task.judges",
    "tasks",
)
"""Settings that digests count since there were digests: at their default they are left out."""
_LENGTH = frozenset({"run.total_steps", "run.epochs"})
"""They reach the weights only through a learning rate that falls to an end."""
_FALLS = frozenset({"linear", "cosine"})
_SLICED = fixed(
    "with `learner.zero_stage` 3 every rank reads the slices that a rank of the same number wrote"
)
_NEVER = frozenset({"run.dir"})
_TOKENS = "tokens_per_micro_batch"
_ABSENT = object()
_SHOWN = 5


@dataclass(frozen=True)
class Change:
    """Another value of one key: there (saved) and here (given)."""

    key: str
    saved: Any
    given: Any
    mark: Mark
    trains: bool

    def __str__(self) -> str:
        return f"{self.key}: {show(self.saved)} -> {show(self.given)}"


@dataclass(frozen=True)
class Changes:
    """What differs from saved settings; `unknown`, `missing`: keys of one program version only."""

    all: list[Change] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def fixed(self) -> list[Change]:
        """What a resumed run cannot change."""
        return [change for change in self.all if change.mark.level == "fixed"]

    @property
    def warned(self) -> list[Change]:
        """What it may change, and is told."""
        return [change for change in self.all if change.mark.level == "warn"]

    def refusal(self, checkpoint: Path) -> str:
        """One line on the fixed keys; empty if none was changed."""
        if not self.fixed:
            return ""
        first, more = self.fixed[0], [change.key for change in self.fixed[1:]]
        rest = f"{', '.join(more[:_SHOWN])}{' and others' if len(more) > _SHOWN else ''}"
        others = f" The same holds for {rest}." if more else ""
        return (
            f"`{first.key}` is {show(first.given)}, but {checkpoint} was made with "
            f"{show(first.saved)} and cannot continue with another: {first.mark.reason}. Set it "
            f"back, or start anew with another run.dir.{others}"
        )

    def lines(self) -> Iterator[str]:
        """Return what to print when a run resumes."""
        for change in self.warned:
            yield f"resumed with another {change} ({change.mark.reason})"
        for names, what in (
            (self.unknown, "has settings that do not exist any more"),
            (self.missing, "does not know the settings"),
        ):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                yield (
                    f"the checkpoint is of another version: it {what} "
                    f"{', '.join(names[:_SHOWN])}{more} (taken as unchanged)"
                )


@cache
def marks() -> dict[str, Mark]:
    """Return the mark of every key and nullable section by name. Raises ValueError for one
    without.
    """
    found: dict[str, Mark] = {}
    _collect(Config, "", None, found)
    return found


def compare(saved: Mapping[str, Any], config: Config) -> Changes:
    """Compare `config` with settings saved as `model_dump(mode="json")`, in schema order."""
    saved, given = renewed(saved), config.model_dump(mode="json")
    changes, known = Changes(), settings()
    for name, mark in marks().items():
        there, here = _at(saved, known[name].path), _at(given, known[name].path)
        if here is not _ABSENT and there is _ABSENT:
            if _at(saved, known[name].path[:-1]) is not None:
                changes.missing.append(name)
            continue
        if kind := known[name].kind:
            there = _complete(kind, there)
        if name == "frozen" and isinstance(there, Mapping):  # keys that it does not know yet
            defaults = FrozenModel().model_dump(mode="json")
            there = {
                key: defaults | dict(one) if isinstance(one, Mapping) else one
                for key, one in there.items()
            }
        if here is _ABSENT or name in _NEVER or there == here:
            continue
        if known[name].section and there is not None and here is not None:
            continue  # its keys are compared
        trains = mark.trains and (name not in _LENGTH or config.learner.schedule in _FALLS)
        if name == "learner.ranks" and config.learner.zero_stage == 3:
            mark = _SLICED
        changes.all.append(Change(name, there, here, mark, trains))
    changes.unknown.extend(_unknown(saved, ()))
    return changes


def keep_chosen(config: Config, saved: Mapping[str, Any], *keys: str) -> Config:
    """Give the `keys` of `learner` that are `auto` the values that saved settings have: what a
    start before chose.
    """
    learner = config.learner
    found = {key: _at(saved, ("learner", key)) for key in keys if getattr(learner, key) == "auto"}
    known = {key: value for key, value in found.items() if value not in (_ABSENT, "auto")}
    if known.get(_TOKENS, config.longest_share) < config.longest_share:
        del known[_TOKENS]  # of shorter sequences; what is chosen anew is told as a change
    return config.unchecked_copy(update={"learner": learner.unchecked_copy(update=known)})


def training_digest(config: Config) -> str:
    """Digest of every setting that decides which weights the learner makes of recorded groups."""
    values, known = config.model_dump(mode="json"), settings()
    endless = config.learner.schedule not in _FALLS
    parts = {
        name: _at(values, known[name].path)
        for name, mark in marks().items()
        if mark.trains and not (endless and name in _LENGTH)
    }
    for name in _SINCE:
        if parts[name] == known[name].default:
            del parts[name]
    plain = {
        name: value is not None if known[name].section else value
        for name, value in parts.items()
        if value is not _ABSENT and not known[name].kind
    }
    plain |= digested(values)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _complete(kind: str, saved: Any) -> Any:
    """Return a saved choice, or list of choices, with the options that it had by default."""
    one = OneOf(kind)
    return [one.written(each) for each in saved] if isinstance(saved, list) else one.written(saved)


def _collect(
    section: type[Section], prefix: str, around: Mark | None, found: dict[str, Mark]
) -> None:
    for key, info in section.model_fields.items():
        name, inner = f"{prefix}{key}", _section(info.annotation)
        mark = next(
            (part for part in info.metadata if isinstance(part, Mark)), section.on_resume or around
        )
        if inner is None or info.default is None:
            if mark is None:
                raise ValueError(
                    f"`{name}` has no mark for resume; give it, or its section, one "
                    "(async_grpo.config.section.Mark)"
                )
            found[name] = mark
        if inner is not None:
            _collect(inner, f"{name}.", mark, found)


def _section(annotation: Any) -> type[Section] | None:
    """Return the section class that an annotation (`X` or `X | None`) names, if any; a list or a
    mapping of sections and a choice are values.
    """
    if get_origin(annotation) in (list, dict):
        return None
    options = [
        option
        for option in (annotation, *get_args(annotation))
        if isinstance(option, type) and issubclass(option, Section) and option is not Chosen
    ]
    return options[0] if options else None


def _at(values: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        values = values.get(key, _ABSENT) if isinstance(values, Mapping) else _ABSENT
    return values


def _unknown(values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Names in `values` that are no settings; what lies inside a free-form mapping is its value."""
    for key, value in values.items():
        name = ".".join((*path, key))
        if name not in settings():
            yield name
        elif settings()[name].section and isinstance(value, Mapping):
            yield from _unknown(value, (*path, key))
