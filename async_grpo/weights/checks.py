"""Do engines compute with the weights that they are sent? Asked at the start, and of every
newcomer.

Runs in: the driver. Hides the two questions: weights that are visibly perturbed must move the
engine's log-probs as they move the learner's (tensors that do not arrive, or not where they should,
show), and sampled responses must come with the log-probs that the learner computes. Invariant:
whoever passes serves perturbed weights until real ones are published; no ticket exists before that.

When log-probs of an engine are those of the learner. Two ways of computing the same numbers differ
by rounding: in float32 by less than 1e-4, in bfloat16 by some hundredths per token, whose size is
measured on the true weights when the run starts. A check that could not fail shows nothing, so the
self-check's perturbation has to move log-probs by several times what is allowed.

The drift alarm: what engines compute now and then, against what the learner computed when it staged
the same version. After every `verify_every`-th publication each engine scores a few fixed
responses, as ordinary requests between the others; the answer carries the label of its version. An
answer that spans two versions, or comes under one for which the learner has computed nothing, is
owed: it is asked again after the next publication. Invariant: nothing here holds up a publication
or a step; what is found ends the run at the next boundary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from async_grpo.config.schema import Config
from async_grpo.errors import TransferMismatch
from async_grpo.weights.delivery import DeliveryOutcome, EngineHandle
from async_grpo.weights.transport import SELF_CHECK, Announcement, Staged, TokenSequence

SELF_CHECK_SCALES = (0.05, 0.1, 0.2, 0.4)
"""Perturbations tried in turn until one moves log-probs by more than CONTRAST times what is
allowed.
"""
CONTRAST = 4.0
EXACT = 1e-4
NOISY_MEAN, NOISY_CORRELATION, NOISE_FACTOR = 0.03, 0.95, 4.0


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two lists of log-probs: largest and mean absolute difference, and their correlation. Not a
    number if one entry is not.
    """

    largest: float
    mean: float
    correlation: float

    @classmethod
    def of(cls, served: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> Difference:
        """served, expected: the same number of arrays [L]."""
        ours, theirs = (
            np.concatenate(list(rows)).astype(np.float64) if rows else np.zeros(0)
            for rows in (served, expected)
        )
        if not len(ours):
            return cls(0.0, 0.0, 1.0)
        apart, varies = np.abs(ours - theirs), len(ours) > 1 and ours.std() > 0 and theirs.std() > 0
        return cls(
            float(apart.max()),
            float(apart.mean()),
            float(np.corrcoef(ours, theirs)[0, 1]) if varies else 1.0,
        )


@dataclass(slots=True)
class Tolerance:
    """What is allowed. exact: learner and engine compute in float32; `noise`: mean difference
    measured on the true weights.
    """

    exact: bool
    noise: float = 0.0

    @property
    def bound(self) -> float:
        """Largest difference (exact), or mean difference."""
        return EXACT if self.exact else max(NOISY_MEAN, NOISE_FACTOR * self.noise)

    def size(self, difference: Difference) -> float:
        """The number that `bound` is about."""
        return difference.largest if self.exact else difference.mean

    def objection(self, difference: Difference) -> str:
        """What is wrong with this difference, or ""."""
        size = self.size(difference)
        if not size <= self.bound:  # not a number is too much
            return (
                f"log-probs differ by {size:.2g} {'at worst' if self.exact else 'on average'}, "
                f"and {self.bound:.2g} is allowed"
            )
        if not self.exact and not difference.correlation >= NOISY_CORRELATION:
            return (
                f"log-probs correlate by {difference.correlation:.2f} only, and "
                f"{NOISY_CORRELATION} is the least"
            )
        return ""

    def shows(self, moved: Difference) -> bool:
        """Whether a perturbation that moves log-probs so far tells right from wrong weights."""
        return self.size(moved) > CONTRAST * self.bound


class SelfCheckFailed(TransferMismatch):
    """An engine does not compute with the weights that it was sent."""


class CheckedLearner(Protocol):
    """The learner group as the check sees it."""

    async def stage_perturbed(
        self, label: str, *, scale: float, sequences: list[TokenSequence]
    ) -> Staged: ...
    async def release(self) -> None: ...
    async def logprobs(self, sequences: list[TokenSequence]) -> list[np.ndarray]: ...


class SelfCheck:
    """`sequences`: the fixed responses that engines score. `passed`: ids of the engines that
    did.
    """

    def __init__(
        self,
        config: Config,
        *,
        learner: CheckedLearner,
        tolerance: Tolerance,
        backend: str,
        deliver: Callable[[Sequence[EngineHandle], Announcement], Awaitable[None]],
    ) -> None:
        """deliver(engines, announcement): returns when all of them have it, or raises."""
        self._config, self._learner, self._tolerance, self._backend, self._deliver = (
            config,
            learner,
            tolerance,
            backend,
            deliver,
        )
        self._scales = SELF_CHECK_SCALES
        self.sequences: list[TokenSequence] = []
        self.passed: set[str] = set()

    async def load_path(self, engines: Sequence[EngineHandle]) -> dict[str, float]:
        """Publish perturbed weights to these engines and compare log-probs: tensors that do not
        arrive, or not where they should, show.
        """
        try:
            return await self._perturb_and_compare(engines)
        finally:
            await self._learner.release()

    async def _perturb_and_compare(self, engines: Sequence[EngineHandle]) -> dict[str, float]:
        for scale in self._scales:
            staged = await self._learner.stage_perturbed(
                SELF_CHECK, scale=scale, sequences=self.sequences
            )
            await self._deliver(engines, staged.announcement)
            differences = {}
            for engine in engines:
                scored = await self._within(
                    engine.score(self.sequences), f"the test responses of {engine.actor_id}"
                )
                differences[engine.actor_id] = Difference.of(
                    [row for _, row in scored], staged.logprobs
                )
            moved = Difference.of(staged.logprobs, staged.before)
            self._object(differences, "after a test publication of perturbed weights")
            if self._tolerance.shows(moved):
                self._scales = tuple(
                    other for other in SELF_CHECK_SCALES if other >= scale
                )  # the bound may grow with the noise
                self.passed |= set(differences)
                worst = max(self._tolerance.size(difference) for difference in differences.values())
                return {
                    "weights/self_check_error": worst,
                    "weights/self_check_moved": self._tolerance.size(moved),
                }
        raise SelfCheckFailed(
            f"the test perturbation moved log-probs by {self._tolerance.size(moved):.2g} "
            "only, too little to tell whether weights arrive (engine "
            f"and learner may differ by {self._tolerance.bound:.2g}); set "
            "weight_sync.self_check: false to start without the check"
        )

    async def sampler(self, engines: Sequence[EngineHandle]) -> dict[str, float]:
        """Compare the log-probs that come with sampled responses, at the training temperature,
        under the true weights; measures the noise.
        """
        differences = {}
        for engine in engines:
            answers = await self.responses(engine)
            expected = await self._learner.logprobs(
                [(prompt, response) for prompt, response, _ in answers]
            )
            differences[engine.actor_id] = Difference.of(
                [served for _, _, served in answers], expected
            )
        self._object(differences, "of the responses that it samples")
        self._tolerance.noise = max(difference.mean for difference in differences.values())
        return {"weights/self_check_sampler_error": self._tolerance.noise}

    def _object(self, differences: dict[str, Difference], when: str) -> None:
        for actor_id, difference in differences.items():
            if objection := self._tolerance.objection(difference):
                raise SelfCheckFailed(
                    f"engine {actor_id} and the learner disagree {when}: {objection}. "
                    "Weights do not arrive where they should over "
                    f"{self._backend}, or the engine computes something else; training "
                    "would silently use the wrong policy"
                )

    async def responses(
        self, engine: EngineHandle
    ) -> list[tuple[list[int], list[int], np.ndarray]]:
        return await self._within(
            engine.probe_sequences(), f"the test responses of {engine.actor_id}"
        )

    async def _within(self, work: Awaitable[Any], what: str) -> Any:
        seconds = self._config.weight_sync.deadlines.acknowledge_s
        try:
            return await asyncio.wait_for(work, seconds)
        except TimeoutError as error:
            raise TimeoutError(
                f"{what} took longer than weight_sync.deadlines.acknowledge_s = {seconds:g} s"
            ) from error


KEPT_VERSIONS = 4


@dataclass(slots=True)
class PublicationTimes:
    """Sums over the publications so far: seconds that the learner waited, that engines were paused
    (mean over engines) and until live; tokens that running responses had to compute again;
    publications repeated and engines dropped because of a fault.
    """

    count: int = 0
    learner_waited: float = 0.0
    engines_paused: float = 0.0
    wall: float = 0.0
    recomputed_tokens: int = 0
    repeated: int = 0
    dropped: int = 0

    def add(self, outcome: DeliveryOutcome) -> None:
        """Count what the engines say about one delivery."""
        receipts = outcome.done.values()
        self.engines_paused += sum(receipt.seconds["total"] for receipt in receipts) / max(
            1, len(receipts)
        )
        self.recomputed_tokens += sum(receipt.recomputed_tokens for receipt in receipts)

    def measurements(self) -> dict[str, float]:
        """As metrics: means per publication, and counts."""
        count = max(1, self.count)
        return {
            "weights/publications": float(self.count),
            "weights/learner_waited_s": self.learner_waited / count,
            "weights/engine_paused_s": self.engines_paused / count,
            "weights/until_live_s": self.wall / count,
            "weights/recomputed_tokens": self.recomputed_tokens / count,
            "weights/repeated": float(self.repeated),
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
            if (
                all_of_them or engine.actor_id in self.owed
            ) and engine.actor_id not in self._asking:
                task = self._asking[engine.actor_id] = asyncio.create_task(self._ask(engine))
                task.add_done_callback(
                    lambda task, actor_id=engine.actor_id: self._finished(actor_id, task)
                )

    def raise_findings(self) -> None:
        """Raise TransferMismatch if an engine was found to compute with other weights."""
        for error in self._findings:
            raise error

    def measurements(self) -> dict[str, float]:
        """weights/probes: answers compared; weights/drift: the largest difference seen;
        weights/probes_owed: answers still to come.
        """
        return {
            "weights/probes": float(self._compared),
            "weights/drift": self._largest,
            "weights/probes_owed": float(len(self.owed)),
        }

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
        self._compared, self._largest = (
            self._compared + 1,
            max(self._largest, self._tolerance.size(difference)),
        )
        if objection := self._tolerance.objection(difference):
            raise TransferMismatch(
                f"engine {engine.actor_id} does not compute with the weights {label} that "
                f"it acknowledged: {objection}; its responses would be "
                "trained as another policy's"
            )

    def _finished(self, actor_id: str, task: asyncio.Task[None]) -> None:
        del self._asking[actor_id]
        if task.cancelled():
            return
        if isinstance(task.exception(), TransferMismatch):
            self._findings.append(task.exception())
        elif (
            task.exception() is not None
        ):  # dead or busy: the manager finds out which, and the answer stays owed
            self.owed.add(actor_id)
