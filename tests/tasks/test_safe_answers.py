"""Scorers of reasoning-gym that evaluate what a model writes: they see numbers, lists and formulas
only.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from async_grpo.config import schema
from async_grpo.tasks import safe_answers
from async_grpo.tasks.registry import load_task

HOSTILE = [
    "__import__('pathlib').Path({file!r}).touch()",
    "open({file!r}, 'w')",
    "[open({file!r}, 'w')]",
    "[*map(open, [{file!r}], 'w')]",
    "().__class__.__base__",
    "x.__class__",
    "lambda: 0",
    "f(2)",
    "x(2)",
    "sin(x)(2)",
    "2(3)",
    "abs(2)",
    "N(2)",
    "S('1')",
    "eval('1')",
    "sin\n(2)",
    "9**9**9",
    "(9**999)**999",
    "((9**99)**99)**99",
    "9**(9**9)",
    "9**\n9**9",
    "99999!",
    "10**10**10",
    "9" * 4000 + "**2",
    "(" * 5000 + "1",
    "[" * 5000 + "]" * 5000,
    "1+" * 1_000_000 + "1",
    "x\u0661",
    "１**2",
    "2**9999",
    "[0]*10**10",
    "'a'*10**10",
    "\x00",
]


def task(name: str):
    return load_task(
        schema.TaskConfig(name="reasoning_gym", options={"dataset": name, "size": 40}), 0
    )


def test_the_table_names_every_data_set_that_evaluates_answers() -> None:
    from reasoning_gym.factory import DATASETS

    found = {
        name
        for name, (dataset, _) in DATASETS.items()
        if re.search(
            r"\b(eval|parse_expr|sympify|exec)\((?!entry)", inspect.getsource(dataset.score_answer)
        )
    }
    assert found == safe_answers.LITERALS | safe_answers.EXPRESSIONS


@pytest.mark.parametrize("problems", [8, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(safe_answers.LITERALS | safe_answers.EXPRESSIONS))
def test_hostile_answers_are_scored_like_none_and_solutions_in_full(
    name: str, tmp_path: Path, problems: int
) -> None:
    here, file = task(name), tmp_path / "touched"
    problem = here.train(0)
    nothing = here.score("<answer></answer>", problem.reference)
    for text in HOSTILE:
        text = text.replace("{file!r}", repr(str(file)))
        assert not safe_answers.admitted(text, name), text[:60]
        assert here.score(f"<answer>{text}</answer>", problem.reference) == nothing
    assert not file.exists()
    for index in range(problems):
        problem = here.train(index)
        answer = ast.literal_eval(problem.reference)["answer"]
        if safe_answers.admitted(answer, name):
            assert here.score(problem.solution, problem.reference).correct == 1.0
        else:
            assert "Integral" in answer  # the package could not solve its own problem


def test_lists_and_formulas_keep_their_scores() -> None:
    matrix = task("spiral_matrix").train(0)
    numbers = ast.literal_eval(matrix.reference)["answer"].split()
    assert task("spiral_matrix").score(
        f"<answer>[{', '.join(numbers)}]</answer>", matrix.reference
    ).rewards == {"correct": 0.1}
    for text in (
        "x**2 + 3*x - 1.5",
        "-(2 - 8*x)**(3/2)/3 + C",
        "sin(x)**5*cos(3*x) + exp(-x)",
        "42*(30 - 4 - 23)",
        "X**9",
    ):
        assert safe_answers.is_expression(text), text
    for text in ("1 0 1\n0 0 1", "_ Q _ _", "[[1, 0], [0, 1]]", "['a', 'b']", "-1.5", "ABCDE"):
        assert safe_answers.is_literal(text), text
