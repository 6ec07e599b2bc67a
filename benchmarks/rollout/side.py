"""A rollout actor and bare vLLM, in turn, on one engine.

Runs in: a process of its own, which `benchmarks.rollout` starts; vLLM's EngineCore and the
verifiers are its children. Both sides use the very same engine, so that nothing differs but our
code: the actor takes tickets from a stand-in queue that always has some, and its frames are taken
as soon as they come; the bare side awaits vLLM's own generator for the same prompts, seeds and
sampling parameters, all requests at once. In seed mode the two generate the same tokens, which is
checked.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from typing import Any

import psutil

from async_grpo.config.schema import Config
from async_grpo.replay.actor_reports import ActorReport
from async_grpo.replay.queue import Verdict
from async_grpo.rollout.host import hash63
from async_grpo.rollout.producer import GroupProducer
from async_grpo.tasks.registry import problem_index
from async_grpo.wire.codec import Buffer, GroupTicket, decode_group
from benchmarks.tails import PROMPT_TOKENS, prompt_of

TIMEOUT_S = 1_800.0
LABEL = "v0.0"


@dataclass(frozen=True)
class Load:
    """Groups per turn, responses per group, the longest response, and how many the engine generates
    at the same time.
    """

    groups: int = 32
    group_size: int = 8
    longest: int = 256
    sequences: int = 64
    seeded: bool = True


@dataclass(frozen=True)
class Side:
    """One side of a turn: seconds, response tokens, CPU seconds of the actor's process, of the
    engine's, and of the verifiers.
    """

    seconds: float
    tokens: int
    actor_cpu: float
    engine_cpu: float
    verifier_cpu: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def cpu_us_per_token(self) -> float:
        """CPU microseconds per token, engine and all."""
        return (self.actor_cpu + self.engine_cpu + self.verifier_cpu) / self.tokens * 1e6


@dataclass(frozen=True)
class RolloutResult:
    """The turns of one model; `same`: groups whose tokens the two sides had in common, of
    `compared`.
    """

    actor: list[Side]
    bare: list[Side]
    mean_tokens: float
    longest_tokens: int
    same: int
    compared: int

    @property
    def ratios(self) -> list[float]:
        """The actor's tokens per second over bare vLLM's, turn by turn."""
        return [ours.rate / bare.rate for ours, bare in zip(self.actor, self.bare, strict=True)]

    @property
    def cpu_ratios(self) -> list[float]:
        """The bare side's CPU seconds per token over ours."""
        return [
            bare.cpu_us_per_token / ours.cpu_us_per_token
            for ours, bare in zip(self.actor, self.bare, strict=True)
        ]


class Tickets:
    """A queue that always has tickets until `count` groups have come."""

    def __init__(self, first: int, count: int) -> None:
        self._next, self._end, self._count = first, first + count, count
        self.frames: list[bytes] = []

    async def acquire(
        self,
        actor_id: str,
        version: int,
        holding: list[tuple[int, int]],
        want: int,
        report: ActorReport | None,
    ) -> list[GroupTicket] | None:
        if len(self.frames) == self._count:
            return None
        given = range(self._next, min(self._end, self._next + want))
        self._next += len(given)
        return [GroupTicket(group_id, 1, version) for group_id in given]

    async def put(self, actor_id: str, frames: list[Buffer]) -> list[Verdict]:
        self.frames += [bytes(frame) for frame in frames]
        return [Verdict(-1, 1, "accepted") for _ in frames]

    async def fail(
        self, actor_id: str, tickets: list[GroupTicket], reason: str, tokens: list[int]
    ) -> None:
        raise RuntimeError(f"groups {[ticket.group_id for ticket in tickets]} failed: {reason}")


