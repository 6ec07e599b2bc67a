"""What shows that a setting of the configuration is connected: tables of wires, and the mutant that
disconnects one.

A wire names a key (a setting, or an option: `algorithm.policy_loss.sapo.tau_pos`), a value and a
probe. The probe drives the product with a loaded configuration
and returns what can be seen from outside; it must see something else with the value than without.
`disconnected` makes the product read the key's default, whatever the configuration says: then the
probe must see what it sees without the value.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args
from unittest import mock

from async_grpo.config.choice import Chosen
from async_grpo.config.docs import options, settings
from async_grpo.config.load import load_config
from async_grpo.config.schema import Config
from async_grpo.config.section import Section
from async_grpo.config.unused import OWNED

Probe = Callable[[Config], Any]
_UNSET = object()
EXEMPT = ("checks", "docs", "load", "resume")
"""Modules of `async_grpo.config` that see what was given: they check, write and compare it."""
BASE = {
    "run.total_steps": 10,
    "rollout.rollout_batch_size": 4,
    "rollout.group_size": 4,
    "rollout.prompt_length": 8,
    "rollout.response_length": 16,
}


@dataclass(frozen=True)
class Wire:
    """`probe` sees `value` of `key`, in a configuration that has the values `given` too.

    against: what it is compared with, instead of the default. same: the probe returns the value
    itself, as it was handed over. unchecked: a value that validation refuses.
    """

    key: str
    value: Any
    probe: Probe
    given: Mapping[str, Any] = field(default_factory=dict)
    against: Any = _UNSET
    same: bool = False
    unchecked: bool = False

    @property
    def without(self) -> dict[str, Any]:
        """The values of the configuration that `value` is compared with."""
        named = {} if self.key not in options() else {self.key: options()[self.key].default}
        return {
            **named,
            **self.given,
            **({} if self.against is _UNSET else {self.key: self.against}),
        }


@dataclass(frozen=True)
class Sight:
    """What a wire's probe saw: with the value, without, and with the key disconnected."""

    wanted: Any
    without: Any
    mutant: Any

    @property
    def killed(self) -> bool:
        """Whether a test of the wire would fail if the setting had no effect."""
        return self.wanted != self.without and self.mutant != self.wanted


@cache
def _model() -> tempfile.TemporaryDirectory:
    from tests.support.models import write_model

    directory = tempfile.TemporaryDirectory(prefix="wiring-")
    write_model(Path(directory.name), hidden=32)
    return directory


def tiny_model() -> str:
    """A small random model; it is removed when the process ends."""
    return _model().name


@cache
def _empty() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="wiring-")


def workplace() -> Path:
    """A new directory of its own; it is removed when the process ends."""
    return Path(tempfile.mkdtemp(dir=_empty().name))


OWNERS = {owned.owner for owned in OWNED}


def load(values: Mapping[str, Any], *, switched: str | None = None) -> Config:
    """The configuration that a user with these keys gets, in a new run directory. switched: the key
    that is given on the command line, with its default if it is not among the values.
    """
    place = workplace()
    made = any(key.startswith(("model.path", "model.warm_start")) for key in values)
    model = {} if made else {"model.path": "some/model"}
    merged = {**BASE, **model, "run.dir": str(place / "run"), **values}
    if merged.get("run.epochs"):
        merged["run.total_steps"] = None
    if merged.get("model.warm_start") is not None:
        merged.pop("model.path", None)
    if switched in OWNERS:
        default = settings()[switched].default
        overrides = [f"{switched}={json.dumps(merged.pop(switched, default))}"]
    else:
        overrides = []
    for key in sorted(merged.keys() & options().keys()):
        setting, name, option = key.rsplit(".", 2)
        mapping = merged[setting] if isinstance(merged.get(setting), dict) else {"name": name}
        merged[setting] = {**mapping, option: merged.pop(key)}
    written: dict[str, Any] = {}
    for key, value in sorted(merged.items()):  # a section before its keys
        node, (*parents, name) = written, key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = dict(value) if isinstance(value, dict) else value
    (place / "config.yaml").write_text(json.dumps(written))
    return load_config(place / "config.yaml", overrides)


_WITHOUT: dict[tuple[Probe, str], Any] = {}
"""What a probe saw without the value; many wires share it."""


def seen_without(wire: Wire) -> Any:
    """What the wire's probe sees without the value, asked once for all wires that share it."""
    values = wire.without
    named = wire.probe, json.dumps([values, wire.key in OWNERS and wire.key], sort_keys=True)
    if named not in _WITHOUT:
        _WITHOUT[named] = wire.probe(load(values, switched=wire.key))
    return _WITHOUT[named]


