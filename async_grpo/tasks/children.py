"""Child processes that run a user's code, each with a pipe.

Runs in: rollout actors (and the driver, for evaluation). Hides how a child is started, watched and
killed. Invariants: a child dies with its parent, in a process group of its own; no wait is without
a deadline that its caller gives; whatever a child says is one message, or an error of its kind.
This contains accidents; it is no sandbox against hostile code.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

from async_grpo.runtime import stacks
from async_grpo.tasks import pipe

START_TIMEOUT_S = 120.0
"""Longest time a child may take to import the task and be ready."""
_STOP_TIMEOUT_S = 10.0
_GRACE_S = 0.2
_LAST_WORDS_S = 2.0
_KEPT_ENVIRONMENT = ("PATH", "HOME", "LANG")
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class ChildError(RuntimeError):
    """A call of a child failed, for a `reason` of one word."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True)
class ChildKind:
    """What a kind of children runs: its name, module, the setting of its deadline, its error;
    variables that it has of this process's environment, beside those that all have; whether it has
    processes of its own, which it ends at SIGTERM.
    """

    name: str
    module: str
    setting: str
    error: type[ChildError]
    variables: tuple[str, ...] = ()
    has_children: bool = False


class Child:
    """One process and its pipe. `greeting`: what it said when it was ready."""

    def __init__(self, process: asyncio.subprocess.Process, kind: ChildKind) -> None:
        self._process, self._kind = process, kind
        self.pid = process.pid
        self.asked: float | None = None
        """Since when the child owes an answer (monotonic seconds)."""
        self.greeting: Any = None
        self._expected: int | None = None
        """Length of a message whose head has been read and whose body has not."""

    @classmethod
    async def spawn(cls, kind: ChildKind, setup: bytes) -> Child:
        """Start a child and let it import the task. Raises ChildError("start")."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            kind.module,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_environment(kind.variables),
            start_new_session=True,
        )
        child = cls(process, kind)
        try:
            await child._send(pipe.frame(setup), START_TIMEOUT_S)
            said, detail = await child.receive(START_TIMEOUT_S)
        except ChildError as error:
            await child.kill()
            raise kind.error(
                "start",
                f"a {kind.name} child did not get ready ({error}); its own output is on stderr",
            ) from error
        except asyncio.CancelledError:
            await child.kill()
            raise
        if said != "ready":
            await child.kill()
            raise kind.error("start", f"a {kind.name} child could not construct the task: {detail}")
        child.greeting = detail
        return child

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.returncode is None

    async def send(self, body: bytes, timeout: float) -> None:
        """Send a packed message. Raises ChildError, MessageTooLarge."""
        await self._send(pipe.frame(body), timeout)

    async def receive(self, timeout: float | None) -> list[Any]:
        """Return the next message within `timeout` seconds. Raises ChildError timeout or crash."""
        reader = self._process.stdout
        assert reader is not None
        try:
            try:
                return await self._read(reader, timeout)
            except TimeoutError:
                # A parent that was busy itself may find the answer waiting in the pipe.
                return await self._read(reader, _GRACE_S)
        except TimeoutError as error:
            raise self._kind.error(
                "timeout", f"no answer within {timeout:g} s ({self._kind.setting})"
            ) from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise await self._gone() from error
        except ValueError as error:
            raise self._kind.error(
                "crash", f"the {self._kind.name} child wrote something else than an answer: {error}"
            ) from error

    async def end(self, within_s: float) -> None:
        """Close the pipe, so that the process may end by itself; then kill it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._process.wait()
        await self.kill()

    async def kill(self) -> None:
        """Kill the process and what it started, and wait for its end."""
        if self._process.returncode is None and self._kind.has_children:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self._process.wait()
            if self._process.returncode is None:  # what is below it ends what it has started
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await asyncio.sleep(_GRACE_S)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.killpg(self._process.pid, signal.SIGKILL)
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def _send(self, data: bytes, timeout: float) -> None:
        writer = self._process.stdin
        assert writer is not None
        try:
            async with asyncio.timeout(timeout):
                writer.write(data)
                await writer.drain()
        except TimeoutError as error:
            raise self._kind.error(
                "timeout", f"the {self._kind.name} child took no message within {timeout:g} s"
            ) from error
        except ConnectionError as error:
            raise await self._gone() from error

    async def _read(self, reader: asyncio.StreamReader, timeout: float | None) -> list[Any]:
        async with asyncio.timeout(timeout):
            if self._expected is None:
                self._expected = pipe.checked_length(
                    pipe.LENGTH.unpack(await reader.readexactly(pipe.LENGTH.size))[0]
                )
            message = pipe.unpack(await reader.readexactly(self._expected))
            self._expected = None
        if not isinstance(message, list) or len(message) < 2:
            raise ValueError(f"{message!r:.80}")
        return message

    async def _gone(self) -> ChildError:
        """Return the error for a child that closed its pipe."""
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                code = await self._process.wait()
        except TimeoutError:
            return self._kind.error("crash", f"the {self._kind.name} child closed its pipe")
        if code == -signal.SIGXCPU:
            return self._kind.error(
                "timeout", f"it took more CPU time than {self._kind.setting} allows"
            )
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return self._kind.error("crash", f"the {self._kind.name} child {how}")


def _environment(more: tuple[str, ...]) -> dict[str, str]:
    """Return a clean environment in which the child can import what this process can."""
    names = (*_KEPT_ENVIRONMENT, *more)
    kept = {name: os.environ[name] for name in names if name in os.environ}
    path = [os.path.abspath(entry) for entry in sys.path]
    return {**kept, **stacks.environment(), **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(path)}
