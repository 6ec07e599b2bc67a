"""Doubles of classes and functions that would start a run: what is asked of them must exist, every
call must fit the signature, and what comes back is of the annotated type.
"""

from __future__ import annotations

import ast
import builtins
import collections.abc
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Self
from unittest.mock import MagicMock

from tests.support.metric_page import documented

PLAIN = {bool: False, int: 3, float: 0.5, str: "text", Path: Path("runs/double"), type(None): None}
MANY = (list, set, frozenset, collections.abc.Iterable)


class Metrics(dict[str, float]):
    """Numbers by name. Raises KeyError for a name that docs/metrics.md does not explain."""

    def __missing__(self, name: str) -> float:
        if not documented(name):
            raise KeyError(f"docs/metrics.md explains no metric {name}")
        return 0.5


class _AnyName(dict[str, Any]):
    """The names of a module; what it imports for types only may be anything."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Any)


def called(function: Any, *given: Any, owner: Any = None, **named: Any) -> Any:
    """What a call of `function` returns, by its annotation. Raises TypeError if it does not fit."""
    inspect.signature(function).bind(*given, **named)
    result = value(function.__annotations__.get("return"), sys.modules[function.__module__], owner)
    if not inspect.iscoroutinefunction(function):
        return result

    async def later() -> Any:
        return result

    return later()


def value(annotation: Any, module: types.ModuleType, owner: Any = None) -> Any:
    """A value of an annotation of `module`; `owner` where it says Self."""
    if isinstance(annotation, str):
        annotation = eval(annotation, {}, _AnyName(vars(module)))
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
        return Metrics() if inner[1:] == (float,) else {}
    if inspect.isclass(kind) and issubclass(kind, MANY) and inner:
        return iter([value(inner[0], module, owner)] * 2)
    if inspect.isclass(kind) and kind.__module__.startswith("async_grpo"):
        return Double(kind)
    return MagicMock(name=str(annotation))


@cache
def attributes(of: type) -> frozenset[str]:
    """What the methods of a class assign to `self`, and what its body declares."""
    found: set[str] = set()
    for one in of.__mro__[:-1]:
        tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if ast.unparse(node.value) == "self" else set()
        found |= set(vars(one).get("__annotations__", ()))
    return frozenset(found)


class Double:
    """An object of a class that never came to life. given: of its constructor."""

    def __init__(self, of: type, given: Mapping[str, Any] = types.MappingProxyType({})) -> None:
        self._class, self._given = of, dict(given)

    def __getattr__(self, name: str) -> Any:
        found = inspect.getattr_static(self._class, name, None)
        module = sys.modules[self._class.__module__]
        if name.startswith("_"):
            raise AttributeError(f"{name} is no public name of {self._class.__name__}")
        if isinstance(found, property):
            return value(found.fget.__annotations__.get("return"), module, self)
        if inspect.isfunction(found):
            return lambda *given, **named: called(found, self, *given, owner=self, **named)
        if found is None and name not in attributes(self._class):
            raise AttributeError(f"{self._class.__name__} has no {name}")
        return self._given.get(name, MagicMock(name=name))

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


def double(of: Any) -> Any:
    """The double of a class, or of a function."""
    if inspect.isclass(of):
        return ClassDouble(of)
    return lambda *given, **named: called(of, *given, **named)
