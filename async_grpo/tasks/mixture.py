"""Several tasks in one run (`tasks`), and which problem every group poses.

    group id --Quotas--> task, number of its ids before --problem_index--> its problem

Runs in: the driver, the queue's process (which has no data) and the rollout actors. Hides how
shares are kept exactly. Invariants: the problem of a group is a function of configuration, data and
group_id alone; while weights stay, as many successive ids as the weights sum up to have exactly
their shares of every task, wherever they begin.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate, zip_longest
from math import gcd, lcm

from async_grpo.config import schema
from async_grpo.errors import SetupError
from async_grpo.tasks.base import Problem, Problems, Task, TaskError, task_weights
from async_grpo.tasks.registry import create_task, load_task, problem_index

LONGEST = 10_000
"""Most ids after which the order of tasks begins again."""


def load_tasks(config: schema.Config) -> Problems:
    """Return the training problems of a run, read and checked. Raises TaskError."""
    if not config.tasks:
        return load_task(config.task, config.seed)
    return Mixture(config, {name: _of(config, name, load=True) for name in config.tasks})


def create_tasks(config: schema.Config) -> Problems:
    """Return the problems of a run, training data not read. Raises TaskError."""
    if not config.tasks:
        return create_task(config.task, config.seed)
    return Mixture(config, {name: _of(config, name, load=False) for name in config.tasks})


def _of(config: schema.Config, name: str, *, load: bool) -> Task:
    try:
        made = load_task if load else create_task
        return made(config.tasks[name], config.seed)
    except TaskError as error:
        raise type(error)(named_error(name, error)) from error


def named_error(task: str, error: Exception) -> str:
    """Say an error with the name of its task, of several."""
    said = str(error)
    return f"tasks.{task}.{said[5:]}" if said.startswith("task.") else f"tasks.{task}: {said}"


@contextmanager
def naming(own: schema.Config) -> Iterator[None]:
    """Name the task of several in what is refused inside. own: the configuration as it has it."""
    try:
        yield
    except SetupError as error:
        if not own.posed:
            raise
        raise type(error)(named_error(own.posed, error)) from error


def parts_of(config: schema.Config, problems: Problems) -> Iterator[tuple[schema.Config, Task]]:
    """Yield every task, with the configuration as if there were only this one."""
    tasks = problems.tasks if isinstance(problems, Mixture) else {"": problems}
    for name, task in tasks.items():
        yield config.of_task(name), task  # type: ignore[misc]  # what is no mixture is a task


def reward_weights(config: schema.Config, problems: Problems) -> dict[str, float]:
    """Weight of every reward component, as `task_weights`; of `tasks` they are `task.component`."""
    weights: dict[str, float] = {}
    for own, task in parts_of(config, problems):
        with naming(own):
            found = task_weights(own.task, task)
        weights |= {own.component(name): weight for name, weight in found.items()}
    return weights


class Mixture:
    """The problems of several tasks, one task after the other."""

    def __init__(self, config: schema.Config, tasks: Mapping[str, Task]) -> None:
        self.tasks = dict(tasks)
        self._teachers = {name: one.teacher for name, one in config.tasks.items()}

    @property
    def fingerprint(self) -> str:
        """Digest of the tasks' fingerprints."""
        parts = [(name, task.fingerprint) for name, task in self.tasks.items()]
        return blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1]

    def train(self, index: int) -> Problem:
        """Training problem `index`; see `Task.train`."""
        if not 0 <= index < len(self):
            raise IndexError(f"problem {index}")
        number = bisect_right(self._ends, index)
        name, before = list(self.tasks)[number], (0, *self._ends)[number]
        return self._named(name, self.tasks[name].train(index - before))

    def evaluation(self, n: int) -> list[Problem]:
        """Return the first `n` held-out problems, of the tasks in turn."""
        each = [
            [self._named(name, problem) for problem in task.evaluation(n)]
            for name, task in self.tasks.items()
        ]
        rounds = zip_longest(*each)
        return [one for problems in rounds for one in problems if one is not None][:n]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(map(len, self.tasks.values())))

    def _named(self, name: str, problem: Problem) -> Problem:
        return replace(problem, task=name, teacher=problem.teacher or self._teachers[name])


