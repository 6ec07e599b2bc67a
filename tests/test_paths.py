"""The paths of docs/explanation/architecture.md are those of the code."""

from __future__ import annotations

import ast
import itertools
import re
import sys
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from async_grpo.algo import losses
from tests.support.learners import make_case, make_config, open_learner, split
from tests.support.models import write_model

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| \d+ \| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)


def path(title: str) -> list[tuple[str, str]]:
    """The (file, function) rows under a heading of the page, in order."""
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
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


STEP = "From `async-grpo train` to `ppo_clip`"
OUT, IN = "A weight version, out of the learner", "A weight version, into an engine"
BY_OTHERS = {"ppo_clip": "the registry of losses", "receive_weights": "vLLM's `update_weights`"}
"""Function -> who calls it in place of the one above."""


@pytest.mark.parametrize("title", [STEP, OUT, IN])
def test_each_function_of_a_path_calls_the_next(title: str) -> None:
    rows, before = path(title), set[str]()
    assert len(rows) > 5
    for (file, function), (_, called) in itertools.pairwise(rows):
        here, name = words(file, function), called.rpartition(".")[2]
        # a shell that Ray runs is told by its caller which method to call
        known = here | (before if "getattr" in here else set())
        assert name in known or name in BY_OTHERS, (function, called)
        before = here


def test_the_paths_are_short() -> None:
    step, version = path(STEP), path(OUT) + path(IN)
    assert len(step) <= 14 and len({file for file, _ in step}) <= 9
    assert len({file for file, _ in version}) <= 10


def test_the_learners_frames_stand_on_the_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        seen[:] = [
            frame.f_code.co_qualname
            for frame, _ in traceback.walk_stack(sys._getframe())
            if "/async_grpo/learner/" in frame.f_code.co_filename
        ]
        return losses.policy_loss(*arguments, **options)

    monkeypatch.setattr("async_grpo.learner.token_math.policy_loss", watched)
    directory = write_model(tmp_path / "plain")
    case = make_case(directory)
    with open_learner(make_config(), {"plain": directory}, case) as learner:
        learner.prepare(case.plan([split(range(len(case.values)), 2)]))
        learner.train(case.values, 0.0)
    assert seen[::-1] == [name for file, name in path(STEP) if file.startswith("learner/")]
