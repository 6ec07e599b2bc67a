"""What a command's own parser makes of its words, without importing its module: `python -m
benchmarks.rollout` would import vLLM to say what its options are.

The `main` of the module is called as it stands, up to the point where its parser has answered. Of
its globals only those are evaluated that it asks for until then.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import builtins
import contextlib
import importlib
import inspect
import io
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from async_grpo.cli import VERBS
from async_grpo.config.command_line import Parser
from tests.support.snippets import ROOT

OURS = ("async_grpo", "benchmarks", "tests")
LIGHT = ("async_grpo.tools.migrate.",)
"""Modules of ours whose import is cheap, and whose classes need their module."""
PARSING = ("parse_args", "parse_intermixed_args")


class Refused(ValueError):
    """What a parser says of words that it does not take."""


class Incomplete(Refused):
    """What a parser says where nothing is wrong, but something is missing."""


class _Answered(BaseException):
    """The parser has done its part; `args[0]` is what it found."""


def file_of(module: str) -> Path | None:
    """The file that `python -m module` runs; None where there is none."""
    path = ROOT / module.replace(".", "/")
    found = (path / "__main__.py", path.with_suffix(".py"))
    return next((file for file in found if file.is_file()), None)


def parsed(file: Path, words: list[str]) -> argparse.Namespace:
    """What the program in this file understands by these words. Raises Refused or
    Incomplete.
    """
    here, told = names(file), io.StringIO()
    if not any(f".{name}(" in here.source for name in PARSING):  # a command of few words
        if unknown := [word for word in words if f'"{word}"' not in here.source]:
            raise Refused(f"{file.name} knows no {' '.join(unknown)}")
        return argparse.Namespace()
    main = here["main"]
    given = [words] if inspect.signature(main).parameters else []
    with contextlib.ExitStack() as stack:
        for name in PARSING:
            stack.enter_context(mock.patch.object(argparse.ArgumentParser, name, _answer(name)))
        stack.enter_context(mock.patch.object(sys, "argv", [str(file), *words]))
        stack.enter_context(contextlib.redirect_stderr(told))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        try:
            main(*given)
        except _Answered as answered:
            return answered.args[0]
        except SystemExit as end:
            if end.code:
                said = told.getvalue().strip()
                missing = not words or "arguments are required" in said
                raise (Incomplete if missing else Refused)(said) from None
            return argparse.Namespace()  # `--help`, `--recipes`
    raise AssertionError(f"{file} did its work without asking a parser")


def answered(verb: str, words: list[str]) -> argparse.Namespace:
    """What a verb of the command line understands by these words. Raises Refused or Incomplete."""
    home, told = importlib.import_module(VERBS[verb][0]), io.StringIO()
    parser = Parser(prog=verb)
    home.arguments(parser)
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        try:
            return parser.read(words)
        except SystemExit as end:
            if end.code:
                said = told.getvalue().strip()
                missing = not words or "arguments are required" in said or "name a YAML" in said
                raise (Incomplete if missing else Refused)(said) from None
            return argparse.Namespace()  # `--help`


def _answer(name: str) -> Any:
    usual = getattr(argparse.ArgumentParser, name)

    def answer(parser: argparse.ArgumentParser, *given: Any) -> None:
        raise _Answered(usual(parser, *given))

    return answer


class Names(dict[str, Any]):
    """The globals of a module of ours, each evaluated when it is asked for."""

    def __init__(self, file: Path) -> None:
        # dataclasses look their module up, and these have none
        super().__init__(__file__=str(file), __name__="builtins", __builtins__=builtins)
        self.source = file.read_text(encoding="utf-8")
        tree = ast.parse(self.source)
        self["__doc__"] = ast.get_docstring(tree)
        self._bindings = dict(_bindings(tree))

    def __missing__(self, name: str) -> Any:
        node = self._bindings[name]
        if isinstance(node, ast.Import):
            self[name] = _imported(node, name)
        elif isinstance(node, ast.ImportFrom):
            self[name] = _imported_from(node, name)
        else:
            if isinstance(node, ast.ClassDef):  # whose body does not ask a mapping
                for needed in set(_evaluated(node)) & self._bindings.keys() - {name}:
                    self[needed]
            future = __future__.annotations.compiler_flag
            exec(compile(ast.Module([node], []), self["__file__"], "exec", future), self)
        return self[name]


def _bindings(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Name, and the statement at the top of a module that binds it."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((one.asname or one.name.split(".")[0], node) for one in node.names)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for part in ast.walk(node):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    yield part.id, node


def _evaluated(node: ast.AST) -> Iterator[str]:
    """Names in a class's body, those inside its methods aside."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _evaluated(inner)


def _imported(node: ast.Import, name: str) -> Any:
    [alias] = [one for one in node.names if name == (one.asname or one.name.split(".")[0])]
    return importlib.import_module(alias.name if alias.asname else name)


def _imported_from(node: ast.ImportFrom, name: str) -> Any:
    [alias] = [one for one in node.names if name == (one.asname or one.name)]
    inner = f"{node.module}.{alias.name}"
    if file_of(inner) is not None:  # a module, not a name in one
        return importlib.import_module(inner)
    if node.module.split(".")[0] not in OURS or node.module.startswith(LIGHT):
        return getattr(importlib.import_module(node.module), alias.name)
    if (file := file_of(node.module)) is not None:
        return names(file)[alias.name]
    return importlib.import_module(inner)  # a module of a package


@cache
def names(file: Path) -> Names:
    """The globals of this file, the same object every time."""
    return Names(file)
