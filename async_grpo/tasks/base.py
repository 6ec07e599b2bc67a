"""What a task is: problems to pose and a verifier that scores responses.

Runs in: the driver and the rollout actors (problems) and verifier children (`score`). Hides
nothing. Invariants: a task's constructor is cheap and reads no data, because every verifier child
constructs the task too; `score` depends on its arguments and the options alone; what crosses to a
child (`Problem.reference`, `Score`) is plain enough for msgpack.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel, ValidationError

from async_grpo.config import schema
from async_grpo.errors import SetupError
from async_grpo.old_names import WasVerdict
from async_grpo.runtime.numbers import checked_correct, finite

Prompt = str | list[dict[str, str]]
Options = TypeVar("Options", bound=BaseModel)


class TaskError(SetupError, ValueError):
    """The task's name, data or options are wrong; one sentence says what to change."""


class RowsRefused(TaskError):
    """Rows that were read, and are of no use on any machine."""


@dataclass(frozen=True)
class Problem:
    """One prompt: text, or chat messages with `role` and `content`.

    `reference` is what the verifier (or the environment) needs and must be msgpack-able; `solution`
    is a worked answer for the supervised warm start, of an episode what policy and environment say
    in turn. `teacher` is the frozen model that teaches it, of several; `task` its task, of several.
    """

    prompt: Prompt
    reference: Any
    solution: str | tuple[str, ...] | None = None
    teacher: str | None = None
    task: str = ""


@dataclass(frozen=True)
class Score(WasVerdict):
    """Raw reward per component, None where there is nothing to say of one, and whether the response
    is correct: 1, 0 or None.
    """

    rewards: dict[str, float | None]
    correct: float | None


class Problems(Protocol):
    """Problems to train and to evaluate."""

    @property
    def fingerprint(self) -> str:
        """Identifies data and options: equal fingerprints mean equal problems at equal indices."""

    def __len__(self) -> int:
        """Return the number of training problems."""

    def train(self, index: int) -> Problem:
        """Training problem `index`, 0 <= index < len(self); always the same one."""

    def evaluation(self, n: int) -> list[Problem]:
        """Return the first `n` held-out problems (or all, if fewer), none of them a training
        problem.
        """


class Task(Problems, Protocol):
    """Problems and their verifier, made as `Task(settings: schema.TaskConfig, seed: int)`."""

    weights: dict[str, float]
    """Default weight of every reward component that `score` returns."""

    def score(self, response: str, reference: Any) -> Score | Awaitable[Score]:
        """Score one response; may be `async def` where it waits. Runs in a verifier child, with
        `task.env_vars` in its environment. A task with `environment` (see
        `environments.base.HasEnvironment`) has none.
        """


@runtime_checkable
class WarmsUp(Protocol):
    """A task whose first `score` would be slow (imports)."""

    def warm_up(self) -> None:
        """Import what is slow; children call this before the first deadline starts."""


def scores_later(task: object) -> bool:
    """Return whether the task's `score` is a coroutine function."""
    return inspect.iscoroutinefunction(getattr(task, "score", None))


def is_judged(rewards: Mapping[str, float], judges: Collection[str]) -> bool:
    """Return whether a judge grades every response with a weight. rewards: configured weights."""
    return any(rewards.get(name) if rewards else True for name in judges)


def task_weights(settings: schema.TaskConfig, task: Task) -> dict[str, float]:
    """Weight of every reward component: the configured ones (an unnamed component weighs 0), else
    the task's own, and 1 for each judge. Raises TaskError for a component that the task does not
    have, for no weight, and for a judge with the name of a component.
    """
    if both := sorted(set(task.weights) & set(settings.judges)):
        raise TaskError(
            f"task.judges.{both[0]} has the name of a component of the task: give it another"
        )
    weights = task.weights | dict.fromkeys(settings.judges, 1.0)
    if not settings.rewards:
        return weights
    unknown = sorted(set(settings.rewards) - set(weights))
    if unknown:
        raise TaskError(
            f"task.rewards names {', '.join(unknown)}; the components of this task are "
            f"{', '.join(sorted(weights))}"
        )
    if not any(settings.rewards.values()):
        raise TaskError(
            "task.rewards gives every component the weight 0, so that all responses are equal; "
            "give one of them a weight"
        )
    return {name: settings.rewards.get(name, 0.0) for name in weights}


def refuse_rows(settings: schema.TaskConfig) -> None:
    """Raise TaskError for data of a built-in task that makes its problems itself; a class of one's
    own that builds on it may have a use for them.
    """
    for key, given in (("train", settings.train), ("eval", settings.eval)):
        if given is not None and ":" not in settings.name:
            raise TaskError(
                f"task.{key} is {given!r}, but task {settings.name} generates its problems; "
                "leave it out, or choose a task with data rows (docs/how-to/data.md)"
            )


def parse_options(model: type[Options], settings: schema.TaskConfig) -> Options:
    """`task.options` checked by the task's own model. Raises TaskError that names the option."""
    try:
        return model.model_validate(settings.options)
    except ValidationError as error:
        first = error.errors()[0]
        where, kind = ".".join(map(str, first["loc"])), first["type"]
        given = f"is {first['input']!r:.60}: {first['msg']}"
        what = {"extra_forbidden": "is not an option", "missing": "is missing"}.get(kind, given)
        raise TaskError(
            f"task.options.{where} {what} (the options of task {settings.name} "
            f"are {', '.join(sorted(model.model_fields))})"
        ) from error


def check_score(
    score: object, components: Collection[str], counted: Collection[str] | None = ()
) -> Score:
    """`score` with plain floats, and None for what is missing. counted: components of which it must
    have one, by default any; None: it needs none (`is_judged`). Raises TypeError
    unless it is a Score of these components, ValueError if not finite.
    """
    if not isinstance(score, Score):
        raise TypeError(f"score() must return a Score, got {type(score).__name__}")
    if not isinstance(score.rewards, dict) or set(score.rewards) != set(components):
        raise TypeError(
            f"score() must return the components {sorted(components)}, got {score.rewards!r}"
        )
    rewards = {
        name: None if value is None else finite(name, value)
        for name, value in score.rewards.items()
    }
    if counted is not None and all(rewards[name] is None for name in counted or components):
        raise TypeError(
            f"score() has no value for any of {sorted(counted or components)}; a response needs "
            "one of the components that have a weight"
        )
    return Score(rewards, checked_correct(score.correct))
