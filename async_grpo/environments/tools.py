"""Functions as tools: what the policy is told of them, and how they are called.

Runs in: the driver and rollout actors (`with_tools`, schemas), and environment children
(`ToolEnvironment`). Hides how a function becomes a schema, and what an error of it means:

    action -> calls of functions -> a message of role `tool` for each    (the episode goes on)
              none               -> the task's environment, or its score (the episode ends)

A ValueError, an ArithmeticError or a LookupError of a function says that its arguments were wrong:
the policy reads it, and the action was invalid. Any other exception is a failure that the policy
cannot have caused, and its group is issued again. Invariant: a task without tools stays as it is.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pydantic

from async_grpo.environments.base import Action, HasEnvironment, HasPlayers, HasTools, Observation
from async_grpo.environments.calculator import calculator
from async_grpo.runtime.variables import hide
from async_grpo.tasks.base import Problem, Score, Task, TaskError, WarmsUp, scores_later

BUILT_IN: dict[str, Callable[..., Any]] = {"calculator": calculator}
_OF_THE_POLICY = (ValueError, ArithmeticError, LookupError)


def with_tools(task: Task, names: Sequence[str]) -> Task:
    """Return the task with these tools and its own; the task itself where there are none. Raises
    TaskError.
    """
    own = list(task.tools) if isinstance(task, HasTools) else []
    functions = {one.__name__: one for one in own if not isinstance(one, dict)}
    for name in names:
        function = _imported(name)
        if functions.setdefault(function.__name__, function) is not function:
            raise TaskError(f"environment.tools: there are two tools {function.__name__!r}")
    schemas = [one for one in own if isinstance(one, dict)]
    if functions and isinstance(task, HasPlayers):
        raise TaskError("environment.tools: an agent over HTTP brings its own tools")
    return TaskWithTools(task, functions, schemas) if functions or schemas else task


class TaskWithTools:
    """A task whose responses are episodes in which tools may be called; see `Task`."""

    def __init__(
        self, task: Task, functions: dict[str, Callable[..., Any]], schemas: list[dict[str, Any]]
    ) -> None:
        """schemas: of further tools, which the task's environment answers."""
        self._task = task
        self._functions, self._schemas = functions, schemas
        self.weights = task.weights

    @property
    def fingerprint(self) -> str:
        """Of the task; see `Task.fingerprint`."""
        return self._task.fingerprint

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Describe all tools, for a chat template. Raises TaskError for a function that does not
        say what its arguments are.
        """
        return [*map(_schema, self._functions.values()), *self._schemas]

    def __len__(self) -> int:
        return len(self._task)

    def train(self, index: int) -> Problem:
        """Training problem `index`; see `Task.train`."""
        return self._task.train(index)

    def evaluation(self, n: int) -> list[Problem]:
        """Held-out problems; see `Task.evaluation`."""
        return self._task.evaluation(n)

    def score(self, response: str, reference: Any) -> Score | Awaitable[Score]:
        """Score the last turn of an episode; see `Task.score`."""
        return self._task.score(response, reference)

    def warm_up(self) -> None:
        """Import what is slow; see `WarmsUp`."""
        if isinstance(self._task, WarmsUp):
            self._task.warm_up()

    def environment(self) -> ToolEnvironment:
        """Return a new environment."""
        task = self._task
        inner = task.environment() if isinstance(task, HasEnvironment) else _Scored(task)
        return ToolEnvironment(inner, self._functions)


class _Scored:
    """A task's `score` as an environment of one turn."""

    replayable = True

    def __init__(self, task: Any) -> None:
        self._task = task
        self._reference: Any = None
        self.step = self._step_later if scores_later(task) else self._step

    def reset(self, reference: Any, seed: int) -> Observation:
        self._reference = reference
        return Observation()

    def _step(self, action: Action) -> Observation:
        return self._scored(self._task.score(action.content, self._reference))

    async def _step_later(self, action: Action) -> Observation:
        return self._scored(await self._task.score(action.content, self._reference))

    @staticmethod
    def _scored(score: Score) -> Observation:
        rewards = {name: value for name, value in score.rewards.items() if value is not None}
        if len(rewards) < len(score.rewards):
            raise TypeError(
                f"score() leaves out {sorted(score.rewards.keys() - rewards)}; in an "
                "episode, rewards are added up: return 0 for a component without a value"
            )
        return Observation(rewards=rewards, correct=score.correct, done=True)

    def close(self) -> None:
        """Nothing is held."""


