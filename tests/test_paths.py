"""The paths of docs/architecture.md are those of the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from async_grpo.algo import losses

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| \d+ \| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)


def path(title: str) -> list[tuple[str, str]]:
    """The (file, function) rows under a heading of the page, in order."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    [section] = [one for one in page.split("\n## ") if one.startswith(title)]
    return ROW.findall(section)


@cache
def functions(file: str) -> dict[str, ast.AST]:
    """Every function of a file by its qualified name."""
    found: dict[str, ast.AST] = {}

    def visit(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found[".".join([*names, child.name])] = child
                visit(child, (*names, child.name))

    visit(ast.parse((ROOT / "async_grpo" / file).read_text()), ())
    return found


def words(file: str, function: str) -> set[str]:
    """Names, attributes and strings in the body of a function."""
    seen: set[str] = set()
    for node in ast.walk(functions(file)[function]):
        if isinstance(node, ast.Attribute):
            seen.add(node.attr)
        elif isinstance(node, ast.Name):
            seen.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            seen.add(node.value)
    return seen


@pytest.mark.parametrize(
    ("title", "frames", "files"),
    [("From `async-grpo train` to `ppo_clip`", 14, 9), ("A weight version", 14, 10)],
)
def test_a_path_of_the_page_is_short_and_each_function_calls_the_next(
    title: str, frames: int, files: int
) -> None:
    rows = path(title)
    assert 8 <= len(rows) <= frames and len({file for file, _ in rows}) <= files
    before: set[str] = set()
    for (file, function), (_, called) in zip(rows, rows[1:], strict=False):
        here = words(file, function)
        if called != "ppo_clip":  # it is found in the registry of the losses
            name = called.rpartition(".")[2]
            # a shell that Ray runs is told by its caller which method to call
            assert name in here | (before if "getattr" in here else set()), (function, called)
        before = here
    assert losses.POLICY_LOSSES.function("ppo_clip") is losses.ppo_clip
