"""How learner ranks and engines on CPU share the cores of a machine (`cluster.cores: shared`).

    both work        each on its own cores, those that placement dealt to it
    engines wait     ranks on all of these cores
    ranks wait       engines on all of these cores

Runs in: ranks and rollout actors (`compute_in`), the driver (`Lender`). Each process computes in
more threads than it has cores of its own, always as many, so that no number depends on who waits;
threads that wait for each other sleep instead of spinning. Hides how the kernel is asked. Not the
kernel's own balance: without affinities, whatever the priorities, a step of a model of 135 million
parameters took 1.2 times as long. Invariants: a process that is gone lends nothing; one that has
started again is found; after `stop` nothing is moved.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from async_grpo.runtime import stacks

LOOK_S = 0.05
"""Seconds between two looks at who works."""
_LOOKS_UNTIL_NEW = 20
"""Looks after which processes that have started are found."""


def compute_in(threads: int) -> None:
    """Let libraries that this process and its children load from now on compute in `threads`."""
    os.environ.update(
        OMP_NUM_THREADS=str(threads),
        OMP_WAIT_POLICY="passive",
        GOMP_SPINCOUNT="0",
        MKL_DYNAMIC="FALSE",  # else as many as there are cores at the first call
    )


def stay_on(cores: Collection[int], *, pid: int | None = None) -> None:
    """Keep all threads of this or another process, and those that they start, on these cores."""
    for thread in os.listdir(f"/proc/{pid or os.getpid()}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)


@dataclass(slots=True)
class _Worker:
    """A rank or an engine. own: its cores; on: those it may use now; ticks: of computing so far."""

    learns: bool
    own: frozenset[int]
    on: frozenset[int]
    ticks: int


class Lender:
    """Moves ranks and engines of this machine between their own cores and all, in a thread."""

    def __init__(self, directory: str | Path, cores: Collection[int]) -> None:
        """directory: where the run's processes register (`stacks.home`). cores: of all of them;
        empty to lend none.
        """
        self._directory, self._cores = directory, frozenset(cores)
        self._workers: dict[stacks.Process, _Worker] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._lend, name="async_grpo-cores", daemon=True)

    def start(self) -> None:
        """Begin to lend."""
        if self._cores:
            self._thread.start()

    def stop(self) -> None:
        """Move no process from now on; also before `start`, and twice."""
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _lend(self) -> None:
        looks = 0
        while not self._end.wait(LOOK_S):
            if looks % _LOOKS_UNTIL_NEW == 0:
                self._find()
            looks += 1
            self._look()

    def _find(self) -> None:
        for process in stacks.registered(self._directory):
            learns = process.role.startswith("learner-")
            if process in self._workers or not (learns or process.role.endswith("+engine")):
                continue
            with contextlib.suppress(OSError):  # it has ended
                if stacks.begun(process.pid) == process.begun:
                    own = frozenset(os.sched_getaffinity(process.pid))
                    self._workers[process] = _Worker(learns, own, own, _ticks(process.pid))

    def _look(self) -> None:
        working = {True: False, False: False}
        for process, worker in list(self._workers.items()):
            try:
                ticks = _ticks(process.pid)
            except OSError:
                del self._workers[process]
                continue
            working[worker.learns] |= ticks > worker.ticks
            worker.ticks = ticks
        for process, worker in self._workers.items():
            cores = worker.own if working[not worker.learns] else self._cores
            if cores != worker.on:
                worker.on = cores
                with contextlib.suppress(OSError):  # it has ended
                    stay_on(cores, pid=process.pid)


def _ticks(pid: int) -> int:
    """Return a process's CPU time in clock ticks. Raises OSError for one that has ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