class ToolEnvironment:
    """Calls functions, and leaves everything else to another environment."""

    def __init__(self, inner: Any, functions: dict[str, Callable[..., Any]]) -> None:
        self._inner = inner
        self._functions = {
            name: pydantic.validate_call(function) for name, function in functions.items()
        }
        parts = [inner, *functions.values()]
        self.replayable = all(getattr(part, "replayable", False) for part in parts)
        self._later = {name for name, one in functions.items() if _is_async(one)}
        # plain methods run one at a time in their process; several `async` ones wait together
        self.step = self._step_later if self._later or _is_async(inner.step) else self._step
        self.reset, self.close = inner.reset, inner.close

    def _step(self, action: Action) -> Observation:
        if not self._is_for_tools(action):
            return self._inner.step(action)
        return _answered(action, [self._called(call) for call in action.tool_calls])

    async def _step_later(self, action: Action) -> Observation:
        if not self._is_for_tools(action):
            if _is_async(self._inner.step):
                return await self._inner.step(action)
            return await asyncio.to_thread(self._inner.step, action)
        said = await asyncio.gather(*[self._called_later(call) for call in action.tool_calls])
        return _answered(action, said)

    def _is_for_tools(self, action: Action) -> bool:
        """Whether the inner environment has nothing to do with the action. It gets an action that
        calls a tool of its own, or one that nobody knows, with all of its calls.
        """
        if action.unreadable:
            return True
        names = {call["name"] for call in action.tool_calls}
        scored = isinstance(self._inner, _Scored)
        return bool(names) and (scored or names <= self._functions.keys())

    def _called(self, call: dict[str, Any]) -> tuple[str, bool]:
        try:
            return _text(self._function(call)(**call["arguments"])), True
        except _OF_THE_POLICY as error:
            return _told(error), False

    async def _called_later(self, call: dict[str, Any]) -> tuple[str, bool]:
        try:
            function = self._function(call)
            if call["name"] in self._later:
                return _text(await function(**call["arguments"])), True
            return _text(await asyncio.to_thread(function, **call["arguments"])), True
        except _OF_THE_POLICY as error:
            return _told(error), False

    def _function(self, call: dict[str, Any]) -> Callable[..., Any]:
        if call["name"] not in self._functions:
            raise LookupError(
                f"there is no tool {call['name']!r:.60}; there are {', '.join(self._functions)}"
            )
        return self._functions[call["name"]]


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function)


def _answered(action: Action, results: Sequence[tuple[str, bool]]) -> Observation:
    messages = [
        {"role": "tool", "name": call["name"], "content": text}
        | ({"tool_call_id": call["id"]} if call.get("id") else {})
        for call, (text, _) in zip(action.tool_calls, results, strict=True)
    ]
    if action.unreadable:
        messages.append({"role": "user", "content": f"Error: {action.unreadable}"})
    failed = sum(not right for _, right in results) + bool(action.unreadable)
    return Observation(
        messages,
        correct=0.0,
        invalid=failed > 0,
        metrics={"tool_calls": float(len(action.tool_calls)), "tool_errors": float(failed)},
    )


def _text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _told(error: Exception) -> str:
    if isinstance(error, pydantic.ValidationError):
        first = error.errors()[0]
        return hide(f"Error: {'.'.join(map(str, first['loc']))}: {first['msg']}")[:500]
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return hide(f"Error: {text}")[:500]


def _imported(name: str) -> Callable[..., Any]:
    if name in BUILT_IN:
        return BUILT_IN[name]
    module_name, _, function_name = name.replace(":", ".").rpartition(".")
    where = f"environment.tools names {name!r}"
    if not module_name:
        raise TaskError(
            f"{where}; give a function of yours as module.function, or {', '.join(BUILT_IN)}"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise TaskError(f"{where}, whose module cannot be imported: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise TaskError(f"{where}, but {module_name} has no function {function_name}")
    return function


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:
        raise TaskError(
            f"tool {function.__name__} cannot be described ({' '.join(str(error).split())}): give "
            "every argument a type hint, and a line under `Args:` in the docstring"
        ) from error
