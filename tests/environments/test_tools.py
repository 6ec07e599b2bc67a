"""Functions as tools: schemas, calls, errors, and who pays for them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from async_grpo.config import schema
from async_grpo.config.environment import EnvironmentConfig
from async_grpo.environments.base import Action, Observation
from async_grpo.environments.calculator import calculator
from async_grpo.environments.pool import EnvironmentFailed, EnvironmentPool
from async_grpo.environments.tools import TaskWithTools, with_tools
from async_grpo.tasks.base import Score, TaskError
from tests.support.tools import Asks, AsksInTurns

SUPPORT = "tests.support.tools"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"id-{name}", "name": name, "arguments": arguments}


def steps(
    actions: list[Action], *, names: list[str], task: str = "Asks", **settings: Any
) -> list[Observation | str]:
    """What a pool's children answer; of failures their reason and text."""

    async def main() -> list[Observation | str]:
        config = EnvironmentConfig(tools=names, workers=1, step_timeout_s=1.0, **settings)
        pool = EnvironmentPool(
            schema.TaskConfig(name=f"{SUPPORT}:{task}"), config, weights={"right": 1.0}, seed=0
        )
        await pool.start()
        try:
            episode, _ = await pool.open("two", 0)
            answers: list[Observation | str] = []
            for action in actions:
                try:
                    answers.append(await episode.step(action))
                except EnvironmentFailed as error:
                    answers.append(str(error))
            return answers
        finally:
            await pool.close()

    return asyncio.run(main())


def test_a_task_without_tools_stays_as_it_is() -> None:
    task = Asks(None, 0)
    assert with_tools(task, []) is task


def test_a_component_of_an_episode_has_a_value() -> None:
    class Silent(Asks):
        def score(self, response: str, reference: Any) -> Score:
            return Score({"right": None}, None)

    environment = with_tools(Silent(None, 0), ["calculator"]).environment()
    environment.reset("two", 0)
    with pytest.raises(TypeError, match=r"leaves out \['right'\].* return 0 for a component"):
        environment.step(Action("two", [1], "stop"))


def test_schemas_come_from_hints_and_docstrings() -> None:
    task = with_tools(Asks(None, 0), [f"{SUPPORT}.search", "calculator"])
    assert isinstance(task, TaskWithTools) and len(task) == 2 and task.fingerprint == "asks"
    first, second = (one["function"] for one in task.tools)
    assert (first["name"], first["description"]) == ("search", "Look something up.")
    assert first["parameters"]["properties"]["limit"] == {
        "type": "integer",
        "description": "How often.",
    }
    assert first["parameters"]["required"] == ["query"]
    assert second["name"] == "calculator"


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["nothing"], "give a function of yours as module.function, or calculator"),
        (["no_module.search"], "cannot be imported: No module named 'no_module'"),
        ([f"{SUPPORT}.absent"], "has no function absent"),
        ([f"{SUPPORT}.search", f"{SUPPORT}:search"], ""),
        ([f"{SUPPORT}.search", "tests.support.other_tools.search"], "two tools 'search'"),
    ],
)
def test_names_that_mean_nothing_are_refused(
    names: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys
    import types

    other = types.ModuleType("tests.support.other_tools")
    other.search = lambda query: query  # type: ignore[attr-defined]
    other.search.__name__ = "search"
    monkeypatch.setitem(sys.modules, "tests.support.other_tools", other)
    if not says:
        assert isinstance(with_tools(Asks(None, 0), names), TaskWithTools)
        return
    with pytest.raises(TaskError, match=says):
        with_tools(Asks(None, 0), names)


def test_a_function_that_does_not_say_what_its_arguments_are_is_refused() -> None:
    task = with_tools(Asks(None, 0), [f"{SUPPORT}.undescribed"])
    assert isinstance(task, TaskWithTools)
    with pytest.raises(TaskError, match="tool undescribed cannot be described"):
        _ = task.tools


def test_calls_are_answered_and_the_turn_without_one_is_scored() -> None:
    first, both, last = steps(
        [
            Action("x", tool_calls=[call("search", query="one")]),
            Action("x", tool_calls=[call("search", query="one", limit="2"), call("later")]),
            Action("<s>two", content="two"),
        ],
        names=[f"{SUPPORT}.search", f"{SUPPORT}.later"],
    )
    assert first == Observation(
        [{"role": "tool", "name": "search", "content": "two", "tool_call_id": "id-search"}],
        correct=0.0,
        metrics={"tool_calls": 1.0, "tool_errors": 0.0},
    )
    assert isinstance(both, Observation) and both.invalid
    assert [message["content"] for message in both.content] == [  # type: ignore[index]
        "three",
        "Error: query: Missing required argument",
    ]
    assert both.metrics == {"tool_calls": 2.0, "tool_errors": 1.0}
    assert last == Observation(rewards={"right": 1.0}, correct=1.0, done=True)


def test_an_asynchronous_tool_gives_way() -> None:
    [found] = steps(
        [Action("x", tool_calls=[call("later", query="one")] * 5)], names=[f"{SUPPORT}.later"]
    )
    assert isinstance(found, Observation)
    assert [one["content"] for one in found.content] == ['{"found": "two"}'] * 5  # type: ignore[index]


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (Action("x", tool_calls=[call("search", query="ten")]), "Error: ten"),
        (Action("x", tool_calls=[call("search", word="ten")]), "Error: query: Missing"),
        (Action("x", tool_calls=[call("seek")]), "there is no tool 'seek'; there are search"),
        (Action("x", unreadable="no JSON"), "Error: no JSON"),
    ],
)
def test_what_the_policy_did_wrong_it_reads(action: Action, says: str) -> None:
    [found] = steps([action], names=[f"{SUPPORT}.search"])
    assert isinstance(found, Observation) and found.invalid and not found.done
    assert says in found.content[0]["content"]  # type: ignore[index]


