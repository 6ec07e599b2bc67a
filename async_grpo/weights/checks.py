"""Do engines compute with the weights that the learner sent? Two checks of log-probs.

Runs in: the driver.

    LoadPathCheck   of every engine before it serves: weights that are visibly perturbed must move
                    its log-probs as they move the learner's (tensors that do not arrive, or arrive
                    in the wrong place, show), and its sampled responses must come with the
                    log-probs that the learner computes. In half precision the true weights are
                    published before them, which shows how far engine and learner differ by
                    rounding, and the movements are compared
    DriftProbe      after every `verify_every`-th publication each engine scores a few fixed
                    responses, as ordinary requests between the others; compared with what the
                    learner computed when it staged the version that labels the answer. An answer
                    that spans two versions, or has one that the learner did not score, is owed: the
                    engine is asked again after the next publication

`Tolerance` says which differences are rounding: in float32 1e-4 on average, in bfloat16 some
hundredths per token, measured on the true weights; rounding has no direction. The perturbation has
to move log-probs by many times what is allowed: a check that could not fail shows nothing. But one
that wrecks the model makes rounding as large as any fault: perturbations grow in small steps, and
the one that shows most without wrecking decides.

Invariants: an engine that passed the load-path check serves perturbed weights until real ones are
published, and no ticket exists before that; a drift probe delays no publication and no step, its
findings end the run at the next boundary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from async_grpo.config.schema import Config
from async_grpo.errors import TransferMismatch
from async_grpo.weights.fan_out import EngineHandle
from async_grpo.weights.shared_gpu import Apart
from async_grpo.weights.transport import SELF_CHECK, Announcement, Staged, TokenSequence

SELF_CHECK_SCALES = (0.0125, 0.025, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.56, 0.8)
"""Perturbations tried in turn until one moves log-probs far enough. Those of a trained model move
three times as far with each of the later steps.
"""
CONTRAST, CLEAR = 4.0, 10.0
"""Least movement, in differences that are allowed, and one that leaves nothing to show: what a
tenth of it comes from, a single layer, has not arrived unseen.
"""
WRECKED = 3.0
"""Mean movement of log-probs, in nats, beyond which little of what a trained model knew is left."""
EXACT = 1e-4
OUTLIER = 64.0
"""In float32: the mean difference that is allowed, and the largest one, which may also be so many
times the mean. Rounding differs by up to 26 times its mean, measured over 500 tokens of a trained
model; a fault that few tokens show stands out from all others.
"""
NOISY_MEAN, NOISY_CORRELATION, NOISE_FACTOR = 0.03, 0.95, 4.0
LARGEST_NOISE, LEAST_NOISE = 0.15, 2e-3
"""Most that rounding explains, as a mean difference of log-probs, and least that is expected."""
LEAST_BIAS = 0.02
"""Mean difference with its sign that is always allowed."""
MOVEMENT_CORRELATION, MOVEMENT_NOISE, STEEPER = 0.9, 4.0, 1.5
"""Least correlation of the movements of engine and learner, and the most that they may differ on
average, as a multiple of the noise: where a perturbation moves log-probs n times as far for its
scale as the smallest did, rounding does too, and `STEEPER` * n is allowed.
"""
KEPT_VERSIONS = 4
"""Newest versions whose log-probs of the learner are kept for answers of the drift probe."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Largest and mean absolute difference of two lists of log-probs, and their correlation; not a
    number if an entry is not. bias: mean difference with its sign, and `error` its standard error.
    spread: standard deviation of the second list.
    """

    largest: float
    mean: float
    correlation: float
    bias: float = 0.0
    error: float = 0.0
    spread: float = 0.0

    @classmethod
    def of(cls, served: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> Difference:
        """Compare two lists of the same number of arrays [L]."""
        ours, theirs = (
            np.concatenate(list(rows)).astype(np.float64) if rows else np.zeros(0)
            for rows in (served, expected)
        )
        if not len(ours):
            return cls(0.0, 0.0, 1.0)
        apart, varies = ours - theirs, len(ours) > 1 and ours.std() > 0 and theirs.std() > 0
        return cls(
            float(np.abs(apart).max()),
            float(np.abs(apart).mean()),
            float(np.corrcoef(ours, theirs)[0, 1]) if varies else 1.0,
            float(apart.mean()),
            float(apart.std() / len(apart) ** 0.5),
            float(theirs.std()),
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
        """The mean difference that is allowed, and the least bound of the largest one (exact)."""
        return EXACT if self.exact else max(NOISY_MEAN, NOISE_FACTOR * self.noise)

    def size(self, difference: Difference) -> float:
        """Return the number that is shown of a difference."""
        return difference.largest if self.exact else difference.mean

    def objection(self, difference: Difference) -> str:
        """Say what is wrong with a difference, or ""."""
        if not difference.mean <= self.bound:  # not a number is too much
            return (
                f"log-probs differ by {difference.mean:.2g} on average, and {self.bound:.2g} is "
                "allowed"
            )
        most = max(self.bound, OUTLIER * difference.mean)
        if self.exact and not difference.largest <= most:
            return (
                f"log-probs differ by {difference.largest:.2g} at worst, and {most:.2g} is allowed"
            )
        # log-probs that hardly vary do not correlate either way
        tells = not self.exact and not difference.spread <= CONTRAST * self.bound
        if tells and not difference.correlation >= NOISY_CORRELATION:
            return (
                f"log-probs correlate by {difference.correlation:.2f} only, and "
                f"{NOISY_CORRELATION} is the least"
            )
        return ""

    def measure(self, difference: Difference) -> str:
        """Take a difference under the same weights as noise; or say why it is none."""
        if not difference.mean <= LARGEST_NOISE:
            return (
                f"log-probs differ by {difference.mean:.2g} on average, and rounding explains "
                f"{LARGEST_NOISE}"
            )
        allowed = max(LEAST_BIAS, difference.mean / 2, CONTRAST * difference.error)
        if not abs(difference.bias) <= allowed:
            return (
                f"log-probs differ by {difference.bias:+.2g} on average, all in one direction; "
                f"rounding explains at most {allowed:.2g}"
            )
        self.noise = max(self.noise, difference.mean)
        return ""

    def of_movement(self, steeper: float) -> float:
        """Return the difference of two movements that is allowed. steeper: how many times as far
        for its scale the perturbation moves log-probs as a small one.
        """
        if self.exact:
            return self.bound
        return max(MOVEMENT_NOISE, STEEPER * steeper) * max(self.noise, LEAST_NOISE)


AFTER_PERTURBATION = "after a test weight sync of perturbed weights"
Scores = dict[str, list[np.ndarray]]
"""Log-probs of the fixed responses, each [L], by engine."""


@dataclass(slots=True)
class Perturbation:
    """A perturbation, how far the learner's log-probs moved, by how much the engines' may differ,
    and by how much they did, where they were asked.
    """

    scale: float
    moved: float
    allowed: float
    apart: dict[str, Difference] = field(default_factory=dict)

    @property
    def contrast(self) -> float:
        """Movement, in differences that are allowed."""
        return self.moved / self.allowed

    def objection(self, actor_id: str, tolerance: Tolerance) -> str:
        """Say what is wrong with an engine's movement, or ""."""
        apart = self.apart[actor_id]
        if tolerance.exact:
            return tolerance.objection(apart)
        # movements that are all alike do not correlate either way
        tells = not apart.spread <= CONTRAST * self.allowed
        alike = apart.correlation >= MOVEMENT_CORRELATION or not tells
        if apart.mean <= self.allowed and alike:
            return ""
        return (
            f"its log-probs move otherwise, by {apart.mean:.2g} on average (if the run passes with "
            "model.dtype: float32 this is rounding, and weight_sync.self_check: false starts "
            "without the check)"
        )

    def text(self, actor_id: str = "") -> str:
        """Return the figures, those of an engine too where it is given and was asked."""
        text, apart = f"{self.scale:g}: {self.moved:.2g}", self.apart.get(actor_id)
        if apart is None:
            return text
        return (
            f"{text}, {actor_id} {apart.mean:.2g} apart (allowed {self.allowed:.2g}, correlation "
            f"{apart.correlation:.3f})"
        )


