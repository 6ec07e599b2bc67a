"""Frozen models: the processes that serve them, and those who ask.

    rollout actor: FrozenClient --Ray, repeated--> FrozenProcess -> engine, never synced
    rollout actor: Address (`cluster.addresses`) --HTTPS--> a model of somebody else's
    driver: FrozenModels starts the processes, watches them, and ends the run without one

Runs in: the driver (`FrozenModels`), an actor of its own per model (`FrozenProcess`), rollout
actors (`FrozenClient`). Hides restarts: Ray starts a process that died again, on its place, up to
`cluster.restart_budget` times, and repeats the calls that waited for it, which change nothing.

Invariants: learner and queue never wait for a frozen model; its weights are those of its directory
from the first answer to the last; a process that does not answer within its deadlines is killed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import ray

from async_grpo.cluster.addresses import addresses
from async_grpo.cluster.deaths import told
from async_grpo.cluster.queue import MAX_CALLS
from async_grpo.config.schema import Config
from async_grpo.errors import FaultBudgetSpent
from async_grpo.rollout.engine.base import Engine, EngineError, Sampling
from async_grpo.rollout.engine.choice import ENGINE
from async_grpo.rollout.frozen import (
    FrozenFailed,
    Question,
    Taught,
    TextRefused,
    engine_config,
    tokenizer_of,
)
from async_grpo.runtime import stacks
from async_grpo.runtime.cores import compute_in
from async_grpo.runtime.lifetime import die_with_parent
from async_grpo.runtime.listener import FailureHandler, RunListener
from async_grpo.runtime.text import one_line
from async_grpo.tasks.base import Prompt
from async_grpo.tasks.chat import answered_ids, plain, prompt_ids
from async_grpo.weights.transport import UNPUBLISHED

PROBE_INTERVAL_S = 5.0
RETRY_S = 1.0
CLOSE_TIMEOUT_S = 5.0
T = TypeVar("T")


class FrozenProcess:
    """One frozen model with its engine, which starts with the first call that needs it."""

    def __init__(self, config: Config, name: str, *, device: str, threads: int = 0) -> None:
        """threads: of computing on the CPU; 0: as Ray says."""
        die_with_parent()
        if threads:
            compute_in(threads)
        stacks.register(f"frozen-{name}", stacks.home(config.run.dir))
        self._config, self._device = engine_config(config, name), device
        self._name, self._timeout_s = name, config.frozen[name].timeout_s
        self._engine: Engine | None = None
        self._tokenizer: Any = None
        self._starting = asyncio.Lock()
        self._failure, self._answered = "", 0.0  # why it is to be killed; when it answered last

    async def start(self) -> int:
        """Load the model, once; the process id."""
        async with self._starting:
            if self._engine is None:
                model = str(self._config.model.path)
                read = asyncio.to_thread(tokenizer_of, self._config, self._name)
                self._tokenizer, stops = await read
                self._engine = await ENGINE.start(
                    self._config,
                    model_dir=model,
                    device=self._device,
                    backend="shared_memory" if self._device == "cpu" else "nccl",
                    stop_token_ids=stops,
                    label=UNPUBLISHED,
                    seed=0,
                )
        return os.getpid()

    async def score(self, sequences: Sequence[tuple[list[int], list[int]]]) -> list[Taught]:
        """See `Teacher.score`. Raises EngineError."""
        engine, top_k = await self._loaded(), self._config.algorithm.distill.teacher_top_k
        return await self._in_time(engine.top_logprobs(sequences, top_k))

    async def respond(self, prompt: list[int], limit: int, seed: int | None) -> list[int]:
        """See `Demonstrator.respond`. Raises EngineError."""
        engine = await self._loaded()
        sampling = Sampling(n=1, max_tokens=limit, temperature=1.0, seed=seed)
        [done] = await self._in_time(engine.generate(prompt, sampling))
        return list(done.token_ids.tolist())

    async def answer(self, question: Question) -> str:
        """See `Answerer.answer`. Raises EngineError."""
        engine = await self._loaded()
        messages = [
            {**one, "content": plain(self._tokenizer, one["content"])} for one in question.messages
        ]
        prompt, room = prompt_ids(self._tokenizer, messages), self._config.rollout.longest_row - 1
        if len(prompt) + question.max_tokens > room:
            raise TextRefused(
                f"is asked {len(prompt)} tokens and may answer {question.max_tokens}; "
                f"frozen.{self._name}.context_length is {room}"
            )
        sampling = Sampling(
            n=1, max_tokens=question.max_tokens, temperature=0.0, schema=question.schema
        )
        [done] = await self._in_time(engine.generate(prompt, sampling))
        return str(self._tokenizer.decode(done.token_ids, skip_special_tokens=True))

    async def rewards(self, conversations: Sequence[tuple[Prompt, str]]) -> list[float | None]:
        """See `RewardModel.rewards`. Raises EngineError."""
        engine, room = await self._loaded(), self._config.rollout.longest_row - 1
        asked = [
            answered_ids(self._tokenizer, prompt, plain(self._tokenizer, response))
            for prompt, response in conversations
        ]
        fitting = [ids for ids in asked if len(ids) <= room]
        scores = iter(await self._in_time(engine.classify(fitting)))
        return [next(scores) if len(ids) <= room else None for ids in asked]

    async def _loaded(self) -> Engine:
        await self.start()
        assert self._engine is not None
        return self._engine

    async def _in_time(self, asked: Coroutine[Any, Any, T]) -> T:
        """Wait for an answer, unless the engine gives nobody one for too long. Raises
        EngineError.
        """
        work, began = asyncio.ensure_future(asked), time.monotonic()
        try:
            while not work.done() and not self._failure:
                await asyncio.wait({work}, timeout=self._timeout_s)
                since = time.monotonic() - max(began, self._answered)
                if not work.done() and since >= self._timeout_s:
                    self._failure = f"no answer for {since:.0f} s (frozen.{self._name}.timeout_s)"
            if self._failure:
                raise EngineError(self._failure)
            answer, self._answered = work.result(), time.monotonic()
            return answer
        finally:
            work.cancel()

    async def health(self) -> int:
        """Process id. Raises EngineError where the engine is dead, or hangs."""
        if self._failure:
            raise EngineError(self._failure)
        if self._engine is not None:
            await self._engine.check()
        return os.getpid()

    async def close(self) -> None:
        """Stop the engine."""
        if self._engine is not None:
            self._engine.close()


class FrozenClient:
    """A frozen model for a rollout actor: see `rollout.frozen`."""

    def __init__(self, name: str, handle: Any) -> None:
        self._name, self._handle = name, handle

    async def score(self, sequences: Sequence[tuple[list[int], list[int]]]) -> list[Taught]:
        """See `Teacher.score`."""
        answers: list[Taught] = await self._ask("score", sequences)
        return answers

    async def respond(self, prompt: list[int], limit: int, seed: int | None) -> list[int]:
        """See `Demonstrator.respond`."""
        response: list[int] = await self._ask("respond", prompt, limit, seed)
        return response

    async def answer(self, question: Question) -> str:
        """See `Answerer.answer`."""
        return str(await self._ask("answer", question))

    async def rewards(self, conversations: Sequence[tuple[Prompt, str]]) -> list[float | None]:
        """See `RewardModel.rewards`."""
        answers: list[float | None] = await self._ask("rewards", conversations)
        return answers

    async def _ask(self, method: str, *asked: Any) -> Any:
        """Ask until there is an answer; whoever calls sets the deadline. No group fails for a
        process that is gone, since the next one would meet the same.
        """
        while True:
            try:
                # Ray repeats a call whose process dies, once there is another
                call = getattr(self._handle, method).options(max_task_retries=-1)
                return await call.remote(*asked)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, TextRefused):
                    raise TextRefused(str(error.cause)) from None
                sick = isinstance(error.cause, EngineError) and await self._returns()
                if not sick:
                    raise FrozenFailed(f"{self._name}: {one_line(error.cause)}") from error
            except ray.exceptions.RayError:
                await asyncio.sleep(RETRY_S)  # it is back soon, or the driver ends the run

    async def _returns(self) -> bool:
        """Wait until another process has taken the place of one that failed; False where the one
        that was asked is well, so that the request itself must be at fault.
        """
        try:
            await self._handle.health.remote()
            return False
        except ray.exceptions.RayError:
            await asyncio.sleep(RETRY_S)
            return True


class FrozenModels:
    """All frozen models of a run."""

    def __init__(
        self,
        config: Config,
        *,
        options: Sequence[dict[str, Any]],
        device: str,
        threads: int = 0,
        listener: RunListener,
        failures: FailureHandler,
    ) -> None:
        """Begin a process for each. options: Ray's, in the order of `config.frozen_here`. threads:
        in which each computes on the CPU; 0: as Ray says. Raises SetupError for an address whose
        key is not in the environment.
        """
        self._config, self._listener = config, listener
        self._failures = failures
        self._watching: list[asyncio.Task[None]] = []
        self.handles = {
            name: ray.remote(FrozenProcess)
            .options(
                max_concurrency=MAX_CALLS, max_restarts=config.cluster.restart_budget, **option
            )
            .remote(config, name, device=device, threads=threads)
            for name, option in zip(config.frozen_here, options, strict=True)
        }
        """Ray actors by name."""
        self.addresses = addresses(config)
        """Models that are elsewhere, by name."""

    async def start(self) -> None:
        """Load all models, and watch their processes. Raises TimeoutError, RayError."""
        seconds = self._config.watchdog.start_timeout_s
        loads = [one.start.options(max_task_retries=-1).remote() for one in self.handles.values()]
        try:
            pids = await asyncio.wait_for(asyncio.gather(*loads), seconds)
        except TimeoutError as error:
            raise TimeoutError(
                f"starting {', '.join(self.handles)} took longer than watchdog.start_timeout_s = "
                f"{seconds:g} s"
            ) from error
        for pid, (name, handle) in zip(pids, self.handles.items(), strict=True):
            watching = asyncio.ensure_future(self._watch(name, handle, pid))
            watching.add_done_callback(self._watched)
            self._watching.append(watching)

    async def stop(self) -> None:
        """End all processes, after their engines if those end in time."""
        for task in self._watching:
            task.cancel()
        closing = [one.close.remote() for one in self.handles.values()]
        with suppress(TimeoutError):
            await asyncio.wait_for(
                asyncio.gather(*closing, return_exceptions=True), CLOSE_TIMEOUT_S
            )
        for handle in self.handles.values():
            ray.kill(handle)

    async def _watch(self, name: str, handle: Any, pid: int) -> None:
        """Probe process pid and those after it: kill one that fails, so that Ray starts another."""
        limit = self._config.watchdog.probe_timeout_s
        budget = self._config.cluster.restart_budget
        restarts, fault = 0, ""
        while True:
            await asyncio.sleep(RETRY_S if fault else PROBE_INTERVAL_S)
            try:
                async with asyncio.timeout(limit):
                    now = await handle.health.remote()
            except ray.exceptions.ActorUnavailableError as error:
                fault = fault or told(error)  # it is being started again
                continue
            except TimeoutError:
                fault = f"no answer to a probe within watchdog.probe_timeout_s = {limit:g} s"
                ray.kill(handle, no_restart=False)
                continue
            except ray.exceptions.RayTaskError as error:
                fault = one_line(error.cause)
                ray.kill(handle, no_restart=False)
                continue
            except ray.exceptions.RayError as error:
                why = f"frozen model {name} died, and cluster.restart_budget = {budget} is spent"
                self._failures.fail(FaultBudgetSpent(f"{why} ({fault or told(error)})"))
                return
            if now != pid:
                restarts += 1
                said = f"frozen model {name} died ({fault or 'between two probes'})"
                self._listener.note(
                    f"{said} and is started again, restart {restarts} of at most {budget}; groups "
                    "wait for it"
                )
                self._listener.fault(said)
            pid, fault = now, ""

    def _watched(self, watching: asyncio.Task[None]) -> None:
        """End the run with an error of our own watch."""
        error = None if watching.cancelled() else watching.exception()
        if error is not None:
            self._failures.fail(error)
