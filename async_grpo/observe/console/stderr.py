"""What is written to standard error while a panel is on the terminal, as lines that can be printed
above it.

Runs in: the driver. Hides that the file descriptor itself is taken, for a traceback may come from
another thread, from C++, or from a child: `sys.stderr` in its place would see the first of them
only.

Invariants: only where standard error is the terminal that the panel is on; nothing that is written
before `stop` gets lost, and a child that still has the descriptor afterwards can go on writing.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable

from async_grpo.runtime.text import without_colours

STDERR = 2
JOIN_S = 1.0
"""A child that outlives the panel keeps its end of the pipe, so the thread may outlive it too."""


class StderrLines:
    """Hands every line that is written to standard error to `say`, until `stop`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        sys.stderr.flush()
        self._terminal = os.dup(STDERR)
        reading, writing = os.pipe()
        os.dup2(writing, STDERR)
        os.close(writing)
        self._thread = threading.Thread(
            target=self._read, args=(reading,), name="async_grpo-stderr", daemon=True
        )
        self._thread.start()
        atexit.register(self.stop)  # the traceback of a script that ends with the panel on

    def stop(self) -> None:
        """Give standard error back."""
        atexit.unregister(self.stop)
        sys.stderr.flush()
        os.write(STDERR, b"\n")  # the end of what has no end yet
        os.dup2(self._terminal, STDERR)
        os.close(self._terminal)
        self._thread.join(JOIN_S)

    def _read(self, reading: int) -> None:
        with open(reading, encoding="utf-8", errors="replace", newline="\n") as lines:
            for line in lines:
                last = line.rstrip("\r\n").rpartition("\r")[2]  # state of a bar drawn again
                if text := without_colours(last.expandtabs()):
                    self._say(text)


def same_terminal(descriptor: int) -> bool:
    """Whether standard error goes to the terminal that this descriptor is."""
    try:
        return os.isatty(STDERR) and os.fstat(STDERR).st_rdev == os.fstat(descriptor).st_rdev
    except OSError:  # it is closed
        return False
