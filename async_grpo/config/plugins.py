"""A user's plugins as the settings see them: their names, traits and typed options.

Runs in: any process that checks a configuration. Hides the child process (`python -m
async_grpo.config.plugins`) that imports the modules: they may import torch, which a driver that
only checks settings must not wait for. Invariants: without plugins nothing is started; every
mistake is a SettingError, before any process of the run starts; a module of `replay.plugins` never
imports torch, since the replay queue imports it.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from async_grpo.algo import catalog
from async_grpo.algo.catalog import EstimatorTraits, LossTraits, Registry
from async_grpo.config.algorithm import SECTIONS
from async_grpo.config.docs import show, words
from async_grpo.config.schema import Config
from async_grpo.runtime.parts import part

TIMEOUT_S = 120.0
OPTIONS = ("algorithm", "options")


class SettingError(ValueError):
    """A value below `path` that is wrong; `str(error)` says so in at most two lines."""

    def __init__(self, path: Iterable[str], text: str) -> None:
        super().__init__(text)
        self.path = tuple(path)


@dataclass(frozen=True)
class Known:
    """What a configuration may name: traits by kind and name, and what the queue would find."""

    traits: Mapping[str, Mapping[str, Any]]
    in_queue: frozenset[str] = frozenset()

    def estimator(self, config: Config) -> EstimatorTraits:
        """Return the traits of the configured estimator."""
        name = config.algorithm.adv_estimator
        found = self.traits["estimator"].get(name)
        return catalog.ESTIMATORS[name] if found is None else EstimatorTraits(**found)

    def loss(self, config: Config) -> LossTraits:
        """Return the traits of the configured policy loss."""
        name = config.algorithm.policy_loss
        found = self.traits["policy_loss"].get(name)
        return catalog.POLICY_LOSSES[name] if found is None else LossTraits(**found)


def check_plugins(config: Config) -> Known:
    """Check all names and options of plugins. Raises SettingError for the first that is wrong."""
    algorithm, modules = config.algorithm, list(config.replay.plugins)
    request = {
        "replay.plugins": modules,
        "algorithm.plugins": list(algorithm.plugins),
        "options": algorithm.options,
        "used": [name for _, _, name in named(config)],
    }
    if modules or algorithm.plugins:
        stamps = tuple(_stamp(name) for name in (*modules, *algorithm.plugins))
        reply = json.loads(_ask(json.dumps(request, sort_keys=True), tuple(sys.path), stamps))
        known = Known(reply["traits"], frozenset(reply["in_queue"]))
    else:
        reply = {"imports": [], "options": option_problems(algorithm.options, _built_in())}
        known = Known({kind: {} for kind in catalog.KINDS})
    for problem in (*reply["imports"], *_unknown_names(config, known), *reply["options"]):
        raise SettingError(*problem)
    return known


def _built_in() -> dict[str, type[Any]]:
    """Name -> class of the options of what is built in."""
    return {
        name: registry[name].options
        for registry in catalog.KINDS.values()
        for name in registry.built_in
        if registry[name].options is not None
    }


def named(config: Config) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Find the settings that name something registered: (kind, path, name) of each."""
    algorithm, custom = config.algorithm, config.replay.filter_groups.custom
    yield "estimator", ("algorithm", "adv_estimator"), algorithm.adv_estimator
    yield "policy_loss", ("algorithm", "policy_loss"), algorithm.policy_loss
    yield "importance", ("algorithm", "importance", "mode"), algorithm.importance.mode
    for name in algorithm.reward_shaping:
        yield "reward_shaping", ("algorithm", "reward_shaping"), name
    if custom is not None:
        yield "group_filter", ("replay", "filter_groups", "custom"), custom


def _unknown_names(config: Config, known: Known) -> Iterator[tuple[tuple[str, ...], str]]:
    for kind, path, name in named(config):
        registry = catalog.KINDS[kind]
        names = [*(one for one in registry if one in registry.built_in), *known.traits[kind]]
        modules = "replay.plugins" if kind == "group_filter" else "algorithm.plugins"
        if name not in names or (kind == "group_filter" and name not in known.in_queue):
            allowed = (
                f"one of {', '.join(names)}"
                if names
                else f"the name of a {registry.kind} that `{modules}` registers"
            )
            if kind == "group_filter" and name in names:
                allowed += f", of a module in `{modules}`: the replay queue imports no other"
            peers = part("peer_names") if kind == "policy_loss" else None
            ours = None if peers is None else peers.LOSSES.get(name)
            meant = f"; of other systems it is `{ours}` here" if ours else ""
            yield path, f"`{'.'.join(path)}` is {show(name)}; allowed is {allowed}{meant}."
    filters = config.replay.filter_groups
    if filters.enable and filters.metric == "seq_reward":
        for name in config.algorithm.reward_shaping:
            if name in known.traits["reward_shaping"] and name not in known.in_queue:
                yield (
                    ("replay", "filter_groups", "metric"),
                    "`replay.filter_groups.metric: seq_reward` needs the reward shaping "
                    f"{show(name)} in the replay queue: register it in a module of "
                    "`replay.plugins`, or use score.",
                )


