"""The settings of a rollout actor: one actor with a fake engine and queue, its verifiers' children,
and what vLLM is asked for.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from transformers import AutoTokenizer

from async_grpo.config.schema import Config
from async_grpo.errors import RunError
from async_grpo.rollout import host
from async_grpo.rollout.engine.base import Completion, Sampling
from async_grpo.rollout.engine.choice import ENGINE
from async_grpo.rollout.engine.vllm.arguments import engine_arguments
from async_grpo.rollout.engine.vllm.engine import VllmEngine
from async_grpo.rollout.producer import GroupProducer
from async_grpo.tasks.base import Score
from async_grpo.tasks.verifier import VerifierError, VerifierPool
from async_grpo.weights.transport import Announcement
from async_grpo.wire.codec import Buffer, GroupTicket, decode_meta
from tests.support.wiring import Wire, recorded_waits, tiny_model

LONG = 2400
"""Tokens of a response, so that a group is larger than the smallest limit of a frame."""
LABEL = "v0.0"


class Parts:
    """Engine, verifiers and queue of an actor, and what they were asked."""

    serving_version, unfinished, serving = 0, 0, LABEL

    max_num_seqs = 256
    stop_token_ids = (1,)

    def __init__(self) -> None:
        self.tickets = [GroupTicket(0, 1, 0), GroupTicket(1, 1, 0)]
        self.sampled: Counter[str] = Counter()
        self.speeds: dict[str, float] = {}
        self.spent: dict[str, float] = {}
        self.seen: list[Any] = []
        self.answered = 0

    async def generate(
        self, prompt: list[int], sampling: Sampling, *, name: str = "", purpose: str = "rollouts"
    ) -> list[Completion]:
        self.seen.append((purpose, prompt, sampling))
        ids, logprobs = np.arange(LONG, dtype=np.int32) % 90, np.full(LONG, -1.0, np.float32)
        one = Completion(ids, logprobs, [(LABEL, 0, LONG)], "stop", 0.0)
        return [one] * sampling.n

    async def score(self, sequences: list[tuple[list[int], list[int]]]) -> list[Any]:
        self.seen.append(sequences)
        nothing = np.empty((LONG, 0), np.int32)
        return [(np.full((LONG, 1), -1.0, np.float32), nothing)] * len(sequences)

    async def respond(self, prompt: list[int], limit: int, seed: int | None) -> list[int]:
        return [5] * limit

    async def check(self) -> None: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def cut_off(self, name: str) -> int:
        return 0

    async def score_many(self, items: list[Any]) -> list[Score | VerifierError]:
        good = Score({"correct": 1.0}, 1.0)
        return [VerifierError("timeout"), *[good] * (len(items) - 1)]

    async def acquire(
        self, actor_id: str, version: int, holding: Any, want: int, report: Any
    ) -> list[GroupTicket] | None:
        given, self.tickets = self.tickets[:want], self.tickets[want:]
        self.seen += [want] * bool(given)
        return None if self.answered == 2 else given

    async def put(self, actor_id: str, frames: list[Buffer]) -> list[Any]:
        self.answered += len(frames)
        metas = [decode_meta(frame) for frame in frames]
        self.seen += [[(row.role, row.length, row.rewards) for row in one.rows] for one in metas]
        return [SimpleNamespace(status="accepted") for _ in frames]

    async def fail(
        self, actor_id: str, tickets: Sequence[GroupTicket], reason: str, tokens: list[int]
    ) -> None:
        self.answered += len(tickets)
        self.seen.append(reason)


def acted(config: Config) -> list[Any]:
    """What an actor asks of its parts for two tickets and for an evaluation, and its deadlines."""
    return asyncio.run(_acted(config))


async def _acted(config: Config) -> list[Any]:
    parts, load = Parts(), AutoTokenizer.from_pretrained

    def tokenizer(directory: str, **options: Any) -> Any:
        parts.seen.append(options)
        return load(directory, **options)

    def pool(settings: Any, *, seed: int, cpu: Any) -> Parts:
        parts.seen.append(seed)
        return parts

    async def start(config: Config, *, seed: int, **options: Any) -> Parts:
        parts.seen.append(seed)
        return parts

    with ExitStack() as stack:
        for target, name, fake in (
            (AutoTokenizer, "from_pretrained", tokenizer),
            (ENGINE, "start", start),
            (ENGINE, "begin", lambda *arguments, **options: None),
            (host, "VerifierPool", pool),
        ):
            stack.enter_context(mock.patch.object(target, name, fake))
        waits = stack.enter_context(recorded_waits())
        actor = GroupProducer(
            config,
            actor_id="a",
            queue=parts,
            model_dir=tiny_model(),
            device="cpu",
            cores=(),
            frozen={"big": parts},
        )
        await actor.start(backend="shared_memory", label=LABEL)
        try:
            await actor.run()
        except RunError as error:
            parts.seen.append(str(error))
        total = min(4, config.evaluation.max_samples)
        parts.seen.append(
            await actor.evaluate(indices=range(total), total=total, label=LABEL, samples=1)
        )
    return [*parts.seen, sorted(waits)]


def verified(config: Config) -> list[Any]:
    """The children that verify: how many, their memory and variables, how long one may take, and a
    score.
    """
    with mock.patch.dict("os.environ", A_KEY="of a service"):
        return asyncio.run(_verified(config))


async def _verified(config: Config) -> list[Any]:
    with recorded_waits() as waits:
        pool = VerifierPool(config.task, seed=config.seed)
        children = set(_children())
        await pool.start()
        try:
            started = set(_children()) - children
            scored = await pool.score("4", "4")
            limits = [
                [line for line in text.splitlines() if line.startswith("Max data size")]
                for text in (Path(f"/proc/{pid}/limits").read_text() for pid in started)
            ]
            known = [b"A_KEY=" in Path(f"/proc/{pid}/environ").read_bytes() for pid in started]
        finally:
            await pool.close()
    return [limits, known, scored.rewards, sorted(waits)]


def _children() -> list[int]:
    return [
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]


class _Arguments(dict):
    """What stands for vLLM's arguments and configurations: the keywords themselves."""

    def __init__(self, **options: Any) -> None:
        super().__init__(options)


