"""A process that plays an episode: how it is begun, read and ended.

Runs in: environment children. Hides pipes, sessions, who waits for whom, and the fork server:

    Launcher.begin: a subprocess; with `preload` a fork of the fork server, its imports done

    stdin <- the problem;  stdout, stderr -> their ends, up to `most` bytes;  end -> an exit status

Invariants: whatever a program started is ended with it, if it keeps the episode's key in its
environment; its output is read and thrown away but for the end. This contains accidents; it is no
sandbox against hostile code.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_grpo.agents.fork_server import KEY, LARGEST
from async_grpo.environments.guard import adopt

KEPT = 64 * 1024
"""Bytes of the end of each output that are looked at."""
SWEEPS, SWEEP_S = 50, 0.02
"""Times that what a program left is looked for, as long as there is something, and in between."""
LAST_WORDS_S = 0.5
"""How long the output of a program that has ended may go on."""
_NO_KEY = "-" * 32
"""As long as every key of an episode: the fork server's place for it."""
_PASSED = ("PATH", "HOME", "LANG", "TMPDIR", "SSL_CERT_FILE")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_AWAITED: set[int] = set()
"""Children whose end somebody waits for: programs and fork servers."""
_FORKING: set[object] = set()
"""Forks that are asked for and not awaited yet."""
_FORK_SERVER = Path(__file__).with_name("fork_server.py")


@dataclass(frozen=True)
class Ended:
    """How a program ended: its exit status (negative: a signal), whether it was ended because it
    printed too much, the last line of each output, and whether that of stdout is cut off, since it
    has `KEPT` bytes or more.
    """

    code: int
    printed_much: bool
    out: str
    err: str
    cut: bool


class ProgramProcess:
    """One program, which has begun."""

    def __init__(self, pid: int, wait: Callable[[], int], pipes: _Pipes, *, key: str) -> None:
        """wait: for its end, when that has come; its exit status."""
        self.pid, self._key = pid, key
        _AWAITED.add(pid)
        self._wait, self._pipes = wait, pipes
        self._code: int | None = None

    async def end(self) -> Ended:
        """Wait for the end, whoever still has the outputs."""
        await _exit_of(self.pid)
        if not await self._pipes.closed(LAST_WORDS_S):  # something that it left has its output
            await asyncio.to_thread(sweep, self._key)
        self.kill()  # and its session, while its number is still its own
        code = self._reap()
        out, err = await self._pipes.read()
        cut = len(out) == KEPT and len(_lines(out)) == 1
        return Ended(code, self._pipes.printed_much, _last(out), _last(err), cut)

    async def close(self) -> None:
        """End the program and what it started."""
        if self._code is None:
            self.kill()
            await _exit_of(self.pid)
            self._reap()
        await asyncio.to_thread(sweep, self._key)
        await self._pipes.read()
        _reap_others()

    def _reap(self) -> int:
        """Return the exit status, which the system tells once."""
        if self._code is None:
            self._code = self._wait()
            _AWAITED.discard(self.pid)
        return self._code

    def kill(self) -> None:
        """Kill the program's session, if its end has not been seen."""
        if self._code is not None:  # its number may be another's by now
            return
        for kill in (os.killpg, os.kill):  # a forked one has no session of its own at first
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)


