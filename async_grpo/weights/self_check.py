"""Do engines compute with the weights that they are sent? Asked at the start, and of every newcomer.

Runs in: the driver. Hides the two questions: weights that are visibly perturbed must move the engine's log-probs as they move the learner's
(tensors that do not arrive, or not where they should, show), and sampled responses must come with the log-probs that the learner computes.
Invariant: whoever passes serves perturbed weights until real ones are published; no ticket exists before that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import numpy as np

from async_grpo.config.schema import Config
from async_grpo.weights.base import SELF_CHECK, Announcement, Staged, TokenSequence, TransferMismatch
from async_grpo.weights.delivery import EngineHandle
from async_grpo.weights.verification import SELF_CHECK_SCALES, Difference, Tolerance


class SelfCheckFailed(TransferMismatch):
    """An engine does not compute with the weights that it was sent."""


class LearnerSide(Protocol):
    """The learner group as the check sees it."""

    async def stage_perturbed(self, label: str, *, scale: float, sequences: list[TokenSequence]) -> Staged: ...
    async def release(self) -> None: ...
    async def logprobs(self, sequences: list[TokenSequence]) -> list[np.ndarray]: ...


class SelfCheck:
    """`sequences`: the fixed responses that engines score. `passed`: ids of the engines that did."""

    def __init__(
        self, config: Config, *, learner: LearnerSide, tolerance: Tolerance, backend: str,
        deliver: Callable[[Sequence[EngineHandle], Announcement], Awaitable[None]],
    ) -> None:
        """deliver(engines, announcement): returns when all of them have it, or raises."""
        self._config, self._learner, self._tolerance, self._backend, self._deliver = config, learner, tolerance, backend, deliver
        self._scales = SELF_CHECK_SCALES
        self.sequences: list[TokenSequence] = []
        self.passed: set[str] = set()

    async def load_path(self, engines: Sequence[EngineHandle]) -> dict[str, float]:
        """Publish perturbed weights to these engines and compare log-probs: tensors that do not arrive, or not where they should, show."""
        try:
            return await self._perturb_and_compare(engines)
        finally:
            await self._learner.release()

    async def _perturb_and_compare(self, engines: Sequence[EngineHandle]) -> dict[str, float]:
        for scale in self._scales:
            staged = await self._learner.stage_perturbed(SELF_CHECK, scale=scale, sequences=self.sequences)
            await self._deliver(engines, staged.announcement)
            differences = {}
            for engine in engines:
                scored = await self._within(engine.score(self.sequences), f"the test responses of {engine.actor_id}")
                differences[engine.actor_id] = Difference.of([row for _, row in scored], staged.logprobs)
            moved = Difference.of(staged.logprobs, staged.before)
            self._object(differences, "after a test publication of perturbed weights")
            if self._tolerance.shows(moved):
                self._scales = tuple(other for other in SELF_CHECK_SCALES if other >= scale)  # the bound may grow with the noise
                self.passed |= set(differences)
                worst = max(self._tolerance.size(difference) for difference in differences.values())
                return {"weights/self_check_error": worst, "weights/self_check_moved": self._tolerance.size(moved)}
        raise SelfCheckFailed(
            f"the test perturbation moved log-probs by {self._tolerance.size(moved):.2g} only, too little to tell whether weights arrive (engine "
            f"and learner may differ by {self._tolerance.bound:.2g}); set weight_sync.self_check: false to start without the check"
        )

    async def sampler(self, engines: Sequence[EngineHandle]) -> dict[str, float]:
        """Compare the log-probs that come with sampled responses, at the training temperature, under the true weights; measures the noise."""
        differences = {}
        for engine in engines:
            answers = await self.responses(engine)
            expected = await self._learner.logprobs([(prompt, response) for prompt, response, _ in answers])
            differences[engine.actor_id] = Difference.of([served for _, _, served in answers], expected)
        self._object(differences, "of the responses that it samples")
        self._tolerance.noise = max(difference.mean for difference in differences.values())
        return {"weights/self_check_sampler_error": self._tolerance.noise}

    def _object(self, differences: dict[str, Difference], when: str) -> None:
        for actor_id, difference in differences.items():
            if objection := self._tolerance.objection(difference):
                raise SelfCheckFailed(
                    f"engine {actor_id} and the learner disagree {when}: {objection}. Weights do not arrive where they should over "
                    f"{self._backend}, or the engine computes something else; training would silently use the wrong policy"
                )

    async def responses(self, engine: EngineHandle) -> list[tuple[list[int], list[int], np.ndarray]]:
        return await self._within(engine.probe_sequences(), f"the test responses of {engine.actor_id}")

    async def _within(self, work: Awaitable[Any], what: str) -> Any:
        seconds = self._config.weight_sync.deadlines.acknowledge_s
        try:
            return await asyncio.wait_for(work, seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{what} took longer than weight_sync.deadlines.acknowledge_s = {seconds:g} s") from error
