"""One run at a time in a run directory: the file `lock.json` in it.

Runs in: the driver, with a thread of its own. Hides how the lock of a dead owner is told from that
of a living one:

    the owner's process can be seen here     by its id and the time of its start
    elsewhere: another node or container,    by its heartbeat: the file is touched every `BEAT_S`,
        or this machine before a reboot      and one that is older than `SILENT_S` has no owner

The age of the file is measured against a file made now in the same directory, so the clocks of the
machines need not agree.

Invariants: nothing of a run is written before the lock is held; an owner that stood still for so
long that another start took over finds that out at its next beat, and ends; an error names the
holder's host and process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from async_grpo.errors import SetupError
from async_grpo.runtime import lifetime, stacks
from async_grpo.runtime.storage import open_to_others

LOCK = "lock.json"
BEAT_S = 5.0
SILENT_S = 60.0
POLL_S = 0.2

_log = logging.getLogger(__name__)


class RunLock:
    """The lock of one start of a run."""

    def __init__(self, run_dir: Path, *, lost: Callable[[str], None]) -> None:
        """lost: gets a sentence, in another thread, when another start has taken over."""
        self._run_dir, self._lost = run_dir, lost
        self._path = run_dir / LOCK
        self._token = uuid.uuid4().hex
        self._since = time.time()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, *, note: Callable[[str], None], check: Callable[[], None]) -> bool:
        """Take the lock, also from a dead owner; whether there was an owner. Holding it already is
        no error.

        note: gets a sentence before a wait for the heartbeat of an owner that cannot be seen from
        here; `check` is called meanwhile, and what it raises ends the wait. Raises SetupError where
        another run holds the lock, or where the file cannot be written.
        """
        if self._thread is not None:
            return False
        self._closing.clear()
        try:
            self._run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            if open_to_others(self._run_dir):  # somebody made it so
                note(
                    f"other users of this machine can read {self._run_dir}, with its texts and "
                    f"weights; `chmod 700 {self._run_dir}` ends that"
                )
            found = self._take(note, check)
        except OSError as error:
            raise SetupError(
                f"{self._path} cannot be written: {error.strerror}; set run.dir to a directory "
                "that this user may write to"
            ) from error
        self._thread = threading.Thread(target=self._beat, name="async_grpo-lock", daemon=True)
        self._thread.start()
        return found

    def release(self) -> None:
        """Remove the lock, if it is held. A second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._closing.set()
        thread.join(timeout=BEAT_S)
        with contextlib.suppress(OSError), _alone(self._run_dir):
            if (_read(self._path) or {}).get("token") == self._token:
                self._path.unlink()

    def _take(self, note: Callable[[str], None], check: Callable[[], None]) -> bool:
        watched: int | None = None
        while True:
            with _alone(self._run_dir):
                owner = _read(self._path)
                lives = False if owner is None else _lives(owner, self._path)
                if owner is None or lives is False:
                    self._write()
                    return owner is not None
                touched = self._path.stat().st_mtime_ns
            if lives or watched not in (None, touched):
                raise SetupError(
                    f"another run uses {self._run_dir}: {_named(owner)}; wait until it has ended, "
                    "or give this run another run.dir"
                )
            if watched is None:
                watched = touched
                note(
                    f"{self._path} names {_named(owner)}, which cannot be seen from here; the "
                    f"directory is taken over once that process has been silent for {SILENT_S:g} s"
                )
            check()
            time.sleep(POLL_S)

    def _write(self) -> None:
        temporary = self._path.with_name(f"{LOCK}.{self._token}")
        owner = {
            "token": self._token,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "owner": lifetime.owner(),
            "begun": stacks.begun(os.getpid()),
            "since": self._since,
        }
        temporary.write_text(json.dumps(owner) + "\n", encoding="utf-8")
        os.replace(temporary, self._path)

    def _beat(self) -> None:
        failing = False
        while not self._closing.wait(BEAT_S):
            try:
                owner = _read(self._path)
                if owner is None:  # somebody removed the file, and nobody took it
                    self._write()
                elif owner.get("token") == self._token:
                    os.utime(self._path)
                else:
                    self._lost(
                        f"{_named(owner)} has taken over {self._run_dir}, because this run was "
                        f"stopped for more than {SILENT_S:g} s; only one run may write there"
                    )
                    return
                failing = False
            except OSError as error:
                if not failing:
                    _log.warning("%s cannot be touched: %s", self._path, error.strerror)
                failing = True


def _lives(owner: dict[str, Any], path: Path) -> bool | None:
    """Whether the owner lives; None where its process cannot be seen and its heartbeat is young."""
    lives = stacks.lives(str(owner.get("owner", "")), int(owner.get("begun", 0)))
    if lives is None:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{LOCK}.") as now:
            age = os.fstat(now.fileno()).st_mtime - path.stat().st_mtime
        return False if age > SILENT_S else None
    return lives


def _named(owner: dict[str, Any]) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(owner.get("since", 0.0))))
    return f"process {owner.get('pid')} on {owner.get('host')}, since {since}"


def _read(path: Path) -> dict[str, Any] | None:
    """Read what the file says of its owner, {} if it cannot be understood; None without a file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Let no other start look at the lock and change it meanwhile. A file system that cannot lock
    a directory is left to the heartbeat: of two that write at once the first finds out.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