class Launcher:
    """Begins programs with one command; with modules to be imported before, by forking."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        directory: str | None,
        variables: Mapping[str, str],
        passed: Sequence[str] = (),
        preload: Sequence[str] = (),
        most: int,
    ) -> None:
        """directory: None for this process's. variables: beside those that are passed on. passed:
        more names of these. most: bytes of both outputs.
        """
        self._arguments, self._directory = list(arguments), directory
        self._variables, self._preload = dict(variables), list(preload)
        self._passed = (*_PASSED, *passed)
        self._most = most
        self._server: _ForkServer | None = None
        self._asking = asyncio.Lock()

    async def begin(self, problem: bytes, variables: Mapping[str, str]) -> ProgramProcess:
        """Begin a program. problem: its standard input; variables: of this episode, with its key.
        Raises OSError, RuntimeError.
        """
        adopt()
        ours, theirs = _pipe_ends()
        try:
            if self._preload:
                pid, wait = await self._fork(variables, theirs)
            else:
                pid, wait = self._exec(variables, theirs)
        except BaseException:
            for one in ours:
                os.close(one)
            raise
        finally:
            for one in theirs:
                os.close(one)
        pipes = _Pipes(self._most)
        process = ProgramProcess(pid, wait, pipes, key=variables[KEY])
        await pipes.open(ours, problem, too_much=process.kill)
        return process

    async def check(self) -> None:
        """Start the fork server once and end it. Raises OSError, RuntimeError."""
        (await self._start()).end()

    def _exec(
        self, variables: Mapping[str, str], outputs: Sequence[int]
    ) -> tuple[int, Callable[[], int]]:
        begun = subprocess.Popen(
            self._arguments,
            stdin=outputs[0],
            stdout=outputs[1],
            stderr=outputs[2],
            cwd=self._directory,
            env=self._whole(variables),
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        return begun.pid, begun.wait

    async def _fork(
        self, variables: Mapping[str, str], outputs: Sequence[int]
    ) -> tuple[int, Callable[[], int]]:
        async with self._asking:
            if self._server is None or not self._server.alive:
                self._server = await self._start()
            asked = object()
            _FORKING.add(asked)
            try:
                pid = await self._server.fork(variables, outputs)
                _AWAITED.add(pid)
            finally:
                _FORKING.discard(asked)
        return pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    async def _start(self) -> _ForkServer:
        return await _ForkServer.start(
            self._arguments, self._preload, self._directory, self._whole({KEY: _NO_KEY})
        )

    def _whole(self, variables: Mapping[str, str]) -> dict[str, str]:
        passed = {name: os.environ[name] for name in self._passed if name in os.environ}
        return {**passed, "PYTHONUNBUFFERED": "1", **self._variables, **variables}


class _ForkServer:
    """The process that has imported, and forks."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process, self._control = process, control

    @classmethod
    async def start(
        cls,
        arguments: Sequence[str],
        modules: Sequence[str],
        directory: str | None,
        variables: Mapping[str, str],
    ) -> _ForkServer:
        """Start it, and wait for its imports. Raises OSError, RuntimeError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        plan = json.dumps({"modules": list(modules), "arguments": list(arguments[1:])})
        with theirs:
            process = subprocess.Popen(
                [arguments[0], str(_FORK_SERVER), str(theirs.fileno()), plan],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                cwd=directory,
                env=dict(variables),
                preexec_fn=_die_with_parent,
            )
        ours.setblocking(False)
        _AWAITED.add(process.pid)
        server = cls(process, ours)
        said = await server._said()
        if "ready" not in said:
            server.end()
            raise RuntimeError(said["error"])
        return server

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        if self._process.poll() is None:
            return True
        self._control.close()
        return False

    async def fork(self, variables: Mapping[str, str], outputs: Sequence[int]) -> int:
        """Return the pid of a new program with these files. Raises RuntimeError."""
        message = json.dumps({**variables, "parent": str(os.getpid())}).encode()
        if len(message) > LARGEST:
            raise RuntimeError(f"the variables of an episode have more than {LARGEST} bytes")
        socket.send_fds(self._control, [message], list(outputs))
        said = await self._said()
        if "pid" not in said:
            raise RuntimeError(said["error"])
        return int(said["pid"])

    async def _said(self) -> dict[str, str]:
        loop = asyncio.get_running_loop()
        try:
            message = await loop.sock_recv(self._control, LARGEST)
        except BaseException:  # an answer that nobody waits for would be the next one's
            self.end()
            raise
        if not message:
            self.end()
            raise RuntimeError(
                "the process that programs are forked from has ended; its own output is on stderr"
            )
        return json.loads(message)

    def end(self) -> None:
        """End it; programs that it has forked go on."""
        self._process.kill()
        self._process.wait()
        self._control.close()


class _Pipes:
    """A program's three files, seen from outside."""

    def __init__(self, most: int) -> None:
        self._printed, self._most = 0, most
        self._talk: asyncio.Task[None] | None = None
        self._kept = [b"", b""]
        self._transports: list[asyncio.BaseTransport] = []

    @property
    def printed_much(self) -> bool:
        """Whether more was printed than allowed."""
        return self._printed > self._most

    async def open(self, ends: Sequence[int], problem: bytes, too_much: Callable[[], None]) -> None:
        """Begin to write and read. ends: of stdin, stdout, stderr."""
        into = await _writer(ends[0])
        outputs = []
        for one in ends[1:]:
            reader, transport = await _reader(one)
            outputs.append(reader)
            self._transports.append(transport)
        self._transports.append(into.transport)
        self._talk = asyncio.create_task(self._both(into, problem, outputs, too_much))

    async def closed(self, timeout_s: float) -> bool:
        """Wait until both outputs have ended; whether they have."""
        assert self._talk is not None
        done, _ = await asyncio.wait({self._talk}, timeout=timeout_s)
        return bool(done)

    async def read(self) -> tuple[bytes, bytes]:
        """Return the ends of both outputs, where these do not end soon what there is of them."""
        assert self._talk is not None
        if not await self.closed(LAST_WORDS_S):
            self._talk.cancel()
            for one in self._transports:
                one.close()
        return self._kept[0], self._kept[1]

    async def _both(
        self,
        into: asyncio.StreamWriter,
        problem: bytes,
        outputs: Sequence[asyncio.StreamReader],
        too_much: Callable[[], None],
    ) -> None:
        async def read(number: int, stream: asyncio.StreamReader) -> None:
            while part := await stream.read(KEPT):
                self._printed += len(part)
                if self.printed_much:
                    too_much()
                self._kept[number] = (self._kept[number] + part)[-KEPT:]

        async def say() -> None:
            with contextlib.suppress(ConnectionError):  # it may not want to know
                into.write(problem)
                await into.drain()
            into.close()

        await asyncio.gather(say(), *[read(at, one) for at, one in enumerate(outputs)])


