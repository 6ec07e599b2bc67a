"""One pool of child processes that run a user's code: verifiers and environments are its kinds.

Runs in: rollout actors (and the driver, for evaluation), on one event loop. Hides how a child is
started, watched, replaced and ended:

    ChildPool      place 0     place 1     ...        a kind of Child says which module runs, and
       |              |           |                   whether it has many calls at a time
     start, child: spawn -- setup ----> tasks/child.py: limits, then the task, in a process of its
       |              |   <-- "ready" -  own session; what it prints goes to stderr
       |            send -- messages -> the module's work      each with a deadline, of its caller
       |           receive <----------
       |            kill: it hangs, lies, or owes what nobody waits for; a new one takes its place
       |           leaving: likewise, once its user has no more work in it
     close: end, for all

Invariants: a child dies with its parent; no wait is without a deadline that its caller gives;
whatever a child says is one message, or an error of its kind; whatever was started is ended by
`close`, also what was only being started. This contains accidents; it is no sandbox against hostile
code.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar

from async_grpo.config import schema
from async_grpo.config.environment import EnvironmentConfig
from async_grpo.runtime import stacks
from async_grpo.runtime.variables import known
from async_grpo.tasks import pipe

START_TIMEOUT_S = 120.0
"""Longest time a child may take to import the task and be ready."""
SILENCE_S = 5.0
"""A child with many calls answers this much later than its longest deadline, or is not able to."""
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


class Child:
    """One process and its pipe. A kind of children gives it a name, and what it runs."""

    name: ClassVar[str]
    module: ClassVar[str]
    setting: ClassVar[str]
    """The setting of its deadline."""
    error: ClassVar[type[ChildError]]
    variables: ClassVar[tuple[str, ...]] = ()
    """Those that it has of this process's environment, beside those that all have."""
    has_children: ClassVar[bool] = False
    """Whether it has processes of its own, which it ends at SIGTERM."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self.pid = process, process.pid
        self._stdin, self._stdout = process.stdin, process.stdout
        self.greeting: Any = None
        """What it said when it was ready: the names of the task's reward components."""
        self.is_async = False
        """Whether the task's `score` is a coroutine function."""
        self.leaving = False
        """Whether it gets no new work."""
        self._expected: int | None = None
        """Length of a message whose head has been read and whose body has not."""

    @classmethod
    async def spawn(cls, setup: bytes, env_vars: Mapping[str, str]) -> Self:
        """Start a child and let it construct the task. env_vars: `task.env_vars` with their values.
        Raises ChildError("start").
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            cls.module,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_environment(cls.variables, env_vars),
            start_new_session=True,
        )
        child = cls(process)
        try:
            child.greeting = await child._greeted(setup)
        except BaseException:
            await child.kill()
            raise
        return child

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.returncode is None

    async def send(self, body: bytes, timeout: float) -> None:
        """Send a packed message. Raises ChildError, MessageTooLarge."""
        data = pipe.frame(body)
        try:
            async with asyncio.timeout(timeout):
                self._stdin.write(data)
                await self._stdin.drain()
        except TimeoutError as error:
            raise self.error(
                "timeout", f"the {self.name} child took no message within {timeout:g} s"
            ) from error
        except ConnectionError as error:
            raise await self._gone() from error

    async def receive(self, timeout: float | None) -> list[Any]:
        """Return the next message within `timeout` seconds. Raises ChildError timeout or crash."""
        try:
            try:
                return await self._read(timeout)
            except TimeoutError:
                # A parent that was busy itself may find the answer waiting in the pipe.
                return await self._read(_GRACE_S)
        except TimeoutError as error:
            raise self.error(
                "timeout", f"no answer within {timeout:g} s ({self.setting})"
            ) from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise await self._gone() from error
        except ValueError as error:
            raise self.error(
                "crash", f"the {self.name} child wrote something else than an answer: {error}"
            ) from error

    async def end(self) -> None:
        """End the process as its kind does, when the pool is closed."""
        await self.kill()

    async def kill(self, within_s: float = 0.0) -> None:
        """Kill the process and what it started, and wait for its end. within_s: how long it may
        take to end by itself, once its pipe is closed.
        """
        self.leaving = True
        if within_s:
            self._stdin.close()
            await self._exit_code(within_s)
        if self.alive and self.has_children:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            if await self._exit_code(_STOP_TIMEOUT_S) is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()  # what is below it ends what it has started
                await asyncio.sleep(_GRACE_S)
        if self.alive:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.killpg(self.pid, signal.SIGKILL)
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await self._process.wait()
        self._stdin.close()

    async def _greeted(self, setup: bytes) -> Any:
        try:
            await self.send(setup, START_TIMEOUT_S)
            said, detail, *more = await self.receive(START_TIMEOUT_S)
        except ChildError as error:
            raise self.error(
                "start",
                f"a {self.name} child did not get ready ({error}); its own output is on stderr",
            ) from error
        if said != "ready":
            raise self.error("start", f"a {self.name} child could not construct the task: {detail}")
        self.is_async = more == [True]
        return detail

    async def _read(self, timeout: float | None) -> list[Any]:
        async with asyncio.timeout(timeout):
            if self._expected is None:
                self._expected = pipe.checked_length(
                    pipe.LENGTH.unpack(await self._stdout.readexactly(pipe.LENGTH.size))[0]
                )
            message = pipe.unpack(await self._stdout.readexactly(self._expected))
            self._expected = None
        if not isinstance(message, list) or len(message) < 2:
            raise ValueError(f"{message!r:.80}")
        return message

    async def _gone(self) -> ChildError:
        """Return the error for a child that closed its pipe."""
        code = await self._exit_code(_LAST_WORDS_S)
        if code is None:
            return self.error("crash", f"the {self.name} child closed its pipe")
        if code == -signal.SIGXCPU:
            return self.error("timeout", f"it took more CPU time than {self.setting} allows")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return self.error("crash", f"the {self.name} child {how}")

    async def _exit_code(self, within_s: float) -> int | None:
        """Wait for the end; None where the process still runs then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._process.wait()
        return self._process.returncode


