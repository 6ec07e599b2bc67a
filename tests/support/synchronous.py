"""The asynchronous system in one event loop: real loop, queue, wire, row and token mathematics and
coordinator around a tiny policy.

Fake are the engines (a table of logits that samples a group from its id and the weights it serves,
and nothing else), the processes (tasks that fail, die and come back) and the learner's model (one
rank that trains the same table).
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from async_grpo.algo.filters import FilterRule
from async_grpo.algo.metrics import MetricSums
from async_grpo.config.schema import Config
from async_grpo.learner.batching import PlanRow, RankPlan, RowKey, RowValue
from async_grpo.learner.rows import LearnerRow, decode_rows, token_batch
from async_grpo.learner.token_math import TokenMath
from async_grpo.replay.queue import ReplayQueue
from async_grpo.replay.rules import QueueSettings
from async_grpo.run.loop import Loop
from async_grpo.run.planning import shaping
from async_grpo.weights.coordinator import Coordinator
from async_grpo.weights.transport import Announcement, Receipt, Staged, TokenSequence, parse_label
from async_grpo.wire.codec import Group, GroupTicket, Row, VersionSpan, encode_group
from tests.support.listener import RecordingListener

STEPS, SEED = 50, 7
BATCH_GROUPS, GROUP_SIZE, MINIBATCH_GROUPS, EPOCHS = 6, 4, 2, 2
VOCAB, EOS, LONGEST_PROMPT, LONGEST_RESPONSE = 11, 0, 3, 8
TOKENS_PER_MICRO_BATCH = 32
WEIGHTS = {"correct": 1.0, "brief": 0.3}
MAX_ATTEMPTS = 12
DEADLINE_S = 60.0


def make_config(*, max_staleness: int = 0, steps: int = STEPS) -> Config:
    """Several epochs and minibatches per step, a filter, and truncated rows that count in their
    group but not in the loss.
    """
    return Config.model_validate(
        {
            "seed": SEED,
            "run": {"total_steps": steps},
            "model": {"path": "none"},
            "task": {"rewards": WEIGHTS},
            "rollout": {
                "rollout_batch_size": BATCH_GROUPS,
                "group_size": GROUP_SIZE,
                "prompt_length": LONGEST_PROMPT,
                "response_length": LONGEST_RESPONSE,
            },
            "replay": {
                "max_staleness": max_staleness,
                "max_attempts": MAX_ATTEMPTS,
                "filter_groups": {"enable": True, "metric": "acc"},
            },
            "algorithm": {"mask_truncated": True, "clip_ratio": 0.2, "clip_schedule": "harmonic"},
            "learner": {
                "ppo_epochs": EPOCHS,
                "ppo_mini_batch_size": MINIBATCH_GROUPS,
                "tokens_per_micro_batch": TOKENS_PER_MICRO_BATCH,
                "lr": 0.02,
            },
            "weight_sync": {"self_check": False, "verify_every": 0},
            "watchdog": {"step_timeout_s": DEADLINE_S},
        }
    )


# ---- the engine: the same for both loops ----


@dataclass(frozen=True, eq=False)
class Response:
    """One sampled response: tokens int32 [L], log-probs float32 [L], and what the verifier says of
    it.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    rewards: dict[str, float]
    verdict: float
    truncated: bool


def unanswerable(group_id: int) -> bool:
    """Groups that fail on every engine at every attempt."""
    return group_id % 23 == 4


def sample(table: torch.Tensor, group_id: int) -> tuple[np.ndarray, list[Response]]:
    """Prompt and responses of a group: a function of its id and the weights, so that another
    attempt gives the same.
    """
    rng = np.random.default_rng([SEED, group_id])
    prompt = rng.integers(1, VOCAB, rng.integers(1, LONGEST_PROMPT + 1)).astype(np.int32)
    logprobs = torch.log_softmax(table.detach(), -1)
    cumulative, logprobs = logprobs.double().exp().cumsum(-1).numpy(), logprobs.numpy()
    responses = []
    for _ in range(GROUP_SIZE):
        tokens, chosen, last = [], [], int(prompt[-1])
        while len(tokens) < LONGEST_RESPONSE and (not tokens or last != EOS):
            token = min(
                int(np.searchsorted(cumulative[last], rng.random(), side="right")), VOCAB - 1
            )
            tokens.append(token)
            chosen.append(min(float(logprobs[last, token]), 0.0))
            last = token
        correct = float(sum(tokens) % 3 == 1)
        responses.append(
            Response(
                np.array(tokens, np.int32),
                np.array(chosen, np.float32),
                {"correct": correct, "brief": 1 - len(tokens) / LONGEST_RESPONSE},
                correct,
                last != EOS,
            )
        )
    return prompt, responses