@pytest.mark.parametrize("name", ["broken", "hangs"])
def test_what_it_cannot_have_caused_is_a_failure(name: str) -> None:
    [found] = steps([Action("x", tool_calls=[call(name)])], names=[f"{SUPPORT}.{name}"])
    says = {"broken": "exception: step(): ConnectionError: no network", "hangs": "timeout: step()"}
    assert isinstance(found, str) and found.startswith(says[name])


def test_an_environment_has_functions_called_for_it_and_answers_its_own_tools() -> None:
    assert [one["function"]["name"] for one in with_tools(AsksInTurns(None, 0), []).tools] == [  # type: ignore[attr-defined]
        "search",
        "answer",
    ]
    looked, said, answered = steps(
        [
            Action("x", tool_calls=[call("search", query="one")]),
            Action("two"),
            Action("x", tool_calls=[call("answer", word="two")]),
        ],
        names=[],
        task="AsksInTurns",
    )
    assert isinstance(looked, Observation) and looked.content[0]["content"] == "two"  # type: ignore[index]
    assert said == Observation("call a tool", invalid=True)
    assert answered == Observation(rewards={"right": 1.0}, correct=1.0, done=True)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("48 / 2 + 1", "25"),
        ("(3 + 4) * 2.5", "17.5"),
        ("1/3", "0.3333333333"),
        ("0.1 + 0.2", "0.3"),
        ("1,200 * 3", "3600"),
        ("2 ** 10 % 100", "24"),
        ("-7 // 2", "-4"),
        ("2 ** -2", "0.25"),
    ],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *["", "x", "__import__('os')", "9 ** 9 ** 9", "1e999", "2 ** 65", "(" * 300, "10 ** 40"],
        *["True", "1 if 1 else 2", "'a' * 3", "2 ** 0.5", "1" * 199],
    ],
)
def test_the_calculator_refuses_what_is_no_number(expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        calculator(expression)


def test_a_division_by_nothing_is_told() -> None:
    [found] = steps(
        [Action("x", tool_calls=[call("calculator", expression="1/0")])], names=["calculator"]
    )
    assert isinstance(found, Observation) and "Error" in found.content[0]["content"]  # type: ignore[index]