class _Llm:
    """vLLM as far as a publication needs it; `seen` is what it was asked."""

    def __init__(self, arguments: dict[str, Any], **options: Any) -> None:
        self.seen: list[Any] = [sorted(arguments.items(), key=str)]
        self.engine_core = self
        self.output_processor = SimpleNamespace(request_states={})

    @classmethod
    def from_engine_args(cls, arguments: dict[str, Any], **options: Any) -> _Llm:
        return cls(arguments, **options)

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        self.seen.append((mode, clear_cache))

    async def collective_rpc(self, method: str, args: Any) -> list[Any]:
        return [0] if method == "cached_tokens" else [{}]

    async def update_weight_version(self, label: str) -> None: ...

    async def resume_generation(self) -> None: ...

    def shutdown(self) -> None: ...


def _vllm() -> dict[str, ModuleType]:
    """Modules in the place of vLLM's, which would take seconds to import."""
    homes = {
        "vllm": {},
        "vllm.config": {},
        "vllm.config.weight_transfer": {"WeightTransferConfig": _Arguments},
        "vllm.engine": {},
        "vllm.usage": {},
        "vllm.usage.usage_lib": {"UsageContext": SimpleNamespace(OPENAI_API_SERVER="server")},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": _Arguments},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": _Llm},
        "vllm.v1.engine.core_client": {"AsyncMPClient": _Llm},
        "vllm.v1.metrics": {},
        "vllm.v1.metrics.loggers": {"PrometheusStatLogger": object},
        "async_grpo.rollout.engine.vllm.scheduler": {"HeldOutputs": object},
    }
    found = {}
    for name, values in homes.items():
        found[name] = ModuleType(name)
        vars(found[name]).update(values)
    return found


