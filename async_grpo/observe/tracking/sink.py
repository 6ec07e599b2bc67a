"""What a tracker of experiments has to be able to do: a `TrackerSink`, in one file per tracker.

Runs in: the thread that sends, or `async-grpo report --sync`.

    Tracker -> metrics.jsonl, samples.jsonl -> Outbox -> Delivery -> TrackerSink -> MLflow, ...

Invariant: any call may come again, and changes nothing then. So a sink keeps no record: what was
sent, what comes again and when is the affair of the outbox and of the delivery.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from async_grpo.errors import SetupError


class TrackingError(SetupError):
    """The tracker, or the run directory's record of what it has, cannot be used."""


class Refused(Exception):
    """The tracker will never take this, whatever else it takes."""


class Gone(Exception):
    """The tracker does not know the run (any more)."""


@dataclass(kw_only=True)
class RunFacts:
    """What a tracker is told of a run when it begins."""

    uri: str | None
    """Address of the tracker; None: a place in the run directory, wherever that is now."""
    experiment: str
    name: str
    parameters: dict[str, str]
    created: int = field(default_factory=lambda: int(time.time() * 1000))
    """Milliseconds since 1970."""
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """What the run is found by if the answer that had its id was lost."""


class Point(NamedTuple):
    """A value of a metric; `time` in milliseconds since 1970."""

    name: str
    value: float
    time: int
    step: int


class TrackerSink(Protocol):
    """A tracker at one address. What a method raises means that it is tried again later, except for
    Refused and Gone.
    """

    title: str
    """Its name for people; in lower case, for files."""
    address: str
    ends_last: bool
    """Whether nothing may follow the status of a run that ended."""

    def __init__(self, uri: str | None, run_dir: Path) -> None:
        """Set the address and reach nothing. uri: as in RunFacts."""

    def where(self) -> str:
        """Continue a sentence about a run with where it is looked at."""

    def start(self, run: RunFacts) -> str:
        """Return the id of the run that has this key; make it if there is none."""

    def set_status(self, run_id: str, status: str, ended: int | None) -> None:
        """Set it to RUNNING, FINISHED, FAILED or KILLED. Raises Gone if the run takes nothing."""

    def log(
        self,
        run_id: str,
        *,
        parameters: dict[str, str] | None = None,
        tags: dict[str, str] | None = None,
        points: Sequence[Point] = (),
    ) -> None:
        """Take parameters, which do not change any more, tags, which do, or points: a hundred or
        900 points at most, or none of them and raise Refused.
        """

    def show_samples(self, run_id: str, rows: list[dict[str, Any]]) -> None:
        """Show these responses in the place of earlier ones."""

    def put(self, run_id: str, path: Path, place: str) -> None:
        """Copy a file, or a directory as `place`."""

    def register(self, run_id: str, model: str, place: str) -> None:
        """Make what was put at `place` a version of the model, once per run."""
