"""The training loop.

Runs in: the driver. Sees ids, lengths, raw rewards and versions, never tokens.

       tickets (group_id, attempt, policy_version)
     +------------------------------------------+
     v                                          |
    rollout actors ---- groups (msgpack) --> ReplayQueue -- metadata --> loop: plan, row mathematics
     vLLM engine, verifier children             | owns admission, order    |
     ^                                          |                          v  prepare / train
     |                                          +---- payload --> Learner rank x M (DeepSpeed):
     |                                                              token mathematics
     +------------- weights, version v ------------------------------------+

One learner step: take(step) -> plan -> prepare -> row values
                  -> train (epochs x minibatches updates) -> publish(version = step) -> log

rollout actor  consumes tickets; waits for a ticket, that is for `live(version)` and for room below
               `max_outstanding`; unblocked by publish and by batches that leave the queue
ReplayQueue    consumes groups; waits for nothing: it answers, or says that it has no batch yet
loop           consumes metadata; waits for a batch, the ranks, and the publication before this one;
               unblocked by `rollout_batch_size` groups in time, and by every engine that took
               the weights
Learner rank   consumes payload and row values; waits for the loop's calls and the other ranks

A learner that was set back to a checkpoint repeats the recorded steps after it (`repeat`): the same
without publications. That half is `StepTrainer`, which also trains a recorded run again alone.

Invariants: step numbers start at 1 and the weights after step s are version s; a batch has exactly
`rollout_batch_size` groups; nothing waits longer than `watchdog.step_timeout_s`, a step as a whole
not longer than twice that, and a failure elsewhere (`fail`) ends every wait at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from async_grpo.algo.metrics import MetricSums
from async_grpo.config.schema import Config
from async_grpo.errors import LearnerLost, Stalled, StopRequested
from async_grpo.learner.batching import RankPlan, RowKey, RowValue
from async_grpo.run.planning import RowMath
from async_grpo.runtime.time_ledger import LEARNER_CAUSES, LEARNER_PREFIX, LearnerTime, TimeByCause
from async_grpo.wire.codec import Batch

POLL_S = 0.005
BETWEEN = "between two learner steps"
STEP_DEADLINES, STEP_GRACE_S = 2, 5.0
"""A learner step as a whole gets this many times its deadline and so much longer: a call of the
learner that hangs has one of its own, which may begin late in the step, and after which the learner
is brought back.
"""


class BatchQueue(Protocol):
    """The queue as the loop sees it."""

    async def get_batch(self, step: int) -> Batch | None:
        """Take the batch of this step; None while there is none."""

    async def metrics(self) -> dict[str, float]:
        """Metrics of the queue."""


class TrainingLearner(Protocol):
    """The learner group as the loop sees it."""

    async def prepare(self, plans: Sequence[RankPlan]) -> dict[RowKey, float]:
        """Let every rank fetch its rows. Token KL per row, if the reward needs it."""

    async def train(
        self, values: dict[RowKey, RowValue], kl_coef: float, lr_factor: float
    ) -> list[dict[str, Any]]:
        """Make the optimizer steps of the plans. values: what the rows are worth; lr_factor: of the
        learning rate. Metrics of each rank on the wire form of MetricSums.
        """


class Publisher(Protocol):
    """The coordinator as the loop sees it."""

    async def publish(self, version: int) -> float:
        """Publish the learner's weights; the seconds that the learner waited."""

    def weight_metrics(self) -> dict[str, float]:
        """Metrics of the publications."""

    async def refresh(self, version: int) -> None:
        """Raise what was found in the background, and let newcomers in."""

    async def settle(self) -> None:
        """Wait until what was published is live and checked."""


class BatchSamples(Protocol):
    """The sample table as the loop sees it."""

    def take(self, batch: Batch) -> None:
        """Show some responses of this batch, whose training begins."""


@dataclass
class Comparison:
    """Versions with the recorded weights bit for bit, with others, and without recorded digest."""

    same: list[int] = field(default_factory=list)
    different: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)

    def add(self, version: int, *, found: str, recorded: str) -> None:
        """Compare two digests of a version's weights; "" for one that nobody took."""
        known = self.same if found == recorded else self.different
        (known if found and recorded else self.unknown).append(version)


