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
from inspect import signature
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from async_grpo.algo import catalog
from async_grpo.algo.catalog import EstimatorTraits, LossTraits
from async_grpo.config.choice import REGISTRIES, Chosen
from async_grpo.config.docs import show, words
from async_grpo.config.schema import Config, FilterGroups
from async_grpo.runtime.parts import part

TIMEOUT_S = 120.0


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
        name = config.algorithm.adv_estimator.name
        found = self.traits["estimator"].get(name)
        return catalog.ESTIMATORS[name] if found is None else EstimatorTraits(**found)

    def loss(self, config: Config) -> LossTraits:
        """Return the traits of the configured policy loss."""
        name = config.algorithm.policy_loss.name
        found = self.traits["policy_loss"].get(name)
        return catalog.POLICY_LOSSES[name] if found is None else LossTraits(**found)


def check_plugins(config: Config) -> Known:
    """Check all names and options of what is chosen. Raises SettingError for the first that is
    wrong.
    """
    algorithm, modules = config.algorithm, list(config.replay.plugins)
    chosen = [(kind, path, choice.name, choice.values) for kind, path, choice in choices(config)]
    request = {
        "replay.plugins": modules,
        "algorithm.plugins": list(algorithm.plugins),
        "chosen": chosen,
    }
    if modules or algorithm.plugins:
        stamps = tuple(_stamp(name) for name in (*modules, *algorithm.plugins))
        reply = json.loads(_ask(json.dumps(request, sort_keys=True), tuple(sys.path), stamps))
        known = Known(reply["traits"], frozenset(reply["in_queue"]))
    else:
        reply = {"imports": [], "options": option_problems(chosen, built_in=True)}
        known = Known({kind: {} for kind in catalog.KINDS})
    for problem in (*reply["imports"], *_unknown_names(config, known), *reply["options"]):
        raise SettingError(*problem)
    return known


def choices(config: Config) -> Iterator[tuple[str, tuple[str, ...], Chosen]]:
    """Find the settings that name one of several: (kind, path, choice) of each."""
    algorithm = config.algorithm
    filters: list[tuple[tuple[str, ...], FilterGroups]] = [
        (("replay",), config.replay.filter_groups),
        *((("tasks", name), f) for name, one in config.tasks.items() if (f := one.filter_groups)),
    ]
    yield "estimator", ("algorithm", "adv_estimator"), algorithm.adv_estimator
    yield "policy_loss", ("algorithm", "policy_loss"), algorithm.policy_loss
    yield "clip_schedule", ("algorithm", "clip_schedule"), algorithm.clip_schedule
    yield "importance", ("algorithm", "importance", "mode"), algorithm.importance.mode
    for place, shaping in enumerate(algorithm.reward_shaping):
        yield "reward_shaping", ("algorithm", "reward_shaping", str(place)), shaping
    for path, one in filters:
        if one.custom is not None:
            yield "group_filter", (*path, "filter_groups", "custom"), one.custom
    yield "transport", ("weight_sync", "backend"), config.weight_sync.backend


def _unknown_names(config: Config, known: Known) -> Iterator[tuple[tuple[str, ...], str]]:
    for kind, path, choice in choices(config):
        name, registry = choice.name, REGISTRIES[kind]
        plugins = known.traits.get(kind, {})
        names = [*(one for one in registry if one in registry.built_in), *plugins]
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
        for shaping in config.algorithm.reward_shaping:
            if shaping.name in known.traits["reward_shaping"] and (
                shaping.name not in known.in_queue
            ):
                yield (
                    ("replay", "filter_groups", "metric"),
                    "`replay.filter_groups.metric: seq_reward` needs the reward shaping "
                    f"{show(shaping.name)} in the replay queue: register it in a module of "
                    "`replay.plugins`, or use score.",
                )


def option_problems(
    chosen: Iterable[tuple[str, Iterable[str], str, Mapping[str, Any]]], *, built_in: bool = False
) -> list[tuple[tuple[str, ...], str]]:
    """Find what is wrong in the options of what is `chosen` (kind, path, name, options), also what
    is missing: (path, text) of each. Names that are not registered here are passed over; with
    `built_in` those of plugins are.
    """
    found: list[tuple[tuple[str, ...], str]] = []
    for kind, path, name, values in chosen:
        registry = REGISTRIES[kind]
        if name in (registry.built_in if built_in else registry):
            found += _wrong(tuple(path), name, registry[name].options, values, kind)
    return found


def _wrong(
    path: tuple[str, ...],
    name: str,
    options: type[Any] | None,
    values: Mapping[str, Any],
    kind: str,
) -> Iterator[tuple[tuple[str, ...], str]]:
    if options is None:
        for extra in values:
            yield (*path, extra), _no_option((*path, extra), name, (), kind)
        return
    if is_dataclass(options) and "__pydantic_config__" not in dir(options):
        vars_of: Any = options
        vars_of.__pydantic_config__ = {"allow_inf_nan": False}
    adapter: TypeAdapter[Any] = TypeAdapter(options)
    keys = adapter.json_schema().get("properties", {})
    try:
        adapter.validate_json(json.dumps(values), strict=True, extra="forbid")
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            at = (*path, *map(str, problem["loc"]))
            key, dotted = at[len(path) :][:1], ".".join(at)
            if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
                yield at, _no_option(at, name, keys, kind)
            elif not key or key[0] not in keys:
                yield at, f"`{dotted}`: {problem['msg'].removeprefix('Value error, ')}."
            elif problem["type"] in ("missing", "missing_argument"):
                yield at, f"`{dotted}` is missing; allowed is {words(keys[key[0]])}."
            else:
                given = show(problem["input"])
                yield at, f"`{dotted}` is {given}; allowed is {words(keys[key[0]])}."


def _no_option(path: tuple[str, ...], name: str, keys: Iterable[str], kind: str) -> str:
    """Say that there is no such option, and what may have been meant."""
    text, known = f"`{'.'.join(path)}` is not a setting.", list(keys)
    if close := difflib.get_close_matches(path[-1], known, n=1, cutoff=0.6):
        return f"{text}\nDid you mean `{'.'.join((*path[:-1], close[0]))}`?"
    others = [
        other
        for other, traits in REGISTRIES[kind].items()
        if traits.options is not None and path[-1] in signature(traits.options).parameters
    ]
    if others:
        return f"{text}\nIt is an option of {' and '.join(others)}, and {name} is chosen."
    return f"{text}\nThe options of {name} are {', '.join(known) or 'none'}."


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
    options = [] if imports else option_problems(request["chosen"])
    return {"traits": traits, "in_queue": in_queue, "imports": imports, "options": options}


def _import(module: str) -> str:
    """Import it; why that failed, or ""."""
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - a user's module, told in words
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            return f"is neither in the working directory ({Path.cwd()}) nor on PYTHONPATH"
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
