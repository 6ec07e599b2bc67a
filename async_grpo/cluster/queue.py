"""The replay queue as a Ray actor, and how the driver and rollout actors call it.

Runs in: the queue's process (`QueueProcess`), the driver (`DriverQueue`) and rollout actors
(`ActorQueue`). A module that imports nothing large, so that a queue that died is back at once.
Hides Ray: frames travel as one array, a wait that ends soon is waited out at the queue instead of
by one remote call after the other, and every call has a deadline and says who is late or gone.

Invariant: no call waits for another, which Ray's limit of calls at once (`MAX_CALLS`) could keep
from running. One event loop serves all: Ray's concurrency groups would have a loop each.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from async_grpo.cluster.deaths import death_as, told
from async_grpo.errors import FaultBudgetSpent, SetupError, Stalled
from async_grpo.replay.actor_reports import ActorReport, ActorReports, QueueMetrics
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.resume import JournalSettings, open_queue
from async_grpo.replay.rules import QueueSettings, Verdict
from async_grpo.runtime import stacks
from async_grpo.runtime.garbage import keep_startup
from async_grpo.runtime.lifetime import die_with_parent
from async_grpo.wire.codec import Batch, Buffer, GroupTicket, pack_frames, unpack_frames

BATCH_PATIENCE_S, BATCH_POLL_S = 0.25, 0.003
TICKET_PATIENCE_S, TICKET_POLL_S = 0.25, 0.01
"""Seconds that a call waits for tickets while few do, and between two looks for them by any call:
the more wait, the more rarely each looks.
"""
TICKET_CALLS_PER_S = 250.0
"""The more actors wait, the longer each call does, so that no more than this come again."""
P = ParamSpec("P")
T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
MAX_CALLS = 10_000
"""Calls that a Ray actor takes at once: more than can wait."""
REOPEN_TIMEOUT_S = 600.0
"""Longest time the queue may take to read its journal again."""


class QueueProcess:
    """A `ReplayQueue` as an actor. Ray builds it again when it dies, and it reads its journal."""

    def __init__(
        self,
        settings: QueueSettings,
        journal: JournalSettings | None = None,
        snapshot: dict[str, Any] | None = None,
        run_dir: str | None = None,
    ) -> None:
        """Open the queue; every call raises what went wrong, for Ray would wrap an error from
        here.
        """
        die_with_parent()
        if run_dir is not None:
            stacks.register("queue", stacks.home(run_dir))
        self._settings, self._journal = settings, journal
        self._waiting = 0
        """Actors whose `acquire` waits for tickets."""
        self._published: asyncio.Future[None] | None = None
        """Done when another version is live; None while nobody waits for that."""
        self._opened: ReplayQueue | Exception
        try:
            self._opened = open_queue(settings, journal, snapshot=snapshot)
            keep_startup()
        except Exception as error:  # noqa: BLE001 - raised by every call
            self._opened = error

    @property
    def _queue(self) -> ReplayQueue:
        if isinstance(self._opened, Exception):
            raise self._opened
        return self._opened

    async def opened(self) -> str | None:
        """Say what a resumed queue took over. Raises what went wrong when it was opened."""
        return None if self._queue.report is None else str(self._queue.report)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the queue itself."""
        live = self._queue.ledger.live
        answer = await getattr(self._queue, method)(*args, **kwargs)
        if self._queue.ledger.live != live and self._published is not None:
            self._published.set_result(None)
            self._published = None
        return answer

    # ---- rollout actors ----

    async def acquire(
        self,
        actor_id: str,
        serving_version: int,
        holding: Sequence[tuple[int, int]],
        want: int,
        report: ActorReport | None = None,
    ) -> list[GroupTicket] | None:
        """Ask the queue for tickets, again for a moment while it has none, unless the actor has
        missed a publication. The actor gets no other ticket meanwhile, so `holding` is all it may
        have.
        """
        tickets = await self._queue.acquire(actor_id, serving_version, holding, want, report)
        self._waiting += 1
        patience_s = max(TICKET_PATIENCE_S, self._waiting / TICKET_CALLS_PER_S)
        deadline = time.monotonic() + patience_s
        try:
            while (
                tickets == []
                and want
                and serving_version >= self._queue.ledger.live
                and (left := deadline - time.monotonic()) > 0
            ):
                await self._publication(min(TICKET_POLL_S * self._waiting, left))
                tickets = await self._queue.acquire(actor_id, serving_version, holding, want)
        finally:
            self._waiting -= 1
        return tickets

    async def _publication(self, seconds: float) -> None:
        """Wait for another version to be live, for so long at most."""
        if self._published is None:
            self._published = asyncio.get_running_loop().create_future()
        await asyncio.wait({self._published}, timeout=seconds)

    async def put_packed(self, actor_id: str, packed: np.ndarray) -> list[Verdict]:
        """`put` of the frames in one packed array."""
        return await self._queue.put(actor_id, list(unpack_frames(packed)))

    # ---- loop and learner ----

    async def next_batch(self, step: int) -> Batch | None:
        """`get_batch`, asked again here for a moment."""
        deadline = time.monotonic() + BATCH_PATIENCE_S
        while (batch := await self._queue.get_batch(step)) is None and time.monotonic() < deadline:
            await asyncio.sleep(BATCH_POLL_S)
        return batch

    async def payload(self, step: int, group_ids: Sequence[int]) -> np.ndarray:
        """See `ReplayQueue.payload`."""
        return await self._queue.payload(step, group_ids)

    async def obstacle(self, after: int, until: int) -> str:
        """Why the trained steps after `after`, up to `until`, cannot be trained again, or ""."""
        try:
            for step in range(after + 1, until + 1):
                await self._queue.get_batch(step)
        except SetupError as error:
            return str(error)
        return ""

    async def discard(
        self, step: int, snapshot: dict[str, Any] | None, why: str
    ) -> tuple[str, int]:
        """Take back the steps after `step`, which `snapshot` is of: a summary, and the raised run
        epoch. Tickets that are out are lost; their actors live on and are refused.
        """
        assert self._journal is not None  # without one, a learner that died is not brought back
        await self._queue.commit()
        run_epoch = self._queue.ledger.run_epoch
        journal = replace(
            self._journal,
            start=_next_start(self._queue.start),
            lost_steps="discard",
            reason=why,
            fresh=False,
            reached=0,
        )
        settings = replace(self._settings, trained_steps=step)
        self._opened = queue = open_queue(settings, journal, snapshot=snapshot)
        queue.raise_epoch(above=run_epoch, step=step)
        return str(queue.report), queue.ledger.run_epoch

    # ---- what others may know ----

    async def progress(self) -> dict[str, int]:
        """Learner steps done, the step in training (0: none), and the run epoch."""
        ledger = self._queue.ledger
        training = ledger.training_step or 0
        return {"steps": ledger.steps, "training": training, "run_epoch": ledger.run_epoch}

    async def full_metrics(self) -> QueueMetrics:
        """`metrics`, and the latest report of every rollout actor."""
        return QueueMetrics(await self._queue.metrics(), self._queue.reports())

    async def in_flight(self) -> dict[str, list[tuple[int, int, float]]]:
        """(group_id, attempt, seconds since it was issued) at each actor, for post-mortems."""
        ledger, now = self._queue.ledger, time.monotonic()
        return {
            name: [(one.group_id, one.attempt, now - one.issued_at) for one in ledger.held_by(name)]
            for name in ledger.held
        }

    async def pid(self) -> int:
        """Process id, for tests and post-mortems."""
        return os.getpid()