def option_problems(
    options: Mapping[str, Mapping[str, Any]],
    classes: Mapping[str, type[Any]],
    used: Iterable[str] = (),
) -> list[tuple[tuple[str, ...], str]]:
    """(path, text) of everything that is wrong in `algorithm.options`, given the class of each
    name's options; also what is missing for the names that are `used`.
    """
    classes = {name: one for name, one in classes.items() if name not in SECTIONS}
    found: list[tuple[tuple[str, ...], str]] = [
        ((*OPTIONS, name), _no_options(name, classes)) for name in options if name not in classes
    ]
    for name in dict.fromkeys((*options, *used)):
        if name in classes:
            found += _wrong(name, classes[name], options.get(name, {}))
    return found


def _no_options(name: str, known: Iterable[str]) -> str:
    text = f"`{'.'.join((*OPTIONS, name))}` is not a setting."
    if name in SECTIONS:
        return f"{text}\n`options.{name}` is `algorithm.{name}` here."
    if close := difflib.get_close_matches(name, known, n=1):
        return f"{text}\nDid you mean `{'.'.join((*OPTIONS, close[0]))}`?"
    return (
        f"{text}\nOptions stand under the name of a plugin that has some: "
        f"{', '.join(known) or 'none is registered'}."
    )


def _wrong(
    name: str, options: type[Any], values: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], str]]:
    if is_dataclass(options) and "__pydantic_config__" not in dir(options):
        vars_of: Any = options
        vars_of.__pydantic_config__ = {"allow_inf_nan": False}
    adapter: TypeAdapter[Any] = TypeAdapter(options)
    keys = adapter.json_schema().get("properties", {})
    try:
        adapter.validate_json(json.dumps(values), strict=True, extra="forbid")
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            path = (*OPTIONS, name, *map(str, problem["loc"]))
            key, dotted = path[len(OPTIONS) + 1 :][:1], ".".join(path)
            if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
                close = difflib.get_close_matches(path[-1], keys, n=1, cutoff=0.6)
                hint = (
                    f"Did you mean `{'.'.join((*path[:-1], close[0]))}`?"
                    if close
                    else f"The keys of `{'.'.join(path[:-1])}` are {', '.join(keys) or 'none'}."
                )
                yield path, f"`{dotted}` is not a setting.\n{hint}"
            elif not key or key[0] not in keys:
                yield path, f"`{dotted}`: {problem['msg'].removeprefix('Value error, ')}."
            elif problem["type"] in ("missing", "missing_argument"):
                yield path, f"`{dotted}` is missing; allowed is {words(keys[key[0]])}."
            else:
                given = show(problem["input"])
                yield path, f"`{dotted}` is {given}; allowed is {words(keys[key[0]])}."


def _stamp(module: str) -> int:
    """When the module's file was last changed, so that a notebook sees a module that was edited."""
    relative = Path(*module.split("."))
    files = (
        Path(entry or ".") / name
        for entry in sys.path
        for name in (relative.with_suffix(".py"), relative / "__init__.py")
    )
    return next((file.stat().st_mtime_ns for file in files if file.is_file()), 0)


@lru_cache(maxsize=64)
def _ask(request: str, path: tuple[str, ...], stamps: tuple[int, ...]) -> str:
    """Return the answer of a child process to `request`, as JSON."""
    asked = json.loads(request)
    modules = ", ".join(asked["replay.plugins"] + asked["algorithm.plugins"])
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "async_grpo.config.plugins", str(file.fileno())],
                check=False,
                input=request,
                pass_fds=[file.fileno()],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=TIMEOUT_S,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, path))},
            )
        except subprocess.TimeoutExpired:
            raise SettingError(
                ("algorithm", "plugins"),
                f"the plugins {modules} cannot be imported within {TIMEOUT_S:g} s; what a module "
                "does when it is imported must be quick.",
            ) from None
        file.seek(0)
        answer = file.read()
    if not answer:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise SettingError(
            ("algorithm", "plugins"),
            f"the plugins {modules} cannot be imported: the process ended with code "
            f"{done.returncode} ({last[:200]}).",
        )
    return answer


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Import the modules and say what they register, and what is wrong."""
    imports: list[tuple[tuple[str, ...], str]] = []
    in_queue: list[str] = []
    for key in ("replay.plugins", "algorithm.plugins"):
        for module in request[key]:
            problem = _import(module)
            if not problem and key == "replay.plugins" and "torch" in sys.modules:
                problem = (
                    "imports torch, which the replay queue must not: register group filters in a "
                    "module of plain Python"
                )
            if problem:
                imports.append((tuple(key.split(".")), f"`{key}` names {module}, which {problem}."))
        if key == "replay.plugins":
            in_queue = [*catalog.GROUP_FILTERS.plugins(), *catalog.REWARD_SHAPINGS.plugins()]
    traits = {
        kind: {name: {**asdict(one), "options": None} for name, one in registry.plugins().items()}
        for kind, registry in catalog.KINDS.items()
    }
    options = (
        [] if imports else option_problems(request["options"], Registry.options, request["used"])
    )
    return {"traits": traits, "in_queue": in_queue, "imports": imports, "options": options}


def _import(module: str) -> str:
    """Import it; why that failed, or ""."""
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - a user's module, told in words
        trace = traceback.extract_tb(error.__traceback__)
        frames = [one for one in trace if "importlib" not in one.filename]
        at = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return f"cannot be imported: {said}{at}"
    return ""


if __name__ == "__main__":
    from async_grpo.config import plugins  # the same module under the name that others import

    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as reply:
        json.dump(plugins._answer(json.load(sys.stdin)), reply)
