"""What a person sees while a run goes on: phases with seconds, one line per interval of steps, a table at the end.

Runs in: the driver. Hides the difference between a terminal (one status line that is refreshed) and a file or pipe (plain lines
without control characters), and how often a line is worth printing.

Invariants: one line per call at most; the last step is always printed; text from outside (answers, error messages) can neither
move the cursor nor change colours.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import rich.box
import rich.console
from rich.live import Live
from rich.table import Table
from rich.text import Text

_TERMINAL_INTERVAL_S = 1.0
_PLAIN_INTERVAL_S = 2.0
_PLAIN_WIDTH = 120


def _number(value: float) -> str:
    return f"{value:.2f}"


def _rate(value: float) -> str:
    return f"{value / 1000:.1f}k" if abs(value) >= 1000 else f"{value:.0f}"


def _share(value: float) -> str:
    return f"{value:.0%}"


# Metric key, label, format: the columns of a step line in their order. `time/learner_idle` is a share of the step's time.
_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("rollout/score", "score {}", _number),
    ("rollout/accuracy", "accuracy {}", _share),
    ("train/lag_mean", "lag {}", _number),
    ("train/lag_max", "max {}", "{:.0f}".format),
    ("rollout/response_length", "length {}", "{:.1f}".format),
    ("train/tokens_per_s", "{} tok/s", _rate),
    ("time/learner_idle", "idle {}", _share),
    ("train/grad_norm", "grad {}", _number),
    ("train/entropy", "entropy {}", _number),
)


class Console:
    """Prints to one stream (standard output if None). Thread-safe. `clock` gives seconds and only moves forward."""

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        stream = stream if stream is not None else sys.stdout
        self._terminal = stream.isatty()
        # The stream alone decides: environment variables that force colours must not put control characters into log files.
        self._out = rich.console.Console(
            file=stream, force_terminal=self._terminal, highlight=False, markup=False, emoji=False,
            width=None if self._terminal else _PLAIN_WIDTH,
        )  # fmt: skip
        self._clock = clock
        self._interval = _TERMINAL_INTERVAL_S if self._terminal else _PLAIN_INTERVAL_S
        self._last_line = -math.inf
        self._live: Live | None = None
        self._lock = threading.RLock()

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Announce a phase of the start or the end, and print its seconds when the block is left."""
        started = self._clock()
        if self._terminal:
            self._show(f"{text} ...")
        else:
            self._print(f"{text} ...")
        try:
            yield
        except BaseException:
            self._print(f"{text} ... failed after {self._clock() - started:.1f} s", style="red")
            raise
        self._print(f"{text} ... {self._clock() - started:.1f} s")

    def info(self, *texts: str) -> None:
        """Print each as a line."""
        for text in texts:
            self._print(text)

    def error(self, text: str) -> None:
        """Print a line that starts with `error:`."""
        self._print(f"error: {text}", style="bold red")

    def weights_arrive(self, measured: dict[str, float]) -> None:
        """Print what the check of the weight transport at the start measured, if there was one."""
        if measured:
            self.info(
                "weights arrive: after a test publication the engines' log-probs differ from the learner's by at most "
                f"{measured['weights/self_check_error']:.1e} (the test moved them by {measured['weights/self_check_moved']:.2f})"
            )

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        """Show the progress of learner step `step` of `total`, unless a line was shown a moment ago; the last step always is.

        Metrics that are missing or not finite are left out, unknown ones are ignored.
        """
        now, last = self._clock(), step >= total
        with self._lock:
            if now - self._last_line < self._interval and not last:
                return
            self._last_line = now
            line = _step_line(step, total, metrics)
            if self._terminal and not last:
                self._show(line)
            else:
                self._print(line)

    def summary(self, title: str, rows: list[tuple[str, str]]) -> None:
        """Print a two-column table; outside a terminal every row is one line, whatever its length, so that commands can be copied."""
        if not self._terminal:
            width = max((len(_visible(name)) for name, _ in rows), default=0)
            for line in (title, *(f"  {_visible(name):{width}}   {value}" for name, value in rows)):
                self._print(line)
            return
        table = Table(title=_visible(title), title_justify="left", show_header=False, box=rich.box.SIMPLE)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(Text(_visible(name)), Text(_visible(value)))
        with self._lock:
            self._hide()
            self._out.print(table)

    def _print(self, text: str, *, style: str | None = None) -> None:
        with self._lock:
            self._hide()
            self._out.print(Text(_visible(text), style=style or ""), soft_wrap=True)

    def _show(self, text: str) -> None:
        """Put the text into the status line."""
        line = Text(_visible(text), no_wrap=True, overflow="ellipsis")
        with self._lock:
            if self._live is None:
                self._live = Live(console=self._out, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
                self._live.start()
            self._live.update(line, refresh=True)

    def _hide(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _step_line(step: int, total: int, metrics: dict[str, float]) -> str:
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    parts += [label.format(show(metrics[key])) for key, label, show in _COLUMNS if math.isfinite(metrics.get(key, math.nan))]
    return "  ".join(parts)


def _visible(text: str) -> str:
    """The text with control characters as escapes; newlines and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape", "backslashreplace").decode() for c in text)