def _next_start(start: str) -> str:
    """Name a start for the next learner that goes back: `s`, `s.1`, `s.2`."""
    process, _, number = start.partition(".")
    return f"{process}.{int(number or 0) + 1}"


class DriverQueue:
    """The queue as the loop sees it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.reports = ActorReports()
        """Of all rollout actors, as of the newest `metrics`; a new queue forgets dead ones."""
        self._reading = 0
        """Calls under way for which the queue reads its journal, and answers nobody meanwhile."""
        self._read_until = 0.0

    async def call(
        self,
        method: Callable[Concatenate[ReplayQueue, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call a method of the queue itself, such as `ReplayQueue.counts`."""
        return await self._call(self._handle.call.remote(method.__name__, *args, **kwargs))

    async def get_batch(self, step: int) -> Batch | None:
        """Take the batch of a learner step, or None while the queue has none."""
        return await self._call(self._handle.next_batch.remote(step))

    async def payload(self, step: int, group_ids: list[int]) -> np.ndarray:
        """Fetch the frames of these groups, packed into one array."""
        return await self._call(self._handle.payload.remote(step, group_ids))

    async def metrics(self) -> dict[str, float]:
        """Metrics of the queue and of all rollout actors."""
        answer: QueueMetrics = await self._call(self._handle.full_metrics.remote())
        for actor_id, report in answer.reports.items():
            self.reports.tell(actor_id, report)
        return answer.metrics | self.reports.metrics()

    async def digests(self) -> dict[int, str]:
        """Return the recorded digests of the weights, by version."""
        return await self._reads(self._handle.call.remote("digests"))

    async def obstacle(self, *, after: int, until: int) -> str:
        """Say why recorded steps cannot be trained again, or ""."""
        return await self._reads(self._handle.obstacle.remote(after, until))

    async def progress(self) -> dict[str, int]:
        """Return learner steps done, the step in training and the run epoch."""
        return await self._call(self._handle.progress.remote())

    async def discard(
        self, *, step: int, snapshot: dict[str, Any] | None, why: str
    ) -> tuple[str, int]:
        """Take back the learner steps after `step`; a summary, and the new run epoch."""
        return await self._reads(self._handle.discard.remote(step, snapshot, why))

    async def opened(self, *, timeout_s: float) -> str | None:
        """Wait until the queue has read its journal; what it took over, in words."""
        return await self._call(self._handle.opened.remote(), timeout_s=timeout_s)

    async def _reads(self, reference: Awaitable[Any]) -> Any:
        """Await a call for which the queue reads its journal. Other calls have as much time until
        it has answered, and theirs from then on.
        """
        self._reading += 1
        try:
            return await self._call(reference, timeout_s=REOPEN_TIMEOUT_S)
        finally:
            self._reading -= 1
            self._read_until = time.monotonic()

    async def _call(self, reference: Awaitable[Any], *, timeout_s: float | None = None) -> Any:
        limit_s = CALL_TIMEOUT_S if timeout_s is None else timeout_s
        asked, begun = asyncio.ensure_future(reference), time.monotonic()
        try:
            while not asked.done():
                now, held_up = time.monotonic(), self._reading > 0 and timeout_s is None
                begun = now if held_up else max(begun, self._read_until)
                if (left := begun + limit_s - now) <= 0:
                    raise Stalled(f"the replay queue did not answer within {limit_s:g} s")
                await asyncio.wait({asked}, timeout=left)
            with death_as(queue_died):
                return asked.result()
        finally:
            asked.cancel()


