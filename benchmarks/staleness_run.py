"""Training at a forced lag: the parts of a run in one process, in step with each other.

Runs in: one process, which keeps its engine for all its runs. Queue, rollout actor, loop and
learner are the product's; only the publisher is of its own: it publishes version s when all groups
that may be issued before it are complete. With `max_staleness` L the queue then holds L whole
batches ahead of the learner, and every token of step s > L has a lag of exactly L (those of the
first L steps have s - 1).
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_grpo.config.schema import Config
from async_grpo.learner.batching import RankPlan, RowKey, RowValue
from async_grpo.learner.forward_choice import by_row
from async_grpo.learner.learner import Learner
from async_grpo.learner.packing import response_row
from async_grpo.replay.actor_reports import ActorReport
from async_grpo.replay.ledger import Ledger
from async_grpo.replay.queue import ReplayQueue, Verdict
from async_grpo.replay.rules import QueueSettings
from async_grpo.rollout.actor import RolloutActor
from async_grpo.run.loop import Loop
from async_grpo.run.planning import shaping
from async_grpo.runtime.provenance import load_tokenizer
from async_grpo.tasks.base import task_weights
from async_grpo.tasks.chat import prompt_ids
from async_grpo.tasks.registry import load_task
from async_grpo.weights.shared_memory import SharedMemorySender
from async_grpo.weights.transport import Version
from async_grpo.wire.codec import Buffer, GroupTicket

KEY = "test-staleness"
"""Begins the names of segments; tests that look for what a run has left behind pass over it."""
GROUPS_PER_SEED = 10_000_000
"""Ids of one seed's groups begin here times the seed: other problems in another order."""
STEP_TIMEOUT_S, WAIT_S = 120.0, 0.002


class Switch:
    """The queue of the run that is on, as the rollout actor sees it."""

    def __init__(self) -> None:
        self.queue: ReplayQueue | None = None

    async def acquire(
        self,
        actor_id: str,
        version: int,
        holding: list[tuple[int, int]],
        want: int,
        report: ActorReport | None,
    ) -> list[GroupTicket] | None:
        return await self.queue.acquire(actor_id, version, holding, want, report)

    async def put(self, actor_id: str, frames: list[Buffer]) -> list[Verdict]:
        return await self.queue.put(actor_id, frames)

    async def fail(
        self, actor_id: str, tickets: list[GroupTicket], reason: str, tokens: list[int]
    ) -> None:
        await self.queue.fail(actor_id, tickets, reason, tokens)


class OneRank:
    """A learner of one rank as the loop sees it; its work is done in a thread."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    async def begin(self, plans: Sequence[RankPlan]) -> dict[RowKey, float]:
        return await asyncio.to_thread(self._learner.begin, plans[0])

    async def assign(
        self, values: dict[RowKey, RowValue], kl_coef: float, lr_factor: float
    ) -> None:
        self._learner.assign(values, kl_coef, lr_factor)

    async def update(self, index: int) -> None:
        await asyncio.to_thread(self._learner.update, index)

    async def end(self) -> list[dict[str, Any]]:
        return [self._learner.end()]


class InStep:
    """Publishes a version when everything that was issued before it is complete."""

    def __init__(
        self, actor: RolloutActor, sender: SharedMemorySender, queue: ReplayQueue, *, number: int
    ) -> None:
        """number: of the run in this process; versions of a later one are newer."""
        self._actor, self._sender, self._queue, self._number = actor, sender, queue, number

    def logged(self, step: int, metrics: dict[str, float]) -> None:
        """Keep nothing: what a step returns is read."""

    def note(self, text: str) -> None:
        """Show a line."""
        print(text, flush=True)

    async def publish(self, version: int) -> float:
        """Wait, publish, and let the queue issue tickets for this version. Raises TimeoutError,
        RuntimeError.
        """
        settings = self._queue.settings
        async with asyncio.timeout(STEP_TIMEOUT_S):
            wanted = (
                min(version + settings.max_staleness, settings.total_steps)
                * settings.rollout_batch_size
                if version
                else 0
            )
            while True:
                counts = await self._queue.counts()
                if sum(counts[state] for state in ("ready", "training", "trained")) >= wanted:
                    break
                await asyncio.sleep(WAIT_S)
            await self.send(version)
        await self._queue.live(version)
        return 0.0

    async def send(self, version: int) -> None:
        """Give the engine the learner's weights. Raises RuntimeError."""
        receipt = await self._actor.receive(
            await asyncio.to_thread(self._sender.stage, self.label(version), verify=False)
        )
        if receipt.failure:
            raise RuntimeError(f"version {version} did not arrive: {receipt.reason}")

    def label(self, version: int) -> str:
        return Version(self._number, version).label

    def weight_metrics(self) -> dict[str, float]:
        return {}

    async def refresh(self, version: int) -> None: ...

    async def unpinned(self) -> None: ...

    async def settle(self) -> None: ...


