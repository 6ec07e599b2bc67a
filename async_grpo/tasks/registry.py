"""Finds a task by name and decides which problem a group poses.

Runs in: the driver, the rollout actors and verifier children. Hides the table of built-in tasks,
the import of a user's own, and the permutation of prompts. Invariant: the problem of a group is a
function of seed, data and group_id alone, never of a result.
"""

from __future__ import annotations

import difflib
import importlib
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import blake2b
from typing import Any

from async_grpo.config import schema
from async_grpo.runtime.variables import hide
from async_grpo.tasks.base import Problems, Task, TaskError, scores_later
from async_grpo.tasks.verl import VerlReward, is_reward_function

BUILT_IN = {
    "arithmetic": "async_grpo.tasks.arithmetic:Arithmetic",
    "gsm8k": "async_grpo.tasks.gsm8k:Gsm8k",
    "math": "async_grpo.tasks.math:Math",
    "reasoning_gym": "async_grpo.tasks.reasoning_gym:ReasoningGym",
    "jsonl": "async_grpo.tasks.jsonl:Jsonl",
    "chain": "async_grpo.environments.chain:Chain",
    "program": "async_grpo.agents.program:Program",
    "external": "async_grpo.agents.external:External",
    "gymnasium": "async_grpo.contrib.adapters:Gymnasium",
    "textarena": "async_grpo.contrib.adapters:TextArena",
    "skyrl_gym": "async_grpo.contrib.adapters:SkyRLGym",
}
HELD_OUT = {"gsm8k": "openai/gsm8k:main:test", "math": "HuggingFaceH4/MATH-500:default:test"}
"""Held-out rows of an evaluation that names no more than the task."""
_ROUNDS = 6
_PARTS = ("weights", "fingerprint", "__len__", "train", "evaluation", "score")


def load_task(settings: schema.TaskConfig, seed: int) -> Task:
    """Return the configured task with its training data read and checked. Raises TaskError."""
    task = create_task(settings, seed)
    if _asked(settings.name, "say how many problems it has", lambda: len(task)) < 1:
        raise TaskError(f"task {settings.name} has no training problem; check task.train")
    return task


def create_task(settings: schema.TaskConfig, seed: int) -> Task:
    """Return the configured task, its data not read (as a verifier child needs it). Raises
    TaskError.
    """
    path = BUILT_IN.get(settings.name, settings.name)
    module_name, colon, class_name = path.partition(":")
    if not colon or not module_name or not class_name:
        raise TaskError(
            f"there is no task {settings.name!r}{_did_you_mean(settings.name, BUILT_IN)}; "
            f"use one of {', '.join(BUILT_IN)}, or a custom one as package.module:Class"
        )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing and (module_name == missing or module_name.startswith(missing + ".")):
            raise TaskError(
                f"task.name is {settings.name!r}, but there is no module {missing!r} in the "
                "working directory"
            ) from error
        raise TaskError(
            f"task.name is {settings.name!r}, whose module {module_name} cannot be "
            f"imported: {_described(error)}"
        ) from error
    factory: Any = vars(module).get(class_name)
    if not callable(factory):
        raise TaskError(
            f"module {module_name} has no class "
            f"{class_name!r}{_did_you_mean(class_name, vars(module))}"
        )
    if is_reward_function(factory):
        factory = partial(VerlReward, factory)
    try:
        task = factory(settings, seed)
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(f"task {settings.name} cannot be made: {_described(error)}") from error
    # a property may read the data, which is not for this moment
    own = {*dir(type(task)), *getattr(task, "__dict__", ())}
    lacking = [name for name in _PARTS if name not in own]
    if "environment" in own and "score" in lacking:
        lacking.remove("score")
    if lacking and settings.name not in BUILT_IN:
        raise TaskError(
            f"{settings.name} is no task: it has no {', '.join(lacking)} "
            "(docs/how-to/data.md shows one)"
        )
    return task


def held_out(config: schema.Config, task: Problems) -> int:
    """Held-out problems of an evaluation: of `task`, or of `evaluation.task`. Raises TaskError."""
    wanted, pose = config.evaluation.max_samples, "pose its held-out problems"
    if config.evaluation.task is None:
        return _asked(config.task_names, pose, lambda: len(task.evaluation(wanted)))
    try:
        evaluated = create_task(config.evaluated_task, config.seed)
        name = config.evaluation.task.name
        found = _asked(name, pose, lambda: len(evaluated.evaluation(wanted)))
    except TaskError as error:
        raise TaskError(f"evaluation.task: {error}") from error
    if not found:
        raise TaskError(
            f"evaluation.task: task {config.evaluation.task.name} has no held-out problems "
            "(set evaluation.task.eval)"
        )
    return found


def check_concurrency(config: schema.Config, posed: Iterable[Task]) -> None:
    """Raise TaskError where verifiers are to score several responses at the same time, and no task
    of the run can.
    """
    limits = config.task.verifier
    tasks = [*posed, create_task(config.evaluated_task, config.seed)]
    if limits.concurrency > 1 and not any(map(scores_later, tasks)):
        raise TaskError(
            f"task.verifier.concurrency is {limits.concurrency}, which is for tasks with an "
            f"`async def score`, and {config.task_names} has none: use task.verifier.workers"
        )


def problem_index(seed: int, fingerprint: str, group_id: int, n: int) -> int:
    """Index in [0, n) of a group's problem: a fresh pseudo-random permutation per epoch, by a
    Feistel network over the next even power of two, walked until below n (at most 4 steps on
    average).
    """
    if n < 1 or group_id < 0:
        raise ValueError(
            f"problem_index needs n >= 1 and group_id >= 0, got n {n} and group_id {group_id}"
        )
    epoch, value = divmod(group_id, n)
    key = blake2b(f"{seed}\0{fingerprint}\0{epoch}".encode(), digest_size=32).digest()
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    while True:
        value = _feistel(value, key, half)
        if value < n:
            return value


def _feistel(value: int, key: bytes, half: int) -> int:
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for round_number in range(_ROUNDS):
        digest = blake2b(
            right.to_bytes(16, "little"), digest_size=8, key=key, salt=bytes([round_number])
        ).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return left << half | right


def _asked(name: str, what: str, count: Callable[[], int]) -> int:
    """Return what `count` counts of task `name`. Raises TaskError for any error of its code."""
    try:
        return count()
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(f"task {name} cannot {what}: {_described(error)}") from error


def _described(error: BaseException) -> str:
    """Say an error of a user's module on one line, with the place where it was raised."""
    frames, place = traceback.extract_tb(error.__traceback__), ""
    if frames and not isinstance(error, SyntaxError):
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})"
    return f"{type(error).__name__}: {' '.join(hide(str(error)).split())[:200]}{place}"


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