class StepListener(Protocol):
    """The part of a `RunListener` that the loop needs."""

    def logged(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of a learner step."""

    def note(self, text: str) -> None:
        """Log something of interest."""


class StepTrainer:
    """Trains batches, step by step, and repeats recorded steps; nothing of it is published."""

    _times_repeats = True
    """Whether a repeated step's line has its seconds."""

    def __init__(
        self,
        config: Config,
        *,
        queue: BatchQueue,
        learner: TrainingLearner,
        weights: dict[str, float],
        total_steps: int,
        steps_done: int,
        listener: StepListener,
        row_state: dict[str, Any] | None = None,
    ) -> None:
        """weights: of the reward components. row_state: what the row mathematics kept."""
        self._config, self._weights = config, weights
        self._queue, self._learner = queue, learner
        self._listener, self.total_steps = listener, total_steps
        self._failure: BaseException | None = None
        self._deadlines: list[asyncio.Timeout] = []
        self.steps_done = steps_done
        self._row_math = RowMath(config, weights, row_state)
        self.phase = "starting"
        """What a step is doing, for messages."""
        self.latest: dict[str, float] = {}
        """Metrics of the last step."""
        self.lengths: list[tuple[int, ...]] = []
        """Response lengths of the last step, by group."""
        self.generation_s: list[float] = []
        """Seconds from a group's ticket to its last token, of the same groups."""
        self.time = TimeByCause(LEARNER_CAUSES)
        """What the learner spends its time on, from the first thing it is asked to do."""
        self._line: dict[str, float] = {}
        """The learner's times in the last line that was logged."""

    def fail(self, error: BaseException) -> None:
        """End the run with this error at its next wait; the first error wins."""
        if self._failure is None:
            self._failure = error
            for deadline in self._deadlines:
                if not deadline.expired():
                    deadline.reschedule(0)

    @property
    def failed(self) -> bool:
        """Whether the run ends with an error."""
        return self._failure is not None

    @asynccontextmanager
    async def _until_failure(self, step: int | None = None) -> AsyncIterator[None]:
        """Inside the block every wait ends when the run fails elsewhere, with that error. step: of
        a learner step as a whole, which ends with Stalled beyond its deadline.
        """
        self._raise_failure()
        seconds = self._config.watchdog.step_timeout_s
        limit = None if step is None else STEP_DEADLINES * seconds + STEP_GRACE_S
        deadline = asyncio.timeout(limit)
        self._deadlines.append(deadline)
        try:
            async with deadline:
                yield
        except Exception as error:
            if self._failure is None:
                if not isinstance(error, TimeoutError) or not deadline.expired():
                    raise
                raise Stalled(
                    f"learner step {step} took more than {STEP_DEADLINES} times "
                    f"watchdog.step_timeout_s ({seconds:g} s); it was {self.phase}"
                ) from error
        finally:
            self._deadlines.remove(deadline)
        self._raise_failure()  # it counts more than what it brought about, and loses no cause

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def go_back(self, steps_done: int, row_state: dict[str, Any] | None) -> None:
        """Set the loop back to a step, with the `row_state` there; None: the initial model."""
        self.steps_done = steps_done
        self._row_math = RowMath(self._config, self._weights, row_state)

    async def repeat(
        self, until: int, *, recorded: dict[int, str], digest: Callable[[int], Awaitable[str]]
    ) -> Comparison:
        """Train the recorded steps up to `until` again, and compare the digest of the weights after
        each with that in `recorded`. digest: takes the digest of the current weights.
        """
        comparison = Comparison()
        async with self._until_failure():
            while self.steps_done < until:
                step, started = self.steps_done + 1, time.perf_counter()
                self.phase = f"repeating learner step {step}"
                batch = await self._take(step)
                taken = time.perf_counter()
                sums, metrics = await self._train(batch)
                trained = time.perf_counter()
                self.steps_done = step
                expected = recorded.get(step, "")
                found = await digest(step) if expected else ""
                comparison.add(step, found=found, recorded=expected)
                metrics |= sums.means() | {
                    "train/repeated": 1.0,
                    "weights/differ": float(len(comparison.different)),
                }
                if self._times_repeats:
                    metrics |= self._times(
                        wall=time.perf_counter() - started,
                        wait=taken - started,
                        train=trained - taken,
                        publish=0.0,
                        tokens=metrics["rollout/response_tokens"],
                    )
                self._listener.logged(step, metrics)
                self.latest = metrics
        self.phase = BETWEEN
        return comparison

    def row_state(self) -> dict[str, Any]:
        """State that the row mathematics keeps from step to step, for a checkpoint."""
        return self._row_math.state()

    async def _train(self, batch: Batch) -> tuple[MetricSums, dict[str, float]]:
        self.lengths = [
            tuple(row.length for row in group.episodes_sampled) for group in batch.groups
        ]
        times = [group.times for group in batch.groups]
        self.generation_s = [each["done"] - each["queued"] for each in times]
        plans, kl_coef = self._row_math.plans(batch), self._row_math.kl_coef
        kl_sums = await self._learner.prepare(plans)
        values, metrics = self._row_math.values(batch, kl_sums)
        sums = MetricSums()
        for rank in await self._learner.train(values, kl_coef, self._row_math.lr_factor):
            sums.merge(MetricSums.from_wire(rank))
        if self._row_math.trained(sums.means()):
            self._listener.note(
                f"step {batch.step}: data from old policies keeps the policy swinging (train/ess); "
                f"the learning rate is {self._row_math.lr_factor:g} of its first from now on"
            )
        return sums, metrics

    async def _take(self, step: int) -> Batch:
        timeout_s = self._config.watchdog.step_timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            self._raise_failure()  # a wait that had just ended swallows its cancellation
            batch = await self._queue.get_batch(step)
            if batch is not None:
                return batch
            if time.monotonic() > deadline:
                counts = {
                    name: int(value)
                    for name, value in (await self._queue.metrics()).items()
                    if value and "/" in name
                }
                raise Stalled(
                    f"no batch for learner step {step} within watchdog.step_timeout_s = "
                    f"{timeout_s:g} s; the queue has {counts}"
                )
            await self._while_waiting(step)
            await asyncio.sleep(POLL_S)

    async def _while_waiting(self, step: int) -> None:
        """Do what there is to do while a batch is waited for."""

    def _times(
        self, *, wall: float, wait: float, train: float, publish: float, tokens: float
    ) -> dict[str, float]:
        before, self._line = self._line, self.time_metrics()
        spent = LearnerTime.between(before, self._line, tokens=tokens)
        return {
            "time/step": wall,
            "time/wait": wait,
            "time/train": train,
            "time/weight_sync": publish,
            "time/learner_idle": spent.idle,
            "train/tokens_per_s": spent.tokens_per_s,
            **self._line,
        }

    def time_metrics(self) -> dict[str, float]:
        """Seconds of the learner by cause so far."""
        return {f"{LEARNER_PREFIX}{cause}": spent for cause, spent in self.time.seconds().items()}


class Loop(StepTrainer):
    """Trains what the engines generate, and publishes the weights."""

    _times_repeats = False  # the seconds of a recovery count as restarting

    def __init__(
        self,
        config: Config,
        *,
        queue: BatchQueue,
        learner: TrainingLearner,
        publisher: Publisher,
        weights: dict[str, float],
        total_steps: int,
        steps_done: int,
        listener: StepListener,
        row_state: dict[str, Any] | None = None,
        samples: BatchSamples | None = None,
    ) -> None:
        """Take the parts of a loop. samples: shows responses."""
        super().__init__(
            config,
            queue=queue,
            learner=learner,
            weights=weights,
            total_steps=total_steps,
            steps_done=steps_done,
            listener=listener,
            row_state=row_state,
        )
        self._publisher, self._samples = publisher, samples
        self._published = steps_done
        self._interrupted = 0
        """The step that was cancelled while it trained; 0: none."""
        self._repeating = False
        self.stopping = False
        """Whether to give up waiting for groups."""
        self.tokens = 0
        self.lag_sum = self.lag_max = 0.0
        self.durations: list[float] = []
        self.scores: list[float] = []

    def go_back(self, steps_done: int, row_state: dict[str, Any] | None) -> None:
        """Set the loop back to a step; see `StepTrainer.go_back`."""
        super().go_back(steps_done, row_state)
        self._published = steps_done

    async def repeat(
        self, until: int, *, recorded: dict[int, str], digest: Callable[[int], Awaitable[str]]
    ) -> Comparison:
        """Train recorded steps again, whose weights are not published; see `StepTrainer.repeat`."""
        self._repeating = True
        try:
            return await super().repeat(until, recorded=recorded, digest=digest)
        finally:
            self._repeating, self._published = False, self.steps_done

    async def step(self) -> dict[str, float]:
        """Train one learner step; its metrics. Raises LearnerLost behind an interrupted one."""
        self._raise_failure()
        if self._interrupted:
            number, self._interrupted = self._interrupted, 0
            raise LearnerLost(
                f"learner step {number} was interrupted, and how far its ranks came is not known"
            )
        step, started = self.steps_done + 1, time.perf_counter()
        async with self._until_failure(step):
            self.phase = f"waiting for the groups of learner step {step}"
            with self.time.during("idle"):
                batch = await self._take(step)
            if self._samples is not None:
                self._samples.take(batch)
            self.phase = f"training learner step {step}"
            taken = time.perf_counter()
            try:
                with self.time.during("working"):
                    sums, metrics = await self._train(batch)
            except asyncio.CancelledError:
                if self._failure is None:  # Ctrl-C in a notebook, which may go on
                    self._interrupted = step
                raise
            trained = time.perf_counter()
            self.steps_done = step
            published = 0.0
            if step % self._config.weight_sync.every_steps == 0:
                published = await self._publish(step)
            self.phase = f"collecting the metrics of learner step {step}"
            wall = time.perf_counter() - started
            metrics |= sums.means() | await self._queue.metrics()
            metrics |= self._publisher.weight_metrics()
            metrics |= self._times(
                wall=wall,
                wait=taken - started,
                train=trained - taken,
                publish=published,
                tokens=metrics["rollout/response_tokens"],
            )
            self._count(wall, metrics)
            self._listener.logged(step, metrics)
            self.phase, self.latest = BETWEEN, metrics
        return metrics

    async def finish(self) -> None:
        """Publish the newest weights, and wait until they are live."""
        await self.publish_newest()
        async with self._until_failure():
            with self.time.during("weight_sync"):
                await self._publisher.settle()
        self.phase = BETWEEN

    async def publish_newest(self) -> None:
        """Publish the weights of now, if the last step's are not published."""
        if self._published < self.steps_done:
            async with self._until_failure():
                await self._publish(self.steps_done)
            self.phase = BETWEEN

    @contextmanager
    def held(self) -> Iterator[None]:
        """Enter while a publication waits for an evaluation of the version before."""
        before = self.phase
        self.phase = "waiting for an evaluation before the next weight sync"
        with self.time.during("evaluating"):
            yield
        self.phase = before

    async def _publish(self, version: int) -> float:
        self._raise_failure()
        self.phase = f"syncing weights of version {version}"
        with self.time.during("weight_sync"):
            waited = await self._publisher.publish(version)
        self._published = version
        return waited

    async def _while_waiting(self, step: int) -> None:
        """Let newcomers in, and give up waiting where the run was asked to end."""
        if self.stopping and not self._repeating:
            raise StopRequested(
                f"the run was asked to end while learner step {step} waited for its groups"
            )
        await self._publisher.refresh(step - 1)

    def _count(self, wall: float, metrics: dict[str, float]) -> None:
        """Add a step that was trained for the first time to what the summary shows."""
        self.durations.append(wall)
        self.scores.append(metrics["rollout/score"])
        self.tokens += int(metrics["rollout/response_tokens"])
        # absent when no token of the batch is in the loss
        self.lag_sum += metrics.get("train/staleness_mean", 0.0)
        self.lag_max = max(self.lag_max, metrics.get("train/staleness_max", 0.0))
