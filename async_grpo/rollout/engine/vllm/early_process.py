"""Starts EngineCore's process before vLLM asks for it.

Runs in: rollout actors, and in the process that is started. vLLM's front end imports some 6,000
modules and then spawns EngineCore, which imports them again: ten seconds of CPU time after ten
seconds. Here the second process starts at once and imports beside the first; when vLLM spawns
EngineCore, it gets this one. Hides how multiprocessing spawns.

Invariants: from the hand-over on the process has the environment of a spawned one. If it died, or
its environment cannot be changed (libraries loaded before its first line), vLLM spawns its own. A
vLLM that wants to hand over open files is an error. Either way EngineCore runs on its cores. The
process ends when it is not taken, and when its parent dies.
"""

from __future__ import annotations

import glob
import importlib
import importlib.util
import io
import json
import os
import sys
import tempfile
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnProcess, set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen
from pathlib import Path
from typing import Any

from async_grpo.runtime.lifetime import die_with_parent

MODULES = (
    "async_grpo.runtime.light_imports",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.model_loader",
    "vllm.distributed.weight_transfer.nccl_engine",
    "vllm.model_executor.model_loader.reload",
)
"""Modules of EngineCore; not the worker extension, which reads the environment when imported."""
ENGINE_CORE = "EngineCore"
_LENGTH_BYTES = 8
_UTIL: Any = util  # not typed: private functions of multiprocessing
_SPAWN: Any = SpawnProcess


class EarlyProcess:
    """A process that imports what EngineCore will need, and then waits."""

    def __init__(self, *, cores: Collection[int], modules: Sequence[str] = MODULES) -> None:
        """cores: of EngineCore, empty for any; `modules` are imported on whatever core is free."""
        self._cores = sorted(cores)
        self._preload = preload()
        self._tracker = resource_tracker.getfd()
        self.sentinel, child_w = os.pipe()
        child_r, self.writer = os.pipe()
        code = (
            f"from async_grpo.rollout.engine.vllm.early_process import main; main({os.getpid()}, "
            f"{self._tracker}, {child_r}, {[*modules]})"
        )
        command = [
            os.fsdecode(spawn.get_executable()),
            *_UTIL._args_from_interpreter_flags(),
            "-c",
            code,
            "--multiprocessing-fork",
        ]
        with environment(
            PYTHONPATH=os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
            LD_PRELOAD=self._preload,
        ):
            self.pid = _UTIL.spawnv_passfds(
                spawn.get_executable(), command, [self._tracker, child_r, child_w]
            )
        os.close(child_r)
        os.close(child_w)
        self._waits = True
        # at its end of file the process ends
        self.finalizer = weakref.finalize(self, _UTIL.close_fds, self.sentinel, self.writer)

    @contextmanager
    def offered(self) -> Iterator[None]:
        """Give this process to vLLM, if it spawns EngineCore inside the block; end it otherwise."""
        usual = _SPAWN._Popen

        def choose(process: SpawnProcess) -> Popen:
            fits = (
                process.name == ENGINE_CORE
                and self._waits
                and os.environ.get("LD_PRELOAD", "") == self._preload
                and self._lives()
            )
            if fits:
                return _Taken(process, self)
            spawned = usual(process)
            if process.name == ENGINE_CORE and self._cores:
                os.sched_setaffinity(spawned.pid, self._cores)
            return spawned

        _SPAWN._Popen = staticmethod(choose)
        try:
            yield
        finally:
            _SPAWN._Popen = staticmethod(usual)
            self.end()

    def take(self) -> bytes:
        """Hand the process over; returns the bytes to send ahead."""
        self._waits = False
        self.finalizer.detach()
        facts = json.dumps({"environment": dict(os.environ), "cores": self._cores}).encode()
        return len(facts).to_bytes(_LENGTH_BYTES, "little") + facts

    def end(self) -> None:
        """End the process, unless it was taken."""
        if self._waits:
            self._waits = False
            self.finalizer()
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)

    def _lives(self) -> bool:
        if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            return True
        self._waits = False
        self.finalizer()
        return False


class _Taken(Popen):
    """multiprocessing's handle of EngineCore's process."""

    _fds: list[int]
    finalizer: Any

    def __init__(self, process: SpawnProcess, early: EarlyProcess) -> None:
        self._early = early
        self.pid, self.sentinel = early.pid, early.sentinel
        super().__init__(process)

    def _launch(self, process: SpawnProcess) -> None:
        data = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process.name), data)
            reduction.dump(process, data)
        finally:
            set_spawning_popen(None)
        if self._fds:
            raise RuntimeError(
                "EngineCore needs open files of its parent, but its process already runs"
            )
        ahead = self._early.take()
        self.finalizer = _UTIL.Finalize(
            self, _UTIL.close_fds, (self._early.sentinel, self._early.writer)
        )
        with open(self._early.writer, "wb", closefd=False) as pipe:
            pipe.write(ahead)
            pipe.write(data.getbuffer())


def main(parent: int, tracker: int, pipe: int, modules: Sequence[str]) -> None:
    """Import, wait, and become the process that the parent describes."""
    import setproctitle

    die_with_parent(parent)
    # finds where the title goes, between arguments and environment as they were at the start
    setproctitle.getproctitle()
    for name in modules:
        importlib.import_module(name)
    facts = json.loads(_read(pipe, int.from_bytes(_read(pipe, _LENGTH_BYTES), "little")))
    os.environ.clear()
    os.environ.update(facts["environment"])
    tempfile.tempdir = None  # a module may have asked for it; it is another one now
    if facts["cores"]:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), facts["cores"])
    spawn.spawn_main(tracker_fd=tracker, pipe_handle=pipe)


def _read(pipe: int, size: int) -> bytes:
    """Read exactly `size` bytes; end the process at the end of file."""
    found = b""
    while len(found) < size:
        part = os.read(pipe, size - len(found))
        if not part:
            sys.exit(0)
        found += part
    return found


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    return Path(spec.origin).parent


def preload() -> str:
    """LD_PRELOAD as vLLM sets it on CPU: PyTorch's OpenMP library, and vLLM's allocator if any."""
    libraries = os.environ.get("LD_PRELOAD", "")
    torch, vllm = (_folder(name) for name in ("torch", "vllm"))
    if not any(name in libraries for name in ("libomp", "libgomp", "libiomp")):
        found = _first(torch.parent / "torch.libs/libgomp*.so*", torch / "lib/libgomp*.so*")
        libraries = ":".join(filter(None, [libraries, found]))
    if "libtcmalloc" not in libraries:
        found = _first(vllm / "libs/libtcmalloc_minimal*.so*", vllm / "libs/libtcmalloc.so*")
        libraries = ":".join(filter(None, [found, libraries]))
    return libraries


def _first(*patterns: Path) -> str:
    """Return the first file that matches, or ""."""
    return next((path for pattern in patterns for path in glob.glob(str(pattern))), "")


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set these variables for processes that start inside the block; an empty value sets none."""
    before = {name: os.environ.get(name) for name in values}
    try:
        os.environ.update({name: value for name, value in values.items() if value})
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
