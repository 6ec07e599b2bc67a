"""A rollout actor whose engine, queue and verifiers are fakes."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np

from async_grpo.config.schema import Config
from async_grpo.replay.actor_reports import ActorReport
from async_grpo.replay.queue import Verdict
from async_grpo.rollout.engine.base import Completion, EngineError, Sampling
from async_grpo.rollout.host import Parts as LoadedParts
from async_grpo.rollout.posed import PosedTask
from async_grpo.rollout.producer import GroupProducer
from async_grpo.tasks.base import Problem, Score
from async_grpo.tasks.verifier import VerifierError
from async_grpo.wire.codec import Buffer, GroupMeta, GroupTicket, decode_meta


class Tokenizer:
    eos_token_id = 99
    chat_template = "of words"

    def __len__(self) -> int:
        return 100

    def apply_chat_template(self, messages: list[Any], **_: Any) -> list[int]:
        return [*range(sum(len(one["content"]) for one in messages)), 7, 5]

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(range(len(text)))}

    def decode(self, ids: np.ndarray, *, skip_special_tokens: bool) -> str:
        return "answer"


class Task:
    fingerprint = "f"

    def __init__(self) -> None:
        self.weights = {"correct": 1.0}

    def __len__(self) -> int:
        return 3

    def train(self, index: int) -> Problem:
        return Problem("ask", 1)

    def evaluation(self, n: int) -> list[Problem]:
        return [Problem(text, 1) for text in ("ask", "asks far too much", "and")][:n]


class Parts:
    """Engine, verifiers and queue in one, and what they were told. Two tickets, then none; closed
    when both are answered.
    """

    serving_version = 0
    stop_token_ids = (99,)
    max_num_seqs = 256
    hangs = only_greedy_fails = False
    per_group = 2

    def __init__(
        self,
        *,
        engine: BaseException | None = None,
        verifier: Score | VerifierError | None = None,
        dead: bool = False,
    ) -> None:
        self.engine, self.verifier, self.dead = engine, verifier, dead
        self.tickets = [GroupTicket(0, 1, 0), GroupTicket(1, 1, 0)]
        self.frames: list[GroupMeta] = []
        self.failed: dict[int, str] = {}
        self.asked: list[tuple[list[int], Sampling]] = []
        self.scored: list[int] = []
        self.seen: list[int] = []
        """Lengths of the prompts whose responses the engine scored."""
        self.sent: list[Buffer] = []
        self.running = self.most_running = self.cancelled = 0
        self.reports: list[ActorReport] = []
        self.wasted: dict[int, int] = {}
        self.sampled: Counter[str] = Counter(total=7, probes=3)
        self.speeds = {"engine_4_s": 0.5, "engine_4_tokens": 9.0, "engine_4_steps": 3.0}
        self.spent = {"verified": 4.0, "verifying_s": 1.0}

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        *,
        name: str = "",
        purpose: str = "rollouts",
    ) -> list[Completion]:
        self.asked.append((prompt_ids, sampling))
        if self.engine is not None and not (self.only_greedy_fails and sampling.temperature > 0):
            raise self.engine
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await asyncio.sleep(60 if self.hangs or self.only_greedy_fails else 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.running -= 1
        n = 2 if sampling.temperature > 0 else 3
        ids, logprobs = np.arange(n, dtype=np.int32), np.full(n, -1.0, np.float32)
        return [Completion(ids, logprobs, [("v0.0", 0, n)], "stop", 0.0) for _ in range(sampling.n)]

    @property
    def unfinished(self) -> int:
        return self.per_group * self.running

    async def top_logprobs(
        self, sequences: list[tuple[list[int], list[int]]], top_k: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        self.seen += [len(prompt) for prompt, _ in sequences]
        found = []
        for prompt, response in sequences:
            values = np.full((len(response), 1 + top_k), -len(prompt), np.float32)
            found.append((values, np.zeros((len(response), top_k), np.int32)))
        return found

    async def check(self) -> None:
        if self.dead:
            raise EngineError("the engine is not healthy")

    async def score_many(self, items: list[tuple[str, Any]]) -> list[Score | VerifierError]:
        self.scored.append(len(items))
        return [self.verifier or Score({"correct": 1.0}, 1.0) for _ in items]

    def cut_off(self, name: str) -> int:
        return 5

    async def acquire(
        self,
        actor_id: str,
        version: int,
        holding: list[tuple[int, int]],
        want: int,
        report: ActorReport | None,
    ) -> list[GroupTicket] | None:
        self.reports += [report] * (report is not None)
        given, self.tickets = self.tickets[:want], self.tickets[want:]
        return None if len(self.frames) + len(self.failed) == 2 else given

    async def put(self, actor_id: str, frames: list[Buffer]) -> list[Verdict]:
        self.sent += frames
        self.frames += [decode_meta(frame) for frame in frames]
        return [
            Verdict(meta.group_id, meta.attempt, "accepted") for meta in self.frames[-len(frames) :]
        ]

    async def fail(
        self, actor_id: str, tickets: list[GroupTicket], reason: str, tokens: list[int]
    ) -> None:
        self.failed |= {ticket.group_id: reason for ticket in tickets}
        self.wasted |= {
            ticket.group_id: count for ticket, count in zip(tickets, tokens, strict=True)
        }


def actor_of(
    parts: Parts,
    *,
    on_error: str = "drop_group",
    group_timeout_s: float | None = None,
    adv_estimator: str = "grpo",
    seeded: bool = False,
    teacher: Any = None,
    judge: Any = None,
    algorithm: dict[str, Any] | None = None,
    rollout: dict[str, Any] | None = None,
) -> GroupProducer:
    teachers = teacher if isinstance(teacher, dict) else {"teacher": teacher}
    named = [*teachers] if isinstance(teacher, dict) else "teacher"
    distilled = {} if teacher is None else {"distill": {"teacher": named}}
    judges = {} if judge is None else {"nice": {"model": "judge"}}
    models = {**teachers, "judge": judge}
    config = Config.model_validate(
        {
            "algorithm": {"adv_estimator": adv_estimator, **distilled, **(algorithm or {})},
            "frozen": {name: {"path": "t"} for name, one in models.items() if one is not None},
            "run": {"total_steps": 2},
            "model": {"path": "m"},
            "task": {"verifier": {"on_error": on_error}, "judges": judges},
            "rollout": {
                "rollout_batch_size": 2,
                "group_size": 2,
                "prompt_length": 4,
                "response_length": 8,
                "group_timeout_s": group_timeout_s,
                "seeded": "on" if seeded else "off",
                **(rollout or {}),
            },
        }
    )
    actor = GroupProducer(
        config, actor_id="a", queue=parts, model_dir="m", device="cpu", cores=(), frozen=models
    )
    actor._parts = LoadedParts(
        engine=parts,
        tokenizer=Tokenizer(),
        task=Task(),
        posed={"": PosedTask(config, Task(), make_verifiers=lambda: parts, start_player=None)},
        evaluator=None,
    )
    return actor