# ---- the model: the same for both loops ----


@dataclass(frozen=True)
class Update:
    """One optimizer update: its rows in the order of their sum, what each is worth, the weight of
    its tokens, and the loss.
    """

    micro_batches: tuple[tuple[RowKey, ...], ...]
    advantages: tuple[float, ...]
    weights: tuple[float, ...]
    loss: float


@dataclass(frozen=True)
class Step:
    """One learner step: its groups, the versions that sampled them, its updates, and a digest of
    the weights after it.
    """

    group_ids: tuple[int, ...]
    versions: tuple[int, ...]
    updates: tuple[Update, ...]
    weights: str


class Policy:
    """Next-token logits [VOCAB, VOCAB] and their optimizer. How the loss of given rows is summed is
    shared by both loops: bits need it.
    """

    def __init__(self, config: Config) -> None:
        start = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(SEED))
        start[:, EOS] += 1.5  # most responses end within the budget
        self.table = torch.nn.Parameter(start)
        self.math = TokenMath(config, collectives=None)  # type: ignore[arg-type]  # this estimator and this loss call none
        self._optimizer = torch.optim.Adam([self.table], lr=config.learner.lr)

    def update(self, micro_batches: Sequence[Sequence[tuple[PlanRow, LearnerRow]]]) -> Update:
        """One optimizer update over these rows; a micro-batch without rows adds nothing."""
        self._optimizer.zero_grad()
        filled = [list(part) for part in micro_batches if part]
        total = 0.0
        for part in filled:
            loss = self._loss([planned for planned, _ in part], [row for _, row in part])
            loss.backward()
            total += loss.item()
        self._optimizer.step()
        entries = [entry for part in filled for entry in part]
        return Update(
            tuple(tuple(planned.key for planned, _ in part) for part in filled),
            tuple(float(row.advantages[0]) for _, row in entries),
            tuple(planned.weight for planned, _ in entries),
            total,
        )

    def _loss(self, planned: list[PlanRow], rows: list[LearnerRow]) -> torch.Tensor:
        batch = token_batch(planned, rows, torch.device("cpu"))
        distribution = torch.log_softmax(self.table, -1)[before(rows)]
        logprobs = distribution.gather(-1, tokens_of(rows).unsqueeze(-1)).squeeze(-1)
        entropy = -(distribution.exp() * distribution).sum(-1)
        return self.math.loss(batch, logprobs, entropy, selection=None, metrics=None)

    def digest(self) -> str:
        """The weights, bit for bit."""
        return hashlib.blake2b(self.table.detach().numpy().tobytes(), digest_size=8).hexdigest()


def tokens_of(rows: Sequence[LearnerRow]) -> torch.Tensor:
    """Response tokens of the rows, one after the other."""
    return torch.from_numpy(np.concatenate([row.response for row in rows]).astype(np.int64))


def before(rows: Sequence[LearnerRow]) -> torch.Tensor:
    """The token before each response token, which is all that the policy looks at."""
    return torch.from_numpy(
        np.concatenate([[*row.prompt[-1:], *row.response[:-1]] for row in rows]).astype(np.int64)
    )


# ---- the asynchronous learner ----


class Learner:
    """One learner rank as the loop and the coordinator see it. It keeps a record of every step."""

    def __init__(self, config: Config, queue: ReplayQueue) -> None:
        self.policy, self.steps = Policy(config), list[Step]()
        self._queue, self._max_staleness = queue, config.replay.max_staleness

    async def prepare(self, plans: Sequence[RankPlan]) -> dict[RowKey, float]:
        [self._plan] = plans
        payload = await self._queue.payload(self._plan.step, self._plan.group_ids)
        self._rows = decode_rows(self._plan, payload, max_staleness=self._max_staleness)
        return {}

    async def train(
        self, values: dict[RowKey, RowValue], kl_coef: float, lr_factor: float
    ) -> list[dict[str, Any]]:
        self.policy.math.assign(self._rows, owned=self._plan.owned, values=values, kl_coef=kl_coef)
        updates: list[Update] = []
        for update in self._plan.updates:
            # the actors go on meanwhile, as they do beside a learner in another process
            await asyncio.sleep(0)
            in_loss = [
                [(row, self._rows[row.key]) for row in part if row.weight != 0] for part in update
            ]
            updates.append(self.policy.update(in_loss))
        versions = {
            self._plan.step - 1 - int(lag) for row in self._rows.values() for lag in row.lag
        }
        self.steps.append(
            Step(
                self._plan.group_ids, tuple(sorted(versions)), tuple(updates), self.policy.digest()
            )
        )
        return [MetricSums().to_wire()]

    async def connect(self, tensor_parallel_sizes: list[int]) -> list[dict[str, Any]]:
        return [{} for _ in tensor_parallel_sizes]

    async def rendezvous(self) -> str:
        return ""

    async def stage(self, label: str, *, verify: bool, sequences: list[TokenSequence]) -> Staged:
        return Staged(Announcement(label, "fake", {"table": self.policy.table.detach().clone()}))

    async def release(self) -> None: ...

    async def send(self, announcement: Announcement) -> str:
        await asyncio.sleep(0.001)
        return ""


