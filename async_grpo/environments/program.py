"""Programs as environments: any executable that talks to the policy over HTTP, one per episode.

Runs in: the driver and rollout actors (`Program`: problems of another task), and environment
children (`ProgramEnvironment`: the process). Hides how a process is begun, read and ended:

    {"prompt", "reference", "seed"} --stdin--> program --OPENAI_BASE_URL, OPENAI_API_KEY--> policy
    rewards and verdict <--the last line of stdout, JSON--+
                                                          exit status other than 0 --> a failure

Invariants: whatever a program started is ended with its episode, if it keeps the episode's key in
its environment; its output is read and thrown away but for the end, and bounded. This contains
accidents; it is no sandbox against hostile code.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shlex
import signal
import time
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from async_grpo.config import schema
from async_grpo.config.section import Section
from async_grpo.environments.base import Action, Observation
from async_grpo.tasks.base import Problem, TaskError, parse_options

KEY = "OPENAI_API_KEY"
KEPT = 64 * 1024
"""Bytes of the end of each output that are looked at."""
LONGEST_LINE = 300
SWEEPS, SWEEP_S = 50, 0.02
"""Times that what a program left is looked for, as long as there is something, and in between."""
LAST_WORDS_S = 0.5
"""How long the output of a program that has ended may go on."""
_PASSED = ("PATH", "HOME", "LANG", "TMPDIR", "SSL_CERT_FILE")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None)


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
        if self._options.of == "program":
            raise TaskError("task.options.of is `program`: name the task whose problems it plays")
        inner = settings.model_copy(
            update={"name": self._options.of, "options": self._options.of_options}
        )
        self._task = create_task(inner, seed)
        self.weights = dict(self._options.rewards or self._task.weights)

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
        return ProgramEnvironment(self._options)


class ProgramEnvironment:
    """One program. `reset` begins it, `step` waits for its end; what it says last is the episode's
    worth, and its finish reason is the content.
    """

    def __init__(self, options: ProgramOptions) -> None:
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self._talk: asyncio.Task[tuple[bytes, bytes]] | None = None
        self._key = ""
        self._printed, self._most = 0, round(options.output_mb * 2**20)

    async def reset(self, reference: Any, seed: int) -> Observation:
        """Begin the program. reference: the problem, with `url` and `key` of the policy."""
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what it leaves behind is ours
        self._key = reference["key"]
        variables = {name: os.environ[name] for name in _PASSED if name in os.environ}
        variables |= {"OPENAI_BASE_URL": reference["url"], KEY: self._key, "PYTHONUNBUFFERED": "1"}
        self._process = await asyncio.create_subprocess_exec(
            *self._options.arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self._options.directory,
            env=variables | self._options.variables,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        problem = {"prompt": reference["prompt"], "reference": reference["reference"], "seed": seed}
        self._talk = asyncio.create_task(self._read(json.dumps(problem).encode()))
        return Observation()

    async def step(self, action: Action) -> Observation:
        """Wait for the program's end. Raises RuntimeError for anything but a result."""
        assert self._process is not None and self._talk is not None
        await _exit_of(self._process.pid)
        done, _ = await asyncio.wait({self._talk}, timeout=LAST_WORDS_S)
        if not done:  # something that it left has its output
            await asyncio.to_thread(sweep, self._key, but=self._process.pid)
        out, err = await asyncio.shield(self._talk)
        code = await self._process.wait()
        if self._printed > self._most:
            raise RuntimeError(
                "the program printed more than task.options.output_mb = "
                f"{self._options.output_mb:g}"
            )
        if code != 0:
            how = f"signal {-code}" if code < 0 else f"exit status {code}"
            raise RuntimeError(f"the program ended with {how}: {_last_line(err)}")
        return _result(_last_line(out))

    async def close(self) -> None:
        """End the program and what it started."""
        if self._process is not None:
            self._kill()
            await asyncio.to_thread(sweep, self._key, but=self._process.pid)
            await self._process.wait()
        if self._talk is not None:
            await self._talk

    def _kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self, problem: bytes) -> tuple[bytes, bytes]:
        """Say the problem, and read both outputs to their end."""
        process = self._process
        assert process is not None and process.stdin and process.stdout and process.stderr

        async def read(stream: asyncio.StreamReader) -> bytes:
            kept = b""
            while part := await stream.read(KEPT):
                self._printed += len(part)
                if self._printed > self._most:
                    self._kill()
                kept = (kept + part)[-KEPT:]
            return kept

        async def say() -> None:
            with contextlib.suppress(ConnectionError):  # it may not want to know
                process.stdin.write(problem)
                await process.stdin.drain()
            process.stdin.close()

        _, out, err = await asyncio.gather(say(), read(process.stdout), read(process.stderr))
        return out, err


def is_program(task: object) -> bool:
    """Whether a task's episodes are played by programs."""
    return isinstance(task, Program)


def sweep(key: str, *, but: int = 0) -> None:
    """Kill all processes of this user that have an episode's key in their environment, and take
    what those leave to their parent, where that is this process. but: one whose end somebody else
    waits for.
    """
    marked = f"{KEY}={key}".encode()
    killed: set[int] = set()
    for _ in range(SWEEPS):
        found = {pid for pid in _processes() if marked in _environment(pid).split(b"\0")}
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
        killed.discard(but)
        for pid in killed:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not found and not any(Path(f"/proc/{pid}").exists() for pid in killed):
            return
        time.sleep(SWEEP_S)


async def _exit_of(pid: int) -> None:
    """Wait until a child has ended, whoever still has its output."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended, and the event loop knows
        return
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _processes() -> list[int]:
    own = os.getpid()
    return [
        int(one.name)
        for one in Path("/proc").iterdir()
        if one.name.isdigit() and int(one.name) != own
    ]


def _environment(pid: int) -> bytes:
    """Read a process's environment; empty for one that has ended, or that is another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _for_program(problem: Problem) -> Problem:
    reference = {"prompt": problem.prompt, "reference": problem.reference}
    return Problem(problem.prompt, reference, problem.solution)


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _result(line: str) -> Observation:
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