class Quotas:
    """Tasks in an order that keeps their shares: the one furthest behind its share comes next."""

    def __init__(self, weights: Mapping[str, Sequence[tuple[int, float]]]) -> None:
        """weights: by task, each with the place in the order from which it holds. Raises TaskError
        for weights without a small common measure.
        """
        self._starts = sorted({start for pairs in weights.values() for start, _ in pairs})
        self._orders: list[list[str]] = []
        for start in self._starts:
            held = {
                name: next(weight for since, weight in reversed(pairs) if since <= start)
                for name, pairs in weights.items()
            }
            self._orders.append(_order(held))
        self._before: list[Counter[str]] = [Counter()]
        for number, (start, end) in enumerate(zip(self._starts, self._starts[1:], strict=False)):
            self._before.append(self._before[-1] + self._count(number, end - start))

    def __getitem__(self, place: int) -> str:
        """Return the task at a place of the order, 0 or more."""
        number = bisect_right(self._starts, place) - 1
        order = self._orders[number]
        return order[(place - self._starts[number]) % len(order)]

    def before(self, place: int) -> int:
        """Count the earlier places of the task at a place."""
        number, name = bisect_right(self._starts, place) - 1, self[place]
        order, passed = self._orders[number], place - self._starts[number]
        whole, rest = divmod(passed, len(order))
        return self._before[number][name] + whole * order.count(name) + order[:rest].count(name)

    def _count(self, number: int, places: int) -> Counter[str]:
        order = self._orders[number]
        whole, rest = divmod(places, len(order))
        return Counter(order * whole) + Counter(order[:rest])


def _order(weights: Mapping[str, float]) -> list[str]:
    """Return one round of the order, in which each task has its exact share."""
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    scale = lcm(*[one.denominator for one in exact.values()])
    shares = {name: int(one * scale) for name, one in exact.items()}
    common = gcd(*shares.values())
    shares = {name: one // common for name, one in shares.items()}
    total = sum(shares.values())
    if total > LONGEST:
        raise TaskError(
            f"the weights of `tasks` have exact shares of {total:,} groups only, more than "
            f"{LONGEST:,}: choose rounder ones"
        )
    due, order = dict.fromkeys(shares, 0), []
    for _ in range(total):
        due = {name: owed + shares[name] for name, owed in due.items()}
        chosen = max(due, key=lambda name: due[name])
        due[chosen] -= total
        order.append(chosen)
    return order


@dataclass(frozen=True)
class ProblemOrder:
    """The problem of every group id: its index among all (`Problems.train`), and its task. parts:
    name, fingerprint and number of problems of each task; can be pickled.
    """

    seed: int
    parts: tuple[tuple[str, str, int], ...]
    quotas: Quotas | None = None

    @classmethod
    def of(cls, config: schema.Config, problems: Problems) -> ProblemOrder:
        """Read it from a run's configuration and data. Raises TaskError for its weights."""
        tasks = problems.tasks if isinstance(problems, Mixture) else {"": problems}
        parts = tuple((name, task.fingerprint, len(task)) for name, task in tasks.items())
        size = config.rollout.rollout_batch_size
        weights = {
            name: [(int(step) * size, weight) for step, weight in one.weights]
            for name, one in config.tasks.items()
        }
        return cls(config.seed, parts, Quotas(weights) if weights else None)

    def task(self, group_id: int) -> str:
        """Return the task of a group; "" where there is only one."""
        return "" if self.quotas is None else self.quotas[group_id]

    def __call__(self, group_id: int) -> int:
        """Return the index of a group's problem."""
        if self.quotas is None:
            [(_, fingerprint, count)] = self.parts
            return problem_index(self.seed, fingerprint, group_id, count)
        wanted, before = self.quotas[group_id], 0
        for name, fingerprint, count in self.parts:
            if name == wanted:
                place = self.quotas.before(group_id)
                return before + problem_index(self.seed, fingerprint, place, count)
            before += count
        raise KeyError(wanted)

    @property
    def problems(self) -> int:
        """Count the problems of all tasks."""
        return sum(count for _, _, count in self.parts)
