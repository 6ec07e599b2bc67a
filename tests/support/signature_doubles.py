"""Doubles of classes whose objects would start a run: what is asked of them must exist, every call
must fit the signature, and what comes back is of the annotated type.
"""

from __future__ import annotations

import ast
import builtins
import collections.abc
import importlib
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Self
from unittest.mock import MagicMock

import api_page
import griffe

from tests.support.metric_page import documented

PLAIN = {bool: False, int: 3, float: 0.5, str: "text", Path: Path("runs/double"), type(None): None}
PARTS = {"actors": "ActorManager", "learner": "LearnerGroup", "queue": "DriverQueue"}
"""Attributes of `System` whose types its `__init__` does not say."""
TRAINERS = ("async_grpo.run.trainer", "async_grpo.run.callbacks.base")
"""Modules whose mappings from names to anything hold metrics."""
MANY = (list, set, frozenset, collections.abc.Iterable)


class Anything(MagicMock):
    """What no annotation describes."""

    def __format__(self, spec: str) -> str:
        return format(1, spec)


class Metrics(dict[str, Any]):
    """Values by name. Raises KeyError for a name that docs/reference/metrics.md does not explain,
    and that neither the module that made them nor the trainer, which adds some, ever says.
    """

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__({"rollout/score": 0.5})
        self._module = module

    def __missing__(self, name: str) -> Any:
        if documented(name):
            return 0.5
        if name not in _texts(self._module) | _texts(sys.modules[TRAINERS[0]]):
            raise KeyError(f"docs/reference/metrics.md explains no metric {name}")
        return Anything(name=name)


class ByName(dict[str, Any]):
    """Values by whatever name is asked for."""

    def __missing__(self, name: str) -> Any:
        return Anything(name=name)


@cache
def _texts(module: types.ModuleType) -> frozenset[str]:
    tree = ast.parse(inspect.getsource(module))
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return frozenset(one for one in constants if isinstance(one, str))


class _Names(dict[str, Any]):
    """The names of a module, those too that it imports for types only."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(vars(module))
        self._inside = module.__name__.partition(".")[2]

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            return getattr(builtins, name)
        try:
            package = api_page.load(api_page.PACKAGE)
            found = api_page.defining(package[".".join(filter(None, (self._inside, name)))])
        except (KeyError, griffe.AliasResolutionError):  # of a library
            return Any
        return getattr(importlib.import_module(found.module.path), name, Any)


def called(function: Any, *given: Any, owner: Any = None, **named: Any) -> Any:
    """What a call of `function` returns, by its annotation. Raises TypeError if it does not fit."""
    inspect.signature(function).bind(*given, **named)
    awaited = [_finished(one) for one in given if inspect.iscoroutine(one)]
    result = value(function.__annotations__.get("return"), sys.modules[function.__module__], owner)
    if awaited and isinstance(result, Anything):  # it waits for what it was given
        return awaited[0]
    inner = getattr(function, "__wrapped__", function)
    if inspect.isgeneratorfunction(inner) and inner is not function:  # a context manager
        return nullcontext(next(iter(result)))
    if not inspect.iscoroutinefunction(function):
        return result

    async def later() -> Any:
        return result

    return later()


def _finished(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits for something")


def value(annotation: Any, module: types.ModuleType, owner: Any = None) -> Any:
    """A value of an annotation of `module`; `owner` where it says Self."""
    if isinstance(annotation, str):
        annotation = eval(annotation, {}, _Names(module))
    if isinstance(annotation, ClassDouble):
        annotation = annotation._of
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    kind = origin or annotation
    if annotation in (Self, getattr(owner, "_class", Self)):
        return owner
    if annotation in PLAIN or annotation is None:
        return PLAIN.get(annotation)
    if origin in (typing.Union, types.UnionType):
        [first, *_] = [one for one in inner if one is not type(None)]
        return value(first, module, owner)
    if kind is tuple:
        return tuple(value(one, module, owner) for one in inner if one is not ...)
    if inspect.isclass(kind) and issubclass(kind, collections.abc.Mapping):
        metrics = inner[1:] == (float,) or (inner[1:] == (Any,) and module.__name__ in TRAINERS)
        return Metrics(module) if metrics else ByName(a=Anything(name="a"))
    if inspect.isclass(kind) and issubclass(kind, MANY) and inner:
        return iter([value(inner[0], module, owner)] * 2)
    if inspect.isclass(kind) and kind.__module__.startswith("async_grpo"):
        return Double(kind)
    return Anything(name=str(annotation))


@cache
def attributes(of: type) -> dict[str, tuple[str, str]]:
    """Attributes of the objects of a class: the type, as far as the class says it, and the module
    that does.
    """
    found: dict[str, tuple[str, str]] = {}
    for one in of.__mro__[:-1]:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(one)))):
            if isinstance(node, ast.AnnAssign):
                kind = ast.unparse(node.annotation)
                name = ast.unparse(node.target).removeprefix("self.")
                found[name] = kind, one.__module__
            elif isinstance(node, ast.Assign):
                made = node.value
                kind = ast.unparse(made.func) if isinstance(made, ast.Call) else ""
                for target in node.targets:
                    for part in ast.walk(target):
                        if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                            kind = kind if kind[:1].isupper() else ""
                            found.setdefault(part.attr, (kind, one.__module__))
    return found


class Double:
    """An object of a class that never came to life. given: of its constructor."""

    def __init__(self, of: type, given: Mapping[str, Any] = types.MappingProxyType({})) -> None:
        self._class, self._given = of, dict(given)

    def __getattr__(self, name: str) -> Any:
        found = inspect.getattr_static(self._class, name, None)
        if name.startswith("_"):
            raise AttributeError(f"{name} is no public name of {self._class.__name__}")
        if isinstance(found, property):
            home = sys.modules[found.fget.__module__]
            return value(found.fget.__annotations__.get("return"), home, self)
        if inspect.isfunction(found):
            return lambda *given, **named: called(found, self, *given, owner=self, **named)
        if found is None and name not in attributes(self._class):
            raise AttributeError(f"{self._class.__name__} has no {name}")
        if name in self._given:
            return self._given[name]
        kind, home = attributes(self._class).get(name, ("", self._class.__module__))
        kind = kind or PARTS.get(name, "")
        return value(kind, sys.modules[home], self) if kind else Anything(name=name)

    def _special(self, name: str, *given: Any) -> Any:
        method = getattr(self._class, name, None)
        if method is None:
            raise TypeError(f"{self._class.__name__} has no {name}")
        return called(method, self, *given, owner=self)

    def __enter__(self) -> Self:
        self._special("__enter__")
        return self

    def __exit__(self, *error: Any) -> None:
        self._special("__exit__", *error)

    def __iter__(self) -> Iterator[Any]:
        if (made := self._special("__iter__")) is not self:
            return made
        return iter([self._special("__next__") for _ in range(2)])


class ClassDouble:
    """A class whose objects are doubles."""

    def __init__(self, of: type) -> None:
        self._of = of

    def __call__(self, *given: Any, **named: Any) -> Double:
        bound = inspect.signature(self._of).bind(*given, **named)
        return Double(self._of, bound.arguments)

    def __getattr__(self, name: str) -> Any:
        found = inspect.getattr_static(self._of, name)
        if isinstance(found, classmethod):
            made = Double(self._of)
            return lambda *given, **named: called(found.__func__, self, *given, owner=made, **named)
        return getattr(self._of, name)