def sweep(key: str) -> None:
    """Kill all processes of this user that have this key in their environment, and take what those
    leave to their parent, where that is this process and nobody else awaits them.
    """
    marked = f"{KEY}={key}".encode()
    killed: set[int] = set()
    for _ in range(SWEEPS):
        found = {pid for pid in _processes() if marked in _environment(pid).split(b"\0")}
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
        for pid in killed - _AWAITED:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not found and not any(Path(f"/proc/{pid}").exists() for pid in killed - _AWAITED):
            return
        time.sleep(SWEEP_S)


def _reap_others() -> None:
    """Take what ended programs left to this process, their parent now, and what has ended since."""
    if _FORKING:  # one that is just being adopted may have ended, and nobody awaits it yet
        return
    for pid in _processes():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        state, parent = stat.rpartition(")")[2].split()[:2]
        if state == "Z" and int(parent) == os.getpid() and pid not in _AWAITED:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _pipe_ends() -> tuple[list[int], list[int]]:
    """Return this process's ends and the program's, of stdin, stdout and stderr."""
    read_in, write_in = os.pipe()
    read_out, write_out = os.pipe()
    read_err, write_err = os.pipe()
    return [write_in, read_out, read_err], [read_in, write_out, write_err]


async def _reader(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
    )
    return reader, transport


async def _writer(descriptor: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), os.fdopen(descriptor, "wb", 0)
    )
    return asyncio.StreamWriter(transport, protocol, None, loop)


async def _exit_of(pid: int) -> None:
    """Wait until a child has ended, whoever still has its output."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended, and somebody has waited for it
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


def _last(output: bytes) -> str:
    return _lines(output)[-1].strip().decode(errors="replace")


def _lines(output: bytes) -> list[bytes]:
    r"""Split at \n and \r alone: what else ends lines in Unicode may stand in JSON."""
    return output.rstrip().splitlines() or [b""]
