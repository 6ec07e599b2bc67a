"""One announcement to many engines: who serves it now, who has to take it again, and who is gone.

Runs in: the driver. Invariant: returns within its deadlines whatever the engines do. In a
collective one engine that stops stops all; those that still work abort by themselves and say that
they are torn, so the one that says nothing is the culprit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from async_grpo.config.schema import Deadlines
from async_grpo.weights.transport import Announcement, Receipt, TokenSequence, TornTransfer

GRACE_S = 5.0
UNDER_WAY = 2
"""As in `guard`, which the driver does without: buckets that are on their way when nothing moves
any more.
"""


class EngineHandle(Protocol):
    """One engine as the driver sees it. Every call raises when its process is gone."""

    actor_id: str
    tensor_parallel_size: int

    async def connect(self, payload: dict[str, Any]) -> Receipt: ...
    async def receive(self, announcement: Announcement) -> Receipt: ...
    async def probe_sequences(self) -> list[tuple[list[int], list[int], np.ndarray]]: ...
    async def score(self, sequences: list[TokenSequence]) -> list[tuple[list[str], np.ndarray]]: ...


@dataclass(slots=True)
class DeliveryOutcome:
    """By actor id: receipts of those that did it, why others failed, and the errors of those that
    died or said nothing.

    learner: why its half failed, or ""; learner_hangs: it said nothing.
    """

    done: dict[str, Receipt] = field(default_factory=dict)
    failed: dict[str, Receipt] = field(default_factory=dict)
    lost: dict[str, BaseException] = field(default_factory=dict)
    learner: str = ""
    learner_hangs: bool = False

    @property
    def complete(self) -> bool:
        """Whether everybody did it."""
        return not (self.failed or self.lost or self.learner)

    def reasons(self) -> str:
        """Everything that went wrong, in words."""
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
) -> DeliveryOutcome:
    """Call all engines (and the learner) at once. seconds: for everything, named `what` in
    messages.

    grace_s: what the others get once one has failed, where all depend on each other; None where
    they do not.
    """
    outcome = DeliveryOutcome()
    tasks: dict[asyncio.Future[Any], EngineHandle | None] = {
        asyncio.ensure_future(call(engine)): engine for engine in engines
    }
    if learner is not None:
        tasks[asyncio.ensure_future(learner)] = None
    deadline, waiting = time.monotonic() + seconds, set(tasks)
    try:
        while waiting and (left := deadline - time.monotonic()) > 0:
            finished, waiting = await asyncio.wait(
                waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            for task in finished:
                _note(outcome, tasks[task], task)
            if grace_s is not None and not outcome.complete:
                deadline = min(deadline, time.monotonic() + grace_s)
                grace_s = None  # from the first failure on
    finally:
        for task in waiting:
            task.cancel()
    for task in waiting:
        engine = tasks[task]
        if engine is None:
            outcome.learner, outcome.learner_hangs = (
                f"the learner did not finish {what} in time",
                True,
            )
        else:
            outcome.lost[engine.actor_id] = TimeoutError(
                f"{engine.actor_id} did not answer {what} within its deadline ({seconds:g} "
                "s at most)"
            )
    return outcome


def _note(outcome: DeliveryOutcome, engine: EngineHandle | None, task: asyncio.Future[Any]) -> None:
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
    """How long the others of a torn transfer may take to notice it themselves."""
    return deadlines.pause_s + UNDER_WAY * deadlines.bucket_s + GRACE_S


def require_complete(outcome: DeliveryOutcome, kind: type[Exception] = TornTransfer) -> None:
    """Raise unless everybody did it: what an engine raised, or this kind with the reasons."""
    for error in outcome.lost.values():
        raise error
    if not outcome.complete:
        raise kind(outcome.reasons())


def consume_exception(task: asyncio.Task[None]) -> None:
    """Whoever waits gets the error; when the run ends first, nobody does."""
    if not task.cancelled():
        task.exception()