class ActorQueue:
    """The queue as a rollout actor sees it; calls are repeated for `patience_s` at most."""

    def __init__(self, handle: Any, *, patience_s: float = CALL_TIMEOUT_S) -> None:
        self._handle, self._patience_s = handle, patience_s

    async def acquire(
        self,
        actor_id: str,
        version: int,
        holding: list[tuple[int, int]],
        want: int,
        report: ActorReport | None = None,
    ) -> list[GroupTicket] | None:
        """Ask for tickets; None when the queue is closed."""
        return await self._call(
            lambda: self._handle.acquire.remote(actor_id, version, holding, want, report)
        )

    async def put(self, actor_id: str, frames: list[Buffer]) -> list[Verdict]:
        """Hand over frames; a verdict for each."""
        packed = pack_frames(frames)
        return await self._call(lambda: self._handle.put_packed.remote(actor_id, packed))

    async def fail(
        self,
        actor_id: str,
        tickets: list[GroupTicket],
        reason: str,
        tokens: list[int] | None = None,
    ) -> None:
        """Report tickets whose groups cannot be completed."""
        await self._call(
            lambda: self._handle.call.remote("fail", actor_id, tickets, reason, tokens)
        )

    async def _call(self, ask: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                with death_as(queue_died):
                    return await asyncio.wait_for(ask(), CALL_TIMEOUT_S)
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise Stalled(
                        f"the replay queue did not answer for {self._patience_s:g} s"
                    ) from None


def queue_died(error: BaseException) -> FaultBudgetSpent:
    """Return the error of a run whose queue is gone for good."""
    return FaultBudgetSpent(
        "the replay queue's process died, and more often than cluster.restart_budget "
        f"allows (with replay.journal.enable=false: once): {told(error)}"
    )
