"""Any data set of the reasoning-gym package, scored by its own `score_answer`.

Runs in: the driver, the rollout actors and verifier children. Hides the package. Problems are
generated from seeds: training problem i comes from `first + i`, where `first` is a function of the
run's seed; held-out problems come from seeds that no run trains on and are the same for every run.
Reward `correct`: the data set's score, in [0, 1]; it is correct exactly when that score is at
least 1. An answer that a scorer would evaluate, and that does not look like a number, list or
formula, is scored like none (`safe_answers`).
"""

from __future__ import annotations

import ast
import math
import warnings
from functools import cached_property
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from async_grpo.config import schema
from async_grpo.tasks import answers, safe_answers
from async_grpo.tasks.base import Problem, Score, TaskError, parse_options, refuse_rows
from async_grpo.tasks.chat import TAGS, PromptOptions

_HELD_OUT_SEED = 2**31
_MAX_SIZE = 2**30


class ReasoningGymOptions(PromptOptions):
    """Options of the task `reasoning_gym`."""

    dataset: str
    """Name of the data set, e.g. `chain_sum`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """The data set's own parameters, without `seed` and `size`."""
    size: Annotated[int, Field(ge=1, le=_MAX_SIZE)] = 10_000
    """Number of training problems."""


class ReasoningGym:
    """A generated reasoning task; one with few distinct questions may repeat one held out."""

    weights: ClassVar[dict[str, float]] = {"correct": 1.0}

    def __init__(self, settings: schema.TaskConfig, seed: int) -> None:
        refuse_rows(settings)
        self._options = parse_options(ReasoningGymOptions, settings)
        reserved = sorted({"seed", "size"} & set(self._options.params))
        if reserved:
            raise TaskError(
                f"task.options.params may not hold {', '.join(reserved)}; use the run's "
                "seed and task.options.size"
            )
        self._first = seed * 1_000_003 % (_HELD_OUT_SEED - _MAX_SIZE)

    @cached_property
    def fingerprint(self) -> str:
        """Names the package's version, the options and the first seed."""
        from importlib.metadata import version

        return f"reasoning-gym-{version('reasoning-gym')}-{self._options!r}-{self._first}"

    def __len__(self) -> int:
        return len(self._dataset)

    def train(self, index: int) -> Problem:
        """Training problem `index`; see `Task.train`."""
        if not 0 <= index < len(self):
            raise IndexError(f"problem {index} of {len(self)}")
        return self._problem(self._dataset[index])

    def evaluation(self, n: int) -> list[Problem]:
        """`n` problems from seeds that no run trains on."""
        held_out = self._create(_HELD_OUT_SEED, max(n, 1))
        return [self._problem(held_out[index]) for index in range(n)]

    def score(self, response: str, reference: Any) -> Score:
        """Score the `<answer>` block, or the whole response without one."""
        answer, entry = answers.tagged(response, "answer"), ast.literal_eval(reference)
        answer = response.strip() if answer is None else answer
        if not safe_answers.admitted(answer, self._options.dataset):
            answer = ""
        value = float(self._dataset.score_answer(answer, entry))
        return Score({"correct": value}, float(value >= 1.0))

    def warm_up(self) -> None:
        """Import the package and score once."""
        self._dataset.score_answer("", self._dataset[0])

    @cached_property
    def _dataset(self) -> Any:
        return self._create(self._first, self._options.size)

    def _create(self, seed: int, size: int) -> Any:
        with warnings.catch_warnings():
            # the package's dependencies warn about their own source when first imported
            warnings.simplefilter("ignore")
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        name = self._options.dataset
        if name not in DATASETS:
            raise TaskError(f"task.options.dataset: reasoning-gym has no data set {name!r}")
        try:
            return reasoning_gym.create_dataset(name, seed=seed, size=size, **self._options.params)
        except (TypeError, ValueError, AssertionError) as error:
            raise TaskError(f"task.options.params does not fit data set {name}: {error}") from error

    def _problem(self, entry: dict[str, Any]) -> Problem:
        # A Python literal keeps tuples; msgpack makes lists, which some scorers do not accept.
        reference, answer = repr(_plain(entry)), entry["answer"]
        worked = f"<reasoning>{answer}</reasoning>\n<answer>{answer}</answer>"
        solution = None if answer is None else worked
        return Problem(self._options.prompt(entry["question"], system=TAGS), reference, solution)


def _plain(value: Any) -> Any:
    """`value` as types with a Python literal; other metadata (no scorer reads it) as text."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    for container in (list, tuple, set):
        if isinstance(value, container):
            return container(_plain(item) for item in value)
    literal = type(value) in (type(None), str, bytes, bool, int)
    return value if literal or (type(value) is float and math.isfinite(value)) else str(value)
