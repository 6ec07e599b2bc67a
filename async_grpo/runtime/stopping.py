"""Asking a run to end: by SIGTERM, SIGINT, or a call.

Runs in: the driver. Hides how a wait is cut short. Invariants: a request never interrupts what must
be whole (a learner step that trains, a publication, a checkpoint); whatever else the main thread
waits for gives way within `POLL_S`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, NoReturn, Self

from async_grpo.errors import EXIT_MEANING, StopRequested
from async_grpo.runtime.lifetime import kill_descendants

STOPPED_EARLY = "stopped as asked, before there was anything to save; the same command starts again"
POLL_S = 0.2
CANCELLED_S = 10.0
"""For work that was cancelled to come to its end."""
SHORT_GRACE_S = 60.0
RAYS_GRACE_S = 3.0


class Stop(threading.Event):
    """Set once somebody asked the run to end. Safe in signal handlers and in any thread."""

    def check(self) -> None:
        """Raise StopRequested if the run was asked to end."""
        if self.is_set():
            raise StopRequested("the run was asked to end")

    def run(
        self, work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop, *, stoppable: bool
    ) -> Any:
        """Wait for `work` in the loop of another thread; its result. If `stoppable`, cancel it once
        asked, wait until it has ended, and raise StopRequested.
        """
        begun: list[asyncio.Task[Any]] = []
        done = threading.Event()

        def begin() -> None:
            begun.append(loop.create_task(work))
            begun[0].add_done_callback(lambda _: done.set())

        loop.call_soon_threadsafe(begin)
        try:
            while not done.wait(POLL_S):
                if stoppable:
                    self.check()
        except BaseException:
            # whoever stops the run next must not take away what the work still uses
            loop.call_soon_threadsafe(lambda: begun[0].cancel())
            done.wait(CANCELLED_S)
            raise
        return begun[0].result()


def stop_early() -> None:
    """Let SIGTERM and SIGINT end the process as `Signals` would, while it still imports: nothing
    has been started, and there is nothing to save.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop_early)


def _stop_early(number: int, frame: FrameType | None) -> NoReturn:
    os.write(1, f"{STOPPED_EARLY}\nexit code 0: {EXIT_MEANING[0]}\n".encode())
    os._exit(0)


class Signals:
    """Catch SIGTERM and SIGINT: the first asks the run to end, the second ends it at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` prints a line."""
        self._say = say
        self._trainer: Any = None
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(self, *error: object) -> None:
        usual: dict[int, Any] = {
            signal.SIGTERM: signal.SIG_DFL,
            signal.SIGINT: signal.default_int_handler,
        }
        for number, handler in self._before.items():
            signal.signal(number, usual[number] if handler is _stop_early else handler)

    def attach(self, trainer: Any) -> None:
        """From now on the request goes to this trainer; at once if it has been made already."""
        self._trainer = trainer
        if self.requested:
            trainer.request_stop()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested:
            if os.isatty(1):
                os.write(1, b"\x1b[?25h")  # the cursor, which the panel hides
            os.write(
                1,
                f"\nerror: exit code {128 + number}: a second signal ({name}) ended the "
                "run at once\n".encode(),
            )
            # the kernel would end most of them; Ray's agents take minutes to notice
            kill_descendants()
            if self._trainer is not None:
                self._trainer.abandon()
            os._exit(128 + number)
        self.requested = True
        if self._trainer is not None:
            self._trainer.request_stop()
        text = (
            f"{name}: the run ends after the learner step that is being trained, and saves; a "
            "second signal ends it at once"
        )
        # the main thread may be in the middle of printing
        threading.Thread(target=self._say, args=(text,), daemon=True).start()


def grace_period() -> str | None:
    """Say what the user of a Ray job should know about `ray job stop`; None outside a job."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:
        return None
    seconds = float(os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", RAYS_GRACE_S))
    line = f"`ray job stop` gives this run {seconds:g} s to save before it is killed"
    if seconds < SHORT_GRACE_S:
        line += (
            ", which is too short for a learner step and a checkpoint of a real model: set "
            "RAY_JOB_STOP_WAIT_TIME_S to 600 in the env_vars of the job's runtime_env "
            "(docs/how-to/deploy/ray.md); a killed run continues from its last checkpoint"
        )
    return line