def served(config: Config) -> list[Any]:
    """What vLLM is started with, and the deadlines of a publication; on a GPU."""
    return asyncio.run(_served(config))


async def _served(config: Config) -> list[Any]:
    with mock.patch.dict(sys.modules, _vllm()), recorded_waits() as waits:
        engine = await VllmEngine.start(
            config,
            model_dir="directory",
            device="cuda",
            backend="nccl",
            stop_token_ids=[1],
            label=LABEL,
            seed=3,
        )
        await engine.receive(Announcement("v0.1", "nccl", {}))
        seen = engine._llm.seen
        engine.close()
    return [seen, sorted(waits)]


def beside_a_learner(config: Config) -> dict[str, Any]:
    """What an engine on a learner's GPU is started with."""
    return engine_arguments(
        config, model_dir="m", device="cuda", backend="ipc", seed=0, gpu_bytes=80 * 2**30
    )


TAUGHT = {
    "frozen": {"big": {"path": "t/t"}},
    "algorithm.distill.teacher": "big",
    "rollout.prompt_length": 32,
}
IMITATES = {"algorithm.sft_loss_coef": 0.1}
ZERO = {"task.verifier.on_error": "zero"}

WIRES = [
    Wire("seed", 5, acted),
    Wire("model.trust_remote_code", True, acted),
    Wire("rollout.group_size", 3, acted),
    Wire("rollout.prompt_length", 4, acted),
    Wire("rollout.response_length", 24, acted),
    Wire("rollout.temperature", 0.7, acted),
    Wire("rollout.top_p", 0.9, acted),
    Wire("rollout.top_k", 20, acted),
    Wire("rollout.min_p", 0.1, acted),
    Wire("rollout.repetition_times", 4, acted),
    Wire("rollout.repetition_length", 9, acted, {"rollout.repetition_times": 4}),
    Wire("rollout.seeded", "on", acted),
    Wire("rollout.group_timeout_s", 77.0, acted),
    Wire("wire.max_frame_bytes", 2**16, acted, {"task.verifier.on_error": "zero"}),
    Wire("algorithm.adv_estimator", "remax", acted),
    Wire("algorithm.distill.teacher_prompt", "{prompt}+", acted, TAUGHT | ZERO),
    Wire("algorithm.sft_model", "big", acted, TAUGHT | IMITATES | ZERO),
    Wire("task.name", "tests.support.mixed_task:Mixed", verified),
    Wire("task.options", {"max_digits": 1}, acted),
    Wire("task.verifier.on_error", "zero", acted),
    Wire("evaluation.n", 3, acted),
    Wire("evaluation.temperature", 0.3, acted),
    Wire("task.env_vars", ["A_KEY"], verified),
    Wire("task.verifier.workers", 2, verified),
    Wire("task.verifier.timeout_s", 33.0, verified),
    Wire("task.verifier.memory_mb", 1024, verified),
    Wire("model.dtype", "float32", served),
    Wire("model.lm_head_fp32", True, served),
    Wire("model.trust_remote_code", True, served),
    Wire("rollout.prompt_length", 16, served),
    Wire("rollout.top_k", 20, served),
    Wire("cluster.engine.tensor_parallel_size", 2, served),
    Wire("cluster.engine.max_num_seqs", 8, served),
    Wire("cluster.engine.kv_cache_gb", 2.5, served),
    Wire("cluster.engine.sleep", True, beside_a_learner),
    Wire("cluster.engine.gpu_memory_utilization", 0.5, served),
    Wire("cluster.engine.enforce_eager", True, served),
    Wire("cluster.engine.vllm", {"kv_cache_dtype": "fp8"}, served),
    Wire("weight_sync.kv_cache", "keep", served),
    Wire("weight_sync.lora", "adapter", served, {"model.lora": {}}),
    Wire("weight_sync.deadlines.pause_s", 41.0, served),
    Wire("weight_sync.deadlines.resume_s", 42.0, served),
]
