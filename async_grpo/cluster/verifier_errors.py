"""Verifier errors, told while the run goes on: of every kind the first, the 10th, the 100th, and
the first of every class of exceptions.

Runs in: the driver, on the event loop of the system. Hides how often the queue, to which rollout
actors report, is asked.
"""

from __future__ import annotations

import asyncio

from async_grpo.cluster.queue import DriverQueue
from async_grpo.config.schema import Config
from async_grpo.runtime.listener import FailureHandler, RunListener

WATCH_S = 2.0
AGAIN = 10
"""Times as many errors of a kind are said again."""
CAUSES = 20
"""Most causes that are said one by one."""
CONSEQUENCES = {
    "drop_group": "the group is issued again",
    "zero": "the response counts as wrong",
    "fail": "the run ends",
}
"""What `task.verifier.on_error` makes of an error, in words."""


class VerifierErrors:
    """Kinds of verifier errors that were met: `told` has the text of the newest one of each."""

    def __init__(
        self, config: Config, queue: DriverQueue, listener: RunListener, failures: FailureHandler
    ) -> None:
        self._consequence = CONSEQUENCES[config.task.verifier.on_error]
        self._queue, self._listener = queue, listener
        self._failures = failures
        self._watching: asyncio.Task[None] | None = None
        self.told: dict[str, str] = {}
        self._next: dict[str, int] = {}
        self._causes: set[tuple[str, str]] = set()

    def begin(self) -> None:
        """Look every `WATCH_S` from now on."""
        self._watching = asyncio.create_task(self._watch())

    def cancel(self) -> None:
        """Look no more."""
        if self._watching is not None:
            self._watching.cancel()

    async def tell(self) -> None:
        """Say the first error of every kind that is new, and how many there are now and then."""
        counts = await self._queue.metrics()
        for kind, text in self._queue.reports.verifier_errors().items():
            metric = f"rollout/verifier_errors_{kind}"
            detail = text.partition(": ")[2] if kind == "exception" else ""
            exception = detail.partition(":")[0]  # its class
            cause, self.told[kind] = (kind, exception), text
            if cause not in self._causes and (len(self._causes) < CAUSES or kind not in self._next):
                self._causes.add(cause)
                self._next.setdefault(kind, AGAIN)
                consequence = self._consequence
                if kind == "judge" and consequence == CONSEQUENCES["zero"]:
                    consequence = "what the judge says counts as 0"
                what = f"a verifier failed, {consequence} (task.verifier.on_error)"
                if kind == "frozen":
                    what = "a frozen model gave no answer, the group is issued again"
                self._listener.note(
                    f"{what}: {text}; the next ones like this are only counted ({metric})"
                )
            elif (count := int(counts[metric])) >= self._next[kind]:
                while count >= self._next[kind]:
                    self._next[kind] *= AGAIN
                who = "frozen models" if kind == "frozen" else "verifiers"
                self._listener.note(
                    f"{who} have failed {count} times by {kind} ({metric}), now: {text}"
                )

    async def _watch(self) -> None:
        try:
            while True:
                await asyncio.sleep(WATCH_S)
                await self.tell()
        except Exception as error:  # noqa: BLE001 - ends the run
            self._failures.fail(error)