def _minus(rows: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [row - other for row, other in zip(rows, others, strict=True)]


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
        gpu: Apart,
    ) -> None:
        """deliver(engines, announcement): returns when all of them have it, or raises."""
        self._gpu = gpu
        self._config, self._backend = config, backend
        self._learner, self._deliver = learner, deliver
        self._tolerance = tolerance
        # in float32 a larger one tells no less
        self._scales: tuple[float, ...] = (
            SELF_CHECK_SCALES[2:] if tolerance.exact else SELF_CHECK_SCALES
        )
        self._slope = np.inf  # least movement so far, by scale
        self.sequences: list[TokenSequence] = []
        self.passed: set[str] = set()

    async def load_path(self, engines: Sequence[EngineHandle]) -> dict[str, float]:
        """Publish perturbed weights to these engines and compare log-probs. Returns metrics."""
        try:
            measured = await self._perturb_and_compare(engines)
        except asyncio.CancelledError:  # a run that ends waits for no rank; its copy ends with it
            raise
        except BaseException:
            await self._learner.release()
            raise
        await self._learner.release()
        return measured

    async def _perturb_and_compare(self, engines: Sequence[EngineHandle]) -> dict[str, float]:
        tolerance = self._tolerance
        origin = None if tolerance.exact else await self._noise(engines)
        tried: list[Perturbation] = []
        for scale in self._scales:
            staged = await self._stage(scale)
            moved = Difference.of(staged.logprobs, staged.before)
            self._slope = min(self._slope, max(moved.mean, LEAST_NOISE) / scale)
            allowed = tolerance.of_movement(moved.mean / scale / self._slope)
            wrecked = not tolerance.exact and not moved.mean <= WRECKED
            if wrecked and any(one.apart for one in tried):
                break
            tried.append(one := Perturbation(scale, tolerance.size(moved), allowed))
            if one.contrast < CONTRAST:
                continue
            one.apart = await self._apart(engines, staged, origin)
            if tolerance.exact or wrecked or one.contrast >= CLEAR:
                break
        shown = [one for one in tried if one.apart]
        if not shown:
            raise SelfCheckFailed(
                f"no test perturbation moved log-probs by {CONTRAST:g} times what rounding "
                f"explains, {tried[-1].allowed:.2g}, too little to tell whether weights arrive "
                f"(by scale: {'; '.join(one.text() for one in tried)}); set "
                "weight_sync.self_check: false to start without the check"
            )
        best = max(shown, key=lambda one: one.contrast)
        for actor_id in best.apart:
            if objection := best.objection(actor_id, tolerance):
                figures = "; ".join(one.text(actor_id) for one in tried)
                objection += (
                    f"; by scale of the perturbation, the learner's log-probs moved by {figures}"
                )
                self._object({actor_id: objection}, AFTER_PERTURBATION)
        # later checks start here, and may need more: the tolerance may grow with the noise
        self._scales = tuple(other for other in SELF_CHECK_SCALES if other >= best.scale)
        self.passed |= set(best.apart)
        return {
            "weights/self_check_error": max(map(tolerance.size, best.apart.values())),
            "weights/self_check_moved": best.moved,
        }

    async def _noise(self, engines: Sequence[EngineHandle]) -> Scores:
        """Publish the true weights, measure the noise, and return the log-probs of each engine."""
        staged = await self._stage(0.0)
        scores = await self._scores(engines, staged)
        self._object(
            {
                actor_id: self._tolerance.measure(Difference.of(served, staged.logprobs))
                for actor_id, served in scores.items()
            },
            "after a test weight sync of the true weights",
        )
        return scores

    async def _stage(self, scale: float) -> Staged:
        return await self._learner.stage_perturbed(
            SELF_CHECK, scale=scale, sequences=self.sequences
        )

    async def _apart(
        self, engines: Sequence[EngineHandle], staged: Staged, origin: Scores | None
    ) -> dict[str, Difference]:
        """How far the engines' log-probs are from the learner's: their movements from `origin`,
        where it is given.
        """
        scores, expected = await self._scores(engines, staged), staged.logprobs
        if origin is not None:
            expected = _minus(expected, staged.before)
            scores = {actor: _minus(rows, origin[actor]) for actor, rows in scores.items()}
        return {actor: Difference.of(rows, expected) for actor, rows in scores.items()}

    async def _scores(self, engines: Sequence[EngineHandle], staged: Staged) -> Scores:
        """Publish weights to these engines alone; their log-probs of the sequences."""
        await self._deliver(engines, staged.announcement)
        scores = {}
        for engine in engines:
            scored = await self._within(engine, engine.score(self.sequences))
            scores[engine.actor_id] = [row for _, row in scored]
        return scores

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
        tolerance = self._tolerance
        found = {actor_id: tolerance.objection(one) for actor_id, one in differences.items()}
        self._object(found, "of the responses that it samples")
        error = max(difference.mean for difference in differences.values())
        tolerance.noise = max(tolerance.noise, error)
        return {"weights/self_check_sampler_error": error}

    def _object(self, objections: Mapping[str, str], when: str) -> None:
        for actor_id, objection in objections.items():
            if objection:
                raise SelfCheckFailed(
                    f"engine {actor_id} and the learner disagree {when}: {objection}. Either "
                    f"weights do not arrive over {self._backend}, or the engine computes another "
                    "function; training would use the wrong policy"
                )

    async def responses(
        self, engine: EngineHandle
    ) -> list[tuple[list[int], list[int], np.ndarray]]:
        """Let an engine sample: prompt, response and its log-probs [L]."""
        return await self._within(engine, engine.probe_sequences())

    async def _within(self, engine: EngineHandle, work: Awaitable[Any]) -> Any:
        seconds = self._config.rollout.longest_group_s
        try:
            # which, unlike `wait_for`, swallows no cancellation
            async with self._gpu.turn("engines"), asyncio.timeout(seconds):
                return await work
        except TimeoutError as error:
            raise TimeoutError(
                f"the test responses of {engine.actor_id} took longer than "
                f"{seconds:g} s: use shorter prompts, or raise rollout.group_timeout_s"
            ) from error


class DriftProbe:
    """Compares the log-probs of engines with the learner's, while they serve.

    sequences: the fixed responses. owed: engines whose last answer could not be compared.
    """

    def __init__(self, config: Config, tolerance: Tolerance, gpu: Apart) -> None:
        self._settings, self._tolerance = config.weight_sync, tolerance
        self._longest_s = config.rollout.longest_group_s
        self._gpu = gpu
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
        async with self._gpu.turn("engines"), asyncio.timeout(self._longest_s):
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
