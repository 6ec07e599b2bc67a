"""Evaluates held-out problems on the run's engines.

Runs in: the driver. Hides which engine answers, and that engines may die meanwhile.

    before, after training   all engines share the problems, since nothing else runs; problems of a
                             dead engine are shared out again, or wait for its replacement where it
                             was the last engine
    beside training          one engine leaves the set (`Coordinator.pinned`): it takes no tickets
                             and answers beside the groups that it holds -> join. The last engine
                             generates training groups too, and the next publication waits

Invariants: a result belongs to one version, which every response carries, and is logged under its
step; at most one evaluation is beside training, and an evaluation that is due meanwhile is left out
and counted; an evaluation whose engine dies begins again with the version of then, an evaluation
that takes longer than `evaluation.timeout_s` is given up; both are noted. Learner steps wait only
for a held publication.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import ray

from async_grpo.algo.accuracy import ProblemOutcome, metrics
from async_grpo.cluster.deaths import is_death
from async_grpo.cluster.remote_engine import RemoteEngine
from async_grpo.cluster.rollout_actors import ActorManager
from async_grpo.cluster.samples import EvaluationSamples
from async_grpo.cluster.session import settled
from async_grpo.config.schema import Config
from async_grpo.errors import Stalled
from async_grpo.runtime.listener import FailureHandler, RunListener
from async_grpo.weights.coordinator import Coordinator
from async_grpo.weights.pinning import Pin
from async_grpo.weights.transport import parse_label

HEALTH_TIMEOUT_S = 10.0
POLL_S = 0.1
MAY_LIVE = (ray.exceptions.RayTaskError, ray.exceptions.ActorUnavailableError)
"""Errors after which a probe tells whether the engine is dead."""
Rows = list[dict[str, Any]]
WhenDone = Callable[[int, dict[str, float], Rows], None]
Tell = Callable[[Mapping[str, float]], Awaitable[list[str]]]


class HasEpoch(Protocol):
    """Knows the run's epoch, which rises when the learner goes back to a checkpoint."""

    run_epoch: int


