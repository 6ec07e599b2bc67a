"""One call to many engines at once: which engines did it, which must repeat it, which are gone.

Runs in: the driver. Invariant: returns within its deadlines whatever the engines do. In a
collective one engine that stops stops all; working engines abort by themselves and report that
they are torn, so an engine that does not answer is the culprit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from async_grpo.config.schema import Deadlines
from async_grpo.runtime.listener import long_wait
from async_grpo.weights.transport import (
    Announcement,
    Receipt,
    TokenSequence,
    TornTransfer,
    torn_after,
)

GRACE_S = 5.0


class EngineHandle(Protocol):
    """One engine as the driver sees it. Every call raises when its process is gone or given up."""

    actor_id: str
    host: str
    tensor_parallel_size: int

    async def connect(self, payload: dict[str, Any]) -> Receipt:
        """Prepare the engine's half of the transport."""

    async def receive(self, announcement: Announcement) -> Receipt:
        """Load an announced publication."""

    async def attend(self, announcement: Announcement) -> Receipt:
        """Take part in a publication that is pushed, and load nothing of it."""

    async def probe_sequences(self) -> list[tuple[list[int], list[int], np.ndarray]]:
        """Sample a few fixed prompts: prompt, response, its log-probs [L]."""

    async def score(self, sequences: list[TokenSequence]) -> list[tuple[list[str], np.ndarray]]:
        """Score responses: the version labels and the log-probs [L] of each."""


Engine = TypeVar("Engine", bound=EngineHandle)


@dataclass(slots=True)
class DeliveryOutcome:
    """Results by actor id: receipts of those that are `done` or `failed`, and the errors of `lost`
    engines, which died or did not answer.

    learner: why the learner's half failed, or "". learner_hangs: whether it did not answer.
    """

    done: dict[str, Receipt] = field(default_factory=dict)
    failed: dict[str, Receipt] = field(default_factory=dict)
    lost: dict[str, BaseException] = field(default_factory=dict)
    learner: str = ""
    learner_hangs: bool = False

    @property
    def complete(self) -> bool:
        """Whether all engines and the learner did it."""
        return not (self.failed or self.lost or self.learner)

    def reasons(self) -> str:
        """Say everything that went wrong."""
        said = [f"{actor_id}: {receipt.reason}" for actor_id, receipt in self.failed.items()]
        said += [
            f"{actor_id}: {type(error).__name__}: {error}" for actor_id, error in self.lost.items()
        ]
        return "; ".join(said + [self.learner] * bool(self.learner))


async def call_all(
    engines: Sequence[EngineHandle],
    call: Callable[[EngineHandle], Awaitable[Receipt]],
    *,
    learner: Awaitable[str] | None,
    seconds: float,
    grace_s: float | None,
    what: str,
    note: Callable[[str], None],
    late_s: float,
) -> DeliveryOutcome:
    """Call all engines (and the learner) at once. seconds: deadline of everything, which messages
    call `what`. note: told for whom it waits, from `late_s` on.

    grace_s: seconds left once one call has failed, where all depend on each other; else None.
    """
    outcome = DeliveryOutcome()
    tasks: dict[asyncio.Future[Any], EngineHandle | None] = {
        asyncio.ensure_future(call(engine)): engine for engine in engines
    }
    if learner is not None:
        tasks[asyncio.ensure_future(learner)] = None
    deadline, waiting = time.monotonic() + seconds, set(tasks)

    def whom() -> str:
        late = [engine for task, engine in tasks.items() if not task.done()]
        return ", ".join(f"{one.actor_id} on {one.host}" if one else "the learner" for one in late)

    try:
        with long_wait(what, whom, note, first_s=late_s):
            while waiting and (left := deadline - time.monotonic()) > 0:
                finished, waiting = await asyncio.wait(
                    waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
                for task in finished:
                    _record(outcome, tasks[task], task)
                if grace_s is not None and not outcome.complete:
                    deadline = min(deadline, time.monotonic() + grace_s)
                    grace_s = None  # from the first failure on
    finally:
        for task in waiting:
            task.cancel()
    for task in waiting:
        engine = tasks[task]
        if engine is None:
            outcome.learner = f"the learner did not finish {what} in time"
            outcome.learner_hangs = True
        else:
            outcome.lost[engine.actor_id] = TimeoutError(
                f"{engine.actor_id} did not answer {what} within its deadline "
                f"({seconds:g} s at most)"
            )
    return outcome


def _record(
    outcome: DeliveryOutcome, engine: EngineHandle | None, task: asyncio.Future[Any]
) -> None:
    error = task.exception()
    if engine is None:
        if error is not None:
            raise error
        outcome.learner = task.result()
    elif error is not None:
        outcome.lost[engine.actor_id] = error
    else:
        (outcome.failed if task.result().failure else outcome.done)[engine.actor_id] = task.result()


def grace(deadlines: Deadlines) -> float:
    """Seconds that the other engines of a torn transfer get to notice it by themselves."""
    return torn_after(deadlines) + GRACE_S


def require_complete(outcome: DeliveryOutcome, kind: type[Exception] = TornTransfer) -> None:
    """Raise unless the outcome is complete: the error of a lost engine, or `kind`."""
    for error in outcome.lost.values():
        raise error
    if not outcome.complete:
        raise kind(outcome.reasons())


def consume_exception(task: asyncio.Task[Any]) -> None:
    """Retrieve the task's exception, so that asyncio does not log it when the run ends first."""
    if not task.cancelled():
        task.exception()