async def measure(model: str, load: Load, turns: int) -> RolloutResult:
    """Start an engine and measure both sides in turn, in a process of its own."""
    config = Config.model_validate(
        {
            "model": {"path": model, "dtype": "float32"},
            "run": {"total_steps": 1},
            "task": {"name": "benchmarks.tails:Tails"},
            "rollout": {
                "prompt_length": PROMPT_TOKENS[1],
                "response_length": load.longest,
                "group_size": load.group_size,
                "rollout_batch_size": load.groups,
                "seeded": "on" if load.seeded else "off",
            },
            "cluster": {"engine": {"max_num_seqs": load.sequences}},
        }
    )
    core = min(os.sched_getaffinity(0))
    actor = GroupProducer(
        config,
        actor_id="benchmark",
        queue=Tickets(0, 0),
        model_dir=model,
        device="cpu",
        cores=(core,),
    )
    await actor.start(backend="shared_memory", label=LABEL)
    try:
        sides = Sides(actor, config, load)
        await sides.turn("actor", 0)
        await sides.turn("bare", 0)
        found: dict[str, list[Side]] = {"actor": [], "bare": []}
        same = compared = 0
        for number in range(1, turns + 1):
            responses = {}
            for name in ("actor", "bare") if number % 2 else ("bare", "actor"):
                side, responses[name] = await sides.turn(name, number)
                found[name].append(side)
            compared += len(responses["actor"])
            same += sum(
                responses["bare"][group_id] == mine for group_id, mine in responses["actor"].items()
            )
        lengths = [len(tokens) for group in responses["actor"].values() for tokens in group]
        return RolloutResult(
            found["actor"], found["bare"], sum(lengths) / len(lengths), max(lengths), same, compared
        )
    finally:
        await actor.close()


Responses = dict[int, list[list[int]]]


class Sides:
    """The two sides of a turn, on the engine of `actor`."""

    def __init__(self, actor: GroupProducer, config: Config, load: Load) -> None:
        self._actor, self._config, self._load = actor, config, load

    async def turn(self, name: str, number: int) -> tuple[Side, Responses]:
        """One side's work of turn `number`: every turn has prompts of its own."""
        first, work = number * self._load.groups, {"actor": self._ours, "bare": self._bare}[name]
        prompts = {
            group_id: self._prompt(group_id) for group_id in range(first, first + self._load.groups)
        }
        before, started = _cpu_seconds(), time.perf_counter()
        keep = await work(prompts)
        seconds = time.perf_counter() - started
        used = [after - then for after, then in zip(_cpu_seconds(), before, strict=True)]
        responses = keep()
        return Side(
            seconds, sum(len(tokens) for group in responses.values() for tokens in group), *used
        ), responses

    def _prompt(self, group_id: int) -> list[int]:
        task = self._actor.parts.task
        index = problem_index(self._config.seed, task.fingerprint, group_id, len(task))
        return self._actor.parts.tokenizer(prompt_of(index))["input_ids"]

    async def _ours(self, prompts: dict[int, list[int]]) -> Any:
        queue = self._actor._queue = Tickets(min(prompts), len(prompts))
        await self._actor.run()

        def keep() -> Responses:
            groups = [decode_group(frame) for frame in queue.frames]
            return {
                group.group_id: [row.response_ids.tolist() for row in group.rows]
                for group in groups
            }

        return keep

    async def _bare(self, prompts: dict[int, list[int]]) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        llm, found = self._actor.parts.engine._llm, {}

        async def one(group_id: int, prompt: list[int]) -> None:
            params = SamplingParams(
                n=self._load.group_size,
                max_tokens=self._load.longest,
                temperature=1.0,
                seed=hash63(self._config.seed, group_id) if self._load.seeded else None,
                stop_token_ids=self._actor.parts.engine.stop_token_ids,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            async for output in llm.generate(
                {"prompt_token_ids": prompt, "cache_salt": "bare"}, params, f"bare{group_id}"
            ):
                found[group_id] = output

        await asyncio.gather(*[one(group_id, prompt) for group_id, prompt in prompts.items()])

        def keep() -> Responses:
            ordered = {
                group_id: sorted(output.outputs, key=lambda one: one.index)
                for group_id, output in found.items()
            }
            return {
                group_id: [list(answer.token_ids) for answer in answers]
                for group_id, answers in ordered.items()
            }

        return keep


def _cpu_seconds() -> tuple[float, float, float]:
    """Of this process, of vLLM's EngineCore, and of the verifiers, so far."""
    used = {"engine": 0.0, "verifier": 0.0}
    own = time.process_time()
    for child in psutil.Process().children(recursive=True):
        times, verifies = (
            child.cpu_times(),
            any("verifier_child" in part for part in child.cmdline()),
        )
        used["verifier" if verifies else "engine"] += times.user + times.system
    return own, used["engine"], used["verifier"]
