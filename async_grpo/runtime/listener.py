"""What the parts of a run tell its user, and how a part ends the run.

Runs in: the driver. The parts know nothing of console, tracker or gauges: the trainer listens for
them, and tests listen with a recording fake. Invariant: `note` and `error` may be called in any
thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

LATE_S = 5.0
"""A wait is worth a line after so long."""


class RunListener(Protocol):
    """The user's side of a run."""

    def note(self, text: str) -> None:
        """Show a line."""

    def error(self, text: str) -> None:
        """Show a line about something that went wrong, and did not end the run."""

    def fault(self, text: str) -> None:
        """Record a fault after which the run goes on, besides the line that shows it: a process
        that died, a checkpoint that failed.
        """

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of learner step `step`."""

    def samples(self, rows: list[dict[str, Any]]) -> None:
        """Record responses, a row each."""

    def published(self, version: int, seconds: float) -> None:
        """Record that a version became live, `seconds` after its weights were staged."""

    def saved(self, step: int, path: Path) -> None:
        """Record that the checkpoint of a learner step is complete."""

    def rolled_back(self, step: int) -> None:
        """Discard what was recorded of the learner steps after `step`."""


class FailureHandler(Protocol):
    """Where a part reports an error of its own background work."""

    def fail(self, error: BaseException) -> None:
        """End the run with this error, or begin what repairs the run; the first error wins."""


@contextmanager
def long_wait(
    what: str, whom: Callable[[], str], note: Callable[[str], None], *, first_s: float = LATE_S
) -> Iterator[None]:
    """Note for whom `what` waits inside the block: after `first_s`, and whenever it has doubled."""

    async def tell() -> None:
        waited = 0.0
        while True:
            await asyncio.sleep(max(first_s, waited))
            waited += max(first_s, waited)
            note(f"{what} waits for {whom()}, {waited:.0f} s")

    telling = asyncio.ensure_future(tell())
    try:
        yield
    finally:
        telling.cancel()
