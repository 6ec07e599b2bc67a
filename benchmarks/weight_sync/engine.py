"""The engine's side of a publication: its phases, and the rollout time that it costs.

Runs in: a process of its own per engine, which `benchmarks.weight_sync` starts; vLLM's EngineCore
is its child. The same responses are generated without publications and with one every `period_s`,
in turn; what the second takes longer, divided by its publications, is the time lost. That is more
than the pause: with `kv_cache: recompute` running responses compute their caches again after it.
`adapter` publishes adapters of the rank that a run has by default (`weight_sync.lora: adapter`);
they pause nobody.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from async_grpo.config.schema import Config
from async_grpo.learner import adapters
from async_grpo.learner.weights import PublishedFactors
from async_grpo.rollout.engine.base import Sampling
from async_grpo.rollout.engine.vllm.engine import VllmEngine
from async_grpo.weights.names import file_shapes
from async_grpo.weights.shared_memory import SharedMemorySender
from async_grpo.weights.transport import Version
from benchmarks.weight_sync.learner import KEY
from benchmarks.weight_sync.models import PlainWeights, Size

TIMEOUT_S, PROMPT = 900.0, list(range(3, 11))
GROUP_SIZE, RATE_RESPONSES = 4, 2  # times the responses that run at once
WAYS: dict[str, dict[str, Any]] = {
    "recompute": {"weight_sync": {"kv_cache": "recompute"}},
    "keep": {"weight_sync": {"kv_cache": "keep"}},
    "adapter": {"weight_sync": {"lora": "adapter"}},
}
"""Settings of a run by what happens to running responses."""
EVERY_S = 10.0
"""The aim is about one publication per so many seconds."""


@dataclass(frozen=True)
class Published:
    """One publication to a busy engine, seconds by phase. live: from the start of the stage until
    the engine serves it.
    """

    stage: float
    pause: float
    load: float
    resume: float
    live: float
    recomputed_tokens: int


@dataclass(frozen=True)
class Pair:
    """Seconds for the same responses without and with publications, and how many there were."""

    without: float
    published: float
    publications: int

    @property
    def lost(self) -> float:
        """Seconds of rollout time that one publication costs."""
        return (self.published - self.without) / self.publications

    @property
    def share(self) -> float:
        """Share of the rollout time lost at one publication per EVERY_S."""
        return self.lost / EVERY_S


@dataclass(frozen=True)
class EngineResult:
    """What was measured on one engine."""

    tokens_per_s: float
    publications: list[Published]
    pairs: list[Pair]


async def engine_side(
    size: Size, model: str, way: str, pairs: int, window_s: float, fallback: Path
) -> EngineResult:
    """Start an engine and measure it, in a process of its own. way: of WAYS."""
    lora = {"lora": {}} if way == "adapter" else {}
    config = Config.model_validate(
        {
            "model": {"path": model, "dtype": size.dtype} | lora,
            "run": {"total_steps": 1},
            **WAYS[way],
            "rollout": {"prompt_length": len(PROMPT), "response_length": 2 * size.response},
            "cluster": {"engine": {"max_num_seqs": size.sequences, "kv_cache_gb": 1.0}},
        }
    )
    engine = await VllmEngine.start(
        config,
        model_dir=model,
        device="cpu",
        backend="shared_memory",
        stop_token_ids=[],
        label="v0.0",
        seed=1,
    )
    weights = factors_of(config, model) if lora else PlainWeights(model)
    sender = SharedMemorySender(weights, key=f"{KEY}{way}", fallback=fallback)
    try:
        [payload] = sender.connect("", [1])
        receipt = await engine.connect(payload)
        if receipt.failure:
            raise RuntimeError(receipt.reason)
        return await Measuring(engine, sender, size).result(pairs=pairs, window_s=window_s)
    finally:
        sender.close()
        engine.close()


def factors_of(config: Config, model: str) -> PublishedFactors:
    """Adapters as a learner of one rank publishes them, without a backend."""
    plain = AutoModelForCausalLM.from_pretrained(model)
    adapters.restrict(plain, config.model, seed=1, base=model)
    return PublishedFactors(plain, files=file_shapes(model))


class Measuring:
    """An engine at work, and publications to it."""

    def __init__(self, engine: VllmEngine, sender: SharedMemorySender, size: Size) -> None:
        self._engine, self._sender, self._size = engine, sender, size
        self._version = 0

    async def result(self, *, pairs: int, window_s: float) -> EngineResult:
        """All measurements, after one publication and some responses that are thrown away."""
        await self._publish()
        await self._publish()
        groups = max(1, RATE_RESPONSES * self._size.sequences // GROUP_SIZE)
        await self._generate(groups)
        rate = groups * GROUP_SIZE * self._size.response / await self._generate(groups)
        groups = math.ceil(
            max(window_s, 2 * self._size.period_s) * rate / (GROUP_SIZE * self._size.response)
        )
        published: list[Published] = []
        found = []
        for number in range(pairs):
            seconds = {}
            for publishing in (False, True) if number % 2 else (True, False):
                seconds[publishing], new = await self._window(groups, publishing=publishing)
                published += new
            publications = len(published) - sum(pair.publications for pair in found)
            found.append(Pair(seconds[False], seconds[True], publications))
        tokens = groups * GROUP_SIZE * self._size.response
        return EngineResult(
            statistics.median(tokens / pair.without for pair in found), published, found
        )

    async def _window(self, groups: int, *, publishing: bool) -> tuple[float, list[Published]]:
        """Seconds for so many groups, and the publications meanwhile; the next one starts
        `period_s` after the one before.
        """
        work = asyncio.create_task(self._generate(groups))
        published = []
        while publishing:
            await asyncio.wait({work}, timeout=self._size.period_s)
            if work.done():
                break
            published.append(await self._publish())
        return await work, published

    async def _generate(self, groups: int) -> float:
        """Seconds for so many groups of the mean length `response`, always in the same order."""
        lengths = random.Random(0)
        shortest, longest = (
            self._size.response // 2,
            self._size.response - self._size.response // 2 + self._size.response,
        )
        budgets = [lengths.randint(shortest, longest) for _ in range(groups)]
        started = time.perf_counter()
        await asyncio.gather(
            *[
                self._engine.generate(
                    PROMPT, Sampling(n=GROUP_SIZE, max_tokens=budget, temperature=1.0)
                )
                for budget in budgets
            ]
        )
        return time.perf_counter() - started

    async def _publish(self) -> Published:
        """One publication as the driver makes it; the learner, which would be another process, is a
        thread.
        """
        self._version += 1
        started = time.perf_counter()
        announcement = await asyncio.to_thread(
            self._sender.stage, Version(0, self._version).label, verify=False
        )
        staged = time.perf_counter()
        receipt = await self._engine.receive(announcement)
        if receipt.failure:
            raise RuntimeError(receipt.reason)
        phases = receipt.seconds
        return Published(
            staged - started,
            phases["pause"],
            phases["load"],
            phases["resume"],
            time.perf_counter() - started,
            receipt.recomputed_tokens,
        )
