"""Environments without their processes: the built-in chain, the documented one, and what an
observation may be.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from async_grpo.config import schema
from async_grpo.contrib.warm_start.cache import ALPHABET
from async_grpo.environments.base import (
    Action,
    HasEnvironment,
    Observation,
    check_observation,
    from_wire,
    to_wire,
)
from async_grpo.environments.chain import Chain
from async_grpo.tasks.base import TaskError
from async_grpo.tasks.registry import load_task

ROOT = Path(__file__).parents[2]


def chain(**options: int) -> Chain:
    return load_task(schema.TaskConfig(name="chain", options=options), 0)


def test_a_chain_is_followed_by_its_own_solution() -> None:
    task = chain()
    assert isinstance(task, HasEnvironment)
    for index in range(200):
        problem = task.train(index)
        environment = task.environment()
        environment.reset(problem.reference, 0)
        steps, key = problem.prompt.rstrip(">").split(":")
        assert problem.solution[0] == f"g{key}" and len(problem.solution) == 2 * int(steps) + 1
        for number, said in enumerate(problem.solution[::2]):
            seen = environment.step(Action(said))
            last = number == int(steps)
            assert seen.done is last and seen.correct == float(last) and not seen.invalid
            if not last:
                assert seen.content == problem.solution[2 * number + 1] and not seen.rewards
        assert seen.rewards == {"correct": 1.0}
        assert set(problem.prompt + "".join(problem.solution)) <= set(ALPHABET)


def test_wrong_answers_and_nonsense() -> None:
    environment = chain().environment()
    environment.reset({"table": [(n + 1) % 10 for n in range(10)], "answer": 4}, 0)
    assert environment.step(Action("a3")) == Observation(
        rewards={"correct": 0.0}, done=True, correct=0.0
    )
    assert environment.step(Action("a4")).correct == 1.0
    assert environment.step(Action("g9")).content == "0>"
    for said in ("", "g", "a", "g12", "x3", "gx", " g3", "g²", "g3 "):
        seen = environment.step(Action(said))
        assert seen.invalid and not seen.done and seen.content == "?>", said


def test_problems_are_what_their_index_says_and_none_is_held_out() -> None:
    task = chain(max_steps=5)
    assert task.train(7) == chain(max_steps=5).train(7) != task.train(8)
    assert {problem.prompt[0] for problem in map(task.train, range(200))} == set("12345")
    assert task.fingerprint != chain().fingerprint
    tables = {tuple(problem.reference["table"]) for problem in task.evaluation(300)}
    assert not tables & {tuple(task.train(index).reference["table"]) for index in range(2000)}
    assert len(task.evaluation(3)) == 3 and task.evaluation(3) == task.evaluation(5)[:3]
    for index in (-1, len(task)):
        with pytest.raises(IndexError):
            task.train(index)
    with pytest.raises(TaskError, match="max_steps"):
        chain(max_steps=0)
    with pytest.raises(TaskError, match=r"task\.train"):
        load_task(schema.TaskConfig(name="chain", train="rows.jsonl"), 0)


def test_the_documented_environment_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = (ROOT / "docs" / "how-to" / "tools-and-environments.md").read_text()
    (tmp_path / "guess.py").write_text(re.search(r"```python\n(.*?)```", document, re.DOTALL)[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "guess", raising=False)
    task = load_task(schema.TaskConfig(name="guess:Guess"), 0)
    assert isinstance(task, HasEnvironment) and len(task) == 16 and len(task.evaluation(99)) == 16
    environment = task.environment()
    seen = [environment.reset(5, 0)] + [environment.step(Action(said)) for said in ("9", "x", "5")]
    checked = [check_observation(one, task.weights) for one in seen]
    assert [one.content for one in checked] == ["", "lower. ", "a number, please. ", ""]
    assert [one.invalid for one in checked] == [False, False, True, False]
    assert checked[-1].done and checked[-1].rewards == {"found": 1.0}


def test_finish_reasons_of_the_document_are_those_of_the_code() -> None:
    from async_grpo.wire.groups import FINISH_REASONS

    document = (ROOT / "docs" / "how-to" / "tools-and-environments.md").read_text()
    ends = document.partition("## What ends an episode")[2].partition("\n## ")[0]
    told = re.findall(r"^\| `(\w+)` \|", ends, re.MULTILINE)
    assert set(told) == set(FINISH_REASONS) - {"stop"}


@pytest.mark.parametrize(
    "observation",
    [
        Observation(),
        Observation("text", {"value": 1}, True, 0.0, True, {"seconds": 3}),
        Observation([{"role": "tool", "content": "x"}]),
        Observation([1, 2, 3]),
    ],
)
def test_an_observation_survives_the_pipe(observation: Observation) -> None:
    assert from_wire(to_wire(observation), {"value": 1.0}) == observation


@pytest.mark.parametrize("values", [None, [], [1] * 6, ["", {}, 0, None, False, {}], {"a": 1}])
def test_what_is_no_observation_is_refused(values: object) -> None:
    with pytest.raises(TypeError):
        from_wire(values, {"value": 1.0})


def test_a_task_needs_a_score_or_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "class Neither:\n    weights = {'a': 1.0}\n    fingerprint = 'n'\n"
    body += "    def __init__(self, settings, seed): ...\n    def __len__(self): return 1\n"
    body += "    def train(self, index): ...\n    def evaluation(self, n): return []\n"
    (tmp_path / "neither.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TaskError, match="has no score"):
        load_task(schema.TaskConfig(name="neither:Neither"), 0)
