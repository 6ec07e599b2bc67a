"""What a person sees while a run goes on: phases with seconds, a panel or one line per interval of
steps, a table at the end.

Runs in: the driver. Hides the difference between a terminal (one panel that is refreshed, lines
above it) and a file or pipe (plain lines without control characters), and how often a line is worth
printing.

Invariants: one line per call at most; the last step is always printed; text from outside (answers,
error messages) can neither move the cursor nor change colours, nor can what other threads and
children write to standard error; the cursor is back when the run has ended. Nothing that is written
to standard error gets lost, and a child that still has it afterwards can go on writing.
"""

from __future__ import annotations

import atexit
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TextIO

import rich.console
from rich.live import Live
from rich.text import Text

from async_grpo.observe.console.panel import known, panel
from async_grpo.observe.console.progress import Progress
from async_grpo.observe.console.status_file import StatusFile
from async_grpo.runtime.text import visible, without_colours

STDERR = 2
JOIN_S = 1.0
"""A child that outlives the panel keeps its end of the pipe, so the thread may outlive it too."""
_TERMINAL_INTERVAL_S = 1.0
_PLAIN_INTERVAL_S = 10.0
_BOTTLENECK_INTERVAL_S = 30.0
_PLAIN_WIDTH, _PLAIN_HEIGHT, _NARROWEST = 120, 1000, 10
_COPIED = re.compile(r"(?:^|[\s(])(?:~?/|\.{1,2}/|[a-z+]+:/|python -m )")
"""Where a path, an address or a command begins."""
_LONG_PHASE_S = 60.0
_EXIT_CODES = {"FINISHED": 0, "KILLED": 0, "FAILED": 1}


_COLUMNS = (
    ("rollout/score", "score {:.2f}"),
    ("rollout/accuracy", "accuracy {:.0%}"),
    ("train/staleness_mean", "staleness {:.2f}"),
    ("train/staleness_max", "max {:.0f}"),
    ("rollout/response_length", "length {:.1f}"),
    ("train/tokens_per_s", "{rate} tok/s"),
    ("time/learner_idle", "idle {:.0%}"),
    ("train/grad_norm", "grad {:.2f}"),
    ("train/entropy", "entropy {:.2f}"),
)
"""Metrics of a step line and their text, in their order."""


class StderrLines:
    """Hands every line that is written to standard error to `say`, until `stop`. It takes the file
    descriptor itself, for a traceback may come from another thread, from C++, or from a child, of
    which `sys.stderr` in its place would see the first only.
    """

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


