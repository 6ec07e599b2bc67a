"""Programs as environments: any executable that talks to the policy over HTTP, one per episode.

Runs in: the driver and rollout actors (`Program`: problems of another task), and environment
children (`ProgramEnvironment`: the process). Hides what a program is told, and what it is worth:

    {"prompt", "reference", "seed"} --stdin--> program --OPENAI_BASE_URL, OPENAI_API_KEY--> policy
    rewards and verdict <--the last line of stdout, JSON--+
                                                          exit status other than 0 --> a failure

How it is begun, read and ended is `program_process`'s.
"""

from __future__ import annotations

import json
import shlex
from typing import Annotated, Any

from pydantic import Field

from async_grpo.config import schema
from async_grpo.config.section import Section
from async_grpo.environments.base import Action, Observation
from async_grpo.environments.fork_server import KEY
from async_grpo.environments.program_process import Launcher, ProgramProcess
from async_grpo.tasks.base import Problem, TaskError, parse_options

LONGEST_LINE = 300


class ProgramOptions(Section):
    """Options of the task `program`."""

    command: Annotated[list[str] | str, Field(min_length=1)]
    """The program and its arguments, as a list or as a line; no shell reads it."""
    of: str = "jsonl"
    """Task whose problems are posed; its `train`, `eval` and `fields` are this task's."""
    of_options: dict[str, Any] = Field(default_factory=dict)
    """Options of that task."""
    rewards: dict[str, float] | None = None
    """Weights of the reward components that the program may name; null: those of the task `of`."""
    directory: str | None = None
    """Working directory of the program; null: that of the run."""
    variables: dict[str, str] = Field(default_factory=dict)
    """More variables of its environment, beside PATH, HOME, LANG, TMPDIR and SSL_CERT_FILE."""
    output_mb: Annotated[float, Field(gt=0)] = 16.0
    """Most that it may print, in MiB; then it is ended, and its group is issued again."""
    preload: list[str] = Field(default_factory=list)
    """Modules that a Python program finds imported: it is forked from a process that has them, and
    need not spend a second on `openai`. The command is an interpreter, then a script or `-m` and a
    module.
    """

    @property
    def arguments(self) -> list[str]:
        """The command as a list."""
        return shlex.split(self.command) if isinstance(self.command, str) else self.command


class Program:
    """Problems of another task, for a program; see `Task`."""

    def __init__(self, settings: schema.TaskConfig, seed: int) -> None:
        from async_grpo.tasks.registry import create_task

        self._options = parse_options(ProgramOptions, settings)
        if not self._options.arguments:
            raise TaskError("task.options.command is empty: name the program")
        if self._options.preload and not _forkable(self._options.arguments):
            raise TaskError(
                "task.options.preload is for commands like [python, agent.py] or [python, -m, "
                "agent], without options of the interpreter"
            )
        if self._options.of == "program":
            raise TaskError("task.options.of is `program`: name the task whose problems it plays")
        inner = settings.model_copy(
            update={"name": self._options.of, "options": self._options.of_options}
        )
        self._task = create_task(inner, seed)
        self.weights = dict(self._options.rewards or self._task.weights)
        self._launcher = Launcher(
            self._options.arguments,
            directory=self._options.directory,
            variables=self._options.variables,
            preload=self._options.preload,
            most=round(self._options.output_mb * 2**20),
        )

    @property
    def fingerprint(self) -> str:
        """Of the problems; see `Task.fingerprint`."""
        return f"program-{self._task.fingerprint}"

    def __len__(self) -> int:
        return len(self._task)

    def train(self, index: int) -> Problem:
        """Training problem `index`; see `Task.train`."""
        return _for_program(self._task.train(index))

    def evaluation(self, n: int) -> list[Problem]:
        """Held-out problems; see `Task.evaluation`."""
        return [_for_program(problem) for problem in self._task.evaluation(n)]

    def environment(self) -> ProgramEnvironment:
        """Return a new process's owner, which has begun nothing yet."""
        return ProgramEnvironment(self._options, self._launcher)


class ProgramEnvironment:
    """One program. `reset` begins it, `step` waits for its end; what it says last is the episode's
    worth, and its finish reason is the content.
    """

    def __init__(self, options: ProgramOptions, launcher: Launcher) -> None:
        self._options, self._launcher = options, launcher
        self._process: ProgramProcess | None = None

    async def reset(self, reference: Any, seed: int) -> Observation:
        """Begin the program. reference: the problem, with `url` and `key` of the policy."""
        variables = {"OPENAI_BASE_URL": reference["url"], KEY: reference["key"]}
        problem = {"prompt": reference["prompt"], "reference": reference["reference"], "seed": seed}
        self._process = await self._launcher.begin(json.dumps(problem).encode(), variables)
        return Observation()

    async def step(self, action: Action) -> Observation:
        """Wait for the program's end. Raises RuntimeError for anything but a result."""
        assert self._process is not None
        ended = await self._process.end()
        if ended.printed_much:
            raise RuntimeError(
                "the program printed more than task.options.output_mb = "
                f"{self._options.output_mb:g}"
            )
        if ended.code != 0:
            how = f"signal {-ended.code}" if ended.code < 0 else f"exit status {ended.code}"
            raise RuntimeError(f"the program ended with {how}: {ended.err}")
        return result_of(ended.out)

    async def close(self) -> None:
        """End the program and what it started."""
        if self._process is not None:
            await self._process.close()


def is_program(task: object) -> bool:
    """Whether a task's episodes are played by programs."""
    return isinstance(task, Program)


def _forkable(arguments: list[str]) -> bool:
    if len(arguments) < 2 or arguments[1] == "-m":
        return len(arguments) > 2
    return not arguments[1].startswith("-")


def _for_program(problem: Problem) -> Problem:
    reference = {"prompt": problem.prompt, "reference": problem.reference}
    return Problem(problem.prompt, reference, problem.solution)


def result_of(line: str) -> Observation:
    """Read what a program says last. Raises RuntimeError."""
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("rewards"), dict):
        raise RuntimeError(
            'the last line of the program must be JSON like {"rewards": {"correct": 1.0}, '
            f'"verdict": 1}}; it was {line[:LONGEST_LINE]!r}'
        )
    reason = found.get("finish_reason", "env_done")
    return Observation(
        reason if isinstance(reason, str) else "env_done",
        found["rewards"],
        done=True,
        verdict=found.get("verdict"),
        metrics=found.get("metrics") or {},
    )