class Evaluations:
    """All evaluations of one run."""

    def __init__(
        self,
        config: Config,
        *,
        coordinator: Coordinator[RemoteEngine],
        actors: ActorManager,
        epochs: HasEpoch,
        listener: RunListener,
        failures: FailureHandler,
        total_steps: int,
        tell: Tell,
    ) -> None:
        """failures: told what ends the run. tell: told accuracies by task; which begin by that."""
        self._config, self._coordinator = config, coordinator
        self._actors, self._epochs = actors, epochs
        self._listener, self._failures = listener, failures
        self._tell_accuracies = tell
        self._samples = EvaluationSamples(total_steps=total_steps, rows=config.tracking.sample_rows)
        self._beside: asyncio.Task[None] | None = None
        self._skipped = 0

    async def everywhere(
        self, total: int, *, step: int, alone: Callable[[], Awaitable[None]]
    ) -> tuple[dict[str, float], Rows]:
        """Evaluate the live weights (of `step`) on `total` problems: metrics, and responses to
        show. No publication and no other evaluation may run. Raises Stalled after
        `evaluation.timeout_s`.

        alone: called while no engine serves; raises when none will.
        """
        started, left, outcomes, rows = time.perf_counter(), list(range(total)), [], []
        try:
            async with asyncio.timeout(self._config.evaluation.timeout_s) as deadline:
                while left:
                    while not (engines := self._coordinator.serving()):
                        await alone()
                        await asyncio.sleep(POLL_S)
                    async with self._actors.gpu.turn("engines"):
                        left, answered, shown = await self._share(engines, left, total=total)
                    outcomes += answered
                    rows += shown
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise Stalled(
                "the evaluation took longer than evaluation.timeout_s = "
                f"{self._config.evaluation.timeout_s:g} s"
            ) from error
        seconds = time.perf_counter() - started
        result = await self._metrics(outcomes, seconds=seconds, waited=seconds)
        self._listener.note(f"held-out accuracy at step {step}: {_accuracies(result)}")
        return result, self._samples.shown(step, rows)

    async def begin(self, total: int, done: WhenDone) -> None:
        """Begin to evaluate the newest version; `done(step, metrics, responses)` at the end."""
        if self._beside is not None and not self._beside.done():
            self._skipped += 1
            self._listener.note(
                "an evaluation is left out, because the one before is still under way: raise "
                "evaluation.every_steps, or lower evaluation.max_samples or evaluation.n"
            )
            return
        self._beside = asyncio.create_task(self._evaluate_beside(total, done))
        self._beside.add_done_callback(self._ended)
        await asyncio.sleep(0)  # now it has asked for the version, before the next publication can

    async def finish(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` for the evaluation beside training; whether none runs any more."""
        if self._beside is not None:
            await asyncio.wait({self._beside}, timeout=seconds)
        return self._beside is None or self._beside.done()

    def cancel(self) -> None:
        """Give up the evaluation beside training, because the run ends."""
        if self._beside is not None:
            self._beside.cancel()

    async def _evaluate_beside(self, total: int, done: WhenDone) -> None:
        started = time.perf_counter()
        deadline = asyncio.get_running_loop().time() + self._config.evaluation.timeout_s
        waited = 0.0
        while True:
            answers = None
            async with self._coordinator.pinned() as pin:
                try:
                    async with asyncio.timeout_at(deadline) as limit:
                        answers = await self._by(pin, total)
                except TimeoutError:
                    if not limit.expired():
                        raise
                if pin.engine is not None:
                    # it gets tickets when it serves the live version
                    await self._tell(pin.engine, pin.engine.handle.go_on)
                waited += pin.learner_waited_s
            version = parse_label(pin.label)
            if answers is not None and version.run_epoch == self._epochs.run_epoch:
                outcomes, rows = answers
                seconds = time.perf_counter() - started
                result = await self._metrics(outcomes, seconds=seconds, waited=waited)
                self._listener.note(_line(version.step, result, pin))
                done(version.step, result, self._samples.shown(version.step, rows))
                return
            back = f"the learner was rolled back before step {version.step}"
            why = "its engine died" if answers is None else back
            if limit.expired() or not await self._somebody_serves(deadline):
                self._listener.note(
                    f"the evaluation of step {version.step} took longer than evaluation.timeout_s "
                    f"= {self._config.evaluation.timeout_s:g} s and is cancelled"
                )
                return
            self._listener.note(
                f"the evaluation of step {version.step} starts again with the current weights: "
                f"{why}"
            )

    async def _by(
        self, pin: Pin[RemoteEngine], total: int
    ) -> tuple[list[ProblemOutcome], Rows] | None:
        """Answers of the engines that keep the version; None when one of them died."""
        if pin.engine is None:
            engines = self._coordinator.serving()
        else:  # nobody waits for its last groups: they go on
            engines = [pin.engine] if await self._tell(pin.engine, pin.engine.handle.rest) else []
        if not engines:
            return None
        async with self._actors.gpu.turn("engines"):
            left, outcomes, rows = await self._share(engines, list(range(total)), total=total)
        return None if left else (outcomes, rows)

    async def _tell(self, engine: RemoteEngine, call: Any) -> bool:
        """Whether the engine took the call; otherwise it is dropped."""
        if (error := await _fault(call)) is not None:
            await self._actors.drop(engine.actor_id, error)
        return error is None

    async def _somebody_serves(self, deadline: float) -> bool:
        """Whether an engine serves before the deadline, perhaps in the place of a dead one."""
        while not self._coordinator.serving():
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True

    async def _share(
        self, engines: Sequence[RemoteEngine], problems: list[int], *, total: int
    ) -> tuple[list[int], list[ProblemOutcome], Rows]:
        """Problems that dead engines left undone; outcomes and some responses of the others."""
        samples = -(-self._samples.each // len(engines))
        parts = [problems[index :: len(engines)] for index in range(len(engines))]
        calls = [
            engine.handle.evaluate.remote(
                indices=part, total=total, label=engine.acknowledged, samples=samples
            )
            for engine, part in zip(engines, parts, strict=True)
        ]
        left, outcomes, rows = [], [], []
        try:
            answers = await asyncio.gather(*[settled(call) for call in calls])
        except asyncio.CancelledError:
            for call in calls:
                ray.cancel(call)  # else the engine would go on answering
            raise
        for engine, part, answer in zip(engines, parts, answers, strict=True):
            dead = unanswered = is_death(answer)
            if isinstance(answer, MAY_LIVE):
                dead = await _fault(engine.handle.health) is not None
            if dead:
                await self._actors.drop(engine.actor_id, answer)
            if dead or unanswered:  # others answer its problems, or it is asked again
                left += part
            elif isinstance(answer, BaseException):
                raise answer
            else:
                outcomes += answer[0]
                rows += answer[1]
        return left, outcomes, rows

    async def _metrics(
        self, outcomes: list[ProblemOutcome], *, seconds: float, waited: float
    ) -> dict[str, float]:
        own = {
            "eval/seconds": seconds,
            "eval/learner_waited_s": waited,
            "eval/skipped": float(self._skipped),
        }
        found = metrics(outcomes, n=self._config.evaluation.n) | own
        if any(one.after for one in self._config.tasks.values()):
            names = {name: f"eval/task/{name}/accuracy_greedy" for name in self._config.tasks}
            known = {name: found[key] for name, key in names.items() if key in found}
            for task in await self._tell_accuracies(known):
                self._listener.note(f"task {task} is posed from now on")
        return found

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failures.fail(error)


def _accuracies(result: dict[str, float]) -> str:
    """Say what an evaluation found."""
    names = [
        name
        for name in result
        if name == "eval/accuracy_greedy"
        or (name.startswith("eval/pass_at_") and name.count("/") == 1)
    ]
    spoken = [
        f"{name.removeprefix('eval/').replace('_at_', '@').replace('accuracy_', '')} "
        f"{result[name]:.1%}"
        for name in names
    ]
    return ", ".join(spoken) or f"{result['eval/problems']:.0f} problems, none judged"


def _line(step: int, result: dict[str, float], pin: Pin[RemoteEngine]) -> str:
    """Line for the user about an evaluation while the run trains."""
    who = f"on {pin.engine.actor_id}" if pin.engine else "on every engine, while weight sync waited"
    return (
        f"evaluated step {step} {who}: {_accuracies(result)} ({result['eval/seconds']:.1f} s; the "
        f"learner waited {result['eval/learner_waited_s']:.1f} s)"
    )


async def _fault(call: Any) -> BaseException | None:
    """Call an engine: the error if it does not answer in time, else None."""
    try:
        await asyncio.wait_for(call.remote(), HEALTH_TIMEOUT_S)
    except (TimeoutError, ray.exceptions.RayError) as error:
        return error
    return None
