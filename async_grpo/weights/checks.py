"""Do engines compute with the weights that the learner sent? Two checks of log-probs.

Runs in: the driver.

    LoadPathCheck   of every engine before it serves: weights that are visibly perturbed must move
                    its log-probs as they move the learner's (tensors that do not arrive, or arrive
                    in the wrong place, show), and its sampled responses must come with the
                    log-probs that the learner computes
    DriftProbe      after every `verify_every`-th publication each engine scores a few fixed
                    responses, as ordinary requests between the others; compared with what the
                    learner computed when it staged the version that labels the answer. An answer
                    that spans two versions, or has one that the learner did not score, is owed: the
                    engine is asked again after the next publication

`Tolerance` says which differences are rounding: in float32 less than 1e-4, in bfloat16 some
hundredths per token, measured on the true weights when the run starts. The perturbation has to move
log-probs by several times the tolerance: a check that could not fail shows nothing.

Invariants: an engine that passed the load-path check serves perturbed weights until real ones are
published, and no ticket exists before that; a drift probe delays no publication and no step, its
findings end the run at the next boundary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from async_grpo.config.schema import Config
from async_grpo.errors import TransferMismatch
from async_grpo.weights.fan_out import EngineHandle
from async_grpo.weights.transport import SELF_CHECK, Announcement, Staged, TokenSequence

SELF_CHECK_SCALES = (0.05, 0.1, 0.2, 0.4)
"""Perturbations tried in turn until one moves log-probs by more than CONTRAST x the tolerance."""
CONTRAST = 4.0
EXACT = 1e-4
NOISY_MEAN, NOISY_CORRELATION, NOISE_FACTOR = 0.03, 0.95, 4.0
KEPT_VERSIONS = 4
"""Newest versions whose log-probs of the learner are kept for answers of the drift probe."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Largest and mean absolute difference of two lists of log-probs, and their correlation; not a
    number if an entry is not.
    """

    largest: float
    mean: float
    correlation: float

    @classmethod
    def of(cls, served: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> Difference:
        """Compare two lists of the same number of arrays [L]."""
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
    """The difference that is allowed. exact: learner and engine compute in float32. noise: mean
    difference measured on the true weights.
    """

    exact: bool
    noise: float = 0.0

    @property
    def bound(self) -> float:
        """Largest difference (exact), or mean difference."""
        return EXACT if self.exact else max(NOISY_MEAN, NOISE_FACTOR * self.noise)

    def size(self, difference: Difference) -> float:
        """Return the number that `bound` limits."""
        return difference.largest if self.exact else difference.mean

    def objection(self, difference: Difference) -> str:
        """Say what is wrong with a difference, or ""."""
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
    """The learner group as the load-path check sees it."""

    async def stage_perturbed(
        self, label: str, *, scale: float, sequences: list[TokenSequence]
    ) -> Staged:
        """Stage perturbed weights apart, with the log-probs of `sequences` before and after."""

    async def release(self) -> None:
        """Free the perturbed copy."""

    async def logprobs(self, sequences: list[TokenSequence]) -> list[np.ndarray]:
        """Compute log-probs [L] of each response under the current weights."""


class LoadPathCheck:
    """Compares the log-probs of engines with the learner's, before they serve.

    sequences: the fixed responses that engines score. passed: ids of the engines that passed.
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
        self._config, self._backend = config, backend
        self._learner, self._deliver = learner, deliver
        self._tolerance = tolerance
        self._scales: tuple[float, ...] = SELF_CHECK_SCALES
        self.sequences: list[TokenSequence] = []
        self.passed: set[str] = set()

    async def load_path(self, engines: Sequence[EngineHandle]) -> dict[str, float]:
        """Publish perturbed weights to these engines and compare log-probs. Returns metrics."""
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
                scored = await self._within(engine, engine.score(self.sequences))
                differences[engine.actor_id] = Difference.of(
                    [row for _, row in scored], staged.logprobs
                )
            moved = Difference.of(staged.logprobs, staged.before)
            self._object(differences, "after a test publication of perturbed weights")
            if self._tolerance.shows(moved):
                # later checks start here, and may need more: the tolerance may grow with the noise
                self._scales = tuple(other for other in SELF_CHECK_SCALES if other >= scale)
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
        """Compare the log-probs that come with sampled responses, at the training temperature and
        under the true weights; this measures the noise. Returns metrics.
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
                    f"engine {actor_id} and the learner disagree {when}: {objection}. Weights do "
                    f"not arrive where they should over {self._backend}, or the engine computes "
                    "something else; training would silently use the wrong policy"
                )

    async def responses(
        self, engine: EngineHandle
    ) -> list[tuple[list[int], list[int], np.ndarray]]:
        """Let an engine sample: prompt, response and its log-probs [L]."""
        return await self._within(engine, engine.probe_sequences())

    async def _within(self, engine: EngineHandle, work: Awaitable[Any]) -> Any:
        seconds = self._config.weight_sync.deadlines.acknowledge_s
        try:
            return await asyncio.wait_for(work, seconds)
        except TimeoutError as error:
            raise TimeoutError(
                f"the test responses of {engine.actor_id} took longer than "
                f"weight_sync.deadlines.acknowledge_s = {seconds:g} s"
            ) from error


class DriftProbe:
    """Compares the log-probs of engines with the learner's, while they serve.

    sequences: the fixed responses. owed: engines whose last answer could not be compared.
    """

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
        """Whether to verify the publication that follows so many."""
        every = self._settings.verify_every
        return bool(every and self.sequences) and (publications + 1) % every == 0

    def expect(self, label: str, logprobs: list[np.ndarray]) -> None:
        """Keep the learner's log-probs under this label."""
        self._expected[label] = logprobs
        while len(self._expected) > KEPT_VERSIONS:
            del self._expected[next(iter(self._expected))]

    def start(self, engines: Sequence[EngineHandle], *, all_of_them: bool) -> None:
        """Ask all these engines, or only those that owe an answer, in the background."""
        self.owed &= {engine.actor_id for engine in engines}
        for engine in engines:
            wanted = all_of_them or engine.actor_id in self.owed
            if wanted and engine.actor_id not in self._asking:
                task = self._asking[engine.actor_id] = asyncio.create_task(self._ask(engine))
                task.add_done_callback(partial(self._finished, engine.actor_id))

    def raise_findings(self) -> None:
        """Raise TransferMismatch if an engine was found to compute with other weights."""
        for error in self._findings:
            raise error

    def metrics(self) -> dict[str, float]:
        """weights/probes: answers compared; /drift: largest difference; /probes_owed: to come."""
        return {
            "weights/probes": float(self._compared),
            "weights/drift": self._largest,
            "weights/probes_owed": float(len(self.owed)),
        }

    async def settle(self) -> None:
        """Wait for the answers that are still to come; each has a deadline."""
        if self._asking:
            await asyncio.wait(set(self._asking.values()))
            await asyncio.sleep(0)  # for what `_finished` records

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
        self._compared += 1
        self._largest = max(self._largest, self._tolerance.size(difference))
        if objection := self._tolerance.objection(difference):
            raise TransferMismatch(
                f"engine {engine.actor_id} does not compute with the weights {label} that it "
                f"acknowledged: {objection}; its responses would be trained as another policy's"
            )

    def _finished(self, actor_id: str, task: asyncio.Task[None]) -> None:
        del self._asking[actor_id]
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, TransferMismatch):
            self._findings.append(error)
        elif error is not None:  # dead or busy: the manager finds out which
            self.owed.add(actor_id)