def see(wire: Wire) -> Sight:
    """Let the probe look with the value, without, and with the key disconnected."""
    wanted, without = wire.probe(_given(wire)), seen_without(wire)
    config = _given(wire)
    with disconnected(wire.key):
        try:
            mutant = wire.probe(config)
        except Exception as error:  # noqa: BLE001 a test would fail here as well
            mutant = repr(error)
    return Sight(wanted, without, mutant)


def _given(wire: Wire) -> Config:
    if not wire.unchecked:
        return load({**wire.given, wire.key: wire.value})
    config = load(wire.given)
    changed: Any = wire.value
    *parents, name = wire.key.split(".")
    for depth in range(len(parents), -1, -1):
        section: Any = config
        for parent in parents[:depth]:
            section = getattr(section, parent)
        changed = section.unchecked_copy(update={name: changed})
        name = parents[depth - 1] if depth else ""
    return changed


@contextmanager
def recorded_waits() -> Iterator[set[int]]:
    """The deadlines that asyncio is given inside the block, in whole seconds."""
    seen: set[int] = set()
    with ExitStack() as stack:
        for name, position in (("timeout", 0), ("wait_for", 1)):
            real = getattr(asyncio, name)

            def recorded(
                *arguments: Any, real: Any = real, at: int = position, **options: Any
            ) -> Any:
                seconds = arguments[at] if len(arguments) > at else options.get("timeout")
                seen.update([] if seconds is None else [math.ceil(seconds)])
                return real(*arguments, **options)

            stack.enter_context(mock.patch.object(asyncio, name, recorded))
        real_wait = asyncio.wait

        async def wait(tasks: Any, *, timeout: float | None = None, **options: Any) -> Any:
            seen.update([] if timeout is None else [math.ceil(timeout)])
            return await real_wait(tasks, timeout=timeout, **options)

        stack.enter_context(mock.patch.object(asyncio, "wait", wait))
        yield seen


@contextmanager
def disconnected(key: str) -> Iterator[None]:
    """The product reads the default of `key`, as an attribute or in a dump of its section; tests,
    validation and the comparison at a resume see the value that was given.
    """
    if key in options():
        with _without_option(key):
            yield
        return
    *parents, name = key.split(".")
    owners: list[type[Any]] = [
        Config,
        *(_section(parents[: depth + 1]) for depth in range(len(parents))),
    ]
    owner = owners[-1]
    default = owner.model_fields[name].get_default(call_default_factory=True)

    def read(section: Section) -> Any:
        return default if _in_product(sys._getframe(1)) else vars(section)[name]

    dumps = {method: getattr(Section, method) for method in ("model_dump", "model_dump_json")}

    def dump(section: Section, **options: Any) -> dict[str, Any]:
        out = dumps["model_dump"](section, **options)
        if _in_product(sys._getframe(1)) and type(section) in owners:
            node = out
            for part in parents[owners.index(type(section)) :]:
                node = node.get(part) if isinstance(node, dict) else None
            if isinstance(node, dict) and name in node:
                node[name] = (
                    default.written()
                    if isinstance(default, Chosen)
                    else default.model_dump()
                    if isinstance(default, Section)
                    else default
                )
        return out

    before = vars(owner).get(name, _UNSET)
    setattr(owner, name, property(read, lambda section, value: vars(section).update({name: value})))
    Section.model_dump = dump
    try:
        yield
    finally:
        delattr(owner, name)
        if before is not _UNSET:
            setattr(owner, name, before)
        del Section.model_dump


@contextmanager
def _without_option(key: str) -> Iterator[None]:
    """The product reads the default of this option."""
    _, name, option = key.rsplit(".", 2)

    def read(choice: Chosen) -> dict[str, Any]:
        values = dict(choice.model_extra or {})
        if choice.name == name and option in values and _in_product(sys._getframe(1)):
            values[option] = options()[key].default
        return values

    with mock.patch.object(Chosen, "values", property(read)):
        yield


def _in_product(frame: Any) -> bool:
    """Whether the code that reads belongs to what the settings are for."""
    module = frame.f_globals.get("__name__", "")
    return module.startswith("async_grpo.") and module not in {
        f"async_grpo.config.{name}" for name in EXEMPT
    }


def _section(path: list[str]) -> type[Any]:
    """The class of the section at this dotted path."""
    found: type[Any] = Config
    for name in path:
        annotation = found.model_fields[name].annotation
        found = next(
            one
            for one in (annotation, *get_args(annotation))
            if isinstance(one, type) and issubclass(one, Section)
        )
    return found


def keys() -> list[str]:
    """Every key of the schema that holds a value, sections that may be null too, and every option
    of what a key may choose.
    """
    found = settings()
    return [
        name for name, setting in found.items() if not setting.section or setting.default is None
    ] + list(options())
