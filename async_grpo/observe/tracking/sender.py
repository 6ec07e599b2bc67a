"""Sends one tracker what the files of a run directory have, while the run is on.

    metrics.jsonl, samples.jsonl -> Outbox -> Delivery -> TrackerSink, in a thread of its own

Runs in: the driver. Hides that thread with its retries and deadlines. Invariants: no call but
`ready` and `finish` waits for the tracker, and those have deadlines; failures are counted, and the
first of a series is shown; what the tracker does not get is said at the end with the command that
sends it; a tracker that fails after the start never stops training.
"""

from __future__ import annotations

import math
import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path

from async_grpo.observe.tracking.delivery import Delivery
from async_grpo.observe.tracking.outbox import METRICS, Outbox, TrackedRun
from async_grpo.observe.tracking.sink import TrackerSink, TrackingError
from async_grpo.runtime.text import one_line, without_password

THREAD = "async_grpo-tracking"
START_TIMEOUT_S = 120.0
"""Longest wait for the tracker at the start; a new database takes two seconds or more."""
FINISH_TIMEOUT_S = 30.0
POLL_S = 0.1
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 60.0


class Sender:
    """Sends one tracker's run: `begin`, `ready`, any number of `wake`, `end`, `finish`."""

    def __init__(
        self,
        run: TrackedRun,
        kind: type[TrackerSink],
        *,
        run_dir: Path,
        resumed: bool,
        offline_ok: bool,
        start_s: float,
        note: Callable[[str], None],
    ) -> None:
        """resumed, note: as of `Tracker`. offline_ok: whether the run begins without the tracker,
        for which it waits `start_s` at most.
        """
        self.outbox = Outbox(run_dir, kind.title, run)
        self._delivery = Delivery(self.outbox, kind, lambda: time.monotonic() > self._deadline)
        self._sink = self._delivery.sink(run)
        self._resumed, self._offline_ok = resumed, offline_ok
        self._note, self._start_s = note, min(START_TIMEOUT_S, start_s)
        self._started_by, self._deadline = math.inf, math.inf
        self._failures, self._last_error = 0, ""
        self._failure: Exception | None = None
        """Why the run does not begin."""
        self._logged = 0
        self._earlier = True
        self._tried, self._finishing = threading.Event(), threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)

    @property
    def title(self) -> str:
        """The tracker's name."""
        return self._sink.title

    @property
    def address(self) -> str:
        """The tracker's address."""
        return self._sink.address

    @property
    def run_id(self) -> str | None:
        """The tracker's id of the run; None until there is one."""
        return self.outbox.runs[-1].run_id

    @property
    def unsent(self) -> int:
        """Rows of `metrics.jsonl` that the tracker has not acknowledged."""
        return self._logged + self.outbox.unsent

    @property
    def errors(self) -> int:
        """Attempts to reach the tracker that failed, and what it refused."""
        return self._failures + self._delivery.refused

    @property
    def where(self) -> str:
        """Say where the run is looked at."""
        return (f"run {self.run_id}" if self.run_id else "not reached yet") + self._sink.where()

    @property
    def begun(self) -> bool:
        """Whether `begin` was called."""
        return self._thread.ident is not None

    def begin(self) -> None:
        """Begin to connect; `ready` waits for it."""
        self._started_by = time.monotonic() + self._start_s
        self._thread.start()

    def ready(self, check: Callable[[], None]) -> None:
        """Wait for the start and raise its error. check: called meanwhile."""
        while not self._tried.wait(POLL_S):
            check()
            if time.monotonic() > self._started_by:
                if not self._offline_ok:
                    self._failure = TimeoutError(f"no answer within {self._start_s:.0f} s")
                break
        if isinstance(self._failure, TrackingError):
            raise self._failure
        if self._failure is not None:
            raise TrackingError(
                f"{self.title} at {without_password(self.address)} cannot be used "
                f"({one_line(self._failure)}); check tracking.uri, or set "
                "tracking.offline_ok=true to send later, or tracking.mlflow=false"
            ) from self._failure

    def expect(self, rows: int) -> None:
        """Count rows that `metrics.jsonl` is about to have; one thread at a time."""
        self._logged += rows

    def wake(self) -> None:
        """Send what there is."""
        self._wake.set()

    def conclude(self, status: str) -> None:
        """Note on the disk how the run ended, in case nothing comes after this."""
        try:
            with self.outbox.idle(self._left_s):
                self.outbox.change(status=status)
        except OSError as error:
            self._last_error = one_line(error)

    def end(self, status: str, deadline: float) -> None:
        """Send the rest until the deadline (of `time.monotonic`); `finish` waits for it."""
        self._deadline = deadline
        self.conclude(status)
        self._finishing.set()
        self._wake.set()

    def finish(self) -> None:
        """Wait until the rest is sent, and say what is left."""
        if not self.begun:
            return
        if self._failure is None:
            self._thread.join(self._left_s)
        if self._thread.is_alive() and not self._last_error:
            self._last_error = f"no answer within {FINISH_TIMEOUT_S:.0f} s"
        lacks: list[str] = []
        try:
            lacks = self.outbox.waiting(*self.outbox.runs)
            with self.outbox.idle(self._left_s):
                self.outbox.close()
        except OSError as error:  # then nobody knows later that it was sent
            self._last_error, lacks = one_line(error), lacks or ["perhaps what was sent last"]
        if lacks and self._failure is None:
            reason = f" ({self._last_error})" if self._last_error else ""
            self._note(
                f"{self.title} does not have all of this run: it lacks {', '.join(lacks)}"
                f"{reason}; send the rest with: "
                f"async-grpo report --sync {shlex.quote(str(self.outbox.run_dir))}"
            )

    @property
    def _left_s(self) -> float:
        """How long `finish` may still wait."""
        return min(FINISH_TIMEOUT_S, max(POLL_S, self._deadline - time.monotonic()))

    # ---- the thread ----

    def _run(self) -> None:
        delay, failed = _FIRST_RETRY_S, False
        while time.monotonic() < self._deadline:  # else `finish` has given up
            self._wake.clear()
            last = self._finishing.is_set()  # read last: what comes now wakes again
            sent = self._attempt(last=last)
            self._tried.set()
            if self._failure is not None:
                return
            if sent and failed:
                self._note(f"{self.title} answers again, and has all metrics")
            failed = not sent
            if last:
                return
            if sent:
                delay = _FIRST_RETRY_S
                self._wake.wait()
            else:
                self._finishing.wait(delay)
                delay = min(2 * delay, _LAST_RETRY_S)

    def _attempt(self, *, last: bool) -> bool:
        """Send once; return whether it went well."""
        try:
            self.outbox.open(resumed=self._resumed)
            self._delivery.connect(self.outbox.runs[-1])
            self._tried.set()
            # Once: what is wrong with an earlier run must not hold up this one.
            earlier, self._earlier = self._earlier, False
            self._delivery.send(earlier=earlier, end=last)
        except Exception as error:  # noqa: BLE001 - counted and shown
            self._failures += 1
            before, self._last_error = self._last_error, one_line(error)
            if not self._tried.is_set() and not self._offline_ok:
                self._failure = error
            elif not before:
                self._note(
                    f"{self.title}: {self._last_error}; training continues, metrics are kept "
                    f"in {METRICS} and sent later"
                )
            return False
        self._last_error = ""
        return True