class Screen:
    """Prints to a stream, on a terminal with a panel at its end that is refreshed every second."""

    def __init__(self, stream: TextIO) -> None:
        self.terminal = stream.isatty()
        # The stream alone decides: environment variables that force colours must not put control
        # characters into log files.
        self.out = rich.console.Console(
            file=stream,
            force_terminal=self.terminal,
            highlight=False,
            markup=False,
            emoji=False,
            width=None if self.terminal else _PLAIN_WIDTH,
            height=None if self.terminal else _PLAIN_HEIGHT,
        )
        self._live: Live | None = None
        self._stderr: StderrLines | None = None
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def follow(self, facts: Callable[[], Mapping[str, Any]], *, title: str = "") -> None:
        """Keep a panel of `facts()` at the end of a terminal until `stop`; draw it now."""
        with self._lock:
            if self._live is not None:
                self._live.refresh()
            elif self.terminal:
                self._live = Live(
                    get_renderable=lambda: self._panel(facts(), time.time(), title),
                    console=self.out,
                    refresh_per_second=1,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._live.start(refresh=True)
                if same_terminal(self.out.file.fileno()):
                    self._stderr = StderrLines(self.print)

    def stop(self) -> None:
        """Remove the panel."""
        with self._lock:
            (live, self._live), (stderr, self._stderr) = (self._live, None), (self._stderr, None)
        if stderr is not None:
            stderr.stop()
        if live is not None:
            live.stop()

    def print(self, text: str, *, style: str = "", head: str = "") -> None:
        """Print a text above the panel, beside `head`. On a terminal it is broken between words,
        but not where it has a path, an address or a command, which is there to be copied.
        """
        parts = [Text(visible(text), style, overflow="ignore")]  # a long word stays whole
        if self.terminal and not _COPIED.search(text):
            width = max(_NARROWEST, self.out.width - len(head))
            parts = list(parts[0].wrap(self.out, width, tab_size=4))
        for part in parts:
            self.out.print(Text.assemble((head, "dim"), part), soft_wrap=True)
            head = " " * len(head)

    def print_panel(self, facts: Mapping[str, Any], *, now: float, title: str = "") -> None:
        """Print the panel once, for good."""
        self.stop()
        self.out.print(self._panel(facts, now, title))

    def _panel(
        self, facts: Mapping[str, Any], now: float, title: str
    ) -> rich.console.RenderableType:
        width, height = self.out.size
        return panel(facts, width=width, height=height, now=now, title=title)


class Console:
    """Prints to one stream (None: standard output). Thread-safe. clock: monotonic seconds."""

    def __init__(
        self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._screen = Screen(stream if stream is not None else sys.stdout)
        self._terminal = self._screen.terminal
        self._clock = clock
        self._interval = _TERMINAL_INTERVAL_S if self._terminal else _PLAIN_INTERVAL_S
        self._last_line, self._unshown = -math.inf, ""
        self._said = ("", -math.inf)
        self._lock = threading.RLock()
        self._record: StatusFile | None = None
        self.progress = Progress()
        """What the panel shows."""

    def begin_run(self, run_dir: Path, *, run: str) -> None:
        """Begin another run, whose progress and events are kept in `run_dir` from now on."""
        self.progress = Progress()
        self._record = StatusFile(run_dir, self.progress, run=run)

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Show a phase of the start or the end, and print its seconds when it is over."""
        started, over = self._clock(), threading.Event()
        progress = self.progress  # another run may begin inside
        phase = progress.enter(text)
        if self._terminal:
            self._screen.follow(lambda: self.progress.facts())
        else:
            said = (text, started, over)
            threading.Thread(
                target=self._remind, args=said, name="async_grpo-phase", daemon=True
            ).start()
        failed = True
        try:
            yield
            failed = False
        finally:
            over.set()
            progress.leave(phase)
            self.event("phase", begin=phase[1], text=text, failed=failed)
            cut_short = "stopped after " if progress.stopping else "failed after "
            seconds = f"{cut_short if failed else ''}{self._clock() - started:.1f} s"
            self._screen.print(f"{text} ... {seconds}", style="red" if failed else "")

    def info(self, *texts: str) -> None:
        """Print each text as a line."""
        for text in texts:
            self._say(text)

    def error(self, text: str) -> None:
        """Print a line that starts with `error:`."""
        self._say(f"error: {text}", style="bold red")

    def weights_arrive(self, measured: dict[str, float]) -> None:
        """Print what the weight transport's self-check measured, if it ran."""
        self.progress.serves()
        if measured:
            self.info(
                "weights arrive: after a test weight sync the engines' log-probs differ "
                "from the learner's by at most "
                f"{measured['weights/self_check_error']:.1e} (the test moved them by "
                f"{measured['weights/self_check_moved']:.2f})"
            )

    def logged(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Show a learner step, unless a line was shown a moment ago; the last by `end` at latest.

        Metrics that are missing or not finite are left out; an evaluation changes the panel only.
        """
        self.progress.logged(step, total, metrics)
        now, last = self._clock(), step >= total
        with self._lock:
            if "time/step" not in metrics:
                return
            head = f"step {step:>{len(str(total))}}/{total}"
            self._unshown = "  ".join([head, *known(metrics, _COLUMNS)])
            if now - self._last_line < self._interval and not last:
                return
            self._last_line = now
        if self._terminal:
            self._screen.follow(lambda: self.progress.facts())
        if last or not self._terminal:
            self._show_step()

    def bottleneck(self, *, kind: str, text: str) -> None:
        """Show the bottleneck in the panel; off a terminal as a line, when it is another one."""
        self.progress.say(kind=kind, text=text)
        with self._lock:
            now, (said, said_at) = self._clock(), self._said
            if not self._terminal and kind != said and now - said_at >= _BOTTLENECK_INTERVAL_S:
                self._said = kind, now
                self._screen.print(f"bottleneck: {text}")

    def published(self, version: int, seconds: float) -> None:
        """Record that a version became live, `seconds` after it was staged."""
        self.progress.published(version)
        self.event("publication", version=version, begin=time.time() - seconds)

    def event(self, kind: str, /, **facts: Any) -> None:
        """Record an event that is over; `facts` are plain values."""
        if self._record is not None:
            self._record.event(kind, **facts)

    def summary(self, title: str, rows: list[tuple[str, str]]) -> None:
        """Print a title and rows of a name and a text, which can be copied."""
        self._screen.stop()
        self._screen.print(title)
        width = max((len(visible(name)) for name, _ in rows), default=0)
        for name, value in rows:
            self._screen.print(value, head=f"  {visible(name):{width}}   ")

    def stopping(self) -> None:
        """Show that the run ends after this step, with a checkpoint; safe in a signal handler."""
        self.progress.stopping = time.time()

    def stopped(self, status: str) -> None:
        """Record that the run ended as FINISHED, FAILED or KILLED, unless `end` has."""
        if not self.progress.ended:
            self.end(_EXIT_CODES[status], "")

    def end(self, code: int, message: str) -> None:
        """Remove the panel and record how the run ended; the last call counts."""
        self._screen.stop()
        self._show_step()
        self.progress.end(code, message)
        if self._record is not None:
            self._record.close()

    def _say(self, text: str, *, style: str = "") -> None:
        self._screen.print(text, style=style)
        self.progress.note(text)
        self.event("note", text=text, error=bool(style))

    def _show_step(self) -> None:
        """Print the line of the newest learner step, if it was not."""
        with self._lock:
            line, self._unshown = self._unshown, ""
            if line:
                self._screen.print(line)

    def _remind(self, text: str, started: float, over: threading.Event) -> None:
        """Say soon that a phase is under way, and then every minute."""
        wait = _PLAIN_INTERVAL_S
        while not over.wait(wait):
            self._screen.print(f"{text} ... {self._clock() - started:.0f} s so far")
            wait = _LONG_PHASE_S
