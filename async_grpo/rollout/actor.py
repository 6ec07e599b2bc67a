"""One side of the system: tickets in, scored groups out.

Runs in: rollout actors. Knows nothing of learner steps. The flow of one group:

    ticket -> prompt tokens -> engine: n responses -> verifier children: rewards -> frame
        -> outbox -> queue.put (batched)

With ReMax (arXiv 2310.10505) the engine also gives one greedy response to the prompt, the last
rollout of the group with role `baseline`.

Invariants: a group stays in `holding` until the queue has answered its `put` or `fail`, so nothing
that was completed can be lost with a message; a group that cannot be completed is failed by name
with its reason, and only a dead engine or queue, or a verifier error that must end the run, ends
`run`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from async_grpo.algo.accuracy import ProblemOutcome
from async_grpo.config.schema import Config
from async_grpo.errors import SetupError, VerifierFailed
from async_grpo.replay.partial import PartialStart
from async_grpo.replay.queue import Verdict
from async_grpo.replay.token_ledger import ActorReport
from async_grpo.rollout.engine import Completion, Engine, EngineError, Sampling, stop_tokens
from async_grpo.rollout.evaluator import EngineEvaluator, PromptTooLong, probe_sequences
from async_grpo.rollout.partial import PartialFile, PartialGeneration, encode_all
from async_grpo.rollout.time_accounting import EngineTime
from async_grpo.tasks.base import Problem, Score
from async_grpo.tasks.chat import prompt_ids
from async_grpo.tasks.registry import load_task, problem_index
from async_grpo.tasks.verifier import VerifierError, VerifierPool
from async_grpo.weights.transport import Announcement, Receipt, TokenSequence
from async_grpo.wire import Buffer, Group, GroupTicket, Rollout, WireError, encode_group

POLL_S = 0.02
"""Between two questions for tickets; the queue's process lets each of them wait a while for its
answer.
"""
HEARTBEAT_S = 0.5


class TicketQueue(Protocol):
    """The queue as a rollout actor sees it."""

    async def acquire(
        self,
        actor_id: str,
        version: int,
        holding: list[tuple[int, int]],
        want: int,
        report: ActorReport | None,
    ) -> list[GroupTicket] | None: ...
    async def put(self, actor_id: str, frames: list[Buffer]) -> list[Verdict]: ...
    async def fail(
        self, actor_id: str, tickets: list[GroupTicket], reason: str, tokens: list[int]
    ) -> None: ...


class RolloutActor:
    """Generates groups for the tickets it acquires, until the queue closes."""

    def __init__(
        self,
        config: Config,
        *,
        actor_id: str,
        queue: TicketQueue,
        model_dir: str,
        device: str,
        cores: Sequence[int],
        partials: str | None = None,
    ) -> None:
        """partials: file with beginnings of responses, for the tickets that continue them."""
        self.actor_id = actor_id
        self._partials = None if partials is None else PartialFile.at(Path(partials))
        self._growing: dict[tuple[int, int], PartialGeneration] = {}
        self._config, self._queue, self._model_dir, self._device = config, queue, model_dir, device
        self._cores = set(cores)
        self._baselines = int(
            config.algorithm.adv_estimator == "remax"
        )  # greedy responses per group
        self._responses, self._slots = (
            config.rollout.group_size + self._baselines,
            config.cluster.engine.max_num_seqs,
        )
        self._groups: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._outbox: list[tuple[GroupTicket, bytes]] = []
        self._changed = asyncio.Event()
        self._stages: dict[
            tuple[int, int], tuple[str, float, float]
        ] = {}  # of each group: stage, since when, and since when it is here
        self._draining, self._ended = False, asyncio.Event()
        self._resting = False
        self._produced_at = 0.0
        self._counts: Counter[str] = Counter()
        self._time = EngineTime()

    async def start(self, *, backend: str, label: str) -> None:
        """Load tokenizer, task, verifiers and engine, serving as `label`."""
        early = Engine.begin(self._device, cores=self._cores)
        from async_grpo.runtime import light_imports  # noqa: F401, I001 - before transformers' models
        from transformers import AutoTokenizer

        config = self._config
        self._tokenizer = AutoTokenizer.from_pretrained(
            self._model_dir, trust_remote_code=config.model.trust_remote_code
        )
        self._task = load_task(config.task, config.seed)
        if (
            not isinstance(self._task.train(0).prompt, str)
            and self._tokenizer.chat_template is None
        ):
            raise SetupError(
                f"task {config.task.name} asks in chat messages, but the tokenizer of "
                f"{self._model_dir} has no chat template; "
                "use an instruction-tuned model, or the task's plain style "
                "(task.options.style=plain)"
            )
        everywhere = os.sched_getaffinity(0)
        self._verifiers = VerifierPool(
            config.task, seed=config.seed, cpu=everywhere - self._cores or everywhere
        )
        starting = asyncio.create_task(self._verifiers.start())
        self._engine = await Engine.start(
            config,
            model_dir=self._model_dir,
            device=self._device,
            backend=backend,
            label=label,
            early=early,
            stop_token_ids=stop_tokens(self._model_dir, self._tokenizer.eos_token_id),
            seed=_hash63(config.seed, self.actor_id) >> 32,
        )
        await starting
        self._answering = EngineEvaluator(
            config,
            engine=self._engine,
            task=self._task,
            verifiers=self._verifiers,
            encode=self._encode,
            text=self._text,
            cpu=everywhere - self._cores or everywhere,
        )

    async def run(self) -> None:
        """Produce groups until the queue closes. Raises when the engine or the queue is gone."""
        self._produced_at = time.monotonic()
        sender = asyncio.create_task(self._send_outbox())
        polled = 0.0
        self._time.producing(True)
        try:
            while True:
                if self._draining and not self._groups:
                    return
                want = 0 if self._draining or self._resting else self._room()
                if want or time.monotonic() - polled > HEARTBEAT_S:
                    polled = time.monotonic()
                    report = self._time.report(
                        self._engine.sampled, self._counts, every_s=HEARTBEAT_S
                    )
                    tickets = await self._queue.acquire(
                        self.actor_id,
                        self._engine.serving_version,
                        list(self._groups),
                        want,
                        report,
                    )
                    if tickets is None:
                        return
                    for ticket in tickets:
                        self._start_group(ticket)
                    if tickets and want > len(tickets):
                        continue
                await self._wait_for_change(POLL_S)
                for task in [sender, *self._groups.values()]:
                    if task.done() and task.exception() is not None:
                        raise task.exception()
        finally:
            pending = [sender, *self._groups.values()]
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            self._groups.clear()
            self._stages.clear()
            self._growing.clear()
            self._outbox.clear()
            self._time.producing(False)
            self._ended.set()

    async def drain(self) -> None:
        """Take no more tickets, and wait until the queue has all groups that this actor holds.
        `run` returns.
        """
        self._draining = True
        self._changed.set()
        await self._ended.wait()

    async def connect(self, payload: dict[str, Any]) -> Receipt:
        """Prepare the engine for publications."""
        return await self._engine.connect(payload)

    async def receive(self, announcement: Announcement) -> Receipt:
        """Take and serve the announced weights."""
        with self._time.during("paused"):
            receipt = await self._engine.receive(announcement)
        self._counts["paused_s"] += receipt.seconds.get("total", 0.0)
        self._counts["reprefilled"] += receipt.recomputed_tokens
        self._changed.set()
        return receipt

    async def score(self, sequences: list[TokenSequence]) -> list[tuple[list[str], np.ndarray]]:
        """Log-probs of these responses under the weights that are served, with the labels of
        those.
        """
        return await self._engine.score(sequences)

    async def evaluate(
        self, *, indices: Sequence[int], total: int, label: str, samples: int
    ) -> tuple[list[ProblemOutcome], list[dict[str, Any]]]:
        """Outcomes of these held-out problems from the weights `label`, and some responses as text
        (`EngineEvaluator.answer`).
        """
        with self._time.during("evaluating"):
            return await self._answering.answer(
                indices=indices, total=total, label=label, samples=samples
            )

    async def rest(self) -> None:
        """Take no more tickets until `go_on`; what this actor holds goes on, and `run` does not
        return.
        """
        self._resting = True

    async def go_on(self) -> None:
        """Take tickets again."""
        self._resting, self._produced_at = False, time.monotonic()
        self._changed.set()

    async def probe_sequences(self) -> list[tuple[list[int], list[int], np.ndarray]]:
        """A few greedy responses as (prompt, response, log-probs), for the comparison with the
        learner.
        """
        return await probe_sequences(self._engine, self._task, self._encode, self._config.rollout)

    async def final_report(self) -> ActorReport:
        """What it did in all, after the queue was closed: it waits until what was under way is
        dropped.
        """
        if self._time.is_producing:
            await self._ended.wait()
        return self._time.report(self._engine.sampled, self._counts)

    async def health(self) -> dict[str, float]:
        """Counters since the start; raises when the engine is dead."""
        await self._engine.check()
        sampled = {
            f"sampled_{purpose}": float(tokens) for purpose, tokens in self._engine.sampled.items()
        }
        return (
            {name: float(value) for name, value in self._counts.items()}
            | {"in_flight": float(len(self._groups))}
            | sampled
        )

    async def status(self) -> dict[str, Any]:
        """What it serves, what is in flight with stage and ages in seconds (oldest first), and who
        verifies, for post-mortems.
        """
        now, started = time.monotonic(), "_engine" in vars(self)
        stages = sorted(
            (begun, key, stage, since)
            for key, (stage, since, begun) in self._stages.items()
            if key in self._groups
        )
        return {
            "serving": self._engine.serving if started else "it is starting",
            "paused": started and self._engine.paused,
            "draining": self._draining,
            "counts": dict(self._counts),
            "in_flight": [
                {
                    "group_id": key[0],
                    "attempt": key[1],
                    "stage": stage,
                    "stage_s": now - since,
                    "age_s": now - begun,
                }
                for begun, key, stage, since in stages
            ],
            "verifying": self._verifiers.busy() if started else [],
        }

    async def partials(self) -> list[tuple[PartialStart, bytes]]:
        """The beginnings of all groups that are under way, while they go on; of one that the queue
        has got meanwhile, perhaps too.
        """
        return await encode_all(
            list(self._growing.values()), max_bytes=self._config.wire.max_frame_bytes
        )

    async def close(self) -> None:
        """Stop the engine and the verifiers."""
        await self._answering.close()
        await self._verifiers.close()
        self._engine.close()

    def _open(self) -> int:
        """Responses that the engine has not finished. The long ones keep a group here, not the
        places of those that have ended.
        """
        unasked = sum(stage == "queued" for stage, _, _ in self._stages.values())
        return self._engine.unfinished + unasked * self._responses

    def _room(self) -> int:
        """How many groups to ask for, so that the engine always has one waiting. Those that are
        verified must not pile up without end.
        """
        return max(
            0,
            min(
                -(-(self._slots - self._open()) // self._responses), self._slots - len(self._groups)
            )
            + 1,
        )

    def _start_group(self, ticket: GroupTicket) -> None:
        key = (ticket.group_id, ticket.attempt)
        if key not in self._groups:
            self._groups[key] = asyncio.create_task(self._produce(ticket))
            self._at(ticket, "queued")

    async def _wait_for_change(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return
        self._changed.clear()

    async def _produce(self, ticket: GroupTicket) -> None:
        try:
            async with asyncio.timeout(self._config.rollout.group_timeout_s):
                frame = encode_group(
                    await self._group(ticket), max_bytes=self._config.wire.max_frame_bytes
                )
        except TimeoutError:
            timeout_s = self._config.rollout.group_timeout_s
            stage = self._stages[ticket.group_id, ticket.attempt][0]
            # Not one slow group but an engine that hangs: this actor is replaced.
            if stage != "verifying" and time.monotonic() - self._produced_at > timeout_s:
                raise EngineError(
                    f"no group came out of the engine for rollout.group_timeout_s = {timeout_s:g} s"
                ) from None
            await self._fail(
                ticket,
                f"timeout: no result within rollout.group_timeout_s = {timeout_s:g} s, it "
                f"was {stage}",
            )
        except VerifierError as error:
            if self._config.task.verifier.on_error == "fail":
                raise VerifierFailed(
                    f"a verifier of {self.actor_id}: group {ticket.group_id} could not be "
                    f"scored ({error}) and task.verifier.on_error is fail"
                ) from error
            await self._fail(ticket, f"verifier: {error}")
        except (EngineError, WireError, PromptTooLong) as error:
            await (
                self._engine.check()
            )  # a dead engine ends the run of this actor instead of failing group after group
            await self._fail(ticket, f"{type(error).__name__}: {error}")
        else:
            self._produced_at = time.monotonic()
            self._outbox.append((ticket, frame))
            self._at(ticket, "put")
            self._changed.set()
            self._outbox_event.set()

    async def _group(self, ticket: GroupTicket) -> Group:
        config, queued = self._config, time.time()
        problem = self._task.train(
            problem_index(config.seed, self._task.fingerprint, ticket.group_id, len(self._task))
        )
        prompt_ids = self._encode(problem)
        seed = _hash63(config.seed, ticket.group_id) if config.seeded else None
        self._at(ticket, "generating")
        completions = await self._generate(ticket, prompt_ids, seed=seed)
        done = time.time()
        self._at(ticket, "verifying")
        scores = await self._score(problem, completions)
        size = config.rollout.group_size
        self._counts["groups"] += 1
        self._counts["tokens"] += sum(
            len(completion.token_ids) for completion in completions[:size]
        )
        self._counts["baseline_tokens"] += sum(
            len(completion.token_ids) for completion in completions[size:]
        )
        rollouts = [
            Rollout(
                response_ids=completion.token_ids,
                behavior_logprobs=completion.logprobs,
                loss_mask=np.ones(len(completion.token_ids), np.uint8),
                versions=completion.versions,
                rewards=score.rewards,
                verdict=score.verdict,
                finish_reason=completion.finish_reason,
                role="train" if index < size else "baseline",
            )
            for index, (completion, score) in enumerate(zip(completions, scores, strict=True))
        ]
        return Group(
            group_id=ticket.group_id,
            attempt=ticket.attempt,
            policy_version=ticket.policy_version,
            actor_id=self.actor_id,
            run_epoch=ticket.run_epoch,
            prompt_ids=np.asarray(prompt_ids, np.int32),
            rollouts=rollouts,
            times={
                "queued": queued,
                "first_token": min(completion.first_token for completion in completions),
                "done": done,
                "scored": time.time(),
            },
        )

    async def _generate(
        self, ticket: GroupTicket, prompt_ids: list[int], *, seed: int | None
    ) -> list[Completion]:
        """`group_size` samples, then the greedy responses, all generated at the same time; from
        their beginnings where the ticket continues them.
        """
        rollout = self._config.rollout
        wanted = [self._sampling(n=rollout.group_size, temperature=rollout.temperature, seed=seed)]
        wanted += [self._sampling(n=1, temperature=0.0, seed=None)] * self._baselines
        known = (
            []
            if self._partials is None
            else self._partials.take(ticket, prompt_ids, wanted, self._counts)
        )
        growing = PartialGeneration(self._engine, ticket, prompt_ids, wanted, known=known)
        self._growing[ticket.group_id, ticket.attempt] = growing
        return await growing.finish()

    async def _score(self, problem: Problem, completions: list[Completion]) -> list[Score]:
        results = await self._verifiers.score_many(
            [(self._text(completion), problem.reference) for completion in completions]
        )
        scores = []
        for result in results:
            if isinstance(result, VerifierError):
                self._counts["verifier_errors"] += 1
                self._counts[f"verifier_errors_{result.reason}"] += 1
                if self._config.task.verifier.on_error != "zero":
                    raise result
                result = Score(rewards={name: 0.0 for name in self._task.weights}, verdict=0.0)
            scores.append(result)
        return scores

    async def _send_outbox(self) -> None:
        """Put whatever is ready in one call; what comes meanwhile goes with the next."""
        self._outbox_event = asyncio.Event()
        while True:
            await self._outbox_event.wait()
            self._outbox_event.clear()
            batch = list(self._outbox)
            if not batch:
                continue
            verdicts = await self._queue.put(self.actor_id, [frame for _, frame in batch])
            for verdict in verdicts:
                self._counts[f"put_{verdict.status}"] += 1
            del self._outbox[: len(batch)]
            for ticket, _ in batch:
                self._leave(ticket)

    async def _fail(self, ticket: GroupTicket, reason: str) -> None:
        self._counts["failed"] += 1
        self._at(ticket, "fail")
        growing = self._growing.get(
            (ticket.group_id, ticket.attempt)
        )  # None: its prompt was too long
        await self._queue.fail(
            self.actor_id, [ticket], reason, [0 if growing is None else growing.tokens]
        )
        self._leave(ticket)

    def _at(self, ticket: GroupTicket, stage: str) -> None:
        key, now = (ticket.group_id, ticket.attempt), time.monotonic()
        self._stages[key] = stage, now, self._stages[key][2] if key in self._stages else now
        self._time.stage(key, stage)

    def _leave(self, ticket: GroupTicket) -> None:
        key = (ticket.group_id, ticket.attempt)
        self._groups.pop(key, None)
        self._stages.pop(key, None)
        self._time.stage(key, None)
        self._growing.pop(key, None)
        self._changed.set()

    def _sampling(self, *, n: int, temperature: float, seed: int | None) -> Sampling:
        rollout = self._config.rollout
        return Sampling(
            n=n,
            max_tokens=rollout.response_length,
            temperature=temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            seed=seed,
        )

    def _encode(self, problem: Problem) -> list[int]:
        ids = prompt_ids(self._tokenizer, problem.prompt)
        if len(ids) > self._config.rollout.prompt_length:
            raise PromptTooLong(
                f"a prompt has {len(ids)} tokens, rollout.prompt_length is "
                f"{self._config.rollout.prompt_length}"
            )
        return ids

    def _text(self, completion: Completion) -> str:
        return self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)


def _hash63(*parts: object) -> int:
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
