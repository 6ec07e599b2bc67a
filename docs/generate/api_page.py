"""The reference page of the API, written from the sources: signatures and docstrings.

`pages.py` writes it. Hides griffe, which follows a name to where it is defined. Invariants: nothing
of the package is imported for it; what is on the page stands in the code, word by word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe

PACKAGE = Path(__file__).resolve().parents[2] / "async_grpo"

SECTIONS = {
    "A custom task": (
        "`task.name: my_module:MyTask` names a class like `Task`; nothing is inherited or "
        "registered ([rewards](../how-to/rewards.md)). Its `score` is the verifier, and runs in "
        "children of the rollout "
        "actors. A task with an `environment` has episodes in place of `score` "
        "([tools and environments](../how-to/tools-and-environments.md)).",
        {
            "tasks.base": "Task Problem Score WarmsUp TaskError",
            "environments.base": "HasEnvironment Environment Action Observation HasTools",
        },
    ),
    "Callbacks and sweeps": (
        "Built-in callbacks, by their names in `run.callbacks` or as objects; a custom one is a "
        "subclass of `Callback`.",
        {"run.callbacks.early_stopping": "*", "contrib.tune": "resources trainable"},
    ),
    "What plugins are called with": (
        "Functions that are registered get one of these ([extend](../how-to/extend.md)).",
        {
            "algo.losses": "Terms",
            "algo.estimators": "Groups Options",
            "algo.importance_modes": "Ratios",
            "algo.rewards": "ShapedResponse",
            "algo.filters": "GroupFacts",
        },
    ),
    "Inside a running system": (
        "`trainer.system.actors` and `trainer.system.learner`, for those who want to look inside. "
        "Their coroutines belong to the event loop of the trainer.",
        {
            "cluster.rollout_actors": "ActorManager",
            "cluster.learner_group": "LearnerGroup",
            "rollout.generation": "Generated",
        },
    ),
}
"""Heading -> what stands below it, and names by module (`*`: all that it defines, if the module is
there), beside those of `async_grpo` itself."""

OF_USE = {
    "ActorManager": "deaths alive processes healthy_actor_ids foreach_actor generate add remove",
    "LearnerGroup": "state logprobs get_weights pids",
}
"""Class that a run makes -> what of it is for its users."""

_INTRODUCTION = """\
# API

<!-- Written by `make docs` from the code: change it there. -->

Signatures, with the first paragraph of each docstring; the rest stands in the code. What takes long
to import (torch, Ray, vLLM) is imported when a name needs it, not with the package.

## `async_grpo`

`from async_grpo import ...` gives these names. How they are used:
[notebook](../how-to/notebook.md), [extend](../how-to/extend.md).
"""


@cache
def load(package: Path) -> griffe.Module:
    """Read a package's sources."""
    return defining(
        griffe.load(package.name, search_paths=[package.parent], allow_inspection=False)
    )


def defining(named: Any) -> Any:
    """Follow a name to what it stands for."""
    return named.final_target if isinstance(named, griffe.Alias) else named


def render() -> str:
    """Return the page as Markdown. Raises KeyError for a name that its module does not have."""
    package = load(PACKAGE)
    parts = [_INTRODUCTION]
    for name in sorted(map(str, package.exports or ()), key=str.lower):
        parts += _entry(package[name], shown=package.path)
    for heading, (text, modules) in SECTIONS.items():
        parts.append(f"## {heading}\n\n{text}\n")
        for path, names in modules.items():
            if names == "*" and not PACKAGE.joinpath(*path.split(".")).with_suffix(".py").is_file():
                continue
            module = package[path]
            for one in _defined(module) if names == "*" else map(module.__getitem__, names.split()):
                parts += _entry(one, shown=module.path)
    return "\n".join(parts)


def _defined(module: griffe.Object) -> Iterator[griffe.Object]:
    """Find the public functions and classes that a module defines."""
    for one in module.members.values():
        if isinstance(one, griffe.Class | griffe.Function) and not one.name.startswith("_"):
            yield one


def _entry(named: griffe.Object | griffe.Alias, *, shown: str) -> Iterator[str]:
    """Lines about one name; `shown` is the module to import it from."""
    found = defining(named)
    yield f"### `{found.name}`\n"
    if isinstance(found, griffe.Class):
        yield from _class(found, shown)
    elif isinstance(found, griffe.Function):
        yield _text(f"{shown}.{_signature(found)}", found)
    else:
        yield _text(f"module {found.path}", found)
        yield from _listed(
            _line(_signature(one) if isinstance(one, griffe.Function) else one.name, one)
            for one in _defined(found)
        )


def _class(found: griffe.Class, shown: str) -> Iterator[str]:
    public = {*(load(PACKAGE).exports or ())}  # what is inherited from these is on the page
    chain = [found, *(one for one in found.mro() if one.name not in public)]
    is_section = any(one.name == "Section" for one in chain)  # holds settings
    made = defining(found.all_members.get("__init__"))
    bases = ", ".join(str(base).replace("'", '"') for base in found.bases)
    if isinstance(made, griffe.Function) and not is_section and found.name not in OF_USE:
        head = _signature(made, found.name).removesuffix(" -> None")
    else:
        head = f"{found.name}({bases})" if bases and not is_section else found.name
    yield _text(f"{shown}.{head}", found)
    if is_section:
        yield (
            "Its fields are the settings: [configuration](configuration/index.md). "
            "`config.model_copy(update={...})` is a copy with other values, checked like any.\n"
        )
        return
    members: dict[str, str] = {}
    for one in chain:
        for member in one.members.values():
            if line := _member(member, dataclass="dataclass" in one.labels):
                members.setdefault(member.name, line)
    shown_ones = OF_USE.get(found.name, " ".join(members)).split()
    yield from _listed(members[name] for name in shown_ones)


def _member(member: griffe.Object, *, dataclass: bool) -> str:
    """Describe a public attribute, property or method; nothing for another."""
    name, special = member.name, member.name.startswith("__")
    if name in ("__init__", "__new__"):
        return ""
    if name.startswith("_") and not (special and member.docstring):
        return ""
    if isinstance(member, griffe.Function):
        waits = "async " if "async" in member.labels else ""
        return _line(f"{waits}{_signature(member)}", member)
    if not isinstance(member, griffe.Attribute) or member.annotation is None:
        return _line(name, member) if "property" in member.labels else ""
    in_signature = dataclass and not member.docstring and "instance-attribute" in member.labels
    if "property" not in member.labels and in_signature:
        return ""
    return _line(f"{name}: {member.annotation}".replace("'", '"'), member)


def _signature(function: griffe.Function, name: str | None = None) -> str:
    text = function.signature(name=name).replace("'", '"')
    for made, shown in (("list()", "[]"), ("dict()", "{}")):
        text = text.replace(f" = {made}", f" = {shown}")
    return text


def _text(head: str, of: griffe.Object) -> str:
    return "\n\n".join(part for part in (f"`{head}`", _summary(of)) if part) + "\n"


def _line(code: str, of: griffe.Object) -> str:
    text = _summary(of)
    return f"- `{code}`" + (f"<br>{text}" if text else "")


def _summary(of: griffe.Object) -> str:
    """Return the first paragraph of a docstring, on one line."""
    text = of.docstring.value if of.docstring else ""
    return " ".join(text.partition("\n\n")[0].split())


def _listed(lines: Iterable[str]) -> Iterator[str]:
    if together := "\n".join(lines):
        yield f"{together}\n"