# ---- rollout actors, and what happens to them ----


@dataclass(frozen=True)
class Faults:
    """How many actors there are, and what goes wrong.

    Shares: of groups that `fail`, and of calls whose answer is lost. Mean seconds: between deaths
    (0: none), to take new weights, to produce a group.
    """

    seed: int = 0
    actors: int = 3
    fail: float = 0.0
    lost_answer: float = 0.0
    death_s: float = 0.0
    receive_s: float = 0.004
    group_s: float = 0.003


class Actor:
    """A rollout actor with its engine: takes tickets, samples with the weights that it serves, puts
    the groups.
    """

    tensor_parallel_size = 1

    def __init__(self, actor_id: str, fleet: Fleet) -> None:
        self.actor_id, self.dead = actor_id, False
        self._fleet, self._queue, self._random = fleet, fleet.queue, fleet.random
        self._slots = self._random.randint(1, BATCH_GROUPS + 1)
        self._table, self._version = torch.zeros(VOCAB, VOCAB), -1
        self.holding: dict[tuple[int, int], GroupTicket] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def connect(self, payload: dict[str, Any]) -> Receipt:
        return Receipt("")

    async def receive(self, announcement: Announcement) -> Receipt:
        await self._fleet.pause(self._fleet.faults.receive_s)
        if self.dead:
            raise ConnectionError(f"{self.actor_id} is dead")
        self.load(announcement.payload["table"], parse_label(announcement.label).step)
        return Receipt(announcement.label, seconds={"total": 0.0})

    def load(self, table: torch.Tensor, version: int) -> None:
        """Serve these weights under this version."""
        self._table, self._version = table, version

    async def run(self) -> None:
        """Work on tickets until the queue closes."""
        while True:
            free = self._slots - len(self.holding)
            tickets = await self._queue.acquire(
                self.actor_id, self._version, list(self.holding), free
            )
            if tickets is None:
                return
            if tickets and not self._fleet.chance(
                "lost_answer"
            ):  # lost tickets are given again to the next call
                for ticket in tickets:
                    self.holding[ticket.group_id, ticket.attempt] = ticket
                    self.tasks.append(self._fleet.spawn(self._produce(ticket)))
            await self._fleet.pause(0.001)

    async def _produce(self, ticket: GroupTicket) -> None:
        await self._fleet.pause(self._fleet.faults.group_s)
        if unanswerable(ticket.group_id) or self._fleet.chance("fail"):
            await self._queue.fail(self.actor_id, [ticket], "no answer")
        else:
            frame = self.frame(ticket)
            [verdict] = await self._queue.put(self.actor_id, [frame])
            assert verdict.status in ("accepted", "rejected"), verdict
            if self._fleet.chance("lost_answer"):
                [verdict] = await self._queue.put(self.actor_id, [frame])
                assert verdict.status == "duplicate", verdict
        del self.holding[ticket.group_id, ticket.attempt]

    def frame(self, ticket: GroupTicket, *, nonsense: bool = False) -> bytes:
        """The group as it goes over the wire; `nonsense` comes from weights that nobody ever had,
        so that no bit of it fits.
        """
        prompt, responses = sample(-self._table if nonsense else self._table, ticket.group_id)
        rows = [
            Row(
                one.tokens,
                one.logprobs,
                [(0, len(one.tokens))],
                [VersionSpan(self._version, 0, len(one.tokens))],
                one.rewards,
                one.verdict,
                "length" if one.truncated else "stop",
            )
            for one in responses
        ]
        times = dict.fromkeys(("queued", "first_token", "done", "scored"), 0.0)
        return encode_group(
            Group(
                ticket.group_id,
                ticket.attempt,
                ticket.policy_version,
                self.actor_id,
                [prompt],
                rows,
                times,
                ticket.run_epoch,
            )
        )