class ManyCalls(Child):
    """A child that has many calls at a time, where it `answers_many`. A message is the number of a
    call and its request; the reply is that number, and the answer. After one that says that its
    process is spoilt it gets no new work.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__(process)
        self.calls: dict[int, asyncio.Future[list[Any]]] = {}
        """Answers that it owes, by number."""
        self.heard = time.monotonic()
        """When it said something last, or began to owe an answer."""
        self._numbers, self._ended = itertools.count(), False
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def spawn(cls, setup: bytes, env_vars: Mapping[str, str]) -> Self:
        """Start a child, and listen to it."""
        child = await super().spawn(setup, env_vars)
        if child.answers_many:
            child._reader = asyncio.create_task(child._read_replies())
        return child

    @property
    def answers_many(self) -> bool:
        """Whether it speaks as this class says."""
        return True

    async def ask(
        self, request: bytes, timeout_s: float, *, patience_s: float, in_turn: bool = False
    ) -> list[Any]:
        """Return the answer to a packed request within patience_s, in_turn: as long as the child
        says something that often; else it is ended. Raises ChildError, MessageTooLarge.
        """
        if self._ended:
            raise self.error("crash", f"the {self.name} child has ended")
        began = time.monotonic()
        if not self.calls:
            self.heard = began
        number = next(self._numbers)
        answer = self.calls[number] = asyncio.get_running_loop().create_future()
        try:
            # msgpack: an array of two values
            await self.send(b"\x92" + pipe.pack(number) + request, timeout_s)
            while not answer.done():
                left = (self.heard if in_turn else began) + patience_s - time.monotonic()
                if left <= 0:
                    await self.end("crash", f"the child gave no answer for {patience_s:g} s")
                    break
                await asyncio.wait({answer}, timeout=left)
            return await answer
        finally:
            del self.calls[number]

    async def end(self, reason: str = "closed", detail: str = "it was ended") -> None:
        """Kill it; the calls that it owes answers to fail."""
        if self._ended:
            return
        self._ended = self.leaving = True
        for answer in self.calls.values():
            if not answer.done():
                answer.set_result([reason, detail])
        if self._reader is not None and self._reader is not asyncio.current_task():
            self._reader.cancel()
        await self.kill(self._grace_s(reason))

    def _grace_s(self, reason: str) -> float:
        """How long it may take to end by itself."""
        return 0.0

    async def _read_replies(self) -> None:
        """Deliver replies until the child ends."""
        while True:
            try:
                number, *reply = await self.receive(None)
            except ChildError as error:
                await self.end(error.reason, str(error))
                return
            self.heard = time.monotonic()
            if reply[0] in (pipe.STUCK, "memory"):  # also where nobody waits for it any more
                self.leaving = True
            answer = self.calls.get(number) if isinstance(number, int) else None
            if answer is not None and not answer.done():
                answer.set_result(reply)


AnyChild = TypeVar("AnyChild", bound=Child)


class ChildPool(Generic[AnyChild]):
    """Children of one kind, one at each place (from 0). All methods belong to one event loop."""

    REASONS: ClassVar[tuple[str, ...]] = (
        "timeout",
        "crash",
        "memory",
        "exception",
        "wrong_type",
        "not_sendable",
        "start",
        "closed",
    )

    def __init__(
        self,
        kind: type[AnyChild],
        task: schema.TaskConfig,
        limits: schema.Verifier | EnvironmentConfig,
        *,
        seed: int,
        cpu: set[int] | None,
        more: dict[str, Any] | None = None,
    ) -> None:
        """limits: how many children, and their memory. cpu: their cores, None for any. more: what
        they are told beside the task. Nothing starts before `start`.
        """
        self.errors: Counter[str] = Counter()
        """What failed, by reason."""
        told = {"settings": task.model_dump(), "seed": seed, "memory_mb": limits.memory_mb}
        self._setup = pipe.pack(told | {"cpu": sorted(cpu) if cpu else None} | (more or {}))
        self._kind, self._closed = kind, False
        self._env_vars = known(task.env_vars)
        self._places: list[AnyChild | None] = [None] * limits.workers
        self._turns = [asyncio.Lock() for _ in range(limits.workers)]
        self._children: list[AnyChild] = []

    @property
    def children(self) -> list[AnyChild]:
        """All that run, also those that are leaving."""
        return [child for child in self._children if child.alive]

    async def start(self) -> None:
        """Start all children and wait until they are ready; if one cannot be, the pool is closed.
        Raises ChildError("start").
        """
        try:
            await self.present()
        except BaseException:
            await self.close()
            raise

    async def present(self) -> list[AnyChild]:
        """Return the children of all places, those started that are missing. Raises ChildError
        start or closed.
        """
        missing = [place for place in range(len(self._places)) if self._at(place) is None]
        outcomes = await asyncio.gather(*map(self.child, missing), return_exceptions=True)
        if failed := [outcome for outcome in outcomes if isinstance(outcome, BaseException)]:
            raise failed[0]
        return [child for child in self._places if child is not None]

    async def child(self, place: int) -> AnyChild:
        """Return the child of a place, started if there is none. Raises ChildError start or
        closed.
        """
        async with self._turns[place]:
            child = self._at(place)
            if child is None and not self._closed:
                child = self._places[place] = await self._kind.spawn(self._setup, self._env_vars)
                self._children = [*self.children, child]
                if self._closed:
                    await child.end()
            if child is None or self._closed:
                raise self._kind.error("closed", f"the {self._kind.name} pool has been closed")
            return child

    def _at(self, place: int) -> AnyChild | None:
        child = self._places[place]
        usable = child is not None and child.alive and not child.leaving and not self._closed
        return child if usable else None

    async def close(self) -> None:
        """End all children; what is asked of them ends in an error. Idempotent."""
        self._closed = True
        await asyncio.gather(*(child.end() for child in self.children))


def _environment(more: tuple[str, ...], env_vars: Mapping[str, str]) -> dict[str, str]:
    """Return a clean environment in which the child can import what this process can."""
    names = (*_KEPT_ENVIRONMENT, *more)
    kept = {name: os.environ[name] for name in names if name in os.environ}
    path = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    return {**kept, **stacks.environment(), **_ONE_THREAD, **env_vars, **path}
