"""The process above an environment child, which ends what that leaves.

Runs in: the first process that a pool starts for environments; the environment child is its fork.
Both hold the tree together from the inside, since whoever ends one of them may not know of the
rest: Ray kills the direct children of an actor that it ends, the pool kills a child that is silent.

    rollout actor ---- guard ---- environment child ---- programs ---- what these start

    the child ends      -> the guard ends everything below it, and ends as the child did
    the actor ends      -> the guard gives the child, which sees it too, `GRACE_S`; then the same
    SIGTERM             -> the guard kills the child; then the same
    the guard is killed -> the child ends everything below itself, and itself

Invariant: as long as one of the two runs, nothing that either has started outlives it. A sweep of
`/proc` from outside would miss processes in `exec`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time

from async_grpo.runtime.lifetime import descendants, kill_descendants

GRACE_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36
_ROUNDS, _ROUND_S = 250, 0.02


def guarded(actor: int) -> None:
    """Fork, and return in the child; the guard stays above it. actor: pid of the parent."""
    watched = os.pidfd_open(actor)
    if os.getppid() != actor:
        sys.exit(f"process {actor}, which started this one, is gone")
    adopt()
    guard = os.getpid()
    child = os.fork()
    if child:
        _guard(child, watched)
    os.close(watched)
    adopt()
    above = os.pidfd_open(guard)
    threading.Thread(target=_end_with, args=(guard, above), name="guard", daemon=True).start()


def adopt() -> None:
    """Become the parent of what processes below this one leave."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _guard(child: int, actor: int) -> None:
    """Wait for the child's end or the actor's, end what is left, and end as the child did."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    nothing = os.open(os.devnull, os.O_RDWR)
    for one in (0, 1):  # the protocol is the child's
        os.dup2(nothing, one)
    ended = os.pidfd_open(child)
    select.select([ended, actor], [], [])
    if not select.select([ended], [], [], GRACE_S)[0]:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    end_below()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _end_with(guard: int, above: int) -> None:
    if os.getppid() == guard:
        select.select([above], [], [])
    end_below()
    os.kill(os.getpid(), signal.SIGKILL)


def end_below() -> None:
    """Kill everything below this process, also what is only just being started."""
    for _ in range(_ROUNDS):
        kill_descendants()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        if not descendants():
            return
        time.sleep(_ROUND_S)
