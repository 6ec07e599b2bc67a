"""Doubles that let the `nccl` path run on CPU: vLLM's NCCL communicator, and the CUDA stream and
device calls that CPU torch lacks.

Runs in: test processes and, through a vLLM plugin (tests/plugins), every process of vLLM that they
start. Everything else is real. On a machine with GPUs nothing is replaced.

The doubles are as unforgiving as what they stand for:
- The root's broadcast returns at once and runs on its stream's thread; `synchronize` waits for it
  and raises its error. Other ranks block in the call, because on CPU what follows on the stream
  runs at once; a thread for which it does not (tests/support/gpu_order.py) returns at once too.
- Operations of one communicator run in the order of the calls, whatever their streams. One
  transfers only when every rank has called it.
- A peer that dies or leaves is not noticed: the others hang until they call `destroy`, which is
  `ncclCommAbort`. A broadcast that is
  blocked then raises `Aborted` (with the fault `quiet_abort` it returns and leaves its bytes
      undefined, as on a GPU); one that is called
  later does nothing, as with vLLM's communicator.
- The current device and stream belong to the thread. Ranks that share a process need different
  devices, or they share vLLM's streams.

Faults and the log are files, named by environment variables so that they reach vLLM's child
processes; see `Control`.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo

LIMIT_S = 120.0
"""No wait in here is longer, so that a test which forgets to abort ends with an error."""
ABORT_WAIT_S, IDLE_S = 5.0, 0.5
order: Callable[[str], AbstractContextManager[None]] | None = None
"""Around the transfer of every bucket, on its root, with the communicator's id: a
`gpu_order.Order`.
"""
_POLL_S = 0.0005
_FAULTS, _LOG = "NCCL_DOUBLE_FAULTS", "NCCL_DOUBLE_LOG"
_PLUGINS = Path(__file__).parent / "plugins"
FAULTS = ("hang", "stuck", "corrupt", "exit", "slow", "quiet_abort")


class Aborted(RuntimeError):
    """The communicator of this process was destroyed while the broadcast ran."""


# -- control
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """One line of the log. t: `time.monotonic`, comparable between processes of a machine. event:
    init, begin, end, lost, abort.
    """

    event: str
    t: float
    pid: int
    rank: int
    bucket: int
    nbytes: int
    comm: str


class Control:
    """The test's side: which faults to inject, and what the communicators logged."""

    def __init__(self, directory: Path) -> None:
        self.faults_path, self.log_path = (
            directory / "nccl_faults.json",
            directory / "nccl_log.jsonl",
        )
        self._serial = 0

    def inject(self, *faults: dict[str, Any]) -> None:
        """Replace the faults by these; none removes them. A fault is `{"kind": ..., "rank": ...}`
        and perhaps `comm`, `bucket`, `seconds`.

        rank: of the communicator, 0 is the sender. comm: its id, if one of several. bucket: which
        broadcast of a communicator, counted from 0 since this call; every one if left out. Kinds:
        `hang` before the bucket until aborted, `stuck` likewise but not abortable, `corrupt` one
        bit of what a receiver got (the sign of a float in its middle), `exit` the process at once,
        `slow` by `seconds`, `quiet_abort` (see above).
        """
        for fault in faults:
            if fault["kind"] not in FAULTS:
                raise ValueError(
                    f"there is no fault {fault['kind']!r}; known are {', '.join(FAULTS)}"
                )
        self._serial += 1
        scratch = self.faults_path.with_suffix(".new")
        scratch.write_text(json.dumps({"serial": self._serial, "faults": faults}))
        scratch.replace(self.faults_path)

    def events(self, event: str | None = None, *, rank: int | None = None) -> list[Event]:
        """What was logged since `clear`, in order of time."""
        text = self.log_path.read_text() if self.log_path.exists() else ""
        found = sorted((Event(**json.loads(line)) for line in text.splitlines()), key=lambda e: e.t)
        return [e for e in found if event in (None, e.event) and rank in (None, e.rank)]

    def clear(self) -> None:
        """Forget the log and remove the faults."""
        self.log_path.write_text("")
        self.inject()