class Averaged:
    """A running average of a learner's weights, from those of now."""

    def __init__(self, learner: Learner) -> None:
        self._weights = [one.detach().clone() for one in learner.engine.module.parameters()]

    def add(self, learner: Learner, decay: float) -> None:
        """Add the weights of a step."""
        with torch.no_grad():
            for average, now in zip(self._weights, learner.engine.module.parameters(), strict=True):
                average.lerp_(now, 1 - decay)

    def give(self, learner: Learner) -> None:
        """Give the learner these weights; it trains no further."""
        with torch.no_grad():
            for average, now in zip(self._weights, learner.engine.module.parameters(), strict=True):
                now.copy_(average)


class Bench:
    """An engine and everything that outlives a run."""

    def __init__(self, config: Config, model_dir: str) -> None:
        """config: what all runs share; rollout and task must not change after."""
        self._config, self._model_dir, self._switch, self._runs = config, model_dir, Switch(), 0
        self._task = load_task(config.task, config.seed)
        self._weights = task_weights(config.task, self._task)
        self._actor = RolloutActor(
            config,
            actor_id="bench",
            queue=self._switch,
            model_dir=model_dir,
            device="cpu",
            cores=(),
        )

    async def start(self) -> None:
        """Start the engine and the verifiers."""
        torch.set_num_threads(1)
        await self._actor.start(backend="shared_memory", label=Version(0, 0).label)

    async def close(self) -> None:
        """Stop them."""
        await self._actor.close()

    async def train(
        self,
        config: Config,
        *,
        seed: int,
        evaluated: Sequence[int] | None = None,
        decay: float | None = None,
    ) -> dict[str, Any]:
        """One run of `run.total_steps` with a lag of `replay.max_staleness`: held-out accuracy
        before, and after the steps `evaluated` (by default three times over the last sixth); its
        mean over these; the mean probability of the right answers at the end; the lags that were
        trained; score, effective sample size and learning rate of every step. decay: also the
        accuracy of weights averaged over the run, with this decay per step.
        """
        self._runs += 1
        started = time.monotonic()
        total, scores, ess, rates, evaluations = config.run.total_steps, [], [], [], []
        lags: list[tuple[float, float]] = []
        evaluated = evaluated or [total * twelfths // 12 for twelfths in (10, 11, 12)]
        async with self._system(config, seed=seed) as (loop, publisher, learner):
            await publisher.publish(0)
            averaged = None if decay is None else Averaged(learner)
            of_average = {}
            before = await self._accuracy(publisher.label(0))
            producing = asyncio.create_task(self._actor.run())
            try:
                for step in range(1, total + 1):
                    metrics = await loop.step()
                    scores.append(round(metrics["rollout/score"], 4))
                    ess.append(round(metrics["train/ess"], 4))
                    rates.append(metrics["train/lr"])
                    lags.append((metrics["train/lag_mean"], metrics["train/lag_max"]))
                    if averaged is not None:
                        averaged.add(learner, decay)
                    if step in evaluated and step < total:
                        evaluations.append(await self._accuracy(publisher.label(step)))
            finally:
                await self._switch.queue.close()
                await asyncio.wait_for(producing, STEP_TIMEOUT_S)
            evaluations.append(await self._accuracy(publisher.label(total)))
            probability = await asyncio.to_thread(self._probability, learner)
            if averaged is not None:
                averaged.give(learner)
                await publisher.send(total + 1)
                of_average = {"averaged": await self._accuracy(publisher.label(total + 1))}
        full = lags[config.replay.max_staleness :] or [(float("nan"),) * 2]
        return {
            "before": before,
            "accuracy": round(float(np.mean(evaluations)), 5),
            "evaluations": evaluations,
            "probability": round(probability, 5),
            "lag_mean": float(np.mean([mean for mean, _ in full])),
            "lag_max": max(most for _, most in lags),
            "scores": scores,
            "ess": ess,
            "rates": rates,
            **of_average,
            "seconds": round(time.monotonic() - started, 1),
        }

    @asynccontextmanager
    async def _system(
        self, config: Config, *, seed: int
    ) -> AsyncIterator[tuple[Loop, InStep, Learner]]:
        """Queue, learner and loop of one run."""
        rollout, first = config.rollout, seed * GROUPS_PER_SEED
        settings = QueueSettings(
            rollout_batch_size=rollout.rollout_batch_size,
            max_staleness=config.replay.max_staleness,
            outstanding=config.max_outstanding,
            total_steps=config.run.total_steps,
            group_size=rollout.group_size,
            max_attempts=config.replay.max_attempts,
            max_num_gen_batches=0,
            shaping=shaping(config, self._weights),
            next_group_id=first,
        )
        ledger = Ledger(first_group_id=first, steps=0, max_attempts=settings.max_attempts)
        ledger.run_epoch = self._runs
        queue = self._switch.queue = ReplayQueue(settings, ledger=ledger)
        running = asyncio.get_running_loop()

        def fetch(step: int, group_ids: Sequence[int]) -> np.ndarray:
            return asyncio.run_coroutine_threadsafe(queue.payload(step, group_ids), running).result(
                STEP_TIMEOUT_S
            )

        with socket.create_server(
            ("127.0.0.1", 0)
        ) as free:  # a port of its own for every process group
            port = free.getsockname()[1]
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        build = partial(
            Learner,
            config,
            model_dir=self._model_dir,
            fetch=fetch,
            device="cpu",
            total_updates=config.run.total_steps * config.updates_per_step,
        )
        learner = await asyncio.to_thread(build)
        sender = SharedMemorySender(learner, key=KEY, fallback=Path(config.run.dir))
        try:
            [payload] = sender.connect("", [1])
            receipt = await self._actor.connect(payload)
            if receipt.failure:
                raise RuntimeError(receipt.reason)
            publisher = InStep(self._actor, sender, queue, number=self._runs)
            loop = Loop(
                config,
                queue=queue,
                learner=OneRank(learner),
                publisher=publisher,
                weights=self._weights,
                total_steps=config.run.total_steps,
                steps_done=0,
                listener=publisher,
            )
            yield loop, publisher, learner
        finally:
            sender.close()
            learner.close()

    async def _accuracy(self, label: str) -> float:
        """Share of the held-out problems that the most likely response answers right."""
        total = len(self._task.evaluation(self._config.evaluation.max_samples))
        outcomes, _ = await self._actor.evaluate(
            indices=range(total), total=total, label=label, samples=0
        )
        return sum(outcome.greedy for outcome in outcomes) / total

    def _probability(self, learner: Learner) -> float:
        """Mean probability that the learner's weights give the right answers of the held-out
        problems, the end of the response included.
        """
        tokenizer = load_tokenizer(self._model_dir, trust_remote_code=False)
        rows = []
        for problem in self._task.evaluation(self._config.evaluation.max_samples):
            prompt = prompt_ids(tokenizer, problem.prompt)
            answer = [*tokenizer(problem.solution)["input_ids"], tokenizer.eos_token_id]
            rows.append(response_row(np.array(prompt), np.array(answer)))
        found = by_row(learner.engine, rows)
        return float(np.mean([np.exp(logprobs.sum()) for logprobs in found]))
