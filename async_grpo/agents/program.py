"""Programs as environments: any executable that talks to the policy over HTTP, one per episode.

Runs in: the driver and rollout actors (`Program`: problems of another task), and environment
children (`ProgramEnvironment`: the process). Hides what a program is told, and what it is worth:

    {"prompt", "reference", "seed"} --stdin--> program --OPENAI_BASE_URL, OPENAI_API_KEY--> policy
    rewards and correct <--the last line of stdout, JSON--+
                                                          exit status other than 0 --> a failure

How it is begun, read and ended is `program_process`'s.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from async_grpo.agents.fork_server import KEY
from async_grpo.agents.program_process import KEPT, Launcher, ProgramProcess
from async_grpo.agents.served import ServedOptions, ServedTask, result_of, told
from async_grpo.config import schema
from async_grpo.environments.base import Action, Observation
from async_grpo.tasks.base import TaskError, parse_options


class ProgramOptions(ServedOptions):
    """Options of the task `program`."""

    command: Annotated[list[str] | str, Field(min_length=1)]
    """The program and its arguments, as a list or as a line; no shell reads it. `python` alone is
    the interpreter of the run.
    """
    directory: str | None = None
    """Working directory of the program; null: that of the run."""
    variables: dict[str, str] = Field(default_factory=dict)
    """More variables of its environment, beside PATH, HOME, LANG, TMPDIR, SSL_CERT_FILE and
    those of `task.env_vars`. They are stored with the run.
    """
    output_mb: Annotated[float, Field(gt=0)] = 16.0
    """Most that it may print, in MiB; then it is ended, and its group is issued again."""
    preload: list[str] = Field(default_factory=list)
    """Modules that a Python program finds imported: it is forked from a process that has them, and
    need not spend a second on `openai`. The command is an interpreter, then a script or `-m` and a
    module. Random numbers of `random`, numpy and torch begin anew; other state is the same in all.
    """

    @property
    def arguments(self) -> list[str]:
        """The command as a list."""
        words = shlex.split(self.command) if isinstance(self.command, str) else self.command
        return [sys.executable, *words[1:]] if words[:1] == ["python"] else words


class Program(ServedTask):
    """Problems of another task, for a program; see `Task`."""

    def __init__(self, settings: schema.TaskConfig, seed: int) -> None:
        options = parse_options(ProgramOptions, settings)
        if not options.arguments:
            raise TaskError("task.options.command is empty: name the program")
        if options.preload and not _forkable(options.arguments):
            raise TaskError(
                "task.options.preload is for commands like [python, agent.py] or [python, -m, "
                "agent], without options of the interpreter"
            )
        super().__init__(settings, options, seed)
        self.options = options
        self._launcher = Launcher(
            options.arguments,
            directory=options.directory,
            variables=options.variables,
            passed=settings.env_vars,
            preload=options.preload,
            most=round(options.output_mb * 2**20),
        )

    def notes(self, config: schema.Config) -> Iterator[str]:
        """Say nothing, but check that it can be begun. Raises TaskError."""
        self.check(config.environment.reset_timeout_s)
        yield from ()

    def check(self, timeout_s: float) -> None:
        """Find what is begun, and import what is preloaded. Raises TaskError."""
        options, arguments = self.options, self.options.arguments
        directory = Path(options.directory or ".")
        if not directory.is_dir():
            raise TaskError(f"task.options.directory: {directory} is no directory")
        own = "/" in arguments[0]
        if shutil.which(str(directory / arguments[0]) if own else arguments[0]) is None:
            raise TaskError(f"task.options.command: there is no program {arguments[0]}")
        script = arguments[1] if len(arguments) > 1 else ""
        if script.endswith(".py") and not (directory / script).is_file():
            raise TaskError(f"task.options.command: {directory / script} does not exist")
        if options.preload:
            try:
                asyncio.run(asyncio.wait_for(self._launcher.check(), timeout_s))
            except (OSError, RuntimeError, TimeoutError) as error:
                why = str(error) or f"not imported within {timeout_s:g} s"
                raise TaskError(f"task.options.preload: {why}") from error

    def environment(self) -> ProgramEnvironment:
        """Return a new process's owner, which has begun nothing yet."""
        return ProgramEnvironment(self.options, self._launcher)


class ProgramEnvironment:
    """One program. `reset` begins it, `step` waits for its end; what it says last is the episode's
    worth, and its finish reason is the content.
    """

    def __init__(self, options: ProgramOptions, launcher: Launcher) -> None:
        self._options, self._launcher = options, launcher
        self._begun: asyncio.Task[ProgramProcess] | None = None
        self._ending: asyncio.Task[None] | None = None

    async def reset(self, reference: Any, seed: int) -> Observation:
        """Begin the program. reference: the problem, with `url` and `key` of the policy."""
        url, key = reference["url"], reference["key"]
        variables = {
            "OPENAI_BASE_URL": url,
            KEY: key,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": key,
        }
        problem = json.dumps(told(reference, seed)).encode()
        self._begun = asyncio.create_task(self._launcher.begin(problem, variables))
        await asyncio.shield(self._begun)  # `close` ends what begins too late
        return Observation()

    async def step(self, action: Action) -> Observation:
        """Wait for the program's end. Raises RuntimeError for anything but a result."""
        assert self._begun is not None
        ended = await self._begun.result().end()
        if ended.printed_much:
            raise RuntimeError(
                "the program printed more than task.options.output_mb = "
                f"{self._options.output_mb:g}"
            )
        if ended.code != 0:
            how = f"signal {-ended.code}" if ended.code < 0 else f"exit status {ended.code}"
            raise RuntimeError(f"the program ended with {how}: {ended.err}")
        if ended.cut:
            raise RuntimeError(
                f"the last line of the program has {KEPT // 1024} KiB or more; a result must be "
                "shorter: write long data to a file"
            )
        try:
            found = json.loads(ended.out)
        except ValueError:
            found = None
        try:
            return result_of(found, ended.out)
        except ValueError as error:
            raise RuntimeError(f"the last line of the program {error}") from error

    async def close(self) -> None:
        """End the program and what it started, also one that is just being begun."""
        if self._begun is not None:
            self._ending = asyncio.create_task(self._end(self._begun))
            await asyncio.shield(self._ending)  # it goes on where that takes too long

    async def _end(self, begun: asyncio.Task[ProgramProcess]) -> None:
        try:
            process = await begun
        except (OSError, RuntimeError):  # there is none: `reset` has raised it
            return
        await process.close()


def _forkable(arguments: list[str]) -> bool:
    if len(arguments) < 2 or arguments[1] == "-m":
        return len(arguments) > 2
    return not arguments[1].startswith("-")