@dataclass
class Fleet:
    """The actors that are alive, and the hand that kills them: the coordinator's set of engines."""

    queue: ReplayQueue
    faults: Faults
    actor_type: type[Actor] = Actor
    actors: dict[str, Actor] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random, self._tasks = random.Random(self.faults.seed), set[asyncio.Task[None]]()

    async def start(self, tasks: asyncio.TaskGroup, coordinator: Coordinator) -> None:
        """Every actor serves version 0 and takes tickets; an error in any of them ends `tasks`."""
        self._group, self._coordinator = tasks, coordinator
        self.actors = {
            actor.actor_id: actor for actor in [self._new() for _ in range(self.faults.actors)]
        }
        await coordinator.start(0)
        for actor in self.actors.values():
            actor.tasks.append(self.spawn(actor.run()))
        if self.faults.death_s:
            self.spawn(self._kill_now_and_then())

    def stop(self) -> None:
        """End everything that still runs."""
        for task in self._tasks:
            task.cancel()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def pause(self, mean_s: float) -> None:
        """A random time, sometimes a long one."""
        await asyncio.sleep(min(self.random.expovariate(1 / mean_s), 8 * mean_s))

    def chance(self, fault: str) -> bool:
        """Whether this fault happens now."""
        happens = self.random.random() < getattr(self.faults, fault)
        self.seen[fault] += happens
        return happens

    def alive(self) -> list[Actor]:
        return list(self.actors.values())

    async def drop(self, actor_id: str, error: BaseException) -> None:
        """The actor is declared dead: its tickets are issued again, another one starts, and what it
        had finished comes too late.
        """
        if (actor := self.actors.pop(actor_id, None)) is None:
            return
        await self.queue.forfeit(actor_id)
        for ticket in actor.holding.values():
            self.spawn(self._come_too_late(actor, ticket))
        self.spawn(self._replace())

    def _new(self) -> Actor:
        self.seen["started"] += 1
        return self.actor_type(f"actor-{self.seen['started']}", self)

    async def _replace(self) -> None:
        actor = self._new()
        actor.tasks.append(
            self.spawn(actor.run())
        )  # it asks for tickets before it serves what is live
        await self._coordinator.join(actor, lambda: self.actors.update({actor.actor_id: actor}))

    async def _kill_now_and_then(self) -> None:
        while True:
            await self.pause(self.faults.death_s)
            if living := [actor for actor in self.alive() if not actor.dead]:
                victim = max(
                    living, key=lambda actor: len(actor.holding)
                )  # where a death costs most
                victim.dead = True
                for task in victim.tasks:
                    task.cancel()
                self.seen["deaths"] += 1
                self.spawn(self._notice(victim))

    async def _notice(self, victim: Actor) -> None:
        await self.pause(0.004)
        await self.drop(victim.actor_id, ConnectionError("killed"))

    async def _come_too_late(self, actor: Actor, ticket: GroupTicket) -> None:
        await self.pause(0.03)
        assert await self.queue.acquire(actor.actor_id, 0, [], 1) is None
        [verdict] = await self.queue.put(actor.actor_id, [actor.frame(ticket, nonsense=True)])
        assert verdict.status in ("late", "duplicate"), (
            verdict
        )  # a duplicate: it died between the queue's taking and its answer
        self.seen[verdict.status] += 1


# ---- a run ----


@dataclass(frozen=True)
class Finished:
    """What a run leaves: its steps, the queue's counts, and how often each fault was seen."""

    steps: list[Step]
    counts: dict[str, int]
    seen: Counter[str]


def queue_settings(config: Config) -> QueueSettings:
    """What the system gives the queue, from the configuration."""
    return QueueSettings(
        rollout_batch_size=BATCH_GROUPS,
        max_staleness=config.replay.max_staleness,
        total_steps=config.run.total_steps or 0,
        group_size=GROUP_SIZE,
        max_attempts=MAX_ATTEMPTS,
        max_num_gen_batches=config.replay.filter_groups.max_num_gen_batches,
        shaping=shaping(config, WEIGHTS),
        filter=FilterRule(metric=config.replay.filter_groups.metric),
    )


async def run_asynchronously(
    config: Config, faults: Faults, *, actor_type: type[Actor] = Actor
) -> Finished:
    """Train `run.total_steps` learner steps."""
    queue = ReplayQueue(queue_settings(config))
    learner, fleet, total_steps = (
        Learner(config, queue),
        Fleet(queue, faults, actor_type),
        config.run.total_steps or 0,
    )
    coordinator = Coordinator(
        config,
        learner=learner,
        engines=fleet,
        backend="shared_memory",
        live=queue.live,
        exact=True,
        listener=RecordingListener(),
    )
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        await fleet.start(tasks, coordinator)
        loop = Loop(
            config,
            queue=queue,
            learner=learner,
            publisher=coordinator,
            weights=WEIGHTS,
            total_steps=total_steps,
            steps_done=0,
            listener=RecordingListener(),
        )
        for _ in range(total_steps):
            await loop.step()
        await loop.finish()
        await queue.close()
        fleet.stop()
    return Finished(learner.steps, await queue.counts(), fleet.seen)