def _read_faults() -> tuple[int, list[dict[str, Any]]]:
    path = os.environ.get(_FAULTS)
    if not path or not os.path.exists(path):
        return 0, []
    content = json.loads(Path(path).read_text())
    return content["serial"], content["faults"]


def _log(event: Event) -> None:
    if path := os.environ.get(_LOG):
        with open(
            path, "ab", buffering=0
        ) as file:  # one write in append mode: lines of several processes do not mix
            file.write(json.dumps(vars(event)).encode() + b"\n")


# -- streams and devices
# ----------------------------------------------------------------------------------------------


class Stream:
    """torch.cuda.Stream for what the communicator enqueues; tensor operations of CPU torch do not
    wait for it.
    """

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device, self.index = (
            torch.device("cpu"),
            _thread.device if device is None else _index(device),
        )
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()  # the running one stays in front
        self._errors: list[BaseException] = []
        self._worker: threading.Thread | None = None
        _streams.add(self)

    def enqueue(self, job: Callable[[], None]) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()
            if self._worker is None:
                # A daemon: a broadcast that hangs does not keep a process alive, as on a GPU.
                self._worker = threading.Thread(target=self._work, daemon=True, name="stream")
                self._worker.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._jobs, IDLE_S):
                    self._worker = None
                    return
                job = self._jobs[0]
            try:
                job()
            except Exception as error:  # noqa: BLE001 - raised by the next synchronize
                self._errors.append(error)
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()

    def synchronize(self) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._jobs, LIMIT_S):
                raise TimeoutError(
                    f"a stream did not finish within {LIMIT_S:g} s, and nobody aborted its "
                    "communicator"
                )
            errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def query(self) -> bool:
        return not self._jobs

    def reached(self) -> Callable[[], bool]:
        """Record an event: the answer says whether all that is enqueued now has run."""
        with self._changed:
            last = self._jobs[-1] if self._jobs else None

        def reached() -> bool:
            with self._changed:
                return last not in self._jobs

        return reached

    def record_event(self) -> Any:
        """An event whose `synchronize` waits for all that is enqueued now."""
        reached = self.reached()
        return SimpleNamespace(synchronize=lambda: self._wait_for(reached))

    def wait_stream(self, other: Stream) -> None:
        reached = other.reached()
        if other is not self:
            self.enqueue(lambda: other._wait_for(reached))

    def _wait_for(self, reached: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(reached, LIMIT_S):
                raise TimeoutError(f"a stream waited {LIMIT_S:g} s for another one")


class _Thread(threading.local):
    device = 0
    stream: Stream | None = None
    gpu: Any = None
    """A `gpu_order.Gpu`: what follows a broadcast is enqueued as well."""


_thread = _Thread()
_streams: weakref.WeakSet[Stream] = weakref.WeakSet()
_default_streams: dict[int, Stream] = {}
_default_lock = threading.Lock()


def _current_device_index() -> int:
    return _thread.device


def _set_device_index(device: Any) -> None:
    _thread.device = _index(device)


def _current_stream(device: Any = None) -> Stream:
    if _thread.stream is not None:
        return _thread.stream
    with _default_lock:
        index = _thread.device if device is None else _index(device)
        return _default_streams.setdefault(index, Stream(index))


@contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    before = _thread.stream
    _thread.stream = stream or before
    try:
        yield
    finally:
        _thread.stream = before


def _synchronize(device: Any = None) -> None:
    for stream in list(_streams):
        if stream.index == (_thread.device if device is None else _index(device)):
            stream.synchronize()


def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    """Nothing without a Gpu: memory of the CPU is free when no job refers to it any more."""
    if _thread.gpu is not None:
        _thread.gpu.record_stream(tensor, stream)


def _index(device: Any) -> int:
    return device if isinstance(device, int) else torch.device(device).index or 0


# -- communicator
# --------------------------------------------------------------------------------------------------


class GlooCommunicator:
    """vLLM's PyNcclCommunicator over gloo."""

    def __init__(
        self, group: Any, device: int | str | torch.device, library_path: str | None = None
    ) -> None:
        self.group, self.rank, self.world_size = group, group.rank, group.world_size
        self.device = torch.device("cpu")
        self.available = self.world_size > 1
        self.disabled = not self.available
        self._aborted, self._changed = threading.Event(), threading.Condition()
        self._issued = self._finished = self._bucket = self._serial = 0
        if self.disabled:
            return
        for stream in list(_streams):
            stream._errors = []  # of a group that is gone
        self._id = group.broadcast_obj(os.urandom(4).hex(), src=0)
        self._store = PrefixStore(self._id, group.store)
        self._log("init", -1, 0)
        options = ProcessGroupGloo._Options()
        options._timeout, options._devices = (
            timedelta(seconds=LIMIT_S),
            [ProcessGroupGloo.create_device(hostname="127.0.0.1")],
        )
        self._gloo = ProcessGroupGloo(self._store, self.rank, self.world_size, options)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Stream | None = None) -> None:
        if self.disabled:
            return
        assert tensor.device == self.device, (
            f"the communicator works on {self.device}, but the tensor is on {tensor.device}"
        )
        with self._changed:
            number, self._issued = self._issued, self._issued + 1
        if _thread.gpu is not None:
            tensor = _thread.gpu.address(tensor)
        if src == self.rank or _thread.gpu is not None:
            (stream or _current_stream()).enqueue(lambda: self._run(number, tensor, src))
        else:
            self._run(number, tensor, src)

    def destroy(self) -> None:
        """Abort: blocked broadcasts of this process end at once. The other ranks are not told."""
        if self.available and not self.disabled:
            self._log("abort", -1, 0)
            self._aborted.set()
            with self._changed:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._finished == self._issued, ABORT_WAIT_S)
            self.available, self.disabled = False, True

    def _run(self, number: int, tensor: torch.Tensor, src: int) -> None:
        """Broadcast `number` of this communicator, after those before it."""
        try:
            self._wait(lambda: self._finished == number, may_hang=False)
            bucket, faults = self._next_bucket()
            self._log("begin", bucket, tensor.nbytes)
            self._suffer(faults)
            with order(self._id) if order and src == self.rank else nullcontext():
                self._transfer(number, tensor, src)
            if "corrupt" in faults and src != self.rank:
                _bytes_of(tensor)[min(tensor.nbytes // 2 | 3, tensor.nbytes - 1)] ^= 0x80
            self._log("end", bucket, tensor.nbytes)
        except Aborted:
            if "quiet_abort" not in self._faults()[1]:
                raise
        finally:
            with self._changed:
                self._finished += 1
                self._changed.notify_all()

    def _transfer(self, number: int, tensor: torch.Tensor, src: int) -> None:
        """Wait until every rank has come, then let gloo copy: a gloo operation that has begun
        cannot be aborted.
        """
        if tensor.nbytes == 0:
            return
        ready = [f"{number}/ready/{rank}" for rank in range(self.world_size) if rank != src]
        if src == self.rank:
            self._wait(lambda: self._store.check(ready))
            self._store.set(f"{number}/go", "")
        else:
            self._store.set(f"{number}/ready/{self.rank}", "")
            self._wait(lambda: self._store.check([f"{number}/go"]))
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        work = self._gloo.broadcast([_bytes_of(tensor)], options)
        self._wait(work.is_completed)
        if not work.is_success():
            self._lost(work.exception())

    def _wait(self, condition: Callable[[], bool], *, may_hang: bool = True) -> None:
        """Until the condition holds. Raises Aborted. Losing the peers is no end: NCCL's kernels
        would go on waiting.
        """
        deadline = time.monotonic() + LIMIT_S
        while not self._aborted.is_set():
            if _exiting.is_set():
                time.sleep(LIMIT_S)
            try:
                if condition():
                    return
            except RuntimeError as error:
                if not may_hang:
                    raise
                self._lost(error)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"a broadcast waited {LIMIT_S:g} s, and nobody aborted its communicator"
                )
            time.sleep(_POLL_S)
        raise Aborted(f"rank {self.rank} aborted its communicator during a broadcast")

    def _lost(self, error: object) -> None:
        """Hang until aborted."""
        self._log("lost", -1, 0)
        if not self._aborted.wait(LIMIT_S):
            raise TimeoutError(
                f"a broadcast lost its peers ({error}), and nobody aborted its "
                f"communicator within {LIMIT_S:g} s"
            )
        raise Aborted(
            f"rank {self.rank} aborted its communicator after it had lost its peers: {error}"
        )

    def _faults(self) -> tuple[int, dict[str, dict[str, Any]]]:
        serial, faults = _read_faults()
        return serial, {
            fault["kind"]: fault
            for fault in faults
            if fault.get("rank", self.rank) == self.rank and fault.get("comm", self._id) == self._id
        }

    def _next_bucket(self) -> tuple[int, dict[str, dict[str, Any]]]:
        """Which broadcast this is since the faults were set, and the faults for it by kind."""
        serial, faults = self._faults()
        self._bucket = self._bucket + 1 if serial == self._serial else 0
        self._serial = serial
        return self._bucket, {
            kind: fault
            for kind, fault in faults.items()
            if fault.get("bucket", self._bucket) == self._bucket
        }

    def _suffer(self, faults: dict[str, dict[str, Any]]) -> None:
        if "exit" in faults:
            os._exit(17)
        if "stuck" in faults:
            time.sleep(LIMIT_S)
        if "hang" in faults:
            self._wait(lambda: False)
        if "slow" in faults and self._aborted.wait(faults["slow"]["seconds"]):
            raise Aborted(f"rank {self.rank} aborted its communicator during a slow broadcast")

    def _log(self, event: str, bucket: int, nbytes: int) -> None:
        _log(Event(event, time.monotonic(), os.getpid(), self.rank, bucket, nbytes, self._id))


_exiting = threading.Event()


@atexit.register
def _park() -> None:
    """Keep daemon threads out of C++ while the interpreter ends: it would kill them there, and the
    process with SIGABRT.
    """
    _exiting.set()
    time.sleep(20 * _POLL_S)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory, uint8 [n]."""
    return tensor.detach().view(-1).view(torch.uint8)


# -- installation
# --------------------------------------------------------------------------------------------------

_originals: list[tuple[Any, str, Any]] = []


def install() -> None:
    """Put the doubles in place in this process; nothing on a machine with GPUs, and nothing the
    second time.
    """
    if torch.cuda.is_available() or _originals:
        return
    from vllm.distributed.device_communicators import pynccl

    for owner, name, double in (
        (pynccl, "PyNcclCommunicator", GlooCommunicator),
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "stream", _stream),
        (torch.cuda, "current_stream", _current_stream),
        (torch.Tensor, "record_stream", _record_stream),
        (torch.accelerator, "current_device_index", _current_device_index),
        (torch.accelerator, "set_device_index", _set_device_index),
        (torch.accelerator, "synchronize", _synchronize),
    ):
        _originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, double)


def uninstall() -> None:
    """Put back what `install` replaced."""
    while _originals:
        owner, name, original = _originals.pop()
        setattr(owner, name, original)


@contextmanager
def installed(directory: Path) -> Iterator[Control]:
    """The doubles in this process and in all that it starts meanwhile; faults and log are files in
    `directory`.
    """
    control = Control(directory)
    ours = {_FAULTS: str(control.faults_path), _LOG: str(control.log_path)}
    path = os.pathsep.join(
        filter(None, [str(_PLUGINS), str(_PLUGINS.parents[2]), os.environ.get("PYTHONPATH")])
    )
    before = {name: os.environ.get(name) for name in (*ours, "PYTHONPATH")}
    os.environ.update(ours, PYTHONPATH=path)
    sys.path.insert(0, str(_PLUGINS))  # what multiprocessing hands to its children
    install()
    try:
        yield control
    finally:
        uninstall()
        sys.path.remove(str(_PLUGINS))
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
