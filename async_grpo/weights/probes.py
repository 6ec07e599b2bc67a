"""The drift alarm: what engines compute now and then, against what the learner computed when it staged the same version.

Runs in: the driver. After every `verify_every`-th publication each engine scores a few fixed responses, as ordinary requests between the others; the
answer carries the label of its version. An answer that spans two versions, or comes under one for which the learner has computed nothing, is owed: it is
asked again after the next publication. Invariant: nothing here holds up a publication or a step; what is found ends the run at the next boundary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from async_grpo.config.schema import Config
from async_grpo.weights.base import TokenSequence, TransferMismatch
from async_grpo.weights.delivery import EngineHandle, Outcome
from async_grpo.weights.verification import Difference, Tolerance

KEPT_VERSIONS = 4


@dataclass(slots=True)
class PublicationTimes:
    """Sums over the publications so far: seconds that the learner waited, that engines were paused (mean over engines) and until live;
    tokens that running responses had to compute again; publications repeated and engines dropped because of a fault."""

    count: int = 0
    learner_waited: float = 0.0
    engines_paused: float = 0.0
    wall: float = 0.0
    recomputed_tokens: int = 0
    repeated: int = 0
    dropped: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count what the engines say about one delivery."""
        receipts = outcome.done.values()
        self.engines_paused += sum(receipt.seconds["total"] for receipt in receipts) / max(1, len(receipts))
        self.recomputed_tokens += sum(receipt.recomputed_tokens for receipt in receipts)

    def measurements(self) -> dict[str, float]:
        """As metrics: means per publication, and counts."""
        count = max(1, self.count)
        return {
            "weights/publications": float(self.count), "weights/learner_waited_s": self.learner_waited / count,
            "weights/engine_paused_s": self.engines_paused / count, "weights/until_live_s": self.wall / count,
            "weights/recomputed_tokens": self.recomputed_tokens / count, "weights/repeated": float(self.repeated),
            "weights/dropped_engines": float(self.dropped),
        }


class Probes:
    """`sequences`: the fixed responses. `owed`: engines whose last answer could not be compared."""

    def __init__(self, config: Config, tolerance: Tolerance) -> None:
        self._settings, self._tolerance = config.weight_sync, tolerance
        self.sequences: list[TokenSequence] = []
        self.owed: set[str] = set()
        self._expected: dict[str, list[np.ndarray]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._findings: list[BaseException] = []
        self._compared = 0
        self._largest = 0.0

    def due(self, publications: int) -> bool:
        """Whether the publication after so many is one to verify."""
        every = self._settings.verify_every
        return bool(every and self.sequences) and (publications + 1) % every == 0

    def expect(self, label: str, logprobs: list[np.ndarray]) -> None:
        """What the learner computes under this label."""
        self._expected[label] = logprobs
        while len(self._expected) > KEPT_VERSIONS:
            del self._expected[next(iter(self._expected))]

    def start(self, engines: Sequence[EngineHandle], *, all_of_them: bool) -> None:
        """Ask these engines, or those among them that owe an answer, in the background."""
        self.owed &= {engine.actor_id for engine in engines}
        for engine in engines:
            if (all_of_them or engine.actor_id in self.owed) and engine.actor_id not in self._asking:
                task = self._asking[engine.actor_id] = asyncio.create_task(self._ask(engine))
                task.add_done_callback(lambda task, actor_id=engine.actor_id: self._finished(actor_id, task))

    def raise_findings(self) -> None:
        """Raise TransferMismatch if an engine was found to compute with other weights."""
        for error in self._findings:
            raise error

    def measurements(self) -> dict[str, float]:
        """weights/probes: answers compared; weights/drift: the largest difference seen; weights/probes_owed: answers still to come."""
        return {"weights/probes": float(self._compared), "weights/drift": self._largest, "weights/probes_owed": float(len(self.owed))}

    async def settle(self) -> None:
        """Wait for the answers that are still to come; each has a deadline."""
        if self._asking:
            await asyncio.wait(set(self._asking.values()))
            await asyncio.sleep(0)  # for what `_finished` notes

    async def close(self) -> None:
        """Stop asking."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, engine: EngineHandle) -> None:
        self.owed.add(engine.actor_id)
        async with asyncio.timeout(self._settings.deadlines.acknowledge_s):
            scored = await engine.score(self.sequences)
        labels = {label for own, _ in scored for label in own}
        if len(labels) != 1 or (label := labels.pop()) not in self._expected:
            return
        difference = Difference.of([row for _, row in scored], self._expected[label])
        self.owed.discard(engine.actor_id)
        self._compared, self._largest = self._compared + 1, max(self._largest, self._tolerance.size(difference))
        if objection := self._tolerance.objection(difference):
            raise TransferMismatch(
                f"engine {engine.actor_id} does not compute with the weights {label} that it acknowledged: {objection}; its responses would be "
                "trained as another policy's"
            )

    def _finished(self, actor_id: str, task: asyncio.Task[None]) -> None:
        del self._asking[actor_id]
        if task.cancelled():
            return
        if isinstance(task.exception(), TransferMismatch):
            self._findings.append(task.exception())
        elif task.exception() is not None:  # dead or busy: the manager finds out which, and the answer stays owed
            self.owed.add(actor_id)
